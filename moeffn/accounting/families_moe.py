"""Families whose layers are grouped-query attention and a mixture of experts."""

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
    sparse_step,
    tower,
    width_and_depth,
    windows,
)
from .ffns import dense, moe
from .mixers import Mixed, gqa
from .reader import Keys
from .weights import Architecture, Layer, Mixer, Weight, matrix, norm

OWN_EXPERT_WIDTH = {"aria_moe_lm": ("moe_intermediate_size", "intermediate_size"),
                    "smallthinker": ("moe_ffn_hidden_size",)}


@family("mixtral", "olmoe", "flex_olmo", "minimax_m2", "phimoe", "grinmoe", "granitemoe", "granitemoeshared",
        "granitemoe_swa", "aria_text", "aria_moe_lm", "smallthinker")
def every_layer(k: Keys) -> Architecture:
    """Every layer sparse, `intermediate_size` is the expert width."""
    name = k.text("model_type")
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    bias = attention_bias(k)
    qk_norm = "full" if name in ("olmoe", "flex_olmo", "minimax_m2") else ""
    expert = k.integer(*OWN_EXPERT_WIDTH.get(name, ("intermediate_size",)))
    experts = k.integer("num_local_experts", "moe_num_primary_experts")
    shared = expert * k.integer("moe_num_shared_experts", minimum=0) if name.startswith("aria") else 0
    if name in ("granitemoeshared", "granitemoe_swa"):
        shared = k.integer("shared_intermediate_size", absent=0, minimum=0)
    norm_bias = name in ("phimoe", "grinmoe")
    if name == "minimax_m2" and k.data.get("num_mtp_modules"):  # which its published files leave out too
        k.excluded.append("num_mtp_modules")
    ffn = moe(d, expert, experts, k.integer("num_experts_per_tok", "moe_num_active_primary_experts"), shared=shared,
              selection="buffer" if name == "minimax_m2" else "")
    layers = [
        block("sparse", gqa(d, heads, kv, width, bias=bias, qk_norm=qk_norm, sinks=name == "granitemoe_swa",
                            window=window), ffn, norm(d, norm_bias, 2))
        for window in windows(k, n)
    ]
    return decoder(k, name, d, layers, tied=False, norm_bias=norm_bias,
                   head_bias=norm_bias and k.flag("lm_head_bias", absent=False))


@family("qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_text", "mellum", "flint", "sdar_moe",
        "qwen3_omni_moe_talker_text")
def qwen(k: Keys) -> Architecture:
    name = k.text("model_type")
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    second, talks = name == "qwen2_moe", name.endswith("talker_text")
    if second:
        bias = "qkv" if k.flag("qkv_bias", absent=True) else ""
    else:
        bias = attention_bias(k)
    sparse = [True] * n if talks else sparse_step(k, n)
    if name == "mellum" and k.has("mlp_layer_types"):
        sparse = first_dense(k, n)
    experts = k.integer("num_experts", "num_local_experts")
    ffn = moe(d, k.integer("moe_intermediate_size"), experts, k.integer("num_experts_per_tok"),
              shared=(k.integer("shared_expert_intermediate_size", minimum=0)
                      if second or talks or name == "flint" else 0),
              shared_gate=second or talks)
    plain = dense(d, k.integer("intermediate_size")) if not all(sparse) else []
    layers = [
        block("sparse" if on else "dense", gqa(d, heads, kv, width, bias=bias, qk_norm="" if second else "head",
                                               sinks=name == "flint", window=window if name == "flint" else None),
              ffn if on else plain, norm(d, copies=2))
        for on, window in zip(sparse, windows(k, n), strict=True)
    ]
    return decoder(k, name, d, layers, tied=name == "qwen3_vl_moe_text")


@family("gpt_oss", "openai_privacy_filter")
def gpt_oss(k: Keys) -> Architecture:
    """Biases on experts, router and attention; a sink for each head."""
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    bias = "qkvo" if k.flag("attention_bias", absent=True) else ""
    ffn = moe(d, k.integer("intermediate_size"), k.integer("num_local_experts"),
              k.integer("num_experts_per_tok", "experts_per_token"), bias=True, router_bias=True)
    layers = [block("sparse", gqa(d, heads, kv, width, bias=bias, sinks=True, window=window), ffn, norm(d, copies=2))
              for window in windows(k, n)]
    return decoder(k, k.text("model_type"), d, layers, tied=False)


