"""moe_ffn over the ranks of a dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..functional import moe_ffn
from ..types import ExpertWeights, Routing
from .dispatchers import Batch, Dispatcher


def expert_parallel_ffn(x: Tensor, routing: Routing, weights: ExpertWeights, dispatcher: Dispatcher, *,
                        backend: str = "auto", meanwhile: Callable[[], None] | None = None) -> Tensor:
    """`moe_ffn` with the experts on several ranks: x (…, D), T tokens of this rank -> (…, D).

    routing  over all E experts, for this rank's tokens
    weights  of the L experts (L = 0 too) that `dispatcher.placement` puts on this rank, in slot order
    meanwhile  called once while the tokens fly, for work that does not need them (a shared expert)

    Collective: every rank calls it, and its backward, the same number of times, with T = 0 too. A rank's expert
    gradients are sums over the tokens of all ranks. Raises what `moe_ffn` raises, and ExchangeError.
    """
    flat = x.reshape(-1, x.shape[-1])
    batch = dispatcher.dispatch(flat, routing, meanwhile=meanwhile)
    y = dispatcher.combine(local_experts(batch, weights, backend=backend), batch.handle)
    if routing.identity_weights is not None:
        y = (y + routing.identity_weights[:, None].to(y.dtype) * flat).to(y.dtype)
    return y.reshape(x.shape)


def local_experts(batch: Batch, weights: ExpertWeights, *, backend: str = "auto") -> Tensor:
    """The experts of this rank on a batch -> y (M, D). Zeros, still a part of the graph, when the rank has none."""
    if weights.num_experts:
        return moe_ffn(batch.x, batch.routing, weights, backend=backend)
    return _NoExperts.apply(batch.x, batch.routing.weights, *(t for _, t in weights.named_tensors()))


class _NoExperts(torch.autograd.Function):
    """Zeros whose backward still reaches the inputs: the exchanges behind them are collective."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.like = [(t.shape, t.dtype, t.device) for t in inputs]
        return torch.zeros_like(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
