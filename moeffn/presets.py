"""One MoE block of a published model as a MoEConfig: from a preset's name or a config.json. Imports no torch.

Names and sizes are those of `moeffn.accounting`: what `moeffn params` counts, the block is built from. The router's
form comes from the table below, by family; a family that is not in it is refused by name rather than guessed. The
stored presets hold sizes; a scale of the weights or groups that they leave out are read as 1. A config.json may also
hold the fields of MoEConfig themselves.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import checks
from .config import SWIGLU, SWIGLU_OAI, Activation, Layout, MoEConfig, RouterConfig


def load_block(source: str) -> tuple[str, MoEConfig]:
    """A preset's name, or the path of a JSON file or of the folder of a config.json -> (label, MoEConfig).

    Raises ValueError naming close presets, the missing key or the unknown family; OSError for an unreadable file.
    """
    path, known = Path(source), "a file config.json, or a preset that `moeffn params list` shows"
    if not source:  # as a path it would be the folder that the process runs in
        raise checks.bad("PRESET", known, "''")
    if path.is_dir() and not (path / "config.json").is_file():
        raise checks.bad("PRESET", "a file config.json, or a folder that holds one", f"the folder {source!r}")
    path = path / "config.json" if path.is_dir() else path
    if path.suffix != ".json" and not path.exists():
        from .accounting.presets import close_presets, find_preset

        try:
            preset = find_preset(source)
        except ValueError:
            near = close_presets(source)
            hint = f"; near ones: {', '.join(near)}" if near else ""
            raise checks.bad("PRESET", known + hint, repr(source)) from None
        return preset.name, block_config(preset.config, where=preset.name)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise checks.bad(str(path), "a JSON object", f"text that breaks at line {error.lineno}: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise checks.bad(str(path), "a JSON object", f"bytes that are no text ({error})") from None
    except RecursionError as error:
        raise checks.bad(str(path), "a JSON object", f"one nested too deep ({error})") from None
    if not isinstance(config, dict):
        raise checks.bad(str(path), "a JSON object", type(config).__name__)
    return path.stem if path.stem != "config" else path.resolve().parent.name, block_config(config, where=path.name)


def block_config(config: Mapping[str, Any], where: str = "config") -> MoEConfig:
    """The MoE block that a model's config describes. Raises ValueError naming the key or the family."""
    if "model_type" not in config and "d_model" in config:
        return _own_fields(config, where)
    text: Mapping[str, Any] = next((config[key] for key in ("text_config", "llm_config", "language_config")
                 if isinstance(config.get(key), Mapping)), {})
    inner = {**config, **text}
    family = inner.get("model_type")
    if family not in _ROUTERS:
        raise checks.bad(f"{where}: model_type",
                         f"a mixture's ({', '.join(sorted(_ROUTERS))}), or the fields of MoEConfig",
                         repr(family) if family else "no such key")
    from .accounting.families import architecture

    try:
        model = architecture(config)
    except (ValueError, TypeError) as error:
        raise type(error)(str(error).replace("config.", f"{where}: ", 1)) from None
    layer = next((layer for layer in model.layers if layer.num_experts), None)
    if layer is None:
        raise checks.bad(f"{where}: num_experts", "experts in at least one layer", "none")
    if any(w.part == "latent" for w in layer.weights):
        raise checks.bad(f"{where}: moe_latent_size", "0 (no projection around the experts)", "one")
    if any(w.part == "dense" for w in layer.weights):
        raise checks.bad(f"{where}: model_type", "a family whose sparse layers have no dense FFN beside the experts",
                         repr(family))
    options, activation = _ROUTERS[family]
    routed = [w for w in layer.routed if w.kind == "matrix"]
    shared = next((w.shape[0] for w in layer.weights if w.part == "shared" and w.kind == "matrix"), 0)
    experts, top_k, idle = routed[0].copies, routed[0].used or 0, routed[0].idle
    bias = any(w.kind == "bias" for w in layer.routed)
    router = RouterConfig(num_experts=experts, top_k=top_k, num_identity_experts=idle, **options(_Keys(inner, where)))
    return MoEConfig(
        d_model=model.d_model, d_expert=routed[0].shape[0], num_experts=experts, top_k=top_k, d_shared=shared,
        shared_gate=any(w.part == "shared_gate" for w in layer.weights), router=router, bias=bias, router_bias=bias,
        selection_bias=any(w.part == "router" and w.kind != "matrix" for w in layer.weights) and not bias,
        activation=dataclasses.replace(activation, gated=len(routed) == 3),
        layout=Layout.INTERLEAVED if activation is SWIGLU_OAI else Layout.CONCAT)


