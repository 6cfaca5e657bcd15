"""Counts from configs: published models to the unit, conventions, and configs that must be refused."""

import json
import os
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from moeffn.accounting import VENDORS, Convention, count, find_preset, presets

GOLDEN = json.loads((Path(__file__).parent / "data/accounting/golden.json").read_text())
FILES = json.loads((Path(__file__).parent / "data/accounting/files.json").read_text())
IDLE_BOUNDS = {"min_all": ("min", "active_all"), "max_all": ("max", "active_all"),
               "min_excl_input": ("min", "active_head"), "max_excl_input": ("max", "active_head"),
               "min_excl_both": ("min", "active_none"), "max_excl_both": ("max", "active_none")}


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda g: g["name"])
def test_published_models_to_the_unit(golden):
    found = count(golden["name"])
    assert found.total == golden["total"]
    for key in ("all", "head", "none"):
        if key in golden:
            assert getattr(found, f"active_{key}") == golden[key], key
    if "ffn" in golden:  # the FFNs alone, of LongCat without its routed experts, of GPT-3 without biases
        words = golden.get("ffn_convention", "idle=mean")
        assert count(golden["name"], convention=words).ffn_active == golden["ffn"]
        assert count(golden["name"], convention=f"scope=ffn,{words}").active == golden["ffn"]
    if "buffers" in golden:
        assert found.buffers == golden["buffers"]
    if "mtp_total" in golden:
        assert (found.mtp_total, found.mtp_active) == (golden["mtp_total"], golden["mtp_active"])
    for key, (idle, attribute) in IDLE_BOUNDS.items():
        if key in golden:
            assert getattr(count(golden["name"], convention=Convention(idle=idle)), attribute) == golden[key], key


@pytest.mark.parametrize("published", FILES, ids=lambda g: g["name"])
def test_elements_of_published_files(published):
    """What the files of a model hold by their own index, from its config alone."""
    assert count(published["name"], convention=Convention(scope=published["scope"])).total == published["total"]


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda g: g["name"])
def test_parts_add_up_and_json_agrees(golden):
    found = count(golden["name"])
    assert sum(p.total for p in found.parts) == found.total
    data = json.loads(json.dumps(found.to_dict()))
    assert data["total"] == found.total
    assert data["active"] == {"all": found.active_all, "head": found.active_head, "none": found.active_none}
    assert sum(c["total"] for c in data["components"].values()) == found.total
    in_layers = sum(layer.total * layer.count for layer in found.layers)
    assert in_layers == count(golden["name"], convention=Convention(scope="layers")).total
    assert found.active_none <= found.active_head <= found.active_all <= found.total


def test_published_figures_are_near_under_the_vendors_convention():
    """Anchored on what vendors print, so that an error shared by this table and its golden counts still shows."""
    for name, preset in presets().items():
        if preset.published_total and name not in ("Transformer-base", "Switch-Base-128"):  # printed: 65M, "7B"
            total = count(name, convention=preset.convention).total
            assert total == pytest.approx(preset.published_total, rel=0.04), name


@pytest.mark.parametrize(("name", "convention", "total", "active"), [
    ("GLM-4.5", "glm", 355_233_991_936, 32_482_299_136),  # its own caption: MTP in, embeddings and head out
    ("Ling-mini-2.0", "all", 16_255_638_528, 1_432_968_192),  # one vendor prints both 1.43B ...
    ("Ling-mini-2.0", "none", 16_255_638_528, 789_142_528),  # ... and "789M non-embedding"
    ("Nemotron-3-Nano-30B-A3B", "nvidia", 31_577_937_344, 3_227_751_872),
    ("MiniMax-Text-01", "minimax", 456_089_655_296, 45_944_920_064),
    ("Qwen3-30B-A3B", "qwen", 30_532_122_624, 3_353_032_704),
    ("gpt-oss-120b", "openai", 116_829_156_672, 5_132_849_472),
    ("LongCat-Flash", "longcat", 560_664_958_976, 27_149_490_176),  # uniform mean over identity experts: "~27B"
])
def test_vendor_conventions(name, convention, total, active):
    found = count(name, convention=convention)
    assert (found.total, found.active) == (total, active)


