"""Timing of several contenders in one run: they alternate in random order, and disturbed samples are thrown away.

A sample is a batch of calls of at least `batch_s` seconds. Linux tells how long any runnable task waited for a CPU
during the sample (the pressure-stall counter) and how long the host of a virtual machine took the CPUs away (steal);
samples with more than 3 % of them are not used. The figure is the median of what is left.
"""

from __future__ import annotations

import csv
import datetime
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

PRESSURE, STAT = Path("/proc/pressure/cpu"), Path("/proc/stat")
STALL_LIMIT = 0.03
RESULTS = Path(__file__).parent / "results"


@dataclass
class Timing:
    """Seconds per call of one contender: every sample, and the ones taken while nothing else wanted the CPUs."""

    samples: list[float] = field(default_factory=list)
    clean: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median of the clean samples; of the fastest three when fewer than three are clean."""
        return statistics.median(self.clean if len(self.clean) >= 3 else sorted(self.samples)[:3])


def stalled() -> float:
    """Seconds so far in which some task waited for a CPU, or the host took one; 0 where the kernel does not say."""
    try:
        line = PRESSURE.read_text().splitlines()[0]
        stolen = int(STAT.read_text().split(maxsplit=9)[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError):
        return 0.0
    return int(line.rsplit("total=", 1)[1]) / 1e6 + stolen


def alternate(contenders: dict[str, Callable[[int], object]], *, seconds: float, batch_s: float = 0.012,
              min_rounds: int = 5, seed: int = 0) -> dict[str, Timing]:
    """Times every contender for about `seconds` in all. A contender is called with a running number, by which it picks
    one of several inputs, so that small batches do not find their weights in the cache."""
    rng = random.Random(seed)
    calls = {}
    for name, run in contenders.items():
        run(0)
        start = time.perf_counter()
        run(1)
        calls[name] = max(1, round(batch_s / max(1e-7, time.perf_counter() - start)))
    timings = {name: Timing() for name in contenders}
    number, rounds, begin = 2, 0, time.perf_counter()
    while rounds < min_rounds or time.perf_counter() - begin < seconds:
        order = list(contenders)
        rng.shuffle(order)
        for name in order:
            run, n = contenders[name], calls[name]
            before, start = stalled(), time.perf_counter()
            for _ in range(n):
                run(number)
                number += 1
            took = time.perf_counter() - start
            timings[name].samples.append(took / n)
            if stalled() - before <= STALL_LIMIT * took:
                timings[name].clean.append(took / n)
        rounds += 1
        if time.perf_counter() - begin > 4 * seconds:
            break
    return timings


def machine() -> dict[str, str]:
    """What a result must be read with: processor, versions, date."""
    import torch

    cpu = platform.processor() or platform.machine()
    try:
        names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
                 if line.startswith(("model name", "model\t"))]
        cpu = " model ".join(reversed(names[:2])) or cpu
    except OSError:
        pass
    return {"cpu": cpu, "threads": str(torch.get_num_threads()), "torch": torch.__version__,
            "python": platform.python_version(), "date": datetime.date.today().isoformat()}


def write_csv(name: str, rows: list[dict[str, object]]) -> Path:
    """Rows (all with the same keys) to benchmarks/results/<name>.csv, each with the machine's columns."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.csv"
    about = machine()
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, [*rows[0], *about], lineterminator="\n")
        writer.writeheader()
        writer.writerows({**row, **about} for row in rows)
    return path
