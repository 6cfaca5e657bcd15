"""Problems shared by the tests: random weights and routings, and the float64 truth to judge a backend by."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import moeffn
from moeffn import Activation, ExpertWeights, Layout, Routing, backends, reference
from moeffn.config import SWIGLU
from moeffn.testing import CheckReport

CPU_BACKENDS = [b for b in ("torch", "native") if backends.available(b, torch.device("cpu"), torch.float32) is None]
ACTIVATIONS = {
    "swiglu": SWIGLU,
    "geglu": Activation(kind="gelu"),
    "geglu_tanh": Activation(kind="gelu_tanh"),
    "reglu": Activation(kind="relu"),
    "glu": Activation(kind="sigmoid"),
    "bilinear": Activation(kind="identity"),
    "swiglu_oai": Activation(kind="silu", alpha=1.702, limit=0.7, up_offset=1.0),
    "limit_after": Activation(kind="silu", limit=0.5, limit_after=True),
    "softcap": Activation(kind="silu", softcap_gate=1.0, softcap_up=2.0),
    "relu2": Activation(kind="relu2", gated=False),
    "gelu": Activation(kind="gelu", gated=False),
    "quick_gelu": Activation(kind="silu", alpha=1.702, gated=False),
    "sigmoid": Activation(kind="sigmoid", gated=False),
}


@dataclass
class Problem:
    """One mixture: leaves named x, weights, w_in, w_out, b_in, b_out (the last two may be missing), ids and options."""

    leaves: dict[str, Tensor]
    ids: Tensor
    activation: Activation = SWIGLU
    layout: Layout = Layout.CONCAT
    apply_to: str = "output"

    def to(self, dtype: torch.dtype) -> Problem:
        """The same values (rounded once) in another dtype; routing weights stay float32 below float64."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        leaves = {n: t.detach().to(wide if n == "weights" else dtype) for n, t in self.leaves.items()}
        return Problem(leaves, self.ids, self.activation, self.layout, self.apply_to)

    def experts(self) -> ExpertWeights:
        names = ("w_in", "w_out", "b_in", "b_out")
        return ExpertWeights(*(self.leaves.get(n) for n in names), self.activation, self.layout)

    def run(self, function=None, grads: bool = True, seed: int = 5, **kwargs) -> dict[str, Tensor]:
        """y and, unless grads is False, the gradient of every leaf for a fixed random upstream gradient."""
        function = function or moeffn.moe_ffn
        leaves = {n: t.detach().requires_grad_(grads) for n, t in self.leaves.items()}
        problem = Problem(leaves, self.ids, self.activation, self.layout, self.apply_to)
        routing = Routing(self.ids, leaves["weights"], apply_to=self.apply_to)
        y = function(leaves["x"], routing, problem.experts(), **kwargs)
        out = {"y": y.detach()}
        if grads:
            dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(y.dtype)
            y.backward(dy)
            in_buffers = "grad_buffers" in kwargs  # and what is there is not in .grad
            out |= {n: torch.zeros_like(t) if in_buffers and t.grad is None else t.grad for n, t in leaves.items()}
        return out


def make(T=13, K=2, E=5, D=16, F=12, *, activation=SWIGLU, layout=Layout.CONCAT, bias=False, apply_to="output",
         dtype=torch.float64, ids=None, seed=0, drop=True) -> Problem:
    """Unit-variance data; weights scaled by 1/sqrt(fan-in); with `drop`, one slot in eight or so has id -1."""
    g = torch.Generator().manual_seed(seed)

    def randn(*shape, scale=1.0):
        return (torch.randn(*shape, generator=g, dtype=torch.float64) * scale).to(dtype)

    W = activation.width_in(F)
    leaves = {"x": randn(T, D), "weights": torch.rand(T, K, generator=g, dtype=torch.float64) + 0.1,
              "w_in": randn(E, W, D, scale=D**-0.5), "w_out": randn(E, D, F, scale=F**-0.5)}
    if bias:
        leaves |= {"b_in": randn(E, W), "b_out": randn(E, D)}
    if ids is None:
        ids = torch.rand(T, E, generator=g).argsort(-1)[:, :K].to(torch.int32)
        if drop and K > 1:
            ids = torch.where(torch.rand(T, K, generator=g) < 0.12, -1, ids).to(torch.int32)
    return Problem(leaves, ids, activation, layout, apply_to).to(dtype)


def naive(x, routing, weights):
    """The mixture as plain torch autograd would run it in x's dtype: the yardstick of the error budget."""
    out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32))
    for e in range(weights.num_experts):
        token, k = torch.where(routing.experts == e)
        w = routing.weights[token, k, None]
        rows = x[token]
        if routing.apply_to == "input":
            y = reference.one_expert((w * rows).to(x.dtype), weights, e)
        else:
            y = w * reference.one_expert(rows, weights, e)
        out = out.index_add(0, token, y.to(out.dtype))
    return out.to(x.dtype)


def errors(got: Tensor, truth: Tensor) -> tuple[float, float]:
    """Relative Frobenius error, and the worst row's error over the rms row norm; both 0 for an exact result."""
    got, truth = got.double().reshape(-1, got.shape[-1]), truth.double().reshape(-1, truth.shape[-1])
    assert torch.isfinite(got).all()
    norm = truth.norm()
    if truth.numel() == 0 or norm == 0:
        return (got.norm().item(),) * 2 if truth.numel() else (0.0, 0.0)
    rows = (got - truth).norm(dim=1).max() / (norm / truth.shape[0] ** 0.5)
    return ((got - truth).norm() / norm).item(), rows.item()


def assert_within_budget(problem: Problem, dtype: torch.dtype, grads: bool = True, **kwargs) -> None:
    """Every output and gradient is at most twice as far from float64 as plain torch in the same dtype is."""
    low = problem.to(dtype)
    truth = low.to(torch.float64).run(naive, grads)
    plain, got = low.run(naive, grads), low.run(None, grads, **kwargs)
    floor = torch.finfo(dtype).eps  # results of a handful of terms may be exact in plain torch by luck
    for name, value in got.items():
        for kind, mine, theirs in zip(("Frobenius", "worst row"), errors(value, truth[name]),
                                      errors(plain[name], truth[name]), strict=True):
            assert mine <= 2 * theirs + floor, f"{name}: {kind} error {mine:.3g}, plain torch {theirs:.3g}"


def failed(call: Callable[[], CheckReport]) -> str:
    """The report of a check that does not hold."""
    with pytest.raises(AssertionError) as info:
        call()
    return str(info.value)
