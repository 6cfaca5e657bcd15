"""Image towers of vision-language models when a config is of the tower alone, by the tables of `towers`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from . import towers
from .families import family
from .reader import Keys
from .stacks import whole
from .weights import Architecture, Layer, Mixer, Weight

Table = Callable[[Keys], list[Weight]]


def _alone(table: towers.Tower) -> Table:
    """A table that needs nothing of the wrapper."""
    return lambda v: table(v, v, 0)


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
    table, depth = ALONE[k.text("model_type")]
    n, heads = k.integer(depth), k.integer("num_heads", "num_attention_heads")
    one, two = (Counter(table(Keys({**k.data, depth: layers}, k.where, k))) for layers in (1, 2))
    block = two - one
    d = k.integer("embed_dim", "hidden_size")
    mixer = Mixer(heads, d // heads, d // heads, None, 2 * d)
    return whole(k, d, 1, [Layer("dense", tuple(block.elements()), (mixer,))] * n, (one - block).elements())
