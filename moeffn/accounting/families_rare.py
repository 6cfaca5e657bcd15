"""Text models with a layer of their own kind, each of which is alone in it."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from .families import attention_bias, block, decoder, family, heads_of, width_and_depth, windows
from .families_gemma import gemma4
from .ffns import dense
from .mixers import gqa
from .reader import Keys
from .stacks import whole
from .weights import Architecture, Layer, Mixer, Weight, matrix, norm


def _filter(part: str, *shape: int) -> Weight:
    return Weight(part, shape, "filter")


@family("xlnet")
def xlnet(k: Keys) -> Architecture:
    """XLNet: relative positions through a projection of their own, three biases and a segment table each layer."""
    d, n, heads, width = (k.integer(key) for key in ("d_model", "n_layer", "n_head", "d_head"))
    found, mixer = gqa(d, heads, heads, width)
    found += matrix("attention", heads * width, d)
    found += [_filter("attention", heads, width)] * 3 + [_filter("attention", 2, heads, width)]
    layer = block("dense", (found, mixer), dense(d, k.integer("d_inner"), gated=False, bias=True), norm(d, True, 2))
    return decoder(k, "xlnet", d, [layer] * n, tied=True, final_norm=False, head_bias=True,
                   extra=(_filter("other", 1, 1, d),))


@family("modernbert", "modernbert-decoder")
def modernbert(k: Keys) -> Architecture:
    """ModernBERT: gated FFNs; the first layer has no norm before its attention, the embedding's serves."""
    name = k.text("model_type")
    d, n = width_and_depth(k)
    heads = k.integer("num_attention_heads")
    bias, norm_bias = attention_bias(k), k.flag("norm_bias", absent=False)
    width = k.divide("head_dim", d, heads)
    ffn = dense(d, k.integer("intermediate_size"), bias=k.flag("mlp_bias", absent=False))
    layers = [block("dense", gqa(d, heads, heads, width, bias=bias, window=window), ffn,
                    norm(d, norm_bias, 1 + (i > 0))) for i, window in enumerate(windows(k, n, "local_attention"))]
    extra, decodes = norm(d, norm_bias), name.endswith("decoder")
    if decodes:  # a projection and a norm before the head
        extra = extra + matrix("other", d, d, k.flag("classifier_bias", absent=False)) + norm(d, norm_bias)
    return decoder(k, name, d, layers, tied=True, norm_bias=norm_bias, head=decodes,
                   head_bias=decodes and k.flag("decoder_bias", absent=True), extra=tuple(extra))


@family("cpmant")
def cpmant(k: Keys) -> Architecture:
    """CPM-Ant: learned prompts in the embedding, a bias for each distance and pair of segments, an untied head."""
    d, n = width_and_depth(k)
    heads, segments = k.integer("num_attention_heads"), k.integer("segment_types")
    mixed = gqa(d, heads, heads, k.integer("dim_head"))
    layer = block("dense", mixed, dense(d, k.integer("dim_ff")), norm(d, copies=2))
    prompts = k.integer("prompt_types") * k.integer("prompt_length")
    extra = (Weight("embedding", (segments, d), "table"), Weight("embedding", (prompts, d), "table"),
             _filter("attention", segments**2 + k.integer("position_bias_num_buckets"), heads))
    k.data = {**k.data, "tie_word_embeddings": False}
    return decoder(k, "cpmant", d, [layer] * n, tied=False, extra=extra)


@family("doge")
def doge(k: Keys) -> Architecture:
    """Doge: attention masked by its values, scaled residuals; its mixture adds experts of one channel to the FFN."""
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    bias = attention_bias(k)
    found, mixer = gqa(d, heads, kv, width, bias=bias, qk_norm="head")
    found += [*matrix("attention", kv, kv * width, bool(bias)), _filter("attention", kv)]
    ffn, sparse = dense(d, k.integer("intermediate_size"), bias=k.flag("mlp_bias", absent=False)), k.flag("is_moe")
    if sparse:
        experts, top_k = k.integer("num_experts"), k.integer("num_experts_per_tok")
        ffn += matrix("router", 2 * isqrt(experts), d)
        ffn += matrix("routed", 1, d, copies=experts, used=top_k) + matrix("routed", d, 1, copies=experts, used=top_k)
    layer = block("sparse" if sparse else "dense", (found, mixer), ffn,
                  norm(d, copies=2) + [_filter("other", d)] * 2)
    return decoder(k, "doge", d, [layer] * n, tied=False)


