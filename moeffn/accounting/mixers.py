"""The weights of token mixers: attention in its forms, linear attention, state spaces, short convolutions.

Every function returns `(weights, mixer)`. d is the model width.
"""

from __future__ import annotations

from .weights import Mixer, Weight, matrix, norm

Mixed = tuple[list[Weight], Mixer]
PART = "attention"


def _filter(*shape: int) -> Weight:
    return Weight(PART, shape, "filter")


def gqa(d: int, heads: int, kv: int, qk: int, v: int | None = None, *, bias: str = "", qk_norm: str = "",
        gate: str = "", sinks: bool = False, window: int | None = None, values: bool = True) -> Mixed:
    """Attention with `heads` query heads and `kv` key/value heads of width `qk` (values `v`).

    bias: the letters of the projections that have one, of "qkvo". qk_norm: "head" (one vector for all heads),
    "full" (one value a channel), "heads" (a vector for each head). gate: "query" (the query projection is twice as
    wide), "heads" (one gate a head), "channels" (one a channel). kv = 0: keys and values come from another layer.
    values = False: the keys serve as values.
    """
    v = qk if v is None else v
    found = matrix(PART, heads * qk * (2 if gate == "query" else 1), d, "q" in bias)
    if kv:
        found += matrix(PART, kv * qk, d, "k" in bias)
        if values:
            found += matrix(PART, kv * v, d, "v" in bias)
    found += matrix(PART, d, heads * v, "o" in bias)
    widths = {"": (), "head": (qk, qk), "full": (heads * qk, kv * qk), "heads": (heads * qk, kv * qk)}[qk_norm]
    for width in widths[: 2 if kv else 1]:
        found += norm(width)
    if gate == "heads":
        found += matrix(PART, heads, d)
    elif gate == "channels":
        found += matrix(PART, heads * v, d)
    if sinks:
        found.append(_filter(heads))
    return found, Mixer(heads, qk, v, window, kv * (qk + v if values else qk))


def mla(d: int, heads: int, q_rank: int, kv_rank: int, nope: int, rope: int, v: int, *, bias: bool = False,
        gate: str = "", q_norm: bool = True, window: int | None = None) -> Mixed:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434); q_rank = 0: no query compression.

    bias is on the two down projections and the output, as in DeepSeek's code.
    """
    query = heads * (nope + rope)
    if q_rank:
        found = matrix(PART, q_rank, d, bias) + norm(q_rank) * q_norm + matrix(PART, query, q_rank)
    else:
        found = matrix(PART, query, d)
    found += matrix(PART, kv_rank + rope, d, bias) + norm(kv_rank)
    found += matrix(PART, heads * (nope + v), kv_rank) + matrix(PART, d, heads * v, bias)
    if gate == "heads":
        found += matrix(PART, heads, d)
    return found, Mixer(heads, nope + rope, v, window, kv_rank + rope)


def indexer(d: int, q_rank: int, heads: int, width: int) -> list[Weight]:
    """The index of DeepSeek sparse attention: which past tokens a query looks at."""
    keys = matrix(PART, width, d) + norm(width, bias=True)
    return matrix(PART, heads * width, q_rank) + keys + matrix(PART, heads, d)


def hyper(rows: int, columns: int, scales: int, part: str) -> list[Weight]:
    """The maps of hyper-connections between residual streams: one matrix, an offset for each row, some scales."""
    return [*matrix(part, rows, columns), Weight(part, (rows,), "filter"), Weight(part, (scales,), "filter")]


def gated_delta(d: int, key_heads: int, value_heads: int, key: int, value: int, conv: int) -> Mixed:
    """Gated DeltaNet as in Qwen3-Next: q, k, v, z, b and a projections, a convolution over q, k and v."""
    qkv = 2 * key_heads * key + value_heads * value
    found = matrix(PART, qkv, d) + matrix(PART, value_heads * value, d) + matrix(PART, 2 * value_heads, d)
    found += [_filter(qkv, 1, conv), _filter(value_heads), _filter(value_heads)]
    found += norm(value) + matrix(PART, d, value_heads * value)
    return found, Mixer(state=value_heads * key * value)


def kimi_delta(d: int, heads: int, width: int, conv: int, low_rank: bool) -> Mixed:
    """Kimi delta attention; the forget gate (and in Kimi Linear the output gate) goes through `width` channels."""
    inner = heads * width
    found = matrix(PART, inner, d) * 3 + matrix(PART, heads, d) + matrix(PART, d, inner) + norm(width)
    found += [_filter(3 * inner, 1, conv), _filter(inner), _filter(heads)]
    gate = matrix(PART, width, d) + matrix(PART, inner, width) if low_rank else matrix(PART, inner, d)
    return found + gate * 2, Mixer(state=heads * width * width)


def lightning(d: int, heads: int, width: int) -> Mixed:
    """Lightning attention of MiniMax-Text-01: fused q, k, v, an output gate and a norm over all heads."""
    inner = heads * width
    found = matrix(PART, 3 * inner, d) + matrix(PART, d, inner) + matrix(PART, inner, d) + norm(inner)
    return found, Mixer(state=heads * width * width)


def mamba1(d: int, inner: int, state: int, conv: int, rank: int, *, conv_bias: bool = True, bias: bool = False,
           norms: bool = False) -> Mixed:
    """Mamba; `norms` adds Jamba's three over dt, B and C."""
    found = matrix(PART, 2 * inner, d, bias) + matrix(PART, rank + 2 * state, inner) + matrix(PART, inner, rank, True)
    found += matrix(PART, d, inner, bias)
    found += [_filter(inner, 1, conv), _filter(inner, state), _filter(inner)] + [_filter(inner)] * conv_bias
    if norms:
        found += norm(rank) + norm(state) * 2
    return found, Mixer(state=inner * state)


def mamba2(d: int, heads: int, width: int, groups: int, state: int, conv: int, *, conv_bias: bool = True,
           bias: bool = False, norms: bool = True) -> Mixed:
    """Mamba-2 with `heads` heads of `width` channels; z, x, B, C and dt from one projection."""
    inner = heads * width
    channels = inner + 2 * groups * state
    found = matrix(PART, inner + channels + heads, d, bias) + matrix(PART, d, inner, bias)
    found += [_filter(channels, 1, conv)] + [_filter(channels)] * conv_bias + [_filter(heads)] * 3
    if norms:
        found += norm(inner)
    return found, Mixer(state=inner * state)


def short_conv(d: int, length: int, bias: bool = False) -> Mixed:
    """The gated short convolution of LFM2."""
    found = matrix(PART, 3 * d, d, bias) + matrix(PART, d, d, bias) + [_filter(d, 1, length)] + [_filter(d)] * bias
    return found, Mixer(state=d * length)
