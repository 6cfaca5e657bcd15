"""The tuner's measuring under the interpreter: it runs the launches of one kernel with the tile that is asked for."""

import torch
from interpreted import interpreted

from moeffn.backends import tuning
from moeffn.kernels import launch
from moeffn.kernels.tiles import TileConfig

pytestmark = interpreted


def test_tune_times_each_kernel_and_keeps_what_is_faster(monkeypatch):
    ran = []
    real = launch.run
    monkeypatch.setattr(tuning, "run", lambda made: (ran.append(made), real(made)))
    monkeypatch.setattr("moeffn.kernels.tuned.neighbours", lambda tile, problem: [_wider(tile)])
    seen = {}

    def timer(calls):
        times = {}
        for name, call in calls.items():
            ran.clear()
            call()
            kernels = {(one.name, one.args["BLOCK_N"], one.args["BLOCK_K"]) for one in ran if "BLOCK_K" in one.args}
            assert len(kernels) == 1
            seen.setdefault(next(iter(kernels))[0], []).append(len(ran))
            times[name] = 1.0 / next(iter(kernels))[1] / next(iter(kernels))[2]
        return times

    lines = []
    found = tuning.tune([6], d_model=16, d_expert=32, num_experts=3, top_k=2, dtype=torch.float32,
                        device=torch.device("cpu"), say=lines.append, timer=timer)
    assert [e.key[0] for e in found] == ["up", "down", "dh", "dx", "dw"] and len(lines) == 5
    assert {name: set(counts) for name, counts in seen.items()} == {"up": {1}, "rows": {1, 2}, "dh": {1}, "dw": {2}}
    for e in found:
        assert e.tile_s < e.default_s and e.tile.block_n == 2 * e.default.block_n


def _wider(tile):
    return TileConfig(tile.block_m, 64, tile.block_k, tile.num_warps, tile.num_stages)
