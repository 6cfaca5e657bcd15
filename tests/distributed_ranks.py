"""Runs a file of cases on W ranks, one spawn for all of them, and collects what each case said on each rank.

The ranks join over NCCL, each on a GPU of its own, where there are W GPUs, else over gloo on the CPU; the cases are the
same. MOEFFN_TEST_BACKEND=gloo or nccl decides otherwise.

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
from typing import TypeVar

import torch

Case = Callable[[], None]
Method = TypeVar("Method", bound=Callable[..., None])


def only_on(*sizes: int) -> Callable[[Method], Method]:
    """A case that needs one of these numbers of ranks; the others report it as skipped."""
    def mark(case: Method) -> Method:
        case.sizes = sizes  # type: ignore[attr-defined]
        return case

    return mark


def runs_on(case: Callable[..., None], W: int) -> bool:
    return W in getattr(case, "sizes", (W,))


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


def backend_for(W: int) -> str:
    """The backend of W ranks on this machine: "nccl" or "gloo"."""
    asked = os.environ.get("MOEFFN_TEST_BACKEND")
    if asked not in (None, "nccl", "gloo"):
        raise ValueError(f"MOEFFN_TEST_BACKEND: expected nccl or gloo, got {asked!r}")
    return asked or ("nccl" if torch.cuda.device_count() >= W else "gloo")


def join(W: int, rank: int, folder: Path, name: str, *, backend: str, timeout: float = 20.0) -> torch.device:
    """A group of W processes that meet at a file: no port can be taken, any rank may die. Returns this rank's device.

    NCCL gets more time: its first collective builds the communicators.
    """
    torch.set_num_threads(1)
    device, options = torch.device("cpu"), {}
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        timeout, options = 3 * timeout, {"device_id": device}
    torch.distributed.init_process_group(backend, init_method=f"file://{folder / name}", rank=rank, world_size=W,
                                         timeout=timedelta(seconds=timeout), **options)
    return device


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
