"""Tokens on their way out over a hop and results on their way home, with gradients that fly as they do.

Each way is two autograd nodes, a departure and an arrival, and what runs between them in forward runs between them in
backward, too: autograd takes the node that was made last among those that are ready.

    forward     depart: tokens ──────── work in between ─────────────────> arrive   experts   results fly home
    backward    dx summed at home <──── gradient of that work ── dx flies home ──   experts   dy flies out

The gradient of going out is coming home and the other way round, over the splits of the forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .. import checks
from ..backends import rows as compiled
from ..permutation import sum_dtype
from .exchange import Hop
from .payload import RowFormat
from .transport import Pending

_BLOCK_BYTES = 1 << 18  # a block of sums stays in a CPU's second-level cache


class _Flight:
    """One way of one call: what has departed and not arrived, forwards and later backwards."""

    def __init__(self, hop: Hop, dtype: torch.dtype, weight_dtype: torch.dtype = torch.float32) -> None:
        self.hop, self.dtype, self.weight_dtype = hop, dtype, weight_dtype
        self.departed: tuple[Pending, int, Tensor] | None = None

    def depart(self, buffer: Tensor, fmt: RowFormat, what: str, *, home: bool) -> None:
        pending, number = self.hop.start(buffer, fmt, what, home=home)
        self.departed = (pending, number, buffer)  # the buffer is kept until it has left

    def arrive(self, fmt: RowFormat, what: str, *, home: bool) -> Tensor:
        assert self.departed is not None
        pending, number, _ = self.departed
        self.departed = None
        return self.hop.receive((pending, number), fmt, what, home=home)

    def tokens(self, D: int) -> RowFormat:
        return RowFormat.token(D, self.dtype, self.hop.C, self.weight_dtype)

    def gradients(self, D: int) -> RowFormat:
        return RowFormat.gradient(D, self.dtype, self.hop.C, self.weight_dtype)


def dispatch(hop: Hop, x: Tensor, weights: Tensor,
             meanwhile: Callable[[Tensor], None] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """x (T, D), weights (T, K) -> x (M, D), ids (M, C), weights (M, C) of the tokens that came, by source rank.

    `meanwhile` is called with x while they fly: the gradient of what it makes of that x is the first term of the sum
    over this rank's tokens.
    """
    checks.shape("weights", weights, (hop.T, hop.K), "(T, K) of the plan")
    flight = _Flight(hop, x.dtype, weights.dtype)
    ticket, here = _DepartOut.apply(x, weights, flight)
    if meanwhile is not None:
        meanwhile(here)
    return _ArriveOut.apply(ticket, flight, x.shape[1])


def combine(hop: Hop, y: Tensor, mine: Tensor | None = None, meanwhile: Callable[[], None] | None = None) -> Tensor:
    """y (M, D), a row per row that came -> (T, D): mine (T, D), then each token's rows, in float32, rounded once.

    `meanwhile` is called while they fly; the backward of what it does runs while their gradients do.
    """
    checks.shape("y", y, (sum(hop.recv), y.shape[1]), "a row for each row of the dispatched batch")
    flight = _Flight(hop, y.dtype)
    ticket = _DepartHome.apply(y, flight)
    if meanwhile is not None:
        meanwhile()
    return _ArriveHome.apply(ticket, mine, flight, y.shape[1])


def sum_rows(rows: Tensor, rows_of_token: Tensor, first: Tensor | None, dtype: torch.dtype, *,
             may_read: bool) -> Tensor:
    """rows (S, D), rows_of_token (T, R) -> (T, D): first (T, D), then rows in order; float32 (float64), rounded once.

    Where rows_of_token is -1 nothing is read, so that no NaN of another token comes through. `may_read`: the host may
    look at the device, to spare masks that nothing needs.
    """
    (T, R), D = rows_of_token.shape, rows.shape[1]
    if rows.shape[0] == 0:
        return rows.new_zeros((T, D), dtype=dtype) if first is None else first.to(dtype)
    if compiled.can_sum(rows, first, dtype):
        return compiled.sum_rows(rows, rows_of_token, first)
    wide = sum_dtype(rows)
    out = rows.new_empty((T, D), dtype=dtype)
    index, nothing = rows_of_token.clamp(min=0).long(), rows_of_token[..., None] < 0
    masked = nothing.any(0).squeeze(1).tolist() if may_read else [True] * R
    block = max(1, _BLOCK_BYTES // (D * wide.itemsize)) if rows.device.type == "cpu" else max(1, T)
    for begin in range(0, T, block):
        part = slice(begin, begin + block)
        total = None if first is None else first[part].to(wide, copy=True)
        for k in range(R):
            term = rows.index_select(0, index[part, k]).to(wide)
            if masked[k]:
                term.masked_fill_(nothing[part, k], 0.0)
            total = term if total is None else total.add_(term)
        assert total is not None
        out[part] = total
    return out


class _DepartOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor,  # type: ignore[override]
                flight: _Flight) -> tuple[Tensor, Tensor]:
        ctx.flight, ctx.D = flight, x.shape[1]
        ctx.set_materialize_grads(False)
        hop, fmt = flight.hop, flight.tokens(x.shape[1])
        buffer = fmt.empty(sum(hop.send), x.device)
        hop.gather(x, fmt.column(buffer, 0))
        fmt.column(buffer, 1).copy_(hop.ids)
        if hop.T:
            carried = weights.reshape(-1, hop.C)[hop.unit_of_row.clamp(min=0)]
            fmt.column(buffer, 2).copy_(torch.where(hop.ids >= 0, carried, 0.0))
        flight.depart(buffer, fmt, "dispatch", home=False)
        return x.new_empty(0), x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, dx_here: Tensor | None) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        flight: _Flight = ctx.flight
        hop, fmt = flight.hop, flight.gradients(ctx.D)
        came = flight.arrive(fmt, "dispatch backward", home=True)
        grad_x = sum_rows(fmt.column(came, 0), hop.rows_of_token, dx_here, flight.dtype,
                          may_read=hop.verify)
        return grad_x, _weight_gradient(fmt.column(came, 1), hop).to(flight.weight_dtype), None


class _ArriveOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, flight: _Flight,  # type: ignore[override]
                D: int) -> tuple[Tensor, Tensor, Tensor]:
        ctx.flight = flight
        hop, fmt = flight.hop, flight.tokens(D)
        came = flight.arrive(fmt, "dispatch", home=False)
        ids = fmt.column(came, 1).contiguous()
        if hop.verify and hop.counts is not None:
            with hop.telling():
                hop.counts.verify_ids(ids, hop.recv)
        ctx.mark_non_differentiable(ids)
        return fmt.column(came, 0), ids, fmt.column(came, 2).contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, _: Tensor, dw: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        flight: _Flight = ctx.flight
        fmt = flight.gradients(dx.shape[1])
        buffer = fmt.empty(sum(flight.hop.recv), dx.device)
        fmt.column(buffer, 0).copy_(dx)
        fmt.column(buffer, 1).copy_(dw)
        flight.depart(buffer, fmt, "dispatch backward", home=True)
        return dx.new_empty(0), None, None


def _weight_gradient(rows: Tensor, hop: Hop) -> Tensor:
    """rows (S, C) of weight gradients -> (T, K): slot s reads its column of the row that carried it."""
    if hop.row_of_slot.numel() == 0 or rows.shape[0] == 0:
        return rows.new_zeros((hop.T, hop.K))
    row = hop.row_of_slot.long()
    column = torch.zeros_like(row) if hop.per_slot else torch.arange(hop.K, device=row.device).repeat(hop.T)
    return torch.where(row >= 0, rows[row.clamp(min=0), column], 0.0).view(hop.T, hop.K)


class _DepartHome(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, flight: _Flight) -> Tensor:  # type: ignore[override]
        ctx.flight, ctx.D = flight, y.shape[1]
        fmt = RowFormat.vector(y.shape[1], y.dtype)
        buffer = fmt.empty(y.shape[0], y.device)
        fmt.column(buffer, 0).copy_(y)
        flight.depart(buffer, fmt, "combine", home=True)
        return y.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        fmt = RowFormat.vector(ctx.D, ctx.flight.dtype)
        return fmt.column(ctx.flight.arrive(fmt, "combine backward", home=False), 0), None


class _ArriveHome(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, mine: Tensor | None, flight: _Flight,  # type: ignore[override]
                D: int) -> Tensor:
        ctx.flight, ctx.with_mine = flight, mine is not None
        fmt = RowFormat.vector(D, flight.dtype)
        came = flight.arrive(fmt, "combine", home=True)
        return sum_rows(fmt.column(came, 0), flight.hop.rows_of_token, mine, flight.dtype,
                        may_read=flight.hop.verify)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None, None]:  # type: ignore[override]
        flight: _Flight = ctx.flight
        if ctx.needs_input_grad[0]:
            fmt = RowFormat.vector(dy.shape[1], flight.dtype)
            buffer = fmt.empty(sum(flight.hop.send), dy.device)
            flight.hop.gather(dy, fmt.column(buffer, 0))
            flight.depart(buffer, fmt, "combine backward", home=False)
        return dy.new_empty(0), dy if ctx.with_mine else None, None, None
