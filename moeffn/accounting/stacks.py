"""Layers of encoders and decoders outside Llama's line: attention, perhaps a second one to other states, an FFN."""

from __future__ import annotations

from collections.abc import Iterable

from .ffns import dense
from .mixers import Mixed
from .mixers import gqa as attention
from .reader import Keys
from .weights import Architecture, Layer, Mixer, Weight, matrix, norm


def table(rows: int, width: int) -> Weight:
    return Weight("embedding", (rows, width), "table")


def vector(*shape: int, part: str = "other") -> Weight:
    """A parameter that is no matrix: a learned token, a filter, a scale."""
    return Weight(part, shape, "filter")


def conv(rows: int, columns: int, *taps: int, bias: bool = True) -> list[Weight]:
    """A convolution `columns` -> `rows` with kernels of the size `taps`."""
    return [vector(rows, columns, *taps), *[Weight("other", (rows,), "bias")] * bias]


def looking(d: int, wide: int, heads: int, kv: int, width: int, bias: str = "") -> Mixed:
    """Attention of states of width d to others of width `wide`."""
    found = matrix("attention", heads * width, d, "q" in bias)
    for letter in "kv":
        found += matrix("attention", kv * width, wide, letter in bias)
    found += matrix("attention", d, heads * width, "o" in bias)
    return found, Mixer(heads, width, width, None, 2 * kv * width)


def layer(k: Keys, d: int, heads: int, hidden: int, *, kv: int = 0, width: int = 0, bias: str = "qkvo",
          gated: bool = False, ffn_bias: bool = True, norm_bias: bool = True, norms: int = 0,
          looks: Mixed | None = None, more: Iterable[Weight] = ()) -> Layer:
    """Attention, an FFN, and with `looks` a second attention; a norm for each of them unless `norms` says how many.

    kv, width: key/value heads, as many as `heads` when 0, and a head's width, d / heads when 0. more: further weights.
    """
    width = width or k.divide("head_dim", d, heads)
    found, mixer = attention(d, heads, kv or heads, width, bias=bias)
    others, mixers = ([], ()) if looks is None else (looks[0], (looks[1],))
    ffn = dense(d, hidden, gated=gated, bias=ffn_bias)
    count = norms or 2 + (looks is not None)
    return Layer("dense", (*found, *others, *ffn, *norm(d, norm_bias) * count, *more), (mixer, *mixers))


def whole(k: Keys, d: int, vocab: int, layers: Iterable[Layer], outer: Iterable[Weight],
          tied: bool = True) -> Architecture:
    """A model of these weights, named by its `model_type`."""
    return Architecture(k.text("model_type"), d, vocab, tuple(layers), tuple(outer), tied,
                        assumed=tuple(sorted(k.assumed.items())), excluded=tuple(k.excluded))
