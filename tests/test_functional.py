"""moe_ffn and expert_ffn on every CPU backend; comments name public reports of the fault a test guards against."""

from __future__ import annotations

import pytest
import torch
from problems import ACTIVATIONS, CPU_BACKENDS, Problem, assert_within_budget, errors, make, naive

import moeffn
from moeffn import ExpertWeights, Grads, Layout, Routing, functional, reference

backend = pytest.mark.parametrize("backend", CPU_BACKENDS)
EXACT = {"torch": torch.float64, "native": torch.float32}  # the widest dtype each backend takes
LIMIT = {torch.float64: 1e-12, torch.float32: 2e-5}


def assert_exact(problem: Problem, backend: str, **kwargs) -> None:
    """Output and every gradient equal the token-by-token oracle in float64, to the backend's widest dtype."""
    dtype = EXACT[backend]
    low = problem.to(dtype)
    oracle = reference.moe_ffn if problem.ids.numel() < 1000 else naive  # the oracle's loops take minutes beyond
    truth = low.to(torch.float64).run(oracle)
    for name, value in low.run(backend=backend, **kwargs).items():
        assert errors(value, truth[name])[0] <= LIMIT[dtype], name


@backend
@pytest.mark.parametrize("apply_to", ["output", "input"])
@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_equals_the_oracle(backend, activation, layout, apply_to):
    problem = make(activation=ACTIVATIONS[activation], layout=layout, apply_to=apply_to, bias=True)
    assert_exact(problem, backend)


@backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("K", [1, 2, 4, 8])
def test_error_budget(backend, dtype, K):
    # grouped_gemm#31, TransformerEngine#1336: the error must not grow with k; 64 tokens fill several row blocks
    assert_within_budget(make(T=64, K=K, E=8, D=96, F=64, drop=False, bias=K == 2), dtype, backend=backend)


@backend
@pytest.mark.parametrize("D, F", [(1, 1), (7, 17), (33, 5), (100, 33), (1025, 3)])
def test_widths_that_are_multiples_of_nothing(backend, D, F):
    # transformers#48644, pytorch#172440: d = 1025 raised for its 16-byte stride
    assert_exact(make(D=D, F=F, bias=True), backend)


@backend
@pytest.mark.parametrize("T", [1, 2, 3, 7, 512, 519, 3073])
def test_any_token_count(backend, T):
    # llama.cpp#13164: fixed scratch for 3072 rows; #20323: single-token assumption
    assert_exact(make(T=T, D=8, F=4), backend)


@backend
@pytest.mark.parametrize("seed", range(12))
def test_random_shapes(backend, seed):
    # DeepGEMM#237, FBGEMM#4283: one shape in many picks an illegal configuration
    g = torch.Generator().manual_seed(seed)
    T, E, D, F = (int(torch.randint(1, n, (), generator=g)) for n in (90, 20, 70, 70))
    K = int(torch.randint(1, E + 1, (), generator=g))
    assert_exact(make(T=T, K=K, E=E, D=D, F=F, bias=bool(seed % 2), seed=seed), backend)


ROUTINGS = {
    "all to one": lambda T, K: torch.full((T, K), 3),
    "first only": lambda T, K: torch.zeros(T, K, dtype=torch.int64),
    "last only": lambda T, K: torch.full((T, K), 4),
    "nobody": lambda T, K: torch.full((T, K), -1),
    "one row": lambda T, K: torch.full((T, K), -1).index_put((torch.tensor([5]), torch.tensor([1])), torch.tensor(2)),
    "ids beyond E": lambda T, K: torch.tensor([[5, 2**31 - 1], [1, -7]]).repeat(T, 1)[:T],
    "int64 beyond int32": lambda T, K: torch.tensor([[2**32 + 1, -(2**33)], [0, 1]]).repeat(T, 1)[:T],
    "same expert twice": lambda T, K: torch.ones(T, K, dtype=torch.int64),
}


