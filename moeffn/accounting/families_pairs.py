"""An encoder and a decoder that attends to it, of one family or of two."""

from __future__ import annotations

from dataclasses import replace

from .families import attention_bias, block, built, decoder, family, heads_of
from .families_classic import classic
from .families_encoders import ENCODERS, encoder
from .families_senses import as_vision
from .families_seq2seq import bart
from .families_text import bert_layer
from .ffns import dense
from .mixers import gqa
from .reader import Keys
from .stacks import table, whole
from .weights import Architecture, Layer, Weight, matrix, norm

WITH_TRANSFORM = ("bert", "roberta", "camembert", "xlm-roberta")  # a projection and a norm before the head
DECODERS = (*WITH_TRANSFORM, "bert-generation", "gpt2", "trocr", "bart", "mbart")


@family("encoder-decoder", "vision-encoder-decoder", "speech-encoder-decoder")
def pair(k: Keys) -> Architecture:
    """Two models of other families: `encoder`, and `decoder` with attention to the encoder's states."""
    first, second = (Keys(k.inside(key).data, f"config.{key}") for key in ("encoder", "decoder"))
    name = second.text("model_type")
    if name not in DECODERS:
        raise ValueError(f"config.decoder.model_type: no weight table for {name!r} as a decoder of a pair "
                         f"(there is one for {', '.join(DECODERS)})")
    seen, said = built(first), _decodes(second, name)
    outer = (*seen.outer, *said.outer)
    if seen.d_model != said.d_model and not second.has("cross_attention_hidden_size"):
        outer += tuple(matrix("other", said.d_model, seen.d_model, True))
    return replace(said, family=k.text("model_type"), layers=seen.layers + said.layers, outer=outer,
                   assumed=tuple(sorted({**dict(seen.assumed), **dict(said.assumed)}.items())),
                   excluded=seen.excluded + said.excluded)


def _decodes(k: Keys, name: str) -> Architecture:
    if name == "trocr":
        return classic(k)
    if name in ("bart", "mbart"):
        return bart(k, stacks=("decoder",))
    model = classic(k) if name == "gpt2" else encoder(k, decodes=True)
    d = model.d_model
    heads = k.integer("num_attention_heads", "n_head")
    again, mixer = gqa(d, heads, heads, k.divide("head_dim", d, heads), bias="qkvo")
    layers = tuple(Layer("dense", (*layer.weights, *again, *norm(d, True)), (*layer.mixers, mixer))
                   for layer in model.layers)
    outer = list(model.outer)
    if name in ENCODERS:
        outer.append(Weight("head", (model.vocab,), "bias"))
    if name in WITH_TRANSFORM:
        outer += matrix("other", d, d, True) + norm(d, True)
    return replace(model, layers=layers, outer=tuple(outer))


@family("fsmt")
def fsmt(k: Keys) -> Architecture:
    """FSMT: a vocabulary for each side, sinusoidal positions that are parameters, norms behind every sublayer."""
    d = k.integer("d_model")
    layers, extra = [], [Weight("embedding", (k.integer("src_vocab_size"), d), "table")]
    for stack in ("encoder", "decoder"):
        n, heads = k.integer(f"{stack}_layers"), k.integer(f"{stack}_attention_heads")
        found, mixer = gqa(d, heads, heads, k.divide("head_dim", d, heads), bias="qkvo")
        times = 2 if stack == "decoder" else 1
        ffn = dense(d, k.integer(f"{stack}_ffn_dim"), gated=False, bias=True)
        layers += [Layer("dense", (*found * times, *ffn, *norm(d, True, 1 + times)), (mixer,) * times)] * n
        rows = k.integer("max_position_embeddings") + k.integer("pad_token_id", minimum=0) + 1
        extra.append(Weight("embedding", (rows, d), "table"))
    k.data = {**k.data, "vocab_size": k.integer("tgt_vocab_size")}
    return decoder(k, "fsmt", d, layers, tied=False, final_norm=False, extra=tuple(extra))


