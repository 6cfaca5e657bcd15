"""One byte row per token on the wire: the vector, then ids, weights and a tag, each on an 8-byte boundary.

    | x: D values | ids: C int32 | weights: C values | tag: int32 |  padded to a multiple of 16 bytes

Bytes carry any dtype (gloo refuses float8, and int32 beside bfloat16 needs two collectives otherwise). The tag says
which row of which exchange this is, so a row that was never written, or that belongs elsewhere, is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..backends.memory import buffer
from .errors import MismatchError, name_ranks


@dataclass(frozen=True)
class RowFormat:
    """Columns of a row, as (width, dtype); the tag comes last."""

    columns: tuple[tuple[int, torch.dtype], ...]

    @staticmethod
    def token(D: int, dtype: torch.dtype, C: int, weight_dtype: torch.dtype) -> RowFormat:
        """A token on its way to its experts: x (D), ids (C) and weights (C)."""
        return RowFormat(((D, dtype), (C, torch.int32), (C, weight_dtype)))

    @staticmethod
    def gradient(D: int, dtype: torch.dtype, C: int, weight_dtype: torch.dtype) -> RowFormat:
        """Its gradient on the way back: dx (D) and d weights (C)."""
        return RowFormat(((D, dtype), (C, weight_dtype)))

    @staticmethod
    def vector(D: int, dtype: torch.dtype) -> RowFormat:
        """A result on the way home, or its gradient on the way out."""
        return RowFormat(((D, dtype),))

    @property
    def offsets(self) -> tuple[int, ...]:
        """Byte at which each column begins, and the tag's as the last."""
        found, at = [], 0
        for width, dtype in self.columns:
            found.append(at)
            at = -(-(at + width * dtype.itemsize) // 8) * 8
        return (*found, at)

    @property
    def row_bytes(self) -> int:
        return -(-(self.offsets[-1] + 4) // 16) * 16

    def empty(self, rows: int, device: torch.device) -> Tensor:
        return buffer((rows, self.row_bytes), torch.uint8, device)

    def column(self, buffer: Tensor, index: int) -> Tensor:
        """Column `index` of the buffer as a strided view (rows, width); the tag is column -1, (rows, 1) int32."""
        at = self.offsets[index]
        width, dtype = (1, torch.int32) if index == -1 else self.columns[index]
        step = at // dtype.itemsize
        return buffer.view(dtype)[:, step : step + width]


def tags(exchange: int, sources: Sequence[int], splits: Sequence[int], device: torch.device) -> Tensor:
    """(sum(splits), 1) int32: the tag of row i from `sources[g]`, for segments of `splits[g]` rows."""
    total = sum(splits)
    lengths = torch.tensor(splits, device="cpu")
    base = torch.tensor([(exchange * 1_000_003 + s * 65_537 + 12_345) % 1_000_000_007 for s in sources], device="cpu")
    first = lengths.cumsum(0) - lengths
    values = torch.arange(total, device="cpu") + (base - first).repeat_interleave(lengths, output_size=total)
    return values.to(torch.int32).to(device)[:, None]


def verify_tags(found: Tensor, exchange: int, recv: Sequence[int], what: str) -> None:
    """Raise MismatchError naming the ranks whose rows did not arrive as announced. Reads from the device."""
    expected = tags(exchange, range(len(recv)), recv, found.device)
    wrong = (found != expected).squeeze(1)
    if not bool(wrong.any()):
        return
    per_rank = [int(part.sum()) for part in wrong.split(list(recv))]
    blamed = [r for r, n in enumerate(per_rank) if n]
    detail = "; ".join(f"rank {r} announced {recv[r]} rows, {recv[r] - per_rank[r]} came as announced" for r in blamed)
    raise MismatchError(f"{what} (exchange {exchange}): {name_ranks(blamed)} sent other rows than announced: {detail}",
                        blamed)