def test_checkpoint_scope_counts_stored_elements():
    """DeepSeek-V3's BF16 + FP8 elements are main + MTP + duplicated embedding and head; GLM-4.5 adds its buffers."""
    deepseek = count("DeepSeek-V3", convention=Convention(scope="checkpoint"))
    assert deepseek.total - deepseek.buffers == 684_489_830_400 == 671_026_404_352 + 11_610_067_968 + 1_853_358_080
    assert deepseek.buffers == 59 * 256
    assert count("GLM-4.5", convention=Convention(scope="checkpoint")).total == 358_337_791_296
    assert count("Qwen3-Next-80B-A3B", convention=Convention(scope="checkpoint")).total == 81_324_862_720
    assert count("Qwen3-30B-A3B", convention=Convention(scope="checkpoint")).total == 30_532_122_624


def test_gpt_oss_table_of_its_card():
    found = count("gpt-oss-20b")
    assert found.part("routed").total + found.part("router").total == 19_119_145_728  # "MLP 19.12B"
    assert found.part("attention").total == 637_203_456  # "Attention 0.64B"
    assert found.part("embedding").total + found.part("head").total == 1_158_266_880  # "1.16B"


def test_worked_block():
    """d=4096, 32 heads of 128, 8 key/value heads, gated 14336: attention, FFN and its share."""
    found = count({**find_preset("Llama-3.1-8B").config, "num_hidden_layers": 1}, convention=Convention(scope="layers"))
    attention, ffn = found.part("attention").total, found.part("dense").total
    assert (attention, ffn) == (41_943_040, 176_160_768)
    assert round(100 * ffn / (attention + ffn), 1) == 80.8


def test_mla_layer_of_deepseek_v3():
    layer = count({**find_preset("DeepSeek-V3").config, "num_hidden_layers": 1, "first_k_dense_replace": 1})
    latent_norms = layer.part("norm").total - 3 * 7168
    assert layer.part("attention").total == 187_105_280
    assert layer.part("attention").total + latent_norms == 187_107_328


def test_active_is_not_total():
    """Linear in the experts a token uses; the number of experts shows in the router alone."""
    config = find_preset("Mixtral-8x7B-v0.1").config
    base = count(config)
    expert = 32 * 3 * 4096 * 14336
    for k in range(1, 9):
        assert count({**config, "num_experts_per_tok": k}).active_all == base.active_all + (k - 2) * expert
    wide = count({**config, "num_local_experts": 64})
    assert wide.active_all - base.active_all == wide.part("router").total - base.part("router").total == 32 * 56 * 4096
    assert wide.total > 7 * base.total


@pytest.mark.parametrize(("change", "layers"), [
    ({"decoder_sparse_step": 2}, [False, True] * 24),
    ({"mlp_only_layers": [0, 47]}, [False] + [True] * 46 + [False]),
])
def test_dense_layers_between_sparse_ones(change, layers):
    config = {**find_preset("Qwen3-30B-A3B").config, **change}
    found = count(config)
    kinds = [layer.kind for layer in found.layers for _ in range(layer.count)]
    assert kinds == ["sparse" if on else "dense" for on in layers]
    assert found.part("dense").total == layers.count(False) * 3 * 2048 * 6144


def test_tied_and_untied_differ_by_one_matrix():
    config = find_preset("Llama-3.1-8B").config
    untied, tied = count(config), count({**config, "tie_word_embeddings": True})
    table = 128256 * 4096
    assert untied.total - tied.total == table
    assert untied.active_head == tied.active_head == untied.active_all - table  # what a token is multiplied by
    assert untied.active_none == tied.active_none


