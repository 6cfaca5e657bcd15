"""RouterConfig of a transformers model: which scores, in what order, renormalised how, as the family's code does it.

`family_router_config` reads a configuration, a model, or one block; recipes are named in `families.csv`. A scale that a
family applies to the experts' sum instead of the weights is the same function, and is given as `scale`. Learned scales
(Gemma 4's per expert, Inkling's global one) are parameters and no part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from .. import checks
from ..config import RouterConfig
from . import families
from .families import Family

Options = dict[str, Any]


def _norm(c: Any) -> Options:
    return {"renormalize": bool(c.norm_topk_prob)}


def _groups(c: Any, reduce: str, fill: str) -> Options:
    if c.n_group is None:
        return {}
    return {"num_groups": c.n_group, "topk_groups": c.topk_group, "group_reduce": reduce, "group_fill": fill}


def _pnorm(c: Any) -> Options:
    p = c.ffn_config.moe_normalize_expert_weights
    return {} if p is None else {"renormalize": True, "norm_p": float(p)}


def _grouped_v2(c: Any) -> Options:
    return _groups(c, "max", "zero") if c.topk_method == "group_limited_greedy" else {}


def _cohere(c: Any) -> Options:
    if c.expert_selection_fn == "softmax":
        return {"order": "topk_score"}
    return {"order": "topk_score", "score": "sigmoid", **_norm(c)}


def _softcap(c: Any) -> Options:
    cap = c.moe_router_logit_softcapping
    return {"score": "sigmoid", "renormalize": True, "logit_softcap": cap if cap > 0 else None}


_SUM = {"renormalize": True}
_RECIPES: dict[str, Callable[[Any], Options]] = {
    "softmax": lambda c: {},
    "softmax_sum": lambda c: _SUM,
    "softmax_norm": _norm,
    "softmax_groups_max": _grouped_v2,
    "softmax_groups_zero": lambda c: {**(_norm(c) if hasattr(c, "norm_topk_prob") else _SUM),
                                      **_groups(c, "sum_top2", "zero")},
    "softmax_pnorm": _pnorm,
    "softmax_clamped": lambda c: {**_SUM, "renorm_eps": c.moe_norm_min, "renorm_eps_mode": "clamp"},
    "softmax_identity": lambda c: {"num_identity_experts": c.zero_expert_num or 0},
    "softmax_skip": lambda c: {"num_identity_experts": 1, "identity_kind": "skip"},
    "topk_softmax": lambda c: {"order": "topk_score"},
    "topk_softmax_or_sigmoid": _cohere,
    "topk_sigmoid": lambda c: {"order": "topk_score", "score": "sigmoid", **_norm(c)},
    "topk_sigmoid_input": lambda c: {"order": "topk_score", "score": "sigmoid", "apply_to": "input"},
    "sigmoid_sum": lambda c: {"score": "sigmoid", **_SUM},
    "sigmoid_norm": lambda c: {"score": "sigmoid", **_norm(c)},
    "sigmoid_groups": lambda c: {"score": "sigmoid", **_norm(c), **_groups(c, "sum_top2", "neg_inf")},
    "sigmoid_groups_zero": lambda c: {"score": "sigmoid", **_norm(c), **_groups(c, "sum_top2", "zero")},
    "sigmoid_softcap": _softcap,
    "sigmoid_multiplied": lambda c: {"score": "sigmoid", **_SUM, "logit_scale": c.output_multiplier},
    "sqrtsoftplus": lambda c: {"score": "sqrtsoftplus", **_SUM},
    "sparsemixer": lambda c: {"score": "sparsemixer", "jitter_eps": c.router_jitter_noise},
    "joint_logsigmoid": lambda c: {"score": "joint_logsigmoid", "num_shared": c.n_shared_experts},
}


def family_router_config(source: Any) -> RouterConfig:
    """The routing mode of a transformers configuration, model, MoE block, router or experts module.

    Raises ValueError when the family is not in the table or its routing is not a RouterConfig (hash routing,
    product keys, capacity), TypeError for other objects.
    """
    row, config = _row_and_config(source)
    if not row.routing:
        raise checks.bad("source", "a family whose routing RouterConfig expresses",
                         f"{row.family} ({row.router or 'no router'})")
    try:
        options = _RECIPES[row.routing](config)
        if row.scale:
            options = {**options, "scale": float(_attribute(config, row.scale))}
        E, K = (int(a) if a.isdigit() else _attribute(config, a) for a in (row.num_experts, row.top_k))
    except AttributeError as error:
        raise checks.bad("source", f"a whole configuration of {row.family}", f"one where {error}") from error
    if row.renorm_eps and options.get("renormalize"):
        options = {**options, "renorm_eps": float(row.renorm_eps)}
    if isinstance(E, list) or isinstance(K, list):  # hunyuan_v1_moe may give one number per layer
        raise checks.bad("source", "a configuration with one num_experts and top_k for all layers", f"{E}, {K}")
    return RouterConfig(num_experts=E, top_k=K, **options)


def _attribute(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def _row_and_config(source: Any) -> tuple[Family, Any]:
    if isinstance(source, nn.Module):
        return _of_module(source)
    model_type = getattr(source, "model_type", None)
    if model_type is None:
        raise checks.bad_type("source", "a transformers configuration or a module", source)
    for config in _text_configs(source):
        rows = [r for r in families.table() if r.family == families.family_of(config)]
        if rows:
            return next((r for r in rows if r.routing), rows[0]), config
    raise checks.bad("source", "a configuration of a family in the table", f"model_type {model_type!r}")


def _text_configs(config: Any) -> list[Any]:
    inner = config.get_text_config() if hasattr(config, "get_text_config") else config
    return [config] if inner is config else [inner, config]


def _of_module(module: nn.Module) -> tuple[Family, Any]:
    """The first row that names a class at or below the module, and the nearest configuration."""
    for part in module.modules():
        row = next((r for column in ("router", "block", "swapped") if (r := families.lookup(part, column))), None)
        if row is None:
            continue
        holders = [part, *part.modules(), *module.modules()]
        config = next((h.config for h in holders if hasattr(h, "config")), None)
        if config is None:
            raise checks.bad("source", "a module that holds its configuration, or the configuration itself",
                             type(module).__name__)
        configs = [c for c in _text_configs(config) if hasattr(c, row.top_k.split(".")[0]) or row.top_k.isdigit()]
        if not configs:
            raise checks.bad("source", f"a configuration with {row.top_k}", type(config).__name__)
        return row, configs[0]
    raise checks.bad("source", "a model or block of a family in the table", type(module).__name__)
