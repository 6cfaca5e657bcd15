"""Dense decoders and encoders: the baselines that a mixture is compared with."""

from __future__ import annotations

from dataclasses import dataclass

from .families import block, decoder, family, heads_of, windows
from .families_moe import _sizes, tower
from .ffns import dense
from .mixers import gqa, mamba1, mamba2, mla
from .reader import Keys
from .weights import Architecture, Weight, matrix, norm


@dataclass(frozen=True)
class Plain:
    """What tells one Llama-like family from another. `bias` are the attention projections that have a bias when the
    flag `bias_key` is true; `bias_absent` is what its absence means ("" for a family without the flag: always)."""

    norms: int = 2
    norm_bias: bool = False
    bias: str = "qkvo"
    bias_key: str = "attention_bias"
    bias_absent: bool = False
    mlp_bias: str = "mlp_bias"
    qk_norm: str = ""
    gated: bool = True
    tied: bool = False
    final_norm: bool = True
    activation: int = 0  # parameters of the activation (xIELU)


PLAIN = {
    "llama": Plain(),
    "mistral": Plain(bias=""),
    "ministral": Plain(bias=""),
    "ministral3": Plain(bias=""),
    "qwen2": Plain(bias="qkv", bias_key="", bias_absent=True),
    "qwen3": Plain(qk_norm="head"),
    "gemma": Plain(tied=True),
    "gemma2": Plain(norms=4, tied=True),
    "gemma3_text": Plain(norms=4, tied=True, qk_norm="head"),
    "olmo": Plain(norms=0, final_norm=False),
    "olmo2": Plain(qk_norm="full"),
    "olmo3": Plain(qk_norm="full"),
    "phi3": Plain(bias=""),
    "granite": Plain(),
    "granite_swa": Plain(tied=True),
    "smollm3": Plain(tied=True),
    "glm": Plain(bias="qkv", bias_absent=True),
    "glm4": Plain(bias="qkv", bias_absent=True, norms=4),
    "exaone4": Plain(bias="", qk_norm="head"),
    "seed_oss": Plain(bias="qkv", bias_absent=True),
    "ernie4_5": Plain(bias_key="use_bias", mlp_bias="use_bias", tied=True),
    "helium": Plain(bias="qkv"),
    "arcee": Plain(gated=False),
    "apertus": Plain(gated=False, qk_norm="head", activation=2),
    "hunyuan_v1_dense": Plain(qk_norm="head"),
    "starcoder2": Plain(norm_bias=True, bias_key="use_bias", bias_absent=True, mlp_bias="use_bias", gated=False,
                        tied=True),
    "stablelm": Plain(norm_bias=True, bias="qkv", bias_key="use_qkv_bias"),
    "nemotron": Plain(norm_bias=True, gated=False),
    "internlm3": Plain(bias="qkv", bias_key="qkv_bias"),
    "cwm": Plain(bias=""),
}


@family(*PLAIN)
def plain(k: Keys) -> Architecture:
    """Every layer: grouped-query attention and one FFN of three matrices (two in some families)."""
    name = k.text("model_type")
    p = PLAIN[name]
    d, n = _sizes(k)
    heads, kv, width = heads_of(k, d)
    biased = k.flag(p.bias_key, absent=p.bias_absent) if p.bias_key and p.bias else p.bias_absent
    mlp_absent = p.mlp_bias == "use_bias" and p.bias_absent
    ffn = dense(d, k.integer("intermediate_size"), gated=p.gated, bias=k.flag(p.mlp_bias, absent=mlp_absent))
    ffn += [Weight("dense", (1,), "filter")] * p.activation
    layers = [block("dense", gqa(d, heads, kv, width, bias=p.bias if biased else "", qk_norm=p.qk_norm, window=window),
                    ffn, norm(d, p.norm_bias, p.norms)) for window in windows(k, n)]
    if name == "stablelm" and k.flag("use_parallel_residual", absent=False):
        raise ValueError("config.use_parallel_residual: the parallel StableLM has no weight table")
    return decoder(k, name, d, layers, tied=p.tied, norm_bias=p.norm_bias, final_norm=p.final_norm)