def test_shared_experts_by_number_and_by_width():
    config = find_preset("DeepSeek-V3").config
    shared = count(config).part("shared")
    assert shared.total == shared.active == 58 * 3 * 7168 * 2048
    assert count({**config, "n_shared_experts": 3}).part("shared").total == 3 * shared.total
    assert count({**config, "n_shared_experts": 0}).part("shared").total == 0
    nano = count("Nemotron-3-Nano-30B-A3B")  # a width of its own, two matrices
    assert nano.part("shared").total == 23 * 2 * 2688 * 3712


def test_zero_shared_width_is_no_shared_expert():
    assert find_preset("Qwen3-Coder-480B-A35B").config["shared_expert_intermediate_size"] == 0
    assert count("Qwen3-Coder-480B-A35B").part("shared").total == 0
    qwen2 = {**find_preset("Qwen2-57B-A14B").config, "shared_expert_intermediate_size": 0}
    assert count(qwen2).part("shared").total == count(qwen2).part("shared_gate").total == 0


def test_top_1():
    scout = count("Llama-4-Scout")
    assert scout.part("routed").active * 16 == scout.part("routed").total
    assert {layer.top_k for layer in scout.layers} == {1}


def test_lists_where_numbers_are_usual():
    """Hunyuan writes sizes as lists, one entry a layer."""
    config = {"model_type": "hunyuan_v1_moe", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
              "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96, "vocab_size": 100, "num_experts": 8,
              "tie_word_embeddings": True, "moe_topk": [2, 2, 4], "num_shared_expert": [1, 1, 2],
              "moe_intermediate_size": [96, 96, 96]}
    found = count(config)
    assert found.part("routed").active == 3 * 64 * 96 * (2 + 2 + 4)
    assert found.part("shared").total == 3 * 64 * 96 * (1 + 1 + 2)
    with pytest.raises(ValueError, match=r"config\.moe_topk: expected 3 entries.*got 2"):
        count({**config, "moe_topk": [2, 4]})
    with pytest.raises(TypeError, match=r"config\.moe_topk\[1\]: expected an integer, got str"):
        count({**config, "moe_topk": [2, "2", 4]})
    with pytest.raises(TypeError, match=r"config\.hidden_size: .* a list that differs by layer"):
        count({**config, "hidden_size": [64, 128, 64]})


SIZES = [("Mixtral-8x7B-v0.1", key) for key in (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_local_experts",
    "num_experts_per_tok", "vocab_size")]
SIZES += [("DeepSeek-V3", key) for key in (
    "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "moe_intermediate_size",
    "first_k_dense_replace", "n_shared_experts")]
SIZES += [("OLMoE-1B-7B", "intermediate_size"), ("gpt-oss-20b", "head_dim"),
          ("Nemotron-3-Nano-30B-A3B", "ssm_state_size")]


@pytest.mark.parametrize(("name", "key"), SIZES)
def test_a_missing_size_is_named_and_never_filled(name, key):
    config = dict(find_preset(name).config)
    del config[key]
    with pytest.raises(ValueError, match=rf"config\.{key} is missing"):
        count(config)


@pytest.mark.parametrize("name", [
    "Qwen3-30B-A3B", "DeepSeek-V3.2", "GLM-4.5", "gpt-oss-20b", "Llama-4-Scout", "Jamba-v0.1", "Granite-3.0-1B-A400M",
    "ERNIE-4.5-21B-A3B", "LongCat-Flash", "Nemotron-3-Nano-30B-A3B", "Switch-Base-128", "GPT-2", "Llama-3.1-8B",
    "Gemma-4-26B-A4B(text)", "Qwen3-Next-80B-A3B", "LFM2-8B-A1B", "Kimi-Linear-48B-A3B", "MiMo-V2-Flash"])
