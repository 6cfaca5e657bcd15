"""What can go wrong between ranks, each with the ranks it names."""

from __future__ import annotations

from collections.abc import Sequence


class ExchangeError(RuntimeError):
    """An exchange failed. `ranks`: the ranks of the group that are to blame, as far as this rank can tell.

    The group is unusable after it (gloo closes its connections, NCCL aborts): destroy it and start again from a
    checkpoint.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class RankAbsentError(ExchangeError):
    """Ranks that died, are late, or are in another exchange when the deadline passed."""


class MismatchError(ExchangeError):
    """Ranks whose arguments, counts or rows do not agree with what was announced."""


def name_ranks(ranks: Sequence[int]) -> str:
    """[1] -> "rank 1"; [1, 3] -> "ranks 1, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(str(r) for r in ranks)}"
