"""Forward, backward and decoding of one MoE FFN on one GPU against every contender that is installed.

    python benchmarks/bench_gpu.py [--check] [--shapes qwen3-30b,...] [--dtype bf16] [--minutes 8] [--smoke]

--check runs `moeffn check --device cuda` first, in the same --minutes; what they do not suffice for is named and left
out. Timed with CUDA events, contenders alternating, the router included. A contender is timed only where its output
agrees with plain torch in float32. TFLOP/s count 6·T·K·D·F forward, 12 backward and 18 together; the backward's time is
that of both passes less that of the forward that saves for it. Percents are of moeffn.accounting's bound on the sum of
the kernels. Without a GPU it says so and ends with code 2; --smoke there compares the contenders' answers and ends with
code 0. Results, with device, clocks and versions: benchmarks/results/bench_gpu-<device>.csv.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from gpu_contenders import Call, Setup, Shape

from moeffn import MoEFFN, accounting
from moeffn.accounting.kernels import KernelCost, device_of

RESULTS = Path(__file__).parent / "results"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Row = dict[str, object]
Timer = Callable[[dict[str, Callable[[], object]]], dict[str, float]]

SHAPES = [
    Shape("qwen3-30b", 32768, 2048, 768, 128, 8),
    Shape("qwen3-30b-8k", 8192, 2048, 768, 128, 8),
    Shape("wide-128", 32768, 4096, 1024, 128, 8),
    Shape("narrow-128", 24576, 1536, 256, 128, 8),
    Shape("fine-256", 32768, 4096, 512, 256, 16),
    Shape("qwen3-next", 32768, 2048, 512, 512, 10),
]
DECODE_TOKENS = (1, 2, 4, 8, 16, 32, 64)
# What is aimed at on one H200 in bf16, TFLOP/s, and for decoding milliseconds: not measurements.
GOALS: dict[tuple[str, str], float] = {
    ("qwen3-30b", "forward"): 520, ("qwen3-30b", "forward+backward"): 430,
    ("qwen3-30b-8k", "forward"): 400, ("qwen3-30b-8k", "forward+backward"): 320,
    ("wide-128", "forward"): 557, ("wide-128", "backward"): 566,
    ("narrow-128", "forward"): 364, ("narrow-128", "backward"): 404,
    ("fine-256", "forward"): 516, ("fine-256", "backward"): 525,
    ("qwen3-next", "forward"): 400, ("qwen3-next", "forward+backward"): 340,
}
DECODE_GOALS_MS = {1: 0.030, 64: 0.320}
PASSES = ("inference", "forward", "forward+backward")


def costs(shape: Shape, which: str) -> list[KernelCost]:
    """The kernels of a pass, as accounting counts them."""
    block = shape.block()
    every = accounting.kernels(block, shape.T, train=True)
    saving = len(accounting.kernels(block, shape.T))
    return {"inference": list(accounting.kernels(block, shape.T)), "forward": list(every[:saving]),
            "backward": list(every[saving:]), "forward+backward": list(every)}[which]


def row(shape: Shape, which: str, contender: str, seconds: float | None, device: accounting.Device | None, dtype: str,
        **more: object) -> Row:
    """One line of the results; without a time only what was found out."""
    made: Row = {"shape": shape.name, "T": shape.T, "D": shape.D, "F": shape.F, "E": shape.E, "K": shape.K,
                 "dtype": dtype, "pass": which, "contender": contender, **more}
    if seconds is None:
        return made
    flops = {"backward": 12, "forward+backward": 18}.get(which, 6) * shape.T * shape.K * shape.D * shape.F
    made |= {"ms": f"{seconds * 1e3:.4f}", "tflops": f"{flops / seconds / 1e12:.1f}"}
    if device is not None and dtype in device.tflops:
        bound = sum(k.seconds(device, dtype) for k in costs(shape, which))
        made |= {"bound_ms": f"{bound * 1e3:.4f}", "percent_of_bound": f"{100 * bound / seconds:.1f}"}
    if (shape.name, which) in GOALS:
        made["goal_tflops"] = GOALS[shape.name, which]
    return made


def distance(run: Call, truth: torch.Tensor) -> float:
    """Relative Frobenius distance from the float32 answer; infinite where the contender raises."""
    with torch.no_grad():
        try:
            return float((run().float() - truth).norm() / truth.norm())
        except Exception as error:  # a contender that does not run here must not end the benchmark
            print(f"  {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
            return float("inf")


def step(setup: Setup, run: Call, which: str) -> Callable[[], object]:
    """One pass of a contender."""
    if which == "inference":
        return torch.no_grad()(run)
    return run if which == "forward" else lambda: torch.autograd.grad(run(), setup.inputs(), setup.dy)


def bench(shape: Shape, dtype: str, device: str, timer: Timer, chip: accounting.Device | None) -> Iterator[Row]:
    """Every contender's passes at a shape, and our kernels alone."""
    setup = Setup(shape, DTYPES[dtype], device)
    found = setup.contenders()
    with torch.no_grad():
        wide = MoEFFN(setup.layer.config, device=device, backend="torch")
        wide.load_state_dict({n: t.float() for n, t in setup.layer.state_dict().items()})
        truth = wide(setup.x.float())
        del wide
    far = {name: distance(run, truth) for name, run in found.items()}
    limit = 2 * far["cuBLAS loop"] + torch.finfo(DTYPES[dtype]).eps
    kept = {name: run for name, run in found.items() if far[name] <= limit}
    del truth
    times: dict[str, dict[str, float]] = {}
    for which in PASSES:
        good: dict[str, Callable[[], object]] = {}
        for name, run in kept.items():
            try:
                step(setup, run, which)()
                good[name] = step(setup, run, which)
            except Exception as error:
                print(f"  {name}, {which}: {type(error).__name__}")
        times[which] = timer(good)
        for name in found:
            yield row(shape, which, name, times[which].get(name), chip, dtype, distance=f"{far[name]:.2e}",
                      ms="" if name in good else "wrong answer" if far[name] < float("inf") else "does not run")
    for name, both in times["forward+backward"].items():
        if both > times["forward"][name]:
            yield row(shape, "backward", name, both - times["forward"][name], chip, dtype)
    if "triton" in kept:
        del setup, found, kept, good, run  # their tensors, before ours are made anew
        yield from kernel_rows(shape, dtype, timer, chip)


