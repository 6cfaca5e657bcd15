"""Model families: from a config to the list of weights. The registry, and what all decoders share.

Each family is a function of its config's keys, written from the structure of the public modelling code
(transformers 5.24, or the code beside the checkpoint where transformers has none) and compared with live models in
the tests. A family that is not here is refused by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from .reader import REQUIRED, Keys
from .towers import towers
from .weights import Architecture, Layer, Mixer, Weight, matrix, norm

Builder = Callable[[Keys], Architecture]
B = TypeVar("B", bound=Callable[..., Architecture])
FAMILIES: dict[str, Builder] = {}

LINEAR = ("linear_attention", "lightning_attention")
FULL = ("full_attention", "attention", "sliding_attention", "chunked_attention")


def family(*names: str) -> Callable[[B], B]:
    """Register a builder under `model_type` names."""

    def register(build: B) -> B:
        for name in names:
            FAMILIES[name] = build
        return build

    return register


def architecture(config: Mapping[str, Any]) -> Architecture:
    """The weights of the model that `config` (the content of a config.json) describes.

    Raises ValueError for an unknown `model_type`, a missing size or an impossible value, TypeError for a value of
    the wrong type; the message names the key.
    """
    from . import (  # noqa: F401
        families_classic,
        families_conformers,
        families_dense,
        families_encoders,
        families_gemma,
        families_hearing,
        families_hybrid,
        families_indexed,
        families_mamba,
        families_moe,
        families_multimodal,
        families_other,
        families_pairs,
        families_rare,
        families_recurrent,
        families_remote,
        families_seen,
        families_senses,
        families_seq2seq,
        families_series,
        families_sparse,
        families_speech,
        families_text,
        families_towers,
    )

    keys = Keys(config)
    if not keys.has("model_type") and keys.has("intermediate"):
        return FAMILIES["paper"](keys)
    model = built(keys)
    if not model.excluded:
        return model
    return replace(model, towers=lambda: towers(Keys(config), model.d_model))


def built(k: Keys) -> Architecture:
    """The model of the family that `model_type` names; capitals and punctuation do not matter (MiniMaxText01)."""
    name = k.text("model_type")
    if name not in FAMILIES:
        same = [known for known in FAMILIES if _letters(known) == _letters(name)]
        if not same:
            near = difflib.get_close_matches(name, FAMILIES, 3)
            hint = f" (close: {', '.join(near)})" if near else ""
            raise ValueError(
                f"{k.where}.model_type: no weight table for {name!r}{hint}; "
                "moeffn.accounting.count(module) counts any live module, also one on the meta device"
            )
        name = same[0]
        k.data = {**k.data, "model_type": name}
    return FAMILIES[name](k)


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def width_and_depth(k: Keys) -> tuple[int, int]:
    """Width and number of layers."""
    return k.integer("hidden_size"), k.integer("num_hidden_layers", "num_layers")


def tower(k: Keys, *names: str) -> Keys:
    """The language model inside a multimodal config; the other towers are named as excluded."""
    inner = next((name for name in (*names, "text_config", "llm_config", "language_config") if k.has(name)), "")
    if not inner:
        return k
    k.excluded.extend(name for name in ("vision_config", "audio_config", "speech_config") if k.has(name))
    return k.inside(inner)


def shared_width(k: Keys, expert: int, sparse: list[bool]) -> int:
    """Width of the shared experts: a number of them, or a width of their own."""
    if k.has("shared_experts_intermediate_size"):
        return k.integer("shared_experts_intermediate_size") * k.integer("n_shared_experts", minimum=0)
    if k.has("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"):
        if not k.has("n_shared_experts", "num_shared_experts"):
            return k.integer("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", minimum=0)
        own = k.integer("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", minimum=0)
        return own * (k.integer("n_shared_experts", "num_shared_experts", minimum=0) > 0)
    return expert * k.integer("n_shared_experts", "num_shared_experts", minimum=0) if any(sparse) else 0


# In these families' own code a missing number of key/value heads means as many as query heads.
KV_FROM_HEADS = {
    "chameleon", "cohere_compass_text", "emu3_text_model", "eurobert", "ultrabert", "skywork", "xverse", "aria_moe_lm",
    "PanguProMoE", "pangu_pro_moe", "PanguEmbedded",
    "afmoe", "apertus", "arcee", "aria_text", "baichuan", "cohere", "cohere2", "cohere2_moe", "deepseek", "flex_olmo",
    "granite", "granitemoe", "granitemoehybrid", "granitemoeshared", "granitemoe_swa", "hunyuan", "hunyuan_moe",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "internlm", "llama", "megrez_moe", "nemotron", "olmo", "olmo2", "olmo3",
    "olmoe", "phi3",
}
# In these a head's width is a size of its own, never d / heads.
OWN_HEAD_DIM = {
    "afmoe", "cohere2_moe", "cwm", "ernie4_5", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt_oss", "helium",
    "hy_v3", "internlm3", "laguna", "lara_mini", "llama4_text", "mellum", "mimo_v2_flash", "minimax_m2",
    "minimax_m3_vl_text", "ministral3", "nemotron_h", "openai_privacy_filter", "qwen3", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_next", "sarvam_moe", "seed_oss", "solar_open",
}
# In these a missing head's width is d / heads, rounded down.
ROUNDS_DOWN = {"glm4_moe", "glm4v_moe_text", "qwen3_omni_moe_text"}


def without_experts(k: Keys) -> None:
    """Refuses a config that names experts of a family whose table has none: a mixture would be counted as dense."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        if k.has(name) and k.integer(name, minimum=0) > 1:
            raise ValueError(f"{k.where}.{name}: a {k.text('model_type')!r} with experts has no weight table, "
                             f"got {k.data[name]}")


