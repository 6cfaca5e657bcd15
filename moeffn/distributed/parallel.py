"""parallelize: the experts of a layer or model over the `ep` dimension of a device mesh, data parallel over the others.

Each rank of the mesh works on its own tokens. Experts become one packed DTensor a parameter, `Shard(0)` over `ep`,
under the names they had, so checkpoints (torch.distributed.checkpoint) reshard by global expert id. Everything else
is replicated.

Gradients, after `reduce_gradients(model)`, are those of one process on all tokens: of the mean of the ranks' losses
(loss="mean", what DDP and FSDP do) or of their sum (loss="sum": divide by the global number of tokens yourself, which
is what uneven batches need). Load-balance and z losses count each token of the global batch once either way.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from .. import checks
from ..balance import attach_loss, load_balance_loss, load_stats, z_loss
from ..layer import Experts, MoEFFN
from ..types import ExpertWeights, Routing
from .cost import Links, describe, estimate
from .dispatchers import AllGather, AllToAll, Dispatcher, Local, TwoLevel
from .functional import expert_parallel_ffn
from .placement import Placement
from .replicas import Replicator
from .transport import GroupTransport, Transport

log = logging.getLogger(__name__)
_CHOICES = ("auto", "all_to_all, dedup rank", "all_to_all, dedup none", "all_gather", "two_level")


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How `parallelize` distributes.

    dispatcher      "auto": the cheapest of the printed cost model; or its name there
    loss            "mean" or "sum": how the ranks' losses make the global loss
    tokens          T per rank that the cost model assumes
    ranks_per_node  of the ep group; None: LOCAL_WORLD_SIZE (torchrun sets it) where it divides the group, else one node
    links           bandwidths for the cost model
    deadline        seconds per exchange on gloo; None: the group's timeout
    chunks          parts in which tokens travel, each while the experts work on the part before
    local_first     slots of a rank's own experts stay and are computed while the others fly
    budget          rows from each rank to each rank, fixed (see `AllToAll`); needs "all_to_all, dedup rank" or "none"
    placement       where experts are computed, with replicas (see `balance_replicas`); None: on the rank that owns them
    broadcast       first give every rank the parameters and buffers of the mesh's first rank
    """

    dispatcher: str = "auto"
    loss: Literal["mean", "sum"] = "mean"
    tokens: int = 4096
    ranks_per_node: int | None = None
    links: Links | None = None
    deadline: float | None = None
    chunks: int = 1
    local_first: bool = False
    budget: int | None = None
    placement: Placement | None = None
    broadcast: bool = True

    def __post_init__(self) -> None:
        checks.one_of("ParallelConfig.dispatcher", self.dispatcher, _CHOICES)
        checks.one_of("ParallelConfig.loss", self.loss, ("mean", "sum"))
        checks.positive_int("ParallelConfig.tokens", self.tokens)
        checks.positive_int("ParallelConfig.chunks", self.chunks)
        if self.budget is not None and not self.dispatcher.startswith("all_to_all"):
            raise checks.bad("ParallelConfig.budget", "None unless dispatcher is 'all_to_all, …'", self.budget)