def test_no_key_is_left_out_silently(name):
    """Without any one key of its config a model is refused, or counted the same, or the reading is in `assumed`."""
    config, whole = find_preset(name).config, count(name)
    for key in config:
        short = {k: v for k, v in config.items() if k != key}
        try:
            found = count(short)
        except ValueError as error:
            assert key in str(error) or "is missing" in str(error), (key, error)
            continue
        if (found.total, found.active, found.mtp_total) != (whole.total, whole.active, whole.mtp_total):
            assert key in dict(found.assumed), key


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"num_experts_per_tok": 9}, ValueError, "num_experts_per_tok: 9 experts per token, of 8"),
    ({"num_experts_per_tok": 0}, ValueError, "num_experts_per_tok: expected at least 1, got 0"),
    ({"hidden_size": "4096"}, TypeError, "hidden_size: expected an integer, got str"),
    ({"hidden_size": 4096.0}, TypeError, "hidden_size: expected an integer, got float"),
    ({"num_local_experts": True}, TypeError, "num_local_experts: expected an integer, got bool"),
    ({"tie_word_embeddings": 1}, TypeError, "tie_word_embeddings: expected true or false"),
    ({"num_attention_heads": 33}, ValueError, "head_dim is missing and 4096 does not divide by 33"),
    ({"model_type": "mixtrall"}, ValueError, r"no weight table for 'mixtrall' \(close: mixtral"),
    ({"model_type": None}, ValueError, "model_type is missing"),
])
def test_bad_values_are_named(change, error, message):
    with pytest.raises(error, match=message):
        count({**find_preset("Mixtral-8x7B-v0.1").config, **change})


MISREAD = ["Qwen3-30B-A3B", "DeepSeek-V3.2", "gpt-oss-20b", "Granite-4.0-H-Small", "DBRX", "Gemma-4-26B-A4B"]
if os.environ.get("MOEFFN_ALL_FAMILIES"):
    MISREAD += ["DeepSeek-V4-Flash", "Llama-4-Scout", "Nemotron-3-Nano-30B-A3B", "ERNIE-4.5-21B-A3B", "Step-3",
                "Grok-2", "RWKV-7-2.9B", "xLSTM-7B", "openPangu-Ultra-MoE-718B", "Skywork-MoE", "BERT-base", "T5-11B"]


@pytest.mark.parametrize("name", MISREAD)
def test_any_value_is_counted_or_refused_by_the_name_of_its_key(name):
    config = find_preset(name).config
    for key in config:
        for value in (None, 0, -1, 2.5, "x", True, [], [1], {}, {"a": 1}, [None], ["a", "b"]):
            try:
                assert count({**config, key: value}).total >= 0
            except (ValueError, TypeError) as error:
                assert str(error).startswith("config"), (key, value, error)


def test_sources_that_are_none(tmp_path):
    with pytest.raises(ValueError, match="neither a file nor a preset; close presets: Qwen3-30B-A3B"):
        count("Qwen3-30B-A3")
    broken = tmp_path / "config.json"
    broken.write_text("{")
    with pytest.raises(ValueError, match="not JSON"):
        count(broken)
    with pytest.raises(TypeError, match="source: expected"):
        count(3)
    with pytest.raises(ValueError, match="convention: expected one of all, head"):
        count("GPT-2", convention="vendor")
    with pytest.raises(ValueError, match=r"convention\.scope: expected one of ffn"):
        Convention(scope="everything")


def test_paths_and_names(tmp_path):
    config = find_preset("OLMoE-1B-7B").config
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert count(tmp_path).total == count(tmp_path / "config.json").total == count(str(tmp_path)).total
    assert count("olmoe 1b 7b").total == count(config).total == 6_919_161_856
    assert count("deepseek-ai/DeepSeek-V3.1") == count("DeepSeek-V3")  # another release of the same sizes
    assert count("Qwen/Qwen3-30B-A3B").total == count("Qwen3-30B-A3B").total


