"""Backward: from dy to the gradients of pre-activations, weights, biases and router weights.

Per row r of expert e and token t, with s the router weight (apply_to "output"; 1 for "input"):

    dA' = dy_t · w_out[e]         summed unscaled, dy rows gathered in the load
    ds  = <dA', A> + <dy_t, b_out[e]>        equal to <dy_t, y_r>: neither y nor dy_r is ever stored
    dH  = act'(H) · s · dA',   A' = s · A    one epilogue, from H alone
    dw_out[e] = Σ_r dy_t ⊗ A'_r,  dw_in[e] = Σ_r dH_r ⊗ x_t   sums over gathered rows
    dx_r = dH_r · w_in[e]                     packed, then summed per token by `forward.combine`
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import gated_slopes, unary_slope
from .forward import blocks, locate, place, spread
from .launch import cdiv, launch, next_power_of_2
from .metadata import Schedule
from .operands import load, matrices, matrix_at, product
from .tiles import TileConfig


@triton.jit
def _piece(da, n, row64, live, s, h, dh, act, F, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, ACT: tl.constexpr):
    """The dH epilogue on some columns n of dA': stores dH and A', returns the row sums of dA' · A."""
    keep = live[:, None] & (n < F)[None, :]
    if GATED:
        at = row64[:, None] * (2 * F) + (n * 2 if INTERLEAVED else n)[None, :]
        up_at = at + (1 if INTERLEAVED else F)
        g = tl.load(h + at, mask=keep, other=0.0).to(tl.float32)
        u = tl.load(h + up_at, mask=keep, other=0.0).to(tl.float32)
        a, dg, du = gated_slopes(g, u, ACT)
        tl.store(dh + up_at, (du * (da * s[:, None])).to(dh.dtype.element_ty), mask=keep)
    else:
        at = row64[:, None] * F + n[None, :]
        a, dg = unary_slope(tl.load(h + at, mask=keep, other=0.0).to(tl.float32), ACT)
    tl.store(dh + at, (dg * (da * s[:, None])).to(dh.dtype.element_ty), mask=keep)
    if act is not None:
        tl.store(act + row64[:, None] * F + n[None, :], (a * s[:, None]).to(act.dtype.element_ty), mask=keep)
    return tl.sum(tl.where(keep, da * a, 0.0), 1)


