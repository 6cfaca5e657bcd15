"""Families published with code beside the checkpoint, which transformers does not build: from that code's structure.

Compared with published totals in the tests, since there is no live model to compare with.
"""

from __future__ import annotations

from .families import block, decoder, family, heads_of, width_and_depth
from .families_dense import plain
from .ffns import dense, moe
from .mixers import gqa
from .reader import Keys
from .weights import Architecture, Mixer, Weight, matrix, norm


@family("chatglm")
def chatglm(k: Keys) -> Architecture:
    """ChatGLM 2 and 3, GLM-4-9B."""
    d, n = width_and_depth(k)
    heads, width = k.integer("num_attention_heads"), k.integer("kv_channels")
    kv = k.integer("multi_query_group_num") if k.flag("multi_query_attention") else heads
    bias = k.flag("add_bias_linear", absent=False)
    letters = "qkv" * (bias or k.flag("add_qkv_bias")) + "o" * bias
    norms = norm(d, not k.flag("rmsnorm", absent=True), 2)
    ffn = dense(d, k.integer("ffn_hidden_size"), bias=bias)
    layers = [block("dense", gqa(d, heads, kv, width, bias=letters), ffn, norms)] * n
    return decoder(k, "chatglm", d, layers, tied=False)


@family("qwen")
def qwen1(k: Keys) -> Architecture:
    """The first Qwen: `intermediate_size` is that of both halves of the gated FFN together."""
    d, n = width_and_depth(k)
    heads, width = k.integer("num_attention_heads"), k.integer("kv_channels")
    without = k.flag("no_bias")
    ffn = dense(d, k.integer("intermediate_size") // 2, bias=not without)
    mixed = gqa(d, heads, heads, width, bias="qkv" if without else "qkvo")
    return decoder(k, "qwen", d, [block("dense", mixed, ffn, norm(d, copies=2))] * n, tied=False)


@family("minicpm")
def minicpm(k: Keys) -> Architecture:
    """MiniCPM, and its mixture of experts."""
    if not k.has("num_experts"):
        return plain(k)
    d, n = width_and_depth(k)
    ffn = moe(d, k.integer("intermediate_size"), k.integer("num_experts"), k.integer("num_experts_per_tok"))
    layer = block("sparse", gqa(d, *heads_of(k, d)), ffn, norm(d, copies=2))
    return decoder(k, "minicpm", d, [layer] * n, tied=True)


@family("nemotron-nas", "deci")
def nemotron_nas(k: Keys) -> Architecture:
    """Llama-Nemotron after architecture search: `block_configs` say what is left of each layer."""
    d, n = width_and_depth(k)
    heads = k.integer("num_attention_heads")
    width = k.integer("head_dim") if k.has("head_dim") else k.divide("head_dim", d, heads)
    configs = k.data.get("block_configs")
    if not isinstance(configs, list) or len(configs) != n:
        raise ValueError(f"config.block_configs: expected a list of {n} layers, got {type(configs).__name__}")
    bias, ffn_bias = k.flag("attention_bias", absent=False), k.flag("mlp_bias", absent=False)
    layers = []
    for i, config in enumerate(configs):
        entry = Keys(config, f"config.block_configs[{i}]", k)
        attention, ffn = entry.inside("attention"), entry.inside("ffn")
        found, mixer, hidden, norms = [], Mixer(), [], norm(d, copies=2)
        if attention.flag("no_op", absent=False):
            norms = norms[1:]
        elif attention.flag("replace_with_linear", absent=False):
            found = matrix("attention", d, d, bias)
        else:
            kv = attention.divide("n_heads_in_group", heads, attention.integer("n_heads_in_group"))
            found, mixer = gqa(d, heads, kv, width, bias="qkvo" if bias else "")
        if ffn.flag("no_op", absent=False):
            norms = norms[1:]
        elif ffn.flag("replace_with_linear", absent=False):
            hidden = matrix("dense", d, d, ffn_bias)
        else:
            times = ffn.data.get("ffn_mult")
            if not isinstance(times, int | float):
                raise ValueError(f"{ffn.where}.ffn_mult: expected a number, got {times!r}")
            hidden = dense(d, -(-int(2 * times * d / 3) // 256) * 256, bias=ffn_bias)
        layers.append(block("dense", (found, mixer), hidden, norms))
    return decoder(k, "nemotron-nas", d, layers, tied=False)


@family("grok-2", "git")
def grok2(k: Keys) -> Architecture:
    """Grok-2: experts beside a dense FFN in every layer. Its published config names another model's `model_type`."""
    if not k.has("residual_moe"):
        return git(k)
    d, n = width_and_depth(k)
    ffn = moe(d, k.integer("moe_intermediate_size"), k.integer("num_local_experts"), k.integer("num_experts_per_tok"))
    if k.flag("residual_moe"):
        ffn = ffn + dense(d, k.integer("intermediate_size"))
    mixed = gqa(d, k.integer("num_attention_heads"), k.integer("num_key_value_heads"), k.integer("head_dim"))
    return decoder(k, "grok-2", d, [block("sparse", mixed, ffn, norm(d, copies=4))] * n, tied=False)


def git(k: Keys) -> Architecture:
    """GIT: BERT's layers as a decoder of text behind an image encoder, which is excluded."""
    d, n, heads = k.integer("hidden_size"), k.integer("num_hidden_layers"), k.integer("num_attention_heads")
    mixed = gqa(d, heads, heads, k.divide("head_dim", d, heads), bias="qkvo")
    ffn = dense(d, k.integer("intermediate_size"), gated=False, bias=True)
    k.excluded.extend(key for key in ("vision_config",) if k.has(key))
    extra = (Weight("embedding", (k.integer("max_position_embeddings"), d), "table"), *norm(d, True))
    return decoder(k, "git", d, [block("dense", mixed, ffn, norm(d, True, 2))] * n, tied=False, final_norm=False,
                   head_bias=True, extra=extra)


@family("xverse")
def xverse(k: Keys) -> Architecture:
    """XVERSE: Llama's layers; in its mixture `intermediate_size` is the experts' width, shared ones beside them."""
    if not k.has("num_experts"):
        return plain(k)
    d, n = width_and_depth(k)
    expert = k.integer("intermediate_size")
    ffn = moe(d, expert, k.integer("num_experts"), k.integer("num_experts_per_tok"),
              shared=expert * k.integer("num_shared_experts", minimum=0))
    return decoder(k, "xverse", d, [block("sparse", gqa(d, *heads_of(k, d)), ffn, norm(d, copies=2))] * n, tied=False)


@family("skywork")
def skywork(k: Keys) -> Architecture:
    """Skywork: Llama's layers, with `num_experts` two of so many experts behind a router of one or two layers."""
    d, n = width_and_depth(k)
    mixed, hidden = gqa(d, *heads_of(k, d)), k.integer("intermediate_size")
    experts = k.integer("num_experts", absent=0, minimum=0)
    ffn = dense(d, hidden)
    if experts:
        if k.integer("moe_expert_interval", absent=1) != 1:
            raise ValueError("config.moe_expert_interval: a Skywork-MoE with dense layers has no weight table")
        ffn = moe(d, hidden, experts, k.integer("num_experts_per_tok", "moe_topk", absent=2))
        if k.flag("moe_2layer_gate"):
            ffn[:1] = matrix("router", 8 * experts, d) + matrix("router", experts, 8 * experts)
    layer = block("sparse" if experts else "dense", mixed, ffn, norm(d, copies=2))
    return decoder(k, "skywork", d, [layer] * n, tied=False)


@family("PanguProMoE", "pangu_pro_moe")
def pangu_pro(k: Keys) -> Architecture:
    """Pangu Pro MoE: groups of experts of which each serves a token, scaled by a vector; biases on the attention."""
    d, n = width_and_depth(k)
    mixed = gqa(d, *heads_of(k, d), bias="qkvo")
    experts, dense_only = k.integer("num_experts"), set(k.indices("mlp_only_layers"))
    ffn = moe(d, k.integer("moe_intermediate_size"), experts, k.integer("num_experts_per_tok"),
              shared=k.integer("shared_expert_intermediate_size", minimum=0))
    ffn.append(Weight("router", (1, experts), "filter"))
    layers = [block("dense", mixed, dense(d, k.integer("intermediate_size")), norm(d, copies=2)) if i in dense_only
              else block("sparse", mixed, ffn, norm(d, copies=2)) for i in range(n)]
    return decoder(k, "pangu_pro_moe", d, layers, tied=False)


@family("step3_text", "step3_vl")
def step3(k: Keys) -> Architecture:
    """Step-3: one key and value of full width for all heads, low-rank queries (arXiv 2507.19427)."""
    if k.has("text_config"):
        k.excluded.append("vision_config")
        k = k.inside("text_config")
    d, n = width_and_depth(k)
    heads, width, rank = k.integer("num_attention_heads"), k.integer("head_dim"), k.integer("share_q_dim")
    kv = k.integer("num_attention_groups")
    found = matrix("attention", rank, d) + norm(rank) + matrix("attention", heads * width, rank)
    found += matrix("attention", kv * width, d) * 2 + matrix("attention", d, heads * width)
    mixed = found, Mixer(heads, width, width, None, 2 * kv * width)
    sparse = set(k.indices("moe_layers_enum", required=True))
    ffn = moe(d, k.integer("moe_intermediate_size"), k.integer("moe_num_experts"), k.integer("moe_top_k"),
              shared=k.integer("share_expert_dim", minimum=0), where="config.moe_top_k")
    plain_ffn = dense(d, k.integer("intermediate_size"))
    layers = [block("sparse" if i in sparse else "dense", mixed, ffn if i in sparse else plain_ffn, norm(d, copies=2))
              for i in range(n)]
    return decoder(k, "step3", d, layers, tied=False)