def test_text_tower_inside_a_multimodal_config():
    found = count("Qwen3.5-35B-A3B")
    assert found.excluded == ("vision_config",)
    inner = {**find_preset("Qwen3.5-35B-A3B").config["text_config"], "tie_word_embeddings": False}
    assert count(inner).total == found.total
    gemma, whole = count("Gemma-3-27B", convention=Convention(vision=False)), count("Gemma-3-27B")
    assert gemma.total == 27_009_346_304
    assert whole.total - gemma.total == 423_060_336


def test_what_is_assumed_is_said():
    assumed = dict(count("Gemma-3-1B").assumed)
    assert assumed["tie_word_embeddings"] is True
    config = {**find_preset("Gemma-3-1B").config, "tie_word_embeddings": False, "attention_bias": False,
              "mlp_bias": False}
    assert count(config).assumed == ()


def test_conventions_leave_out_norms_biases_and_router_biases():
    name = "gpt-oss-20b"
    whole = count(name)
    assert whole.total - count(name, convention=Convention(norms=False)).total == whole.part("norm").total
    biases = 24 * (2 * 2880 + 2 * 512 + 4096 - 2880 + 32 + 32 * (2 * 2880 + 2880))
    assert whole.total - count(name, convention=Convention(biases=False)).total == biases
    ernie = count("ERNIE-4.5-21B-A3B")  # selection biases are parameters here
    assert ernie.total - count("ERNIE-4.5-21B-A3B", convention=Convention(router_biases=False)).total == 27 * 64
    assert count(name, convention=Convention(scope="ffn")).total == whole.ffn_total


def test_count_is_the_sum_of_its_formula():
    """DeepSeek layout on any sizes, against the closed formula."""
    d, f, vocab = 32, 24, 50
    for experts, k, shared, layers, tied in product((1, 3, 8), (1, 2, 8), (0, 1, 4), (1, 3), (False, True)):
        k = min(k, experts)
        config = {"model_type": "deepseek", "hidden_size": d, "num_hidden_layers": layers, "num_attention_heads": 4,
                  "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 40, "moe_intermediate_size": f,
                  "n_routed_experts": experts, "num_experts_per_tok": k, "n_shared_experts": shared,
                  "first_k_dense_replace": 1, "tie_word_embeddings": tied, "vocab_size": vocab}
        found = count(config)
        attention = d * 8 * (2 * 4 + 2 * 2)
        head = 0 if tied else vocab * d
        common = layers * (attention + 2 * d) + d + vocab * d + head + 3 * d * 40
        sparse = layers - 1
        assert found.total == common + sparse * (3 * d * f * (experts + shared) + experts * d), config
        assert found.active == common + sparse * (3 * d * f * (k + shared) + experts * d), config


def test_conventions_in_words():
    assert count("GLM-4.5", convention="scope=model+mtp,total=none,active=none") == count("GLM-4.5", convention="glm")
    words = count("gpt-oss-20b", convention="norms=no,biases=no")
    assert words == count("gpt-oss-20b", convention=Convention(norms=False, biases=False))
    for wrong in ("norms=0", "scope", "size=2", "active=none,"):
        with pytest.raises(ValueError, match="convention: expected"):
            count("GPT-2", convention=wrong)
    with pytest.raises(ValueError, match=r"convention\.idle: expected one of min"):
        count("GPT-2", convention="idle=some")


def test_a_count_prints_short_and_keeps_its_components():
    found = count("Qwen3-30B-A3B")
    assert repr(found) == "Count('Qwen3-30B-A3B', total=30_532_122_624, active=3_353_032_704)"
    assert repr(count("GLM-4.5", convention="glm")).endswith(", convention='scope=model+mtp,total=none,active=none')")
    assert repr(count("GPT-2", convention="norms=no")).endswith(", convention='norms=no')")
    assert found.components["routed"] == found.part("routed")
    assert tuple(found.components.values()) == found.parts


def test_all_vendor_names_work():
    for vendor in VENDORS:
        assert count("DeepSeek-V3", convention=vendor).active > 3e10
    assert count("DeepSeek-V3", convention=replace(VENDORS["glm"], active="all")).active > 3.8e10