@family("gemma3")
def gemma3(k: Keys) -> Architecture:
    """Gemma 3 with its SigLIP tower and the projector between; without `vision_config` the language model alone."""
    inner = k.inside("text_config") if k.has("text_config") else k
    inner.data = {**inner.data, "model_type": "gemma3_text"}
    text = plain(inner)
    if not k.has("vision_config"):
        return text
    v = k.inside("vision_config")
    d, depth = v.integer("hidden_size"), v.integer("num_hidden_layers")
    patches = (v.integer("image_size") // v.integer("patch_size")) ** 2
    pixels = v.integer("num_channels", absent=3) * v.integer("patch_size") ** 2
    attention = 4 * (d * d + d)
    ffn = 2 * d * v.integer("intermediate_size") + v.integer("intermediate_size") + d
    elements = depth * (attention + ffn + 4 * d) + pixels * d + d + patches * d + 2 * d
    elements += d * text.d_model + d  # projector: one matrix and its norm
    return _with_vision(text, "gemma3", elements, k)


def _with_vision(text: Architecture, name: str, elements: int, k: Keys) -> Architecture:
    outer = (*text.outer, Weight("vision", (elements,), "filter"))
    return Architecture(name, text.d_model, text.vocab, text.layers, outer, text.tied, text.mtp, text.duplicates,
                        tuple(sorted(k.assumed.items())), tuple(k.excluded))


@family("gemma4", "gemma4_text")
def gemma4(k: Keys) -> Architecture:
    """Gemma 4: full layers have their own head width, keys may serve as values, experts run beside a dense FFN."""
    inner = k.inside("text_config") if k.has("text_config") else k
    text = _gemma4_text(inner)
    if inner is k:
        return text
    if k.has("audio_config"):
        k.excluded.append("audio_config")
    if not k.has("vision_config"):
        return text
    v = k.inside("vision_config")
    d, depth = v.integer("hidden_size"), v.integer("num_hidden_layers")
    heads, kv, width = heads_of(v, d)
    layer = sum(w.total for w in gqa(d, heads, kv, width, qk_norm="head")[0])
    layer += sum(w.total for w in dense(d, v.integer("intermediate_size"))) + 4 * d
    elements = depth * layer + 3 * v.integer("patch_size") ** 2 * d + 2 * v.integer("position_embedding_size") * d
    return _with_vision(text, "gemma4", elements + d * text.d_model, k)


def _gemma4_text(k: Keys) -> Architecture:
    from .ffns import moe

    d, n = _sizes(k)
    heads, kv = k.integer("num_attention_heads"), k.integer("num_key_value_heads")
    types = k.words("layer_types", layers=n, among=("full_attention", "sliding_attention"))
    alternative = k.flag("attention_k_eq_v", absent=False)
    bias = "qkvo" if k.flag("attention_bias", absent=False) else ""
    width = k.integer("head_dim")
    if k.has("per_layer_config"):  # what newer code saves in place of the global sizes
        full_layers = k.inside("per_layer_config")
        first = Keys(next(iter(full_layers.data.values()), {}), f"{full_layers.where}[...]", k)
        wide = first.integer("head_dim", absent=width)
        kv_full = first.integer("num_key_value_heads", absent=kv)
    else:
        wide = k.integer("global_head_dim")
        kv_full = k.integer("num_global_key_value_heads", absent=kv) if alternative else kv
    shared_from = n - k.integer("num_kv_shared_layers", absent=0, minimum=0)
    doubled = k.flag("use_double_wide_mlp", absent=False)
    hidden = k.integer("intermediate_size")
    inputs = k.integer("hidden_size_per_layer_input", minimum=0)
    experts: list[Weight] = []
    if k.flag("enable_moe_block", absent=False):
        count = k.integer("num_experts")
        experts = moe(d, k.integer("moe_intermediate_size"), count, k.integer("top_k_experts", "num_experts_per_tok"),
                      where="config.top_k_experts")
        experts += [Weight("router", (d,), "filter"), Weight("router", (count,), "filter"), *norm(d, copies=3)]
    layers = []
    for i, word in enumerate(types):
        full = word == "full_attention"
        reuse = i >= shared_from
        mixed = gqa(d, heads, 0 if reuse else (kv_full if full else kv), wide if full else width, bias=bias,
                    qk_norm="head", values=not (alternative and full),
                    window=None if full else k.integer("sliding_window", absent=0) or None)
        ffn = dense(d, hidden * (2 if doubled and reuse else 1)) + experts
        extra = matrix("other", inputs, d) + matrix("other", d, inputs) + norm(d) if inputs else []
        layers.append(block("sparse" if experts else "dense", mixed, ffn + extra, norm(d, copies=4)))
    outer: tuple[Weight, ...] = ()
    if inputs:
        outer = (Weight("embedding", (k.integer("vocab_size_per_layer_input"), n * inputs), "table"),
                 *matrix("other", n * inputs, d), *norm(inputs))
    return decoder(k, "gemma4", d, layers, tied=True, extra=outer)


@family("gpt2", "gpt_neo", "gpt_bigcode", "opt", "gptj", "codegen", "gpt_neox", "phi", "falcon", "bloom", "mpt")
def old(k: Keys) -> Architecture:
    """Decoders of the GPT-2 line: two-matrix FFNs, LayerNorm, mostly biases, some with learned positions."""
    name = k.text("model_type")
    d = k.integer("n_embd", "hidden_size", "d_model")
    n = k.integer("n_layer", "num_hidden_layers", "num_layers", "n_layers")
    heads = k.integer("n_head", "num_attention_heads", "num_heads", "n_heads")
    kv = heads
    bias, mlp_bias, norms, norm_bias, head_bias = "qkvo", True, 2, True, False
    extra: tuple[Weight, ...] = ()
    tied = True
    positions = 0
    hidden = k.integer("n_inner", "intermediate_size", "ffn_dim", "ffn_hidden_size", absent=4 * d)
    if name == "gpt2":
        positions = k.integer("n_positions", "max_position_embeddings")
    elif name == "gpt_neo":
        positions, bias = k.integer("max_position_embeddings"), "o"
    elif name == "gpt_bigcode":
        positions = k.integer("n_positions", "max_position_embeddings")
        kv = 1 if k.flag("multi_query", absent=True) else heads
    elif name == "opt":
        positions = k.integer("max_position_embeddings") + 2
        if k.integer("word_embed_proj_dim", absent=d) != d:
            raise ValueError("config.word_embed_proj_dim: an OPT with projected embeddings has no weight table")
        bias = "qkvo" if k.flag("enable_bias", absent=True) else ""
    elif name in ("gptj", "codegen"):
        bias, norms, tied, head_bias = "", 1, False, True
    elif name == "gpt_neox":
        tied = False
        bias = "qkvo" if k.flag("attention_bias", absent=True) else ""
    elif name == "phi":
        norms, tied, head_bias = 1, False, True
        kv = k.integer("num_key_value_heads", absent=heads)
    elif name == "falcon":
        new = k.flag("new_decoder_architecture", absent=False)
        kv = k.integer("num_kv_heads", absent=heads) if new else (1 if k.flag("multi_query", absent=True) else heads)
        mlp_bias = k.flag("bias", absent=False)
        bias = "qkvo" if mlp_bias else ""
        norms = k.integer("num_ln_in_parallel_attn", absent=2) if new else (
            1 if k.flag("parallel_attn", absent=True) else 2)
    elif name == "bloom":
        extra = tuple(norm(d, True))
    else:  # mpt
        hidden, bias, mlp_bias, norm_bias = k.integer("expansion_ratio") * d, "", False, False
    if positions:
        extra += (Weight("embedding", (positions, d), "table"),)
    width = k.divide("head_dim", d, heads)
    ffn = dense(d, hidden, gated=False, bias=mlp_bias)
    layer = block("dense", gqa(d, heads, kv, width, bias=bias), ffn, norm(d, norm_bias, norms))
    return decoder(k, name, d, [layer] * n, tied=tied, norm_bias=norm_bias, head_bias=head_bias, extra=extra)


@family("bert", "roberta", "distilbert")
def encoder(k: Keys) -> Architecture:
    """BERT-like encoders as their base model has them: with a pooler (not DistilBERT), without a language head."""
    name = k.text("model_type")
    d = k.integer("hidden_size", "dim")
    n, heads = k.integer("num_hidden_layers", "n_layers"), k.integer("num_attention_heads", "n_heads")
    hidden = k.integer("intermediate_size", "hidden_dim")
    width = k.divide("head_dim", d, heads)
    layer = block("dense", gqa(d, heads, heads, width, bias="qkvo"), dense(d, hidden, gated=False, bias=True),
                  norm(d, True, 2))
    tables = [k.integer("vocab_size"), k.integer("max_position_embeddings")]
    if name != "distilbert":
        tables.append(k.integer("type_vocab_size"))
    outer = [Weight("embedding", (rows, d), "table") for rows in tables] + norm(d, True)
    if name != "distilbert":
        outer += matrix("other", d, d, True)
    return Architecture(name, d, tables[0], (layer,) * n, tuple(outer), True,
                        assumed=tuple(sorted(k.assumed.items())))


@family("mamba", "mamba2", "falcon_mamba")
def mamba(k: Keys) -> Architecture:
    name = k.text("model_type")
    d, n = _sizes(k)
    bias, conv_bias = k.flag("use_bias", absent=False), k.flag("use_conv_bias", absent=True)
    if name == "mamba2":
        mixed = mamba2(d, k.integer("num_heads"), k.integer("head_dim"), k.integer("n_groups"),
                       k.integer("state_size"), k.integer("conv_kernel"), conv_bias=conv_bias, bias=bias)
    else:
        inner = k.integer("intermediate_size", absent=d * k.integer("expand")) if name == "mamba" else k.integer(
            "intermediate_size")
        rank = -(-d // 16) if k.data.get("time_step_rank") == "auto" else k.integer("time_step_rank")
        mixed = mamba1(d, inner, k.integer("state_size"), k.integer("conv_kernel"), rank, conv_bias=conv_bias,
                       bias=bias)
    return decoder(k, name, d, [block("dense", mixed, [], norm(d))] * n, tied=name != "mamba2")


@family("minicpm3")
def minicpm3(k: Keys) -> Architecture:
    d, n = _sizes(k)
    mixed = mla(d, k.integer("num_attention_heads"), k.integer("q_lora_rank"), k.integer("kv_lora_rank"),
                k.integer("qk_nope_head_dim"), k.integer("qk_rope_head_dim"), k.integer("v_head_dim"),
                bias=k.flag("attention_bias", absent=False))
    return decoder(k, "minicpm3", d, [block("dense", mixed, dense(d, k.integer("intermediate_size")),
                                            norm(d, copies=2))] * n, tied=True)


@family("mistral3", "llava", "internvl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v_moe", "aria",
        "deepseek_vl_v2", "kimi_vl")
def multimodal(k: Keys) -> Architecture:
    """The language model of a vision-language config, by the `model_type` inside; the vision tower is excluded."""
    from .families import FAMILIES

    outer = k.text("model_type")
    inner = tower(k)
    if inner is k:
        raise ValueError(f"config.text_config is missing: it holds the language model of {outer}")
    name = inner.text("model_type")
    name = name.removesuffix("_text") if name not in FAMILIES else name
    name = {"qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_vl_moe_text"}.get(name, name)
    inner.data = {**inner.data, "model_type": name}
    return FAMILIES[name](inner)
