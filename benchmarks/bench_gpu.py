"""Forward and forward + backward of one MoE FFN on one GPU against every contender that is installed, and decoding.

    python benchmarks/bench_gpu.py [--shapes qwen3-30b,...] [--dtype bf16] [--seconds 1.0] [--decode] [--smoke]

Timed with CUDA events, contenders alternating, the router included for every contender that has the same one. A
contender is timed only where its output agrees with plain torch in float32. TFLOP/s count 6·T·K·D·F forward and
18·T·K·D·F with backward; the roofline is that of moeffn.accounting. Without a GPU it says so and ends with code 2;
--smoke there runs the shapes' arithmetic and ends with code 0. Results: benchmarks/results/bench_gpu-<device>.csv.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.util
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from moeffn import MoEConfig, MoEFFN, backends
from moeffn.permutation import permute, plan, unpermute

RESULTS = Path(__file__).parent / "results"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """T tokens through E experts of width F, K a token."""

    name: str
    T: int
    D: int
    F: int
    E: int
    K: int

    def flops(self, train: bool) -> int:
        return (18 if train else 6) * self.T * self.K * self.D * self.F


SHAPES = [
    Shape("qwen3-30b", 32768, 2048, 768, 128, 8),
    Shape("qwen3-30b-8k", 8192, 2048, 768, 128, 8),
    Shape("wide-128", 32768, 4096, 1024, 128, 8),
    Shape("narrow-128", 24576, 1536, 256, 128, 8),
    Shape("fine-256", 32768, 4096, 512, 256, 16),
    Shape("qwen3-next", 32768, 2048, 512, 512, 10),
]
DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)


class Setup:
    """One layer, its input and upstream gradient on the device; every contender works on the same weights."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: str) -> None:
        torch.manual_seed(0)
        self.shape = shape
        config = MoEConfig(d_model=shape.D, d_expert=shape.F, num_experts=shape.E, top_k=shape.K)
        self.layer = MoEFFN(config, device=device, dtype=dtype)
        self.x = torch.randn(shape.T, shape.D, device=device, dtype=dtype, requires_grad=True)
        self.dy = torch.randn_like(self.x)

    def contenders(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Name -> a call that returns y from x, the router included."""
        def with_backend(name: str) -> Callable[[], torch.Tensor]:
            def run() -> torch.Tensor:
                self.layer.backend = name
                return self.layer(self.x)
            return run

        found = {name: with_backend(name) for name in ("triton", "torch")
                 if backends.available(name, self.x.device, self.x.dtype) is None}
        found["cuBLAS loop"] = self._loop
        if hasattr(torch.nn.functional, "grouped_mm") and self.x.dtype == torch.bfloat16:
            found["grouped_mm"] = self._grouped
        if importlib.util.find_spec("scattermoe"):
            found["scattermoe"] = self._scattermoe
        return found

    def _grouped(self) -> torch.Tensor:
        """permute, torch grouped_mm twice, unpermute: what eager frameworks do."""
        w = self.layer.experts.weights
        routing = self.layer.router(self.x)
        grouped = plan(routing.experts, w.num_experts)
        rows = permute(self.x, grouped)
        h = torch.nn.functional.grouped_mm(rows, w.w_in.transpose(1, 2), offs=grouped.offsets[1:])
        gate, up = h.chunk(2, -1)
        out = torch.nn.functional.grouped_mm(torch.nn.functional.silu(gate) * up, w.w_out.transpose(1, 2),
                                             offs=grouped.offsets[1:])
        return unpermute(out, grouped, routing.weights)

    def _loop(self) -> torch.Tensor:
        """One cuBLAS product per expert and matrix; reads the counts on the host."""
        w = self.layer.experts.weights
        routing = self.layer.router(self.x)
        grouped = plan(routing.experts, w.num_experts)
        rows = permute(self.x, grouped).split(grouped.counts.tolist())
        out = []
        for e, part in enumerate(rows):
            gate, up = (part @ w.w_in[e].T).chunk(2, -1)
            out.append((torch.nn.functional.silu(gate) * up) @ w.w_out[e].T)
        return unpermute(torch.cat(out), grouped, routing.weights)

    def _scattermoe(self) -> torch.Tensor:
        from scattermoe.mlp import flatten_sort_count, parallel_linear  # type: ignore[import-not-found]

        w, K = self.layer.experts.weights, self.shape.K
        routing = self.layer.router(self.x)
        expert_ids, slots, offsets = flatten_sort_count(routing.experts.long(), num_experts=w.num_experts)
        h = parallel_linear(self.x, w.w_in.transpose(1, 2), K, expert_ids, slots, offsets, grouped_out=True)
        gate, up = h.chunk(2, -1)
        return parallel_linear(torch.nn.functional.silu(gate) * up, w.w_out.transpose(1, 2), 1, expert_ids, slots,
                               offsets, gates=routing.weights.to(self.x.dtype), grouped_in=True)


def agrees(setup: Setup, run: Callable[[], torch.Tensor], truth: torch.Tensor) -> float:
    """Relative Frobenius distance from the float32 answer."""
    with torch.no_grad():
        return float((run().float() - truth).norm() / truth.norm())


def measure(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Median seconds of each call, contenders alternating in random order, between CUDA events."""
    for call in calls.values():
        for _ in range(3):
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


def train_step(setup: Setup, run: Callable[[], torch.Tensor]) -> Callable[[], object]:
    inputs = [setup.x, *setup.layer.parameters()]
    return lambda: torch.autograd.grad(run(), inputs, setup.dy)


def bench(shape: Shape, dtype: torch.dtype, seconds: float) -> list[dict[str, object]]:
    setup = Setup(shape, dtype, "cuda")
    found = setup.contenders()
    with torch.no_grad():
        wide = MoEFFN(setup.layer.config, device="cuda", backend="torch")
        wide.load_state_dict({n: t.float() for n, t in setup.layer.state_dict().items()})
        truth = wide(setup.x.float())
        del wide
    distance = {name: agrees(setup, run, truth) for name, run in found.items()}
    limit = 2 * distance["cuBLAS loop"] + torch.finfo(dtype).eps
    kept = {name: run for name, run in found.items() if distance[name] <= limit}
    rows: list[dict[str, object]] = []
    for train in (False, True):
        calls: dict[str, Callable[[], object]] = {}
        for name, run in kept.items():
            calls[name] = train_step(setup, run) if train else torch.no_grad()(run)
        times = measure(calls, seconds)
        for name in found:
            took = times.get(name)
            rows.append({"shape": shape.name, "T": shape.T, "D": shape.D, "F": shape.F, "E": shape.E, "K": shape.K,
                         "pass": "forward+backward" if train else "forward", "contender": name,
                         "distance": f"{distance[name]:.2e}", "ms": f"{took * 1e3:.4f}" if took else "wrong answer",
                         "tflops": f"{shape.flops(train) / took / 1e12:.1f}" if took else ""})
            print("  ".join(str(v) for v in rows[-1].values()), flush=True)
    return rows


def decode_rows(dtype: torch.dtype, seconds: float) -> list[dict[str, object]]:
    """Latency of the layer under a CUDA graph at the Qwen3-30B widths."""
    rows: list[dict[str, object]] = []
    for T in DECODE_TOKENS:
        shape = Shape("decode", T, 2048, 768, 128, 8)
        setup = Setup(shape, dtype, "cuda")
        setup.layer.backend = "triton"
        with torch.no_grad():
            for _ in range(3):
                setup.layer(setup.x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                setup.layer(setup.x)
        took = measure({"triton": graph.replay}, seconds)["triton"]
        active = min(shape.E, T * shape.K)
        gbs = 3 * active * shape.D * shape.F * dtype.itemsize / took / 1e9
        rows.append({"shape": "decode", "T": T, "D": shape.D, "F": shape.F, "E": shape.E, "K": shape.K,
                     "pass": "forward, graph", "contender": "triton", "ms": f"{took * 1e3:.4f}",
                     "gb_per_s_at_most": f"{gbs:.0f}"})
        print("  ".join(str(v) for v in rows[-1].values()), flush=True)
    return rows


def machine() -> dict[str, str]:
    import triton

    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,driver_version", "--format=csv,noheader"]
    try:
        clocks = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        clocks = "unknown"
    return {"device": torch.cuda.get_device_name(), "clocks": clocks, "torch": torch.__version__,
            "triton": triton.__version__, "date": datetime.date.today().isoformat()}


def smoke() -> None:
    """What can be checked without a GPU: every contender runs on a tiny shape on the CPU and agrees."""
    setup = Setup(Shape("smoke", 24, 32, 16, 4, 2), torch.float32, "cpu")
    found = setup.contenders()
    truth = found["torch"]().detach()
    for name, run in found.items():
        assert agrees(setup, run, truth) < 1e-5, name
        assert all(g.isfinite().all() for g in train_step(setup, run)()), name  # type: ignore[attr-defined]
    print(f"no GPU: nothing was timed; agree on a CPU: {', '.join(found)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(s.name for s in SHAPES))
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--seconds", type=float, default=1.0, help="per contender and pass")
    parser.add_argument("--decode", action="store_true", help="the decoding table too")
    parser.add_argument("--smoke", action="store_true", help="one small shape; without a GPU, agreement on the CPU")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        if options.smoke:
            smoke()
            return 0
        print("bench_gpu: no CUDA or ROCm device is here; nothing was timed", file=sys.stderr)
        return 2
    dtype = DTYPES[options.dtype]
    chosen = [s for s in SHAPES if s.name in options.shapes.split(",")]
    if options.smoke:
        chosen, options.seconds = [Shape("smoke", 512, 256, 128, 8, 2)], 0.01
    rows = [row for shape in chosen for row in bench(shape, dtype, options.seconds)]
    if options.decode:
        rows += decode_rows(dtype, options.seconds)
    if not options.smoke:
        about = machine()
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"bench_gpu-{about['device'].replace(' ', '-').lower()}.csv"
        fields = list(dict.fromkeys(name for row in rows for name in (*row, *about)))
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fields, lineterminator="\n")
            writer.writeheader()
            writer.writerows(row | about for row in rows)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
