"""Small stand-ins of modules, on which a module's own code can be run in float64 without touching the module.

A stand-in shares the module's class, flags and children's classes, but has parameters of its own, of other sizes, no
hooks and no training noise. What the code computes on it is then compared with what moeffn would compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def stand_in(module: nn.Module, tensors: Mapping[str, Tensor], *, training: bool = False,
             replace: Callable[[str, nn.Module], nn.Module | None] = lambda name, child: None, prefix: str = "") -> Any:
    """A copy of the module tree with `tensors` (by qualified name) for parameters and buffers; those not named stay.

    `replace(qualified name, child)` may give another module for a child.
    """
    other = replace(prefix.removesuffix("."), module)
    if other is not None:
        return other
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__.update({k: v for k, v in module.__dict__.items() if k != "forward"})
    for hooks in _HOOKS:
        twin.__dict__[hooks] = type(module.__dict__.get(hooks, {}))()
    for kind in ("_parameters", "_buffers"):
        held = {n: tensors.get(prefix + n, t) for n, t in module.__dict__[kind].items()}
        twin.__dict__[kind] = {n: nn.Parameter(t) if kind == "_parameters" and prefix + n in tensors else t
                               for n, t in held.items()}
    twin.__dict__["_modules"] = {
        n: child and stand_in(child, tensors, training=training, replace=replace, prefix=f"{prefix}{n}.")
        for n, child in module._modules.items()
    }
    twin.__dict__["training"] = training
    return twin


class Scale(nn.Module):
    """Stands for a dropout: multiplies by a constant, so that its place in the code shows."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def random(*shape: int, seed: int) -> Tensor:
    """Normal float64 values on the CPU, from a generator of their own."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
