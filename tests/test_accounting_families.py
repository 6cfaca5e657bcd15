"""Every class of config that transformers has and that holds a text model, as it is by default and in full size."""

import importlib.util
import os

import pytest

from moeffn.accounting import count, find_preset
from moeffn.accounting.families import FAMILIES
from moeffn.accounting.live import read_module
from moeffn.accounting.towers import TOWERS

if importlib.util.find_spec("transformers") is None:
    pytest.skip("needs transformers", allow_module_level=True)

import torch
from accounting_models import whole
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

count("GPT-2")  # the tables register themselves at the first count
ALL = bool(os.environ.get("MOEFFN_ALL_FAMILIES"))
TOP_K = {"switch_transformers": 1, "nllb-moe": 2}  # their modules do not say it
# Defaults that build no model (a size is None), and one class that allocates rows no checkpoint has; all of these are
# compared with sizes of their own in test_accounting_live, but for two whose towers are in no package of ours (timm).
ELSEWHERE = {
    "fast_vlm", "perception_lm", "diffusion_gemma", "t5gemma2", "hunyuan_vl", "hunyuan_vl_text", "granite4_vision",
    "deepseek_ocr2", "deepseek_ocr2_text", "diffusion_gemma_text",
    "dbrx", "deepseek_v2", "dots1", "ernie4_5_vl_moe_text", "gemma3n", "hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2_moe",
    "longcat_flash", "ministral", "nemotron", "qwen2_5_omni", "qwen3_omni_moe", "qwen4_exp", "qwen4_exp_text",
    "step3p5", "aya_vision", "gemma4_assistant", "voxtral_realtime_text",
}
KNOWN = sorted(name for name in CONFIG_MAPPING_NAMES if name in FAMILIES and name not in ELSEWHERE)
# One of each kind of table, and wrappers, in every run.
KINDS = ("gpt2", "trocr", "led", "bert", "roformer", "xlnet", "esm", "reformer", "encoder-decoder",
         "moonshine", "vilt")
TOWERS_ALONE = ("_vision", "_vision_model", "vision_encoder", "_ctc", "_diarization", "transcribe_audio")
# What a default lacks to build a model.
CHANGES = {
    "esm": {"vocab_size": 33, "pad_token_id": 1, "position_embedding_type": "rotary"}, "reformer": {"is_decoder": True},
    "chameleon": {"vq_config": {}, "vocabulary_map": {"<image>": 3}},
    **{name: {"prediction_length": 24} for name in ("time_series_transformer", "informer", "autoformer")},
    "qwen3_omni_moe_talker_text": {"shared_expert_intermediate_size": 768},
    **{name: {"dropout_rate": 0.0} for name in ("t5gemma2_text", "t5gemma2_decoder")},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "vision-text-dual-encoder": {"vision_config": {"model_type": "vit"}, "text_config": {"model_type": "bert"}},
}
# Without a table: convolutions, detectors, codecs.
WITHOUT = ("resnet", "swin", "detr", "encodec", "vits")


@pytest.mark.parametrize("name", KNOWN if ALL else KINDS)
def test_default_config_equals_live_model(name):
    """The language model; of Gemma 3 and 4 the vision tower too. A base model lacks the head its config implies."""
    try:
        model, config = whole(name, CHANGES.get(name, {}))
    except LookupError:
        pytest.skip("built only inside another model")
    # A module does not tell that an expert of ZAYA computes nothing.
    words = "vision=no,idle=max" if name == "zaya" else "vision=no"
    if name.endswith(TOWERS_ALONE) and "text_config" not in config:
        words = "all"
    read = read_module(model, TOP_K.get(name))
    counted, live = (count(source, convention=words) for source in (config, read))
    head = counted.part("head").total if live.part("head").total == 0 else 0
    assert (counted.total - head, counted.active - head) == (live.total, live.active)
    assert count(read).total == sum(p.numel() for p in model.parameters())
    towers = {key for key in ("vision_config", "audio_config") if config.get(key)}
    assert towers <= set(counted.excluded) or count(config).total - head == count(model).total


@pytest.mark.parametrize("name", sorted({name for name, _ in TOWERS}) if ALL else ["qwen3_vl_moe"])
def test_towers_equal_those_of_the_live_model(name):
    """Under the scope `multimodal` a wrapper's config counts what the whole model holds."""
    config = AutoConfig.for_model(name)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    found = count(config.to_dict(), convention="scope=multimodal")
    assert found.total == sum(p.numel() for p in model.parameters())
    assert found.excluded == ()


