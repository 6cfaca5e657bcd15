"""Compiles every kernel at every shipped tile, as the backend launches it, and writes tests/data/triton_static.csv.

For bf16, the products for fp32 too, at the Qwen3-30B-A3B widths (D 2048, F 768, E 128, K 8), in each bucket of rows per
expert, and for the routers named below, with no device; on sm_90 and sm_100 also what runs where a layout allows no
descriptor (reads "pointers"), and the persistent kernels; at the small widths of SPLIT what splits its inner sums;
grouping for 4096 experts.
To write the table anew: PYTHONPATH=. python tests/triton_table.py
To compile one tile of each kernel and variant for a family with another triton: … tests/triton_table.py --check sm90
"""

from __future__ import annotations

import csv
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import triton
from pointer_products import narrow_products

from moeffn import RouterConfig
from moeffn.backends import Needs
from moeffn.backends.triton import TritonBackend
from moeffn.kernels import metadata
from moeffn.kernels.aot import TARGETS, compile_launch, report
from moeffn.kernels.launch import Launch, recorded
from moeffn.kernels.tiles import Problem, TileConfig, pick_tiles
from moeffn.types import ExpertWeights

TABLE = Path(__file__).parent / "data" / "triton_static.csv"
D, F, E, K = 2048, 768, 128, 8
TOKENS = {"large": 32768, "medium": 1024, "small": 128}
ROUTERS = {
    "qwen3": RouterConfig(num_experts=E, top_k=K, renormalize=True),
    "gpt-oss": RouterConfig(num_experts=128, top_k=4, order="topk_score"),
    "qwen3-next": RouterConfig(num_experts=512, top_k=10, renormalize=True),
    "deepseek-v3": RouterConfig(num_experts=256, top_k=8, score="sigmoid", num_groups=8, topk_groups=4, scale=2.5,
                                renormalize=True, renorm_eps=1e-20),
    "largest": RouterConfig(num_experts=4096, top_k=64, score="sqrtsoftplus", renormalize=True),
}
SPLIT = [(4096, 256, 8, 2), (512, 2048, 8, 2)]  # D, F, E, K of which 64 tokens split the up- or down-projection
KEY = ("family", "kernel", "variant", "tile", "warps", "stages", "reads", "persistent", "split")
BESIDE: dict[str, Any] = {"pointers": {"tma": False}, "persistent": {"persistent": 1}}


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def step(family: str, T: int, pick: Callable[[Problem], TileConfig] = pick_tiles, sizes: tuple[int, ...] = (D, F, E, K),
         dtype: torch.dtype = torch.bfloat16) -> list[Launch]:
    """The launches of a training step of T tokens, then of decoding 8 and 1."""
    D, F, E, K = sizes
    backend = TritonBackend(pick, family)
    weights = ExpertWeights(*(meta(*shape, dtype=dtype) for shape in ((E, 2 * F, D), (E, D, F), (E, 2 * F), (E, D))))
    x, w = meta(T, D, dtype=dtype), meta(T, K, dtype=torch.float32)
    with recorded() as launches:
        plan = backend.plan(meta(T, K, dtype=torch.int32), E)
        _, h = backend.forward(x, plan, w, weights, apply_to="output", save=True)
        backend.backward(x, x, h, plan, w, weights, apply_to="output", needs=Needs())
        for few in (8, 1):
            backend.moe(x[:few], meta(few, K, dtype=torch.int32), w[:few], weights, apply_to="output")
    return launches


def grouping(tokens: int, top_k: int, num_experts: int) -> list[Launch]:
    """The launches that group slots by expert and schedule tiles of 128 rows."""
    with recorded() as launches:
        offsets = metadata.plan(meta(tokens, top_k, dtype=torch.int32), num_experts)[1]
        metadata.schedule(offsets, tokens * top_k, 128)
    return launches


def routing(config: RouterConfig, T: int) -> list[Launch]:
    """The launches of a router and its backward, with a selection bias unless it is a softmax."""
    backend = TritonBackend()
    logits = meta(T, config.num_experts, dtype=torch.float32)
    with recorded() as launches:
        ids, w = backend.route(logits, config, logits[0] if config.score != "softmax" else None)
        backend.route_backward(w, logits, ids, config)
    return launches


