"""Who is missing: after an exchange fails, the survivors tell each other through the group's store where they stopped.

Nothing is written while all goes well. A rank whose exchange fails writes its state, then waits until every other rank
has written or a grace period has passed; those that stay silent died, hang, or never came.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from .errors import ExchangeError, MismatchError, RankAbsentError, name_ranks

if TYPE_CHECKING:
    from .transport import GroupTransport

_GRACE = 2.0  # seconds beyond the deadline that a survivor may need to notice that its own exchange failed
_POLL = 0.05


def _store(transport: GroupTransport) -> dist.Store:
    return dist.distributed_c10d._get_process_group_store(transport.group)


def _key(rank: int) -> str:
    return f"moeffn/stopped/{rank}"


def report(transport: GroupTransport, state: str) -> None:
    """Write where this rank stopped; a store that is gone is not an error here."""
    try:
        _store(transport).set(_key(transport.rank), state)
    except Exception:  # the store lives in a rank or an agent that may be the dead one; the caller raises anyway
        return


def diagnose(transport: GroupTransport, error: Exception, what: str) -> ExchangeError:
    """The named error for an exchange that failed with `error`. Waits at most deadline + 2 seconds."""
    here = f"{what} (exchange {transport.exchanges})"
    report(transport, here)
    patience = (transport.deadline or 0.0) + _GRACE
    others = [r for r in range(transport.size) if r != transport.rank]
    states: dict[int, str] = {}
    end = time.monotonic() + patience
    try:
        store = _store(transport)
        store.set_timeout(timedelta(seconds=patience))
        while time.monotonic() < end and len(states) < len(others):
            for r in others:
                if r not in states and store.check([_key(r)]):
                    states[r] = store.get(_key(r)).decode()
            time.sleep(_POLL)
    except Exception as gone:
        return RankAbsentError(
            f"rank {transport.rank}: {here} failed ({_short(error)}) and so did the store that knows of the others "
            f"({_short(gone)}): the process that serves it, by default rank 0 or the torchrun agent, is gone", [0])
    absent = [r for r in others if r not in states]
    limit = "" if transport.deadline is None else f" within {transport.deadline:g} s"
    if absent:
        return RankAbsentError(f"rank {transport.rank}: {name_ranks(absent)} did not arrive at {here}{limit} "
                               f"({_short(error)})", absent)
    other_place = {r: s for r, s in states.items() if s != here}
    if other_place:
        said = "; ".join(f"rank {r}: {s}" for r, s in sorted(other_place.items()))
        return MismatchError(f"rank {transport.rank} stopped in {here}, others elsewhere: {said}", sorted(other_place))
    return ExchangeError(f"rank {transport.rank}: {here} failed on every rank: {_short(error)}")


def _short(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:160]
