"""What a training step does across ranks after backward: sums of gradients, their norm, the selection bias."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from .. import checks
from ..balance import update_selection_bias
from .parallel import ParallelExperts, parallel_layers, sum_over


def reduce_gradients(module: nn.Module) -> None:
    """Once per optimizer step, after the last backward: gradients become those of one process on all tokens.

    Replicated parameters are summed over all ranks of the mesh in float32, experts over the data-parallel ranks; with
    loss="mean" both are divided by the number of ranks. A trainable parameter without a gradient counts as zero, so
    ranks that use different parts of the model still agree. Parameters that FSDP manages are left to it.
    """
    experts = [layer.experts for layer in parallel_layers(module)]
    if not experts:
        raise checks.bad("module", "one that `parallelize` distributed", type(module).__name__)
    first = experts[0]
    assert isinstance(first, ParallelExperts)
    mesh, scale = first.mesh, 1.0 / first.mesh.size() if first.loss == "mean" else 1.0
    owned = {id(p) for e in experts for p in e.parameters()}
    trained = [p for p in module.parameters() if p.requires_grad]
    plain = [p for p in trained if not isinstance(p, DTensor)]
    packed = [p for p in trained if id(p) in owned and isinstance(p, DTensor) and p.device_mesh.ndim == 1]
    _sum_together(plain, mesh, None, scale)
    if mesh.size() > mesh["ep"].size():
        _sum_together(packed, mesh, "ep", scale)
    elif scale != 1.0:
        for p in packed:
            if p.grad is not None:
                local(p.grad).mul_(scale)


def _sum_together(params: Sequence[nn.Parameter], mesh: DeviceMesh, without: str | None, scale: float) -> None:
    """Sum the gradients of `params` over the mesh, all of one accumulation dtype in one collective."""
    for wide in (torch.float32, torch.float64):
        group = [p for p in params if (p.dtype == torch.float64) == (wide == torch.float64)]
        if not group:
            continue
        for p in group:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        grads = [local(p.grad) for p in group]
        flat = sum_over(torch.cat([g.reshape(-1).to(wide) for g in grads]), mesh, without=without).mul_(scale)
        for g, part in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            g.copy_(part.view_as(g))


def local(t: Tensor | None) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    assert t is not None
    return t.to_local() if isinstance(t, DTensor) else t


def grad_norm(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """() float32 (float64 if any gradient is): the norm of all gradients, every expert and every shard counted once.

    Collective over the meshes of the DTensors among them. The same number on every rank.
    """
    checks.positive("norm_type", norm_type)
    grads = [p.grad for p in parameters if p.grad is not None]
    wide = torch.float64 if any(g.dtype == torch.float64 for g in grads) else torch.float32
    device = grads[0].device if grads else torch.device("cpu")
    sums: dict[tuple[int, ...], tuple[list[dist.ProcessGroup], Tensor]] = {}
    for g in grads:
        groups = []
        if isinstance(g, DTensor):
            for dim, placement in enumerate(g.placements):
                if placement.is_partial():
                    raise checks.bad("parameters", "gradients that are sharded or replicated", f"{placement} gradient")
                if isinstance(placement, Shard) or placement.is_shard():
                    groups.append(g.device_mesh.get_group(dim))
        part = local(g).detach().to(wide)
        value = part.abs().max() if norm_type == math.inf and part.numel() else part.abs().pow(norm_type).sum()
        if norm_type == math.inf and not part.numel():
            value = part.new_zeros(())
        key = tuple(id(group) for group in groups)
        held = sums.setdefault(key, (groups, torch.zeros((), dtype=wide, device=device)))[1]
        held.copy_(torch.maximum(held, value) if norm_type == math.inf else held + value)
    total = torch.zeros((), dtype=wide, device=device)
    for groups, value in sums.values():
        for group in groups:
            dist.all_reduce(value, op=dist.ReduceOp.MAX if norm_type == math.inf else dist.ReduceOp.SUM, group=group)
        total = torch.maximum(total, value) if norm_type == math.inf else total + value
    return total if norm_type == math.inf else total.pow(1.0 / norm_type)


def clip_grad_norm_(parameters: Iterable[Tensor] | nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` that counts each expert once: gradients scaled in place, their norm returned.

    Call it after `reduce_gradients`, on every rank, with the same parameters in the same order.
    """
    checks.positive("max_norm", max_norm)
    params = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    norm = grad_norm(params, norm_type)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for p in params:
        if p.grad is not None:
            part = local(p.grad)
            part.mul_(factor.to(part.dtype).to(part.device))
    return norm


@torch.no_grad()
def update_selection_biases(module: nn.Module, rate: float = 1e-3, *, center: bool = False) -> None:
    """Once per optimizer step: every layer's selection bias from the load of all ranks since the last call.

    One collective for all layers; then the counts start anew. The same bias on every rank.
    """
    layers = [layer for layer in parallel_layers(module) if layer.router.counts is not None]
    if not layers:
        raise checks.bad("module", "distributed layers with a selection bias (MoEConfig.selection_bias=True)", "none")
    first = layers[0].experts
    assert isinstance(first, ParallelExperts)
    counts = [layer.router.counts for layer in layers]
    total = sum_over(torch.cat([c for c in counts if c is not None]), first.mesh)
    for layer, mine in zip(layers, total.split([len(c) for c in counts if c is not None]), strict=True):
        bias = layer.router.selection_bias
        assert bias is not None
        E = layer.config.num_experts
        bias[:E].copy_(update_selection_bias(bias[:E], mine, rate, center=center))
        layer.router.reset_counts()
