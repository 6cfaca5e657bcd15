"""Families with experts behind latent attention, and those whose attention picks the tokens it looks at."""

from __future__ import annotations

from .families import (
    attention_bias,
    block,
    decoder,
    family,
    first_dense,
    heads_of,
    predictions,
    predictor,
    shared_width,
    tower,
    width_and_depth,
)
from .families_moe import grouped
from .ffns import dense, moe
from .mixers import gqa, indexer, mla
from .reader import Keys
from .weights import Architecture, Layer, matrix, norm

LATENT = {
    # family: (selection bias, mtp as in DeepSeek-V3, extra norm after a sparse FFN)
    "deepseek_v2": ("", False, False),
    "deepseek_v3": ("buffer", True, False),
    "deepseek_v32": ("buffer", True, False),
    "kimi_k2": ("buffer", True, False),
    "glm4_moe_lite": ("buffer", True, False),
    "glm_moe_dsa": ("buffer", True, False),
    "mistral4": ("", False, False),
    "sarvam_mla": ("buffer", True, False),
    "axk1": ("buffer", False, True),
    "pangu_ultra_moe": ("flag", True, False),
}
# openPangu's names of the keys, as in its own code.
PANGU = {"attention_q_lora_dim": "q_lora_rank", "attention_kv_lora_dim": "kv_lora_rank",
         "attention_qk_dim": "qk_nope_head_dim", "attention_qk_rope_dim": "qk_rope_head_dim",
         "attention_v_dim": "v_head_dim", "num_routed_experts": "n_routed_experts",
         "num_shared_experts": "n_shared_experts", "num_dense_layers": "first_k_dense_replace",
         "num_mtp_layers": "num_nextn_predict_layers"}


def indexed(k: Keys, layers: int) -> list[bool]:
    """Which layers have an index of their own; the others look at the tokens that an earlier one picked. By
    `indexer_types`, by a pattern of F and S, or every `index_topk_freq`-th from an offset on."""
    if k.has("index_topk_pattern") and not k.has("indexer_types"):
        letters = k.data["index_topk_pattern"]
        if not isinstance(letters, str) or len(letters) != layers or set(letters) - {"F", "S"}:
            raise ValueError(f"{k.where}.index_topk_pattern: expected {layers} letters of F and S, got {letters!r}")
        return [letter == "F" for letter in letters]
    if not k.has("indexer_types"):
        every = k.integer("index_topk_freq", absent=1)
        offset = k.integer("index_skip_topk_offset", absent=2, minimum=0) if every > 1 else 0
        return [max(i - offset + 1, 0) % every == 0 for i in range(layers)]
    return [word == "full" for word in k.words("indexer_types", layers=layers, among=("full", "shared"))]


@family(*LATENT, "kimi_k25")
def latent(k: Keys) -> Architecture:
    """DeepSeek's layout of experts on multi-head latent attention, with or without a sparse-attention index."""
    k = tower(k)
    name = k.text("model_type")
    if k.data.get("use_mla") is False:  # DeepSeek-VL2 Tiny: the layout of experts without the latent attention
        k.data = {**k.data, "model_type": "deepseek"}
        return grouped(k)
    selection, has_mtp, after = LATENT.get(name, LATENT["deepseek_v3"])
    norms = 2
    if name == "pangu_ultra_moe":
        k.data = {**k.data, **{new: k.data[old] for old, new in PANGU.items() if k.has(old)}}
        selection = "buffer" if k.flag("router_enable_expert_bias", absent=False) else ""
        norms = 4 if k.flag("sandwich_norm") else 2
    d, n = width_and_depth(k)
    heads = k.integer("num_attention_heads")
    if k.data.get("q_lora_rank", 0) is None:
        rank = 0
    elif name == "sarvam_mla" and not k.has("q_lora_rank"):
        rank = 0
    else:
        rank = k.integer("q_lora_rank")
    found, mixer = mla(d, heads, rank, k.integer("kv_lora_rank"), k.integer("qk_nope_head_dim"),
                       k.integer("qk_rope_head_dim"), k.integer("v_head_dim"),
                       bias=k.flag("attention_bias", absent=False))
    look = (indexer(d, rank, k.integer("index_n_heads"), k.integer("index_head_dim"))
            if name in ("deepseek_v32", "glm_moe_dsa") else [])
    no_experts = "n_routed_experts" in k.data and k.data["n_routed_experts"] is None  # said, not left out
    sparse = [False] * n if no_experts else first_dense(k, n)
    ffn = []
    if any(sparse):
        expert = k.integer("moe_intermediate_size")
        ffn = moe(d, expert, k.integer("n_routed_experts"), k.integer("num_experts_per_tok"),
                  shared=shared_width(k, expert, sparse), selection=selection)
    plain = dense(d, k.integer("intermediate_size")) if not all(sparse) else []
    layers = [block("sparse" if on else "dense", (found + look * own, mixer), ffn if on else plain,
                    norm(d, copies=norms + (after and on))) for own, on in zip(indexed(k, n), sparse, strict=True)]
    mtp: tuple[Layer, ...] = ()
    if has_mtp and sparse[-1]:  # with an index of its own, whatever the last layer has
        last = block(layers[-1].kind, (found + look, mixer), ffn, norm(d, copies=norms + after))
        mtp = (predictor(d, last),) * predictions(k)
    return decoder(k, name, d, layers, tied=False, mtp=mtp, mtp_copies=2)


