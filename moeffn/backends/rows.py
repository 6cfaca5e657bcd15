"""Rows that came from other ranks, summed for each token by the C++ module: one pass where torch makes many. CPUs."""

from __future__ import annotations

import torch
from torch import Tensor

from .memory import _native

_CODES = {torch.float32: 0, torch.bfloat16: 1}


def can_sum(rows: Tensor, first: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether `sum_rows` takes these: on a CPU with the compiled module, float32 or bfloat16 throughout."""
    return (_native is not None and rows.device.type == "cpu" and rows.dtype == dtype and dtype in _CODES
            and rows.stride(1) == 1 and (first is None or first.dtype == dtype))


def sum_rows(rows: Tensor, rows_of_token: Tensor, first: Tensor | None) -> Tensor:
    """rows (S, D) with any stride between rows, rows_of_token (T, R) int32, -1: none, first (T, D) -> (T, D): first,
    then the rows in order, in float32, rounded once. Raises ValueError for a row beyond S."""
    (T, R), (S, D) = rows_of_token.shape, rows.shape
    out = rows.new_empty((T, D))
    index = rows_of_token.contiguous()
    if first is not None and first.stride(1) != 1:
        first = first.contiguous()
    begin = (0, 0) if first is None else (first.data_ptr(), first.stride(0) * first.element_size())
    _native.sum_rows(_CODES[rows.dtype], T, R, D, rows.data_ptr(), S, rows.stride(0) * rows.element_size(),  # type: ignore[union-attr]
                     index.data_ptr(), *begin, out.data_ptr())
    return out
