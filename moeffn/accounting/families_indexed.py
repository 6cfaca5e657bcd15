"""Latent attention whose layers pick the tokens they look at, mixed with other layers or with residual streams."""

from __future__ import annotations

from math import isqrt

from .families import (
    attention_bias,
    block,
    decoder,
    family,
    first_dense,
    predictions,
    predictor,
    shared_width,
    tower,
    width_and_depth,
)
from .families_sparse import indexed
from .ffns import dense, moe
from .mixers import Mixed, gated_delta, gqa, hyper, indexer, kimi_delta, mla
from .reader import Keys
from .weights import Architecture, Layer, Mixer, Weight, matrix, norm

LINEAR_OR_INDEXED = ("linear_attention", "indexed_attention", "full_attention", "deepseek_sparse_attention")


def _experts(k: Keys, d: int, sparse: list[bool], selection: str = "buffer") -> tuple[list[Weight], list[Weight]]:
    """The mixture of the sparse layers and the FFN of the others."""
    expert = k.integer("moe_intermediate_size")
    ffn = moe(d, expert, k.integer("n_routed_experts"), k.integer("num_experts_per_tok"),
              shared=shared_width(k, expert, sparse), selection=selection) if any(sparse) else []
    return ffn, dense(d, k.integer("intermediate_size")) if not all(sparse) else []


def _latent(k: Keys, d: int, rank: int, gate: str = "") -> Mixed:
    return mla(d, k.integer("num_attention_heads"), rank, k.integer("kv_lora_rank"), k.integer("qk_nope_head_dim"),
               k.integer("qk_rope_head_dim", minimum=0), k.integer("v_head_dim"), gate=gate,
               bias=k.flag("attention_bias", absent=False))


@family("axk2")
def axk2(k: Keys) -> Architecture:
    """A.X K2: query and output gate from one projection of the compressed query, raw and normed; norms with a gate."""
    d, n = width_and_depth(k)
    heads, rank, kv = k.integer("num_attention_heads"), k.integer("q_lora_rank"), k.integer("kv_lora_rank")
    nope, rope, v = k.integer("qk_nope_head_dim"), k.integer("qk_rope_head_dim"), k.integer("v_head_dim")
    bias = k.flag("attention_bias", absent=False)
    found = matrix("attention", rank, d, bias) + norm(rank) + matrix("attention", heads * (nope + rope + v), 2 * rank)
    found += matrix("attention", kv + rope, d, bias) + norm(kv) + matrix("attention", heads * (nope + v), kv)
    found += matrix("attention", d, heads * v, bias)
    found += indexer(d, rank, k.integer("index_n_heads"), k.integer("index_head_dim"))
    mixed = found, Mixer(heads, nope + rope, v, None, kv + rope)
    low = k.integer("gated_norm_rank")
    gated = norm(d) + matrix("norm", low, d) + matrix("norm", d, low)
    sparse = first_dense(k, n)
    ffn, plain = _experts(k, d, sparse)
    layers = [block("sparse" if on else "dense", mixed, ffn if on else plain, gated + (gated if on else norm(d)))
              for on in sparse]
    return decoder(k, "axk2", d, layers, tied=False)


@family("hy_v4", "hy_v4_vl", "hy_v4_vl_text")
def hunyuan_v4(k: Keys) -> Architecture:
    """Hunyuan 4: residual streams, sinks, an output gate, and an index every few layers."""
    k = tower(k)
    d, n = width_and_depth(k)
    rank, streams = k.integer("q_lora_rank"), k.integer("hc_mult")
    found, mixer = _latent(k, d, rank)
    inner = mixer.heads * mixer.v
    found += [*matrix("attention", inner, d), Weight("attention", (mixer.heads,), "filter")]
    found += hyper(2 * streams, streams * d, 2, "attention")
    sparse = first_dense(k, n)
    ffn, plain = _experts(k, d, sparse)
    around = hyper(2 * streams, streams * d, 2, "dense") + norm(d, copies=2)
    look = indexer(d, rank, k.integer("index_n_heads"), k.integer("index_head_dim"))
    layers = [block("sparse" if on else "dense", (found + look * own, mixer), ffn if on else plain, around)
              for own, on in zip(indexed(k, n), sparse, strict=True)]
    return decoder(k, "hy_v4", d, layers, tied=False, extra=tuple(hyper(streams, streams * d, 1, "other")))


