"""Time of an exchange: the direct and the hierarchical model, a message-size curve, fits to measured tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise
from math import log
from typing import Any

from .traffic import row_bytes


@dataclass(frozen=True)
class Direct:
    """t = a + T·K·b·(1 - n/R)/B: every copy of a row goes straight to its expert's rank. us and GB/s."""

    a_us: float
    gbs: float
    worst_error: float = 0.0

    def time_us(self, tokens: int, top_k: int, row: float, ranks: int, domain: int) -> float:
        return self.a_us + direct_bytes(tokens, top_k, row, ranks, domain) / self.gbs / 1000


def direct_bytes(tokens: int, top_k: int, row: float, ranks: int, domain: int) -> float:
    """Bytes a rank sends over its NIC when each expert gets its own copy."""
    return tokens * top_k * row * max(0.0, 1 - domain / ranks)


@lru_cache(maxsize=1)
def measured() -> dict[str, Any]:
    """The tables of measured.json: low_latency and message_size."""
    return json.loads(files(__package__).joinpath("measured.json").read_text(encoding="utf-8"))


def _least(f: Callable[[float], float], low: float, high: float) -> float:
    """Where a convex function is least, by golden section."""
    ratio = (5**0.5 - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = f(left), f(right)
    for _ in range(50):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = f(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = f(right)
    return (low + high) / 2


def fit_direct(points: Sequence[tuple[float, float]]) -> Direct:
    """The direct model through (bytes, microseconds), with the least worst relative error; two parameters."""
    if len(points) < 2:
        raise ValueError(f"points: expected at least 2 to fit two parameters, got {len(points)}")

    def worst(a: float, slope: float) -> float:
        return max(abs((a + slope * nbytes) / t - 1) for nbytes, t in points)

    top = max(t for _, t in points)
    steepest = max(t / nbytes for nbytes, t in points if nbytes)

    def best_a(slope: float) -> float:
        return _least(lambda a: worst(a, slope), 0, top)

    slope = _least(lambda s: worst(best_a(s), s), 0, steepest)
    a = best_a(slope)
    return Direct(a, 1 / slope / 1000, worst(a, slope))


@lru_cache(maxsize=32)
def fitted(table: str, direction: str, hold_out: tuple[int, ...] = ()) -> Direct:
    """The direct model fitted to a low-latency table of measured.json, dispatch (FP8) or combine (BF16).

    Sizes inside one domain are another regime and are left out, as are those of `hold_out`.
    """
    data = measured()["low_latency"]
    if table not in data:
        raise ValueError(f"table: expected one of {', '.join(data)}, got {table!r}")
    if direction not in ("dispatch", "combine"):
        raise ValueError(f"direction: expected dispatch or combine, got {direction!r}")
    entry = data[table]
    row = row_bytes(entry["d_model"], "fp8" if direction == "dispatch" else "bf16")
    points = [(direct_bytes(entry["tokens"], entry["top_k"], row, int(r), entry["domain"]), t)
              for r, t in entry[f"{direction}_us"].items()
              if int(r) > entry["domain"] and int(r) not in hold_out]
    return fit_direct(points)


def curve_factor(curve: str | None, message: float) -> float:
    """Part of its full bandwidth a link reaches with messages of this many bytes, from a measured curve (linear in
    the logarithm of the size; proportional to it below the smallest measured). None: always all."""
    if curve is None:
        return 1.0
    data: Mapping[str, Any] = measured()["message_size"]
    if curve not in data:
        raise ValueError(f"curve: expected one of {', '.join(data)}, got {curve!r}")
    points = data[curve]["points"]
    full = points[-1][1]
    if message <= points[0][0]:
        return max(message, 1.0) / points[0][0] * points[0][1] / full
    for (small, slow), (large, fast) in pairwise(points):
        if message <= large:
            part = (log(message) - log(small)) / (log(large) - log(small))
            return (slow + part * (fast - slow)) / full
    return 1.0


def hierarchical_us(nic_bytes: float, domain_bytes: float, *, nic_gbs: float, domain_gbs: float, latency_us: float,
                    rho: float = 1.0) -> float:
    """t = a + rho·max(bytes over the NIC / its bandwidth, bytes inside the domain / its bandwidth)."""
    return latency_us + rho * max(nic_bytes / nic_gbs, domain_bytes / domain_gbs) / 1000
