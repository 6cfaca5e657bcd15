"""Modules: Router, Experts, MoEFFN, DenseFFN. Thin: parameters, initial values, and calls of the functions."""

from __future__ import annotations

import math
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.nn.functional import linear

from . import backends, checks
from .backends.native import plain_moe, plain_route
from .balance import attach_loss, load_balance_loss, load_stats, z_loss
from .config import SWIGLU, Activation, Layout, MoEConfig, RouterConfig
from .dense import dense_ffn
from .functional import moe_ffn, moe_with_shared
from .routing import apply_capacity, route
from .types import ExpertWeights, LoadStats, Routing, routing_as_is


def _parameter(*shape: int, fan_in: int, device: Any, dtype: Any) -> nn.Parameter:
    bound = 1.0 / math.sqrt(fan_in)
    return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype).uniform_(-bound, bound))


class Router(nn.Module):
    """Scores tokens and picks experts: x (T, D) -> Routing. Logits and all that follows are float32 (float64 if x is).

    weight (E + Z + S, D); bias (E + Z + S,) when asked; selection_bias (E + Z,), a float32 buffer that stays float32
    through `.to(dtype)`, added to what is ranked and never to the weights. backend: as in `route`.
    counts (E,) int64, kept only with a selection bias: slots routed to each expert since `reset_counts`, counted in
    backward, so that recomputation under activation checkpointing and evaluation leave it alone.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    selection_bias: Tensor | None
    counts: Tensor | None

    def __init__(self, d_model: int, config: RouterConfig, *, bias: bool = False, selection_bias: bool = False,
                 backend: str = "auto", device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        checks.positive_int("d_model", d_model)
        checks.instance("config", config, RouterConfig)
        backends.check_name(backend)
        self.config, self.backend = config, backend
        rows = config.num_logits
        self.weight = _parameter(rows, d_model, fan_in=d_model, device=device, dtype=dtype)
        self.bias = nn.Parameter(torch.zeros(rows, device=device, dtype=dtype)) if bias else None
        classes = config.num_experts + config.num_identity_experts
        ranked = torch.zeros(classes, device=device, dtype=torch.float32) if selection_bias else None
        self.register_buffer("selection_bias", ranked)
        counts = torch.zeros(config.num_experts, device=device, dtype=torch.int64) if selection_bias else None
        self.register_buffer("counts", counts, persistent=False)

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None, expert_ids: Tensor | None = None) -> Routing:
        """x (T, D), token_mask (T,) bool, expert_ids (T, K) for hash routing -> Routing.

        With backend "native", few tokens and no gradient, logits and choice are one C++ call."""
        if self.backend == "native" and token_mask is None and expert_ids is None and not is_dynamo_compiling():
            found = plain_route(x, self.weight, self.bias, self.selection_bias, self.config)
            if found is not None:
                return routing_as_is(*found, self.config.apply_to)
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        if token_mask is not None:  # a NaN in padding must not reach the weight's gradient as 0 * NaN
            checks.tensor("token_mask", token_mask, 1)
            checks.boolean("token_mask", token_mask)
            checks.shape("token_mask", token_mask, (x.shape[0],), "(T,)")
            checks.same_device("token_mask", token_mask, x.device, "x")
            x = torch.where(token_mask[:, None], x, 0.0)
        with torch.autocast("cpu" if x.device.type == "meta" else x.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(wide)
            logits = linear(x.to(wide), self.weight.to(wide), bias)
        return route(logits, self.config, selection_bias=self.selection_bias, token_mask=token_mask,
                     expert_ids=expert_ids, backend=self.backend)

    def reset_counts(self) -> None:
        """Start a new counting period (once per optimizer step, after the bias was updated)."""
        if self.counts is not None:
            self.counts.zero_()

    def _apply(self, fn: Any, recurse: bool = True) -> Router:
        kept = self.selection_bias
        super()._apply(fn, recurse)
        moved = self.selection_bias
        if kept is not None and moved is not None and moved.dtype != kept.dtype:
            self.selection_bias = kept.to(moved.device)
        return self

    def extra_repr(self) -> str:
        return f"d_model={self.weight.shape[1]}, {self.config}"


class Experts(nn.Module):
    """The weights of E experts as packed parameters: w_in (E, 2F | F, D), w_out (E, D, F), b_in, b_out or absent."""

    w_in: nn.Parameter
    w_out: nn.Parameter
    b_in: nn.Parameter | None
    b_out: nn.Parameter | None

    def __init__(self, num_experts: int, d_model: int, d_expert: int, *, activation: Activation = SWIGLU,
                 layout: Layout = Layout.CONCAT, bias: bool = False, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        E, D, F = num_experts, d_model, d_expert
        for name, value in (("num_experts", E), ("d_model", D), ("d_expert", F)):
            checks.positive_int(name, value)
        self.activation, self.layout = activation, layout
        width = activation.width_in(F)
        where = {"device": device, "dtype": dtype}
        self.w_in = _parameter(E, width, D, fan_in=D, **where)
        self.w_out = _parameter(E, D, F, fan_in=F, **where)
        self.b_in = nn.Parameter(torch.zeros(E, width, **where)) if bias else None
        self.b_out = nn.Parameter(torch.zeros(E, D, **where)) if bias else None

    @property
    def weights(self) -> ExpertWeights:
        """The parameters as ExpertWeights (no copies)."""
        return ExpertWeights(self.w_in, self.w_out, self.b_in, self.b_out, self.activation, self.layout)

    def forward(self, x: Tensor, routing: Routing, *, backend: str = "auto") -> Tensor:
        """x (…, D) with T tokens, a routing of T tokens -> (…, D)."""
        if not is_dynamo_compiling():
            y = plain_moe(x, routing, self, backend)  # without the checks of an ExpertWeights
            if y is not None:
                return y
        return moe_ffn(x, routing, self.weights, backend=backend)

    def extra_repr(self) -> str:
        E, D, F = self.w_out.shape
        return f"num_experts={E}, d_model={D}, d_expert={F}, activation={self.activation}, layout={self.layout.value}"


class DenseFFN(nn.Module):
    """A dense FFN: two matrices, or three (gate and up packed in w_in) for a gated activation.

    w_in (2F | F, D), w_out (D, F), b_in, b_out or absent; gate (1, D) with `output_gate`: the output is multiplied by
    sigmoid(x · gate) (the shared expert of Qwen2-MoE). x (…, D) -> (…, D).
    """

    def __init__(self, d_model: int, d_hidden: int, *, activation: Activation = SWIGLU, layout: Layout = Layout.CONCAT,
                 bias: bool = False, output_gate: bool = False, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        D, F = d_model, d_hidden
        checks.positive_int("d_model", D)
        checks.positive_int("d_hidden", F)
        self.activation, self.layout = activation, checks.layout("layout", layout, Layout)
        width = activation.width_in(F)
        where = {"device": device, "dtype": dtype}
        self.w_in = _parameter(width, D, fan_in=D, **where)
        self.w_out = _parameter(D, F, fan_in=F, **where)
        self.b_in = nn.Parameter(torch.zeros(width, **where)) if bias else None
        self.b_out = nn.Parameter(torch.zeros(D, **where)) if bias else None
        self.gate = _parameter(1, D, fan_in=D, **where) if output_gate else None

    def forward(self, x: Tensor) -> Tensor:
        y = dense_ffn(x, self.w_in, self.w_out, b_in=self.b_in, b_out=self.b_out, activation=self.activation,
                      layout=self.layout)
        gate = self.output_gate(x)
        return y if gate is None else gate.to(y.dtype) * y

    def output_gate(self, x: Tensor) -> Tensor | None:
        """What the output is multiplied by: x (…, D) -> (…, 1), or None."""
        if self.gate is None:
            return None
        dtype = torch.promote_types(x.dtype, self.gate.dtype)
        return torch.sigmoid(linear(x.to(dtype), self.gate.to(dtype)))

    @property
    def weights(self) -> ExpertWeights:
        """The parameters as those of a single expert (no copies)."""
        b_in, b_out = (None if b is None else b[None] for b in (self.b_in, self.b_out))
        return ExpertWeights(self.w_in[None], self.w_out[None], b_in, b_out, self.activation, self.layout)

    def extra_repr(self) -> str:
        D, F = self.w_out.shape
        return f"d_model={D}, d_hidden={F}, activation={self.activation}, bias={self.b_in is not None}"


class MoEFFN(nn.Module):
    """A drop-in FFN: x (…, D) -> (…, D), built from a MoEConfig.

    In training, losses with a non-zero coefficient are attached to the output's graph: y.backward() sends their
    gradient to the router without any plumbing. State dict: router.weight, router.bias, router.selection_bias,
    experts.w_in, experts.w_out, experts.b_in, experts.b_out, shared.…; what is absent is not there.
    """

    def __init__(self, config: MoEConfig, *, backend: str = "auto", device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        checks.instance("config", config, MoEConfig)
        backends.check_name(backend)
        c = self.config = config
        self.backend = backend
        where = {"device": device, "dtype": dtype}
        self.router = Router(c.d_model, c.route, bias=c.router_bias, selection_bias=c.selection_bias,
                             backend=backend, **where)
        self.experts = Experts(c.num_experts, c.d_model, c.d_expert, activation=c.activation, layout=c.layout,
                               bias=c.bias, **where)
        self.shared = None
        if c.d_shared:
            self.shared = DenseFFN(c.d_model, c.d_shared, activation=c.activation, layout=c.layout, bias=c.bias,
                                   output_gate=c.shared_gate, **where)
        self._last: Routing | None = None

    @overload
    def forward(self, x: Tensor, *, token_mask: Tensor | None = None) -> Tensor: ...
    @overload
    def forward(self, x: Tensor, *, token_mask: Tensor | None = None, return_routing: bool) -> Any: ...

    def forward(self, x: Tensor, *, token_mask: Tensor | None = None, return_routing: bool = False) -> Any:
        """x (…, D) -> (…, D), or (y, Routing) with `return_routing`, and then no loss is attached.

        token_mask (…,) bool: False marks padding, which is routed nowhere (its routed output is 0) and counted in no
        loss or statistic. Raises ValueError/TypeError for shapes and dtypes that do not fit.
        """
        c = self.config
        checks.tensor("x", x)
        checks.floating("x", x)
        if x.ndim < 1 or x.shape[-1] != c.d_model:
            raise checks.bad("x", f"last dimension d_model = {c.d_model}", f"shape {tuple(x.shape)}")
        flat = x.reshape(-1, c.d_model)
        if token_mask is not None:
            checks.tensor("token_mask", token_mask)
            checks.shape("token_mask", token_mask, tuple(x.shape[:-1]), "the leading dimensions of x")
            token_mask = token_mask.reshape(-1)
        routing = self.router(flat, token_mask=token_mask)
        if c.capacity_factor is not None:
            capacity = math.ceil(c.capacity_factor * routing.experts.numel() / c.num_experts)
            routing, _ = apply_capacity(routing, c.num_experts, capacity)
        weights = routing.weights.detach() if routing.weights.requires_grad else routing.weights
        self._last = routing_as_is(routing.experts, weights, None, routing.apply_to)
        y = self._mix(flat, routing)
        if self.training and torch.is_grad_enabled():
            if self.router.counts is not None and y.requires_grad:
                y = _CountLoad.apply(y, self.router.counts, routing.experts)
            if not return_routing:
                y = self._with_losses(y, routing, token_mask)
        y = y.reshape(x.shape)
        return (y, routing) if return_routing else y

    def _mix(self, x: Tensor, routing: Routing) -> Tensor:
        """Routed plus shared experts: x (T, D) -> (T, D)."""
        if self.shared is None:
            return self.experts(x, routing, backend=self.backend)
        y = None
        if not self.training:  # where checkpointing runs a layer without gradients first, both runs must agree
            y = moe_with_shared(x, routing, self.experts.weights, self.shared.weights, self.shared.output_gate(x),
                                backend=self.backend)
        if y is None:
            y = self.experts(x, routing, backend=self.backend) + self.shared(x)
        return y * 0.5 if self.config.shared_combine == "average" else y

    def _with_losses(self, y: Tensor, routing: Routing, token_mask: Tensor | None) -> Tensor:
        c = self.config
        assert routing.logits is not None
        if c.aux_loss_coef:
            y = attach_loss(y, c.aux_loss_coef * load_balance_loss(routing, c.route, token_mask=token_mask))
        if c.z_loss_coef:
            y = attach_loss(y, c.z_loss_coef * z_loss(routing.logits, token_mask=token_mask))
        return y

    def __repr__(self) -> str:
        """One line, whatever the layer holds: a model prints it once a block."""
        return f"{type(self).__name__}({repr(self.config).partition('(')[2][:-1]}, backend={self.backend!r})"

    def load_stats(self) -> LoadStats | None:
        """Load of the latest forward; None before the first. Counting happens here, not in forward."""
        return None if self._last is None else load_stats(self._last, self.config.num_experts)


class _CountLoad(torch.autograd.Function):
    """Identity whose backward adds the routed slots to `counts`: once per backward, however often forward is redone."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, counts: Tensor, experts: Tensor) -> Tensor:
        ctx.save_for_backward(experts)
        ctx.counts = counts
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (experts,) = ctx.saved_tensors
        E = ctx.counts.shape[0]
        slots = experts.reshape(-1).to(torch.int64)
        slots = torch.where(slots < 0, E, slots)
        total = torch.zeros(E + 1, dtype=torch.int64, device=grad.device)
        ctx.counts += total.scatter_add_(0, slots, torch.ones_like(slots))[:E]
        return grad, None, None
