"""Backend "native": the C++ forward against float64, on every instruction set that this machine runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import problems
import pytest
import torch

import moeffn
from moeffn import Activation, Layout, RouterConfig, Routing, backends, reference
from moeffn.config import SWIGLU, SWIGLU_OAI
from moeffn.types import ExpertWeights, Plan

native = pytest.importorskip("moeffn._native")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BACKEND = backends.get("native")


@pytest.fixture(params=native.isas())
def isa(request):
    native.force_isa(request.param)
    yield request.param
    native.force_isa("")


def layer(E, D, F, dtype=torch.float32, activation=SWIGLU, layout=Layout.CONCAT, bias=False):
    rows = activation.width_in(F)
    w_in, w_out = torch.randn(E, rows, D) / D**0.5, torch.randn(E, D, F) / F**0.5
    b_in, b_out = (torch.randn(E, rows).to(dtype), torch.randn(E, D).to(dtype)) if bias else (None, None)
    return ExpertWeights(w_in.to(dtype), w_out.to(dtype), b_in, b_out, activation, layout)


def double(ew):
    wide = [t if t is None else t.double() for t in (ew.w_in, ew.w_out, ew.b_in, ew.b_out)]
    return ExpertWeights(*wide, ew.activation, ew.layout)


def errors(y, exact):
    """Relative Frobenius error, and the worst row's."""
    diff, size = (y.double() - exact).norm(dim=1), exact.norm(dim=1)
    return (diff.norm() / size.norm()).item(), (diff / size.clamp(min=1e-6 * size.mean().item() + 1e-30)).max().item()


def check(x, ids, weights, ew, apply_to="output", factor=2.0):
    """y and h of the native forward meet the budget: `factor` times the error of plain torch in the same dtype."""
    exact = reference.moe_ffn(x.double(), Routing(ids, weights.double(), apply_to=apply_to), double(ew))
    found = {}
    for name in ("torch", "native"):
        backend = backends.get(name)
        plan = backend.plan(ids, ew.num_experts)
        y, h = backend.forward(x, plan, weights, ew, apply_to=apply_to, save=True)
        found[name] = errors(y, exact), h[: plan.offsets[-1]].double()
        assert torch.equal(backend.forward(x, plan, weights, ew, apply_to=apply_to, save=False)[0], y)
    for mine, limit in zip(found["native"][0], found["torch"][0], strict=True):
        assert mine <= factor * limit + 1e-12, found
    h, like = found["native"][1], found["torch"][1]
    # one rounding to x's dtype apart; fp32 sums differ in their order only
    eps = torch.finfo(x.dtype).eps
    assert (h - like).norm() <= (2 * eps if x.dtype != torch.float32 else 8 * eps) * like.norm() + 1e-12


def routing(T, K, E, drop=True):
    ids = torch.randint(-1 if drop else 0, E, (T, K), dtype=torch.int32)
    return ids, torch.rand(T, K)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [3, 40, 300, 900])  # dot products; one and several tiles of rows; several blocks of rows
def test_error_budget(isa, dtype, T):
    ew = layer(5, 136, 72, dtype, bias=True)
    check(torch.randn(T, 136).to(dtype), *routing(T, 2, 5), ew)
    kernel = backends.get("native").last_kernel
    assert kernel == isa or kernel == "avx512"


@pytest.mark.parametrize("name", problems.ACTIVATIONS)
@pytest.mark.parametrize("layout", list(Layout))
def test_every_activation_and_layout(isa, name, layout):
    activation = problems.ACTIVATIONS[name]
    for dtype in (torch.float32, torch.bfloat16):
        ew = layer(3, 40, 24, dtype, activation, layout, bias=True)
        check(torch.randn(50, 40).to(dtype), *routing(50, 2, 3), ew, factor=3.0)  # 50 rows: 3 leaves room for chance


@pytest.mark.parametrize("D", [1, 7, 17, 33, 63, 64, 65, 100, 1025])  # odd, vector and tile edges, no 16-byte rows
def test_any_size_uses_the_kernels(isa, D):
    for dtype, F in ((torch.float32, 17), (torch.bfloat16, 176), (torch.bfloat16, 1)):
        x = torch.empty(41 * D + 1, dtype=dtype)[1:].view(41, D).copy_(torch.randn(41, D))  # off by one element
        ew = layer(3, D, F, dtype)
        ids, w = routing(41, 2, 3, drop=False)
        exact = reference.moe_ffn(x.double(), Routing(ids, w.double()), double(ew))
        y = moeffn.moe_ffn(x, Routing(ids, w), ew, backend="native")
        assert moeffn.last_backend() == "native"
        assert errors(y, exact)[0] <= (2e-6 if dtype == torch.float32 else 1.2e-2)


