"""The oracle against formulas written out by hand: it judges everything else, so nothing of it is taken on trust."""

from __future__ import annotations

import math

import pytest
import torch

import moeffn
from moeffn import (
    BILINEAR,
    GEGLU,
    GEGLU_TANH,
    GLU,
    REGLU,
    SWIGLU,
    SWIGLU_OAI,
    Activation,
    ExpertWeights,
    Layout,
    RouterConfig,
    Routing,
    reference,
)


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def gelu(x: float) -> float:
    return 0.5 * x * (1 + math.erf(x / 2**0.5))


def gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)))


# activation, gate, up (None: not gated), value by hand
ACTIVATIONS = [
    (SWIGLU, 1.5, 2.0, silu(1.5) * 2.0),
    (GEGLU, 1.5, 2.0, gelu(1.5) * 2.0),
    (GEGLU_TANH, -0.7, 2.0, gelu_tanh(-0.7) * 2.0),
    (REGLU, -0.7, 2.0, 0.0),
    (REGLU, 0.7, -2.0, -1.4),
    (GLU, 0.0, 3.0, 1.5),
    (BILINEAR, -0.7, 2.0, -1.4),
    (SWIGLU_OAI, 9.0, -8.0, 7.0 / (1 + math.exp(-1.702 * 7.0)) * (-7.0 + 1.0)),  # gate cut at 7, up at -7, up + 1
    (SWIGLU_OAI, -9.0, 0.5, -9.0 / (1 + math.exp(1.702 * 9.0)) * 1.5),  # the gate is not cut from below
    (Activation(limit=1.0, limit_after=True), 9.0, 0.5, 1.0 * 0.5),
    (Activation(softcap_gate=2.0, softcap_up=3.0), 1.5, 4.0,
     2 * math.tanh(0.75) / (1 + math.exp(-1.5)) * 3 * math.tanh(4 / 3)),
    (Activation(gated=False, kind="relu2"), -1.0, None, 0.0),
    (Activation(gated=False, kind="relu2"), 1.5, None, 2.25),
    (Activation(gated=False, kind="gelu"), -0.3, None, gelu(-0.3)),
    (Activation(gated=False, kind="silu", alpha=1.702), 0.8, None, 0.8 / (1 + math.exp(-1.702 * 0.8))),
    (Activation(gated=False, kind="relu"), -0.8, None, 0.0),
    (Activation(gated=False, kind="gelu_tanh"), 0.8, None, gelu_tanh(0.8)),
    (Activation(gated=False, kind="identity"), -0.8, None, -0.8),
]


@pytest.mark.parametrize("case", ACTIVATIONS, ids=lambda c: f"{c[0].kind}-{c[1]}")
def test_activations_by_hand(case: tuple[Activation, float, float | None, float]) -> None:
    activation, gate, up, want = case
    h = torch.tensor([[gate] if up is None else [gate, up]], dtype=torch.float64)
    for layout in Layout:  # with one pair both layouts are the same numbers
        assert float(reference.activate(h, activation, layout)) == pytest.approx(want, rel=1e-12, abs=1e-15)


def test_layouts_are_not_the_same() -> None:
    # NVIDIA/Megatron-LM#7576; Dao-AILab/sonic-moe#45: interleaved read as concatenated gives finite garbage
    h = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    concat = reference.activate(h, BILINEAR, Layout.CONCAT)
    interleaved = reference.activate(h, BILINEAR, Layout.INTERLEAVED)
    assert concat.tolist() == [[3.0, 8.0]] and interleaved.tolist() == [[2.0, 12.0]]


def scalar_experts(*, bias: bool = False) -> ExpertWeights:
    """D = F = 1, identity activation: expert e multiplies by (e + 1)·10, plus e + 1 with biases."""
    scale = torch.arange(1.0, 4.0, dtype=torch.float64)
    ones = torch.ones(3, 1, dtype=torch.float64)
    return ExpertWeights((10 * scale)[:, None, None], torch.ones(3, 1, 1, dtype=torch.float64),
                         torch.zeros(3, 1, dtype=torch.float64) if bias else None,
                         ones * scale[:, None] if bias else None, Activation(kind="identity", gated=False))


def test_mixture_by_hand() -> None:
    x = torch.tensor([[2.0], [5.0]], dtype=torch.float64)
    routing = Routing(torch.tensor([[0, 2], [1, -1]]), torch.tensor([[0.25, 0.5], [0.5, 9.0]], dtype=torch.float64))
    assert reference.moe_ffn(x, routing, scalar_experts()).tolist() == [[0.25 * 20 + 0.5 * 60], [0.5 * 100]]
    with_bias = reference.moe_ffn(x, routing, scalar_experts(bias=True))
    assert with_bias.tolist() == [[0.25 * 21 + 0.5 * 63], [0.5 * 102]]
    on_input = Routing(routing.experts, routing.weights, apply_to="input")  # Llama 4: the bias is not weighted
    assert reference.moe_ffn(x, on_input, scalar_experts(bias=True)).tolist() == [[5 + 1 + 30 + 3], [50 + 2]]
    identity = Routing(routing.experts, routing.weights, identity_weights=torch.tensor([0.5, 0.0], dtype=torch.float64))
    assert reference.moe_ffn(x, identity, scalar_experts()).tolist() == [[35.0 + 1.0], [50.0]]


