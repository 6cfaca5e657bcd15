"""One MoE block of a published model as a MoEConfig: from a preset's name or a config.json. Imports no torch.

The sizes and the router of the first sparse layer are read from the model's own config keys; a family that is not in
the table below is refused by name rather than guessed. The stored presets hold sizes and the router's form; a final
scale of the weights that they leave out is read as 1. A config.json may also hold the fields of MoEConfig themselves.
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

BENCH_PRESETS = {
    "mixtral-8x7b": "Mixtral-8x7B-v0.1",
    "mixtral-8x22b": "Mixtral-8x22B-v0.1",
    "olmoe-1b-7b": "OLMoE-1B-7B",
    "qwen2-57b-a14b": "Qwen2-57B-A14B",
    "qwen3-30b-a3b": "Qwen3-30B-A3B",
    "qwen3-235b-a22b": "Qwen3-235B-A22B",
    "qwen3-next-80b-a3b": "Qwen3-Next-80B-A3B",
    "deepseek-v2": "DeepSeek-V2",
    "deepseek-v3": "DeepSeek-V3",
    "kimi-k2": "Kimi-K2",
    "glm-4.5": "GLM-4.5",
    "glm-4.5-air": "GLM-4.5-Air",
    "gpt-oss-20b": "gpt-oss-20b",
    "gpt-oss-120b": "gpt-oss-120b",
    "granite-3.0-1b-a400m": "Granite-3.0-1B-A400M",
    "minimax-text-01": "MiniMax-Text-01",
    "nemotron-3-nano-30b-a3b": "Nemotron-3-Nano-30B-A3B",
}
# The defaults of transformers' Glm4MoeConfig, which are this model.
_GLM_4_5_AIR = {"model_type": "glm4_moe", "hidden_size": 4096, "moe_intermediate_size": 1408, "n_routed_experts": 128,
                "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
                "routed_scaling_factor": 1.0, "norm_topk_prob": True}


def load_block(source: str) -> tuple[str, MoEConfig]:
    """A preset's name, or the path of a JSON file or of the folder of a config.json -> (label, MoEConfig).

    Raises ValueError naming close presets, the missing key or the unknown family; OSError for an unreadable file.
    """
    if source in BENCH_PRESETS:
        return source, block_config(_preset(BENCH_PRESETS[source]))
    path = Path(source)
    if path.is_dir() and not (path / "config.json").is_file():
        raise checks.bad("PRESET", "a file config.json, or a folder that holds one", f"the folder {source!r}")
    path = path / "config.json" if path.is_dir() else path
    if path.suffix != ".json" and not path.exists():
        near = difflib.get_close_matches(source.lower(), BENCH_PRESETS, 3)
        hint = f"{', '.join(near)} or another of them" if near else ", ".join(BENCH_PRESETS)
        raise checks.bad("PRESET", f"a file config.json, or a preset ({hint})", repr(source))
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise checks.bad(str(path), "a JSON object", f"text that breaks at line {error.lineno}: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise checks.bad(str(path), "a JSON object", f"bytes that are no text ({error})") from None
    if not isinstance(config, dict):
        raise checks.bad(str(path), "a JSON object", type(config).__name__)
    return path.stem if path.stem != "config" else path.resolve().parent.name, block_config(config, where=path.name)


def _preset(name: str) -> Mapping[str, Any]:
    if name == "GLM-4.5-Air":
        return _GLM_4_5_AIR
    from .accounting.presets import find_preset

    return find_preset(name).config


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


def block_config(config: Mapping[str, Any], where: str = "config") -> MoEConfig:
    """The MoE block that a model's config describes. Raises ValueError naming the key or the family."""
    if "model_type" not in config and "d_model" in config:
        return _own_fields(config, where)
    config = {**config, **config["text_config"]} if isinstance(config.get("text_config"), Mapping) else config
    family = config.get("model_type")
    if family not in _FAMILIES:
        raise checks.bad(f"{where}: model_type", f"one of {', '.join(sorted(_FAMILIES))}, or the fields of MoEConfig",
                         repr(family) if family else "no such key")
    return _FAMILIES[family](_Keys(config, where))


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


