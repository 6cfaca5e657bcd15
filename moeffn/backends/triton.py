"""Backend "triton": the kernels of `moeffn.kernels` on NVIDIA and AMD GPUs.

Under TRITON_INTERPRET=1 (set before triton is imported) the same kernels run on CPU tensors in float32 and float16:
slow, for tests only, and only when asked for by name.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from ..config import Activation, Layout, RouterConfig
from ..kernels import backward as bwd
from ..kernels import decode, metadata, router, tuned
from ..kernels import forward as fwd
from ..kernels.launch import cdiv, interpreting
from ..kernels.tiles import Family, Kernel, Problem, TileConfig, pick_tiles
from ..types import ExpertWeights, Plan
from .base import Grads, Needs

FEW_SLOTS = 64  # up to here most slots have an expert to themselves (128 experts), so no weights are read twice
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class TritonBackend:
    """`pick` chooses every tile: by default the tiles measured on this device where MOEFFN_TILES names a file that
    `moeffn tune` wrote, else the shipped ones. Tests hand in their own to reach tile edges with small tensors."""

    name = "triton"

    def __init__(self, pick: Callable[[Problem], TileConfig] | None = None, family: Family | None = None) -> None:
        path = os.environ.get(tuned.VARIABLE) if pick is None else None
        self.pick = pick or (tuned.load(path, device_name()).pick if path else pick_tiles)
        self.family = family

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if device.type == "cpu":
            if not interpreting():
                return "needs a GPU (on a CPU only under TRITON_INTERPRET=1, for tests)"
            if dtype not in (torch.float32, torch.float16):
                return f"the Triton interpreter multiplies float32 and float16 only, not {dtype}"
            return None
        if device.type != "cuda":
            return f"needs a CUDA or ROCm GPU, not {device.type}"
        if dtype not in _DTYPES:
            return f"computes in bfloat16, float16 and float32, not {dtype}"
        if torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0):
            return "needs compute capability 8.0"
        return None

    def routes(self, config: RouterConfig, dtype: torch.dtype) -> bool:
        """Which configs `route` takes: the scores that real routers use, over at most 4096 classes and 64 chosen."""
        classes = config.num_experts + config.num_identity_experts
        return (dtype == torch.float32 and config.score in ("softmax", "sigmoid", "sqrtsoftplus")
                and config.norm_p == 1.0 and config.logit_softcap is None
                and classes <= router.MAX_CLASSES and config.top_k <= router.MAX_K)

    def route(self, logits: Tensor, config: RouterConfig, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """logits (T, E+Z) float32, bias (E+Z,) or None -> ids (T, K) int32 in 0 .. E+Z-1, weights (T, K) float32."""
        bias = None if bias is None else bias.float().contiguous()
        return router.route(logits.contiguous(), bias, _rule(config), config.top_k)

    def route_backward(self, dweights: Tensor, logits: Tensor, ids: Tensor, config: RouterConfig) -> Tensor:
        """Gradient (T, E+Z) of `route`'s weights with respect to its logits, from dweights (T, K) and its ids."""
        return router.route_backward(dweights.contiguous(), logits.contiguous(), ids, _rule(config))

    def plan(self, experts: Tensor, num_experts: int) -> Plan:
        return Plan(*metadata.plan(experts, num_experts))

    def moe(self, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights, *, apply_to: str) -> Tensor:
        """The whole mixture without gradients: a few slots take the path that neither sorts nor tiles."""
        if 0 < ids.numel() <= FEW_SLOTS and experts.w_in.dtype == x.dtype:
            return decode.few_slots(x, experts.w_in, experts.w_out, experts.b_in, experts.b_out, ids, weights,
                                    activation=constants(experts.activation), on_input=apply_to == "input",
                                    interleaved=experts.layout is Layout.INTERLEAVED,
                                    family=self.family or device_family(x.device))
        plan = self.plan(ids, experts.num_experts)
        return self.forward(x, plan, weights, experts, apply_to=apply_to, save=False)[0]

    def forward(self, x: Tensor, plan: Plan, weights: Tensor, experts: ExpertWeights, *, apply_to: str, save: bool
                ) -> tuple[Tensor, Tensor | None]:
        run = _Run(self, x, plan, weights, experts, apply_to)
        up, down = run.tile("up"), run.tile("down")
        a, h = fwd.up(x, run.cast(experts.w_in), experts.b_in, plan.slot_of_row, plan.offsets, run.schedule(up), up,
                      top_k=run.top_k, d_expert=experts.d_expert, save=save, scale=run.input_scale, **run.act,
                      **run.precise)
        rows = fwd.rows_matmul(a, run.cast(experts.w_out), experts.b_out, plan.offsets, run.schedule(down), down,
                               **run.precise)
        return fwd.combine(rows, plan.row_of_slot, run.output_scale, x.shape[0], x.dtype), h

    def backward(self, dy: Tensor, x: Tensor | None, h: Tensor, plan: Plan, weights: Tensor, experts: ExpertWeights, *,
                 apply_to: str, needs: Needs, into: Grads | None = None) -> Grads:
        run = _Run(self, dy, plan, weights, experts, apply_to)
        on_input = apply_to == "input"
        rows_of: dict[str, Any] = {"slot_of_row": plan.slot_of_row, "offsets": plan.offsets, "top_k": run.top_k}
        tile = run.tile("dh")
        dh, act, dots = bwd.hidden_grad(dy, run.cast(experts.w_out), h, tiles=run.schedule(tile), config=tile,
                                        scale=run.output_scale, want_act=needs.w_out,
                                        want_dots=needs.weights and not on_input, **rows_of, **run.act, **run.precise)
        grads: dict[str, Tensor | None] = {}
        outer = functools.partial(bwd.outer_sum, config=run.tile("dw"), **rows_of, **run.precise)
        if needs.w_out:
            out, add, grads["w_out"] = _target("w_out", experts.w_out, into)
            outer(left=dy, right=cast(Tensor, act), out=out, gather="left", scale=None, accumulate=add)
        if needs.b_out and experts.b_out is not None:
            out, add, grads["b_out"] = _target("b_out", experts.b_out, into)
            bwd.column_sum(dy, out, gather=True, scale=run.output_scale, accumulate=add, **rows_of)
        if needs.w_in:
            out, add, grads["w_in"] = _target("w_in", experts.w_in, into)
            outer(left=dh, right=cast(Tensor, x), out=out, gather="right", scale=run.input_scale, accumulate=add)
        if needs.b_in and experts.b_in is not None:
            out, add, grads["b_in"] = _target("b_in", experts.b_in, into)
            bwd.column_sum(dh, out, gather=False, scale=None, accumulate=add, **rows_of)
        del act
        rows = None
        if needs.x or (needs.weights and on_input):
            tile = run.tile("dx")
            rows = fwd.rows_matmul(dh, run.cast(experts.w_in).transpose(1, 2), None, plan.offsets, run.schedule(tile),
                                   tile, **run.precise)
        if needs.x:
            grads["x"] = fwd.combine(cast(Tensor, rows), plan.row_of_slot, run.input_scale, dy.shape[0], dy.dtype)
        if needs.weights:
            grads["weights"] = out = torch.empty(weights.shape, dtype=weights.dtype, device=weights.device)
            router = functools.partial(bwd.weight_grad, out, plan.row_of_slot, plan.offsets, top_k=run.top_k)
            if on_input:
                router(token_rows=x, other=cast(Tensor, rows)[0])
            elif experts.b_out is not None:
                router(dots=dots, token_rows=dy, other=experts.b_out, by_expert=True)
            else:
                router(dots=dots)
        return Grads(**grads)


