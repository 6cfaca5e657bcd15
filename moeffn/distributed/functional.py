"""moe_ffn over the ranks of a dispatcher."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..functional import moe_ffn
from ..types import ExpertWeights, Routing
from .dispatchers import Batch, Dispatcher


def expert_parallel_ffn(x: Tensor, routing: Routing, weights: ExpertWeights, dispatcher: Dispatcher, *,
                        backend: str = "auto", chunks: int = 1, meanwhile: Callable[[], None] | None = None) -> Tensor:
    """`moe_ffn` with the experts on several ranks: x (…, D), T tokens of this rank -> (…, D).

    routing  over all E experts, for this rank's tokens
    weights  of the L experts (L = 0 too) that `dispatcher.placement` puts on this rank, in slot order
    chunks   the tokens travel in that many parts, each while the experts work on the part before: the same number on
             every rank, whatever its tokens (parts may be empty)
    meanwhile  called once while the tokens fly, for work that does not need them (a shared expert)

    Collective: every rank calls it, and its backward, the same number of times, with T = 0 too. A rank's expert
    gradients are sums over the tokens of all ranks. Raises what `moe_ffn` raises, and ExchangeError.
    """
    flat = x.reshape(-1, x.shape[-1])
    checks.positive_int("chunks", chunks)
    if chunks == 1:
        batch = dispatcher.dispatch(flat, routing, meanwhile=meanwhile)
        y = dispatcher.combine(local_experts(batch, weights, backend=backend), batch.handle)
    else:
        y = _in_chunks(flat, routing, weights, dispatcher, backend, chunks, meanwhile)
    if routing.identity_weights is not None:
        y = (y + routing.identity_weights[:, None].to(y.dtype) * flat).to(y.dtype)
    return y.reshape(x.shape)


def _in_chunks(x: Tensor, routing: Routing, weights: ExpertWeights, dispatcher: Dispatcher, backend: str, chunks: int,
               meanwhile: Callable[[], None] | None) -> Tensor:
    outputs: list[Tensor] = []
    work, before = meanwhile, None
    parts = zip(x.tensor_split(chunks), routing.experts.tensor_split(chunks), routing.weights.tensor_split(chunks),
                strict=True)
    for piece, ids, w in parts:
        computed: list[Tensor] = []
        if before is not None:
            work = functools.partial(_compute, computed, before, weights, backend)
        batch = dispatcher.dispatch(piece, Routing(ids, w, apply_to=routing.apply_to), meanwhile=work)
        if before is not None:
            outputs.append(dispatcher.combine(computed[0], before.handle))
        before = batch
    assert before is not None
    outputs.append(dispatcher.combine(local_experts(before, weights, backend=backend), before.handle))
    return torch.cat(outputs)


def _compute(into: list[Tensor], batch: Batch, weights: ExpertWeights, backend: str) -> None:
    into.append(local_experts(batch, weights, backend=backend))


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
