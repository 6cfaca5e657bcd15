"""Models that say, sing or write down what is spoken: decoders of words and of a codec's codes. Codecs are excluded."""

from __future__ import annotations

from itertools import pairwise

from .families import attention_bias, built, family, heads_of, width_and_depth
from .families_senses import wave
from .ffns import dense
from .mixers import gqa
from .reader import Keys
from .stacks import conv, layer, looking, table, vector, whole
from .weights import Architecture, Layer, Mixer, Weight, matrix, norm


def _llama(k: Keys, d: int) -> Layer:
    heads, kv, width = heads_of(k, d)
    return layer(k, d, heads, k.integer("intermediate_size"), kv=kv, width=width, bias=attention_bias(k), gated=True,
                 ffn_bias=k.flag("mlp_bias", absent=False), norm_bias=False)


@family("csm_depth_decoder_model")
def csm_depth(k: Keys) -> Architecture:
    """CSM's decoder of the codes of one frame: each code but the first has a head of its own."""
    d, n = width_and_depth(k)
    wide, vocab, codes = k.integer("backbone_hidden_size"), k.integer("vocab_size"), k.integer("num_codebooks")
    outer = [table(codes * vocab, wide), *matrix("other", d, wide), *norm(d)]
    outer.append(Weight("head", (codes - 1, d, vocab), "matrix"))
    return whole(k, d, vocab, [_llama(k, d)] * n, outer, tied=False)


@family("csm")
def csm(k: Keys) -> Architecture:
    """CSM: a decoder of text and of the first code, with the depth decoder behind it, whose table it may share."""
    d, n = width_and_depth(k)
    deep, vocab = csm_depth(k.inside("depth_decoder_config")), k.integer("vocab_size")
    k.excluded.append("codec_config")
    own = 0 if k.flag("tie_codebooks_embeddings") else 1
    outer = [table(k.integer("text_vocab_size"), d), *[table(k.integer("num_codebooks") * vocab, d)] * own]
    outer += [*norm(d), *matrix("head", vocab, d), *deep.outer]
    return whole(k, d, vocab, (*[_llama(k, d)] * n, *deep.layers), outer, tied=False)


@family("higgs_audio_v2")
def higgs_audio(k: Keys) -> Architecture:
    """Higgs Audio v2: in each layer an FFN and norms for codes of sound alone beside those for text (which are
    active); the head is of codes."""
    d, n = width_and_depth(k)
    codes, vocab = k.integer("num_codebooks") * k.integer("codebook_size"), k.integer("vocab_size")
    plain = _llama(k, d)
    ffn = dense(d, k.integer("intermediate_size"), bias=k.flag("mlp_bias", absent=False), part="vision", copies=1,
                used=0)
    ffn += [Weight("vision", (d,), "norm", 1, 0)] * 2
    outer = [table(vocab, d), table(codes, d), *norm(d), *matrix("head", codes, d)]
    return whole(k, d, vocab, [Layer("dense", (*plain.weights, *ffn), plain.mixers)] * n, outer, tied=False)


@family("dia_encoder")
def dia_encoder(k: Keys) -> Architecture:
    """Dia's encoder of bytes."""
    d, n = width_and_depth(k)
    mixed = k.integer("num_attention_heads"), k.integer("num_key_value_heads"), k.integer("head_dim")
    stack = layer(k, d, mixed[0], k.integer("intermediate_size"), kv=mixed[1], width=mixed[2], bias="", gated=True,
                  ffn_bias=False, norm_bias=False)
    vocab = k.integer("vocab_size")
    return whole(k, d, vocab, [stack] * n, [table(vocab, d), *norm(d)])


