"""Encoders of text: BERT and its kin, as their base model has them (without a head for masked words)."""

from __future__ import annotations

from dataclasses import dataclass

from .families import block, family
from .ffns import dense, moe
from .mixers import Mixed, gqa
from .reader import Keys
from .weights import Architecture, Layer, Mixer, Weight, matrix, norm


@dataclass(frozen=True)
class Encoder:
    """What tells one BERT-like encoder from another.

    positions: rows of the position table beyond `max_position_embeddings`, None without a table. types: whether there
    is a table of token types. pooler: whether the base model has one. embedded, final: norms behind the embeddings
    and behind the layers. bias: the attention projections that have one. narrow: key of the width of the embeddings
    where a matrix projects them to the model's. gated: FFNs of three matrices; ffn_bias: of all, or of the last alone.
    """

    positions: int | None = 0
    types: bool = True
    pooler: bool = True
    embedded: int = 1
    final: int = 0
    bias: str = "qkvo"
    narrow: str = ""
    gated: bool = False
    ffn_bias: str = "all"


BASE = Encoder()
BARE = Encoder(pooler=False)
ENCODERS = {
    **dict.fromkeys(("bert", "roberta", "camembert", "xlm-roberta", "tapas", "visual_bert", "ernie", "big_bird",
                     "data2vec-text", "xmod", "bros", "layoutlm", "markuplm", "ibert", "luke", "roc_bert",
                     "longformer", "squeezebert", "fnet", "align_text_model", "clap_text_model",
                     "bridgetower_text_model", "chinese_clip_text_model"), BASE),
    **dict.fromkeys(("splinter", "dpr", "convbert", "altclip_text_model"), BARE),
    **dict.fromkeys(("yoso", "nystromformer", "mra"), Encoder(positions=2, pooler=False)),
    **dict.fromkeys(("distilbert", "flaubert", "xlm", "bert-generation"), Encoder(types=False, pooler=False)),
    "roberta-prelayernorm": Encoder(final=1),
    "xlm-roberta-xl": Encoder(embedded=0, final=1),
    "megatron-bert": Encoder(embedded=0, final=1),
    "mpnet": Encoder(types=False),
    "electra": Encoder(pooler=False, narrow="embedding_size"),
    "roformer": Encoder(positions=None, pooler=False, narrow="embedding_size"),
    "albert": Encoder(narrow="embedding_size"),
    "rembert": Encoder(narrow="input_embedding_size"),
    "deberta": Encoder(pooler=False, bias="qvo"),
    "deberta-v2": Encoder(pooler=False),
    "jina_embeddings_v3": Encoder(positions=None),
    "gte": Encoder(positions=None, pooler=False, gated=True, ffn_bias="last"),
    "nomic_bert": Encoder(positions=None, pooler=False, bias="", gated=True, ffn_bias="none"),
}


@family(*ENCODERS)
def encoder(k: Keys, decodes: bool = False) -> Architecture:
    """Every layer: attention of `num_attention_heads` heads and an FFN, both behind norms with biases. A model that
    decodes has no pooler."""
    name = k.text("model_type")
    e = ENCODERS[name]
    if name == "nomic_bert" and k.has("n_embd"):
        return nomic(k)
    d = k.integer("hidden_size", "dim", "emb_dim")
    n = k.integer("num_hidden_layers", "n_layers")
    heads = 1 if name == "fnet" else k.integer("num_attention_heads", "n_heads")
    hidden = k.integer("intermediate_size", "hidden_dim", absent=4 * d) if name in ("xlm", "flaubert") else k.integer(
        "intermediate_size", "hidden_dim")
    head = k.integer("head_dim") if k.has("head_dim") else k.divide("head_dim", d, heads)
    ffn = dense(d, hidden, gated=e.gated, bias=e.ffn_bias == "all")
    ffn += [Weight("dense", (d,), "bias")] * (e.ffn_bias == "last")
    found, mixer = gqa(d, heads, heads, head, bias=e.bias)
    more = LAYER_EXTRAS[name](k, d, heads) if name in LAYER_EXTRAS else []
    mixed: Mixed = (found, mixer)
    if name == "convbert":
        mixed = _convolved(k, d, heads)
    elif name == "squeezebert":
        mixed, ffn = _grouped(k, d, hidden, mixer)
    elif name == "fnet":
        mixed = [], Mixer()
    layer = block("dense", mixed, ffn + more, norm(d, True, 2))
    embedded = k.integer(e.narrow) if e.narrow else d
    outer = [Weight("embedding", (rows, embedded), "table") for rows in _tables(k, e)]
    outer += norm(embedded, True, e.embedded) + norm(d, True, e.final)
    if e.narrow and (embedded != d or name in ("albert", "rembert")):
        outer += matrix("other", d, embedded, True)
    if name in OUTER_EXTRAS:
        outer += OUTER_EXTRAS[name](k, d, heads)
    if e.pooler and not decodes:
        outer += matrix("other", d, d, True)
    layers = (layer,) * n
    if name == "albert":
        layers = _shared(k, layer, n)
    return Architecture(name, d, k.integer("vocab_size", "n_words"), layers, tuple(outer), True,
                        assumed=tuple(sorted(k.assumed.items())), excluded=tuple(k.excluded))