def _softmax(keys: _Keys, *, width: tuple[str, ...] = ("moe_intermediate_size",), renormalize: bool | None = None,
             shared: int = 0, shared_gate: bool = False, activation: Activation = SWIGLU) -> MoEConfig:
    """Softmax over all experts, then top-k. renormalize None: the config's norm_topk_prob, false when absent."""
    E = keys.integer("num_experts", "num_local_experts", "n_routed_experts")
    K = keys.integer("num_experts_per_tok")
    renorm = keys.flag("norm_topk_prob", False) if renormalize is None else renormalize
    return MoEConfig(d_model=keys.integer("hidden_size"), d_expert=keys.integer(*width), num_experts=E, top_k=K,
                     d_shared=shared, shared_gate=shared_gate, activation=activation,
                     router=RouterConfig(num_experts=E, top_k=K, renormalize=renorm))


def _of_selected(keys: _Keys, *, activation: Activation = SWIGLU, layout: Layout = Layout.CONCAT, bias: bool = False
                 ) -> MoEConfig:
    """Top-k of the logits, then a softmax over the k."""
    E, K = keys.integer("num_local_experts"), keys.integer("num_experts_per_tok")
    return MoEConfig(d_model=keys.integer("hidden_size"), d_expert=keys.integer("intermediate_size"), num_experts=E,
                     top_k=K, activation=activation, layout=layout, bias=bias, router_bias=bias,
                     router=RouterConfig(num_experts=E, top_k=K, order="topk_score"))


def _deepseek_v2(keys: _Keys) -> MoEConfig:
    E, K, F = (keys.integer(n) for n in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"))
    limited = keys.config.get("topk_method") == "group_limited_greedy"
    groups = keys.integer("n_group", absent=1) if limited else 1
    return MoEConfig(d_model=keys.integer("hidden_size"), d_expert=F, num_experts=E, top_k=K,
                     d_shared=F * keys.integer("n_shared_experts", absent=0),
                     router=RouterConfig(num_experts=E, top_k=K, num_groups=groups, group_reduce="max",
                                         group_fill="zero",
                                         topk_groups=keys.integer("topk_group", absent=1) if limited else 1,
                                         scale=keys.number("routed_scaling_factor", 1.0)))


def _sigmoid_groups(keys: _Keys) -> MoEConfig:
    """DeepSeek V3 and those that follow it: sigmoid, a selection bias, groups by the sum of their two best."""
    E, K, F = (keys.integer(n) for n in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"))
    groups = keys.integer("n_group", absent=1)
    renorm = keys.flag("norm_topk_prob", True)
    router = RouterConfig(num_experts=E, top_k=K, score="sigmoid", num_groups=groups,
                          topk_groups=keys.integer("topk_group", absent=1), renormalize=renorm,
                          renorm_eps=1e-20 if renorm else 0.0, scale=keys.number("routed_scaling_factor", 1.0))
    return MoEConfig(d_model=keys.integer("hidden_size"), d_expert=F, num_experts=E, top_k=K, router=router,
                     selection_bias=True, d_shared=F * keys.integer("n_shared_experts", absent=0))


def _nemotron_h(keys: _Keys) -> MoEConfig:
    if keys.integer("moe_latent_size", absent=0):
        raise checks.bad(f"{keys.where}: moe_latent_size", "0 (no projection around the experts)",
                         keys.integer("moe_latent_size"))
    block = _sigmoid_groups(keys)
    return dataclasses.replace(block, d_shared=keys.integer("moe_shared_expert_intermediate_size", absent=0),
                               activation=Activation(kind="relu2", gated=False))


def _shared_qwen2(keys: _Keys) -> int:
    return keys.integer("shared_expert_intermediate_size", absent=0)


_FAMILIES: dict[str, Callable[[_Keys], MoEConfig]] = {
    "mixtral": lambda k: _softmax(k, width=("intermediate_size",), renormalize=True),
    "minimax": lambda k: _softmax(k, width=("intermediate_size",), renormalize=True),
    "olmoe": lambda k: _softmax(k, width=("intermediate_size",)),
    "qwen2_moe": lambda k: _softmax(k, shared=_shared_qwen2(k), shared_gate=_shared_qwen2(k) > 0),
    "qwen3_moe": lambda k: _softmax(k),
    "qwen3_next": lambda k: _softmax(k, shared=_shared_qwen2(k), shared_gate=_shared_qwen2(k) > 0),
    "granitemoe": _of_selected,
    "gpt_oss": lambda k: _of_selected(k, activation=SWIGLU_OAI, layout=Layout.INTERLEAVED, bias=True),
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _sigmoid_groups,
    "deepseek_v32": _sigmoid_groups,
    "kimi_k2": _sigmoid_groups,
    "glm4_moe": _sigmoid_groups,
    "nemotron_h": _nemotron_h,
}
