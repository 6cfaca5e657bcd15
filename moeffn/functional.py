"""moe_ffn and expert_ffn: argument checks, dtype rules, and the registered operators with their gradients.

Strata: public function (here) -> registered operator `moeffn::forward` / `moeffn::backward` (here) -> backend.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from . import backends, checks, reference
from .accounting import flop_formulas
from .backends import Grads, Needs
from .backends.base import LATEST
from .backends.native import plain_moe
from .config import Activation, Layout
from .dense import dense_ffn
from .types import ExpertWeights, Plan, Routing

__all__ = ["dense_ffn", "expert_ffn", "last_backend", "moe_ffn"]


def last_backend() -> str:
    """Name of the backend that ran the latest forward or backward in this process; "none" before the first."""
    return LATEST["backend"]


def moe_ffn(x: Tensor, routing: Routing, weights: ExpertWeights, *, backend: str = "auto",
            grad_buffers: Grads | None = None) -> Tensor:
    """The mixture: x (…, D), T tokens -> (…, D), Σ_k weights[t, k] · expert_{experts[t, k]}(x_t).

    Slots with id -1 (or >= E) contribute nothing. Saves only x, the pre-activations and the routing for backward.
    Output dtype: the autocast dtype inside `torch.autocast`, else x's; x and weights of different dtypes are computed
    in the wider one. `grad_buffers` (w_in, w_out, b_in, b_out): contiguous buffers, in the parameter's dtype or
    float32, to which parameter gradients are added in place of being returned.

    Raises ValueError/TypeError for shapes, dtypes or devices that do not fit, or a backend that cannot run.
    Reference: `moeffn.reference.moe_ffn`.
    """
    if grad_buffers is None and type(weights) is ExpertWeights and not is_dynamo_compiling():
        y = plain_moe(x, routing, weights, backend)
        if y is not None:
            return y
    checks.tensor("x", x)
    checks.instance("routing", routing, Routing)
    checks.instance("weights", weights, ExpertWeights)
    D = weights.d_model
    if x.ndim < 1 or x.shape[-1] != D:
        raise checks.bad("x", f"last dimension D = {D} (that of weights.w_in)", f"shape {tuple(x.shape)}")
    flat = x.reshape(-1, D)
    if routing.num_tokens != flat.shape[0]:
        raise checks.bad("routing.experts", f"T = {flat.shape[0]} tokens (those of x)", f"T = {routing.num_tokens}")
    checks.same_device("routing.experts", routing.experts, x.device, "x")
    _check_common(x, weights, grad_buffers)
    out_dtype, flat = _compute_dtype(flat, weights)
    name = backends.resolve(backend, flat.device, flat.dtype)
    if name == "reference":
        return _reference(reference.moe_ffn, grad_buffers, x.to(flat.dtype), routing, weights).to(out_dtype)
    y = _run(flat, routing, weights, name, grad_buffers)
    if routing.identity_weights is not None:
        y = (y + routing.identity_weights[:, None].to(y.dtype) * flat).to(y.dtype)
    return y.to(out_dtype).reshape(x.shape)


def moe_with_shared(x: Tensor, routing: Routing, weights: ExpertWeights, shared: ExpertWeights, gate: Tensor | None, *,
                    backend: str = "auto") -> Tensor | None:
    """Routed experts plus a shared one (E = 1; `gate` (T,) scales it), x (T, D) -> (T, D), in one call of the backend.

    None where the backend has no such call or a gradient, a trace or another dtype is asked for; never an error: what
    is wrong with the arguments is for `moe_ffn` to say.
    """
    tensors = (x, routing.weights, *(t for ew in (weights, shared) for _, t in ew.named_tensors()))
    if not (backends.plain_inference(*tensors) and routing.identity_weights is None and x.shape[-1] == weights.d_model
            and routing.num_tokens == x.shape[0] and x.device == weights.w_in.device
            and x.dtype == weights.w_in.dtype == shared.w_in.dtype and _compute_dtype(x, weights)[0] == x.dtype):
        return None
    name = backends.resolve(backend, x.device, x.dtype)
    impl = backends.get(name)
    if not hasattr(impl, "moe"):
        return None
    LATEST["backend"] = name
    return impl.moe(x, routing.experts, routing.weights, weights, apply_to=routing.apply_to, shared=shared,
                    shared_gate=gate)


def expert_ffn(rows: Tensor, offsets: Tensor, weights: ExpertWeights, *, row_weights: Tensor | None = None,
               backend: str = "auto") -> Tensor:
    """Experts on rows that are already grouped: rows (R, D), offsets (E+1,) int32 -> (R, D).

    Expert e owns rows offsets[e]:offsets[e+1]; rows from offsets[E] on come back as zeros and are never read.
    `row_weights` (R,) multiply the outputs. Dtypes, gradients and errors as in `moe_ffn`.
    Reference: `moeffn.reference.expert_ffn`.
    """
    checks.tensor("rows", rows, 2)
    checks.tensor("offsets", offsets, 1)
    checks.index_dtype("offsets", offsets)
    checks.instance("weights", weights, ExpertWeights)
    R, D = rows.shape
    if D != weights.d_model:
        raise checks.bad("rows", f"last dimension D = {weights.d_model}", f"shape {tuple(rows.shape)}")
    checks.shape("offsets", offsets, (weights.num_experts + 1,), "(E + 1,)")
    checks.same_device("offsets", offsets, rows.device, "rows")
    _check_common(rows, weights, None)
    if offsets.device.type == "cpu" and not torch.compiler.is_compiling():
        bounds = offsets.tolist()
        if bounds[0] != 0 or bounds != sorted(bounds) or bounds[-1] > R:
            raise checks.bad("offsets", f"values that rise from 0 to at most R = {R}", str(bounds)[:80])
    out_dtype, flat = _compute_dtype(rows, weights)
    if row_weights is None:
        row_weights = torch.ones(R, dtype=torch.float64 if flat.dtype == torch.float64 else torch.float32,
                                 device=rows.device)
    checks.tensor("row_weights", row_weights, 1)
    checks.floating("row_weights", row_weights)
    checks.shape("row_weights", row_weights, (R,), "(R,)")
    checks.same_device("row_weights", row_weights, rows.device, "rows")
    name = backends.resolve(backend, flat.device, flat.dtype)
    if name == "reference":
        return _reference(reference.expert_ffn, None, flat, offsets, weights, row_weights=row_weights).to(out_dtype)
    offsets = offsets.to(torch.int32)
    row = torch.arange(R, dtype=torch.int32, device=rows.device)
    row = torch.where(row < offsets[-1], row, -1)
    plan = Plan(offsets.diff(), offsets, row, row)
    return _run_planned(flat, plan, row_weights[:, None], weights, "output", name, None).to(out_dtype)


def _reference(function: Callable[..., Tensor], grad_buffers: Grads | None, *args: Any, **kwargs: Any) -> Tensor:
    if grad_buffers is not None:
        raise checks.bad("grad_buffers", "None with backend 'reference'", "Grads")
    LATEST["backend"] = "reference"
    return function(*args, **kwargs)


def _check_common(x: Tensor, weights: ExpertWeights, grad_buffers: Grads | None) -> None:
    checks.floating("x", x)
    if forward_ad._current_level >= 0:
        for t in (x, *(t for _, t in weights.named_tensors())):
            if forward_ad.unpack_dual(t).tangent is not None:
                raise NotImplementedError("moeffn has no forward-mode derivatives: a tangent came with an argument")
    checks.same_device("weights.w_in", weights.w_in, x.device, "x")
    if grad_buffers is None:
        return
    checks.instance("grad_buffers", grad_buffers, Grads)
    for name, param in weights.named_tensors():
        buffer = getattr(grad_buffers, name)
        if buffer is not None:
            checks.shape(f"grad_buffers.{name}", buffer, tuple(param.shape), f"that of weights.{name}")
            if buffer.dtype not in (param.dtype, torch.float32) or not buffer.is_contiguous():
                raise checks.bad(f"grad_buffers.{name}", f"contiguous {param.dtype} or float32", buffer.dtype)


def _compute_dtype(x: Tensor, weights: ExpertWeights) -> tuple[torch.dtype, Tensor]:
    """Output dtype, and x in the dtype of the computation."""
    kind = x.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        return dtype, x.to(dtype)
    return x.dtype, x.to(torch.promote_types(x.dtype, weights.w_in.dtype))


def _run(x: Tensor, routing: Routing, ew: ExpertWeights, backend: str, buffers: Grads | None) -> Tensor:
    if backends.plain_inference(x, routing.weights, *(t for _, t in ew.named_tensors())):
        impl = backends.get(backend)
        LATEST["backend"] = backend
        with torch._C._AutoDispatchBelowAutograd():  # what inference_mode saves per operator, for ordinary tensors
            if hasattr(impl, "moe"):
                return impl.moe(x, routing.experts, routing.weights, ew, apply_to=routing.apply_to)
            plan = impl.plan(routing.experts, ew.num_experts)
            return impl.forward(x, plan, routing.weights, ew, apply_to=routing.apply_to, save=False)[0]
    plan = Plan(*_plan_op(routing.experts, ew.num_experts, backend))
    return _run_planned(x, plan, routing.weights, ew, routing.apply_to, backend, buffers)


def _run_planned(x: Tensor, plan: Plan, weights: Tensor, ew: ExpertWeights, apply_to: str, backend: str,
                 buffers: Grads | None) -> Tensor:
    tensors = (x, weights, ew.w_in, ew.w_out, ew.b_in, ew.b_out)
    save = backends.differentiated(*(t for t in tensors if t is not None))
    held = [getattr(buffers, n) if buffers else None for n in ("w_in", "w_out", "b_in", "b_out")]
    y, _ = _forward_op(x, weights, plan.offsets, plan.slot_of_row, plan.row_of_slot, ew.w_in, ew.w_out, ew.b_in,
                       ew.b_out, *held, _encode(ew, apply_to), backend, save)
    return y


def _encode(ew: ExpertWeights, apply_to: str) -> str:
    """What the operators' string argument carries: activation, layout, apply_to. A string is a constant to dynamo."""
    return f"{ew.activation.key};{ew.layout.value};{apply_to}"


