"""Moving rows of bytes between ranks: one primitive, over a process group or between threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from .. import checks
from ..backends.memory import buffer
from .errors import ExchangeError, MismatchError, RankAbsentError, name_ranks

T = TypeVar("T")


class Pending(Protocol):
    """An exchange on its way."""

    def wait(self) -> Tensor:
        """The received rows (M, bytes) uint8. Raises ExchangeError."""


class Transport(Protocol):
    """A group of `size` ranks seen from `rank`. Every rank makes the same calls in the same order, with zero rows too.

    sent_bytes  what this rank has sent to others, by kind of exchange
    exchanges   how many exchanges it has started
    """

    rank: int
    size: int
    exchanges: int
    sent_bytes: dict[str, int]

    def start(self, rows: Tensor, send: Sequence[int], recv: Sequence[int], what: str) -> Pending:
        """Send rows (sum(send), bytes) uint8, the first send[0] to rank 0 and so on; recv[r] rows come from rank r."""

    def report(self, state: str) -> None:
        """Tell the other ranks that this one stops, and why."""

    def split(self, groups: Sequence[Sequence[int]]) -> Transport:
        """This rank's group among disjoint `groups` of ranks; every rank calls it with the same groups."""


def account(transport: Transport, rows: Tensor, send: Sequence[int], what: str) -> None:
    """Check the splits and count the bytes that leave this rank."""
    if sum(send) != rows.shape[0] or len(send) != transport.size:
        raise checks.bad(f"{what}: send splits", f"{transport.size} splits that sum to {rows.shape[0]} rows",
                         list(send))
    away = rows.shape[0] - send[transport.rank]
    transport.exchanges += 1
    transport.sent_bytes[what] = transport.sent_bytes.get(what, 0) + away * rows.shape[1] * rows.element_size()