def kernel_rows(shape: Shape, dtype: str, timer: Timer, chip: accounting.Device | None) -> Iterator[Row]:
    """Each grouped product of the triton backend alone, at the tile it picks: the down-projection with the sum of each
    token's rows, the two gradients of weights as one."""
    from moeffn.backends.tuning import KERNELS, Step, problem

    sizes = shape.T, shape.D, shape.F, shape.E, shape.K, DTYPES[dtype], torch.device("cuda", 0)
    one = Step(*sizes)
    tiles = {name: one.backend.pick(problem(name, *sizes)) for name in KERNELS}
    split = tiles["up"].split_k, tiles["down"].split_k
    every = {k.name: k for k in accounting.kernels(shape.block(), shape.T, train=True, split=split)}
    names = {"up": ("up", "up sum"), "down": ("down", "combine"), "dw": ("dw out", "dw in")}
    for name, tile in tiles.items():
        parts = [every[n] for n in names.get(name, (name,)) if n in every]
        seconds = timer({name: one.call(name, tile)})[name]
        flops, nbytes = sum(k.flops for k in parts), sum(k.nbytes for k in parts)
        made = row(shape, f"kernel {name}", "triton", None, chip, dtype, tile=str(tile)) | {
            "ms": f"{seconds * 1e3:.4f}", "tflops": f"{flops / seconds / 1e12:.1f}",
            "gb_per_s": f"{nbytes / seconds / 1e9:.0f}"}
        if chip is not None and dtype in chip.tflops:
            bound = sum(k.seconds(chip, dtype) for k in parts)
            made |= {"bound_ms": f"{bound * 1e3:.4f}", "percent_of_bound": f"{100 * bound / seconds:.1f}"}
        yield made


