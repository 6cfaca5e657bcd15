"""The tuner without a GPU: what its search keeps for given times, and when a file's tiles are used."""

import dataclasses
import json
import warnings

import pytest
import torch

from moeffn.backends import tuning
from moeffn.backends.triton import TritonBackend
from moeffn.kernels import tuned
from moeffn.kernels.tiles import Problem, pick_tiles, why_illegal

UP = Problem("up", 2000, 2, True, "sm90", 2048, 768)
DEFAULT = pick_tiles(UP)


def by_cost(cost, log=None):
    """A timer that computes the seconds of a tile instead of measuring them."""
    def versus(a, b):
        if log is not None:
            log.append((a, b))
        return cost(a), cost(b)
    return versus


def test_the_search_climbs_to_the_fastest_tile_and_compares_it_with_the_default():
    def cost(tile):  # best: 4 stages, persistent, groups of 4
        return 1 + 0.1 * abs(tile.num_stages - 2) + 0.1 * (tile.persistent != 1) + 0.1 * (tile.group_m != 4)

    log = []
    entry = tuned.search(UP, by_cost(cost, log))
    assert entry.tile == dataclasses.replace(DEFAULT, num_stages=2, persistent=1, group_m=4)
    assert (entry.default_s, entry.tile_s) == pytest.approx((cost(DEFAULT), 1.0))
    assert log[-1] == (DEFAULT, entry.tile)
    assert all(why_illegal(c, UP) is None for pair in log for c in pair)


@pytest.mark.parametrize("cost, reason", [
    (lambda tile: 1.0, "all alike"),
    (lambda tile: 1.0 if tile == DEFAULT else 0.985, "faster by less than the margin"),
    (lambda tile: 1.0 if tile == DEFAULT else float("inf"), "nothing else compiles"),
])
def test_the_default_stays(cost, reason):
    assert tuned.search(UP, by_cost(cost)) is None, reason


def test_a_gain_that_does_not_show_again_is_not_kept():
    calls = []

    def versus(a, b):
        calls.append(b)
        return 1.0, 0.9 if b.persistent and calls.count(b) == 1 else 1.0

    assert tuned.search(UP, versus) is None
    assert calls[-1].persistent


@pytest.mark.parametrize("problem", [
    UP, dataclasses.replace(UP, kernel="dh"), dataclasses.replace(UP, kernel="dw"),
    dataclasses.replace(UP, kernel="dx", family="gfx9"), dataclasses.replace(UP, kernel="down", rows_per_expert=1)])
def test_neighbours_are_legal_different_and_of_the_same_height(problem):
    start = pick_tiles(problem)
    found = tuned.neighbours(start, problem)
    assert len(found) == len(set(found)) >= 6 and start not in found
    for tile in found:
        assert why_illegal(tile, problem) is None and tile.block_m == start.block_m
        differing = [f.name for f in dataclasses.fields(tile) if getattr(tile, f.name) != getattr(start, f.name)]
        assert len(differing) == 1
        assert problem.kernel != "dw" or differing[0] not in ("tma", "persistent")
    assert any(tile.split_k == 2 for tile in found) == (problem.kernel in ("up", "down"))


FASTER = dataclasses.replace(DEFAULT, group_m=4)


def entry(**change):
    return dataclasses.replace(tuned.Entry(tuned.key(UP), DEFAULT, 2e-3, FASTER, 1e-3), **change)


def picked(tmp_path, made, problem=UP, device="GPU"):
    tuned.save(tmp_path / "tiles.json", "GPU", [made])
    return tuned.load(tmp_path / "tiles.json", device).pick(problem)


def test_a_file_is_read_as_it_was_written(tmp_path):
    assert picked(tmp_path, entry()) == FASTER
    (read,) = tuned.load(tmp_path / "tiles.json", "GPU").entries.values()
    assert read.key == entry().key and read.tile_s == pytest.approx(1e-3)


@pytest.mark.parametrize("made, problem, reason", [
    (entry(tile_s=2e-3), UP, "not faster than the default"),
    (entry(default=FASTER, tile=DEFAULT), dataclasses.replace(UP, rows_per_expert=50), "another bucket"),
    (entry(), dataclasses.replace(UP, d_expert=512), "another width"),
    (entry(), dataclasses.replace(UP, num_experts=8), "another number of experts"),
    (entry(), dataclasses.replace(UP, itemsize=4), "another size of an element"),
    (entry(default=dataclasses.replace(DEFAULT, num_stages=2)), UP, "measured against another default"),
    (entry(tile=dataclasses.replace(DEFAULT, block_n=512)), UP, "does not fit the shared memory"),
    (entry(), dataclasses.replace(UP, family="sm80"), "a tile of another family"),
])
def test_when_the_shipped_tile_is_used(made, problem, reason, tmp_path):
    assert picked(tmp_path, made, problem) == pick_tiles(problem), reason


def test_a_file_of_another_device_or_triton_is_not_used_and_says_so(tmp_path):
    with pytest.warns(UserWarning, match="measured on GPU"):
        assert picked(tmp_path, entry(), device="other") == DEFAULT
    path = tmp_path / "tiles.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"triton": "0.0"}))
    with pytest.warns(UserWarning, match=r"triton 0\.0"):
        assert tuned.load(path, "GPU").pick(UP) == DEFAULT


@pytest.mark.parametrize("text", ["", "[]", '{"device": "GPU", "triton": "1"}',
                                  '{"device": "GPU", "triton": "1", "tiles": [{"kernel": "up"}]}'])
def test_what_is_no_such_file_is_refused(text, tmp_path):
    (tmp_path / "tiles.json").write_text(text)
    with pytest.raises(ValueError, match=r"MOEFFN_TILES: expected a file that `moeffn tune` wrote, got .*tiles\.json"):
        tuned.load(tmp_path / "tiles.json", "GPU")


def test_the_backend_reads_the_file_that_the_environment_names(tmp_path, monkeypatch):
    path = tmp_path / "tiles.json"
    tuned.save(path, tuning.device_name(), [entry()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert TritonBackend().pick(UP) == DEFAULT
        monkeypatch.setenv(tuned.VARIABLE, str(path))
        assert TritonBackend().pick(UP) == FASTER
        assert TritonBackend(pick_tiles).pick(UP) == DEFAULT
    monkeypatch.setenv(tuned.VARIABLE, str(path) + "x")
    with pytest.raises(FileNotFoundError):
        TritonBackend()


def test_nothing_is_tuned_inside_a_graph_capture(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="captured"):
        tuning.tune([64], d_model=16, d_expert=16, num_experts=2, top_k=1, dtype=torch.bfloat16,
                    device=torch.device("cuda"))