class _Keys:
    """Typed access to a config that names the key in every error."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def integer(self, *names: str, absent: int | None = None) -> int:
        for name in names:
            value = self.config.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int):
                    raise checks.bad(f"{self.where}: {name}", "an int", repr(value))
                return value
        if absent is None:
            raise checks.bad(f"{self.where}: {' or '.join(names)}", "an int", "no such key")
        return absent

    def number(self, name: str, absent: float) -> float:
        value = self.config.get(name)
        if value is None:
            return absent
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise checks.bad(f"{self.where}: {name}", "a number", repr(value))
        return float(value)

    def flag(self, name: str, absent: bool) -> bool:
        value = self.config.get(name)
        return absent if value is None else bool(value)


def _own_fields(config: Mapping[str, Any], where: str) -> MoEConfig:
    known = {f.name: f for f in dataclasses.fields(MoEConfig) if f.init}
    for key in config:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f" ({near[0]}?)" if near else ""
            raise checks.bad(f"{where}: {key}", f"a field of MoEConfig{hint}", "another key")
    missing = [n for n, f in known.items() if f.default is dataclasses.MISSING and n not in config]
    if missing:
        raise checks.bad(f"{where}: {missing[0]}", "an int", "no such key")
    values = dict(config)
    for name, cls in (("router", RouterConfig), ("activation", Activation)):
        if isinstance(values.get(name), Mapping):
            try:
                values[name] = cls(**values[name])
            except TypeError as error:
                raise checks.bad(f"{where}: {name}", f"the fields of {cls.__name__}", str(error)) from None
    return MoEConfig(**values)


def _norm(k: _Keys) -> dict[str, Any]:
    return {"renormalize": k.flag("norm_topk_prob", False)}


def _sum(k: _Keys) -> dict[str, Any]:
    return {"renormalize": True}


def _selected(k: _Keys) -> dict[str, Any]:
    """Top-k of the logits, then a softmax over the k."""
    return {"order": "topk_score"}


def _sigmoid(k: _Keys) -> dict[str, Any]:
    return {"score": "sigmoid", "renormalize": True, "scale": k.number("routed_scaling_factor", 1.0)}


def _groups_of_best(k: _Keys) -> dict[str, Any]:
    """DeepSeek V2: softmax, groups by their best expert."""
    limited = k.config.get("topk_method") == "group_limited_greedy"
    return {"num_groups": k.integer("n_group", absent=1) if limited else 1, "group_reduce": "max",
            "group_fill": "zero", "topk_groups": k.integer("topk_group", absent=1) if limited else 1,
            "scale": k.number("routed_scaling_factor", 1.0)}


def _groups_of_two(k: _Keys) -> dict[str, Any]:
    """DeepSeek V3 and those that follow it: sigmoid, a selection bias, groups by the sum of their two best."""
    renorm = k.flag("norm_topk_prob", True)
    return {"score": "sigmoid", "num_groups": k.integer("n_group", absent=1), "renormalize": renorm,
            "topk_groups": k.integer("topk_group", absent=1), "renorm_eps": 1e-20 if renorm else 0.0,
            "scale": k.number("routed_scaling_factor", 1.0)}


def _softmax(k: _Keys) -> dict[str, Any]:
    return {"scale": k.number("routed_scaling_factor", 1.0)}


def _clamped(k: _Keys) -> dict[str, Any]:
    return {"renormalize": True, "renorm_eps": k.number("moe_norm_min", 1e-12), "renorm_eps_mode": "clamp"}


def _table(options: Callable[[_Keys], dict[str, Any]], *families: str, activation: Activation = SWIGLU) -> dict:
    return dict.fromkeys(families, (options, activation))


_ROUTERS: dict[str, tuple[Callable[[_Keys], dict[str, Any]], Activation]] = {
    **_table(_sum, "mixtral", "minimax", "minimax_text_01", "hunyuan_v1_moe", "qwen3_5_moe", "qwen3_5_moe_text",
             "qwen3_vl_moe", "qwen3_vl_moe_text", "dbrx"),
    **_table(_norm, "olmoe", "flex_olmo", "qwen2_moe", "qwen3_moe", "qwen3_next", "deepseek", "bailing_moe"),
    **_table(_selected, "granitemoe", "granitemoeshared", "granitemoehybrid", "aria_text"),
    **_table(_selected, "gpt_oss", activation=SWIGLU_OAI),
    **_table(_groups_of_best, "deepseek_v2"),
    **_table(_groups_of_two, "deepseek_v3", "deepseek_v32", "kimi_k2", "kimi_k25", "glm4_moe", "glm4v_moe_text",
             "glm4_moe_lite", "glm_moe_dsa", "dots1", "solar_open", "exaone_moe", "mimo_v2_flash", "bailing_moe_v2",
             "kimi_linear", "axk1"),
    **_table(_groups_of_two, "nemotron_h", activation=Activation(kind="relu2", gated=False)),
    **_table(_sigmoid, "minimax_m2", "afmoe", "hy_v3"),
    **_table(_softmax, "jamba", "longcat_flash"),
    **_table(_clamped, "ernie4_5_moe"),
    **_table(lambda k: {"score": "sparsemixer", "jitter_eps": k.number("router_jitter_noise", 0.01)}, "phimoe"),
    **_table(lambda k: {"order": "topk_score", "score": "sigmoid", "apply_to": "input"}, "llama4", "llama4_text"),
    **_table(lambda k: {"score": "sigmoid", "renormalize": k.flag("norm_topk_prob", True)}, "lfm2_moe"),
}
