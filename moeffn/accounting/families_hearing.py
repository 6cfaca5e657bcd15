"""Encoders of sound beside wav2vec 2.0's own line, and the towers of models that listen."""

from __future__ import annotations

from .families import family
from .families_senses import waves
from .ffns import dense
from .mixers import gqa
from .reader import Keys
from .stacks import conv, layer, looking, table, vector, whole
from .weights import Architecture, Layer, Weight, matrix, norm


def _sizes(k: Keys) -> tuple[int, int, int, int]:
    if k.flag("add_adapter", absent=False):
        raise ValueError(f"{k.where}.add_adapter: no weight table for adapters behind the layers")
    return (k.integer("hidden_size"), k.integer("num_hidden_layers"), k.integer("num_attention_heads"),
            k.integer("intermediate_size"))


def _masked(k: Keys, d: int) -> list[Weight]:
    return [vector(d)] * (k.number("mask_time_prob") > 0 or k.number("mask_feature_prob") > 0)


def _normed(k: Keys, d: int) -> list[Weight]:
    """A convolution over positions whose weights are normed."""
    length = k.integer("num_conv_pos_embeddings")
    return [vector(length), *conv(d, d // k.integer("num_conv_pos_embedding_groups"), length)]


@family("data2vec-audio")
def data2vec(k: Keys) -> Architecture:
    """data2vec's encoder of sound: a norm in every convolution, several plain ones over positions."""
    d, n, heads, hidden = _sizes(k)
    last, outer = waves(k, "layer")
    outer += norm(last, True) + matrix("other", d, last, True) + _masked(k, d) + norm(d, True)
    around = conv(d, d // k.integer("num_conv_pos_embedding_groups"), k.integer("conv_pos_kernel_size"))
    outer += around * k.integer("num_conv_pos_embeddings")
    return whole(k, d, k.integer("vocab_size"), [layer(k, d, heads, hidden)] * n, outer)


@family("sew", "sew-d")
def sew(k: Keys) -> Architecture:
    """SEW: the layers work on fewer frames, which a matrix spreads again; SEW-D's are DeBERTa's."""
    d, n, heads, hidden = _sizes(k)
    last, outer = waves(k, k.text("feat_extract_norm"))
    outer += norm(last, True) + matrix("other", d, last, True) * (last != d) + _masked(k, d) + _normed(k, d)
    outer += matrix("other", k.integer("squeeze_factor") * d, d, True)
    if k.text("model_type") == "sew":
        outer += norm(d, True)
    elif k.flag("relative_attention"):
        if not k.flag("share_att_key"):
            raise ValueError(f"{k.where}.share_att_key: no weight table for projections of positions of their own")
        outer.append(table(2 * k.integer("position_buckets"), d))
    if k.text("norm_rel_ebd", absent="") == "layer_norm":
        outer += norm(d, True)
    return whole(k, d, k.integer("vocab_size"), [layer(k, d, heads, hidden)] * n, outer)


def conformer(k: Keys, d: int, heads: int, hidden: int, *, taps: int, positions: str = "",
              more: tuple[Weight, ...] = ()) -> Layer:
    """A layer of attention and a convolution between two FFNs, six norms in all. positions: "relative" with a
    projection of distances and two biases of the queries."""
    extra = dense(d, hidden, gated=False, bias=True) + norm(d, True, 4)
    extra += conv(2 * d, d, 1, bias=False) + conv(d, 1, taps, bias=False) + conv(d, d, 1, bias=False)
    if positions == "relative":
        extra += matrix("attention", d, d) + [vector(heads, d // heads, part="attention")] * 2
    return layer(k, d, heads, hidden, more=[*extra, *more])


@family("wav2vec2-bert", "wav2vec2-conformer")
def conformers(k: Keys) -> Architecture:
    """Conformers over the wave, or over filter banks whose frames are projected (wav2vec 2.0 BERT)."""
    d, n, heads, hidden = _sizes(k)
    positions, more = k.text("position_embeddings_type", absent=""), ()
    if k.text("model_type") == "wav2vec2-bert":
        inward = k.integer("feature_projection_input_dim")
        outer = norm(inward, True) + matrix("other", d, inward, True) + _masked(k, d)
        if positions == "relative_key":
            rows = k.integer("left_max_position_embeddings") + k.integer("right_max_position_embeddings") + 1
            more = (vector(rows, d // heads, part="attention"),)
    else:
        last, outer = waves(k, k.text("feat_extract_norm"))
        outer += norm(last, True) + matrix("other", d, last, True) + _masked(k, d) + _normed(k, d) + norm(d, True)
    own = conformer(k, d, heads, hidden, taps=k.integer("conv_depthwise_kernel_size"), positions=positions, more=more)
    return whole(k, d, k.integer("vocab_size", absent=1), [own] * n, outer)


@family("audio-spectrogram-transformer")
def spectrogram(k: Keys) -> Architecture:
    """AST: overlapping patches of a spectrogram, two learned tokens, a vision transformer's layers."""
    d, n, heads, hidden = _sizes(k)
    patch = k.integer("patch_size")
    high = (k.integer("num_mel_bins") - patch) // k.integer("frequency_stride") + 1
    wide = (k.integer("max_length") - patch) // k.integer("time_stride") + 1
    outer = [*matrix("other", d, patch**2, True), *[vector(d)] * 2, table(high * wide + 2, d), *norm(d, True)]
    return whole(k, d, 1, [layer(k, d, heads, hidden, bias="qkv" * k.flag("qkv_bias") + "o")] * n, outer)


# Whisper's encoder in other models: its positions are parameters, or not; what follows its layers.
WHISPER = ("qwen2_audio_encoder", "audioflamingo3_encoder", "voxtral_encoder", "qwen2_5_omni_audio_encoder",
           "qwen3_omni_moe_audio_encoder", "qwen3_asr_encoder", "glmasr_encoder", "moss_transcribe_diarize_audio")


@family(*WHISPER)
def whisper_tower(k: Keys) -> Architecture:
    """Whisper's encoder alone, in Qwen's omni models without a table of positions and with projections behind it."""
    name = k.text("model_type")
    d, n = k.integer("d_model", "hidden_size"), k.integer("encoder_layers", "num_hidden_layers")
    heads = k.integer("encoder_attention_heads", "num_attention_heads")
    hidden, bins = k.integer("encoder_ffn_dim", "intermediate_size"), k.integer("num_mel_bins")
    outer = norm(d, True)
    newer = name in ("qwen3_omni_moe_audio_encoder", "qwen3_asr_encoder")
    if newer:
        wide, high = k.integer("downsample_hidden_size"), bins
        for columns in (1, wide, wide):
            outer += conv(wide, columns, 3, 3)
            high = (high + 1) // 2
        outer += matrix("other", d, wide * high) + matrix("other", d, d, True) * ("omni" in name)
    else:
        outer += conv(d, bins, 3) + conv(d, d, 3)
    if not newer and "omni" not in name and name != "glmasr_encoder":
        outer.append(table(k.integer("max_source_positions"), d))
    elif "omni" in name:
        out = k.integer("output_dim")
        outer += matrix("other", out, d, True) + [table(2, out)] * (name == "qwen2_5_omni_audio_encoder")
    return whole(k, d, 1, [layer(k, d, heads, hidden, bias="qkvo" if newer else "qvo")] * n, outer)


@family("parakeet_encoder", "nemotron_asr_streaming_encoder", "lasr_encoder")
def fast_conformer(k: Keys) -> Architecture:
    """Fast conformers: frames are made fewer by convolutions first; LASR's positions are rotary."""
    d, n, heads, hidden = _sizes(k)
    bias, convolved = k.flag("attention_bias"), k.flag("convolution_bias")
    bins, wide, side = (k.integer(key) for key in ("num_mel_bins", "subsampling_conv_channels",
                                                   "subsampling_conv_kernel_size"))
    taps, relative = k.integer("conv_kernel_size"), k.text("model_type") != "lasr_encoder"
    more = dense(d, hidden, gated=False, bias=bias) + norm(d, relative, 3) + norm(d, True)
    more += conv(2 * d, d, 1, bias=convolved) + conv(d, 1, taps, bias=convolved) + conv(d, d, 1, bias=convolved)
    if relative:
        more += matrix("attention", d, d) + [vector(heads, d // heads, part="attention")] * 2
        stride, times = k.integer("subsampling_conv_stride"), k.integer("subsampling_factor").bit_length() - 1
        for _ in range(times):  # of a stream, padded by one more
            bins = bins // stride + k.text("model_type").startswith("nemotron")
        outer = conv(wide, 1, side, side)
        outer += (conv(wide, 1, side, side) + conv(wide, wide, 1, 1)) * (times - 1)
        outer += matrix("other", d, wide * bins, True)
    else:
        outer = matrix("other", d, bins, True) + conv(d, d, side) + conv(wide, d, side)
        outer += matrix("other", d, wide, True) + norm(d)
    own = layer(k, d, heads, hidden, bias="qkvo" * bias, ffn_bias=bias, norm_bias=relative, more=more)
    return whole(k, d, 1, [own] * n, outer)


@family("granite_speech5_encoder", "granite_speech5_ctc")
def granite_speech_next(k: Keys) -> Architecture:
    """The fifth generation of Granite Speech's conformer under names of its own; four frames are stacked, and the
    vocabulary is predicted halfway and at the end."""
    if k.text("model_type") == "granite_speech5_ctc":
        k = k.inside("encoder_config")
    d, n, heads, hidden = _sizes(k)
    inner, width, vocab = k.integer("conv_expansion_factor") * d, k.integer("head_dim"), k.integer("vocab_size")
    own = layer(k, d, heads, hidden, kv=k.integer("num_key_value_heads"), width=width, bias="o",
                more=_granite(k, d, hidden, inner, k.integer("max_position_embeddings"), width))
    outer = matrix("other", d, 4 * k.integer("num_mel_bins"), True)
    outer += matrix("other", vocab, d, True) + matrix("other", d, vocab, True)
    return whole(k, d, vocab, [own] * n, outer)


def _granite(k: Keys, d: int, hidden: int, inner: int, distances: int, width: int) -> list[Weight]:
    """The second FFN and the convolution of a layer, its norms, and a table of distances."""
    found = dense(d, hidden, gated=False, bias=True) + norm(d, True, 3) + norm(inner, True)
    found += conv(2 * inner, d, 1) + conv(inner, 1, k.integer("conv_kernel_size"), bias=False) + conv(d, inner, 1)
    return [*found, vector(2 * distances + 1, width, part="attention")]


@family("parakeet_ctc", "lasr_ctc", "omniasr_ctc")
def ctc(k: Keys) -> Architecture:
    """An encoder and a head of the vocabulary for each frame."""
    vocab = k.integer("vocab_size")
    heard = omniasr(k.inside("audio_config")) if k.has("audio_config") else fast_conformer(k.inside("encoder_config"))
    head = matrix("head", vocab, heard.d_model, True)
    return whole(k, heard.d_model, vocab, heard.layers, (*heard.outer, *head), tied=False)


@family("canary_decoder")
def canary_decoder(k: Keys) -> Architecture:
    """Canary's decoder, which attends to the encoder's states."""
    d, n, heads, hidden = _sizes(k)
    kv, width, bias = k.integer("num_key_value_heads"), k.integer("head_dim"), "qkvo" * k.flag("attention_bias")
    own = layer(k, d, heads, hidden, kv=kv, width=width, bias=bias, looks=gqa(d, heads, kv, width, bias=bias))
    vocab = k.integer("vocab_size")
    return whole(k, d, vocab, [own] * n, [table(vocab, d), *norm(d, True, 2)])


@family("canary", "cohere_asr")
def canary(k: Keys) -> Architecture:
    """A fast conformer and a decoder; Cohere's has learned positions and projects the encoder's states."""
    cohere = k.text("model_type") == "cohere_asr"
    heard = fast_conformer(k.inside("encoder_config"))
    said = canary_decoder(k if cohere else k.inside("decoder_config"))
    d, vocab, outer = said.d_model, said.vocab, [*heard.outer, *said.outer]
    if cohere:
        outer += [table(k.integer("max_position_embeddings"), d), *matrix("other", d, heard.d_model, True)]
    tied = k.tied(True)
    outer += [Weight("head", (vocab,), "bias")] if tied else matrix("head", vocab, d, True)
    return whole(k, d, vocab, heard.layers + said.layers, outer, tied)


@family("granite_speech_encoder", "granite_speech_plus_encoder")
def granite_speech(k: Keys) -> Architecture:
    """Granite Speech's conformer: attention in blocks with learned distances, letters predicted halfway."""
    d, n, heads, width = (k.integer(key) for key in ("hidden_dim", "num_layers", "num_heads", "dim_head"))
    hidden, inner = k.integer("feedforward_mult") * d, k.integer("conv_expansion_factor") * d
    inward, out = k.integer("input_dim"), k.integer("output_dim")
    more = _granite(k, d, hidden, inner, k.integer("max_pos_emb"), width)
    own = layer(k, d, heads, hidden, width=width, bias="o", more=more)
    outer = matrix("other", d, inward, True) + matrix("other", out, d, True) + matrix("other", d, out, True)
    return whole(k, d, out, [own] * n, outer)


@family("parakeet_rnnt", "nemotron_asr_streaming", "nemotron3_5_asr")
def transducer(k: Keys) -> Architecture:
    """A fast conformer, LSTMs over the words said so far, and a head on the sum of both; Nemotron 3.5's encoder is told
    the language by a prompt."""
    heard, vocab, low = fast_conformer(k.inside("encoder_config")), k.integer("vocab_size"), k.integer(
        "decoder_hidden_size")
    d = heard.d_model
    outer = matrix("other", low, d, True) + matrix("other", low, low, True)
    outer += [table(vocab, low), *matrix("head", vocab, low, True)]
    cell = matrix("other", 4 * low, low, True) * 2
    outer += cell * k.integer("num_decoder_layers")
    if k.text("model_type") == "nemotron3_5_asr":
        wide = k.integer("prompt_intermediate_size")
        outer += matrix("other", wide, d + k.integer("num_prompts"), True) + matrix("other", d, wide, True)
    return whole(k, d, vocab, heard.layers, [*heard.outer, *outer], tied=False)


@family("nemotron3_5_transcribe_asr_audio", "nemotron3_diarization_audio", "nemotron3_5_transcribe_word_timestamp")
def nemotron_audio(k: Keys) -> Architecture:
    """Nemotron's encoders of sound: stacked frames projected, a transformer whose queries and keys may have norms with
    biases; the one that finds words in time spreads its states first."""
    name = k.text("model_type")
    d, n, heads, hidden = _sizes(k)
    more = norm(d // heads, True, 2) if "diarization" not in name else []
    own = layer(k, d, heads, hidden, kv=k.integer("num_key_value_heads"), bias="o", more=more)
    outer = norm(d, True, 2)
    if name.endswith("timestamp"):
        outer += conv(d, d, k.integer("upsampling_factor"))
    else:
        outer += matrix("other", d, k.integer("num_mel_bins") * k.integer("subsampling_factor"))
    return whole(k, d, 1, [own] * n, outer)


@family("omniasr_audio")
def omniasr(k: Keys) -> Architecture:
    """Omnilingual ASR's encoder: wav2vec 2.0's with a plain convolution over positions."""
    d, n, heads, hidden = _sizes(k)
    last, outer = waves(k, "layer")
    outer += norm(last, True) + matrix("other", d, last, True) + norm(d, True)
    outer += conv(d, d // k.integer("num_conv_pos_embedding_groups"), k.integer("num_conv_pos_embeddings"))
    return whole(k, d, 1, [layer(k, d, heads, hidden)] * n, outer)


@family("voxtral_realtime_encoder")
def voxtral_realtime(k: Keys) -> Architecture:
    """Voxtral's encoder of a stream: Whisper's convolutions, Llama's layers with some biases."""
    d, n, heads, hidden = _sizes(k)
    own = layer(k, d, heads, hidden, width=k.integer("head_dim"), bias="qvo", gated=True, ffn_bias=False,
                norm_bias=False, more=[Weight("dense", (d,), "bias")])
    return whole(k, d, 1, [own] * n, [*conv(d, k.integer("num_mel_bins"), 3), *conv(d, d, 3), *norm(d)])


@family("fun_asr_nano_encoder")
def fun_asr(k: Keys) -> Architecture:
    """Fun-ASR-Nano's encoder: a convolution over time in each attention; the first layer reads stacked frames, the
    last of both stages end in a norm."""
    d, n, heads, hidden = _sizes(k)
    inward, taps = k.integer("num_mel_bins") * k.integer("num_stacked_frames"), k.integer("fsmn_kernel_size")
    own = layer(k, d, heads, hidden, more=conv(d, 1, taps, bias=False))
    first, mixer = looking(inward, inward, heads, heads, k.divide("head_dim", d, heads), "qkv")
    first = first[:-1] + matrix("attention", d, d, True) + conv(d, 1, taps, bias=False)
    first += norm(inward, True) + norm(d, True) + dense(d, hidden, gated=False, bias=True)
    stages = 2 if k.integer("num_timestamp_prediction_layers", minimum=0) else 1
    return whole(k, d, 1, [Layer("dense", tuple(first), (mixer,)), *[own] * (n - 1)], norm(d, True) * stages)


@family("dots3_note_audio_encoder")
def dots_audio(k: Keys) -> Architecture:
    """Dots 3's encoder of sound: three convolutions, gated FFNs with biases, an adapter."""
    d, n, heads, hidden = _sizes(k)
    wide, high, out = k.integer("downsample_hidden_size"), k.integer("feature_size"), k.integer("adapter_out_dim")
    outer: list[Weight] = []
    for columns in (1, wide, wide):
        outer += conv(wide, columns, 3, 3)
        high = (high + 1) // 2
    outer += matrix("other", d, wide * high) + norm(d) + norm(d, True)
    outer += matrix("other", out, d, True) + matrix("other", out, out, True)
    own = layer(k, d, heads, hidden, kv=k.integer("num_key_value_heads"), width=k.integer("head_dim"),
                bias="qv" * k.flag("attention_bias") + "o", gated=True, norm_bias=False)
    return whole(k, d, 1, [own] * n, outer)


@family("gemma4_audio", "gemma3n_audio")
def gemma_audio(k: Keys) -> Architecture:
    """Gemma's conformers: norms of one vector before and after each part, a scale of the queries' channels."""
    first = k.text("model_type") == "gemma3n_audio"
    prefix = "conf_" if first else ""
    d, n, heads = k.integer("hidden_size"), *(k.integer(f"{prefix}num_{key}") for key in ("hidden_layers",
                                                                                          "attention_heads"))
    channels = k.indices("sscp_conv_channel_size" if first else "subsampling_conv_channels", required=True)
    outer: list[Weight] = []
    for rows, columns in zip(channels, [1, *channels], strict=False):
        outer += conv(rows, columns, 3, 3, bias=False) + norm(rows)
    if first:
        if k.data.get("sscp_conv_kernel_size") != [[3, 3]] * 2 or k.data.get("sscp_conv_stride_size") != [[2, 2]] * 2:
            raise ValueError(f"{k.where}.sscp_conv_kernel_size: a weight table for kernels of 3 and steps of 2 alone")
        high = (k.integer("input_feat_size") + 3) // 4
    else:
        high = channels[0] // 4
        outer += matrix("other", k.integer("output_proj_dims"), d, True)
    outer += matrix("other", d, high * channels[-1])
    more = dense(d, 4 * d, gated=False) + matrix("attention", d, d) + [vector(d // heads, part="attention")]
    more += conv(d, 1, k.integer(f"{prefix}conv_kernel_size"), bias=False) + matrix("other", 2 * d, d)
    more += matrix("other", d, d)
    own = layer(k, d, heads, 4 * d, bias="", ffn_bias=False, norm_bias=False, norms=9, more=more)
    return whole(k, d, 1, [own] * n, outer)


@family("phi4_multimodal_audio")
def phi_audio(k: Keys) -> Architecture:
    """Phi-4's conformer: gated FFNs with biases, three pointwise convolutions, a table of distances."""
    d, heads, hidden = k.integer("hidden_size"), k.integer("num_attention_heads"), k.integer("intermediate_size")
    wide, bins, times = k.integer("nemo_conv_channels"), k.integer("input_size"), k.integer("time_reduction")
    inner, out, taps = d * k.integer("depthwise_multiplier"), k.integer("ext_pw_out_channel"), k.integer("kernel_size")
    outer, steps = conv(wide, 1, 3, 3), times.bit_length() - 1
    outer += (conv(wide, 1, 3, 3) + conv(wide, wide, 1, 1)) * (steps - 1)
    outer += matrix("other", d, wide * -(-bins // times), True)
    outer.append(table(k.integer("bias_max_distance") * (1 if k.flag("bias_symmetric") else 2), heads))
    more = dense(d, hidden, bias=True) + norm(d, True, 3) + [vector(out)] * 2 + conv(2 * out, d, 1)
    more += conv(inner, 1, taps) + conv(k.integer("depthwise_separable_out_channel"), inner, 1) + conv(out, d, 1)
    return whole(k, d, 1, [layer(k, d, heads, hidden, gated=True, more=more)] * k.integer("num_blocks"), outer)
