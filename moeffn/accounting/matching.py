"""Fair comparisons: the gated or mixture shape that equals a dense FFN in total weights, active weights or FLOPs.

Two matrices of width M equal three of width 2M/3; keeping the inner width instead gives the gated form half as many
weights again, and a comparison of activations then compares sizes too.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from .block import Block, active_weights, always_active_weights, ffn_weights, forward_flops, total_weights

EQUALS = ("total", "active", "flops")


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A dense FFN: two matrices, or three when gated."""

    d_model: int
    d_hidden: int
    gated: bool = False
    bias: bool = False

    def __post_init__(self) -> None:
        for name in ("d_model", "d_hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"Dense.{name}: expected at least 1, got {getattr(self, name)}")

    @property
    def expansion(self) -> float:
        """Inner width over model width."""
        return self.d_hidden / self.d_model


Shape = Dense | Block


@dataclass(frozen=True)
class Sizes:
    """Weights and forward FLOPs a token (matrix products alone) of a shape."""

    total: int
    active: int
    flops: int


@dataclass(frozen=True)
class Match:
    """`shape` is nearest to the baseline in `equal` after rounding; exact_width is the width before it. total, active
    and flops are ratios to the baseline."""

    shape: Shape
    equal: str
    exact_width: float
    total: float
    active: float
    flops: float
    warnings: tuple[str, ...]


def sizes(shape: Shape) -> Sizes:
    """Weights and FLOPs of a shape."""
    if isinstance(shape, Dense):
        weights = ffn_weights(shape.d_model, shape.d_hidden, gated=shape.gated, bias=shape.bias)
        return Sizes(weights, weights, 2 * ffn_weights(shape.d_model, shape.d_hidden, gated=shape.gated))
    return Sizes(total_weights(shape), active_weights(shape), forward_flops(shape, 1))


def round_width(width: Fraction | float, multiple: int, rounding: str = "up") -> int:
    """To a multiple that hardware likes, at least one of them; up as Llama does (10,922.7 becomes 11,008 for 256)."""
    if multiple < 1:
        raise ValueError(f"multiple: expected at least 1, got {multiple}")
    steps = Fraction(width) / multiple
    if rounding == "up":
        count = -(-steps.numerator // steps.denominator)
    elif rounding == "nearest":
        count = round(steps)
    elif rounding == "down":
        count = steps.numerator // steps.denominator
    else:
        raise ValueError(f"rounding: expected up, nearest or down, got {rounding!r}")
    return multiple * max(1, count)


def compare(baseline: Shape, other: Shape) -> tuple[str, ...]:
    """What confounds a comparison of two shapes; empty when weights and FLOPs agree within 5%."""
    a, b = sizes(baseline), sizes(other)
    found = []
    inner = baseline.d_hidden if isinstance(baseline, Dense) else baseline.d_expert
    if isinstance(other, Dense) and other.d_hidden == inner and other.gated != baseline.gated:
        found.append(f"equal inner width {inner}: the gated form has {b.total / a.total - 1:+.0%} weights and FLOPs; "
                     f"a fair gated width is {round_width(Fraction(2 * inner, 3), 1)}"
                     if other.gated else f"equal inner width {inner}: the form without a gate has "
                                         f"{b.total / a.total - 1:+.0%} weights and FLOPs")
    for name in ("total", "active", "flops"):
        ratio = getattr(b, name) / getattr(a, name)
        if abs(ratio - 1) > 0.05:
            label = {"total": "total weights", "active": "active weights", "flops": "FLOPs a token"}[name]
            found.append(f"{label} differ: {ratio:.2f} times")
    return tuple(found)


def _match(baseline: Shape, shape: Shape, equal: str, exact: Fraction) -> Match:
    a, b = sizes(baseline), sizes(shape)
    return Match(shape, equal, float(exact), b.total / a.total, b.active / a.active, b.flops / a.flops,
                 compare(baseline, shape))


def match_gated(baseline: Dense, *, multiple: int = 256, rounding: str = "up") -> Match:
    """The gated FFN without biases that has the weights of an FFN with two matrices (or the reverse)."""
    if baseline.gated:
        exact = Fraction(3 * baseline.d_hidden, 2)
    else:
        exact = Fraction(2 * baseline.d_hidden, 3)
    width = round_width(exact, multiple, rounding)
    return _match(baseline, Dense(d_model=baseline.d_model, d_hidden=width, gated=not baseline.gated), "total", exact)


def match_moe(baseline: Dense, *, num_experts: int, top_k: int, equal: str = "active", gated: bool = True,
              d_shared: int = 0, multiple: int = 64, rounding: str = "nearest") -> Match:
    """The mixture whose total weights, active weights or FLOPs a token equal those of a dense FFN, router and shared
    expert in. Raises ValueError when these alone are more than the baseline has."""
    if equal not in EQUALS:
        raise ValueError(f"equal: expected one of {', '.join(EQUALS)}, got {equal!r}")
    unit = Block(d_model=baseline.d_model, d_expert=1, num_experts=num_experts, top_k=top_k, gated=gated,
                 d_shared=d_shared)
    target = getattr(sizes(baseline), equal)
    if equal == "flops":
        target //= 2
    room = target - always_active_weights(unit)
    copies = num_experts if equal == "total" else top_k
    if room <= 0:
        raise ValueError(f"d_shared: router and shared expert have {always_active_weights(unit):,} weights, the "
                         f"baseline {target:,}: nothing is left for experts")
    exact = Fraction(room, copies * unit.matrices * baseline.d_model)
    width = round_width(exact, multiple, rounding)
    shape = Block(d_model=baseline.d_model, d_expert=width, num_experts=num_experts, top_k=top_k, gated=gated,
                  d_shared=d_shared)
    return _match(baseline, shape, equal, exact)
