"""Families that mix tokens by more than one kind of layer, and those with an unusual layer of experts."""

from __future__ import annotations

from .families import (
    FULL,
    LINEAR,
    attention_bias,
    block,
    decoder,
    family,
    first_dense,
    heads_of,
    linear_layers,
    predictions,
    predictor,
    shared_width,
    sparse_step,
    tower,
    width_and_depth,
    windows,
)
from .families_moe import every_layer, grouped_lightning
from .ffns import dense, moe
from .mixers import gated_delta, gqa, kimi_delta, lightning, mla, short_conv
from .reader import Keys
from .weights import Architecture, Layer, Weight, matrix, norm


@family("qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_text", "lara_mini")
def qwen_hybrid(k: Keys) -> Architecture:
    """Gated DeltaNet with a gated full attention every few layers; experts unless the family is Qwen3.5 dense."""
    name = k.text("model_type")
    k = tower(k)
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    linear = linear_layers(k, n, "full_attention_interval")
    sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    recurrent = gated_delta(d, *(k.integer(f"linear_{size}") for size in sizes)) if any(linear) else None
    bias = attention_bias(k)
    gate = "query" if name != "lara_mini" and k.flag("attn_output_gate", absent=True) else ""
    full = gqa(d, heads, kv, width, bias=bias, qk_norm="head", gate=gate)
    has_experts = not name.startswith("qwen3_5") or "moe" in name
    sparse = sparse_step(k, n) if has_experts else [False] * n
    ffn = moe(d, k.integer("moe_intermediate_size"), k.integer("num_experts"), k.integer("num_experts_per_tok"),
              shared=k.integer("shared_expert_intermediate_size", minimum=0),
              shared_gate=name != "lara_mini") if any(sparse) else []
    plain = dense(d, k.integer("intermediate_size")) if not all(sparse) else []
    norms = norm(d, copies=2)
    layers = [block("sparse" if on else "dense", recurrent if recurrent and is_linear else full, ffn if on else plain,
                    norms) for is_linear, on in zip(linear, sparse, strict=True)]
    # One projection 2d -> d with three norms for all prediction layers; each of these has full attention.
    count = k.integer("mtp_num_hidden_layers", absent=0, minimum=0)
    mtp = [block("mtp", full, ffn or plain, norms) for _ in range(count)]
    if mtp:
        entry = matrix("other", d, 2 * d) + norm(d, copies=3)
        mtp[0] = Layer("mtp", mtp[0].weights + tuple(entry), mtp[0].mixers)
    return decoder(k, name, d, layers, tied=name == "lara_mini", mtp=tuple(mtp))


@family("minimax", "minimax_text_01", "minimax_m1")
def minimax(k: Keys) -> Architecture:
    """MiniMax-Text-01 and M1. M2's published config names this `model_type` too, and says it by its router's bias."""
    if k.has("use_routing_bias"):
        k.data = {**k.data, "model_type": "minimax_m2"}
        return every_layer(k)
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    if k.has("attn_type_list"):
        linear = [kind == 0 for kind in k.each("attn_type_list", layers=n)]
    else:
        linear = [word in LINEAR for word in k.words("layer_types", layers=n, among=FULL + LINEAR)]
    ffn = moe(d, k.integer("intermediate_size"), k.integer("num_local_experts"), k.integer("num_experts_per_tok"),
              shared=k.integer("shared_intermediate_size", absent=0, minimum=0))
    layers = [block("sparse", lightning(d, heads, width) if on else gqa(d, heads, kv, width), ffn, norm(d, copies=2))
              for on in linear]
    return decoder(k, k.text("model_type"), d, layers, tied=False)