@family("dory")
def dory(k: Keys) -> Architecture:
    """Dory: normalised weights and no norms; some layers are passed several times."""
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    bias, hidden = attention_bias(k), k.integer("intermediate_size")
    words = k.words("layer_types", layers=n, among=("sliding_attention", "full_attention", "mlp"))
    start, middle = k.integer("n_input_layers", minimum=0), k.integer("n_recurrent_layers", minimum=0)
    loops = k.integer("n_recurrent_loops")
    layers = []
    for i, word in enumerate(words):
        if word == "mlp":
            found = dense(d, hidden, bias=k.flag("mlp_bias", absent=False)) + [_filter("dense", hidden)] * 2
            layer = Layer("dense", (*found, _filter("other", d)))
        else:
            window = k.integer("sliding_window") if word == "sliding_attention" else None
            found, mixer = gqa(d, heads, kv, width, bias=bias, gate="channels", window=window)
            layer = Layer("dense", (*found, *[_filter("attention", heads * width)] * 2, _filter("other", d)), (mixer,))
        layers.append(layer.repeated(loops, []) if start <= i < start + middle else layer)
    scale = _filter("head", k.integer("vocab_size"))
    return decoder(k, "dory", d, layers, tied=False, final_norm=False, extra=(scale,))


@family("hrm_text")
def hrm_text(k: Keys) -> Architecture:
    """Hierarchical reasoning: two stacks of layers without norms' weights, passed in cycles."""
    d = k.integer("hidden_size")
    heads, width = k.integer("num_attention_heads"), k.integer("head_dim")
    depth, high, low = k.integer("num_layers_per_stack"), k.integer("H_cycles"), k.integer("L_cycles")
    layer = block("dense", gqa(d, heads, heads, width, gate="channels"), dense(d, k.integer("intermediate_size")), [])
    layers = [layer.repeated(high * low, [])] * depth + [layer.repeated(high, [])] * depth
    return decoder(k, "hrm_text", d, layers, tied=False, final_norm=False, extra=(_filter("other", d),))


@family("moshi", "kyutai_speech_to_text")
def moshi(k: Keys) -> Architecture:
    """Moshi's main decoder, and the speech-to-text model built like it; codecs and depth decoder are excluded."""
    name = k.text("model_type")
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    mixed = gqa(d, heads, kv, width, window=k.integer("sliding_window", absent=0) or None)
    ffn = dense(d, k.divide("ffn_dim", k.integer("ffn_dim"), 2))
    k.excluded.extend(key for key in ("audio_encoder_config", "depth_decoder_config", "codec_config") if k.has(key))
    rows = 1 if name == "moshi" else k.integer("num_codebooks") * k.integer("codebook_vocab_size") + 1
    return decoder(k, name, d, [block("dense", mixed, ffn, norm(d, copies=2))] * n, tied=False,
                   extra=(Weight("embedding", (rows, d), "table"),))


BLT = ("patcher", "local_encoder", "global_transformer", "local_decoder")


@family(*(f"blt_{part}" for part in BLT))
def blt_part(k: Keys) -> Architecture:
    """One of the four transformers of a BLT; the local ones attend to patches in a layer, or in all, and project."""
    part = k.text("model_type").removeprefix("blt_")
    d, n = width_and_depth(k)
    heads, kv = k.integer("num_attention_heads"), k.integer("num_key_value_heads")
    mixed = gqa(d, heads, kv, k.divide("head_dim", d, heads))
    layers = [block("dense", mixed, dense(d, k.integer("intermediate_size")), norm(d, copies=2))] * n
    outer: list[Weight] = []
    if part.startswith("local"):
        crossed = n if k.flag("cross_attn_all_layers", absent=False) else 1
        layers += [Layer("dense", (*mixed[0], *norm(d, copies=2)), (mixed[1],))] * crossed
        inward = d if part == "local_encoder" else k.integer("hidden_size_global")
        outer += matrix("other", d * k.integer("cross_attn_k"), inward)
    elif part == "global_transformer" and k.has("encoder_cross_output_size"):
        outer += matrix("other", d, k.integer("encoder_cross_output_size"))
    if part in ("patcher", "local_encoder"):
        outer.append(Weight("embedding", (k.integer("vocab_size"), d), "table"))
    if part in ("patcher", "local_decoder"):
        outer += norm(d)
    if part == "patcher":
        outer += matrix("other", k.integer("vocab_size"), d)
    return whole(k, d, k.integer("vocab_size", absent=1), layers, outer)


