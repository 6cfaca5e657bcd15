"""Expert parallelism on the processes of one machine: every dispatcher, and what the exchange costs beyond its bytes.

    python benchmarks/bench_ep.py [--ranks 2] [--shape S2] [--tokens 512] [--dtype bf16] [--smoke]

Starts the ranks itself (gloo). A step is forward + backward of the experts with dispatch and combine; the router and
the optimizer are not in it. `raw` is the time of bare all_to_all_single calls with the bytes and splits of the same
step. `overhead_of_step` is (the exchanges of a step with idle experts - raw) / step. (A step minus its experts would
not do: cores differ in speed from call to call, and the ranks wait for the slower one.) "local first": slots of a
rank's own experts are computed while the others fly. Results go to results/ep.csv.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
import harness
from shapes import SHAPES

from moeffn import MoEConfig
from moeffn.distributed.bench import Block

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DISPATCHERS = ("all_to_all, dedup rank", "all_to_all, dedup none", "all_gather",
               "all_to_all, dedup rank, local first")


def config_of(name: str) -> MoEConfig:
    if name == "smoke":
        return MoEConfig(d_model=64, d_expert=32, num_experts=8, top_k=2)
    s = SHAPES[name]
    return MoEConfig(d_model=s.D, d_expert=s.F, num_experts=s.E, top_k=s.K)


def rank_main(arguments: argparse.Namespace) -> None:
    """One rank: measure, and let rank 0 write what was found to the meeting folder."""
    folder = Path(arguments.folder)
    torch.set_num_threads(arguments.threads)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=arguments.rank,
                            world_size=arguments.ranks)
    rows = []
    for name in arguments.dispatchers.split(";"):
        local_first = name.endswith(", local first")
        block = Block(config_of(arguments.shape), arguments.tokens, dispatcher=name.removesuffix(", local first"),
                      dtype=DTYPES[arguments.dtype], device=torch.device("cpu"), local_first=local_first)
        rows.append({**block.measure(arguments.calls).as_row(), "dispatcher": name})
        del block
    if arguments.rank == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shape", default="S2", choices=[*SHAPES, "smoke"])
    parser.add_argument("--tokens", type=int, default=512, help="per rank")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--calls", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1, help="per rank")
    parser.add_argument("--dispatchers", default=";".join(DISPATCHERS), help="names separated by ;")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape once; nothing is written")
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default=None, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.shape, arguments.tokens, arguments.calls = "smoke", 32, 1
    if arguments.rank is not None:
        rank_main(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        passed = [f"--{k}={getattr(arguments, k)}" for k in
                  ("ranks", "shape", "tokens", "dtype", "calls", "threads", "dispatchers")]
        ranks = [subprocess.Popen([sys.executable, __file__, *passed, f"--rank={r}", f"--folder={folder}"])
                 for r in range(arguments.ranks)]
        for p in ranks:
            p.wait(timeout=900)
        path = Path(folder) / "rows.json"
        if not path.exists():
            sys.exit("a rank failed")
        rows = json.loads(path.read_text())
    about = {"shape": arguments.shape, "dtype": arguments.dtype, "threads_per_rank": arguments.threads}
    rows = [{**about, **r} for r in rows]
    for r in rows:
        print(f"{r['dispatcher']:<35} step {1e3 * r['step']:8.1f} ms  dispatch {1e3 * r['dispatch']:7.2f}  experts "
              f"{1e3 * r['experts']:8.1f}  combine {1e3 * r['combine']:7.2f}  exchanges "
              f"{1e3 * r['exchange_only']:7.2f}  raw {1e3 * r['raw']:7.2f}  overhead "
              f"{100 * r['overhead_of_step']:5.1f} % of the step  MB {r['bytes_sent'] / 1e6:.3f} "
              f"(D(G) {r['bytes_expected'] / 1e6:.3f})")
        assert r["bytes_sent"] == r["bytes_forward"], "counted bytes are not those of the routing"
    if not arguments.smoke:
        print(harness.write_csv("ep", rows))


if __name__ == "__main__":
    main()