@backend
@pytest.mark.parametrize("routing", ROUTINGS)
def test_skewed_and_empty_routings(backend, routing):
    # torchtitan#1166: groups of 0 rows; TransformerEngine#2908: sentinel ids
    ids = ROUTINGS[routing](13, 2)
    problem = make(ids=torch.where((ids < 0) | (ids >= 5), -1, ids).to(torch.int32), bias=True)
    problem.ids = ids
    assert_exact(problem, backend)


@backend
def test_experts_without_rows_have_gradients_of_exactly_zero(backend):
    # MSLK#158, pytorch#174314, torchtitan#1237: memory of idle groups was left as allocated
    for _ in range(3):
        poison = [torch.full((5, 24, 16), float("nan")) for _ in range(8)]
        del poison
        out = make(ids=torch.tensor([[1, 4]]).repeat(13, 1), bias=True, dtype=torch.float32).run(backend=backend)
        for name in ("w_in", "w_out", "b_in", "b_out"):
            assert torch.isfinite(out[name]).all()
            assert (out[name][[0, 2, 3]] == 0).all() and (out[name][[1, 4]] != 0).any()


@backend
def test_idle_experts_have_zero_gradients_in_reused_memory(backend):
    # large gradients lie on pages that the step before gave back: 4 x 1024 x 512 floats
    busy, idle = ({"T": 8, "E": 4, "D": 512, "F": 512, "dtype": torch.float32, "ids": torch.tensor(ids).repeat(4, 1)}
                  for ids in ([[0, 1], [2, 3]], [[1, -1], [-1, 1]]))
    for _ in range(2):
        assert (make(**busy).run(backend=backend)["w_in"] != 0).any()
        out = make(**idle).run(backend=backend)
        for name in ("w_in", "w_out"):
            assert (out[name][[0, 2, 3]] == 0).all() and (out[name][1] != 0).any()


@backend
def test_no_tokens(backend):
    # sglang#23609: a launch over nothing broke what ran afterwards
    out = make(T=0, bias=True, dtype=torch.bfloat16).run(backend=backend)
    assert out["y"].shape == (0, 16) and out["y"].dtype == torch.bfloat16
    assert all((out[n] == 0).all() for n in ("w_in", "w_out", "b_in", "b_out"))


@backend
def test_rows_of_nan_stay_where_they_are(backend):
    problem = make(bias=True, dtype=torch.float32, drop=False)
    clean = problem.run(backend=backend, grads=False)["y"]
    problem.leaves["x"][4] = float("nan")
    dirty = problem.run(backend=backend, grads=False)["y"]
    others = torch.arange(13) != 4
    assert torch.isnan(dirty[4]).any() and torch.equal(dirty[others], clean[others])


