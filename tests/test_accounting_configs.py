"""Configs with the keys that vendors publish, against the figures they print (billions, rounded or cut off)."""

import json
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from pathlib import Path

import pytest

from moeffn.accounting import count, find_preset

PUBLISHED = json.loads((Path(__file__).parent / "data/accounting/published.json").read_text())


def printed(value, figure):
    """Whether `value` weights are printed as `figure` billions."""
    digits = Decimal(figure)
    exact = Decimal(value) / 10**9
    return digits in (exact.quantize(digits, ROUND_HALF_UP), exact.quantize(digits, ROUND_DOWN))


@pytest.mark.parametrize("model", PUBLISHED, ids=lambda m: m["name"])
def test_published_figures(model):
    """Active under the convention that the vendor's figure follows."""
    found = count(model["config"], convention=f"active={model['convention']}")
    for value, figure in ((found.total, model["total"]), (found.active, model["active"])):
        assert figure is None or printed(value, figure), (value, figure)


def test_figures_that_count_embeddings_and_figures_that_do_not():
    """Ring's report prints 957M and 6.1B in its abstract, 1.6B and 7.4B in its table: without and with embeddings."""
    ring = {m["name"]: count(m["config"]) for m in PUBLISHED if m["name"].startswith("Ring")}
    mini, flash = ring["Ring-mini-linear-2.0"], ring["Ring-flash-linear-2.0"]
    assert printed(mini.active_none, "0.957") and printed(mini.active_all, "1.6")
    assert printed(flash.active_none, "6.1") and printed(flash.active_all, "7.4")


def test_lightning_or_delta_attention_in_ling():
    """Ling 2.5 and 3 share a `model_type`; keys of the delta rule tell them apart, and a missing one is named."""
    ling = next(m["config"] for m in PUBLISHED if m["name"] == "Ling-2.5-1T")
    two, three = count(ling), count({**ling, "short_conv_kernel_size": 4, "no_kda_lora": True})
    d, inner = 8192, 64 * 128
    lightning = 5 * d * inner + inner + 2 * 128
    delta = 4 * d * inner + 2 * d * inner + 64 * d + 3 * inner * 4 + inner + 64 + 128
    assert three.total - two.total == 70 * (delta - lightning) + 10 * 64 * d  # and gates in the ten latent layers
    with pytest.raises(ValueError, match=r"config\.short_conv_kernel_size is missing"):
        count({**ling, "no_kda_lora": True})
    with pytest.raises(ValueError, match=r"config\.short_conv_kernel_size is missing"):
        count({key: value for key, value in ling.items() if key != "group_norm_size"})


def test_sparse_layers_as_a_list_of_true_and_false():
    exaone = next(m["config"] for m in PUBLISHED if m["name"] == "K-EXAONE")
    found = count({**exaone, "is_moe_layer": [False, True] * 24})
    assert [layer.kind for layer in found.layers] == ["dense", "sparse"] * 24
    with pytest.raises(ValueError, match=r"config\.is_moe_layer: expected 48 of true and false"):
        count({**exaone, "is_moe_layer": [True]})
    with pytest.raises(TypeError, match=r"config\.is_moe_layer: expected a list"):
        count({**exaone, "is_moe_layer": 1})


@pytest.mark.parametrize(("name", "written"), [
    ("MiniMax-Text-01", "MiniMaxText01"), ("Mixtral-8x7B-v0.1", "Mixtral"), ("GPT-NeoX-20B", "gpt-neox"),
])
def test_capitals_and_punctuation_of_a_model_type_do_not_matter(name, written):
    assert count({**find_preset(name).config, "model_type": written}).total == count(name).total


def test_kimi_k3_is_not_counted_as_kimi_linear():
    """Its text_config says `kimi_linear`, with latent experts and residuals of blocks that Kimi Linear has not."""
    linear = find_preset("Kimi-Linear-48B-A3B").config
    with pytest.raises(ValueError, match=r"config\.text_config\.routed_expert_hidden_size: Kimi K3's layers"):
        count({"model_type": "kimi_vl", "text_config": {**linear, "routed_expert_hidden_size": 64}})


def test_sinks_of_mimo_by_its_flags():
    mimo = next(m["config"] for m in PUBLISHED if m["name"] == "MiMo-V2.5-Pro")
    full = mimo["hybrid_layer_pattern"].count(0)
    base = count(mimo).total
    assert count({**mimo, "add_full_attention_sink_bias": True}).total == base + full * 128
    assert count({**mimo, "add_swa_attention_sink_bias": False}).total == base - (70 - full) * 128


def test_experts_that_layers_share_count_once():
    """Megrez 2: ten pools for thirty sparse layers; a token still meets six experts in each layer."""
    given = next(m["config"] for m in PUBLISHED if m["name"].startswith("Megrez"))
    expert = 3 * 2048 * 1408
    found, alone = count(given), count({**given, "experts_shared_frequency": 1})
    assert (found.part("routed").total, alone.part("routed").total) == (10 * 64 * expert, 30 * 64 * expert)
    assert found.active == alone.active
    assert found.part("routed").active == 30 * 6 * expert
    with pytest.raises(ValueError, match="experts_shared_frequency: no weight table"):
        count({**given, "experts_shared_frequency": 11})


def test_width_of_a_head_of_hunyuan_under_its_own_name():
    known = find_preset("Hunyuan-A13B").config
    published = {**{key: v for key, v in known.items() if key != "head_dim"}, "attention_head_dim": 128}
    assert count(published).total == count("Hunyuan-A13B").total
    assert count({**published, "attention_head_dim": 64}).total < count("Hunyuan-A13B").total
