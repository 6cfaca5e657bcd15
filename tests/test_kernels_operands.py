"""Weights and packed rows read through descriptors, by persistent programs, and products computed transposed: the same
answers, and when it happens."""

import dataclasses

import pytest
import torch
from interpreted import bulk_tiles, interpreted, sanitized, tiles, tiny_tiles
from problems import ACTIVATIONS, Problem, assert_within_budget, make

from moeffn import Layout, backends
from moeffn.backends import Needs
from moeffn.kernels import forward
from moeffn.kernels.launch import recorded
from moeffn.kernels.operands import descriptor

pytestmark = interpreted


@pytest.fixture(autouse=True)
def three_programs(monkeypatch):
    monkeypatch.setattr(forward, "multiprocessors", lambda device: 3)


def read(problem: Problem) -> dict[str, list[str]]:
    """READ (and READ_A) of each launch of a forward and a backward with `bulk_tiles`."""
    ew, x, w = problem.experts(), problem.leaves["x"], problem.leaves["weights"]
    with tiles(bulk_tiles) as backend, recorded() as launches:
        plan = backend.plan(problem.ids, ew.num_experts)
        y, h = backend.forward(x, plan, w, ew, apply_to="output", save=True)
        backend.backward(y, x, h, plan, w, ew, apply_to="output", needs=Needs(b_in=False, b_out=False))
    return {f"{i} {one.name}": [one.args[n] for n in ("READ", "READ_A") if n in one.args] + [one.grid[0]]
            for i, one in enumerate(launch for launch in launches if "READ" in launch.args)}


def transposed(problem: Problem) -> Problem:
    """Both weights as transposed views: contiguous along the other dimension."""
    leaves = dict(problem.leaves)
    for name in ("w_in", "w_out"):
        leaves[name] = leaves[name].transpose(1, 2).contiguous().transpose(1, 2)
    return Problem(leaves, problem.ids, problem.activation, problem.layout, problem.apply_to)


@pytest.mark.parametrize("options, change, reads, reason", [
    ({}, None, ["rows", "rows", "columns", "columns"], "gate and up halves; tails of rows, columns and inner sums"),
    ({"layout": Layout.INTERLEAVED, "bias": True, "activation": ACTIVATIONS["swiglu_oai"]}, None,
     ["rows", "rows", "columns", "columns"], "every second row"),
    ({"activation": ACTIVATIONS["relu2"], "D": 32, "F": 64}, None, ["rows", "rows", "columns", "columns"],
     "two matrices, whole tiles"),
    ({}, transposed, ["columns", "columns", "rows", "rows"], "contiguous the other way"),
    ({"layout": Layout.INTERLEAVED}, transposed, ["pointers", "columns", "rows", "rows"],
     "interleaved halves of a transposed matrix have no dimension of stride 1"),
    ({"D": 37, "F": 19}, None, ["pointers"] * 4, "rows that are no multiple of 16 bytes"),
])
def test_within_budget(options, change, reads, reason):
    problem = make(**{"T": 40, "E": 4, "D": 20, "F": 36, **options})
    if change:
        problem = change(problem)
    got = read(problem.to(torch.float32))
    assert [r[0] for r in got.values()] == reads, reason
    assert {r[-1] for r in got.values()} == {3}  # fewer programs than tiles
    with tiles(bulk_tiles), sanitized() as seen:
        assert_within_budget(problem, torch.float32, backend="triton")
    assert seen["lanes"]


@pytest.mark.parametrize("counts", [[35, 0, 1], [16, 17, 15], [0, 0, 48], [0, 0, 0]])
def test_uneven_groups_equal_the_pointers_answer(counts):
    """A tile's tail reads the next expert's rows, or rows beyond the last: nothing of them may show."""
    ids = torch.cat([torch.full((c, 1), e, dtype=torch.int32) for e, c in enumerate([*counts, 2])])
    ids[-2:] = -1
    problem = make(T=len(ids), K=1, E=3, D=16, F=20, ids=ids).to(torch.float32)
    with tiles(tiny_tiles):
        plain = problem.run(backend="triton")
    with tiles(bulk_tiles), sanitized():
        bulk = problem.run(backend="triton")
    for name, value in plain.items():
        torch.testing.assert_close(bulk[name], value, rtol=0, atol=0)


def test_a_nan_row_stays_in_its_token():
    problem = make(T=40, K=1, E=3, D=16, F=20, drop=False).to(torch.float32)
    with tiles(bulk_tiles):
        clean = problem.run(backend="triton", grads=False)["y"]
        problem.leaves["x"][4] = float("nan")
        got = problem.run(backend="triton", grads=False)["y"]
    others = [t for t in range(40) if t != 4]
    assert torch.isnan(got[4]).all() and torch.equal(got[others], clean[others])


def test_no_tokens():
    with tiles(bulk_tiles):
        out = make(T=0, E=3, ids=torch.zeros(0, 2, dtype=torch.int32)).to(torch.float32).run(backend="triton")
    assert out["y"].shape == (0, 16) and not out["w_in"].any()


@pytest.mark.parametrize("t, reason", [
    (torch.zeros(4, 8, 16)[:, :, 1:], "an address that is no multiple of 16 bytes"),
    (torch.zeros(4, 8, 18)[:, :, :16], "a row stride that is none"),
    (torch.zeros(4, 16, 8).transpose(1, 2), "no last dimension of stride 1"),
    (torch.zeros(8, 16).expand(4, 8, 16), "one matrix for all experts: a stride of 0"),
    (torch.zeros(0, 8, 16), "no elements"),
])
def test_layouts_without_a_descriptor(t, reason):
    assert descriptor(torch.zeros(4, 8, 16), (1, 8, 16)) is not None
    assert descriptor(t, (1, 8, 16)) is None, reason


def test_shared_weights_of_all_experts_are_read_through_pointers():
    problem = make(T=20, E=3, D=16, F=20).to(torch.float32)
    for name in ("w_in", "w_out"):
        problem.leaves[name] = problem.leaves[name][:1].expand(3, -1, -1)
    assert {r[0] for r in read(problem).values()} == {"pointers"}
    got = problem.run(backend="triton", grads=False)["y"]
    torch.testing.assert_close(got, problem.run(backend="torch", grads=False)["y"], rtol=1e-5, atol=1e-5)
    assert backends.get("triton").pick is not bulk_tiles


def swapped_tiles(problem):
    return dataclasses.replace(tiny_tiles(problem), swap=problem.kernel != "dw")


def swapped_bulk_tiles(problem):
    return dataclasses.replace(bulk_tiles(problem), swap=problem.kernel != "dw")


@pytest.mark.parametrize("pick", [swapped_tiles, swapped_bulk_tiles])
@pytest.mark.parametrize("dtype, options", [
    (torch.float32, {"activation": ACTIVATIONS["swiglu_oai"], "layout": Layout.INTERLEAVED, "bias": True}),
    (torch.float32, {"apply_to": "input", "activation": ACTIVATIONS["relu2"], "D": 33}), (torch.float16, {})])
def test_transposed_products(pick, dtype, options):
    """Forward and every gradient with the matrices on the left of each product; edges in every dimension."""
    with tiles(pick), sanitized() as seen:
        assert_within_budget(make(**{"T": 19, "E": 4, "D": 24, "F": 40, **options}), dtype, backend="triton")
    assert seen["lanes"]