@family("dbrx")
def dbrx(k: Keys) -> Architecture:
    d, n = k.integer("d_model"), k.integer("n_layers")
    attention, ffn_keys = k.inside("attn_config"), k.inside("ffn_config")
    heads = k.integer("n_heads")
    width = k.divide("head_dim", d, heads)
    ffn = moe(d, ffn_keys.integer("ffn_hidden_size"), ffn_keys.integer("moe_num_experts"),
              ffn_keys.integer("moe_top_k"), where="config.ffn_config.moe_top_k")
    mixed = gqa(d, heads, attention.integer("kv_n_heads"), width)
    return decoder(k, "dbrx", d, [block("sparse", mixed, ffn, norm(d, copies=2))] * n, tied=False)


@family("llama4", "llama4_text")
def llama4(k: Keys) -> Architecture:
    k = tower(k)
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    bias = attention_bias(k)
    if k.has("moe_layers"):
        chosen = set(k.indices("moe_layers"))
        sparse = [i in chosen for i in range(n)]
    else:
        step = k.integer("interleave_moe_layer_step")
        sparse = [(i + 1) % step == 0 for i in range(n)]
    width_expert = k.integer("intermediate_size")
    ffn = moe(d, width_expert, k.integer("num_local_experts"), k.integer("num_experts_per_tok"), shared=width_expert)
    plain = dense(d, k.integer("intermediate_size_mlp")) if not all(sparse) else []
    layers = [block("sparse" if on else "dense", gqa(d, heads, kv, width, bias=bias, window=window),
                    ffn if on else plain, norm(d, copies=2))
              for on, window in zip(sparse, windows(k, n, "attention_chunk_size"), strict=True)]
    return decoder(k, "llama4", d, layers, tied=False)


@family("ernie4_5_moe")
def ernie(k: Keys) -> Architecture:
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    bias = k.flag("use_bias", absent=False)
    start, interval = k.integer("moe_layer_start_index", minimum=0), k.integer("moe_layer_interval", absent=1)
    end = k.integer("moe_layer_end_index", minimum=-1)
    end = n - 1 if end == -1 else end
    sparse = [(i + 1) % interval == 0 and start <= i <= end for i in range(n)]
    expert = k.integer("moe_intermediate_size")
    ffn = moe(d, expert, k.integer("moe_num_experts"), k.integer("moe_k", "moe_topk"), shared_bias=bias,
              shared=expert * k.integer("moe_num_shared_experts", minimum=0), selection="parameter",
              where="config.moe_k")
    plain = dense(d, k.integer("intermediate_size"), bias=bias) if not all(sparse) else []
    layers = [block("sparse" if on else "dense", gqa(d, heads, kv, width, bias="qkvo" if bias else ""),
                    ffn if on else plain, norm(d, copies=2)) for on in sparse]
    # A prediction layer is dense and has its own projection and two more norms.
    count = k.integer("num_nextn_predict_layers", absent=0, minimum=0)
    dense_ffn = dense(d, k.integer("intermediate_size"), bias=bias) if count else []
    entry = matrix("other", d, 2 * d, bias) + norm(d, copies=4)
    mtp = (block("mtp", gqa(d, heads, kv, width, bias="qkvo" if bias else ""), dense_ffn, entry),) * count
    return decoder(k, "ernie4_5_moe", d, layers, tied=True, head_bias=bias, mtp=mtp)


