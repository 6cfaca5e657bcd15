"""Runs a file of cases on W ranks, one spawn for all of them, and collects what each case said on each rank.

A launcher imports the cases once and forks the ranks, before any thread or device is used. The ranks join over NCCL,
each on a GPU of its own, where there are W GPUs, else over gloo on the CPU; the cases are the same.
MOEFFN_TEST_BACKEND=gloo or nccl decides otherwise.

A rank writes one JSON line a case, so that one that dies or hangs loses only what it did not finish.
"""

from __future__ import annotations

import json
import os
import signal
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


def run_ranks(worker: str, runs: dict[int, str], folder: Path, *, deadline: float) -> dict[int, dict[str, list[str]]]:
    """Run tests/`worker` for each {W: suite}, one after the other, on W ranks in folder/W -> for each W and case the
    verdict of each rank: "ok", a traceback, or "no result". `deadline` seconds for each."""
    here = Path(__file__).parent
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(here), *sys.path])}
    asked = [f"{W}:{suite}" for W, suite in runs.items()]
    subprocess.run([sys.executable, str(here / worker), str(folder), str(deadline), *asked], env=env, check=True)
    return {W: verdicts(folder / str(W), W) for W in runs}


def verdicts(folder: Path, W: int) -> dict[str, list[str]]:
    said: list[dict[str, str]] = []
    for r in range(W):
        path = folder / f"result{r}"
        lines = path.read_text().splitlines() if path.exists() else []
        said.append(dict(json.loads(line) for line in lines))
    names = {name for one in said for name in one}
    tails = [(folder / f"log{r}").read_text()[-800:] for r in range(W)]
    return {name: [one.get(name, f"no result; log: {tails[r]}") for r, one in enumerate(said)] for name in names}


def launch(program: Callable[[str, int, Path, int], None]) -> None:
    """The launcher: program(suite, W, folder, rank) in a fork a rank; what is alive at the deadline is killed."""
    folder, deadline = Path(sys.argv[1]), float(sys.argv[2])
    for size, suite in (asked.split(":") for asked in sys.argv[3:]):
        W, place = int(size), folder / size
        place.mkdir(parents=True)
        ranks = {_fork(program, suite, W, place, rank) for rank in range(W)}
        end = time.monotonic() + deadline
        while ranks and time.monotonic() < end:
            ranks -= {pid for pid in ranks if os.waitpid(pid, os.WNOHANG)[0]}
            time.sleep(0.02)
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _fork(program: Callable[[str, int, Path, int], None], suite: str, W: int, place: Path, rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    log = os.open(place / f"log{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        program(suite, W, place, rank)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # without gloo's teardown, which may abort a process whose work is done


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
