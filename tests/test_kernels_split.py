"""Inner sums split over programs: the same answers, the same bits on every run, and where it is chosen."""

import dataclasses

import pytest
import torch
from interpreted import bulk_tiles, interpreted, poisoned, sanitized, tiles, tiny_tiles
from problems import ACTIVATIONS, assert_within_budget, make

from moeffn import ExpertWeights, Layout
from moeffn.backends.triton import TritonBackend
from moeffn.kernels import decode, forward
from moeffn.kernels.launch import recorded
from moeffn.kernels.tiles import pick_tiles

pytestmark = interpreted
OAI = {"activation": ACTIVATIONS["swiglu_oai"], "layout": Layout.INTERLEAVED, "bias": True}


def split(base, share, **change):
    """`base` with the inner sums of up and down split."""
    def pick(problem):
        inner = problem.kernel in ("up", "down")
        return dataclasses.replace(base(problem), **({"split_k": share, **change} if inner else {}))
    return pick


@pytest.mark.parametrize("pick, reason", [
    (split(tiny_tiles, 2), "parts of different lengths"),
    (split(tiny_tiles, 4), "parts that are empty"),
    (split(tiny_tiles, 2, swap=True), "transposed products, as the shipped small tiles"),
    (split(bulk_tiles, 2), "read through descriptors by persistent programs"),
])
@pytest.mark.parametrize("dtype, options", [
    (torch.float32, OAI), (torch.float16, OAI), (torch.float32, {"apply_to": "input", "bias": True, "D": 33}),
    (torch.float16, {"activation": ACTIVATIONS["relu2"], "D": 48, "F": 64})])
def test_within_budget(pick, reason, dtype, options, monkeypatch):
    """Forward and every gradient: h comes from the summed parts. Nothing is read beyond the tensors or unwritten."""
    monkeypatch.setattr(forward, "multiprocessors", lambda device: 3)
    with tiles(pick), sanitized() as seen, poisoned(monkeypatch):
        assert_within_budget(make(**{"T": 19, "E": 4, "D": 40, "F": 36, **options}), dtype, backend="triton")
    assert seen["lanes"]


def test_whole_numbers_give_the_bits_of_the_unsplit_sum():
    """Sums of small integers are exact in any order, so only a lost or doubled part could differ."""
    problem = make(T=21, E=3, D=72, F=40, activation=ACTIVATIONS["reglu"], bias=True).to(torch.float32)
    for leaf in problem.leaves.values():
        leaf.copy_((leaf * 2).round().clamp(-3, 3))
    got = []
    for pick in (tiny_tiles, split(tiny_tiles, 2), split(tiny_tiles, 8)):
        with tiles(pick):
            got.append(problem.run(backend="triton"))
    for name, value in got[0].items():
        assert torch.equal(value, got[1][name]) and torch.equal(value, got[2][name]), name


def test_two_runs_are_bitwise_equal():
    problem = make(T=21, K=3, E=4, D=70, F=40, bias=True).to(torch.float32)
    with tiles(split(tiny_tiles, 4)):
        first, second = (problem.run(backend="triton") for _ in range(2))
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_no_tokens():
    with tiles(split(tiny_tiles, 2)):
        out = make(T=0, E=3, ids=torch.zeros(0, 2, dtype=torch.int32)).to(torch.float32).run(backend="triton")
    assert out["y"].shape == (0, 16) and not out["w_in"].any()


@pytest.mark.parametrize("share", [2, 4])
@pytest.mark.parametrize("options", [
    OAI, {"apply_to": "input", "bias": True}, {"activation": ACTIVATIONS["relu2"], "K": 3}, {"T": 1, "K": 5}])
def test_few_slots(share, options, monkeypatch):
    """Three steps: parts of two and one of them, and an empty one; a dropped slot leaves its part unwritten."""
    problem = make(**{"T": 6, "E": 5, "D": 37, "F": 19, **options})
    monkeypatch.setattr(decode, "STEP", 16)
    monkeypatch.setattr(decode, "split_k", lambda *grid: share)
    with sanitized() as seen, poisoned(monkeypatch):
        assert_within_budget(problem, torch.float32, grads=False, backend="triton")
        assert_within_budget(problem, torch.float16, grads=False, backend="triton")
    assert seen["lanes"]


@pytest.mark.parametrize("shape, few, many", [
    ({"E": 8, "D": 4096, "F": 256}, (4, 1), (8, 1)), ({"E": 8, "D": 1024, "F": 1024}, (1, 1), (2, 2)),
    ({"E": 8, "D": 4096, "F": 14336}, (1, 1), (1, 1)), ({"E": 128, "D": 2048, "F": 768}, (1, 1), (1, 1))])
def test_where_it_is_chosen(shape, few, many):
    """One token, then 64, of narrow experts, of a small model, of Mixtral and of Qwen3-30B-A3B: up and down."""
    E, D, F = shape.values()

    def meta(*size, dtype=torch.bfloat16):
        return torch.empty(size, dtype=dtype, device="meta")

    backend = TritonBackend(pick_tiles, "sm90")
    ew = ExpertWeights(meta(E, 2 * F, D), meta(E, D, F))
    for T, want in ((1, few), (64, many)):
        with recorded() as launches:
            backend.moe(meta(T, D), meta(T, 2, dtype=torch.int32), meta(T, 2, dtype=torch.float32), ew,
                        apply_to="output")
        up, down = (one for one in launches if one.name in ("slot_up", "token_down", "up", "rows"))
        assert up.args["SPLIT"] == want[0]
        assert (down.args["SPLIT"] if T > 1 else 1) == want[1]
