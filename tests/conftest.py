"""Shared by all tests: two threads, deterministic seeds, no global state left behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

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