@family("glm5_next", "glm5_next_text")
def glm5_next(k: Keys) -> Architecture:
    """GLM-5 Next: Kimi delta attention with latent attention between, an index over pooled keys, residual streams."""
    k = tower(k)
    d, n = width_and_depth(k)
    rank, streams = k.integer("q_lora_rank"), k.integer("hc_mult")
    within = k.inside("linear_attn_config") if k.has("linear_attn_config") else k  # as published, as saved
    delta = kimi_delta(d, within.integer("linear_num_heads", "num_heads"),
                       within.integer("linear_head_dim", "head_dim"),
                       within.integer("linear_conv_kernel_dim", "short_conv_kernel_size"), low_rank=True)
    found, mixer = _latent(k, d, rank)
    heads, width = k.integer("index_n_heads"), k.integer("index_head_dim")
    look = indexer(d, rank, heads, width) + matrix("attention", width, d)
    look.append(Weight("attention", (k.integer("index_kpool"), width), "filter"))
    linear = [w == "linear_attention" for w in k.words("layer_types", layers=n, among=LINEAR_OR_INDEXED)]
    sparse = first_dense(k, n)
    ffn, plain = _experts(k, d, sparse)
    around = hyper(streams * streams + 2 * streams, streams * d, 3, "attention")
    around += hyper(streams * streams + 2 * streams, streams * d, 3, "dense") + norm(d, copies=2)
    layers = [block("sparse" if on else "dense", delta if rec else (found + look * own, mixer), ffn if on else plain,
                    around) for rec, own, on in zip(linear, indexed(k, n), sparse, strict=True)]
    # A prediction layer has an index of its own and experts, and one residual stream.
    predicted = predictor(d, block("mtp", (found + look, mixer), ffn or plain, norm(d, copies=2)))
    return decoder(k, "glm5_next", d, layers, tied=False, mtp=(predicted,) * predictions(k))


@family("dots3_note", "dots3_note_text")
def dots3_note(k: Keys) -> Architecture:
    """dots3: latent attention with a gate for each head; window layers have sizes of their own."""
    k = tower(k)
    d, n = width_and_depth(k)
    words = k.words("layer_types", layers=n, among=("indexed_attention", "full_attention", "sliding_attention"))
    if "sliding_attention" in words and not k.has("per_layer_config"):
        raise ValueError(f"{k.where}.per_layer_config is missing: it holds the sizes of the window layers")
    sparse = first_dense(k, n)
    ffn, plain = _experts(k, d, sparse)
    layers = []
    for i, (word, on) in enumerate(zip(words, sparse, strict=True)):
        own = k.layer(i)
        rank = own.integer("q_lora_rank")
        found, mixer = _latent(own, d, rank, gate="heads")
        found += norm(own.integer("qk_rope_head_dim"))
        if word != "sliding_attention":
            found += indexer(d, rank, own.integer("index_n_heads"), own.integer("index_head_dim"))
        layers.append(block("sparse" if on else "dense", (found, mixer), ffn if on else plain, norm(d, copies=2)))
    return decoder(k, "dots3_note", d, layers, tied=False)