@functools.cache
def _decode(spec: str) -> tuple[Activation, Layout, str]:
    key, layout, apply_to = spec.split(";")
    return Activation.from_key(key), Layout(layout), apply_to


@torch.library.custom_op("moeffn::plan", mutates_args=())
def _plan_op(experts: Tensor, num_experts: int, backend: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan = backends.get(backend).plan(experts, num_experts)
    return plan.counts, plan.offsets, plan.slot_of_row, plan.row_of_slot


@_plan_op.register_fake
def _(experts: Tensor, num_experts: int, backend: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    N = experts.numel()
    return tuple(experts.new_empty((n,), dtype=torch.int32) for n in (num_experts, num_experts + 1, N, N))  # type: ignore[return-value]


@torch.library.custom_op("moeffn::forward", mutates_args=())
def _forward_op(x: Tensor, weights: Tensor, offsets: Tensor, slot_of_row: Tensor, row_of_slot: Tensor, w_in: Tensor,
                w_out: Tensor, b_in: Tensor | None, b_out: Tensor | None, g_w_in: Tensor | None,
                g_w_out: Tensor | None, g_b_in: Tensor | None, g_b_out: Tensor | None, spec: str, backend: str,
                save: bool) -> tuple[Tensor, Tensor]:
    """-> y (T, D), h (N, 2F | F) or empty. The g_* buffers are untouched here: they are what backward adds to."""
    LATEST["backend"] = backend
    act, layout, apply_to = _decode(spec)
    ew = ExpertWeights(w_in, w_out, b_in, b_out, act, layout)
    plan = Plan(offsets.diff(), offsets, slot_of_row, row_of_slot)
    y, h = backends.get(backend).forward(x, plan, weights, ew, apply_to=apply_to, save=save)
    return y, x.new_empty((0,)) if h is None else h


@_forward_op.register_fake
def _(x: Tensor, weights: Tensor, offsets: Tensor, slot_of_row: Tensor, row_of_slot: Tensor, w_in: Tensor,
      w_out: Tensor, b_in: Tensor | None, b_out: Tensor | None, g_w_in: Tensor | None, g_w_out: Tensor | None,
      g_b_in: Tensor | None, g_b_out: Tensor | None, spec: str, backend: str, save: bool) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape)
    return y, x.new_empty((slot_of_row.shape[0], w_in.shape[1]) if save else (0,))


@torch.library.custom_op("moeffn::backward", mutates_args=("g_w_in", "g_w_out", "g_b_in", "g_b_out"))
def _backward_op(dy: Tensor, x: Tensor | None, h: Tensor, weights: Tensor, offsets: Tensor, slot_of_row: Tensor,
                 row_of_slot: Tensor, w_in: Tensor, w_out: Tensor, b_in: Tensor | None, b_out: Tensor | None,
                 g_w_in: Tensor | None, g_w_out: Tensor | None, g_b_in: Tensor | None, g_b_out: Tensor | None,
                 spec: str, backend: str, needs: list[bool]
                 ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, weights, w_in, w_out, b_in, b_out; empty where not needed or added to a buffer."""
    LATEST["backend"] = backend
    act, layout, apply_to = _decode(spec)
    ew = ExpertWeights(w_in, w_out, b_in, b_out, act, layout)
    plan = Plan(offsets.diff(), offsets, slot_of_row, row_of_slot)
    into = Grads(None, None, g_w_in, g_w_out, g_b_in, g_b_out)
    grads = backends.get(backend).backward(dy, x, h, plan, weights, ew, apply_to=apply_to, needs=Needs(*needs),
                                           into=into)
    found = (grads.x, grads.weights, grads.w_in, grads.w_out, grads.b_in, grads.b_out)
    return tuple(dy.new_empty((0,)) if g is None else g for g in found)  # type: ignore[return-value]


@_backward_op.register_fake
def _(dy: Tensor, x: Tensor | None, h: Tensor, weights: Tensor, offsets: Tensor, slot_of_row: Tensor,
      row_of_slot: Tensor, w_in: Tensor, w_out: Tensor, b_in: Tensor | None, b_out: Tensor | None,
      g_w_in: Tensor | None, g_w_out: Tensor | None, g_b_in: Tensor | None, g_b_out: Tensor | None, spec: str,
      backend: str, needs: list[bool]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    likes = (dy, weights, w_in, w_out, b_in, b_out)
    buffers = (None, None, g_w_in, g_w_out, g_b_in, g_b_out)
    return tuple(  # type: ignore[return-value]
        dy.new_empty(t.shape, dtype=t.dtype) if n and t is not None and g is None else dy.new_empty((0,))
        for t, n, g in zip(likes, needs, buffers, strict=True))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    (x, weights, offsets, slot_of_row, row_of_slot, w_in, w_out, b_in, b_out, *buffers, spec, backend, _) = inputs
    grad = ctx.needs_input_grad
    ctx.needs = [grad[0], grad[1], grad[5], grad[6], grad[7] and b_in is not None, grad[8] and b_out is not None]
    ctx.spec, ctx.backend, ctx.buffers = spec, backend, buffers
    on_input = _decode(spec)[2] == "input"
    keep_x = ctx.needs[2] or (on_input and ctx.needs[1])
    ctx.save_for_backward(x if keep_x else None, output[1], weights, offsets, slot_of_row, row_of_slot, w_in, w_out,
                          b_in, b_out)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
    none: list[Tensor | None] = [None] * 16
    if dy is None or not any(ctx.needs):
        return tuple(none)
    if torch._C._are_functorch_transforms_active() or torch._C._functorch.is_legacy_batchedtensor(dy):
        raise checks.only_reference("runs a backward under torch.vmap")
    x, h, weights, offsets, slot_of_row, row_of_slot, w_in, w_out, b_in, b_out = ctx.saved_tensors
    grads = _backward_op(dy, x, h, weights, offsets, slot_of_row, row_of_slot, w_in, w_out, b_in, b_out,
                         *ctx.buffers, ctx.spec, ctx.backend, ctx.needs)
    held = [False, False, *(b is not None for b in ctx.buffers)]
    for position, grad, need, in_buffer in zip((0, 1, 5, 6, 7, 8), grads, ctx.needs, held, strict=True):
        if need and not in_buffer:
            none[position] = grad
    return tuple(none)


def _twice(ctx: Any, *grads: Tensor | None) -> None:
    raise checks.only_reference("has second derivatives")


_forward_op.register_autograd(_backward, setup_context=_setup_context)
_backward_op._backward_fn = _twice  # register_autograd takes no operator that writes to its arguments
flop_formulas.register(torch.ops.moeffn.forward, torch.ops.moeffn.backward)
