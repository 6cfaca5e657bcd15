"""Forward and every gradient of the triton backend under the interpreter, against float64, over the edge shapes.

The budget is that of every backend: at most twice the error of plain torch in the same dtype. Tiles are 16 or 32 wide.
"""

import pytest
import torch
from interpreted import interpreted, poisoned, sanitized, tiles, tiny_tiles
from problems import ACTIVATIONS, Problem, assert_within_budget, make

import moeffn
from moeffn import ExpertWeights, Grads, Layout, Routing, backends, functional
from moeffn.backends import Needs
from moeffn.kernels.launch import recorded

pytestmark = interpreted
OAI = ACTIVATIONS["swiglu_oai"]


@pytest.fixture(autouse=True)
def small_and_checked(request):
    with tiles(tiny_tiles), sanitized() as seen:
        yield
    assert seen["lanes"] or "no_tokens" in request.node.name or "two_kernels" in request.node.name


def check(problem: Problem, dtype=torch.float32) -> None:
    assert_within_budget(problem, dtype, backend="triton")


def one_hot_expert(T, K, e):
    return torch.full((T, K), e, dtype=torch.int32)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name):
    check(make(T=24, E=2, D=16, F=20, activation=ACTIVATIONS[name]))


@pytest.mark.parametrize("shape, reason", [
    ({"T": 1, "K": 1, "E": 1, "D": 1, "F": 1}, "everything one"),
    ({"T": 1, "K": 8, "E": 8, "D": 17, "F": 7}, "one token, K = E"),
    ({"T": 8, "K": 2, "E": 1, "D": 15, "F": 16}, "both slots of a token on one expert; one short of a tile in D"),
    ({"T": 33, "K": 1, "E": 2, "D": 33, "F": 31}, "top-1; one over two tiles in D, one short in F"),
    ({"T": 17, "K": 2, "E": 40, "D": 32, "F": 32}, "most experts empty; whole tiles: the paths without masks"),
    ({"T": 20, "K": 3, "E": 5, "D": 48, "F": 33}, "K not a power of two; one over a tile in F"),
])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_shapes(shape, reason, dtype):
    ids = None if shape["E"] > 1 else one_hot_expert(shape["T"], shape["K"], 0)
    check(make(**shape, ids=ids), dtype)


@pytest.mark.parametrize("options, reason", [
    ({"activation": OAI, "layout": Layout.INTERLEAVED, "bias": True}, "gpt-oss: interleaved, clamp, biases"),
    ({"bias": True}, "biases, concatenated"),
    ({"apply_to": "input", "bias": True}, "weights on the input, bias after them"),
    ({"apply_to": "input", "layout": Layout.INTERLEAVED}, "weights on the input, interleaved"),
    ({"activation": ACTIVATIONS["relu2"], "bias": True}, "two matrices with biases"),
])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_options(options, reason, dtype):
    check(make(T=11, E=4, D=18, F=34, **options), dtype)


@pytest.mark.parametrize("counts", [[35, 0, 1], [16, 17, 15], [0, 0, 48]])
def test_uneven_groups(counts):
    """A tail tile after a whole one, an expert between two tiles' worth, only the last expert."""
    ids = torch.cat([one_hot_expert(c, 1, e) for e, c in enumerate(counts)])
    check(make(T=len(ids), K=1, E=3, D=16, F=16, ids=ids[torch.randperm(len(ids))]))


def test_ids_outside_the_experts_contribute_nothing():
    ids = torch.tensor([[0, -1], [3, 2], [7, 4], [2147483647, -2147483648]], dtype=torch.int32)
    problem = make(T=4, E=4, ids=ids).to(torch.float32)
    out = problem.run(backend="triton")
    truth = Problem(problem.leaves, torch.where(ids < 4, ids, -1)).run(backend="torch")
    for name, value in truth.items():
        torch.testing.assert_close(out[name], value, rtol=1e-5, atol=1e-6)
    assert torch.equal(out["y"][2:], torch.zeros(2, 16))


def test_no_tokens():
    out = make(T=0, E=3, ids=torch.zeros(0, 2, dtype=torch.int32)).to(torch.float32).run(backend="triton")
    assert out["y"].shape == (0, 16)
    assert all(torch.equal(out[n], torch.zeros_like(out[n])) for n in ("w_in", "w_out"))


