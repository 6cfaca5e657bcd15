"""Weights of the image towers beside a language model, with the projector between: for the scope `multimodal`.

One entry a wrapper: its tower from the sizes of `vision_config`, its projector from those and the language model's
width. Towers without an entry are refused by name under that scope, and named as excluded under the others.
"""

from __future__ import annotations

from collections.abc import Callable

from .ffns import dense
from .reader import Keys
from .weights import Weight, matrix

PART = "vision"
Tower = Callable[[Keys, Keys, int], list[Weight]]


def _norm(width: int, bias: bool = True, copies: int = 1) -> list[Weight]:
    return [Weight(PART, (width,), "filter")] * (copies * (2 if bias else 1))


def _table(rows: int, width: int) -> list[Weight]:
    return [Weight(PART, (rows, width), "table")] * (rows > 0)


def _block(d: int, hidden: int, *, bias: str = "qkvo", gated: bool = False, ffn_bias: bool = True,
           norm_bias: bool = True) -> list[Weight]:
    """Attention of four d x d matrices and an FFN, each behind a norm."""
    found = [w for letter in "qkvo" for w in matrix(PART, d, d, letter in bias)]
    found += dense(d, hidden, gated=gated, bias=ffn_bias, part="vision_ffn")
    return found + _norm(d, norm_bias, 2)


def _pixels(v: Keys) -> int:
    return v.integer("num_channels", "in_channels", absent=3) * v.integer("patch_size") ** 2


