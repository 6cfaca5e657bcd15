"""Text encoders, and decoders, whose layers or embeddings are built in a way of their own."""

from __future__ import annotations

from .families import attention_bias, block, decoder, family, heads_of, width_and_depth
from .ffns import dense
from .mixers import Mixed, gqa
from .reader import Keys
from .weights import Architecture, Layer, Mixer, Weight, matrix, norm


def _table(rows: int, width: int) -> Weight:
    return Weight("embedding", (rows, width), "table")


def _filter(part: str, *shape: int) -> Weight:
    return Weight(part, shape, "filter")


def bert_layer(k: Keys, d: int) -> Layer:
    """BERT's: attention and FFN with biases, each with a norm."""
    heads = k.integer("num_attention_heads")
    mixed = gqa(d, heads, heads, k.divide("head_dim", d, heads), bias="qkvo")
    return block("dense", mixed, dense(d, k.integer("intermediate_size"), gated=False, bias=True), norm(d, True, 2))


def base(k: Keys, name: str, d: int, layers: list[Layer], outer: list[Weight], vocab: int) -> Architecture:
    """An encoder without a head."""
    return Architecture(name, d, vocab, tuple(layers), tuple(outer), True,
                        assumed=tuple(sorted(k.assumed.items())), excluded=tuple(k.excluded))


@family("canine")
def canine(k: Keys) -> Architecture:
    """CANINE: hashed characters, one layer over them before and after the deep stack over pooled ones."""
    d, n = width_and_depth(k)
    hashes, buckets = k.integer("num_hash_functions"), k.integer("num_hash_buckets")
    outer = [_table(buckets, k.divide("hash_width", d, hashes))] * hashes
    outer += [_table(k.integer("max_position_embeddings"), d), _table(k.integer("type_vocab_size"), d)]
    for wide, taps in ((d, "downsampling_rate"), (2 * d, "upsampling_kernel_size")):
        outer += [_filter("other", d, wide, k.integer(taps)), Weight("other", (d,), "bias")]
    outer += norm(d, True, 3) + matrix("other", d, d, True)
    return base(k, "canine", d, [bert_layer(k, d)] * (n + 2), outer, buckets)


@family("esm")
def esm(k: Keys) -> Architecture:
    """ESM-2: positions by rotation unless a table is asked for, and a regression of contacts on all attentions."""
    d, n = width_and_depth(k)
    if k.flag("is_folding_model", absent=False):
        raise ValueError("config.is_folding_model: ESMFold has no weight table")
    vocab = k.integer("vocab_size")
    outer = [_table(vocab, d)]
    if k.text("position_embedding_type", absent="absolute") == "absolute":
        outer.append(_table(k.integer("max_position_embeddings"), d))
    outer += norm(d, True, 1 + k.flag("emb_layer_norm_before", absent=False)) + matrix("other", d, d, True)
    outer += matrix("other", 1, n * k.integer("num_attention_heads"), True)
    return base(k, "esm", d, [bert_layer(k, d)] * n, outer, vocab)


@family("mobilebert")
def mobilebert(k: Keys) -> Architecture:
    """MobileBERT: each layer works on narrower states, between two projections, with several FFNs in a row."""
    d, n, heads = k.integer("hidden_size"), k.integer("num_hidden_layers"), k.integer("num_attention_heads")
    if not k.flag("use_bottleneck"):
        raise ValueError("config.use_bottleneck: a MobileBERT without bottlenecks has no weight table")
    t, narrow = k.integer("intra_bottleneck_size"), k.integer("embedding_size")
    wide = t if k.flag("use_bottleneck_attention") else d
    head = k.divide("head_dim", t, heads)
    found = matrix("attention", t, t, True) * 3 + matrix("attention", t, wide, True)
    ffns = k.integer("num_feedforward_networks")
    ffn = dense(t, k.integer("intermediate_size"), gated=False, bias=True) * ffns
    shared = k.flag("key_query_shared_bottleneck")
    ways = matrix("other", t, d, True) * (1 + shared) + matrix("other", d, t, True)
    norms = norm(t, True, 1 + ffns + 1 + shared) + norm(d, True)
    layer = block("dense", (found, Mixer(heads, head, head, None, 2 * t)), ffn + ways, norms)
    vocab, trigram = k.integer("vocab_size"), k.flag("trigram_input")
    outer = [_table(vocab, narrow), _table(k.integer("max_position_embeddings"), d),
             _table(k.integer("type_vocab_size"), d), *matrix("other", d, narrow * (3 if trigram else 1), True)]
    outer += norm(d, True) + matrix("other", d, d, True) * k.flag("classifier_activation", absent=True)
    return base(k, "mobilebert", d, [layer] * n, outer, vocab)


