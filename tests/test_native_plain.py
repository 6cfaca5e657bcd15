"""Backend "native": plain inference in one C++ call gives what the path through Python gives, or is left to that."""

from __future__ import annotations

import sys
import threading
import weakref
from types import SimpleNamespace

import problems
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import moeffn
from moeffn import Activation, Layout, Routing, functional
from moeffn.backends.native import plain_moe, plain_route
from moeffn.config import SWIGLU
from moeffn.types import ExpertWeights

native = pytest.importorskip("moeffn._native")

E, D, F, T, K = 6, 24, 10, 5, 2


def weights(dtype=torch.float32, activation=SWIGLU, layout=Layout.CONCAT, bias=True):
    rows = activation.width_in(F)
    shapes = [(E, rows, D), (E, D, F), *([(E, rows), (E, D)] if bias else [])]
    return ExpertWeights(*(torch.randn(s).to(dtype) for s in shapes), activation=activation, layout=layout)


def routing(apply_to="output", **kwargs):
    return Routing(torch.randint(-1, E + 1, (T, K), dtype=torch.int32), torch.rand(T, K), apply_to=apply_to, **kwargs)


def in_python(monkeypatch, *args, **kwargs):
    with monkeypatch.context() as m:
        m.setattr(functional, "plain_moe", lambda *a: None)
        return moeffn.moe_ffn(*args, **kwargs)


@pytest.fixture
def taken(monkeypatch):
    """What each call of the quick path gave, in order."""
    seen = []

    def record(*args):
        y = plain_moe(*args)
        seen.append(y is not None)
        return y

    monkeypatch.setattr(functional, "plain_moe", record)
    return seen


@pytest.mark.parametrize("name", problems.ACTIVATIONS)
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float16,) * 2,
                                    (torch.float32, torch.bfloat16)], ids=str)
def test_every_kind_is_the_same_to_the_bit(monkeypatch, taken, name, dtypes):
    for layout in Layout:
        for bias in (False, True):
            for apply_to in ("output", "input"):
                ew = weights(dtypes[1], problems.ACTIVATIONS[name], layout, bias)
                x, r = torch.randn(T, D).to(dtypes[0]), routing(apply_to)
                y = moeffn.moe_ffn(x, r, ew)
                assert taken.pop() and y.dtype == x.dtype and moeffn.last_backend() == "native"
                assert torch.equal(y, in_python(monkeypatch, x, r, ew))


@pytest.mark.parametrize("K", [1, 2])
def test_kernels_that_began_too_early_give_up(monkeypatch, taken, K):
    """Calls large enough for several threads, which begin before an autocast or a gradient is known of."""
    shapes = (8, 512, 256), (8, 256, 256)
    ew = ExpertWeights(*(torch.randn(s) / 16 for s in shapes))
    x, r = torch.randn(24, 256), Routing(torch.randint(8, (24, K), dtype=torch.int32), torch.rand(24, K))
    expected = in_python(monkeypatch, x, r, ew)
    for _ in range(20):
        assert torch.equal(moeffn.moe_ffn(x, r, ew), expected)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert moeffn.moe_ffn(x, r, ew).dtype == torch.bfloat16
        assert torch.equal(moeffn.moe_ffn(x, r, ew), expected)
        y = moeffn.moe_ffn(x.clone().requires_grad_(), r, ew)
        assert y.requires_grad and torch.equal(y, expected)
    assert taken == [True, False, True, False] * 20


def test_shapes_strides_and_parameters(monkeypatch, taken):
    turned = [torch.randn(E, D, 2 * F).transpose(1, 2), torch.randn(E, F, D).transpose(1, 2)]
    wide = [torch.randn(E, 4 * F, 2 * D)[:, ::2, ::2], torch.randn(E, D, 3 * F)[:, :, F : 2 * F]]
    biases = [torch.randn(2 * F, E).t(), torch.randn(E, 2 * D)[:, ::2]]
    for ew in (ExpertWeights(*turned), ExpertWeights(*wide, *biases), ExpertWeights(*map(nn.Parameter, turned))):
        for shape in ((T, D), (1, T, 1, D)):
            x, r = torch.randn(shape), routing()
            with torch.no_grad():
                y = moeffn.moe_ffn(x, r, ew, backend="native")
                assert taken.pop() and y.shape == shape and y.is_contiguous() and type(y) is torch.Tensor
                assert torch.equal(y, in_python(monkeypatch, x, r, ew))
    one = Routing(torch.tensor([[3, 1]], dtype=torch.int32), torch.rand(1, 2))
    x = torch.randn(D)  # no dimension of tokens
    ew = weights()
    assert torch.equal(moeffn.moe_ffn(x, one, ew), moeffn.moe_ffn(x[None], one, ew)[0]) and all(taken)


