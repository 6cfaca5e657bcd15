"""Counts from a config against counts of the live model that transformers builds from it, on the meta device."""

import importlib.util
import os
import re
import warnings

import pytest

from moeffn.accounting import Convention, count, find_preset

if importlib.util.find_spec("transformers") is None:
    pytest.skip("needs transformers", allow_module_level=True)

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
)

# family: what to change in transformers' default config, so that every branch of the family's structure is built.
# Defaults of full size are kept where nothing is said (on the meta device size costs nothing).
MIXTURES = [
    ("mixtral", {}), ("minimax", {}), ("qwen2_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [3]}),
    ("qwen2_moe", {"qkv_bias": False}), ("qwen3_moe", {"attention_bias": True, "decoder_sparse_step": 3}),
    ("qwen3_vl_moe_text", {}), ("qwen3_next", {"attention_bias": True}), ("qwen3_5_moe_text", {}), ("olmoe", {}),
    ("flex_olmo", {}), ("jamba", {}), ("hunyuan_v1_moe", {"head_dim": 128, "num_experts": 8, "moe_topk": 2}),
    ("deepseek_v2", {"q_lora_rank": None, "num_experts_per_tok": 6}), ("deepseek_v3", {"attention_bias": True}),
    ("deepseek_v32", {}), ("deepseek_v4", {}), ("ernie4_5_moe", {"use_bias": True}), ("mistral4", {}),
    ("gemma4_text", {"num_kv_shared_layers": 10, "use_double_wide_mlp": True}),
    ("gemma4_text", {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}),
    ("granitemoe", {}), ("granitemoeshared", {"shared_intermediate_size": 77, "attention_bias": True}),
    ("granitemoehybrid", {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]}),
    ("granitemoe_swa", {}), ("jetmoe", {}), ("gpt_oss", {}), ("openai_privacy_filter", {}),
    ("llama4_text", {"interleave_moe_layer_step": 2}),
    ("dots1", {"n_routed_experts": 16, "n_shared_experts": 2, "num_experts_per_tok": 4, "first_k_dense_replace": 1}),
    ("glm4_moe", {"head_dim": 128, "use_qk_norm": True, "attention_bias": True}), ("glm4v_moe_text", {"head_dim": 128}),
    ("glm4_moe_lite", {}), ("glm_moe_dsa", {}), ("kimi_linear", {"q_lora_rank": 64}), ("exaone_moe", {}),
    ("mimo_v2_flash", {}), ("nemotron_h", {"hybrid_override_pattern": "ME*-", "moe_latent_size": 64,
                                           "num_hidden_layers": None}),
    ("phimoe", {"attention_bias": True, "lm_head_bias": True}), ("minimax_m2", {}), ("afmoe", {}),
    ("lfm2_moe", {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "num_dense_layers": 1}),
    ("solar_open", {}), ("cohere2_moe", {"num_shared_experts": 2, "first_k_dense_replace": 1,
                                         "prefix_dense_intermediate_size": 99}),
    ("bailing_hybrid", {}), ("laguna", {"num_attention_heads_per_layer": [48, 64] * 20}), ("mellum", {}),
    ("hy_v3", {}), ("axk1", {}), ("sarvam_mla", {}), ("sarvam_moe", {}), ("aria_text", {}), ("lara_mini", {}),
    ("minimax_m3_vl_text", {"num_hidden_layers": 2, "layer_types": ["full_attention", "minimax_m3_sparse"],
                            "mlp_layer_types": ["dense", "sparse"]}),
    ("axk2", {}), ("beam", {}), ("dots3_note_text", {}), ("flint", {}), ("hy_v4", {}), ("glm5_next_text", {}),
    ("mistral_large4_text", {"kv_source_layers": [i - i % 2 for i in range(72)]}), ("muse_spark_text", {}),
    ("kolibri1", {}), ("inkling_text", {"mlp_layer_types": ["dense"] + ["sparse"] * 65}), ("inkling2_text", {}),
    ("inkling2_loop_text", {}), ("zaya", {}),
    ("qwen4_exp_text", {"num_hidden_layers": 8, "ple_layer_ids": [2, 5], "ngram_vocab_size_base": 1000,
                        "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 512,
                        "indexer_compress_ratio": 16, "eos_token_id": 3}),
    ("switch_transformers", {}), ("nllb-moe", {"encoder_layers": 4, "decoder_layers": 4, "num_experts": 8}),
]
# Dense families: CI builds one of each kind, all of them with MOEFFN_ALL_FAMILIES=1.
DENSE = [
    ("llama", {"attention_bias": True, "mlp_bias": True}), ("mistral", {}), ("qwen2", {}), ("qwen3", {}),
    ("qwen3_5_text", {}), ("gemma", {}), ("gemma2", {}), ("gemma3_text", {}), ("olmo", {}), ("olmo2", {}),
    ("olmo3", {}), ("phi", {}), ("phi3", {}), ("gpt2", {}), ("gpt_neo", {}), ("gpt_neox", {}), ("gptj", {}),
    ("opt", {}), ("bloom", {}), ("falcon", {}), ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 1}),
    ("starcoder2", {}), ("stablelm", {}), ("cohere", {"use_qk_norm": True}), ("cohere2", {}), ("granite", {}),
    ("smollm3", {}), ("glm", {}), ("glm4", {}), ("exaone4", {}), ("seed_oss", {}),
    ("nemotron", {"num_key_value_heads": 8}), ("t5", {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 2}),
    ("mamba", {}), ("mamba2", {}), ("gpt_bigcode", {}), ("arcee", {}), ("apertus", {}),
    ("hunyuan_v1_dense", {"head_dim": 128}), ("mpt", {}), ("ernie4_5", {}), ("helium", {}),
    ("lfm2", {"layer_types": ["conv", "full_attention"] * 16, "conv_bias": True}), ("falcon_h1", {}),
    ("ministral3", {}), ("minicpm3", {}), ("distilbert", {}), ("youtu", {}), ("gemma3n_text", {}),
    ("gemma4_unified_text", {}), ("olmo_hybrid", {}), ("recurrent_gemma", {}), ("zamba", {}),
    ("zamba2", {"num_mem_blocks": 2, "use_shared_attention_adapter": True, "add_bias_linear": True}), ("rwkv", {}),
    ("lfm3", {}), ("bitnet", {}), ("exaone", {}), ("hyperclovax", {}), ("nanochat", {}), ("jais2", {}),
    ("apertus1p5_text", {}), ("vaultgemma", {}), ("iquestcoder", {}), ("muse_glimmer_text", {}), ("bart", {}),
    ("mbart", {}), ("pegasus", {}), ("m2m_100", {}), ("marian", {}), ("blenderbot", {}), ("blenderbot-small", {}),
    ("whisper", {}), ("cosmos3_edge_text", {}), ("granite_docling_text", {}), ("glm_ocr_text", {}),
]
KINDS = ("llama", "qwen2", "gemma3_text", "gemma3n_text", "olmo2", "gpt2", "t5", "bart", "mamba2", "zamba2", "lfm2",
         "recurrent_gemma", "olmo_hybrid", "rwkv", "falcon_h1", "distilbert")