def make_mesh(ep: int, *, device_type: str | None = None) -> DeviceMesh:
    """A ("dp", "ep") mesh over all ranks, neighbours in one ep group. ValueError when ep does not divide the ranks."""
    checks.positive_int("ep", ep)
    world = dist.get_world_size()
    if world % ep:
        raise checks.bad("ep", f"a divisor of the {world} ranks", ep)
    kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    return init_device_mesh(kind, (world // ep, ep), mesh_dim_names=("dp", "ep"))


def parallelize(module: nn.Module, mesh: DeviceMesh, config: ParallelConfig | None = None) -> nn.Module:
    """Distribute every MoEFFN in `module` (or itself) in place; returns it. Collective over the mesh.

    mesh has a dimension "ep"; its other dimensions are data parallel. Raises ValueError for a mesh without "ep" or a
    module without MoEFFN.
    """
    checks.instance("module", module, nn.Module)
    checks.instance("mesh", mesh, DeviceMesh)
    config = config or ParallelConfig()
    names = mesh.mesh_dim_names or ()
    if "ep" not in names:
        raise checks.bad("mesh", "a dimension named 'ep'", f"dimensions {names or 'without names'}")
    layers = [m for m in module.modules() if isinstance(m, MoEFFN)]
    if not layers:
        raise checks.bad("module", "a MoEFFN, or a module that holds one", type(module).__name__)
    if config.broadcast:
        broadcast_from_first(module, mesh)
    transport = GroupTransport(mesh.get_group("ep"), deadline=config.deadline)
    for layer in layers:
        _distribute(layer, mesh, config, transport)
    return module


def broadcast_from_first(module: nn.Module, mesh: DeviceMesh) -> None:
    """Every parameter and buffer of every rank becomes that of the mesh's first rank. Meta tensors are left."""
    for t in (*module.parameters(), *module.buffers()):
        if t.device.type == "meta" or isinstance(t, DTensor):
            continue
        data = t.detach().contiguous()
        for dim in range(mesh.ndim):
            dist.broadcast(data, group=mesh.get_group(dim), group_src=0)
        if data.data_ptr() != t.data_ptr():
            t.data.copy_(data)


def _distribute(layer: MoEFFN, mesh: DeviceMesh, config: ParallelConfig, transport: GroupTransport) -> None:
    experts = layer.experts
    if isinstance(experts, ParallelExperts):
        raise checks.bad("module", "layers that are not distributed yet", "one that is")
    c = layer.config
    home = Placement.chunked(c.num_experts, transport.size)
    placement = config.placement or home
    if placement.num_experts != c.num_experts or placement.num_ranks != transport.size or placement.missing:
        raise checks.bad("ParallelConfig.placement",
                         f"all {c.num_experts} experts on {transport.size} ranks",
                         f"{placement.num_experts} experts on {placement.num_ranks} ranks, missing {placement.missing}")
    name = choose(placement, config, d_model=c.d_model, top_k=c.top_k, dtype=experts.w_in.dtype)
    for key, p in list(experts.named_parameters()):
        sharded = distribute_tensor(p.detach(), mesh["ep"], [Shard(0)], src_data_rank=None)
        experts.register_parameter(key, nn.Parameter(sharded, requires_grad=p.requires_grad))
    experts.__class__ = ParallelExperts
    assert isinstance(experts, ParallelExperts)
    experts.mesh, experts.loss = mesh, config.loss
    experts.chunks, experts.local_first = config.chunks, config.local_first
    experts.dispatcher = make_dispatcher(name, transport, placement, config)
    experts.replicator = None if placement == home else Replicator(transport, home, placement)
    layer.__class__ = ParallelMoEFFN


def choose(placement: Placement, config: ParallelConfig, *, d_model: int, top_k: int, dtype: torch.dtype) -> str:
    """The dispatcher's name; with "auto" the first of the cost table, which is logged."""
    if config.dispatcher != "auto":
        return config.dispatcher
    if placement.has_replicas or placement.num_ranks == 1:
        return "all_to_all, dedup rank"
    table = estimate(placement, tokens=config.tokens, d_model=d_model, top_k=top_k, dtype=dtype,
                     ranks_per_node=_per_node(placement.num_ranks, config), links=config.links)
    if dist.is_initialized() and dist.get_rank() == 0:
        log.info("dispatcher: %s\n%s", table[0].name, describe(table))
    return table[0].name


def _per_node(size: int, config: ParallelConfig) -> int:
    n = config.ranks_per_node or int(os.environ.get("LOCAL_WORLD_SIZE", size))
    return n if n <= size and size % n == 0 else size


def make_dispatcher(name: str, transport: Transport, placement: Placement,
                    config: ParallelConfig | None = None) -> Dispatcher:
    """A dispatcher by its name in the cost table; W = 1 gives `Local`."""
    config = config or ParallelConfig()
    checks.one_of("dispatcher", name, _CHOICES[1:])
    if transport.size == 1 and config.budget is None:
        return Local(placement)
    if name == "all_gather":
        return AllGather(transport, placement)
    if name == "two_level":
        return TwoLevel(transport, placement, ranks_per_node=_per_node(transport.size, config))
    dedup: Literal["rank", "none"] = "rank" if name.endswith("rank") else "none"
    return AllToAll(transport, placement, dedup=dedup, budget=config.budget)


class ParallelExperts(Experts):
    """Experts whose parameters are DTensors over `ep`; forward is collective over the ep group."""

    mesh: DeviceMesh
    loss: str
    chunks: int
    local_first: bool
    dispatcher: Dispatcher
    replicator: Replicator | None

    @property
    def weights(self) -> ExpertWeights:
        """The experts that this rank computes."""
        local: list[Tensor | None] = [p.to_local() if isinstance(p, DTensor) else p
                                      for p in (self.w_in, self.w_out, self.b_in, self.b_out)]
        if self.replicator is not None:
            local = self.replicator(local)
        w_in, w_out, b_in, b_out = local
        assert w_in is not None and w_out is not None
        return ExpertWeights(w_in, w_out, b_in, b_out, self.activation, self.layout)

    def forward(self, x: Tensor, routing: Routing, *, backend: str = "auto",
                meanwhile: Callable[[], None] | None = None) -> Tensor:
        return expert_parallel_ffn(x, routing, self.weights, self.dispatcher, backend=backend, chunks=self.chunks,
                                   local_first=self.local_first, meanwhile=meanwhile)


class ParallelMoEFFN(MoEFFN):
    """MoEFFN whose load-balance loss counts the load of all ranks, and whose shared expert runs while tokens fly."""

    def _mix(self, x: Tensor, routing: Routing) -> Tensor:
        if self.shared is None:
            return self.experts(x, routing, backend=self.backend)
        found: list[Tensor] = []
        shared = self.shared
        y = self.experts(x, routing, backend=self.backend, meanwhile=lambda: found.append(shared(x)))
        y = y + found[0]
        return y * 0.5 if self.config.shared_combine == "average" else y

    def _with_losses(self, y: Tensor, routing: Routing, token_mask: Tensor | None) -> Tensor:
        c, experts = self.config, self.experts
        assert isinstance(experts, ParallelExperts) and routing.logits is not None
        if not (c.aux_loss_coef or c.z_loss_coef):
            return y
        if token_mask is None:
            tokens = torch.full((1,), routing.num_tokens, device=y.device)
        else:
            tokens = (token_mask != 0).sum()[None]
        mine = torch.cat([load_stats(routing, c.num_experts).counts, tokens])
        total = sum_over(mine.clone(), experts.mesh)
        share = mine[-1].double() / total[-1].clamp(min=1)
        if experts.loss == "mean":
            share = share * experts.mesh.size()
        if c.aux_loss_coef:
            loss = load_balance_loss(routing, c.route, token_mask=token_mask, counts=total[:-1])
            y = attach_loss(y, loss, share * c.aux_loss_coef)
        if c.z_loss_coef:
            y = attach_loss(y, z_loss(routing.logits, token_mask=token_mask), share * c.z_loss_coef)
        return y


def sum_over(t: Tensor, mesh: DeviceMesh, *, without: str | None = None) -> Tensor:
    """t summed in place over every dimension of the mesh (except one); returns it."""
    for dim, name in enumerate(mesh.mesh_dim_names or ()):
        if name != without and mesh.size(dim) > 1:
            dist.all_reduce(t, group=mesh.get_group(dim))
    return t


def parallel_layers(module: nn.Module) -> Iterator[ParallelMoEFFN]:
    """The distributed layers of a module, in order."""
    return (m for m in module.modules() if isinstance(m, ParallelMoEFFN))
