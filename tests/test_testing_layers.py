"""check_plan, check_layer and the error budget: each fails on what is broken in just that way, else passes."""


from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import failed
from torch import Tensor, nn
from torch.nn.functional import linear

from moeffn import DenseFFN, MoEConfig, MoEFFN, Plan, RouterConfig, Routing, plan, reference, route
from moeffn.testing import (
    check_layer,
    check_plan,
    error_budget,
    errors,
)

# ---- plans ---------------------------------------------------------------------------------------------------------


def miscounted(ids: Tensor, E: int) -> Plan:
    p = plan(ids, E)
    return Plan(p.counts.clamp(max=1), p.offsets, p.slot_of_row, p.row_of_slot)


def row_twice(ids: Tensor, E: int) -> Plan:
    p = plan(ids, E)
    return Plan(p.counts, p.offsets, p.slot_of_row.clamp(min=0), p.row_of_slot.clamp(max=3))


def unstable(ids: Tensor, E: int) -> Plan:
    p = plan(ids, E)
    slots = p.slot_of_row.clone()
    for a, b in zip(p.offsets.tolist(), p.offsets.tolist()[1:], strict=False):
        slots[a:b] = slots[a:b].flip(0)
    rows = p.row_of_slot.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            rows[slot] = row
    return Plan(p.counts, p.offsets, slots, rows)


def test_plans() -> None:
    for make in (plan, reference.plan):
        assert check_plan(make).passed == ["counts", "bijection", "stable order"]
    for make, name, other in ((miscounted, "counts", "bijection"), (row_twice, "bijection", "counts"),
                              (unstable, "stable order", "bijection")):
        text = failed(functools.partial(check_plan, make))
        assert f"FAILED   {name}" in text and f"passed   {other}" in text


# ---- layers --------------------------------------------------------------------------------------------------------


def moe(**kwargs: Any) -> MoEFFN:
    torch.manual_seed(0)
    return MoEFFN(MoEConfig(d_model=16, d_expert=12, num_experts=8, top_k=2, **kwargs))


class Around(nn.Module):
    """A good layer with something done to its input or output."""

    def __init__(self, change: Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]) -> None:
        super().__init__()
        self.inner, self.change = moe(), change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x, self.inner)


class _GradientTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad


def refuses_empty(x: Tensor, f: Callable[[Tensor], Tensor]) -> Tensor:
    x.reshape(-1, 16).max(0)
    return f(x)


BROKEN_LAYERS: dict[str, tuple[Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor], str]] = {
    "shape": (lambda x, f: f(x).double() if x.dtype == torch.float32 else f(x), "expected torch.float32"),
    "token order": (lambda x, f: f(x) + torch.arange(x.shape[1]).to(x.dtype)[:, None], "move with their tokens"),
    "one token": (lambda x, f: f(x - x.mean((0, 1))) if x.numel() else f(x), "when only token 17 changes"),
    "bad token": (lambda x, f: f(x) + 0.0 * x.sum(), "when only token 17 becomes nan"),
    "equal tokens": (lambda x, f: f(x) * torch.linspace(1, 2, x.shape[1], dtype=x.dtype)[:, None], "for equal tokens"),
    "token alone": (lambda x, f: f(x) if x.shape[1] != 1 else 1.1 * f(x), "the output it has in a batch"),
    "empty batch": (refuses_empty, "raised IndexError"),
    "determinism": (lambda x, f: f(x) + 1e-3 * torch.randn_like(x), "output of the first run"),
    "gradient": (lambda x, f: f(_GradientTwice.apply(x)), "along a random direction of the input"),
}


@pytest.mark.parametrize("name", BROKEN_LAYERS)
def test_broken_layer_is_found(name: str) -> None:
    change, message = BROKEN_LAYERS[name]
    text = failed(lambda: check_layer(Around(change)))
    line = next(x for x in text.splitlines() if x.startswith(f"FAILED   {name}:"))
    assert message in line, line
    assert "skipped  conservation: give routing= and weights=" in text


def test_good_layers_pass() -> None:
    for layer in (moe(), moe(d_shared=8, shared_gate=True, shared_combine="average", bias=True)):
        report = check_layer(layer)
        assert len(report.passed) == 11 and not report.skipped, str(report)
    # a dense FFN and a plain Sequential are layers, too
    assert len(check_layer(DenseFFN(16, 20)).passed) == 9
    assert len(check_layer(nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 16))).passed) == 9


def test_a_layer_that_loses_a_slot_is_found() -> None:
    layer = moe()
    whole = layer.experts.forward

    def loses_the_second(x: Tensor, routing: Routing, **kwargs: Any) -> Tensor:
        experts = routing.experts.clone()
        experts[::2, 1] = -1
        return whole(x, Routing(experts, routing.weights), **kwargs)

    layer.experts.forward = loses_the_second  # type: ignore[method-assign]
    text = failed(lambda: check_layer(layer, skip=["gradient"]))
    assert "FAILED   conservation: token 0: expected the weighted sum over experts" in text


