"""What `replace_ffn` did, module by module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..config import Activation, RouterConfig
from ..listing import listed


@dataclass(frozen=True)
class Replaced:
    """One module that now runs on moeffn. `kind`: "moe" or "dense"; `routing`: None where RouterConfig cannot say."""

    name: str
    kind: Literal["moe", "dense"]
    cls: str
    family: str
    activation: Activation
    routing: RouterConfig | None = None
    note: str = ""


@dataclass(frozen=True)
class Left:
    """One FFN that was left as it was, and why."""

    name: str
    cls: str
    reason: str


@dataclass(frozen=True)
class ReplacementReport:
    """What `replace_ffn` did, module by module. `backend` is the one asked for; "auto" is resolved at each call."""

    replaced: tuple[Replaced, ...]
    left: tuple[Left, ...]
    backend: str

    def __str__(self) -> str:
        return self.describe()

    def describe(self) -> str:
        """The report as text; modules of which the same is to be said share a line."""
        entries = []
        for r in self.replaced:
            text = f"{r.cls} {r.activation}" + (f"; {r.routing}" if r.routing is not None else "")
            entries.append((f"{r.kind:5} {r.name or '(root)'}", text + (f" [{r.note}]" if r.note else "")))
        entries += [(f"left  {left.name or '(root)'}", f"{left.cls}: {left.reason}") for left in self.left]
        head = f"backend {self.backend}: {len(self.replaced)} FFNs replaced, {len(self.left)} left"
        return "\n  ".join([head, *listed(entries)])
