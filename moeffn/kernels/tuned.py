"""Tiles that were measured on a device, in a JSON file, and the search that finds them. Pure: timing is handed in.

    {"device": "NVIDIA H200", "triton": "3.6.0",
     "tiles": [{"kernel": "up", "rows": "large", "d_model": 2048, "d_expert": 768, "num_experts": 128, "itemsize": 2,
                "gated": true, "default": {…}, "default_us": 1200.0, "tile": {…}, "tile_us": 1100.0}, …]}

An entry is used only for its bucket of rows per expert, widths, experts, size of an element, device and version of
Triton, only where it was faster than the default that it was measured against, and only while that is the default.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton

from .tiles import Problem, TileConfig, bucket, pick_tiles, why_illegal

VARIABLE = "MOEFFN_TILES"
"""The environment variable that names the file which the triton backend reads when it is first used."""
MARGIN = 0.02
"""By how much a tile must be faster than another to take its place: above the noise of a median."""

Key = tuple[Any, ...]
Versus = Callable[[TileConfig, TileConfig], tuple[float, float]]
"""Seconds of two tiles, measured alternating; infinity for one that does not run."""


def key(problem: Problem) -> Key:
    return (problem.kernel, bucket(problem.rows_per_expert), problem.d_model, problem.d_expert, problem.num_experts,
            problem.itemsize, problem.gated)


@dataclass(frozen=True)
class Entry:
    """A tile that was measured against a default, both in seconds."""

    key: Key
    default: TileConfig
    default_s: float
    tile: TileConfig
    tile_s: float


@dataclass(frozen=True)
class Tuned:
    """The usable entries of a file, by `key`."""

    entries: dict[Key, Entry]

    def pick(self, problem: Problem) -> TileConfig:
        """The measured tile where it is legal and was faster than what `pick_tiles` still answers, else that answer."""
        default = pick_tiles(problem)
        entry = self.entries.get(key(problem))
        if entry is None or entry.default != default or entry.tile_s >= entry.default_s:
            return default
        return default if why_illegal(entry.tile, problem) else entry.tile


_KEY = ("kernel", "rows", "d_model", "d_expert", "num_experts", "itemsize", "gated")


def save(path: str | Path, device: str, entries: list[Entry]) -> None:
    """Write (or replace) a file of measured tiles."""
    tiles = [dict(zip(_KEY, e.key, strict=True)) | {"default": asdict(e.default), "default_us": e.default_s * 1e6,
                                                    "tile": asdict(e.tile), "tile_us": e.tile_s * 1e6} for e in entries]
    text = json.dumps({"device": device, "triton": triton.__version__, "tiles": tiles}, indent=1)
    Path(path).write_text(text + "\n", encoding="utf-8")


def load(path: str | Path, device: str) -> Tuned:
    """Read a file of measured tiles for a device. One of another device or version of Triton gives no tiles, and a
    warning that says so; ValueError for what is no such file, OSError where there is none."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        found = [Entry(tuple(t[n] for n in _KEY), TileConfig(**t["default"]), t["default_us"] / 1e6,
                       TileConfig(**t["tile"]), t["tile_us"] / 1e6) for t in data["tiles"]]
        measured = data["device"], data["triton"]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{VARIABLE}: expected a file that `moeffn tune` wrote, got {path} ({error!r})") from None
    if measured != (device, triton.__version__):
        warnings.warn(f"{path} was measured on {measured[0]} with triton {measured[1]}; here is {device} with triton "
                      f"{triton.__version__}: its tiles are not used", stacklevel=2)
        return Tuned({})
    return Tuned({e.key: e for e in found})


def neighbours(tile: TileConfig, problem: Problem) -> list[TileConfig]:
    """Legal tiles that differ from one in one field. Its height stays: kernels of one pass share their row tiles."""
    steps: list[tuple[str, list[Any]]] = [
        ("block_n", [tile.block_n // 2, tile.block_n * 2]), ("block_k", [tile.block_k // 2, tile.block_k * 2]),
        ("num_warps", [4, 8]), ("num_stages", [tile.num_stages - 1, tile.num_stages + 1]),
        ("group_m", [1, 4, 8, 16]), ("pieces", [1, 2, 4] if problem.kernel == "dh" else [])]
    if problem.kernel == "up" and problem.gated:
        steps.append(("pieces", [1, 2]))
    if problem.kernel != "dw":
        steps += [("split_k", [tile.split_k // 2, tile.split_k * 2])]
        steps += [("tma", [not tile.tma]), ("persistent", [0, 1, 2]), ("swap", [not tile.swap])]
    made = (dataclasses.replace(tile, **{name: value}) for name, values in steps for value in values)
    return [c for c in dict.fromkeys(made) if c != tile and why_illegal(c, problem) is None]


def search(problem: Problem, versus: Versus, rounds: int = 4) -> Entry | None:
    """Climb from the default to the fastest neighbour while it is `MARGIN` faster, at most `rounds` times; None unless
    what is found also beats the default in a last comparison of the two."""
    default = tile = pick_tiles(problem)
    for _ in range(rounds):
        ratios = {}
        for other in neighbours(tile, problem):
            mine, theirs = versus(tile, other)
            ratios[other] = theirs / mine
        fastest = min(ratios, key=ratios.__getitem__)
        if ratios[fastest] > 1 - MARGIN:
            break
        tile = fastest
    if tile == default:
        return None
    default_s, tile_s = versus(default, tile)
    return Entry(key(problem), default, default_s, tile, tile_s) if tile_s <= (1 - MARGIN) * default_s else None
