"""Dispatchers on W ranks that are threads of one process: every one equals one process, and moves what it says."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from distributed_problems import DISPATCHERS, Problem, Ran, on_rank, one_process, random_problem
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moeffn import ExpertWeights, Routing, moe_ffn, reference
from moeffn.distributed import (
    AllToAll,
    Handle,
    Local,
    MismatchError,
    Placement,
    RankAbsentError,
    balance_replicas,
    expert_parallel_ffn,
    run_loopback,
)
from moeffn.distributed.cost import Links, estimate, expected_destinations
from moeffn.distributed.payload import RowFormat
from moeffn.distributed.transport import LoopbackTransport


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gathered(p: Problem, ran: list[Ran]) -> dict[str, Tensor]:
    """The ranks' results as one process has them: tokens in rank order, experts by id, replicas' gradients summed."""
    out = {name: torch.cat([r.tensors[name] for r in ran]) for name in ("y", "x", "weights")}
    for name, like in (("w_in", p.w_in), ("w_out", p.w_out)):
        total = torch.zeros_like(like)
        for r, held in zip(ran, p.placement.experts_of_rank, strict=True):
            for slot, e in enumerate(held):
                total[e] += r.tensors[name][slot]
        out[name] = total
    return out


@pytest.mark.parametrize("name", DISPATCHERS)
@pytest.mark.parametrize("block", range(6))
def test_equals_one_process_in_float64(name: str, block: int):
    for seed in range(block * 10, block * 10 + 10):
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
    """Against float64: the error of one process in this dtype, and one half unit for each rounding of the recipe."""
    unit = torch.finfo(dtype).eps / 2
    roundings = {"none": 1, "rank": 1, "gather": 1, "budget": 1, "two level": 2}[name]
    for seed in range(100, 120):
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


def rows_by_hand(p: Problem, rank: int, name: str) -> dict[str, int]:
    """Rows that leave `rank`, counted by loops over tokens and slots from the routing alone."""
    E, W, n = p.placement.num_experts, p.W, 2 if p.W % 2 == 0 else p.W
    home = [p.placement.places_of_expert[e] for e in range(E)]
    rank_of_place = p.placement.rank_of_place

    def destinations(r: int, t: int) -> list[int]:
        held = [home[e] for e in p.ids[r][t].tolist() if 0 <= e < E and home[e]]
        return [rank_of_place[places[t % len(places)]] for places in held]

    everyone = [[destinations(r, t) for t in range(len(p.ids[r]))] for r in range(W)]
    if name == "none":
        return {"out": sum(d != rank for tok in everyone[rank] for d in tok),
                "back": sum(d == rank for r in range(W) if r != rank for tok in everyone[r] for d in tok)}
    if name == "rank":
        return {"out": sum(d != rank for tok in everyone[rank] for d in set(tok)),
                "back": sum(d == rank for r in range(W) if r != rank for tok in everyone[r] for d in set(tok))}
    if name == "gather":
        return {"out": (W - 1) * len(everyone[rank]), "back": sum(len(everyone[r]) for r in range(W) if r != rank)}
    node, local = divmod(rank, n)
    rail = [m * n + local for m in range(W // n)]
    out1 = sum(m != node for tok in everyone[rank] for m in {d // n for d in tok})
    back1 = sum(node in {d // n for d in tok} for r in rail if r != rank for tok in everyone[r])
    out2 = sum(d != rank for r in rail for tok in everyone[r] for d in set(tok) if d // n == node)
    back2 = sum(rank in tok for m in range(W // n) for i in range(n) if i != local for tok in everyone[m * n + i])
    return {"out": out1 + out2, "back": back1 + back2}


@pytest.mark.parametrize("name", ["rank", "none", "gather", "two level"])
def test_bytes_are_those_of_the_routing(name: str):
    """What the transport counted equals the handle's figures and rows counted by hand times the bytes of a row."""
    moved = 0
    for seed in range(300, 330):
        p = random_problem(seed)
        ran = run_loopback(p.W, lambda t, p=p: on_rank(p, DISPATCHERS[name](t, p.placement), t))
        D, K = p.x[0].shape[1], 1 if name == "none" else p.ids[0].shape[1]
        token = RowFormat.token(D, torch.float64, K, torch.float64).row_bytes
        vector = RowFormat.vector(D, torch.float64).row_bytes
        gradient = RowFormat.gradient(D, torch.float64, K, torch.float64).row_bytes
        for rank, r in enumerate(ran):
            rows = rows_by_hand(p, rank, name)
            h = r.handle
            assert h.bytes_dispatch == r.sent["dispatch"] == rows["out"] * token, seed
            assert h.bytes_combine == r.sent["combine"] == rows["back"] * vector, seed
            assert r.sent["combine backward"] == rows["out"] * vector, seed
            assert h.bytes_dispatch_backward == r.sent["dispatch backward"] == rows["back"] * gradient, seed
            assert h.bytes_counts == r.sent["counts"], seed
            moved += rows["out"]
    assert moved > 400


