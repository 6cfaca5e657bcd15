"""Forward: the up-projection with its activation, and the product of packed rows with the experts' matrices.

A program works on one tile of a `Schedule`, or none, when the grid
is the host's bound on tiles; on several, a grid apart, when the grid is as many as a device holds (persistent).
Offsets that multiply a stride are 64-bit throughout.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import gated, unary
from .launch import cdiv, launch, multiprocessors
from .metadata import Schedule
from .operands import descriptor, matrices, matrix_at, product
from .tiles import TileConfig


@triton.jit
def place(pid, tiles_m, tiles_n, GROUP_M: tl.constexpr):
    """(row tile, column tile) of program pid: GROUP_M row tiles share each column tile before the next comes."""
    width = GROUP_M * tiles_n
    first = pid // width * GROUP_M
    rows = tl.minimum(tiles_m - first, GROUP_M)
    within = pid % width
    return first + within % rows, within // rows


@triton.jit
def locate(pid, count, tiles_n, tiles, capacity, offsets, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr):
    """Tile pid of a schedule: its expert, first row, rows (BLOCK_M,), which of them are the expert's, column tile."""
    tile, pid_n = place(pid, count, tiles_n, GROUP_M)
    e = tl.load(tiles + 1 + tile).to(tl.int64)
    first = tl.load(tiles + 1 + capacity + tile)
    row = first + tl.arange(0, BLOCK_M)
    return e, first, row, row < tl.load(offsets + e + 1), pid_n


@triton.jit
def _up_piece(g, u, n, row64, live, scale, b_at, stride_bn, h, a, F, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
              SCALE: tl.constexpr, ACT: tl.constexpr):
    """The up-projection's epilogue on some columns n: scale, bias, h, activation."""
    keep = live[:, None] & (n < F)[None, :]
    gate_row = n * 2 if INTERLEAVED else n
    up_row = n * 2 + 1 if INTERLEAVED else n + F
    if SCALE:
        g *= scale[:, None]
        u *= scale[:, None]
    if b_at is not None:
        g += tl.load(b_at + gate_row.to(tl.int64) * stride_bn, mask=n < F, other=0.0).to(tl.float32)[None, :]
        if GATED:
            u += tl.load(b_at + up_row.to(tl.int64) * stride_bn, mask=n < F, other=0.0).to(tl.float32)[None, :]
    # the activation reads what backward will read: h rounded to its storage type
    g = g.to(a.dtype.element_ty)
    if GATED:
        u = u.to(a.dtype.element_ty)
        if h is not None:
            tl.store(h + row64[:, None] * (2 * F) + gate_row[None, :], g, mask=keep)
            tl.store(h + row64[:, None] * (2 * F) + up_row[None, :], u, mask=keep)
        act = gated(g.to(tl.float32), u.to(tl.float32), ACT)
    else:
        if h is not None:
            tl.store(h + row64[:, None] * F + n[None, :], g, mask=keep)
        act = unary(g.to(tl.float32), ACT)
    tl.store(a + row64[:, None] * F + n[None, :], act.to(a.dtype.element_ty), mask=keep)


