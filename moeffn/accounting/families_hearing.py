"""Encoders of sound beside wav2vec 2.0's own line, and the towers of models that listen."""

from __future__ import annotations

from .families import family
from .families_senses import waves
from .ffns import dense
from .reader import Keys
from .stacks import conv, layer, looking, table, vector, whole
from .weights import Architecture, Layer, Weight, matrix, norm


def sizes(k: Keys) -> tuple[int, int, int, int]:
    """Width, layers, heads, width of the FFNs, of a model without adapters."""
    if k.flag("add_adapter", absent=False):
        raise ValueError(f"{k.where}.add_adapter: no weight table for adapters behind the layers")
    return (k.integer("hidden_size"), k.integer("num_hidden_layers"), k.integer("num_attention_heads"),
            k.integer("intermediate_size"))


def masked(k: Keys, d: int) -> list[Weight]:
    """What stands for masked frames."""
    return [vector(d)] * (k.number("mask_time_prob") > 0 or k.number("mask_feature_prob") > 0)


def normed(k: Keys, d: int) -> list[Weight]:
    """A convolution over positions whose weights are normed."""
    length = k.integer("num_conv_pos_embeddings")
    return [vector(length), *conv(d, d // k.integer("num_conv_pos_embedding_groups"), length)]


@family("data2vec-audio")
def data2vec(k: Keys) -> Architecture:
    """data2vec's encoder of sound: a norm in every convolution, several plain ones over positions."""
    d, n, heads, hidden = sizes(k)
    last, outer = waves(k, "layer")
    outer += norm(last, True) + matrix("other", d, last, True) + masked(k, d) + norm(d, True)
    around = conv(d, d // k.integer("num_conv_pos_embedding_groups"), k.integer("conv_pos_kernel_size"))
    outer += around * k.integer("num_conv_pos_embeddings")
    return whole(k, d, k.integer("vocab_size"), [layer(k, d, heads, hidden)] * n, outer)


@family("sew", "sew-d")
def sew(k: Keys) -> Architecture:
    """SEW: the layers work on fewer frames, which a matrix spreads again; SEW-D's are DeBERTa's."""
    d, n, heads, hidden = sizes(k)
    last, outer = waves(k, k.text("feat_extract_norm"))
    outer += norm(last, True) + matrix("other", d, last, True) * (last != d) + masked(k, d) + normed(k, d)
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


@family("audio-spectrogram-transformer")
def spectrogram(k: Keys) -> Architecture:
    """AST: overlapping patches of a spectrogram, two learned tokens, a vision transformer's layers."""
    d, n, heads, hidden = sizes(k)
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
    kv = k.integer("num_key_value_heads") if name == "glmasr_encoder" else heads
    return whole(k, d, 1, [layer(k, d, heads, hidden, kv=kv, bias="qkvo" if newer else "qvo")] * n, outer)


@family("nemotron3_5_transcribe_asr_audio", "nemotron3_diarization_audio", "nemotron3_5_transcribe_word_timestamp")
def nemotron_audio(k: Keys) -> Architecture:
    """Nemotron's encoders of sound: stacked frames projected, a transformer whose queries and keys may have norms with
    biases; the one that finds words in time spreads its states first."""
    name = k.text("model_type")
    d, n, heads, hidden = sizes(k)
    if k.integer("num_key_value_heads", absent=heads) != heads:
        raise ValueError(f"{k.where}.num_key_value_heads: expected {heads} as query heads, "
                         f"got {k.data['num_key_value_heads']}")
    more = norm(d // heads, True, 2) if "diarization" not in name else []
    own = layer(k, d, heads, hidden, bias="o", more=more)
    outer = norm(d, True, 2)
    if name.endswith("timestamp"):
        outer += conv(d, d, k.integer("upsampling_factor"))
    else:
        outer += matrix("other", d, k.integer("num_mel_bins") * k.integer("subsampling_factor"))
    return whole(k, d, 1, [own] * n, outer)


@family("omniasr_audio")
def omniasr(k: Keys) -> Architecture:
    """Omnilingual ASR's encoder: wav2vec 2.0's with a plain convolution over positions."""
    d, n, heads, hidden = sizes(k)
    last, outer = waves(k, "layer")
    outer += norm(last, True) + matrix("other", d, last, True) + norm(d, True)
    outer += conv(d, d // k.integer("num_conv_pos_embedding_groups"), k.integer("num_conv_pos_embeddings"))
    return whole(k, d, 1, [layer(k, d, heads, hidden)] * n, outer)


@family("voxtral_realtime_encoder")
def voxtral_realtime(k: Keys) -> Architecture:
    """Voxtral's encoder of a stream: Whisper's convolutions, Llama's layers with some biases."""
    d, n, heads, hidden = sizes(k)
    own = layer(k, d, heads, hidden, width=k.integer("head_dim"), bias="qvo", gated=True, ffn_bias=False,
                norm_bias=False, more=[Weight("dense", (d,), "bias")])
    return whole(k, d, 1, [own] * n, [*conv(d, k.integer("num_mel_bins"), 3), *conv(d, d, 3), *norm(d)])


@family("fun_asr_nano_encoder")
def fun_asr(k: Keys) -> Architecture:
    """Fun-ASR-Nano's encoder: a convolution over time in each attention; the first layer reads stacked frames, the
    last of both stages end in a norm."""
    d, n, heads, hidden = sizes(k)
    inward, taps = k.integer("num_mel_bins") * k.integer("num_stacked_frames"), k.integer("fsmn_kernel_size")
    own = layer(k, d, heads, hidden, more=conv(d, 1, taps, bias=False))
    first, mixer = looking(inward, inward, heads, heads, k.divide("head_dim", d, heads), "qkv")
    first = first[:-1] + matrix("attention", d, d, True) + conv(d, 1, taps, bias=False)
    first += norm(inward, True) + norm(d, True) + dense(d, hidden, gated=False, bias=True)
    stages = 2 if 0 < k.integer("num_timestamp_prediction_layers", minimum=0) < n else 1
    return whole(k, d, 1, [Layer("dense", tuple(first), (mixer,)), *[own] * (n - 1)], norm(d, True) * stages)


@family("dots3_note_audio_encoder")
def dots_audio(k: Keys) -> Architecture:
    """Dots 3's encoder of sound: three convolutions, gated FFNs with biases, an adapter."""
    d, n, heads, hidden = sizes(k)
    wide, high, out = k.integer("downsample_hidden_size"), k.integer("feature_size"), k.integer("adapter_out_dim")
    outer: list[Weight] = []
    for columns in (1, wide, wide):
        outer += conv(wide, columns, 3, 3)
        high = (high + 1) // 2
    outer += matrix("other", d, k.integer("conv_output_size", absent=wide * high)) + norm(d) + norm(d, True)
    outer += matrix("other", out, d, True) + matrix("other", out, out, True)
    own = layer(k, d, heads, hidden, kv=k.integer("num_key_value_heads"), width=k.integer("head_dim"),
                bias="qvo" * k.flag("attention_bias"), gated=True, norm_bias=False)
    return whole(k, d, 1, [own] * n, outer)


@family("nemotron3_diarization")
def diarization(k: Keys) -> Architecture:
    """Who speaks when: an encoder of sound, states spread over frames again, a score for each speaker."""
    head, heard = k.inside("head_config"), nemotron_audio(k.inside("audio_config"))
    d, wide = head.integer("hidden_size"), head.integer("audio_hidden_size")
    outer = [*heard.outer, vector(heard.d_model), *matrix("other", d, wide, True), *matrix("other", d, d, True)]
    outer += conv(d * head.integer("subsampling_factor"), d, 3)
    outer += matrix("other", head.integer("num_speakers"), d, True)
    return whole(k, heard.d_model, 1, heard.layers, outer)


@family("nemotron3_5_transcribe_audio")
def speakers(k: Keys) -> Architecture:
    """Nemotron 3.5's encoder of what is said beside the one of who says it."""
    heard, told = nemotron_audio(k.inside("asr_config")), k.inside("diarization_config")
    said = diarization(told)
    outer = [*heard.outer, *said.outer, *norm(heard.d_model, True)]
    outer += norm(told.inside("head_config").integer("num_speakers"), True)
    return whole(k, heard.d_model, 1, heard.layers + said.layers, outer)
