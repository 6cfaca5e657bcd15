"""What a model is made of: weights, token mixers, layers.

A model is described by its matrices, not by a formula for their sum: every count, byte and FLOP of this package is
a walk over the same list, so two of its figures cannot disagree. Nothing here imports torch.

Letters: D model width, F expert width, E experts, K experts a token uses, H query heads, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import prod

PARTS = (
    "embedding",  # token table, with learned positions and token types where the model adds them to it
    "attention",  # every token mixer: GQA, MLA, linear attention, Mamba, short convolutions, with their biases
    "router",
    "routed",  # the experts a router chooses from
    "latent",  # projections between the model width and the narrower one of latent experts
    "shared",  # experts that every token uses
    "shared_gate",
    "dense",  # FFNs without experts
    "norm",
    "head",
    "vision",  # towers beside the language model (images, sound) and their projectors; experts of image tokens alone
    "vision_ffn",
    "other",
)
FFN_PARTS = ("router", "routed", "shared", "shared_gate", "dense", "vision_ffn")
KINDS = ("matrix", "bias", "norm", "table", "filter", "buffer")


@dataclass(frozen=True, slots=True)
class Weight:
    """`copies` equal tensors of `shape`, of which a token uses `used` (all of them when None).

    kind: matrix (a token is multiplied by it: 2 FLOPs an element), table (looked up), bias, norm, filter (short
    convolutions, decays and other elementwise parameters) or buffer (in a checkpoint, but no parameter: the
    selection bias of an auxiliary-loss-free router).
    idle: experts of the same router that compute nothing (LongCat's identity experts). They take places of the
    top-k, so the copies a token uses vary between max(0, used - idle) and min(used, copies).
    passes: how many times a token goes through it (blocks that several layers share, loops): counts once as a
    weight, `passes` times in FLOPs.
    """

    part: str
    shape: tuple[int, ...]
    kind: str = "matrix"
    copies: int = 1
    used: int | None = None
    idle: int = 0
    passes: int = 1

    @property
    def size(self) -> int:
        """Elements of one copy."""
        return prod(self.shape)

    @property
    def total(self) -> int:
        return self.size * self.copies

    def active(self, idle: str = "mean") -> int | Fraction:
        """Elements a token uses; `idle` is min, mean (uniform routing over real and idle experts) or max."""
        if self.used is None:
            return self.total
        if not self.idle or idle == "max":
            return self.size * min(self.used, self.copies)
        if idle == "min":
            return self.size * max(0, self.used - self.idle)
        return self.size * Fraction(self.used * self.copies, self.copies + self.idle)


@dataclass(frozen=True, slots=True)
class Mixer:
    """How a layer mixes tokens: what the cost of attention and of its cache needs.

    heads, qk, v: query heads and the widths of a key and a value. window: positions seen, None for all.
    cache: elements kept for each past token. state: elements of a recurrent state (linear attention, Mamba).
    """

    heads: int = 0
    qk: int = 0
    v: int = 0
    window: int | None = None
    cache: int = 0
    state: int = 0


@dataclass(frozen=True, slots=True)
class Layer:
    kind: str
    weights: tuple[Weight, ...]
    mixers: tuple[Mixer, ...] = ()

    def repeated(self, passes: int, more: list[Weight]) -> Layer:
        """This layer passed several times by each token, with `more` weights."""
        weights = tuple(replace(w, passes=passes) for w in (*self.weights, *more))
        return Layer(self.kind, weights, self.mixers * passes)

    @property
    def routed(self) -> tuple[Weight, ...]:
        return tuple(w for w in self.weights if w.part == "routed")

    @property
    def num_experts(self) -> int:
        return max((w.copies for w in self.routed), default=0)

    @property
    def top_k(self) -> int:
        return max((w.used or 0 for w in self.routed), default=0)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A whole model. `outer` holds what is not in a layer; `mtp` the prediction layers behind the model.

    tied: the head is the embedding matrix. duplicates: elements that a checkpoint stores a second time (an MTP
    layer's own copy of embedding and head). assumed: keys that the config leaves out and whose absence has a plain
    meaning in this family, with that meaning. excluded: what the config names and this table leaves out. towers: the
    weights of what is excluded, where there is a table (read when asked for).
    """

    family: str
    d_model: int
    vocab: int
    layers: tuple[Layer, ...]
    outer: tuple[Weight, ...]
    tied: bool
    mtp: tuple[Layer, ...] = ()
    duplicates: int = 0
    assumed: tuple[tuple[str, object], ...] = ()
    excluded: tuple[str, ...] = ()
    towers: Callable[[], tuple[Weight, ...] | None] = field(default=lambda: None, compare=False)

    def runs(self) -> list[tuple[Layer, int]]:
        """Layers with how many of them follow each other."""
        found: list[tuple[Layer, int]] = []
        for layer in self.layers:
            if found and (layer is found[-1][0] or layer == found[-1][0]):
                found[-1] = layer, found[-1][1] + 1
            else:
                found.append((layer, 1))
        return found

    def weights(self, mtp: bool = False) -> Iterable[Weight]:
        yield from self.outer
        for layer in self.layers + (self.mtp if mtp else ()):
            yield from layer.weights

    @property
    def has_head(self) -> bool:
        return any(w.part == "head" and w.kind == "matrix" for w in self.outer)


def matrix(part: str, rows: int, columns: int, bias: bool = False, copies: int = 1, used: int | None = None,
           idle: int = 0) -> list[Weight]:
    """A linear map `columns` -> `rows`, with its bias."""
    found = [Weight(part, (rows, columns), "matrix", copies, used, idle)]
    if bias:
        found.append(Weight(part, (rows,), "bias", copies, used, idle))
    return found


def norm(width: int, bias: bool = False, copies: int = 1) -> list[Weight]:
    found = [Weight("norm", (width,), "norm", copies)]
    return [*found, Weight("norm", (width,), "bias", copies)] if bias else found
