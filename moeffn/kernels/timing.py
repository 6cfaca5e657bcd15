"""Timing on a GPU with events: contenders alternate in random order, the L2 cache is flushed between calls."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping

import torch


def alternate(calls: Mapping[str, Callable[[], object]], seconds: float, warm_up: int = 3) -> dict[str, float]:
    """Median seconds of each call, from at least 5 samples each and about `seconds` of them each."""
    for call in calls.values():
        for _ in range(warm_up):
            call()
    torch.cuda.synchronize()
    flush = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")  # 256 MiB: evicts the L2 cache
    samples: dict[str, list[float]] = {name: [] for name in calls}
    rng, spent = random.Random(0), 0.0
    while spent < seconds * len(calls) or len(next(iter(samples.values()))) < 5:
        for name in rng.sample(list(calls), len(calls)):
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            calls[name]()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) / 1e3)
            spent += samples[name][-1]
    return {name: statistics.median(times) for name, times in samples.items()}
