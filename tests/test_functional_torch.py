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


SMOOTH = moeffn.MoEConfig(d_model=16, d_expert=8, num_experts=4, top_k=2)
ONLY_REFERENCE = {
    "has second derivatives": lambda f, x: torch.autograd.functional.hvp(f, x, x)[1],
    "runs under torch.func.grad": lambda f, x: torch.func.grad(f)(x),
    "runs a backward under torch.vmap": lambda f, x: torch.autograd.functional.jacobian(f, x, vectorize=True),
}


@pytest.mark.parametrize("does", ONLY_REFERENCE)
@pytest.mark.parametrize("backend", ["reference", *CPU_BACKENDS])
def test_what_the_reference_alone_does_is_refused_by_name(backend, does):
    torch.manual_seed(0)
    layer = moeffn.MoEFFN(SMOOTH, backend=backend)  # its router is the backend's own where it has one
    experts = layer.experts.weights
    routing = Routing(torch.tensor([[0, 1], [2, 0], [3, 1]]), torch.rand(3, 2))
    for f in (lambda z: layer(z).square().sum(),
              lambda z: moeffn.moe_ffn(z, routing, experts, backend=backend).square().sum()):
        if backend == "reference":
            assert ONLY_REFERENCE[does](f, torch.randn(3, 16)).isfinite().all()
        else:
            with pytest.raises(NotImplementedError, match=f"backend: expected 'reference', which alone {does}"):
                ONLY_REFERENCE[does](f, torch.randn(3, 16))


@backend
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_equals_a_loop(backend):
    # inside vmap a tensor does not say that it requires a gradient: nothing was saved for the backward
    torch.manual_seed(0)
    layer = moeffn.MoEFFN(SMOOTH, backend=backend)
    xs = torch.randn(2, 5, 16, requires_grad=True)
    outs = torch.func.vmap(layer)(xs), torch.stack([layer(x) for x in xs])
    grads = [torch.autograd.grad(y.square().sum(), (xs, layer.experts.w_in)) for y in outs]
    for a, b in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        torch.testing.assert_close(torch.func.vmap(layer)(xs), outs[1])


def test_forward_mode_derivatives_are_refused():
    p = make(dtype=torch.float32)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError):
        x = torch.autograd.forward_ad.make_dual(p.leaves["x"], torch.ones(13, 16))
        moeffn.moe_ffn(x, Routing(p.ids, p.leaves["weights"]), p.experts())


@backend
def test_nothing_is_kept_where_nothing_is_differentiated(backend, monkeypatch):
    impl = moeffn.backends.get(backend)
    real, pre, saved = impl.forward, [], []

    def spy(*args, **kwargs):
        y, h = real(*args, **kwargs)
        pre.append(h)
        return y, h

    monkeypatch.setattr(impl, "forward", spy)
    monkeypatch.setattr(functional.backends, "plain_inference", lambda *tensors: False)  # shortcuts have no h to keep
    monkeypatch.setattr(functional, "plain_moe", lambda *a: None)
    problem = make(dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        problem.run(backend=backend, grads=False)
        with torch.no_grad():
            moeffn.moe_ffn(problem.leaves["x"].requires_grad_(), Routing(problem.ids, problem.leaves["weights"]),
                           problem.experts(), backend=backend)
        assert pre == [None, None] and not saved
        problem.run(backend=backend)
    assert pre[2].shape == (26, 24) and saved  # with gradients they are there