@family("blip", "blip_text_model")
def blip(k: Keys) -> Architecture:
    """BLIP's captioner: BERT's layers as a decoder that attends to the image encoder, which is excluded."""
    if k.text("model_type") == "blip_text_model" and not k.flag("is_decoder", absent=True):
        raise ValueError(f"{k.where}.is_decoder: expected true, for which there is a weight table")
    if k.text("model_type") == "blip":
        k.excluded.append("vision_config")
        k = k.inside("text_config")
    d, heads = k.integer("hidden_size"), k.integer("num_attention_heads")
    wide, head = k.integer("encoder_hidden_size"), k.divide("head_dim", d, heads)
    layer = bert_layer(k, d)
    crossed = matrix("attention", d, d, True) * 2 + matrix("attention", d, wide, True) * 2 + norm(d, True)
    mixers = (*layer.mixers, gqa(d, heads, heads, head)[1])
    layers = [Layer("dense", (*layer.weights, *crossed), mixers)] * k.integer("num_hidden_layers")
    extra = [Weight("embedding", (k.integer("max_position_embeddings"), d), "table"), *norm(d, True, 2)]
    extra += matrix("other", d, d, True)
    return decoder(k, "blip", d, layers, tied=True, final_norm=False, head_bias=True, extra=tuple(extra))


@family("pix2struct_vision_model", "kosmos_2_5_vision_model")
def pix2struct_encoder(k: Keys) -> Architecture:
    """Pix2Struct's encoder of image patches, with tables of their rows and columns."""
    d, heads = k.integer("hidden_size"), k.integer("num_attention_heads")
    own = block("dense", gqa(d, heads, heads, k.integer("d_kv", "head_dim")),
                dense(d, k.integer("d_ff", "intermediate_size")), norm(d, copies=2))
    places = [table(k.integer("seq_len", "max_num_patches"), d)] * 2
    outer = matrix("other", d, k.integer("patch_embed_hidden_size"), True) + norm(d)
    return whole(k, d, 1, [own] * k.integer("num_hidden_layers"), [*outer, *places])


@family("pix2struct_text_model")
def pix2struct_decoder(k: Keys) -> Architecture:
    """Pix2Struct's decoder: T5's, with an untied head."""
    d, heads = k.integer("hidden_size"), k.integer("num_heads")
    found, mixer = gqa(d, heads, heads, k.divide("head_dim", d, heads))
    own = Layer("dense", tuple(found * 2 + dense(d, k.integer("d_ff")) + norm(d, copies=3)), (mixer,) * 2)
    bias = Weight("attention", (k.integer("relative_attention_num_buckets"), heads), "filter")
    return decoder(k, "pix2struct", d, [own] * k.integer("num_layers"), tied=False, extra=(bias,))


@family("pix2struct")
def pix2struct(k: Keys) -> Architecture:
    """Pix2Struct: a T5 whose encoder reads image patches; the figure holds both."""
    seen, said = pix2struct_encoder(k.inside("vision_config")), pix2struct_decoder(k.inside("text_config"))
    return replace(said, layers=seen.layers + said.layers, outer=(*seen.outer, *said.outer))


@family("rag")
def rag(k: Keys) -> Architecture:
    """RAG: an encoder of questions, and the generator that reads what is found."""
    asked, said = (built(Keys(k.inside(key).data, f"config.{key}")) for key in ("question_encoder", "generator"))
    return replace(said, family="rag", layers=asked.layers + said.layers, outer=(*asked.outer, *said.outer),
                   assumed=tuple(sorted({**dict(asked.assumed), **dict(said.assumed)}.items())))


@family("colpali", "colqwen2", "colmodernvbert")
def retriever(k: Keys) -> Architecture:
    """A vision-language model without its head and a projection of each of its states, which counts as vision."""
    model = built(Keys(k.inside("vlm_config").data, "config.vlm_config"))
    outer = tuple(w for w in model.outer if w.part != "head")
    seen = matrix("vision", k.integer("embedding_dim"), model.d_model, True)
    return replace(model, family=k.text("model_type"), outer=(*outer, *seen), tied=True)