@family("kimi_linear", "bailing_hybrid")
def delta_latent(k: Keys) -> Architecture:
    """Kimi delta attention with latent attention between; Ling 2.5, of Ling 3's `model_type`, has lightning attention
    in its place and no gates on the latent one."""
    name = k.text("model_type")
    kimi = name == "kimi_linear"
    for key in ("routed_expert_hidden_size", "attn_res_block_size"):
        if kimi and k.has(key):
            raise ValueError(f"{k.where}.{key}: Kimi K3's layers, under Kimi Linear's name, have no weight table")
    delta = kimi or k.has("short_conv_kernel_size", "no_kda_lora", "kda_safe_gate") or not k.has("group_norm_size")
    d, n = width_and_depth(k)
    heads = k.integer("num_attention_heads")
    if kimi and k.has("linear_attn_config"):
        inner = k.inside("linear_attn_config")
        full = set(inner.indices("full_attn_layers"))  # numbered from 1
        linear = [i + 1 not in full for i in range(n)]
        sizes = inner.integer("num_heads"), inner.integer("head_dim"), inner.integer("short_conv_kernel_size")
    else:
        linear = linear_layers(k, n, "layer_group_size")
        if kimi:
            sizes = k.integer("linear_num_heads"), k.integer("linear_head_dim"), k.integer("linear_conv_kernel_dim")
        else:
            taps = "linear_conv_kernel_dim" if k.has("linear_conv_kernel_dim") else "short_conv_kernel_size"
            conv = k.integer(taps) if delta else 0
            sizes = k.integer("linear_num_heads", absent=heads), k.integer("linear_head_dim", "head_dim"), conv
    rank = k.integer("q_lora_rank") if k.has("q_lora_rank") else 0
    attention = mla(d, heads, rank, k.integer("kv_lora_rank"), k.integer("qk_nope_head_dim"),
                    k.integer("qk_rope_head_dim"), k.integer("v_head_dim"),
                    gate="heads" if delta and not kimi else "")
    recurrent = kimi_delta(d, *sizes, low_rank=kimi) if delta else grouped_lightning(k, d, heads, sizes[1])
    sparse = first_dense(k, n)
    expert = k.integer("moe_intermediate_size")
    ffn = moe(d, expert, k.integer("num_experts", "num_local_experts"),
              k.integer("num_experts_per_token", "num_experts_per_tok"), shared=shared_width(k, expert, sparse),
              selection="buffer", where="config.num_experts_per_token")
    plain = dense(d, k.integer("intermediate_size")) if not all(sparse) else []
    layers = [block("sparse" if on else "dense", recurrent if is_linear else attention, ffn if on else plain,
                    norm(d, copies=2)) for is_linear, on in zip(linear, sparse, strict=True)]
    mtp: tuple[Layer, ...] = ()
    if kimi and k.data.get("num_nextn_predict_layers"):
        k.excluded.append("num_nextn_predict_layers")
    elif not kimi and ffn:  # latent attention and experts
        mtp = (predictor(d, block("mtp", attention, ffn, norm(d, copies=2))),) * predictions(
            k, "num_nextn_predict_layers", "num_mtp_layers")
    return decoder(k, name, d, layers, tied=False, mtp=mtp)


