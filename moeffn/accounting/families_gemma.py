"""Gemma 3, 3n and 4: windows, shared keys and values, tables for each layer, and the vision tower beside them."""

from __future__ import annotations

from dataclasses import replace

from .families import attention_bias, block, decoder, family, heads_of, tower, width_and_depth, windows
from .families_dense import plain
from .ffns import dense, moe
from .mixers import gqa
from .reader import Keys
from .weights import Architecture, Weight, matrix, norm


@family("gemma3", "shieldgemma2")
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
    pools = v.flag("vision_use_head", absent=False)  # one more attention, from a learned query, and its FFN
    ffn = (depth + pools) * (2 * d * v.integer("intermediate_size") + v.integer("intermediate_size") + d)
    elements = depth * (attention + 4 * d) + pixels * d + d + patches * d + 2 * d
    elements += pools * (attention + 3 * d)
    elements += d * text.d_model + d  # projector: one matrix and its norm
    return _with_vision(text, "gemma3", elements, ffn, k)


def _with_vision(text: Architecture, name: str, elements: int, ffn: int, k: Keys) -> Architecture:
    outer = (*text.outer, Weight("vision", (elements,), "filter"), Weight("vision_ffn", (ffn,), "filter"))
    return Architecture(name, text.d_model, text.vocab, text.layers, outer, text.tied, text.mtp, text.duplicates,
                        tuple(sorted(k.assumed.items())), tuple(k.excluded))


