"""Encoder-decoders, dense and with experts."""

from __future__ import annotations

from .families import decoder, family
from .ffns import dense, moe
from .mixers import gqa
from .reader import Keys
from .weights import Architecture, Layer, Weight, matrix, norm


@family("t5", "switch_transformers", "mt5", "umt5", "longt5", "udop", "pop2piano")
def t5(k: Keys) -> Architecture:
    """T5 and its kin: encoder and decoder with relative positions, FFNs without biases."""
    name = k.text("model_type")
    d, heads, width, hidden = k.integer("d_model"), k.integer("num_heads"), k.integer("d_kv"), k.integer("d_ff")
    encoders = k.integer("num_layers")
    decoders = k.integer("num_decoder_layers", absent=encoders)
    gated = k.text("feed_forward_proj", absent="relu").startswith("gated")
    buckets = k.integer("relative_attention_num_buckets")
    pooled = name == "longt5" and k.text("encoder_attention_type") == "transient-global"
    layers = []
    for stack, n in (("encoder", encoders), ("decoder", decoders)):
        every = 0
        if name == "switch_transformers":
            count = k.integer(f"num_sparse_{stack}_layers", minimum=0)
            every = n // count if count else 0
        for i in range(n):
            found, mixer = gqa(d, heads, heads, width)
            times = 2 if stack == "decoder" else 1
            found = found * times
            if i == 0 or name == "umt5":
                found = [*found, Weight("attention", (buckets, heads), "filter")]
            if pooled and stack == "encoder":  # summaries of blocks, with a norm and a bias of their own
                found = found + norm(d) + [Weight("attention", (buckets, heads), "filter")] * (i == 0)
            sparse = bool(every) and (i % every == 1 or every == 1)
            ffn = (moe(d, hidden, k.integer("num_experts"), 1, gated=False, where="config.num_experts",
                       router_bias=k.flag("router_bias", absent=False)) if sparse
                   else dense(d, hidden, gated=gated))
            weights = tuple(found + ffn + norm(d, copies=1 + times))
            layers.append(Layer("sparse" if sparse else "dense", weights, (mixer,) * times))
    extra = norm(d)
    if name == "udop":  # tables of places on a page, biases of places, and image patches into each stack
        extra += [Weight("embedding", (k.integer("max_2d_position_embeddings"), d), "table")] * 2
        places = k.data.get("relative_bias_args")
        if not isinstance(places, list) or not places:
            raise TypeError(f"config.relative_bias_args: expected a list of biases, got {places!r}")
        others = len(places) - 1
        extra += [Weight("attention", (buckets, heads), "filter")] * (2 * others)
        pixels = k.integer("num_channels") * k.integer("patch_size") ** 2
        extra += matrix("other", d, pixels, True) * 2
    elif name == "pop2piano":
        extra.append(Weight("embedding", (k.integer("composer_vocab_size"), d), "table"))
        extra += matrix("head", k.integer("vocab_size"), d)
    return decoder(k, name, d, layers, tied=True, extra=tuple(extra))


@family("nllb_moe", "nllb-moe")
def nllb(k: Keys) -> Architecture:
    """NLLB-MoE: encoder and decoder, top-2 experts in every few layers, biases everywhere."""
    d = k.integer("d_model")
    layers = []
    for stack in ("encoder", "decoder"):
        n, heads = k.integer(f"{stack}_layers"), k.integer(f"{stack}_attention_heads")
        hidden, every = k.integer(f"{stack}_ffn_dim"), k.integer(f"{stack}_sparse_step", minimum=0)
        for i in range(n):
            found, mixer = gqa(d, heads, heads, k.divide("head_dim", d, heads), bias="qkvo")
            times = 2 if stack == "decoder" else 1
            sparse = bool(every) and (i + 1) % every == 0
            ffn = (moe(d, hidden, k.integer("num_experts"), 2, gated=False, bias=True, where="config.num_experts",
                       router_bias=k.flag("router_bias", absent=False)) if sparse
                   else dense(d, hidden, gated=False, bias=True))
            layers.append(Layer("sparse" if sparse else "dense",
                                tuple(found * times + ffn + norm(d, True, 1 + times)), (mixer,) * times))
    return decoder(k, "nllb_moe", d, layers, tied=True, norm_bias=True, extra=tuple(norm(d, True)))


NORMS_OF_A_STACK = {"mbart": 2, "marian": 0, "pp_formulanet_text": 2}
POSITIONS = {"bart": 2, "mbart": 2, "mvp": 2, "plbart": 2, "pp_formulanet_text": 2}  # rows beyond the positions
NO_POSITIONS = ("m2m_100", "pegasus_x", "seamless_m4t", "seamless_m4t_v2", "speech_to_text")


@family("bart", "mbart", "mvp", "plbart", "pegasus", "pegasus_x", "m2m_100", "marian", "blenderbot",
        "blenderbot-small", "whisper", "seamless_m4t", "seamless_m4t_v2", "bigbird_pegasus", "led",
        "speech_to_text")
