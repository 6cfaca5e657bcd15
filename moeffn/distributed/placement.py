"""Where each expert lives: an explicit expert -> (rank, slot) table, with replicas and missing ranks.

A *slot of a rank* holds one expert; the slots of all ranks, one rank after the other, are the P *places* of the table:

    E=5 experts on W=3 ranks, expert 0 with a replica on rank 2:
    experts_of_rank = ((0, 1), (2, 3), (4, 0))      places 0..5 hold experts 0,1,2,3,4,0
    first_place     = (0, 2, 4, 6)                  place p is slot p - first_place[r] of rank r
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from .. import checks


@dataclass(frozen=True)
class Placement:
    """num_experts E; experts_of_rank: for each rank its experts in slot order; missing: experts that live nowhere.

    The owner of an expert is the lowest rank that holds it; the other holders are replicas. Tokens are split over the
    holders of an expert by token index, so each goes to exactly one. Slots routed to a missing expert contribute
    nothing and are counted as dropped. Raises ValueError for ids out of range, an expert twice on one rank, or an
    expert without a home that `missing` does not name.
    """

    num_experts: int
    experts_of_rank: tuple[tuple[int, ...], ...]
    missing: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        checks.positive_int("Placement.num_experts", self.num_experts)
        if not self.experts_of_rank:
            raise checks.bad("Placement.experts_of_rank", "at least one rank", "none")
        for rank, held in enumerate(self.experts_of_rank):
            for e in held:
                if not 0 <= e < self.num_experts:
                    raise checks.bad(f"Placement.experts_of_rank[{rank}]", f"ids in [0, {self.num_experts})", e)
            if len(set(held)) != len(held):
                raise checks.bad(f"Placement.experts_of_rank[{rank}]", "each expert at most once", held)
        nowhere = tuple(sorted(set(range(self.num_experts)) - {e for held in self.experts_of_rank for e in held}))
        if nowhere != tuple(sorted(self.missing)):
            raise checks.bad("Placement.experts_of_rank", f"a home for every expert except missing={self.missing}",
                             f"no home for {nowhere}")

    @staticmethod
    def balanced(num_experts: int, num_ranks: int) -> Placement:
        """Contiguous, sizes that differ by at most one, larger first: 30 experts on 8 ranks are 4,4,4,4,4,4,3,3."""
        checks.positive_int("num_experts", num_experts)
        checks.positive_int("num_ranks", num_ranks)
        base, extra = divmod(num_experts, num_ranks)
        return _contiguous([base + (r < extra) for r in range(num_ranks)])

    @staticmethod
    def chunked(num_experts: int, num_ranks: int) -> Placement:
        """Contiguous as DTensor's `Shard(0)` (torch.chunk) cuts E rows: 30 experts on 8 ranks are 4,4,4,4,4,4,4,2."""
        checks.positive_int("num_experts", num_experts)
        checks.positive_int("num_ranks", num_ranks)
        size = -(-num_experts // num_ranks)
        return _contiguous([max(0, min(size, num_experts - r * size)) for r in range(num_ranks)])

    def without(self, ranks: Iterable[int]) -> Placement:
        """The table when `ranks` hold nothing: their experts stay with their replicas, or become missing."""
        gone = set(ranks)
        for r in gone:
            if not 0 <= r < self.num_ranks:
                raise checks.bad("ranks", f"ranks in [0, {self.num_ranks})", r)
        held = tuple(() if r in gone else h for r, h in enumerate(self.experts_of_rank))
        alive = {e for h in held for e in h}
        return Placement(self.num_experts, held, tuple(e for e in range(self.num_experts) if e not in alive))

    @property
    def num_ranks(self) -> int:
        return len(self.experts_of_rank)

    @property
    def num_places(self) -> int:
        return self.first_place[-1]

    @cached_property
    def first_place(self) -> tuple[int, ...]:
        """(W+1,): rank r has places first_place[r] : first_place[r+1]."""
        bounds = [0]
        for held in self.experts_of_rank:
            bounds.append(bounds[-1] + len(held))
        return tuple(bounds)

    @cached_property
    def expert_of_place(self) -> tuple[int, ...]:
        return tuple(e for held in self.experts_of_rank for e in held)

    @cached_property
    def places_of_expert(self) -> tuple[tuple[int, ...], ...]:
        """For each expert its places, owner first; () for a missing one."""
        found: list[list[int]] = [[] for _ in range(self.num_experts)]
        for place, e in enumerate(self.expert_of_place):
            found[e].append(place)
        return tuple(tuple(f) for f in found)

    @cached_property
    def rank_of_place(self) -> tuple[int, ...]:
        return tuple(r for r, held in enumerate(self.experts_of_rank) for _ in held)

    def owner(self, expert: int) -> int:
        """The lowest rank that holds the expert, -1 when it is missing."""
        places = self.places_of_expert[expert]
        return self.rank_of_place[places[0]] if places else -1

    @property
    def has_replicas(self) -> bool:
        return any(len(p) > 1 for p in self.places_of_expert)

    @cached_property
    def _tables(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}

    def tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """On `device`: places (E, most replicas) int32 padded with -1, replicas (E,) int64."""
        if device not in self._tables:
            width = max(1, max(len(p) for p in self.places_of_expert))
            rows = [list(p) + [-1] * (width - len(p)) for p in self.places_of_expert]
            self._tables[device] = (
                torch.tensor(rows, dtype=torch.int32, device=device),
                torch.tensor([max(1, len(p)) for p in self.places_of_expert], device=device))
        return self._tables[device]

    def places(self, experts: Tensor) -> Tensor:
        """experts (T, K) -> place of each slot (T, K) int32; -1 for ids outside [0, E) and missing experts.

        Token t goes to holder t % replicas of its expert.
        """
        table, replicas = self.tables(experts.device)
        valid = (experts >= 0) & (experts < self.num_experts)
        ids = torch.where(valid, experts, 0).long()
        token = torch.arange(experts.shape[0], device=experts.device)[:, None]
        place = table[ids, token % replicas[ids]]
        return torch.where(valid, place, -1)

    def describe(self) -> str:
        """One line a rank."""
        return "\n".join(f"rank {r}: {len(h)} experts {list(h)}" for r, h in enumerate(self.experts_of_rank))


def _contiguous(sizes: list[int]) -> Placement:
    held, start = [], 0
    for size in sizes:
        held.append(tuple(range(start, start + size)))
        start += size
    return Placement(start, tuple(held))
