"""Experts modules that follow transformers' experts contract: what they hold, read once, and their forward.

The contract (`transformers.integrations.moe.use_experts_implementation`): parameters gate_up_proj or up_proj, down_proj
and their *_bias; flags has_gate, has_bias, is_transposed, is_concatenated, has_post_expert_norm; `_apply_gate`; called
as forward(hidden_states (T, D), top_k_index (T, K), top_k_weights (T, K)) -> (T, D). K may change from call to call,
and ids from num_experts on ("sentinels" of expert parallelism) contribute nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from ..config import Activation, Layout
from ..functional import expert_ffn, moe_ffn
from ..permutation import permute, plan, unpermute
from ..types import ExpertWeights, Routing
from . import gates, probe

# Experts that do all their arithmetic in float32 whatever the dtype of states and weights.
FLOAT32_EXPERTS = ("OpenAIPrivacyFilterExperts",)


@dataclass(frozen=True)
class ExpertsSpec:
    """How to read one experts module. in_name: its (E, …) input projection; transposed: (E, D, 2F) and (E, F, D);
    held: what its gate was made of when it was read."""

    activation: Activation
    layout: Layout
    in_name: str = "gate_up_proj"
    transposed: bool = False
    bias: bool = False
    post_norm: bool = False
    float32: bool = False
    held: gates.Held = field(default=(), repr=False, compare=False)


def is_decorated(module: nn.Module) -> bool:
    """Whether the module's forward is the one transformers' decorator put on its class."""
    forward = type(module).forward
    home = getattr(forward, "__globals__", {}).get("__name__")
    return hasattr(forward, "__wrapped__") and home == "transformers.integrations.moe"


def read_spec(experts: Any) -> ExpertsSpec:
    """The spec of a module with the experts contract. ValueError naming the module's class where its gate computes
    nothing that `Activation` expresses, where its gate and its layout flag disagree, or where weights are quantised."""
    cls = type(experts).__name__
    for name, weight in experts.named_parameters():
        if weight.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise checks.bad(f"{cls}.{name}", "a floating dtype of 16 bits or more (quantised weights are not served)",
                             weight.dtype)
    gated = getattr(experts, "has_gate", True)
    flagged = Layout.CONCAT if getattr(experts, "is_concatenated", True) else Layout.INTERLEAVED
    activation = gates.of_experts(experts, flagged)
    if activation is None:
        other = Layout.INTERLEAVED if flagged is Layout.CONCAT else Layout.CONCAT
        if gated and gates.of_experts(experts, other) is not None:
            raise checks.bad(f"{cls}.is_concatenated", f"the layout that its _apply_gate reads ({other.value})",
                             flagged.value)
        what = "_apply_gate" if gated else "act_fn"
        raise checks.bad(f"{cls}.{what}", "a function that moeffn.Activation expresses (silu, gelu, gelu_tanh, relu, "
                         "relu2, sigmoid, identity; with a clamp, an offset or soft caps when gated)",
                         repr(getattr(experts, "act_fn", what)))
    return ExpertsSpec(
        activation=activation, layout=flagged, in_name="gate_up_proj" if gated else "up_proj",
        transposed=getattr(experts, "is_transposed", False), bias=getattr(experts, "has_bias", False),
        post_norm=getattr(experts, "has_post_expert_norm", False),
        float32=any(c.__name__ in FLOAT32_EXPERTS for c in type(experts).__mro__),
        held=gates.hold(experts, "act_fn", "_apply_gate.__func__", *gates.shaping(experts)),
    )


@torch.compiler.assume_constant_result
def _read_spec_at(module_id: int) -> ExpertsSpec:
    return read_spec(gates.module_of(module_id))


def spec_of(experts: Any) -> ExpertsSpec:
    """`read_spec`, remembered on the module until its activation, gate or limits are exchanged."""
    spec = experts.__dict__.get("_moeffn_spec")
    if spec is None or gates.exchanged(experts, spec.held):
        spec = _read_spec_at(id(experts))
        experts.__dict__["_moeffn_spec"] = spec
    return spec


def weights_of(experts: Any, spec: ExpertsSpec) -> ExpertWeights:
    """The module's parameters as ExpertWeights: views, never copies; sizes are those of the tensors."""
    w_in, w_out = getattr(experts, spec.in_name), experts.down_proj
    if spec.transposed:
        w_in, w_out = w_in.transpose(1, 2), w_out.transpose(1, 2)
    b_in, b_out = (getattr(experts, spec.in_name + "_bias"), experts.down_proj_bias) if spec.bias else (None, None)
    return ExpertWeights(w_in, w_out, b_in, b_out, spec.activation, spec.layout)


def routing_of(index: Tensor, weights: Tensor) -> Routing:
    """Routing from a router's ids (T, K) and weights (T, K) of any floating dtype."""
    return Routing(experts=index, weights=weights if weights.dtype == torch.float64 else weights.float())


def run(experts: Any, hidden_states: Tensor, index: Tensor, weights: Tensor, backend: str) -> Tensor:
    """The experts' part of a block: (T, D) in, the weighted sum over K experts (T, D) out, in hidden_states' dtype."""
    spec = spec_of(experts)
    ew, routing = weights_of(experts, spec), routing_of(index, weights)
    x = hidden_states.float() if spec.float32 and hidden_states.dtype != torch.float64 else hidden_states
    if not spec.post_norm:
        return moe_ffn(x, routing, ew, backend=backend).to(hidden_states.dtype)
    # The norm sees each expert's own output, before the weighted sum.
    grouped = plan(routing.experts, ew.num_experts)
    rows = expert_ffn(permute(x, grouped), grouped.offsets, ew, backend=backend)
    return unpermute(experts.post_expert_norm(rows), grouped, routing.weights).to(hidden_states.dtype)


_agreed: set[tuple[type, ExpertsSpec]] = set()


def agree(experts: Any, spec: ExpertsSpec) -> None:
    """Runs the class's own loop and `run` on a small float64 stand-in; ValueError when they differ. Once a class."""
    if (type(experts), spec) in _agreed:
        return
    E, D, F = getattr(experts, spec.in_name).shape[0], 12, 10
    rows = 2 * F if spec.activation.gated else F
    shapes = {spec.in_name: (E, rows, D), "down_proj": (E, D, F)}
    if spec.transposed:
        shapes = {n: (e, b, a) for n, (e, a, b) in shapes.items()}
    shapes |= {spec.in_name + "_bias": (E, rows), "down_proj_bias": (E, D)}  # type: ignore[dict-item]
    tensors = {n: probe.random(*shapes.get(n, (D,)), seed=i) for i, (n, _) in enumerate(experts.named_parameters())}
    twin = probe.stand_in(experts, tensors)
    twin.__dict__.pop("_moeffn_spec", None)
    T, K = 6, min(2, E)
    x = probe.random(T, D, seed=50)
    index = torch.stack([torch.arange(K, device="cpu") + t for t in range(T)]) % E
    weights = probe.random(T, K, seed=51).abs()
    with torch.no_grad():
        try:
            own = type(experts).forward.__wrapped__(twin, x, index, weights)
        except Exception as error:
            raise checks.bad(type(experts).__name__, "a forward that runs its own parameters", repr(error)) from error
        mine = run(twin, x, index, weights, "torch")
    if own.shape != mine.shape or (own - mine).abs().max() > 1e-4 * own.abs().max():
        raise checks.bad(type(experts).__name__, "experts that compute what their flags and gate say",
                         "another result from its own forward on a small input")
    _agreed.add((type(experts), spec))
