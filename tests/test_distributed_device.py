"""What expert parallelism asks of a GPU, without one: on a second device that counts copies and refuses to mix."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from distributed_problems import DISPATCHERS, Problem, Ran, gathered, one_process, random_problem
from distributed_sham import Sham, home, there
from torch import Tensor

from moeffn import ExpertWeights, MoEConfig, MoEFFN, Routing
from moeffn.distributed import (
    AllToAll,
    Handle,
    ParallelExperts,
    ParallelMoEFFN,
    Placement,
    Replicator,
    balance_replicas,
    clip_grad_norm_,
    expert_parallel_ffn,
    run_loopback,
)
from moeffn.distributed.transport import LoopbackTransport

pytestmark = pytest.mark.usefixtures("one_thread")
Found = tuple[dict[str, Tensor], list[str], list[str]]


def steps(p: Problem, name: str, t: LoopbackTransport, **options: object) -> Found:
    """Two steps on the second device: the results, and the copies to the host and to the device of the second."""
    held = list(p.placement.experts_of_rank[t.rank])
    leaves = {"x": there(p.x[t.rank]), "weights": there(p.weights[t.rank]), "w_in": there(p.w_in[held]),
              "w_out": there(p.w_out[held])}
    ids, dy, dispatcher = there(p.ids[t.rank]), there(p.dy[t.rank]), DISPATCHERS[name](t, p.placement)
    for _ in range(2):  # tables are put on the device in the first
        for leaf in leaves.values():
            leaf.requires_grad_().grad = None
        with Sham() as sham:
            y = expert_parallel_ffn(leaves["x"], Routing(ids, leaves["weights"], apply_to=p.apply_to),
                                    ExpertWeights(leaves["w_in"], leaves["w_out"]), dispatcher, backend="torch",
                                    **options)
            y.backward(dy)
    return {"y": home(y), **{k: home(v.grad) for k, v in leaves.items()}}, sham.to_host, sham.to_device


@pytest.mark.parametrize("options", [{}, {"chunks": 2, "local_first": True}], ids=["plain", "overlapped"])
@pytest.mark.parametrize("name", DISPATCHERS)
def test_copies_between_host_and_device(name: str, options: dict[str, object]):
    """Forward and backward: one copy to the host for each announcement, none with a budget, none to the device; and
    the results are those of one process."""
    for seed in range(800, 803):
        p = random_problem(seed, W=4)
        ran: list[Found] = run_loopback(p.W, lambda t, p=p: steps(p, name, t, **options))
        want = one_process(p)
        got = gathered(p, [Ran(tensors, Handle(0, ()), {}, 0) for tensors, _, _ in ran])
        for key, value in want.items():
            assert torch.allclose(got[key], value, rtol=0, atol=1e-11), (seed, key)
        announced = [] if name == "budget" else ["_to_copy"] * options.get("chunks", 1)
        for _, to_host, to_device in ran:
            assert to_host == announced and to_device == [], seed


def test_the_second_device_is_strict():
    """Tensors of two devices are refused, and reads, copies and tensors made of Python numbers are seen."""
    with Sham() as sham:
        x = there(torch.arange(3.0))
        with pytest.raises(RuntimeError, match="two devices"):
            x + torch.ones(3)
        x.sum().item()
        x.cpu()
        torch.tensor([1, 2], device=x.device)
        torch.ones(2).to(x.device)
        x.nonzero()
        assert home(torch.full((2,), 3, device=x.device) + 1).tolist() == [4, 4]
    assert sham.to_host == ["_local_scalar_dense", "_to_copy", "nonzero"] and sham.to_device == ["tensor", "_to_copy"]


def test_a_layer_with_losses_and_replicas_makes_no_copies():
    """Router, losses of the global batch, shared expert, replicated experts with a fixed budget, norm and clipping."""
    E, W, T = 4, 2, 6
    home_of, placement = Placement.balanced(E, W), balance_replicas([9.0, 1.0, 1.0, 1.0], W, 3)
    c = MoEConfig(d_model=8, d_expert=6, num_experts=E, top_k=2, d_shared=4, selection_bias=True, aux_loss_coef=0.1,
                  z_loss_coef=0.1)

    def program(t: LoopbackTransport) -> tuple[list[str], list[str]]:
        layer = MoEFFN(c, backend="torch")
        for module in layer.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                kept = p[list(home_of.experts_of_rank[t.rank])] if module is layer.experts else p
                module._parameters[name] = there(kept).requires_grad_()
            for name, b in list(module.named_buffers(recurse=False)):
                module._buffers[name] = there(b)
        layer.__class__, layer.experts.__class__ = ParallelMoEFFN, ParallelExperts
        e = layer.experts
        e.mesh, e.loss = SimpleNamespace(size=lambda *_: 1, mesh_dim_names=("ep",)), "mean"
        e.chunks, e.local_first = 1, True
        e.dispatcher, e.replicator = AllToAll(t, placement, budget=2 * T), Replicator(t, home_of, placement)
        x = there(torch.randn(T, 8)).requires_grad_()
        for _ in range(2):
            with Sham() as sham:
                layer(x).sum().backward()
                clip_grad_norm_(layer, 1.0)
        return sham.to_host, sham.to_device

    assert run_loopback(W, program) == [([], [])] * W