@family("hunyuan_v1_moe", "hunyuan", "hunyuan_moe")
def hunyuan(k: Keys) -> Architecture:
    """Hunyuan-A13B and Hunyuan-Large: sizes may be lists, one entry a layer."""
    name = k.text("model_type")
    if k.has("attention_head_dim") and not k.has("head_dim"):
        k.data = {**k.data, "head_dim": k.integer("attention_head_dim")}
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    bias = attention_bias(k)
    qk_norm = "head" if k.flag("use_qk_norm", absent=True) else ""
    experts = k.each("num_experts", layers=n, minimum=1)
    top_k = k.each("moe_topk", "num_experts_per_tok", layers=n, minimum=1)
    plain = k.integer("intermediate_size")
    expert = k.each("moe_intermediate_size", layers=n, minimum=1, absent=plain)
    shared = k.each("num_shared_expert", layers=n, absent=1)
    mlp = k.flag("use_mixed_mlp_moe", absent=True)
    share_kv = k.integer("cla_share_factor", absent=1) if k.flag("use_cla", absent=False) else 1
    layers = []
    for i in range(n):
        mixed = gqa(d, heads, kv if i % share_kv == 0 else 0, width, bias=bias, qk_norm=qk_norm)
        if experts[i] == 1:
            ffn = dense(d, plain)
        else:
            width_shared = shared[i] * expert[i] if k.has("moe_intermediate_size") else shared[i] * plain
            ffn = moe(d, expert[i], experts[i], top_k[i], shared=width_shared * mlp, where="config.moe_topk")
        layers.append(block("dense" if experts[i] == 1 else "sparse", mixed, ffn, norm(d, copies=2)))
    return decoder(k, name, d, layers, tied=name != "hunyuan_v1_moe")


GROUPED = {
    # family: (bias of these projections when attention_bias, default of attention_bias, qk norm, selection bias,
    #          gate, norms a layer)
    "glm4_moe": ("qkv", False, "flag", "buffer", "", 2),
    "glm4v_moe_text": ("qkv", True, "", "buffer", "", 2),
    "sarvam_moe": ("qkv", False, "flag", "buffer", "", 2),
    "dots1": ("qkvo", False, "head", "buffer", "", 2),
    "solar_open": ("qkv", False, "", "buffer", "", 2),
    "exaone_moe": ("", False, "head", "buffer", "", 2),
    "hy_v3": ("qkvo", False, "head", "buffer", "", 2),
    "afmoe": ("qkvo", False, "head", "parameter", "channels", 4),
    "laguna": ("qkvo", False, "head", "parameter", "heads", 2),
    "deepseek": ("qkvo", False, "", "", "", 2),
    "bailing_moe": ("", False, "flag", "flag", "", 2),
    "bailing_moe_v2": ("", False, "flag", "buffer", "", 2),
    "llada2_moe": ("", False, "flag", "buffer", "", 2),
    "bailing_moe_linear": ("", False, "flag", "buffer", "", 2),
    "deepseek_ocr2_text": ("qkvo", False, "", "", "", 2),
    "mimo_v2_flash": ("qkv", False, "", "buffer", "", 2),
    "unlimited_ocr_text": ("qkvo", False, "", "", "", 2),
    "kolibri1": ("", False, "head", "buffer", "", 4),
    "beam": ("qkvo", False, "head", "buffer", "channels", 4),
}
WITHOUT_SHARED = ("mimo_v2_flash", "beam")
ALWAYS_SPARSE = {  # what a config without `first_k_dense_replace` means
    "solar_open": {"absent": 0}, "bailing_moe": {"absent": 0}, "kolibri1": {"absent": 0},
}