@pytest.mark.parametrize("edge", [15, 16, 17, 31, 32, 33])  # rows, D and F around every tile size
def test_tile_edges(isa, edge):
    for counts in ([edge, 0, 1], [0, edge, 2 * edge], [257, 255, edge]):
        ids = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(counts))[:, None]
        for dtype in (torch.float32, torch.bfloat16):
            check(torch.randn(len(ids), edge).to(dtype), ids, torch.ones(len(ids), 1), layer(3, edge, edge + 1, dtype))


@pytest.mark.parametrize("counts", [[0, 0, 0], [5, 0, 0], [0, 0, 4], [0, 1, 0], [3, 0, 3]])
def test_experts_without_rows(isa, counts):
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)
    rows = torch.full((sum(counts) + 3, 20), torch.nan)  # the last three belong to no expert
    rows[: sum(counts)] = torch.randn(sum(counts), 20)
    ew = layer(3, 20, 12)
    y = moeffn.expert_ffn(rows, offsets, ew, backend="native")
    exact = reference.expert_ffn(rows.double(), offsets, double(ew))
    assert torch.allclose(y.double(), exact, atol=1e-5) and torch.equal(y[sum(counts):], torch.zeros(3, 20))


@pytest.mark.parametrize("T", [0, 1, 2, 3, 7, 512, 519, 3073, 65537])  # no fixed scratch, no assumed batch
def test_any_number_of_tokens(T):
    ew = layer(4, 8, 4)
    x, (ids, w) = torch.randn(T, 8), routing(T, 2, 4)
    y = BACKEND.moe(x, ids, w, ew, apply_to="output")
    plan = BACKEND.plan(ids, 4)
    like = backends.get("torch").forward(x, plan, w, ew, apply_to="output", save=False)[0]
    assert y.shape == (T, 8) and torch.allclose(y, like, atol=1e-5)


def test_mixed_dtypes_and_strides(isa):
    for x_dtype in DTYPES:
        for w_dtype in DTYPES:
            ew = layer(3, 50, 36, w_dtype, bias=True)
            ids, w = routing(45, 3, 3)
            x = torch.randn(50, 45).to(x_dtype).t()  # strided
            plan = BACKEND.plan(ids, 3)
            y, _ = BACKEND.forward(x, plan, w, ew, apply_to="input", save=False)
            # as a checkpoint of (E, D, 2F) and (E, F, D) gives them
            flipped = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (ew.w_in, ew.w_out)]
            other = ExpertWeights(*flipped, ew.b_in, ew.b_out)
            assert torch.equal(BACKEND.forward(x, plan, w, other, apply_to="input", save=False)[0], y)
            exact = reference.moe_ffn(x.double(), Routing(ids, w.double(), apply_to="input"), double(ew))
            assert errors(y, exact)[0] <= {torch.float32: 5e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}[x_dtype]


@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("rows", [1, 3, 5, 8, 9, 40])  # by columns, or turned into rows first
def test_transposed_weights(isa, rows, layout):
    ids = torch.tensor([0, 2], dtype=torch.int32).repeat_interleave(rows)[:, None]
    for dtype in DTYPES:
        ew = layer(3, 70, 131, dtype, layout=layout, bias=True)
        w_in, w_out = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (ew.w_in, ew.w_out))
        check(torch.randn(len(ids), 70).to(dtype), ids, torch.rand(len(ids), 1),
              ExpertWeights(w_in, w_out, ew.b_in, ew.b_out, ew.activation, layout))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [5, 9])
def test_long_sums_in_float32(isa, rows, transposed):
    """One running sum of all 14,336 terms would be five times as far off as torch."""
    for D, F in ((64, 14336), (14336, 64)):
        ew = layer(1, D, F)
        if transposed:
            ew = ExpertWeights(*(t.mT.contiguous().mT for t in (ew.w_in, ew.w_out)))
        check(torch.randn(rows, D), torch.zeros(rows, 1, dtype=torch.int32), torch.ones(rows, 1), ew)


def test_same_bits_for_any_number_of_threads(isa):
    ew = layer(6, 96, 64, torch.bfloat16, SWIGLU_OAI, bias=True)
    x, (ids, w) = torch.randn(200, 96).bfloat16(), routing(200, 3, 6)
    results = []
    for threads in (1, 2, 1, 2):
        torch.set_num_threads(threads)
        results.append(BACKEND.moe(x, ids, w, ew, apply_to="output"))
    assert all(torch.equal(r, results[0]) for r in results)