def test_verbs_put_together_are_the_mixture() -> None:
    ids = torch.tensor([[2, 0], [2, -1], [0, 2], [1, 0]])
    w = torch.rand(4, 2, dtype=torch.float64)
    experts = ExpertWeights(torch.randn(3, 8, 5).double(), torch.randn(3, 5, 4).double())
    x = torch.randn(4, 5, dtype=torch.float64)
    p = reference.plan(ids, 3)
    y = reference.unpermute(reference.expert_ffn(reference.permute(x, p), p.offsets, experts), p, w)
    torch.testing.assert_close(y, reference.moe_ffn(x, Routing(ids, w), experts))
    assert reference.moe_ffn(x.view(2, 2, 5), Routing(ids, w), experts).shape == (2, 2, 5)


@pytest.mark.parametrize("T", [0, 3])
def test_what_no_slot_uses_has_gradients_of_zero(T: int) -> None:
    """As on the other backends: an output outside the graph would stop a backward that others run."""
    leaves = [torch.full(shape, float("nan"), requires_grad=True) for shape in ((T, 5), (T, 2), (3, 8, 5), (3, 5, 4))]
    x, w, w_in, w_out = leaves
    unrouted = Routing(torch.full((T, 2), -1), w)
    p = reference.plan(unrouted.experts, 3)
    rows = reference.permute(x, p)
    for y in (reference.moe_ffn(x, unrouted, ExpertWeights(w_in, w_out)),
              moeffn.moe_ffn(x, unrouted, ExpertWeights(w_in, w_out), backend="reference"),
              reference.unpermute(reference.expert_ffn(rows, p.offsets, ExpertWeights(w_in, w_out)), p, w)):
        assert y.shape == (T, 5) and bool((y == 0).all())
        assert all(bool((g == 0).all()) for g in torch.autograd.grad(y.sum(), leaves))
    logits = torch.zeros(0, 4, requires_grad=True)
    assert reference.route(logits, RouterConfig(num_experts=4, top_k=2)).weights.requires_grad


def test_plan_by_hand() -> None:
    p = reference.plan(torch.tensor([[2, 0], [-1, 3], [0, 9]]), 4)
    assert p.counts.tolist() == [2, 0, 1, 1] and p.offsets.tolist() == [0, 2, 2, 3, 4]
    assert p.slot_of_row.tolist() == [1, 4, 0, 3, -1, -1] and p.row_of_slot.tolist() == [2, 0, -1, 3, 1, -1]


def test_router_by_hand() -> None:
    """Grouped sigmoid with a bias, as DeepSeek V3 does it, computed with Python floats."""
    logits = [0.3, -1.0, 2.0, 0.5, 0.1, 1.2]
    bias = [0.0, 0.9, -0.5, 0.0, 0.3, 0.0]
    s = [1 / (1 + math.exp(-v)) for v in logits]
    biased = [a + b for a, b in zip(s, bias, strict=True)]
    worth = [biased[0] + biased[1], biased[2] + biased[3], biased[4] + biased[5]]
    kept = sorted(range(3), key=lambda g: -worth[g])[:2]
    allowed = [e for e in range(6) if e // 2 in kept]
    chosen = sorted(allowed, key=lambda e: -biased[e])[:3]
    total = sum(s[e] for e in chosen)
    config = RouterConfig(num_experts=6, top_k=3, score="sigmoid", num_groups=3, topk_groups=2, renormalize=True,
                          scale=2.5)
    r = reference.route(torch.tensor([logits], dtype=torch.float64), config,
                        selection_bias=torch.tensor(bias, dtype=torch.float64))
    assert r.experts[0].tolist() == chosen
    assert r.weights[0].tolist() == pytest.approx([2.5 * s[e] / total for e in chosen], rel=1e-12)


def test_sparsemixer_by_hand() -> None:
    logits = [1.0, 0.95, -2.0, 0.5]  # threshold 2·0.1: only 0.95 is near 1.0; after that 1.0 and 0.5 are out of sight
    config = RouterConfig(num_experts=4, top_k=2, score="sparsemixer", jitter_eps=0.1)
    r = reference.route(torch.tensor([logits], dtype=torch.float64), config)
    assert r.experts.tolist() == [[0, 1]]
    first = math.exp(1.0) / (math.exp(1.0) + math.exp(0.95))
    assert r.weights[0].tolist() == pytest.approx([first, 1.0], rel=1e-12)


def test_joint_softmax_by_hand() -> None:
    logits = [1.0, -1.0, 0.5, 0.2]  # three experts, one shared
    config = RouterConfig(num_experts=3, top_k=2, score="joint_logsigmoid", num_shared=1, scale=4.0)
    r = reference.route(torch.tensor([logits], dtype=torch.float64), config)
    odds = [1 / (1 + math.exp(-v)) for v in (1.0, 0.5, 0.2)]  # softmax of log-sigmoids: sigmoids over their sum
    assert r.experts.tolist() == [[0, 2]] and r.shared_weights is not None
    assert r.weights[0].tolist() == pytest.approx([4 * o / sum(odds) for o in odds[:2]], rel=1e-12)
    assert r.shared_weights[0].tolist() == pytest.approx([4 * odds[2] / sum(odds)], rel=1e-12)
