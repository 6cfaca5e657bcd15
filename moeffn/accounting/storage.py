"""Bytes of a checkpoint: parameters, stored elements and bytes are three different numbers.

Quantised formats store scales beside the values, and a checkpoint holds buffers and copies that are no parameters
(the "total" of DeepSeek-V3's files is 684.5B for a 671B model).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any

from .counting import load
from .weights import Weight


@dataclass(frozen=True, kw_only=True)
class Format:
    """How weights are stored. `bits`: of one value of a quantised matrix; the rest is `other` bytes an element.

    block: (rows, columns) that share one scale of `scale_bytes`; None: no scales. tensor_bytes: a scale for the whole
    matrix. parts: which parts' matrices are quantised.
    """

    name: str
    bits: int
    block: tuple[int, int] | None = None
    scale_bytes: int = 0
    tensor_bytes: int = 0
    other: int = 2
    parts: tuple[str, ...] = ()


LINEAR = ("attention", "routed", "shared", "dense", "latent")
FORMATS = {
    "fp32": Format(name="fp32", bits=32, other=4),
    "bf16": Format(name="bf16", bits=16),
    # DeepSeek-V3: E4M3 with one float32 scale for 128x128; router, embedding, head, MTP projection and norms in bf16.
    "fp8": Format(name="fp8", bits=8, block=(128, 128), scale_bytes=4, parts=LINEAR),
    # OCP microscaling, as gpt-oss stores its experts: E2M1 with an 8-bit exponent for 32 values, 4.25 bits a value.
    "mxfp4": Format(name="mxfp4", bits=4, block=(1, 32), scale_bytes=1, parts=("routed",)),
    # E2M1 with an E4M3 scale for 16 values and a float32 for each matrix, 4.5 bits a value.
    "nvfp4": Format(name="nvfp4", bits=4, block=(1, 16), scale_bytes=1, tensor_bytes=4, parts=("routed",)),
    # Groups of 128 with a 16-bit scale, symmetric, 4.125 bits a value.
    "int4": Format(name="int4", bits=4, block=(1, 128), scale_bytes=2, parts=("routed",)),
}


@dataclass(frozen=True)
class Stored:
    """parameters; elements: values, scales and buffers; quantised: the parameters in the low-precision format;
    scales; buffers; nbytes: all of it."""

    format: str
    parameters: int
    elements: int
    quantised: int
    scales: int
    buffers: int
    nbytes: int


def _scales(weight: Weight, fmt: Format) -> int:
    """Scales of all copies of a quantised matrix, counting incomplete blocks as whole."""
    if fmt.block is None:
        return 0
    rows, columns = weight.shape
    return ceil(rows / fmt.block[0]) * ceil(columns / fmt.block[1]) * weight.copies


def _tally(weights: Iterable[Weight], fmt: Format) -> tuple[int, int, int, int, Fraction]:
    parameters = quantised = scales = buffers = 0
    size = Fraction(0)
    for weight in weights:
        if weight.kind == "buffer":
            buffers += weight.total
            size += 4 * weight.total
            continue
        parameters += weight.total
        if weight.kind == "matrix" and weight.part in fmt.parts:
            quantised += weight.total
            count = _scales(weight, fmt)
            scales += count
            size += Fraction(weight.total * fmt.bits, 8) + count * fmt.scale_bytes + weight.copies * fmt.tensor_bytes
        else:
            size += weight.total * fmt.other
    return parameters, quantised, scales, buffers, size


def stored(source: Any, fmt: str | Format = "bf16", *, mtp: bool = False) -> Stored:
    """What a checkpoint of `source` (as for `count`) holds in a format, a name of `FORMATS` or a `Format`.

    mtp: with the prediction layers, and the embedding and head that some vendors store again for each.
    """
    if isinstance(fmt, str):
        if fmt not in FORMATS:
            raise ValueError(f"format: expected a Format or one of {', '.join(FORMATS)}, got {fmt!r}")
        fmt = FORMATS[fmt]
    _, model = load(source)
    parameters, quantised, scales, buffers, size = _tally(model.weights(mtp), fmt)
    copies = model.duplicates if mtp else 0
    size += copies * fmt.other
    whole = parameters + copies + scales + buffers
    return Stored(fmt.name, parameters + copies, whole, quantised, scales, buffers, ceil(size))
