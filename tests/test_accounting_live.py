"""Counts from a config against counts of the live model that transformers builds from it, on the meta device."""

import importlib.util
import os
import re
import warnings

import pytest

from moeffn.accounting import Convention, count, find_preset
from moeffn.accounting.live import read_module

if importlib.util.find_spec("transformers") is None:
    pytest.skip("needs transformers", allow_module_level=True)

import torch
from accounting_models import build, whole
from torch import nn
from transformers import AutoConfig

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
    ("doge", {"is_moe": True, "num_experts": 64, "num_experts_per_tok": 8}),
]
# Branches of dense families, encoders and encoder-decoders. Their defaults are in test_accounting_families.
BRANCHES = [
    ("solar_open", {"attention_bias": True}), ("hy_v3", {"mlp_bias": True}), ("opt", {"enable_bias": False}),
    ("seed_oss", {"attention_out_bias": True}), ("phi", {"qk_layernorm": True}), ("minicpm3", {"mlp_bias": True}),
    ("bailing_hybrid", {"linear_num_heads": 64, "linear_conv_kernel_dim": 8}),
    ("dots3_note_text", {"shared_experts_intermediate_size": 3072}), ("glm_image_text", {"attention_bias": False}),
    ("llama", {"attention_bias": True, "mlp_bias": True}), ("falcon", {"new_decoder_architecture": True,
                                                                       "num_kv_heads": 1}),
    ("cohere", {"use_qk_norm": True}), ("nemotron", {"num_key_value_heads": 8}),
    ("hunyuan_v1_dense", {"head_dim": 128}), ("bamba", {"attn_layer_indices": [1]}),
    ("t5", {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 2}),
    ("lfm2", {"layer_types": ["conv", "full_attention"] * 4, "conv_bias": True, "num_hidden_layers": 8}),
    ("zamba2", {"num_mem_blocks": 2, "use_shared_attention_adapter": True, "add_bias_linear": True}),
    ("opt", {"word_embed_proj_dim": 512, "do_layer_norm_before": False}),
    ("longt5", {"encoder_attention_type": "transient-global", "num_layers": 2, "feed_forward_proj": "gated-gelu"}),
    ("albert", {"num_hidden_groups": 2, "inner_group_num": 2}),
    ("persimmon", {"qk_layernorm": False}),
    ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True, "num_key_value_heads": 8}),
    ("xlstm", {"use_bias": True, "num_hidden_layers": 2, "num_blocks": 2}),
    ("idefics", {"cross_layer_interval": 2, "additional_vocab_size": 8}),
    ("deberta-v2", {"position_biased_input": False}), ("prophetnet", {"num_encoder_layers": 1, "ngram": 3}),
]
ALL = bool(os.environ.get("MOEFFN_ALL_FAMILIES"))
# Families whose tables nothing else shares, and near copies of others: with MOEFFN_ALL_FAMILIES=1 alone.
SELDOM = (
    "exaone_moe", "bailing_hybrid", "laguna", "glm4v_moe_text", "aria_text", "granitemoeshared", "deberta-v2",
    "mistral_large4_text", "inkling_text", "inkling2_text", "inkling2_loop_text", "qwen4_exp_text", "beam", "flint",
    "kolibri1", "muse_spark_text", "axk1", "axk2", "hy_v4", "dots3_note_text", "glm5_next_text", "lara_mini",
    "mellum", "sarvam_mla", "sarvam_moe", "solar_open", "hy_v3", "openai_privacy_filter", "granitemoe",
    "granitemoe_swa", "mistral4", "flex_olmo", "zamba2", "qwen3_vl_moe_text", "glm4_moe_lite", "glm_moe_dsa",
    "falcon", "cohere", "nemotron", "hunyuan_v1_dense", "persimmon", "bamba", "minimax_m3_vl_text",
    "seed_oss", "phi", "minicpm3", "glm_image_text",
)
FAMILIES = [case for case in MIXTURES + BRANCHES if ALL or case[0] not in SELDOM]
# Building a model takes its time by layers: eight hold a period of every pattern, four where all layers are alike or
# the first few differ. AS_DEEP need the number they have.
FOUR = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo", "hunyuan_v1_moe", "deepseek_v2", "deepseek_v3",
        "deepseek_v32", "ernie4_5_moe", "mistral4", "granitemoe", "granitemoeshared", "granitemoe_swa", "jetmoe",
        "gpt_oss", "openai_privacy_filter", "llama4_text", "dots1", "glm4_moe", "glm4v_moe_text", "glm4_moe_lite",
        "phimoe", "minimax_m2", "solar_open", "sarvam_mla", "sarvam_moe", "aria_text", "llama", "falcon", "cohere",
        "nemotron", "opt", "albert", "persimmon", "stablelm", "deberta-v2", "hunyuan_v1_dense", "doge")
AS_DEEP = ("gemma3n_text", "gemma4_text", "inkling_text", "inkling2_loop_text", "laguna", "lfm2",
           "lfm2_moe", "minimax_m3_vl_text", "mistral_large4_text", "nemotron_h", "nllb-moe", "switch_transformers",
           "t5", "zamba2", "prophetnet")
LIVE_TOP_K = {"switch_transformers": 1, "nllb-moe": 2}  # their modules do not say it


