"""Shared by all tests: two threads, deterministic seeds, no global state left behind, long jobs beside them."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import background
import pytest

# A thread that waits sleeps: spinning, it takes the core that the thread it waits for shares with a job (five times the
# time of test_native_backward.py, measured beside one busy process). Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

# Modules of torch and transformers are so many objects that looking for cycles among them after every 700 new ones
# takes about a fifteenth of the accounting tests' time (17.8 s to 16.6 s at equal speed of the machine).
gc.set_threshold(50_000)

DATA = Path(__file__).parent / "data"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "job(*calls, seconds): needs what `background` makes of these calls, each about "
                                       "so many seconds of one core's time")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that wait for jobs are the last, those of the longest jobs before the others."""
    def order(item: pytest.Item) -> tuple[bool, int]:
        mark = item.get_closest_marker("job")
        return mark is not None, -mark.kwargs["seconds"] if mark else 0

    items.sort(key=order)


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        background.begin(call for item in session.items for mark in item.iter_markers("job") for call in mark.args)


def pytest_unconfigure() -> None:
    background.end()


@pytest.fixture(autouse=True)
def _quiet_globals() -> Iterator[None]:
    """A fixed seed, and settings that a test changed put back."""
    torch.manual_seed(0)
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    yield
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)


@pytest.fixture
def data_dir() -> Path:
    """tests/data."""
    return DATA


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For ranks that are threads of one process: none starts a pool, and all run on one core. They hold Python's lock
    in turn; waking a thread on another core at each turn more than doubles the time."""
    torch.set_num_threads(1)
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    yield
    os.sched_setaffinity(0, cores)