def test_a_bad_row_stays_alone(isa):
    for T in (3, 60):
        ew = layer(4, 32, 16, torch.bfloat16)
        x, (ids, w) = torch.randn(T, 32).bfloat16(), routing(T, 2, 4, drop=False)
        clean = BACKEND.moe(x, ids, w, ew, apply_to="output")
        x[1] = torch.nan
        y = BACKEND.moe(x, ids, w, ew, apply_to="output")
        others = torch.arange(T) != 1
        assert y[1].isnan().all() and torch.equal(y[others], clean[others])


SIZES = {"nan": torch.nan, "infinite": torch.inf, "largest": 3.4e38, "large": 1e25, "tiny": 1e-36, "subnormal": 1e-40,
         "zero": 0.0}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("where", ["x", "w_in", "w_out"])
def test_rows_of_any_magnitude(isa, where, size):
    """Many rows of fp32, a row of x or of the weights scaled: AMX multiplies parts of numbers, which must not show."""
    activation = Activation(kind="relu", gated=False)
    ew, x = layer(1, 200, 90, activation=activation), torch.randn(150, 200)
    ids, w = torch.zeros(150, 1, dtype=torch.int32), torch.ones(150, 1)
    clean = BACKEND.moe(x, ids, w, ew, apply_to="output")
    scaled = {"x": x, "w_in": ew.w_in[0], "w_out": ew.w_out[0]}[where]
    scaled[17] *= SIZES[size] if SIZES[size] < 1e30 else 1.0
    if not SIZES[size] < 1e30:
        scaled[17, 5] = SIZES[size]
    y = BACKEND.moe(x, ids, w, ew, apply_to="output")
    like = backends.get("torch").forward(x, backends.get("torch").plan(ids, 1), w, ew, apply_to="output", save=False)[0]
    exact = reference.moe_ffn(x.double(), Routing(ids, w.double()), double(ew))
    assert torch.equal(y.isfinite(), like.isfinite()) and torch.equal(y.isnan(), like.isnan())
    terms = (x.double().abs() @ ew.w_in[0].double().abs().T) @ ew.w_out[0].double().abs().T  # sums of magnitudes
    far = (y.double() - exact).abs() > 5e-7 * terms + 1e-43
    assert not (far & like.isfinite()).any()
    if where == "x":
        others = torch.arange(150) != 17
        assert torch.equal(y[others], clean[others])


def test_many_tokens_of_one_expert_take_bounded_memory():
    """All 12,000 slots to one expert: several passes, and the memory of one is given back below the limit."""
    native.scratch_release()
    ew = layer(2, 1024, 512, torch.bfloat16)
    x = torch.randn(6000, 1024).bfloat16()
    ids = torch.zeros(6000, 2, dtype=torch.int32)
    ids[:, 1] = 1
    ids[1000:, 1] = -1
    w = torch.rand(6000, 2)
    y = BACKEND.moe(x, ids, w, ew, apply_to="output")
    assert 0 < native.scratch_held() <= 64 << 20
    part = BACKEND.moe(x[:100], ids[:100], w[:100], ew, apply_to="output")
    assert errors(y[:100], part.double())[0] <= 5e-3


@pytest.mark.parametrize(("D", "F"), [(2044, 16), (1400, 400)])
def test_memory_shorter_than_results_and_activations(D, F):
    """512 tokens of 16 experts each: what they give (63 MiB) is summed strip by strip, or (44 MiB) leaves room for the
    activations of a few experts at a time.
    """
    ew, shared = layer(24, D, F), layer(1, D, F)
    x, gate = torch.randn(512, D), torch.rand(512)
    ids, w = torch.rand(512, 24).topk(16).indices.int(), torch.rand(512, 16)
    ids[::7, 3] = -1
    for more in ({}, {"shared": shared, "shared_gate": gate}):
        native.scratch_release()
        y = BACKEND.moe(x, ids, w, ew, apply_to="output", **more)
        assert native.scratch_held() <= 64 << 20
        for some in (slice(0, 60), slice(450, 512)):
            given = {**more, "shared_gate": gate[some]} if more else {}
            part = BACKEND.moe(x[some], ids[some], w[some], ew, apply_to="output", **given)
            assert errors(y[some], part.double())[1] <= 2e-6


def test_plan_is_the_oracles():
    for T, K, E in ((0, 1, 3), (1, 1, 1), (50, 4, 7), (9, 2, 1000)):
        ids = torch.randint(-2, E + 2, (T, K), dtype=torch.int32)
        mine, like = BACKEND.plan(ids, E), reference.plan(ids, E)
        for name in ("counts", "offsets", "slot_of_row", "row_of_slot"):
            assert torch.equal(getattr(mine, name), getattr(like, name)), name


