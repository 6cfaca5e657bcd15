"""What happens when a rank fails, and who is missing.

The contract, on gloo with a deadline:

* A rank that dies, hangs or is later than the deadline: every other rank raises RankAbsentError naming it, at most
  2 · deadline + 2 seconds after its own call began. With torchrun the rank's agent may end the others sooner.
* A rank whose arguments differ (placement, dispatcher, D, K, dtype), that announces impossible counts, or that delivers
  fewer rows or other rows than announced: MismatchError names it where that is seen; the rank that saw it tells the
  others through the store, whose error repeats it.
* A rank that skips a call: the exchanges that meet have different sizes. gloo ends a process that is sent more than it
  expects (the one that skipped, or its peers); the rest name it as absent.
* After any of these the group is dead. Destroy it, form a new one of the ranks that remain, take
  `placement.without(dead)` or a new placement over the survivors, and load the last checkpoint: it reshards to any
  number of ranks. Nothing was committed: the optimizer step has not run.

On NCCL, torch's watchdog bounds the wait (its timeout, not `deadline`), and arguments and counts are still compared.

Nothing is written while all goes well. A rank whose exchange fails writes its state to the group's store, then waits
until every other rank has written or a grace period has passed; those that stay silent died, hang, or never came.
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
