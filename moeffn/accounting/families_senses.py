"""Encoders of images and of sound that stand alone, or before a decoder of text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod

from .families import block, built, family
from .families_encoders import encoder
from .families_text import base
from .ffns import dense
from .mixers import gqa
from .reader import Keys
from .weights import FFN_PARTS, Architecture, Weight, matrix, norm


def _filter(part: str, *shape: int) -> Weight:
    return Weight(part, shape, "filter")


@dataclass(frozen=True)
class Patches:
    """What tells one ViT from another. tokens: learned vectors beside the patches, `extra` of them without a position.
    bias_key: flag of the projections `bias` (output aside), true when absent. before, after: norms around the
    layers. positions: whether each patch and token has a learned one. scales: vectors that scale residuals, a layer."""

    tokens: int = 1
    extra: int = 0
    positions: bool = True
    patch_bias: bool = True
    bias_key: str = "qkv_bias"
    bias: str = "qkv"
    pooler: bool = False
    before: int = 0
    after: int = 1
    scales: int = 0


VIT = {
    "vit": Patches(pooler=True),
    "deit": Patches(tokens=2, pooler=True),
    "ijepa": Patches(tokens=0),
    "vit_msn": Patches(),
    "vit_mae": Patches(),
    "vivit": Patches(pooler=True),
    "videomae": Patches(tokens=0, positions=False, bias_key="qv_bias", bias="qv", after=0),
    "dinov2": Patches(extra=1, scales=2),
    "dinov2_with_registers": Patches(extra=1, scales=2),
    "dinov3_vit": Patches(extra=1, positions=False, bias_key="", scales=2),
    **dict.fromkeys(("clip_vision_model", "clipseg_vision_model", "metaclip_2_vision_model", "altclip_vision_model",
                     "chinese_clip_vision_model", "owlvit_vision_model", "owlv2_vision_model", "git_vision_model",
                     "kosmos_2_vision_model"), Patches(patch_bias=False, bias_key="", before=1)),
    **dict.fromkeys(("siglip_vision_model", "siglip2_vision_model", "idefics2_vision", "idefics3_vision",
                     "smolvlm_vision", "phi4_multimodal_vision"), Patches(tokens=0, bias_key="")),
    **dict.fromkeys(("paddleocr_vl_vision", "cosmos3_edge_vision", "kimi_k25_vision"), Patches(tokens=0, bias_key="")),
    "janus_vision_model": Patches(tokens=0, bias_key="attention_bias"),
    "video_llama_3_vision": Patches(tokens=0, positions=False, bias_key=""),
    "ernie4_5_vl_moe_vision": Patches(tokens=0, positions=False, patch_bias=False, bias_key=""),
    "minimax_m3_vl_vision": Patches(tokens=0, positions=False, patch_bias=False, bias_key="", before=1, after=0),
    **dict.fromkeys(("muse_spark_vision", "muse_glimmer_vision"),
                    Patches(tokens=0, patch_bias=False, bias_key="", before=1)),
    "mlcd_vision_model": Patches(positions=False, patch_bias=False, bias_key="", before=1),
    "tipsv2_vision_model": Patches(extra=1, scales=2),
    "pixio": Patches(),
    "blip_vision_model": Patches(bias_key=""),
    **dict.fromkeys(("beit", "data2vec-vision"), Patches(positions=False, bias_key="", bias="qv", scales=2)),
    **dict.fromkeys(("blip_2_vision_model", "instructblip_vision_model", "instructblipvideo_vision_model"), Patches()),
}


def _grid(k: Keys, key: str, frames: bool) -> list[int]:
    """Sizes of an image or of a patch along time, height and width: one number for both sides, or a list."""
    sides = k.data.get(key)
    found = list(sides) if isinstance(sides, list) else [k.integer(key)] * 2
    if len(found) == 2 and frames:
        found.insert(0, k.integer("num_frames" if key == "image_size" else "tubelet_size"))
    if not all(isinstance(side, int) and side > 0 for side in found):
        raise TypeError(f"{k.where}.{key}: expected an integer or a list of them, got {sides!r}")
    return found


TEMPORAL = ("minimax_m3_vl_vision", "muse_spark_vision", "muse_glimmer_vision")  # patches of several frames
REGISTERS = ("dinov2_with_registers", "dinov3_vit", "tipsv2_vision_model")
HEADS = ("siglip_vision_model", "siglip2_vision_model", "phi4_multimodal_vision")  # may end in a pooling attention


def _places(k: Keys, patch: list[int], frames: bool) -> int:
    """Positions of patches: as many as the config says, or as an image has."""
    name = k.text("model_type")
    if name in ("siglip2_vision_model", "cosmos3_edge_vision"):
        return k.integer("num_patches")
    if name in ("kimi_k25_vision", "muse_spark_vision", "muse_glimmer_vision"):
        return k.integer("pos_emb_height") * k.integer("pos_emb_width")
    image = _grid(k, "image_size", frames)
    return prod(side // size for side, size in zip(image, patch, strict=True))


def _beit(k: Keys, p: Patches) -> Patches:
    """BEiT's options."""
    for key in ("use_relative_position_bias", "use_shared_relative_position_bias"):
        if k.flag(key):
            raise ValueError(f"{k.where}.{key}: no weight table for biases of relative positions")
    after = 0 if k.text("model_type") == "data2vec-vision" and k.flag("use_mean_pooling") else 1
    return replace(p, positions=k.flag("use_absolute_position_embeddings"), extra=int(k.flag("use_mask_token")),
                   scales=2 * (k.number("layer_scale_init_value") > 0), after=after)