@family("lfm2_moe", "lfm2", "lfm3")
def lfm2(k: Keys) -> Architecture:
    name = k.text("model_type")
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    if k.has("layer_types"):
        full = [word != "conv" for word in k.words("layer_types", layers=n, among=("conv", *FULL))]
    else:
        chosen = set(k.indices("full_attn_idxs", required=True))
        full = [i in chosen for i in range(n)]
    conv = short_conv(d, k.integer("conv_L_cache"), k.flag("conv_bias", absent=False))
    gate = "heads" if name == "lfm3" and k.flag("use_attention_gate") else ""
    attention = gqa(d, heads, kv, width, qk_norm="head", gate=gate)
    norms = norm(d, copies=4 if name == "lfm3" and k.flag("use_sandwich_norm") else 2)
    hidden = k.integer("intermediate_size", "block_ff_dim")
    if name == "lfm2" and k.flag("block_auto_adjust_ff_dim", absent=True):
        step = k.integer("block_multiple_of")
        scale = k.data.get("block_ffn_dim_multiplier")
        hidden = int((1.0 if scale is None else scale) * int(2 * hidden / 3))
        hidden = -(-hidden // step) * step
    sparse = first_dense(k, n) if name == "lfm2_moe" else [False] * n
    ffn = moe(d, k.integer("moe_intermediate_size"), k.integer("num_experts"), k.integer("num_experts_per_tok"),
              selection="buffer" if k.flag("use_expert_bias", absent=True) else "") if any(sparse) else []
    plain = dense(d, hidden)
    layers = [block("sparse" if on else "dense", attention if is_full else conv, ffn if on else plain, norms)
              for is_full, on in zip(full, sparse, strict=True)]
    if k.has("tie_embedding") and not k.has("tie_word_embeddings"):
        return decoder(k, name, d, layers, tied=k.flag("tie_embedding"))
    return decoder(k, name, d, layers, tied=True)


@family("longcat_flash", "longcat_flash_ngram")
def longcat(k: Keys) -> Architecture:
    """Two latent attentions and two dense FFNs a layer, beside experts of which some compute nothing; in
    LongCat-Flash-Lite tables of n-grams beside the embedding, each with a projection."""
    d, n = k.integer("hidden_size"), k.integer("num_layers", "num_hidden_layers")
    found, mixer = mla(d, k.integer("num_attention_heads"), k.integer("q_lora_rank"), k.integer("kv_lora_rank"),
                       k.integer("qk_nope_head_dim"), k.integer("qk_rope_head_dim"), k.integer("v_head_dim"),
                       bias=k.flag("attention_bias", absent=False))
    ffn = moe(d, k.integer("expert_ffn_hidden_size", "moe_intermediate_size"), k.integer("n_routed_experts"),
              k.integer("moe_topk", "num_experts_per_tok"), selection="buffer",
              idle=k.integer("zero_expert_num", minimum=0), router_bias=k.flag("router_bias", absent=False),
              where="config.moe_topk")
    plain = dense(d, k.integer("ffn_hidden_size", "intermediate_size"))
    layer = Layer("sparse", tuple(found * 2 + ffn + plain * 2 + norm(d, copies=4)), (mixer, mixer))
    predicted = predictor(d, Layer("mtp", tuple(found + plain + norm(d, copies=2)), (mixer,)))  # dense, one attention
    extra: list[Weight] = []
    if k.text("model_type").endswith("ngram") or k.has("ngram_vocab_size_ratio"):
        tables = k.integer("emb_split_num") * (k.integer("emb_neighbor_num") - 1)
        rows, width = k.integer("ngram_vocab_size_ratio") * k.integer("vocab_size"), k.divide("emb_width", d, tables)
        extra = [Weight("embedding", (rows + 2 * i + 1, width), "table") for i in range(tables)]
        extra += matrix("other", d, width) * tables
    return decoder(k, "longcat_flash", d, [layer] * n, tied=False, mtp=(predicted,) * predictions(k), mtp_copies=1,
                   extra=tuple(extra))


@family("jetmoe")
def jetmoe(k: Keys) -> Architecture:
    """Attention is a mixture too: each expert has its own query and output projections."""
    d, n = width_and_depth(k)
    kv, width, top_k = k.integer("num_key_value_heads"), k.integer("kv_channels"), k.integer("num_experts_per_tok")
    experts = k.integer("num_local_experts")
    inner = kv * width
    found, mixer = gqa(d, kv * top_k, kv, width)
    found = (matrix("attention", inner, d, copies=experts, used=top_k)
             + matrix("attention", d, inner, copies=experts, used=top_k)
             + matrix("attention", 2 * inner, d) + matrix("router", experts, d) + [Weight("attention", (d,), "bias")])
    ffn = moe(d, k.integer("intermediate_size", "ffn_hidden_size"), experts, top_k)
    layer = block("sparse", (found, mixer), [*ffn, Weight("routed", (d,), "bias")], norm(d, copies=2))
    return decoder(k, "jetmoe", d, [layer] * n, tied=True)


@family("cohere2_moe", "cohere2", "cohere", "cohere_compass_text")
def cohere(k: Keys) -> Architecture:
    """Attention and FFN side by side behind one norm; Command A+ and its dense predecessors."""
    name = k.text("model_type")
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    bias = attention_bias(k)
    sparse = [False] * n
    ffn: list[Weight] = []
    if name == "cohere2_moe":
        sparse = first_dense(k, n)
        expert = k.integer("intermediate_size")
        ffn = moe(d, expert, k.integer("num_experts"), k.integer("num_experts_per_tok"),
                  shared=expert * k.integer("num_shared_experts", minimum=0))
    hidden = "prefix_dense_intermediate_size" if k.has("prefix_dense_intermediate_size") else "intermediate_size"
    plain = dense(d, k.integer(hidden)) if not all(sparse) else []
    qk_norm = "heads" if name == "cohere" and k.flag("use_qk_norm", absent=False) else ""
    layers = [block("sparse" if on else "dense", gqa(d, heads, kv, width, bias=bias, qk_norm=qk_norm, window=window),
                    ffn if on else plain, norm(d)) for on, window in zip(sparse, windows(k, n), strict=True)]
    return decoder(k, name, d, layers, tied=True)