def _feeds(d: int, hidden: int) -> list[Weight]:
    """A norm and two matrices without biases."""
    return [*norm(d, True), *dense(d, hidden, gated=False)]


@family("evolla")
def evolla(k: Keys) -> Architecture:
    """Evolla: an encoder of proteins, queries that gather what it says, and a Llama some of whose layers attend to
    them through gates."""
    p = k.inside("protein_encoder_config")
    wide, d, n = p.integer("hidden_size"), k.integer("hidden_size"), k.integer("num_hidden_layers")
    vocab = p.integer("vocab_size")
    outer = [Weight("embedding", (vocab, wide), "table"), *norm(wide, True, 1 + p.flag("emb_layer_norm_before"))]
    if p.text("position_embedding_type") == "absolute":
        outer.append(Weight("embedding", (p.integer("max_position_embeddings"), wide), "table"))
    inner, depth = k.integer("resampler_dim_head") * k.integer("resampler_heads"), k.integer("resampler_depth")
    found = matrix("attention", inner, wide) * 3 + matrix("attention", wide, inner) + norm(wide, True, 2)
    gathers = Layer("dense", (*found, *_feeds(wide, k.integer("resampler_ff_mult") * wide)))
    outer += [Weight("other", (k.integer("resampler_num_latents"), wide), "filter"), *norm(d, True)]
    outer += matrix("other", d, wide, True)
    heads = k.integer("num_attention_heads")
    own = block("dense", gqa(d, *heads_of(k, d), bias=attention_bias(k)),
                dense(d, k.integer("intermediate_size"), bias=k.flag("mlp_bias", absent=False)), norm(d, copies=2))
    looks, mixer = gqa(d, heads, heads, k.divide("head_dim", d, heads),
                       bias="qkv" + "o" * k.flag("aligner_enable_bias"))
    looks += [*norm(d), *_feeds(d, k.integer("aligner_ffn_mult") * d), *[Weight("other", (1,), "filter")] * 2]
    adapted = Layer("dense", (*own.weights, *looks), (*own.mixers, mixer))
    every = max(n // k.integer("aligner_num_add_layers"), 1)
    layers = [bert_layer(p, wide)] * p.integer("num_hidden_layers") + [gathers] * depth
    layers += [adapted if (i + 1) % every == 0 else own for i in range(n)]
    k.data = {**k.data, "tie_word_embeddings": False}
    return decoder(k, "evolla", d, layers, tied=False, extra=tuple(outer))


@family("pi0")
def pi0(k: Keys) -> Architecture:
    """PI0: a vision-language model and a narrower transformer for actions that shares its attention, both without a
    head; the latter and projections of states, actions and times count as vision."""
    said, acts = (built(Keys(k.inside(key).data, f"config.{key}")) for key in ("vlm_config", "dit_config"))
    outer, more = ([w for w in model.outer if w.part != "head"] for model in (said, acts))
    d = acts.d_model
    for rows, columns in ((d, k.integer("max_state_dim")), (d, k.integer("max_action_dim")),
                          (k.integer("max_action_dim"), d), (d, 2 * d), (d, d)):
        more += matrix("other", rows, columns, True)
    layers = tuple(replace(one, weights=as_vision(one.weights)) for one in acts.layers)
    return replace(said, family="pi0", layers=said.layers + layers, outer=(*outer, *as_vision(more)), tied=True)


@family("jev")
def jev(k: Keys) -> Architecture:
    """JEV: a language model without its head, and a projection to the answers of its questions."""
    model = built(Keys(k.inside("text_config").data, "config.text_config"))
    outer = tuple(w for w in model.outer if w.part != "head")
    return replace(model, family="jev", tied=True, outer=(
        *outer, *matrix("other", k.integer("num_verbalizers"), k.integer("hidden_size"), True)))
