"""What `moeffn bench` and `moeffn demo` measure with: repeated timing, ceilings of this machine, synthetic weights."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from . import reference
from .backends.native import module as native_module
from .functional import moe_ffn
from .testing.workloads import errors
from .types import ExpertWeights, Routing


def median_seconds(call: Callable[[int], object], device: torch.device, *, at_least: float = 0.4, calls: int = 5,
                   warmup: int = 2) -> float:
    """Median seconds of call(i), over `calls` calls or as many as fill `at_least` seconds, after `warmup` calls."""
    for i in range(warmup):
        call(i)
    samples: list[float] = []
    begin = time.perf_counter()
    while len(samples) < calls or time.perf_counter() - begin < at_least:
        synchronize(device)
        start = time.perf_counter()
        call(len(samples))
        synchronize(device)
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def matmul_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of the best of several square torch.mm of this dtype; on a CPU the native module's loop of multiply-adds
    in registers, where that is faster."""
    n = 8192 if device.type == "cuda" else 2048
    a, b, out = (torch.randn(n, n, device=device).to(dtype) for _ in range(3))
    product = 2 * n**3 / _best(lambda: torch.mm(a, b, out=out), device)
    native = _native(device)
    return product if native is None else max(product, native.peak_flops(dtype == torch.bfloat16))


def read_ceiling(device: torch.device) -> float:
    """Bytes/s of the best of several reads of one buffer larger than any cache: a maximum over int32; on a CPU the
    native module's read of several streams, where that is faster."""
    count = (1 << 30) // 4 if device.type == "cuda" else (1 << 29) // 4
    buffer = torch.ones(count, dtype=torch.int32, device=device)
    plain = 4 * count / _best(buffer.max, device)
    native = _native(device)
    return plain if native is None else max(plain, native.read_bandwidth([(buffer.data_ptr(), 4 * count)]))


def _native(device: torch.device) -> Any:
    try:
        return native_module() if device.type == "cpu" else None
    except ImportError:
        return None


def _best(call: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    call()
    best = float("inf")
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def fill_normal_(tensors: Iterable[Tensor], generator: torch.Generator) -> None:
    """Fill with normal values of unit fan-in variance, from one random pool read at shifting places: that takes as
    long as a copy, where billions of draws would take minutes. The pool's length divides no usual size, so no two
    experts are equal."""
    for t in tensors:
        pool = torch.randn(min(16_777_259, t.numel()), generator=generator, device="cpu") * t.shape[-1] ** -0.5
        pool = pool.to(t.dtype).to(t.device)
        flat, done = t.view(-1), 0
        while done < flat.numel():
            n = min(pool.numel(), flat.numel() - done)
            flat[done : done + n] = pool[:n]
            done += n


def sample_errors(weights: ExpertWeights, x: Tensor, experts: Tensor, backend: str, train: bool) -> dict[str, float]:
    """Run moe_ffn on all of x (T, D), and compare a sample of tokens with float64 and with plain torch in x's dtype.

    -> output_error, output_budget, and with `train` gradient_error, gradient_budget (the gradient of x): relative
    Frobenius errors; a budget is twice the error of plain torch. The sample is 1 to 8 tokens, fewer for larger experts.
    """
    per_slot = weights.w_in[0].numel() + weights.w_out[0].numel()
    size = max(1, min(8, x.shape[0], 1_000_000_000 // (per_slot * experts.shape[1])))
    sample = torch.linspace(0, x.shape[0] - 1, size, device=x.device).round().long().unique()
    given = torch.rand(experts.shape, generator=torch.Generator().manual_seed(0), device="cpu").to(x.device) + 0.1
    given = given / given.sum(1, keepdim=True)
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), device="cpu").to(x.device, x.dtype)

    def outcome(function: Callable[..., Tensor], rows: Tensor | slice, dtype: torch.dtype, **options: str
                ) -> list[Tensor]:
        xs = x[rows].to(dtype).detach().requires_grad_(train)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        y = function(xs, Routing(experts[rows], given[rows].to(wide)), weights, **options)
        if not train:
            return [y.detach()]
        (dx,) = torch.autograd.grad(y, xs, dy[rows].to(dtype))
        return [y.detach(), dx]

    frozen = [t.requires_grad for _, t in weights.named_tensors()]
    for _, t in weights.named_tensors():
        t.requires_grad_(False)
    truth = outcome(reference.moe_ffn, sample, torch.float64)
    plain = outcome(reference.moe_ffn, sample, x.dtype)
    ours = [t[sample] for t in outcome(moe_ffn, slice(None), x.dtype, backend=backend)]
    for (_, t), needed in zip(weights.named_tensors(), frozen, strict=True):
        t.requires_grad_(needed)
    floor = torch.finfo(x.dtype).eps / 2
    found = {}
    for name, t, p, o in zip(("output", "gradient"), truth, plain, ours, strict=False):
        found[f"{name}_error"] = errors(o, t).frobenius
        found[f"{name}_budget"] = 2 * max(errors(p, t).frobenius, floor)
    return found
