"""Dense decoders of Llama's line: the baselines that a mixture is compared with."""

from __future__ import annotations

from dataclasses import dataclass

from .families import (
    block,
    decoder,
    family,
    heads_of,
    predictions,
    predictor,
    width_and_depth,
    windows,
    without_experts,
)
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
    final_bias: bool | None = None  # of the last norm, where it differs
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
    sinks: bool = False
    lambdas: int = 0  # vectors of a head's width in each attention (differential attention)
    head: bool = True
    more: str = ""  # key of rows of the table beyond the vocabulary


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
    "granite_swa": Plain(tied=True, sinks=True),
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
    "PanguEmbedded": Plain(bias_key="bias"),
    "Yi": Plain(bias=""),
    "xverse": Plain(bias=""),
    "telechat3": Plain(),
    "vaultgemma": Plain(tied=True),
    "jais2": Plain(norm_bias=True, gated=False),
    "apertus1p5_text": Plain(gated=False, qk_norm="head", activation=2),
    "qwen2_vl_text": Plain(bias="qkv", bias_key="", bias_absent=True),
    "qwen2_5_vl_text": Plain(bias="qkv", bias_key="", bias_absent=True),
    "qwen2_5_omni_text": Plain(bias="qkv", bias_key="", bias_absent=True),
    "qwen3_vl_text": Plain(qk_norm="head"),
    "glm4v_text": Plain(bias="qkv", bias_key="", bias_absent=True, norms=4),
    "glm_image_text": Plain(bias="qkv", bias_absent=True, norms=4),
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
    "diffllama": Plain(lambdas=4),
    "voxtral_realtime_text": Plain(bias=""),
    "emu3_text_model": Plain(),
    "phi4_multimodal": Plain(bias=""),
    "phi4mm": Plain(bias=""),
    "Dream": Plain(bias="qkv", bias_key="", bias_absent=True),
    "sdar": Plain(qk_norm="head"),
    "hunyuan_vl_text": Plain(qk_norm="head", tied=True),
    "granite4_vision_text": Plain(),
    "molmo2_text": Plain(bias="qkv", qk_norm="head", more="additional_vocab_size"),
    "eurobert": Plain(head=False),
    "esmc": Plain(bias="", qk_norm="full", norm_bias=True, final_bias=False, head=False),
    "ultrabert": Plain(head=False),
}


@family(*PLAIN)
def plain(k: Keys) -> Architecture:
    """Every layer: grouped-query attention and one FFN of three matrices (two in some families)."""
    name = k.text("model_type")
    without_experts(k)
    p = PLAIN[name]
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    biased = k.flag(p.bias_key, absent=p.bias_absent) if p.bias_key and p.bias else p.bias_absent
    mlp_absent = p.mlp_bias == "use_bias" and p.bias_absent
    ffn = dense(d, k.integer("intermediate_size"), gated=p.gated, bias=k.flag(p.mlp_bias, absent=mlp_absent))
    ffn += [Weight("dense", (1,), "filter")] * p.activation
    norms = norm(d, p.norm_bias, p.norms)
    qk_norm = p.qk_norm
    if name == "stablelm":
        norms = norm(d, True, 1 if k.flag("use_parallel_residual", absent=False) else 2)
        qk_norm = "heads" if k.flag("qk_layernorm", absent=False) else ""
    elif name == "hyperclovax":
        norms = norm(d, copies=4 if k.flag("use_post_norm") else 2)
    if p.inner_norms:
        norms = norms + norm(d) + norm(k.integer("intermediate_size"))
    lambdas = [Weight("attention", (width,), "filter")] * p.lambdas
    if name == "voxtral_realtime_text":  # scales of the norm before the FFN, from the delay
        ffn += matrix("other", 32, d) + matrix("other", d, 32)
    bias = p.bias if biased else ""
    if name == "seed_oss" and k.flag("attention_out_bias", absent=False):
        bias += "o"
    layers = []
    for window in windows(k, n):
        found, mixer = gqa(d, heads, kv, width, bias=bias, qk_norm=qk_norm, gate=p.gate,
                           window=window, sinks=p.sinks)
        layers.append(block("dense", (found + lambdas, mixer), ffn, norms))
    towers = ("img_processor", "embd_layer", "vision_lora", "speech_lora",
              *(("vision_config", "audio_config") if name == "phi4_multimodal" else ()))
    k.excluded.extend(key for key in towers if k.has(key))
    extra = (Weight("embedding", (k.integer(p.more, minimum=0), d), "table"),) if p.more else ()
    mtp = (predictor(d, layers[-1]),) * (predictions(k) if name == "mimo" else 0)
    return decoder(k, name, d, layers, tied=p.tied, norm_bias=p.norm_bias if p.final_bias is None else p.final_bias,
                   final_norm=p.final_norm, head=p.head, extra=extra, mtp=mtp)


@family("minicpm3", "youtu")
def latent_dense(k: Keys) -> Architecture:
    """Multi-head latent attention and dense FFNs."""
    d, n = width_and_depth(k)
    mixed = mla(d, k.integer("num_attention_heads"), k.integer("q_lora_rank"), k.integer("kv_lora_rank"),
                k.integer("qk_nope_head_dim"), k.integer("qk_rope_head_dim"), k.integer("v_head_dim"),
                bias=k.flag("attention_bias", absent=False))
    ffn = dense(d, k.integer("intermediate_size"), bias=k.flag("mlp_bias", absent=False))
    return decoder(k, k.text("model_type"), d, [block("dense", mixed, ffn, norm(d, copies=2))] * n,
                   tied=True)
