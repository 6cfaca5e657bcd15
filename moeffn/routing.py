"""route: logits to experts and weights, vectorised, deterministic, differentiable; apply_capacity: explicit drops."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from . import backends, checks
from .config import NORM_FLOOR, STAND_IN, RouterConfig
from .types import Routing

_SORT_BELOW = 1024  # up to this many scores one stable sort is faster than a keyed top-k (1 x 256: 10 us against 29 us)


def route(logits: Tensor, config: RouterConfig, *, selection_bias: Tensor | None = None,
          token_mask: Tensor | None = None, expert_ids: Tensor | None = None, backend: str = "auto") -> Routing:
    """Choose the experts of each token: logits (T, E+Z+S) -> Routing with experts (T, K) and weights (T, K).

    selection_bias  (E+Z,) added to what is ranked, never to the weights (DeepSeek V3's aux-loss-free balancing)
    token_mask      (T,) bool; False: the token is not routed (ids -1, weights 0, no gradient)
    expert_ids      (T, K) int: the choice is given (hash routing), the weights still come from the scores; ids from
                    E on are identity experts
    backend         as in `moe_ffn`; where it has a router of its own for this config ("triton": one kernel, one more
                    backward; float32 softmax, sigmoid and sqrtsoftplus. "native": C++, plain softmax and sigmoid), that
                    runs, else the operations of torch, as with "auto" on a CPU: weights are torch's to the bit there

    Everything is computed in float32 whatever the dtype of `logits` (float64 for float64). The k ids come in falling
    order of rank; equal ranks go to the lowest id, on every device and for every T. NaN and -Inf logits are read as
    -1e30, +Inf as 1e30: such rows get distinct ids in range, finite weights and no gradient at those logits, and other
    rows keep every bit. Differentiable in `logits` through the weights; no host synchronisation on a GPU.

    With top_k = 1, renormalised weights and a softmax over the one selected logit are the constant 1, so the router
    gets no gradient: a warning says so once per config. "sparsemixer" is its evaluation form; the Gumbel sampling of
    its training is not part of this function.

    Raises ValueError/TypeError for shapes, dtypes or devices that do not fit (ids are range-checked on a CPU only; on a
    GPU an id out of range is not routed). Reference: `moeffn.reference.route`.
    """
    _check(logits, config, selection_bias, token_mask, expert_ids)
    E, C = config.num_experts, config.num_experts + config.num_identity_experts
    raw = logits.to(torch.promote_types(logits.dtype, torch.float32))
    name = backends.resolve(backend, raw.device, raw.dtype)
    shared = None
    exact = backend == "auto" and raw.device.type == "cpu"  # bit for bit what torch and transformers give
    if expert_ids is None and not exact and backends.routes(name, config.key, raw.dtype):
        if backends.plain_inference(raw):
            ids, weights = backends.get(name).route(raw, config, selection_bias)  # type: ignore[attr-defined]
        else:
            backends.differentiated(raw)  # refuses torch.func.grad
            weights, ids = _route_op(raw, selection_bias, config.key, name)
    elif config.score == "sparsemixer":
        ids, weights = _sparsemixer(_bounded(raw, config), config)
    else:
        z = _bounded(raw, config)
        z, shared = (z[:, :C], z[:, C:]) if config.num_shared else (z, None)
        probs = torch.softmax(z, -1) if config.score == "softmax" and config.order == "score_topk" else None
        if expert_ids is None:
            ids = _select(z.detach() if probs is None else probs.detach(), config, selection_bias)
        else:
            ids = expert_ids.long()
        weights, shared = _weigh(z, probs, ids.clamp(0, C - 1) if expert_ids is not None else ids, shared, config)
    if config.top_k == 1 and weights.requires_grad and not torch.compiler.is_compiling():
        _warn_without_gradient(config)
    return _finish(ids, weights, shared, raw, config, token_mask, bounded=expert_ids is None, E=E, C=C)


def apply_capacity(routing: Routing, num_experts: int, capacity: int, *,
                   policy: Literal["weight", "order"] = "weight") -> tuple[Routing, Tensor]:
    """Let each expert take at most `capacity` slots -> (Routing, dropped () int64); drops become id -1, weight 0.

    policy "weight" keeps the heaviest slots of an expert, "order" the first; equal weights go to the lower slot. The
    other weights stay as they are, without renormalisation. Slots that were not routed before are not counted as
    dropped. Differentiable in the weights that are kept; no host synchronisation on a GPU.
    Raises ValueError/TypeError for a negative capacity, an unknown policy, or what is not a Routing.
    """
    checks.instance("routing", routing, Routing)
    checks.positive_int("num_experts", num_experts)
    checks.non_negative_int("capacity", capacity)
    checks.one_of("policy", policy, ("weight", "order"))
    flat = routing.experts.reshape(-1)
    routed = (flat >= 0) & (flat < num_experts)
    expert = torch.where(routed, flat, num_experts)
    if policy == "weight":
        first = torch.sort(routing.weights.detach().reshape(-1), descending=True, stable=True).indices
        order = first[torch.sort(expert[first], stable=True).indices]
    else:
        order = torch.sort(expert, stable=True).indices
    by_expert = expert[order].contiguous()
    slots = torch.arange(flat.numel(), device=flat.device)
    place = torch.empty_like(slots)
    place[order] = slots - torch.searchsorted(by_expert, by_expert)
    drop = (routed & (place >= capacity)).view(routing.experts.shape)
    kept = replace(routing, experts=torch.where(drop, -1, routing.experts),
                   weights=torch.where(drop, 0.0, routing.weights))
    return kept, drop.sum()


def scores(logits: Tensor, config: RouterConfig) -> Tensor:
    """Every expert's score: logits (T, E+Z+S) -> (T, E+Z), float32 (float64), after scale and softcap, differentiable.

    What the experts are ranked by before selection bias and groups; sigmoid for "joint_logsigmoid", softmax for
    "sparsemixer" and for "topk_score" with softmax.
    """
    C = config.num_experts + config.num_identity_experts
    z = _bounded(logits.to(torch.promote_types(logits.dtype, torch.float32)), config)[:, :C]
    if config.score in ("softmax", "sparsemixer"):
        return torch.softmax(z, -1)
    return _sqrtsoftplus(z) if config.score == "sqrtsoftplus" else _sigmoid(z)


def top_ids(values: Tensor, k: int) -> Tensor:
    """values (T, C), any device -> (T, k) int64: ids of the k largest of each row, falling, equal values by lowest id.

    `torch.topk` promises no order of ties, so large float32 inputs get keys that have none: the value's bits as an
    ordered integer, then the id, packed in a float64 (32 + 21 bits, hence C < 2^21).
    """
    T, C = values.shape
    if values.dtype != torch.float32 or (not torch.compiler.is_compiling() and T * C <= _SORT_BELOW):
        return torch.sort(values, dim=-1, descending=True, stable=True).indices[:, :k]
    bits = (values + 0.0).view(torch.int32)  # + 0.0: -0.0 and 0.0 are equal
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = ordered.double() * 2.0**21 - torch.arange(C, device=values.device)
    return torch.topk(key, k, dim=-1).indices


def _check(logits: Tensor, config: RouterConfig, bias: Tensor | None, mask: Tensor | None, ids: Tensor | None) -> None:
    checks.instance("config", config, RouterConfig)
    checks.tensor("logits", logits, 2)
    checks.floating("logits", logits)
    T, C = logits.shape[0], config.num_experts + config.num_identity_experts
    if logits.shape[1] != config.num_logits:
        raise checks.bad("logits", f"shape (T, {config.num_logits}) = (T, experts + identity + shared)",
                         f"shape {tuple(logits.shape)}")
    if bias is not None:
        checks.tensor("selection_bias", bias, 1)
        checks.floating("selection_bias", bias)
        checks.shape("selection_bias", bias, (C,), "(E + Z,)")
        checks.same_device("selection_bias", bias, logits.device, "logits")
    if mask is not None:
        checks.tensor("token_mask", mask, 1)
        checks.boolean("token_mask", mask)
        checks.shape("token_mask", mask, (T,), "(T,)")
        checks.same_device("token_mask", mask, logits.device, "logits")
    if ids is not None:
        if bias is not None or config.score == "sparsemixer":
            raise checks.bad("expert_ids", "no selection_bias and no 'sparsemixer' beside given ids",
                             f"score {config.score!r}, selection_bias {'None' if bias is None else 'given'}")
        checks.tensor("expert_ids", ids, 2)
        checks.index_dtype("expert_ids", ids)
        checks.shape("expert_ids", ids, (T, config.top_k), "(T, K)")
        checks.same_device("expert_ids", ids, logits.device, "logits")
        checks.ids_in_range("expert_ids", ids, C)


_decode = functools.cache(RouterConfig.from_key)


@torch.library.custom_op("moeffn::route", mutates_args=())
def _route_op(logits: Tensor, bias: Tensor | None, key: str, backend: str) -> tuple[Tensor, Tensor]:
    """-> weights (T, K) float32, ids (T, K) int32 of classes 0 .. E+Z-1, by the backend's own router.

    Floats first: torch.library.opcheck adds up the outputs in the dtype of the first.
    """
    ids, weights = backends.get(backend).route(logits, _decode(key), bias)  # type: ignore[attr-defined]
    return weights, ids


@_route_op.register_fake
def _(logits: Tensor, bias: Tensor | None, key: str, backend: str) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], _decode(key).top_k)
    return logits.new_empty(shape), logits.new_empty(shape, dtype=torch.int32)


@torch.library.custom_op("moeffn::route_backward", mutates_args=())
def _route_backward_op(dweights: Tensor, logits: Tensor, ids: Tensor, key: str, backend: str) -> Tensor:
    return backends.get(backend).route_backward(dweights, logits, ids, _decode(key))  # type: ignore[attr-defined]


@_route_backward_op.register_fake
def _(dweights: Tensor, logits: Tensor, ids: Tensor, key: str, backend: str) -> Tensor:
    return logits.new_empty(logits.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, ctx.key, ctx.backend = inputs
    ctx.save_for_backward(logits, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, dweights: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    logits, ids = ctx.saved_tensors
    return _route_backward_op(dweights, logits, ids, ctx.key, ctx.backend), None, None, None


def _twice(ctx: Any, *grads: Tensor | None) -> None:
    raise checks.only_reference("has second derivatives")


_route_op.register_autograd(_backward, setup_context=_setup_context)
_route_backward_op.register_autograd(_twice)


def _bounded(z: Tensor, config: RouterConfig) -> Tensor:
    """Finite logits after scale and softcap; what was not finite gets no gradient."""
    z = torch.nan_to_num(z, nan=-STAND_IN, posinf=STAND_IN, neginf=-STAND_IN)
    if config.logit_scale != 1.0:
        z = (z * config.logit_scale).clamp(-STAND_IN, STAND_IN)
    if config.logit_softcap is not None:
        z = config.logit_softcap * torch.tanh(z / config.logit_softcap)
    return z


def _sigmoid(z: Tensor) -> Tensor:
    """Sigmoid as one half of a softmax. ATen's CPU sigmoid (and softplus) give one value two different results, by its
    place in the tensor (vector body or scalar tail), which breaks ties wrongly; its exp, softmax, logsigmoid do not."""
    return F.pad(z[..., None], (0, 1)).softmax(-1)[..., 0]


def _sqrtsoftplus(z: Tensor) -> Tensor:
    """sqrt(softplus(z)); softplus(z) = -logsigmoid(-z) for the reason given above, the floor keeps gradients finite."""
    return (-F.logsigmoid(-z)).clamp(min=torch.finfo(z.dtype).tiny).sqrt()


def _select(ranked: Tensor, config: RouterConfig, bias: Tensor | None) -> Tensor:
    """Ids (T, K) int64 from class logits (or softmax scores) without gradient."""
    if config.order == "score_topk" and config.score != "softmax":
        ranked = _sqrtsoftplus(ranked) if config.score == "sqrtsoftplus" else (1.0 + torch.exp(-ranked)).reciprocal()
    if bias is not None:
        ranked = ranked + bias.detach().to(ranked.dtype)
    if config.num_groups > 1:
        ranked = _limit_groups(ranked, config)
    return top_ids(ranked, config.top_k)


def _limit_groups(ranked: Tensor, config: RouterConfig) -> Tensor:
    T, C = ranked.shape
    G = config.num_groups
    grouped = ranked.view(T, G, C // G)
    if config.group_reduce == "max":
        worth = grouped.amax(-1)
    else:
        best, second = grouped.topk(2, -1).values.unbind(-1)
        worth = best + second
    keep = torch.zeros(T, G, dtype=torch.bool, device=ranked.device)
    keep = keep.scatter(1, top_ids(worth, config.topk_groups), True)
    fill = 0.0 if config.group_fill == "zero" else -torch.inf
    return torch.where(keep[:, :, None], grouped, fill).view(T, C)


def _weigh(z: Tensor, probs: Tensor | None, ids: Tensor, shared: Tensor | None, config: RouterConfig
           ) -> tuple[Tensor, Tensor | None]:
    """Weights (T, K) of the chosen ids, and (T, S) of the shared experts; scores of single logits are elementwise, so
    those are taken of the K gathered logits."""
    if probs is not None:
        w = probs.gather(1, ids)
    else:
        picked = z.gather(1, ids)
        if config.score == "joint_logsigmoid" and shared is not None:
            joint = torch.softmax(F.logsigmoid(torch.cat([picked, shared], -1)), -1) * config.scale
            return joint[:, : config.top_k], joint[:, config.top_k :]
        if config.score == "softmax":
            w = torch.softmax(picked, -1)
        else:
            w = _sqrtsoftplus(picked) if config.score == "sqrtsoftplus" else _sigmoid(picked)
    if config.renormalize:
        p = config.norm_p
        norm = w.sum(-1, keepdim=True) if p == 1.0 else torch.linalg.vector_norm(w, p, -1, keepdim=True)
        if config.renorm_eps_mode == "add" and config.renorm_eps:
            norm = norm + config.renorm_eps
        w = w / norm.clamp(min=max(NORM_FLOOR, config.renorm_eps if config.renorm_eps_mode == "clamp" else 0.0))
    return (w if config.scale == 1.0 else w * config.scale), None


def _sparsemixer(z: Tensor, config: RouterConfig) -> tuple[Tensor, Tensor]:
    """Two picks; each weight is a softmax over the logits near that pick (Phi-3.5-MoE, evaluation form)."""
    frozen = z.detach()
    ids, weights, rest = [], [], z
    for _ in range(2):
        top = top_ids(rest.detach(), 1)
        best = frozen.gather(1, top)
        far = (best - frozen) / torch.maximum(frozen.abs(), best) > 2.0 * config.jitter_eps
        weights.append(torch.softmax(torch.where(far, -torch.inf, rest), -1).gather(1, top))
        ids.append(top)
        rest = rest.scatter(1, top, -torch.inf)
    w = torch.cat(weights, 1)
    return torch.cat(ids, 1), w if config.scale == 1.0 else w * config.scale


def _finish(ids: Tensor, weights: Tensor, shared: Tensor | None, raw: Tensor, config: RouterConfig,
            mask: Tensor | None, *, bounded: bool, E: int, C: int) -> Routing:
    """Identity experts leave the ids for a weight of x itself, masked tokens and ids out of range leave altogether."""
    identity = None
    if mask is not None:
        ids, weights = torch.where(mask[:, None], ids, -1), torch.where(mask[:, None], weights, 0.0)
        shared = None if shared is None else torch.where(mask[:, None], shared, 0.0)
    if C > E and config.identity_kind == "identity":
        identity = torch.where((ids >= E) & (ids < C), weights, 0.0).sum(-1)
    if C > E or not bounded:
        real = (ids >= 0) & (ids < E)
        ids, weights = torch.where(real, ids, -1), torch.where(real, weights, 0.0)
    return Routing(ids.to(torch.int32), weights, raw, config.apply_to, identity_weights=identity, shared_weights=shared)


@functools.cache
def _warn_without_gradient(config: RouterConfig) -> None:
    """Once per config: top-1 weights that are the constant 1 teach the router nothing (Megatron-LM#894)."""
    constant = config.renormalize and not config.renorm_eps
    if constant or (config.order == "topk_score" and config.score == "softmax"):
        warnings.warn(
            "RouterConfig with top_k=1: the weight is always 1 (renormalised, or a softmax over one logit), so no "
            "gradient reaches the router; use order='score_topk' with renormalize=False, or an auxiliary loss",
            stacklevel=3)
