"""The loop over the inner dimension that the up-projection, dH and the products of packed rows share, and how it reads
the tiles of an operand: through pointers, or in bulk (TMA) through a descriptor made on the host.

A descriptor needs a last dimension of stride 1 and every other stride and the address in multiples of 16 bytes; where
that does not hold, and on devices without TMA, the same kernel is compiled for pointers. A descriptor over all experts'
matrices, with the expert as leading coordinate, is made once a launch: nothing is rewritten on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def load(at, rows, columns, FULL_ROWS: tl.constexpr, FULL_COLUMNS: tl.constexpr):
    """A tile, zero where a mask is false; masks known to be full cost nothing."""
    if FULL_ROWS and FULL_COLUMNS:
        return tl.load(at)
    elif FULL_ROWS:
        return tl.load(at, mask=columns[None, :], other=0.0)
    elif FULL_COLUMNS:
        return tl.load(at, mask=rows[:, None], other=0.0)
    else:
        return tl.load(at, mask=rows[:, None] & columns[None, :], other=0.0)


@triton.jit
def matrix_at(w, e, n, k, stride_e, stride_n, stride_k, READ: tl.constexpr):
    """Where expert e's matrix is read at columns n and inner indices k: pointers (BLOCK_K, BLOCK_N), or e itself."""
    if READ == "pointers":
        return w + e * stride_e + n.to(tl.int64)[None, :] * stride_n + k.to(tl.int64)[:, None] * stride_k
    else:
        return e.to(tl.int32)


@triton.jit
def matrix_tile(w, at, pid_n, k0, rest, N, READ: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
                BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr):
    """The (BLOCK_K, BLOCK_N) tile at inner index k0, from where `rest` are left; zero outside the matrix."""
    if READ == "pointers":
        k = tl.arange(0, BLOCK_K)
        n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        return load(at, k < rest, n < N, EVEN_K, EVEN_N)
    elif READ == "rows":
        return tl.trans(tl.reshape(w.load([at, pid_n * BLOCK_N, k0]), (BLOCK_N, BLOCK_K)))
    else:
        tl.static_assert(READ == "columns")
        return tl.reshape(w.load([at, k0, pid_n * BLOCK_N]), (BLOCK_K, BLOCK_N))


@triton.jit
def matrix_next(at, stride_k, READ: tl.constexpr, STEP: tl.constexpr):
    """Where the next tile, STEP further along the inner dimension, is read."""
    if READ == "pointers":
        return at + tl.cast(stride_k, tl.int64) * STEP
    else:
        return at


@triton.jit
def product(a, a_at, stride_ak, live, w, w_at, w_up, u_at, stride_wk, pid_n, N, part, INNER,
            READ_A: tl.constexpr, READ: tl.constexpr, FULL_A: tl.constexpr, SWAP: tl.constexpr, SPLIT: tl.constexpr,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_N: tl.constexpr,
            EVEN_K: tl.constexpr, PRECISION: tl.constexpr):
    """Rows (BLOCK_M, INNER) times column tile pid_n of w, and of w_up unless it is None: two float32 tiles
    (BLOCK_M, BLOCK_N), the second meaningless without w_up. Of the inner dimension steps part, part + SPLIT, …, at the
    first of which a_at, w_at and u_at point. FULL_A: rows that are not live may be read all the same.

    SWAP computes the transposed product: the matrices' columns, 64 or more, then stand where the matrix units of sm_90
    and sm_100 want at least 64 rows, and few rows per expert where they take 16 or 32.
    """
    k = tl.arange(0, BLOCK_K)
    first: tl.constexpr = BLOCK_N if SWAP else BLOCK_M
    second: tl.constexpr = BLOCK_M if SWAP else BLOCK_N
    acc = tl.zeros([first, second], tl.float32)
    acc_u = tl.zeros([first, second], tl.float32)
    for k0 in range(part * BLOCK_K, INNER, SPLIT * BLOCK_K):
        rest = INNER - k0
        ak = a.load([a_at, k0]) if READ_A == "rows" else load(a_at, live, k < rest, FULL_A, EVEN_K)
        wk = matrix_tile(w, w_at, pid_n, k0, rest, N, READ, EVEN_K, EVEN_N, BLOCK_K, BLOCK_N)
        acc = _multiply(ak, wk, acc, SWAP, PRECISION)
        w_at = matrix_next(w_at, stride_wk, READ, SPLIT * BLOCK_K)
        if w_up is not None:
            uk = matrix_tile(w_up, u_at, pid_n, k0, rest, N, READ, EVEN_K, EVEN_N, BLOCK_K, BLOCK_N)
            acc_u = _multiply(ak, uk, acc_u, SWAP, PRECISION)
            u_at = matrix_next(u_at, stride_wk, READ, SPLIT * BLOCK_K)
        if READ_A == "pointers":
            a_at += tl.cast(stride_ak, tl.int64) * (SPLIT * BLOCK_K)
    if SWAP:
        acc = tl.trans(acc)
        acc_u = tl.trans(acc_u)
    return acc, acc_u


@triton.jit
def _multiply(rows, matrix, acc, SWAP: tl.constexpr, PRECISION: tl.constexpr):
    if SWAP:
        return tl.dot(tl.trans(matrix), tl.trans(rows), acc, input_precision=PRECISION)
    else:
        return tl.dot(rows, matrix, acc, input_precision=PRECISION)


def descriptor(t: Tensor, block: Sequence[int]) -> TensorDescriptor | None:
    """A descriptor of t read in such blocks; None where its layout does not allow one."""
    steps = [s * t.itemsize for s in t.stride()[:-1]]
    if not t.numel() or t.stride(-1) != 1 or t.data_ptr() % 16 or max(t.shape) >= 1 << 31:
        return None
    if any(s % 16 or not 0 < s < 1 << 40 for s in steps):
        return None
    return TensorDescriptor(t, list(t.shape), list(t.stride()), list(block))


def matrices(parts: list[Tensor], block_n: int, block_k: int, tma: bool) -> tuple[str, list[Any]]:
    """Matrices (E, N, K) of any strides -> their common READ and what a kernel is given for each: descriptors of blocks
    that are contiguous along K ("rows") or along N ("columns"), or the tensors themselves ("pointers")."""
    if tma:
        rows = [descriptor(w, (1, block_n, block_k)) for w in parts]
        columns = [descriptor(w.transpose(1, 2), (1, block_k, block_n)) for w in parts]
        for read, made in (("rows", rows), ("columns", columns)):
            if None not in made:
                return read, made
    return "pointers", [*parts]
