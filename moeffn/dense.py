"""dense_ffn: the FFN that the mixture replaces, with two or three matrices; saves only x and the pre-activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from . import checks
from .backends.activation import activate, activate_backward, halves, joined
from .config import Activation, Layout
from .permutation import sum_dtype

Parts = Tensor | tuple[Tensor, Tensor]


def dense_ffn(x: Tensor, w_in: Parts, w_out: Tensor, *, b_in: Parts | None = None, b_out: Tensor | None = None,
              activation: Activation, layout: Layout = Layout.CONCAT) -> Tensor:
    """act(x·w_inᵀ + b_in)·w_outᵀ + b_out, gated or not: x (…, D) -> (…, D_out).

    w_in (2F, D) for gated kinds in `layout`, or the pair gate (F, D), up (F, D) of separate parameters; (F, D) when not
    gated. w_out (D_out, F); b_in like w_in without D; b_out (D_out,). Any strides. Dtypes as in `moe_ffn`.
    Raises ValueError/TypeError naming the argument.
    """
    checks.tensor("x", x)
    checks.floating("x", x)
    weights = _parts("w_in", w_in, activation, 2)
    biases = () if b_in is None else _parts("b_in", b_in, activation, 1)
    checks.tensor("w_out", w_out, 2)
    checks.floating("w_out", w_out)
    rows = sum(w.shape[0] for w in weights)
    F = rows // 2 if activation.gated else rows
    D = x.shape[-1] if x.ndim else 0
    for i, w in enumerate(weights):
        checks.shape(f"w_in[{i}]", w, (w.shape[0], D), "(rows, D of x)")
    checks.shape("w_out", w_out, (w_out.shape[0], F), "(D, F of w_in)")
    if biases and len(biases) != len(weights):
        raise checks.bad("b_in", f"{len(weights)} tensors, as w_in has", len(biases))
    for i, (b, w) in enumerate(zip(biases, weights, strict=False)):
        checks.shape(f"b_in[{i}]", b, (w.shape[0],), f"(rows of w_in[{i}],)")
    if b_out is not None:
        checks.shape("b_out", b_out, (w_out.shape[0],), "(rows of w_out,)")
    params = [*weights, w_out, *biases, *(() if b_out is None else (b_out,))]
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        out_dtype = dtype = torch.get_autocast_dtype(kind)
    else:
        out_dtype, dtype = x.dtype, torch.promote_types(x.dtype, w_out.dtype)
    params = [p.to(dtype) for p in params]
    spec = (activation, layout, len(weights), len(biases) > 0, b_out is not None)
    y = _DenseFFN.apply(x.reshape(-1, D).to(dtype), spec, *params)
    return y.to(out_dtype).reshape(*x.shape[:-1], w_out.shape[0])


def _parts(name: str, value: Parts, activation: Activation, ndim: int) -> tuple[Tensor, ...]:
    parts = value if isinstance(value, tuple) else (value,)
    for part in parts:
        checks.tensor(name, part, ndim)
        checks.floating(name, part)
    if len(parts) == 2 and not activation.gated:
        raise checks.bad(name, "one tensor for an activation that is not gated", "a pair")
    if len(parts) > 2 or (len(parts) == 2 and parts[0].shape != parts[1].shape):
        raise checks.bad(name, "one tensor, or a pair (gate, up) of one shape", [tuple(p.shape) for p in parts])
    if len(parts) == 1 and activation.gated and parts[0].shape[0] % 2:
        raise checks.bad(name, "an even number 2F of rows for a gated activation", parts[0].shape[0])
    return parts


class _DenseFFN(torch.autograd.Function):
    """x (T, D), spec, parameters: 1 or 2 w_in, w_out, as many b_in or none, b_out or none."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        # Without named inputs: dynamo drops ctx where, counting *params as one, their number is one less than passed.
        x, spec, *params = inputs
        act, layout, n, has_b_in, has_b_out = spec
        w_in, w_out = params[:n], params[n]
        b_in = params[n + 1 : 2 * n + 1] if has_b_in else (None,) * n
        hidden = [linear(x, w, b) for w, b in zip(w_in, b_in, strict=True)]
        gate, up = hidden if n == 2 else halves(hidden[0], act, layout)
        ctx.spec = spec
        grads = ctx.needs_input_grad
        keep_x = any(grads[2 : 2 + n])
        ctx.save_for_backward(x if keep_x else None, *hidden, *w_in, w_out)
        return linear(activate(gate, up, act), w_out, params[-1] if has_b_out else None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        act, layout, n, has_b_in, has_b_out = ctx.spec
        x, *rest = ctx.saved_tensors
        hidden, w_in, w_out = rest[:n], rest[n : 2 * n], rest[2 * n]
        need = iter(ctx.needs_input_grad)
        need_x, _ = next(need), next(need)
        need_w_in = [next(need) for _ in range(n)]
        need_w_out = next(need)
        need_b_in = [next(need) for _ in range(n)] if has_b_in else [False] * n
        need_b_out = next(need) if has_b_out else False
        wide = sum_dtype(dy)
        gate, up = hidden if n == 2 else halves(hidden[0], act, layout)
        a, d_gate, d_up = activate_backward(gate.to(wide), None if up is None else up.to(wide),
                                            torch.mm(dy, w_out).to(wide), act)
        pieces = [d_gate, d_up] if n == 2 else [joined(d_gate, d_up, layout)]
        d_hidden = [p.to(dy.dtype) for p in pieces if p is not None]
        dx = None
        if need_x:
            dx = torch.mm(d_hidden[0], w_in[0])
            if n == 2:
                dx += torch.mm(d_hidden[1], w_in[1])
        grads = [torch.mm(d.t(), x) if needed else None for d, needed in zip(d_hidden, need_w_in, strict=True)]
        grads.append(torch.mm(dy.t(), a.to(dy.dtype)) if need_w_out else None)
        if has_b_in:
            grads += [p.sum(0).to(dy.dtype) if p is not None and needed else None
                      for p, needed in zip(pieces, need_b_in, strict=True)]
        if has_b_out:
            grads.append(dy.to(wide).sum(0).to(dy.dtype) if need_b_out else None)
        return dx, None, *grads
