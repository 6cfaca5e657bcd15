"""Runs a file of cases on W gloo ranks, one spawn for all of them, and collects what each case said on each rank.

A worker writes one JSON line a case, so that a rank that dies or hangs loses only what it did not finish. The exit code
of a worker is not looked at: gloo's teardown may abort a process whose work is done.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch

Case = Callable[[], None]


def run_ranks(worker: str, W: int, suite: str, folder: Path, *, deadline: float) -> dict[str, list[str]]:
    """Run tests/`worker` on W ranks -> for each case the verdict of each rank: "ok", a traceback, or "no result"."""
    folder.mkdir(parents=True, exist_ok=True)
    here = Path(__file__).parent
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(here), *sys.path])}
    command = [sys.executable, str(here / worker), suite, str(W), str(folder)]
    logs = [open(folder / f"log{r}", "w") for r in range(W)]
    workers = [subprocess.Popen([*command, str(r)], env=env, stdout=logs[r], stderr=logs[r]) for r in range(W)]
    end = time.monotonic() + deadline
    try:
        for p in workers:
            p.wait(timeout=max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for p in workers:
            if p.poll() is None:
                p.kill()
                p.wait()
        for log in logs:
            log.close()
    said: list[dict[str, str]] = []
    for r in range(W):
        path = folder / f"result{r}"
        lines = path.read_text().splitlines() if path.exists() else []
        said.append(dict(json.loads(line) for line in lines))
    names = {name for one in said for name in one}
    tails = [(folder / f"log{r}").read_text()[-800:] for r in range(W)]
    return {name: [one.get(name, f"no result; log: {tails[r]}") for r, one in enumerate(said)] for name in names}


def join(W: int, rank: int, folder: Path, name: str, timeout: float = 20.0) -> None:
    """A gloo group of W processes that meet at a file, so that no port can be taken and any rank may die."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder / name}", rank=rank, world_size=W,
                                         timeout=timedelta(seconds=timeout))


def run_cases(cases: dict[str, Case], rank: int, folder: Path) -> None:
    """Run the cases in order and write each verdict at once; the first failure ends the run (the group may be dead)."""
    with open(folder / f"result{rank}", "a") as out:
        for name, case in cases.items():
            try:
                torch.manual_seed(0)
                case()
                verdict = "ok"
            except BaseException:  # checkpoint errors are not Exceptions
                verdict = traceback.format_exc()
            out.write(json.dumps([name, verdict]) + "\n")
            out.flush()
            if verdict != "ok":
                break
