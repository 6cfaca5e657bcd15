"""Dense decoders and encoders: the baselines that a mixture is compared with."""

from __future__ import annotations

from dataclasses import dataclass

from .families import block, decoder, family, heads_of, width_and_depth, windows
from .ffns import dense
from .mixers import gqa, mla
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
    gate: str = ""  # of the attention's output, as in `gqa`
    inner_norms: bool = False  # before the output projections of attention and FFN (BitNet)


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
    # Published with code of their own.
    "baichuan": Plain(bias=""),
    "internlm": Plain(bias_key="bias"),
    "internlm2": Plain(bias_key="bias"),
    "minicpm": Plain(bias="", tied=True),
    "mimo": Plain(bias="qkv", bias_absent=True),
    "orion": Plain(bias="", norm_bias=True),
    "phi3_v": Plain(bias=""),
    "Yi": Plain(bias=""),
    "vaultgemma": Plain(tied=True),
    "jais2": Plain(norm_bias=True, gated=False),
    "apertus1p5_text": Plain(gated=False, qk_norm="head", activation=2),
    "qwen2_vl_text": Plain(bias="qkv", bias_key="", bias_absent=True),
    "qwen2_5_vl_text": Plain(bias="qkv", bias_key="", bias_absent=True),
    "qwen2_5_omni_text": Plain(bias="qkv", bias_key="", bias_absent=True),
    "qwen3_vl_text": Plain(qk_norm="head"),
    "glm4v_text": Plain(bias="qkv", bias_key="", bias_absent=True, norms=4),
    "glm_image_text": Plain(bias="qkv", bias_key="", bias_absent=True, norms=4),
    "glm_ocr_text": Plain(bias="", norms=4),
    "iquestcoder": Plain(),
    "hyperclovax": Plain(),
    "exaone": Plain(),
    "nanochat": Plain(norms=0, final_norm=False, gated=False),
    "granite_docling_text": Plain(),
    "cosmos3_edge_text": Plain(gated=False),
    "paddleocr_vl_text": Plain(bias_key="use_bias", mlp_bias="use_bias", tied=True),
    "muse_glimmer_text": Plain(norms=4, gate="channels"),
    "bitnet": Plain(inner_norms=True),
}


@family(*PLAIN)
def plain(k: Keys) -> Architecture:
    """Every layer: grouped-query attention and one FFN of three matrices (two in some families)."""
    name = k.text("model_type")
    p = PLAIN[name]
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    biased = k.flag(p.bias_key, absent=p.bias_absent) if p.bias_key and p.bias else p.bias_absent
    mlp_absent = p.mlp_bias == "use_bias" and p.bias_absent
    ffn = dense(d, k.integer("intermediate_size"), gated=p.gated, bias=k.flag(p.mlp_bias, absent=mlp_absent))
    ffn += [Weight("dense", (1,), "filter")] * p.activation
    norms = norm(d, p.norm_bias, p.norms)
    if name == "hyperclovax":
        norms = norm(d, copies=4 if k.flag("use_post_norm") else 2)
    if p.inner_norms:
        norms = norms + norm(d) + norm(k.integer("intermediate_size"))
    layers = [block("dense", gqa(d, heads, kv, width, bias=p.bias if biased else "", qk_norm=p.qk_norm, gate=p.gate,
                                 window=window), ffn, norms) for window in windows(k, n)]
    k.excluded.extend(key for key in ("img_processor",) if k.has(key))
    if name == "mimo" and k.data.get("num_nextn_predict_layers"):
        k.excluded.append("num_nextn_predict_layers")
    if name == "stablelm" and k.flag("use_parallel_residual", absent=False):
        raise ValueError("config.use_parallel_residual: the parallel StableLM has no weight table")
    return decoder(k, name, d, layers, tied=p.tied, norm_bias=p.norm_bias, final_norm=p.final_norm)


@family("gpt2", "gpt_neo", "gpt_bigcode", "opt", "gptj", "codegen", "gpt_neox", "phi", "phi-msft", "falcon", "bloom",
        "mpt")
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
    elif name in ("phi", "phi-msft"):
        norms, tied, head_bias = 1, False, True
        kv = k.integer("num_key_value_heads", "n_head_kv", absent=heads)
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


@family("minicpm3", "youtu")
def latent_dense(k: Keys) -> Architecture:
    """Multi-head latent attention and dense FFNs."""
    d, n = width_and_depth(k)
    mixed = mla(d, k.integer("num_attention_heads"), k.integer("q_lora_rank"), k.integer("kv_lora_rank"),
                k.integer("qk_nope_head_dim"), k.integer("qk_rope_head_dim"), k.integer("v_head_dim"),
                bias=k.flag("attention_bias", absent=False))
    return decoder(k, k.text("model_type"), d, [block("dense", mixed, dense(d, k.integer("intermediate_size")),
                                            norm(d, copies=2))] * n, tied=True)
