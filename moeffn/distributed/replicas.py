"""Replicas of hot experts: which experts to copy where (EPLB), and the copies themselves.

`balance_replicas` follows DeepSeek's EPLB: pack groups of experts to nodes by the longest-processing-time rule, give
each further slot of a node to the expert with the most load per copy, and pack the copies to the node's
ranks by the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import checks
from .exchange import Hop, plan_hop
from .flight import dispatch
from .placement import Placement
from .transport import Transport


def balance_replicas(load: Sequence[float], num_ranks: int, slots_per_rank: int, *, num_nodes: int = 1,
                     num_groups: int = 1) -> Placement:
    """load (E,), any unit -> Placement of slots_per_rank · num_ranks copies of E experts with an even load.

    num_groups: experts e of one group (E / num_groups neighbours, group-limited routing) stay on one node when the
    groups divide by the nodes; else nodes are ignored. Ranks never hold an expert twice, so some slots stay empty when
    that leaves no choice. Raises ValueError when the slots cannot hold every expert once.
    """
    E, slots = len(load), num_ranks * slots_per_rank
    for name, value in (("num_ranks", num_ranks), ("slots_per_rank", slots_per_rank), ("num_nodes", num_nodes),
                        ("num_groups", num_groups)):
        checks.positive_int(name, value)
    if num_ranks % num_nodes:
        raise checks.bad("num_nodes", f"a divisor of the {num_ranks} ranks", num_nodes)
    if E % num_groups:
        raise checks.bad("num_groups", f"a divisor of the {E} experts", num_groups)
    if slots < E:
        raise checks.bad("slots_per_rank", f"at least {-(-E // num_ranks)} for {E} experts on {num_ranks} ranks",
                         slots_per_rank)
    if min(load, default=0.0) < 0:
        raise checks.bad("load", "values of at least 0", min(load))
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    size = E // num_groups
    groups = [list(range(g * size, (g + 1) * size)) for g in range(num_groups)]
    nodes = _pack(groups, [sum(load[e] for e in g) for g in groups], num_nodes, num_groups // num_nodes)
    ranks_each, held = num_ranks // num_nodes, []
    for node in nodes:
        experts = [e for g in node for e in groups[g]]
        copies = _replicate(experts, load, ranks_each * slots_per_rank, ranks_each)
        pieces = [e for e in experts for _ in range(copies[e])]
        packed = _pack([[e] for e in pieces], [load[e] / copies[e] for e in pieces], ranks_each, slots_per_rank,
                       distinct=pieces)
        held += [tuple(sorted(pieces[i] for i in items)) for items in packed]
    return Placement(E, tuple(held))


def _replicate(experts: list[int], load: Sequence[float], slots: int, most: int) -> dict[int, int]:
    """Copies of each expert: one each, then the next to the largest load per copy, at most one for each rank."""
    copies = dict.fromkeys(experts, 1)
    for _ in range(slots - len(experts)):
        able = [e for e in experts if copies[e] < most]
        if not able:
            break
        copies[max(able, key=lambda e: (load[e] / copies[e], -e))] += 1
    return copies


def _pack(items: list[list[int]], weights: list[float], bins: int, room: int,
          distinct: list[int] | None = None) -> list[list[int]]:
    """Indices of items in `bins` bins of `room`, heaviest first to the lightest bin; `distinct`: no value twice in one.

    Items with the most copies go first among equals of weight; when only bins that hold the value have room, an item
    swaps with one of another bin.
    """
    packed: list[list[int]] = [[] for _ in range(bins)]
    total = [0.0] * bins
    for i in sorted(range(len(items)), key=lambda i: (-weights[i], i)):
        value = None if distinct is None else distinct[i]

        def lacks(b: int, value: int | None = value) -> bool:
            return distinct is None or all(distinct[j] != value for j in packed[b])

        free = [b for b in range(bins) if len(packed[b]) < room and lacks(b)]
        if free:
            best = min(free, key=lambda b: (total[b], b))
        else:
            best = _make_room(packed, total, weights, distinct, room, value)
        packed[best].append(i)
        total[best] += weights[i]
    return packed


def _make_room(packed: list[list[int]], total: list[float], weights: list[float], distinct: list[int] | None, room: int,
               value: int | None) -> int:
    """Move an item from a full bin without `value` to a bin with room; return the bin that now has room."""
    assert distinct is not None
    for to in (b for b in range(len(packed)) if len(packed[b]) < room):
        there = {distinct[j] for j in packed[to]}
        for source in (b for b in range(len(packed)) if all(distinct[j] != value for j in packed[b])):
            for j in reversed(packed[source]):
                if distinct[j] not in there:
                    packed[source].remove(j)
                    packed[to].append(j)
                    total[source] -= weights[j]
                    total[to] += weights[j]
                    return source
    raise AssertionError("no bin for a copy: more copies than ranks")


class Replicator:
    """Copies each expert's weights from the rank that owns it to the ranks that compute it; gradients return summed.

    One exchange each way per call, all tensors of an expert in one row. The replicas' gradients are summed in float32
    in the order of the table, owner first.
    """

    def __init__(self, transport: Transport, home: Placement, placement: Placement) -> None:
        rank = transport.rank
        owned = home.experts_of_rank[rank]
        width = max(len(p) for p in placement.places_of_expert)
        rows = [[*placement.places_of_expert[e], *[-1] * (width - len(placement.places_of_expert[e]))] for e in owned]
        self.places = torch.tensor(rows, dtype=torch.int32, device="cpu").view(len(owned), width)
        self.transport, self.placement = transport, placement
        # rows come by owner, then by its slot: ascending expert ids
        order = sorted(range(len(placement.experts_of_rank[rank])), key=lambda s: placement.experts_of_rank[rank][s])
        self.row_of_slot = torch.tensor(order, dtype=torch.int64, device="cpu").argsort()
        self.ones = torch.ones(self.places.shape, dtype=torch.float32, device="cpu")
        self._hop: Hop | None = None

    def __call__(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The owned experts' tensors (L, …), None where absent -> those of this rank's slots. Collective."""
        present = [t for t in tensors if t is not None]
        device, dtype = present[0].device, present[0].dtype
        for t in present:
            if t.requires_grad and not t.is_leaf:  # torch 2.11 gathers a DTensor's gradient of other strides
                t.register_hook(lambda g: g.clone(memory_format=torch.contiguous_format))
        flat = torch.cat([t.reshape(t.shape[0], t.shape[1:].numel()) for t in present], 1)
        if self._hop is None:  # the first call also puts the tables on the device, once
            self.places, self.row_of_slot = self.places.to(device), self.row_of_slot.to(device)
            self.ones = self.ones.to(device)
            self._hop = plan_hop(self.transport, self.places, self.placement.rank_of_place, dedup="none",
                                 D=flat.shape[1], dtype=dtype)
        came = dispatch(self._hop, flat, self.ones)[0].index_select(0, self.row_of_slot)
        parts = iter(came.split([t.shape[1:].numel() for t in present], 1))
        return [None if t is None else next(parts).reshape(-1, *t.shape[1:]) for t in tensors]
