"""`moeffn bench PRESET --ep` and `moeffn check --ep`: the command line on the ranks that torchrun started.

    torchrun --nproc-per-node 2 -m moeffn bench qwen3-30b-a3b --ep --tokens 512
    torchrun --nproc-per-node 4 -m moeffn check --ep
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from .. import checks
from ..config import MoEConfig
from .bench import Block, largest_error
from .cost import describe, estimate
from .placement import Placement

DISPATCHERS = ("all_to_all, dedup rank", "all_to_all, dedup none", "all_gather", "two_level")


@contextlib.contextmanager
def group(device: str) -> Iterator[torch.device]:
    """The process group of a torchrun launch: NCCL for "cuda", gloo for "cpu"; destroyed at the end."""
    if "RANK" not in os.environ:
        raise checks.bad("--ep", "a launch by torchrun (torchrun --nproc-per-node N -m moeffn …)",
                         "no RANK in the environment")
    where = torch.device("cpu")
    if device == "cuda":
        where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(where)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", device_id=where if device == "cuda" else None)
    try:
        yield where
        dist.barrier()
    finally:
        dist.destroy_process_group()


def bench(label: str, config: MoEConfig, *, tokens: list[int], dtype: str = "bfloat16", device: str = "cpu",
          seed: int = 0, as_json: bool = False) -> None:
    """Measure every dispatcher that fits the group on one block; rank 0 prints. `tokens` per rank, each measured."""
    with group(device) as where:
        W = dist.get_world_size()
        placement = Placement.balanced(config.num_experts, W)
        names = [n for n in DISPATCHERS if n != "two_level" or 1 < _local_ranks() < W]
        rows = []
        for T, name in itertools.product(tokens, names):
            block = Block(config, T, dispatcher=name, dtype=getattr(torch, dtype), device=where, seed=seed)
            rows.append(block.measure().as_row())
        if dist.get_rank():
            return
        if as_json:
            print(json.dumps({"block": label, "dtype": dtype, "device": device, "threads": torch.get_num_threads(),
                              "torch": torch.__version__, "rows": rows}, indent=2))
            return
        print(f"{label}: {config.num_experts} experts on {W} ranks, top {config.top_k}, d_model {config.d_model}, "
              f"{dtype}, {dist.get_backend()}")
        _show(rows)
        print(f"\ncost model for {tokens[-1]} tokens (uniform routing; its links are assumed, see "
              "moeffn.distributed.cost.Links):")
        print(describe(estimate(placement, tokens=tokens[-1], d_model=config.d_model, top_k=config.top_k,
                                dtype=getattr(torch, dtype), ranks_per_node=_local_ranks())))


def check(*, device: str = "cpu") -> bool:
    """Every dispatcher on the running group against one process in float64; rank 0 prints; True when all agree."""
    with group(device) as where:
        good = True
        for name in DISPATCHERS:
            if name == "two_level" and not 1 < _local_ranks() < dist.get_world_size():
                continue
            error = largest_error(name, device=where)
            good &= error <= 1e-12
            if dist.get_rank() == 0:
                verdict = "ok" if error <= 1e-12 else "WRONG"
                print(f"{name:<24} largest relative error {error:.1e} (limit 1e-12) {verdict}")
    return good


def _local_ranks() -> int:
    W = dist.get_world_size()
    n = int(os.environ.get("LOCAL_WORLD_SIZE", W))
    return n if W % n == 0 else W


def _show(rows: list[dict[str, Any]]) -> None:
    print(f"{'dispatcher':<24}{'T':>6}{'tok/s/rank':>11}{'tok/s':>11}{'step':>9}{'forward':>9}{'dispatch':>9}{'experts':>9}"
          f"{'combine':>9}{'raw':>9}{'overhead':>9}{'MB sent':>10}{'handle':>10}{'by D(G)':>10}")
    for r in rows:
        ms = "".join(f"{1e3 * r[k]:>9.2f}" for k in ("step", "forward", "dispatch", "experts", "combine", "raw"))
        mb = "".join(f"{r[k] / 1e6:>10.3f}" for k in ("bytes_sent", "bytes_forward", "bytes_expected"))
        print(f"{r['dispatcher']:<24}{r['tokens_per_rank']:>6}{r['tokens_per_s_per_rank']:>11,.0f}{r['tokens_per_s']:>11,.0f}{ms}"
              f"{100 * r['overhead_of_step']:>8.1f}%{mb}")
    print("times in ms, of the slowest rank; step: forward + backward; raw: bare collectives of a step's bytes;\n"
          "overhead: (a step's exchanges with idle experts - raw) / step; MB: what leaves rank 0 in a forward,\n"
          "counted, by the handle (must agree) and by D(G), the mean over ranks of uniform routing")
    last = rows[-1]
    print(f"a token of rank 0 goes to {last['destinations']:.3f} ranks in this routing, "
          f"{last['destinations_expected']:.3f} by D(G)")
