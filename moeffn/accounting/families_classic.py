"""Decoders of the GPT-2 line: two-matrix FFNs, LayerNorm, mostly biases, some with learned positions."""

from __future__ import annotations

from dataclasses import dataclass

from .families import block, decoder, family, without_experts
from .ffns import dense
from .mixers import gqa
from .reader import REQUIRED, Keys
from .weights import Architecture, Layer, Weight, matrix, norm


@dataclass(frozen=True)
class Classic:
    """What tells one of these families from another.

    positions: key of the number of learned positions, "" without a table; more: rows of the table beyond it.
    bias: the attention projections with a bias. norms: in a layer; embedded, final: behind embedding and layers.
    crossed: each layer also attends to an encoder's states, which the model does not hold.
    """

    positions: str = ""
    more: int = 0
    bias: str = "qkvo"
    mlp_bias: bool = True
    norms: int = 2
    norm_bias: bool = True
    embedded: int = 0
    final: bool = True
    tied: bool = True
    head_bias: bool = False
    crossed: bool = False


CLASSIC = {
    "gpt2": Classic("n_positions"),
    "gpt-sw3": Classic("n_positions"),
    "imagegpt": Classic("n_positions", norm_bias=False, tied=False),
    "openai-gpt": Classic("n_positions", final=False),
    "gpt_neo": Classic("max_position_embeddings", bias="o"),
    "gpt_bigcode": Classic("n_positions"),
    "opt": Classic("max_position_embeddings", 2),
    "biogpt": Classic("max_position_embeddings", 2),
    "xglm": Classic(),
    "ctrl": Classic(head_bias=True),
    "gptj": Classic(bias="", norms=1, tied=False, head_bias=True),
    "codegen": Classic(bias="", norms=1, tied=False, head_bias=True),
    "gpt_neox": Classic(tied=False),
    "gpt_neox_japanese": Classic(bias="", mlp_bias=False),
    "persimmon": Classic(tied=False),
    "phi": Classic(norms=1, tied=False, head_bias=True),
    "phi-msft": Classic(norms=1, tied=False, head_bias=True),
    "falcon": Classic(),
    "bloom": Classic(embedded=1),
    "mpt": Classic(bias="", mlp_bias=False, norm_bias=False),
    "trocr": Classic("max_position_embeddings", 2, crossed=True, final=False),
}


@family(*CLASSIC)
def classic(k: Keys) -> Architecture:
    name = k.text("model_type")
    without_experts(k)
    c = CLASSIC[name]
    d = k.integer("n_embd", "hidden_size", "d_model")
    n = k.integer("n_layer", "num_hidden_layers", "num_layers", "n_layers", "decoder_layers")
    heads = k.integer("n_head", "num_attention_heads", "num_heads", "n_heads", "attention_heads",
                      "decoder_attention_heads")
    bias, mlp_bias, norms, kv = c.bias, c.mlp_bias, c.norms, heads
    if name == "gpt_bigcode":
        kv = 1 if k.flag("multi_query", absent=True) else heads
    elif name == "opt":
        mlp_bias = k.flag("enable_bias", absent=True)
        bias = bias if mlp_bias else ""
        if not k.flag("layer_norm_elementwise_affine", absent=True):
            raise ValueError(f"{k.where}.layer_norm_elementwise_affine: no weight table for norms without weights")
    elif name == "gpt_neox":
        bias = bias if k.flag("attention_bias", absent=True) else ""
    elif name.startswith("phi"):
        kv = k.integer("num_key_value_heads", "n_head_kv", absent=heads)
    elif name == "falcon":
        kv, bias, mlp_bias, norms = _falcon(k, heads)
    layer = block("dense", gqa(d, heads, kv, k.divide("head_dim", d, heads), bias=bias),
                  dense(d, _hidden(k, name, d), gated=False, bias=mlp_bias), norm(d, c.norm_bias, norms))
    if c.crossed:
        again, mixer = gqa(d, heads, heads, k.divide("head_dim", d, heads), bias=bias)
        layer = Layer("dense", (*layer.weights, *again, *norm(d, True)), (*layer.mixers, mixer))
    if name in ("persimmon", "phi") and k.flag("qk_layernorm", absent=REQUIRED if name == "persimmon" else False):
        layer = Layer("dense", (*layer.weights, *norm(d // heads, True, 2)), layer.mixers)
    extra = norm(d, True, c.embedded)
    table, final = d, c.final
    if name == "gpt_neox_japanese":  # the last layer alone adds a bias to its attention's output
        extra.append(Weight("attention", (d,), "bias"))
    elif name == "opt":
        table = k.integer("word_embed_proj_dim", absent=d)
        extra += (matrix("other", d, table) + matrix("other", table, d)) * (table != d)
        final = k.flag("do_layer_norm_before", absent=True) and not k.flag("_remove_final_layer_norm", absent=False)
    elif name == "trocr":
        extra += norm(d, True, int(k.flag("layernorm_embedding")))
    if c.positions and (name != "trocr" or k.flag("use_learned_position_embeddings")):
        rows = k.integer(*dict.fromkeys((c.positions, "max_position_embeddings"))) + c.more
        extra.append(Weight("embedding", (rows, d), "table"))
    return decoder(k, name, d, [layer] * n, tied=c.tied, norm_bias=c.norm_bias, head_bias=c.head_bias,
                   final_norm=final, extra=tuple(extra), table=table)


def _hidden(k: Keys, name: str, d: int) -> int:
    """The FFN's width."""
    if name == "mpt":
        return k.integer("expansion_ratio") * d
    if name == "gpt_neox_japanese":
        return k.integer("intermediate_multiple_size") * d
    return k.integer("n_inner", "intermediate_size", "ffn_dim", "ffn_hidden_size", "dff", "decoder_ffn_dim",
                     absent=4 * d)


def _falcon(k: Keys, heads: int) -> tuple[int, str, bool, int]:
    """Key/value heads, biases of attention and FFN, norms a layer."""
    new = k.flag("new_decoder_architecture", absent=False)
    kv = k.integer("num_kv_heads", absent=heads) if new else (1 if k.flag("multi_query", absent=True) else heads)
    bias = k.flag("bias", absent=False)
    norms = k.integer("num_ln_in_parallel_attn", absent=2) if new else (
        1 if k.flag("parallel_attn", absent=True) else 2)
    return kv, "qkvo" if bias else "", bias, norms