@pytest.mark.parametrize(("E", "K", "W"), [(16, 2, 4), (30, 4, 8), (64, 6, 16)])  # even, uneven, many ranks
def test_mean_rows_are_the_expected_destinations(E: int, K: int, W: int):
    """Uniform routing: distinct ranks per token average D(G) within four standard errors."""
    T, placement = 400, Placement.balanced(E, W)
    g = torch.Generator().manual_seed(E)
    ids = torch.rand(T * W, E, generator=g).topk(K).indices.to(torch.int32).split(T)

    def program(t: LoopbackTransport) -> tuple[Tensor, int]:
        hop = AllToAll(t, placement).plan(Routing(ids[t.rank], torch.ones(T, K)), 4, torch.float32).hops[0]
        return (hop.rows_of_token >= 0).sum(1).double(), sum(hop.send)

    found = run_loopback(W, program)
    per_token = torch.cat([f[0] for f in found])
    assert int(per_token.sum()) == sum(f[1] for f in found)
    sizes = [len(h) for h in placement.experts_of_rank]
    error = float(per_token.std()) / math.sqrt(T * W)
    assert error > 0
    assert abs(float(per_token.mean()) - expected_destinations(E, K, sizes)) <= 4 * error


def test_expected_destinations_of_published_tables():
    """D(R) for 256 experts, top 8: 5.295 on 8 ranks, 7.267 on 32; (8,2) on 4 ranks: 1.857."""
    assert expected_destinations(256, 8, [32] * 8) == pytest.approx(5.295, abs=5e-4)
    assert expected_destinations(256, 8, [8] * 32) == pytest.approx(7.267, abs=5e-4)
    assert expected_destinations(8, 2, [2] * 4) == pytest.approx(1.857, abs=5e-4)
    assert expected_destinations(5, 5, [2, 2, 1]) == 3


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


def test_budget_drops_and_counts():
    """Rows beyond the budget are dropped in token order, counted, and contribute exactly nothing; gradients follow."""
    E, W, T, K, D = 4, 2, 6, 2, 5
    placement = Placement.balanced(E, W)
    g = torch.Generator().manual_seed(3)
    x = [torch.randn(T, D, generator=g, dtype=torch.float64) for _ in range(W)]
    ids = [torch.tensor([[2, 3]] * T, dtype=torch.int32), torch.tensor([[0, 2]] * T, dtype=torch.int32)]
    weights = [torch.rand(T, K, generator=g, dtype=torch.float64) for _ in range(W)]
    w_in, w_out = (torch.randn(E, 6, D, generator=g, dtype=torch.float64),
                   torch.randn(E, D, 3, generator=g, dtype=torch.float64))
    p = Problem(placement, w_in, w_out, x, ids, weights, x, "output")
    ran = run_loopback(W, lambda t: on_rank(p, AllToAll(t, placement, budget=4), t))
    kept = [i.clone() for i in ids]
    kept[0][4:] = -1  # both experts live on rank 1: tokens 4, 5 do not fit
    kept[1][4:] = -1  # each of rank 1's tokens goes to both ranks
    want = one_process(Problem(placement, w_in, w_out, x, kept, weights, x, "output"))
    for key, value in gathered(p, ran).items():
        assert torch.allclose(value, want[key], rtol=0, atol=1e-12), key
    assert [int(r.handle.dropped) for r in ran] == [4, 4]
    assert all("counts" not in r.sent for r in ran)


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
            K, D = odd.get("K", 2), odd.get("D", 4)
            x = torch.zeros(3, D, dtype=odd.get("dtype", torch.float32))
            d.dispatch(x, Routing(torch.zeros(3, K, dtype=torch.int32), torch.ones(3, K)))
        return program

    cases = {"top_k": {"K": 1}, "d_model": {"D": 5}, "dtype": {"dtype": torch.float64},
             "the placement": {"placement": Placement.chunked(4, 3)}, "settings": {"dedup": "none"}}
    for word, change in cases.items():
        with pytest.raises(MismatchError, match=rf"rank 2 disagree on .*{word}") as caught:
            run_loopback(3, different(**change))
        assert caught.value.ranks == (2,)


