"""`moeffn check` on a CPU: its checks pass on a right backend, fail on a wrong one, and refuse without a GPU."""

from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from moeffn import backends
from moeffn.cli import check, check_device

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run `moeffn check --device cuda`")


def test_every_cpu_check_passes_with_the_torch_backend():
    lines = []
    assert check.run_checks("cpu", "torch", 0, lines.append) == [], "\n".join(lines)
    assert len(lines) == len(check.CHECKS) + 2


@pytest.mark.parametrize("name", ["error budget", "decoding", "determinism"])
def test_a_wrong_backend_is_found(name, monkeypatch):
    """A forward that is off by a percent, differently each time."""
    backend = backends.get("torch")
    forward, calls = type(backend).forward, []

    def wrong(self, x, *args, **kwargs):
        y, h = forward(self, x, *args, **kwargs)
        calls.append(0)
        return y * (1 + 0.01 * len(calls)), h

    class Wrong(type(backend)):
        forward = wrong

    monkeypatch.setitem(backends.BACKENDS, "native", ("torch", "TorchBackend"))
    backends.get.cache_clear()
    backends.available.cache_clear()
    monkeypatch.setattr(backends.get("native"), "__class__", Wrong)
    monkeypatch.setattr("moeffn.functional.plain_moe", lambda *a: None)
    try:
        with pytest.raises(AssertionError, match=r"error|differs"):
            check.CHECKS[name](check.Target(torch.device("cpu"), "native", 0))
    finally:
        backends.get.cache_clear()
        backends.available.cache_clear()


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_the_check_of_big_tensors_is_right_about_small_ones(backend):
    target = check.Target(torch.device("cpu"), backends.resolve(backend, torch.device("cpu"), torch.float32), 0)
    for sizes in ({"E": 9, "others": 0}, {"E": 4, "others": 50}):
        assert check_device.last_expert(target, F=24, D=16, **sizes) == (sizes["E"] * 48 * 16,
                                                                         (sizes["others"] + 64) * 48)


def test_golden_families_are_compared_where_the_recordings_are(monkeypatch):
    target = check.Target(torch.device("cpu"), "torch", 0)
    said = check.golden_families(target)
    checkout = (Path(check.__file__).parents[2] / "tests" / "data" / "golden").is_dir()
    assert said.startswith(f"{len(check.GOLDEN)} families" if checkout else "skipped: needs")


@without_gpu
def test_without_a_gpu_it_refuses():
    app = typer.Typer()
    check.register(app)
    result = CliRunner().invoke(app, ["--device", "cuda"])
    assert isinstance(result.exception, ValueError) and "nothing was checked" in str(result.exception)