@backend
@pytest.mark.parametrize("view", ["transposed", "every second", "slice", "offset"])
def test_strided_x_and_gradient(backend, view):
    # intel-xpu-backend-for-triton#7455, vllm#3324: transposed, sliced or chunked inputs were read as contiguous
    problem = make(dtype=EXACT[backend], drop=False)
    x = problem.leaves["x"]
    T, D = x.shape
    storage = {"transposed": lambda: x.t().contiguous().t(), "every second": lambda: _spread(x),
               "slice": lambda: torch.cat([x, x], 1)[:, :D], "offset": lambda: _offset(x)}
    strided = storage[view]().requires_grad_()
    plain = x.clone().requires_grad_()
    routing = Routing(problem.ids, problem.leaves["weights"])
    results = []
    for leaf in (strided, plain):
        y = moeffn.moe_ffn(leaf, routing, problem.experts(), backend=backend)
        dy = torch.linspace(-1, 1, D, dtype=x.dtype).expand(T, D)  # an expanded upstream gradient: stride 0
        results.append((y, *torch.autograd.grad(y, leaf, dy)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _spread(x):
    wide = torch.full((x.shape[0], 2 * x.shape[1]), float("nan"), dtype=x.dtype)
    wide[:, ::2] = x
    return wide[:, ::2]


def _offset(x):
    flat = torch.empty(x.numel() + 1, dtype=x.dtype)
    flat[1:] = x.reshape(-1)
    return flat[1:].view(x.shape)


@backend
def test_strided_weights(backend):
    # scattermoe#23: backward on a permuted weight view; a transposed checkpoint is a view here
    problem = make(bias=True, dtype=EXACT[backend])
    plain = problem.run(backend=backend)
    for name in ("w_in", "w_out"):
        problem.leaves[name] = problem.leaves[name].transpose(1, 2).contiguous().transpose(1, 2)
    bank = torch.cat([problem.leaves["b_in"], problem.leaves["b_in"]], 1)
    problem.leaves["b_in"] = bank[:, : bank.shape[1] // 2]
    for name, value in problem.run(backend=backend).items():
        assert errors(value, plain[name])[0] <= LIMIT[EXACT[backend]], name


@backend
def test_memory_beside_a_slice_of_weights_is_not_read(backend):
    # oneDNN's bfloat16 products read past a row of 37 in memory of 42: the NaN there reached the result
    problem = make(T=40, D=37, F=37, dtype=torch.bfloat16, drop=False)
    plain = problem.run(backend=backend)
    for name in ("w_in", "w_out"):
        bank = torch.full((5, problem.leaves[name].shape[1], 42), float("nan"), dtype=torch.bfloat16)
        bank[:, :, :37] = problem.leaves[name]
        problem.leaves[name] = bank[:, :, :37]
    assert all(errors(value, plain[name])[0] < 0.02 for name, value in problem.run(backend=backend).items())


@backend
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("w_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_follow_linear(backend, x_dtype, w_dtype, autocast):
    # scattermoe#17, transformers#43828, Automodel#1913: mismatches under autocast and fp32 master weights
    problem = make(T=40, D=32, F=24, bias=True, drop=False)
    for name, leaf in problem.leaves.items():
        wanted = {"x": x_dtype, "weights": torch.float32}.get(name, w_dtype)
        problem.leaves[name] = leaf.to(wanted)
    truth = Problem({n: t.double() for n, t in problem.leaves.items()}, problem.ids).run(reference.moe_ffn)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        got = problem.run(backend=backend)
        if autocast is not None:
            linear = torch.nn.functional.linear(problem.leaves["x"], problem.leaves["w_in"][0])
            assert got["y"].dtype == linear.dtype
    if autocast is None:
        assert got["y"].dtype == x_dtype
    for name, value in got.items():
        if name != "y":
            assert value.dtype == problem.leaves[name].dtype
        lowest = {value.dtype, autocast or x_dtype, x_dtype, w_dtype}
        limit = 0.03 if torch.bfloat16 in lowest else 0.004 if torch.float16 in lowest else 1e-5
        assert errors(value, truth[name])[0] < limit, name


@backend
@pytest.mark.parametrize(("dtype", "values", "total"), [
    (torch.bfloat16, [256.0, 1.0, -256.0], 1.0),  # in bfloat16 256 + 1 is 256
    (torch.float32, [2.0**24, 1.0, 1.0], 2.0**24),  # 2^24 + 1 is 2^24, but 1 + 1 + 2^24 is not
])
def test_slots_are_summed_in_float32_one_after_the_other(backend, dtype, values, total):
    several = torch.tensor(values, dtype=dtype)[:, None, None]
    linear = moeffn.Activation(kind="identity", gated=False)
    routing = Routing(torch.tensor([[0, 1, 2]] * 5), torch.ones(5, 3))
    x = torch.ones(5, 1, dtype=dtype, requires_grad=True)
    forward = ExpertWeights(torch.ones_like(several), several, activation=linear)
    for given in (x, x.detach()):  # with and without a graph
        assert moeffn.moe_ffn(given, routing, forward, backend=backend).flatten().tolist() == [total] * 5
    backward = ExpertWeights(several, torch.ones_like(several), activation=linear)
    moeffn.moe_ffn(x, routing, backward, backend=backend).sum().backward()
    assert x.grad.flatten().tolist() == [total] * 5


@backend
def test_hundred_repeats_are_bitwise_equal(backend):
    # transformers#43362, vllm#53440, torchtitan#1974: index_add and atomics in low precision
    problem = make(T=64, K=4, E=6, D=32, F=24, bias=True, dtype=torch.bfloat16)
    with torch.random.fork_rng():
        first = problem.run(backend=backend)
        for _ in range(99):
            again = problem.run(backend=backend)
            assert all(torch.equal(first[n], again[n]) for n in first)


@backend
def test_result_does_not_depend_on_the_thread_count(backend):
    problem = make(T=64, K=4, E=6, D=32, F=24, bias=True, dtype=torch.float32)
    threads = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2):
            torch.set_num_threads(n)
            results.append(problem.run(backend=backend))
    finally:
        torch.set_num_threads(threads)
    if backend == "native":
        assert all(torch.equal(results[0][n], results[1][n]) for n in results[0])
    else:  # torch's own matmul does not promise this
        assert all(errors(results[0][n], results[1][n])[0] < 1e-5 for n in results[0])


@backend
def test_runs_under_deterministic_algorithms(backend):
    # transformers#43583, torchtitan#3436: counting tokens failed there
    torch.use_deterministic_algorithms(True)
    try:
        assert_exact(make(), backend)
    finally:
        torch.use_deterministic_algorithms(False)


def saved_bytes(problem: Problem, backend: str, frozen: tuple[str, ...] = ()) -> int:
    """Bytes that autograd holds between forward and backward, parameters aside."""
    leaves = {n: t.detach().requires_grad_(n not in frozen) for n, t in problem.leaves.items()}
    parameters = {t.untyped_storage().data_ptr() for n, t in leaves.items() if n not in ("x", "weights")}
    held: dict[int, int] = {}

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in parameters:
            held[storage.data_ptr()] = storage.nbytes()
        return t

    again = Problem(leaves, problem.ids, problem.activation, problem.layout, problem.apply_to)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        moeffn.moe_ffn(leaves["x"], Routing(problem.ids, leaves["weights"]), again.experts(), backend=backend)
    return sum(held.values())


@backend
def test_saved_for_backward_is_x_h_and_sixteen_bytes_a_slot_at_most(backend):
    T, K, E, D, F = 32, 4, 8, 48, 24
    problem = make(T=T, K=K, E=E, D=D, F=F, dtype=torch.bfloat16, drop=False)
    N = T * K
    maps = 4 * N + 4 * N + 4 * N + 4 * (E + 1)  # weights, slot_of_row, row_of_slot, offsets
    assert saved_bytes(problem, backend) == 2 * T * D + 4 * N * F + maps
    # frozen experts keep nothing that only their gradient needs (unsloth-zoo#838)
    assert saved_bytes(problem, backend, frozen=("w_in", "w_out")) == 4 * N * F + maps


@backend
def test_frozen_weights_cost_no_weight_gradient(backend, monkeypatch):
    # unsloth-zoo#838, Liger-Kernel#1441: dW was computed and thrown away; unfreezing later must work
    problem = make(dtype=torch.float32)
    seen = []
    impl = moeffn.backends.get(backend)
    real = impl.backward

    def spy(*args, **kwargs):
        grads = real(*args, **kwargs)
        seen.append((kwargs["needs"], grads))
        return grads

    monkeypatch.setattr(impl, "backward", spy)
    leaves = {n: t.detach().requires_grad_(n in ("x", "weights")) for n, t in problem.leaves.items()}
    for unfreeze in (False, True):
        leaves["w_out"].requires_grad_(unfreeze)
        experts = Problem(leaves, problem.ids).experts()
        moeffn.moe_ffn(leaves["x"], Routing(problem.ids, leaves["weights"]), experts, backend=backend).sum().backward()
        needs, grads = seen[-1]
        assert (needs.w_in, needs.w_out) == (False, unfreeze) and grads.w_in is None
        assert (grads.w_out is not None) == unfreeze
    expected = problem.run(lambda *a, **k: reference.moe_ffn(*a) * 1.0)
    assert leaves["w_out"].grad.shape == expected["w_out"].shape and leaves["w_in"].grad is None


@backend
@pytest.mark.parametrize("buffer_dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_added_to_given_buffers(backend, buffer_dtype):
    # main gradients in float32 beside bfloat16 weights (Megatron's convention)
    problem = make(T=40, D=32, F=24, bias=True, dtype=torch.bfloat16)
    plain = problem.run(backend=backend)
    leaves = {n: t.detach().requires_grad_() for n, t in problem.leaves.items()}
    names = ("w_in", "w_out", "b_in", "b_out")
    buffers = {n: torch.ones(leaves[n].shape, dtype=buffer_dtype) for n in names}
    got = Problem(leaves, problem.ids).run(
        lambda x, r, w: moeffn.moe_ffn(x, r, w, backend=backend, grad_buffers=Grads(**buffers)))
    for name in names:
        assert got[name] is None  # nothing came back through autograd
        assert errors(buffers[name], plain[name].double() + 1)[0] < 0.01
    assert torch.equal(got["x"], plain["x"])


@backend
def test_expert_ffn_on_grouped_rows(backend):
    p = make(dtype=torch.float32, bias=True)
    offsets = torch.tensor([0, 3, 3, 7, 8, 10], dtype=torch.int32)
    rows = torch.cat([p.leaves["x"][:10], torch.full((3, 16), float("nan"))])  # beyond offsets[E]: never read
    weights = torch.rand(13)
    got = moeffn.expert_ffn(rows, offsets, p.experts(), row_weights=weights, backend=backend)
    want = reference.expert_ffn(rows, offsets, p.experts(), row_weights=weights)
    assert torch.allclose(got[:10], want[:10], atol=1e-5) and (got[10:] == 0).all()


@backend
def test_expert_ffn_gradients_ignore_rows_beyond_the_last_group(backend):
    # torchtitan#1237, transformers#45621: garbage past offsets[-1] times 0 is NaN
    p = make(dtype=torch.float32)
    offsets = torch.tensor([0, 3, 3, 7, 8, 10], dtype=torch.int32)
    clean, dirty = p.leaves["x"].clone(), p.leaves["x"].clone()
    dirty[10:] = float("nan")
    grads = []
    for rows in (clean, dirty):
        leaves = [t.detach().requires_grad_() for t in (rows, p.leaves["w_in"], p.leaves["w_out"])]
        y = moeffn.expert_ffn(leaves[0], offsets, ExpertWeights(*leaves[1:]), backend=backend)
        grads.append(torch.autograd.grad(y.sum(), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True)) and (grads[0][0][10:] == 0).all()


def test_leading_dimensions():
    p = make(T=12, dtype=torch.float64)
    routing = Routing(p.ids, p.leaves["weights"])
    flat = moeffn.moe_ffn(p.leaves["x"], routing, p.experts(), backend="torch")
    cube = moeffn.moe_ffn(p.leaves["x"].view(2, 3, 2, 16), routing, p.experts(), backend="torch")
    assert cube.shape == (2, 3, 2, 16) and torch.equal(cube.reshape(12, 16), flat)


def test_identity_experts_add_the_token_itself():
    p = make(dtype=torch.float64)
    identity = torch.rand(13, dtype=torch.float64)
    routing = Routing(p.ids, p.leaves["weights"], identity_weights=identity)
    assert torch.allclose(moeffn.moe_ffn(p.leaves["x"], routing, p.experts(), backend="torch"),
                          reference.moe_ffn(p.leaves["x"], routing, p.experts()), atol=1e-12)


def test_last_backend_tells_the_truth():
    p = make(dtype=torch.float32)
    for name in (*CPU_BACKENDS, "reference"):
        p.run(backend=name)
        assert functional.last_backend() == name
    p.run(backend="auto")
    assert functional.last_backend() == CPU_BACKENDS[-1]
    p.to(torch.float64).run(backend="auto")
    assert functional.last_backend() == "torch"


BAD = {
    "x: expected last dimension D = 16": lambda p, r, e: moeffn.moe_ffn(p["x"][:, :3], r, e),
    "routing.experts: expected T = 5": lambda p, r, e: moeffn.moe_ffn(p["x"][:5], r, e),
    "x: expected a torch.Tensor": lambda p, r, e: moeffn.moe_ffn([1.0], r, e),
    "x: expected a floating-point dtype": lambda p, r, e: moeffn.moe_ffn(p["x"].int(), r, e),
    "backend: expected one of": lambda p, r, e: moeffn.moe_ffn(p["x"], r, e, backend="cuda"),
    "backend: expected one that runs on cpu": lambda p, r, e: moeffn.moe_ffn(p["x"], r, e, backend="triton"),
    "weights.w_in: expected device meta": lambda p, r, e: moeffn.moe_ffn(
        p["x"].to("meta"), Routing(r.experts.to("meta"), r.weights.to("meta")), e),
    "routing: expected Routing": lambda p, r, e: moeffn.moe_ffn(p["x"], (r.experts, r.weights), e),
    "weights: expected ExpertWeights": lambda p, r, e: moeffn.moe_ffn(p["x"], r, p["w_in"]),
    "Routing.experts: expected 2 dimensions": lambda p, r, e: Routing(r.experts[0], r.weights[0]),
    "Routing.experts: expected int32 or int64": lambda p, r, e: Routing(r.weights, r.weights),
    "Routing.weights: expected shape": lambda p, r, e: Routing(r.experts, r.weights[:, :1]),
    "ExpertWeights.w_out: expected shape": lambda p, r, e: ExpertWeights(p["w_in"], p["w_in"]),
    "ExpertWeights.w_out: expected dtype": lambda p, r, e: ExpertWeights(p["w_in"], p["w_out"].double()),
    "ExpertWeights.b_in: expected shape": lambda p, r, e: ExpertWeights(p["w_in"], p["w_out"], p["w_out"][0]),
    "ExpertWeights.layout: expected 'concat' or": lambda p, r, e: ExpertWeights(p["w_in"], p["w_out"], layout="gate"),
    "offsets: expected shape": lambda p, r, e: moeffn.expert_ffn(p["x"], torch.tensor([0, 1]), e),
    "offsets: expected values that rise": lambda p, r, e: moeffn.expert_ffn(
        p["x"], torch.tensor([0, 3, 2, 4, 5, 6]), e),
    "offsets: expected values that rise from 0": lambda p, r, e: moeffn.expert_ffn(
        p["x"], torch.tensor([1, 3, 4, 4, 5, 6]), e),
    "offsets: expected values that rise from 0 to at most R = 13": lambda p, r, e: moeffn.expert_ffn(
        p["x"], torch.tensor([0, 3, 4, 4, 5, 14]), e),
    "grad_buffers.w_in: expected shape": lambda p, r, e: moeffn.moe_ffn(
        p["x"], r, e, grad_buffers=Grads(w_in=p["w_out"])),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_names_argument_expected_and_got(message):
    p = make(dtype=torch.float32)
    routing = Routing(p.ids, p.leaves["weights"])
    with pytest.raises((ValueError, TypeError)) as info:
        BAD[message](p.leaves, routing, p.experts())
    assert str(info.value).startswith(message) and ", got " in str(info.value)
