"""DeepSeek-V4, encoder-decoders with experts, and models known from a paper's table alone."""

from __future__ import annotations

from typing import Any

from .families import block, decoder, family, first_dense, predictions, predictor, width_and_depth
from .ffns import dense, moe
from .mixers import gqa, hyper
from .reader import Keys
from .weights import Architecture, Layer, Mixer, Weight, matrix, norm

COMPRESSED = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


@family("deepseek_v4")
def deepseek_v4(k: Keys) -> Architecture:
    """Shared key/value head, compressed caches, grouped output projection, hyper-connections, experts everywhere.

    Hyper-connections count with the sublayer they surround. Layers with hash routing have no selection bias; their
    token table is no parameter.
    """
    d, n = width_and_depth(k)
    ratios: Any = []
    if k.has("layer_types"):
        kinds = k.words("layer_types", layers=n, among=COMPRESSED.values())
    else:
        ratios = k.data.get("compress_ratios")  # may run on over the prediction layers
        if not isinstance(ratios, list) or len(ratios) < n or any(r not in COMPRESSED for r in ratios):
            known = sorted(COMPRESSED)
            raise ValueError(f"config.compress_ratios: expected at least {n} values of {known}, got {ratios}")
        kinds = [COMPRESSED[r] for r in ratios[:n]]
    hashed = (sum(word == "hash_moe" for word in k.words("mlp_layer_types", layers=n, among=("hash_moe", "moe")))
              if k.has("mlp_layer_types") else k.integer("num_hash_layers", minimum=0))
    expert, streams = k.integer("moe_intermediate_size"), k.integer("hc_mult")
    shared = expert * k.integer("n_shared_experts", minimum=0)
    sizes = d, expert, k.integer("n_routed_experts"), k.integer("num_experts_per_tok")
    maps = streams * streams + 2 * streams
    layers = []
    for i, kind in enumerate(kinds):
        found, mixer = _v4_attention(k, d, kind)
        found += hyper(maps, streams * d, 3, "attention")
        ffn = moe(*sizes, shared=shared, selection="" if i < hashed else "buffer")
        ffn += hyper(maps, streams * d, 3, "dense")
        layers.append(block("sparse", (found, mixer), ffn, norm(d, copies=2)))
    mtp = []
    for i in range(predictions(k)):  # two projections d -> d in place of one of 2d, and streams of its own
        kind = COMPRESSED.get(ratios[n + i], "sliding_attention") if len(ratios) > n + i else "sliding_attention"
        found, mixer = _v4_attention(k, d, kind)
        found += hyper(maps, streams * d, 3, "attention") + hyper(streams, streams * d, 1, "other")
        ffn = moe(*sizes, shared=shared, selection="buffer") + hyper(maps, streams * d, 3, "dense")
        mtp.append(predictor(d, block("mtp", (found, mixer), ffn, norm(d, copies=2))))
    return decoder(k, "deepseek_v4", d, layers, tied=False, mtp=tuple(mtp),
                   extra=tuple(hyper(streams, streams * d, 1, "other")))


def _compressor(d: int, rate: int, width: int, cached: int) -> list[Weight]:
    """Keys and values of `rate` tokens pooled into one, with learned weights."""
    return [Weight("attention", (rate, width), "filter"), *matrix("attention", width, d) * 2, *norm(cached)]


def _v4_attention(k: Keys, d: int, kind: str) -> tuple[list[Weight], Mixer]:
    heads, width, rank = k.integer("num_attention_heads"), k.integer("head_dim"), k.integer("q_lora_rank")
    groups, inner = k.integer("o_groups"), k.integer("o_lora_rank")
    found = matrix("attention", rank, d) + norm(rank) + matrix("attention", heads * width, rank)
    found += matrix("attention", width, d) + norm(width)
    found += matrix("attention", groups * inner, k.divide("o_group_width", heads * width, groups))
    found += [*matrix("attention", d, groups * inner), Weight("attention", (heads,), "filter")]
    rate = 0
    if kind != "sliding_attention":
        usual = {word: rate for rate, word in COMPRESSED.items()}
        rate = k.inside("compress_rates").integer(kind) if k.has("compress_rates") else usual[kind]
    if kind == "heavily_compressed_attention":
        found += _compressor(d, rate, width, width)
    elif kind == "compressed_sparse_attention":
        index_heads, index = k.integer("index_n_heads"), k.integer("index_head_dim")
        found += _compressor(d, rate, 2 * width, width) + _compressor(d, rate, 2 * index, index)
        found += matrix("attention", index_heads * index, rank) + matrix("attention", index_heads, d)
    window = k.integer("sliding_window", absent=0) or None
    return found, Mixer(heads, width, width, window, width)


