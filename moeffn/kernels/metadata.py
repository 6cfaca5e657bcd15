"""Grouping slots by expert, and the schedule of row tiles: integers only, exact, stable, no host synchronisation.

Three small kernels. `_count` writes a histogram of experts per block of slots; `_place` starts from the rows that
earlier experts and earlier blocks take and hands out rows chunk by chunk, a slot's rank being the number of equal ids
before it; `_schedule` lists the row tiles of every expert. The number of tiles is known only to the device, so the host
launches a bound and programs beyond it return.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import cdiv, launch, next_power_of_2


@triton.jit(do_not_specialize=["N"])
def _count(experts, partial, N, E, E_PAD: tl.constexpr, BLOCK: tl.constexpr):
    """partial (blocks, E): slots of each block that go to each expert."""
    b = tl.program_id(0).to(tl.int64)
    slot = b * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(experts + slot, mask=slot < N, other=-1)
    valid = (ids >= 0) & (ids < E)
    counts = tl.histogram(tl.where(valid, ids, 0), E_PAD, mask=valid)
    e = tl.arange(0, E_PAD)
    tl.store(partial + b * E + e, counts, mask=e < E)


@triton.jit(do_not_specialize=["N", "num_blocks"])
def _place(experts, partial, counts, offsets, slot_of_row, row_of_slot, N, num_blocks, E, E_PAD: tl.constexpr,
           BLOCK: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, SINGLE: tl.constexpr):
    """Rows of one block of slots. SINGLE: this is the only block, and it counts for itself."""
    b = tl.program_id(0)
    start = b.to(tl.int64) * BLOCK
    e = tl.arange(0, E_PAD)
    total = tl.zeros([E_PAD], tl.int32)
    before = tl.zeros([E_PAD], tl.int32)
    if SINGLE:
        every = tl.arange(0, BLOCK)
        held = tl.load(experts + every, mask=every < N, other=-1)
        total += tl.histogram(tl.maximum(held, 0), E_PAD, mask=(held >= 0) & (held < E))
    else:
        for first in range(0, num_blocks, ROWS):
            j = first + tl.arange(0, ROWS)
            part = tl.load(partial + j.to(tl.int64)[:, None] * E + e[None, :],
                           mask=(j < num_blocks)[:, None] & (e < E)[None, :], other=0)
            total += tl.sum(part, 0)
            before += tl.sum(tl.where((j < b)[:, None], part, 0), 0)
    ends = tl.cumsum(total, 0)
    free = ends - total + before  # the next free row of each expert
    i = tl.arange(0, CHUNK)
    for c in range(0, BLOCK, CHUNK):
        slot = start + c + i
        ids = tl.load(experts + slot, mask=slot < N, other=-1)
        valid = (ids >= 0) & (ids < E)
        ids = tl.where(valid, ids, 0)
        same = (ids[:, None] == ids[None, :]) & valid[None, :] & (i[None, :] < i[:, None])
        at = tl.gather(free, ids, 0) + tl.sum(same.to(tl.int32), 1)
        tl.store(slot_of_row + at, slot.to(tl.int32), mask=valid)
        tl.store(row_of_slot + slot, tl.where(valid, at, -1), mask=slot < N)
        free += tl.histogram(ids, E_PAD, mask=valid)
    row = start + tl.arange(0, BLOCK)
    tl.store(slot_of_row + row, -1, mask=(row < N) & (row >= tl.sum(total, 0)))
    if b == 0:
        tl.store(counts + e, total, mask=e < E)
        tl.store(offsets + e, ends - total, mask=e < E)
        tl.store(offsets + e + 1, ends, mask=e < E)


@triton.jit(do_not_specialize=["E", "capacity"])
def _schedule(offsets, tiles, E, capacity, E_PAD: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr):
    """tiles: [how many, expert of each tile (capacity), first row of each tile (capacity)]; one program an expert."""
    me = tl.program_id(0)
    e = tl.arange(0, E_PAD)
    start = tl.load(offsets + e, mask=e < E, other=0)
    end = tl.load(offsets + e + 1, mask=e < E, other=0)
    needed = (end - start + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(e < me, needed, 0), 0)
    mine = tl.sum(tl.where(e == me, needed, 0), 0)
    row = tl.sum(tl.where(e == me, start, 0), 0)
    for j in range(0, mine, CHUNK):
        i = j + tl.arange(0, CHUNK)
        tl.store(tiles + 1 + first + i, me, mask=i < mine)
        tl.store(tiles + 1 + capacity + first + i, row + i * BLOCK_M, mask=i < mine)
    if me == E - 1:
        tl.store(tiles, first + mine)


def plan(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """experts (T, K) int32 -> counts (E,), offsets (E+1,), slot_of_row (N,), row_of_slot (N,), all int32.

    Slots keep their order inside an expert. Ids outside [0, E) are dropped: row_of_slot -1, and slot_of_row is -1 from
    row offsets[E] on.
    """
    flat = experts.reshape(-1).contiguous()  # a view with a uniform stride stays a view
    N, E = flat.numel(), num_experts
    assert N < 1 << 31
    made = torch.empty if N else torch.zeros
    counts, offsets, slot_of_row, row_of_slot = (
        made(n, dtype=torch.int32, device=flat.device) for n in (E, E + 1, N, N))
    # small blocks while few of them exist: every program reads the counts of all blocks
    block = min(1024, next_power_of_2(N, 32)) if N <= 1 << 17 else 2048
    blocks, e_pad = cdiv(N, block), next_power_of_2(E, 16)
    partial = torch.empty((blocks if blocks > 1 else 0, E), dtype=torch.int32, device=flat.device)
    if blocks > 1:
        launch(_count, (blocks,), experts=flat, partial=partial, N=N, E=E, E_PAD=e_pad, BLOCK=block)
    launch(_place, (blocks,), num_warps=4 if e_pad <= 1024 else 8, experts=flat, partial=partial, counts=counts,
           offsets=offsets, slot_of_row=slot_of_row, row_of_slot=row_of_slot, N=N, num_blocks=blocks, E=E, E_PAD=e_pad,
           BLOCK=block, CHUNK=min(block, 64), ROWS=max(1, 4096 // e_pad), SINGLE=blocks == 1)
    return counts, offsets, slot_of_row, row_of_slot


@dataclass(frozen=True)
class Schedule:
    """Row tiles of `block_m` rows, none crossing an expert.

    `tiles` (1 + 2·capacity,) int32 on the device: the number of tiles, the expert of each, the first row of each.
    With counts [2, 0, 3, 1] and block_m 2: 4 tiles, experts [0, 2, 2, 3], rows [0, 2, 4, 5]. `capacity` bounds the
    number from the host: N // block_m full tiles, and one ragged tile for each expert that can have rows.
    """

    tiles: Tensor
    capacity: int
    block_m: int


def schedule(offsets: Tensor, num_slots: int, block_m: int) -> Schedule:
    """The tiles of an expert-sorted buffer of `num_slots` rows, offsets (E+1,) int32."""
    E = offsets.numel() - 1
    capacity = num_slots // block_m + min(E, num_slots)
    tiles = torch.empty(1 + 2 * capacity, dtype=torch.int32, device=offsets.device)
    if capacity:
        launch(_schedule, (E,), offsets=offsets, tiles=tiles, E=E, capacity=capacity,
               E_PAD=next_power_of_2(E, 16), BLOCK_M=block_m, CHUNK=128)
    return Schedule(tiles, capacity, block_m)
