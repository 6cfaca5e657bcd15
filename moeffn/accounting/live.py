"""Weights of a live torch module, of any architecture, also on the meta device.

A module has no config to read, so parts are told by the names and classes that model code uses. Each storage counts
once: a tied head shows up only as the embedding. The only file here that needs a torch module in hand.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from .weights import Architecture, Layer, Weight

TOP_K = ("top_k", "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_top_k",
         "moe_k", "top_k_experts", "num_selected_experts")
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

# In this order: the first that matches the dotted name decides.
RULES = (
    ("vision", r"vision|visual(?!_attention)|multi_modal_projector|audio_tower|image_encoder|codec_model|tokens_extend|"
               r"vqmodel|^audio_encoder|audio_mlp|audio_(input|post_attention)_layernorm"),
    ("head", r"(^|\.)(lm_heads?(\.\d+)?|lm_loss|embed_out|output_projection|audio_lm_head|codebooks_head|logits_dense|"
             r"proj_out|codec_head|ctc_head|joint\.head|flow_head|eos_head)\.|^(output|head)\.(weight|bias)$|predictions\.bias"),
    ("shared_gate", r"shared_expert_gate"),
    ("norm", r"norm|(^|\.)ln_?\w*\."),
    ("attention", r"relative_pos_embeddings"),
    ("other", r"embedding_hidden_mapping|embeddings_project"),
    ("embedding", r"(?<!un)embed|(^|\.)(wte|wpe|shared)\.weight$"),
    ("shared", r"(^|\.)shared(_(expert|mlp)\w*)?\."),
    ("router", r"(^|\.)(router(_gate)?|wg)\.|(^|\.)gate\.|expert_bias|e_score_corr"),
    ("attention", r"attn|attention|mamba|conv|(^|\.)mixer\.(in_proj|out_proj|x_proj|[qkvo]_proj|A_log|D$|dt_)"),
    ("dense", r"mlp|ffn|feed_forward|(^|\.)(fc\d|wi|wo|intermediate|output)\.|DenseReluDense|mixer\.(up|down)_proj"),
)


def _language_model(modules: dict[str, Any]) -> str:
    """Where the language model of a wrapper begins, "" when the module has no towers around one."""
    found = (path for path in modules if path.rsplit(".", 1)[-1] in ("language_model", "text_model"))
    return min(found, key=lambda path: path.count("."), default="")


def _is_tower(name: str, language: str) -> bool:
    """Whether a parameter of a wrapper belongs to none of its language model, embedding and head."""
    if not language or name.startswith(f"{language}."):
        return False
    return not re.search(r"^(model\.)?(lm_head|embed_tokens|layers|norm|embed_out)\.", name)


def _part(name: str, routed: bool) -> str:
    for part, pattern in RULES[:6]:
        if re.search(pattern, name, re.IGNORECASE):
            return part
    if routed:
        return "routed"
    return next((part for part, pattern in RULES[6:] if re.search(pattern, name, re.IGNORECASE)), "other")


def _ancestors(name: str, modules: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The modules around a parameter, nearest first."""
    pieces = name.split(".")[:-1]
    while pieces:
        path = ".".join(pieces)
        if path in modules:
            yield path, modules[path]
        pieces.pop()
    yield "", modules[""]


def _attribute(module: Any, names: tuple[str, ...]) -> int | None:
    for holder in (module, getattr(module, "config", None)):
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    return None


def _find(name: str, modules: dict[str, Any], names: tuple[str, ...]) -> int | None:
    """An attribute of a module around the parameter, or of a child of it (the router beside the experts)."""
    for _, module in _ancestors(name, modules):
        for candidate in (module, *module.children()):
            value = _attribute(candidate, names)
            if value is not None:
                return value
    return None


def _is_routed(name: str, modules: dict[str, Any]) -> bool:
    """Whether a parameter belongs to experts that a router chooses from."""
    if re.search(r"shared_?(expert|mlp)|(^|\.)shared\.|(^|\.)(router|gate)\.|expert_bias", name):
        return False
    if re.search(r"(^|\.)experts\.", name):
        return True
    return any("Experts" in type(module).__name__ for path, module in _ancestors(name, modules) if path)


