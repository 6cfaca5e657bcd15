"""Image towers of vision-language models when a config is of the tower alone, by the tables of `towers`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from . import towers
from .families import family
from .ffns import dense, moe
from .mixers import gqa
from .reader import Keys
from .stacks import layer, table, vector, whole
from .weights import Architecture, Layer, Mixer, Weight, matrix, norm

Table = Callable[[Keys], list[Weight]]


def _alone(tower: towers.Tower) -> Table:
    """A table that needs nothing of the wrapper."""
    return lambda v: tower(v, v, 0)


ALONE: dict[str, tuple[Table, str]] = {
    **{name: (_alone(towers.qwen2_vl), "depth") for name in ("qwen2_vl_vision",)},
    **{name: (_alone(towers.qwen2_5_vl), "depth") for name in ("qwen2_5_vl_vision", "qwen2_5_omni_vision_encoder")},
    **{name: (_alone(towers.qwen3_vl), "depth")
       for name in ("qwen3_vl_vision", "qwen3_vl_moe_vision", "qwen3_5_vision", "qwen3_5_moe_vision",
                    "qwen3_omni_moe_vision_encoder", "qwen4_exp_vision", "cohere_compass_vision")},
    **{name: (_alone(towers.glm4v), "depth") for name in ("glm4v_vision", "glm4v_moe_vision")},
    **{name: (towers.intern, "num_hidden_layers") for name in ("internvl_vision", "qianfan_ocr_vision")},
    "llama4_vision_model": (_alone(towers.llama4), "num_hidden_layers"),
}


@family(*ALONE)
def tower_alone(k: Keys) -> Architecture:
    """All counts as vision. What a tower of two layers has more than one of one layer is a layer."""
    weights, depth = ALONE[k.text("model_type")]
    n, heads = k.integer(depth), k.integer("num_heads", "num_attention_heads")
    one, two = (Counter(weights(Keys({**k.data, depth: layers}, k.where, k))) for layers in (1, 2))
    block = two - one
    d = k.integer("embed_dim", "hidden_size")
    mixer = Mixer(heads, d // heads, d // heads, None, 2 * d)
    return whole(k, d, 1, [Layer("dense", tuple(block.elements()), (mixer,))] * n, (one - block).elements())


@family("idefics2_perceiver")
def resampler(k: Keys) -> Architecture:
    """Learned queries that gather an image in a few layers (Idefics 2)."""
    d, heads, width = k.integer("hidden_size"), k.integer("resampler_n_heads"), k.integer("resampler_head_dim")
    own = layer(k, d, heads, 4 * d, kv=k.integer("num_key_value_heads"), width=width, bias="", gated=True,
                ffn_bias=False, norm_bias=False, norms=3)
    outer = [vector(k.integer("resampler_n_latents"), d), *norm(d)]
    return whole(k, d, 1, [own] * k.integer("resampler_depth"), outer)


@family("deepseek_ocr2_encoder")
def ocr_encoder(k: Keys) -> Architecture:
    """DeepSeek-OCR 2's encoder: Qwen2's layers over compressed patches."""
    d, heads = k.integer("hidden_size"), k.integer("num_attention_heads")
    own = layer(k, d, heads, k.integer("intermediate_size"), kv=k.integer("num_key_value_heads"), bias="qkv",
                gated=True, ffn_bias=False, norm_bias=False)
    return whole(k, d, 1, [own] * k.integer("num_hidden_layers"), norm(d))


@family("mllama_vision_model")
def mllama_vision(k: Keys) -> Architecture:
    """Llama 3.2's tower: tables for the tiles of an image by its shape, gated layers over all of them at the end."""
    d, heads, patch = k.integer("hidden_size"), k.integer("attention_heads"), k.integer("patch_size")
    shapes, tiles = k.data.get("supported_aspect_ratios"), k.integer("max_num_tiles")
    if not isinstance(shapes, list) or not shapes:
        raise TypeError(f"{k.where}.supported_aspect_ratios: expected a list of shapes, got {shapes!r}")
    places, rows = (k.integer("image_size") // patch) ** 2 + 1, len(shapes) + 1
    outer = [*matrix("other", d, k.integer("num_channels") * patch**2), vector(d), table(places, d)]
    outer += [table(rows, tiles * places * d), *[table(rows, tiles * d)] * 2, *[vector(1)] * 3, *norm(d, True, 2)]
    plain, gated = (layer(k, d, heads, k.integer("intermediate_size"), bias="", more=[vector(1)] * gates)
                    for gates in (0, 2))
    return whole(k, d, 1, [plain] * k.integer("num_hidden_layers") + [gated] * k.integer("num_global_layers"), outer)


@family("dots3_note_vision_encoder")
def dots_vision(k: Keys) -> Architecture:
    """Dots 3's tower: gated FFNs, in its later layers mixtures of ever more experts."""
    d, n, heads = k.integer("hidden_size"), k.integer("num_hidden_layers"), k.integer("num_attention_heads")
    bias, expert = "qkvo" * k.flag("attention_bias"), k.integer("moe_intermediate_size")
    found, mixer = gqa(d, heads, heads, k.divide("head_dim", d, heads), bias=bias, qk_norm="head")
    plain = dense(d, k.integer("intermediate_size"), bias=k.flag("mlp_bias"))
    layers = []
    for i, word in enumerate(k.words("mlp_layer_types", layers=n, among=("dense", "sparse"))):
        own = k.layer(i)
        ffn = plain if word == "dense" else moe(d, expert, own.integer("num_local_experts"),
                                                k.integer("num_experts_per_tok"), selection="buffer")
        layers.append(Layer(word, (*found, *ffn, *norm(d) * 2), (mixer,)))
    inward = k.integer("adapter_in_dim")
    wide = inward * k.integer("adapter_merge_size") ** 2
    outer = [*matrix("other", d, k.integer("num_channels") * k.integer("patch_size") ** 2, True), *norm(d) * 2]
    outer += norm(inward, True) + matrix("other", wide, wide, True)
    return whole(k, d, 1, layers, outer + matrix("other", k.integer("adapter_out_dim"), wide, True))


def _pixels(k: Keys) -> int:
    """Values of a patch of some frames."""
    return k.integer("in_channels") * k.integer("temporal_patch_size") * k.integer("patch_size") ** 2


@family("exaone4_5_vision")
def exaone_vision(k: Keys) -> Architecture:
    """EXAONE 4.5's tower: Qwen2.5-VL's with fewer key/value heads."""
    d, heads, side = k.integer("hidden_size"), k.integer("num_heads"), k.integer("spatial_merge_size")
    own = layer(k, d, heads, k.integer("intermediate_size"), kv=k.integer("num_key_value_heads"), gated=True,
                norm_bias=False)
    wide = d * side**2
    outer = [*matrix("other", d, _pixels(k)), *norm(d), *matrix("other", wide, wide, True)]
    outer += matrix("other", k.integer("out_hidden_size"), wide, True)
    return whole(k, d, 1, [own] * k.integer("depth"), outer)


@family("glm_ocr_vision", "glm5_next_vision")
def glm_vision(k: Keys) -> Architecture:
    """GLM's later towers: no table of positions, norms of queries and keys, biases, a wide gated merger."""
    d, heads, out = k.integer("hidden_size"), k.integer("num_heads"), k.integer("out_hidden_size")
    side, bias = k.integer("spatial_merge_size"), k.flag("attention_bias")
    wide = (k.integer("projection_intermediate_size") if k.text("model_type") == "glm5_next_vision"
            else out * k.integer("in_channels"))
    own = layer(k, d, heads, k.integer("intermediate_size"), bias="qkvo" * bias, gated=True, ffn_bias=bias,
                norm_bias=False, more=norm(k.divide("head_dim", d, heads)) * 2)
    outer = [*matrix("other", d, _pixels(k), True), *norm(d), *matrix("other", out, d * side**2, True)]
    outer += [*matrix("other", out, out), *norm(out, True), *dense(out, wide)]
    return whole(k, d, 1, [own] * k.integer("depth"), outer)


@family("gemma4_vision")
def gemma_vision(k: Keys) -> Architecture:
    """Gemma 4's tower: norms before and after, positions of rows and of columns."""
    d, width = k.integer("hidden_size"), k.integer("head_dim")
    if k.flag("standardize") or k.flag("use_clipped_linears"):
        raise ValueError(f"{k.where}.standardize: no weight table for standardized states or clipped matrices")
    own = layer(k, d, k.integer("num_attention_heads"), k.integer("intermediate_size"), width=width,
                kv=k.integer("num_key_value_heads"), bias="", gated=True, ffn_bias=False, norm_bias=False,
                norms=4, more=norm(width) * 2)
    outer = [*matrix("other", d, 3 * k.integer("patch_size") ** 2)]
    outer += [table(k.integer("position_embedding_size"), d)] * 2
    return whole(k, d, 1, [own] * k.integer("num_hidden_layers"), outer)


@family("inkling2_vision")
def inkling_vision(k: Keys) -> Architecture:
    """Inkling 2's tower: scaled residuals, neighbouring patches joined by two matrices."""
    d, side, wide = k.integer("hidden_size"), k.integer("spatial_merge_size"), k.integer("projection_hidden_dim")
    own = layer(k, d, k.integer("num_attention_heads"), k.integer("intermediate_size"),
                more=[vector(d)] * (2 * (k.number("layer_scale_init_value") > 0)))
    outer = [*matrix("other", d, k.integer("num_channels") * k.integer("patch_size") ** 2), *[vector(d)] * 2]
    outer += [table(k.integer("posemb_grid_size") ** 2, d), *norm(d, True)]
    bias = k.flag("projector_bias")
    outer += matrix("other", wide, d * side**2, bias) + matrix("other", k.integer("text_hidden_size"), wide, bias)
    return whole(k, d, 1, [own] * k.integer("num_hidden_layers"), outer)
