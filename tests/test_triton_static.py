"""What the compilers say of every shipped tile, with no device: the table tests/data/triton_static.csv, kept true.

Every kernel is compiled as the backend launches it, for bf16 at the Qwen3-30B-A3B widths (D 2048, F 768, E 128, K 8),
in each bucket of rows per expert. To write the table anew: PYTHONPATH=. python tests/test_triton_static.py
"""

from __future__ import annotations

import csv
import multiprocessing
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from moeffn.backends import Needs
from moeffn.backends.triton import TritonBackend
from moeffn.kernels.aot import TARGETS, compile_launch, narrow_products, report, source
from moeffn.kernels.launch import Launch, interpreting, recorded
from moeffn.types import ExpertWeights

pytestmark = pytest.mark.skipif(interpreting(), reason="interpreted kernels cannot be compiled")
TABLE = Path(__file__).parent / "data" / "triton_static.csv"
D, F, E, K = 2048, 768, 128, 8
TOKENS = {"large": 32768, "medium": 1024, "small": 128}
KEY = ("family", "kernel", "variant", "tile", "warps", "stages")


def shipped(family: str) -> dict[tuple[str, ...], Launch]:
    """Every different launch of a training step in the three buckets, by the key columns of the table."""
    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    found: dict[tuple[str, ...], Launch] = {}
    backend = TritonBackend(family=family)
    weights = ExpertWeights(meta(E, 2 * F, D), meta(E, D, F), meta(E, 2 * F), meta(E, D))
    for T in TOKENS.values():
        x, w = meta(T, D), meta(T, K, dtype=torch.float32)
        with recorded() as launches:
            plan = backend.plan(meta(T, K, dtype=torch.int32), E)
            _, h = backend.forward(x, plan, w, weights, apply_to="output", save=True)
            backend.backward(x, x, h, plan, w, weights, apply_to="output", needs=Needs())
            backend.moe(x[:8], meta(8, K, dtype=torch.int32), w[:8], weights, apply_to="output")
        for launch in launches:
            found.setdefault((family, *_key(launch)), launch)
    return found


def _key(launch: Launch) -> tuple[str, ...]:
    a = launch.args
    variant = {"dw": "gather " + ("left" if a.get("GATHER_LEFT") else "right"),
               "rows": "down" if a.get("bias") is not None else "dx",
               "place": "one block" if a.get("SINGLE") else "blocks"}.get(launch.name, "")
    tile = "x".join(str(a[n]) for n in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "BLOCK", "SLOTS") if n in a)
    return launch.name, variant, tile, str(launch.num_warps), str(launch.num_stages)


def compile_row(key: tuple[str, ...]) -> dict[str, str]:
    """One row of the table, computed in a worker process; `narrow` holds offending 32-bit products."""
    compiled = compile_launch(shipped(key[0])[key], key[0])
    row = dict(zip(KEY, key, strict=True)) | {n: str(v) for n, v in asdict(report(compiled, key[0])).items()}
    return row | {"narrow": "; ".join(narrow_products(compiled.asm["ttir"]))}


def compile_all() -> list[dict[str, str]]:
    keys = [key for family in TARGETS for key in shipped(family)]
    with tempfile.TemporaryDirectory() as cache:
        before = os.environ.get("TRITON_CACHE_DIR")
        os.environ["TRITON_CACHE_DIR"] = cache
        try:
            with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
                return list(pool.map(compile_row, keys))
        finally:
            del os.environ["TRITON_CACHE_DIR"]
            if before is not None:
                os.environ["TRITON_CACHE_DIR"] = before


@pytest.fixture(scope="module")
def rows():
    return compile_all()


def test_the_committed_table_is_what_the_compiler_says(rows):
    with TABLE.open() as file:
        table = list(csv.DictReader(file))
    assert [tuple(r[k] for k in KEY) for r in table] == [tuple(r[k] for k in KEY) for r in rows]
    if table[0]["triton"] != triton.__version__:
        pytest.skip(f"the table is of triton {table[0]['triton']}, here is {triton.__version__}")
    for old, new in zip(table, rows, strict=True):
        assert old == {"triton": triton.__version__, **{k: v for k, v in new.items() if k != "narrow"}}


