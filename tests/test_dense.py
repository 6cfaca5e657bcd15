"""dense_ffn against the formulas, with separate and packed gate and up, and what it keeps for backward."""

from __future__ import annotations

import pytest
import torch
from problems import ACTIVATIONS

from moeffn import GEGLU_TANH, SWIGLU, DenseFFN, Layout, dense_ffn, reference

D, F = 10, 7


def leaves(activation, bias=True, dtype=torch.float64):
    g = torch.Generator().manual_seed(3)
    W = activation.width_in(F)
    shapes = {"x": (3, 4, D), "w_in": (W, D), "w_out": (D, F)} | ({"b_in": (W,), "b_out": (D,)} if bias else {})
    return {n: torch.randn(s, generator=g, dtype=torch.float64).to(dtype).requires_grad_() for n, s in shapes.items()}


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_output_and_gradients(activation, bias, split):
    if split and not activation.gated:
        pytest.skip("one matrix has nothing to split")
    p = leaves(activation, bias)
    halves = (lambda t: (t[:F], t[F:])) if split else (lambda t: t)
    y = dense_ffn(p["x"], halves(p["w_in"]), p["w_out"], b_in=halves(p["b_in"]) if bias else None,
                  b_out=p.get("b_out"), activation=activation)
    h = p["x"] @ p["w_in"].T + (p["b_in"] if bias else 0)
    want = reference.activate(h, activation, Layout.CONCAT) @ p["w_out"].T + (p["b_out"] if bias else 0)
    for a, b in zip((y, *torch.autograd.grad(y.sin().sum(), list(p.values()))),
                    (want, *torch.autograd.grad(want.sin().sum(), list(p.values()))), strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_interleaved_rows_are_a_reordering_of_concatenated_ones():
    p = leaves(SWIGLU, bias=False)
    interleaved = torch.stack((p["w_in"][:F], p["w_in"][F:]), 1).reshape(2 * F, D)
    a = dense_ffn(p["x"], p["w_in"], p["w_out"], activation=SWIGLU)
    b = dense_ffn(p["x"], interleaved, p["w_out"], activation=SWIGLU, layout=Layout.INTERLEAVED)
    assert torch.allclose(a, b, atol=1e-12)


@pytest.mark.parametrize("activation", [SWIGLU, ACTIVATIONS["gelu"]], ids=["gated", "two matrices"])
def test_only_x_and_the_pre_activations_are_kept(activation):
    p = leaves(activation, bias=False, dtype=torch.float32)
    parameters = {p[n].untyped_storage().data_ptr() for n in ("w_in", "w_out")}
    held = {}

    def pack(t):
        if t.untyped_storage().data_ptr() not in parameters:
            held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        dense_ffn(p["x"], p["w_in"], p["w_out"], activation=activation)
    T = 12
    assert sum(held.values()) == 4 * (T * D + T * activation.width_in(F))


def test_frozen_weights_get_no_gradient_and_thaw():
    p = leaves(GEGLU_TANH)
    for frozen in (True, False):
        p["w_in"].requires_grad_(not frozen)
        p["w_in"].grad = None
        dense_ffn(p["x"], p["w_in"], p["w_out"], b_in=p["b_in"], activation=GEGLU_TANH).sum().backward()
        assert (p["w_in"].grad is None) == frozen


def test_autocast_gives_the_dtype_of_linear():
    p = leaves(SWIGLU, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = dense_ffn(p["x"], p["w_in"], p["w_out"], b_in=p["b_in"], b_out=p["b_out"], activation=SWIGLU)
        assert y.dtype == torch.nn.functional.linear(p["x"], p["w_in"]).dtype == torch.bfloat16
    y.float().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in p.values())
    ffn, x = DenseFFN(D, F, bias=True).bfloat16(), torch.randn(3, D).bfloat16()
    with torch.autocast("cpu", dtype=torch.float16):  # biases of the dtype that is not autocast's
        y = ffn(x)
    assert y.dtype == torch.float16
    assert torch.allclose(y.float(), ffn.float()(x.float()), atol=0.02)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_compiles_with_and_without_gradients(grad, bias):
    torch._dynamo.reset()
    ffn, x = DenseFFN(D, F, bias=bias), torch.randn(3, D)
    with torch.set_grad_enabled(grad):
        assert torch.allclose(torch.compile(ffn, fullgraph=True, backend="aot_eager")(x), ffn(x), atol=1e-6)


def test_module_state_and_shape():
    ffn = DenseFFN(D, F, bias=True, output_gate=True)
    assert sorted(ffn.state_dict()) == ["b_in", "b_out", "gate", "w_in", "w_out"]
    assert sorted(DenseFFN(D, F).state_dict()) == ["w_in", "w_out"]
    x = torch.randn(2, 3, D)
    want = torch.sigmoid(x @ ffn.gate.T) * dense_ffn(x, ffn.w_in, ffn.w_out, b_in=ffn.b_in, b_out=ffn.b_out,
                                                     activation=SWIGLU)
    assert torch.equal(ffn(x), want)


@pytest.mark.parametrize("change, message", [
    ({"w_in": torch.zeros(2 * F, D + 1)}, r"w_in\[0\]: expected shape"),
    ({"w_out": torch.zeros(D, F + 1)}, "w_out: expected shape"),
    ({"w_in": torch.zeros(2 * F + 1, D)}, "w_in: expected an even number"),
    ({"b_out": torch.zeros(D + 1)}, "b_out: expected shape"),
    ({"b_in": torch.zeros(3)}, "b_in: expected"),
    ({"b_in": (torch.zeros(F), torch.zeros(F))}, "b_in: expected 1 tensors, as w_in has, got 2"),
    ({"b_in": torch.zeros(2 * F + 2)}, r"b_in\[0\]: expected shape"),
    ({"x": "text"}, "x: expected a torch.Tensor"),
    ({"w_in": (torch.zeros(F, D), torch.zeros(F + 1, D))}, "w_in: expected one tensor, or a pair"),
])
def test_bad_input(change, message):
    p = {n: t.detach() for n, t in leaves(SWIGLU, dtype=torch.float32).items()} | change
    with pytest.raises((ValueError, TypeError), match=message):
        dense_ffn(p["x"], p["w_in"], p["w_out"], b_in=p["b_in"], b_out=p["b_out"], activation=SWIGLU)