class _Run:
    """What the launches of one forward or backward share: tiles, schedules, casts, the activation as constants."""

    def __init__(self, backend: TritonBackend, rows: Tensor, plan: Plan, weights: Tensor, experts: ExpertWeights,
                 apply_to: str) -> None:
        self.backend, self.plan, self.dtype = backend, plan, rows.dtype
        self.top_k = max(1, plan.num_slots // max(1, rows.shape[0]))
        self.rows_per_expert = cdiv(plan.num_slots, experts.num_experts)
        self.gated = experts.activation.gated
        self.num_experts, self.d_model, self.d_expert = experts.w_out.shape
        self.family = backend.family or device_family(rows.device)
        flat = weights.reshape(-1).contiguous()
        self.input_scale = flat if apply_to == "input" else None
        self.output_scale = None if apply_to == "input" else flat
        self.act: dict[str, Any] = {"activation": constants(experts.activation),
                                    "interleaved": experts.layout is Layout.INTERLEAVED}
        tf32 = rows.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
        self.precise: dict[str, Any] = {"precision": "tf32" if tf32 else "ieee"}
        self._schedules: dict[int, metadata.Schedule] = {}

    def tile(self, kernel: Kernel) -> TileConfig:
        return self.backend.pick(Problem(kernel, self.rows_per_expert, self.dtype.itemsize, self.gated, self.family,
                                         self.d_model, self.d_expert, self.num_experts))

    def schedule(self, tile: TileConfig) -> metadata.Schedule:
        if tile.block_m not in self._schedules:
            self._schedules[tile.block_m] = metadata.schedule(self.plan.offsets, self.plan.num_slots, tile.block_m)
        return self._schedules[tile.block_m]

    def cast(self, weight: Tensor) -> Tensor:
        """The weight in the dtype of the computation: float32 masters are cast once a call, as autocast would."""
        return weight.to(self.dtype)


def _target(name: str, param: Tensor, into: Grads | None) -> tuple[Tensor, bool, Tensor | None]:
    """Where a parameter's gradient goes, whether it is added there, and what backward returns for it."""
    given = getattr(into, name) if into is not None else None
    if given is not None:
        return given, True, None
    fresh = torch.empty(param.shape, dtype=param.dtype, device=param.device)
    return fresh, False, fresh


def constants(act: Activation) -> tuple[Any, ...]:
    """An activation as the kernels' compile-time tuple ACT; 0 stands for no limit and no cap."""
    return (act.kind, float(act.alpha), float(act.limit or 0.0), act.limit_after, float(act.up_offset),
            float(act.softcap_gate or 0.0), float(act.softcap_up or 0.0))


def _rule(c: RouterConfig) -> tuple[Any, ...]:
    """A router's config as the kernels' compile-time tuple RULE."""
    add, floor = (c.renorm_eps, 0.0) if c.renorm_eps_mode == "add" else (0.0, c.renorm_eps)
    return (c.score, c.order, c.num_groups, c.topk_groups, c.group_reduce, c.group_fill, c.renormalize, float(add),
            max(router.NORM_FLOOR, float(floor)), float(c.scale), float(c.logit_scale))


def device_name() -> str:
    """By which files of measured tiles know a device: the current GPU's name, "cpu" without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


@functools.cache
def device_family(device: torch.device) -> Family:
    """The tile family of a device. A CPU (interpreter) or meta tensor counts as sm90."""
    if device.type != "cuda":
        return "sm90"
    if torch.version.hip is not None:
        return "gfx9"
    major = torch.cuda.get_device_capability(device)[0]
    return "sm80" if major == 8 or major >= 12 else "sm90" if major == 9 else "sm100"
