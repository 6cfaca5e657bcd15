"""The ranks of the suites: test_distributed_ranks.py starts it (see `distributed_ranks`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from distributed_checkpoints import CheckpointCases
from distributed_commands import CommandCases
from distributed_compare import Ranks
from distributed_dispatch import DispatchCases
from distributed_ranks import backend_for, join, launch, run_cases, runs_on
from distributed_training import TrainingCases

SUITES: dict[str, list[type[Ranks]]] = {
    "all": [DispatchCases, TrainingCases, CheckpointCases, CommandCases],
    "checkpoints": [CheckpointCases],
}


def cases_of(suite: str) -> dict[str, Callable[[Ranks], None]]:
    """The cases of a suite, in the order in which every rank runs them."""
    return {n[len("case_"):]: case for cls in SUITES[suite] for n, case in vars(cls).items() if n.startswith("case_")}


def rank_of_suite(name: str, W: int, folder: Path, rank: int) -> None:
    device = join(W, rank, folder, "meet", backend=backend_for(W))
    made = {cls.__name__: cls(W, rank, folder, device) for cls in SUITES[name]}
    run_cases({n: functools.partial(case, made[case.__qualname__.split(".")[0]])
               for n, case in cases_of(name).items() if runs_on(case, W)}, rank, folder)
    dist.barrier()


if __name__ == "__main__":
    launch(rank_of_suite)