def nomic(k: Keys) -> Architecture:
    """Nomic's encoders from the keys of their own code: gated FFNs, or in turn plain ones and mixtures of them whose
    experts share one output bias."""
    d, n, heads, hidden = (k.integer(key) for key in ("n_embd", "n_layer", "n_head", "n_inner"))
    bias = "qkvo" if k.flag("qkv_proj_bias") else ""
    gated = k.text("activation_function") in ("swiglu", "geglu", "glu")
    plain = dense(d, hidden, gated=gated, bias=k.flag("mlp_fc1_bias"))
    every = k.integer("moe_every_n_layers", absent=0, minimum=0) if k.has("num_experts") else 0
    ffn = [*moe(d, hidden, k.integer("num_experts"), k.integer("moe_top_k"), gated=gated, where="config.moe_top_k"),
           Weight("routed", (d,), "bias")] if every else plain
    mixed = gqa(d, heads, heads, k.divide("head_dim", d, heads), bias=bias)
    sparse = [every > 0 and i % every == 1 for i in range(n)]
    layers = tuple(block("sparse" if on else "dense", mixed, ffn if on else plain, norm(d, True, 2)) for on in sparse)
    tables = [Weight("embedding", (rows, d), "table")
              for rows in (k.integer("vocab_size"), k.integer("type_vocab_size", minimum=0)) if rows]
    return Architecture("nomic_bert", d, tables[0].shape[0], layers, (*tables, *norm(d, True)), True,
                        assumed=tuple(sorted(k.assumed.items())))


def _tables(k: Keys, e: Encoder) -> list[int]:
    """Rows of the tables of tokens, positions and token types."""
    rows = [k.integer("vocab_size", "n_words")]
    if e.positions is not None and k.flag("position_biased_input", absent=True):
        rows.append(k.integer("max_position_embeddings") + e.positions)
    if k.has("type_vocab_sizes"):
        rows += k.indices("type_vocab_sizes")
    elif e.types:
        rows.append(k.integer("type_vocab_size", minimum=0))
    return [r for r in rows if r]


def _shared(k: Keys, layer: Layer, n: int) -> tuple[Layer, ...]:
    """ALBERT: a few groups of layers, each passed n / groups times."""
    groups, inner = k.integer("num_hidden_groups"), k.integer("inner_group_num")
    passes = k.divide("num_hidden_groups", n, groups)
    return (layer.repeated(passes, []),) * (groups * inner)


def _convolved(k: Keys, d: int, heads: int) -> Mixed:
    """ConvBERT: fewer heads beside a convolution whose taps depend on the token."""
    heads, taps = k.divide("head_ratio", heads, k.integer("head_ratio")), k.integer("conv_kernel_size")
    if k.integer("num_groups") != 1:
        raise ValueError("config.num_groups: a ConvBERT with grouped FFNs has no weight table")
    width = k.divide("head_dim", d, k.integer("num_attention_heads"))
    inner = heads * width
    found = matrix("attention", inner, d, True) * 3 + matrix("attention", d, d, True)
    found += [Weight("attention", (d, 1, taps), "filter"), *matrix("attention", inner, d, True)]
    found += matrix("attention", heads * taps, inner, True) + matrix("attention", inner, d, True)
    return found, Mixer(heads, width, width, None, 2 * inner)


def _grouped(k: Keys, d: int, hidden: int, mixer: Mixer) -> tuple[Mixed, list[Weight]]:
    """SqueezeBERT: projections and FFN as convolutions of width 1 over groups of channels."""
    def linear(part: str, rows: int, columns: int, key: str) -> list[Weight]:
        return matrix(part, rows, k.divide(key, columns, k.integer(key)), True)

    found = [w for key in ("q_groups", "k_groups", "v_groups", "post_attention_groups")
             for w in linear("attention", d, d, key)]
    ffn = linear("dense", hidden, d, "intermediate_groups") + linear("dense", d, hidden, "output_groups")
    return (found, mixer), ffn


