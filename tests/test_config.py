"""Configuration objects refuse what has no meaning, say why, and are frozen."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from moeffn import GEGLU, SWIGLU, SWIGLU_OAI, Activation, Layout, MoEConfig, RouterConfig
from moeffn.config import ACTIVATION_KINDS


def name(value: Any) -> str:
    return str(value) if isinstance(value, dict) else ""


ROUTER: dict[str, Any] = {"num_experts": 8, "top_k": 2}
MOE: dict[str, Any] = {"d_model": 16, "d_expert": 12, "num_experts": 8, "top_k": 2}

# arguments over the good ones, error, what the message must hold: the field, what was expected, what came
BAD_ROUTERS: list[tuple[dict[str, Any], type[Exception], str]] = [
    # laekov/fastmoe#197; ml-explore/mlx-examples#504; JustVugg/colibri#944: k > E met an opaque 'k not in range'
    ({"top_k": 0}, ValueError, "RouterConfig.top_k: expected at least 1, got 0"),
    ({"top_k": 9}, ValueError, "RouterConfig.top_k: expected at most num_experts + num_identity_experts = 8, got 9"),
    ({"num_experts": 0}, ValueError, "RouterConfig.num_experts: expected at least 1, got 0"),
    ({"top_k": 2.0}, TypeError, "RouterConfig.top_k: expected an int, got float 2.0"),
    ({"top_k": True}, TypeError, "RouterConfig.top_k: expected an int, got bool True"),
    # huggingface/transformers#48647: impossible groups were accepted and misrouted
    ({"num_groups": 3}, ValueError, "RouterConfig.num_groups: expected a divisor of the 8 router classes, got 3"),
    ({"num_groups": 4, "topk_groups": 5}, ValueError, "topk_groups: expected at most num_groups = 4, got 5"),
    ({"num_groups": 4, "top_k": 3}, ValueError,
     "RouterConfig.topk_groups: expected topk_groups * (classes / num_groups) >= top_k = 3, got 1 * 2"),
    ({"num_groups": 8, "topk_groups": 2}, ValueError, "groups of at least 2 experts for 'sum_top2', got 1"),
    ({"num_groups": 0}, ValueError, "RouterConfig.num_groups: expected at least 1, got 0"),
    ({"score": "relu"}, ValueError, "RouterConfig.score: expected one of 'softmax', 'sigmoid'"),
    ({"order": "random"}, ValueError, "RouterConfig.order: expected one of 'score_topk', 'topk_score', got 'random'"),
    ({"group_reduce": "mean"}, ValueError, "RouterConfig.group_reduce: expected one of 'max', 'sum_top2'"),
    ({"group_fill": "nan"}, ValueError, "RouterConfig.group_fill: expected one of 'neg_inf', 'zero'"),
    ({"renorm_eps_mode": "max"}, ValueError, "RouterConfig.renorm_eps_mode: expected one of 'add', 'clamp'"),
    ({"apply_to": "gate"}, ValueError, "RouterConfig.apply_to: expected one of 'output', 'input'"),
    ({"identity_kind": "zero"}, ValueError, "RouterConfig.identity_kind: expected one of 'identity', 'skip'"),
    ({"norm_p": 0.0}, ValueError, "RouterConfig.norm_p: expected a number above 0, got 0.0"),
    ({"renorm_eps": -1e-6}, ValueError, "RouterConfig.renorm_eps: expected a number of at least 0, got -1e-06"),
    ({"scale": float("nan")}, ValueError, "RouterConfig.scale: expected a finite number, got nan"),
    ({"scale": "2"}, TypeError, "RouterConfig.scale: expected a number, got str '2'"),
    ({"logit_softcap": -1.0}, ValueError, "RouterConfig.logit_softcap: expected a number above 0, got -1.0"),
    ({"num_identity_experts": -1}, ValueError, "RouterConfig.num_identity_experts: expected at least 0, got -1"),
    ({"score": "sparsemixer", "top_k": 3}, ValueError, "top_k=2, order 'score_topk', one group for 'sparsemixer'"),
    ({"score": "sparsemixer", "renormalize": True}, ValueError, "RouterConfig.renormalize: expected False with score"),
    ({"score": "joint_logsigmoid"}, ValueError, "RouterConfig.num_shared: expected > 0 exactly when"),
    ({"num_shared": 1}, ValueError, "RouterConfig.num_shared: expected > 0 exactly when"),
    ({"score": "joint_logsigmoid", "num_shared": 1, "renormalize": True}, ValueError, "renormalize: expected False"),
    ({"score": "sqrtsoftplus", "order": "topk_score"}, ValueError, "'score_topk' with score 'sqrtsoftplus'"),
]


@pytest.mark.parametrize(("changed", "error", "message"), BAD_ROUTERS, ids=name)
def test_impossible_routers_are_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        RouterConfig(**{**ROUTER, **changed})


def test_possible_corners_are_taken() -> None:
    assert RouterConfig(num_experts=1, top_k=1).num_logits == 1
    assert RouterConfig(num_experts=8, top_k=8).num_logits == 8
    assert RouterConfig(num_experts=8, top_k=10, num_identity_experts=4).num_logits == 12
    assert RouterConfig(num_experts=8, top_k=4, num_groups=4, topk_groups=2).topk_groups == 2
    assert RouterConfig(num_experts=6, top_k=2, score="joint_logsigmoid", num_shared=2).num_logits == 8


BAD_MOE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"top_k": 9}, ValueError, "MoEConfig.top_k: expected at most num_experts = 8, got 9"),
    ({"top_k": 0}, ValueError, "MoEConfig.top_k: expected at least 1, got 0"),
    ({"num_experts": 0}, ValueError, "MoEConfig.num_experts: expected at least 1, got 0"),
    ({"d_model": -4}, ValueError, "MoEConfig.d_model: expected at least 1, got -4"),
    ({"d_expert": "12"}, TypeError, "MoEConfig.d_expert: expected an int, got str '12'"),
    ({"router": RouterConfig(num_experts=4, top_k=2)}, ValueError,
     "MoEConfig.router: expected num_experts=8, top_k=2, got num_experts=4, top_k=2"),
    ({"router": "softmax"}, TypeError, "MoEConfig.router: expected RouterConfig, got str"),
    ({"router": RouterConfig(num_experts=8, top_k=2, score="joint_logsigmoid", num_shared=1)}, ValueError,
     "MoEConfig.router: expected num_shared = 0"),
    ({"activation": "silu"}, TypeError, "MoEConfig.activation: expected Activation, got str 'silu'"),
    ({"layout": "packed"}, ValueError, "MoEConfig.layout: expected 'concat' or 'interleaved', got 'packed'"),
    ({"shared_gate": True}, ValueError, "MoEConfig.shared_gate: expected d_shared > 0, got d_shared=0"),
    ({"shared_combine": "max"}, ValueError, "MoEConfig.shared_combine: expected one of 'sum', 'average', got 'max'"),
    ({"capacity_factor": 0.0}, ValueError, "MoEConfig.capacity_factor: expected a number above 0, got 0.0"),
    ({"aux_loss_coef": -0.1}, ValueError, "MoEConfig.aux_loss_coef: expected a number of at least 0, got -0.1"),
    ({"z_loss_coef": float("inf")}, ValueError, "MoEConfig.z_loss_coef: expected a number of at least 0, got inf"),
]


@pytest.mark.parametrize(("changed", "error", "message"), BAD_MOE, ids=name)
def test_impossible_layers_are_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        MoEConfig(**{**MOE, **changed})


def test_default_router_renormalises_except_for_one_expert_a_token() -> None:
    # NVIDIA/Megatron-LM#894: renormalised top-1 weights would leave the router without gradient
    assert MoEConfig(**MOE).route == RouterConfig(num_experts=8, top_k=2, renormalize=True)
    assert MoEConfig(**{**MOE, "top_k": 1}).route == RouterConfig(num_experts=8, top_k=1)
    own = RouterConfig(num_experts=8, top_k=2, score="sigmoid")
    assert MoEConfig(**MOE, router=own).route is own


BAD_ACTIVATIONS: list[tuple[dict[str, Any], str]] = [
    ({"kind": "swish"}, "Activation.kind: expected one of 'silu', 'gelu'"),
    ({"alpha": 0}, "Activation.alpha: expected a number above 0, got 0"),
    ({"kind": "gelu", "alpha": 1.7}, "Activation.alpha: expected 1.0 unless kind is 'silu'"),
    ({"gated": False, "limit": 7.0}, "only with gated=True"),
    ({"limit": -1.0}, "Activation.limit: expected a number above 0"),
    ({"limit_after": True}, "Activation.limit_after: expected a limit to apply"),
    ({"softcap_gate": 5.0, "limit": 7.0}, "Activation.softcap_*: expected kind 'silu', alpha 1, no limit"),
]


@pytest.mark.parametrize(("changed", "message"), BAD_ACTIVATIONS, ids=name)
def test_impossible_activations_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Activation(**changed)


def test_activation_key_holds_every_field() -> None:
    softcapped = Activation(softcap_gate=3.0, softcap_up=5.0)
    for act in (SWIGLU, GEGLU, SWIGLU_OAI, softcapped, Activation(limit=2.0, limit_after=True, up_offset=0.1),
                *(Activation(kind=k, gated=g) for k in ACTIVATION_KINDS for g in (True, False))):
        assert Activation.from_key(act.key) == act
    assert SWIGLU.width_in(12) == 24 and Activation(gated=False).width_in(12) == 12
    assert SWIGLU.key != SWIGLU_OAI.key


def test_configs_are_frozen_keyword_only_and_hashable() -> None:
    # A mutable or positional config is how E and k change places
    for config in (RouterConfig(**ROUTER), MoEConfig(**MOE), SWIGLU):
        assert len({config, dataclasses.replace(config)}) == 1
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.top_k = 3  # type: ignore[misc, union-attr]
    with pytest.raises(TypeError):
        RouterConfig(8, 2)  # type: ignore[misc]
    assert MoEConfig(**MOE, layout="interleaved").layout is Layout.INTERLEAVED  # type: ignore[arg-type]


def test_printed_configs_are_short_and_rebuild_themselves() -> None:
    for config, text in (
        (SWIGLU, "Activation(kind='silu')"),
        (SWIGLU_OAI, "Activation(kind='silu', alpha=1.702, limit=7.0, up_offset=1.0)"),
        (RouterConfig(num_experts=8, top_k=2, scale=2.5),
         "RouterConfig(num_experts=8, top_k=2, score='softmax', order='score_topk', renormalize=False, scale=2.5)"),
        (MoEConfig(d_model=4, d_expert=8, num_experts=8, top_k=2, layout=Layout.INTERLEAVED, activation=SWIGLU_OAI),
         f"MoEConfig(d_model=4, d_expert=8, num_experts=8, top_k=2, activation={SWIGLU_OAI}, "
         "layout=Layout.INTERLEAVED)"),
    ):
        assert repr(config) == text and eval(text) == config
