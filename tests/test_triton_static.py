"""What the compilers say of every shipped tile, with no device: the table tests/data/triton_static.csv, kept true.

`triton_table` compiles the kernels, a process for each family, and writes the table anew.
"""

from __future__ import annotations

import csv
import functools
import json

import background
import pytest
import torch
import triton
import triton.language as tl
from pointer_products import narrow_products
from triton_table import KEY, ROUTERS, TABLE, command, routing, shipped, step

from moeffn.kernels.aot import TARGETS, compile_launch, source
from moeffn.kernels.launch import Launch, interpreting

pytestmark = pytest.mark.skipif(interpreting(), reason="interpreted kernels cannot be compiled")


def compile_family(family: str) -> list[dict[str, str]]:
    done = background.run(*command(family))
    assert done.returncode == 0, done.stdout[-4000:]
    return json.loads(done.stdout)


JOBS = [functools.partial(compile_family, family) for family in TARGETS]
needs_rows = pytest.mark.job(*JOBS, seconds=120)


@pytest.fixture(scope="module")
def rows():
    return [row for job in JOBS for row in background.result(job)]


@needs_rows
def test_the_committed_table_is_what_the_compiler_says(rows):
    with TABLE.open() as file:
        table = list(csv.DictReader(file))
    assert [tuple(r[k] for k in KEY) for r in table] == [tuple(r[k] for k in KEY) for r in rows]
    if table[0]["triton"] != triton.__version__:
        pytest.skip(f"the table is of triton {table[0]['triton']}, here is {triton.__version__}")
    for old, new in zip(table, rows, strict=True):
        assert old == {"triton": triton.__version__, **{k: v for k, v in new.items() if k != "narrow"}}


@needs_rows
def test_nothing_spills(rows):
    assert [r for r in rows if r["spills"] != "0"] == []


@needs_rows
@pytest.mark.parametrize("family, unit", [("sm80", "mma"), ("sm90", "wgmma"), ("sm100", "tcgen05"), ("gfx9", "mfma")])
def test_products_use_the_matrix_unit(rows, family, unit):
    """Those of float32 where the unit multiplies them exactly. Few rows per expert too: 64 columns of the matrices take
    the place of the 64 rows that wgmma and tcgen05 need."""
    products = [r for r in rows if r["family"] == family and r["kernel"] in ("up", "rows", "dh", "dw")]
    assert len(products) >= 30
    for row in products:
        exact = "fp32" in row["variant"] and family != "gfx9"  # NVIDIA's units would round to TF32
        assert row["matrix_unit"] == ("" if exact else unit), row


@needs_rows
@pytest.mark.parametrize("family", ["sm90", "sm100"])
def test_an_sm_holds_the_intended_programs(rows, family):
    """One of the largest tiles, two of every other: by 65536 registers and 228 KiB of shared memory, of which each
    program takes 1 KiB more than it asks for."""
    seen = set()
    for row in rows:
        if row["family"] == family and row["kernel"] in ("up", "rows", "dh", "dw"):
            programs = 1 if row["tile"] in ("128x128x64", "128x256x64") else 2
            assert int(row["registers"]) * 32 * int(row["warps"]) * programs <= 65536, row
            assert (int(row["shared_bytes"]) + 1024) * programs <= 228 * 1024, row
            seen.add((row["kernel"], programs))
    assert len(seen) == 8


@needs_rows
@pytest.mark.parametrize("kernel, tile, programs", [("slot_up", "8x256", 8 * 768 // 8), ("token_down", "8x128x8", 256)])
def test_decoding_one_token_has_every_program_resident(rows, kernel, tile, programs):
    """On an H200's 132 SMs, with the copies of each pipeline in shared memory: at least 36 KB an SM on their way."""
    row, = (r for r in rows if (r["family"], r["kernel"], r["tile"], r["split"]) == ("sm90", kernel, tile, ""))
    registers, shared = int(row["registers"]) * 32 * int(row["warps"]), int(row["shared_bytes"])
    resident = min(65536 // registers, 227 * 1024 // shared)
    assert resident * 132 >= programs and programs * shared >= 132 * 36 * 1024


@needs_rows
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


@pytest.mark.parametrize("few, many", [(129, 240), (2000, 2016), (32767, 32768)])
def test_a_new_token_count_compiles_nothing(few, many):
    """Within a bucket (small, medium, large) odd and 16-divisible counts get one specialisation of every kernel."""
    made = [{(launch.name, launch.num_warps, launch.num_stages, str(source(launch).signature),
              str(source(launch).constants), str(source(launch).attrs))
             for launch in (*step("sm90", T), *routing(ROUTERS["qwen3"], T))} for T in (few, many)]
    assert made[0] == made[1]


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
