"""Published models by name: their configs, with the source of each, in presets.json."""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any


@dataclass(frozen=True)
class Preset:
    """A model's config and where it comes from. convention: a name of `VENDORS`, that of the published figures.
    published: the vendor's total and active figure, rounded as the vendor prints them (None where none is known).
    also: names of other releases with the same sizes."""

    name: str
    config: dict[str, Any]
    source: str
    convention: str
    published_total: float | None
    published_active: float | None
    also: tuple[str, ...] = ()


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


@lru_cache(maxsize=1)
def presets() -> dict[str, Preset]:
    """All presets, by name."""
    data = json.loads(files(__package__).joinpath("presets.json").read_text(encoding="utf-8"))
    return {entry["name"]: Preset(**entry) for entry in data}


@lru_cache(maxsize=1)
def _names() -> dict[str, str]:
    """The name of a preset by every way to write it."""
    known = presets()
    names = {_plain(re.sub(r"-v[\d.]+$", "", key)): key for key in known}
    names |= {_plain(other): key for key, preset in known.items() for other in preset.also}
    return names | {_plain(key): key for key in known}


def find_preset(name: str) -> Preset:
    """The preset of a name; case, punctuation and a closing version do not matter. ValueError names close ones."""
    wanted = _names()
    for way in (name, name.rsplit("/", 1)[-1]):
        if _plain(way) in wanted:
            return presets()[wanted[_plain(way)]]
    near = close_presets(name)
    hint = f"; close presets: {', '.join(near)}" if near else ""
    raise ValueError(f"source: {name!r} is neither a file nor a preset{hint} (`moeffn params list` shows all)")


def close_presets(name: str) -> list[str]:
    """Up to four presets that are named much like `name`."""
    wanted = _names()
    return list(dict.fromkeys(wanted[n] for n in difflib.get_close_matches(_plain(name), wanted, 4, 0.5)))
