"""Which tile each kernel runs with: a problem in, a frozen TileConfig out. Pure, no device, no tuning at run time.

The choice depends on the rows an expert gets on average and on the device's family, never on the token count itself:
a new T costs no compilation beyond the three buckets. Sizes are in elements, shared memory in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Kernel = Literal["up", "down", "dh", "dx", "dw"]
Family = Literal["sm80", "sm90", "sm100", "gfx9"]

SHARED_MEMORY = {"sm80": 99 * 1024, "sm90": 227 * 1024, "sm100": 227 * 1024, "gfx9": 64 * 1024}
"""Bytes a program may use. sm80 stands for every older NVIDIA device, so it takes the smallest of them (8.6, 8.9)."""

MULTIPROCESSORS = {"sm80": 108, "sm90": 132, "sm100": 148, "gfx9": 304}
"""Of A100, H200, B200, MI300X: two programs for each keep the memory busy, see _WIDE and `kernels.decode`."""
MAX_SPLIT = 8


@dataclass(frozen=True)
class Problem:
    """What a kernel is asked to do, as far as its tile depends on it.

    rows_per_expert: N / E rounded up, of the host-side bound N; itemsize: bytes of an element of x;
    gated: the up-projection keeps two accumulators and the dH epilogue two halves; d_model, d_expert: by which tiles
    that were measured are found (`kernels.tuned`); with num_experts they tell how many programs a grid has, 0 where
    that is not known.
    """

    kernel: Kernel
    rows_per_expert: int
    itemsize: int
    gated: bool
    family: Family
    d_model: int = 0
    d_expert: int = 0
    num_experts: int = 0


@dataclass(frozen=True)
class TileConfig:
    """A tile M by N by K (for dw: rows and columns of the gradient, slots a step), its warps and pipeline stages.

    group_m: row tiles that share a column tile before the next one starts (L2 reuse); pieces: column pieces into which
    the up and dH epilogues are cut, so that they do not spill; tma: weights and packed rows are read in bulk through
    descriptors where their layout allows; persistent: programs for each multiprocessor, each taking tile after tile,
    0 for one program a tile; swap: the product is computed transposed, N then being its rows (up, down, dh, dx);
    split_k: programs that share a tile's inner sum (up, down), their float32 parts added in order by the next kernel.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group_m: int = 8
    pieces: int = 1
    tma: bool = False
    persistent: int = 0
    swap: bool = False
    split_k: int = 1

    def __str__(self) -> str:
        return (f"{self.block_m}x{self.block_n}x{self.block_k} w{self.num_warps} s{self.num_stages}"
                f" g{self.group_m} p{self.pieces}{' tma' if self.tma else ''}"
                f"{f' persistent {self.persistent}' if self.persistent else ''}{' swap' if self.swap else ''}"
                f"{f' split {self.split_k}' if self.split_k > 1 else ''}")


def shared_memory(config: TileConfig, problem: Problem) -> int:
    """Bytes of shared memory of the software pipeline: num_stages steps of both operands (one fewer on gfx9, where the
    step in flight is held in registers), and the staged output when the next tile's loads overlap it (persistent).
    Compared with the compiler's figures in tests/data/triton_static.csv."""
    halves = 2 if problem.kernel == "up" and problem.gated else 1
    step = (config.block_m + halves * config.block_n) * config.block_k * problem.itemsize
    staged = config.block_m * config.block_n // config.pieces * problem.itemsize if config.persistent else 0
    return step * (config.num_stages - 1 if problem.family == "gfx9" else config.num_stages) + staged


def why_illegal(config: TileConfig, problem: Problem) -> str | None:
    """None when the compiler takes the tile on that family, else the reason."""
    for name in ("block_m", "block_n", "block_k", "num_warps", "pieces", "split_k"):
        value = getattr(config, name)
        if value < 1 or value & (value - 1):
            return f"{name} = {value} is not a power of two"
    if min(config.block_m, config.block_n, config.block_k) < 16:
        return f"{config}: every side of a matrix product is at least 16"
    if config.block_n // config.pieces < 16:
        return f"pieces = {config.pieces} leave fewer than 16 of {config.block_n} columns"
    if config.num_warps > (8 if problem.family == "gfx9" else 16):
        return f"num_warps = {config.num_warps} is more than a program may have"
    if not 1 <= config.num_stages <= 8:
        return f"num_stages = {config.num_stages} is not in 1..8"
    if config.tma and problem.family not in ("sm90", "sm100"):
        return f"tma: {problem.family} has no bulk copies"
    if config.persistent < 0:
        return f"persistent = {config.persistent} is negative"
    if config.split_k > (MAX_SPLIT if problem.kernel in ("up", "down") else 1):
        return f"split_k = {config.split_k}: {problem.kernel} takes at most {MAX_SPLIT} in up and down, 1 elsewhere"
    need, have = shared_memory(config, problem), SHARED_MEMORY[problem.family]
    return None if need <= have else f"needs {need} bytes of shared memory of {have}"


