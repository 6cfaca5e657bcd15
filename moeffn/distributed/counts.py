"""What every rank announces before a hop: sizes that must agree, rows for each rank, slots for each place. Verified."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import MismatchError, name_ranks
from .transport import Transport

_AGREED = ("d_model", "top_k", "dtype", "chunks")  # must be the same on every rank
_HEADER = (*_AGREED, "rank", "tokens")


@dataclass(frozen=True)
class Counts:
    """The announcements of all G ranks of a group, on the host.

    tokens (G,); rows (G, G): rows[s, d] go from s to d; slots (G, P): slots of rank s for each place;
    owner (P,): the rank of the group that holds each place; nbytes: what announcing them sent from this rank.
    """

    rank: int
    tokens: Tensor
    rows: Tensor
    slots: Tensor
    owner: Tensor
    nbytes: int = 0

    @property
    def send(self) -> tuple[int, ...]:
        return tuple(self.rows[self.rank].tolist())

    @property
    def recv(self) -> tuple[int, ...]:
        return tuple(self.rows[:, self.rank].tolist())

    @property
    def slots_between(self) -> Tensor:
        """(G, G): slots of rank s that rank d computes."""
        G = self.rows.shape[0]
        return torch.zeros(G, G, dtype=torch.int64, device="cpu").index_add_(1, self.owner, self.slots)

    def verify_sums(self, K: int, dedup: str) -> None:
        """Rows and slots that each rank announces must be possible together, for its tokens and this dedup level."""
        between = self.slots_between
        limit = self.tokens * K
        if dedup == "none":
            good = self.rows == between
        elif dedup == "rank":
            good = (self.rows <= between) & (between <= self.rows * K) & (self.rows <= self.tokens[:, None])
        else:
            good = self.rows == self.tokens[:, None]
        wrong = ~good.all(1) | (self.slots.sum(1) > limit) | (self.slots < 0).any(1)
        if bool(wrong.any()):
            blamed = wrong.nonzero().squeeze(1).tolist()
            raise MismatchError(
                f"counts: {name_ranks(blamed)} announced impossible sums: {self.rows[blamed].sum(1).tolist()} rows, "
                f"{self.slots[blamed].sum(1).tolist()} slots for {self.tokens[blamed].tolist()} tokens of {K} slots",
                blamed)

    def verify_ids(self, ids: Tensor, recv: Sequence[int]) -> None:
        """ids (M, C) that came: from each source, for each place of this rank, as many slots as it announced."""
        G, P = self.slots.shape
        ids = ids.cpu().long()
        ranks, times = torch.arange(G, device="cpu"), torch.tensor(recv, device="cpu")
        source = torch.repeat_interleave(ranks, times, output_size=ids.shape[0])
        beyond = (ids >= P).any(1)
        spread = torch.where((ids >= 0) & ~beyond[:, None], ids + source[:, None] * P, G * P)
        found = torch.bincount(spread.reshape(-1), minlength=G * P + 1)[: G * P].view(G, P)
        announced = torch.where(self.owner == self.rank, self.slots, 0)
        wrong = (found != announced).any(1)
        wrong[source[beyond]] = True
        if bool(wrong.any()):
            blamed = wrong.nonzero().squeeze(1).tolist()
            detail = "; ".join(f"rank {r} announced {int(announced[r].sum())} slots, {int(found[r].sum())} came"
                               for r in blamed)
            raise MismatchError(f"dispatch: {name_ranks(blamed)} sent other slots than announced: {detail}", blamed)


def announce(transport: Transport, *, T: int, K: int, D: int, dtype: torch.dtype, rows: Tensor, per_place: Tensor,
             owner: Tensor, chunks: int = 1) -> Counts:
    """Exchange the announcements: rows (X,) and per_place (P,) of this rank -> those of all, rows (G, X) being what the
    caller makes of them. owner (P,) on the host; chunks: in how many parts the caller's tokens travel.

    One exchange and one device-to-host copy. Raises MismatchError naming the ranks whose sizes differ from the others'.
    """
    X = rows.shape[0]
    head = _head(D, K, code(dtype), chunks, transport.rank, rows.device)
    tokens = torch.full((1,), T, dtype=torch.int32, device=rows.device)
    mine = torch.cat([head, tokens, rows.to(torch.int32), per_place.to(torch.int32)])
    table = gather_ints(transport, mine, "counts")
    check_agreement(table, _AGREED, "counts")
    told = table[:, len(_AGREED)].tolist()
    wrong = [r for r, v in enumerate(told) if v != r]
    if wrong:
        raise MismatchError(f"counts: what came from {name_ranks(wrong)} is not an announcement of that rank", wrong)
    body = table[:, len(_HEADER) :].long()
    return Counts(transport.rank, table[:, len(_HEADER) - 1].long(), body[:, :X], body[:, X:], owner,
                  4 * table.shape[1] * (transport.size - 1))


@functools.lru_cache(maxsize=256)
def _head(D: int, K: int, dtype: int, chunks: int, rank: int, device: torch.device) -> Tensor:
    """What is the same in every call, on the device: copied there once."""
    return torch.tensor([D, K, dtype, chunks, rank], dtype=torch.int32, device=device)


def gather_ints(transport: Transport, mine: Tensor, what: str) -> Tensor:
    """mine (n,) int32, n the same on every rank -> (G, n) int32 on the host: one exchange, one copy to the host."""
    G = transport.size
    sent = mine.view(torch.uint8)[None].expand(G, -1).contiguous()
    came = transport.start(sent, [1] * G, [1] * G, what).wait()
    return came.cpu().view(torch.int32).view(G, -1)


def code(value: object) -> int:
    """A number that stands for a value in an announcement: equal values, equal numbers."""
    return zlib.crc32(str(value).encode()) & 0x7FFFFFFF


def check_agreement(table: Tensor, names: Sequence[str], what: str) -> None:
    """table (G, ≥ len(names)): raise MismatchError naming the ranks that differ from the most frequent value."""
    for column, name in enumerate(names):
        values = table[:, column].tolist()
        usual = max(values, key=lambda v: (values.count(v), -values.index(v)))
        other = [r for r, v in enumerate(values) if v != usual]
        if other:
            seen = ", ".join(f"rank {r} has {values[r]}" for r in other)
            raise MismatchError(f"{what}: {name_ranks(other)} disagree on {name}: {seen}, the others {usual}", other)
