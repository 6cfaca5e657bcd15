"""The router in one kernel, logits to ids and weights, and its backward: see `moeffn.route` for what they compute.

RULE is a compile-time tuple (score, order, num_groups, topk_groups, group_reduce, group_fill, renormalize, eps_add,
floor, scale, logit_scale), with the scores "softmax", "sigmoid" and "sqrtsoftplus". A program takes a few whole rows,
one lane a class. With groups the lanes of a group are padded to a power of two, so that a group is one axis of a
reshaped row.

exp and the functions made of it are written out: the hardware's are off by more units the further the argument is from
zero, and differ by device, which would break ties differently.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import cdiv, launch, next_power_of_2

MAX_CLASSES, MAX_K = 4096, 64
NORM_FLOOR = 1e-30  # what weights are divided by at least, so that a row of zeros stays zero
_STAND_IN = tl.constexpr(1e30)  # +Inf logits are read as this, -Inf and NaN as its negative
_TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32: what softplus is at least
_LAST = tl.constexpr(0x7FFFFFFF)
_TAKEN = tl.constexpr(-(1 << 63))  # below every key


@triton.jit
def exp(x):
    """e^x to about one unit in the last place, subnormal results too (Cephes' expf); inf above 89, 0 below -104."""
    x = tl.minimum(tl.maximum(x, -104.0), 89.0)
    n = tl.floor(x * 1.44269504088896341 + 0.5)
    r = (x - n * 0.693359375) + n * 2.12194440e-4
    p = 1.9875691500e-4 * r + 1.3981999507e-3
    p = p * r + 8.3334519073e-3
    p = p * r + 4.1665795894e-2
    p = p * r + 1.6666665459e-1
    p = p * r + 5.0000001201e-1
    y = p * (r * r) + r + 1.0
    half = n.to(tl.int32) >> 1  # 2^n may be out of range where the result is not: two factors
    rest = n.to(tl.int32) - half
    return y * ((half + 127) << 23).to(tl.float32, bitcast=True) * ((rest + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def log1p(y):
    """log(1 + y) for y in [0, 1]: 2·atanh(y / (2 + y)) by its series."""
    s = tl.div_rn(y, 2.0 + y)
    t = s * s
    p = t * (1.0 / 17.0) + 1.0 / 15.0
    p = p * t + 1.0 / 13.0
    p = p * t + 1.0 / 11.0
    p = p * t + 1.0 / 9.0
    p = p * t + 1.0 / 7.0
    p = p * t + 1.0 / 5.0
    p = p * t + 1.0 / 3.0
    return 2.0 * (s + s * (p * t))


@triton.jit
def sigmoid(z):
    e = exp(-tl.abs(z))
    return tl.div_rn(tl.where(z >= 0, 1.0, e), 1.0 + e)


@triton.jit
def softplus(z):
    return tl.maximum(z, 0.0) + log1p(exp(-tl.abs(z)))


@triton.jit
def _bounded(raw, RULE: tl.constexpr):
    """Finite logits after the scale."""
    LOGIT_SCALE: tl.constexpr = RULE[10]
    z = tl.where(raw == raw, raw, -_STAND_IN)
    z = tl.where(z == float("inf"), _STAND_IN, tl.where(z == float("-inf"), -_STAND_IN, z))
    if LOGIT_SCALE != 1.0:
        z = tl.minimum(tl.maximum(z * LOGIT_SCALE, -_STAND_IN), _STAND_IN)
    return z


@triton.jit
def _unbounded(grad, raw, RULE: tl.constexpr):
    """The gradient of `_bounded`: none where the logit was not finite or was clamped."""
    LOGIT_SCALE: tl.constexpr = RULE[10]
    passes = tl.abs(raw) < float("inf")
    if LOGIT_SCALE != 1.0:
        passes = passes & (tl.abs(raw * LOGIT_SCALE) <= _STAND_IN)
        grad *= LOGIT_SCALE
    return tl.where(passes, grad, 0.0)


@triton.jit
def _key(value, i):
    """An integer that orders by value, falling, and of equal values by the lower index."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    ordered = bits ^ ((bits >> 31) & _LAST)
    return (ordered.to(tl.int64) << 32) + (i ^ _LAST).to(tl.int64)


@triton.jit
def _limit(ranked, real, RULE: tl.constexpr, ROWS: tl.constexpr, G_PAD: tl.constexpr, S_PAD: tl.constexpr):
    """ranked (ROWS, G_PAD·S_PAD) with the lanes outside the best groups filled."""
    GROUPS: tl.constexpr = RULE[2]
    TOPK_GROUPS: tl.constexpr = RULE[3]
    REDUCE: tl.constexpr = RULE[4]
    FILL: tl.constexpr = RULE[5]
    grouped = tl.reshape(tl.where(real[None, :], ranked, float("-inf")), (ROWS, G_PAD, S_PAD))
    worth = tl.max(grouped, 2)
    if REDUCE == "sum_top2":
        first = tl.argmax(grouped, 2)
        others = tl.where(tl.arange(0, S_PAD)[None, None, :] == first[:, :, None], float("-inf"), grouped)
        worth += tl.max(others, 2)
    g = tl.arange(0, G_PAD)[None, :]
    keys = tl.where(g < GROUPS, _key(worth, g), _TAKEN)
    keep = tl.zeros([ROWS, G_PAD], tl.int32)
    for _ in range(TOPK_GROUPS):
        best = keys == tl.max(keys, 1)[:, None]
        keep += best.to(tl.int32)
        keys = tl.where(best, _TAKEN, keys)
    fill = 0.0 if FILL == "zero" else float("-inf")
    return tl.reshape(tl.where(keep[:, :, None] > 0, grouped, fill), (ROWS, G_PAD * S_PAD))


@triton.jit
def _weigh(picked, real, top, total, RULE: tl.constexpr):
    """Scores (ROWS, K) of the chosen logits before renormalisation, 0 beyond K; top and total: the maximum and the sum
    of exponentials of the whole row (softmax before top-k)."""
    SCORE: tl.constexpr = RULE[0]
    ORDER: tl.constexpr = RULE[1]
    if SCORE == "softmax":
        if ORDER == "topk_score":
            picked = tl.where(real, picked, float("-inf"))
            top = tl.max(picked, 1)
            total = tl.sum(exp(picked - top[:, None]), 1)
        w = tl.div_rn(exp(picked - top[:, None]), total[:, None])
    elif SCORE == "sigmoid":
        w = sigmoid(picked)
    else:
        w = tl.sqrt_rn(tl.maximum(softplus(picked), _TINY))
    return tl.where(real, w, 0.0)


@triton.jit(do_not_specialize=["T"])
def _route(logits, bias, ids, weights, T, C: tl.constexpr, RULE: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr,
           G_PAD: tl.constexpr, S_PAD: tl.constexpr, ROWS: tl.constexpr):
    """ids, weights (T, K) of logits (T, C); bias (C,) or None is added to what is ranked."""
    SCORE: tl.constexpr = RULE[0]
    ORDER: tl.constexpr = RULE[1]
    GROUPS: tl.constexpr = RULE[2]
    RENORMALIZE: tl.constexpr = RULE[6]
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, G_PAD * S_PAD)
    size: tl.constexpr = C // GROUPS
    c = lane // S_PAD * size + lane % S_PAD
    real = (lane % S_PAD < size) & (lane // S_PAD < GROUPS)
    live = (t < T)[:, None]
    raw = tl.load(logits + t[:, None] * C + c[None, :], mask=live & real[None, :], other=0.0)
    z = tl.where(real[None, :], _bounded(raw, RULE), float("-inf"))
    top = tl.max(z, 1)
    total = top
    ranked = z
    if ORDER == "score_topk":
        if SCORE == "softmax":
            e = exp(z - top[:, None])
            total = tl.sum(e, 1)
            ranked = tl.div_rn(e, total[:, None])
        elif SCORE == "sigmoid":
            ranked = tl.div_rn(1.0, 1.0 + exp(-z))
        else:
            ranked = tl.sqrt_rn(tl.maximum(softplus(z), _TINY))
    if bias is not None:
        ranked += tl.load(bias + c, mask=real, other=0.0)[None, :]
    if GROUPS > 1:
        ranked = _limit(ranked, real, RULE, ROWS, G_PAD, S_PAD)
    keys = tl.where(real[None, :], _key(ranked, c[None, :]), _TAKEN)
    k = tl.arange(0, K_PAD)[None, :]
    chosen = tl.zeros([ROWS, K_PAD], tl.int32)
    for i in range(K):
        best = tl.max(keys, 1)[:, None]
        chosen = tl.where(k == i, (best & _LAST).to(tl.int32) ^ _LAST, chosen)
        keys = tl.where(keys == best, _TAKEN, keys)
    held = live & (k < K)
    picked = _bounded(tl.load(logits + t[:, None] * C + chosen, mask=held, other=0.0), RULE)
    w = _weigh(picked, k < K, top, total, RULE)
    if RENORMALIZE:
        w = tl.div_rn(w, tl.maximum(tl.sum(w, 1) + RULE[7], RULE[8])[:, None])
    at = t[:, None] * K + k
    tl.store(ids + at, chosen, mask=held)
    tl.store(weights + at, w * RULE[9], mask=held)


@triton.jit(do_not_specialize=["T"])
def _route_backward(dweights, logits, ids, dlogits, T, C: tl.constexpr, RULE: tl.constexpr, K: tl.constexpr,
                    K_PAD: tl.constexpr, C_PAD: tl.constexpr, ROWS: tl.constexpr):
    """dlogits (T, C), every element written, from dweights (T, K); the scores are computed again."""
    SCORE: tl.constexpr = RULE[0]
    ORDER: tl.constexpr = RULE[1]
    RENORMALIZE: tl.constexpr = RULE[6]
    DENSE: tl.constexpr = SCORE == "softmax" and ORDER == "score_topk"
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, C_PAD)[None, :]
    k = tl.arange(0, K_PAD)[None, :]
    live = t < T
    held = live[:, None] & (k < K)
    inside = live[:, None] & (c < C)
    chosen = tl.load(ids + t[:, None] * K + k, mask=held, other=0)
    picked_raw = tl.load(logits + t[:, None] * C + chosen, mask=held, other=0.0)
    picked = _bounded(picked_raw, RULE)
    top = tl.zeros([ROWS], tl.float32)
    total = top
    if DENSE:
        raw = tl.load(logits + t[:, None] * C + c, mask=inside, other=0.0)
        z = tl.where(c < C, _bounded(raw, RULE), float("-inf"))
        top = tl.max(z, 1)
        e = exp(z - top[:, None])
        total = tl.sum(e, 1)
    w = _weigh(picked, k < K, top, total, RULE)
    g = tl.load(dweights + t[:, None] * K + k, mask=held, other=0.0) * RULE[9]
    if RENORMALIZE:
        plain = tl.sum(w, 1) + RULE[7]
        norm = tl.maximum(plain, RULE[8])[:, None]
        common = tl.where(plain >= RULE[8], tl.sum(g * tl.div_rn(w, norm), 1), 0.0)
        g = tl.div_rn(g - common[:, None], norm)
    dot = tl.sum(g * w, 1)
    if SCORE == "softmax":
        if ORDER == "topk_score":
            g = _unbounded(w * (g - dot[:, None]), picked_raw, RULE)
    elif SCORE == "sigmoid":
        e_picked = exp(-tl.abs(picked))
        g = _unbounded(g * tl.div_rn(e_picked, (1.0 + e_picked) * (1.0 + e_picked)), picked_raw, RULE)
    else:
        slope = tl.where(softplus(picked) >= _TINY, tl.div_rn(sigmoid(picked), 2.0 * tl.maximum(w, _TINY)), 0.0)
        g = _unbounded(g * slope, picked_raw, RULE)
    spread = tl.zeros([ROWS, C_PAD], tl.float32)
    for i in range(K):
        to = tl.load(ids + t * K + i, mask=live, other=-1)
        spread = tl.where(c == to[:, None], tl.sum(tl.where(k == i, g, 0.0), 1)[:, None], spread)
    if DENSE:
        spread = _unbounded(tl.div_rn(e, total[:, None]) * (spread - dot[:, None]), raw, RULE)
    tl.store(dlogits + t[:, None] * C + c, spread, mask=inside)


def _shape(lanes: int) -> dict[str, int]:
    """Rows a program and warps: up to 512 lanes a row stays inside a warp, above it is spread over 4 or 8."""
    return {"ROWS": 1 if lanes > 512 else max(4, 512 // lanes), "num_warps": 8 if lanes > 2048 else 4}


def route(logits: Tensor, bias: Tensor | None, rule: tuple[Any, ...], top_k: int) -> tuple[Tensor, Tensor]:
    """logits (T, C) float32 contiguous, bias (C,) float32 or None -> ids (T, K) int32, weights (T, K) float32."""
    T, C = logits.shape
    ids = torch.empty((T, top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((T, top_k), dtype=torch.float32, device=logits.device)
    g_pad, s_pad = next_power_of_2(rule[2]), next_power_of_2(C // rule[2])
    shape = _shape(g_pad * s_pad)
    launch(_route, (cdiv(T, shape["ROWS"]),), logits=logits, bias=bias, ids=ids, weights=weights, T=T, C=C, RULE=rule,
           K=top_k, K_PAD=next_power_of_2(top_k), G_PAD=g_pad, S_PAD=s_pad, **shape)
    return ids, weights


def route_backward(dweights: Tensor, logits: Tensor, ids: Tensor, rule: tuple[Any, ...]) -> Tensor:
    """dweights (T, K), logits (T, C), ids (T, K) as `route` gave them, all contiguous -> dlogits (T, C) float32."""
    T, C = logits.shape
    top_k = ids.shape[1]
    dlogits = torch.empty_like(logits)
    c_pad = next_power_of_2(C)
    shape = _shape(c_pad)
    launch(_route_backward, (cdiv(T, shape["ROWS"]),), dweights=dweights, logits=logits, ids=ids, dlogits=dlogits, T=T,
           C=C, RULE=rule, K=top_k, K_PAD=next_power_of_2(top_k), C_PAD=c_pad, **shape)
    return dlogits
