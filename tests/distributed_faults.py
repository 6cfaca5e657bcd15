"""The ranks of the fault suite: test_distributed_faults.py starts it (see `distributed_ranks`).

Always over gloo: deadlines are gloo's (NCCL's watchdog ends the process), and it is gloo that delivers short rows.
Each case forms a new group of three ranks, breaks something on rank 1 and looks at the error of the others. Rank 1 is
killed in the last case, so that its process serves all others before.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from distributed_ranks import join, launch, run_cases

from moeffn import Routing
from moeffn.distributed import AllToAll, ExchangeError, GroupTransport, MismatchError, Placement, RankAbsentError

DEADLINE = 2.5
IDS = torch.tensor([[0, 2, 4], [1, 3, 5]], dtype=torch.int32)  # each token goes to all three ranks


class Short(GroupTransport):
    """Sends one row fewer to rank 0 than it announced, as a fault below would."""

    fault = ""

    def start(self, rows, send, recv, what):
        if what == self.fault:
            send = [send[0] - 1, *send[1:]]
            rows = torch.cat([rows[: send[0]], rows[send[0] + 1 :]])
        return super().start(rows, send, recv, what)


def step(transport: GroupTransport, backward: bool = True) -> None:
    d = AllToAll(transport, Placement.balanced(6, 3))
    x = torch.ones(2, 4).requires_grad_()
    batch = d.dispatch(x, Routing(IDS, torch.ones(2, 3)))
    y = d.combine(batch.x * 1.0, batch.handle)
    if backward:
        y.sum().backward()


def error_of(call: Callable[[], None]) -> tuple[ExchangeError, float]:
    begin = time.monotonic()
    try:
        call()
    except ExchangeError as error:
        return error, time.monotonic() - begin
    raise AssertionError("no error")


class Faults:
    def __init__(self, W: int, rank: int, folder: Path) -> None:
        self.W, self.rank, self.folder = W, rank, folder

    def _group(self, name: str) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        join(self.W, self.rank, self.folder, name, backend="gloo")
        dist.barrier()

    def case_delayed_rank_is_named(self) -> None:
        self._group("delayed")
        t = GroupTransport(deadline=DEADLINE)
        step(t)
        if self.rank == 1:
            time.sleep(2 * DEADLINE + 3.5)  # beyond the others' deadline and their search for the absent
            error, _ = error_of(lambda: step(t))
            assert isinstance(error, ExchangeError)
            return
        error, seconds = error_of(lambda: step(t))
        assert isinstance(error, RankAbsentError) and error.ranks == (1,), (error, error.ranks)
        assert "rank 1 did not arrive at agreement" in str(error) and f"within {DEADLINE:g} s" in str(error), error
        assert seconds < 2 * DEADLINE + 3, seconds

    def case_short_send_is_named(self) -> None:
        """gloo delivers fewer rows in silence; the receiver names the sender, the others learn who stopped and why."""
        self._group("short")
        t = Short(deadline=DEADLINE) if self.rank == 1 else GroupTransport(deadline=DEADLINE)
        if self.rank == 1:
            t.fault = "combine"
        error, _ = error_of(lambda: (step(t), step(t)))
        if self.rank == 0:
            assert isinstance(error, MismatchError) and error.ranks == (1,), error
            assert "rank 1 announced 2 rows, 1 came" in str(error), error
        else:
            assert 0 in error.ranks and "rank 1 announced 2 rows, 1 came" in str(error), (error, error.ranks)

    def case_killed_rank_is_named(self) -> None:
        self._group("killed")
        t = GroupTransport(deadline=DEADLINE)
        step(t)
        if self.rank == 1:
            self.done("killed_rank_is_named")
            os.kill(os.getpid(), signal.SIGKILL)
        error, seconds = error_of(lambda: [step(t) for _ in range(3)])
        assert isinstance(error, RankAbsentError) and error.ranks == (1,), (error, error.ranks)
        assert seconds < 2 * DEADLINE + 5, seconds

    def done(self, name: str) -> None:
        """The verdict of a rank that dies in its case."""
        with open(self.folder / f"result{self.rank}", "a") as out:
            out.write(f'["{name}", "ok"]\n')


def rank_of_faults(_: str, W: int, folder: Path, rank: int) -> None:
    suite = Faults(W, rank, folder)
    names = [n for n in vars(Faults) if n.startswith("case_")]
    run_cases({n[len("case_"):]: getattr(suite, n) for n in names}, rank, folder)


if __name__ == "__main__":
    launch(rank_of_faults)
