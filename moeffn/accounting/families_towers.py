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
