"""Vision- and audio-language configs: the language model inside counts, the towers beside it are named as excluded.

Gemma 3 and 4, whose published sizes include the vision tower, are in `families_dense`.
"""

from __future__ import annotations

from .families import FAMILIES, attention_bias, block, built, decoder, family, heads_of, tower
from .ffns import dense, moe
from .mixers import gqa
from .reader import Keys
from .weights import Architecture, Weight, matrix, norm

WRAPPERS = (
    "apertus1p5", "aria", "audioflamingo3", "aya_vision", "blip-2", "cohere2_vision", "cohere_compass", "cosmos3_edge",
    "cosmos3_omni", "deepseek_ocr2", "deepseek_vl", "deepseek_vl_hybrid", "deepseek_vl_v2", "embedding_gemma2", "emu3",
    "exaone4_5", "fast_vlm", "florence2", "fun_asr_nano", "fuyu", "glm46v", "glm4v", "glm4v_moe", "glm_image",
    "glm_ocr", "glmasr", "glmga", "got_ocr2", "granite4_vision", "granite_docling", "granite_speech",
    "granite_speech_plus", "hunyuan_vl", "hyperclovax_vision_v2", "idefics2", "idefics3", "instructblip",
    "instructblipvideo", "interns1", "interns1_pro", "internvl", "internvl_chat", "janus", "kimi_vl", "lfm2_vl",
    "lfm3_vl", "lighton_ocr", "llava", "llava_next", "llava_next_video", "llava_onevision", "minicpm_ocr",
    "minicpmv4_6", "minicpmv4_7", "minimax_vl_01", "mistral3", "mllama", "modernvbert", "molmo2",
    "moss_transcribe_diarize", "muse_glimmer", "muse_spark", "musicflamingo", "nemo_speechlm", "nemotron_h_omni",
    "NemotronH_Nano_VL_V2", "omniasr", "ovis", "ovis2", "ovis2_5", "paddleocr_vl", "paligemma", "perception_lm",
    "pp_chart2table", "qianfan_ocr", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_asr",
    "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "ultravbert", "unlimited_ocr", "vibevoice",
    "vibevoice_asr", "video_llama_3", "video_llava", "vipllava", "voxtral", "voxtral_realtime",
)


@family(*WRAPPERS)
def multimodal(k: Keys) -> Architecture:
    """The language model of a wrapper, by the `model_type` inside; of one whose keys are beside those of its towers (as
    older files of Qwen2.5-VL have them), by the wrapper's with `_text` behind it."""
    inner = tower(k)
    flat = f"{k.text('model_type')}_text"
    if inner is k and flat in FAMILIES and k.has("hidden_size"):
        k.excluded.extend(key for key in ("vision_config", "audio_config") if k.has(key))
        k.data = {**k.data, "model_type": flat}
        return FAMILIES[flat](k)
    if inner is k:
        raise ValueError(f"config.text_config is missing: it holds the language model of {k.text('model_type')}")
    return built(inner)


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


@family("mllama_text_model")
def mllama(k: Keys) -> Architecture:
    """Llama 3.2 Vision's language model: in some layers an attention to the image, with gates, takes the place of the
    text's. The table has eight rows more than the head."""
    d, n = k.integer("hidden_size"), k.integer("num_hidden_layers")
    heads, kv, width = heads_of(k, d)
    crossed = set(k.indices("cross_attention_layers", required=True))
    ffn, plain = dense(d, k.integer("intermediate_size")), gqa(d, heads, kv, width)
    looks = gqa(d, heads, kv, width, qk_norm="head")
    looks[0].extend([Weight("attention", (1,), "filter"), Weight("dense", (1,), "filter")])
    layers = [block("dense", looks if i in crossed else plain, ffn, norm(d, copies=2)) for i in range(n)]
    return decoder(k, "mllama", d, layers, tied=False, extra=(Weight("embedding", (8, d), "table"),))


@family("idefics")
def idefics(k: Keys) -> Architecture:
    """IDEFICS' language model: gated attention to the image and a further FFN before every few layers."""
    d, n = k.integer("hidden_size"), k.integer("num_hidden_layers")
    heads = k.integer("num_attention_heads")
    width, more = k.divide("head_dim", d, heads), k.integer("additional_vocab_size", minimum=0)
    wide = k.inside("vision_config").integer("embed_dim")
    if k.flag("qk_layer_norms", absent=False):
        raise ValueError("config.qk_layer_norms: an IDEFICS with norms of queries and keys has no weight table")
    found, mixer = gqa(d, heads, heads, width)
    ffn, norms = dense(d, k.integer("intermediate_size")), norm(d, copies=2)
    looks = matrix("attention", heads * width, d) + matrix("attention", heads * width, wide) * 2
    looks += [*matrix("attention", d, heads * width), Weight("attention", (1,), "filter")]
    crossed = block("dense", (looks, mixer), [*ffn, Weight("dense", (1,), "filter")], norms)
    layers = [block("dense", (found, mixer), ffn, norms)] * n
    layers += [crossed] * (n // k.integer("cross_layer_interval"))
    k.excluded.extend(key for key in ("vision_config", "perceiver_config") if k.has(key))
    extra = (Weight("embedding", (more, d), "table"), Weight("head", (more, d), "matrix")) if more else ()
    return decoder(k, "idefics", d, layers, tied=False, extra=extra)


@family("kosmos-2", "kosmos-2.5", "kosmos_2_text_model", "kosmos_2_5_text_model")
def kosmos(k: Keys) -> Architecture:
    """Kosmos-2's language model: norms before the output projections of attention and FFN."""
    second = "5" in k.text("model_type")
    if not k.text("model_type").endswith("text_model"):
        k.excluded.append("vision_config")
        k = k.inside("text_config")
    if k.flag("add_cross_attention", absent=False):
        raise ValueError(f"{k.where}.add_cross_attention: no weight table for a second attention")
    d, n, heads = k.integer("embed_dim"), k.integer("layers"), k.integer("attention_heads")
    hidden = k.integer("ffn_dim")
    mixed = gqa(d, heads, heads, k.divide("head_dim", d, heads), bias="qkvo")
    norms = norm(d, True, 2 if second else 3) + norm(hidden, True)
    layer = block("dense", mixed, dense(d, hidden, gated=False, bias=True), norms)
    extra = (Weight("embedding", (2, d), "table"),) if second else ()
    return decoder(k, "kosmos", d, [layer] * n, tied=True, norm_bias=True, extra=extra)
