"""Grouping slots by expert: exact against numpy, under the interpreter, with every access inside its tensor."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from interpreted import interpreted, poisoned, sanitized

from moeffn.kernels import metadata
from moeffn.kernels.forward import place

pytestmark = interpreted


def numpy_plan(ids, E):
    """counts, offsets, slot_of_row, row_of_slot by a stable argsort of the kept slots."""
    kept = np.flatnonzero((ids >= 0) & (ids < E))
    order = kept[np.argsort(ids[kept], kind="stable")]
    counts = np.bincount(ids[kept], minlength=E)
    slot_of_row = np.full(ids.size, -1)
    slot_of_row[: order.size] = order
    row_of_slot = np.full(ids.size, -1)
    row_of_slot[order] = np.arange(order.size)
    return counts, np.concatenate([[0], np.cumsum(counts)]), slot_of_row, row_of_slot


@pytest.mark.parametrize("N, E, low, high, reason", [
    (0, 4, 0, 4, "no tokens: nothing is launched, offsets are zeros"),
    (1, 1, 0, 1, "the smallest problem"),
    (6, 4, 0, 4, "the worked example's size"),
    (33, 3, -2, 5, "ids outside [0, E) on both sides drop out; one slot more than a chunk"),
    (100, 8, 9, 12, "nothing is routed"),
    (129, 5, 2, 3, "one expert takes all, one slot more than two chunks"),
    (1024, 16, 0, 16, "exactly one block, E a power of two: no spare histogram bin"),
    (1025, 17, -1, 18, "one slot in a second block"),
    (5000, 257, 0, 257, "more than 256 experts, several blocks"),
    (3000, 4096, -1, 4097, "the most experts that are promised"),
])
def test_plan_is_exact(N, E, low, high, reason, monkeypatch):
    ids = np.random.default_rng(N).integers(low, high, N, dtype=np.int32)
    with sanitized() as seen, poisoned(monkeypatch):
        got = metadata.plan(torch.from_numpy(ids).view(-1, 1), E)
    names = ("counts", "offsets", "slot_of_row", "row_of_slot")
    for name, mine, truth in zip(names, got, numpy_plan(ids, E), strict=True):
        assert mine.dtype == torch.int32
        np.testing.assert_array_equal(mine.numpy(), truth, err_msg=f"{name}: {reason}")
    assert seen["lanes"] > 0 or N == 0


def test_plan_of_65536_slots():
    """Above 65535 slots (16-bit counters would wrap) on 512 experts."""
    ids = np.random.default_rng(0).integers(0, 512, 65537, dtype=np.int32)
    for mine, truth in zip(metadata.plan(torch.from_numpy(ids).view(-1, 1), 512), numpy_plan(ids, 512), strict=True):
        np.testing.assert_array_equal(mine.numpy(), truth)


def test_plan_takes_a_strided_view_of_ids():
    ids = torch.randint(0, 4, (9, 6), dtype=torch.int32, generator=torch.Generator().manual_seed(1))[:, ::2]
    for mine, truth in zip(metadata.plan(ids, 4), numpy_plan(ids.reshape(-1).numpy(), 4), strict=True):
        np.testing.assert_array_equal(mine.numpy(), truth)


@pytest.mark.parametrize("counts, block_m", [
    ([2, 0, 3, 1], 2), ([0, 0, 0], 16), ([300], 16), ([16, 17, 15, 0, 1], 16), ([1] * 70, 16), ([0] * 20 + [5000], 32)])
def test_schedule_covers_every_row_once(counts, block_m, monkeypatch):
    offsets = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
    N = sum(counts) + 3  # three slots were dropped
    with sanitized(), poisoned(monkeypatch):
        schedule = metadata.schedule(offsets, N, block_m)
    tiles = schedule.tiles.tolist()
    truth = [(e, int(offsets[e]) + i) for e, c in enumerate(counts) for i in range(0, c, block_m)]
    assert tiles[0] == len(truth) <= schedule.capacity
    experts, rows = tiles[1 : 1 + tiles[0]], tiles[1 + schedule.capacity :][: tiles[0]]
    assert list(zip(experts, rows, strict=True)) == truth


def test_the_bound_on_tiles_is_reached():
    """Experts with one row more than whole tiles need every tile of the bound: it cannot be smaller."""
    counts, block_m = [17, 1, 1, 33], 16
    offsets = torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)
    schedule = metadata.schedule(offsets, sum(counts), block_m)
    assert schedule.tiles[0].item() == sum(-(-c // block_m) for c in counts) == schedule.capacity


@triton.jit
def _places(out, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    pid = tl.program_id(0)
    m, n = place(pid, tiles_m, tiles_n, GROUP_M)
    tl.store(out + 2 * pid, m)
    tl.store(out + 2 * pid + 1, n)


@pytest.mark.parametrize("tiles_m, tiles_n, group", [(5, 3, 2), (4, 2, 4), (3, 1, 8), (1, 4, 1)])
def test_programs_that_run_together_share_columns_and_few_rows(tiles_m, tiles_n, group):
    """Groups of rows, in each column after column: what the L2 cache holds is `group` row tiles and one of columns."""
    out = torch.full((tiles_m * tiles_n, 2), -1, dtype=torch.int32)
    _places[(tiles_m * tiles_n,)](out, tiles_m, tiles_n, group)
    rows = [range(first, min(first + group, tiles_m)) for first in range(0, tiles_m, group)]
    assert out.tolist() == [[m, n] for together in rows for n in range(tiles_n) for m in together]
