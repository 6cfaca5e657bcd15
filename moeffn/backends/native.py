"""Backend "native": the C++ kernels of csrc/ on CPUs. Checks tensors, hands their addresses to `moeffn._native`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import checks
from ..config import ACTIVATION_KINDS, NORM_FLOOR, STAND_IN, Activation, Layout, RouterConfig
from ..types import ExpertWeights, Plan, Routing
from . import native_backward
from .base import LATEST, Grads, Needs
from .memory import buffer

_native: ModuleType | None
try:
    from .. import _native  # type: ignore[attr-defined,no-redef]  # after torch, whose OpenMP library it shares
except ImportError as error:
    _native = None
    _missing = f"the C++ module moeffn._native is not built ({error})"

_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@functools.lru_cache(maxsize=256)
def _router(c: RouterConfig) -> tuple[int, int, bool, bool, bool, float, float] | None:
    """What the C++ router takes: plain softmax and sigmoid; None for other configs."""
    plain = RouterConfig(num_experts=c.num_experts, top_k=c.top_k, score=c.score, order=c.order,
                         renormalize=c.renormalize, renorm_eps=c.renorm_eps, scale=c.scale, apply_to=c.apply_to)
    if c.score not in ("softmax", "sigmoid") or c != plain:
        return None
    return (c.num_experts, c.top_k, c.score == "sigmoid", c.order == "topk_score", c.renormalize, c.renorm_eps, c.scale)


def _route_outputs(x: Tensor, T: int, K: int, E: int) -> tuple[Tensor, Tensor, Tensor]:
    """Room for experts, weights and logits."""
    return (x.new_empty((T, K), dtype=torch.int32), x.new_empty((T, K), dtype=torch.float32),
            x.new_empty((T, E), dtype=torch.float32))


def _bind() -> None:
    """Hands csrc/plain.h what it asks of torch."""
    module().bind_torch({
        "Tensor": Tensor, "Parameter": torch.nn.Parameter, "Routing": Routing,
        "exchange": Tensor.__dlpack_c_exchange_api__,  # type: ignore[attr-defined]
        "empty_like": torch.empty_like, "is_grad_enabled": torch.is_grad_enabled, "is_neg": Tensor.is_neg,
        "is_autocast_enabled": torch.is_autocast_enabled, "is_tracing": torch._C._is_tracing,
        "dispatch_modes": torch._C._len_torch_dispatch_stack, "forward_ad": forward_ad, "activation": _activation,
        "interleaved": Layout.INTERLEAVED, "router": _router, "route_outputs": _route_outputs,
        "latest": LATEST,
    })


def _never_plain(*arguments: Any) -> Any:
    """In place of the functions below where the module is not built."""
    return None


# plain_moe(x, routing, weights, backend): `moe_ffn` in one C++ call where this backend is meant, nothing watches or
# differentiates and all arguments fit; None elsewhere. `weights`: an ExpertWeights, or anything with its attributes.
# plain_route(x, weight, bias, selection_bias, config): a router of few tokens under the same conditions: x (T, D),
# weight (E, D), bias and selection_bias (E,) or None -> experts (T, K) int32, weights (T, K) and logits (T, E) float32.
# Neither is for code that dynamo traces.
plain_moe: Callable[..., Tensor | None] = _never_plain if _native is None else _native.plain_moe
plain_route: Callable[..., tuple[Tensor, Tensor, Tensor] | None]
plain_route = _never_plain if _native is None else _native.plain_route


def module() -> ModuleType:
    """The compiled module; ImportError with the reason where it was not built."""
    if _native is None:
        raise ImportError(_missing)
    return _native


def _in_memory(t: Tensor) -> Tensor:
    """t as memory holds it: a lazily negated view or a tensor of symbolic zeros has no values at its address."""
    if t.is_neg():
        return t.resolve_neg()
    return torch.zeros(t.shape, dtype=t.dtype, device=t.device) if t._is_zerotensor() else t


def _strided(t: Tensor) -> tuple[int, ...]:
    if t.is_neg() or t._is_zerotensor():
        raise checks.bad("weights", "tensors with values in memory", "a negated view or symbolic zeros")
    return (t.data_ptr(), _CODES[t.dtype], *t.stride())


def _activation(a: Activation) -> tuple[int, bool, float, bool, float, bool, float, float, float]:
    return (ACTIVATION_KINDS.index(a.kind), a.gated, a.alpha, a.limit is not None, a.limit or 0.0, a.limit_after,
            a.up_offset, a.softcap_gate or 0.0, a.softcap_up or 0.0)


def _describe(ew: ExpertWeights):
    """The C++ side's view of the weights: addresses and strides, so valid as long as the tensors are."""
    bias = [None if b is None else _strided(b) for b in (ew.b_in, ew.b_out)]
    return module().experts(ew.num_experts, ew.d_expert, ew.d_model, _activation(ew.activation),
                            ew.layout is Layout.INTERLEAVED, _strided(ew.w_in), _strided(ew.w_out), *bias)


def _float_weights(weights: Tensor) -> Tensor:
    return weights if weights.dtype == torch.float32 and weights.is_contiguous() else weights.float().contiguous()


def _with_plain_biases(ew: ExpertWeights) -> ExpertWeights:
    b_in, b_out = (b if b is None or b.is_contiguous() else b.contiguous() for b in (ew.b_in, ew.b_out))
    return dataclasses.replace(ew, b_in=b_in, b_out=b_out)


