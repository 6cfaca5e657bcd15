"""The semantics, written for reading: loops over tokens and slots, plain torch, autograd, any dtype up to float64.

Every public operation has its twin here under the same name and signature. Nothing here is fast, and nothing here
shares code with what it judges: this file is the oracle of the tests, `moeffn bench` and `moeffn.testing`.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from .config import Activation, Layout, RouterConfig
from .types import ExpertWeights, Plan, Routing


def activate(h: Tensor, activation: Activation, layout: Layout) -> Tensor:
    """Pre-activation h (…, 2F | F) -> (…, F); see `Activation` for the formulas."""
    if not activation.gated:
        return _act(h, activation)
    F = h.shape[-1] // 2
    if layout is Layout.INTERLEAVED:
        gate, up = h[..., 0::2], h[..., 1::2]
    else:
        gate, up = h[..., :F], h[..., F:]
    if activation.softcap_gate or activation.softcap_up:
        cg, cu = activation.softcap_gate, activation.softcap_up
        capped = gate if cg is None else cg * torch.tanh(gate / cg)
        return capped * torch.sigmoid(gate) * (up if cu is None else cu * torch.tanh(up / cu))
    limit = activation.limit
    if limit is not None:
        up = up.clamp(-limit, limit)
        if not activation.limit_after:
            gate = gate.clamp(max=limit)
    gate = _act(gate, activation)
    if limit is not None and activation.limit_after:
        gate = gate.clamp(max=limit)
    return gate * (up + activation.up_offset)


def _act(x: Tensor, activation: Activation) -> Tensor:
    match activation.kind:
        case "silu":
            return x * torch.sigmoid(activation.alpha * x)
        case "gelu":
            return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))
        case "gelu_tanh":
            return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))
        case "relu":
            return torch.relu(x)
        case "relu2":
            return torch.relu(x).square()
        case "sigmoid":
            return torch.sigmoid(x)
        case "identity":
            return x
    raise AssertionError(activation.kind)


def one_expert(x: Tensor, weights: ExpertWeights, e: int) -> Tensor:
    """Expert e on rows x (n, D) -> (n, D), in the promoted dtype of x and the weights."""
    dtype = torch.promote_types(x.dtype, weights.w_in.dtype)
    h = x.to(dtype) @ weights.w_in[e].to(dtype).T
    if weights.b_in is not None:
        h = h + weights.b_in[e].to(dtype)
    y = activate(h, weights.activation, weights.layout) @ weights.w_out[e].to(dtype).T
    return y if weights.b_out is None else y + weights.b_out[e].to(dtype)


def plan(experts: Tensor, num_experts: int) -> Plan:
    """experts (T, K) -> Plan, by a loop over experts and slots (the worked example of `moeffn.types`)."""
    flat = experts.reshape(-1).tolist()
    slot_of_row: list[int] = []
    offsets = [0]
    for e in range(num_experts):
        slot_of_row += [s for s, id_ in enumerate(flat) if id_ == e]
        offsets.append(len(slot_of_row))
    row_of_slot = [-1] * len(flat)
    for row, slot in enumerate(slot_of_row):
        row_of_slot[slot] = row
    slot_of_row += [-1] * (len(flat) - len(slot_of_row))
    counts = [b - a for a, b in itertools.pairwise(offsets)]
    as_tensor = [torch.tensor(v, dtype=torch.int32, device=experts.device) for v in
                 (counts, offsets, slot_of_row, row_of_slot)]
    return Plan(*as_tensor)


def _nothing(like: Tensor, *tensors: Tensor) -> Tensor:
    """A zero () in like's dtype and in the graph of the tensors: what is used by no slot has a gradient of zeros."""
    return sum((t[:0].sum().to(like.dtype) for t in tensors), like.new_zeros(()))  # type: ignore[return-value]


