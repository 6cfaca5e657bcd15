"""What the checks share: running properties one by one, reading a user's module, comparing gradients."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from .. import checks


@dataclass
class CheckReport:
    """Outcome of the checks, by property."""

    passed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"passed   {name}" for name in self.passed]
        lines += [f"skipped  {name}: {why}" for name, why in self.skipped.items()]
        lines += [f"FAILED   {name}: {why}" for name, why in self.failed.items()]
        return "\n".join(lines)


class Skip(Exception):
    """A property that cannot be looked at here, and why."""


def fail(expected: str, got: object, token: int | None = None) -> NoReturn:
    where = "" if token is None else f"token {token}: "
    raise AssertionError(f"{where}expected {expected}, got {got}")


def run_properties(subject: str, properties: dict[str, Callable[[], None]], skip: Collection[str],
                   answer: Callable[[], object] = lambda: None) -> CheckReport:
    """Run the properties, or, where the subject's `answer` to plain input fails, report that alone."""
    if isinstance(skip, str) or not isinstance(skip, Collection):
        raise checks.bad_type("skip", "a collection of names of properties", skip)
    for name in skip:
        checks.one_of("skip", name, properties)
    report = CheckReport()
    try:
        answer()
    except Exception as error:
        why = str(error) if isinstance(error, AssertionError) else f"raised {type(error).__name__}: {error}"
        raise AssertionError(f"{subject}: no answer to plain input, so none of {len(properties)} properties was "
                             f"reached: {why}") from error
    for name, check in properties.items():
        if name in skip:
            report.skipped[name] = "asked for"
            continue
        try:
            check()
            report.passed.append(name)
        except Skip as reason:
            report.skipped[name] = str(reason)
        except AssertionError as failure:
            report.failed[name] = str(failure)
        except Exception as error:  # a crash of the user's code is a finding, not the end of the checks
            report.failed[name] = f"raised {type(error).__name__}: {error}"
    if report.failed:
        raise AssertionError(f"{subject}: {len(report.failed)} of {len(properties)} properties do not hold\n{report}")
    return report


@contextlib.contextmanager
def evaluating(module: Any) -> Iterator[None]:
    """The module in evaluation mode and gradients on, then back: noise of training would fail every comparison, and the
    caller's `no_grad` would be blamed on the module."""
    modules = list(module.modules()) if isinstance(module, nn.Module) else []
    modes = [m.training for m in modules]
    try:
        if modules:
            module.eval()
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for m, mode in zip(modules, modes, strict=True):
            m.training = mode


class Subject:
    """A router or layer under test: on which device, in which dtype, how wide its input is."""

    def __init__(self, call: Any, width: int) -> None:
        self.call, self.width = call, width
        first = next(call.parameters(), None) if isinstance(call, nn.Module) else None
        self.device = torch.device("cpu") if first is None else first.device
        self.dtype = torch.float32 if first is None else first.dtype

    def randn(self, rows: int, width: int | None = None, *, seed: int = 0) -> Tensor:
        """(rows, width) of unit variance; width defaults to that of the input."""
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(rows, self.width if width is None else width, generator=g, device="cpu")
        return x.to(self.device, self.dtype)

    def shuffled(self, n: int) -> Tensor:
        return torch.randperm(n, generator=torch.Generator().manual_seed(5), device="cpu").to(self.device)

    def with_call(self, call: Any) -> Any:
        """The same subject around another module."""
        other = copy.copy(self)
        other.call = call
        return other

    def double(self) -> Any:
        """A copy in float64 (a plain function is itself)."""
        other = self.with_call(copy.deepcopy(self.call).double() if isinstance(self.call, nn.Module) else self.call)
        other.dtype = torch.float64
        return other

    def parameters(self) -> dict[str, Tensor]:
        """Parameters that are trained, by name."""
        named = self.call.named_parameters() if isinstance(self.call, nn.Module) else ()
        return {n: p for n, p in named if p.requires_grad}


def compare_gradient(subject: Subject, loss: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """Autograd against central differences along one random direction for the input and for each parameter.

    Three steps are tried and the nearest counts: the largest can cross a choice of experts, the smallest drowns in
    rounding where the module computes in float32 inside.
    """
    x = x.to(subject.device).requires_grad_()
    targets = {"the input": x, **subject.parameters()}
    y = loss(x)
    if not y.requires_grad:
        fail("an output that is differentiable", "one without gradient")
    grads = torch.autograd.grad(y, list(targets.values()), allow_unused=True)
    g = torch.Generator().manual_seed(6)
    for (name, target), grad in zip(targets.items(), grads, strict=True):
        v = torch.randn(target.shape, generator=g, dtype=torch.float64, device="cpu").to(target.device)
        got = 0.0 if grad is None else float((grad.double() * v).sum())
        slopes = []
        with torch.no_grad():
            for h in (1e-3, 1e-4, 1e-5):
                ends = []
                for step in (h, -2 * h):
                    target += step * v
                    ends.append(float(loss(x)))
                target += h * v
                slopes.append((ends[0] - ends[1]) / (2 * h))
        near = min(slopes, key=lambda s: abs(s - got))
        if abs(near - got) > 2e-3 * max(abs(near), abs(got)) + 1e-6:
            fail(f"slope {near:.6g} along a random direction of {name} by differences", f"{got:.6g} by autograd")
