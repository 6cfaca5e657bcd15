"""Shared by all tests: two threads, deterministic seeds, no global state left behind."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Modules of torch and transformers are so many objects that looking for cycles among them after every 700 new ones
# takes about a fifteenth of the accounting tests' time (17.8 s to 16.6 s at equal speed of the machine).
gc.set_threshold(50_000)

DATA = Path(__file__).parent / "data"


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
def one_thread():
    """Ranks that are threads of one process would otherwise each start a pool."""
    torch.set_num_threads(1)
