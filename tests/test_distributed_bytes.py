"""What dispatchers move: bytes against loops over the routing, the mean against D(G), the cost model, fixed budgets."""

from __future__ import annotations

import math

import pytest
import torch
from distributed_problems import DISPATCHERS, Problem, gathered, on_rank, one_process, random_problem
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from moeffn import Routing
from moeffn.distributed import (
    AllToAll,
    Placement,
    TwoLevel,
    run_loopback,
)
from moeffn.distributed.cost import Links, estimate, expected_destinations
from moeffn.distributed.payload import RowFormat
from moeffn.distributed.transport import LoopbackTransport

pytestmark = pytest.mark.usefixtures("one_thread")


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
    if name == "budget":
        return {"out": (W - 1) * 11, "back": (W - 1) * 11}
    node, local = divmod(rank, n)
    rail = [m * n + local for m in range(W // n)]
    out1 = sum(m != node for tok in everyone[rank] for m in {d // n for d in tok})
    back1 = sum(node in {d // n for d in tok} for r in rail if r != rank for tok in everyone[r])
    out2 = sum(d != rank for r in rail for tok in everyone[r] for d in set(tok) if d // n == node)
    back2 = sum(rank in tok for m in range(W // n) for i in range(n) if i != local for tok in everyone[m * n + i])
    return {"out": out1 + out2, "back": back1 + back2}


@pytest.mark.parametrize("name", DISPATCHERS)
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
            assert h.bytes_counts == r.sent.get("counts", 0), seed
            moved += rows["out"]
    assert moved > 400


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64])
def test_one_payload_carries_any_dtype(dtype: torch.dtype):
    """Vector, ids and weights of a token travel in one row of bytes, bit by bit; float8, which gloo refuses, too."""
    D, C, rows = 5, 3, 4
    fmt = RowFormat.token(D, dtype, C, torch.float32)
    assert all(at % 8 == 0 for at in fmt.offsets) and fmt.row_bytes % 16 == 0

    sent = [[torch.randn(rows, D).to(dtype), torch.randint(9, (rows, C), dtype=torch.int32), torch.rand(rows, C)]
            for _ in range(2)]

    def program(t: LoopbackTransport) -> bool:
        buffer = fmt.empty(rows, torch.device("cpu"))
        for i, column in enumerate(sent[t.rank]):
            fmt.column(buffer, i).copy_(column)
        came = t.start(buffer, [2, 2], [2, 2], "dispatch").wait()
        mine = slice(2 * t.rank, 2 * t.rank + 2)
        want = [torch.cat([sent[r][i][mine].view(torch.uint8) for r in range(2)]) for i in range(3)]
        return all(torch.equal(fmt.column(came, i).contiguous().view(torch.uint8), want[i]) for i in range(3))

    assert run_loopback(2, program) == [True, True]


@pytest.mark.parametrize(("E", "K", "W", "n"), [
    (16, 2, 4, 1), (30, 4, 8, 1), (64, 6, 16, 1),  # even, uneven, many ranks
    (30, 4, 8, 2), (64, 6, 16, 4),  # once per node of n ranks
])
def test_mean_rows_are_the_expected_destinations(E: int, K: int, W: int, n: int):
    """Uniform routing: distinct ranks, or nodes, per token average D(G) within four standard errors."""
    T, placement = 400, Placement.balanced(E, W)
    g = torch.Generator().manual_seed(E)
    ids = torch.rand(T * W, E, generator=g).topk(K).indices.to(torch.int32).split(T)

    def program(t: LoopbackTransport) -> tuple[Tensor, int]:
        d = AllToAll(t, placement) if n == 1 else TwoLevel(t, placement, ranks_per_node=n)
        hop = d.plan(Routing(ids[t.rank], torch.ones(T, K)), 4, torch.float32).hops[0]
        return (hop.rows_of_token >= 0).sum(1).double(), sum(hop.send)

    found = run_loopback(W, program)
    per_token = torch.cat([f[0] for f in found])
    assert int(per_token.sum()) == sum(f[1] for f in found)
    sizes = [len(h) for h in placement.experts_of_rank]
    per_node = [sum(sizes[i : i + n]) for i in range(0, W, n)]
    error = float(per_token.std()) / math.sqrt(T * W)
    assert error > 0
    assert abs(float(per_token.mean()) - expected_destinations(E, K, per_node)) <= 4 * error


def test_expected_destinations_of_published_tables():
    """D(R) for 256 experts, top 8: 5.295 on 8 ranks, 7.267 on 32; (8,2) on 4 ranks: 1.857."""
    assert expected_destinations(256, 8, [32] * 8) == pytest.approx(5.295, abs=5e-4)
    assert expected_destinations(256, 8, [8] * 32) == pytest.approx(7.267, abs=5e-4)
    assert expected_destinations(8, 2, [2] * 4) == pytest.approx(1.857, abs=5e-4)
    assert expected_destinations(5, 5, [2, 2, 1]) == 3


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
