"""Routing, ExpertWeights, LoadStats: what they take, what they refuse, what they tell."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from moeffn import SWIGLU, Activation, ExpertWeights, Layout, LoadStats, Plan, Routing

IDS, ONES = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)


def test_routing_needs_ids_and_weights_alone() -> None:
    r = Routing(experts=IDS, weights=ONES)
    assert (r.num_tokens, r.top_k, r.logits, r.apply_to, r.identity_weights, r.shared_weights) == (
        3, 2, None, "output", None, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        r.weights = ONES  # type: ignore[misc]


def test_ids_beyond_int32_do_not_wrap_into_experts() -> None:
    # 2**32 + 1 would become expert 1 by plain narrowing
    r = Routing(torch.tensor([[2**32 + 1, -(2**32) + 1], [3, -1]]), torch.ones(2, 2))
    assert r.experts.dtype == torch.int32
    assert r.experts.tolist() == [[2**31 - 1, -1], [3, -1]]


@pytest.mark.parametrize(("kwargs", "error", "message"), [
    ({"experts": IDS[0]}, ValueError, r"Routing.experts: expected 2 dimensions, got shape \(2,\)"),
    ({"experts": IDS.float()}, TypeError, "Routing.experts: expected int32 or int64, got dtype torch.float32"),
    ({"experts": [[0]]}, TypeError, "Routing.experts: expected a torch.Tensor, got list"),
    ({"weights": ONES[:2]}, ValueError, r"Routing.weights: expected shape \(3, 2\) .* got shape \(2, 2\)"),
    ({"weights": IDS}, TypeError, "Routing.weights: expected a floating-point dtype"),
    ({"weights": ONES.to("meta")}, ValueError, "Routing.weights: expected device cpu"),
    ({"apply_to": "both"}, ValueError, "Routing.apply_to: expected one of 'output', 'input', got 'both'"),
    ({"identity_weights": torch.ones(2)}, ValueError, r"Routing.identity_weights: expected shape \(3,\)"),
    ({"shared_weights": torch.ones(4, 1)}, ValueError, "Routing.shared_weights: expected shape"),
    ({"logits": torch.ones(4, 8)}, ValueError, "Routing.logits: expected shape"),
], ids=lambda v: "+".join(v) if isinstance(v, dict) else "")
def test_bad_routings_are_refused(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Routing(**{"experts": IDS, "weights": ONES, **kwargs})


def weights(**changed: Any) -> ExpertWeights:
    return ExpertWeights(**{"w_in": torch.zeros(4, 12, 5), "w_out": torch.zeros(4, 5, 6), **changed})


def test_expert_weights_need_two_tensors_alone() -> None:
    w = weights()
    assert (w.num_experts, w.d_model, w.d_expert) == (4, 5, 6)
    assert w.activation == SWIGLU and w.layout is Layout.CONCAT
    assert [n for n, _ in w.named_tensors()] == ["w_in", "w_out"]
    full = weights(b_in=torch.zeros(4, 12), b_out=torch.zeros(4, 5), layout="interleaved")
    assert [n for n, _ in full.named_tensors()] == ["w_in", "w_out", "b_in", "b_out"]
    assert full.layout is Layout.INTERLEAVED
    plain = weights(w_out=torch.zeros(4, 5, 12), activation=Activation(gated=False))
    assert plain.d_expert == 12


def test_a_transposed_checkpoint_is_a_view() -> None:
    stored = torch.randn(4, 5, 12)  # (E, D, 2F), as Llama 4 and gpt-oss keep it
    w = weights(w_in=stored.transpose(1, 2))
    assert w.w_in.data_ptr() == stored.data_ptr()


@pytest.mark.parametrize(("changed", "error", "message"), [
    ({"w_in": torch.zeros(4, 11, 5)}, ValueError, "w_in: expected an even number 2F of rows .* got 11"),
    ({"w_in": torch.zeros(12, 5)}, ValueError, "w_in: expected 3 dimensions"),
    ({"w_in": torch.zeros(4, 12, 5, dtype=torch.int8)}, TypeError, "w_in: expected a floating-point dtype"),
    ({"w_out": torch.zeros(4, 6, 5)}, ValueError, r"w_out: expected shape \(4, 5, 6\) .* got shape \(4, 6, 5\)"),
    ({"w_out": torch.zeros(3, 5, 6)}, ValueError, r"w_out: expected shape \(4, 5, 6\)"),
    ({"w_out": torch.zeros(4, 5, 6, dtype=torch.float16)}, ValueError, "w_out: expected dtype torch.float32"),
    ({"w_out": torch.zeros(4, 5, 6, device="meta")}, ValueError, "w_out: expected device cpu"),
    ({"b_in": torch.zeros(4, 6)}, ValueError, r"b_in: expected shape \(4, 12\)"),
    ({"b_out": torch.zeros(5)}, ValueError, "b_out: expected 2 dimensions"),
    ({"activation": "silu"}, TypeError, "activation: expected Activation, got str"),
    ({"layout": "split"}, ValueError, "layout: expected 'concat' or 'interleaved', got 'split'"),
], ids=lambda v: "+".join(v) if isinstance(v, dict) else "")
def test_bad_expert_weights_are_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match="ExpertWeights." + message):
        weights(**changed)


def test_plan_and_load_tell_their_sizes() -> None:
    rows = torch.tensor([0, 2, 1, -1])
    p = Plan(torch.tensor([2, 0, 1]), torch.tensor([0, 2, 2, 3]), rows, rows)
    assert p.num_experts == 3 and p.num_slots == 4
    stats = LoadStats(torch.tensor([6, 0, 0]), torch.tensor(1))
    assert stats.max_over_mean == 3.0 and stats.idle_experts == 2