@family("mistral_large4", "mistral_large4_text")
def mistral_large4(k: Keys) -> Architecture:
    """Mistral Large 4: no query compression, some layers without positions, some that reuse latents of others."""
    k = tower(k)
    d, n = width_and_depth(k)
    heads, kv = k.integer("num_attention_heads"), k.integer("kv_lora_rank")
    bias = k.flag("attention_bias", absent=False)
    nope, rope, v = k.integer("qk_nope_head_dim"), k.integer("qk_rope_head_dim"), k.integer("v_head_dim")
    index, width = k.integer("index_n_heads"), k.integer("index_head_dim")
    look = indexer(d, d, index, width) + norm(d, bias=True) + [Weight("attention", (index,), "filter")] * 2
    rotates = [bool(v) for v in k.each("no_rope_layers", layers=n)]
    sources = k.each("kv_source_layers", layers=n) if k.has("kv_source_layers") else list(range(n))
    sparse = first_dense(k, n)
    ffn, plain = _experts(k, d, sparse, selection="")
    layers = []
    for i, (rotate, own) in enumerate(zip(rotates, indexed(k, n), strict=True)):
        found = matrix("attention", heads * (nope + rope), d) + [Weight("attention", (heads,), "filter")] * 2
        if sources[i] == i:
            found += matrix("attention", kv + rope * rotate, d, bias) + norm(kv)
        found += matrix("attention", heads * (nope + v + (0 if rotate else rope)), kv)
        found += matrix("attention", d, heads * v, bias) + look * own
        mixer = Mixer(heads, nope + rope, v, None, (kv + rope * rotate) * (sources[i] == i))
        layers.append(block("sparse" if sparse[i] else "dense", (found, mixer), ffn if sparse[i] else plain,
                            norm(d, copies=2)))
    return decoder(k, "mistral_large4", d, layers, tied=False, extra=(Weight("other", (rope // 2,), "filter"),))


@family("qwen4_exp", "qwen4_exp_text")
def qwen4_exp(k: Keys) -> Architecture:
    """Qwen4: gated DeltaNet with indexed full attention between, residual streams, n-gram tables in some layers."""
    k = tower(k)
    d, n = width_and_depth(k)
    streams = k.integer("hc_count")
    sizes = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    recurrent = gated_delta(d, *(k.integer(f"linear_{size}") for size in sizes))
    bias = attention_bias(k)
    found, mixer = gqa(d, k.integer("num_attention_heads"), k.integer("num_key_value_heads"), k.integer("head_dim"),
                       bias=bias, qk_norm="head", gate="query")
    width = k.integer("indexer_head_dim")
    heads = k.integer("indexer_n_heads") + k.integer("indexer_kv_heads")
    found += matrix("attention", heads * width, d) + norm(width, copies=2)
    ffn = moe(d, k.integer("moe_intermediate_size"), k.integer("num_experts"), k.integer("num_experts_per_tok"),
              shared=k.integer("shared_expert_intermediate_size"), shared_gate=True)
    wide, rank = streams * d, k.integer("hc_lowrank")
    mix = norm(wide) + matrix("other", rank, wide) + matrix("other", wide, rank)
    around = (mix + matrix("other", streams, wide)) * 2
    ngrams = k.indices("ple_layer_ids", required=True)  # numbered from 1
    layers = []
    for i, word in enumerate(k.words("layer_types", layers=n, among=LINEAR_OR_INDEXED)):
        mixed = recurrent if word == "linear_attention" else (found, mixer)
        table = _ngrams(k, d, wide, sorted(set(ngrams)).index(i + 1)) if i + 1 in ngrams else []
        layers.append(block("sparse", mixed, ffn, around + table))
    return decoder(k, "qwen4_exp", d, layers, tied=False, final_norm=False, extra=tuple(mix))


def _ngrams(k: Keys, d: int, wide: int, order: int) -> list[Weight]:
    """A layer's hashed n-gram table: a prime number of rows for each head, no two alike, padded in all."""
    width = k.integer("ple_embed_dim", absent=d)
    heads = (k.integer("ngram_size") - 1) * k.integer("heads_per_ngram")
    rows, value = 0, k.integer("ngram_vocab_size_base") - 1
    for i in range((order + 1) * heads):
        value += 1
        while value % 2 == 0 or any(value % p == 0 for p in range(3, isqrt(value) + 1, 2)):
            value += 1
        rows += value * (i >= order * heads)
    divisor = k.integer("make_ngram_vocab_size_divisible_by")
    found = [Weight("embedding", (-(-rows // divisor) * divisor, width // heads), "table")]
    found += matrix("other", wide, width) + matrix("other", d, width) + norm(wide, copies=3)
    return [*found, Weight("other", (wide, 1, k.integer("ple_conv_kernel_size")), "filter")]


@family("inkling_text", "inkling_mm_model")
def inkling(k: Keys) -> Architecture:
    """Inkling: relative positions, short convolutions around every sublayer, shared experts that the router scales.
    Prediction layers are dense, behind a 2d -> d projection with two norms."""
    k = _named_as_saved(tower(k), k)
    d, n = width_and_depth(k)
    words = k.words("layer_types", layers=n, among=("hybrid", "hybrid_sliding"))
    conv, relative = k.integer("conv_kernel_size"), k.integer("d_rel")
    sparse = first_dense(k, n)
    expert = k.integer("moe_intermediate_size")
    shared = k.integer("n_shared_experts", minimum=0)
    ffn = moe(d, expert, k.integer("n_routed_experts"), k.integer("num_experts_per_tok"), selection="buffer",
              shared=expert * shared)
    ffn += [Weight("router", (shared, d), "matrix"), Weight("router", (1,), "filter")]
    extra = predictions(k, "num_mtp_layers")
    near = set(k.indices("mtp_local_layer_ids")) if extra else set()
    plain = ([*dense(d, k.integer("intermediate_size")), Weight("dense", (1,), "filter")]
             if extra or not all(sparse) else [])
    layers = []
    further = ["hybrid_sliding" if i in near else "hybrid" for i in range(extra)]
    for word, on in zip([*words, *further], [*sparse, *[False] * extra], strict=True):
        own, window = ("swa_", k.integer("sliding_window_size")) if word == "hybrid_sliding" else ("", None)
        heads, kv = k.integer(f"{own}num_attention_heads"), k.integer(f"{own}num_key_value_heads")
        width = k.integer(f"{own}head_dim")
        found, mixer = gqa(d, heads, kv, width, qk_norm="head", window=window)
        found += matrix("attention", heads * relative, d) + [Weight("attention", (kv * width, 1, conv), "filter")] * 2
        found.append(Weight("attention", (relative, window or k.integer("rel_extent")), "filter"))
        around = norm(d, copies=2) + [Weight("other", (d, 1, conv), "filter")] * 2
        layers.append(block("sparse" if on else "dense", (found, mixer), ffn if on else plain, around))
    entry = tuple(matrix("other", d, 2 * d) + norm(d, copies=2))
    mtp = tuple(Layer("mtp", layer.weights + entry, layer.mixers) for layer in layers[n:])
    return decoder(k, "inkling", d, layers[:n], tied=False, extra=tuple(norm(d)), mtp=mtp)


def _named_as_saved(k: Keys, wrapper: Keys) -> Keys:
    """The keys of Inkling's published files under the names that transformers gives them: there `intermediate_size`
    is the experts' width when a dense one stands beside it, and lists hold the numbers of layers."""
    given = {key: v for key, v in k.data.items() if v is not None}
    n, found = k.integer("num_hidden_layers"), {}
    if k.has("dense_intermediate_size"):
        found = {"moe_intermediate_size": given.get("intermediate_size"),
                 "intermediate_size": given["dense_intermediate_size"]}
    if k.has("local_layer_ids") and not k.has("layer_types"):
        near = set(k.indices("local_layer_ids"))
        found["layer_types"] = ["hybrid_sliding" if i in near else "hybrid" for i in range(n)]
    if k.has("dense_mlp_idx") and not k.has("mlp_layer_types"):
        first = k.integer("dense_mlp_idx", minimum=0)
        found["mlp_layer_types"] = ["dense" if i < first else "sparse" for i in range(n)]
    if k.has("sconv_kernel_size") and not k.has("conv_kernel_size"):
        found["conv_kernel_size"] = given["sconv_kernel_size"]
    if wrapper.has("mtp_config"):
        ahead = wrapper.inside("mtp_config")
        found["num_mtp_layers"] = predictions(ahead)
        found["mtp_local_layer_ids"] = ahead.indices("local_layer_ids")
    k.data = {**given, **found}
    return k


@family("inkling2_text", "inkling2", "inkling2_loop_text", "inkling2_loop")
def inkling2(k: Keys) -> Architecture:
    """Inkling 2: attention over the outputs of earlier blocks; the loop form passes some layers several times."""
    k = tower(k)
    name = k.text("model_type")
    d, n = width_and_depth(k)
    words = k.words("layer_types", layers=n, among=("hybrid", "hybrid_sliding"))
    conv, relative = k.integer("conv_kernel_size", "sconv_kernel_size"), k.integer("d_rel")
    start, end, passes, message = n, n, 1, []
    if "loop" in name:
        start, end = k.integer("loop_layer_index_start", minimum=0), k.integer("loop_layer_index_end")
        passes, low = k.integer("loop_num_passes"), k.integer("loop_gate_rank")
        message = (matrix("other", low, 2 * d) + matrix("other", d, low) * 2) * 4
    ffn = moe(d, k.integer("moe_intermediate_size", "intermediate_size"), k.integer("n_routed_experts"),
              k.integer("num_experts_per_tok"), selection="buffer")
    layers: list[Layer] = []
    for i, word in enumerate(words):
        full = word == "hybrid"
        own, window = ("", None) if full else ("swa_", k.integer("sliding_window_size"))
        heads, kv = k.integer(f"{own}num_attention_heads"), k.integer(f"{own}num_key_value_heads")
        width = k.integer(f"{own}head_dim")
        found, mixer = gqa(d, heads, kv, width, gate="channels", window=window)
        found += matrix("attention", heads, d) + matrix("attention", heads * relative, d)
        found += [Weight("attention", (heads, width), "filter"), Weight("attention", (heads, relative), "filter")]
        found.append(Weight("attention", (relative, k.integer("rel_extent")), "filter"))
        found += [Weight("attention", (kv * width, 1, conv), "filter")] * 2
        if full:  # the taps also depend on the token, for each key/value head
            found += matrix("attention", kv * conv, d) * 2
        around = norm(d, copies=4 if full else 2) + [Weight("other", (d, 1, conv), "filter")] * 2
        around += [Weight("other", (d,), "filter")] * ((3 if full else 1) * (i > 0) + 1)
        layer = block("sparse", (found, mixer), ffn, around)
        layers.append(layer.repeated(passes, message) if start <= i < end else layer)
    extra = [*norm(d), Weight("other", (d,), "filter")]
    if message:
        extra.append(Weight("other", (end - start, 4, d), "filter"))
    head = k.integer("unpadded_vocab_size", "vocab_size")
    return decoder(k, name.removesuffix("_text"), d, layers, tied=False, extra=tuple(extra), head_rows=head)
