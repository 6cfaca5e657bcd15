"""Where the dense FFNs of a model sit, for `moeffn.upcycle`: what `replace_ffn` would replace, or has replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..upcycling import Dense, Site
from . import ffn
from .pairs import PairReading
from .swap import SwapState, is_swapped
from .transformers import _Planner


def dense_sites(model: nn.Module, names: Mapping[nn.Module, Sequence[str]]) -> list[Site]:
    """The sites among the modules in `names`; MoE blocks and FFNs that `dense_ffn` cannot compute are passed over."""
    planner = _Planner(model, "auto", moe=False, dense=True, on_unsupported="leave")
    planner.walk("", model)
    found: dict[nn.Module, SwapState] = {step.module: step.state for step in planner.steps}
    found |= {m: m._moeffn for m in names if is_swapped(m)}  # type: ignore[misc]
    sites = []
    for module in names:
        state = found.get(module)
        if state is None:
            continue
        if state.adapter == "dense" and not state.reading.residual:  # a mixture takes one argument
            sites.append(_whole(module, state.reading, names))
        elif state.adapter == "pair_out":
            sites.append(_pair(module, state.reading, names))
    return sites


def _whole(module: nn.Module, plan: ffn.DensePlan, names: Mapping[nn.Module, Sequence[str]]) -> Site:
    layers = [module.get_submodule(n) for n in plan.w_in]
    dense = _tensors(plan, layers, module.get_submodule(plan.w_out), module.training)
    tail = tuple(module.get_submodule(n) for n in plan.tail)
    return Site(tuple(names[module]), dense, tail=tail)


def _pair(down: nn.Module, reading: PairReading, names: Mapping[nn.Module, Sequence[str]]) -> Site:
    first = reading.intermediate
    layers = [first.get_submodule(n) for n in reading.plan.w_in]
    return Site(tuple(names[down]), _tensors(reading.plan, layers, down, down.training), emptied=tuple(names[first]))


def _tensors(plan: ffn.DensePlan, layers: list[nn.Module], out: nn.Module, training: bool) -> Dense:
    def joined(parts: list[Tensor | None]) -> Tensor | None:
        present = [p for p in parts if p is not None]
        if not present:
            return None
        if plan.up_first:
            up, gate = present[0].chunk(2)
            present = [gate, up]
        if len(present) == 1:
            return present[0]
        return torch.cat([p.detach() for p in present]).requires_grad_(any(p.requires_grad for p in present))

    w_in = joined([ffn.weight(layer) for layer in layers])
    assert w_in is not None
    b_in = joined([layer.bias for layer in layers])  # type: ignore[misc]
    return Dense(w_in, ffn.weight(out), b_in, out.bias, plan.activation, plan.layout, training)  # type: ignore[arg-type]
