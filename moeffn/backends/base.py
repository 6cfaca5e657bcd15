"""The protocol between `functional` and the backends: raw tensors and a Plan in, raw tensors out, no autograd."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .. import checks
from ..types import ExpertWeights, Plan


@dataclass(frozen=True)
class Needs:
    """Which gradients a backward must produce; the others must cost nothing."""

    x: bool = True
    weights: bool = True
    w_in: bool = True
    w_out: bool = True
    b_in: bool = True
    b_out: bool = True


@dataclass(frozen=True)
class Grads:
    """Gradients asked for in `Needs`, None otherwise; each in the dtype of what it is the gradient of.

    As the argument `into` of `Backend.backward`: contiguous buffers of the same shapes, in the parameter's dtype or
    float32, to which w_* and b_* gradients are added in place; those come back as None.
    """

    x: Tensor | None = None
    weights: Tensor | None = None
    w_in: Tensor | None = None
    w_out: Tensor | None = None
    b_in: Tensor | None = None
    b_out: Tensor | None = None


class Backend(Protocol):
    """One way to run the experts. `x` and `dy` are (T, D) of one floating dtype, of any strides; the expert weights may
    have another dtype than x and any strides; sums are kept in float32 (float64 for float64 inputs).

    Rows of the expert-sorted buffer follow `Plan`; T*K = N slots, and slot s belongs to token s // K.
    """

    name: str

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """None when the backend can run on this device and dtype, else the reason in a few words."""

    def plan(self, experts: Tensor, num_experts: int) -> Plan:
        """experts (T, K) int32 -> Plan. Ids below 0 or from num_experts on are dropped."""

    def forward(self, x: Tensor, plan: Plan, weights: Tensor, experts: ExpertWeights, *, apply_to: str, save: bool
                ) -> tuple[Tensor, Tensor | None]:
        """-> y (T, D) in x.dtype and, when `save`, the pre-activations h (N, 2F | F) in x.dtype, in row order with
        the columns in the order of w_in's rows (rows from offsets[E] on hold anything)."""

    def backward(self, dy: Tensor, x: Tensor | None, h: Tensor, plan: Plan, weights: Tensor, experts: ExpertWeights, *,
                 apply_to: str, needs: Needs, into: Grads | None = None) -> Grads:
        """Gradients of `forward` from what it saved. x is None when neither w_in's gradient nor apply_to="input" asks
        for it. Experts without rows get gradients of exactly zero."""

LATEST = {"backend": "none"}  # name of the backend that ran the latest forward or backward in this process


def differentiated(*tensors: Tensor) -> bool:
    """Whether one of them requires a gradient, at any level of torch.func's transforms: a batched tensor does not tell.
    NotImplementedError where torch.func.grad asks for it, which takes no registered operator."""
    needs = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return needs
    functorch = torch._C._functorch
    inner = [t for t in tensors if functorch.is_functorch_wrapped_tensor(t)]
    while inner and torch.is_grad_enabled():
        inner = [functorch.get_unwrapped(t) for t in inner if functorch.is_functorch_wrapped_tensor(t)]
        needs |= any(t.requires_grad for t in inner)
    if needs and any(level.key() == functorch.TransformType.Grad for level in functorch.get_interpreter_stack()):
        raise checks.only_reference("runs under torch.func.grad")
    return needs


def plain_inference(*tensors: Tensor) -> bool:
    """True where a registered operator would add nothing: ordinary tensors, nothing to differentiate or trace."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() or torch.jit.is_tracing():
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    if any(type(t) not in (Tensor, torch.nn.Parameter) or t.device.type == "meta" for t in tensors):
        return False
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in tensors))
