"""Dispatchers: how tokens reach the ranks of their experts and how results come home.

    batch = dispatcher.dispatch(x, routing)           the tokens this rank computes, with ids of its own slots
    y     = moe_ffn(batch.x, batch.routing, weights)  the experts know tokens and slots, nothing of ranks
    out   = dispatcher.combine(y, batch.handle)       (T, D) at home

What arrives is an ordinary batch with an ordinary Routing over the L experts of this rank, so every backend runs it
fused, and nothing but x and the pre-activations is kept for backward. Rows are ordered by source rank, then source
token; with the stable plan of the experts that gives the order (expert, source rank, token) whatever the arrival
order was.

Recipe of the sums: each rank sums the results of its experts for a token in float32 and rounds once to the dtype of x;
the home rank sums those in float32, its own first, then in rank order (dedup "none": in slot order), and rounds once.
The gradient of x is summed the same way. `TwoLevel` rounds once
more, on the rank that receives for its node. float64 stays float64 throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from .. import checks
from ..types import Routing
from . import flight
from .counts import Counts, announce, check_agreement, code, gather_ints
from .exchange import Hop, histogram, owners, plan_hop, presence
from .payload import RowFormat
from .placement import Placement
from .transport import Transport


@dataclass(frozen=True)
class Handle:
    """What one dispatch did, for its combine: the hops in the order they were made, none for `Local`.

    bytes_dispatch, bytes_combine: what leaves this rank for others in each direction of the forward pass; backward
    moves `bytes_combine` out again and `bytes_dispatch_backward` home. bytes_counts: the announcements.
    counts_inside: what `TwoLevel` announced for its second hop.
    """

    T: int
    hops: tuple[Hop, ...]
    bytes_dispatch: int = 0
    bytes_combine: int = 0
    bytes_dispatch_backward: int = 0
    bytes_counts: int = 0
    counts_inside: Counts | None = None

    @property
    def dropped(self) -> Tensor | None:
        """() int64: slots of this rank that a fixed budget had no row for; None without hops."""
        return None if not self.hops else torch.stack([h.dropped for h in self.hops]).sum()


@dataclass(frozen=True)
class Batch:
    """Tokens that came to this rank: x (M, D) and their Routing over its L slots, -1 for slots of other ranks."""

    x: Tensor
    routing: Routing
    handle: Handle


class Dispatcher(Protocol):
    """Tokens to experts and back. Every rank of the group makes the same calls in the same order, with T = 0 too.

    chunks  in how many parts the caller sends its tokens: announced, so that ranks that differ are named
    """

    placement: Placement
    rank: int
    chunks: int

    def plan(self, routing: Routing, D: int, dtype: torch.dtype) -> Handle:
        """Lay out the first hop for this routing: sizes, order, bytes. The only host synchronisation."""

    def dispatch(self, x: Tensor, routing: Routing, handle: Handle | None = None, *,
                 meanwhile: Callable[[Tensor], None] | None = None) -> Batch:
        """x (T, D) and its routing over all E experts -> the batch of this rank. `handle`: one of `plan`, else made;
        `meanwhile` is called once, with x, while the tokens fly, and its backward runs while their gradients do."""

    def combine(self, y: Tensor, handle: Handle, mine: Tensor | None = None, *,
                meanwhile: Callable[[], None] | None = None) -> Tensor:
        """y (M, D), one row per row of the batch -> (T, D). `mine` (T, D): a first term of the sums, made at home;
        `meanwhile` is called once while the results fly."""


class Local:
    """One rank: nothing moves."""

    def __init__(self, placement: Placement) -> None:
        if placement.num_ranks != 1:
            raise checks.bad("placement", "one rank", f"{placement.num_ranks} ranks")
        self.placement, self.rank, self.chunks = placement, 0, 1

    def plan(self, routing: Routing, D: int, dtype: torch.dtype) -> Handle:
        return Handle(routing.num_tokens, ())

    def dispatch(self, x: Tensor, routing: Routing, handle: Handle | None = None, *,
                 meanwhile: Callable[[Tensor], None] | None = None) -> Batch:
        if meanwhile is not None:
            meanwhile(x)
        local = Routing(self.placement.places(routing.experts), routing.weights, apply_to=routing.apply_to)
        return Batch(x, local, handle or self.plan(routing, x.shape[1], x.dtype))

    def combine(self, y: Tensor, handle: Handle, mine: Tensor | None = None, *,
                meanwhile: Callable[[], None] | None = None) -> Tensor:
        checks.shape("y", y, (handle.T, y.shape[1]), "(T, D)")
        if meanwhile is not None:
            meanwhile()
        return y if mine is None else mine + y


class _OneHop:
    """Shared by AllToAll and AllGather."""

    def __init__(self, transport: Transport, placement: Placement, dedup: Literal["none", "rank", "all"],
                 budget: int | None, verify: bool | None) -> None:
        if placement.num_ranks != transport.size:
            raise checks.bad("placement", f"the {transport.size} ranks of the group", f"{placement.num_ranks} ranks")
        if budget is not None:
            checks.positive_int("budget", budget)
        self.transport, self.placement, self.rank = transport, placement, transport.rank
        self.dedup, self.budget, self.verify, self.chunks = dedup, budget, verify, 1
        self.dropped: Tensor | None = None
        self._agreed = False

    def plan(self, routing: Routing, D: int, dtype: torch.dtype) -> Handle:
        if not self._agreed:
            agree(self.transport, self.placement, (self.dedup, self.budget), self.chunks, routing.experts.device)
            self._agreed = True
        places = self.placement.places(routing.experts)
        hop = plan_hop(self.transport, places, self.placement.rank_of_place, dedup=self.dedup, D=D, dtype=dtype,
                       budget=self.budget, verify=self.verify, chunks=self.chunks)
        return add_hop(Handle(routing.num_tokens, ()), hop, D, dtype, routing.weights.dtype)

    def dispatch(self, x: Tensor, routing: Routing, handle: Handle | None = None, *,
                 meanwhile: Callable[[Tensor], None] | None = None) -> Batch:
        handle = handle or self.plan(routing, x.shape[1], x.dtype)
        self.dropped = handle.dropped
        x, ids, weights = flight.dispatch(handle.hops[0], x, routing.weights, meanwhile)
        return Batch(x, local_routing(ids, weights, self.placement, self.rank, routing), handle)

    def combine(self, y: Tensor, handle: Handle, mine: Tensor | None = None, *,
                meanwhile: Callable[[], None] | None = None) -> Tensor:
        return flight.combine(handle.hops[0], y, mine, meanwhile)


class AllToAll(_OneHop):
    """Each token goes to the ranks of its experts, once per rank (dedup "rank") or once per slot ("none").

    budget  rows that a rank may send to each rank: sizes become fixed, nothing is announced, the host never waits, and
            what does not fit is dropped, in token order, and counted in `Handle.dropped` and, for the latest
            dispatch, in `dropped` (() int64 on the device, this rank's slots). None: nothing is dropped.
    verify  check what arrives; None: on CPUs only, because on a GPU it makes the host wait
    """

    def __init__(self, transport: Transport, placement: Placement, *, dedup: Literal["none", "rank"] = "rank",
                 budget: int | None = None, verify: bool | None = None) -> None:
        checks.one_of("dedup", dedup, ("none", "rank"))
        super().__init__(transport, placement, dedup, budget, verify)


class AllGather(_OneHop):
    """Each rank gets the tokens of all ranks and returns its part of the result for each of them.

    The way back is a reduce-scatter done as an exchange and a float32 sum at home in rank order, so bfloat16 rounds
    once. Moves W - 1 rows per token whatever the routing: right when K is close to W or the tokens are few.
    """

    def __init__(self, transport: Transport, placement: Placement, *, verify: bool | None = None) -> None:
        super().__init__(transport, placement, "all", None, verify)


class TwoLevel:
    """Once per node over the slow link, then once per rank inside the node; the way back sums per node first.

    Rank r is local rank r % ranks_per_node of node r // ranks_per_node. A token goes to the rank of its destination
    node that has its own local rank (rail-aligned), which hands it on.
    """

    def __init__(self, transport: Transport, placement: Placement, *, ranks_per_node: int,
                 verify: bool | None = None) -> None:
        checks.positive_int("ranks_per_node", ranks_per_node)
        W, n = transport.size, ranks_per_node
        if W % n:
            raise checks.bad("ranks_per_node", f"a divisor of the {W} ranks of the group", n)
        if placement.num_ranks != W:
            raise checks.bad("placement", f"the {W} ranks of the group", f"{placement.num_ranks} ranks")
        self.transport, self.placement, self.rank = transport, placement, transport.rank
        self.across = transport.split([[node * n + i for node in range(W // n)] for i in range(n)])
        self.inside = transport.split([[node * n + i for i in range(n)] for node in range(W // n)])
        self.verify, self.chunks = verify, 1
        self._first, self._last = self.rank // n * n, self.rank // n * n + n
        ranks = placement.rank_of_place
        self._node_of_place = tuple(r // n for r in ranks)
        # Inside a node only places of the node arrive; the others belong to no local rank.
        self._local_of_place = tuple(r - self._first if self._first <= r < self._last else 0 for r in ranks)
        self._agreed = False

    def plan(self, routing: Routing, D: int, dtype: torch.dtype) -> Handle:
        device = routing.experts.device
        if not self._agreed:
            agree(self.transport, self.placement, ("two level", self.inside.size), self.chunks, device)
            self._agreed = True
        places = self.placement.places(routing.experts)
        across, inside = self._announce(places, D, dtype)
        hop = plan_hop(self.across, places, self._node_of_place, dedup="rank", D=D, dtype=dtype, verify=self.verify,
                       counts=across)
        return add_hop(Handle(routing.num_tokens, (), counts_inside=inside), hop, D, dtype, routing.weights.dtype)

    def _announce(self, places: Tensor, D: int, dtype: torch.dtype) -> tuple[Counts, Counts]:
        """One announcement for both hops: every rank tells its rows for each node and for each rank, so each knows
        what the ranks of its node will have received, and hand on."""
        W, n = self.transport.size, self.inside.size
        rank_of_place, _ = owners(self.placement.rank_of_place, places.device)
        node_of_place, node_host = owners(self._node_of_place, places.device)
        index = places.long()
        rows = torch.cat([presence(node_of_place[index], W // n, "rank").sum(1),
                          presence(rank_of_place[index], W, "rank").sum(1)])
        told = announce(self.transport, T=places.shape[0], K=places.shape[1], D=D, dtype=dtype, rows=rows,
                        per_place=histogram(places, len(self._node_of_place)), owner=node_host, chunks=self.chunks)
        to_node, to_rank = told.rows[:, : W // n], told.rows[:, W // n :]
        node = self._first // n
        rail = slice(self.rank % n, None, n)
        across = Counts(self.across.rank, told.tokens[rail], to_node[rail], told.slots[rail], node_host, told.nbytes)

        def handed_on(t: Tensor) -> Tensor:  # (W, …) -> (n, …): what the members of each rail tell together
            return t.view(W // n, n, *t.shape[1:]).sum(0)

        here = torch.tensor([r == node for r in self._node_of_place], dtype=torch.bool, device="cpu")
        inside = Counts(self.inside.rank, handed_on(to_node[:, node]), handed_on(to_rank[:, self._first : self._last]),
                        handed_on(told.slots) * here,
                        torch.tensor(self._local_of_place, dtype=torch.int64, device="cpu"))
        return across, inside

    def dispatch(self, x: Tensor, routing: Routing, handle: Handle | None = None, *,
                 meanwhile: Callable[[Tensor], None] | None = None) -> Batch:
        handle = handle or self.plan(routing, x.shape[1], x.dtype)
        x, ids, weights = flight.dispatch(handle.hops[0], x, routing.weights, meanwhile)
        inner = plan_hop(self.inside, ids, self._local_of_place, dedup="rank", D=x.shape[1], dtype=x.dtype,
                         verify=self.verify, counts=handle.counts_inside)
        handle = add_hop(handle, inner, x.shape[1], x.dtype, weights.dtype)
        x, ids, weights = flight.dispatch(inner, x, weights)
        return Batch(x, local_routing(ids, weights, self.placement, self.rank, routing), handle)

    def combine(self, y: Tensor, handle: Handle, mine: Tensor | None = None, *,
                meanwhile: Callable[[], None] | None = None) -> Tensor:
        across, inside = handle.hops
        return flight.combine(across, flight.combine(inside, y), mine, meanwhile)


def agree(transport: Transport, placement: Placement, settings: tuple[object, ...], chunks: int,
          device: torch.device) -> None:
    """Once per dispatcher: MismatchError naming the ranks whose placement, settings or chunks are not the others'."""
    mine = torch.tensor([code(placement), placement.num_places, code(settings), chunks], dtype=torch.int32,
                        device=device)
    names = ("the placement", "the number of places", "the dispatcher's settings", "chunks")
    check_agreement(gather_ints(transport, mine, "agreement"), names, "agreement")


def local_routing(ids: Tensor, weights: Tensor, placement: Placement, rank: int, routing: Routing) -> Routing:
    """ids (M, C) of places -> Routing over the slots of this rank."""
    first, last = placement.first_place[rank], placement.first_place[rank + 1]
    here = (ids >= first) & (ids < last)
    return Routing(torch.where(here, ids - first, -1), weights, apply_to=routing.apply_to)


def add_hop(handle: Handle, hop: Hop, D: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> Handle:
    """The handle with one more hop and its bytes."""
    rows, back = hop.rows_away, sum(hop.recv) - hop.recv[hop.transport.rank]
    return replace(
        handle, hops=(*handle.hops, hop),
        bytes_dispatch=handle.bytes_dispatch + rows * RowFormat.token(D, dtype, hop.C, weight_dtype).row_bytes,
        bytes_combine=handle.bytes_combine + back * RowFormat.vector(D, dtype).row_bytes,
        bytes_dispatch_backward=handle.bytes_dispatch_backward
        + back * RowFormat.gradient(D, dtype, hop.C, weight_dtype).row_bytes,
        bytes_counts=handle.bytes_counts + (0 if hop.counts is None else hop.counts.nbytes))