@family(*GROUPED)
def grouped(k: Keys) -> Architecture:
    """DeepSeek's layout of experts (first layers dense, shared beside routed) on grouped-query attention."""
    name = k.text("model_type")
    letters, absent, qk_norm, selection, gate, norms = GROUPED[name]
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    bias = letters if letters and k.flag("attention_bias", absent=absent) else ""
    if name.startswith(("bailing", "llada2")):
        bias = "qkv" * k.flag("use_qkv_bias", absent=False) + "o" * k.flag("use_bias", absent=False)
    if selection == "flag":
        selection = "buffer" if k.flag("moe_router_enable_expert_bias", absent=False) else ""
    if qk_norm == "flag":
        qk_norm = "head" if k.flag("use_qk_norm", absent=name not in ("bailing_moe", "glm4_moe")) else ""
    sparse = first_dense(k, n, **ALWAYS_SPARSE.get(name, {}))
    expert = k.integer("moe_intermediate_size")
    ffn_bias = name == "hy_v3" and k.flag("mlp_bias", absent=False)
    ffn = moe(d, expert, k.integer("n_routed_experts", "num_experts", "num_local_experts"),
              k.integer("num_experts_per_tok", "num_experts_per_token", "top_k"),
              shared=0 if name in WITHOUT_SHARED else shared_width(k, expert, sparse), shared_bias=ffn_bias,
              selection=selection) if any(sparse) else []
    plain = dense(d, k.integer("intermediate_size"), bias=ffn_bias) if not all(sparse) else []
    per_layer = k.each("num_attention_heads_per_layer", layers=n, absent=heads) if name == "laguna" else [heads] * n
    layers = []
    slides = _slides(k, n) if name == "mimo_v2_flash" else []
    group = k.integer("layer_group_size") if name == "bailing_moe_linear" else 0
    for i, window in enumerate(windows(k, n)):
        if slides:
            mixed = _mimo(k, d, slides[i], bias, window)
        elif name == "bailing_moe_linear" and (i + 1) % group and i < n - n % group:
            mixed = grouped_lightning(k, d, heads, width)
        else:
            mixed = gqa(d, per_layer[i], kv, width, bias=bias, qk_norm=qk_norm, gate=gate, window=window)
            mixed[0].extend([Weight("attention", (heads,), "filter")] * (name == "beam"))  # bias of the gate
        layers.append(block("sparse" if sparse[i] else "dense", mixed, ffn if sparse[i] else plain,
                            norm(d, copies=norms)))
    mtp: tuple[Layer, ...] = ()
    if name.startswith(("glm4", "sarvam", "bailing_moe", "hy_v3")) and sparse[-1]:
        mtp = (predictor(d, layers[-1]),) * predictions(k)
    elif name in ("mimo_v2_flash", "exaone_moe") and k.data.get("num_nextn_predict_layers"):
        mixed = _mimo(k, d, True, bias, None) if slides else gqa(d, heads, kv, width, qk_norm=qk_norm)
        layer = block("mtp", mixed, dense(d, k.integer("intermediate_size")), norm(d, copies=2))
        mtp = (predictor(d, layer), *(predictor(d, layer) if slides else layer,) * (predictions(k) - 1))
    elif k.data.get("num_nextn_predict_layers"):
        k.excluded.append("num_nextn_predict_layers")
    return decoder(k, name, d, layers, tied=False, mtp=mtp,
                   mtp_copies=2 * name.startswith(("glm4", "sarvam", "bailing_moe")))


def grouped_lightning(k: Keys, d: int, heads: int, width: int) -> Mixed:
    """Lightning attention of Ring-linear and Ling 2.5: as many key/value heads as queries, a gate and a norm."""
    bias = "qkv" * k.flag("use_qkv_bias", absent=False) + "o" * k.flag("use_bias", absent=False)
    qk_norm = "head" if k.flag("use_qk_norm", absent=True) else ""
    found, _ = gqa(d, heads, heads, width, bias=bias, qk_norm=qk_norm, gate="channels")
    return found + norm(heads * width), Mixer(state=heads * width * width)


@family("mimo_v2")
def mimo_v2(k: Keys) -> Architecture:
    """MiMo-V2.5 and V2.5-Pro: the layers of V2-Flash, the former beside towers."""
    k.excluded.extend(key for key in ("vision_config", "audio_config") if k.has(key))
    k.data = {**k.data, "model_type": "mimo_v2_flash"}
    return grouped(k)


def _slides(k: Keys, layers: int) -> list[bool]:
    """MiMo-V2-Flash: which layers attend to a window."""
    if k.has("hybrid_layer_pattern"):
        return [kind == 1 for kind in k.each("hybrid_layer_pattern", layers=layers)]
    words = k.words("layer_types", layers=layers, among=("full_attention", "sliding_attention"))
    return [word == "sliding_attention" for word in words]


def _mimo(k: Keys, d: int, slides: bool, bias: str, window: int | None) -> Mixed:
    """MiMo-V2-Flash: window layers have sinks and their own heads."""
    prefix = "swa_" if slides else ""
    heads = k.integer(f"{prefix}num_attention_heads", "num_attention_heads")
    if slides and not k.has("swa_num_key_value_heads"):
        kv = 2 * k.integer("num_key_value_heads")
        k.assumed["swa_num_key_value_heads"] = kv
    else:
        kv = k.integer(f"{prefix}num_key_value_heads")
    sinks = k.flag(f"add_{'swa' if slides else 'full'}_attention_sink_bias", absent=slides)
    return gqa(d, heads, kv, k.integer(f"{prefix}head_dim", "head_dim"), k.integer(f"{prefix}v_head_dim", "v_head_dim"),
               bias=bias, sinks=sinks, window=window)
