"""Transformers over series of numbers, and over the states, actions and rewards of an agent."""

from __future__ import annotations

from .families import attention_bias, family
from .ffns import dense
from .mixers import gqa
from .reader import Keys
from .stacks import conv, layer, table, vector, whole
from .weights import Architecture, Layer, Mixer, Weight, matrix, norm


@family("decision_transformer")
def decision_transformer(k: Keys) -> Architecture:
    """Decision Transformer: GPT-2's layers over returns, states and actions, each with a matrix in and out."""
    d, heads, vocab = k.integer("hidden_size"), k.integer("n_head"), k.integer("vocab_size")
    if k.flag("add_cross_attention", absent=False):
        raise ValueError(f"{k.where}.add_cross_attention: no weight table for a second attention")
    own = layer(k, d, heads, k.integer("n_inner", absent=4 * d))
    outer = [table(rows, d) for rows in (vocab, k.integer("n_positions"), k.integer("max_ep_len"))]
    for width in (1, k.integer("state_dim"), k.integer("act_dim")):
        outer += matrix("other", d, width, True) + matrix("other", width, d, True)
    return whole(k, d, vocab, [own] * k.integer("n_layer"), outer + norm(d, True, 2))


@family("time_series_transformer", "informer", "autoformer")
def series(k: Keys) -> Architecture:
    """Encoder and decoder of lagged values and features, without the head of a distribution. Informer's encoder halves
    its length by convolutions; Autoformer's decoder projects trends."""
    name, d, inputs = k.text("model_type"), k.integer("d_model"), k.integer("input_size")
    lags = k.indices("lags_sequence", required=True)
    given = sum(k.integer(f"num_{kind}", minimum=0) for kind in ("time_features", "dynamic_real_features",
                                                                  "static_real_features"))
    kinds = k.integer("num_static_categorical_features", minimum=0)
    rows, widths = ((k.indices(key, required=True) for key in ("cardinality", "embedding_dimension"))
                    if kinds else ([], []))
    features = k.integer("feature_size", absent=inputs * len(lags) + sum(widths) + given + 2 * inputs)
    length = k.integer("prediction_length")
    length += k.integer("context_length", absent=length)
    outer = [table(*size) for size in zip(rows, widths, strict=True)]
    layers: list[Layer] = []
    for stack in ("encoder", "decoder"):
        n, heads, decodes = k.integer(f"{stack}_layers"), k.integer(f"{stack}_attention_heads"), stack == "decoder"
        looks = gqa(d, heads, heads, k.divide("head_dim", d, heads), bias="qkvo") if decodes else None
        more = [vector(features, d, 3)] if decodes and name == "autoformer" else []
        layers += [layer(k, d, heads, k.integer(f"{stack}_ffn_dim"), looks=looks, more=more)] * n
        outer += [*matrix("other", d, features), table(length, d), *norm(d, True)]
        if name == "informer" and not decodes and k.flag("distil"):
            outer += (conv(d, d, 3) + norm(d, True)) * (n - 1)
    if name == "autoformer":
        outer += matrix("other", features, d, True)
    return whole(k, d, 1, layers, outer)


def _patches(k: Keys) -> int:
    length = k.integer("patch_length")
    return (max(k.integer("context_length"), length) - length) // k.integer("patch_stride") + 1


@family("patchtst")
def patchtst(k: Keys) -> Architecture:
    """PatchTST without a head: patches of each channel as tokens, fixed positions that are parameters."""
    d, heads, hidden = k.integer("d_model"), k.integer("num_attention_heads"), k.integer("ffn_dim")
    bias, channels = k.flag("bias"), 1 if k.flag("share_embedding") else k.integer("num_input_channels")
    own = layer(k, d, heads, hidden, ffn_bias=bias, norms=2 + k.flag("channel_attention"))
    marked = k.flag("use_cls_token")
    outer = matrix("other", d, k.integer("patch_length"), True) * channels + [vector(d)] * marked
    return whole(k, d, 1, [own] * k.integer("num_hidden_layers"), [*outer, table(_patches(k) + marked, d)])


@family("patchtsmixer")
def patchtsmixer(k: Keys) -> Architecture:
    """PatchTSMixer without a head: FFNs over patches and over features (and over channels), each with a gate."""
    d, factor = k.integer("d_model"), k.integer("expansion_factor")
    patches = k.integer("num_patches", absent=_patches(k))
    widths = [patches, d] + [k.integer("num_input_channels")] * (k.text("mode") == "mix_channel")
    own: list[Weight] = norm(d, True, len(widths))
    for width in widths:
        own += dense(width, factor * width, gated=False, bias=True)
        own += matrix("dense", width, width, True) * k.flag("gated_attn")
    mixers: tuple[Mixer, ...] = ()
    if k.flag("self_attn"):
        heads = k.integer("self_attn_heads")
        found, mixer = gqa(d, heads, heads, k.divide("head_dim", d, heads), bias="qkvo")
        own, mixers = own + found + norm(d, True), (mixer,)
    outer = matrix("other", d, k.integer("patch_length"), True)
    outer += [table(patches, d)] * k.flag("use_positional_encoding")
    return whole(k, d, 1, [Layer("dense", tuple(own), mixers)] * k.integer("num_layers"), outer)


def _residual(inputs: int, hidden: int, outputs: int, bias: bool = True) -> list[Weight]:
    """Two matrices beside a third from the input to the output."""
    found = matrix("other", hidden, inputs, bias) + matrix("other", outputs, hidden, bias)
    return found + matrix("other", outputs, inputs, bias)


def _quantiles(k: Keys) -> int:
    found = k.data.get("quantiles")
    if not isinstance(found, list | tuple) or not found:
        raise ValueError(f"{k.where}.quantiles: expected a list of quantiles, got {found!r}")
    return len(found) + 1


@family("timesfm")
def timesfm(k: Keys) -> Architecture:
    """TimesFM with its head: patches through a residual block in and out, learned scales of the queries."""
    d, heads, hidden = k.integer("hidden_size"), k.integer("num_attention_heads"), k.integer("intermediate_size")
    width = k.integer("head_dim")
    own = layer(k, d, heads, hidden, width=width, norms=1, more=[*norm(d), vector(width, part="attention")])
    outer = [*_residual(2 * k.integer("patch_length"), hidden, d), table(k.integer("freq_size"), d)]
    outer += _residual(d, hidden, k.integer("horizon_length") * _quantiles(k))
    return whole(k, d, 1, [own] * k.integer("num_hidden_layers"), outer)


@family("timesfm2_5")
def timesfm_next(k: Keys) -> Architecture:
    """TimesFM 2.5 with its heads, of points and of quantiles."""
    d, heads, width = k.integer("hidden_size"), k.integer("num_attention_heads"), k.integer("head_dim")
    bias = k.flag("use_bias")
    own = layer(k, d, heads, k.integer("intermediate_size"), kv=k.integer("num_key_value_heads"), width=width,
                bias=attention_bias(k), ffn_bias=bias, norm_bias=False, norms=4,
                more=[*norm(width) * 2, vector(width, part="attention")])
    outer = _residual(2 * k.integer("patch_length"), d, d)
    for key in ("horizon_length", "output_quantile_len"):
        outer += _residual(d, d, k.integer(key) * _quantiles(k), False)
    return whole(k, d, 1, [own] * k.integer("num_hidden_layers"), outer)