@triton.jit
def _up_tile(pid, count, tiles_n, x, w, w_up, bias, h, a, weights, slot_of_row, offsets, tiles, capacity, N, D, F,
             stride_xt, stride_xd, stride_we, stride_wn, stride_wk, stride_be, stride_bn, TOP_K: tl.constexpr,
             GATED: tl.constexpr, INTERLEAVED: tl.constexpr, SCALE: tl.constexpr, ACT: tl.constexpr,
             PIECES: tl.constexpr, READ: tl.constexpr, SWAP: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr,
             BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_N: tl.constexpr,
             EVEN_K: tl.constexpr, PRECISION: tl.constexpr):
    """Tile pid // SPLIT of `_up`, of its sum every SPLIT-th step."""
    part = pid % SPLIT
    e, _, row, live, pid_n = locate(pid // SPLIT, count, tiles_n, tiles, capacity, offsets, BLOCK_M, GROUP_M)
    slot = tl.load(slot_of_row + row, mask=live, other=0)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = part * BLOCK_K + tl.arange(0, BLOCK_K)
    x_at = x + (slot // TOP_K).to(tl.int64)[:, None] * stride_xt + k.to(tl.int64)[None, :] * stride_xd
    w_at = matrix_at(w, e, n, k, stride_we, stride_wn, stride_wk, READ)
    u_at = w_at
    if GATED:
        u_at = matrix_at(w_up, e, n, k, stride_we, stride_wn, stride_wk, READ)
    acc, acc_u = product(x, x_at, stride_xd, live, w, w_at, w_up, u_at, stride_wk, pid_n, F, part, D, "pointers", READ,
                         True, SWAP, SPLIT, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, PRECISION)
    scale = tl.full([BLOCK_M], 1.0, tl.float32)
    if SCALE:
        scale = tl.load(weights + slot, mask=live, other=0.0).to(tl.float32)
    row64 = row.to(tl.int64)
    b_at = None if bias is None else bias + e * stride_be
    columns: tl.constexpr = BLOCK_N // PIECES
    first = pid_n * BLOCK_N + tl.arange(0, columns)
    if SPLIT > 1:
        at = a + (tl.cast(part, tl.int64) * N + row64)[:, None] * (2 * F if GATED else F) + n[None, :]
        keep = live[:, None] & (n < F)[None, :]
        tl.store(at, acc, mask=keep)
        if GATED:
            tl.store(at + F, acc_u, mask=keep)
    elif PIECES == 1:
        _up_piece(acc, acc_u, first, row64, live, scale, b_at, stride_bn, h, a, F, GATED, INTERLEAVED, SCALE, ACT)
    else:
        tl.static_assert(PIECES == 2)
        g0, g1 = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, columns)), (0, 2, 1)))
        u0, u1 = tl.split(tl.permute(tl.reshape(acc_u, (BLOCK_M, 2, columns)), (0, 2, 1)))
        _up_piece(g0, u0, first, row64, live, scale, b_at, stride_bn, h, a, F, GATED, INTERLEAVED, SCALE, ACT)
        first += columns
        _up_piece(g1, u1, first, row64, live, scale, b_at, stride_bn, h, a, F, GATED, INTERLEAVED, SCALE, ACT)


@triton.jit(do_not_specialize=["capacity", "N"])
def _up(x, w, w_up, bias, h, a, weights, slot_of_row, offsets, tiles, capacity, N, D, F, stride_xt, stride_xd,
        stride_we, stride_wn, stride_wk, stride_be, stride_bn, TOP_K: tl.constexpr, GATED: tl.constexpr,
        INTERLEAVED: tl.constexpr, SCALE: tl.constexpr, ACT: tl.constexpr, PIECES: tl.constexpr, READ: tl.constexpr,
        SWAP: tl.constexpr, SPLIT: tl.constexpr, PERSISTENT: tl.constexpr, BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_N: tl.constexpr,
        EVEN_K: tl.constexpr, PRECISION: tl.constexpr):
    """h = x[token] · w_inᵀ (· weight) + bias, a = act(h); h is None in inference. Gate and up are summed together.

    With SPLIT > 1 a (SPLIT, N, 2F | F) float32 gets the parts of the product, gate and up side by side, for `_up_sum`.
    """
    tiles_n = tl.cdiv(F, BLOCK_N)
    count = tl.load(tiles)
    programs = count * tiles_n * SPLIT
    pid = tl.program_id(0)
    if PERSISTENT:
        for i in tl.range(pid, programs, tl.num_programs(0), flatten=True):
            _up_tile(i, count, tiles_n, x, w, w_up, bias, h, a, weights, slot_of_row, offsets, tiles, capacity, N, D, F,
                     stride_xt, stride_xd, stride_we, stride_wn, stride_wk, stride_be, stride_bn, TOP_K, GATED,
                     INTERLEAVED, SCALE, ACT, PIECES, READ, SWAP, SPLIT, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, EVEN_N,
                     EVEN_K, PRECISION)
    elif pid < programs:
        _up_tile(pid, count, tiles_n, x, w, w_up, bias, h, a, weights, slot_of_row, offsets, tiles, capacity, N, D, F,
                 stride_xt, stride_xd, stride_we, stride_wn, stride_wk, stride_be, stride_bn, TOP_K, GATED, INTERLEAVED,
                 SCALE, ACT, PIECES, READ, SWAP, SPLIT, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, EVEN_N, EVEN_K, PRECISION)