def test_nothing_spills(rows):
    assert [r for r in rows if r["spills"] != "0"] == []


@pytest.mark.parametrize("family, unit", [("sm80", "mma"), ("sm90", "wgmma"), ("sm100", "tcgen05"), ("gfx9", "mfma")])
def test_products_use_the_matrix_unit(rows, family, unit):
    """Tiles of 16 rows are below the 64 that wgmma and tcgen05 need: mma there."""
    products = [r for r in rows if r["family"] == family and r["kernel"] in ("up", "rows", "dh", "dw")]
    assert len(products) >= 12
    for row in products:
        small = row["tile"].startswith("16x") and family in ("sm90", "sm100")
        assert row["matrix_unit"] == ("mma" if small else unit), row


@pytest.mark.parametrize("kernel, programs", [("up", 1), ("rows", 1), ("dh", 1), ("dw", 1)])
def test_large_tiles_fit_the_register_file_of_sm90(rows, kernel, programs):
    """65536 registers and 227 KiB of shared memory an SM hold the intended number of programs."""
    for row in rows:
        if row["family"] == "sm90" and row["kernel"] == kernel:
            assert int(row["registers"]) * 32 * int(row["warps"]) * programs <= 65536, row
            assert int(row["shared_bytes"]) * programs <= 227 * 1024, row


def test_every_pointer_product_is_64_bit(rows):
    assert [(r["kernel"], r["narrow"]) for r in rows if r["narrow"]] == []


@triton.jit
def _careless(x, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + row * stride, 0.0)


@triton.jit
def _careful(x, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + row.to(tl.int64) * stride, 0.0)


@pytest.mark.parametrize("kernel, count", [(_careless, 1), (_careful, 0)])
def test_the_check_of_products_finds_a_narrow_one(kernel, count, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = torch.empty(64, device="meta")
    launch = Launch(kernel, (1,), {"x": x, "stride": 7, "BLOCK": 16}, 4, 2)
    assert len(narrow_products(compile_launch(launch, "sm90").asm["ttir"])) == count


class _NoDevice:
    """A driver that says it has one sm_90 device, so that the just-in-time path runs up to the compiler's door."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return TARGETS["sm90"]


def test_recorded_launches_are_what_the_just_in_time_compiler_is_given(monkeypatch):
    """Every launch is bound by Triton itself; its signature, constants and alignments equal those compiled here."""
    from triton.runtime.driver import driver

    asked = []

    def hook(*, compile, **rest):
        asked.append(compile)
        return True  # do not compile

    monkeypatch.setattr(driver, "_active", _NoDevice())
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", hook)
    launches = shipped("sm90").values()
    for launch in launches:
        options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
        launch.kernel.run(grid=launch.grid, warmup=True, **launch.args, **options)
        mine, theirs = source(launch), asked[-1]
        assert dict(mine.signature) == dict(theirs["signature"]), launch.name
        assert dict(mine.constants) == dict(theirs["constants"]), launch.name
        aligned = {k for k, v in theirs["configs"][0].items() if ["tt.divisibility", 16] in [list(a) for a in v]}
        assert set(mine.attrs) == aligned, launch.name
    assert len(asked) == len(launches) >= 20


if __name__ == "__main__":
    made = compile_all()
    TABLE.parent.mkdir(exist_ok=True)
    with TABLE.open("w", newline="") as out:
        writer = csv.DictWriter(out, ["triton", *(n for n in made[0] if n != "narrow")], extrasaction="ignore",
                                lineterminator="\n")
        writer.writeheader()
        writer.writerows({"triton": triton.__version__, **row} for row in made)
    sys.exit(f"{len(made)} rows" if any(r["spills"] != "0" or r["narrow"] for r in made) else 0)
