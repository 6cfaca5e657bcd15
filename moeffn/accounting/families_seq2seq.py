"""Encoder-decoders, dense and with experts."""

from __future__ import annotations

from .families import decoder, family
from .ffns import dense, moe
from .mixers import gqa
from .reader import Keys
from .weights import Architecture, Layer, Weight, norm


@family("t5", "switch_transformers", "mt5", "umt5")
def t5(k: Keys) -> Architecture:
    """T5 and Switch Transformers: encoder and decoder with relative positions, FFNs without biases."""
    name = k.text("model_type")
    d, heads, width, hidden = k.integer("d_model"), k.integer("num_heads"), k.integer("d_kv"), k.integer("d_ff")
    encoders = k.integer("num_layers")
    decoders = k.integer("num_decoder_layers", absent=encoders)
    gated = k.text("feed_forward_proj", absent="relu").startswith("gated")
    buckets = k.integer("relative_attention_num_buckets")
    layers = []
    for stack, n in (("encoder", encoders), ("decoder", decoders)):
        every = 0
        if name == "switch_transformers":
            count = k.integer(f"num_sparse_{stack}_layers", minimum=0)
            every = n // count if count else 0
        for i in range(n):
            found, mixer = gqa(d, heads, heads, width)
            times = 2 if stack == "decoder" else 1
            found = found * times
            if i == 0 or name == "umt5":
                found = [*found, Weight("attention", (buckets, heads), "filter")]
            sparse = bool(every) and (i % every == 1 or every == 1)
            ffn = (moe(d, hidden, k.integer("num_experts"), 1, gated=False, where="config.num_experts",
                       router_bias=k.flag("router_bias", absent=False)) if sparse
                   else dense(d, hidden, gated=gated))
            weights = tuple(found + ffn + norm(d, copies=1 + times))
            layers.append(Layer("sparse" if sparse else "dense", weights, (mixer,) * times))
    return decoder(k, name, d, layers, tied=True, extra=tuple(norm(d)))


@family("nllb_moe", "nllb-moe")
def nllb(k: Keys) -> Architecture:
    """NLLB-MoE: encoder and decoder, top-2 experts in every few layers, biases everywhere."""
    d = k.integer("d_model")
    layers = []
    for stack in ("encoder", "decoder"):
        n, heads = k.integer(f"{stack}_layers"), k.integer(f"{stack}_attention_heads")
        hidden, every = k.integer(f"{stack}_ffn_dim"), k.integer(f"{stack}_sparse_step", minimum=0)
        for i in range(n):
            found, mixer = gqa(d, heads, heads, k.divide("head_dim", d, heads), bias="qkvo")
            times = 2 if stack == "decoder" else 1
            sparse = bool(every) and (i + 1) % every == 0
            ffn = (moe(d, hidden, k.integer("num_experts"), 2, gated=False, bias=True, where="config.num_experts",
                       router_bias=k.flag("router_bias", absent=False)) if sparse
                   else dense(d, hidden, gated=False, bias=True))
            layers.append(Layer("sparse" if sparse else "dense",
                                tuple(found * times + ffn + norm(d, True, 1 + times)), (mixer,) * times))
    return decoder(k, "nllb_moe", d, layers, tied=True, norm_bias=True, extra=tuple(norm(d, True)))


@family("bart", "mbart", "pegasus", "m2m_100", "marian", "blenderbot", "blenderbot-small", "whisper")
def bart(k: Keys) -> Architecture:
    """BART and its like; m2m_100 (NLLB) and Whisper too. Whisper's encoder has fixed positions, as parameters.

    Sinusoidal positions that are parameters of the module (Marian, Pegasus, Whisper's encoder) count.
    """
    name = k.text("model_type")
    d = k.integer("d_model")
    extra: list[Weight] = []
    layers = []
    for stack in ("encoder", "decoder"):
        n, heads = k.integer(f"{stack}_layers"), k.integer(f"{stack}_attention_heads")
        bias = "qvo" if name == "whisper" else "qkvo"
        found, mixer = gqa(d, heads, heads, k.divide("head_dim", d, heads), bias=bias)
        times = 2 if stack == "decoder" else 1
        ffn = dense(d, k.integer(f"{stack}_ffn_dim"), gated=False, bias=True)
        layers += [Layer("dense", tuple(found * times + ffn + norm(d, True, 1 + times)), (mixer,) * times)] * n
        extra += norm(d, True, {"mbart": 2, "marian": 0}.get(name, 1))
        if name == "whisper":
            rows = k.integer("max_source_positions" if stack == "encoder" else "max_target_positions")
        else:
            rows = 0 if name == "m2m_100" else k.integer("max_position_embeddings") + 2 * (name in ("bart", "mbart"))
        extra += [Weight("embedding", (rows, d), "table")] * (rows > 0)
    if name == "whisper":
        extra += [Weight("other", (d, k.integer("num_mel_bins"), 3), "filter"), Weight("other", (d,), "bias"),
                  Weight("other", (d, d, 3), "filter"), Weight("other", (d,), "bias")]
    return decoder(k, name, d, layers, tied=True, final_norm=False, extra=tuple(extra))
