"""Low-rank adapters (LoRA) on fused expert weights, which tools that look for linear layers cannot reach.

    names = attach_lora(model, rank=8)      every fused expert weight, or ValueError; all else is left to the caller
    merge_lora(model) / unmerge_lora(model)

Axis order: an expert weight W (E, out, in) gets a (E, rank, in) and b (E, out, rank), and becomes
W[e] + (alpha / rank) · b[e] @ a[e]. Where a family stores its weights transposed, (E, in, out), the product is
transposed, never the adapter. Works before and after `replace_ffn` and with `register`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .. import checks
from . import experts as contract
from .swap import is_swapped


class LowRank(nn.Module):
    """The delta of one fused weight. a starts random, b zero, so that the model starts unchanged."""

    def __init__(self, like: Tensor, rank: int, scale: float, transposed: bool) -> None:
        super().__init__()
        E, out, inner = like.shape if not transposed else (like.shape[0], like.shape[2], like.shape[1])
        self.scale, self.transposed = scale, transposed
        self.a = nn.Parameter(torch.randn(E, rank, inner, dtype=like.dtype, device=like.device) / inner**0.5)
        self.b = nn.Parameter(torch.zeros(E, out, rank, dtype=like.dtype, device=like.device))

    def forward(self, weight: Tensor) -> Tensor:
        delta = self.scale * torch.bmm(self.b, self.a)
        return weight + (delta.transpose(1, 2) if self.transposed else delta)


def attach_lora(model: nn.Module, *, rank: int, alpha: float | None = None, targets: tuple[str, ...] | None = None
                ) -> list[str]:
    """Puts an adapter on the fused weights of every experts module; freezes those weights; -> the weights' names.

    `targets`: attribute names such as ("gate_up_proj", "down_proj"); None: both projections, whatever they are called.
    `alpha` is `rank` unless given. Raises ValueError when a target is found in no experts module or only in some of
    them, when there are no experts modules, or when a weight has an adapter already; nothing is changed then.
    """
    checks.positive_int("rank", rank)
    holders = dict(_experts(model))
    if not holders:
        raise checks.bad("model", "modules with fused expert weights", f"{type(model).__name__}, which holds none")
    found: list[tuple[str, Any, str]] = []
    for name, module in holders.items():
        wanted = targets or (contract.spec_of(module).in_name, "down_proj")
        missing = [t for t in wanted if getattr(getattr(module, t, None), "ndim", 0) != 3]
        if missing:
            raise checks.bad("targets", "names of fused weights of every experts module", f"{', '.join(missing)}, "
                             f"not in {name or 'the root'} ({type(module).__name__})")
        found += [(name, module, t) for t in wanted]
    for name, module, target in found:
        if parametrize.is_parametrized(module, target):
            raise checks.bad("model", "weights without an adapter", f"{_join(name, target)}, which has one")
    scale = (rank if alpha is None else alpha) / rank
    for _, module, target in found:
        weight = getattr(module, target)
        weight.requires_grad_(False)
        delta = LowRank(weight, rank, scale, contract.spec_of(module).transposed)
        parametrize.register_parametrization(module, target, delta)
    return [_join(name, target) for name, _, target in found]


def lora_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The adapters alone: "<weight>.a" and "<weight>.b" for every weight that has one."""
    return {f"{name}.{part}": getattr(delta, part).detach() for name, _, _, delta in _adapters(model) for part in "ab"}


def load_lora(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Fills the adapters of `model` from `lora_state_dict` of another. Raises ValueError before writing anything when
    keys are missing or left over, or a shape differs (another number of experts, another rank)."""
    own = {f"{name}.{part}": getattr(delta, part) for name, _, _, delta in _adapters(model) for part in "ab"}
    if own.keys() != state.keys() or not own:
        missing, extra = sorted(own.keys() - state.keys())[:3], sorted(state.keys() - own.keys())[:3]
        raise checks.bad("state", f"the keys of the model's {len(own)} adapter tensors",
                         f"missing {missing}, left over {extra}")
    for name, parameter in own.items():
        checks.shape(f"state[{name!r}]", state[name], tuple(parameter.shape), "that of the model's adapter")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(state[name])


def merge_lora(model: nn.Module) -> list[str]:
    """Adds every adapter into its weight, which keeps its name and Parameter; -> the names. The former values are kept
    beside it so that `unmerge_lora` restores them bit for bit. Raises ValueError when there is no adapter."""
    held = list(_adapters(model))
    if not held:
        raise checks.bad("model", "a model with adapters", type(model).__name__)
    for _, module, target, delta in held:
        base = module.parametrizations[target].original.detach().clone()
        parametrize.remove_parametrizations(module, target, leave_parametrized=True)
        module.__dict__.setdefault("_moeffn_merged", {})[target] = (base, delta)
    return [name for name, *_ in held]


def unmerge_lora(model: nn.Module) -> list[str]:
    """The inverse of `merge_lora`, exact; -> the names. Raises ValueError when nothing was merged."""
    names = []
    for name, module in _experts(model):
        for target, (base, delta) in module.__dict__.pop("_moeffn_merged", {}).items():
            weight = getattr(module, target)
            with torch.no_grad():
                weight.copy_(base)
            parametrize.register_parametrization(module, target, delta)
            names.append(_join(name, target))
    if not names:
        raise checks.bad("model", "a model with merged adapters", type(model).__name__)
    return names


def _experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        swapped = is_swapped(module) and module._moeffn.adapter == "experts"  # type: ignore[union-attr]
        if swapped or contract.is_decorated(module):
            yield name, module


def _adapters(model: nn.Module) -> Iterator[tuple[str, Any, str, LowRank]]:
    for name, module in _experts(model):
        for target, chain in getattr(module, "parametrizations", {}).items():
            for delta in chain:
                if isinstance(delta, LowRank):
                    yield _join(name, target), module, target, delta


def _join(name: str, target: str) -> str:
    return f"{name}.{target}".lstrip(".")
