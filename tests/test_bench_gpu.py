"""benchmarks/bench_gpu.py without a GPU: its contenders agree, its rows and file hold what they say, bad arguments."""

import csv
import importlib
import sys
from pathlib import Path

import pytest
import torch

from moeffn.accounting import devices

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run benchmarks/bench_gpu.py")


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module("bench_gpu")
    finally:
        sys.path.remove(str(BENCHMARKS))


def by_name(seconds):
    return lambda calls: {name: seconds for name in calls}


@without_gpu
def test_smoke_compares_the_contenders(bench, capsys):
    assert bench.main(["--smoke"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("torch", "cuBLAS loop", "transformers eager"))


@without_gpu
def test_without_a_gpu_nothing_is_timed(bench, capsys):
    assert bench.main([]) == 2 and "nothing was timed" in capsys.readouterr().err


def test_unknown_shapes_are_refused(bench, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--shapes", "qwen3-30b,huge"])
    assert "got huge" in capsys.readouterr().err


def test_rows_of_a_shape_and_the_file(bench, tmp_path, monkeypatch):
    """Times are given: 2 ms a pass with gradients, 1 ms without; one contender answers wrongly, one does not run."""
    shape = bench.Shape("tiny", 24, 32, 16, 4, 2)
    real = bench.Setup.contenders

    def contenders(setup):
        found = real(setup)
        def broken():
            raise RuntimeError("no such card")
        return found | {"wrong": lambda: 1.1 * found["torch"](), "broken": broken}

    monkeypatch.setattr(bench.Setup, "contenders", contenders)
    times = iter([1e-3, 1e-3, 2e-3])
    rows = list(bench.bench(shape, "fp32", "cpu", lambda calls: by_name(next(times))(calls), None))
    assert {r["pass"] for r in rows} == {"inference", "forward", "forward+backward", "backward"}
    mine = {r["pass"]: r for r in rows if r["contender"] == "torch"}
    flops = 24 * 2 * 32 * 16 / 1e12
    assert [mine[p]["ms"] for p in ("inference", "backward", "forward+backward")] == ["1.0000", "1.0000", "2.0000"]
    assert mine["backward"]["tflops"] == f"{12 * flops / 1e-3:.1f}"
    words = {r["contender"]: r["ms"] for r in rows if r["pass"] == "forward"}
    assert (words["wrong"], words["broken"]) == ("wrong answer", "does not run")
    bench.write(rows, tmp_path / "out" / "results.csv")
    with (tmp_path / "out" / "results.csv").open() as file:
        read = list(csv.DictReader(file))
    assert len(read) == len(rows) and {"device", "clocks", "torch", "triton", "date"} <= read[0].keys()


def test_percent_of_the_bound_and_goals(bench):
    shape, chip = bench.SHAPES[0], devices()["H200"]
    goal = bench.GOALS["qwen3-30b", "forward"]
    at_goal = shape.flops(False) / goal / 1e12
    made = bench.row(shape, "forward", "triton", at_goal, chip, "bf16")
    assert made["tflops"] == f"{goal:.1f}" and made["goal_tflops"] == goal
    bound = sum(k.seconds(chip) for k in bench.costs(shape, "forward"))
    assert made["percent_of_bound"] == f"{100 * bound / at_goal:.1f}" and bound < at_goal
    assert "bound_ms" not in bench.row(shape, "forward", "triton", at_goal, chip, "fp32")


def test_every_goal_is_below_the_devices_bound(bench):
    """A goal above what memory and arithmetic allow would be a slip of the table."""
    shapes, chip = {s.name: s for s in bench.SHAPES}, devices()["H200"]
    assert {name for name, _ in bench.GOALS} == set(shapes) and len(bench.GOALS) == 12
    for (name, which), goal in bench.GOALS.items():
        flops = {"forward": 6, "backward": 12, "forward+backward": 18}[which]
        shape = shapes[name]
        seconds = flops * shape.T * shape.K * shape.D * shape.F / goal / 1e12
        assert seconds > sum(k.seconds(chip) for k in bench.costs(shape, which)), (name, which)
    for T, goal_ms in bench.DECODE_GOALS_MS.items():
        shape = bench.Shape("decode", T, 2048, 768, 128, 8)
        assert goal_ms / 1e3 > sum(k.seconds(chip) for k in bench.costs(shape, "inference")), T
