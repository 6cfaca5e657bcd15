"""Conformers, which put a convolution between attention and FFN, and what transcribes by them."""

from __future__ import annotations

from .families import family
from .families_hearing import masked, normed, omniasr, sizes
from .families_senses import waves
from .ffns import dense
from .mixers import gqa
from .reader import Keys
from .stacks import conv, layer, table, vector, whole
from .weights import Architecture, Layer, Weight, matrix, norm


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
    d, n, heads, hidden = sizes(k)
    positions = k.text("position_embeddings_type", absent="")
    more: tuple[Weight, ...] = ()
    if k.text("model_type") == "wav2vec2-bert":
        inward = k.integer("feature_projection_input_dim")
        outer = norm(inward, True) + matrix("other", d, inward, True) + masked(k, d)
        if positions == "relative_key":
            rows = k.integer("left_max_position_embeddings") + k.integer("right_max_position_embeddings") + 1
            more = (vector(rows, d // heads, part="attention"),)
    else:
        last, outer = waves(k, k.text("feat_extract_norm"))
        outer += norm(last, True) + matrix("other", d, last, True) + masked(k, d) + normed(k, d) + norm(d, True)
    own = conformer(k, d, heads, hidden, taps=k.integer("conv_depthwise_kernel_size"), positions=positions, more=more)
    return whole(k, d, k.integer("vocab_size", absent=1), [own] * n, outer)


@family("parakeet_encoder", "nemotron_asr_streaming_encoder", "lasr_encoder")
def fast_conformer(k: Keys) -> Architecture:
    """Fast conformers: frames are made fewer by convolutions first; LASR's positions are rotary."""
    d, n, heads, hidden = sizes(k)
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
    own = layer(k, d, heads, hidden, kv=k.integer("num_key_value_heads", absent=heads), bias="qkvo" * bias,
                ffn_bias=bias, norm_bias=relative, more=more)
    return whole(k, d, 1, [own] * n, outer)


@family("granite_speech5_encoder", "granite_speech5_ctc")
def granite_speech_next(k: Keys) -> Architecture:
    """The fifth generation of Granite Speech's conformer under names of its own; four frames are stacked, and the
    vocabulary is predicted halfway and at the end."""
    own_head = k.text("model_type") == "granite_speech5_ctc" and not k.tied(True)
    if k.text("model_type") == "granite_speech5_ctc":
        k = k.inside("encoder_config")
    d, n, heads, hidden = sizes(k)
    inner, width, vocab = k.integer("conv_expansion_factor") * d, k.integer("head_dim"), k.integer("vocab_size")
    bias = k.flag("attention_bias")
    own = layer(k, d, heads, hidden, width=width, bias="o", ffn_bias=bias,
                more=_granite(k, d, hidden, inner, k.integer("max_position_embeddings"), width, bias))
    outer = matrix("other", d, 4 * k.integer("num_mel_bins"), True)
    outer += matrix("other", vocab, d, True) + matrix("other", d, vocab, True)
    outer += matrix("head", vocab, d, True) * own_head
    return whole(k, d, vocab, [own] * n, outer, not own_head)


def _granite(k: Keys, d: int, hidden: int, inner: int, distances: int, width: int,
             bias: bool = True) -> list[Weight]:
    """The second FFN and the convolution of a layer, its norms, and a table of distances."""
    found = dense(d, hidden, gated=False, bias=bias) + norm(d, True, 3) + norm(inner, True)
    found += conv(2 * inner, d, 1) + conv(inner, 1, k.integer("conv_kernel_size"), bias=False) + conv(d, inner, 1)
    return [*found, vector(2 * distances + 1, width, part="attention")]


@family("parakeet_ctc", "lasr_ctc", "omniasr_ctc")
def ctc(k: Keys) -> Architecture:
    """An encoder and a head of the vocabulary for each frame."""
    vocab = k.integer("vocab_size")
    heard = (omniasr(k.inside("audio_config")) if k.text("model_type") == "omniasr_ctc"
             else fast_conformer(k.inside("encoder_config")))
    head = matrix("head", vocab, heard.d_model, True)
    return whole(k, heard.d_model, vocab, heard.layers, (*heard.outer, *head), tied=False)


@family("canary_decoder")
def canary_decoder(k: Keys) -> Architecture:
    """Canary's decoder, which attends to the encoder's states."""
    d, n, heads, hidden = sizes(k)
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
        for key, side in (("sscp_conv_kernel_size", 3), ("sscp_conv_stride_size", 2)):
            if k.data.get(key) != [[side, side]] * 2:
                raise ValueError(f"{k.where}.{key}: there is a weight table for sides of {side}, got {k.data.get(key)}")
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
    outer += matrix("other", d, wide * k.integer("nemo_final_size", absent=-(-bins // times)), True)
    outer.append(table(k.integer("bias_max_distance") * (1 if k.flag("bias_symmetric") else 2), heads))
    more = dense(d, hidden, bias=True) + norm(d, True, 3) + [vector(out)] * 2 + conv(2 * out, d, 1)
    more += conv(inner, 1, taps) + conv(k.integer("depthwise_separable_out_channel"), inner, 1) + conv(out, d, 1)
    return whole(k, d, 1, [layer(k, d, heads, hidden, gated=True, more=more)] * k.integer("num_blocks"), outer)