def test_strided_inputs_and_weights():
    """Transposed x, weights as transposed views and as a slice of a wider bank, an expanded upstream gradient."""
    p = make(T=10, E=3, D=18, F=20, bias=True).to(torch.float32)
    truth = {}
    for strided in (False, True):
        leaves = {n: t.clone() for n, t in p.leaves.items()}
        if strided:
            leaves["x"] = leaves["x"].t().contiguous().t()
            leaves["w_in"] = leaves["w_in"].transpose(1, 2).contiguous().transpose(1, 2)
            bank = torch.randn(4, 18, 27)
            bank[1:, :, 3:23] = leaves["w_out"]
            leaves["w_out"] = bank[1:, :, 3:23]
            leaves["b_in"] = torch.stack([leaves["b_in"]] * 2, -1)[..., 0]
            leaves["weights"] = torch.stack([leaves["weights"]] * 2, -1).flatten(1)[:, ::2]
        leaves = {n: t.detach().requires_grad_() for n, t in leaves.items()}
        problem = Problem(leaves, p.ids)
        y = moeffn.moe_ffn(leaves["x"], Routing(p.ids, leaves["weights"]), problem.experts(), backend="triton")
        y.backward(torch.linspace(-1, 1, 10)[:, None].expand(y.shape))
        out = {"y": y.detach(), **{n: t.grad for n, t in leaves.items()}}
        for name, value in out.items():
            assert torch.equal(value, truth.setdefault(name, value)), name


def test_two_runs_are_bitwise_equal():
    problem = make(T=21, K=3, E=4, D=24, F=40, bias=True).to(torch.float32)
    first, second = (problem.run(backend="triton") for _ in range(2))
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_empty_experts_get_exact_zeros_and_nothing_uninitialised_is_read(monkeypatch):
    ids = torch.tensor([[1, 4], [1, -1], [4, 1]], dtype=torch.int32)
    problem = make(T=3, E=6, D=17, F=19, bias=True, ids=ids).to(torch.float32)
    clean = problem.run(backend="triton")
    with poisoned(monkeypatch):
        out = problem.run(backend="triton")
    for name, value in out.items():
        assert torch.equal(value, clean[name]), name
        if name[:2] in ("w_", "b_"):
            assert torch.equal(value[[0, 2, 3, 5]], torch.zeros_like(value[[0, 2, 3, 5]])), name
            assert (value[[1, 4]] != 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_are_added_to_given_buffers(dtype):
    """Float32 buffers for float16 parameters too; an empty expert's buffer keeps its bits."""
    p = make(T=12, E=4, D=20, F=18, bias=True, ids=torch.randint(0, 3, (12, 2), dtype=torch.int32)).to(dtype)
    plain = p.run(backend="triton")
    leaves = {n: t.detach().requires_grad_() for n, t in p.leaves.items()}
    names = ("w_in", "w_out", "b_in", "b_out")
    start = {n: torch.randn(leaves[n].shape) for n in names}
    held = {n: t.clone() for n, t in start.items()}
    problem = Problem(leaves, p.ids)
    y = moeffn.moe_ffn(leaves["x"], Routing(p.ids, leaves["weights"]), problem.experts(), backend="triton",
                       grad_buffers=Grads(**held))
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).to(dtype)
    y.backward(dy)
    for n in names:
        assert leaves[n].grad is None
        torch.testing.assert_close(held[n] - start[n], plain[n].float(), rtol=4 * torch.finfo(dtype).eps, atol=1e-5)
        assert torch.equal(held[n][3], start[n][3])
    torch.testing.assert_close(leaves["x"].grad, plain["x"])


