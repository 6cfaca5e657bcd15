"""The MoE modules of transformers that do not follow its experts contract, one adapter each.

An adapter reads a module (activation and whatever else it must know; ValueError when it cannot serve it) and replaces
its forward. Routers are the model's own and are called as before, so hooks on them keep working.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from ..config import Activation
from ..dense import dense_ffn
from ..functional import moe_ffn
from ..permutation import permute, plan, unpermute
from ..types import ExpertWeights, Routing
from . import experts as contract
from . import gates
from .swap import adapter, own_forward


@dataclass(frozen=True)
class Reading:
    """The activation of a module, and the attributes it was read from."""

    activation: Activation
    held: gates.Held


@dataclass(frozen=True)
class Adapter:
    """`read` checks a module and returns what its forward needs; `takes` names the children the forward takes over;
    `note` says what a user should know."""

    read: Callable[[nn.Module], Reading | contract.ExpertsSpec]
    takes: tuple[str, ...] = ()
    note: str = ""


def _reader(path: str, *, gated: bool = True) -> Callable[[nn.Module], Reading]:
    """Reader of the activation at a dotted path, as the gate of a gated Activation or plain; "*": of every child."""

    def read(module: nn.Module) -> Reading:
        first, _, rest = path.partition(".")
        paths = [path] if first != "*" else [f"{name}.{rest}" for name, _ in module.named_children()]
        held = gates.hold(module, *paths)
        found = [gates.elementwise(value) for _, value in held]
        for (where, value), act in zip(held, found, strict=True):
            if act is None or act != found[0]:
                raise checks.bad(f"{type(module).__name__}.{where}", "an activation that moeffn.Activation expresses, "
                                 "the same for all experts", repr(value))
        assert found[0] is not None
        return Reading(replace(found[0], gated=gated), held)

    return read


def _activation(module: Any) -> Activation:
    """The activation, read anew when it was exchanged; ValueError naming it when the new one cannot be computed."""
    state = module._moeffn
    if gates.exchanged(module, state.reading.held):
        state.reading = _read_again(id(module))
    return state.reading.activation


@torch.compiler.assume_constant_result
def _read_again(module_id: int) -> Any:
    module = gates.module_of(module_id)
    return ADAPTERS[module._moeffn.adapter].read(module)


@adapter("experts")
def _experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return contract.run(self, hidden_states, top_k_index, top_k_weights, self._moeffn.backend)


@dataclass(frozen=True)
class Separate:
    """One expert whose weights are tensors of its own: w_in a tensor or (gate, up), as in `dense_ffn`."""

    w_in: Tensor | tuple[Tensor, Tensor]
    w_out: Tensor
    b_in: Tensor | None = None
    b_out: Tensor | None = None


def run_separate(x: Tensor, routing: Routing, experts: Sequence[Separate], activation: Activation, backend: str
                 ) -> Tensor:
    """The mixture over experts whose weights lie in separate tensors: x (T, D) -> (T, D).

    "auto" and "torch" visit the experts that have rows and copy no weight; another backend needs one tensor for all
    experts, and gets a copy.
    """
    if backend not in ("auto", "torch"):
        def stacked(name: str) -> Tensor | None:
            parts = [getattr(e, name) for e in experts]
            parts = [torch.cat(p) if isinstance(p, tuple) else p for p in parts]
            return None if parts[0] is None else torch.stack(parts)

        ew = ExpertWeights(stacked("w_in"), stacked("w_out"), stacked("b_in"), stacked("b_out"), activation)  # type: ignore[arg-type]
        return moe_ffn(x, routing, ew, backend=backend)
    grouped = plan(routing.experts, len(experts))
    rows = permute(x, grouped)
    bounds = grouped.offsets.tolist()
    parts = [dense_ffn(rows[a:b], e.w_in, e.w_out, b_in=e.b_in, b_out=e.b_out, activation=activation)
             for e, a, b in zip(experts, bounds, bounds[1:], strict=False) if b > a]
    parts.append(rows[bounds[-1]:].to(parts[0].dtype if parts else rows.dtype))
    return unpermute(torch.cat(parts), grouped, routing.weights)


@adapter("dbrx")
def _dbrx(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    B = hidden_states.shape[0]
    x = hidden_states.reshape(-1, self.hidden_size)
    shape = (self.num_experts, self.ffn_hidden_size, self.hidden_size)
    w1, v1, w2 = (getattr(self.mlp, name).view(shape).unbind(0) for name in ("w1", "v1", "w2"))
    experts = [Separate((gate, up), down.t()) for gate, up, down in zip(w1, v1, w2, strict=True)]
    routing = contract.routing_of(top_k_index, top_k_weights)
    y = run_separate(x, routing, experts, _activation(self), self._moeffn.backend)
    return y.to(hidden_states.dtype).view(B, -1, self.hidden_size)


@adapter("llama4")
def _llama4(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    x = hidden_states.reshape(-1, self.hidden_dim)
    scores, logits = self.router(x)
    index = logits.detach().topk(self.router.top_k, dim=1).indices  # the router's own choice, which it does not return
    ew = ExpertWeights(self.experts.gate_up_proj.transpose(1, 2), self.experts.down_proj.transpose(1, 2),
                       activation=_activation(self))
    routing = Routing(index, contract.routing_of(index, scores.gather(1, index)).weights, apply_to="input")
    routed = moe_ffn(x, routing, ew, backend=self._moeffn.backend)
    return self.shared_expert(x) + routed.to(x.dtype), logits


@adapter("jetmoe")
def _jetmoe(self: Any, layer_input: Tensor) -> Tensor:
    x = layer_input.reshape(-1, layer_input.shape[-1])
    # The router returns slots sorted by expert; put ids and weights back in slot order.
    slot_of_row, _, row_weights, counts, _ = self.router(x)
    row_of_slot = torch.empty_like(slot_of_row)
    row_of_slot[slot_of_row] = torch.arange(slot_of_row.numel(), device=x.device)
    sizes = torch.tensor(counts, device=x.device)
    ids = torch.repeat_interleave(torch.arange(len(counts), device=x.device), sizes)
    shape = (x.shape[0], self.router.top_k)
    routing = contract.routing_of(ids[row_of_slot].view(shape), row_weights[row_of_slot].view(shape))
    ew = ExpertWeights(self.input_linear.weight, self.output_linear.weight, activation=_activation(self))
    y = moe_ffn(x, routing, ew, backend=self._moeffn.backend)
    return y.to(x.dtype).view(layer_input.shape) + self.bias


@adapter("longcat_flash")
def _longcat(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    E = self.down_proj.shape[0]
    routing = contract.routing_of(top_k_index, top_k_weights)
    ew = ExpertWeights(self.gate_up_proj[:E], self.down_proj, activation=_activation(self))
    y = moe_ffn(hidden_states, routing, ew, backend=self._moeffn.backend)
    # Ids from E on are the identity experts, which cost no weights.
    wide = top_k_weights.to(torch.promote_types(top_k_weights.dtype, hidden_states.dtype))
    passed = torch.where(top_k_index >= E, wide, 0.0).sum(-1, keepdim=True)
    return y + (passed * self.identity_expert(hidden_states)).to(y.dtype)


def _read_longcat(module: nn.Module) -> Reading:
    if module.gate_up_proj is None:
        raise checks.bad("LongcatFlashExperts.gate_up_proj", "routed experts beside the identity experts", None)
    return _reader("act_fn")(module)


@adapter("switch_transformers")
def _switch(self: Any, hidden_states: Tensor, selected_experts: Tensor, routing_weights: Tensor) -> Tensor:
    members = list(self.values())
    if self.training and members[0].dropout.p > 0:
        return own_forward(self, hidden_states, selected_experts, routing_weights)
    chosen = selected_experts.argmax(-1)  # (T, 1), of a one-hot row that is zero beyond the expert's capacity
    index = torch.where(selected_experts.sum(-1) > 0, chosen, -1)
    experts = [Separate(m.wi.weight, m.wo.weight) for m in members]
    routing = contract.routing_of(index, routing_weights)
    y = run_separate(hidden_states, routing, experts, _activation(self), self._moeffn.backend)
    return y.to(hidden_states.dtype)


@adapter("inkling_shared")
def _inkling_shared(self: Any, hidden_states: Tensor, gammas: Tensor) -> Tensor:
    gammas = gammas.reshape(*hidden_states.shape[:-1], self.n_shared_experts)
    total: Any = None
    for s in range(self.n_shared_experts):
        y = dense_ffn(hidden_states, (self.gate_proj[s], self.up_proj[s]), self.down_proj[s],
                      activation=_activation(self))
        y = (y * gammas[..., s, None]).float() if y.dtype != torch.float64 else y * gammas[..., s, None]
        total = y if total is None else total + y
    return total.to(hidden_states.dtype)


@adapter("doge")
def _doge(self: Any, hidden_states: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Rank-1 experts (F = 1) under product keys, beside a dense gated FFN."""
    B, S, D = hidden_states.shape
    x = hidden_states.reshape(B * S, D)
    logits = self.router_gate(hidden_states).view(2, B * S, -1)  # the family's own split of the two halves
    (score_a, score_b), (key_a, key_b) = logits.topk(self.num_keys, dim=-1)
    pair_scores = (score_a[..., :, None] + score_b[..., None, :]).flatten(-2)
    pair_ids = (key_a[..., :, None] * self.num_keys + key_b[..., None, :]).flatten(-2)
    scores, position = pair_scores.topk(self.top_k, dim=-1)
    weights = scores.softmax(-1)
    if self.norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    act: Activation = _activation(self)
    rank_one = ExpertWeights(self.down_embed.weight[:, None, :], self.up_embed.weight[:, :, None],
                             activation=Activation(kind=act.kind, alpha=act.alpha, gated=False))
    routed = moe_ffn(x, contract.routing_of(pair_ids.gather(-1, position), weights), rank_one,
                     backend=self._moeffn.backend)
    biased = self.gate_proj.bias is not None
    dense = dense_ffn(hidden_states, (self.gate_proj.weight, self.up_proj.weight), self.down_proj.weight,
                      b_in=(self.gate_proj.bias, self.up_proj.bias) if biased else None, b_out=self.down_proj.bias,
                      activation=act)
    return dense + routed.view(B, S, D), logits