def test_shared_expert_in_the_same_call(isa):
    for T in (1, 30):
        ew, shared = layer(4, 48, 24, torch.bfloat16), layer(1, 48, 40, torch.bfloat16)
        x, (ids, w), gate = torch.randn(T, 48).bfloat16(), routing(T, 2, 4), torch.rand(T)
        y = BACKEND.moe(x, ids, w, ew, apply_to="output", shared=shared, shared_gate=gate)
        every = torch.zeros(T, 1, dtype=torch.int32)
        exact = (reference.moe_ffn(x.double(), Routing(ids, w.double()), double(ew))
                 + reference.moe_ffn(x.double(), Routing(every, gate[:, None].double()), double(shared)))
        assert errors(y, exact)[0] <= 1e-2


ROUTERS = [
    RouterConfig(num_experts=12, top_k=3),
    RouterConfig(num_experts=12, top_k=3, renormalize=True, scale=2.5),
    RouterConfig(num_experts=12, top_k=4, score="sigmoid", renormalize=True, renorm_eps=1e-20),
    RouterConfig(num_experts=12, top_k=2, order="topk_score"),
    RouterConfig(num_experts=12, top_k=12, score="sigmoid", order="topk_score"),
]


@pytest.mark.parametrize("config", ROUTERS, ids=str)
def test_router(config):
    logits = torch.randn(40, 12)
    logits[0] = torch.nan
    logits[1, 3] = torch.nan
    logits[2] = torch.inf
    logits[3] = -torch.inf
    logits[4] = 0.0  # every expert ties
    bias = torch.randn(12) / 10 if config.order == "score_topk" else None
    assert BACKEND.routes(config, torch.float32)
    like = moeffn.route(logits, config, selection_bias=bias, backend="torch")
    for grad in (False, True):
        got = moeffn.route(logits.clone().requires_grad_(grad), config, selection_bias=bias, backend="native")
        assert torch.equal(got.experts, like.experts)
        assert torch.allclose(got.weights, like.weights, rtol=1e-5, atol=1e-7)
        assert all(len(set(row)) == config.top_k for row in got.experts.tolist())


@pytest.mark.parametrize("config", ROUTERS, ids=str)
def test_router_gradient(config):
    """Against autograd through the reference in float64; no gradient at logits that are not finite."""
    logits = torch.randn(40, 12)
    logits[3, 5] = -torch.inf
    mine, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    dweights = torch.randn(40, config.top_k)
    moeffn.route(mine, config, backend="native").weights.backward(dweights)
    reference.route(exact, config).weights.backward(dweights.double())
    assert errors(mine.grad, exact.grad)[0] <= 1e-5
    assert mine.grad[3, 5] == 0


def test_router_operator_compiles_to_one_graph():
    config = ROUTERS[1]
    logits = torch.randn(5, 12, requires_grad=True)
    torch.library.opcheck(torch.ops.moeffn.route, (logits, None, config.key, "native"))
    whole = torch.compile(lambda z: moeffn.route(z, config, backend="native").weights, fullgraph=True)
    assert torch.equal(whole(logits), moeffn.route(logits, config, backend="native").weights)


def test_router_leaves_other_configs_alone():
    """And on a CPU nobody who did not ask for it gets other bits than torch's."""
    assert not BACKEND.routes(RouterConfig(num_experts=8, top_k=2, num_groups=2), torch.float32)
    assert not BACKEND.routes(ROUTERS[0], torch.float64)
    logits = torch.randn(30, 12)
    like = torch.softmax(logits, -1).topk(3)
    assert torch.equal(moeffn.route(logits, ROUTERS[0]).weights, like.values)


def test_bad_plans_and_names_are_value_errors():
    ew, x, w = layer(2, 8, 4), torch.randn(3, 8), torch.rand(3, 1)
    rows = torch.arange(3, dtype=torch.int32)
    for offsets, slots in (([0, 2, 9], rows), ([0, 2, 1], rows), ([1, 2, 3], rows), ([0, 2, 3], rows + 1)):
        plan = Plan(rows[:2], torch.tensor(offsets, dtype=torch.int32), slots, rows)
        with pytest.raises(ValueError, match="plan"):
            BACKEND.forward(x, plan, w, ew, apply_to="output", save=False)
    with pytest.raises(ValueError, match="MOEFFN_ISA"):
        native.force_isa("mmx")


@pytest.mark.parametrize("name, says", [("portable", "portable"), ("no_such", "ValueError")])
def test_environment_variable_forces_an_instruction_set(name, says):
    code = ("import torch\nfrom moeffn import _native\ntry:\n    print(_native.isa())\n"
            "except ValueError as error:\n    print('ValueError', error)")
    home = Path(moeffn.__file__).parents[1]  # the package under test, whatever lies in the working directory
    run = subprocess.run([sys.executable, "-c", code], env={**os.environ, "MOEFFN_ISA": name}, capture_output=True,
                         text=True, check=True, cwd=home)
    assert says in run.stdout