def decode_rows(dtype: str, timer: Timer, chip: accounting.Device | None) -> Iterator[Row]:
    """Latency of the layer under a CUDA graph at the Qwen3-30B widths."""
    for T in DECODE_TOKENS:
        shape = Shape("decode", T, 2048, 768, 128, 8)
        setup = Setup(shape, DTYPES[dtype], "cuda")
        setup.layer.backend = "triton"
        with torch.no_grad():
            for _ in range(3):
                setup.layer(setup.x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                setup.layer(setup.x)
        seconds = timer({"triton": graph.replay})["triton"]
        nbytes = sum(k.nbytes for k in costs(shape, "inference"))
        made = row(shape, "inference", "triton, graph", seconds, chip, dtype, gb_per_s=f"{nbytes / seconds / 1e9:.0f}")
        yield made | ({"goal_ms": DECODE_GOALS_MS[T]} if T in DECODE_GOALS_MS else {})


def machine() -> dict[str, str]:
    """What a result must be read with."""
    import triton

    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,clocks.max.sm,power.limit,driver_version",
             "--format=csv,noheader"]
    try:
        clocks = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        clocks = "unknown"
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {"device": name, "clocks": clocks, "torch": torch.__version__, "triton": triton.__version__,
            "date": datetime.date.today().isoformat()}


def write(rows: list[Row], path: Path) -> None:
    """Rows, each with the machine's columns, to a CSV file."""
    about = machine()
    fields = list(dict.fromkeys(name for one in rows for name in (*one, *about)))
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(one | about for one in rows)
    print(path)


def smoke() -> None:
    """What can be checked without a GPU: every contender runs on a tiny shape on the CPU and agrees."""
    setup = Setup(Shape("smoke", 24, 32, 16, 4, 2), torch.float32, "cpu")
    found = setup.contenders()
    truth = found["torch"]().detach()
    for name, run in found.items():
        assert distance(run, truth) < 1e-5, name
        for which in PASSES:
            step(setup, run, which)()
    print(f"no GPU: nothing was timed; agree on a CPU: {', '.join(found)}")


def on_gpu(options: argparse.Namespace, say: Callable[[str], object] = print) -> tuple[list[Row], list[str]]:
    """-> the rows, and what failed or was left out."""
    from moeffn.cli.check import run_checks
    from moeffn.kernels.timing import alternate

    end = time.perf_counter() + 60 * options.minutes
    missed = [f"check: {name}" for name in run_checks("cuda", "triton", 0, say)] if options.check else []
    chip, rows = device_of(torch.cuda.get_device_name()), []

    def timer(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
        return alternate(calls, options.seconds) if calls else {}

    chosen = [s for s in SHAPES if s.name in options.shapes.split(",")]
    if options.smoke:
        chosen = [Shape("smoke", 512, 256, 128, 8, 2)]
    parts = [(s.name, bench(s, options.dtype, "cuda", timer, chip)) for s in chosen]
    for name, part in [*parts[:1], ("decode", decode_rows(options.dtype, timer, chip)), *parts[1:]]:
        left = end - time.perf_counter()
        say(f"{name}: {max(0.0, left):.0f} s left of {60 * options.minutes:.0f}")
        if left < 0:
            missed.append(f"{name}: the {options.minutes:g} minutes are over")
            continue
        for one in part:
            rows.append(one)
            say("  ".join(f"{n}={v}" for n, v in one.items() if n not in ("D", "F", "E", "K") and v != ""))
        torch.cuda.empty_cache()
    return rows, missed


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(s.name for s in SHAPES))
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--seconds", type=float, default=0.3, help="per contender and pass")
    parser.add_argument("--minutes", type=float, default=8.0, help="for everything")
    parser.add_argument("--check", action="store_true", help="the checks of `moeffn check` first")
    parser.add_argument("--smoke", action="store_true", help="one small shape; without a GPU, agreement on the CPU")
    options = parser.parse_args(argv)
    unknown = set(options.shapes.split(",")) - {s.name for s in SHAPES}
    if unknown:
        parser.error(f"--shapes: expected some of {', '.join(s.name for s in SHAPES)}, got {', '.join(unknown)}")
    if not torch.cuda.is_available():
        if options.smoke:
            smoke()
            return 0
        print("bench_gpu: no CUDA or ROCm device is here; nothing was timed", file=sys.stderr)
        return 2
    rows, missed = on_gpu(options)
    if rows and not options.smoke:
        write(rows, RESULTS / f"bench_gpu-{torch.cuda.get_device_name().replace(' ', '-').lower()}.csv")
    for line in missed:
        print(f"not done or failed: {line}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