def test_llama_4_scout_with_its_tower():
    """108.64B, as its files hold, of which the language model is 107.77B."""
    tower = {"hidden_size": 1408, "num_hidden_layers": 34, "num_attention_heads": 16, "intermediate_size": 5632,
             "image_size": 336, "patch_size": 14, "num_channels": 3, "vision_output_dim": 4096,
             "projector_input_dim": 4096, "projector_output_dim": 4096}
    config = {**find_preset("Llama-4-Scout").config, "vision_config": tower}
    assert count(config).total == 107_769_861_120
    assert count(config, convention="scope=multimodal").total == 108_641_793_536


def test_towers_without_a_table_are_refused_under_that_scope():
    with pytest.raises(ValueError, match=r"convention\.scope: no weight table for vision_config of this config"):
        count({**find_preset("Qwen3.5-35B-A3B").config, "model_type": "aria"}, convention="scope=multimodal")
    assert count("MiniMax-M2", convention="scope=multimodal").total == count("MiniMax-M2").total  # there are none


@pytest.mark.parametrize("name", WITHOUT)
def test_refused_by_name(name):
    with pytest.raises(ValueError, match=f"model_type: no weight table for '{name}'"):
        count({"model_type": name})


SMALL = {
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 128,
    "moe_intermediate_size": 48, "num_hidden_layers": 4, "num_experts": 8, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_local_experts": 8, "num_experts_per_tok": 2, "pad_token_id": 0, "q_lora_rank": 24, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20, "first_k_dense_replace": 1, "n_group": 2,
    "topk_group": 1,
}
SMALL_MIXTURES = (
    "deepseek_v3", "gpt_oss", "qwen2_moe", "mixtral", "qwen3_moe", "olmoe", "flex_olmo", "deepseek_v2", "glm4_moe",
    "glm4_moe_lite", "dots1", "granitemoe", "granitemoeshared", "phimoe", "minimax_m2", "ernie4_5_moe", "llama4_text",
    "exaone_moe", "qwen3_next", "qwen3_5_moe_text", "qwen3_vl_moe_text")
SMALL_DENSE = (
    "llama", "qwen2", "qwen3", "gemma", "gemma2",
    "gemma3_text", "mistral", "phi", "phi3", "olmo", "olmo2", "olmo3", "stablelm", "starcoder2", "cohere", "cohere2",
    "granite", "glm", "glm4", "smollm3", "ministral3", "arcee", "apertus", "seed_oss", "helium", "nemotron",
    "ernie4_5", "hunyuan_v1_dense", "bert", "roberta", "albert", "electra", "deberta-v2", "modernbert")


@pytest.mark.parametrize("name", SMALL_MIXTURES + SMALL_DENSE if ALL else SMALL_MIXTURES[:3])
def test_small_config_equals_live_model(name):
    sizes = {key: v for key, v in SMALL.items() if name in SMALL_MIXTURES or "expert" not in key}
    model, config = whole(name, {**sizes, "head_dim": 16})
    counted, live = count(config), count(model)
    head = counted.part("head").total if live.part("head").total == 0 else 0
    assert (counted.total - head, counted.active - head) == (live.total, live.active)


