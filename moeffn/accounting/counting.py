"""Total and active weights of a model, by component, layer and convention.

"Active" has no single meaning in the field: vendors differ by up to twice the vocabulary times the width. So every
count says which convention it follows, and `VENDORS` holds those of published figures.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from .families import architecture
from .presets import find_preset
from .weights import FFN_PARTS, PARTS, Architecture, Layer, Weight

Runs = list[tuple[Layer, int]]
SCOPES = ("ffn", "layers", "model", "model+mtp", "checkpoint", "multimodal")
EMBEDDINGS = ("all", "head", "none")
IDLE = ("min", "mean", "max")


@dataclass(frozen=True, kw_only=True)
class Convention:
    """What counts.

    scope: ffn (FFNs alone), layers (no embedding, head or final norm), model (of a config the language model, where a
    vendor's figure does not hold its towers), model+mtp (with multi-token-prediction layers), multimodal (with the
    towers that a config names), checkpoint (also buffers, and embedding and head once more for each prediction layer
    that stores them).
    total, active: which embeddings count in the total and in the active figure: all; head (the head's matrix but not
    the input table: what a forward pass multiplies by; a tied matrix stays, because it is the head); none.
    idle: how many of the top-k places go to experts that compute nothing (LongCat): min, mean or max active weights.
    norms, biases, router_biases, vision: whether these count. vision=no is the language model alone, of a config and
    of a live wrapper alike; a config's towers count only where the vendor's figure holds them (Gemma) and are named in
    `Count.excluded` elsewhere. Router biases are the selection biases of
    auxiliary-loss-free routers, parameters in some families and buffers in others.
    """

    scope: str = "model"
    total: str = "all"
    active: str = "all"
    idle: str = "mean"
    norms: bool = True
    biases: bool = True
    router_biases: bool = True
    vision: bool = True

    def __post_init__(self) -> None:
        for name, value, allowed in (("scope", self.scope, SCOPES), ("total", self.total, EMBEDDINGS),
                                     ("active", self.active, EMBEDDINGS), ("idle", self.idle, IDLE)):
            if value not in allowed:
                raise ValueError(f"convention.{name}: expected one of {', '.join(allowed)}, got {value!r}")


# What the published "active" figures of these vendors count (their model cards and papers).
VENDORS = {
    "all": Convention(),
    "head": Convention(active="head"),
    "none": Convention(active="none"),
    **{name: Convention() for name in ("mistral", "qwen", "olmo", "dbrx", "phi", "jamba", "llama4", "dots", "hunyuan",
                                       "ling")},
    **{name: Convention(active="head") for name in ("openai", "nvidia", "deepseek", "kimi", "longcat")},
    **{name: Convention(active="none") for name in ("minimax", "ernie", "granite")},
    "glm": Convention(scope="model+mtp", total="none", active="none"),
}


@dataclass(frozen=True)
class PartCount:
    """One component: all its weights, and those a token uses."""

    part: str
    total: int
    active: int


@dataclass(frozen=True)
class LayerCount:
    """`count` equal layers of one kind, the first at `index`; total and active are of one of them."""

    index: int
    kind: str
    count: int
    total: int
    active: int
    num_experts: int
    top_k: int


@dataclass(frozen=True, repr=False)
class Count:
    """Integers all: the weights of a model under `convention`.

    total, active: under the convention. active_all, active_head, active_none: the same scope under each treatment of
    the embeddings. parts, layers: components and runs of equal layers (whole, whatever the embeddings' treatment);
    `components` holds the former by name.
    buffers: selection biases that are no parameters. mtp_total, mtp_active: multi-token-prediction layers.
    assumed: keys whose absence was read as the value shown. excluded: what the config names and the table leaves out.
    """

    name: str
    family: str
    convention: Convention
    total: int
    active: int
    active_all: int
    active_head: int
    active_none: int
    parts: tuple[PartCount, ...]
    layers: tuple[LayerCount, ...]
    buffers: int
    mtp_total: int
    mtp_active: int
    assumed: tuple[tuple[str, object], ...] = ()
    excluded: tuple[str, ...] = ()

    def __repr__(self) -> str:
        words = {True: "yes", False: "no"}
        said = [f"{key}={words.get(value, value)}" for key, value in vars(self.convention).items()
                if value != getattr(Convention(), key)]
        under = f", convention={','.join(said)!r}" if said else ""
        return f"Count({self.name!r}, total={self.total:_}, active={self.active:_}{under})"

    @property
    def components(self) -> dict[str, PartCount]:
        """Parts by name."""
        return {p.part: p for p in self.parts}

    @property
    def ffn_total(self) -> int:
        return sum(p.total for p in self.parts if p.part in FFN_PARTS)

    @property
    def ffn_active(self) -> int:
        return sum(p.active for p in self.parts if p.part in FFN_PARTS)

    @property
    def ffn_share(self) -> float:
        """Share of the FFNs (experts, routers, dense) in all weights of the scope."""
        return self.ffn_total / max(1, sum(p.total for p in self.parts))

    def part(self, name: str) -> PartCount:
        return next((p for p in self.parts if p.part == name), PartCount(name, 0, 0))

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name, "family": self.family, "total": self.total,
            "active": {"all": self.active_all, "head": self.active_head, "none": self.active_none},
            "convention": {**vars(self.convention), "total_count": self.total, "active_count": self.active},
            "components": {p.part: {"total": p.total, "active": p.active} for p in self.parts},
            "ffn": {"total": self.ffn_total, "active": self.ffn_active, "share": round(self.ffn_share, 6)},
            "layers": [vars(layer) for layer in self.layers],
            "mtp": {"total": self.mtp_total, "active": self.mtp_active}, "buffers": self.buffers,
            "assumed": dict(self.assumed), "excluded": list(self.excluded),
        }


def load(source: str | Path | Mapping[str, Any] | Architecture) -> tuple[str, Architecture]:
    """A name and the architecture of a preset name, a path to a config.json (or its folder), or a config."""
    if isinstance(source, Architecture):
        return source.family, source
    if isinstance(source, Mapping):
        name = source.get("_name_or_path") or source.get("model_type") or "config"
        return str(name), architecture(source)
    if not isinstance(source, str | Path):
        raise TypeError(f"source: expected a preset name, a path, a config or a module, got {type(source).__name__}")
    path = Path(source)
    if path.is_dir() and source:  # "" is no name for the folder that the process runs in
        path = path / "config.json"
    if path.is_file():
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:  # of JSON (too deep, too), or of bytes that are no text
            raise ValueError(f"{path}: not JSON ({error})") from None
        return path.parent.name if path.name == "config.json" else path.stem, architecture(config)
    if path.suffix == ".json" or path.is_absolute():
        raise ValueError(f"source: no file {str(source)!r}")
    preset = find_preset(str(source))
    return preset.name, architecture(preset.config)


def _whole(value: int | Fraction) -> int:
    """An active count; means over idle experts are rounded once, here."""
    return int(value) if value.denominator == 1 else round(value)


def counts_under(weight: Weight, convention: Convention, extra: bool) -> bool:
    """Whether a weight counts. `extra`: buffers do (checkpoints)."""
    if weight.kind == "buffer":
        return extra and convention.router_biases
    if weight.part == "router" and weight.kind == "bias" and len(weight.shape) == 1 and not convention.router_biases:
        return False
    if weight.part.startswith("vision") and not convention.vision:
        return False
    if weight.part == "norm" and not convention.norms:
        return False
    return convention.biases or weight.kind != "bias" or weight.part == "norm"


def _sum(weights: Iterable[Weight], convention: Convention, extra: bool) -> tuple[int, int | Fraction]:
    total: int = 0
    active: int | Fraction = 0
    for weight in weights:
        if counts_under(weight, convention, extra):
            total += weight.total
            active += weight.active(convention.idle)
    return total, active


def _layers(runs: Runs, convention: Convention) -> tuple[LayerCount, ...]:
    found: list[LayerCount] = []
    index = 0
    for layer, times in runs:
        total, active = _sum(layer.weights, convention, False)
        new = LayerCount(index, layer.kind, times, total, _whole(active), layer.num_experts, layer.top_k)
        if found and replace(new, index=0, count=1) == replace(found[-1], index=0, count=1):
            found[-1] = replace(found[-1], count=found[-1].count + times)  # another window alone
        else:
            found.append(new)
        index += times
    return tuple(found)


def _chosen(model: Architecture, runs: Runs, convention: Convention, with_mtp: bool) -> Iterator[tuple[Weight, int]]:
    """The weights of the convention's scope, with how many times each is there."""
    beside = [name for name in model.excluded if name.endswith("_config")]
    if convention.scope == "multimodal" and beside:
        towers = model.towers()
        if towers is None:
            raise ValueError(f"convention.scope: no weight table for {', '.join(beside)} of this config")
        yield from ((w, 1) for w in towers)
    if convention.scope != "layers":
        yield from ((w, 1) for w in model.outer if convention.scope != "ffn" or w.part in FFN_PARTS)
    for layer, times in (*runs, *((layer, 1) for layer in model.mtp if with_mtp)):
        yield from ((w, times) for w in layer.weights if convention.scope != "ffn" or w.part in FFN_PARTS)


def count_architecture(model: Architecture, convention: Convention, name: str = "") -> Count:
    """`count` for weights already listed."""
    extra = convention.scope == "checkpoint"
    with_mtp = convention.scope in ("model+mtp", "checkpoint")
    totals = dict.fromkeys(PARTS, 0)
    actives_of: dict[str, int | Fraction] = dict.fromkeys(PARTS, 0)
    runs = model.runs()
    for weight, times in _chosen(model, runs, convention, with_mtp):
        if counts_under(weight, convention, extra):
            totals[weight.part] += weight.total * times
            actives_of[weight.part] += weight.active(convention.idle) * times
    duplicates = model.duplicates if extra else 0
    total = sum(totals.values()) + duplicates
    active = sum(actives_of.values())
    table, head = (totals["embedding"], actives_of["embedding"]), (totals["head"], actives_of["head"])
    # A tied matrix (or an encoder's, which has no head) is not taken off under "head": the head multiplies by it.
    off = {"all": (0, 0), "none": (table[0] + head[0] + duplicates, table[1] + head[1]),
           "head": table if not model.tied else (0, 0)}
    actives = {key: _whole(active - gone[1]) for key, gone in off.items()}
    mtp_total, mtp_active = _sum((w for layer in model.mtp for w in layer.weights), convention, False)
    every = (*runs, *((layer, 1) for layer in model.mtp if with_mtp))
    buffers = sum(w.total for w in model.outer if w.kind == "buffer")
    buffers += sum(w.total * times for layer, times in every for w in layer.weights if w.kind == "buffer")
    return Count(
        name or model.family, model.family, convention, total - off[convention.total][0],
        actives[convention.active], actives["all"], actives["head"], actives["none"],
        tuple(PartCount(part, t, _whole(actives_of[part])) for part, t in totals.items() if t),
        _layers(runs, convention), buffers, mtp_total, _whole(mtp_active), model.assumed,
        tuple(n for n in model.excluded if convention.scope != "multimodal" or not n.endswith("_config")),
    )


def choose(convention: str | Convention) -> Convention:
    """A convention, the one a vendor's name stands for, or one written as "scope=model+mtp,active=none,norms=no"."""
    if isinstance(convention, Convention):
        return convention
    if convention in VENDORS:
        return VENDORS[convention]
    known = {field.name: field.default for field in fields(Convention)}
    values: dict[str, Any] = {}
    for pair in convention.split(","):
        key, equals, value = pair.partition("=")
        if not equals or key not in known or (isinstance(known[key], bool) and value not in ("yes", "no")):
            raise ValueError(f"convention: expected one of {', '.join(VENDORS)}, or pairs of "
                             f"{', '.join(known)} (the last four yes or no) as in active=none, got {convention!r}")
        values[key] = value == "yes" if isinstance(known[key], bool) else value
    return Convention(**values)


def count(source: Any, *, convention: str | Convention = "all", top_k: int | None = None) -> Count:
    """Total and active weights of a model.

    source: a preset's name ("Qwen3-30B-A3B"), a path to a config.json or to its folder, the config as a dict, or a
    live torch module (any architecture, also on the meta device; `top_k` where the module does not say it).
    convention: see `Convention`; a vendor's name stands for the convention of its published figures.

    Raises ValueError/TypeError naming the key that is missing, impossible or of a wrong type.
    """
    chosen = choose(convention)
    if hasattr(source, "named_parameters"):
        from .live import read_module

        return count_architecture(read_module(source, top_k), chosen, type(source).__name__)
    name, model = load(source)
    return count_architecture(model, chosen, name)