def _table(part: str, rows: int, width: int) -> list[Weight]:
    return [Weight(part, (rows, width), "table")]


def _adapters(k: Keys, d: int, _: int) -> list[Weight]:
    """X-MOD: two narrow matrices for each language behind the FFN, of which a token uses one language's."""
    low = k.divide("adapter_reduction_factor", d, k.integer("adapter_reduction_factor"))
    languages = k.data.get("languages")
    if not isinstance(languages, list | tuple) or not languages:
        raise ValueError(f"config.languages: expected a list of at least one language, got {languages!r}")
    count = len(languages)
    return [*matrix("dense", low, d, True, count, 1), *matrix("dense", d, low, True, count, 1)]


def _xpath(k: Keys, d: int, _: int) -> list[Weight]:
    """MarkupLM: tables of tags and of their order for each depth, and three projections."""
    depth, unit = k.integer("max_depth"), k.integer("xpath_unit_hidden_size")
    found = _table("embedding", k.integer("max_xpath_tag_unit_embeddings"), unit) * depth
    found += _table("embedding", k.integer("max_xpath_subs_unit_embeddings"), unit) * depth
    found += matrix("other", d, depth * unit, True) + matrix("other", 4 * d, depth * unit, True)
    return found + matrix("other", d, 4 * d, True)


def _entities(k: Keys, d: int, _: int) -> list[Weight]:
    """LUKE: a second set of tables, for entities."""
    rows, width = k.integer("entity_vocab_size"), k.integer("entity_emb_size")
    found = _table("embedding", rows, width) + (matrix("other", d, width) if width != d else [])
    found += _table("embedding", k.integer("max_position_embeddings"), d)
    return found + _table("embedding", k.integer("type_vocab_size"), d) + norm(d, True)


def _sounds_and_shapes(k: Keys, d: int, _: int) -> list[Weight]:
    """RoCBert: tables of pronunciations and shapes beside the words', joined by one matrix."""
    found, wide = [], d
    for kind in ("pronunciation", "shape"):
        if k.flag(f"enable_{kind}", absent=True):
            width = k.integer(f"{kind}_embed_dim")
            found += _table("embedding", k.integer(f"{kind}_vocab_size"), width)
            wide += width
    return found + (matrix("other", d, wide, True) if k.flag("concat_input", absent=True) else [])


def _seen(k: Keys, d: int, _: int) -> list[Weight]:
    """VisualBERT: positions and types of image regions, and their projection."""
    found = _table("vision", k.integer("max_position_embeddings"), d)
    found += _table("vision", k.integer("type_vocab_size"), d)
    return found + matrix("vision", d, k.integer("visual_embedding_dim"), True)


def _queries(count: int):
    """Further projections of d x d in each attention."""
    return lambda k, d, heads: matrix("attention", d, d, True) * count


def _projected(k: Keys, d: int, _: int) -> list[Weight]:
    """DPR: a projection where one is asked for."""
    width = k.integer("projection_dim", absent=0, minimum=0)
    return matrix("other", width, d, True) if width else []


LAYER_EXTRAS = {
    "xmod": _adapters,
    "longformer": _queries(3),
    "luke": lambda k, d, h: matrix("attention", d, d, True) * (3 * k.flag("use_entity_aware_attention", absent=True)),
    "nystromformer": lambda k, d, h: [Weight("attention", (h, 1, k.integer("conv_kernel_size"), 1), "filter")],
}
OUTER_EXTRAS = {
    "dpr": _projected,
    "altclip_text_model": lambda k, d, h: matrix("other", k.integer("project_dim"), d, True) + norm(d, True),
    "markuplm": _xpath,
    "luke": _entities,
    "roc_bert": _sounds_and_shapes,
    "visual_bert": _seen,
    "roformer": lambda k, d, h: _table("embedding", k.integer("max_position_embeddings"), d // h),
    "fnet": lambda k, d, h: matrix("other", d, d, True),
    "bros": lambda k, d, h: matrix("other", k.integer("dim_bbox_projection"), k.integer("dim_bbox_sinusoid_emb_2d")),
    "layoutlm": lambda k, d, h: _table("embedding", k.integer("max_2d_position_embeddings"), d) * 4,
    "mpnet": lambda k, d, h: [Weight("attention", (k.integer("relative_attention_num_buckets"), h), "filter")],
}