@adapter("vitpose_backbone")
def _vitpose(self: Any, hidden_state: Tensor, indices: Tensor) -> Tensor:
    """Each sample of (B, S, D) has the expert of its data set, which gives the last `part_features` columns."""
    owner = indices.reshape(-1)
    order, parts = [], []
    for i in range(-1, self.num_experts):  # -1: no such data set, those columns are zero
        mine = ((owner < 0) | (owner >= self.num_experts) if i < 0 else owner == i).nonzero()[:, 0]
        last = self.experts[max(i, 0)]
        weight, bias = (t if i >= 0 else torch.zeros_like(t) for t in (last.weight, last.bias))
        order.append(mine)
        parts.append(dense_ffn(hidden_state[mine], self.fc1.weight, torch.cat([self.fc2.weight, weight]),
                               b_in=self.fc1.bias, b_out=torch.cat([self.fc2.bias, bias]),
                               activation=_activation(self)))
    return torch.cat(parts)[torch.cat(order).argsort()]


ADAPTERS: dict[str, Adapter] = {
    "experts": Adapter(contract.spec_of),
    "dbrx": Adapter(_reader("mlp.activation_fn"), ("mlp",)),
    "llama4": Adapter(_reader("experts.act_fn"), ("experts",)),
    "jetmoe": Adapter(_reader("activation"), ("input_linear", "output_linear")),
    "longcat_flash": Adapter(_read_longcat, ("identity_expert",)),
    "switch_transformers": Adapter(_reader("*.act", gated=False), ("*",), "in training with dropout between the "
                                   "projections, the experts' own forward runs; with a backend other than torch asked "
                                   "for by name, idle experts get gradients of zero where the original gives None"),
    "inkling_shared": Adapter(_reader("act_fn")),
    "doge": Adapter(_reader("act_fn"), ("*",)),
    "vitpose_backbone": Adapter(_reader("act", gated=False), ("*",), "no router: the data set of a sample names its "
                                "expert"),
}
