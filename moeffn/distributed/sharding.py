"""FSDP2 on top of expert parallelism, with gradients that stay those of one process."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard

from .. import checks
from .parallel import ParallelExperts, parallel_layers


def fsdp(module: nn.Module, **options: Any) -> nn.Module:
    """Shard what `parallelize` distributed with FSDP2; returns `module`. `options` go to `fully_shard`.

    Experts are sharded over the data-parallel dimensions (along their rows when those divide them, else along experts),
    everything else over all ranks of the mesh. The reductions are set so that after `reduce_gradients(module)`, which
    does what FSDP leaves, gradients are those of the loss convention of `parallelize`.
    """
    layers = list(parallel_layers(module))
    if not layers:
        raise checks.bad("module", "one that `parallelize` distributed", type(module).__name__)
    first = layers[0].experts
    assert isinstance(first, ParallelExperts)
    mesh, loss = first.mesh, first.loss
    names = [n for n in mesh.mesh_dim_names or () if n != "ep"]
    dp_size = mesh.size() // mesh["ep"].size()
    unmanaged = set()
    for layer in layers:
        if dp_size == 1:
            unmanaged |= set(layer.experts.parameters())
            continue
        if len(names) > 1:
            raise checks.bad("mesh", "one dimension beside 'ep' for FSDP", names)
        rows = [p.shape[1] for p in layer.experts.parameters()]
        dim = 1 if all(r % dp_size == 0 for r in rows) else 0
        fully_shard(layer.experts, mesh=mesh[names[0]], shard_placement_fn=functools.partial(_shard, dim), **options)
        # Over ep the tokens of all ranks are in each expert's gradient already: FSDP's own mean would be that of dp.
        _divide_gradients(layer.experts, mesh.size() if loss == "mean" else 1, mesh.device_type)
    whole = mesh if mesh.ndim == 1 else mesh._flatten("moeffn_all")
    fully_shard(module, mesh=whole, ignored_params=unmanaged or None, **options)
    if loss == "sum":
        _divide_gradients(module, 1, mesh.device_type)
    return module


def _shard(dim: int, parameter: nn.Parameter) -> Shard:
    return Shard(dim)


def _divide_gradients(module: nn.Module, by: int, device_type: str) -> None:
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(float(by))
    if device_type == "cpu":  # gloo has no sum that multiplies
        module.set_force_sum_reduction_for_comms(True)