@family("neomme")
def neomme(k: Keys) -> Architecture:
    """NeoMME: a factored table, a second one that adds to the values, image patches beside the tokens."""
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    bias = attention_bias(k)
    found, mixer = gqa(d, heads, kv, width, bias=bias, gate="channels")
    ffn = dense(d, k.integer("intermediate_size"), gated=False, bias=k.flag("mlp_bias", absent=False))
    layer = block("dense", ([*found, _filter("attention", heads)], mixer), ffn, [_filter("other", 2)])
    vocab, rank, pixels = k.integer("vocab_size"), k.integer("embedding_rank"), 3 * k.integer("patch_size") ** 2
    outer = [_table(vocab, rank), *matrix("embedding", d, rank), _table(vocab, kv * width)]
    outer += norm(pixels, True) + matrix("other", 2 * d, pixels) + matrix("other", d, 2 * d, True)
    return base(k, "neomme", d, [layer] * n, outer, vocab)


@family("perceiver")
def perceiver(k: Keys) -> Architecture:
    """Perceiver's encoder: latents look at the input once, then at each other; inputs' own embeddings are excluded."""
    d, wide, block_layers = k.integer("d_latents"), k.integer("d_model"), k.integer("num_self_attends_per_block")
    shape = k.text("cross_attention_shape_for_attention")
    if shape not in ("q", "kv"):
        raise ValueError(f"config.cross_attention_shape_for_attention: expected q or kv, got {shape!r}")

    def layer(keys: int, usual: int, name: str, norms: list[Weight]) -> Layer:
        qk = k.integer("qk_channels", absent=usual)
        v, heads = k.integer("v_channels", absent=qk), k.integer(f"num_{name}_heads")
        found = matrix("attention", qk, d, True) + matrix("attention", qk, keys, True)
        found += matrix("attention", v, keys, True) + matrix("attention", d, v, True)
        mixer = Mixer(heads, qk // heads, v // heads, None, qk + v)
        factor = k.integer(f"{name}_widening_factor")
        return block("dense", (found, mixer), dense(d, factor * d, gated=False, bias=True), norms + norm(d, True, 2))

    cross = layer(wide, d if shape == "q" else wide, "cross_attention", norm(wide, True))
    inner = layer(d, d, "self_attention", []).repeated(k.integer("num_blocks"), [])
    outer = [Weight("other", (k.integer("num_latents"), d), "table")]
    return base(k, "perceiver", d, [cross, *[inner] * block_layers], outer, k.integer("vocab_size", absent=1))


@family("reformer")
def reformer(k: Keys) -> Architecture:
    """Reformer: hashed attention shares queries and keys; two residual streams, so that the head is twice as wide."""
    d, heads, width = k.integer("hidden_size"), k.integer("num_attention_heads"), k.integer("attention_head_size")
    kinds = k.words("attn_layers", layers=len(k.data.get("attn_layers") or ()), among=("local", "lsh"))
    inner = heads * width
    ffn = dense(d, k.integer("feed_forward_size"), gated=False, bias=True)
    layers = []
    for kind in kinds:
        found = matrix("attention", inner, d) * (2 if kind == "lsh" else 3) + matrix("attention", d, inner)
        layers.append(block("dense", (found, Mixer(heads, width, width, None, 2 * inner)), ffn, norm(d, True, 2)))
    vocab = k.integer("vocab_size")
    outer = [_table(vocab, d)]
    if k.flag("axial_pos_embds"):
        shape, widths = (k.indices(f"axial_pos_{key}", required=True) for key in ("shape", "embds_dim"))
        outer += [_table(rows, each) for rows, each in zip(shape, widths, strict=True)]
    else:
        outer.append(_table(k.integer("max_position_embeddings"), d))
    outer += norm(2 * d, True) + matrix("head", vocab, 2 * d, True) + [Weight("head", (vocab,), "bias")]
    return Architecture("reformer", d, vocab, tuple(layers), tuple(outer), False,
                        assumed=tuple(sorted(k.assumed.items())))


@family("funnel")
def funnel(k: Keys) -> Architecture:
    """Funnel: blocks of layers over fewer and fewer positions and a decoder back to all; XLNet's attention."""
    d, heads, width = k.integer("d_model"), k.integer("n_head"), k.integer("d_head")
    inner = heads * width
    found, mixer = gqa(d, heads, heads, width, bias="kvo")
    found += matrix("attention", inner, d) + [_filter("attention", heads, width)] * 3
    found.append(_filter("attention", 2, heads, width))
    layer = block("dense", (found, mixer), dense(d, k.integer("d_inner"), gated=False, bias=True), norm(d, True, 2))
    sizes = k.indices("block_sizes", required=True)
    repeats = k.indices("block_repeats", required=True)
    layers = [layer.repeated(times, []) for size, times in zip(sizes, repeats, strict=True) for _ in range(size)]
    layers += [layer] * k.integer("num_decoder_layers", minimum=0)
    vocab = k.integer("vocab_size")
    return base(k, "funnel", d, layers, [_table(vocab, d), *norm(d, True)], vocab)


@family("chameleon")
def chameleon(k: Keys) -> Architecture:
    """Chameleon's language model, which sees images as tokens: norms with biases for each head's queries and keys."""
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    mixed: Mixed = gqa(d, heads, kv, width, bias=attention_bias(k))
    mixed[0].extend(norm(heads * width, True) + norm(kv * width, True))
    ffn = dense(d, k.integer("intermediate_size"), bias=k.flag("mlp_bias", absent=False))
    k.excluded.extend(key for key in ("vq_config",) if k.has(key))
    return decoder(k, "chameleon", d, [block("dense", mixed, ffn, norm(d, copies=2))] * n, tied=False)


@family("lilt")
def lilt(k: Keys) -> Architecture:
    """LiLT: beside BERT's stream of text a narrow one of places on a page, in each layer."""
    d, n, heads = k.integer("hidden_size"), k.integer("num_hidden_layers"), k.integer("num_attention_heads")
    ratio = k.integer("channel_shrink_ratio")
    low, hidden = k.divide("channel_shrink_ratio", d, ratio), k.integer("intermediate_size")
    text, (found, mixer) = bert_layer(k, d), gqa(low, heads, heads, k.divide("head_dim", low, heads), bias="qkvo")
    places = dense(low, k.divide("channel_shrink_ratio", hidden, ratio), gated=False, bias=True) + norm(low, True, 2)
    layer = Layer("dense", (*text.weights, *found, *places), (*text.mixers, mixer))
    vocab, positions = k.integer("vocab_size"), k.integer("max_position_embeddings")
    outer = [_table(vocab, d), _table(positions, d), _table(k.integer("type_vocab_size"), d), _table(positions, low)]
    outer += [_table(k.integer("max_2d_position_embeddings"), k.divide("box_width", d, 6))] * 4
    outer += matrix("other", low, d, True) + norm(d, True) + norm(low, True) + matrix("other", d, d, True)
    return base(k, "lilt", d, [layer] * n, outer, vocab)


@family("layoutlmv3")
def layoutlmv3(k: Keys) -> Architecture:
    """LayoutLMv3: text, places and image patches in one stack, with biases of relative places."""
    d, n, heads = k.integer("hidden_size"), k.integer("num_hidden_layers"), k.integer("num_attention_heads")
    vocab = k.integer("vocab_size")
    outer = norm(d, True)
    if k.flag("text_embed", absent=True):
        outer += [_table(vocab, d), _table(k.integer("type_vocab_size"), d), *norm(d, True)]
        outer.append(_table(k.integer("max_position_embeddings"), d))
        outer += [_table(k.integer("max_2d_position_embeddings"), k.integer(key))
                  for key in ("coordinate_size", "shape_size") for _ in range(2)]
    if k.flag("visual_embed", absent=True):
        patch = k.integer("patch_size")
        outer += matrix("other", d, k.integer("num_channels") * patch**2, True)
        outer += [_table((k.integer("input_size") // patch) ** 2 + 1, d), _filter("other", d), *norm(d, True)]
    if k.flag("has_relative_attention_bias", absent=True):
        outer.append(_filter("attention", heads, k.integer("rel_pos_bins")))
    if k.flag("has_spatial_attention_bias", absent=True):
        outer += [_filter("attention", heads, k.integer("rel_2d_pos_bins"))] * 2
    return base(k, "layoutlmv3", d, [bert_layer(k, d)] * n, outer, vocab)


CAPTIONS = ("clip_text_model", "clipseg_text_model", "metaclip_2_text_model", "xclip_text_model", "owlvit_text_model",
            "owlv2_text_model", "groupvit_text_model", "siglip_text_model", "siglip2_text_model", "tipsv2_text_model",
            "videoprism_text_model")


@family(*CAPTIONS)
def captions(k: Keys) -> Architecture:
    """The text side of CLIP and its like; SigLIP's ends in a projection."""
    name = k.text("model_type")
    d, n = width_and_depth(k)
    vocab = k.integer("vocab_size")
    outer = [_table(vocab, d), *norm(d, True)]
    if name == "videoprism_text_model":
        if not k.flag("qkv_bias"):
            raise ValueError(f"{k.where}.qkv_bias: expected true, for which there is a weight table")
        outer.append(_filter("other", d))
    elif name != "tipsv2_text_model":
        outer.append(_table(k.integer("max_position_embeddings"), d))
    if name.startswith("siglip"):
        outer += matrix("other", k.integer("projection_size", absent=d), d, True)
    return base(k, name, d, [bert_layer(k, d)] * n, outer, vocab)
