"""check_layer: the properties of an MoE layer, one method each."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks, reference
from ..types import ExpertWeights, Routing
from .report import CheckReport, Skip, Subject, compare_gradient, evaluating, fail, run_properties

_PROPERTIES = ("shape", "token order", "one token", "bad token", "equal tokens", "token alone", "empty batch",
               "determinism", "gradient", "conservation", "idle experts")


def check_layer(layer: Any, *, d_model: int | None = None, routing: Callable[[Tensor], Routing] | None = None,
                weights: ExpertWeights | None = None, shared: Callable[[Tensor], Tensor] | None = None,
                repeats: int = 3, skip: Collection[str] = ()) -> CheckReport:
    """Check an MoE layer: a function or nn.Module x (B, S, D) -> y (B, S, D), or a tuple that starts with y.

    d_model   D; default: `layer.config.d_model`, else the last dimension of the module's first matrix
    routing   x (T, D) -> the Routing that the layer uses;  weights: its ExpertWeights;  shared: x (T, D) -> what it
              adds to the mixture. With the first two (found by themselves on a MoEFFN) every slot is accounted for.
    repeats   runs, forward and backward, that must be bitwise equal;  skip: names of properties not to check

    Properties: "shape" (other leading dimensions, same rows; dtype kept), "token order" (permuted tokens, permuted
    outputs), "one token" (changing one changes one), "bad token" (NaN stays in its token), "equal tokens" (all on the
    same experts), "token alone" (T = 1), "empty batch" (T = 0, forward and backward), "determinism", "gradient"
    (float64 differences, for the input and every parameter), "conservation" (y is the oracle's weighted sum over all
    slots, each once), "idle experts" (their gradients are exactly 0).

    The layer is checked in evaluation mode. Returns the report, which says what was skipped and why; raises
    AssertionError when a property does not hold, or when the layer gives no answer at all.
    """
    if d_model is None:
        d_model = getattr(getattr(layer, "config", None), "d_model", None)
    if d_model is None and isinstance(layer, nn.Module):
        d_model = next((p.shape[-1] for p in layer.parameters() if p.ndim == 2), None)
    if d_model is None:
        raise checks.bad_type("d_model", "an int, as the layer shows no matrix to read it from", None)
    checks.positive_int("d_model", d_model)
    found = getattr(getattr(layer, "experts", None), "weights", None)
    if weights is None and routing is None and isinstance(found, ExpertWeights) and hasattr(layer, "router"):
        weights, routing, shared = found, layer.router, getattr(layer, "shared", None)
    subject = _Layer(layer, d_model, routing, weights, shared, repeats)
    with evaluating(layer):
        return run_properties(f"layer {type(layer).__name__}",
                              {n: getattr(subject, n.replace(" ", "_")) for n in _PROPERTIES}, skip,
                              answer=lambda: subject.run(subject.randn(6).view(2, 3, -1)))


class _Layer(Subject):
    def __init__(self, call: Any, width: int, routing: Callable[[Tensor], Routing] | None,
                 weights: ExpertWeights | None, shared: Callable[[Tensor], Tensor] | None, repeats: int) -> None:
        super().__init__(call, width)
        self.routing, self.weights, self.shared, self.repeats = routing, weights, shared, repeats
        self.tolerance = 20 * torch.finfo(self.dtype).eps

    def run(self, x: Tensor) -> Tensor:
        y = self.call(x)
        y = y[0] if isinstance(y, (tuple, list)) and y else y
        if not isinstance(y, Tensor):
            fail("a tensor, or a tuple that starts with one", type(y).__name__)
        return y if y.shape == x.shape or y.numel() != x.numel() or y.ndim != 2 else y.view(x.shape)

    def rows(self, x: Tensor) -> Tensor:
        """x (T, D) -> y (T, D), run as a batch of one sequence."""
        return self.run(x[None])[0].detach()

    def same_rows(self, want: Tensor, got: Tensor, index: Tensor, meaning: str) -> None:
        """got[i] is want[index[i]] within rounding."""
        far = (want[index] - got).double().norm(dim=1) > self.tolerance * (want[index].double().norm(dim=1) + 1e-6)
        wrong = far | ~got.isfinite().all(1)
        if bool(wrong.any()):
            i = int(wrong.nonzero()[0])
            t = int(index[i])
            fail(f"{meaning}: {want[t, :4].tolist()}…", f"{got[i, :4].tolist()}…", t)

    def ids(self, *tokens: int) -> Tensor:
        return torch.tensor(tokens, device=self.device)

    def shape(self) -> None:
        x = self.randn(6).view(2, 3, self.width)
        y = self.run(x)
        if y.shape != x.shape or y.dtype != x.dtype:
            fail(f"{x.dtype} {tuple(x.shape)}", f"{y.dtype} {tuple(y.shape)}")
        self.same_rows(y.detach().view(6, -1), self.rows(x.view(6, -1)), self.ids(*range(6)),
                       "the same rows for other leading dimensions")

    def token_order(self) -> None:
        x, order = self.randn(40), self.shuffled(40)
        self.same_rows(self.rows(x), self.rows(x[order]), order, "outputs that move with their tokens")

    def _rest_unchanged(self, x: Tensor, changed: Tensor, meaning: str) -> None:
        rest = self.ids(*(t for t in range(len(x)) if t != 17))
        self.same_rows(self.rows(x), self.rows(changed)[rest], rest, meaning)

    def one_token(self) -> None:
        x = self.randn(40)
        changed = x.clone()
        changed[17] = self.randn(1, seed=9)[0] * 3
        self._rest_unchanged(x, changed, "no change when only token 17 changes")
        if torch.equal(self.rows(x)[17], self.rows(changed)[17]):
            fail("another output for another input", "the same output", 17)

    def bad_token(self) -> None:
        x = self.randn(40)
        for value in (float("nan"), float("inf")):
            changed = x.clone()
            changed[17] = value
            self._rest_unchanged(x, changed, f"no change when only token 17 becomes {value}")

    def equal_tokens(self) -> None:
        y = self.rows(self.randn(1).expand(70, -1))
        self.same_rows(y[:1].expand(70, -1), y, self.ids(*range(70)), "one output for equal tokens")

    def token_alone(self) -> None:
        x = self.randn(12)
        together = self.rows(x)
        for t in range(12):
            self.same_rows(together, self.rows(x[t : t + 1]), self.ids(t), "the output it has in a batch")

    def empty_batch(self) -> None:
        x = self.randn(0)[None].requires_grad_()
        y = self.run(x)
        if y.shape != x.shape:
            fail(f"shape {tuple(x.shape)} for no tokens", tuple(y.shape))
        if y.requires_grad:
            y.sum().backward(inputs=[x])

    def determinism(self) -> None:
        first: list[Any] = []
        names = ["output", "gradient of the input", *(f"gradient of {n}" for n in self.parameters())]
        for i in range(max(2, self.repeats)):
            x = self.randn(64)[None].requires_grad_()
            y = self.run(x)
            now = [y.detach()]
            if y.requires_grad:
                now += torch.autograd.grad(y, [x, *self.parameters().values()], self.randn(64, seed=2)[None],
                                           allow_unused=True)
            first = first or now
            for name, a, b in zip(names, first, now, strict=False):
                if a is not None and not torch.equal(a, b):
                    fail(f"the {name} of the first run", f"up to {float((a - b).abs().max()):.2e} off in run {i}")

    def gradient(self) -> None:
        wide, cotangent = self.double(), self.randn(9, seed=4)[None].double()
        compare_gradient(wide, lambda x: (wide.run(x) * cotangent).sum(), self.randn(9, seed=3)[None].double())

    def _known(self) -> tuple[Callable[[Tensor], Routing], ExpertWeights]:
        if self.routing is None or self.weights is None:
            raise Skip("give routing= and weights= to have every slot accounted for")
        return self.routing, self.weights

    def conservation(self) -> None:
        route, experts = self._known()
        x = self.randn(30)
        r, got = route(x), self.rows(x)
        parts = {n: t.detach().double() for n, t in experts.named_tensors()}
        wide = ExpertWeights(**parts, activation=experts.activation, layout=experts.layout)
        identity = None if r.identity_weights is None else r.identity_weights.detach().double()
        exact = Routing(r.experts, r.weights.detach().double(), None, r.apply_to, identity_weights=identity)
        want = reference.moe_ffn(x.double(), exact, wide)
        if self.shared is not None:
            want = want + self.shared(x).detach().double()
        if getattr(getattr(self.call, "config", None), "shared_combine", "sum") == "average" and self.shared:
            want = want / 2
        off = (got.double() - want).norm(dim=1) > 10 * self.tolerance * (want.norm(dim=1) + want.norm() / 30)
        if bool(off.any()):
            t = int(off.nonzero()[0])
            fail(f"the weighted sum over experts {r.experts[t].tolist()}, {want[t, :4].tolist()}…",
                 f"{got[t, :4].tolist()}…", t)

    def idle_experts(self) -> None:
        route, experts = self._known()
        x = self.randn(1)
        used = set(route(x).experts.flatten().tolist())
        idle = [e for e in range(experts.num_experts) if e not in used]
        packed = {n: t for n, t in experts.named_tensors() if t.requires_grad}
        if not idle or not packed:
            raise Skip("every expert is in use, or none is trained")
        grads = torch.autograd.grad(self.run(x[None]).sum(), list(packed.values()), allow_unused=True)
        for name, grad in zip(packed, grads, strict=True):
            if grad is None or not bool((grad[idle] == 0).all()):
                fail(f"a gradient of exactly 0 for the idle experts {idle} of {name}",
                     "None" if grad is None else f"up to {float(grad[idle].abs().max()):.2e}")
