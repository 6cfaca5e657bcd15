"""The gated and plain activations and their derivatives as jit functions on float32 tiles; see `config.Activation`.

ACT is a compile-time tuple (kind, alpha, limit, limit_after, up_offset, softcap_gate, softcap_up); 0 stands for no
limit and no cap.
"""

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """tanh to float32 accuracy: near zero a series, elsewhere from a sigmoid (which would cancel near zero)."""
    z = x * x
    series = x * (1.0 + z * (-1.0 / 3.0 + z * (2.0 / 15.0 + z * (-17.0 / 315.0 + z * (62.0 / 2835.0)))))
    return tl.where(tl.abs(x) < 0.25, series, 2.0 * tl.sigmoid(2.0 * x) - 1.0)


@triton.jit
def unary_slope(x, ACT: tl.constexpr):
    """act(x) and act'(x)."""
    KIND: tl.constexpr = ACT[0]
    ALPHA: tl.constexpr = ACT[1]
    if KIND == "silu":
        s = tl.sigmoid(ALPHA * x)
        y = x * s
        slope = s + ALPHA * y * (1.0 - s)
    elif KIND == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        y = x * cdf
        slope = cdf + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    elif KIND == "gelu_tanh":
        t = tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        y = 0.5 * x * (1.0 + t)
        slope = 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * 0.7978845608028654 * (1.0 + 0.134145 * x * x)
    elif KIND == "relu":
        y = tl.where(x > 0, x, 0.0 * x)
        slope = tl.where(x > 0, 1.0, 0.0)
    elif KIND == "relu2":
        y = tl.where(x > 0, x * x, 0.0 * x)
        slope = tl.where(x > 0, 2.0 * x, 0.0 * x)
    elif KIND == "sigmoid":
        y = tl.sigmoid(x)
        slope = y * (1.0 - y)
    else:
        tl.static_assert(KIND == "identity")
        y = x
        slope = 0.0 * x + 1.0
    return y, slope


@triton.jit
def unary(x, ACT: tl.constexpr):
    """act(x); the compiler drops the slope."""
    y, _ = unary_slope(x, ACT)
    return y


@triton.jit
def gated_slopes(g, u, ACT: tl.constexpr):
    """a = act(g) · (u + UP_OFFSET) with clamps or soft caps, ∂a/∂g and ∂a/∂u. A clamp passes the gradient on its
    boundary, as torch's does."""
    LIMIT: tl.constexpr = ACT[2]
    LIMIT_AFTER: tl.constexpr = ACT[3]
    UP_OFFSET: tl.constexpr = ACT[4]
    CAP_GATE: tl.constexpr = ACT[5]
    CAP_UP: tl.constexpr = ACT[6]
    if CAP_GATE > 0 or CAP_UP > 0:
        s = tl.sigmoid(g)
        capped = g if CAP_GATE == 0 else CAP_GATE * tanh(g / CAP_GATE)
        bend = 1.0 if CAP_GATE == 0 else 1.0 - (capped / CAP_GATE) * (capped / CAP_GATE)
        up = u if CAP_UP == 0 else CAP_UP * tanh(u / CAP_UP)
        up_bend = 1.0 if CAP_UP == 0 else 1.0 - (up / CAP_UP) * (up / CAP_UP)
        value = capped * s
        slope = bend * s + value * (1.0 - s)
        du = value * up_bend
    else:
        gate = g
        up = u
        if LIMIT > 0:
            up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
            if not LIMIT_AFTER:
                gate = tl.where(gate > LIMIT, LIMIT, gate)
        value, slope = unary_slope(gate, ACT)
        if LIMIT > 0:
            if LIMIT_AFTER:
                slope = tl.where(value > LIMIT, 0.0, slope)
                value = tl.where(value > LIMIT, LIMIT, value)
            else:
                slope = tl.where(g > LIMIT, 0.0, slope)
        up = up + UP_OFFSET
        du = value
        if LIMIT > 0:
            du = tl.where(tl.abs(u) > LIMIT, 0.0, value)
    return value * up, slope * up, du


@triton.jit
def gated(g, u, ACT: tl.constexpr):
    """a of `gated_slopes`; the compiler drops the slopes."""
    a, _, _ = gated_slopes(g, u, ACT)
    return a