@functools.cache
def shipped(family: str) -> dict[tuple[str, ...], Launch]:
    """Every different launch of a training step in the three buckets, by the key columns of the table."""
    found: dict[tuple[str, ...], Launch] = {}
    for T in TOKENS.values():
        for launch in step(family, T):
            found.setdefault((family, *_key(launch)), launch)
        for launch in step(family, T, dtype=torch.float32):
            if "PRECISION" in launch.args:
                found.setdefault((family, *_key(launch, dtype="fp32")), launch)
    for name, config in ROUTERS.items():
        for launch in routing(config, 32768):
            found[(family, *_key(launch, name))] = launch
    for T in (4096, 8):
        for launch in grouping(T, 64, 4096):
            found.setdefault((family, *_key(launch)), launch)
    for sizes in SPLIT:
        for launch in step(family, 64, sizes=sizes):
            if launch.args.get("SPLIT", 1) > 1:
                found.setdefault((family, *_key(launch)), launch)
    for change in BESIDE.values() if family in ("sm90", "sm100") else ():
        for T in (TOKENS["large"], TOKENS["medium"]):
            for launch in step(family, T, lambda p, c=change: replace(pick_tiles(p), **c)):
                if "READ" in launch.args:
                    found.setdefault((family, *_key(launch)), launch)
    return found


def _key(launch: Launch, router: str = "", dtype: str = "") -> tuple[str, ...]:
    a = launch.args
    variant = {"dw": "gather " + ("left" if a.get("GATHER_LEFT") else "right"),
               "rows": "down" if a.get("bias") is not None else "dx",
               "place": "one block" if a.get("SINGLE") else "blocks"}.get(launch.name, router)
    if launch.name in ("count", "place", "schedule") and a["E_PAD"] > 1024:
        variant = f"{variant} {a['E_PAD']} experts".strip()
    variant = f"{variant} {dtype}".strip()
    sides = ("ROWS", "C") if router else ("BLOCK_M", "BLOCK_N", "BLOCK_K", "BLOCK", "SLOTS")
    tile = "x".join(str(a[n]) for n in sides if n in a)
    reads = f"tma {a['READ']}" if a.get("READ", "pointers") != "pointers" else a.get("READ", "")
    return (launch.name, variant, tile, str(launch.num_warps), str(launch.num_stages), reads,
            "yes" if a.get("PERSISTENT") else "", str(a.get("SPLIT", 1)) if a.get("SPLIT", 1) > 1 else "")


def compiled(keys: Iterable[tuple[str, ...]]) -> list[dict[str, str]]:
    """Rows of the table, compiled here and anew; `narrow` holds offending 32-bit products."""
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        os.environ["TRITON_CACHE_DIR"] = cache
        for key in keys:
            made = compile_launch(shipped(key[0])[key], key[0])
            row = dict(zip(KEY, key, strict=True)) | {n: str(v) for n, v in asdict(report(made, key[0])).items()}
            rows.append(row | {"narrow": "; ".join(narrow_products(made.asm["ttir"]))})
    return rows


def sample(family: str) -> list[tuple[str, ...]]:
    """One tile of each kernel and variant, and of each way to read, to go from tile to tile and to split."""
    place = {name: i for i, name in enumerate(KEY)}
    names = ("kernel", "variant", "reads", "persistent", "split")
    return list({tuple(key[place[n]] for n in names): key for key in shipped(family)}.values())


def command(family: str) -> list[str]:
    """Prints the rows of a family as JSON."""
    return [sys.executable, __file__, "--rows", family]


def write(made: list[dict[str, str]]) -> None:
    with TABLE.open("w", newline="") as out:
        writer = csv.DictWriter(out, ["triton", *(n for n in made[0] if n != "narrow")], extrasaction="ignore",
                                lineterminator="\n")
        writer.writeheader()
        writer.writerows({"triton": triton.__version__, **row} for row in made)


def main(option: str = "", family: str = "") -> int:
    if option == "--rows":
        print(json.dumps(compiled(shipped(family))))
        return 0
    if option == "--check":
        rows = compiled(sample(family))
        print(f"triton {triton.__version__}: {len(rows)} kernels compiled for {family}")
    else:
        with ThreadPoolExecutor(2) as pool:
            printed = pool.map(lambda f: subprocess.run(command(f), check=True, stdout=subprocess.PIPE).stdout, TARGETS)
            rows = [row for text in printed for row in json.loads(text)]
        write(rows)
    for r in rows:
        if r["spills"] != "0" or r["narrow"]:
            print("spills or 32-bit products:", " ".join(r[k] for k in (*KEY, "registers", "spills", "narrow")))
    return 1 if any(r["narrow"] for r in rows) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
