"""One rank of a gloo suite: python distributed_worker.py SUITE W FOLDER RANK (test_distributed_gloo.py starts it)."""

from __future__ import annotations

import sys
from pathlib import Path

import torch.distributed as dist
from distributed_checkpoints import CheckpointCases
from distributed_commands import CommandCases
from distributed_compare import Ranks
from distributed_dispatch import DispatchCases
from distributed_ranks import join, run_cases
from distributed_training import TrainingCases

SUITES: dict[str, list[type[Ranks]]] = {
    "all": [DispatchCases, TrainingCases, CheckpointCases, CommandCases],
    "checkpoints": [CheckpointCases],
}


def case_names(suite: str) -> list[str]:
    """The cases of a suite in the order in which every rank runs them."""
    return [n[len("case_"):] for cls in SUITES[suite] for n in vars(cls) if n.startswith("case_")]


def main() -> None:
    name, W, folder, rank = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    join(W, rank, folder, "meet")
    held = {n: cls(W, rank, folder) for cls in SUITES[name] for n in vars(cls) if n.startswith("case_")}
    run_cases({n[len("case_"):]: getattr(cases, n) for n, cases in held.items()}, rank, folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
