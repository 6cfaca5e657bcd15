"""Gated and plain activations in torch, forward and backward: what the torch backend and dense FFNs share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..config import Activation, Layout
from ..permutation import sum_dtype


def halves(h: Tensor, act: Activation, layout: Layout) -> tuple[Tensor, Tensor | None]:
    """Gate and up views of a pre-activation (…, 2F | F); up is None when the activation is not gated."""
    if not act.gated:
        return h, None
    if layout is Layout.INTERLEAVED:
        return h[..., 0::2], h[..., 1::2]
    F = h.shape[-1] // 2
    return h[..., :F], h[..., F:]


def activate(gate: Tensor, up: Tensor | None, act: Activation) -> Tensor:
    """Pre-activations (…, F), up None when not gated -> (…, F) in their dtype; clamps and soft caps in float32."""
    if up is None:
        return _unary(gate, act)
    if act.limit is None and act.alpha == 1.0 and act.kind != "relu2" and not (act.softcap_gate or act.softcap_up):
        value = _unary(gate, act)  # torch's own are float32 inside
        up = up + act.up_offset if act.up_offset else up
        return value * up if value is gate or torch.is_grad_enabled() else value.mul_(up)
    wide, dtype = sum_dtype(gate), gate.dtype
    gate, up = gate.to(wide), up.to(wide)
    if act.softcap_gate or act.softcap_up:
        gate = _softcap(gate, act.softcap_gate) * torch.sigmoid(gate)
        return (gate * _softcap(up, act.softcap_up)).to(dtype)
    if act.limit is not None:
        up = up.clamp(-act.limit, act.limit)
        if not act.limit_after:
            gate = gate.clamp(max=act.limit)
    gate = _unary(gate, act)
    if act.limit_after:
        gate = gate.clamp(max=act.limit)
    return (gate * (up + act.up_offset) if act.up_offset else gate * up).to(dtype)


def activate_backward(gate: Tensor, up: Tensor | None, da: Tensor, act: Activation
                      ) -> tuple[Tensor, Tensor, Tensor | None]:
    """gate, up, da (n, F), all wide -> the activation (n, F) recomputed, d_gate and d_up (None when not gated)."""
    if up is None:
        value, slope = _unary_with_slope(gate, act)
        return value, da * slope, None
    if act.softcap_gate or act.softcap_up:
        cg, cu = _softcap(gate, act.softcap_gate), _softcap(up, act.softcap_up)
        s = torch.sigmoid(gate)
        value, slope = cg * s, _softcap_slope(cg, act.softcap_gate) * s + cg * s * (1 - s)
        return value * cu, da * slope * cu, da * value * _softcap_slope(cu, act.softcap_up)
    up_in, gate_in = up, gate
    if act.limit is not None:
        up = up.clamp(-act.limit, act.limit)
        if not act.limit_after:
            gate = gate.clamp(max=act.limit)
    value, slope = _unary_with_slope(gate, act)
    if act.limit is not None:
        # torch's clamp passes the gradient on the boundary itself
        slope = torch.where((value if act.limit_after else gate_in) <= act.limit, slope, 0.0)
        value = value.clamp(max=act.limit) if act.limit_after else value
    up = up + act.up_offset if act.up_offset else up
    d_up = da * value
    if act.limit is not None:
        d_up = torch.where(up_in.abs() <= act.limit, d_up, 0.0)
    return value * up, da * slope * up, d_up


def joined(d_gate: Tensor, d_up: Tensor | None, layout: Layout) -> Tensor:
    """d_gate, d_up (n, F) -> (n, 2F | F) in the column order of the pre-activation."""
    if d_up is None:
        return d_gate
    if layout is Layout.INTERLEAVED:
        return torch.stack((d_gate, d_up), -1).flatten(-2)
    return torch.cat((d_gate, d_up), -1)


def _softcap(x: Tensor, cap: float | None) -> Tensor:
    return x if cap is None else cap * torch.tanh(x / cap)


def _softcap_slope(capped: Tensor, cap: float | None) -> Tensor | float:
    return 1.0 if cap is None else 1 - (capped / cap).square()


def _unary(x: Tensor, act: Activation) -> Tensor:
    match act.kind:
        case "silu":
            return torch.nn.functional.silu(x) if act.alpha == 1.0 else x * torch.sigmoid(act.alpha * x)
        case "gelu":
            return torch.nn.functional.gelu(x)
        case "gelu_tanh":
            return torch.nn.functional.gelu(x, approximate="tanh")
        case "relu":
            return torch.relu(x)
        case "relu2":
            return torch.relu(x).square()
        case "sigmoid":
            return torch.sigmoid(x)
    return x


def _unary_with_slope(x: Tensor, act: Activation) -> tuple[Tensor, Tensor]:
    """The activation and its derivative at x."""
    y = _unary(x, act)
    match act.kind:
        case "silu":
            s = torch.sigmoid(act.alpha * x)
            return y, s + act.alpha * y * (1 - s)
        case "gelu":
            cdf = 0.5 * (1 + torch.erf(x * math.sqrt(0.5)))
            return y, cdf + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        case "gelu_tanh":
            c = math.sqrt(2 / math.pi)
            t = torch.tanh(c * (x + 0.044715 * x * x * x))
            return y, 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * c * (1 + 3 * 0.044715 * x * x)
        case "relu":
            return y, (x > 0).to(x.dtype)
        case "relu2":
            return y, 2 * torch.relu(x)
        case "sigmoid":
            return y, y * (1 - y)
    return y, torch.ones_like(x)
