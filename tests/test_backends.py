"""Choosing a backend, and parts of the torch backend that no public function shows."""

from __future__ import annotations

import ast
import inspect

import pytest
import torch
from problems import ACTIVATIONS, CPU_BACKENDS

from moeffn import Layout, backends, reference
from moeffn.backends import torch as torch_backend

CPU = torch.device("cpu")


def test_auto_takes_the_first_that_can_run():
    assert backends.resolve("auto", CPU, torch.float64) == "torch"
    assert backends.resolve("auto", CPU, torch.bfloat16) == CPU_BACKENDS[-1]


def test_a_backend_asked_for_by_name_is_taken_or_refused():
    assert backends.resolve("torch", CPU, torch.bfloat16) == "torch"
    with pytest.raises(ValueError, match=r"backend: expected one that runs on cpu in torch\.float32, got .triton.: "):
        backends.resolve("triton", CPU, torch.float32)
    with pytest.raises(ValueError, match="backend: expected one of 'auto', 'reference', 'torch', 'native', 'triton'"):
        backends.resolve("fastest", CPU, torch.float32)


@pytest.mark.parametrize("name", backends.BACKENDS)
def test_every_backend_says_why_it_cannot_run(name):
    reason = backends.available(name, CPU, torch.float32)
    assert reason is None or (isinstance(reason, str) and len(reason) > 5)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_activation_and_its_derivative(activation, layout):
    h = torch.randn(9, activation.width_in(7), dtype=torch.float64, requires_grad=True)
    da = torch.randn(9, 7, dtype=torch.float64)
    want = reference.activate(h, activation, layout)
    (dh,) = torch.autograd.grad(want, h, da)
    gate, up = torch_backend.halves(h.detach(), activation, layout)
    value, d_gate, d_up = torch_backend.activate_backward(gate, up, da, activation)
    for got, expected in ((torch_backend.activate(gate, up, activation), want), (value, want),
                          (torch_backend.joined(d_gate, d_up, layout), dh)):
        assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_swiglu_derivative_in_closed_form():
    # h = silu(a) * b with upstream g: dL/da = g b silu'(a), dL/db = g silu(a), silu'(a) = s(a) + a s(a) (1 - s(a))
    a, b, g = (torch.randn(50, dtype=torch.float64) for _ in range(3))
    s = torch.sigmoid(a)
    _, d_gate, d_up = torch_backend.activate_backward(a, b, g, ACTIVATIONS["swiglu"])
    assert torch.allclose(d_gate, g * b * (s + a * s * (1 - s)), atol=1e-14)
    assert torch.allclose(d_up, g * a * s, atol=1e-14)


@pytest.mark.parametrize("n", [1, 2, 64, 65])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_few_and_many_rows_agree(n, bias):
    x, w = torch.randn(n, 40).bfloat16(), torch.randn(24, 40).bfloat16()
    b = torch.randn(24).bfloat16() if bias else None
    out = torch.full((n, 24), float("nan"), dtype=torch.bfloat16)
    torch_backend._linear(x, w, b, out, 64)
    want = torch.nn.functional.linear(x.double(), w.double(), None if b is None else b.double())
    assert (out.double() - want).norm() / want.norm() < 0.01


def test_the_oracle_shares_no_code_with_what_it_judges():
    imported = {node.module for node in ast.walk(ast.parse(inspect.getsource(reference)))
                if isinstance(node, ast.ImportFrom) and node.level}
    assert imported <= {"config", "types"}