def test_a_layer_that_trains_idle_experts_is_found() -> None:
    layer = moe()
    whole = layer.experts.forward
    layer.experts.forward = lambda x, r, **k: whole(x, r, **k) + 1e-3 * layer.experts.w_in.sum()  # type: ignore
    text = failed(lambda: check_layer(layer))
    assert "FAILED   idle experts: expected a gradient of exactly 0" in text and "of w_in" in text


def test_a_layer_with_a_capacity_drops_equal_tokens() -> None:
    assert "FAILED   equal tokens" in failed(lambda: check_layer(moe(capacity_factor=1.0)))


@pytest.mark.parametrize("router", [
    RouterConfig(num_experts=8, top_k=2, score="sigmoid", order="topk_score", apply_to="input"),
    RouterConfig(num_experts=8, top_k=2, num_identity_experts=4, scale=2.0),
], ids=["weights on the input", "identity experts"])
def test_layers_with_other_mixtures_pass(router: RouterConfig) -> None:
    assert "conservation" in check_layer(moe(router=router)).passed


def test_a_users_own_block_is_accounted_for() -> None:
    """A loop over experts that returns (y, logits), judged with routing= and weights=."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = moe()

        def routing(self, x: Tensor) -> Routing:
            return route(linear(x, self.inner.router.weight), self.inner.config.route)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            flat = x.reshape(-1, 16)
            r = self.routing(flat)
            assert r.logits is not None
            y = torch.zeros_like(flat)
            for e in range(8):
                token, k = (r.experts == e).nonzero(as_tuple=True)
                out = reference.one_expert(flat[token], self.inner.experts.weights, e)
                y = y.index_add(0, token, (r.weights[token, k, None] * out).to(y.dtype))
            return y.view_as(x), r.logits

    block = Block()
    report = check_layer(block, routing=block.routing, weights=block.inner.experts.weights)
    assert {"conservation", "idle experts", "gradient"} <= set(report.passed)


# ---- error budgets -------------------------------------------------------------------------------------------------


def test_errors_are_relative_and_by_row() -> None:
    exact = torch.tensor([[3.0, 4.0], [0.0, 0.0], [30.0, 40.0]])
    off = torch.tensor([[0.0, 0.5], [0.0, 0.0], [0.0, 0.0]])
    e = errors(exact + off, exact)
    assert e.worst_row == pytest.approx(0.1) and e.frobenius == pytest.approx(0.5 / (25 + 2500) ** 0.5)
    spoilt = exact.clone()
    spoilt[1, 0] = 1e-9
    assert errors(spoilt, exact).worst_row == float("inf")
    assert errors(torch.full((1, 2), float("nan")), exact[:1]).frobenius == float("inf")
    assert errors(exact[:0], exact[:0]).worst_row == 0.0


def test_error_budget_tells_good_from_bad() -> None:
    x, w = torch.randn(40, 64).requires_grad_(), (torch.randn(64, 64) / 8).requires_grad_()

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.silu(x @ w.T) @ w

    def chunked(x: Tensor, w: Tensor) -> Tensor:
        return torch.cat([plain(part, w) for part in x.split(7)])

    def one_bad_row(x: Tensor, w: Tensor) -> Tensor:
        y = plain(x, w)
        return torch.where(torch.arange(40)[:, None] == 3, y * 1.05, y)

    def rough_gradient(x: Tensor, w: Tensor) -> Tensor:
        return plain(_GradientTwice.apply(x), w)

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        budgets = error_budget(chunked, plain, x, w, dtype=dtype)
        assert [b.name for b in budgets] == ["output", "gradient of input 0", "gradient of input 1"]
        with pytest.raises(AssertionError, match=f"error budget in {dtype} not met\n  output"):
            error_budget(one_bad_row, plain, x, w, dtype=dtype)
        with pytest.raises(AssertionError, match="not met\n  gradient of input 0: Frobenius"):
            error_budget(rough_gradient, plain, x, w, dtype=dtype)
    assert [b.name for b in error_budget(chunked, plain, x.detach(), w.detach(), dtype=torch.float32)] == ["output"]
    with pytest.raises(ValueError, match="dtype: expected one narrower than float64"):
        error_budget(chunked, plain, x, w, dtype=torch.float64)


def test_a_layer_without_a_matrix_needs_its_width() -> None:
    with pytest.raises(TypeError, match="d_model: expected an int, as the layer shows no matrix"):
        check_layer(nn.ReLU())
