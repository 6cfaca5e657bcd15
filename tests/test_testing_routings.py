"""make_routing: valid, fixed by its seed, as skewed as it says, recorded traces."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from moeffn import load_stats
from moeffn.testing import make_routing

SPECS = ["uniform", "balanced", "zipf:1.2", "zipf:0", "hot:2", "hot:5", "single", "zero-expert"]
UNKNOWN = ["", "zipf", "zipf:x", "zipf:-1", "hot", "hot:0", "hot:9", "single:1", "even", "balanced:2"]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(("T", "K", "E"), [(0, 2, 4), (1, 1, 1), (50, 3, 7), (40, 8, 8)], ids=str)
def test_routings_are_valid_and_fixed_by_the_seed(spec: str, T: int, K: int, E: int) -> None:
    if spec.startswith("hot:") and int(spec[4:]) > E:
        with pytest.raises(ValueError, match="routing: expected one of"):
            make_routing(spec, T, K, E, seed=5)
        return
    r = make_routing(spec, T, K, E, seed=5)
    assert r.experts.shape == (T, K) and r.experts.dtype == torch.int32
    assert all(len(set(row)) == K and min(row) >= 0 and max(row) < E for row in r.experts.tolist())
    assert bool((r.weights > 0).all()) and torch.allclose(r.weights.sum(1), torch.ones(T))
    again, other = make_routing(spec, T, K, E, seed=5), make_routing(spec, T, K, E, seed=6)
    assert torch.equal(again.experts, r.experts) and torch.equal(again.weights, r.weights)
    assert T * K < 2 or not torch.equal(other.weights, r.weights)


def test_routings_have_the_skew_they_say() -> None:
    # vllm-project/vllm#57100; sgl-project/sglang#25571: a "balanced" generator that left experts idle
    T, K, E = 2000, 4, 32

    def counts(spec: str) -> list[int]:
        return sorted(load_stats(make_routing(spec, T, K, E), E).counts.tolist(), reverse=True)

    assert counts("balanced") == [250] * 32
    assert max(load_stats(make_routing("balanced", 7, 3, 32), 32).counts.tolist()) == 1
    assert max(counts("uniform")) < 1.25 * 250 and min(counts("uniform")) > 0.75 * 250
    assert counts("single") == [T] * 4 + [0] * 28
    assert counts("hot:6")[6:] == [0] * 26 and min(counts("hot:6")[:6]) > 0.9 * T * K / 6
    assert counts("hot:2")[:2] == [T, T] and counts("hot:2")[2] < 250
    assert counts("zero-expert")[16:] == [0] * 16 and counts("zero-expert")[15] > 400
    zipf = counts("zipf:1")
    assert zipf[0] > 4 * zipf[8] > 8 * zipf[31] > 0  # skewed, and nobody is without tokens
    assert counts("zipf:2")[0] > zipf[0]


def test_trace(tmp_path: Path) -> None:
    ids = np.array([[0, 3], [2, 1], [-1, 0]])
    np.save(tmp_path / "a.npy", ids)
    np.savez(tmp_path / "a.npz", ids=ids)
    np.savetxt(tmp_path / "a.csv", ids, fmt="%d", delimiter=",")
    (tmp_path / "a.json").write_text(json.dumps(ids.tolist()))
    torch.save(torch.from_numpy(ids), tmp_path / "a.pt")
    for kind in ("npy", "npz", "csv", "json", "pt"):
        r = make_routing(f"trace:{tmp_path}/a.{kind}", 5, 2, 4)
        assert r.experts.tolist() == [[0, 3], [2, 1], [-1, 0], [0, 3], [2, 1]]
    (tmp_path / "ragged.json").write_text("[[0, 3], [2]]")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for kind in ("npy", "npz", "csv", "json", "pt"):
        (tmp_path / f"broken.{kind}").write_text("{")
    unreadable = ["ragged.json", "deep.json", *(f"broken.{kind}" for kind in ("npy", "npz", "csv", "json", "pt"))]
    for path, K, E, message in (*((f"{tmp_path}/{name}", 2, 4, "rows of one length") for name in unreadable),
                                (f"{tmp_path}/a.npy", 3, 4, "K = 3"), (f"{tmp_path}/a.npy", 2, 3, "-1 .. 2"),
                                ("", 2, 4, "an existing file"), (__file__, 2, 4, "a .npy, .npz")):
        with pytest.raises(ValueError, match=message):
            make_routing(f"trace:{path}", 5, K, E)


@pytest.mark.parametrize("spec", UNKNOWN)
def test_unknown_routings_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="routing: expected one of uniform, balanced, zipf:A"):
        make_routing(spec, 4, 2, 8)


def test_routing_with_more_choices_than_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="K: expected at most E = 4, got 5"):
        make_routing("uniform", 4, 5, 4)