@family("dia_decoder")
def dia_decoder(k: Keys) -> Architecture:
    """Dia's decoder of several channels of codes at once, which attends to the encoder's states."""
    d, n = width_and_depth(k)
    heads, kv, width = (k.integer(key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    looks = looking(d, k.integer("cross_hidden_size"), k.integer("cross_num_attention_heads"),
                    k.integer("cross_num_key_value_heads"), k.integer("cross_head_dim"))
    stack = layer(k, d, heads, k.integer("intermediate_size"), kv=kv, width=width, bias="", gated=True,
                  ffn_bias=False, norm_bias=False, looks=looks)
    vocab = k.integer("vocab_size")
    return whole(k, d, vocab, [stack] * n, [table(k.integer("num_channels") * vocab, d), *norm(d)], tied=False)


@family("dia")
def dia(k: Keys) -> Architecture:
    """Dia: the encoder, the decoder and a head for all channels."""
    second = k.inside("decoder_config")
    one, two = dia_encoder(k.inside("encoder_config")), dia_decoder(second)
    head = matrix("head", second.integer("num_channels") * two.vocab, two.d_model)
    return whole(k, two.d_model, two.vocab, one.layers + two.layers, (*one.outer, *two.outer, *head), tied=False)


@family("bark")
def bark(k: Keys) -> Architecture:
    """Bark: three decoders in a row, of words, of coarse and of fine codes; the last has a table for each code."""
    k.excluded.append("codec_config")
    layers: list[Layer] = []
    outer: list[Weight] = []
    for name in ("semantic", "coarse_acoustics", "fine_acoustics"):
        s = k.inside(f"{name}_config")
        d, heads, fine, bias = s.integer("hidden_size"), s.integer("num_heads"), name[0] == "f", s.flag("bias")
        own = layer(s, d, heads, 4 * d, bias="qkvo" * bias, ffn_bias=bias, norm_bias=bias or fine)
        layers += [own] * s.integer("num_layers")
        tables = s.integer("n_codes_total") if fine else 1
        outer += [table(s.integer("input_vocab_size"), d)] * tables + [table(s.integer("block_size"), d)]
        outer += norm(d, bias or fine)
        if not fine or not s.flag("tie_word_embeddings"):
            rows = s.integer("output_vocab_size")
            outer += matrix("head", rows, d) * (tables - s.integer("n_codes_given") if fine else 1)
    return whole(k, d, s.integer("input_vocab_size"), layers, outer, tied=False)


@family("musicgen_decoder", "musicgen_melody_decoder")
def musicgen_decoder(k: Keys) -> Architecture:
    """MusicGen's decoder: a table and a head for each of the codes; the melody's has no attention to the text."""
    d, heads, codes = k.integer("hidden_size"), k.integer("num_attention_heads"), k.integer("num_codebooks")
    looks = gqa(d, heads, heads, k.divide("head_dim", d, heads))
    stack = layer(k, d, heads, k.integer("ffn_dim"), bias="", ffn_bias=False,
                  looks=None if "melody" in k.text("model_type") else looks)
    vocab = k.integer("vocab_size")
    outer = [*[table(vocab + 1, d)] * codes, *norm(d, True), *matrix("head", vocab, d) * codes]
    return whole(k, d, vocab, [stack] * k.integer("num_hidden_layers"), outer, tied=False)


@family("musicgen", "musicgen_melody")
def musicgen(k: Keys) -> Architecture:
    """MusicGen: an encoder of text (T5's), and the decoder of codes."""
    k.excluded.append("audio_encoder")
    t, s = Keys(k.inside("text_encoder").data, "config.text_encoder"), k.inside("decoder")
    text, said = built(t), musicgen_decoder(s)
    d, wide, outer = said.d_model, text.d_model, list(text.outer)
    if t.text("model_type") in ("t5", "mt5", "umt5"):  # its encoder alone
        text_layers = text.layers[:t.integer("num_layers")]
        outer = [text.outer[0], *norm(wide)]
    else:
        text_layers = text.layers
    if wide != d and not s.has("cross_attention_hidden_size"):
        outer += matrix("other", d, wide, True)
    if k.text("model_type") == "musicgen_melody" and k.integer("num_chroma") != d:
        outer += matrix("other", d, k.integer("num_chroma"), True)
    return whole(k, d, said.vocab, text_layers + said.layers, (*outer, *said.outer), tied=False)


def _hears(k: Keys, d: int, heads: int, kv: int, width: int) -> Layer:
    """A layer of Moonshine's decoder: norms without biases, an FFN of fused gate and input."""
    bias, hidden = "qkv" * k.flag("attention_bias"), k.integer("intermediate_size")
    own = layer(k, d, heads, 0, kv=kv, width=width, bias=bias, norm_bias=False,
                looks=gqa(d, heads, kv, width, bias=bias))
    return Layer("dense", (*own.weights, *dense(d, hidden, bias=True)), own.mixers)


@family("moonshine")
def moonshine(k: Keys) -> Architecture:
    """Moonshine: convolutions over the wave, an encoder, a decoder with gated FFNs."""
    d, vocab = k.integer("hidden_size"), k.integer("vocab_size")
    (n, heads, kv), (depth, others, less) = (
        [k.integer(f"{stack}_{key}") for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")]
        for stack in ("encoder", "decoder"))
    width, other = (k.integer("head_dim") if k.has("head_dim") else k.divide("head_dim", d, each)
                    for each in (heads, others))
    first = layer(k, d, heads, k.integer("intermediate_size"), kv=kv, width=width, norm_bias=False,
                  bias="qkv" * k.flag("attention_bias"))
    outer = [*conv(d, 1, 127, bias=False), *conv(2 * d, d, 7), *conv(d, 2 * d, 3), *norm(d, True), *norm(d) * 2]
    tied = k.tied(True)
    outer += [table(vocab, d), *([] if tied else matrix("head", vocab, d))]
    return whole(k, d, vocab, [first] * n + [_hears(k, d, others, less, other)] * depth, outer, tied)


@family("moonshine_streaming_encoder")
def streaming_encoder(k: Keys) -> Architecture:
    """The encoder of Moonshine that hears a stream: norms of one vector, frames projected by a matrix."""
    d, n = width_and_depth(k)
    heads, kv = k.integer("num_attention_heads"), k.integer("num_key_value_heads")
    width = k.integer("head_dim") if k.has("head_dim") else k.divide("head_dim", d, heads)
    own = layer(k, d, heads, k.integer("intermediate_size"), kv=kv, width=width, norm_bias=False,
                bias="qkvo" * k.flag("attention_bias"))
    frame = round(k.integer("sample_rate") * k.number("frame_ms") / 1000)
    outer = [vector(1), *conv(2 * d, d, 5), *conv(d, 2 * d, 5), *matrix("other", d, frame), *norm(d)]
    return whole(k, d, 1, [own] * n, outer)


@family("moonshine_streaming")
def streaming(k: Keys) -> Architecture:
    """Moonshine for streams: the encoder's states get learned positions, and the decoder's width."""
    d, n = width_and_depth(k)
    heads, vocab = k.integer("num_attention_heads"), k.integer("vocab_size")
    width = k.integer("head_dim") if k.has("head_dim") else k.divide("head_dim", d, heads)
    first = streaming_encoder(k.inside("encoder_config"))
    outer = [*first.outer, table(k.integer("max_position_embeddings"), first.d_model), table(vocab, d), *norm(d)]
    outer += matrix("other", d, first.d_model) if first.d_model != d else []
    tied = k.tied(False)
    outer += [] if tied else matrix("head", vocab, d)
    kv = k.integer("num_key_value_heads")
    return whole(k, d, vocab, first.layers + (_hears(k, d, heads, kv, width),) * n, outer, tied)


@family("speecht5")
def speecht5(k: Keys) -> Architecture:
    """SpeechT5 that writes down speech; the other two ways round have other ends."""
    d, vocab = k.integer("hidden_size"), k.integer("vocab_size")
    said = k.data.get("architectures") or ["SpeechT5ForSpeechToText"]
    if said != ["SpeechT5ForSpeechToText"]:
        raise ValueError(f"{k.where}.architectures: there is a weight table for SpeechT5ForSpeechToText, got {said}")
    layers: list[Layer] = []
    for stack in ("encoder", "decoder"):
        heads = k.integer(f"{stack}_attention_heads")
        width = k.divide("head_dim", d, heads)
        looks = gqa(d, heads, heads, width, bias="qkvo") if stack == "decoder" else None
        own = layer(k, d, heads, k.integer(f"{stack}_ffn_dim"), looks=looks)
        layers += [own] * k.integer(f"{stack}_layers")
    distances = 2 * k.integer("encoder_max_relative_position")
    outer = [*wave(k, d), *norm(d, True), vector(distances, d // k.integer("encoder_attention_heads"))]
    tied = k.tied(True)
    outer += [table(vocab, d), *([] if tied else matrix("head", vocab, d))]
    return whole(k, d, vocab, layers, outer, tied)


@family("moshi_depth")
def moshi_depth(k: Keys) -> Architecture:
    """Moshi's decoder of the codes of one frame: matrices of its own for each code, of which a frame needs all."""
    d, heads, codes = k.integer("hidden_size"), k.integer("num_attention_heads"), k.integer("num_codebooks")
    kv, rows, hidden = k.integer("num_key_value_heads"), k.integer("audio_vocab_size"), k.integer("ffn_dim")
    width = k.integer("head_dim") if k.has("head_dim") else k.divide("head_dim", d, heads)

    def each(part: str, rows: int, columns: int) -> list[Weight]:
        return matrix(part, rows, columns, copies=codes)

    found = each("attention", heads * width, d) + each("attention", kv * width, d) * 2
    found += each("attention", d, heads * width)
    ffn = each("dense", hidden, d) + each("dense", d, k.divide("ffn_dim", hidden, 2))
    own = Layer("dense", (*found, *ffn, *norm(d) * 2), (Mixer(heads, width, width, None, 2 * kv * width),))
    outer = [table(k.integer("vocab_size") + 1, d), *[table(rows + 1, d)] * (codes - 1)]
    outer += each("other", d, k.integer("input_size")) + each("head", rows, d)
    return whole(k, d, rows, [own] * k.integer("num_hidden_layers"), outer, tied=False)


@family("qwen2_5_omni_talker")
def omni_talker(k: Keys) -> Architecture:
    """Qwen2.5-Omni's talker: Qwen2's layers over codes, embedded as wide as the thinker's states, and projected."""
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    wide, vocab = k.integer("embedding_size"), k.integer("vocab_size")
    own = layer(k, d, heads, k.integer("intermediate_size"), kv=kv, width=width, bias="qkv", gated=True,
                ffn_bias=False, norm_bias=False)
    outer = [table(vocab, wide), *matrix("other", d, wide, True), *norm(d), *matrix("head", vocab, d)]
    return whole(k, d, vocab, [own] * n, outer, tied=False)


@family("qwen3_omni_moe_talker_code_predictor")
def code_predictor(k: Keys) -> Architecture:
    """Qwen3-Omni's decoder of a frame's codes: Qwen3's layers, a table and a head for each code but the first."""
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    vocab, codes = k.integer("vocab_size"), k.integer("num_code_groups") - 1
    own = layer(k, d, heads, k.integer("intermediate_size"), kv=kv, width=width, bias=attention_bias(k), gated=True,
                ffn_bias=False, norm_bias=False, more=norm(width) * 2)
    outer = [*[table(vocab, d)] * codes, *norm(d), *matrix("head", vocab, d) * codes]
    return whole(k, d, vocab, [own] * n, outer, tied=False)


def _flow(k: Keys) -> list[Weight]:
    """A head that makes a continuous frame from noise in steps: residual blocks whose scales come from the step."""
    d, low, times = k.integer("hidden_size"), k.integer("latent_dim"), k.integer("frequency_embedding_size")
    step = matrix("head", d, times, True) + matrix("head", d, d, True) + norm(d)
    block = matrix("head", d, d, True) * 2 + matrix("head", 3 * d, d, True) + norm(d, True)
    found = matrix("head", d, low, True) + matrix("head", d, k.integer("condition_dim"), True)
    found += block * k.integer("num_hidden_layers")
    found += step * (2 if k.text("flow_type") == "lsd" else 0)  # its beginning and its end
    sizes = [2, *[k.integer("loss_weighting_hidden_size")] * k.integer("loss_weighting_num_layers"), 1]
    for columns, rows in pairwise(sizes):
        found += matrix("head", rows, columns, True)
    return [*found, *matrix("head", 2 * d, d, True), *matrix("head", low, d, True)]


@family("pocket_tts", "gradium_phonon_tts")
def flow_tts(k: Keys) -> Architecture:
    """Decoders of words and continuous frames with a flow as their head, in all that training holds."""
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    own = layer(k, d, heads, k.integer("intermediate_size"), kv=kv, width=width, bias=attention_bias(k), ffn_bias=False)
    low, vocab = k.integer("latent_dim"), k.integer("vocab_size")
    outer = [vector(low), table(vocab, d), *norm(d, True), *matrix("other", d, low), *matrix("head", 1, d, True)]
    if k.text("model_type") == "pocket_tts":
        outer += matrix("other", d, low)
    else:
        voices = k.integer("num_speakers_embedding_dim")
        for columns in (k.integer("audio_prompt_dim"), voices, k.integer("duration_delta_embedding_dim")):
            outer += matrix("other", d, columns)
        outer.append(table(k.integer("num_speakers_vocab_size"), voices))
    return whole(k, d, vocab, [own] * n, [*outer, *_flow(k.inside("flow_head_config"))], tied=False)