@family("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
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
    layer = sum(w.total for w in gqa(d, heads, kv, width, qk_norm="head")[0]) + 4 * d
    ffn = depth * sum(w.total for w in dense(d, v.integer("intermediate_size")))
    elements = depth * layer + 3 * v.integer("patch_size") ** 2 * d + 2 * v.integer("position_embedding_size") * d
    return _with_vision(text, "gemma4", elements + d * text.d_model, ffn, k)


def _gemma4_text(k: Keys) -> Architecture:
    d, n = width_and_depth(k)
    heads, kv = k.integer("num_attention_heads"), k.integer("num_key_value_heads")
    types = k.words("layer_types", layers=n, among=("full_attention", "sliding_attention"))
    alternative = k.flag("attention_k_eq_v", absent=False)
    bias = attention_bias(k)
    width = k.integer("head_dim")
    if k.has("per_layer_config"):  # what newer code saves in place of the global sizes
        own = k.layer(types.index("full_attention"))
        wide, kv_full = own.integer("head_dim"), own.integer("num_key_value_heads")
    else:
        wide = k.integer("global_head_dim")
        kv_full = k.integer("num_global_key_value_heads", absent=kv) if alternative else kv
    shared_from = n - k.integer("num_kv_shared_layers", absent=0, minimum=0)
    doubled = k.flag("use_double_wide_mlp", absent=False)
    hidden = k.integer("intermediate_size")
    unified = k.text("model_type").startswith("gemma4_unified")
    inputs = 0 if unified else k.integer("hidden_size_per_layer_input", minimum=0)
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


@family("gemma3n", "gemma3n_text")
def gemma3n(k: Keys) -> Architecture:
    """Gemma 3n: alternating updates of several streams, low-rank residuals, an embedding for each layer."""
    k = tower(k)
    d, n = width_and_depth(k)
    heads, kv, width = k.integer("num_attention_heads"), k.integer("num_key_value_heads"), k.integer("head_dim")
    shared_from = n - k.integer("num_kv_shared_layers", minimum=0)
    bias = attention_bias(k)
    hidden, streams = k.each("intermediate_size", layers=n, minimum=1), k.integer("altup_num_inputs")
    inputs, rank = k.integer("hidden_size_per_layer_input"), k.integer("laurel_rank")
    around = norm(d, copies=7) + matrix("other", rank, d) + matrix("other", d, rank)  # with the low-rank residual
    around += matrix("other", streams, streams) + matrix("other", streams * streams, streams)
    around += [*matrix("other", streams, d), Weight("other", (d,), "filter")]
    around += matrix("other", inputs, d) + matrix("other", d, inputs)
    layers = [block("dense", gqa(d, heads, kv if i < shared_from else 0, width, bias=bias, qk_norm="head",
                                 window=window), dense(d, hidden[i]), around)
              for i, window in enumerate(windows(k, n))]
    extra = [Weight("embedding", (k.integer("vocab_size_per_layer_input"), n * inputs), "table"), *norm(inputs)]
    extra += matrix("other", n * inputs, d) + matrix("other", d, d) * (2 * (streams - 1))
    return decoder(k, "gemma3n", d, layers, tied=True, extra=tuple(extra))


@family("diffusion_gemma", "diffusion_gemma_text")
def diffusion_gemma(k: Keys) -> Architecture:
    """DiffusionGemma: Gemma 4 with experts whose encoder and decoder are the same weights, and one more FFN that feeds
    the last prediction back."""
    fixed = {"enable_moe_block": True, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
    name, nested = k.text("model_type"), k.has("text_config")
    inner = k.inside("text_config") if nested else k
    own = {**inner.data, **fixed}
    k.data = {**k.data, "text_config": own} if nested else own
    model = gemma4(k)
    more = dense(model.d_model, inner.integer("intermediate_size")) + norm(model.d_model)
    return replace(model, family=name, outer=(*model.outer, *more))


@family("embedding_gemma2_text")
def embedding_gemma(k: Keys) -> Architecture:
    """EmbeddingGemma 2: Gemma 4's encoder, its inputs for each layer a projection alone; no head."""
    d, n = width_and_depth(k)
    heads, inputs = k.integer("num_attention_heads"), k.integer("hidden_size_per_layer_input")
    bias, ffn = attention_bias(k), dense(d, k.integer("intermediate_size"))
    more = matrix("other", inputs, d) + matrix("other", d, inputs)
    layers = []
    for i, window in enumerate(windows(k, n)):
        own = k.layer(i)
        mixed = gqa(d, heads, own.integer("num_key_value_heads"), own.integer("head_dim"), bias=bias, qk_norm="head",
                    window=window)
        layers.append(block("dense", mixed, ffn + more, norm(d, copies=5)))
    outer = matrix("other", n * inputs, d) + norm(inputs) + matrix("other", k.integer("embedding_dim"), d)
    return decoder(k, "embedding_gemma2", d, layers, tied=True, head=False, extra=tuple(outer))


@family("t5gemma2_text", "t5gemma2_encoder", "t5gemma2_decoder")
def t5gemma2_part(k: Keys) -> Architecture:
    """One side of a T5Gemma 2: Gemma 3 without a head, and a vector for the token that ends an image."""
    name = k.text("model_type")
    if name != "t5gemma2_encoder":
        k.data = {**k.data, "model_type": "gemma3_text", "tie_word_embeddings": True}
    model = gemma3(k) if name == "t5gemma2_encoder" else plain(k)
    return replace(model, family=name, outer=(*model.outer, Weight("embedding", (model.d_model,), "filter")))


@family("t5gemma2")
def t5gemma2(k: Keys) -> Architecture:
    """T5Gemma 2: Gemma 3 with its image tower as the encoder, and a decoder whose one attention looks at both; one
    table for both and the head."""
    if not k.tied(True):
        raise ValueError("config.tie_word_embeddings: a T5Gemma 2 with tables of its own has no weight table")
    encoder, inner = gemma3(k.inside("encoder")), k.inside("decoder")
    inner.data = {**inner.data, "model_type": "gemma3_text"}
    stack = plain(inner)
    if stack.d_model != encoder.d_model:
        raise ValueError(f"config.decoder.hidden_size: expected {encoder.d_model} as in the encoder")
    extra = (*norm(stack.d_model), Weight("embedding", (stack.d_model,), "filter"))  # of the token that ends an image
    return replace(encoder, family="t5gemma2", layers=encoder.layers + stack.layers, outer=(*encoder.outer, *extra),
                   assumed=tuple(sorted(k.assumed.items())))
