"""Dispatchers on W ranks that are threads of one process: every one equals one process, and what is odd is named."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from distributed_problems import DISPATCHERS, Problem, gathered, on_rank, one_process, random_problem

from moeffn import ExpertWeights, Routing, moe_ffn, reference
from moeffn.distributed import (
    AllToAll,
    Dispatcher,
    Local,
    MismatchError,
    Placement,
    RankAbsentError,
    expert_parallel_ffn,
    run_loopback,
)
from moeffn.distributed.transport import LoopbackTransport

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", DISPATCHERS)
@pytest.mark.parametrize("block", range(6))
def test_equals_one_process_in_float64(name: str, block: int):
    """Two hundred problems a dispatcher, up to sixteen ranks."""
    for seed in range(block * 20, block * 20 + 20):
        p = random_problem(seed)
        ran = run_loopback(p.W, lambda t, p=p: on_rank(p, DISPATCHERS[name](t, p.placement), t))
        want, got = one_process(p), gathered(p, ran)
        for key, value in want.items():
            assert got[key].shape == value.shape, (seed, key)
            scale = max(1.0, float(value.abs().max()) if value.numel() else 0.0)
            assert torch.allclose(got[key], value, rtol=0, atol=1e-12 * scale), (seed, name, key)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", DISPATCHERS)
def test_rounding_of_the_recipe(name: str, dtype: torch.dtype):
    """Against float64. Outputs and gradients of x: the error of one process in this dtype, and one half unit for each
    rounding of the recipe. Gradients of weights and experts: twice that error, their sums being taken in another order,
    and one rounding where the parts of replicas are added up."""
    unit = torch.finfo(dtype).eps / 2
    roundings = {"none": 1, "rank": 1, "gather": 1, "budget": 1, "two level": 2}[name]
    for seed in range(1100, 1120):
        p = random_problem(seed, dtype)
        wide = Problem(p.placement, p.w_in.double(), p.w_out.double(), [t.double() for t in p.x], p.ids,
                       [t.double() for t in p.weights], [t.double() for t in p.dy], p.apply_to)
        ran = run_loopback(p.W, lambda t, p=p: on_rank(p, DISPATCHERS[name](t, p.placement), t))
        exact, plain, got = one_process(wide), one_process(p), gathered(p, ran)
        for key in ("y", "x"):
            size = float(exact[key].norm())
            allowed = float((plain[key].double() - exact[key]).norm())
            # partial results are rounded before they are summed: relative to the partials, at most sqrt(2K) larger
            allowed += roundings * unit * size * math.sqrt(2 * p.ids[0].shape[1]) * 2
            assert float((got[key].double() - exact[key]).norm()) <= allowed + 1e-30, (seed, key)
        for key in ("weights", "w_in", "w_out"):
            allowed = 2 * float((plain[key].double() - exact[key]).norm()) + unit * float(exact[key].norm())
            assert float((got[key].double() - exact[key]).norm()) <= allowed + 1e-30, (seed, key)


def test_every_rank_makes_the_same_exchanges():
    """Idle ranks, and ranks without tokens or experts, call as often as the others."""
    for name, make in DISPATCHERS.items():
        for seed in range(400, 410):
            p = random_problem(seed)
            ran = run_loopback(p.W, lambda t, p=p, make=make: on_rank(p, make(t, p.placement), t))
            assert len({r.exchanges for r in ran}) == 1, (name, seed)


def test_experts_without_tokens_get_zero_gradients():
    placement = Placement.balanced(6, 3)
    x = torch.randn(4, 3, dtype=torch.float64)
    p = Problem(placement, torch.randn(6, 4, 3, dtype=torch.float64), torch.randn(6, 3, 2, dtype=torch.float64),
                [x, x[:0], x], [torch.zeros(t, 2, dtype=torch.int32) for t in (4, 0, 4)],
                [torch.ones(t, 2, dtype=torch.float64) for t in (4, 0, 4)], [x, x[:0], x], "output")
    for name, make in DISPATCHERS.items():
        ran = run_loopback(3, lambda t, make=make: on_rank(p, make(t, placement), t))
        for rank, r in enumerate(ran):
            for slot, e in enumerate(placement.experts_of_rank[rank]):
                assert bool((r.tensors["w_in"][slot] == 0).all()) == (e != 0), (name, rank)


def test_handle_of_plan_is_reused():
    """One plan serves several dispatches of the same routing, without further announcements."""
    placement, ids = Placement.balanced(4, 2), torch.tensor([[0, 3], [2, 1], [1, 2]], dtype=torch.int32)

    def program(t: LoopbackTransport) -> bool:
        d, routing = AllToAll(t, placement), Routing(ids, torch.ones(3, 2))
        handle = d.plan(routing, 2, torch.float32)
        announced = t.sent_bytes["counts"]
        for scale in (1.0, 2.0):
            x = torch.arange(6.0).view(3, 2) * scale
            batch = d.dispatch(x, routing, handle)
            assert torch.equal(d.combine(batch.x, batch.handle), 2 * x)  # both ranks return each token once
        return t.sent_bytes["counts"] == announced

    assert run_loopback(2, program) == [True, True]


def test_rows_arrive_by_source_and_token():
    """The order of a batch is (source rank, token): results do not depend on who was faster."""
    placement = Placement.balanced(4, 2)

    def program(t: LoopbackTransport) -> list[float]:
        x = torch.arange(3.0)[:, None] + 10 * t.rank
        ids = torch.tensor([[0, 2], [2, 3], [1, 0]], dtype=torch.int32)
        return AllToAll(t, placement).dispatch(x, Routing(ids, torch.ones(3, 2))).x[:, 0].tolist()

    assert run_loopback(2, program) == [[0, 2, 10, 12], [0, 1, 10, 11]]


def test_local_is_one_process():
    p = random_problem(1)
    p = Problem(Placement.balanced(p.placement.num_experts, 1), p.w_in, p.w_out, p.x[:1], p.ids[:1], p.weights[:1],
                p.dy[:1], p.apply_to)
    d = Local(p.placement)
    batch = d.dispatch(p.x[0], Routing(p.ids[0], p.weights[0], apply_to=p.apply_to))
    y = d.combine(moe_ffn(batch.x, batch.routing, ExpertWeights(p.w_in, p.w_out)), batch.handle)
    routing = Routing(p.ids[0], p.weights[0], apply_to=p.apply_to)
    want = reference.moe_ffn(p.x[0], routing, ExpertWeights(p.w_in, p.w_out))
    assert torch.allclose(y, want, rtol=0, atol=1e-12)


class _Short(LoopbackTransport):
    """A rank that sends one row fewer than it announced to rank 0, as a faulty network layer would."""

    def start(self, rows, send, recv, what):
        if what == self.fault and self.rank == 1:
            send = [send[0] - 1, *send[1:]]
            rows = torch.cat([rows[: send[0]], rows[send[0] + 1 :]])
        return super().start(rows, send, recv, what)


@pytest.mark.parametrize("what", ["dispatch", "combine", "combine backward", "dispatch backward"])
def test_rows_that_did_not_come_are_seen(what: str):
    """A short send leaves garbage silently; the tags name the sender, in all four directions."""
    placement, ids = Placement.balanced(4, 2), torch.tensor([[0, 3], [2, 1], [1, 2]], dtype=torch.int32)

    def program(t: LoopbackTransport) -> None:
        t.__class__, t.fault = _Short, what
        d, x = AllToAll(t, placement), torch.randn(3, 2).requires_grad_()
        batch = d.dispatch(x, Routing(ids, torch.ones(3, 2)))
        d.combine(batch.x * 2, batch.handle).sum().backward()

    with pytest.raises(MismatchError, match="rank 1 announced 3 rows, 2 came") as caught:
        run_loopback(2, program)
    assert caught.value.ranks == (1,)


def test_ranks_that_disagree_are_named():
    placement = Placement.balanced(4, 3)

    def different(**change: object) -> Callable[[LoopbackTransport], None]:
        def program(t: LoopbackTransport) -> None:
            odd = change if t.rank == 2 else {}
            d = AllToAll(t, odd.get("placement", placement), dedup=odd.get("dedup", "rank"))
            d.chunks = odd.get("chunks", 2)
            K, D = odd.get("K", 2), odd.get("D", 4)
            x = torch.zeros(3, D, dtype=odd.get("dtype", torch.float32))
            d.dispatch(x, Routing(torch.zeros(3, K, dtype=torch.int32), torch.ones(3, K)))
        return program

    cases = {"top_k": {"K": 1}, "d_model": {"D": 5}, "dtype": {"dtype": torch.float64},
             "the placement": {"placement": Placement.chunked(4, 3)}, "settings": {"dedup": "none"},
             "chunks": {"chunks": 3}}
    for word, change in cases.items():
        with pytest.raises(MismatchError, match=rf"rank 2 disagree on .*{word}") as caught:
            run_loopback(3, different(**change))
        assert caught.value.ranks == (2,)


def test_ranks_that_cut_their_tokens_otherwise_are_named():
    """In a later call, too, and with every dispatcher that announces."""
    weights = ExpertWeights(torch.zeros(1, 4, 3), torch.zeros(1, 3, 2))

    def program(t: LoopbackTransport, make: Callable[..., Dispatcher]) -> None:
        d, routing = make(t, Placement.balanced(4, 4)), Routing(torch.zeros(6, 1, dtype=torch.int32), torch.ones(6, 1))
        for chunks in (2, 2, 3 if t.rank == 1 else 2):
            expert_parallel_ffn(torch.zeros(6, 3), routing, weights, d, backend="torch", chunks=chunks)

    for name in DISPATCHERS.keys() - {"budget"}:
        with pytest.raises(MismatchError, match="rank 1 disagree on chunks: rank 1 has 3, the others 2"):
            run_loopback(4, lambda t, name=name: program(t, DISPATCHERS[name]))


def test_a_rank_that_stops_does_not_hang_the_others():
    def program(t: LoopbackTransport) -> None:
        if t.rank == 1:
            return  # never comes
        AllToAll(t, Placement.balanced(2, 2)).plan(Routing(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)), 1,
                                                  torch.float32)

    with pytest.raises(RankAbsentError, match="rank 1 stopped") as caught:
        run_loopback(2, program, deadline=0.5)
    assert caught.value.ranks == (1,)