@pytest.mark.parametrize(("name", "changes"), FAMILIES, ids=lambda v: v if isinstance(v, str) else "")
def test_config_equals_live_model(name, changes):
    """At full size with MOEFFN_ALL_FAMILIES=1, with four or eight layers otherwise."""
    layers = {} if ALL or name in AS_DEEP else {"num_hidden_layers": 4 if name in FOUR else 8}
    model, config = whole(name, {**layers, **changes})
    read = read_module(model, LIVE_TOP_K.get(name))
    counted, live = (count(source, convention="vision=no") for source in (config, read))
    assert count(read).total == sum(p.numel() for p in model.parameters())
    total = counted.total
    if live.part("head").total == 0:  # a base model without the head that the config would have
        total -= counted.part("head").total
    assert total == live.total
    for part in ("routed", "router", "shared_gate", "embedding"):
        assert counted.part(part).total == live.part(part).total, part
    if name == "zaya":  # a module does not tell that one of its experts computes nothing
        counted = count(config, convention="idle=max")
    assert (counted.active, counted.part("routed")) == (live.active + counted.total - total, live.part("routed"))


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


WIDE = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 512, "vocab_size": 1000}
MIXED = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
WRAPPED = [
    ("diffusion_gemma", {"text_config": {**WIDE, **MIXED, "num_experts": 8, "top_k_experts": 2,
                                         "num_global_key_value_heads": 1}}),
    ("deepseek_ocr2", {"text_config": {**WIDE, **MIXED, "num_key_value_heads": 4, "n_routed_experts": 8,
                                       "n_shared_experts": 2, "mlp_layer_types": ["dense"] + ["sparse"] * 3}}),
    ("hunyuan_vl", {"text_config": {**WIDE, "head_dim": 128, "rope_theta": 10000.0}}), ("t5gemma2", {}),
    ("granite4_vision", {"text_config": WIDE, "deepstack_layer_map": [[0, 0]], "spatial_target_layers": [1],
                         "downsample_rate": "1/2"}),
]


@pytest.mark.parametrize(("name", "changes"), WRAPPED if ALL else WRAPPED[:1])
def test_language_model_inside_a_wrapper(name, changes):
    model, config = whole(name, changes)
    outside = re.compile("vision|visual|projector|image_newline|view_sep")
    language = sum(p.numel() for key, p in model.named_parameters() if not outside.search(key))
    assert count(config, convention="vision=no").total == language


def test_dbrx_stacks_experts_in_rows():
    config = {**find_preset("DBRX").config, "n_layers": 2}
    config["attn_config"] = {**config["attn_config"], "rope_theta": 500000}  # transformers cannot do without
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = build(AutoConfig.for_model(config.pop("model_type"), **config))
    live, counted = count(model), count({**find_preset("DBRX").config, "n_layers": 2})
    assert (live.total, live.active) == (counted.total, counted.active)
    assert live.part("routed") == counted.part("routed")


def test_gemma_4_with_its_vision_tower():
    from transformers import Gemma4ForConditionalGeneration

    config = dict(find_preset("Gemma-4-26B-A4B(text+vision as built)").config)
    text, vision = config["text_config"], config["vision_config"]
    short = {"num_hidden_layers": 12, "layer_types": text["layer_types"][:12]}  # two periods of its layers
    config |= {"text_config": {**text, **short}, "vision_config": {**vision, "num_hidden_layers": 3}}
    counted = count(config)
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        model = Gemma4ForConditionalGeneration(AutoConfig.for_model(config.pop("model_type"), **config))
    live = count(model)
    assert (live.total, live.active) == (counted.total, counted.active)


def test_inkling_under_the_names_of_its_published_files():
    """`intermediate_size` is the experts' width there, and lists hold the numbers of layers."""
    text = {"hidden_size": 64, "num_hidden_layers": 6, "vocab_size": 160, "head_dim": 16,
            "num_attention_heads": 4, "num_key_value_heads": 2, "d_rel": 4, "rel_extent": 16, "swa_head_dim": 16,
            "swa_num_attention_heads": 4, "swa_num_key_value_heads": 1, "local_layer_ids": [0, 1, 3, 4],
            "dense_mlp_idx": 2, "sconv_kernel_size": 3, "sliding_window_size": 8, "n_routed_experts": 8,
            "num_experts_per_tok": 2, "n_shared_experts": 2, "dense_intermediate_size": 128, "intermediate_size": 32}
    saved = {"model_type": "inkling_mm_model", "text_config": text,
             "vision_config": {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2},
             "mtp_config": {"num_nextn_predict_layers": 2, "local_layer_ids": [1]}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        live = count(build(AutoConfig.for_model("inkling_text", **text)))
    text["model_type"] = "inkling_text"
    found = count(saved)
    assert (found.total, found.active, found.excluded) == (live.total, live.active, ("vision_config",))
    assert count({**text, "num_mtp_layers": 2, "mtp_local_layer_ids": [1]}).mtp_total == found.mtp_total
    dense = [count({**text, "num_hidden_layers": 1, "local_layer_ids": near}, convention="scope=layers").total
             for near in ([], [0])]
    assert found.mtp_total == sum(dense) + 2 * (2 * 64 * 64 + 2 * 64)


def test_longcat_real_weights_are_fewer_than_transformers_allocates():
    """The class gives identity experts rows of gate and up weights, which no checkpoint has."""
    model, config = whole("longcat_flash", {"num_layers": 2})
    rows = 2 * 256 * 2 * 2048 * 6144
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
