"""`moeffn check --ep` and `bench --ep`, started by torchrun as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

BENCH = """
from moeffn import MoEConfig
from moeffn.distributed.commands import bench
bench("tiny", MoEConfig(d_model=64, d_expert=32, num_experts=8, top_k=2), tokens=[40], dtype="float32")
"""


def torchrun(*arguments: str, W: int = 2) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
           "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(W),
                           *arguments], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_check_compares_every_dispatcher_with_one_process():
    said = torchrun("-m", "moeffn", "check", "--ep").splitlines()
    lines = [line for line in said if "largest relative error" in line]
    assert [line.split("  ")[0] for line in lines] == ["all_to_all, dedup rank", "all_to_all, dedup none", "all_gather"]
    assert all(line.endswith("ok") for line in lines), lines


def test_bench_prints_tokens_bytes_and_times(tmp_path: Path):
    script = tmp_path / "bench.py"
    script.write_text(BENCH)
    said = torchrun(str(script))
    head, columns, *rows = said.splitlines()
    assert head == "tiny: 8 experts on 2 ranks, top 2, d_model 64, float32, gloo"
    for word in ("tok/s/rank", "tok/s", "dispatch", "experts", "combine", "overhead", "MB sent", "by D(G)"):
        assert word in columns
    for row in rows[:3]:
        sent, by_handle = row.split()[-3:-1]
        assert sent == by_handle and float(sent) > 0, row  # counted, and by the routing's own formula
    assert "ranks in this routing, 1.571 by D(G)" in said  # 2 (1 - C(4, 2) / C(8, 2))
    assert "cost model for 40 tokens" in said