def test_a_rank_that_stops_does_not_hang_the_others():
    def program(t: LoopbackTransport) -> None:
        if t.rank == 1:
            return  # never comes
        AllToAll(t, Placement.balanced(2, 2)).plan(Routing(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)), 1,
                                                  torch.float32)

    with pytest.raises(RankAbsentError, match="rank 1 stopped") as caught:
        run_loopback(2, program, deadline=0.5)
    assert caught.value.ranks == (1,)


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


def test_cost_model_prefers_what_it_should():
    """Many slow nodes: two levels for long batches; one level for few tokens, where latency counts; always by D(G)."""
    placement = Placement.balanced(256, 32)
    long = estimate(placement, tokens=4096, d_model=7168, top_k=8, ranks_per_node=8)
    short = estimate(placement, tokens=1, d_model=7168, top_k=8, ranks_per_node=8)
    assert long[0].name == "two_level" and short[0].name != "two_level"
    by_name = {e.name: e for e in long}
    rows = by_name["all_to_all, dedup rank"]
    total = rows.rows_inside + rows.rows_across
    assert total == pytest.approx(4096 * expected_destinations(256, 8, [8] * 32) * 31 / 32)
    assert by_name["two_level"].rows_across == pytest.approx(4096 * 3.6143 * 3 / 4, rel=1e-4)  # per node, remote 3 of 4
    one_node = estimate(Placement.balanced(8, 8), tokens=64, d_model=64, top_k=8, links=Links(latency_s=1e-9))
    assert one_node[0].name == "all_gather" or one_node[0].bytes <= one_node[-1].bytes


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


def test_loopback_at_work_while_tokens_fly():
    """`meanwhile` is called once by every dispatcher, with and without hops."""
    p = random_problem(2, W=4)
    for make in (*DISPATCHERS.values(), lambda t, _: Local(Placement.balanced(p.placement.num_experts, 1))):
        def program(t: LoopbackTransport, make=make) -> int:
            calls: list[int] = []
            make(t, p.placement).dispatch(p.x[t.rank], Routing(p.ids[t.rank], p.weights[t.rank]),
                                          meanwhile=lambda: calls.append(1))
            return len(calls)

        assert run_loopback(4, program) == [1] * 4


def test_chunks_overlap_and_change_nothing():
    """Part i flies while the experts work on part i - 1; outputs and gradients stay those of one process."""
    for seed in range(600, 606):
        p = random_problem(seed)
        want = one_process(p)

        def program(t: LoopbackTransport, p: Problem = p) -> dict[str, Tensor]:
            held = list(p.placement.experts_of_rank[t.rank])
            x, w = (v[t.rank].clone().requires_grad_() for v in (p.x, p.weights))
            a, b = (v[held].clone().requires_grad_() for v in (p.w_in, p.w_out))
            y = expert_parallel_ffn(x, Routing(p.ids[t.rank], w, apply_to=p.apply_to), ExpertWeights(a, b),
                                    AllToAll(t, p.placement), backend="torch", chunks=3)
            y.backward(p.dy[t.rank])
            return {"y": y.detach(), "x": x.grad, "weights": w.grad, "w_in": a.grad, "w_out": b.grad}

        ran = [Ran(found, Handle(0, ()), {}, 0) for found in run_loopback(p.W, program)]
        for key, value in gathered(p, ran).items():
            # replicas are chosen by the token's place in its chunk: the sum over them is what must agree
            assert torch.allclose(value, want[key], rtol=0, atol=1e-11), (seed, key)


class _HostReads(TorchDispatchMode):
    """Counts what would make the host wait for a GPU: scalar reads and sizes that depend on data."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "item", "nonzero", "masked_select", "_unique2", "bincount", "is_nonzero",
                    "equal"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def test_fixed_budget_never_waits_for_the_device():
    """No data-dependent size and no scalar read in forward or backward; and the usual way is caught by this counter."""
    placement, x = Placement.balanced(4, 2), torch.randn(5, 3)
    ids = torch.tensor([[0, 3], [2, 1], [1, 0], [-1, 2], [3, 3]], dtype=torch.int32)

    def reads(budget: int | None, verify: bool) -> list[str]:
        def program(t: LoopbackTransport) -> list[str]:
            d, leaf = AllToAll(t, placement, budget=budget, verify=verify), x.clone().requires_grad_()
            d.plan(Routing(ids, torch.ones(5, 2)), 3, torch.float32)  # agreement, once a dispatcher
            with _HostReads() as mode:
                batch = d.dispatch(leaf, Routing(ids, torch.ones(5, 2)))
                d.combine(batch.x * 2, batch.handle).sum().backward()
            return mode.found

        return run_loopback(2, program)[0]

    assert reads(5, False) == []
    assert reads(5, True) != []