@family(*VIT)
def vit(k: Keys) -> Architecture:
    """Vision transformers: patches projected by one matrix, attention and FFNs with biases behind norms."""
    name = k.text("model_type")
    p = VIT[name]
    if name in ("beit", "data2vec-vision"):
        p = _beit(k, p)
    elif name == "pixio":
        p = replace(p, tokens=k.integer("n_cls_tokens"))
    d, n = k.integer("hidden_size"), k.integer("depth" if name == "ernie4_5_vl_moe_vision" else "num_hidden_layers")
    heads = k.integer("num_attention_heads", "num_heads")
    if k.flag("use_qk_norm", absent=False):
        raise ValueError(f"{k.where}.use_qk_norm: no weight table for norms of queries and keys")
    frames = name in ("vivit", "videomae")
    patch = _grid(k, _patch_key(name), frames)
    pixels = k.integer("num_channels", "in_channels", absent=3) * prod(patch)
    if name in TEMPORAL:
        pixels *= k.integer("temporal_patch_size", "patch_temporal")
    outer = matrix("other", d, pixels, p.patch_bias)
    registers = k.integer("num_register_tokens", minimum=0) if name in REGISTERS else 0
    outer += [_filter("other", d)] * (p.tokens + p.extra + registers)
    if p.positions:
        outer.append(Weight("embedding", (_places(k, patch, frames) + p.tokens, d), "table"))
    if name == "mlcd_vision_model":  # an angle for each pair of channels of a head
        outer.append(_filter("other", d // heads // 2))
    outer += norm(d, True, p.before + p.after)
    if p.pooler:
        outer += matrix("other", k.integer("pooler_output_size", absent=d), d, True)
    layer = block("dense", gqa(d, heads, heads, k.divide("head_dim", d, heads), bias=_biases(k, name, p)),
                  _ffn(k, name, d), norm(d, True, 2) + [_filter("other", d)] * p.scales)
    if name in HEADS and k.flag("vision_use_head", absent=True):
        hidden = k.integer("intermediate_size")
        outer += [_filter("other", d), *gqa(d, heads, heads, d // heads, bias="qkvo")[0], *norm(d, True)]
        outer += dense(d, hidden, gated=False, bias=True)
    return base(k, name, d, [layer] * n, outer, 1)


def _patch_key(name: str) -> str:
    return "tubelet_size" if name == "vivit" else "patch_size"


def _biases(k: Keys, name: str, p: Patches) -> str:
    if name == "dinov3_vit":
        keys = {"q": "query_bias", "k": "key_bias", "v": "value_bias", "o": "proj_bias"}
        return "".join(letter for letter, key in keys.items() if k.flag(key))
    return (p.bias if not p.bias_key or k.flag(p.bias_key, absent=True) else "") + "o"


def _ffn(k: Keys, name: str, d: int) -> list[Weight]:
    if name == "dinov3_vit":
        return dense(d, k.integer("intermediate_size"), gated=k.flag("use_gated_mlp"), bias=k.flag("mlp_bias"))
    if not name.startswith("dinov2") and name not in ("pixio", "tipsv2_vision_model", "janus_vision_model"):
        return dense(d, k.integer("intermediate_size"), gated=False, bias=True)
    hidden = int(d * k.number("mlp_ratio"))
    if k.flag("use_swiglu_ffn", absent=False):
        hidden = (int(hidden * 2 / 3) + 7) // 8 * 8
        return matrix("dense", 2 * hidden, d, True) + matrix("dense", d, hidden, True)
    return dense(d, hidden, gated=False, bias=True)


def waves(k: Keys, normed: str) -> tuple[int, list[Weight]]:
    """The width behind the convolutions over the wave, and these; `normed` is "layer" where each has a norm, not the
    first alone."""
    widths, taps = (k.indices(key, required=True) for key in ("conv_dim", "conv_kernel"))
    bias = k.flag("conv_bias")
    outer: list[Weight] = []
    for i, (rows, columns, length) in enumerate(zip(widths, [1, *widths], taps, strict=False)):
        outer += [_filter("other", rows, columns, length), *[Weight("other", (rows,), "bias")] * bias]
        outer += norm(rows, True, int(normed == "layer" or i == 0))
    return widths[-1], outer


def wave(k: Keys, d: int, projected: bool = True) -> list[Weight]:
    """Convolutions over the wave, their projection to width d (behind a norm when `projected`), a convolution over
    positions with normed weights, and what stands for masked frames."""
    last, outer = waves(k, k.text("feat_extract_norm"))
    outer += norm(last, True, int(projected)) + matrix("other", d, last, True)
    groups, length = k.integer("num_conv_pos_embedding_groups"), k.integer("num_conv_pos_embeddings")
    outer += [_filter("other", length), _filter("other", d, d // groups, length), Weight("other", (d,), "bias")]
    if k.number("mask_time_prob") > 0 or k.number("mask_feature_prob") > 0:
        outer.append(_filter("other", d))
    return outer


@family("wav2vec2", "hubert", "unispeech", "unispeech-sat", "wavlm")
def wav2vec2(k: Keys) -> Architecture:
    """wav2vec 2.0 and its like: convolutions over the wave, one over positions with normed weights, BERT's layers.
    WavLM's attention has gates for distances, whose table is in the first layer."""
    name = k.text("model_type")
    d, n, heads = k.integer("hidden_size"), k.integer("num_hidden_layers"), k.integer("num_attention_heads")
    if k.flag("add_adapter", absent=False) or k.has("adapter_attn_dim"):
        raise ValueError(f"{k.where}.add_adapter: no weight table for adapters behind or in the layers")
    outer = wave(k, d, name != "hubert" or k.flag("feat_proj_layer_norm", absent=True)) + norm(d, True)
    found, mixer = gqa(d, heads, heads, k.divide("head_dim", d, heads), bias="qkvo")
    if name == "wavlm":
        found += [_filter("attention", heads), *matrix("attention", 8, d // heads, True)]
        outer.append(_filter("attention", k.integer("num_buckets"), heads))
    ffn = dense(d, k.integer("intermediate_size"), gated=False, bias=True)
    layer = block("dense", (found, mixer), ffn, norm(d, True, 2))
    return base(k, name, d, [layer] * n, outer, k.integer("vocab_size"))


@family("pixtral")
def pixtral(k: Keys) -> Architecture:
    """Pixtral's tower: Llama's layers over patches, positions by rotation."""
    d, n, heads = k.integer("hidden_size"), k.integer("num_hidden_layers"), k.integer("num_attention_heads")
    mixed = gqa(d, heads, heads, k.divide("head_dim", d, heads))
    layer = block("dense", mixed, dense(d, k.integer("intermediate_size")), norm(d, copies=2))
    pixels = k.integer("num_channels") * k.integer("patch_size") ** 2
    return base(k, "pixtral", d, [layer] * n, [*matrix("other", d, pixels), *norm(d)], 1)


@family("clip", "siglip", "siglip2", "metaclip_2", "chinese_clip", "altclip", "clipseg", "owlvit", "owlv2",
        "aimv2", "tipsv2", "vision-text-dual-encoder")
def contrast(k: Keys) -> Architecture:
    """Encoders of text and of images side by side, with projections into one space (SigLIP: without); all but the
    text's count as vision."""
    name = k.text("model_type")
    caption, image = (Keys(k.inside(f"{key}_config").data, f"config.{key}_config") for key in ("text", "vision"))
    text = encoder(caption, decodes=True) if name == "chinese_clip" else built(caption)
    seen = built(image)
    outer = [*seen.outer, *[_filter("vision", 1)] * (2 if name.startswith("siglip") else 1)]
    if not name.startswith("siglip") and name != "tipsv2":
        width = k.integer("projection_dim")
        wide = caption.integer("project_dim") if name == "altclip" else text.d_model
        outer += matrix("vision", width, wide) + matrix("vision", width, seen.d_model)
    layers = tuple(replace(layer, weights=as_vision(layer.weights)) for layer in seen.layers)
    return replace(text, family=name, layers=text.layers + layers, outer=(*text.outer, *as_vision(outer)),
                   assumed=tuple(sorted({**dict(text.assumed), **dict(seen.assumed)}.items())))


def as_vision(weights: Iterable[Weight]) -> tuple[Weight, ...]:
    """The same weights as those of a tower."""
    return tuple(replace(w, part="vision_ffn" if w.part in FFN_PARTS else "vision") for w in weights)
