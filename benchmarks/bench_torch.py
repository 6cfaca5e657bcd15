"""Backend "torch" against transformers' grouped_mm and eager experts: forward, and forward + backward, on a CPU.

    python benchmarks/bench_torch.py [--dtype bf16] [--shapes S1,S2,S3] [--tokens 1,64,1024] [--smoke]

Timed: (x, experts, weights) -> y with weights in memory; the router is not. Contenders alternate in one run and
disturbed samples are thrown away (harness.py). Results: results/torch.csv, with the machine, versions and date.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import harness
from bench_cpu import DTYPES, Call, Inputs, _moeffn, _train, _transformers
from shapes import SHAPES, Shape

PASSES = ("forward", "forward + backward")


def bench(shape: Shape, tokens: list[int], dtype: str, passes: list[str], seconds: float) -> list[dict[str, object]]:
    """One row per (T, pass, contender)."""
    rows: list[dict[str, object]] = []
    for what in passes:
        train = what != "forward"
        inputs = Inputs(shape, DTYPES[dtype], train)
        for T in tokens:
            inputs.tokens(T)
            made: dict[str, Call] = {"moeffn torch": _moeffn(inputs, "torch"),
                                     "transformers grouped_mm": _transformers(inputs, "grouped_mm")}
            if not train:  # eager needs a gradient of all experts' size per expert: minutes a step
                made["transformers eager"] = _transformers(inputs, "eager")
            if train:
                made = {name: _train(run) for name, run in made.items()}
            with torch.set_grad_enabled(train):
                times = harness.alternate(made, seconds=seconds, seed=T)
            ours = times["moeffn torch"].median
            for name, timing in times.items():
                rows.append({"shape": shape.name, "D": shape.D, "F": shape.F, "E": shape.E, "K": shape.K, "T": T,
                             "dtype": dtype, "pass": what, "contender": name, "ms": f"{timing.median * 1e3:.4f}",
                             "ours_over_it": f"{ours / timing.median:.3f}", "clean": len(timing.clean),
                             "samples": len(timing.samples)})
            print(f"{shape.name} T={T:<5} {what:<19}",
                  "  ".join(f"{n} {t.median * 1e3:.3f} ms" for n, t in times.items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bf16", choices=list(DTYPES))
    parser.add_argument("--shapes", default="S1,S2,S3")
    parser.add_argument("--tokens", default="1,64,1024")
    parser.add_argument("--seconds", type=float, default=4.0, help="per cell, all contenders together")
    parser.add_argument("--smoke", action="store_true", help="one small shape, no file: does it run?")
    args = parser.parse_args()
    if args.smoke:
        rows = bench(Shape("small", 64, 32, 8, 2), [1, 16], args.dtype, list(PASSES), 0.1)
        assert len(rows) == 2 * 3 + 2 * 2
        return
    rows = []
    for name in args.shapes.split(","):
        rows += bench(SHAPES[name], [int(t) for t in args.tokens.split(",")], args.dtype, list(PASSES), args.seconds)
    print(harness.write_csv("torch", rows))


if __name__ == "__main__":
    main()