def test_float32_masters_of_a_float16_computation():
    """Weights of another dtype than x: computed in x's dtype, gradients in the parameter's."""
    p = make(T=7, E=3, D=20, F=18).to(torch.float16)
    wide = {n: t.float() if n[:2] == "w_" else t for n, t in p.leaves.items()}
    b = backends.get("triton")
    for source in (p.leaves, wide):
        ew, x, w = Problem(source, p.ids).experts(), p.leaves["x"], p.leaves["weights"]
        plan = b.plan(p.ids, 3)
        y, h = b.forward(x, plan, w, ew, apply_to="output", save=True)
        grads = b.backward(y, x, h, plan, w, ew, apply_to="output", needs=Needs(b_in=False, b_out=False))
        assert y.dtype == torch.float16 and grads.w_in.dtype == ew.w_in.dtype
        if source is p.leaves:
            first = y, grads
    assert torch.equal(first[0], y)
    torch.testing.assert_close(first[1].w_in.float(), grads.w_in, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("options", [
    {}, {"activation": OAI, "layout": Layout.INTERLEAVED, "bias": True}, {"apply_to": "input", "bias": True},
    {"activation": ACTIVATIONS["relu2"], "K": 3}, {"T": 1, "K": 5, "D": 1, "F": 1},
    {"T": 2, "K": 11, "E": 12, "F": 140, "bias": True}])
def test_few_slots_without_gradients(options):
    """The path of decoding: at most 64 slots, dropped ids, transposed weights."""
    assert_within_budget(make(**{"T": 6, "E": 5, "D": 37, "F": 19, **options}), torch.float32, grads=False,
                         backend="triton")


def test_few_slots_take_two_kernels_and_many_take_the_tiles():
    p = make(T=33, K=2, E=4).to(torch.float32)
    names = []
    for T in (32, 33):
        with recorded() as launches:
            backends.get("triton").moe(p.leaves["x"][:T], p.ids[:T], p.leaves["weights"][:T], p.experts(),
                                       apply_to="output")
        names.append([launch.name for launch in launches])
    assert names == [["slot_up", "token_down"], ["place", "schedule", "up", "rows", "combine"]]


def test_rows_given_grouped_and_inference_without_h():
    problem = make(T=14, K=1, E=3, D=18, F=20, bias=True).to(torch.float32)
    ew, x = problem.experts(), problem.leaves["x"]
    offsets = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    got = moeffn.expert_ffn(x, offsets, ew, backend="triton")
    torch.testing.assert_close(got, moeffn.expert_ffn(x, offsets, ew, backend="torch"), rtol=1e-5, atol=1e-5)
    assert torch.equal(got[12:], torch.zeros(2, 18))


def test_a_nan_row_stays_in_its_token():
    problem = make(T=9, E=3, D=17, F=18, drop=False).to(torch.float32)
    clean = problem.run(backend="triton", grads=False)["y"]
    problem.leaves["x"][4] = float("nan")
    got = problem.run(backend="triton", grads=False)["y"]
    others = [t for t in range(9) if t != 4]
    assert torch.isnan(got[4]).all() and torch.equal(got[others], clean[others])


def test_registered_operators_pass_opcheck():
    p = make(T=5, E=3, D=16, F=16).to(torch.float32)
    plan = backends.get("triton").plan(p.ids, 3)
    x, w, w_in, w_out = (p.leaves[n].requires_grad_() for n in ("x", "weights", "w_in", "w_out"))
    args = (x, w, plan.offsets, plan.slot_of_row, plan.row_of_slot, w_in, w_out, None, None, None, None, None, None,
            functional._encode(p.experts(), "output"), "triton", True)
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(functional._plan_op, (p.ids, 3, "triton"), test_utils=checks)
    torch.library.opcheck(functional._forward_op, args, test_utils=checks)


def test_one_graph_and_at_most_two_compilations_over_ten_token_counts():
    count = 0

    def counting(graph, inputs):
        nonlocal count
        count += 1
        return graph.forward

    def block(x, ids, w, w_in, w_out):
        return moeffn.moe_ffn(x, Routing(ids, w), ExpertWeights(w_in, w_out), backend="triton")

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend=counting)
    for T in (5, 6, 7, 9, 16, 17, 24, 31, 33, 40):
        p = make(T=T, K=1, E=2, D=16, F=16, seed=T).to(torch.float32)
        got = p.run(lambda x, r, w: compiled(x, r.experts, r.weights, w.w_in, w.w_out))
        eager = p.run(backend="triton")
        assert all(torch.equal(got[n], eager[n]) for n in eager)
    assert count <= 2
