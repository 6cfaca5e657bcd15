"""Backend "native", backward: every gradient against float64, on every instruction set that this machine runs."""

from __future__ import annotations

import random

import problems
import pytest
import torch

from moeffn import Activation, Layout, backends
from moeffn.backends import Grads, Needs
from moeffn.config import ACTIVATION_KINDS, SWIGLU, SWIGLU_OAI
from moeffn.types import ExpertWeights

native = pytest.importorskip("moeffn._native")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ("x", "weights", "w_in", "w_out", "b_in", "b_out")


@pytest.fixture(params=native.isas())
def isa(request):
    native.force_isa(request.param)
    yield request.param
    native.force_isa("")


def gradients(problem: problems.Problem, dtype: torch.dtype = torch.float32, needs: Needs | None = None,
              into: Grads | None = None, backend: str = "native", **changes) -> Grads:
    """One forward in plain torch, then the backend's backward with a fixed upstream gradient."""
    p = problem.to(dtype)
    ew, x, weights = changes.get("experts", p.experts()), changes.get("x", p.leaves["x"]), p.leaves["weights"]
    needs = needs or Needs(b_in=ew.b_in is not None, b_out=ew.b_out is not None)
    plan = backends.get("torch").plan(p.ids, ew.num_experts)
    # from contiguous weights: oneDNN's bf16 product may read past the rows of a view, and 0 * NaN is NaN
    _, h = backends.get("torch").forward(x, plan, weights, p.experts(), apply_to=p.apply_to, save=True)
    dy = changes.get("dy")
    if dy is None:
        dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    keep_x = needs.w_in or p.apply_to == "input"
    return backends.get(backend).backward(dy, x if keep_x else None, h, plan, weights, ew, apply_to=p.apply_to,
                                          needs=needs, into=into)


def assert_same(a: Grads, b: Grads) -> None:
    for name in NAMES:
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None), name
        assert left is None or torch.equal(left, right), name


# 33 and 50 leave tails in every tile, 60 rows an expert fill several panels, E=5 with drops leaves uneven experts
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("apply_to", ["output", "input"])
def test_budget_on_every_instruction_set(isa, dtype, apply_to):
    p = problems.make(T=160, K=2, E=5, D=50, F=33, bias=True, apply_to=apply_to)
    problems.assert_within_budget(p, dtype, backend="native")
    expected = isa if dtype == torch.bfloat16 else min(isa, "avx512") if isa.startswith("avx512") else isa
    ran = backends.get("native").last_kernel
    assert ran == (expected if isa != "amx" or dtype == torch.bfloat16 else "avx512")


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("name", problems.ACTIVATIONS)
def test_budget_of_every_activation(name, layout):
    p = problems.make(T=70, K=2, E=3, D=40, F=37, activation=problems.ACTIVATIONS[name], layout=layout)
    problems.assert_within_budget(p, torch.float32, backend="native")
    problems.assert_within_budget(p, torch.bfloat16, backend="native")


@pytest.mark.parametrize("x_dtype, w_dtype", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16),
                                             (torch.float16, torch.float32), (torch.bfloat16, torch.float16)])
def test_mixed_dtypes(isa, x_dtype, w_dtype):
    # x in 16 bits with fp32 weights is what autocast gives; each gradient comes in its tensor's dtype
    p = problems.make(T=60, K=2, E=4, D=48, F=32, bias=True)
    low = p.to(torch.bfloat16)  # values that every dtype here holds, fp16 up to its smallest numbers
    experts = low.to(w_dtype).experts()
    got = gradients(low, x_dtype, experts=experts)
    truth = gradients(low, torch.float64, backend="torch", experts=low.to(torch.float64).experts())
    plain = gradients(low, x_dtype, experts=experts, backend="torch")
    for name in NAMES:
        value = getattr(got, name)
        assert value.dtype == (x_dtype if name == "x" else torch.float32 if name == "weights" else w_dtype)
        for mine, theirs in zip(problems.errors(value, getattr(truth, name)),
                                problems.errors(getattr(plain, name), getattr(truth, name)), strict=True):
            assert mine <= 2 * theirs + 1e-6, name