@triton.jit
def _dh_tile(pid, count, tiles_n, dy, w, h, dh, act, dots, weights, slot_of_row, offsets, tiles, capacity, N, D, F,
             stride_yt, stride_yd, stride_we, stride_wn, stride_wk, TOP_K: tl.constexpr, GATED: tl.constexpr,
             INTERLEAVED: tl.constexpr, SCALE: tl.constexpr, PIECES: tl.constexpr, ACT: tl.constexpr,
             READ: tl.constexpr, SWAP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
             BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
             PRECISION: tl.constexpr):
    """Tile pid of `_dh`."""
    e, _, row, live, pid_n = locate(pid, count, tiles_n, tiles, capacity, offsets, BLOCK_M, GROUP_M)
    slot = tl.load(slot_of_row + row, mask=live, other=0)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    y_at = dy + (slot // TOP_K).to(tl.int64)[:, None] * stride_yt + k.to(tl.int64)[None, :] * stride_yd
    w_at = matrix_at(w, e, n, k, stride_we, stride_wn, stride_wk, READ)
    acc, _ = product(dy, y_at, stride_yd, live, w, w_at, None, w_at, stride_wk, pid_n, F, 0, D, "pointers", READ, True,
                     SWAP, 1, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_N, EVEN_K, PRECISION)
    s = tl.full([BLOCK_M], 1.0, tl.float32)
    if SCALE:
        s = tl.load(weights + slot, mask=live, other=0.0).to(tl.float32)
    row64 = row.to(tl.int64)
    # Whole, the epilogue spills hundreds of registers: it runs over column pieces of the accumulator.
    part: tl.constexpr = BLOCK_N // PIECES
    first = pid_n * BLOCK_N + tl.arange(0, part)
    if PIECES == 1:
        total = _piece(acc, first, row64, live, s, h, dh, act, F, GATED, INTERLEAVED, ACT)
    else:
        left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        if PIECES == 2:
            total = _piece(left, first, row64, live, s, h, dh, act, F, GATED, INTERLEAVED, ACT)
            total += _piece(right, first + part, row64, live, s, h, dh, act, F, GATED, INTERLEAVED, ACT)
        else:
            tl.static_assert(PIECES == 4)
            a0, a1 = tl.split(tl.permute(tl.reshape(left, (BLOCK_M, 2, part)), (0, 2, 1)))
            a2, a3 = tl.split(tl.permute(tl.reshape(right, (BLOCK_M, 2, part)), (0, 2, 1)))
            total = _piece(a0, first, row64, live, s, h, dh, act, F, GATED, INTERLEAVED, ACT)
            total += _piece(a1, first + part, row64, live, s, h, dh, act, F, GATED, INTERLEAVED, ACT)
            total += _piece(a2, first + 2 * part, row64, live, s, h, dh, act, F, GATED, INTERLEAVED, ACT)
            total += _piece(a3, first + 3 * part, row64, live, s, h, dh, act, F, GATED, INTERLEAVED, ACT)
    if dots is not None:
        tl.store(dots + pid_n.to(tl.int64) * N + row, total, mask=live)


@triton.jit(do_not_specialize=["capacity", "N"])
def _dh(dy, w, h, dh, act, dots, weights, slot_of_row, offsets, tiles, capacity, N, D, F, stride_yt, stride_yd,
        stride_we, stride_wn, stride_wk, TOP_K: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
        SCALE: tl.constexpr, PIECES: tl.constexpr, ACT: tl.constexpr, READ: tl.constexpr, SWAP: tl.constexpr,
        PERSISTENT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
        GROUP_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr):
    """dh, act = s·A and the partial sums dots (column tiles, N) of dA'·A; act and dots may be None."""
    tiles_n = tl.cdiv(F, BLOCK_N)
    count = tl.load(tiles)
    pid = tl.program_id(0)
    if PERSISTENT:
        for i in tl.range(pid, count * tiles_n, tl.num_programs(0), flatten=True):
            _dh_tile(i, count, tiles_n, dy, w, h, dh, act, dots, weights, slot_of_row, offsets, tiles, capacity, N, D,
                     F, stride_yt, stride_yd, stride_we, stride_wn, stride_wk, TOP_K, GATED, INTERLEAVED, SCALE, PIECES,
                     ACT, READ, SWAP, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, EVEN_N, EVEN_K, PRECISION)
    elif pid < count * tiles_n:
        _dh_tile(pid, count, tiles_n, dy, w, h, dh, act, dots, weights, slot_of_row, offsets, tiles, capacity, N, D, F,
                 stride_yt, stride_yd, stride_we, stride_wn, stride_wk, TOP_K, GATED, INTERLEAVED, SCALE, PIECES, ACT,
                 READ, SWAP, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, EVEN_N, EVEN_K, PRECISION)


@triton.jit
def _dw(left, right, out, weights, slot_of_row, offsets, M, WIDTH, stride_lr, stride_lm, stride_rr, stride_rn,
        TOP_K: tl.constexpr, GATHER_LEFT: tl.constexpr, GATHER_RIGHT: tl.constexpr, SCALE: tl.constexpr,
        ACCUMULATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
        GROUP_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_M: tl.constexpr, PRECISION: tl.constexpr):
    """out[e] (M, WIDTH) (+)= Σ over rows r of e: left[r] ⊗ right[r]; a gathered side is read at the row's token.

    An expert without rows gets zeros, or keeps what it has when accumulating.
    """
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(WIDTH, BLOCK_N)
    pid = tl.program_id(0)
    each = tiles_m * tiles_n
    e = pid // each
    pid_m, pid_n = place(pid % each, tiles_m, tiles_n, GROUP_M)
    start = tl.load(offsets + e)
    end = tl.load(offsets + e + 1)
    if ACCUMULATE and start == end:
        return
    m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_at = m.to(tl.int64)[:, None] * stride_lm
    n_at = n.to(tl.int64)[None, :] * stride_rn
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(start, end, BLOCK_K):
        row = first + k
        live = row < end
        slot = row
        if GATHER_LEFT or GATHER_RIGHT or SCALE:
            slot = tl.load(slot_of_row + row, mask=live, other=0)
        token = (slot // TOP_K).to(tl.int64)
        row64 = row.to(tl.int64)
        l_at = left + m_at + (token if GATHER_LEFT else row64)[None, :] * stride_lr
        r_at = right + n_at + (token if GATHER_RIGHT else row64)[:, None] * stride_rr
        lk = load(l_at, m < M, live, EVEN_M, False)
        rk = load(r_at, live, n < WIDTH, False, EVEN_N)
        if SCALE:
            scale = tl.load(weights + slot, mask=live, other=0.0).to(tl.float32)
            lk = (lk.to(tl.float32) * scale[None, :]).to(left.dtype.element_ty)
        acc = tl.dot(lk, rk, acc, input_precision=PRECISION)
    keep = (m < M)[:, None] & (n < WIDTH)[None, :]
    at = out + (e.to(tl.int64) * M + m)[:, None] * WIDTH + n[None, :]
    if ACCUMULATE:
        acc += tl.load(at, mask=keep, other=0.0).to(tl.float32)
    tl.store(at, acc.to(out.dtype.element_ty), mask=keep)


@triton.jit
def _column_sum(rows, out, weights, slot_of_row, offsets, WIDTH, stride_r, stride_n, TOP_K: tl.constexpr,
                GATHER: tl.constexpr, SCALE: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK_R: tl.constexpr,
                BLOCK_N: tl.constexpr):
    """out[e] (+)= Σ over rows of e: (weight ·) rows[row or its token], float32, rows in order."""
    e = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.load(offsets + e)
    end = tl.load(offsets + e + 1)
    acc = tl.zeros([BLOCK_N], tl.float32)
    for first in range(start, end, BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        live = row < end
        slot = tl.load(slot_of_row + row, mask=live, other=0)
        source = (slot // TOP_K if GATHER else row).to(tl.int64)
        at = rows + source[:, None] * stride_r + n.to(tl.int64)[None, :] * stride_n
        part = tl.load(at, mask=live[:, None] & (n < WIDTH)[None, :], other=0.0).to(tl.float32)
        if SCALE:
            part *= tl.load(weights + slot, mask=live, other=0.0).to(tl.float32)[:, None]
        acc += tl.sum(part, 0)
    at = out + e.to(tl.int64) * WIDTH + n
    if ACCUMULATE:
        acc += tl.load(at, mask=n < WIDTH, other=0.0).to(tl.float32)
    tl.store(at, acc.to(out.dtype.element_ty), mask=n < WIDTH)


@triton.jit(do_not_specialize=["N", "columns"])
def _weight_grad(dots, columns, token_rows, other, row_of_slot, offsets, out, N, D, E, stride_t, stride_d, stride_o,
                 stride_od, TOP_K: tl.constexpr, BY_EXPERT: tl.constexpr, E_PAD: tl.constexpr, SLOTS: tl.constexpr,
                 BLOCK: tl.constexpr):
    """out[slot] = Σ_j dots[j, row] + <token_rows[token], other[row or its expert]>, in order; 0 without a row."""
    slot = tl.program_id(0).to(tl.int64) * SLOTS + tl.arange(0, SLOTS)
    row = tl.load(row_of_slot + slot, mask=slot < N, other=-1)
    live = row >= 0
    total = tl.zeros([SLOTS], tl.float32)
    if dots is not None:
        at = dots + row.to(tl.int64)
        for _ in range(columns):
            total += tl.load(at, mask=live, other=0.0)
            at += tl.cast(N, tl.int64)
    if other is not None:
        source = row.to(tl.int64)
        if BY_EXPERT:
            # the expert of a row: how many experts end at or before it
            i = tl.arange(0, E_PAD)
            ends = tl.load(offsets + 1 + i, mask=i < E, other=2147483647)
            source = tl.sum((ends[None, :] <= row[:, None]).to(tl.int64), 1)
        left = token_rows + (slot // TOP_K)[:, None] * stride_t
        right = other + source[:, None] * stride_o
        acc = tl.zeros([SLOTS, BLOCK], tl.float32)
        for d0 in range(0, D, BLOCK):
            d = d0 + tl.arange(0, BLOCK)
            held = live[:, None] & (d < D)[None, :]
            lk = tl.load(left + d.to(tl.int64)[None, :] * stride_d, mask=held, other=0.0).to(tl.float32)
            acc += lk * tl.load(right + d.to(tl.int64)[None, :] * stride_od, mask=held, other=0.0).to(tl.float32)
        total += tl.sum(acc, 1)
    tl.store(out + slot, total.to(out.dtype.element_ty), mask=slot < N)


def hidden_grad(dy: Tensor, w_out: Tensor, h: Tensor, slot_of_row: Tensor, offsets: Tensor, tiles: Schedule,
                config: TileConfig, *, top_k: int, activation: tuple[Any, ...], interleaved: bool, scale: Tensor | None,
                want_act: bool, want_dots: bool, precision: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dy (T, D), w_out (E, D, F), h (N, 2F | F) -> dh like h, s·A (N, F) and partial dots (column tiles, N) float32."""
    N, D, F = slot_of_row.numel(), dy.shape[1], w_out.shape[2]
    dh = torch.empty_like(h)
    act = h.new_empty((N, F)) if want_act else None
    tiles_n = cdiv(F, config.block_n)
    dots = torch.empty((tiles_n, N), dtype=torch.float32, device=h.device) if want_dots else None
    read, (given,) = matrices([w_out.transpose(1, 2)], config.block_n, config.block_k, config.tma)
    launch(_dh, **spread(config, tiles.capacity * tiles_n, h.device), dy=dy, w=given, h=h, dh=dh, act=act, dots=dots,
           weights=scale, slot_of_row=slot_of_row, offsets=offsets, tiles=tiles.tiles, capacity=tiles.capacity, N=N,
           D=D, F=F, stride_yt=dy.stride(0), stride_yd=dy.stride(1), stride_we=w_out.stride(0),
           stride_wn=w_out.stride(2), stride_wk=w_out.stride(1), TOP_K=top_k, GATED=h.shape[1] != F,
           INTERLEAVED=interleaved, SCALE=scale is not None, PIECES=config.pieces, ACT=activation, READ=read,
           **blocks(config, F, D), PRECISION=precision)
    return dh, act, dots


def outer_sum(left: Tensor, right: Tensor, out: Tensor, slot_of_row: Tensor, offsets: Tensor, config: TileConfig, *,
              top_k: int, gather: str, scale: Tensor | None, accumulate: bool, precision: str) -> None:
    """out (E, M, W) contiguous (+)= Σ_r left[r] ⊗ right[r]. `gather` "left" or "right" names the operand (T, ·) that is
    read at each row's token; the other is (N, ·) in row order. `scale` (T·K,) multiplies each row's product."""
    E, M, width = out.shape
    size = blocks(config, width, 1)
    del size["EVEN_K"], size["SWAP"]
    launch(_dw, (E * cdiv(M, config.block_m) * cdiv(width, config.block_n),), num_warps=config.num_warps,
           num_stages=config.num_stages, left=left, right=right, out=out, weights=scale, slot_of_row=slot_of_row,
           offsets=offsets, M=M, WIDTH=width, stride_lr=left.stride(0), stride_lm=left.stride(1),
           stride_rr=right.stride(0), stride_rn=right.stride(1), TOP_K=top_k, GATHER_LEFT=gather == "left",
           GATHER_RIGHT=gather == "right", SCALE=scale is not None, ACCUMULATE=accumulate, **size,
           EVEN_M=M % config.block_m == 0, PRECISION=precision)


def column_sum(rows: Tensor, out: Tensor, slot_of_row: Tensor, offsets: Tensor, *, top_k: int, gather: bool,
               scale: Tensor | None, accumulate: bool) -> None:
    """out (E, W) (+)= the sum of each expert's rows; rows (N, W) in row order, or (T, W) read at the token."""
    E, width = out.shape
    block = min(256, next_power_of_2(width, 16))
    launch(_column_sum, (E, cdiv(width, block)), rows=rows, out=out, weights=scale, slot_of_row=slot_of_row,
           offsets=offsets, WIDTH=width, stride_r=rows.stride(0), stride_n=rows.stride(1), TOP_K=top_k, GATHER=gather,
           SCALE=scale is not None, ACCUMULATE=accumulate, BLOCK_R=16, BLOCK_N=block)


def weight_grad(out: Tensor, row_of_slot: Tensor, offsets: Tensor, *, top_k: int, dots: Tensor | None = None,
                token_rows: Tensor | None = None, other: Tensor | None = None, by_expert: bool = False) -> None:
    """out (T, K): gradient of the router's weights, from partial sums `dots` (J, N) and, when given, the product of
    token_rows (T, D) with `other`: (E, D) of the row's expert when `by_expert`, else (N, D) of the row."""
    N, E = row_of_slot.numel(), offsets.numel() - 1
    D = 0 if token_rows is None else token_rows.shape[1]
    strides = [0, 0, 0, 0] if token_rows is None or other is None else [*token_rows.stride(), *other.stride()]
    slots = 256 if other is None else 4
    launch(_weight_grad, (cdiv(N, slots),), dots=dots, columns=0 if dots is None else dots.shape[0],
           token_rows=token_rows, other=other, row_of_slot=row_of_slot, offsets=offsets, out=out, N=N, D=D, E=E,
           stride_t=strides[0], stride_d=strides[1], stride_o=strides[2], stride_od=strides[3], TOP_K=top_k,
           BY_EXPERT=by_expert, E_PAD=next_power_of_2(E, 16), SLOTS=slots, BLOCK=min(256, next_power_of_2(D, 16)))
