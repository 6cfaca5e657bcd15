"""Keeping experts evenly loaded: auxiliary losses, the aux-loss-free bias update, load statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from . import checks
from .config import RouterConfig
from .permutation import sorted_plan
from .routing import scores, top_ids
from .types import LoadStats, Routing

Layers = Routing | Tensor | Sequence[Routing] | Sequence[Tensor]


def load_balance_loss(layers: Layers, router: RouterConfig | int, *, convention: Literal["switch", "hf"] = "switch",
                      token_mask: Tensor | None = None, counts: Tensor | None = None) -> Tensor:
    """Load-balance loss () of one layer or the mean over several; each a Routing or, for "hf", also its logits (T, E).

    router      the RouterConfig, or the number of experts E, which then means softmax scores
    token_mask  (T,) or (B, S) with B·S = T, bool or 0/1: 0 is padding and counts nowhere; all padding gives 0
    counts      (E,) integers to take f from in place of these layers' own ("switch" only; never changed): the sum over
                micro-batches or data-parallel ranks

    "switch" (Fedus et al. 2021, eq. 4): E · Σ_e f_e P_e, f_e the share of routed slots that went to e (Σ f = 1, which
    is the paper's f divided by K), P_e the mean over tokens of e's score, scores of a token divided by their sum (as
    they are for softmax; DeepSeek V3's form for sigmoid). Even load gives 1 whatever E, K and the number of layers, one
    expert taking all gives E. Identity experts are left out. The gradient flows through P.

    "hf": the number that `load_balancing_loss_func` of Hugging Face transformers returns: softmax and top-k over all
    layers' tokens pooled, f summed over the K choices, so that even load gives K.

    The loss is a mean over the tokens it was given, like a cross-entropy with mean reduction: with M micro-batches of
    equal size, weight each by 1/M, as the main loss. The sum is then the loss of the whole batch when f is the same
    everywhere, which `counts` over the whole batch makes exact.

    Raises ValueError/TypeError for arguments that do not fit.
    """
    checks.one_of("convention", convention, ("switch", "hf"))
    checks.instance("router", router, (RouterConfig, int))
    several: list[Any] = [layers] if isinstance(layers, (Routing, Tensor)) else list(layers)
    if not several:
        raise checks.bad("layers", "at least one Routing or logits tensor", "an empty sequence")
    for layer in several:
        checks.instance("layers", layer, (Routing, Tensor))
    if convention == "hf":
        if counts is not None:
            raise checks.bad("counts", "None with convention 'hf'", "a tensor")
        return _pooled(several, router, token_mask)
    E = router if isinstance(router, int) else router.num_experts
    if counts is not None:
        _check_counts(counts, E)
    config = RouterConfig(num_experts=E, top_k=1) if isinstance(router, int) else router
    losses = []
    for layer in several:
        checks.instance("layers (convention 'switch')", layer, Routing)
        losses.append(_switch(layer, config, token_mask, counts))
    return losses[0] if len(losses) == 1 else torch.stack(losses).mean()


def z_loss(logits: Tensor, *, token_mask: Tensor | None = None) -> Tensor:
    """Router z-loss (): the mean over tokens of logsumexp(logits)², logits (T, E) (Zoph et al. 2022, eq. 5).

    In float32 (float64). Padding as in `load_balance_loss`: counted nowhere, NaN there is harmless, all padding is 0.
    """
    checks.tensor("logits", logits, 2)
    checks.floating("logits", logits)
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    keep = _mask(token_mask, z)
    z = z if keep is None else torch.where(keep[:, None], z, 0.0)
    return _token_mean(torch.logsumexp(z, -1).square(), keep)


def update_selection_bias(bias: Tensor, counts: Tensor, rate: float = 1e-3, *, center: bool = False) -> Tensor:
    """The new selection bias (E,) float32: bias + rate · sign(mean load - load) (Wang et al. 2024, aux-loss-free).

    bias (E,) float32, counts (E,) integers (slots per expert since the last update, summed over data-parallel ranks by
    the caller); neither is changed. The sign is taken in integers, so that loads one slot apart still count. `center`
    takes the mean off the step, so that the bias does not drift when more experts are over than under the mean.

    Raises TypeError for float counts or a bias that is not float32: both lose exactly what this rule needs.
    """
    checks.tensor("bias", bias, 1)
    checks.float32("bias", bias)
    checks.positive("rate", rate)
    E = bias.shape[0]
    _check_counts(counts, E)
    checks.same_device("counts", counts, bias.device, "bias")
    wide = counts.to(torch.int64)
    step = torch.sign(wide.sum() - wide * E).to(bias.dtype)
    if center:
        step = step - step.mean()
    return bias.detach() + rate * step


def load_stats(routing: Routing, num_experts: int) -> LoadStats:
    """Where the slots of a routing went: LoadStats with counts (E,) and dropped (), int64.

    A pure function without host synchronisation: nothing is kept or counted twice under activation checkpointing.
    Raises TypeError/ValueError for what is not a Routing, or a number of experts below 1.
    """
    checks.instance("routing", routing, Routing)
    checks.positive_int("num_experts", num_experts)
    counts = sorted_plan(routing.experts, num_experts).counts.to(torch.int64)
    return LoadStats(counts, routing.experts.numel() - counts.sum())


def attach_loss(y: Tensor, loss: Tensor, coefficient: float | Tensor = 1.0) -> Tensor:
    """y unchanged, with `coefficient * loss` in its graph: y.backward(…) also sends that loss's gradient on its way.

    loss () of any floating dtype; the gradient is `coefficient` whatever reaches y, once per backward through y, also
    under activation checkpointing. It does not pass through a loss scaler: with one, give coefficient times its scale
    (a 0-dimensional tensor will do). With M micro-batches give coefficient / M, as for the main loss.
    """
    checks.tensor("y", y)
    checks.tensor("loss", loss, 0)
    return _Attach.apply(y, loss, coefficient)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Tensor, coefficient: float | Tensor) -> Tensor:
        ctx.coefficient, ctx.like = coefficient, (loss.dtype, loss.device)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        dtype, device = ctx.like
        return grad, torch.ones((), dtype=dtype, device=device) * ctx.coefficient, None


def _switch(routing: Routing, config: RouterConfig, token_mask: Tensor | None, counts: Tensor | None) -> Tensor:
    E = config.num_experts
    logits = routing.logits
    if logits is None:
        raise checks.bad("layers", "a Routing with logits", "logits=None")
    if logits.shape[-1] < E:
        raise checks.bad("layers", f"logits of at least E = {E} columns", f"shape {tuple(logits.shape)}")
    if logits.shape[-1] != config.num_logits:  # E alone was given: no more is known of the other columns
        logits = logits[:, :E]
    keep = _mask(token_mask, logits)
    if counts is None:
        experts = routing.experts if keep is None else torch.where(keep[:, None], routing.experts, -1)
        counts = sorted_plan(experts, E).counts
    s = scores(logits, config)[:, :E]
    s = s / s.sum(-1, keepdim=True).clamp(min=torch.finfo(s.dtype).tiny)
    f = counts.to(s.dtype) / counts.sum().clamp(min=1)
    return E * _token_mean((s * f).sum(-1), keep)


def _pooled(layers: Sequence[Routing | Tensor], router: RouterConfig | int, token_mask: Tensor | None) -> Tensor:
    chosen = probs = rows = None
    for layer in layers:
        logits = layer.logits if isinstance(layer, Routing) else layer
        if logits is None:
            raise checks.bad("layers", "a Routing with logits", "logits=None")
        if isinstance(router, RouterConfig):
            K = router.top_k
        elif isinstance(layer, Routing):
            K = layer.top_k
        else:
            raise checks.bad("router", "a RouterConfig, for its top_k, with bare logits", f"the int {router}")
        keep = _mask(token_mask, logits)
        if keep is not None:
            logits = torch.where(keep[:, None], logits, 0.0)
        p = torch.softmax(logits, -1)  # in the dtype of the logits, as transformers has it
        E = p.shape[-1]
        picked = torch.zeros_like(p, dtype=torch.float32).scatter(1, top_ids(p.detach(), K), 1.0)
        wide = p.to(torch.promote_types(p.dtype, torch.float32))
        if keep is not None:
            picked, wide = picked * keep[:, None], torch.where(keep[:, None], wide, 0.0)
        n = p.shape[0] if keep is None else keep.sum()
        chosen = picked.sum(0) if chosen is None else chosen + picked.sum(0)
        probs = wide.sum(0) if probs is None else probs + wide.sum(0)
        rows = n if rows is None else rows + n
    assert chosen is not None and probs is not None and rows is not None
    total = rows.clamp(min=1) if isinstance(rows, Tensor) else max(1, rows)
    return E * torch.sum((chosen / total) * (probs / total))


def _mask(token_mask: Tensor | None, rows: Tensor) -> Tensor | None:
    """The mask as (T,) bool."""
    if token_mask is None:
        return None
    checks.tensor("token_mask", token_mask)
    if token_mask.numel() != rows.shape[0]:
        raise checks.bad("token_mask", f"T = {rows.shape[0]} elements", f"shape {tuple(token_mask.shape)}")
    return token_mask.reshape(-1).to(rows.device) != 0


def _token_mean(values: Tensor, keep: Tensor | None) -> Tensor:
    """Mean of (T,) over the tokens kept; 0 when there are none."""
    if keep is None:
        return values.sum() / max(1, values.shape[0])
    return torch.where(keep, values, 0.0).sum() / keep.sum().clamp(min=1)


def _check_counts(counts: Tensor, E: int) -> None:
    checks.tensor("counts", counts, 1)
    checks.integer("counts", counts)
    checks.shape("counts", counts, (E,), "(E,)")