class GroupTransport:
    """Over a torch.distributed process group: NCCL on GPUs, gloo on CPUs.

    deadline  seconds an exchange may take on gloo; on expiry, or when a connection breaks, the error names the ranks
              that did not arrive. None takes the group's own timeout. NCCL's own watchdog guards exchanges on GPUs.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, deadline: float | None = None) -> None:
        if deadline is not None:
            checks.positive("deadline", deadline)
        self.group: dist.ProcessGroup = group if group is not None else dist.group.WORLD  # type: ignore[assignment]
        if self.group is None:
            raise checks.bad("group", "an initialised process group (torch.distributed.init_process_group)", None)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.deadline = deadline
        self.exchanges = 0
        self.sent_bytes: dict[str, int] = {}

    def start(self, rows: Tensor, send: Sequence[int], recv: Sequence[int], what: str) -> Pending:
        account(self, rows, send, what)
        out = buffer((sum(recv), rows.shape[1]), rows.dtype, rows.device)
        options = dist.AllToAllOptions()
        if self.deadline is not None and rows.device.type == "cpu":
            options.timeout = timedelta(seconds=self.deadline)
        try:
            work = self.group.alltoall_base(out, rows.contiguous(), list(recv), list(send), options)
        except RuntimeError as error:
            raise self._diagnose(error, what) from error
        return _Work(self, work, out, what)

    def split(self, groups: Sequence[Sequence[int]]) -> GroupTransport:
        mine = None
        for ranks in groups:
            made = dist.new_group([dist.get_global_rank(self.group, r) for r in ranks])
            if self.rank in ranks:
                mine = made
        if mine is None:
            raise checks.bad("groups", f"one that holds rank {self.rank}", [list(g) for g in groups])
        return GroupTransport(mine, deadline=self.deadline)  # type: ignore[arg-type]

    def report(self, state: str) -> None:
        from .faults import report

        report(self, state)

    def _diagnose(self, error: Exception, what: str) -> ExchangeError:
        from .faults import diagnose

        return diagnose(self, error, what)


class _Work:
    def __init__(self, transport: GroupTransport, work: Any, out: Tensor, what: str) -> None:
        self.transport, self.work, self.out, self.what = transport, work, out, what

    def wait(self) -> Tensor:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise self.transport._diagnose(error, self.what) from error
        return self.out


class LoopbackTransport:
    """One of W ranks that are threads of one process (see `run_loopback`): the same calls, no process group."""

    def __init__(self, hub: _Hub, rank: int) -> None:
        self.hub, self.rank, self.size = hub, rank, hub.size
        self.exchanges = 0
        self.sent_bytes: dict[str, int] = {}

    def start(self, rows: Tensor, send: Sequence[int], recv: Sequence[int], what: str) -> Pending:
        account(self, rows, send, what)
        return _Ready(self.hub.exchange(self.rank, rows, list(send), list(recv), what))

    def report(self, state: str) -> None:
        """Nothing: an exception in one thread ends the others."""

    def split(self, groups: Sequence[Sequence[int]]) -> LoopbackTransport:
        hub, position = self.hub.split(self.rank, groups)
        return LoopbackTransport(hub, position)


class _Ready:
    def __init__(self, out: Tensor) -> None:
        self.out = out

    def wait(self) -> Tensor:
        return self.out


class _Hub:
    """Meeting point of W threads."""

    def __init__(self, size: int, deadline: float) -> None:
        self.size, self.deadline = size, deadline
        self.barrier = threading.Barrier(size)
        self.slots: list[tuple[Tensor, list[int], str] | None] = [None] * size
        self.lock = threading.Lock()
        self.children: dict[Any, _Hub] = {}

    def exchange(self, rank: int, rows: Tensor, send: list[int], recv: list[int], what: str) -> Tensor:
        self.slots[rank] = (rows, send, what)
        self._meet(rank, what)
        other = [r for r, slot in enumerate(self.slots) if slot is not None and slot[2] != what]
        if other:
            raise MismatchError(f"rank {rank} is in {what}, {name_ranks(other)} in another exchange", other)
        out = buffer((sum(recv), rows.shape[1]), rows.dtype, rows.device)
        begin = 0
        for source, expected in enumerate(recv):
            theirs, splits, _ = self.slots[source]  # type: ignore[misc]
            first = sum(splits[:rank])
            # As gloo: a sender of fewer rows than expected leaves the rest of the buffer unwritten.
            sent = min(splits[rank], expected)
            out[begin : begin + sent] = theirs[first : first + sent]
            begin += expected
        self._meet(rank, what)
        self.slots[rank] = None
        return out

    def _meet(self, rank: int, what: str) -> None:
        try:
            self.barrier.wait(self.deadline)
        except threading.BrokenBarrierError:
            absent = [r for r in range(self.size) if self.slots[r] is None]
            raise RankAbsentError(f"rank {rank}: {what}: {name_ranks(absent) if absent else 'a rank'} stopped",
                                  absent) from None

    def split(self, rank: int, groups: Sequence[Sequence[int]]) -> tuple[_Hub, int]:
        mine = tuple(next(g for g in groups if rank in g))
        key = (mine, tuple(tuple(g) for g in groups))
        with self.lock:
            hub = self.children.setdefault(key, _Hub(len(mine), self.deadline))
        return hub, mine.index(rank)

    def abort(self) -> None:
        self.barrier.abort()
        for child in self.children.values():
            child.abort()


def run_loopback(num_ranks: int, program: Callable[[LoopbackTransport], T], *, deadline: float = 60.0) -> list[T]:
    """Run `program(transport)` as `num_ranks` ranks in threads of this process; their results in rank order.

    The program may call backward: on a CPU its collectives run in the thread of its rank. When ranks raise, the first
    error that is not the echo of another rank's is raised here.
    """
    checks.positive_int("num_ranks", num_ranks)
    hub = _Hub(num_ranks, deadline)
    results: list[Any] = [None] * num_ranks
    errors: list[BaseException | None] = [None] * num_ranks

    def run(rank: int) -> None:
        try:
            results[rank] = program(LoopbackTransport(hub, rank))
        except BaseException as error:  # handed to the caller below
            errors[rank] = error
            hub.abort()

    threads = [threading.Thread(target=run, args=(r,), daemon=True) for r in range(num_ranks)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    raised = [e for e in errors if e is not None]
    if raised:
        raise next((e for e in raised if not isinstance(e, RankAbsentError)), raised[0])
    return results
