"""Work in processes of its own that goes on beside the tests, at low priority: it takes what they leave of the cores.

A test that needs such a job is marked with it, `@pytest.mark.job(call, seconds=…)`, and asks for `result(call)`.
`conftest.py` begins the jobs with the first test, the longest first, and lets the tests that wait for them be the last.
A job runs its commands with `run`, so that they end with the session.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")
HERE = Path(__file__).parent
_pool = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
_begun: dict[Callable[[], object], Future] = {}
_processes: set[subprocess.Popen] = set()


def begin(calls: Iterable[Callable[[], object]]) -> None:
    """Each once, as many together as there are cores, in this order."""
    _begun.update({call: _pool.submit(call) for call in dict.fromkeys(calls)})


def result(call: Callable[[], Result]) -> Result:
    """What the job returned, once it is done. Raises what it raised."""
    return _begun[call].result()


def end() -> None:
    """Kill what still runs: the session is over."""
    _pool.shutdown(wait=False, cancel_futures=True)
    for process in list(_processes):
        process.kill()


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command at low priority, its output and errors together; a package is the one that these tests import."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]), **options.pop("env", {})}
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, **options)
    _processes.add(process)
    os.setpriority(os.PRIO_PROCESS, process.pid, 10)
    try:
        output = process.communicate()[0]
    finally:
        _processes.discard(process)
    return subprocess.CompletedProcess(command, process.returncode, output)
