"""The backward of backend "native": allocates gradients, hands addresses to `moeffn._native.backward`."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..types import ExpertWeights, Plan
from .base import Grads, Needs
from .memory import buffer, gradient

CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_PARAMS = ("w_in", "w_out", "b_in", "b_out")


def run(native: ModuleType, described: Any, dy: Tensor, x: Tensor | None, h: Tensor, plan: Plan, weights: Tensor,
        experts: ExpertWeights, *, apply_to: str, needs: Needs, into: Grads | None) -> Grads:
    """As `Backend.backward`. `described` is the C++ view of `experts`, whose biases must be contiguous in their last
    dimension; `weights` (T, K) float32 contiguous."""
    T, D = dy.shape
    dy = _row_major(dy)
    x = dy if x is None else _row_major(x)
    h = h.contiguous()
    maps = [t.contiguous() for t in (plan.offsets, plan.slot_of_row, plan.row_of_slot)]
    dx = buffer((T, D), dy.dtype, dy.device) if needs.x else None
    dweights = torch.empty_like(weights) if needs.weights else None
    found: dict[str, Tensor] = {}
    targets: list[tuple[int, int, bool, bool] | None] = [None] * 4
    for i, name in enumerate(_PARAMS):
        param = getattr(experts, name)
        if param is None or not getattr(needs, name):
            continue
        given = getattr(into, name) if into else None
        target, zeroed = gradient(param) if given is None else (given, False)
        if given is None:
            found[name] = target
        targets[i] = (target.data_ptr(), CODES[target.dtype], given is not None, zeroed)
    native.backward(
        described, CODES[dy.dtype], T, weights.shape[1], (dy.data_ptr(), dy.stride(0)), (x.data_ptr(), x.stride(0)),
        h.data_ptr(), tuple(t.data_ptr() for t in maps), weights.data_ptr(), apply_to == "input",
        0 if dx is None else dx.data_ptr(), 0 if dweights is None else dweights.data_ptr(), tuple(targets))
    return Grads(x=dx, weights=dweights, **found)


def _row_major(t: Tensor) -> Tensor:
    return t if t.stride(1) == 1 or t.shape[1] == 1 else t.contiguous()