def _strided_views(ew: ExpertWeights) -> dict[str, ExpertWeights]:
    def spread(t: torch.Tensor) -> torch.Tensor:
        wide = torch.full((t.shape[0], t.shape[1] * 2, t.shape[2] * 3 + 1), float("nan"), dtype=t.dtype)
        view = wide[:, ::2, 1::3]
        view.copy_(t)
        return view

    def turned(t: torch.Tensor) -> torch.Tensor:
        return t.transpose(1, 2).contiguous().transpose(1, 2)

    def bank(t: torch.Tensor) -> torch.Tensor:
        wide = torch.full((t.shape[0] + 2, t.shape[1], t.shape[2] + 5), float("nan"), dtype=t.dtype)
        view = wide[1:-1, :, 3:-2]
        view.copy_(t)
        return view

    def bias(t: torch.Tensor) -> torch.Tensor:
        return t.t().contiguous().t()

    rest = (bias(ew.b_in), bias(ew.b_out), ew.activation, ew.layout)
    return {f.__name__: ExpertWeights(f(ew.w_in), f(ew.w_out), *rest) for f in (spread, turned, bank)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_strides_give_the_same_bits(isa, dtype):
    p = problems.make(T=40, K=2, E=4, D=37, F=50, bias=True)
    experts = p.to(dtype).experts()
    want = gradients(p, dtype)
    for view in _strided_views(experts).values():
        assert_same(gradients(p, dtype, experts=view), want)
    x = p.to(dtype).leaves["x"]
    for odd in (torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape), x.t().contiguous().t(),
                torch.stack([x, x], -1)[..., 0]):
        assert_same(gradients(p, dtype, x=odd), want)
    row = torch.randn(x.shape[1]).to(dtype)
    assert_same(gradients(p, dtype, dy=row.expand(x.shape)), gradients(p, dtype, dy=row.repeat(x.shape[0], 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_empty_experts_get_exact_zeros_in_poisoned_memory(dtype):
    # rows per expert [0, 5, 0, 0, 3, 0]: first, last and middle ones idle; every fresh buffer was NaN before
    ids = torch.tensor([[1], [4], [1], [1], [4], [1], [4], [1], [-1]], dtype=torch.int32)
    p = problems.make(T=9, K=1, E=6, D=96, F=64, bias=True, ids=ids)
    first = gradients(p, dtype)
    for _ in range(3):
        poison = [torch.full_like(getattr(first, n), float("nan")) for n in NAMES]
        del poison
        again = gradients(p, dtype)
        assert_same(again, first)
    for name in NAMES[2:]:
        value = getattr(first, name)
        assert torch.isfinite(value).all()
        assert (value[[0, 2, 3, 5]] == 0).all() and (value[[1, 4]] != 0).any(), name
    assert (first.x[-1] == 0).all() and (first.weights[-1] == 0).all()


def test_no_tokens_and_nothing_routed():
    for T, ids in ((0, torch.zeros(0, 2, dtype=torch.int32)), (3, torch.full((3, 2), -1, dtype=torch.int32))):
        got = gradients(problems.make(T=T, K=2, E=3, D=8, F=4, bias=True, ids=ids))
        for name in NAMES:
            assert (getattr(got, name) == 0).all()
        assert got.x.shape == (T, 8) and got.weights.shape == (T, 2)


@pytest.mark.parametrize("apply_to", ["output", "input"])
@pytest.mark.parametrize("frozen", NAMES)
def test_frozen_tensors_cost_no_memory_and_change_nothing(frozen, apply_to):
    p = problems.make(T=30, K=2, E=4, D=24, F=16, bias=True, apply_to=apply_to)
    full = gradients(p)
    for needs in (Needs(**{frozen: False}), Needs(**{n: n == frozen for n in NAMES})):
        got = gradients(p, needs=needs)
        for name in NAMES:
            value = getattr(got, name)
            assert (value is not None) == getattr(needs, name), name
            assert value is None or torch.equal(value, getattr(full, name)), name


def test_frozen_weights_are_not_touched_by_a_kernel():
    # what is not needed has no buffer to write to, and x need not even exist
    p = problems.make(T=30, K=2, E=4, D=24, F=16)
    got = gradients(p, needs=Needs(w_in=False, w_out=False, b_in=False, b_out=False), x=p.to(torch.float32).leaves["x"])
    assert got.w_in is None and got.w_out is None
    assert torch.equal(got.x, gradients(p).x)


@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [40, 1500])  # 1500 rows of one expert: sums of several row blocks
def test_accumulates_into_buffers(isa, master, rows):
    ids = torch.zeros(rows, 1, dtype=torch.int32)
    ids[::7] = 2
    p = problems.make(T=rows, K=1, E=4, D=33, F=40, bias=True, ids=ids)
    dtype = torch.bfloat16
    fresh = gradients(p, dtype)
    start = {n: torch.randn(getattr(fresh, n).shape).to(master) for n in NAMES[2:]}
    into = Grads(**{n: t.clone() for n, t in start.items()})
    got = gradients(p, dtype, into=into)
    assert got.w_in is None and torch.equal(got.x, fresh.x)
    for name, before in start.items():
        buffer, value = getattr(into, name), getattr(fresh, name).double()
        assert torch.equal(buffer[1], before[1]) and torch.equal(buffer[3], before[3])  # idle experts: untouched
        want = before.double() + value
        slack = 2.0**-8 * value.abs() + (2.0**-8 * want.abs() if master == torch.bfloat16 else 1e-6)
        assert ((buffer.double() - want).abs() <= slack).all(), name
    if master == torch.float32:  # a float32 buffer receives what was never rounded to bf16
        zero = Grads(**{n: torch.zeros_like(t) for n, t in start.items()})
        gradients(p, dtype, into=zero)
        assert torch.equal(zero.w_in.to(dtype), fresh.w_in) and not torch.equal(zero.w_in, fresh.w_in.float())


@pytest.mark.parametrize("rows", [1023, 1024, 1025, 2100])  # around one and two row blocks of D <= 1024
def test_rows_of_one_expert_beyond_a_block(isa, rows):
    p = problems.make(T=rows, K=1, E=1, D=20, F=24, bias=True)
    problems.assert_within_budget(p, torch.float32, backend="native")
    problems.assert_within_budget(p, torch.bfloat16, backend="native")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hundred_runs_on_one_and_two_threads_give_the_same_bits(dtype):
    p = problems.make(T=150, K=4, E=6, D=70, F=130, bias=True)
    first = gradients(p, dtype)
    for i in range(100):
        torch.set_num_threads(1 + i % 2)
        assert_same(gradients(p, dtype), first)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_rows_stay_in_their_tokens_and_experts(isa, dtype):
    ids = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0], [2, 1]], dtype=torch.int32)
    p = problems.make(T=5, K=2, E=4, D=40, F=24, ids=ids)
    clean = gradients(p, dtype)
    x = p.to(dtype).leaves["x"].clone()
    x[1] = float("nan")  # experts 2 and 3
    dirty = gradients(p, dtype, x=x)
    keep = [0, 2, 3, 4]
    assert torch.equal(dirty.x[keep], clean.x[keep]) and dirty.x[1].isnan().all()
    assert torch.equal(dirty.weights[keep], clean.weights[keep]) and dirty.weights[1].isnan().all()
    for name in ("w_in", "w_out"):
        value = getattr(dirty, name)
        assert torch.equal(value[:2], getattr(clean, name)[:2]), name
        assert value[2].isnan().any() and value[3].isnan().any()