@triton.jit(do_not_specialize=["capacity", "N"])
def _up_sum(parts, bias, h, a, weights, slot_of_row, offsets, tiles, capacity, N, F, stride_be, stride_bn,
            GATED: tl.constexpr, INTERLEAVED: tl.constexpr, SCALE: tl.constexpr, ACT: tl.constexpr, SPLIT: tl.constexpr,
            BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """h and a of `_up` from its parts (SPLIT, N, 2F | F), added in order."""
    count = tl.load(tiles)
    pid = tl.program_id(0)
    if pid >= count * tl.cdiv(F, BLOCK_N):
        return
    e, _, row, live, pid_n = locate(pid, count, tl.cdiv(F, BLOCK_N), tiles, capacity, offsets, BLOCK_M, 1)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    keep = live[:, None] & (n < F)[None, :]
    row64 = row.to(tl.int64)
    at = parts + row64[:, None] * (2 * F if GATED else F) + n[None, :]
    g = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    u = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for _ in tl.static_range(SPLIT):
        g += tl.load(at, mask=keep, other=0.0)
        if GATED:
            u += tl.load(at + F, mask=keep, other=0.0)
        at += tl.cast(N, tl.int64) * (2 * F if GATED else F)
    scale = tl.full([BLOCK_M], 1.0, tl.float32)
    if SCALE:
        slot = tl.load(slot_of_row + row, mask=live, other=0)
        scale = tl.load(weights + slot, mask=live, other=0.0).to(tl.float32)
    b_at = None if bias is None else bias + e * stride_be
    _up_piece(g, u, n, row64, live, scale, b_at, stride_bn, h, a, F, GATED, INTERLEAVED, SCALE, ACT)


@triton.jit
def _rows_tile(pid, count, tiles_n, a, w, bias, out, offsets, tiles, capacity, N, WIDTH, INNER, stride_we, stride_wn,
               stride_wk, stride_be, stride_bn, READ_A: tl.constexpr, READ: tl.constexpr, SWAP: tl.constexpr,
               SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
               GROUP_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr):
    """Tile pid // SPLIT of `_rows`, of its sum every SPLIT-th step."""
    part = pid % SPLIT
    e, first, row, live, pid_n = locate(pid // SPLIT, count, tiles_n, tiles, capacity, offsets, BLOCK_M, GROUP_M)
    row64 = row.to(tl.int64)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = part * BLOCK_K + tl.arange(0, BLOCK_K)
    a_at = first if READ_A == "rows" else a + row64[:, None] * INNER + k[None, :]
    w_at = matrix_at(w, e, n, k, stride_we, stride_wn, stride_wk, READ)
    acc, _ = product(a, a_at, 1, live, w, w_at, None, w_at, stride_wk, pid_n, WIDTH, part, INNER, READ_A, READ, False,
                     SWAP, SPLIT, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, PRECISION)
    if bias is not None:
        b_at = bias + e * stride_be + n.to(tl.int64) * stride_bn
        biased = tl.where(part == 0, WIDTH, 0)  # once a row: with the first part
        acc += tl.load(b_at, mask=n < biased, other=0.0).to(tl.float32)[None, :]
    if SPLIT > 1:
        row64 += tl.cast(part, tl.int64) * N
    keep = live[:, None] & (n < WIDTH)[None, :]
    tl.store(out + row64[:, None] * WIDTH + n[None, :], acc.to(out.dtype.element_ty), mask=keep)


@triton.jit(do_not_specialize=["capacity", "N"])
def _rows(a, w, bias, out, offsets, tiles, capacity, N, WIDTH, INNER, stride_we, stride_wn, stride_wk, stride_be,
          stride_bn, READ_A: tl.constexpr, READ: tl.constexpr, SWAP: tl.constexpr, SPLIT: tl.constexpr,
          PERSISTENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
          GROUP_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr):
    """out (SPLIT, N, WIDTH) = a (N, INNER) · w[expert] (WIDTH, INNER by strides)ᵀ + bias, rows packed on both sides; of
    SPLIT > 1 parts of the inner sum each on its own.

    Read in bulk, a tile of `a` may end in rows of the next expert: their products are not stored.
    """
    tiles_n = tl.cdiv(WIDTH, BLOCK_N)
    count = tl.load(tiles)
    programs = count * tiles_n * SPLIT
    pid = tl.program_id(0)
    if PERSISTENT:
        for i in tl.range(pid, programs, tl.num_programs(0), flatten=True):
            _rows_tile(i, count, tiles_n, a, w, bias, out, offsets, tiles, capacity, N, WIDTH, INNER, stride_we,
                       stride_wn, stride_wk, stride_be, stride_bn, READ_A, READ, SWAP, SPLIT, BLOCK_M, BLOCK_N, BLOCK_K,
                       GROUP_M, EVEN_N, EVEN_K, PRECISION)
    elif pid < programs:
        _rows_tile(pid, count, tiles_n, a, w, bias, out, offsets, tiles, capacity, N, WIDTH, INNER, stride_we,
                   stride_wn, stride_wk, stride_be, stride_bn, READ_A, READ, SWAP, SPLIT, BLOCK_M, BLOCK_N, BLOCK_K,
                   GROUP_M, EVEN_N, EVEN_K, PRECISION)


@triton.jit(do_not_specialize=["N"])
def _combine(rows, row_of_slot, weights, out, N, D, K: tl.constexpr, SPLIT: tl.constexpr, WEIGHTED: tl.constexpr,
             BLOCK: tl.constexpr):
    """out[t] = Σ_k weight · rows[row_of_slot[t·K + k]] in slot order, in float32; slots without a row add nothing.

    rows (SPLIT, N, D): the parts of each row are added first, in order.
    """
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):  # unrolled: all rows are in flight at once, the sum stays in order
        row = tl.load(row_of_slot + t * K + k).to(tl.int64)
        columns = tl.where(row >= 0, D, 0)
        at = rows + row * D + d
        value = tl.load(at, mask=d < columns, other=0.0).to(tl.float32)
        for _ in tl.static_range(SPLIT - 1):
            at += tl.cast(N, tl.int64) * D
            value += tl.load(at, mask=d < columns, other=0.0)
        if WEIGHTED:  # a slot without a row adds zero whatever its weight
            value *= tl.where(row >= 0, tl.load(weights + t * K + k).to(tl.float32), 0.0)
        acc += value
    tl.store(out + t * D + d, acc.to(out.dtype.element_ty), mask=d < D)


def spread(config: TileConfig, bound: int, device: torch.device) -> dict[str, Any]:
    """How at most `bound` tiles are launched: a program each, or so many a multiprocessor when persistent."""
    programs = min(bound, config.persistent * multiprocessors(device)) if config.persistent else bound
    return {"grid": (programs,), "num_warps": config.num_warps, "num_stages": config.num_stages,
            "PERSISTENT": config.persistent > 0}


def blocks(config: TileConfig, columns: int, inner: int) -> dict[str, Any]:
    """The tile as constants of a kernel with `columns` output columns and a sum over `inner`."""
    return {"BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
            "SWAP": config.swap, "EVEN_N": columns % config.block_n == 0, "EVEN_K": inner % config.block_k == 0}


def up(x: Tensor, w_in: Tensor, b_in: Tensor | None, slot_of_row: Tensor, offsets: Tensor, tiles: Schedule,
       config: TileConfig, *, top_k: int, d_expert: int, activation: tuple[Any, ...], interleaved: bool,
       scale: Tensor | None, save: bool, precision: str) -> tuple[Tensor, Tensor | None]:
    """x (T, D), w_in (E, 2F | F, D) of any strides -> a (N, F) and, when `save`, h (N, 2F | F), both in row order.

    `scale` (T·K,): what multiplies the product before the bias (weights on the input). Rows without a slot hold
    anything.
    """
    N, width, D, F = slot_of_row.numel(), w_in.shape[1], x.shape[1], d_expert
    a, split = x.new_empty((N, F)), config.split_k
    h = x.new_empty((N, width)) if save else None
    halves = [w_in] if width == F else [w_in[:, i::2] if interleaved else w_in[:, i * F : (i + 1) * F] for i in (0, 1)]
    read, (gate, *more) = matrices(halves, config.block_n, config.block_k, config.tma)
    parts = torch.empty((split, N, width), dtype=torch.float32, device=x.device) if split > 1 else a
    bound = tiles.capacity * cdiv(F, config.block_n) * split
    epilogue: dict[str, Any] = {
        "bias": b_in, "weights": scale, "slot_of_row": slot_of_row, "offsets": offsets, "tiles": tiles.tiles,
        "capacity": tiles.capacity, "N": N, "F": F, "stride_be": 0 if b_in is None else b_in.stride(0),
        "stride_bn": 0 if b_in is None else b_in.stride(1), "GATED": width != F, "INTERLEAVED": interleaved,
        "SCALE": scale is not None, "ACT": activation, "SPLIT": split}
    launch(_up, **spread(config, bound, x.device), x=x, w=gate, w_up=more[0] if more else None, a=parts, D=D,
           h=h if split == 1 else None, stride_xt=x.stride(0), stride_xd=x.stride(1), stride_we=w_in.stride(0),
           stride_wn=halves[0].stride(1), stride_wk=w_in.stride(2), TOP_K=top_k, PIECES=config.pieces, READ=read,
           PRECISION=precision, **blocks(config, F, D), **epilogue)
    if split > 1:  # narrow tiles, so that these are many programs too
        launch(_up_sum, (tiles.capacity * cdiv(F, 16),), parts=parts, a=a, h=h, BLOCK_M=config.block_m, BLOCK_N=16,
               **epilogue)
    return a, h


def rows_matmul(a: Tensor, w: Tensor, bias: Tensor | None, offsets: Tensor, tiles: Schedule, config: TileConfig, *,
                precision: str) -> Tensor:
    """a (N, I) contiguous, w (E, O, I) of any strides, bias (E, O) -> (1, N, O): each row times its expert's matrix; in
    split_k > 1 parts of the inner sum (split_k, N, O), which are float32."""
    N, inner = a.shape
    width, split = w.shape[1], config.split_k
    out = torch.empty((split, N, width), dtype=a.dtype if split == 1 else torch.float32, device=a.device)
    read, (given,) = matrices([w], config.block_n, config.block_k, config.tma)
    packed = descriptor(a, (config.block_m, config.block_k)) if config.tma else None
    launch(_rows, **spread(config, tiles.capacity * cdiv(width, config.block_n) * split, a.device),
           a=a if packed is None else packed, w=given, bias=bias, out=out, offsets=offsets, tiles=tiles.tiles,
           capacity=tiles.capacity, N=N, WIDTH=width, INNER=inner, stride_we=w.stride(0), stride_wn=w.stride(1),
           stride_wk=w.stride(2), stride_be=0 if bias is None else bias.stride(0),
           stride_bn=0 if bias is None else bias.stride(1), READ_A="pointers" if packed is None else "rows",
           READ=read, SPLIT=split, **blocks(config, width, inner), PRECISION=precision)
    return out


def combine(rows: Tensor, row_of_slot: Tensor, weights: Tensor | None, num_tokens: int, dtype: torch.dtype) -> Tensor:
    """rows (parts, N, D), row_of_slot (N,), weights (N,) or None for ones -> (T, D): each token's rows, summed."""
    (split, N, D), T = rows.shape, num_tokens
    out = torch.empty((T, D), dtype=dtype, device=rows.device)
    block = min(2048, triton.next_power_of_2(D))
    launch(_combine, (T, cdiv(D, block)), num_warps=4 if block > 512 else 1, rows=rows, row_of_slot=row_of_slot,
           weights=weights, out=out, N=N, D=D, K=N // max(1, T), SPLIT=split, WEIGHTED=weights is not None, BLOCK=block)
    return out