def bucket(rows_per_expert: int) -> Literal["small", "medium", "large"]:
    """small: decoding, a tile of 16 rows is seldom full; medium: a tile of 128 would be mostly empty."""
    return "small" if rows_per_expert <= 16 else "medium" if rows_per_expert <= 96 else "large"


_T = TileConfig
# Registers and spills of every line: tests/data/triton_static.csv. No line was timed on a device yet.
# The small tiles of _WIDE are transposed products: weights go from shared memory straight to wgmma or tcgen05 (through
# registers to mma.sync, which is all that 16 rows would get), an expert of up to 32 rows reads them once, and two
# programs an SM keep about 150 KB on their way, where 36 KB cover 1 µs of latency at an H200's 4.8 TB/s. Many experts
# make more programs than that; for few of them, and narrow, `pick_tiles` splits the inner sums.
_WIDE = {
    ("up", "large"): _T(128, 128, 64, 8, 3, pieces=2, tma=True),
    ("up", "medium"): _T(64, 64, 64, 4, 4, tma=True),
    ("up", "small"): _T(32, 64, 64, 4, 5, swap=True),
    ("down", "large"): _T(128, 256, 64, 8, 3, tma=True),
    ("down", "medium"): _T(64, 128, 64, 4, 4, tma=True),
    ("down", "small"): _T(32, 64, 128, 4, 4, swap=True),
    ("dh", "large"): _T(128, 128, 64, 8, 3, pieces=4, tma=True),
    ("dh", "medium"): _T(64, 128, 64, 4, 3, pieces=4, tma=True),
    ("dh", "small"): _T(32, 64, 128, 4, 4, swap=True),
    ("dw", "large"): _T(128, 256, 64, 8, 3),
    ("dw", "medium"): _T(128, 128, 32, 8, 4),
    ("dw", "small"): _T(128, 128, 16, 8, 3),
}
_NARROW = {
    ("up", "large"): _T(128, 64, 32, 8, 4),
    ("up", "medium"): _T(64, 64, 32, 4, 4),
    ("up", "small"): _T(16, 64, 64, 4, 3),
    ("down", "large"): _T(128, 128, 32, 8, 4),
    ("down", "medium"): _T(64, 128, 32, 4, 4),
    ("down", "small"): _T(16, 64, 64, 4, 4),
    ("dh", "large"): _T(128, 128, 32, 8, 4, pieces=4),
    ("dh", "medium"): _T(64, 64, 32, 4, 4, pieces=2),
    ("dh", "small"): _T(16, 64, 64, 4, 4),
    ("dw", "large"): _T(128, 128, 32, 8, 4),
    ("dw", "medium"): _T(128, 128, 32, 8, 3),
    ("dw", "small"): _T(64, 128, 16, 4, 3),
}
_FP32 = {  # where _FP32_OTHERS spills
    ("up", "large"): _T(64, 64, 16, 8, 3),
    ("dw", "medium"): _T(64, 64, 16, 4, 3),
}
_FP32_OTHERS = {
    "large": _T(64, 64, 16, 4, 3),
    "medium": _T(32, 64, 16, 4, 3),
    "small": _T(16, 32, 32, 4, 3),
}


def split_k(programs: int, steps: int, family: Family) -> int:
    """Programs that share each inner sum of `steps` steps, where the grid has `programs` without: as many as two a
    multiprocessor allow, each with 4 steps (less would not fill a pipeline) or more."""
    share = 1
    while share < MAX_SPLIT and 2 * share * programs <= 2 * MULTIPROCESSORS[family] and steps >= 8 * share:
        share *= 2
    return share


def pick_tiles(problem: Problem) -> TileConfig:
    """The tile for a problem. Deterministic; the answer is legal by `why_illegal`."""
    size = bucket(problem.rows_per_expert)
    if problem.itemsize > 2:
        config = _FP32.get((problem.kernel, size), _FP32_OTHERS[size])
    else:
        table = _WIDE if problem.family in ("sm90", "sm100") else _NARROW
        config = table["down" if problem.kernel == "dx" else problem.kernel, size]
    if problem.family == "gfx9":
        config = replace(config, num_stages=2)
    if size == "small" and problem.kernel in ("up", "down") and problem.num_experts:
        columns, inner = problem.d_expert, problem.d_model
        if problem.kernel == "down":
            columns, inner = inner, columns
        programs = problem.num_experts * -(-columns // config.block_n)
        config = replace(config, split_k=split_k(programs, inner // config.block_k, problem.family))
    return config
