"""Bounds on tokens/s: what a device's bandwidth and arithmetic allow, and which of the two binds.

A bound, not a forecast: weights are read once a step, all else overlaps. Published rates are dense rates.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from .cost import attention_flops, decode_bytes, matmul_weights
from .counting import load


@dataclass(frozen=True)
class Device:
    """hbm_gb: memory in GB (1e9 bytes); hbm_gbs: GB/s of it; tflops: dense TFLOP/s by format of the operands."""

    name: str
    hbm_gb: float
    hbm_gbs: float
    tflops: dict[str, float]
    source: str

    def ridge(self, dtype: str = "bf16") -> float:
        """FLOPs a byte from which this device is bound by arithmetic."""
        return self.rate(dtype) * 1000 / self.hbm_gbs

    def rate(self, dtype: str) -> float:
        """TFLOP/s in a format. Raises ValueError where the table has none."""
        if dtype not in self.tflops:
            raise ValueError(f"dtype: {self.name} has rates for {', '.join(self.tflops)}, got {dtype!r}")
        return self.tflops[dtype]


@lru_cache(maxsize=1)
def devices() -> dict[str, Device]:
    """The table of devices.json, by name."""
    data = json.loads(files(__package__).joinpath("devices.json").read_text(encoding="utf-8"))
    return {entry["name"]: Device(**entry) for entry in data}


def find_device(device: str | Device) -> Device:
    if isinstance(device, Device):
        return device
    if device not in devices():
        raise ValueError(f"device: expected a Device or one of {', '.join(devices())}, got {device!r}")
    return devices()[device]


def measured_device(name: str, *, gbs: float, tflops: float, memory_gb: float = 0.0, dtype: str = "bf16") -> Device:
    """A device by one's own measurement, e.g. a CPU's read bandwidth and matrix-product rate."""
    for label, value in (("gbs", gbs), ("tflops", tflops)):
        if value <= 0:
            raise ValueError(f"{label}: expected a positive rate, got {value}")
    return Device(name, memory_gb, gbs, {dtype: tflops}, "measured")


def measure_this_machine(*, megabytes: int = 256, size: int = 1024, repeats: int = 3) -> Device:
    """This machine's CPU, as measured now with numpy: reading memory, and a float32 matrix product (best of some).

    Takes about a second; the figures are float32's, the only product numpy is fast at.
    """
    import time

    import numpy as np

    data = np.ones(megabytes * 2**17, dtype=np.float64)
    a = np.ones((size, size), dtype=np.float32)
    best = [float("inf"), float("inf")]
    for _ in range(repeats):
        start = time.perf_counter()
        data.sum()
        middle = time.perf_counter()
        np.matmul(a, a)
        best = [min(best[0], middle - start), min(best[1], time.perf_counter() - middle)]
    return measured_device("this machine", gbs=data.nbytes / best[0] / 1e9, tflops=2 * size**3 / best[1] / 1e12,
                           dtype="fp32")


@dataclass(frozen=True)
class Bound:
    """tokens_per_s under both limits; binds: memory or compute. intensity: FLOPs a byte."""

    device: str
    batch: int
    gigabytes: float
    gigaflops: float
    intensity: float
    memory_tokens_per_s: float
    compute_tokens_per_s: float

    @property
    def tokens_per_s(self) -> float:
        return min(self.memory_tokens_per_s, self.compute_tokens_per_s)

    @property
    def binds(self) -> str:
        return "memory" if self.memory_tokens_per_s < self.compute_tokens_per_s else "compute"


def roofline(source: Any, device: str | Device, batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096),
             *, dtype: str = "bf16", bytes_per_weight: float = 2.0, expert_bytes: float | None = None,
             context: int = 0, cache_bytes: float = 2.0) -> tuple[Bound, ...]:
    """Decode bounds of one step of each batch size, on one device or an ideal aggregate of them.

    context: past tokens of each sequence, read from the cache and attended to. dtype: format of the products.
    """
    chip = find_device(device)
    _, model = load(source)
    flops = 2 * float(matmul_weights(model)) + float(attention_flops(model, context, causal=False))
    return tuple(_bound(chip, batch, decode_bytes(model, batch, bytes_per_weight=bytes_per_weight,
                                                  expert_bytes=expert_bytes, context=context,
                                                  cache_bytes=cache_bytes).total, flops * batch, dtype)
                 for batch in batches)


def prefill(source: Any, device: str | Device, tokens: int, *, dtype: str = "bf16", bytes_per_weight: float = 2.0,
            expert_bytes: float | None = None) -> Bound:
    """The bound of one prompt of `tokens` tokens, causal attention in; the head is used for the last token alone."""
    chip = find_device(device)
    _, model = load(source)
    body = float(matmul_weights(model, head=False)) + float(attention_flops(model, tokens, causal=True)) / 2
    head = 2 * float(matmul_weights(model) - matmul_weights(model, head=False))
    read = decode_bytes(model, tokens, bytes_per_weight=bytes_per_weight, expert_bytes=expert_bytes).total
    return _bound(chip, tokens, read, 2 * body * tokens + head, dtype)


def _bound(chip: Device, batch: int, nbytes: float, flops: float, dtype: str) -> Bound:
    return Bound(chip.name, batch, nbytes / 1e9, flops / 1e9, flops / nbytes, batch * chip.hbm_gbs * 1e9 / nbytes,
                 batch * chip.rate(dtype) * 1e12 / flops)
