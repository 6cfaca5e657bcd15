"""csrc/fuzz.cpp under AddressSanitizer and UndefinedBehaviorSanitizer: 2,000 random problems, every instruction set."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "csrc"


def test_fuzz_is_clean_under_the_sanitizers(tmp_path):
    if shutil.which("cmake") is None or (shutil.which("g++") or shutil.which("c++")) is None:
        pytest.skip("needs cmake and a C++ compiler")

    def run(*command, **env):
        done = subprocess.run(command, cwd=tmp_path, env={**os.environ, **env}, capture_output=True, text=True)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return done.stdout

    run("cmake", "-DMOEFFN_SANITIZE=ON", str(SOURCE))
    run("cmake", "--build", ".", "--parallel", "2")
    out = run("./moeffn_fuzz", "2000", OMP_NUM_THREADS="2", ASAN_OPTIONS="detect_leaks=1",
              UBSAN_OPTIONS="print_stacktrace=1")
    assert out.startswith("2000 problems")
