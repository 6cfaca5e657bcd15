"""One hop of tokens over one group of ranks: who sends which rows to whom. `flight` moves them, out and home.

A hop copies each token (dedup "rank": once per destination rank; "none": once per slot; "all": to every rank) as a row
of bytes with its ids and weights, and later sums the rows that come back, this rank's own first.

Worked example, T=2, K=2, G=2 ranks, slots go to ranks [[0,1],[1,1]], dedup "rank":

    rows sent       token 0 -> rank 0 | token 0 -> rank 1, token 1 -> rank 1        send = (1, 2)
    unit_of_row     [0, 0, 1]         rows_of_token [[0,1],[2,-1]] (on rank 0)                  row_of_slot [0,1,2,2]
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .counts import Counts, announce
from .errors import MismatchError
from .payload import RowFormat, tags, verify_tags
from .transport import Pending, Transport

Dedup = Literal["none", "rank", "all"]


@dataclass(frozen=True)
class Hop:
    """Who sends which rows to whom. Made by `plan_hop`, used by every exchange of one layer call.

    send, recv     (G,) rows to and from each rank of the group, on the host
    unit_of_row    (S,) int64: the token (or slot, per_slot) that each sent row carries; -1: padding of a fixed budget
    ids            (S, C) int32: place ids that travel with each row, -1 for slots that go elsewhere
    rows_of_token  (T, R) int32: the rows to sum for each token: this rank's own, the others' in rank order, -1: none;
                   per_slot in slot order
    row_of_slot    (T*K,) int32: the row that carries the slot's weight, -1: not sent
    dropped        () int64 on the device: routed slots that the budget had no row for
    counts         what every rank announced; None with a fixed budget
    verify         check tags and counts of what arrives (always on a CPU; on a GPU it costs a synchronisation)
    """

    transport: Transport
    T: int
    K: int
    per_slot: bool
    send: tuple[int, ...]
    recv: tuple[int, ...]
    unit_of_row: Tensor
    ids: Tensor
    rows_of_token: Tensor
    row_of_slot: Tensor
    dropped: Tensor
    counts: Counts | None
    verify: bool

    @property
    def C(self) -> int:
        """Slots per row: 1 when each slot travels alone, else K."""
        return 1 if self.per_slot else self.K

    @property
    def rows_away(self) -> int:
        """Rows that leave this rank for others."""
        return sum(self.send) - self.send[self.transport.rank]

    def start(self, buffer: Tensor, fmt: RowFormat, what: str, *, home: bool = False) -> tuple[Pending, int]:
        """Tag and send the buffer, forwards or (`home`) along the reversed splits."""
        send, recv = (self.recv, self.send) if home else (self.send, self.recv)
        number = self.transport.exchanges + 1
        if self.verify:
            fmt.column(buffer, -1).copy_(tags(number, [self.transport.rank] * len(send), send, buffer.device))
        return self.transport.start(buffer, send, recv, what), number

    def receive(self, pending: tuple[Pending, int], fmt: RowFormat, what: str, *, home: bool = False) -> Tensor:
        """The buffer that came, its tags verified."""
        work, number = pending
        buffer = work.wait()
        if self.verify:
            with self.telling():
                verify_tags(fmt.column(buffer, -1), number, self.send if home else self.recv, what)
        return buffer

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks why this one stops, when it does: they will wait for it in vain."""
        try:
            yield
        except MismatchError as error:
            self.transport.report(f"stopped: {error}")
            raise

    def gather(self, x: Tensor, out: Tensor) -> None:
        """out (S, D) <- the token of each sent row; padding rows get any token (nothing reads them)."""
        if self.T:
            unit = self.unit_of_row.clamp(min=0)
            torch.index_select(x, 0, unit // self.K if self.per_slot else unit, out=out)
        else:
            out.zero_()


def plan_hop(transport: Transport, places: Tensor, owner: tuple[int, ...], *, dedup: Dedup, D: int,
             dtype: torch.dtype, budget: int | None = None, verify: bool | None = None, chunks: int = 1,
             counts: Counts | None = None) -> Hop:
    """Lay out a hop: places (T, K) int32, -1: nowhere; owner (P,): the rank of the group that takes each place.

    Announces counts to every rank and checks theirs (one small exchange, one device-to-host copy), except with `counts`
    that the ranks know already, and with `budget` rows for each pair of ranks: then sizes are fixed, nothing is
    announced or copied, and slots beyond are dropped.
    """
    T, K = places.shape
    G, device = transport.size, places.device
    owner_here, owner_host = owners(owner, device)
    target = owner_here[places.long()]
    per_slot = dedup == "none"
    units = T * K if per_slot else T
    present = presence(target, G, dedup)
    if budget is None:
        if counts is None:
            counts = announce(transport, T=T, K=K, D=D, dtype=dtype, rows=present.sum(1),
                              per_place=histogram(places, len(owner)), owner=owner_host, chunks=chunks)
        counts.verify_sums(K, dedup)
        send, recv = counts.send, counts.recv
        position = present.reshape(-1).cumsum(0).view(G, units) - 1
        row = torch.where(present, position, -1)
    else:
        counts, send = None, (budget,) * G
        recv = send
        position = present.cumsum(1) - 1
        first = torch.arange(G, device=device)[:, None] * budget
        row = torch.where(present & (position < budget), position + first, -1)
    S = sum(send)
    unit_of_row = _scatter_index(row, torch.arange(units, device=device).expand(G, units), S)
    rank_of_row = _scatter_index(row, torch.arange(G, device=device)[:, None].expand(G, units), S)
    slot_target = target.reshape(units, 1 if per_slot else K)
    row_of_slot = _row_of_slot(row, slot_target)
    dropped = ((target.reshape(-1) >= 0) & (row_of_slot < 0)).sum()
    ids = torch.full((S, slot_target.shape[1]), -1, dtype=torch.int32, device=device)
    if units:
        carried = unit_of_row.clamp(min=0)
        here = (slot_target[carried] == rank_of_row[:, None]) & (unit_of_row >= 0)[:, None]
        ids = torch.where(here, places.reshape(units, slot_target.shape[1])[carried], -1).to(torch.int32)
    width = min(G, K) if dedup == "rank" else G
    rows_of_token = row_of_slot.view(T, K) if per_slot else _rows_of_token(row, transport.rank, width)
    return Hop(transport, T, K, per_slot, send, recv, unit_of_row, ids, rows_of_token.to(torch.int32),
               row_of_slot.to(torch.int32), dropped, counts, device.type == "cpu" if verify is None else verify)


@functools.lru_cache(maxsize=256)
def owners(owner: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """(P,) on `device`, with -1 at its end so that place -1 finds it, and on the host without."""
    host = torch.tensor(owner, dtype=torch.int64, device="cpu")
    return torch.cat([host, torch.tensor([-1], device="cpu")]).to(device), host


def presence(target: Tensor, G: int, dedup: Dedup) -> Tensor:
    """(G, units) bool: does unit u go to rank g?"""
    if dedup == "all":
        return torch.ones((G, target.shape[0]), dtype=torch.bool, device=target.device)
    flat = target.reshape(-1, 1) if dedup == "none" else target
    marks = torch.zeros((flat.shape[0], G + 1), dtype=torch.bool, device=target.device)
    marks.scatter_(1, torch.where(flat < 0, G, flat).long(), True)
    return marks[:, :G].t()


def histogram(ids: Tensor, size: int) -> Tensor:
    """(size,) int64 counts of the ids in [0, size); integer sums, so deterministic on every device."""
    flat = ids.reshape(-1).long()
    out = torch.zeros(size + 1, dtype=torch.int64, device=ids.device)
    return out.scatter_add_(0, torch.where(flat < 0, size, flat), torch.ones_like(flat))[:size]


def _scatter_index(row: Tensor, values: Tensor, S: int) -> Tensor:
    """(S,) int64: values at their rows, -1 where no row points. Rows are distinct; -1 goes to a spare place."""
    out = torch.full((S + 1,), -1, dtype=torch.int64, device=row.device)
    out.scatter_(0, torch.where(row < 0, S, row).reshape(-1).long(), values.reshape(-1))
    return out[:S]


def _row_of_slot(row: Tensor, slot_target: Tensor) -> Tensor:
    """row (G, units), slot_target (units, C) -> (units * C,) the row of each slot, -1 where it is not sent."""
    if slot_target.numel() == 0:
        return row.new_empty((0,))
    found = row.t().gather(1, slot_target.clamp(min=0).long())
    return torch.where(slot_target >= 0, found, -1).reshape(-1)


def _rows_of_token(row: Tensor, own: int, width: int) -> Tensor:
    """row (G, T) -> (T, width): each token's rows, of rank `own` first, then in rank order; packed left, -1 beyond."""
    by_token = torch.cat([row[own : own + 1], row[:own], row[own + 1 :]]).t()
    sent = by_token >= 0
    place = torch.where(sent, sent.cumsum(1) - 1, width)
    out = torch.full((row.shape[1], width + 1), -1, dtype=row.dtype, device=row.device)
    return out.scatter_(1, place, by_token)[:, :width]
