"""Which experts are chosen: ties, float32 whatever the dtype, any number of experts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from moeffn import RouterConfig, reference, route
from moeffn.routing import top_ids

INF = float("inf")


@pytest.mark.parametrize("E", [8, 9, 33, 128])  # 9 and 33: a last element outside the vector registers of a CPU
def test_ties_go_to_the_lowest_id(E: int) -> None:
    # pytorch/pytorch#127196; vllm-project/vllm#52679; pytorch/torchtitan#3336: tie order differs by device, k and T
    for score, order in itertools.product(("softmax", "sigmoid", "sqrtsoftplus"), ("score_topk", "topk_score")):
        if (score, order) == ("sqrtsoftplus", "topk_score"):
            continue
        for T, K, value in itertools.product((1, 3, 200), (1, 2, 5, 8), (0.0, 1.7, -3.3)):
            config = RouterConfig(num_experts=E, top_k=K, score=score, order=order)  # type: ignore[arg-type]
            ids = route(torch.full((T, E), value), config).experts
            assert torch.equal(ids, torch.arange(K, dtype=torch.int32).expand(T, K)), (score, order, T, K, value)


@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
def test_equal_logits_have_equal_scores_wherever_they_stand(score: str) -> None:
    # torch.sigmoid and softplus on a CPU differ in the last bit between the vector body and the tail of a tensor, for
    # one value in ten to thirty: the last of 33 equal logits would win or lose by its place
    config = RouterConfig(num_experts=33, top_k=3, score=score)  # type: ignore[arg-type]
    for value in (torch.randn(400) * 4).tolist():
        assert route(torch.full((1, 33), value), config).experts.tolist() == [[0, 1, 2]], value


@pytest.mark.parametrize("shape", [(3, 5), (1, 256), (64, 64), (300, 130)], ids=str)  # both methods, odd and even
def test_top_ids_is_a_stable_sort(shape: tuple[int, int]) -> None:
    values = (torch.randn(shape) * 3).round()
    values[values == 0] = torch.where(torch.rand(shape)[values == 0] < 0.5, 0.0, -0.0)
    values[0, 0] = -INF
    K = min(8, shape[1])
    want = np.argsort(-values.numpy(), axis=1, kind="stable")[:, :K]
    assert np.array_equal(top_ids(values, K).numpy(), want)
    denormal = torch.full(shape, 1e-42) * torch.arange(shape[1]).flip(0)
    assert torch.equal(top_ids(denormal, K), torch.arange(K).expand(shape[0], K))


def test_equal_scores_by_saturation_are_ties_too() -> None:
    # sigmoid(20) and sigmoid(30) are the same float32 number: the lower id wins, as the scores say
    logits = torch.tensor([[20.0, 30.0, 25.0, 0.0]])
    assert route(logits, RouterConfig(num_experts=4, top_k=2, score="sigmoid")).experts.tolist() == [[0, 1]]


def test_selection_is_float32_whatever_the_model_dtype() -> None:
    # vllm-project/vllm#14027; sgl-project/sglang#38695: a bf16 router GEMM or softmax changes the chosen experts.
    # bfloat16 numbers near 8 are 1/16 apart, so 8.000 and 8.004 must never be rounded to it.
    logits = torch.tensor([[8.000, 8.004, 0.0, 0.0]])
    config = RouterConfig(num_experts=4, top_k=1)
    with torch.autocast("cpu", torch.bfloat16):
        r = route(logits, config)
    assert r.experts.tolist() == [[1]]
    assert r.weights.dtype == torch.float32 and r.logits is not None and r.logits.dtype == torch.float32


def test_near_uniform_probabilities_do_not_collapse() -> None:
    # ViperEkura/AstrAI#57: 256 probabilities near 1/256, cast to bfloat16 before top-k, become ties
    logits = (torch.randn(50, 256) * 1e-3).to(torch.bfloat16)
    config = RouterConfig(num_experts=256, top_k=8)
    ids = route(logits, config).experts
    assert torch.equal(ids, reference.route(logits.double(), config).experts)
    collapsed = torch.softmax(logits.float(), -1).to(torch.bfloat16)
    assert not torch.equal(ids.long(), top_ids(collapsed, 8))  # the early cast does choose others on this input


@pytest.mark.parametrize("E", [1, 3, 60, 257, 512, 1024, 1025])  # around the block widths of kernels: 256 and 1024
def test_experts_with_high_ids_are_chosen(E: int) -> None:
    # kekzl/imp#2056: experts from id 256 on were never chosen
    K = min(10, E)
    logits = torch.zeros(6, E)
    winners = torch.stack([torch.randperm(max(K, E - E // 2))[:K] + (E - max(K, E - E // 2)) for _ in range(6)])
    logits.scatter_(1, winners, 5.0 + torch.rand(6, K))
    ids = route(logits, RouterConfig(num_experts=E, top_k=K)).experts
    assert torch.equal(ids.sort(1).values, winners.sort(1).values.to(torch.int32))
