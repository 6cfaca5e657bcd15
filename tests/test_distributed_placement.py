"""Where experts live: the table, balanced and chunked cuts, replicas of hot experts."""

from __future__ import annotations

import random

import pytest
import torch

from moeffn.distributed import (
    Placement,
    balance_replicas,
)


def test_placement_table():
    assert [len(h) for h in Placement.balanced(30, 8).experts_of_rank] == [4, 4, 4, 4, 4, 4, 3, 3]
    assert [len(h) for h in Placement.chunked(30, 8).experts_of_rank] == [4, 4, 4, 4, 4, 4, 4, 2]
    for E, W in ((1, 4), (5, 4), (7, 3), (9, 8)):  # as torch.chunk cuts, with empty ranks
        sizes = [c.numel() for c in torch.arange(E).chunk(W)]
        assert [len(h) for h in Placement.chunked(E, W).experts_of_rank] == sizes + [0] * (W - len(sizes))
    p = Placement(5, ((0, 1), (2, 3), (4, 0)))
    assert p.first_place == (0, 2, 4, 6) and p.places_of_expert[0] == (0, 5) and p.owner(0) == 0
    ids = torch.tensor([[0, 4], [0, 1], [0, -1], [5, 2]], dtype=torch.int32)
    assert p.places(ids).tolist() == [[0, 4], [5, 1], [0, -1], [-1, 2]]  # token t goes to holder t % 2 of expert 0
    lost = p.without([1])
    assert lost.missing == (2, 3) and lost.places_of_expert[2] == ()
    assert lost.places(ids).tolist() == [[0, 2], [3, 1], [0, -1], [-1, -1]]
    assert Placement(5, ((0, 1), (2, 3), (4, 0))).without([0]).owner(0) == 2


@pytest.mark.parametrize(("arguments", "message"), [
    ((3, ((0, 1), (1, 3))), r"experts_of_rank\[1\]: expected ids in \[0, 3\)"),
    ((3, ((0, 0), (1, 2))), "each expert at most once"),
    ((3, ((0,), (1,))), r"no home for \(2,\)"),
])
def test_bad_placements(arguments: tuple, message: str):
    with pytest.raises(ValueError, match=message):
        Placement(*arguments)


def test_replicas_even_out_a_skewed_load():
    """The example that EPLB publishes; and on skewed loads the hottest rank carries less than without replicas."""
    load = [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86]
    published = [(5, 6), (5, 7), (4, 8), (3, 4), (9, 10), (2, 10), (0, 1), (1, 11)]
    assert balance_replicas(load, 8, 2, num_nodes=2, num_groups=4).experts_of_rank == tuple(published)
    for seed in range(50):
        rng = random.Random(seed)
        W, extra = rng.randint(2, 8), rng.randint(1, 3)
        E = W * rng.randint(1, 4)
        load = [1 / (i + 1) ** 1.2 for i in range(E)]
        rng.shuffle(load)
        placement = balance_replicas(load, W, E // W + extra)
        copies = [len(p) for p in placement.places_of_expert]
        assert min(copies) >= 1 and max(copies) <= W

        def hottest(p: Placement, load: list[float] = load) -> float:
            return max(sum(load[e] / len(p.places_of_expert[e]) for e in held) for held in p.experts_of_rank)

        assert hottest(placement) <= hottest(Placement.balanced(E, W)) + 1e-12
        assert hottest(placement) < 1.35 * sum(load) / W, (seed, placement)


def test_replicas_refuse_what_cannot_be():
    with pytest.raises(ValueError, match="slots_per_rank: expected at least 3 for 5 experts on 2 ranks"):
        balance_replicas([1.0] * 5, 2, 2)
    with pytest.raises(ValueError, match="num_nodes: expected a divisor of the 4 ranks"):
        balance_replicas([1.0] * 4, 4, 1, num_nodes=3)
