"""Work done while tokens fly: when it runs, and that it changes nothing."""

from __future__ import annotations

import pytest
import torch
from distributed_problems import DISPATCHERS, Problem, Ran, gathered, one_process, random_problem
from torch import Tensor

from moeffn import ExpertWeights, Routing
from moeffn.distributed import (
    AllToAll,
    Handle,
    Local,
    Placement,
    expert_parallel_ffn,
    run_loopback,
)
from moeffn.distributed.transport import LoopbackTransport

pytestmark = pytest.mark.usefixtures("one_thread")


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