def test_inference_tensors_and_weights_that_changed(monkeypatch, taken):
    ew = weights()
    with torch.inference_mode():
        x, r = torch.randn(T, D), routing()
        y = moeffn.moe_ffn(x, r, ew)
        assert y.is_inference() and torch.equal(y, in_python(monkeypatch, x, r, ew))
    first = moeffn.moe_ffn(x, r, ew)
    assert not first.is_inference()
    ew.w_in.mul_(2.0)
    ew.w_out.data = torch.randn(E, D, F)  # other memory under the same tensor
    y = moeffn.moe_ffn(x, r, ew)
    assert taken == [True] * 3 and not torch.equal(y, first) and torch.equal(y, in_python(monkeypatch, x, r, ew))


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Tagged(torch.Tensor):
    pass


def watched(mode):
    def call(x, r, ew):
        with mode():
            return moeffn.moe_ffn(x, r, ew)
    return call


def mapped(x, r, ew):
    return torch.func.vmap(lambda x: moeffn.moe_ffn(x, r, ew))(x[None])[0]


def replaced(**fields):
    """A call with some fields of the routing or the weights exchanged behind the dataclasses' backs."""
    def call(x, r, ew):
        for name, value in fields.items():
            object.__setattr__(r if hasattr(r, name) and name != "weights" else ew, name, value(ew, r))
        return moeffn.moe_ffn(x, r, ew)
    return call