def _weight(name: str, parameter: Any, modules: dict[str, Any], top_k: int | None, language: str) -> Weight:
    shape = tuple(parameter.shape)
    if _is_tower(name, language):
        return Weight("vision", shape, "matrix" if len(shape) == 2 else "filter")
    routed = _is_routed(name, modules)
    if re.search(r"(^|\.)(up|down)_embed\.weight$", name):  # experts of one channel, looked up (Doge)
        routed, shape = True, (shape[0], 1, shape[1])
    part = "routed" if routed and "_embed." in name else _part(name, routed)
    single = re.search(r"experts\.(expert_)?\d+\.", name)
    if routed and (single or len(shape) > 1):
        chosen = top_k if top_k is not None else _find(name, modules, TOP_K)
        if chosen is None:
            raise ValueError(f"top_k: {name} belongs to experts, and no module around it says how many a token uses")
        if "attn" in name or "attention" in name:
            part = "attention"
        if single:
            return Weight(part, shape, "matrix" if len(shape) > 1 else "bias", 1, chosen)
        experts = shape[0]
        if len(shape) == 2 and "bias" not in name:  # all experts stacked in the rows, as DBRX does
            experts = _find(name, modules, NUM_EXPERTS) or shape[0]
            shape = (experts, shape[0] // experts, *shape[1:])
        kind = "matrix" if len(shape) > 2 else "bias"
        return Weight(part, shape[1:], kind, experts, chosen)
    if part == "embedding":
        kind = "table"
    elif name.endswith("bias"):
        kind = "bias"
    elif part == "norm":
        kind = "norm"
    else:
        kind = "matrix" if len(shape) == 2 else "filter"
    return Weight(part, shape, kind)


def read_module(module: Any, top_k: int | None = None) -> Architecture:
    """The weights of `module`. top_k: experts a token uses, where no module around the experts says it.

    Raises ValueError for experts whose top-k is unknown.
    """
    modules = dict(module.named_modules())
    layers: dict[str, list[Weight]] = {}
    outer: list[Weight] = []
    singles: dict[tuple[str, str], list[Weight]] = {}
    seen: set[int] = set()
    language = _language_model(modules)
    for name, parameter in module.named_parameters():
        if id(parameter) in seen:
            continue
        seen.add(id(parameter))
        weight = _weight(name, parameter, modules, top_k, language)
        at = re.search(r"^(?!.*vision)(.*?\b(?:layers|blocks?|h|layer)\.\d+)\.", name)
        key = at.group(1) if at and not _is_tower(name, language) else ""
        if re.search(r"experts\.(expert_)?\d+\.", name) and weight.part in ("routed", "attention"):
            singles.setdefault((key, re.sub(r"experts\.(expert_)?\d+\.", "experts.*.", name)), []).append(weight)
        else:
            (layers.setdefault(key, []) if key else outer).append(weight)
    for (key, _), weights in singles.items():
        first = weights[0]
        merged = Weight(first.part, first.shape, first.kind, len(weights), first.used)
        (layers.setdefault(key, []) if key else outer).append(merged)
    for name, buffer in module.named_buffers():
        if re.search(r"e_score_correction_bias|expert_bias|selection_bias", name):
            outer.append(Weight("router", tuple(buffer.shape), "buffer"))
    built = tuple(
        Layer("sparse" if any(w.part == "routed" for w in weights) else "dense", tuple(weights))
        for weights in layers.values()
    )
    tables = [w for w in outer if w.part == "embedding" and len(w.shape) > 1]
    head = any(w.part == "head" and w.kind == "matrix" for w in outer)
    width = tables[0].shape[-1] if tables else 0
    return Architecture(type(module).__name__, width, tables[0].shape[0] if tables else 0, built, tuple(outer),
                        bool(tables) and not head)