OTHER_BRANCHES = [
    ("mobilebert", {"use_bottleneck_attention": True}),
    ("mobilebert", {"key_query_shared_bottleneck": False, "trigram_input": False}),
    ("esm", {"vocab_size": 33, "pad_token_id": 1, "emb_layer_norm_before": True}),
    ("perceiver", {"cross_attention_shape_for_attention": "q", "num_blocks": 2, "self_attention_widening_factor": 2}),
    ("reformer", {"is_decoder": True, "axial_pos_embds": False}),
    ("funnel", {"block_sizes": [3, 2], "block_repeats": [2, 1]}),
    ("dinov2", {"use_swiglu_ffn": True}), ("dinov3_vit", {"use_gated_mlp": True, "num_register_tokens": 4}),
    ("wav2vec2", {"feat_extract_norm": "layer", "conv_bias": True}),
    ("patchtsmixer", {"mode": "mix_channel", "self_attn": True, "use_positional_encoding": True}),
    ("patchtst", {"channel_attention": True, "use_cls_token": True, "share_embedding": False, "num_input_channels": 3}),
    ("informer", {"prediction_length": 4, "context_length": 6, "num_static_categorical_features": 2, "distil": False,
                  "cardinality": [5, 7], "embedding_dimension": [2, 3], "num_time_features": 2, "input_size": 2}),
    ("wav2vec2-bert", {"position_embeddings_type": "relative"}),
    ("wav2vec2-conformer", {"position_embeddings_type": "rotary", "feat_extract_norm": "layer"}),
    ("sew", {"hidden_size": 512, "num_attention_heads": 8}), ("sew-d", {"relative_attention": False}),
    ("nemotron_asr_streaming_encoder", {"num_mel_bins": 100}), ("parakeet_encoder", {"num_mel_bins": 100}),
    ("parakeet_encoder", {"attention_bias": False, "convolution_bias": False, "subsampling_factor": 4}),
    ("lasr_encoder", {"attention_bias": True, "convolution_bias": True}), ("timesfm2_5", {"attention_bias": True}),
    ("flava_image_model", {"mask_token": False, "qkv_bias": False}), ("timesformer", {"attention_type": "space_only"}),
    ("beit", {"use_mask_token": True, "use_absolute_position_embeddings": True, "layer_scale_init_value": 0.0}),
    ("aimv2_vision_model", {"use_head": False, "qkv_bias": True, "mlp_bias": True}), ("dinov2", {"mlp_ratio": 3}),
    ("blt_local_encoder", {"cross_attn_all_layers": True, "num_hidden_layers": 2}),
    ("blip_2_qformer", {"use_qformer_text_input": True}),
    ("moonshine", {"attention_bias": True, "tie_word_embeddings": False}), ("evolla", {"aligner_num_add_layers": 3}),
    ("patchtst", {"bias": False}), ("timesfm2_5", {"use_bias": True}), ("dpr", {"projection_dim": 9}),
    ("granite_speech5_ctc", {"tie_word_embeddings": False, "encoder_config": {"attention_bias": False}}),
    ("fun_asr_nano_encoder", {"num_hidden_layers": 2, "num_timestamp_prediction_layers": 2, "num_mel_bins": 30}),
    ("blt", {"cross_attn_k": 4, "patch_in_forward": False, "tie_word_embeddings": True}),
    ("pix2struct_text_model", {"hidden_size": 96, "num_heads": 4, "num_layers": 2}),
    ("musicgen_decoder", {"num_codebooks": 3, "hidden_size": 64, "ffn_dim": 80, "num_hidden_layers": 2}),
    ("siglip2_vision_model", {"vision_use_head": False}), ("cohere_asr", {"tie_word_embeddings": False}),
]


@pytest.mark.parametrize(("name", "changes"), OTHER_BRANCHES if ALL else OTHER_BRANCHES[:1])
def test_branches_of_encoders(name, changes):
    model, config = whole(name, changes)
    assert count(config).total == sum(p.numel() for p in model.parameters())


TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48}
WORDS = {**TINY, "vocab_size": 100}
SECOND = {"d_model": 48, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 64, "vocab_size": 100}
FIRST = {"encoder-decoder": ("bert", WORDS), "vision-encoder-decoder": ("vit", TINY),
         "speech-encoder-decoder": ("wav2vec2", {**WORDS, "num_conv_pos_embeddings": 8,
                                                 "num_conv_pos_embedding_groups": 2})}
THEN = {"bert": WORDS, "roberta": WORDS, "bert-generation": WORDS, "trocr": SECOND, "mbart": SECOND, "bart": SECOND,
        "gpt2": {"n_embd": 48, "n_layer": 1, "n_head": 2, "vocab_size": 100}}
PAIRS = [(first, then) for first in FIRST for then in THEN]


@pytest.mark.parametrize(("first", "then"), PAIRS if ALL else [("vision-encoder-decoder", "gpt2")])
def test_pairs_of_an_encoder_and_a_decoder(first, then):
    """Equal to the live pair, with a projection where the widths differ."""
    kind, sizes = FIRST[first]
    said = {"model_type": then, **THEN[then], "is_decoder": True, "add_cross_attention": True}
    model, config = whole(first, {"encoder": {"model_type": kind, **sizes}, "decoder": said})
    assert count(config).total == sum(p.numel() for p in model.parameters())


def test_a_decoder_without_a_table_of_cross_attention_is_refused():
    config = {"model_type": "encoder-decoder", "encoder": {"model_type": "bert", **WORDS},
              "decoder": {"model_type": "electra", **WORDS}}
    with pytest.raises(ValueError, match=r"config\.decoder\.model_type: no weight table for 'electra' as a decoder"):
        count(config)
    with pytest.raises(ValueError, match=r"config\.encoder\.hidden_size is missing"):
        count({**config, "encoder": {"model_type": "bert"}, "decoder": {"model_type": "bert", **WORDS}})
