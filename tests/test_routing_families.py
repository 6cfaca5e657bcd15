"""route configured as the routers of published models: equal to what their own modules computed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from moeffn import RouterConfig, apply_capacity, route

_SIGMOID = {"score": "sigmoid", "renormalize": True, "renorm_eps": 1e-20}
_NO_EPS = {"score": "sigmoid", "renormalize": True}
_GROUPS = {"num_experts": 16, "top_k": 4, "num_groups": 4, "topk_groups": 2}
# Recorded from the router modules of transformers 5.24 in float32: 8 experts, top 3 where nothing else is said.
FAMILIES: dict[str, dict] = {
    "afmoe": {**_SIGMOID, "scale": 2.448},
    "aria": {"order": "topk_score"},
    "beam": {**_SIGMOID, **_GROUPS},
    "dbrx": {"renormalize": True},
    "deepseek_v2_greedy": {"scale": 2.5},
    "deepseek_v2_grouped": {**_GROUPS, "scale": 2.5, "group_reduce": "max", "group_fill": "zero"},
    "deepseek_v3": {**_SIGMOID, **_GROUPS, "scale": 2.5},
    "deepseek_v4": {"score": "sqrtsoftplus", "renormalize": True, "renorm_eps": 1e-20, "scale": 1.5},
    "deepseek_v4_hash": {"score": "sqrtsoftplus", "renormalize": True, "renorm_eps": 1e-20, "scale": 1.5},
    "gemma4": {"renormalize": True},
    "glm4_moe": {**_SIGMOID, "scale": 1.8},
    "gpt_oss": {"order": "topk_score"},
    "hunyuan_v1_moe": {"renormalize": True},
    "inkling": {"score": "joint_logsigmoid", "num_shared": 2, "scale": 8.0},
    "inkling2": {**_SIGMOID, "scale": 8.0},
    "jetmoe": {"order": "topk_score", "top_k": 2},
    "kolibri1": {"score": "sigmoid", "order": "topk_score"},
    "llama4": {"score": "sigmoid", "order": "topk_score", "top_k": 2, "apply_to": "input"},
    "longcat_flash": {"top_k": 4, "num_identity_experts": 4, "scale": 6.0},
    "minimax_m2": _NO_EPS,
    "mistral4": {**_GROUPS, "group_fill": "zero", "renormalize": True, "renorm_eps": 1e-20, "scale": 2.5},
    "mixtral": {"renormalize": True, "top_k": 2},
    "muse_spark": {"score": "sigmoid", "renormalize": True, "renorm_eps": 1e-15, "scale": 2.0},
    "nemotron_h": {**_SIGMOID, "scale": 2.5},
    "olmoe": {},
    "openai_privacy_filter": {"order": "topk_score", "scale": 1 / 3},
    "phimoe": {"score": "sparsemixer", "top_k": 2, "jitter_eps": 0.1},
    "qwen2_moe": {},
    "qwen3_moe": {"renormalize": True},
    "step3p7": _NO_EPS,
    "switch_transformers": {"num_experts": 4, "top_k": 1},
    "zaya": {"top_k": 1, "num_identity_experts": 1, "identity_kind": "skip"},
}


def golden(data_dir: Path, family: str) -> dict[str, Tensor]:
    with np.load(data_dir / "router_goldens.npz") as file:
        return {n.split(".")[1]: torch.from_numpy(file[n]) for n in file.files if n.startswith(family + ".")}


def by_id(ids: Tensor, weights: Tensor, num_experts: int) -> Tensor:
    """(T, E) weight of each expert; what is not routed to an expert counts nowhere."""
    dense = torch.zeros(ids.shape[0], num_experts + 1)
    return dense.scatter_add_(1, torch.where((ids < 0) | (ids >= num_experts), num_experts, ids).long(),
                              weights)[:, :num_experts]


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "switch_transformers"])
def test_real_router(family: str, data_dir: Path) -> None:
    g = golden(data_dir, family)
    config = RouterConfig(**{"num_experts": 8, "top_k": 3, **FAMILIES[family]})
    given = g["ids"].long() if family.endswith("_hash") else None
    r = route(g["logits"], config, selection_bias=g.get("selection_bias"), expert_ids=given)
    ids, weights = r.experts, r.weights
    if "per_expert_scale" in g:
        weights = weights * g["per_expert_scale"][ids.long()]
    if "global_scale" in g:
        weights = weights * g["global_scale"]
        assert r.shared_weights is not None
        torch.testing.assert_close(r.shared_weights * g["global_scale"], g["shared_weights"], rtol=1e-5, atol=1e-7)
    E = config.num_experts
    if config.identity_kind == "skip":  # this router writes id 0, weight 0 for a skipped token
        assert torch.equal(ids < 0, g["weights"] == 0)
    else:
        real = torch.where((g["ids"] < E), g["ids"], -1).sort(1).values
        assert torch.equal(ids.sort(1).values, real.to(torch.int32))
    torch.testing.assert_close(by_id(ids, weights, E), by_id(g["ids"], g["weights"], E), rtol=1e-5, atol=1e-7)
    if r.identity_weights is not None:
        identity = torch.where(g["ids"] >= E, g["weights"], 0.0).sum(1)
        torch.testing.assert_close(r.identity_weights, identity, rtol=1e-5, atol=1e-7)


def test_switch_router_with_its_capacity(data_dir: Path) -> None:
    """Switch Transformers: top-1, at most 3 tokens of a sequence for an expert, in their order."""
    g = golden(data_dir, "switch_transformers")
    for logits, mask, weights in zip(g["logits"], g["ids"], g["weights"], strict=True):
        full = route(logits, RouterConfig(num_experts=4, top_k=1))
        torch.testing.assert_close(full.weights, weights, rtol=1e-5, atol=1e-7)
        kept, dropped = apply_capacity(full, 4, 3, policy="order")
        want = torch.where(mask.sum(1) > 0, mask.argmax(1), -1)
        assert torch.equal(kept.experts[:, 0].long(), want)
        assert int(dropped) == int((want < 0).sum())