def bart(k: Keys, stacks: tuple[str, ...] = ("encoder", "decoder")) -> Architecture:
    """BART and its like; m2m_100 (NLLB) and Whisper too. Whisper's encoder has fixed positions, as parameters.

    Sinusoidal positions that are parameters of the module (Marian, Pegasus, Whisper's encoder) count. Of
    SeamlessM4T the text encoder and decoder count.
    """
    name = k.text("model_type")
    d = k.integer("d_model", "hidden_size")
    if k.data.get("use_prompt"):
        raise ValueError("config.use_prompt: an MVP with prompts has no weight table")
    if name.startswith("seamless"):
        k.excluded.extend(("speech_encoder", "t2u", "vocoder"))
    extra: list[Weight] = []
    layers = []
    for stack in stacks:
        n, heads = k.integer(f"{stack}_layers"), k.integer(f"{stack}_attention_heads")
        bias = {"whisper": "qvo", "pegasus_x": "", "bigbird_pegasus": ""}.get(name, "qkvo")
        found, mixer = gqa(d, heads, heads, k.divide("head_dim", d, heads), bias=bias)
        times = 2 if stack == "decoder" else 1
        if name == "led" and stack == "encoder":  # queries, keys and values of global tokens
            found = found + matrix("attention", d, d, True) * 3
        ffn = dense(d, k.integer(f"{stack}_ffn_dim"), gated=False, bias=True)
        wider = name == "pegasus_x" and stack == "encoder"  # a third norm, and global tokens
        norms = norm(d, True, 1 + times + wider)
        layers += [Layer("dense", tuple(found * times + ffn + norms), (mixer,) * times)] * n
        extra += norm(d, True, NORMS_OF_A_STACK.get(name, 1))
        extra += [Weight("embedding", (k.integer("num_global_tokens"), d), "table")] if wider else []
        if name == "whisper":
            rows = k.integer("max_source_positions" if stack == "encoder" else "max_target_positions")
        else:
            own = f"max_{stack}_position_embeddings" if name == "led" else "max_position_embeddings"
            rows = 0 if name in NO_POSITIONS else k.integer(own) + POSITIONS.get(name, 0)
        extra += [Weight("embedding", (rows, d), "table")] * (rows > 0)
    if name == "whisper":
        extra += [Weight("other", (d, k.integer("num_mel_bins"), 3), "filter"), Weight("other", (d,), "bias"),
                  Weight("other", (d, d, 3), "filter"), Weight("other", (d,), "bias")]
    elif name == "speech_to_text":  # convolutions whose gates halve their channels
        wide, inward = k.integer("conv_channels"), k.integer("input_feat_per_channel") * k.integer("input_channels")
        taps = k.indices("conv_kernel_sizes", required=True)
        for i, length in enumerate(taps):
            rows = 2 * d if i == len(taps) - 1 else wide
            extra += [Weight("other", (rows, inward, length), "filter"), Weight("other", (rows,), "bias")]
            inward = wide // 2
    return decoder(k, name, d, layers, tied=True, final_norm=False, extra=tuple(extra))


@family("pp_formulanet_text")
def formulas(k: Keys) -> Architecture:
    """PP-FormulaNet's decoder of formulas: mBART's."""
    return bart(k, stacks=("decoder",))


@family("prophetnet", "xlm-prophetnet")
def prophetnet(k: Keys) -> Architecture:
    """ProphetNet: positions in both stacks; the decoder predicts several tokens, with relative biases of its own."""
    d = k.integer("hidden_size")
    extra: list[Weight] = []
    layers = []
    for stack in ("encoder", "decoder"):
        n, heads = k.integer(f"num_{stack}_layers"), k.integer(f"num_{stack}_attention_heads")
        found, mixer = gqa(d, heads, heads, k.divide("head_dim", d, heads), bias="qkvo")
        times = 1
        if stack == "decoder":
            times += k.flag("add_cross_attention", absent=True)
            found = found * times + matrix("attention", k.integer("num_buckets") * heads, d, True)
            extra.append(Weight("embedding", (k.integer("ngram"), d), "table"))
        ffn = dense(d, k.integer(f"{stack}_ffn_dim"), gated=False, bias=True)
        layers += [Layer("dense", tuple(found + ffn + norm(d, True, 1 + times)), (mixer,) * times)] * n
        extra += [Weight("embedding", (k.integer("max_position_embeddings"), d), "table"), *norm(d, True)]
    return decoder(k, "prophetnet", d, layers, tied=True, final_norm=False, extra=tuple(extra))


@family("t5gemma")
def t5gemma(k: Keys) -> Architecture:
    """T5Gemma: Gemma 2's layers in both stacks, each with a table of its own; the head is the decoder's."""
    layers, extra = [], []
    for stack in ("encoder", "decoder"):
        s = k.inside(stack)
        d, n, heads, kv = (s.integer(key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads",
                                                      "num_key_value_heads"))
        found, mixer = gqa(d, heads, kv, s.integer("head_dim"), bias="qkvo" * s.flag("attention_bias", absent=False))
        norms = norm(d, copies=4)
        if stack == "decoder":
            wide = k.inside("encoder").integer("hidden_size")
            if wide != d:
                raise ValueError(f"config.encoder.hidden_size: expected {d} as in the decoder, got {wide}")
            found, norms = found * 2, norm(d, copies=6)
        else:
            extra = [Weight("embedding", (s.integer("vocab_size"), d), "table"), *norm(d)]
        weights = tuple(found + dense(d, s.integer("intermediate_size")) + norms)
        layers += [Layer("dense", weights, (mixer,) * (2 if stack == "decoder" else 1))] * n
    return decoder(s, "t5gemma", d, layers, tied=True, extra=tuple(extra))
