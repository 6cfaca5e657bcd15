"""One MoE layer on a device and everything that computes the same: the contenders of bench_gpu."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from moeffn import MoEConfig, MoEFFN, backends
from moeffn.accounting import Block
from moeffn.permutation import permute, plan, unpermute

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """T tokens through E experts of width F, K a token."""

    name: str
    T: int
    D: int
    F: int
    E: int
    K: int

    def flops(self, train: bool) -> int:
        return (18 if train else 6) * self.T * self.K * self.D * self.F

    def block(self) -> Block:
        return Block(d_model=self.D, d_expert=self.F, num_experts=self.E, top_k=self.K)


class Setup:
    """One layer, its input and upstream gradient on the device; every contender works on the same weights."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str) -> None:
        torch.manual_seed(0)
        self.shape = shape
        config = MoEConfig(d_model=shape.D, d_expert=shape.F, num_experts=shape.E, top_k=shape.K)
        self.layer = MoEFFN(config, device=device, dtype=dtype)
        self.x = torch.randn(shape.T, shape.D, device=device, dtype=dtype, requires_grad=True)
        self.dy = torch.randn_like(self.x)

    def contenders(self) -> dict[str, Call]:
        """Name -> a call that returns y from x, the router included (ours, but for the backends' own)."""
        def with_backend(name: str) -> Call:
            def run() -> torch.Tensor:
                self.layer.backend = name
                return self.layer(self.x)
            return run

        found = {name: with_backend(name) for name in ("triton", "torch")
                 if backends.available(name, self.x.device, self.x.dtype) is None}
        found["cuBLAS loop"] = self._loop
        if hasattr(torch.nn.functional, "grouped_mm") and self.x.dtype == torch.bfloat16:
            found["grouped_mm"] = self._grouped
        if importlib.util.find_spec("transformers"):
            found["transformers eager"] = self._transformers("eager")
            if self.x.dtype == torch.bfloat16:
                found["transformers grouped_mm"] = self._transformers("grouped_mm")
        for module, call in (("scattermoe", self._scattermoe), ("liger_kernel", self._liger),
                             ("sonicmoe", self._sonic)):
            if self.x.is_cuda and importlib.util.find_spec(module):
                found[module] = call
        return found

    def inputs(self) -> list[torch.Tensor]:
        """What a training step takes gradients of: x and every parameter."""
        return [self.x, *self.layer.parameters()]

    def _grouped(self) -> torch.Tensor:
        """permute, torch grouped_mm twice, unpermute: what eager frameworks do."""
        w = self.layer.experts.weights
        routing = self.layer.router(self.x)
        grouped = plan(routing.experts, w.num_experts)
        rows = permute(self.x, grouped)
        h = torch.nn.functional.grouped_mm(rows, w.w_in.transpose(1, 2), offs=grouped.offsets[1:])
        gate, up = h.chunk(2, -1)
        out = torch.nn.functional.grouped_mm(torch.nn.functional.silu(gate) * up, w.w_out.transpose(1, 2),
                                             offs=grouped.offsets[1:])
        return unpermute(out, grouped, routing.weights)

    def _loop(self) -> torch.Tensor:
        """One cuBLAS product per expert and matrix; reads the counts on the host."""
        w = self.layer.experts.weights
        routing = self.layer.router(self.x)
        grouped = plan(routing.experts, w.num_experts)
        rows = permute(self.x, grouped).split(grouped.counts.tolist())
        out = []
        for e, part in enumerate(rows):
            gate, up = (part @ w.w_in[e].T).chunk(2, -1)
            out.append((torch.nn.functional.silu(gate) * up) @ w.w_out[e].T)
        return unpermute(torch.cat(out), grouped, routing.weights)

    def _transformers(self, implementation: str) -> Call:
        """Qwen3MoeExperts of transformers over the same parameters."""
        from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        s, w = self.shape, self.layer.experts
        config = Qwen3MoeConfig(hidden_size=s.D, moe_intermediate_size=s.F, num_experts=s.E, num_experts_per_tok=s.K)
        config._experts_implementation = implementation
        with torch.device("meta"):
            experts = Qwen3MoeExperts(config)
        experts.gate_up_proj, experts.down_proj = w.w_in, w.w_out

        def run() -> torch.Tensor:
            routing = self.layer.router(self.x)
            return experts(self.x, routing.experts.long(), routing.weights.to(self.x.dtype))
        return run

    def _scattermoe(self) -> torch.Tensor:
        from scattermoe.mlp import flatten_sort_count, parallel_linear  # type: ignore[import-not-found]

        w, K = self.layer.experts.weights, self.shape.K
        routing = self.layer.router(self.x)
        expert_ids, slots, offsets = flatten_sort_count(routing.experts.long(), num_experts=w.num_experts)
        h = parallel_linear(self.x, w.w_in.transpose(1, 2), K, expert_ids, slots, offsets, grouped_out=True)
        gate, up = h.chunk(2, -1)
        return parallel_linear(torch.nn.functional.silu(gate) * up, w.w_out.transpose(1, 2), 1, expert_ids, slots,
                               offsets, gates=routing.weights.to(self.x.dtype), grouped_in=True)

    def _liger(self) -> torch.Tensor:
        from liger_kernel.ops import LigerFusedMoEFunction  # type: ignore[import-not-found]

        w, routing = self.layer.experts.weights, self.layer.router(self.x)
        return LigerFusedMoEFunction.apply(self.x, w.w_in, w.w_out, routing.experts, routing.weights.to(self.x.dtype))

    def _sonic(self) -> torch.Tensor:
        from sonicmoe import functional  # type: ignore[import-not-found]
        from sonicmoe.enums import ActivationType  # type: ignore[import-not-found]

        w, routing, (T, K) = self.layer.experts.weights, self.layer.router(self.x), (self.shape.T, self.shape.K)
        tokens = torch.arange(T, device=self.x.device, dtype=torch.int32).repeat_interleave(K)
        return functional.moe_general_routing_inputs(
            self.x, routing.weights.reshape(-1).to(self.x.dtype), tokens, routing.experts.reshape(-1),
            w.w_in.permute(1, 2, 0), None, w.w_out.permute(1, 2, 0), None, E=w.num_experts,
            activation_type=ActivationType.SWIGLU, is_inference_mode_enabled=not torch.is_grad_enabled(),
            concat_layout=True, stream_id=None)[0]
