"""pick_tiles: a pure function from problem to tile, always legal, blind to the token count within a bucket."""

import csv
import dataclasses
import itertools
from pathlib import Path

import pytest

from moeffn.kernels.tiles import (
    MULTIPROCESSORS,
    SHARED_MEMORY,
    Problem,
    TileConfig,
    bucket,
    pick_tiles,
    shared_memory,
    why_illegal,
)

KERNELS = ("up", "down", "dh", "dx", "dw")
FAMILIES = tuple(SHARED_MEMORY)


def problem(kernel="up", rows=1000, itemsize=2, gated=True, family="sm90"):
    return Problem(kernel, rows, itemsize, gated, family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_answer_is_legal(kernel, family):
    for rows in (0, 1, 16, 17, 96, 97, 10**6):
        for itemsize in (2, 4):
            for gated in (True, False):
                p = problem(kernel, rows, itemsize, gated, family)
                assert why_illegal(pick_tiles(p), p) is None, p


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_new_token_count_picks_no_new_tile(kernel):
    """Ten thousand sizes give at most one tile a bucket, so at most three compilations."""
    assert len({pick_tiles(problem(kernel, rows)) for rows in range(10000)}) <= 3


def test_forward_kernels_share_a_schedule_and_backward_kernels_too():
    """The same tile height means the same row tiles: one schedule launch for both."""
    for family in FAMILIES:
        for rows in (1, 50, 1000):
            for pair in (("up", "down"), ("dh", "dx")):
                heights = {pick_tiles(problem(k, rows, family=family)).block_m for k in pair}
                assert len(heights) == 1, (family, rows, pair)


def test_buckets():
    assert [bucket(n) for n in (0, 16, 17, 96, 97)] == ["small", "small", "medium", "medium", "large"]


@pytest.mark.parametrize("change, reason", [
    ({"block_m": 48}, "not a power of two"), ({"block_k": 8}, "at least 16"), ({"num_stages": 9}, "1..8"),
    ({"block_n": 256, "num_stages": 4}, "shared memory"), ({"pieces": 16}, "fewer than 16"),
    ({"num_warps": 32}, "warps"), ({"split_k": 3}, "not a power of two"), ({"split_k": 16}, "at most 8"),
    ({"persistent": -1}, "negative"),
    ({"persistent": 1, "block_m": 256}, "shared memory")])
def test_illegal_tiles_say_why(change, reason):
    base = {"block_m": 128, "block_n": 128, "block_k": 64, "num_warps": 8, "num_stages": 3}
    assert why_illegal(TileConfig(**base), problem()) is None
    assert reason in why_illegal(TileConfig(**{**base, **change}), problem())


@pytest.mark.parametrize("kernel, split", [("up", True), ("down", True), ("dh", False), ("dx", False), ("dw", False)])
def test_only_inner_sums_that_the_next_kernel_adds_are_split(kernel, split):
    assert (why_illegal(TileConfig(16, 64, 16, 4, 3, split_k=8), problem(kernel)) is None) == split


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_inner_sums_are_split_only_while_programs_are_few(family, itemsize):
    """At most two programs a multiprocessor, four steps a program, and never for more than a handful of rows."""
    shares = set()
    for E, D, F in itertools.product((1, 2, 8, 64, 256), (64, 512, 4096), (64, 256, 768, 14336)):
        for kernel, columns, inner in (("up", F, D), ("down", D, F)):
            p = Problem(kernel, 16, itemsize, True, family, D, F, E)
            tile = pick_tiles(p)
            assert why_illegal(tile, p) is None
            shares.add(tile.split_k)
            if tile.split_k > 1:
                assert E * -(-columns // tile.block_n) * tile.split_k <= 2 * MULTIPROCESSORS[family]
                assert inner >= 4 * tile.split_k * tile.block_k
            for other in (dataclasses.replace(p, rows_per_expert=17), dataclasses.replace(p, kernel="dh")):
                assert pick_tiles(other).split_k == 1
    assert shares == {1, 2, 4, 8}


def test_bulk_copies_are_for_devices_that_have_them():
    config = TileConfig(64, 64, 32, 4, 3, tma=True)
    assert [why_illegal(config, problem(family=f)) is None for f in ("sm80", "sm90", "sm100", "gfx9")] == [
        False, True, True, False]


def test_the_estimate_of_shared_memory_covers_what_the_compiler_takes():
    """Up to 1 KiB of barriers and reductions, and the epilogue's own use, which stays below the pipeline's."""
    with (Path(__file__).parent / "data" / "triton_static.csv").open() as file:
        rows = list(csv.DictReader(file))
    seen = 0
    for row in rows:
        if row["kernel"] not in ("up", "rows", "dh", "dw"):
            continue
        m, n, k = (int(v) for v in row["tile"].split("x"))
        config = TileConfig(m, n, k, int(row["warps"]), int(row["stages"]), persistent=int(row["persistent"] == "yes"))
        itemsize = 4 if "fp32" in row["variant"] else 2
        p = problem("up" if row["kernel"] == "up" else "down", itemsize=itemsize, family=row["family"])
        assert int(row["shared_bytes"]) <= max(shared_memory(config, p) + 1024, m * n * 4), row
        assert int(row["shared_bytes"]) <= SHARED_MEMORY[row["family"]], row
        seen += 1
    assert seen >= 48
