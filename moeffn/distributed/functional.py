"""moe_ffn over the ranks of a dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..functional import moe_ffn
from ..types import ExpertWeights, Routing
from .dispatchers import Batch, Dispatcher


def expert_parallel_ffn(x: Tensor, routing: Routing, weights: ExpertWeights, dispatcher: Dispatcher, *,
                        backend: str = "auto", chunks: int = 1, local_first: bool = False,
                        meanwhile: Callable[[], None] | None = None) -> Tensor:
    """`moe_ffn` with the experts on several ranks: x (…, D), T tokens of this rank -> (…, D).

    routing  over all E experts, for this rank's tokens
    weights  of the L experts (L = 0 too) that `dispatcher.placement` puts on this rank, in slot order
    chunks   the tokens travel in that many parts: part i flies out and the results of part i - 2 fly home while the
             experts work on part i - 1. The same number on every rank, whatever its tokens (parts may be empty): it is
             announced, and MismatchError names the ranks that differ
    local_first  slots of this rank's own experts do not travel: they are computed while the others fly
    meanwhile  called once while the tokens fly, for work that does not need them (a shared expert)

    Collective: every rank calls it, and its backward, the same number of times, with T = 0 too. A rank's expert
    gradients are sums over the tokens of all ranks, added up in their own dtype over chunks and local slots. Raises
    what `moe_ffn` raises, and ExchangeError.
    """
    checks.positive_int("chunks", chunks)
    dispatcher.chunks = chunks
    flat = x.reshape(-1, x.shape[-1])
    parts: list[_Part] = []
    pieces = zip(flat.tensor_split(chunks), routing.experts.tensor_split(chunks), routing.weights.tensor_split(chunks),
                 strict=True)
    for piece, experts, w in pieces:
        part = Routing(experts, w, apply_to=routing.apply_to)
        here, away = split_local(part, dispatcher) if local_first else (None, part)
        now = _Part(here, weights, dispatcher, backend, None if parts else meanwhile, parts[-1] if parts else None)
        parts.append(now)
        now.batch = dispatcher.dispatch(piece, away, meanwhile=now.while_flying)
    parts[-1].compute()
    parts[-1].combine()
    y = parts[0].out if chunks == 1 else torch.cat([p.out for p in parts])
    if routing.identity_weights is not None:
        y = (y + routing.identity_weights[:, None].to(y.dtype) * flat).to(y.dtype)
    return y.reshape(x.shape)


def split_local(routing: Routing, dispatcher: Dispatcher) -> tuple[Routing, Routing]:
    """routing (T, K) over all experts -> (over this rank's slots, over all experts): -1 where the other has it."""
    placement = dispatcher.placement
    first, last = placement.first_place[dispatcher.rank], placement.first_place[dispatcher.rank + 1]
    places = placement.places(routing.experts)
    here = (places >= first) & (places < last)
    return (replace(routing, experts=torch.where(here, places - first, -1)),
            replace(routing, experts=torch.where(here, -1, routing.experts)))


class _Part:
    """Some of the tokens on their way: what runs while they fly, their batch, their results, their output."""

    batch: Batch
    y: Tensor
    out: Tensor

    def __init__(self, here: Routing | None, weights: ExpertWeights, dispatcher: Dispatcher, backend: str,
                 meanwhile: Callable[[], None] | None, before: _Part | None) -> None:
        self.here, self.weights, self.dispatcher, self.backend = here, weights, dispatcher, backend
        self.meanwhile, self.before = meanwhile, before
        self.mine: Tensor | None = None

    def while_flying(self, x: Tensor) -> None:
        if self.meanwhile is not None:
            self.meanwhile()
        if self.before is not None:
            self.before.compute()
        if self.here is not None:
            self.mine = local_experts(x, self.here, self.weights, backend=self.backend)

    def compute(self) -> None:
        """This part's experts, while the results of the part before fly home."""
        before, self.before = self.before, None
        if before is None:
            self._experts()
        else:
            before.combine(self._experts)

    def combine(self, meanwhile: Callable[[], None] | None = None) -> None:
        self.out = self.dispatcher.combine(self.y, self.batch.handle, self.mine, meanwhile=meanwhile)
        del self.y, self.batch, self.mine

    def _experts(self) -> None:
        self.y = local_experts(self.batch.x, self.batch.routing, self.weights, backend=self.backend)


def local_experts(x: Tensor, routing: Routing, weights: ExpertWeights, *, backend: str = "auto") -> Tensor:
    """This rank's experts on tokens x (M, D), routed over its slots -> (M, D). Zeros, still a part of the graph, when
    the rank has none."""
    if weights.num_experts:
        return moe_ffn(x, routing, weights, backend=backend)
    return _NoExperts.apply(x, routing.weights, *(t for _, t in weights.named_tensors()))


class _NoExperts(torch.autograd.Function):
    """Zeros whose backward still reaches the inputs: the exchanges behind them are collective."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.like = [(t.shape, t.dtype, t.device) for t in inputs]
        return torch.zeros_like(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.like)
