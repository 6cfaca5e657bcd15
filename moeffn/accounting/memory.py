"""Memory of training: weights, gradients, optimizer state and saved activations.

Every expert carries gradients and optimizer state, used or not, so it is the total that counts here, never the
active weights; saved activations follow the experts a token uses, never their number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .block import Block, naive_saved_bytes, saved_bytes
from .counting import load
from .weights import Layer


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank in training: weights, gradients, optimizer state. experts: how many of all weights' bytes
    belong to the routed experts of this rank."""

    weights: float
    gradients: float
    optimizer: float
    expert_parameters: float
    other_parameters: float

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


def split_parameters(source: Any, *, mtp: bool = False) -> tuple[int, int]:
    """Routed and all other parameters of a model."""
    _, model = load(source)
    routed = sum(w.total for w in model.weights(mtp) if w.used is not None and w.part == "routed")
    return routed, sum(w.total for w in model.weights(mtp) if w.kind != "buffer") - routed


def training_memory(source: Any, *, ranks: int = 1, expert_parallel: int = 1, tensor_parallel: int = 1,
                    sharded: str = "optimizer", weight_bytes: int = 2, gradient_bytes: int = 4,
                    optimizer_bytes: int = 12, redundant: int = 0) -> Memory:
    """Weights, gradients and optimizer on one rank, under expert parallelism and sharding.

    Mixed-precision Adam as Megatron keeps it: 2 + 4 + 12 (master, two moments) = 18 bytes a parameter; Muon has one
    moment: optimizer_bytes 8. sharded: none; optimizer (ZeRO-1, 6 + 12/DP bytes a parameter); all (FSDP / ZeRO-3).
    Experts are replicated over ranks / expert_parallel ranks, all else over ranks / tensor_parallel.
    redundant: extra experts a rank and layer holds for balancing (weights alone).
    """
    for name, value in (("ranks", ranks), ("expert_parallel", expert_parallel), ("tensor_parallel", tensor_parallel)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    if ranks % expert_parallel or ranks % tensor_parallel:
        raise ValueError(f"ranks: expected a multiple of expert_parallel = {expert_parallel} and tensor_parallel = "
                         f"{tensor_parallel}, got {ranks}")
    if sharded not in ("none", "optimizer", "all"):
        raise ValueError(f"sharded: expected none, optimizer or all, got {sharded!r}")
    routed, other = split_parameters(source)
    local = routed / expert_parallel, other / tensor_parallel
    copies = ranks / expert_parallel, ranks / tensor_parallel
    weights = gradients = optimizer = 0.0
    for parameters, replicas in zip(local, copies, strict=True):
        spread = replicas if sharded == "all" else 1
        weights += parameters * weight_bytes / spread
        gradients += parameters * gradient_bytes / spread
        optimizer += parameters * optimizer_bytes / (1 if sharded == "none" else replicas)
    if redundant:
        weights += redundant * weight_bytes * sum(w.size for layer in load(source)[1].layers for w in layer.routed
                                                  if w.used is not None)
    return Memory(weights, gradients, optimizer, *local)


def block_of_layer(layer: Layer) -> Block | None:
    """The sizes of a layer's mixture, None for a layer without one. Latent experts: d_model is their own width."""
    matrices = [w for w in layer.routed if w.kind == "matrix"]
    if not matrices:
        return None
    d_expert, d_model = matrices[0].shape
    shared = [w for w in layer.weights if w.part == "shared" and w.kind == "matrix"]
    return Block(d_model=d_model, d_expert=d_expert, num_experts=matrices[0].copies, top_k=matrices[0].used or 0,
                 gated=len(matrices) == 3, d_shared=shared[0].shape[0] if shared else 0,
                 shared_gate=any(w.part == "shared_gate" for w in layer.weights),
                 bias=any(w.kind == "bias" for w in layer.routed))


@dataclass(frozen=True)
class SavedActivations:
    """Bytes that the routed experts of all layers keep for the backward of `tokens` tokens: with this runtime, and
    where each step is an operation of its own."""

    tokens: int
    layers: int
    saved: int
    naive: int


def saved_activations(source: Any, tokens: int, *, element: int = 2) -> SavedActivations:
    """What `tokens` tokens leave behind in the experts of a model (source as for `count`); element: bytes a value."""
    if tokens < 0:
        raise ValueError(f"tokens: expected at least 0, got {tokens}")
    _, model = load(source)
    blocks = [found for found in map(block_of_layer, model.layers) if found is not None]
    return SavedActivations(tokens, len(blocks), sum(saved_bytes(b, tokens, element=element) for b in blocks),
                            sum(naive_saved_bytes(b, tokens, element=element) for b in blocks))
