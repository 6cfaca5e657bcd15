"""Vision- and audio-language configs: the language model inside counts, the towers beside it are named as excluded.

Gemma 3 and 4, whose published sizes include the vision tower, are in `families_dense`.
"""

from __future__ import annotations

from .families import FAMILIES, attention_bias, block, decoder, family, heads_of, tower
from .ffns import dense, moe
from .mixers import gqa
from .reader import Keys
from .weights import Architecture, Weight, matrix, norm

WRAPPERS = (
    "aria", "audioflamingo3", "aya_vision", "cohere2_vision", "deepseek_vl", "deepseek_vl_hybrid", "deepseek_vl_v2",
    "exaone4_5", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmasr", "got_ocr2", "granite_speech", "idefics2",
    "idefics3", "internvl", "internvl_chat", "janus", "kimi_vl", "lfm2_vl", "lfm3_vl", "lighton_ocr", "llava",
    "llava_next", "llava_next_video", "llava_onevision", "mistral3", "muse_glimmer", "muse_spark", "musicflamingo",
    "nemotron_h_omni", "ovis2", "paddleocr_vl", "paligemma", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_audio",
    "qwen2_vl", "qwen3_asr", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "unlimited_ocr",
    "vibevoice_asr", "video_llama_3", "video_llava", "vipllava", "voxtral",
)


@family(*WRAPPERS)
def multimodal(k: Keys) -> Architecture:
    """The language model of a wrapper, by the `model_type` inside."""
    inner = tower(k)
    if inner is k:
        raise ValueError(f"config.text_config is missing: it holds the language model of {k.text('model_type')}")
    name = inner.text("model_type")
    if name not in FAMILIES:
        raise ValueError(f"{inner.where}.model_type: no weight table for {name!r}")
    return FAMILIES[name](inner)


@family("qwen3_omni_moe", "qwen2_5_omni")
def omni(k: Keys) -> Architecture:
    """The thinker of an omni model; talker and vocoder are excluded."""
    k.excluded.extend(name for name in ("talker_config", "code2wav_config", "token2wav_config") if k.has(name))
    return multimodal(k.inside("thinker_config"))


@family("ernie4_5_vl_moe", "ernie4_5_vl_moe_text", "ernie4_5_moe_vl")
def ernie_vl(k: Keys) -> Architecture:
    """ERNIE 4.5 VL: beside the text experts as many, narrower ones that image tokens alone use (active: none).

    Sizes of the experts are pairs, text first; shared experts have the width of the text experts.
    """
    k = tower(k)
    d, n = k.integer("hidden_size"), k.integer("num_hidden_layers")
    heads, kv, width = heads_of(k, d)
    bias = k.flag("use_bias", absent=False)
    expert, visual = k.each("moe_intermediate_size", layers=2, minimum=1)
    experts, visuals = k.each("moe_num_experts", layers=2, minimum=1)
    if k.has("mlp_layer_types"):
        sparse = [word == "sparse" for word in k.words("mlp_layer_types", layers=n, among=("dense", "sparse"))]
    else:
        start, every = k.each("moe_layer_start_index", layers=2)[0], k.integer("moe_layer_interval", absent=1)
        end = k.each("moe_layer_end_index", layers=2, minimum=-1)[0]
        sparse = [(i + 1) % every == 0 and start <= i and (i <= end or end == -1) for i in range(n)]
    top_k = k.integer("moe_k", "num_experts_per_tok")
    ffn = moe(d, expert, experts, top_k, shared=expert * k.integer("moe_num_shared_experts", minimum=0),
              shared_bias=bias, selection="parameter", where="config.moe_k")
    ffn += [*matrix("vision", visuals, d), Weight("vision", (visuals,), "bias")]
    ffn += dense(d, visual, part="vision", copies=visuals, used=0)
    plain = dense(d, k.integer("intermediate_size"), bias=bias) if not all(sparse) else []
    mixed = gqa(d, heads, kv, width, bias="qkvo" if bias else "")
    layers = [block("sparse" if on else "dense", mixed, ffn if on else plain, norm(d, copies=2)) for on in sparse]
    return decoder(k, "ernie4_5_vl_moe", d, layers, tied=True, head_bias=bias)


@family("muse_spark_text")
def muse_spark(k: Keys) -> Architecture:
    """Muse Spark: latent experts with a norm before and after, and a learned gate on each residual."""
    d, n = k.integer("hidden_size"), k.integer("num_hidden_layers")
    sparse = [word == "sparse" for word in k.words("mlp_layer_types", layers=n, among=("dense", "sparse"))]
    latent = k.integer("moe_hidden_size")
    ffn = moe(d, k.integer("moe_intermediate_size"), k.integer("num_local_experts"), k.integer("num_experts_per_tok"),
              latent=latent, selection="buffer") + norm(latent, copies=2)
    plain = dense(d, k.integer("intermediate_size")) if not all(sparse) else []
    mixed = gqa(d, *heads_of(k, d), bias=attention_bias(k), gate="channels")
    around = norm(d, copies=3) + [Weight("other", (d,), "filter")] * 2
    layers = [block("sparse" if on else "dense", mixed, ffn if on else plain, around) for on in sparse]
    return decoder(k, "muse_spark", d, layers, tied=False)
