"""A handful of slots (decoding): two kernels that stream the chosen experts' weights, with no sorting and no tiles.

One row per program leaves the matrix units idle, which costs nothing: at this size the time is that of reading weights.
What counts is how many bytes are on their way at once: by Little's law 4.8 TB/s at a latency of 1 µs need 36 KB for
each of an H200's 132 SMs. Asynchronous copies three steps ahead keep about 140 KB an SM in flight in the up-projection
and 96 KB in the down-projection for one token of Qwen3-30B-A3B (D 2048, F 768, K 8), whose programs are all resident
at once by their registers. Where few slots of narrow experts make too few programs, several share each inner sum of the
up-projection. That is reckoned, not measured: these kernels have not run on a GPU.

Forward only. Sums are float32 in a fixed order, slots of a token in slot order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import gated, unary
from .launch import cdiv, launch, next_power_of_2
from .tiles import Family, split_k

STEP = 256  # inner indices of the up-projection that are read at once


@triton.jit
def _hidden(g, u, scale, b_at, n, held, F, stride_bn, DTYPE: tl.constexpr, GATED: tl.constexpr,
            INTERLEAVED: tl.constexpr, ACT: tl.constexpr):
    """a at columns n of the gate's and the other sums g and u; scale and the expert's bias may be None."""
    if scale is not None:
        g *= scale
        u *= scale
    if b_at is not None:
        gate_row = n * 2 if INTERLEAVED else n
        up_row = n * 2 + 1 if INTERLEAVED else n + F
        g += tl.load(b_at + gate_row.to(tl.int64) * stride_bn, mask=held, other=0.0).to(tl.float32)
        if GATED:
            u += tl.load(b_at + up_row.to(tl.int64) * stride_bn, mask=held, other=0.0).to(tl.float32)
    # rounded where the large kernels round, so that a token's answer depends little on the batch it comes in
    g = g.to(DTYPE).to(tl.float32)
    if GATED:
        act = gated(g, u.to(DTYPE).to(tl.float32), ACT)
    else:
        act = unary(g, ACT)
    return act.to(DTYPE)


@triton.jit
def _slot_up(x, w, bias, a, experts, weights, E, D, F, stride_xt, stride_xd, stride_we, stride_wn, stride_wk, stride_be,
             stride_bn, TOP_K: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, SCALE: tl.constexpr,
             ACT: tl.constexpr, SPLIT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
             STAGES: tl.constexpr):
    """a[slot] (F,) = act(x[token] · w_in[expert]ᵀ (· weight) + bias) on BLOCK_N columns; nothing for a dropped slot.

    With SPLIT > 1 a (SPLIT, T·K, 2F | F) float32 gets parts of the product, gate and up side by side.
    """
    slot = tl.program_id(0).to(tl.int64)
    e = tl.load(experts + slot).to(tl.int64)
    if (e < 0) | (e >= E):
        return
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x + (slot // TOP_K) * stride_xt
    w_at = w + e * stride_we + (n * 2 if INTERLEAVED else n).to(tl.int64)[:, None] * stride_wn
    to_up = tl.cast(stride_wn, tl.int64) * (1 if INTERLEAVED else F)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    acc_u = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    part = tl.program_id(2)
    for k0 in tl.range(part * BLOCK_K, D, SPLIT * BLOCK_K, num_stages=STAGES):
        kk = (k0 + k).to(tl.int64)
        held = (n < F)[:, None] & (kk < D)[None, :]
        xk = tl.load(x_at + kk * stride_xd, mask=kk < D, other=0.0).to(tl.float32)[None, :]
        acc += xk * tl.load(w_at + kk[None, :] * stride_wk, mask=held, other=0.0).to(tl.float32)
        if GATED:
            acc_u += xk * tl.load(w_at + to_up + kk[None, :] * stride_wk, mask=held, other=0.0).to(tl.float32)
    g = tl.sum(acc, 1)
    u = tl.sum(acc_u, 1)
    if SPLIT > 1:
        at = a + (tl.cast(part, tl.int64) * tl.num_programs(0) + slot) * (2 * F if GATED else F) + n
        tl.store(at, g, mask=n < F)
        if GATED:
            tl.store(at + F, u, mask=n < F)
    else:
        scale = tl.load(weights + slot).to(tl.float32) if SCALE else None
        b_at = None if bias is None else bias + e * stride_be
        act = _hidden(g, u, scale, b_at, n, n < F, F, stride_bn, a.dtype.element_ty, GATED, INTERLEAVED, ACT)
        tl.store(a + slot * F + n, act, mask=n < F)


@triton.jit
def _added(parts, slot, k, held, bias, weights, e, F, stride_be, stride_bn, DTYPE: tl.constexpr, TOP_K: tl.constexpr,
           GATED: tl.constexpr, INTERLEAVED: tl.constexpr, SCALE: tl.constexpr, ACT: tl.constexpr, SPLIT: tl.constexpr):
    """a of some slots at columns k, from the parts that `_slot_up` left, added in order; zero where not `held`."""
    width = 2 * F if GATED else F
    at = parts + slot[:, None] * width + k[None, :]
    g = tl.zeros([slot.shape[0], k.shape[0]], tl.float32)
    u = tl.zeros([slot.shape[0], k.shape[0]], tl.float32)
    for _ in tl.static_range(SPLIT):
        g += tl.load(at, mask=held, other=0.0)
        if GATED:
            u += tl.load(at + F, mask=held, other=0.0)
        at += tl.num_programs(0).to(tl.int64) * TOP_K * width
    scale = tl.load(weights + slot[:, None], mask=held, other=0.0).to(tl.float32) if SCALE else None
    b_at = None if bias is None else bias + e[:, None] * stride_be
    act = _hidden(g, u, scale, b_at, k[None, :], held, F, stride_bn, DTYPE, GATED, INTERLEAVED, ACT)
    return tl.where(held, act, 0.0).to(DTYPE)


@triton.jit
def _token_down(a, w, bias, bias_in, y, experts, weights, E, D, F, stride_we, stride_wn, stride_wk, stride_be,
                stride_bn, stride_ie, stride_in, TOP_K: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr,
                SCALE: tl.constexpr, ACT: tl.constexpr, SPLIT: tl.constexpr, SLOTS: tl.constexpr, BLOCK_N: tl.constexpr,
                BLOCK_K: tl.constexpr, STAGES: tl.constexpr):
    """y[token] = Σ_k weight · (a[slot] · w_out[expert]ᵀ + bias) on BLOCK_N columns; the weight is in a unless SCALE.

    With SPLIT > 1 a holds the parts that `_slot_up` left: every program adds them again, which takes no other kernel.
    SLOTS slots of the token are read side by side and then summed in slot order: one after the other, too few bytes
    would be on their way to keep the memory busy.
    """
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    i = tl.arange(0, SLOTS)
    total = tl.zeros([BLOCK_N], tl.float32)
    for first in tl.static_range(0, TOP_K, SLOTS):
        slot = t * TOP_K + first + i
        e = tl.load(experts + slot, mask=first + i < TOP_K, other=-1).to(tl.int64)
        live = (e >= 0) & (e < E)
        e = tl.where(live, e, 0)
        held = live[:, None] & (n < D)[None, :]
        w_at = w + e[:, None] * stride_we + n.to(tl.int64)[None, :] * stride_wn
        acc = tl.zeros([SLOTS, BLOCK_N, BLOCK_K], tl.float32)
        for k0 in tl.range(0, F, BLOCK_K, num_stages=STAGES):
            k = k0 + tl.arange(0, BLOCK_K)
            here = live[:, None] & (k < F)[None, :]
            if SPLIT > 1:
                ak = _added(a, slot, k, here, bias_in, weights, e, F, stride_ie, stride_in, y.dtype.element_ty, TOP_K,
                            GATED, INTERLEAVED, not SCALE, ACT, SPLIT)
            else:
                ak = tl.load(a + slot[:, None] * F + k[None, :], mask=here, other=0.0)
            wk = tl.load(w_at[:, :, None] + k.to(tl.int64)[None, None, :] * stride_wk,
                         mask=held[:, :, None] & (k < F)[None, None, :], other=0.0)
            acc += ak.to(tl.float32)[:, None, :] * wk.to(tl.float32)
        part = tl.sum(acc, 2)
        if bias is not None:
            b_at = bias + e[:, None] * stride_be + n.to(tl.int64)[None, :] * stride_bn
            part += tl.load(b_at, mask=held, other=0.0).to(tl.float32)
        part = part.to(y.dtype.element_ty).to(tl.float32)
        if SCALE:
            part *= tl.load(weights + slot, mask=live, other=0.0).to(tl.float32)[:, None]
        part = tl.where(live[:, None], part, 0.0)
        for j in tl.static_range(SLOTS):
            total += tl.sum(tl.where((i == j)[:, None], part, 0.0), 0)
    tl.store(y + t * D + n, total.to(y.dtype.element_ty), mask=n < D)


def few_slots(x: Tensor, w_in: Tensor, w_out: Tensor, b_in: Tensor | None, b_out: Tensor | None, experts: Tensor,
              weights: Tensor, *, activation: tuple[Any, ...], interleaved: bool, on_input: bool, family: Family
              ) -> Tensor:
    """x (T, D), experts (T, K) int32, weights (T, K), w_in (E, 2F | F, D), w_out (E, D, F) of any strides -> y (T, D).

    Meant for T·K of a few dozen: every slot reads its expert's weights, however many share it.
    """
    T, D = x.shape
    E, width, _ = w_in.shape
    F, K = w_out.shape[2], experts.shape[1]
    block_n, block_k = 8 if T * K <= 16 else 16, min(STEP, next_power_of_2(D, 16))
    split = split_k(T * K * cdiv(F, block_n), cdiv(D, block_k), family)
    y = x.new_empty((T, D))
    a = torch.empty((split, T * K, width), dtype=torch.float32, device=x.device) if split > 1 else x.new_empty(T * K, F)
    stages = 4 if x.element_size() <= 2 else 2  # float32 steps are twice as large, and some devices have 99 KiB
    in_strides = (0, 0) if b_in is None else b_in.stride()
    both: dict[str, Any] = {
        "a": a, "experts": experts.reshape(-1).contiguous(), "weights": weights.reshape(-1).contiguous(), "E": E,
        "D": D, "F": F, "TOP_K": K, "GATED": width != F, "INTERLEAVED": interleaved, "ACT": activation, "SPLIT": split}
    launch(_slot_up, (T * K, cdiv(F, block_n), split), x=x, w=w_in, bias=b_in, stride_xt=x.stride(0),
           stride_xd=x.stride(1), stride_we=w_in.stride(0), stride_wn=w_in.stride(1), stride_wk=w_in.stride(2),
           stride_be=in_strides[0], stride_bn=in_strides[1], SCALE=on_input, BLOCK_N=block_n, BLOCK_K=block_k,
           STAGES=stages, **both)
    launch(_token_down, (T, cdiv(D, 8)), num_warps=8, w=w_out, bias=b_out, bias_in=b_in, y=y,
           stride_we=w_out.stride(0), stride_wn=w_out.stride(1), stride_wk=w_out.stride(2),
           stride_be=0 if b_out is None else b_out.stride(0), stride_bn=0 if b_out is None else b_out.stride(1),
           stride_ie=in_strides[0], stride_in=in_strides[1], SCALE=not on_input, SLOTS=min(8, next_power_of_2(K)),
           BLOCK_N=8, BLOCK_K=min(128, next_power_of_2(F, 16)), STAGES=stages if split == 1 else 2, **both)
    return y
