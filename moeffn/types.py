"""Frozen dataclasses that travel between the rooms: Routing, Plan, ExpertWeights, LoadStats.

Worked example used throughout, T=3, K=2, E=4:

    experts (T,K)    = [[2,0],[2,3],[0,2]]     slots 0..5 go to experts 2,0,2,3,0,2
    counts  (E,)     = [2,0,3,1]               offsets (E+1,) = [0,2,2,5,6]
    slot_of_row (N,) = [1,4, 0,2,5, 3]         stable: slots ascend inside an expert
    row_of_slot (N,) = [2,0,3,5,1,4]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from . import checks
from .config import SWIGLU, Activation, Layout


@dataclass(frozen=True)
class Routing:
    """Who goes where, with what weight.

    experts   (T, K) int32 (int64 is taken and narrowed); -1: this slot is not routed and contributes nothing
    weights   (T, K) float32 (float64 for the oracle)
    logits    (T, E…) float32, the router's raw logits; None when there is no learned router
    apply_to  "output": y = Σ w·expert(x). "input": y = Σ expert(w·x) (Llama 4)
    identity_weights  (T,) weight of x itself, from identity ("zero-computation") experts; None: none exist
    shared_weights    (T, S) router-given weights of S shared experts; None: none exist
    """

    experts: Tensor
    weights: Tensor
    logits: Tensor | None = None
    apply_to: Literal["output", "input"] = "output"
    identity_weights: Tensor | None = None
    shared_weights: Tensor | None = None

    def __post_init__(self) -> None:
        checks.tensor("Routing.experts", self.experts, 2)
        checks.index_dtype("Routing.experts", self.experts)
        checks.tensor("Routing.weights", self.weights, 2)
        checks.floating("Routing.weights", self.weights)
        checks.shape("Routing.weights", self.weights, tuple(self.experts.shape), "that of Routing.experts (T, K)")
        checks.same_device("Routing.weights", self.weights, self.experts.device, "Routing.experts")
        checks.one_of("Routing.apply_to", self.apply_to, ("output", "input"))
        T = self.experts.shape[0]
        for name, t in (("logits", self.logits), ("shared_weights", self.shared_weights)):
            if t is not None:
                checks.tensor(f"Routing.{name}", t, 2)
                checks.shape(f"Routing.{name}", t, (T, t.shape[1]), "T rows, as Routing.experts has")
        if self.identity_weights is not None:
            checks.shape("Routing.identity_weights", self.identity_weights, (T,), "(T,), as Routing.experts has")
        if self.experts.dtype != torch.int32:
            # An id beyond int32 must not wrap around into a valid expert.
            object.__setattr__(self, "experts", self.experts.clamp(-1, 2**31 - 1).to(torch.int32))

    @property
    def num_tokens(self) -> int:
        return self.experts.shape[0]

    @property
    def top_k(self) -> int:
        return self.experts.shape[1]


def routing_as_is(experts: Tensor, weights: Tensor, logits: Tensor | None, apply_to: str) -> Routing:
    """A Routing of tensors that fit for sure: without the checks, which cost 0.05 ms where the caches are cold."""
    if is_dynamo_compiling():  # which knows no other way to make one
        return Routing(experts, weights, logits, apply_to)  # type: ignore[arg-type]
    routing = object.__new__(Routing)
    routing.__dict__.update(experts=experts, weights=weights, logits=logits, apply_to=apply_to, identity_weights=None,
                            shared_weights=None)
    return routing


@dataclass(frozen=True)
class Plan:
    """Rows grouped by expert, in stable slot order (see the example at the top of this file). All int32.

    counts (E,), offsets (E+1,); expert e owns rows offsets[e]:offsets[e+1].
    slot_of_row (N,): slot at each row; rows from offsets[E] on hold -1 (their number is known on the host without a
    device read, which is why the buffer has N rows whatever is dropped).
    row_of_slot (N,): row of each slot, -1 for a slot that is not routed (id < 0 or >= E).
    """

    counts: Tensor
    offsets: Tensor
    slot_of_row: Tensor
    row_of_slot: Tensor

    @property
    def num_experts(self) -> int:
        return self.counts.shape[0]

    @property
    def num_slots(self) -> int:
        return self.row_of_slot.shape[0]


@dataclass(frozen=True)
class ExpertWeights:
    """Weights of E experts; any strides (a transposed checkpoint is a view, not a copy).

    w_in (E, 2F, D) gated, else (E, F, D);  w_out (E, D, F);  b_in (E, 2F | F), b_out (E, D) or None.
    Raises ValueError/TypeError naming the tensor when shapes, dtypes or devices do not fit.
    """

    w_in: Tensor
    w_out: Tensor
    b_in: Tensor | None = None
    b_out: Tensor | None = None
    activation: Activation = None  # type: ignore[assignment]  # SWIGLU; dynamo cannot take an object as a default
    layout: Layout = Layout.CONCAT

    def __post_init__(self) -> None:
        if self.activation is None:
            object.__setattr__(self, "activation", SWIGLU)
        checks.instance("ExpertWeights.activation", self.activation, Activation)
        object.__setattr__(self, "layout", checks.layout("ExpertWeights.layout", self.layout, Layout))
        checks.tensor("ExpertWeights.w_in", self.w_in, 3)
        checks.tensor("ExpertWeights.w_out", self.w_out, 3)
        E, rows, D = self.w_in.shape
        if self.activation.gated and rows % 2:
            raise checks.bad("ExpertWeights.w_in", "an even number 2F of rows for a gated activation", rows)
        F = rows // 2 if self.activation.gated else rows
        checks.shape("ExpertWeights.w_out", self.w_out, (E, D, F), "(E, D, F) matching w_in")
        for name, width, meaning in (("b_in", rows, "(E, rows of w_in)"), ("b_out", D, "(E, D)")):
            bias = getattr(self, name)
            if bias is not None:
                checks.tensor(f"ExpertWeights.{name}", bias, 2)
                checks.shape(f"ExpertWeights.{name}", bias, (E, width), meaning)
        for name, t in self.named_tensors():
            checks.floating(f"ExpertWeights.{name}", t)
            checks.same_device(f"ExpertWeights.{name}", t, self.w_in.device, "ExpertWeights.w_in")
        if self.w_out.dtype != self.w_in.dtype:
            raise checks.bad("ExpertWeights.w_out", f"dtype {self.w_in.dtype} (that of w_in)", self.w_out.dtype)

    def named_tensors(self) -> list[tuple[str, Tensor]]:
        """The tensors present, in the order w_in, w_out, b_in, b_out."""
        named = (("w_in", self.w_in), ("w_out", self.w_out), ("b_in", self.b_in), ("b_out", self.b_out))
        return [(n, t) for n, t in named if t is not None]

    @property
    def num_experts(self) -> int:
        return self.w_in.shape[0]

    @property
    def d_model(self) -> int:
        return self.w_in.shape[2]

    @property
    def d_expert(self) -> int:
        return self.w_out.shape[2]


@dataclass(frozen=True)
class LoadStats:
    """Load of one batch of routings. Tensors stay on their device until a property is read.

    counts (E,) int64: slots routed to each expert;  dropped () int64: slots not routed (capacity, mask or id -1).
    """

    counts: Tensor
    dropped: Tensor

    @property
    def max_over_mean(self) -> float:
        """max/mean load: 1 is perfect balance, E is everything on one expert; 0 when nothing was routed."""
        mean = self.counts.double().mean().item()
        return float(self.counts.max().item() / mean) if mean else 0.0

    @property
    def idle_experts(self) -> int:
        return int((self.counts == 0).sum())