def test_random_problems(isa):
    rnd = random.Random(native.isas().index(isa))
    acts = [SWIGLU, SWIGLU_OAI, Activation(kind="silu", limit=0.5, limit_after=True),
            Activation(kind="silu", softcap_gate=1.5, softcap_up=2.0)]
    acts += [Activation(kind=k, gated=g) for k in ACTIVATION_KINDS for g in (True, False)]
    for seed in range(40):
        E = rnd.choice([1, 2, 3, 8, 40])
        K = rnd.randint(1, min(E, 4))
        p = problems.make(T=rnd.choice([1, 2, 17, 64, 129]), K=K, E=E, D=rnd.choice([1, 7, 17, 33, 100, 1025]),
                          F=rnd.choice([1, 2, 31, 33, 64, 161]), activation=rnd.choice(acts), bias=rnd.random() < 0.5,
                          layout=rnd.choice(list(Layout)), apply_to=rnd.choice(["output", "input"]), seed=seed)
        if rnd.random() < 0.3:  # one hot expert
            p.ids[:, 0] = torch.where(p.ids[:, 1:].eq(0).any(1), -1, 0) if K > 1 else 0
        dtype = rnd.choice(DTYPES)
        low = p.to(dtype)
        got = gradients(low, dtype)
        truth = gradients(low, torch.float64, backend="torch")
        plain = gradients(low, dtype, backend="torch")
        for name in NAMES:
            if getattr(got, name) is None:
                continue
            # sums of a few terms may be lucky in plain torch; budgets are tested above, errors of substance here
            floor = 16 * torch.finfo(dtype).eps
            mine = problems.errors(getattr(got, name), getattr(truth, name))[0]
            theirs = problems.errors(getattr(plain, name), getattr(truth, name))[0]
            assert mine <= 2 * theirs + floor, (seed, name, mine, theirs)


def test_large_gradients_reuse_memory_and_clear_idle_experts():
    # 8 MiB of w_in: beyond the size from which gradients live on kept pages; experts 3 and up are idle
    ids = torch.tensor([[0], [2], [1], [0]], dtype=torch.int32)
    p = problems.make(T=4, K=1, E=8, D=512, F=512, ids=ids)
    native.pages_release()
    first = gradients(p, torch.bfloat16)
    want = first.w_in.clone()
    address = first.w_in.data_ptr()
    first.w_in.fill_(float("nan"))
    del first
    assert native.pages_held() >= want.nbytes
    again = gradients(p, torch.bfloat16)
    assert again.w_in.data_ptr() == address and torch.equal(again.w_in, want)
    assert (again.w_in[3:] == 0).all()
    del again
    native.pages_release()
    assert native.pages_held() == 0


def test_a_few_rows_do_not_push_out_a_gradient():
    """Rows in flight in the forward, a gradient in the backward: the third step maps nothing anew."""
    def step() -> list[bool]:
        rows = [native.gradient_memory(n << 20) for n in (8, 12)]
        fresh = [zeroed for _, zeroed in rows]
        del rows
        return [*fresh, native.gradient_memory(128 << 20)[1]]

    native.pages_release()
    assert step() == [True] * 3
    step()
    assert step() == [False] * 3
    native.gradient_memory(512 << 20)
    assert native.pages_held() <= (512 + 128) << 20  # a quarter more than was ever in use
    native.pages_release()
    assert native.pages_held() == 0
