"""Routings of known skew, and error budgets: what tests and benchmarks are run on and judged by."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .. import checks
from ..types import Routing

SPECS = "uniform, balanced, zipf:A (A >= 0), hot:N (1 <= N <= E), single, zero-expert, trace:FILE"


def make_routing(spec: str, T: int, K: int, E: int, seed: int = 0) -> Routing:
    """A routing (T, K) over E experts, distinct ids per token, positive weights of sum 1; on the CPU, fixed by `seed`.

    uniform      every set of K experts is equally likely
    balanced     every expert gets T·K/E slots, rounded up or down
    zipf:A       K draws without replacement with chances 1/rank^A; which expert has which rank is drawn too
    hot:N        tokens choose among N experts drawn once; with N < K, all of these and K - N others
    single       every token goes to the same K experts
    zero-expert  uniform over a random half of the experts (at least K); the others get nothing
    trace:FILE   the first T rows of the ids in a .npy, .npz, .json, .csv or .pt file of shape (rows, K), again from
                 the start when there are fewer

    Raises ValueError/TypeError for an unknown spec, K > E, or a trace that does not fit.
    """
    checks.instance("spec", spec, str)
    checks.non_negative_int("T", T)
    checks.positive_int("K", K)
    checks.positive_int("E", E)
    if K > E:
        raise checks.bad("K", f"at most E = {E}", K)
    name, _, argument = spec.partition(":")
    g = torch.Generator().manual_seed(seed)
    if name == "trace":
        ids = _trace(argument, T, K, E)
    elif name == "balanced" and not argument:
        ids = _balanced(T, K, E, g)
    else:
        # Draws without replacement, by the Gumbel trick: the K largest of log-chance + noise.
        chance = torch.rand(T, E, generator=g, dtype=torch.float64, device="cpu").clamp(1e-300, 1 - 1e-16)
        noise = -torch.log(-torch.log(chance))
        ids = (_log_chances(spec, name, argument, K, E, g) + noise).topk(K, dim=1).indices
    weights = torch.rand(T, K, generator=g, device="cpu") + 0.1
    return Routing(ids.to(torch.int32), weights / weights.sum(1, keepdim=True))


def _log_chances(spec: str, name: str, argument: str, K: int, E: int, g: torch.Generator) -> Tensor:
    """Log-chance of each expert (E,), up to a constant."""
    rank = torch.randperm(E, generator=g, device="cpu").double()  # which expert is the most popular is drawn, too
    far = 1e6  # above any Gumbel noise: experts this far below are taken only when no others are left
    try:
        if name == "zipf":
            a = float(argument)
            if a >= 0:
                return -a * torch.log(rank + 1)
        elif name == "hot":
            n = int(argument)
            if 1 <= n <= E:
                return torch.where(rank < n, 0.0, -far)
        elif not argument and name in ("uniform", "single", "zero-expert"):
            return {"uniform": torch.zeros_like(rank), "single": -far * rank,
                    "zero-expert": torch.where(rank < max(K, E // 2), 0.0, -far)}[name]
    except ValueError:
        pass
    raise checks.bad("routing", f"one of {SPECS}", repr(spec))


def _balanced(T: int, K: int, E: int, g: torch.Generator) -> Tensor:
    slots = torch.arange(T * K, device="cpu").view(T, K) % E  # K consecutive ids: distinct in a token, even over all
    return torch.randperm(E, generator=g, device="cpu")[slots][torch.randperm(T, generator=g, device="cpu")]


def _read(file: Path) -> np.ndarray:
    if file.suffix == ".json":
        return np.asarray(json.loads(file.read_text()))
    if file.suffix == ".csv":
        return np.loadtxt(file, delimiter=",", dtype=np.int64, ndmin=2)
    if file.suffix == ".pt":
        return torch.load(file, weights_only=True).numpy()
    loaded = np.load(file, allow_pickle=False)
    return loaded[loaded.files[0]] if file.suffix == ".npz" else loaded


def _trace(path: str, T: int, K: int, E: int) -> Tensor:
    file = Path(path)
    if not path or not file.is_file():
        raise checks.bad("routing trace", "trace:FILE with an existing file", repr(path))
    if file.suffix not in (".npy", ".npz", ".json", ".csv", ".pt"):
        raise checks.bad("routing trace", "a .npy, .npz, .json, .csv or .pt file", repr(path))
    try:
        array = _read(file)
    except Exception as error:  # each format's reader has its own
        raise checks.bad("routing trace", f"a {file.suffix} file with rows of one length",
                         f"{path!r} ({error})") from None
    if array.ndim != 2 or array.shape[1] != K or not array.shape[0] or array.dtype.kind not in "iu":
        raise checks.bad("routing trace", f"integers of shape (rows >= 1, K = {K})", f"{array.dtype} {array.shape}")
    if array.min() < -1 or array.max() >= E:
        raise checks.bad("routing trace", f"ids of -1 .. {E - 1}", f"{array.min()} .. {array.max()}")
    return torch.from_numpy(array.astype(np.int64))[torch.arange(T, device="cpu") % array.shape[0]]


@dataclass(frozen=True)
class Errors:
    """Distance from the exact result, relative: of the whole (Frobenius) and of the worst row."""

    frobenius: float
    worst_row: float


@dataclass(frozen=True)
class Budget:
    """Errors of one tensor, those of plain torch in the same dtype, and the factor allowed between them."""

    name: str
    got: Errors
    plain: Errors
    floor: float
    factor: float

    @property
    def met(self) -> bool:
        return all(g <= self.factor * max(p, self.floor) for g, p in
                   ((self.got.frobenius, self.plain.frobenius), (self.got.worst_row, self.plain.worst_row)))

    def __str__(self) -> str:
        return (f"{self.name}: Frobenius {self.got.frobenius:.2e} (plain torch {self.plain.frobenius:.2e}), worst row "
                f"{self.got.worst_row:.2e} ({self.plain.worst_row:.2e}), allowed {self.factor:g}x")


def errors(got: Tensor, exact: Tensor) -> Errors:
    """Errors of `got` against `exact`, both of one shape; rows are along the last dimension. Computed in float64.

    A row that is exactly zero in `exact` has no error when it is zero in `got`, else an infinite one, as has any NaN.
    """
    checks.shape("got", got, tuple(exact.shape), "that of exact")
    want = exact.detach().double().reshape(-1, exact.shape[-1] if exact.ndim else 1)
    diff = got.detach().double().reshape(want.shape) - want

    def relative(d: Tensor, e: Tensor) -> float:
        if d.numel() == 0:
            return 0.0
        ratio = torch.where(e > 0, d / e, torch.where(d == 0, 0.0, torch.inf))
        return float(ratio.nan_to_num(nan=torch.inf, posinf=torch.inf).max())

    return Errors(relative(diff.norm(), want.norm()), relative(diff.norm(dim=1), want.norm(dim=1)))


def error_budget(run: Callable[..., Tensor], plain: Callable[..., Tensor], *inputs: Tensor, dtype: torch.dtype,
                 factor: float = 2.0, seed: int = 0) -> list[Budget]:
    """Hold `run` to `factor` times the error of `plain` (ordinary torch code) in `dtype`: output and every gradient.

    Both map the floating-point `inputs` to one tensor. Exact is `plain` in float64 on the inputs rounded to `dtype`;
    gradients are taken with one random cotangent, for the inputs that require a gradient. No error is asked to be
    below the rounding unit of `dtype`. Meant for inputs of unit variance.

    Returns the budgets; raises AssertionError naming those that are not met, ValueError for another dtype.
    """
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise checks.bad("dtype", "one narrower than float64, in which the exact result is taken", dtype)
    cotangent: list[Tensor] = []

    def evaluate(function: Callable[..., Tensor], wide: bool) -> dict[str, Tensor]:
        tensors = [t.detach().to(dtype) for t in inputs]
        tensors = [(t.double() if wide else t).requires_grad_(i.requires_grad)
                   for t, i in zip(tensors, inputs, strict=True)]
        y = function(*tensors)
        if not cotangent:
            g = torch.Generator().manual_seed(seed)
            dy = torch.randn(y.shape, generator=g, dtype=torch.float64, device="cpu")
            cotangent.append(dy.to(y.device).to(dtype))
        found = {"output": y}
        wanted = {f"gradient of input {i}": t for i, t in enumerate(tensors) if t.requires_grad}
        if wanted:
            grads = torch.autograd.grad(y, list(wanted.values()), cotangent[0].to(y.dtype))
            found.update(zip(wanted, grads, strict=True))
        return found

    exact, rough, got = evaluate(plain, True), evaluate(plain, False), evaluate(run, False)
    floor = torch.finfo(dtype).eps / 2
    budgets = [Budget(n, errors(got[n], e), errors(rough[n], e), floor, factor) for n, e in exact.items()]
    over = [str(b) for b in budgets if not b.met]
    if over:
        raise AssertionError(f"error budget in {dtype} not met\n  " + "\n  ".join(over))
    return budgets
