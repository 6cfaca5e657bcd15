"""Families published with code beside the checkpoint, which transformers does not build: from that code's structure.

Compared with published totals in the tests, since there is no live model to compare with.
"""

from __future__ import annotations

from .families import block, decoder, family, first_dense, heads_of, width_and_depth, without_experts
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
        found, mixer, hidden, norms = [], Mixer(), [], norm(d) * 2
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
            hidden = dense(d, -(-int(2 * ffn.number("ffn_mult") * d / 3) // 256) * 256, bias=ffn_bias)
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


@family("hf_olmo", "llada")
def olmo(k: Keys) -> Architecture:
    """OLMo as first published, and LLaDA on the same code. In OLMo's blocks `mlp_hidden_size` is gate and up in one."""
    if k.has("expert_intermediate_size"):
        return llada_moe(k)
    without_experts(k)
    d, n, heads = k.integer("d_model"), k.integer("n_layers"), k.integer("n_heads")
    kv = k.integer("n_kv_heads", absent=1 if k.flag("multi_query_attention", absent=False) else heads)
    separate = k.text("block_type") == "llama"
    hidden = k.integer("mlp_hidden_size")
    hidden = hidden if separate else k.divide("mlp_hidden_size", hidden, 2)
    bias = k.flag("include_bias", absent=False)
    norms = k.text("layer_norm_type") == "rms" and k.flag("layer_norm_with_affine", absent=True)
    if k.flag("attention_layer_norm", absent=False) or k.text("activation_type") not in ("silu", "swiglu"):
        raise ValueError(f"{k.where}: no weight table for norms of queries and keys, or FFNs without a gate")
    mixed = gqa(d, heads, kv, k.divide("head_dim", d, heads),
                bias="qkv" * (bias or k.flag("include_qkv_bias", absent=False)) + "o" * bias)
    k.data = {**k.data, "tie_word_embeddings": k.flag("weight_tying"),
              "vocab_size": k.integer("embedding_size", "vocab_size")}
    return decoder(k, "olmo", d, [block("dense", mixed, dense(d, hidden, bias=bias), norm(d, copies=2) * norms)] * n,
                   tied=False, final_norm=norms)


def llada_moe(k: Keys) -> Architecture:
    """LLaDA-MoE, of LLaDA's `model_type`: OLMoE's layers with norms for each head."""
    d, n = width_and_depth(k)
    bias = "qkvo" * k.flag("attention_bias", absent=False)
    mixed = gqa(d, *heads_of(k, d), bias=bias, qk_norm="head" if k.flag("qk_layernorm") else "")
    sparse = first_dense(k, n)
    ffn = moe(d, k.integer("expert_intermediate_size"), k.integer("num_experts"), k.integer("num_experts_per_tok"),
              shared=k.integer("shared_expert_intermediate_size", absent=0, minimum=0))
    plain_ffn = dense(d, k.integer("dense_intermediate_size")) if not all(sparse) else []
    layers = [block("sparse" if on else "dense", mixed, ffn if on else plain_ffn, norm(d, copies=2)) for on in sparse]
    return decoder(k, "llada_moe", d, layers, tied=False)


@family("megrez_moe")
def megrez(k: Keys) -> Architecture:
    """Megrez 2: a few layers in a row share their routed experts, each with a router and shared experts of its own. A
    token meets `num_experts_per_tok` of them in each of these layers; they stand in the first, as so many in all."""
    d, n = width_and_depth(k)
    mixed = gqa(d, *heads_of(k, d), bias="qkvo" * k.flag("attention_bias", absent=False))
    sparse, group = first_dense(k, n), k.integer("experts_shared_frequency")
    expert, count, top_k = (k.integer(key) for key in ("moe_intermediate_size", "n_routed_experts",
                                                       "num_experts_per_tok"))
    first = sparse.index(True) if any(sparse) else n
    if not all(sparse[first:]) or top_k * group > count:
        raise ValueError(f"{k.where}.experts_shared_frequency: no weight table for dense layers between those that "
                         f"share experts, or for {group} x {top_k} experts a token of {count}")
    own = moe(d, expert, count, top_k, shared=expert * k.integer("n_shared_experts", minimum=0), selection="buffer")
    plain_ffn = dense(d, k.integer("intermediate_size"))
    layers = []
    for i, on in enumerate(sparse):
        ffn = [w for w in own if w.part != "routed"] if on else plain_ffn
        if on and (i - first) % group == 0:
            uses = top_k * min(group, n - i)
            ffn = ffn + dense(d, expert, part="routed", copies=count, used=uses)
        layers.append(block("sparse" if on else "dense", mixed, ffn, norm(d, copies=2)))
    return decoder(k, "megrez_moe", d, layers, tied=False)


@family("phi3small")
def phi3_small(k: Keys) -> Architecture:
    """Phi-3-small: biases everywhere; block-sparse attention has the weights of the dense one."""
    d, n, hidden = k.integer("hidden_size"), k.integer("num_hidden_layers"), k.integer("ff_intermediate_size")
    mixed = gqa(d, *heads_of(k, d), bias="qkvo")
    layer = block("dense", mixed, dense(d, hidden, bias=True), norm(d, True, 2))
    return decoder(k, "phi3small", d, [layer] * n, tied=True, norm_bias=True)


@family("openelm")
def openelm(k: Keys) -> Architecture:
    """OpenELM: heads and FFNs that widen from layer to layer."""
    d, n, width = k.integer("model_dim"), k.integer("num_transformer_layers"), k.integer("head_dim")
    heads, kv = (k.each(key, layers=n, minimum=1) for key in ("num_query_heads", "num_kv_heads"))
    times, step, gated = k.data.get("ffn_multipliers"), k.integer("ffn_dim_divisor"), k.flag("ffn_with_glu")
    if not isinstance(times, list) or len(times) != n or not all(isinstance(v, int | float) for v in times):
        raise ValueError(f"{k.where}.ffn_multipliers: expected {n} numbers, one for each layer, got {times!r}")
    qk_norm = "head" if k.flag("normalize_qk_projections") else ""
    layers = []
    for i in range(n):
        hidden = max(step, int(times[i] * d + step / 2) // step * step)
        hidden += step * (hidden < 0.9 * times[i] * d)  # never a tenth below what was asked for
        mixed = gqa(d, heads[i], kv[i], width, qk_norm=qk_norm)
        layers.append(block("dense", mixed, dense(d, hidden, gated=gated), norm(d, copies=2)))
    k.data = {**k.data, "tie_word_embeddings": k.flag("share_input_output_layers")}
    return decoder(k, "openelm", d, layers, tied=True)