@family("blt")
def blt(k: Keys) -> Architecture:
    """Byte latent transformer: bytes are patched by a small model, encoded, modelled as patches and decoded."""
    parts = {key: k.inside(f"{key}_config") for key in ("encoder", "global", "decoder")}
    d, vocab = parts["encoder"].integer("hidden_size"), k.integer("vocab_size")
    joined, whole_width = d * k.integer("cross_attn_k"), parts["global"].integer("hidden_size")
    if joined != whole_width:
        parts["global"].data = {"encoder_cross_output_size": joined, **parts["global"].data}
    if k.flag("patch_in_forward", absent=True):
        parts["patcher"] = k.inside("patcher_config")
    stacks = {key: blt_part(part) for key, part in parts.items()}
    sizes = len(k.indices("encoder_hash_byte_group_size", required=True))
    hashes = k.integer("encoder_hash_byte_group_nb_functions") * sizes * k.integer("encoder_hash_byte_group_vocab")
    outer = [w for stack in stacks.values() for w in stack.outer]
    outer.append(Weight("embedding", (hashes, d), "table"))
    tied = k.tied(False)
    outer += [] if tied else matrix("head", vocab, stacks["decoder"].d_model)
    return whole(k, d, vocab, [one for stack in stacks.values() for one in stack.layers], outer, tied)


@family("gemma4_assistant", "gemma4_unified_assistant")
def gemma4_assistant(k: Keys) -> Architecture:
    """Gemma 4's drafting models: no keys and values of their own, projections from and to the width of the target."""
    text = gemma4(k.inside("text_config"))
    wide, d = k.integer("backbone_hidden_size"), text.d_model
    if k.flag("use_ordered_embeddings", absent=False):
        raise ValueError("config.use_ordered_embeddings: an assistant with ordered embeddings has no weight table")
    more = matrix("other", d, 2 * wide) + matrix("other", wide, d)
    return replace(text, family=k.text("model_type"), outer=(*text.outer, *more))


@family("muse_glimmer_assistant")
def muse_glimmer_assistant(k: Keys) -> Architecture:
    """Muse Glimmer's drafting model: Qwen3's layers, fed by a projection of several of the target's states; table and
    head are the target's."""
    d, n = width_and_depth(k)
    mixed = gqa(d, *heads_of(k, d), bias=attention_bias(k), qk_norm="head")
    own = block("dense", mixed, dense(d, k.integer("intermediate_size")), norm(d, copies=2))
    states = len(k.indices("target_layer_ids", required=True))
    return whole(k, d, 1, [own] * n, [*matrix("other", d, states * d), *norm(d, copies=2)])


@family("xlstm")
def xlstm(k: Keys) -> Architecture:
    """xLSTM: matrix memories with exponential gates, and gated FFNs (arXiv 2503.13427)."""
    d = k.integer("hidden_size", "embedding_dim")
    n, heads = k.integer("num_hidden_layers", "num_blocks"), k.integer("num_heads")
    qk, v, wide = (_times(k, d, key) for key in ("qk_dim_factor", "v_dim_factor", "ffn_proj_factor"))
    step = k.integer("ffn_round_up_to_multiple_of")
    hidden = -(-wide // step) * step
    bias = k.flag("use_bias", absent=False)
    found = matrix("attention", qk, d, bias) * 2 + matrix("attention", v, d, bias) * 2
    found += matrix("attention", heads, d, True) * 2 + norm(v, bias) + matrix("attention", d, v, bias)
    mixed = found, Mixer(state=qk * v // heads)
    layer = block("dense", mixed, dense(d, hidden, bias=bias), norm(d, bias, 2))
    return decoder(k, "xlstm", d, [layer] * n, tied=False,
                   final_norm=k.flag("add_out_norm", absent=True))


def _times(k: Keys, width: int, key: str) -> int:
    """The width times a factor of the config, rounded down."""
    return int(width * k.number(key))
