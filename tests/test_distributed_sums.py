"""Sums of the rows that came home: the compiled loop and torch's give the same bits, and read nothing else."""

from __future__ import annotations

import random

import pytest
import torch

from moeffn.backends import rows as compiled
from moeffn.distributed.flight import sum_rows
from moeffn.distributed.payload import RowFormat

needs_module = pytest.mark.skipif(compiled._native is None, reason="the compiled module is not built")


def problem(seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rows in a buffer with tags between them, some of NaN that nobody asks for; tokens with missing rows, and none."""
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    S, T, R, D = rng.randint(1, 40), rng.choice([0, 1, 7, 33]), rng.randint(1, 9), rng.choice([1, 3, 16, 511, 512, 700])
    fmt = RowFormat.vector(D, dtype)
    buffer = torch.randint(0, 256, (S, fmt.row_bytes), generator=g, dtype=torch.uint8)
    rows = fmt.column(buffer, 0)
    rows.copy_(torch.randn(S, D, generator=g) * 3)
    index = torch.randint(-1, S, (T, R), generator=g, dtype=torch.int32)
    index[index == 0] = -1
    rows[0] = torch.nan
    strided = torch.randn(T, 2 * D, generator=g).to(dtype)[:, :: rng.choice([1, 2])][:, :D]
    return rows, index, strided if rng.random() < 0.5 else None


@needs_module
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_compiled_sums_are_those_of_torch(dtype: torch.dtype, threads: int, monkeypatch):
    torch.set_num_threads(threads)
    for seed in range(60):
        rows, index, first = problem(seed, dtype)
        assert compiled.can_sum(rows, first, dtype)
        got = sum_rows(rows, index, first, dtype, may_read=True)
        with monkeypatch.context() as patch:
            patch.setattr(compiled, "can_sum", lambda *_: False)
            for may_read in (True, False):
                want = sum_rows(rows, index, first, dtype, may_read=may_read)
                assert got.shape == want.shape and torch.equal(got, want), seed
        assert bool(got.isfinite().all())


@needs_module
def test_values_that_round_and_do_not():
    """bfloat16 ties go to even, infinities and NaN stay."""
    rows = torch.tensor([[1.0, 1.0, torch.inf, torch.nan], [2**-8, 3 * 2**-8, 1.0, 1.0]], dtype=torch.bfloat16)
    index = torch.tensor([[0, 1]], dtype=torch.int32)
    got = sum_rows(rows, index, None, torch.bfloat16, may_read=True)[0]
    assert got[:3].tolist() == [1.0, 1.0 + 2**-6, torch.inf] and bool(got[3].isnan())


@needs_module
def test_rows_beyond_the_buffer_are_refused():
    with pytest.raises(ValueError, match="rows_of_token: expected values below 2, got 2"):
        compiled.sum_rows(torch.ones(2, 3), torch.tensor([[0, 2]], dtype=torch.int32), None)


def test_what_the_compiled_loop_does_not_take():
    rows = torch.ones(2, 4)
    assert not compiled.can_sum(rows.double(), None, torch.float64)
    assert not compiled.can_sum(rows.half(), None, torch.float16)
    assert not compiled.can_sum(rows[:, ::2], None, torch.float32)
    assert not compiled.can_sum(rows, rows.bfloat16(), torch.float32)
    assert not compiled.can_sum(torch.ones(2, 4, device="meta"), None, torch.float32)