ALL = bool(os.environ.get("MOEFFN_ALL_FAMILIES"))
FAMILIES = MIXTURES + [case for case in DENSE if case[0] in KINDS or ALL]
# Building a model takes its time by layers: eight hold a period of every pattern. These need the number they have.
AS_DEEP = ("deepseek_v4", "gemma3n_text", "gemma4_text", "inkling_text", "inkling2_loop_text", "laguna", "lfm2",
           "lfm2_moe", "minimax_m3_vl_text", "mistral_large4_text", "nemotron_h", "nllb-moe", "switch_transformers",
           "t5", "bart", "zamba2", "distilbert", "gpt2")
LIVE_TOP_K = {"switch_transformers": 1, "nllb-moe": 2}  # their modules do not say it


def build(config):
    for kind in (AutoModelForSpeechSeq2Seq, AutoModelForSeq2SeqLM, AutoModelForCausalLM, AutoModelForImageTextToText,
                 AutoModel):
        if type(config) in kind._model_mapping:
            with torch.device("meta"):
                return kind.from_config(config)
    raise AssertionError(f"transformers builds no model from {type(config).__name__}")


def whole(name, changes):
    """The live model and its config in full, as saving it would write it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = AutoConfig.for_model(name, **changes)
        return build(config), config.to_dict()


@pytest.mark.parametrize(("name", "changes"), FAMILIES, ids=lambda v: v if isinstance(v, str) else "")
def test_config_equals_live_model(name, changes):
    """At full size with MOEFFN_ALL_FAMILIES=1, with eight layers otherwise."""
    model, config = whole(name, changes if ALL or name in AS_DEEP else {"num_hidden_layers": 8, **changes})
    counted, live = count(config), count(model, top_k=LIVE_TOP_K.get(name))
    parameters = sum(p.numel() for p in model.parameters())
    assert live.total == parameters
    total = counted.total
    if live.part("head").total == 0:  # a base model without the head that the config would have
        total -= counted.part("head").total
    assert total == parameters
    for part in ("routed", "router", "shared_gate", "embedding"):
        assert counted.part(part).total == live.part(part).total, part
    if name == "zaya":  # a module does not tell that one of its experts computes nothing
        counted = count(config, convention=Convention(idle="max"))
    assert (counted.active, counted.part("routed")) == (live.active + counted.total - total, live.part("routed"))


WRAPPERS = [
    "aria", "audioflamingo3", "cohere2_vision", "deepseek_vl", "deepseek_vl_hybrid", "exaone4_5",
    "glm46v", "glm4v", "glm5_next", "glm_ocr", "glmasr", "got_ocr2", "granite_speech", "hy_v4_vl", "idefics2",
    "idefics3", "inkling2", "inkling_mm_model", "internvl", "janus", "lfm2_vl", "lfm3_vl", "lighton_ocr", "llava",
    "llava_next", "llava_next_video", "llava_onevision", "minimax_m3_vl", "mistral3", "mistral_large4", "muse_glimmer",
    "muse_spark", "musicflamingo", "nemotron_h_omni", "ovis2", "paddleocr_vl", "paligemma", "qwen2_5_omni_thinker",
    "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_asr", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "unlimited_ocr",
    "vibevoice_asr", "video_llama_3", "video_llava", "vipllava", "voxtral",
]


@pytest.mark.parametrize("name", WRAPPERS if ALL else ["qwen3_vl_moe", "internvl"])
def test_language_model_inside_a_wrapper(name):
    """All that is not in a tower or projector; these are named as excluded."""
    model, config = whole(name, {})
    inside = re.compile(r"(^|\.)(language_model|text_model|lm_head)\.|^model\.(embed_tokens|layers|norm)\.")
    language = sum(p.numel() for key, p in model.named_parameters() if inside.search(key) and "vision" not in key)
    counted = count(config)
    assert counted.total == language < sum(p.numel() for p in model.parameters())
    assert set(counted.excluded) >= {key for key in ("vision_config", "audio_config") if config.get(key)}


def test_experts_of_image_tokens_are_no_text_tokens():
    """ERNIE 4.5 VL 28B-A3B: as built by transformers, and from the keys of the published config."""
    model, config = whole("ernie4_5_vl_moe", {})
    language = sum(p.numel() for key, p in model.named_parameters() if key.startswith(("model.language", "lm_head")))
    counted = count(config)
    assert counted.total == language == 28_624_635_776
    assert counted.part("vision").total == 27 * (3 * 2560 * 512 * 64 + 64 * 2560 + 64)
    assert counted.part("vision").active == 27 * (64 * 2560 + 64)
    text = {k: v for k, v in config["text_config"].items() if k != "mlp_layer_types"}
    published = {**text, "model_type": "ernie4_5_moe_vl", "moe_num_experts": [64, 64], "moe_layer_start_index": [1, 1],
                 "moe_layer_end_index": [29, 28], "moe_layer_interval": 1, "vision_config": {}}
    assert count(published).total == counted.total
    with pytest.raises(ValueError, match=r"moe_num_experts: expected 2 entries"):
        count({**published, "moe_num_experts": [64]})


def test_dbrx_stacks_experts_in_rows():
    config = dict(find_preset("DBRX").config)
    config["attn_config"] = {**config["attn_config"], "rope_theta": 500000}  # transformers cannot do without
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(AutoConfig.for_model(config.pop("model_type"), **config))
    live, counted = count(model), count("DBRX")
    assert (live.total, live.active) == (counted.total, counted.active) == (131_596_523_520, 36_469_708_800)


def test_gemma_4_with_its_vision_tower():
    from transformers import Gemma4ForConditionalGeneration

    config = dict(find_preset("Gemma-4-26B-A4B(text+vision as built)").config)
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model = Gemma4ForConditionalGeneration(AutoConfig.for_model(config.pop("model_type"), **config))
    live = count(model)
    assert live.total == count("Gemma-4-26B-A4B(text+vision as built)").total
    assert live.active == count("Gemma-4-26B-A4B(text+vision as built)").active


def test_longcat_real_weights_are_fewer_than_transformers_allocates():
    """The class gives identity experts rows of gate and up weights, which no checkpoint has."""
    model, config = whole("longcat_flash", {})
    rows = 28 * 256 * 2 * 2048 * 6144
    assert count(model).total - count(config).total == rows


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w_in = nn.Parameter(torch.empty(6, 20, 8, device="meta"))
        self.w_out = nn.Parameter(torch.empty(6, 8, 10, device="meta"))
        self.b_in = nn.Parameter(torch.empty(6, 20, device="meta"))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 6, bias=False, device="meta")
        self.experts = Experts()


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(30, 8, device="meta")
        self.layers = nn.ModuleList([Block()])
        self.lm_head = nn.Linear(8, 30, bias=False, device="meta")
        self.lm_head.weight = self.embed_tokens.weight


def test_a_module_of_ones_own():
    """Each storage once, top-k from the caller when no module has it, from the module when one does."""
    model = Tied()
    with pytest.raises(ValueError, match=r"top_k: layers\.0\.experts\.w_in belongs to experts"):
        count(model)
    expert = 20 * 8 + 8 * 10 + 20
    found = count(model, top_k=2)
    assert found.total == 30 * 8 + 6 * 8 + 6 * expert
    assert found.active == 30 * 8 + 6 * 8 + 2 * expert
    model.layers[0].router.top_k = 3
    assert count(model).active == 30 * 8 + 6 * 8 + 3 * expert
    assert count(model, convention=Convention(active="none")).active == 6 * 8 + 3 * expert
