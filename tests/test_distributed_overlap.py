"""Work done while tokens fly: when it runs, and that it changes nothing."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch
from distributed_problems import DISPATCHERS, Problem, Ran, gathered, one_process, random_problem
from torch import Tensor

from moeffn import Activation, ExpertWeights, Routing, moe_ffn
from moeffn.distributed import (
    AllToAll,
    Handle,
    Local,
    Placement,
    expert_parallel_ffn,
    functional,
    run_loopback,
)
from moeffn.distributed.transport import LoopbackTransport

RELU = Activation(kind="relu", gated=False)
pytestmark = pytest.mark.usefixtures("one_thread")


def test_loopback_at_work_while_tokens_fly():
    """`meanwhile` is called once by every dispatcher, with and without hops."""
    p = random_problem(2, W=4)
    for make in (*DISPATCHERS.values(), lambda t, _: Local(Placement.balanced(p.placement.num_experts, 1))):
        def program(t: LoopbackTransport, make=make) -> int:
            calls: list[int] = []
            make(t, p.placement).dispatch(p.x[t.rank], Routing(p.ids[t.rank], p.weights[t.rank]),
                                          meanwhile=lambda _: calls.append(1))
            return len(calls)

        assert run_loopback(4, program) == [1] * 4


@pytest.mark.parametrize("name", DISPATCHERS)
@pytest.mark.parametrize(("chunks", "local_first"), [(3, False), (1, True), (2, True)])
def test_overlap_changes_nothing(name: str, chunks: int, local_first: bool):
    """Part i flies while the experts work on part i - 1 or on slots of their own rank; outputs and gradients stay those
    of one process, and two runs are bitwise equal."""
    for seed in range(600, 606):
        p = random_problem(seed)
        want = one_process(p)

        def program(t: LoopbackTransport, p: Problem = p) -> dict[str, Tensor]:
            held = list(p.placement.experts_of_rank[t.rank])
            x, w = (v[t.rank].clone().requires_grad_() for v in (p.x, p.weights))
            a, b = (v[held].clone().requires_grad_() for v in (p.w_in, p.w_out))
            y = expert_parallel_ffn(x, Routing(p.ids[t.rank], w, apply_to=p.apply_to), ExpertWeights(a, b),
                                    DISPATCHERS[name](t, p.placement), backend="torch", chunks=chunks,
                                    local_first=local_first)
            y.backward(p.dy[t.rank])
            return {"y": y.detach(), "x": x.grad, "weights": w.grad, "w_in": a.grad, "w_out": b.grad}

        ran = [Ran(found, Handle(0, ()), {}, 0) for found in run_loopback(p.W, program)]
        again = run_loopback(p.W, program)
        assert all(torch.equal(r.tensors[key], a[key]) for r, a in zip(ran, again, strict=True) for key in a), seed
        for key, value in gathered(p, ran).items():
            # replicas are chosen by the token's place in its chunk: the sum over them is what must agree
            assert torch.allclose(value, want[key], rtol=0, atol=1e-11), (seed, key)


def test_parts_fly_out_and_home_while_experts_work(monkeypatch):
    """Three chunks: part i flies out, and the results of part i - 2 home, while the experts work on part i - 1; in
    backward a part's gradients fly while those of another part pass the experts."""
    orders: dict[int, list[str]] = {}  # each rank is a thread

    def experts(x: Tensor, routing: Routing, weights: ExpertWeights, **_: object) -> Tensor:
        orders[threading.get_ident()].append("experts")
        y = moe_ffn(x, routing, weights, backend="torch")
        y.register_hook(lambda _: orders[threading.get_ident()].append("experts backward"))
        return y

    def program(t: LoopbackTransport) -> tuple[list[str], list[str]]:
        order = orders[threading.get_ident()] = []
        start = t.start

        def traced(rows: Tensor, send: list[int], recv: list[int], what: str) -> object:
            came = start(rows, send, recv, what).wait()
            if what in ("counts", "agreement"):
                return SimpleNamespace(wait=lambda: came)
            order.append(f"{what} departs")
            return SimpleNamespace(wait=lambda: (order.append(f"{what} arrives"), came)[1])

        t.start = traced
        w_in, w_out = torch.randn(1, 4, 3).requires_grad_(), torch.randn(1, 3, 2).requires_grad_()
        x, ids = torch.randn(6, 3).requires_grad_(), torch.tensor([[0, 1]] * 6, dtype=torch.int32)
        y = expert_parallel_ffn(x, Routing(ids, torch.ones(6, 2)), ExpertWeights(w_in, w_out),
                                AllToAll(t, Placement.balanced(2, 2)), chunks=3)
        forward = order.copy()
        order.clear()
        y.sum().backward()
        return forward, order

    monkeypatch.setattr(functional, "moe_ffn", experts)
    (forward, backward), second = run_loopback(2, program)
    assert second == (forward, backward)
    assert forward == [
        "dispatch departs", "dispatch arrives", "dispatch departs", "experts", "dispatch arrives",
        "dispatch departs", "combine departs", "experts", "combine arrives", "dispatch arrives",
        "combine departs", "experts", "combine arrives", "combine departs", "combine arrives"]
    assert backward == [
        "combine backward departs", "combine backward arrives", "combine backward departs", "experts backward",
        "combine backward arrives", "dispatch backward departs", "combine backward departs", "experts backward",
        "combine backward arrives", "dispatch backward arrives", "dispatch backward departs", "experts backward",
        "dispatch backward arrives", "dispatch backward departs", "dispatch backward arrives"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{"local_first": True}, {"chunks": 3}, {"chunks": 2, "local_first": True}], ids=str)
def test_overlap_rounds_as_without(options: dict[str, int], dtype: torch.dtype):
    """Integer-valued tokens and weights: every expert's result is exact whatever the number of its rows, so outputs and
    gradients of x must be bitwise those without overlap: the own part is the first term of the same sums, and chunks
    cut no sum. (With replicas a chunk may choose another copy, of another rank: another order.)"""
    rounded = 0
    for seed in range(700, 720):
        p = random_problem(seed, dtype)
        if "chunks" in options and p.placement.has_replicas:
            continue
        exact = [*p.x, *p.dy, p.w_in, p.w_out]
        for t in exact:
            t.copy_((t.double() * 2).round())

        def program(t: LoopbackTransport, options: dict[str, int], p: Problem = p) -> tuple[Tensor, Tensor]:
            held = list(p.placement.experts_of_rank[t.rank])
            x = p.x[t.rank].clone().requires_grad_()
            w = torch.full_like(p.weights[t.rank], 0.3)
            y = expert_parallel_ffn(x, Routing(p.ids[t.rank], w), ExpertWeights(
                p.w_in[held][:, : p.w_out.shape[2]], p.w_out[held], activation=RELU), AllToAll(t, p.placement),
                backend="torch", **options)
            y.backward(p.dy[t.rank])
            return y.detach(), x.grad

        with_it, without = (run_loopback(p.W, lambda t, o=o, program=program: program(t, o)) for o in (options, {}))
        for (y, dx), (y0, dx0) in zip(with_it, without, strict=True):
            assert torch.equal(y, y0) and torch.equal(dx, dx0), seed
            rounded += int(((y.double() / 0.3).frac() != 0).sum())
    assert rounded > 100  # the sums do round