def permute(x: Tensor, plan: Plan) -> Tensor:
    """x (T, D) -> rows (N, D): row r is the token of its slot, zeros beyond the routed rows."""
    K = plan.num_slots // max(1, x.shape[0])
    rows = [x[slot // K] if slot >= 0 else torch.zeros_like(x[0]) for slot in plan.slot_of_row.tolist()]
    return (torch.stack(rows) if rows else x.new_zeros((0, x.shape[1]))) + _nothing(x, x)


def unpermute(rows: Tensor, plan: Plan, weights: Tensor) -> Tensor:
    """rows (N, D), weights (T, K) -> (T, D): the weighted sum of each token's rows, in slot order."""
    T, K = weights.shape
    row_of_slot = plan.row_of_slot.tolist()
    out = []
    for t in range(T):
        acc = rows.new_zeros(rows.shape[1], dtype=torch.promote_types(rows.dtype, weights.dtype))
        for k in range(K):
            if row_of_slot[t * K + k] >= 0:
                acc = acc + weights[t, k] * rows[row_of_slot[t * K + k]]
        out.append(acc.to(rows.dtype))
    return (torch.stack(out) if out else rows.new_zeros((0, rows.shape[1]))) + _nothing(rows, rows, weights)


def expert_ffn(rows: Tensor, offsets: Tensor, weights: ExpertWeights, *, row_weights: Tensor | None = None,
               backend: str = "auto") -> Tensor:
    """rows (R, D) grouped by offsets (E+1,) -> (R, D); rows from offsets[E] on come back as zeros."""
    bounds = offsets.tolist()
    parts = [one_expert(rows[a:b], weights, e) for e, (a, b) in enumerate(itertools.pairwise(bounds))]
    parts.append(rows.new_zeros((rows.shape[0] - bounds[-1], rows.shape[1])).to(parts[0].dtype))
    y = torch.cat(parts)
    return (y if row_weights is None else row_weights[:, None] * y).to(rows.dtype)


def moe_ffn(x: Tensor, routing: Routing, weights: ExpertWeights, *, backend: str = "auto") -> Tensor:
    """x (…, D) -> (…, D): for each token the weighted sum of its experts, plus its identity part."""
    flat = x.reshape(-1, x.shape[-1])
    ids = routing.experts.tolist()
    out = []
    for t, row in enumerate(flat):
        dtype = torch.promote_types(torch.promote_types(x.dtype, routing.weights.dtype), weights.w_in.dtype)
        acc = torch.zeros_like(row, dtype=dtype)
        for k, e in enumerate(ids[t]):
            if not 0 <= e < weights.num_experts:
                continue
            w = routing.weights[t, k]
            if routing.apply_to == "input":
                acc = acc + one_expert((w * row)[None], weights, e)[0]
            else:
                acc = acc + w * one_expert(row[None], weights, e)[0]
        if routing.identity_weights is not None:
            acc = acc + routing.identity_weights[t] * row
        out.append(acc.to(x.dtype))
    y = torch.stack(out) if out else torch.zeros_like(flat)
    return (y + _nothing(y, x, routing.weights, *(t for _, t in weights.named_tensors()))).reshape(x.shape)


def route(logits: Tensor, config: RouterConfig, *, selection_bias: Tensor | None = None,
          token_mask: Tensor | None = None, expert_ids: Tensor | None = None) -> Routing:
    """logits (T, E+Z+S) -> Routing, token by token, ids by Python's sort; see `RouterConfig` for every option."""
    T, C = logits.shape[0], config.num_experts + config.num_identity_experts
    raw = logits if logits.dtype == torch.float64 else logits.float()
    # NaN is read as a very small logit, infinities as very large and very small ones; none of them gets a gradient.
    work = torch.where(raw.isfinite(), raw, torch.full_like(raw, _STAND_IN).copysign(raw.nan_to_num(nan=-1.0)))
    if config.logit_scale != 1.0:
        work = (work * config.logit_scale).clamp(-_STAND_IN, _STAND_IN)
    if config.logit_softcap is not None:
        work = config.logit_softcap * torch.tanh(work / config.logit_softcap)
    ids = torch.full((T, config.top_k), -1, dtype=torch.int32, device=logits.device)
    weight_rows, identity_rows, shared_rows = [], [], []
    for t in range(T):
        given = None if expert_ids is None else expert_ids[t].tolist()
        chosen, weights, shared = _route_token(work[t, :C], work[t, C:], config, selection_bias, given)
        if token_mask is not None and not bool(token_mask[t]):
            chosen, weights, shared = [-1] * config.top_k, weights * 0, shared * 0
        is_zero = torch.tensor([c >= config.num_experts for c in chosen], device=logits.device)
        identity_rows.append((weights * is_zero).sum())
        weight_rows.append(torch.where(is_zero, weights * 0, weights))
        shared_rows.append(shared)
        ids[t] = torch.tensor([-1 if c >= config.num_experts else c for c in chosen], dtype=torch.int32, device="cpu")

    def stack(values: list[Tensor], empty: tuple[int, ...]) -> Tensor:
        return torch.stack(values) if values else work.new_zeros(empty) + _nothing(work, work)

    identity = config.num_identity_experts and config.identity_kind == "identity"
    return Routing(
        ids, stack(weight_rows, (0, config.top_k)), raw, config.apply_to,
        identity_weights=stack(identity_rows, (0,)) if identity else None,
        shared_weights=stack(shared_rows, (0, config.num_shared)) if config.num_shared else None,
    )


def _route_token(x: Tensor, shared: Tensor, c: RouterConfig, bias: Tensor | None, given: list[int] | None
                 ) -> tuple[list[int], Tensor, Tensor]:
    """One token's class logits x (C,) and shared logits (S,) -> chosen ids, weights (K,), shared weights (S,)."""
    if c.score == "sparsemixer":
        return (*_sparsemixer_token(x, c), shared)
    scores = x if c.order == "topk_score" else _score(x, c)
    ranked = scores.detach() if bias is None else scores.detach() + bias.to(scores.dtype)
    chosen = _best(ranked, c, c.top_k) if given is None else given
    picked = x[chosen]
    if c.score == "softmax":
        w = torch.softmax(picked, -1) if c.order == "topk_score" else scores[chosen]
    else:
        w = _score(picked, c) if c.score == "sqrtsoftplus" else torch.sigmoid(picked)
    if c.score == "joint_logsigmoid":
        joint = torch.softmax(torch.nn.functional.logsigmoid(torch.cat([picked, shared])), -1) * c.scale
        return chosen, joint[: c.top_k], joint[c.top_k :]
    if c.renormalize:
        norm = w.sum() if c.norm_p == 1.0 else torch.linalg.vector_norm(w, c.norm_p)
        norm = norm.clamp(min=c.renorm_eps) if c.renorm_eps_mode == "clamp" else norm + c.renorm_eps
        w = w / norm.clamp(min=_NORM_FLOOR)
    return chosen, w * c.scale, shared


_STAND_IN = 1e30  # what ±Inf and NaN (as -Inf) logits are read as
_NORM_FLOOR = 1e-30  # a row of zero weights stays zero when renormalised


def _score(x: Tensor, c: RouterConfig) -> Tensor:
    # Not torch.sigmoid and softplus: on a CPU they give equal logits unequal scores, by their place in the tensor.
    if c.score == "softmax":
        return torch.softmax(x, -1)
    if c.score == "sqrtsoftplus":
        return (-torch.nn.functional.logsigmoid(-x)).clamp(min=torch.finfo(x.dtype).tiny).sqrt()
    return 1.0 / (1.0 + torch.exp(-x))


def _best(ranked: Tensor, c: RouterConfig, k: int) -> list[int]:
    """Ids of the k largest values, ties to the lowest id, after the group limit."""
    values = ranked.tolist()
    if c.num_groups > 1:
        size = len(values) // c.num_groups
        groups = [sorted(values[g * size : (g + 1) * size], reverse=True) for g in range(c.num_groups)]
        sums = [torch.tensor(g[:2], dtype=ranked.dtype, device="cpu").sum().item() for g in groups]
        worth = [g[0] if c.group_reduce == "max" else s for g, s in zip(groups, sums, strict=True)]
        keep = set(sorted(range(c.num_groups), key=lambda g: (-worth[g], g))[: c.topk_groups])
        fill = 0.0 if c.group_fill == "zero" else -math.inf
        values = [v if i // size in keep else fill for i, v in enumerate(values)]
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:k]


def _sparsemixer_token(x: Tensor, c: RouterConfig) -> tuple[list[int], Tensor]:
    """Two picks; each weight is a softmax over the logits close to that pick's maximum (Phi-3.5-MoE, evaluation)."""
    chosen: list[int] = []
    weights = []
    rest = x
    for _ in range(2):
        top = _best(rest.detach(), c, 1)[0]
        best = rest[top].detach()
        far = (best - x.detach()) / x.detach().abs().clamp(min=best) > 2 * c.jitter_eps
        masked = torch.where(far, torch.full_like(rest, -math.inf), rest)
        weights.append(torch.softmax(masked, -1)[top])
        chosen.append(top)
        rest = rest.masked_fill(torch.arange(len(x), device=x.device) == top, -math.inf)
    return chosen, torch.stack(weights) * c.scale
