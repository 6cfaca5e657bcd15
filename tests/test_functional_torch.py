"""moe_ffn among torch's own machinery: checkpointing, compilation, opcheck, tracing, tensors without values."""

from __future__ import annotations

import pytest
import torch
from problems import CPU_BACKENDS, make
from torch.utils.checkpoint import checkpoint

import moeffn
from moeffn import ExpertWeights, Routing, functional

backend = pytest.mark.parametrize("backend", CPU_BACKENDS)


@backend
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(backend, reentrant):
    # Automodel#2635: recomputation must route and compute the same
    problem = make(dtype=torch.float32)
    plain = problem.run(backend=backend)

    def rerun(x, routing, experts):
        inner = lambda x, w, *p: moeffn.moe_ffn(x, Routing(routing.experts, w), ExpertWeights(*p), backend=backend)  # noqa: E731
        return checkpoint(inner, x, routing.weights, experts.w_in, experts.w_out, use_reentrant=reentrant)

    got = problem.run(rerun)
    assert all(torch.equal(got[n], plain[n]) for n in plain)


@backend
@pytest.mark.filterwarnings("ignore")
def test_one_graph_and_at_most_two_compilations_over_ten_token_counts(backend):
    # prime-rl#996, torchtitan#1364: graph breaks on .tolist(), a recompilation per token count
    torch._dynamo.reset()
    graphs = []

    def count(gm, inputs):
        graphs.append(gm)
        return gm.forward

    from torch._dynamo.backends.common import aot_autograd

    def block(x, ids, w, w_in, w_out):
        return moeffn.moe_ffn(x, Routing(ids, w), ExpertWeights(w_in, w_out), backend=backend)

    compiled = torch.compile(block, fullgraph=True, backend=aot_autograd(fw_compiler=count))
    for T in (5, 6, 7, 9, 16, 31, 64, 100, 128, 257):
        problem = make(T=T, dtype=torch.float32, seed=T)
        eager = problem.run(backend=backend)
        got = problem.run(lambda x, r, w: compiled(x, r.experts, r.weights, w.w_in, w.w_out))
        assert all(torch.equal(got[n], eager[n]) for n in eager)
    assert len(graphs) <= 4  # a forward and a backward graph for each of two compilations


@backend
def test_registered_operators_pass_opcheck(backend):
    p = make(dtype=torch.float32, bias=True, drop=False)  # rows of h past the last group hold anything
    e = p.experts()
    plan = functional._plan_op(p.ids, 5, backend)
    leaves = [t.detach().requires_grad_() for t in (p.leaves["x"], p.leaves["weights"])]
    params = [t.detach().requires_grad_() for _, t in e.named_tensors()]
    maps = plan[1:]
    spec = functional._encode(e, "output")
    forward = (*leaves, *maps, *params, None, None, None, None, spec, backend, True)
    torch.library.opcheck(functional._plan_op, (p.ids, 5, backend))
    torch.library.opcheck(functional._forward_op, forward)
    with torch.no_grad():
        y, h = functional._forward_op(*forward)
    frozen = [t.detach() for t in (*leaves, *params)]
    buffers = [torch.zeros_like(t) for t in frozen[2:]]
    backward = (torch.ones_like(y), frozen[0], h, frozen[1], *maps, *frozen[2:], *buffers, spec, backend, [True] * 6)
    torch.library.opcheck(functional._backward_op, backward)


@backend
def test_tensors_without_values_in_memory(backend):
    # a negated view and symbolic zeros hold other values, or none, at their address
    p = make(dtype=torch.float32)
    x = torch.randn(13, 16, dtype=torch.complex64).conj().imag
    routing = Routing(p.ids, p.leaves["weights"])
    assert x.is_neg()
    assert torch.equal(moeffn.moe_ffn(x, routing, p.experts(), backend=backend),
                       moeffn.moe_ffn(x.resolve_neg(), routing, p.experts(), backend=backend))
    zeros = torch._efficientzerotensor((13, 16))
    assert (moeffn.moe_ffn(zeros, routing, p.experts(), backend=backend) == 0).all()


@backend
def test_a_trace_records_the_operator(backend):
    p = make(dtype=torch.float32)
    run = lambda x: moeffn.moe_ffn(x, Routing(p.ids, p.leaves["weights"]), p.experts(), backend=backend)  # noqa: E731
    with torch.no_grad():
        traced = torch.jit.trace(run, p.leaves["x"], check_trace=False)
        assert torch.equal(traced(2 * p.leaves["x"]), run(2 * p.leaves["x"]))


def test_forward_mode_derivatives_are_refused():
    p = make(dtype=torch.float32)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError):
        x = torch.autograd.forward_ad.make_dual(p.leaves["x"], torch.ones(13, 16))
        moeffn.moe_ffn(x, Routing(p.ids, p.leaves["weights"]), p.experts())
