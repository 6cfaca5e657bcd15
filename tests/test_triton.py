"""The triton backend without a GPU: what it refuses and why, what it launches, and the interpreter's test files.

The interpreter is chosen when triton is imported, so its files run in processes of their own with TRITON_INTERPRET=1.
"""

import functools
import re
import subprocess
import sys
from pathlib import Path

import background
import pytest
import torch
from interpreted import INTERPRETING
from problems import make

from moeffn import backends
from moeffn.backends import Grads, Needs
from moeffn.backends.triton import TritonBackend
from moeffn.kernels.launch import recorded
from moeffn.types import ExpertWeights

pytestmark = pytest.mark.skipif(INTERPRETING, reason="this file starts the interpreter's processes")
HERE = Path(__file__).parent
SECONDS = {"layer": 90, "split": 70, "operands": 40, "router": 30, "tuning": 15, "metadata": 15}  # of one core


def interpret(file: Path) -> subprocess.CompletedProcess[str]:
    """Its kernels use one core."""
    return background.run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--durations=5", str(file),
                          cwd=HERE.parent, env={"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})


def runs() -> list:
    calls = {f: functools.partial(interpret, f) for f in sorted(HERE.glob("test_kernels_*.py"))}
    return [pytest.param(call, id=f.name, marks=pytest.mark.job(call, seconds=SECONDS.get(f.stem.split("_")[-1], 10)))
            for f, call in calls.items()]


@pytest.mark.parametrize("run", runs())
def test_under_the_interpreter(run):
    done = background.result(run)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:]
    assert re.search(r"(\d+) passed", done.stdout) and "skipped" not in done.stdout


def test_importing_moeffn_imports_no_triton():
    """Not by itself (torch imports triton with its compiler, so only our own room is looked for after moe_ffn)."""
    code = ("import sys, moeffn; assert 'triton' not in sys.modules; "
            "moeffn.moe_ffn; assert 'moeffn.kernels' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, cwd=HERE.parent)


@pytest.mark.parametrize("device, dtype, reason", [
    ("cpu", torch.float32, "needs a GPU"), ("meta", torch.float32, "not meta"), ("cuda", torch.float64, "float64")])
def test_says_why_it_is_unavailable(device, dtype, reason):
    assert reason in backends.available("triton", torch.device(device), dtype)


def test_asked_for_by_name_on_a_cpu_it_refuses():
    with pytest.raises(ValueError, match=r"backend: .*'triton': needs a GPU"):
        make().to(torch.float32).run(backend="triton")


def launches(needs, bias=True, apply_to="output", into=None, T=64):
    """The kernels that forward and backward launch on meta tensors, by name."""
    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    E, D, F, K = 4, 64, 32, 2
    ew = ExpertWeights(meta(E, 2 * F, D), meta(E, D, F), meta(E, 2 * F) if bias else None, meta(E, D) if bias else None)
    backend, weights = TritonBackend(family="sm90"), meta(T, K, dtype=torch.float32)
    with recorded() as got:
        plan = backend.plan(meta(T, K, dtype=torch.int32), E)
        _, h = backend.forward(meta(T, D), plan, weights, ew, apply_to=apply_to, save=True)
        split = len(got)
        x = dy = meta(T, D)
        grads = backend.backward(dy, x, h, plan, weights, ew, apply_to=apply_to, needs=needs, into=into)
    return [g.name for g in got[:split]], [g.name for g in got[split:]], grads


def test_three_metadata_kernels_and_three_products():
    forward, backward, _ = launches(Needs())
    assert forward == ["place", "schedule", "up", "rows", "combine"]
    assert sorted(backward) == sorted(
        ["schedule", "dh", "dw", "dw", "column_sum", "column_sum", "rows", "combine", "weight_grad"])


@pytest.mark.parametrize("frozen, gone", [
    ("w_in", ["dw"]), ("w_out", ["dw"]), ("b_in", ["column_sum"]), ("b_out", ["column_sum"]),
    ("x", ["rows", "combine"]), ("weights", ["weight_grad"])])
def test_what_needs_no_gradient_launches_nothing(frozen, gone):
    full = launches(Needs())[1]
    _, less, grads = launches(Needs(**{frozen: False}))
    for name in gone:
        full.remove(name)
    assert sorted(less) == sorted(full)
    assert getattr(grads, frozen) is None


def test_no_tokens_launch_only_what_writes_zeros():
    forward, backward, _ = launches(Needs(), T=0)
    assert forward == [] and set(backward) == {"dw", "column_sum"}


def test_gradients_come_in_the_parameters_dtype_or_not_at_all():
    buffer = torch.empty(4, 64, 64, device="meta")
    _, _, grads = launches(Needs(), into=Grads(w_in=buffer))
    assert grads.w_in is None and grads.w_out.dtype == torch.bfloat16 and grads.weights.dtype == torch.float32