def attention_bias(k: Keys) -> str:
    """The projections with a bias where one flag, false when absent, is for all of them."""
    return "qkvo" if k.flag("attention_bias", absent=False) else ""


def heads_of(k: Keys, d: int) -> tuple[int, int, int]:
    """Query heads, key/value heads and head width; the last two derived only where the family's own code does so."""
    name = k.data.get("model_type", "")
    n = k.integer("num_attention_heads")
    kv_heads = k.integer("num_key_value_heads", absent=n if name in KV_FROM_HEADS else REQUIRED)
    if k.has("head_dim") or name in OWN_HEAD_DIM:
        return n, kv_heads, k.integer("head_dim")
    if name in ROUNDS_DOWN and d % n:
        k.assumed["head_dim"] = d // n
        return n, kv_heads, d // n
    return n, kv_heads, k.divide("head_dim", d, n)


def first_dense(k: Keys, layers: int, absent: Any = REQUIRED) -> list[bool]:
    """Which layers are sparse: by `mlp_layer_types`, or dense up to `first_k_dense_replace` and then by frequency."""
    if k.has("mlp_layer_types"):
        words = k.words("mlp_layer_types", layers=layers, among=("dense", "sparse", "moe", "hash_moe"))
        return [word != "dense" for word in words]
    if k.has("is_moe_layer"):
        return k.flags("is_moe_layer", layers=layers)
    if isinstance(k.data.get("moe_layer_freq"), list):
        return [bool(v) for v in k.each("moe_layer_freq", layers=layers)]
    first = k.integer("first_k_dense_replace", "num_dense_layers", minimum=0, absent=absent)
    every = k.integer("moe_layer_freq", absent=1)
    return [i >= first and i % every == 0 for i in range(layers)]


def sparse_step(k: Keys, layers: int) -> list[bool]:
    """Which layers are sparse, by `decoder_sparse_step` and `mlp_only_layers` (Qwen)."""
    step = k.integer("decoder_sparse_step", absent=1)
    dense_only = set(k.indices("mlp_only_layers"))
    return [i not in dense_only and (i + 1) % step == 0 for i in range(layers)]


def linear_layers(k: Keys, layers: int, interval: str) -> list[bool]:
    """Which layers mix by a linear recurrence: by `layer_types`, or all but every `interval`-th."""
    if k.has("layer_types"):
        return [word in LINEAR for word in k.words("layer_types", layers=layers, among=FULL + LINEAR)]
    every = k.integer(interval)
    return [(i + 1) % every != 0 for i in range(layers)]


def windows(k: Keys, layers: int, key: str = "sliding_window") -> list[int | None]:
    """The positions each layer sees, where the config says it; None: all."""
    types = k.data.get("layer_types")
    width = k.data.get(key)
    if not isinstance(types, list) or len(types) != layers or not isinstance(width, int):
        return [None] * layers
    return [width if word in ("sliding_attention", "chunked_attention") else None for word in types]


def decoder(k: Keys, name: str, d: int, layers: list[Layer], *, tied: bool, norm_bias: bool = False,
            final_norm: bool = True, head: bool = True, head_bias: bool = False, extra: tuple[Weight, ...] = (),
            mtp: tuple[Layer, ...] = (), mtp_copies: int = 0, head_rows: int = 0, table: int = 0) -> Architecture:
    """A decoder of `layers` between a token embedding and a head. mtp_copies: matrices of the embedding's size that a
    checkpoint stores once more for each prediction layer. head_rows: rows of the head, 0 for one for each token.
    table: width of the embedding where it is not d."""
    vocab = k.integer("vocab_size", "padded_vocab_size")
    is_tied = k.tied(tied)
    outer = [Weight("embedding", (vocab, table or d), "table"), *extra]
    if final_norm:
        outer += norm(d, norm_bias)
    if head and not is_tied:
        outer += matrix("head", head_rows or vocab, table or d, head_bias)
    elif head and head_bias:
        outer.append(Weight("head", (vocab,), "bias"))
    return Architecture(
        name, d, vocab, tuple(layers), tuple(outer), is_tied, mtp, vocab * d * len(mtp) * mtp_copies,
        tuple(sorted(k.assumed.items())), tuple(k.excluded),
    )


def block(kind: str, mixed: tuple[list[Weight], Mixer], ffn: list[Weight], norms: list[Weight]) -> Layer:
    """One decoder layer."""
    return Layer(kind, tuple(mixed[0] + ffn + norms), (mixed[1],))


def predictor(d: int, layer: Layer) -> Layer:
    """A multi-token-prediction layer as DeepSeek-V3 builds it: a decoder layer behind a 2d -> d projection, with
    three more norms (arXiv 2412.19437, section 2.2); MiMo, Step, LongCat and others alike, on layers of their own."""
    return Layer("mtp", layer.weights + tuple(matrix("other", d, 2 * d) + norm(d, copies=3)), layer.mixers)


def predictions(k: Keys, *names: str) -> int:
    """How many prediction layers the config says the model has."""
    return k.integer(*(names or ("num_nextn_predict_layers",)), absent=0, minimum=0)