class NativeBackend:
    name = "native"

    @property
    def last_kernel(self) -> str:
        """Instruction set of the latest call's kernels; "none" before the first."""
        return module().last_kernel()

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if _native is None:
            return _missing
        if device.type != "cpu":
            return f"runs on CPUs, not on {device.type}"
        return None if dtype in _CODES else f"takes float32, bfloat16 and float16, not {dtype}"

    def plan(self, experts: Tensor, num_experts: int) -> Plan:
        experts = experts.contiguous()
        N = experts.numel()
        counts, offsets, slots, rows = (experts.new_empty(n) for n in (num_experts, num_experts + 1, N, N))
        module().plan(experts.data_ptr(), N, num_experts, counts.data_ptr(), offsets.data_ptr(), slots.data_ptr(),
                      rows.data_ptr())
        return Plan(counts, offsets, slots, rows)

    def forward(self, x: Tensor, plan: Plan, weights: Tensor, experts: ExpertWeights, *, apply_to: str, save: bool
                ) -> tuple[Tensor, Tensor | None]:
        T, D = x.shape
        K = weights.shape[1]
        x, weights = _in_memory(x), _in_memory(weights)
        weights = _float_weights(weights)
        y = buffer((T, D), x.dtype, x.device)
        h = buffer((T * K, experts.w_in.shape[1]), x.dtype, x.device) if save else None
        maps = [t.contiguous() for t in (plan.offsets, plan.slot_of_row, plan.row_of_slot)]
        module().forward(
            _describe(experts), x.data_ptr(), _CODES[x.dtype], T, *x.stride(), K, *(t.data_ptr() for t in maps),
            weights.data_ptr(), apply_to == "input", y.data_ptr(), 0 if h is None else h.data_ptr())
        return y, h

    def moe(self, x: Tensor, experts: Tensor, weights: Tensor, ew: ExpertWeights, *, apply_to: str,
            shared: ExpertWeights | None = None, shared_gate: Tensor | None = None) -> Tensor:
        """Plan and forward in one call, for inference: x (T, D), experts (T, K), weights (T, K) -> (T, D).

        `shared` is a dense FFN (E = 1) over every token, times `shared_gate` (T,) when given, in the same parallel
        region as the experts.
        """
        T, D = x.shape
        x, weights = _in_memory(x), _in_memory(weights)
        experts, weights = experts.contiguous(), _float_weights(weights)
        gate = None if shared_gate is None else shared_gate.float().contiguous()
        y = x.new_empty((T, D))
        module().moe(
            _describe(ew), x.data_ptr(), _CODES[x.dtype], T, *x.stride(), experts.shape[1], experts.data_ptr(),
            weights.data_ptr(), apply_to == "input", y.data_ptr(), None if shared is None else _describe(shared),
            0 if gate is None else gate.data_ptr())
        return y

    def routes(self, config: RouterConfig, dtype: torch.dtype) -> bool:
        """Which configs `route` takes: plain softmax and sigmoid routers."""
        return dtype == torch.float32 and _router(config) is not None

    def route(self, logits: Tensor, config: RouterConfig, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """logits (T, E) float32, bias (E,) -> ids (T, K) int32 and weights (T, K) float32 of `moeffn.route`."""
        T = logits.shape[0]
        logits = _in_memory(logits).contiguous()
        bias = None if bias is None else bias.float().contiguous()
        ids = logits.new_empty((T, config.top_k), dtype=torch.int32)
        weights = logits.new_empty((T, config.top_k))
        module().route(logits.data_ptr(), T, _router(config), 0 if bias is None else bias.data_ptr(), ids.data_ptr(),
                       weights.data_ptr())
        return ids, weights

    def route_backward(self, dweights: Tensor, logits: Tensor, ids: Tensor, config: RouterConfig) -> Tensor:
        """Gradient (T, E) of `route`'s weights with respect to its logits, from dweights (T, K) and its ids."""
        index = ids.long()
        z = torch.nan_to_num(logits, nan=-STAND_IN, posinf=STAND_IN, neginf=-STAND_IN)
        probs = None
        if config.score == "sigmoid":
            score = torch.sigmoid(z.gather(1, index))
        elif config.order == "topk_score":
            score = torch.softmax(z.gather(1, index), -1)
        else:
            probs = torch.softmax(z, -1)
            score = probs.gather(1, index)
        d = dweights * config.scale
        if config.renormalize:
            total = score.sum(-1, keepdim=True) + config.renorm_eps
            norm = total.clamp(min=NORM_FLOOR)
            d = (d - torch.where(total >= NORM_FLOOR, (d * score).sum(-1, keepdim=True) / norm, 0.0)) / norm
        if config.score == "sigmoid":
            grad = torch.zeros_like(z).scatter(1, index, d * score * (1 - score))
        else:
            d = d * score
            along = d.sum(-1, keepdim=True)
            grad = torch.zeros_like(z).scatter(1, index, d if probs is not None else d - along * score)
            grad = grad if probs is None else grad - along * probs
        return torch.where(torch.isfinite(logits), grad, 0.0)

    def backward(self, dy: Tensor, x: Tensor | None, h: Tensor, plan: Plan, weights: Tensor, experts: ExpertWeights, *,
                 apply_to: str, needs: Needs, into: Grads | None = None) -> Grads:
        weights, ew = _float_weights(weights), _with_plain_biases(experts)
        return native_backward.run(module(), _describe(ew), dy, x, h, plan, weights, ew, apply_to=apply_to,
                                   needs=needs, into=into)


if _native is not None:
    _bind()
