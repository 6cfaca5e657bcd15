"""Families of Mamba layers with attention, FFNs and experts between."""

from __future__ import annotations

from .families import FULL, attention_bias, block, decoder, family, heads_of, predictions, predictor, width_and_depth
from .ffns import dense, moe
from .mixers import Mixed, gqa, mamba1, mamba2
from .reader import Keys
from .weights import Architecture, Layer, Weight, norm

MAMBA = ("mamba", "linear_attention")


@family("jamba")
def jamba(k: Keys) -> Architecture:
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    inner = d * k.integer("mamba_expand")
    rank = k.integer("mamba_dt_rank") if k.data.get("mamba_dt_rank") != "auto" else -(-d // 16)
    state_space = mamba1(d, inner, k.integer("mamba_d_state"), k.integer("mamba_d_conv"), rank,
                         conv_bias=k.flag("mamba_conv_bias", absent=True),
                         bias=k.flag("mamba_proj_bias", absent=False), norms=True)
    attention = gqa(d, heads, kv, width)
    attention_at = k.integer("attn_layer_period"), k.integer("attn_layer_offset", minimum=0)
    experts_at = k.integer("expert_layer_period"), k.integer("expert_layer_offset", minimum=0)
    expert, experts = k.integer("intermediate_size"), k.integer("num_experts")
    ffn = moe(d, expert, experts, k.integer("num_experts_per_tok"))
    layers = []
    for i in range(n):
        mixed = attention if i % attention_at[0] == attention_at[1] else state_space
        on = experts > 1 and i % experts_at[0] == experts_at[1]
        layers.append(block("sparse" if on else "dense", mixed, ffn if on else dense(d, expert), norm(d, copies=2)))
    return decoder(k, "jamba", d, layers, tied=False)


@family("granitemoehybrid")
def granite_hybrid(k: Keys) -> Architecture:
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    words = k.words("layer_types", "layers_block_type", layers=n, among=(*MAMBA, "attention", "full_attention"))
    bias = attention_bias(k)
    attention = gqa(d, heads, kv, width, bias=bias)
    state_space = _mamba2(k, d) if any(word in MAMBA for word in words) else attention
    experts = k.integer("num_local_experts", minimum=0)
    shared = k.integer("shared_intermediate_size", minimum=0)
    ffn = (moe(d, k.integer("intermediate_size"), experts, k.integer("num_experts_per_tok"), shared=shared)
           if experts else dense(d, shared))
    layers = [block("sparse" if experts else "dense", state_space if word in MAMBA else attention, ffn,
                    norm(d, copies=2)) for word in words]
    return decoder(k, "granitemoehybrid", d, layers, tied=False)


def _mamba2(k: Keys, d: int, norms: bool = True) -> Mixed:
    """Mamba-2 under the key names of Bamba, Granite and Falcon-H1."""
    heads = k.integer("mamba_n_heads")
    if k.data.get("mamba_d_head") == "auto":
        width = k.divide("mamba_d_head", d * k.integer("mamba_expand"), heads)
    else:
        width = k.integer("mamba_d_head")
    return mamba2(d, heads, width, k.integer("mamba_n_groups"), k.integer("mamba_d_state"), k.integer("mamba_d_conv"),
                  conv_bias=k.flag("mamba_conv_bias", absent=True), bias=k.flag("mamba_proj_bias", absent=False),
                  norms=norms)


@family("bamba", "falcon_h1")
def bamba(k: Keys) -> Architecture:
    """Mamba-2 and attention, in turn (Bamba) or side by side in every layer (Falcon-H1)."""
    name = k.text("model_type")
    d, n = width_and_depth(k)
    heads, kv, width = heads_of(k, d)
    both = name == "falcon_h1"
    bias = attention_bias(k)
    attention = gqa(d, heads, kv, width, bias=bias)
    if both and k.flag("projectors_bias", absent=False) != k.flag("mamba_proj_bias", absent=False):
        raise ValueError(f"{k.where}.projectors_bias: expected as in mamba_proj_bias, "
                         f"got {k.data.get('projectors_bias')}")
    state_space = _mamba2(k, d, norms=not both or k.flag("mamba_rms_norm", absent=False))
    ffn = dense(d, k.integer("intermediate_size"), bias=k.flag("mlp_bias", absent=False))
    if both:
        weights = tuple(attention[0] + state_space[0] + ffn + norm(d, copies=2))
        layers = [Layer("dense", weights, (attention[1], state_space[1]))] * n
    else:
        if k.has("layer_types"):
            full = [word not in MAMBA for word in k.words("layer_types", layers=n, among=(*MAMBA, *FULL))]
        else:
            none = "attn_layer_indices" in k.data and k.data["attn_layer_indices"] is None  # said, not left out
            chosen = set() if none else set(k.indices("attn_layer_indices", required=True))
            full = [i in chosen for i in range(n)]
        layers = [block("dense", attention if on else state_space, ffn, norm(d, copies=2)) for on in full]
    return decoder(k, name, d, layers, tied=False)


@family("nemotron_h")
def nemotron_h(k: Keys) -> Architecture:
    """Each layer is one sublayer: Mamba-2, attention, experts (not gated, perhaps on latent channels) or FFN."""
    d = k.integer("hidden_size")
    if k.has("hybrid_override_pattern"):
        words = _pattern(k, "hybrid_override_pattern")
    else:
        given = k.data.get("layers_block_type") or k.data.get("layer_types")
        count = k.integer("num_hidden_layers", absent=len(given) if isinstance(given, list) else 0)
        words = k.words("layers_block_type", "layer_types", layers=count,
                        among=(*MAMBA, "moe", "attention", "full_attention", "mlp"))
    sublayers = {word: _nemotron(k, d, word) for word in dict.fromkeys(words)}
    layers = [Layer("sparse" if word == "moe" else "dense", *sublayers[word]) for word in words]
    return decoder(k, "nemotron_h", d, layers, tied=False, mtp=_nemotron_mtp(k, d))


def _nemotron_mtp(k: Keys, d: int) -> tuple[Layer, ...]:
    """Prediction layers: each a sequence of sublayers, the first behind a 2d -> d projection with two norms, the last
    with a norm behind it."""
    count = predictions(k)
    if not count:
        return ()
    if k.has("mtp_hybrid_override_pattern"):
        words = _pattern(k, "mtp_hybrid_override_pattern")
    elif k.has("mtp_layers_block_type"):
        given = k.data["mtp_layers_block_type"]
        words = k.words("mtp_layers_block_type", layers=len(given) if isinstance(given, list) else 0,
                        among=("mamba", "moe", "attention", "mlp"))
    else:
        k.excluded.append("num_nextn_predict_layers")
        return ()
    found = [_nemotron(k, d, word) for word in words]
    weights = tuple(w for part in found for w in part[0])
    return (predictor(d, Layer("mtp", weights, tuple(m for part in found for m in part[1]))),) * count


def _pattern(k: Keys, key: str) -> list[str]:
    """A string of one letter a layer."""
    kinds = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
    pattern = k.text(key)
    unknown = sorted(set(pattern) - set(kinds))
    if unknown:
        raise ValueError(f"config.{key}: expected letters of {''.join(kinds)}, got {unknown}")
    return [kinds[letter] for letter in pattern]


def _nemotron(k: Keys, d: int, word: str) -> tuple:
    if word in MAMBA:
        found, mixer = mamba2(
            d, k.integer("mamba_num_heads"), k.integer("mamba_head_dim"), k.integer("n_groups", "mamba_n_groups"),
            k.integer("ssm_state_size"), k.integer("conv_kernel", "mamba_d_conv"),
            conv_bias=k.flag("use_conv_bias", absent=True), bias=k.flag("use_bias", absent=False))
        return tuple(found + norm(d)), (mixer,)
    if word in FULL:
        bias = attention_bias(k)
        k.data = {**k.data, "head_dim": k.integer("head_dim", "attention_head_dim")}
        found, mixer = gqa(d, *heads_of(k, d), bias=bias)
        return tuple(found + norm(d)), (mixer,)
    ffn_bias = k.flag("mlp_bias", absent=False)
    if word == "mlp":
        return tuple(dense(d, k.integer("intermediate_size"), gated=False, bias=ffn_bias) + norm(d)), ()
    expert = k.integer("moe_intermediate_size")
    latent = k.integer("moe_latent_size", absent=0, minimum=0)
    shared = k.integer("moe_shared_expert_intermediate_size", minimum=0)
    found = moe(d, expert, k.integer("n_routed_experts"), k.integer("num_experts_per_tok"), gated=False,
                shared=shared * (k.integer("n_shared_experts", minimum=0) > 0), shared_bias=ffn_bias,
                selection="buffer", latent=latent)
    found += [Weight("latent", (width,), "bias") for width in (latent, d)] * (ffn_bias and latent > 0)
    return tuple(found + norm(d)), ()
