"""Recurrent models: Mamba, RWKV, the linear recurrent unit, and hybrids that share one attention block."""

from __future__ import annotations

from .families import FULL, LINEAR, attention_bias, block, decoder, family, heads_of, width_and_depth
from .ffns import dense
from .mixers import Mixed, gqa, mamba1, mamba2
from .reader import Keys
from .weights import Architecture, Layer, Mixer, Weight, matrix, norm


@family("mamba", "mamba2", "falcon_mamba")
def mamba(k: Keys) -> Architecture:
    name = k.text("model_type")
    d, n = width_and_depth(k)
    bias, conv_bias = k.flag("use_bias", absent=False), k.flag("use_conv_bias", absent=True)
    if name == "mamba2":
        mixed = mamba2(d, k.integer("num_heads"), k.integer("head_dim"), k.integer("n_groups"),
                       k.integer("state_size"), k.integer("conv_kernel"), conv_bias=conv_bias, bias=bias)
    else:
        inner = k.integer("intermediate_size", absent=d * k.integer("expand")) if name == "mamba" else k.integer(
            "intermediate_size")
        rank = -(-d // 16) if k.data.get("time_step_rank") == "auto" else k.integer("time_step_rank")
        mixed = mamba1(d, inner, k.integer("state_size"), k.integer("conv_kernel"), rank, conv_bias=conv_bias,
                       bias=bias)
    return decoder(k, name, d, [block("dense", mixed, [], norm(d))] * n, tied=name != "mamba2")


@family("rwkv")
def rwkv(k: Keys) -> Architecture:
    """RWKV-4: time mixing and channel mixing; the first block has a third norm."""
    d, n = width_and_depth(k)
    inner, hidden = k.integer("attention_hidden_size", absent=d), k.integer("intermediate_size", absent=4 * d)
    mixed = matrix("attention", inner, d) * 3 + matrix("attention", d, inner)
    mixed += [Weight("attention", (inner,), "filter")] * 2 + [Weight("attention", (d,), "filter")] * 3
    ffn = matrix("dense", hidden, d) + matrix("dense", d, d) + matrix("dense", d, hidden)
    ffn += [Weight("dense", (d,), "filter")] * 2
    layers = [block("dense", (mixed, Mixer(state=3 * inner)), ffn, norm(d, True, 3 if i == 0 else 2))
              for i in range(n)]
    return decoder(k, "rwkv", d, layers, tied=False, norm_bias=True)


@family("rwkv5", "rwkv6")
def rwkv5(k: Keys) -> Architecture:
    """Eagle and Finch (arXiv 2404.05892): 13·D²·L + 14·D·L + 4·D + 2·D·V, and 464·D·L for Finch's 14·D·L at the
    usual ranks of 32 and 64, twice these from a width of 4096 on."""
    name = k.text("model_type")
    d, n = width_and_depth(k)
    inner = k.integer("attention_hidden_size", absent=d)
    hidden = k.integer("intermediate_size", absent=int(3.5 * d) // 32 * 32)
    mixed = matrix("attention", inner, d) * 4 + matrix("attention", d, inner) + norm(inner, True)
    mixed += [Weight("attention", (inner,), "filter")] * 2
    if name == "rwkv5":
        mixed += [Weight("attention", (d,), "filter")] * 4
    else:
        rank, decay = (64, 128) if d >= 4096 else (32, 64)
        mixed += [Weight("attention", (d,), "filter")] * 6 + matrix("attention", 5 * rank, d)
        mixed += matrix("attention", d, rank) * 5 + matrix("attention", decay, d) + matrix("attention", inner, decay)
    ffn = matrix("dense", hidden, d) + matrix("dense", d, d) + matrix("dense", d, hidden)
    ffn += [Weight("dense", (d,), "filter")] * 2
    state = inner * k.integer("head_size", absent=64)
    layers = [block("dense", (mixed, Mixer(state=state)), ffn, norm(d, True, 2 + (i == 0))) for i in range(n)]
    return decoder(k, name, d, layers, tied=False, norm_bias=True)


@family("rwkv7")
def rwkv7(k: Keys) -> Architecture:
    """Goose (arXiv 2503.14456): 2·D·V + 4·D + L·D·(12·D + 2·(dw + da + dv + dg) + 19) - (2·D·dv + D), for an FFN of
    4·D; the first layer has no residual of values."""
    d, n = width_and_depth(k)
    width = k.integer("head_dim", "head_size")
    decay, low, value, gate = (k.integer(f"{key}_low_rank_dim") for key in ("decay", "a", "v", "gate"))
    hidden = k.integer("intermediate_size", absent=4 * d)
    layers = []
    for i in range(n):
        mixed = matrix("attention", d, d) * 4 + norm(d, True) + [Weight("attention", (d,), "filter")] * 11
        for rank in (decay, low, gate):
            mixed += matrix("attention", rank, d) + matrix("attention", d, rank)
        if i:
            mixed += matrix("attention", value, d) + matrix("attention", d, value)
            mixed.append(Weight("attention", (d,), "filter"))
        ffn = [*matrix("dense", hidden, d), *matrix("dense", d, hidden), Weight("dense", (d,), "filter")]
        layers.append(block("dense", (mixed, Mixer(state=d * width)), ffn, norm(d, True, 2 + (i == 0))))
    return decoder(k, "rwkv7", d, layers, tied=False, norm_bias=True)


@family("recurrent_gemma")
def recurrent_gemma(k: Keys) -> Architecture:
    """Griffin: gated linear recurrences with window attention between (arXiv 2402.19427)."""
    d, n = width_and_depth(k)
    heads, kv, width = k.integer("num_attention_heads"), k.integer("num_key_value_heads"), k.integer("head_dim")
    inner, pattern = k.integer("lru_width", absent=d), k.data.get("block_types") or k.data.get("_block_types")
    if not isinstance(pattern, list) or not pattern or set(pattern) - {"recurrent", "attention"}:
        raise ValueError(f"config.block_types: expected a list of recurrent and attention, got {pattern!r}")
    part = inner // heads
    recurrent = matrix("attention", inner, d, True) * 2 + matrix("attention", d, inner, True)
    recurrent += [Weight("attention", (inner, 1, k.integer("conv1d_width")), "filter")]
    recurrent += [Weight("attention", (inner,), "filter")] * 2
    recurrent += [Weight("attention", (heads * part, part), "matrix"), Weight("attention", (heads, part), "bias")] * 2
    bias = "qkvo" if k.flag("attention_bias", absent=False) else "o"
    attention = gqa(d, heads, kv, width, bias=bias, window=k.integer("attention_window_size"))
    ffn = dense(d, k.integer("intermediate_size") // 2, bias=True)
    kinds = {"recurrent": (recurrent, Mixer(state=inner)), "attention": attention}
    layers = [block("dense", kinds[pattern[i % len(pattern)]], ffn, norm(d, copies=2)) for i in range(n)]
    return decoder(k, "recurrent_gemma", d, layers, tied=True)


@family("olmo_hybrid")
def olmo_hybrid(k: Keys) -> Architecture:
    """Gated DeltaNet without grouping of heads, and attention with norms behind it as in OLMo 2."""
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    bias = attention_bias(k)
    full = gqa(d, heads, kv, width, bias=bias, qk_norm="full")
    keys, values = k.integer("linear_num_key_heads"), k.integer("linear_num_value_heads")
    key, value = keys * k.integer("linear_key_head_dim"), values * k.integer("linear_value_head_dim")
    recurrent = matrix("attention", key, d) * 2 + matrix("attention", value, d) * 2 + matrix("attention", d, value)
    recurrent += matrix("attention", values, d) * 2 + [Weight("attention", (values,), "filter")] * 2
    recurrent.append(Weight("attention", (2 * key + value, 1, k.integer("linear_conv_kernel_dim")), "filter"))
    recurrent += norm(value // values)
    mixed = recurrent, Mixer(state=value * (key // keys))
    ffn = dense(d, k.integer("intermediate_size"))
    layers = [block("dense", mixed if word in LINEAR else full, ffn, norm(d, copies=2))
              for word in k.words("layer_types", layers=n, among=FULL + LINEAR)]
    return decoder(k, "olmo_hybrid", d, layers, tied=False)


def _shared_block(k: Keys, d: int) -> Mixed:
    """Zamba's attention and FFN over the hidden state beside the embedding (2d), which several layers share."""
    heads, width = k.integer("num_attention_heads"), k.integer("attention_head_dim")
    inner, hidden = heads * width, k.integer("intermediate_size")
    kv = k.integer("num_key_value_heads", absent=heads)
    wide = k.integer("attention_hidden_size", absent=2 * d)
    found = matrix("attention", inner, wide) + matrix("attention", kv * width, wide) * 2 + matrix("attention", d, inner)
    found += dense(d, hidden, bias=k.flag("add_bias_linear", absent=False)) + norm(wide) + norm(d)
    return found, Mixer(heads, width, width, None, 2 * kv * width)


@family("zamba", "zamba2")
def zamba(k: Keys) -> Architecture:
    """Mamba layers, of which some also go through shared attention blocks: counted once, multiplied each time."""
    second = k.text("model_type") == "zamba2"
    d, n = width_and_depth(k)
    words = k.words("layers_block_type", layers=n, among=("mamba", "linear_attention", "hybrid"))
    hybrids = [i for i, word in enumerate(words) if word == "hybrid"]
    state_space = _zamba2_mamba(k, d) if second else _zamba_mamba(k, d)
    blocks = min(k.integer("num_mem_blocks"), len(hybrids)) if second else min(1, len(hybrids))
    found, mixer = _shared_block(k, d)
    low, hidden = (k.integer("adapter_rank"), k.integer("intermediate_size")) if second else (0, 0)
    adapter = matrix("dense", low, d) + matrix("dense", 2 * hidden, low) if second else []
    if second and k.flag("use_shared_attention_adapter"):
        wide = k.integer("attention_hidden_size", absent=2 * d)
        adapter += (matrix("attention", low, wide) + matrix("attention", wide, low)) * 3
    layers = []
    for i, word in enumerate(words):
        layer = block("dense", state_space, [], norm(d))
        if word == "hybrid":
            order = hybrids.index(i)
            weights = list(layer.weights) + matrix("other", d, d) + adapter
            if order < blocks:
                uses = len(range(order, len(hybrids), blocks))
                weights += Layer("dense", tuple(found)).repeated(uses, []).weights
            layer = Layer("dense", tuple(weights), (*layer.mixers, mixer))
        layers.append(layer)
    return decoder(k, k.text("model_type"), d, layers, tied=True)


def _zamba2_mamba(k: Keys, d: int) -> Mixed:
    heads = k.integer("n_mamba_heads")
    width = k.divide("mamba_headdim", k.integer("mamba_expand") * d, heads)
    return mamba2(d, heads, width, k.integer("mamba_ngroups"), k.integer("mamba_d_state"), k.integer("mamba_d_conv"),
                  conv_bias=k.flag("use_conv_bias", absent=True), bias=k.flag("add_bias_linear", absent=False))


def _zamba_mamba(k: Keys, d: int) -> Mixed:
    """Mamba whose data-dependent projections are split over heads."""
    heads, inner, state = k.integer("n_mamba_heads"), k.integer("mamba_expand") * d, k.integer("mamba_d_state")
    rank = -(-d // 16) if k.data.get("mamba_dt_rank") == "auto" else k.integer("mamba_dt_rank")
    part = inner // heads
    found, mixer = mamba1(d, inner, state, k.integer("mamba_d_conv"), rank,
                          conv_bias=k.flag("mamba_conv_bias", absent=True),
                          bias=k.flag("mamba_proj_bias", absent=False))
    whole = matrix("attention", rank + 2 * state, inner)
    found.remove(whole[0])
    return [*found, *matrix("attention", heads * (rank + 2 * state), part)], mixer
