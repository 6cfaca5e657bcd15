"""FLOPs, bytes and memory of a whole model.

Conventions, said once: a multiply-add is 2 FLOPs; norms, softmax, activations and the embedding look-up are no
matrix products and count 0; the head counts, tied or not; backward is twice forward; recompute adds forward again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from .block import distinct_experts
from .counting import load
from .weights import Architecture, Mixer, Weight


@dataclass(frozen=True)
class Cost:
    """FLOPs of `tokens` tokens with a context of `context`.

    weights: products with weights. attention: scores and values, and the updates of recurrent states. forward is
    their sum, backward twice it, recompute what full activation recomputation adds. training = all three.
    """

    tokens: int
    context: int
    weights: int
    attention: int
    forward: int
    backward: int
    recompute: int

    @property
    def training(self) -> int:
        return self.forward + self.backward + self.recompute


def _matrices(model: Architecture, mtp: bool) -> Iterator[Weight]:
    for weight in model.weights(mtp):
        if weight.kind == "matrix":
            yield weight


def matmul_weights(model: Architecture, *, router: bool = True, head: bool = True, mtp: bool = False) -> int | Fraction:
    """Weights a token is multiplied by: active matrices, with the head even where it is the embedding table."""
    found = sum(w.active() * w.passes for w in _matrices(model, mtp)
                if (router or w.part != "router") and w.part not in ("head", "vision"))
    if head and model.has_head:
        found += sum(w.total for w in model.outer if w.part == "head" and w.kind == "matrix")
    elif head and model.tied:
        found += model.vocab * model.d_model
    return found


def seen(mixer: Mixer, context: int, causal: bool) -> Fraction:
    """Past positions a token attends to, on average over a sequence of `context` when causal (half of them without a
    window), all of `context` otherwise."""
    window = context if mixer.window is None else min(mixer.window, context)
    if not causal:
        return Fraction(window)
    return window - Fraction(window * window, 2 * context) if context else Fraction(0)


def attention_flops(model: Architecture, context: int, *, causal: bool = True) -> Fraction:
    """FLOPs a token: 2·H·(qk + v) for each position seen, 4 for each element of a recurrent state (update, read)."""
    total = Fraction(0)
    for layer in model.layers:
        for mixer in layer.mixers:
            total += 2 * mixer.heads * (mixer.qk + mixer.v) * seen(mixer, context, causal) + 4 * mixer.state
    return total


def cost(source: Any, *, tokens: int = 1, context: int = 0, causal: bool = True, recompute: str = "none",
         router: bool = True, head: bool = True, mtp: bool = False) -> Cost:
    """FLOPs of a model (source as for `count`, but no live module).

    context: sequence length; 0 leaves attention out. causal: count half of the scores, as a causal kernel does (and
    Megatron; torchtitan and PaLM's formula count all). recompute: none, or full (the forward pass runs twice).
    router, head, mtp: whether these products count.
    """
    if recompute not in ("none", "full"):
        raise ValueError(f"recompute: expected none or full, got {recompute!r}")
    if tokens < 0 or context < 0:
        raise ValueError(f"tokens and context: expected at least 0, got {tokens} and {context}")
    _, model = load(source)
    weights = round(2 * tokens * matmul_weights(model, router=router, head=head, mtp=mtp))
    attention = round(tokens * attention_flops(model, context, causal=causal))
    forward = weights + attention
    return Cost(tokens, context, weights, attention, forward, 2 * forward, forward if recompute == "full" else 0)


@dataclass(frozen=True)
class DecodeBytes:
    """Bytes one decode step of a batch reads.

    dense: weights every token uses, with the head, without the input table. routed: the experts the batch expects to
    meet. cache: keys and values (or latents, or states). embedding: one row a token.
    distinct: expected experts a sparse layer uses (of the last kind of layer).
    """

    batch: int
    dense: float
    routed: float
    cache: float
    embedding: float
    distinct: float

    @property
    def total(self) -> float:
        return self.dense + self.routed + self.cache + self.embedding


def cache_elements(model: Architecture, context: int) -> int:
    """Elements that the cache of one sequence holds: those of `context` past tokens (or the window), and states."""
    return sum(m.cache * (context if m.window is None else min(m.window, context)) + m.state
               for layer in model.layers for m in layer.mixers)


def decode_bytes(source: Any, batch: int, *, bytes_per_weight: float = 2.0, expert_bytes: float | None = None,
                 context: int = 0, cache_bytes: float = 2.0, embedding: bool = False, ranks: int = 1) -> DecodeBytes:
    """Bytes a decode step of `batch` sequences reads, as a function of the batch: this is what bounds decoding.

    ranks: expert-parallel ranks that share the batch; a rank reads its part of the experts, each the whole batch can
    reach, and all of the rest (its share of the cache too). context: past tokens of each sequence.
    """
    if batch < 1 or ranks < 1:
        raise ValueError(f"batch and ranks: expected at least 1, got {batch} and {ranks}")
    if context < 0:
        raise ValueError(f"context: expected at least 0, got {context}")
    _, model = load(source)
    table = 0 if model.tied else sum(w.total for w in model.outer if w.part == "embedding")
    dense = routed = Fraction(0)
    distinct = 0.0
    weight_reads = 0.0
    for layer in model.layers:
        for weight in layer.weights:
            if weight.used is None:
                continue
            # Idle experts take places of the top-k too: the chance of an expert is used / (copies + idle).
            distinct = distinct_experts(weight.copies + weight.idle, weight.used, batch)
            distinct *= weight.copies / (weight.copies + weight.idle)
            weight_reads += weight.size * distinct
            routed += weight.total
    dense = Fraction(sum(w.total for w in model.weights() if w.kind != "buffer")) - routed - table
    per_expert = bytes_per_weight if expert_bytes is None else expert_bytes
    return DecodeBytes(
        batch, float(dense) * bytes_per_weight, weight_reads * per_expert / ranks,
        cache_elements(model, context) * cache_bytes * batch / ranks,
        model.d_model * bytes_per_weight * batch if embedding else 0.0, distinct,
    )
