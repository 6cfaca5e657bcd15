"""moeffn: a sparse mixture-of-experts FFN runtime for PyTorch. Public names, imported on first use."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "config": ("Activation", "Layout", "MoEConfig", "RouterConfig", "SWIGLU", "GEGLU", "GEGLU_TANH", "REGLU", "GLU",
               "BILINEAR", "SWIGLU_OAI"),
    "types": ("Routing", "Plan", "ExpertWeights", "LoadStats"),
    "routing": ("route", "apply_capacity"),
    "balance": ("load_balance_loss", "z_loss", "update_selection_bias", "load_stats", "attach_loss"),
    "functional": ("moe_ffn", "expert_ffn", "dense_ffn", "last_backend"),
    "layer": ("Router", "Experts", "MoEFFN", "DenseFFN"),
    "permutation": ("plan", "permute", "unpermute"),
    "backends": ("Grads", "resolve"),
    "upcycling": ("upcycle", "UpcycleReport"),
}
_MODULES = ("accounting", "backends", "distributed", "reference", "testing")
_NAMES = {name: home for home, names in _HOMES.items() for name in names}
__all__ = sorted([*_NAMES, *_MODULES])


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