def _patches(v: Keys) -> int:
    return (v.integer("image_size") // v.integer("patch_size")) ** 2


def siglip(v: Keys) -> list[Weight]:
    """SigLIP, with the attention pooling that some wrappers keep."""
    d, depth, hidden = v.integer("hidden_size"), v.integer("num_hidden_layers"), v.integer("intermediate_size")
    found = matrix(PART, d, _pixels(v), True) + _table(_patches(v), d) + _block(d, hidden) * depth + _norm(d)
    if v.flag("vision_use_head", absent=False):
        found += [w for w in _block(d, hidden) if w.part != PART or len(w.shape) == 2]
        found += _norm(d, False, 4) + _norm(d) + _norm(d, False)  # biases of the attention, its norm, the query
    return found


def clip(v: Keys) -> list[Weight]:
    d, depth = v.integer("hidden_size"), v.integer("num_hidden_layers")
    found = matrix(PART, d, _pixels(v)) + _table(_patches(v) + 1, d) + _norm(d, False)
    return found + _block(d, v.integer("intermediate_size")) * depth + _norm(d, copies=2)


def intern(v: Keys) -> list[Weight]:
    d, depth = v.integer("hidden_size"), v.integer("num_hidden_layers")
    bias = "qkvo" if v.flag("attention_bias", absent=False) else "o"
    if v.flag("use_qk_norm", absent=False) or not v.flag("use_mean_pooling", absent=True):
        raise ValueError(f"{v.where}: no weight table for a tower with norms of queries, or without mean pooling")
    layer = _block(d, v.integer("intermediate_size"), bias=bias,
                   norm_bias=v.text("norm_type", absent="layer_norm") == "layer_norm") + _norm(d)  # two scales
    found = matrix(PART, d, _pixels(v), True) + _norm(d, False) + layer * depth
    found += _norm(d, False) * v.flag("use_mask_token", absent=False)
    return found + _table(_patches(v) + 1, d) * v.flag("use_absolute_position_embeddings", absent=True)


def pixtral(v: Keys) -> list[Weight]:
    d, depth = v.integer("hidden_size"), v.integer("num_hidden_layers")
    layer = _block(d, v.integer("intermediate_size"), bias="", gated=True, ffn_bias=False, norm_bias=False)
    return matrix(PART, d, _pixels(v)) + _norm(d, False) + layer * depth


def _merger(d: int, side: int, out: int, norm: int, norm_bias: bool = True) -> list[Weight]:
    """`side` x `side` neighbours joined and projected to the language model's width."""
    wide = d * side * side
    return _norm(norm, norm_bias) + matrix(PART, wide, wide, True) + matrix(PART, out, wide, True)


def qwen2_vl(v: Keys, k: Keys, width: int) -> list[Weight]:
    d, side = v.integer("embed_dim"), v.integer("spatial_merge_size")
    hidden = d * v.integer("mlp_ratio")
    found = matrix(PART, d, _pixels(v) * v.integer("temporal_patch_size")) + _block(d, hidden) * v.integer("depth")
    return found + _merger(d, side, v.integer("hidden_size"), d)


def qwen2_5_vl(v: Keys, k: Keys, width: int) -> list[Weight]:
    d, side = v.integer("hidden_size"), v.integer("spatial_merge_size")
    layer = _block(d, v.integer("intermediate_size"), gated=True, norm_bias=False)
    found = matrix(PART, d, _pixels(v) * v.integer("temporal_patch_size")) + layer * v.integer("depth")
    return found + _merger(d, side, v.integer("out_hidden_size"), d, False)


def qwen3_vl(v: Keys, k: Keys, width: int) -> list[Weight]:
    """Qwen3-VL and 3.5: the former also projects some inner layers (`deepstack_visual_indexes`)."""
    d, side, out = v.integer("hidden_size"), v.integer("spatial_merge_size"), v.integer("out_hidden_size")
    found = matrix(PART, d, _pixels(v) * v.integer("temporal_patch_size"), True)
    found += _table(v.integer("num_position_embeddings"), d)
    found += _block(d, v.integer("intermediate_size")) * v.integer("depth") + _merger(d, side, out, d)
    return found + _merger(d, side, out, d * side * side) * len(v.indices("deepstack_visual_indexes"))


def glm4v(v: Keys, k: Keys, width: int) -> list[Weight]:
    d, out, side = v.integer("hidden_size"), v.integer("out_hidden_size"), v.integer("spatial_merge_size")
    found = matrix(PART, d, _pixels(v) * v.integer("temporal_patch_size"), True) + _table(_patches(v), d)
    bias = "qkv" * v.flag("attention_bias", absent=False)
    found += _block(d, out, bias=bias, gated=True, ffn_bias=False, norm_bias=False) * v.integer("depth")
    found += _norm(d, False, 2) + matrix(PART, out, d * side * side, True) + matrix(PART, out, out) + _norm(out)
    return found + dense(out, v.integer("intermediate_size"), part=PART)


def kimi(v: Keys, k: Keys, width: int) -> list[Weight]:
    d, depth, sides = v.integer("hidden_size"), v.integer("num_hidden_layers"), v.indices("merge_kernel_size")
    if len(sides) != 2:
        raise ValueError(f"{v.where}.merge_kernel_size: expected two integers, got {sides}")
    wide = d * sides[0] * sides[1]
    found = matrix(PART, d, _pixels(v), True) + _table(v.integer("pos_emb_height") * v.integer("pos_emb_width"), d)
    found += _block(d, v.integer("intermediate_size")) * depth + _norm(d, copies=2)
    return found + matrix(PART, wide, wide, True) + matrix(PART, width, wide, True)


def llama4(v: Keys, k: Keys, width: int) -> list[Weight]:
    d, depth, hidden = v.integer("hidden_size"), v.integer("num_hidden_layers"), v.integer("intermediate_size")
    inward, outward = v.integer("projector_input_dim"), v.integer("projector_output_dim")
    found = matrix(PART, d, _pixels(v)) + _table(_patches(v) + 1, d) + _norm(d, False) + _block(d, hidden) * depth
    found += _norm(d, copies=2) + matrix(PART, inward, hidden) + matrix(PART, outward, outward)
    return found + matrix(PART, width, v.integer("vision_output_dim"))


def two(tower: Callable[[Keys], list[Weight]], newline: bool = False) -> Tower:
    """A tower behind two matrices, with biases unless the config says no (LLaVA)."""
    def build(v: Keys, k: Keys, width: int) -> list[Weight]:
        bias = k.flag("multimodal_projector_bias", absent=True)
        found = tower(v) + matrix(PART, width, v.integer("hidden_size"), bias) + matrix(PART, width, width, bias)
        return found + _norm(width, False) * newline
    return build


def one(tower: Callable[[Keys], list[Weight]], bias: bool = False) -> Tower:
    """A tower whose neighbouring patches (`scale_factor` squared) are projected by one matrix."""
    def build(v: Keys, k: Keys, width: int) -> list[Weight]:
        joined = k.integer("scale_factor", absent=1) ** 2
        return tower(v) + matrix(PART, width, joined * v.integer("hidden_size"), bias)
    return build


def internvl(v: Keys, k: Keys, width: int) -> list[Weight]:
    ratio = k.data.get("downsample_ratio")
    if not isinstance(ratio, float) or ratio <= 0:
        raise ValueError(f"{k.where}.downsample_ratio: expected a number of at most 1, got {ratio!r}")
    wide = v.integer("hidden_size") * round(1 / ratio) ** 2
    return intern(v) + _norm(wide) + matrix(PART, width, wide, True) + matrix(PART, width, width, True)


def mistral3(v: Keys, k: Keys, width: int) -> list[Weight]:
    d, side = v.integer("hidden_size"), k.integer("spatial_merge_size")
    bias = k.flag("multimodal_projector_bias", absent=False)
    found = pixtral(v) + _norm(d, False) + matrix(PART, d, d * side * side)
    return found + matrix(PART, width, d, bias) + matrix(PART, width, width, bias)


# By the wrapper, and by its tower where wrappers take more than one.
TOWERS: dict[tuple[str, str], Tower] = {
    ("qwen2_vl", ""): qwen2_vl, ("qwen2_5_vl", ""): qwen2_5_vl,
    **{(name, ""): qwen3_vl for name in ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")},
    **{(name, ""): glm4v for name in ("glm4v", "glm4v_moe", "glm46v")},
    ("kimi_k25", ""): kimi, ("llama4", ""): llama4, ("internvl", ""): internvl, ("mistral3", "pixtral"): mistral3,
    ("llava", "clip_vision_model"): two(clip), ("llava", "siglip_vision_model"): two(siglip),
    ("llava", "pixtral"): two(pixtral), ("llava_next", "clip_vision_model"): two(clip, newline=True),
    ("idefics3", ""): one(siglip), ("smolvlm", ""): one(siglip), ("paligemma", ""): one(siglip, bias=True),
}


def towers(k: Keys, width: int) -> tuple[Weight, ...] | None:
    """The weights beside the language model of width `width` in the config at `k`; None where there is no table."""
    others = [key for key in ("audio_config", "speech_config") if k.has(key)]
    if others or not k.has("vision_config"):
        return None
    v = k.inside("vision_config")
    name = k.text("model_type")
    build = TOWERS.get((name, "")) or TOWERS.get((name, v.text("model_type", absent="")))
    return tuple(build(v, k, width)) if build else None