@family("zaya")
def zaya(k: Keys) -> Architecture:
    """ZAYA: convolutions over queries and keys, a router of its own depth with one expert that computes nothing."""
    d, n = width_and_depth(k)
    heads, kv, width = k.integer("num_attention_heads"), k.integer("num_key_value_heads"), k.integer("head_dim")
    found, mixer = gqa(d, heads, kv, width, bias="qkv" if k.flag("attention_bias", absent=False) else "")
    rows, taps = (heads + kv) * width, (k.integer("cca_time0"), k.integer("cca_time1"))
    found += [Weight("attention", (rows, 1, taps[0]), "filter"), Weight("attention", (rows, width, taps[1]), "filter"),
              *[Weight("attention", (rows,), "filter")] * 2, Weight("attention", (kv,), "filter")]
    experts, inner = k.integer("num_experts"), k.integer("router_hidden_size")
    chosen = moe(d, k.integer("moe_intermediate_size"), experts, k.integer("num_experts_per_tok"), idle=1)
    chosen = [w for w in chosen if w.part != "router"] + matrix("router", inner, d, True) + norm(inner)
    chosen += matrix("router", inner, inner, True) * 2 + matrix("router", experts + 1, inner)
    chosen.append(Weight("router", (experts + 1,), "buffer"))
    around = norm(d, copies=2) + [Weight("other", (d,), "filter")] * 8
    carried = [Weight("router", (inner,), "filter")]
    layers = [block("sparse", (found, mixer), chosen + carried * (i > 0), around) for i in range(n)]
    return decoder(k, "zaya", d, layers, tied=True, head_bias=k.flag("lm_head_bias", absent=False),
                   extra=(Weight("other", (d,), "filter"),) * 2)


@family("paper", "grok-1", "arctic")
def paper(k: Keys) -> Architecture:
    """A decoder described by the handful of sizes that papers print.

    Keys: hidden_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, vocab_size,
    tie_word_embeddings, intermediate (expert width, or the FFN's without experts), num_experts, num_experts_per_tok,
    first_k_dense_replace and dense_intermediate, n_shared_experts and shared_intermediate; and, where it differs
    from a gated pre-norm decoder without biases: gated, norms_per_layer, norm_bias, bias, residual_intermediate (a
    dense FFN beside the experts), learned_positions (counted with the body, as the GPT-3 paper does).
    """
    if k.data.get("model_type") == "grok-1":
        k.data = {"norms_per_layer": 4, "tie_word_embeddings": True, **_renamed(k)}
    elif k.data.get("model_type") == "arctic":
        k.data = {"residual_intermediate": k.data.get("hidden_size"), "norms_per_layer": 3, **_renamed(k)}
    d, n = width_and_depth(k)
    heads, kv, width = k.integer("num_attention_heads"), k.integer("num_key_value_heads"), k.integer("head_dim")
    bias, gated = k.flag("bias", absent=False), k.flag("gated", absent=True)
    norm_bias = k.flag("norm_bias", absent=False)
    norms = norm(d, norm_bias, k.integer("norms_per_layer", absent=2))
    mixed = gqa(d, heads, kv, width, bias="qkvo" if bias else "")
    experts, hidden = k.integer("num_experts", minimum=0), k.integer("intermediate")
    residual = dense(d, k.integer("residual_intermediate", absent=0, minimum=0), gated=gated, bias=bias)
    if experts:
        sparse = first_dense(k, n, absent=0)
        shared = k.integer("n_shared_experts", absent=0, minimum=0)
        ffn = moe(d, hidden, experts, k.integer("num_experts_per_tok"), gated=gated, bias=bias,
                  shared=shared * k.integer("shared_intermediate", minimum=0) if shared else 0)
        plain = dense(d, k.integer("dense_intermediate"), gated=gated, bias=bias) if not all(sparse) else []
    else:
        sparse, ffn, plain = [False] * n, [], dense(d, hidden, gated=gated, bias=bias)
    layers = [block("sparse" if on else "dense", mixed, (ffn if on else plain) + residual, norms) for on in sparse]
    positions = k.integer("learned_positions", absent=0, minimum=0)
    extra = (Weight("other", (positions, d), "table"),) if positions else ()
    if k.flag("encoder_decoder", absent=False):
        return _transformer(k, d, n, mixed, plain, norms, norm_bias)
    return decoder(k, "paper", d, layers, tied=k.tied(False), norm_bias=norm_bias, extra=extra)


def _renamed(k: Keys) -> dict:
    """The keys of Grok-1's and Arctic's own configs, under the names of a paper description."""
    d, heads = k.integer("hidden_size"), k.integer("num_attention_heads")
    names = {"intermediate": "intermediate_size", "num_experts": "num_local_experts"}
    found = {new: k.data[old] for new, old in names.items() if k.has(old)}
    given = {key: value for key, value in k.data.items() if value is not None}
    return {"head_dim": k.divide("head_dim", d, heads), **found, **given}


def _transformer(k: Keys, d: int, n: int, mixed, ffn: list[Weight], norms: list[Weight],
                 norm_bias: bool) -> Architecture:
    """The encoder and decoder of 2017: post-norm, no final norm, one table for both embeddings and the head."""
    below = block("dense", mixed, ffn, norms)
    above = Layer("dense", tuple(mixed[0] * 2 + ffn + norms + norm(d, norm_bias)), (mixed[1],) * 2)
    return decoder(k, "transformer", d, [below] * n + [above] * n, tied=True, final_norm=False)
