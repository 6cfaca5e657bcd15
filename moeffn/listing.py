"""Lines of a report about modules: entries of one text whose names differ in one number become one line."""

from __future__ import annotations

import re
from collections.abc import Iterable


def listed(entries: Iterable[tuple[str, str]]) -> list[str]:
    """(name, text) -> lines "name: text" in the order of first appearance.

    ("layers.0.mlp", "x"), ("layers.1.mlp", "x"), ("layers.4.mlp", "x") -> ["layers.{0-1,4}.mlp (3): x"]
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, text in entries:
        groups.setdefault((re.sub(r"\d+", "#", name), text), []).append(name)
    lines = []
    for (_, text), names in groups.items():
        parts = [re.split(r"(\d+)", name) for name in names]  # text and numbers in turn
        varying = [i for i, column in enumerate(zip(*parts, strict=True)) if len(set(column)) > 1]
        if len(varying) != 1 or len({p[varying[0]] for p in parts}) < len(names):
            lines += [f"{name}: {text}" for name in names]
            continue
        spans = _spans(sorted(int(p[varying[0]]) for p in parts))
        shown = [*parts[0][: varying[0]], f"{{{spans}}}", *parts[0][varying[0] + 1 :]]
        lines.append(f"{''.join(shown)} ({len(names)}): {text}")
    return lines


def _spans(numbers: list[int]) -> str:
    """[0, 1, 2, 5] -> "0-2,5"."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
