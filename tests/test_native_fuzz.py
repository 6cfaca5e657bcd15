"""csrc/fuzz.cpp under AddressSanitizer and UndefinedBehaviorSanitizer: 2,000 random problems, every instruction set."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import background
import pytest

SOURCE = Path(__file__).parents[1] / "csrc"


def fuzz() -> str:
    """What the driver prints, built and run; with the output of what failed, an AssertionError."""
    if shutil.which("cmake") is None or (shutil.which("g++") or shutil.which("c++")) is None:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        def run(*command: str, **env: str) -> str:
            done = background.run(*command, cwd=folder, env=env)
            assert done.returncode == 0, done.stdout[-4000:]
            return done.stdout

        run("cmake", "-DMOEFFN_SANITIZE=ON", str(SOURCE))
        run("cmake", "--build", ".", "--parallel", "2")
        return run("./moeffn_fuzz", "2000", OMP_NUM_THREADS="2", OMP_WAIT_POLICY="passive",
                   ASAN_OPTIONS="detect_leaks=1", UBSAN_OPTIONS="print_stacktrace=1")


@pytest.mark.job(fuzz, seconds=230)
def test_fuzz_is_clean_under_the_sanitizers():
    out = background.result(fuzz) or pytest.skip("needs cmake and a C++ compiler")
    assert out.startswith("2000 problems")