@family("minimax_m3_vl", "minimax_m3_vl_text", "minimax_m3")
def minimax_m3(k: Keys) -> Architecture:
    """MiniMax-M3: block-sparse attention with an index in some layers; the experts' width is `intermediate_size`."""
    k = tower(k)
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    index = k.inside("sparse_attention_config") if k.has("sparse_attention_config") else k
    if k.has("layer_types"):
        words = k.words("layer_types", layers=n, among=("full_attention", "minimax_m3_sparse"))
        indexed = [word != "full_attention" for word in words]
    else:
        indexed = [bool(v) for v in index.each("sparse_attention_freq", layers=n)]
    sparse = first_dense(k, n)
    ffn = moe(d, k.integer("intermediate_size"), k.integer("num_local_experts"), k.integer("num_experts_per_tok"),
              shared=k.integer("shared_intermediate_size", minimum=0), selection="buffer")
    plain = dense(d, k.integer("dense_intermediate_size")) if not all(sparse) else []
    found, mixer = gqa(d, heads, kv, width, qk_norm="head")
    chooser = []
    if any(indexed):
        wide = index.integer("index_head_dim", "sparse_index_dim")
        chooser = matrix("attention", index.integer("index_n_heads", "sparse_num_index_heads") * wide, d)
        chooser += matrix("attention", wide, d) + norm(wide, copies=2)
    layers = [block("sparse" if on else "dense", (found + chooser if look else found, mixer), ffn if on else plain,
                    norm(d, copies=2)) for look, on in zip(indexed, sparse, strict=True)]
    return decoder(k, "minimax_m3", d, layers, tied=False)


@family("step3p5", "step3p7")
def step(k: Keys) -> Architecture:
    """Step-3.5: a gate for each head, more heads in window layers; lists may run on over the prediction layers."""
    k = tower(k)
    d, n = width_and_depth(k)
    heads, width = k.integer("num_attention_heads"), k.integer("head_dim")
    kv = k.integer("num_key_value_heads", "num_attention_groups")
    extra = predictions(k)
    listed = k.data.get("layer_types")
    words = k.words("layer_types", layers=n + extra if isinstance(listed, list) and len(listed) == n + extra else n,
                    among=("full_attention", "sliding_attention"))
    other = k.inside("attention_other_setting") if k.has("attention_other_setting") else None
    more = (other.integer("num_attention_heads") if other else k.integer("num_sliding_attention_heads", absent=heads))
    if k.has("moe_layers_enum"):
        chosen = set(k.indices("moe_layers_enum"))
        sparse = [i in chosen for i in range(n)]
    else:
        sparse = first_dense(k, n)
    expert = k.integer("moe_intermediate_size")
    ffn_bias, bias = k.flag("mlp_bias", absent=False), attention_bias(k)
    ffn = moe(d, expert, k.integer("n_routed_experts", "moe_num_experts", "num_experts"),
              k.integer("num_experts_per_tok", "moe_top_k"), selection="buffer",
              shared=k.integer("share_expert_dim", "share_expert_dims", minimum=0), shared_bias=ffn_bias)
    plain = dense(d, k.integer("intermediate_size"), bias=ffn_bias) if extra or not all(sparse) else []
    window = k.integer("sliding_window", absent=0, minimum=0) or None
    layers = []
    for i, word in enumerate([*words, *["full_attention"] * (n + extra - len(words))]):
        sliding = word == "sliding_attention"
        mixed = gqa(d, more if sliding else heads, kv, width, bias=bias, qk_norm="head", gate="heads",
                    window=window if sliding else None)
        on = i < n and sparse[i]
        layers.append(block("sparse" if on else "dense", mixed, ffn if on else plain, norm(d, copies=2)))
    mtp = tuple(predictor(d, layer) for layer in layers[n:])  # dense, each with a head of its own
    return decoder(k, "step3p5", d, layers[:n], tied=False, mtp=mtp, mtp_copies=1)
