"""`moeffn check --ep`, started by torchrun as a user starts it. (`bench --ep`: see `distributed_commands`.)"""

from __future__ import annotations

import os
import subprocess
import sys


def test_check_compares_every_dispatcher_with_one_process():
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
           "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
                           "moeffn", "check", "--ep"], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if "largest relative error" in line]
    assert [line.split("  ")[0] for line in lines] == ["all_to_all, dedup rank", "all_to_all, dedup none", "all_gather"]
    assert all(line.endswith("ok") for line in lines), lines
