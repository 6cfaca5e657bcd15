"""The table of model families (`families.csv`): which class of each to swap, by which adapter, and how it routes.

A row names a family's block, router and the class whose forward is replaced (`swapped`; empty columns: the family has
no such class). `routing` names a recipe of `routers`, with the configuration attributes it reads. Several rows may name
one family. `UNSUPPORTED` gives the families and classes that cannot be served, with the reason.
"""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass
from pathlib import Path

from torch import nn

UNSUPPORTED = {
    "NllbMoeSparseMLP": ("nllb_moe", "transformers (5.24) hands its experts a 0/1 mask as expert ids, so every first "
                         "choice runs expert 1 and every second choice expert 0; serving that would serve a fault"),
}
LEFT = {
    "JetMoeMoA": "a mixture of attention projections, not an FFN",
}


@dataclass(frozen=True)
class Family:
    """One row of the table; see this module's docstring."""

    family: str
    block: str
    router: str
    swapped: str
    adapter: str
    routing: str
    num_experts: str
    top_k: str
    scale: str
    renorm_eps: str


@functools.cache
def table() -> tuple[Family, ...]:
    with Path(__file__).with_name("families.csv").open(newline="") as file:
        return tuple(Family(**row) for row in csv.DictReader(file))


@functools.cache
def _by(column: str) -> dict[str, Family]:
    found: dict[str, Family] = {}
    for row in table():
        name = getattr(row, column)
        if name:
            found.setdefault(name, row)
    return found


def from_transformers(cls: type) -> bool:
    """Whether the class is defined in transformers' own model files."""
    return cls.__module__.startswith("transformers.models.")


def lookup(module: nn.Module, column: str) -> Family | None:
    """The row whose `column` names the module's class or the transformers class it was derived from."""
    for cls in type(module).__mro__:
        if from_transformers(cls) and cls.__name__ in _by(column):
            return _by(column)[cls.__name__]
    return None


def family_of(thing: object) -> str:
    """The family of a module or configuration by its home in transformers ("qwen3_moe"), "" for one from elsewhere."""
    return next((c.__module__.split(".")[2] for c in type(thing).__mro__ if from_transformers(c)), "")
