"""Encoders of text and images in one stack or side by side, and the queries that carry images to a language model."""

from __future__ import annotations

from dataclasses import replace

from .families import family
from .families_encoders import encoder
from .families_senses import as_vision
from .families_text import bert_layer, captions
from .ffns import dense
from .mixers import gqa
from .reader import Keys
from .stacks import conv, layer, looking, table, vector, whole
from .weights import Architecture, Layer, Weight, matrix, norm


def _words(k: Keys, d: int) -> list[Weight]:
    """BERT's embeddings of tokens, positions and types, with a norm."""
    rows = (k.integer(key) for key in ("vocab_size", "max_position_embeddings", "type_vocab_size"))
    return [*(table(count, d) for count in rows), *norm(d, True)]


def _seen(k: Keys, d: int) -> list[Weight]:
    """Patches of an image, their positions and a token before them."""
    patch = k.integer("patch_size")
    found = matrix("other", d, k.integer("num_channels") * patch**2, True)
    return [*found, table((k.integer("image_size") // patch) ** 2 + 1, d), vector(d)]


def _stack(k: Keys, d: int) -> list[Layer]:
    own = layer(k, d, k.integer("num_attention_heads"), k.integer("intermediate_size"),
                bias="qkv" * k.flag("qkv_bias") + "o")
    return [own] * k.integer("num_hidden_layers")


def _end(d: int) -> list[Weight]:
    """The last norm and a pooler."""
    return norm(d, True) + matrix("other", d, d, True)


@family("lxmert")
def lxmert(k: Keys) -> Architecture:
    """LXMERT: BERT's layers over text and over regions of an image, then layers where each attends to the other, by
    weights both share."""
    d, heads = k.integer("hidden_size"), k.integer("num_attention_heads")
    own = bert_layer(k, d)
    found, mixer = gqa(d, heads, heads, k.divide("head_dim", d, heads), bias="qkvo")
    crossed = Layer("dense", (*own.weights * 2, *found, *norm(d, True)), (*own.mixers * 2, mixer, mixer))
    layers = [own] * (k.integer("l_layers") + k.integer("r_layers")) + [crossed] * k.integer("x_layers")
    outer = _words(k, d) + matrix("other", d, d, True)
    for key in ("visual_feat_dim", "visual_pos_dim"):
        outer += matrix("other", d, k.integer(key), True) + norm(d, True)
    return whole(k, d, k.integer("vocab_size"), layers, outer)


@family("vilt")
def vilt(k: Keys) -> Architecture:
    """ViLT: words and patches of an image in one stack."""
    d = k.integer("hidden_size")
    outer = [*_words(k, d), *_seen(k, d), table(k.integer("modality_type_vocab_size"), d), *_end(d)]
    return whole(k, d, k.integer("vocab_size"), _stack(k, d), outer)


@family("flava_text_model", "flava_image_model", "flava_multimodal_model")
def flava_part(k: Keys) -> Architecture:
    """One of FLAVA's three encoders: of text, of an image, of both one's states."""
    d, name = k.integer("hidden_size"), k.text("model_type")
    if name == "flava_text_model":
        outer = _words(k, d)
    elif name == "flava_image_model":
        outer = _seen(k, d) + [vector(d)] * k.flag("mask_token")
    else:
        outer = [vector(d)] * k.flag("use_cls_token")
    return whole(k, d, k.integer("vocab_size", absent=1), _stack(k, d), [*outer, *_end(d)])


@family("flava")
def flava(k: Keys) -> Architecture:
    """FLAVA: the three encoders and projections between; all but the text's count as vision."""
    text, image, both = (flava_part(k.inside(f"{key}_config")) for key in ("text", "image", "multimodal"))
    width = k.integer("projection_dim")
    outer = [vector(1), *matrix("other", width, image.d_model, True), *matrix("other", width, text.d_model, True)]
    outer += matrix("other", both.d_model, image.d_model, True) + matrix("other", both.d_model, text.d_model, True)
    layers = [replace(one, weights=as_vision(one.weights)) for one in image.layers + both.layers]
    return whole(k, text.d_model, text.vocab, [*text.layers, *layers],
                 [*text.outer, *as_vision([*image.outer, *both.outer, *outer])])


@family("aimv2_text_model", "aimv2_vision_model")
def aimv2(k: Keys) -> Architecture:
    """AIMv2's sides: gated FFNs, norms without biases; an image's states may be pooled by an attention."""
    d, bias = k.integer("hidden_size"), k.flag("qkv_bias")
    own = layer(k, d, k.integer("num_attention_heads"), k.integer("intermediate_size"), bias="qkvo" * bias, gated=True,
                ffn_bias=k.flag("mlp_bias"), norm_bias=False)
    layers, outer = [own] * k.integer("num_hidden_layers"), norm(d)
    if k.text("model_type") == "aimv2_text_model":
        vocab = k.integer("vocab_size")
        return whole(k, d, vocab, layers, [*outer, table(vocab, d), table(k.integer("max_position_embeddings"), d)])
    patch = k.integer("patch_size")
    outer += matrix("other", d, k.integer("num_channels") * patch**2, True) + norm(d)
    if not k.flag("is_native"):
        outer.append(table((k.integer("image_size") // patch) ** 2, d))
    if k.flag("use_head"):
        outer += [vector(d), *matrix("other", d, d, bias) * 2, *matrix("other", d, d, True)]
    return whole(k, d, 1, layers, outer)


@family("timesformer")
def timesformer(k: Keys) -> Architecture:
    """TimeSformer: attention over time and over space in each layer, or over one of them, or both at once."""
    d, heads = k.integer("hidden_size"), k.integer("num_attention_heads")
    kind, bias = k.text("attention_type"), "qkv" * k.flag("qkv_bias") + "o"
    twice = gqa(d, heads, heads, k.divide("head_dim", d, heads), bias=bias) if kind == "divided_space_time" else None
    own = layer(k, d, heads, k.integer("intermediate_size"), bias=bias, looks=twice,
                more=matrix("attention", d, d, True) if twice else [])
    outer = _seen(k, d) + norm(d, True) + [table(k.integer("num_frames"), d)] * (kind != "space_only")
    return whole(k, d, 1, [own] * k.integer("num_hidden_layers"), outer)


@family("bridgetower")
def bridgetower(k: Keys) -> Architecture:
    """BridgeTower: RoBERTa and a vision transformer, and layers in which text and image attend to each other, linked to
    the towers' last layers by sums and norms."""
    t, v = k.inside("text_config"), k.inside("vision_config")
    d, n, heads = k.integer("hidden_size"), k.integer("num_hidden_layers"), k.integer("num_attention_heads")
    text, wide = encoder(t), v.integer("hidden_size")
    if (k.text("link_tower_type") != "add" or k.flag("share_link_tower_layers") or v.flag("remove_last_layer")
            or not (k.flag("share_cross_modal_transformer_layers") and v.flag("share_layernorm"))):
        raise ValueError(f"{k.where}.link_tower_type: only added links, shared transforms and norms have a table")
    seen = layer(v, wide, wide // 64, 4 * wide)  # heads of 64, as CLIP's
    own = layer(k, d, heads, 4 * d, looks=gqa(d, heads, heads, k.divide("head_dim", d, heads), bias="qkvo"))
    patch = v.integer("patch_size")
    outer = [*matrix("other", wide, v.integer("num_channels") * patch**2), vector(wide), *norm(wide, True, 2)]
    outer.append(table((v.integer("image_size") // patch) ** 2 + 1, wide))
    layers = [replace(one, weights=as_vision(one.weights)) for one in [seen] * v.integer("num_hidden_layers")]
    more = matrix("other", d, text.d_model, True) + matrix("other", d, wide, True) + [table(2, d)]
    more += matrix("other", d, d, True) * 2 + norm(d, True) * (2 + 2 * (n - 1))
    crossed = [replace(own, weights=as_vision(own.weights))] * (2 * n)
    return whole(k, text.d_model, text.vocab, [*text.layers, *layers, *crossed],
                 [*text.outer, *as_vision([*outer, *more])])


@family("blip_2_qformer", "instructblip_qformer", "instructblipvideo_qformer")
def queries(k: Keys) -> Architecture:
    """A Q-Former: learned queries that in every few layers attend to an image, with FFNs of their own beside those of
    the text."""
    d, heads, hidden = k.integer("hidden_size"), k.integer("num_attention_heads"), k.integer("intermediate_size")
    texts = k.text("model_type").startswith("instruct") or k.flag("use_qformer_text_input")
    more = dense(d, hidden, gated=False, bias=True) + norm(d, True) if texts else []
    looks = looking(d, k.integer("encoder_hidden_size"), heads, heads, k.divide("head_dim", d, heads), "qkvo")
    every = k.integer("cross_attention_frequency")
    layers = [layer(k, d, heads, hidden, looks=None if i % every else looks, more=more)
              for i in range(k.integer("num_hidden_layers"))]
    outer = norm(d, True)
    if k.text("model_type").startswith("instruct"):
        outer += [table(k.integer("vocab_size"), d), table(k.integer("max_position_embeddings"), d)]
    return whole(k, d, k.integer("vocab_size"), layers, outer)


@family("clvp_encoder")
def clvp_encoder(k: Keys) -> Architecture:
    """CLVP's encoder, of text or of speech: gated FFNs, a projection of the summary."""
    d = k.integer("hidden_size")
    bias = "qkv" * k.flag("use_attention_bias") + "o"
    own = layer(k, d, k.integer("num_attention_heads"), k.integer("intermediate_size"), bias=bias, gated=True,
                norm_bias=False)
    outer = [table(k.integer("vocab_size"), d), *norm(d, True), *matrix("other", k.integer("projection_dim"), d)]
    return whole(k, d, k.integer("vocab_size"), [own] * k.integer("num_hidden_layers"), outer)


def _clvp_heads(k: Keys) -> tuple[int, int, str]:
    return k.integer("hidden_size"), k.integer("num_attention_heads"), "qkv" * k.flag("use_attention_bias") + "o"


@family("clvp_decoder")
def clvp_decoder(k: Keys) -> Architecture:
    """CLVP's decoder of speech codes."""
    d, heads, bias = _clvp_heads(k)
    own = layer(k, d, heads, k.integer("n_inner", absent=4 * d), bias=bias)
    vocab = k.integer("vocab_size")
    outer = [table(vocab, d), table(k.integer("max_position_embeddings"), d), *norm(d, True) * 2]
    return whole(k, d, vocab, [own] * k.integer("num_hidden_layers"), outer + matrix("head", vocab, d, True), False)


@family("clvp")
def clvp(k: Keys) -> Architecture:
    """CLVP: a decoder of speech codes behind text and a voice, and two encoders that rank what it says."""
    text, speech, last = (k.inside(f"{key}_config") for key in ("text", "speech", "decoder"))
    parts = [clvp_decoder(last), clvp_encoder(text), clvp_encoder(speech)]
    d, heads, bias = _clvp_heads(last)
    outer = [table(text.integer("vocab_size"), d), table(last.integer("max_text_tokens"), d), vector(1)]
    outer += conv(d, last.integer("feature_size"), 1)
    mixed = gqa(d, heads, heads, last.divide("head_dim", d, heads), bias=bias)
    blocks = [Layer("dense", (*mixed[0], *norm(d, True)), (mixed[1],))] * last.integer("num_mel_attn_blocks")
    layers = [*blocks, *(one for part in parts for one in part.layers)]
    return whole(k, d, parts[0].vocab, layers, [*outer, *(w for part in parts for w in part.outer)], False)


def _four(d: int, heads: int) -> list[Weight]:
    """An attention of four matrices with biases."""
    return gqa(d, heads, heads, d // heads, bias="qkvo")[0]


@family("xclip_vision_model")
def xclip_vision(k: Keys) -> Architecture:
    """X-CLIP's tower: CLIP's, with a message between frames in each layer."""
    d, heads, patch = k.integer("hidden_size"), k.integer("num_attention_heads"), k.integer("patch_size")
    more = _four(d, heads) + matrix("attention", d, d, True)
    own = layer(k, d, heads, k.integer("intermediate_size"), norms=3, more=more)
    outer = [*matrix("other", d, k.integer("num_channels") * patch**2), vector(d), *norm(d, True, 2)]
    outer.append(table((k.integer("image_size") // patch) ** 2 + 1, d))
    return whole(k, d, 1, [own] * k.integer("num_hidden_layers"), outer)


@family("xclip")
def xclip(k: Keys) -> Architecture:
    """X-CLIP: CLIP for videos, a small transformer over frames, prompts made of text and video. All but the text's
    counts as vision."""
    t, v, low = k.inside("text_config"), k.inside("vision_config"), k.integer("projection_dim")
    text, seen = captions(t), xclip_vision(v)
    d, mid, heads = seen.d_model, v.integer("mit_hidden_size"), v.integer("mit_num_attention_heads")
    outer = [*seen.outer, vector(1), *matrix("other", low, d), *matrix("other", low, text.d_model)]
    outer += [*norm(d, True), *matrix("other", low, d), table(v.integer("num_frames"), mid), *norm(low, True)]
    outer.append(vector(low))
    frames = layer(v, mid, heads, v.integer("mit_intermediate_size"))
    prompts = matrix("attention", low, low) * 3 + matrix("attention", low, low, True) + norm(low, True, 2)
    prompts += dense(low, 4 * low, gated=False, bias=True)
    layers = [*seen.layers, *[frames] * v.integer("mit_num_hidden_layers")]
    layers += [Layer("dense", tuple(prompts))] * k.integer("prompt_layers")
    return whole(k, text.d_model, text.vocab,
                 [*text.layers, *(replace(one, weights=as_vision(one.weights)) for one in layers)],
                 [*text.outer, *as_vision(outer)])