NOT_PLAIN = {
    "dispatch mode": watched(Watching),
    "autocast": watched(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "vmap": mapped,
    "jit.trace": lambda x, r, ew: torch.jit.trace(lambda x: moeffn.moe_ffn(x, r, ew), x, check_trace=False)(x),
    "x wants a gradient": lambda x, r, ew: moeffn.moe_ffn(x.requires_grad_(), r, ew),
    "a weight wants a gradient": lambda x, r, ew: [ew.b_out.requires_grad_(), moeffn.moe_ffn(x, r, ew)][1],
    "routing weights want a gradient": lambda x, r, ew: [r.weights.requires_grad_(), moeffn.moe_ffn(x, r, ew)][1],
    "a subclass": lambda x, r, ew: moeffn.moe_ffn(x.as_subclass(Tagged), r, ew),
    "negated x": lambda x, r, ew: moeffn.moe_ffn(torch._neg_view(-x), r, ew),
    "symbolic zeros": lambda x, r, ew: moeffn.moe_ffn(torch._efficientzerotensor((T, D)), r, ew),
    "columns of x apart": lambda x, r, ew: moeffn.moe_ffn(x.t().contiguous().t(), r, ew),
    "rows of x apart": lambda x, r, ew: moeffn.moe_ffn(torch.cat([x, -x], 1)[:, :D], r, ew),
    "columns of weights apart": lambda x, r, ew: moeffn.moe_ffn(
        x, Routing(r.experts, r.weights.t().contiguous().t()), ew),
    "columns of ids apart": replaced(experts=lambda ew, r: r.experts.t().contiguous().t()),
    "float64": lambda x, r, ew: moeffn.moe_ffn(x.double(), r, ew),
    "x narrower than the weights": lambda x, r, ew: moeffn.moe_ffn(x.bfloat16(), r, ew),
    "no tokens": lambda x, r, ew: moeffn.moe_ffn(x[:0], Routing(r.experts[:0], r.weights[:0]), ew),
    "identity experts": lambda x, r, ew: moeffn.moe_ffn(
        x, Routing(r.experts, r.weights, identity_weights=torch.rand(T)), ew),
    "another backend": lambda x, r, ew: moeffn.moe_ffn(x, r, ew, backend="torch"),
    "buffers": lambda x, r, ew: moeffn.moe_ffn(x, r, ew, grad_buffers=moeffn.backends.Grads()),
}


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_is_not_plain_is_left_to_python(monkeypatch, taken, name):
    found = []
    for path in (functional.plain_moe, lambda *a: None):
        torch.manual_seed(3)
        args = torch.randn(T, D), routing(), weights()
        monkeypatch.setattr(functional, "plain_moe", path)
        found.append(NOT_PLAIN[name](*args))
    assert not any(taken) and torch.equal(*found) and found[0].dtype == found[1].dtype
    assert type(found[0]) is type(found[1]) and found[0].requires_grad == found[1].requires_grad


WRONG = {
    "x of another width": (lambda x, r, ew: (x[:, 1:].contiguous(), r, ew), ValueError, "x: expected last dimension D"),
    "x of integers": (lambda x, r, ew: (x.int(), r, ew), TypeError, "x: expected a floating-point dtype"),
    "x is a list": (lambda x, r, ew: (x.tolist(), r, ew), TypeError, "x: expected a torch.Tensor"),
    "x elsewhere": (lambda x, r, ew: (x.to("meta"), r, ew), ValueError, "device"),
    "other tokens": (lambda x, r, ew: (x[1:], r, ew), ValueError, "routing.experts: expected T = 4"),
    "a tuple for a routing": (lambda x, r, ew: (x, (r.experts, r.weights), ew), TypeError, "routing: expected Routing"),
    "what looks like a routing": (lambda x, r, ew: (x, SimpleNamespace(**vars(r)), ew), TypeError,
                                  "routing: expected Routing"),
    "what looks like weights": (lambda x, r, ew: (x, r, SimpleNamespace(**vars(ew))), TypeError,
                                "weights: expected ExpertWeights"),
    "a tensor for weights": (lambda x, r, ew: (x, r, ew.w_in), TypeError, "weights: expected ExpertWeights"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_as_ever(name):
    change, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        moeffn.moe_ffn(*change(torch.randn(T, D), routing(), weights()))


def test_weights_that_no_longer_fit_never_reach_the_kernels():
    for name, wrong in (("w_out", torch.randn(E, D, F + 1)), ("w_in", torch.randn(E - 1, 2 * F, D)),
                        ("b_in", torch.randn(E, 1)), ("w_out", torch.randn(E, D, F).double()),
                        ("w_out", torch.randn(E, D, F).bfloat16())):
        ew = weights()
        object.__setattr__(ew, name, wrong)
        assert plain_moe(torch.randn(T, D), routing(), ew, "native") is None
    r = routing()
    object.__setattr__(r, "weights", torch.rand(T, K + 1))
    assert plain_moe(torch.randn(T, D), r, weights(), "native") is None
    object.__setattr__(r, "weights", torch.rand(T, K))
    object.__setattr__(r, "experts", torch.rand(T, K))
    assert plain_moe(torch.randn(T, D), r, weights(), "native") is None
    object.__setattr__(r, "experts", torch.zeros(T, K, dtype=torch.int32))
    object.__setattr__(r, "weights", torch.rand(T, K).double())
    assert plain_moe(torch.randn(T, D), r, weights(), "native") is None


def test_tangents_are_refused():
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.randn(T, D), torch.randn(T, D))
        with pytest.raises(NotImplementedError, match="forward-mode"):
            moeffn.moe_ffn(x, routing(), weights())


@pytest.mark.parametrize("transform", ["vmap", "grad", "vjp", "jacrev", "functionalize"])
def test_tensors_of_a_transform_are_not_read(transform):
    seen, rest = [], (routing(), weights(), "native")

    def function(x):
        seen.append(plain_moe(x, *rest))
        return x.sum()

    function = getattr(torch.func, transform)(function, *([torch.randn(T, D)] if transform == "vjp" else []))
    if transform != "vjp":
        function(torch.randn(2, T, D) if transform == "vmap" else torch.randn(T, D))
    assert seen == [None]


class Elsewhere(TorchFunctionMode):
    """Exchanges what torch.empty_like makes."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return self.make(args[0]) if func is torch.empty_like else func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [
    lambda x: torch.empty(x.shape, device="meta"), lambda x: x.new_empty(3, 3), lambda x: None,
    lambda x: x.new_empty(x.shape, dtype=torch.float16), lambda x: x.new_empty(D, T).t()])
def test_a_result_of_another_kind_is_not_written_to(monkeypatch, make):
    for dtype in (torch.float32, torch.bfloat16):
        x, r, ew = torch.randn(T, D).to(dtype), routing(), weights(dtype)
        with Elsewhere(make):
            y = moeffn.moe_ffn(x, r, ew)
        assert torch.equal(y, in_python(monkeypatch, x, r, ew))


@pytest.mark.parametrize("backend", ["native", "torch", "reference"])
def test_the_default_device_and_dtype_do_not_matter(monkeypatch, backend):
    config = moeffn.RouterConfig(num_experts=E, top_k=K)
    logits, x, ew, dy = torch.randn(T, E), torch.randn(T, D), weights(), torch.randn(T, D)

    def run():
        route = moeffn.route(logits, config, backend=backend)
        y = moeffn.moe_ffn(x, route, ew, backend=backend)
        python = in_python(monkeypatch, x, route, ew, backend=backend)
        leaves = [t.clone().requires_grad_() for t in (logits, x, ew.w_in, ew.w_out)]
        route = moeffn.route(leaves[0], config, backend=backend)
        moeffn.moe_ffn(leaves[1], route, ExpertWeights(*leaves[2:]), backend=backend).backward(dy)
        return y, python, *(t.grad for t in leaves)

    expected = run()
    with torch.device("meta"):
        found = [run()]
    torch.set_default_dtype(torch.bfloat16)
    try:
        found.append(run())
    finally:
        torch.set_default_dtype(torch.float32)
    for tensors in found:
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(tensors, expected, strict=True))


def test_many_threads_at_once():
    cases = [(torch.randn(T, D), routing(), weights(activation=Activation(kind=k))) for k in ("silu", "gelu", "relu")]
    expected = [moeffn.moe_ffn(*c) for c in cases]
    wrong = []

    def work(i):
        for _ in range(200):
            if not torch.equal(moeffn.moe_ffn(*cases[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(i % len(cases),)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_a_plain_call_beside_others_that_are_not():
    x, r, ew = torch.randn(T, D), routing(), weights()
    expected, found, ended = moeffn.moe_ffn(x, r, ew), [], threading.Event()

    def not_plain():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            while not ended.is_set():
                found.append(plain_moe(x, r, ew, "native") is None)

    threads = [threading.Thread(target=not_plain) for _ in range(2)]
    for t in threads:
        t.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        assert all(torch.equal(plain_moe(x, r, ew, "native"), expected) for _ in range(1000))
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        for t in threads:
            t.join()
    assert found and all(found)


def test_many_activations(monkeypatch):
    x, r, like, seen = torch.randn(T, D), routing(), weights(), []
    for i in range(600):  # more than are remembered, some at the address of one before
        ew = ExpertWeights(like.w_in, like.w_out, activation=Activation(kind="silu", alpha=1.0 + i))
        y = moeffn.moe_ffn(x, r, ew)
        if i % 50 == 0:
            assert torch.equal(y, in_python(monkeypatch, x, r, ew))
        seen.append(weakref.ref(ew.activation))
        del ew
    assert sum(a() is not None for a in seen) <= 300


ROUTERS = {
    "softmax": {},
    "renormalised": {"renormalize": True, "scale": 2.5},
    "selected": {"order": "topk_score"},
    "sigmoid": {"score": "sigmoid", "renormalize": True, "renorm_eps": 1e-3},
}


@pytest.fixture(params=native.isas())
def isa(request):
    native.force_isa(request.param)
    yield request.param
    native.force_isa("")


@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 2, (torch.bfloat16,) * 2, (torch.float16,) * 2,
                                    (torch.bfloat16, torch.float32), (torch.float32, torch.float16)], ids=str)
def test_a_router_in_one_call(isa, name, dtypes):
    for T, C, D in ((1, 4, 1), (3, 37, 100), (8, 5, 64), (9, 33, 65), (64, 128, 300)):
        config = moeffn.RouterConfig(num_experts=C, top_k=3, **ROUTERS[name])
        router = moeffn.Router(D, config, bias=T != 3, selection_bias=T > 3, backend="native", dtype=dtypes[1])
        x = torch.randn(T, D).to(dtypes[0])
        with torch.no_grad():
            for p in router.parameters():
                p.copy_(torch.randn_like(p))
            if router.selection_bias is not None:
                router.selection_bias.normal_()
            found = plain_route(x, router.weight, router.bias, router.selection_bias, config)
            ids, w, logits = found
            bias = 0.0 if router.bias is None else router.bias.double()
            exact = x.double() @ router.weight.double().t() + bias
            size = x.double().abs() @ router.weight.double().abs().t() + bias
            assert ((logits - exact).abs() <= 1e-6 * size.abs() + 1e-6).all() and logits.dtype == torch.float32
            like = moeffn.route(logits, config, selection_bias=router.selection_bias, backend="native")
            assert torch.equal(ids, like.experts) and torch.equal(w, like.weights)
            r = router(x)
            assert torch.equal(r.experts, ids) and torch.equal(r.weights, w) and torch.equal(r.logits, logits)
            assert vars(r).keys() == vars(like).keys() and r.apply_to == config.apply_to
            each = torch.cat([plain_route(x[t : t + 1], router.weight, router.bias, router.selection_bias, config)[2]
                              for t in range(T)])
            assert torch.equal(each, logits)  # a token's logits do not depend on the others


def test_what_the_router_leaves_to_torch(monkeypatch):
    config = moeffn.RouterConfig(num_experts=E, top_k=K)
    grouped = moeffn.RouterConfig(num_experts=E, top_k=K, num_groups=3, topk_groups=2, group_reduce="max")
    x, w, b = torch.randn(T, D), torch.randn(E, D), torch.randn(E)
    with torch.no_grad():
        assert plain_route(x, w, b, b, config) is not None
        apart = torch.randn(2 * E)[::2]
        for args in ((torch.randn(65, D), w, b, b), (x.double(), w, b, b), (torch.randn(T, 2 * D)[:, :D], w, b, b),
                     (x[0], w, b, b), (x[:0], w, b, b), (torch._neg_view(x), w, b, b), (x.to("meta"), w, b, b),
                     (x, w.t().contiguous().t(), b, b), (x, w[1:], b, b), (x, w, b[1:], b), (x, w, b.long(), b),
                     (x, w, b, b.double()), (x, w, b, b[1:]), (x, w, b, apart)):
            assert plain_route(*args, config) is None
        assert plain_route(x, w, b, b, grouped) is None
        with Watching():
            assert plain_route(x, w, b, b, config) is None
        shifted = torch.randn(2 * E)[::2], torch.randn(E, 2 * D)[:, :D]  # a bias with gaps, rows further apart
        r = plain_route(x, shifted[1], shifted[0], None, config)
        assert torch.allclose(r[2], x @ shifted[1].t() + shifted[0], atol=1e-5)
    assert plain_route(x, w.requires_grad_(), b, b, config) is None
    router = moeffn.Router(D, config, backend="native")
    assert router(x).weights.requires_grad
    calls = []
    monkeypatch.setattr("moeffn.layer.plain_route", lambda *a: calls.append(a))
    with torch.no_grad():
        router(x, token_mask=torch.ones(T, dtype=torch.bool))
        router(x, expert_ids=torch.zeros(T, K, dtype=torch.int64))
        moeffn.Router(D, config)(x)  # "auto" on a CPU: bit for bit torch's
        assert not calls
        router(x)
    assert len(calls) == 1


def test_a_layer_of_plain_calls_is_the_layer(monkeypatch):
    config = moeffn.MoEConfig(d_model=D, d_expert=F, num_experts=E, top_k=K)
    layer = moeffn.MoEFFN(config, backend="native").eval()
    x = torch.randn(2, T, D)
    with torch.no_grad():
        y, r = layer(x, return_routing=True)
        assert layer.load_stats().counts.sum() == 2 * T * K
        monkeypatch.setattr("moeffn.layer.plain_route", lambda *a: None)
        monkeypatch.setattr("moeffn.functional.plain_moe", lambda *a: None)
        z, like = layer(x, return_routing=True)
    assert torch.equal(r.experts, like.experts) and torch.allclose(y, z, atol=1e-5)
