"""plan, permute, unpermute: stable, exact, differentiable, of any size."""

from __future__ import annotations

from dataclasses import astuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moeffn import Plan, permute, plan, reference, unpermute
from moeffn.testing import check_plan, error_budget, make_routing

EXAMPLE = torch.tensor([[2, 0], [2, 3], [0, 2]], dtype=torch.int32)


def same_plan(a: Plan, b: Plan) -> bool:
    return all(x.dtype == torch.int32 and torch.equal(x, y) for x, y in zip(astuple(a), astuple(b), strict=True))


def test_the_worked_example() -> None:
    p = plan(EXAMPLE, 4)
    assert p.counts.tolist() == [2, 0, 3, 1] and p.offsets.tolist() == [0, 2, 2, 5, 6]
    assert p.slot_of_row.tolist() == [1, 4, 0, 2, 5, 3] and p.row_of_slot.tolist() == [2, 0, 3, 5, 1, 4]


@given(st.integers(0, 12), st.integers(1, 4), st.integers(1, 9), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_plan_equals_the_loop(T: int, K: int, E: int, seed: int) -> None:
    # ids of -1 and beyond E are dropped; so are those that only other kernels would produce
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(-2, E + 2, (T, K), generator=g, dtype=torch.int32)
    assert same_plan(plan(ids, E), reference.plan(ids, E))
    assert same_plan(plan(ids.long(), E), reference.plan(ids, E))


def test_plan_is_a_stable_bijection() -> None:
    # ggml-org/llama.cpp#26464: 2-3 different outputs over 5 runs, as slots were placed in the order of arrival
    assert check_plan(plan).passed == ["counts", "bijection", "stable order"]


@pytest.mark.parametrize("E", [1, 64, 128, 256, 512, 1024, 2048])  # vllm-project/vllm#12239, #3376; ROCm/aiter#1869:
@pytest.mark.parametrize("N", [1, 65535, 65536])  # >= 128, 256, 1024 experts or more rows than a uint16 counts
def test_offsets_of_many_experts_and_rows(E: int, N: int) -> None:
    ids = torch.randint(0, E, (N, 1), dtype=torch.int32)
    p = plan(ids, E)
    counts = np.bincount(ids.numpy().ravel(), minlength=E)
    assert np.array_equal(p.counts.numpy(), counts)
    assert np.array_equal(p.offsets.numpy()[1:], np.cumsum(counts)) and int(p.offsets[0]) == 0
    assert np.array_equal(p.slot_of_row.numpy(), np.argsort(ids.numpy().ravel(), kind="stable"))


@pytest.mark.parametrize("T", [1, 2, 3, 7, 512, 519, 3073, 65537])  # ggml-org/llama.cpp#13164: fixed batch limits
def test_no_fixed_batch_limit(T: int) -> None:
    ids = make_routing("uniform", T, 2, 8).experts
    x = torch.arange(T, dtype=torch.float32)[:, None].expand(T, 3)
    p = plan(ids, 8)
    rows = permute(x, p)
    assert torch.equal(rows[:, 0].long(), p.slot_of_row.long() // 2)
    assert torch.equal(unpermute(rows, p, torch.full((T, 2), 0.5)), x)


@pytest.mark.parametrize("K", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_there_and_back_is_exact(K: int, dtype: torch.dtype) -> None:
    # tgale96/grouped_gemm#31; NVIDIA/TransformerEngine#1336: errors that grew with k. 1/K is exact for powers of two,
    # and numbers of 8 bits leave room for the partial sums.
    x = torch.randn(50, 6).bfloat16().to(dtype).requires_grad_()
    p = plan(make_routing("zipf:1", 50, K, 16).experts, 16)
    y = unpermute(permute(x, p), p, torch.full((50, K), 1.0 / K))
    assert torch.equal(y, x) and y.dtype == dtype
    g = torch.randn(50, 6).bfloat16().to(dtype)
    y.backward(g)
    assert torch.equal(x.grad, g)


@pytest.mark.parametrize("K", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_budget(K: int, dtype: torch.dtype) -> None:
    # sums over slots are kept in float32, forward and backward, whatever the dtype of the rows
    p = plan(make_routing("uniform", 60, K, 16).experts, 16)
    x = torch.randn(60, 32).requires_grad_()
    w = (torch.randn(60, K) / K).requires_grad_()
    m = torch.randn(60 * K, 32)

    def ours(x: Tensor, w: Tensor) -> Tensor:
        return unpermute(permute(x, p) * m.to(x.dtype), p, w)

    def plain(x: Tensor, w: Tensor) -> Tensor:
        per_slot = (x[:, None] * m.to(x.dtype)[p.row_of_slot.long()].view(60, K, 32)) * w[:, :, None]
        return per_slot.sum(1)

    error_budget(ours, plain, x, w, dtype=dtype)


def test_gradients_in_float64() -> None:
    ids = torch.tensor([[2, 0], [-1, 3], [0, 7], [2, 1]], dtype=torch.int32)  # one dropped slot, one out of range
    p = plan(ids, 4)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    rows = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: permute(x, p), (x,))
    assert torch.autograd.gradcheck(lambda r, w: unpermute(r, p, w), (rows, w))
    torch.testing.assert_close(permute(x, p), reference.permute(x, p))
    torch.testing.assert_close(unpermute(rows, p, w), reference.unpermute(rows, p, w))


def test_dropped_slots_give_zero_and_let_nothing_through() -> None:
    # NVIDIA/TransformerEngine#2908: the sentinel -1 was mishandled
    ids = torch.tensor([[-1, -1], [1, -1], [0, 1]], dtype=torch.int32)
    p = plan(ids, 2)
    x = torch.randn(3, 4, requires_grad=True)
    rows = permute(x, p)
    assert torch.equal(rows[3:], torch.zeros(3, 4))
    poisoned = rows.detach().clone()
    poisoned[3:] = float("nan")
    poisoned.requires_grad_()
    w = torch.ones(3, 2, requires_grad=True)
    y = unpermute(poisoned, p, w)
    assert torch.equal(y[0], torch.zeros(4)) and bool(y.isfinite().all())
    y.sum().backward()
    assert w.grad is not None and torch.equal(w.grad[ids < 0], torch.zeros(3))
    assert poisoned.grad is not None and torch.equal(poisoned.grad[3:], torch.zeros(3, 4))
    rows.sum().backward()
    assert torch.equal(x.grad, torch.tensor([0.0, 1.0, 2.0])[:, None].expand(3, 4))


def test_strided_inputs() -> None:
    # intel/intel-xpu-backend-for-triton#7455; huggingface/kernels-community#106: strides ignored
    base = torch.randn(10, 12)
    p = plan(make_routing("uniform", 6, 2, 4).experts, 4)
    for x in (base[:6, ::2], torch.randn(6, 6).t(), base[:6, 3:9], base[0, :6].expand(6, 6)):
        leaf = x.clone(memory_format=torch.contiguous_format).requires_grad_()
        strided = x.detach().requires_grad_()
        for t in (leaf, strided):
            y = unpermute(permute(t, p), p, torch.ones(6, 2))
            y.backward(torch.ones(6).expand(6, 6))
        assert torch.equal(permute(x, p), permute(leaf.detach(), p))
        assert torch.equal(leaf.grad, strided.grad)


def test_deterministic_and_repeatable() -> None:
    # huggingface/transformers#43362; vllm-project/vllm#53440; pytorch/torchtitan#1974, #3436: atomics, histc
    torch.use_deterministic_algorithms(True)
    ids = make_routing("zipf:1.5", 64, 4, 8).experts
    first: list[Tensor] = []
    for _ in range(100):
        x, w = (torch.randn(s, generator=torch.Generator().manual_seed(1)) for s in ((64, 16), (64, 4)))
        x, w = x.to(torch.bfloat16).requires_grad_(), w.requires_grad_()
        p = plan(ids, 8)
        y = unpermute(permute(x, p), p, w)
        y.backward(torch.ones_like(y))
        now = [*astuple(p), y.detach(), x.grad, w.grad]
        first = first or now
        assert all(torch.equal(a, b) for a, b in zip(first, now, strict=True))
    assert int(plan(ids, 8).counts.sum()) == 256


@pytest.mark.parametrize(("T", "E"), [(0, 4), (3, 4)])  # no tokens; tokens, all dropped
def test_nothing_routed(T: int, E: int) -> None:
    p = plan(torch.full((T, 2), -1, dtype=torch.int32), E)
    x, w = torch.randn(T, 5, requires_grad=True), torch.ones(T, 2, requires_grad=True)
    y = unpermute(permute(x, p), p, w)
    assert torch.equal(y, torch.zeros(T, 5)) and p.counts.tolist() == [0] * E
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros(T, 5)) and torch.equal(w.grad, torch.zeros(T, 2))


def test_bad_arguments_name_what_was_expected() -> None:
    p, x = plan(EXAMPLE, 4), torch.zeros(3, 5)
    for call, error, message in (
        (lambda: plan(EXAMPLE[0], 4), ValueError, "experts: expected 2 dimensions"),
        (lambda: plan(EXAMPLE.float(), 4), TypeError, "experts: expected int32 or int64"),
        (lambda: plan(EXAMPLE, 0), ValueError, "num_experts: expected at least 1, got 0"),
        (lambda: permute(torch.zeros(4, 5), p), ValueError, r"x: expected T tokens with T \* K = 6 slots"),
        (lambda: permute(x, EXAMPLE), TypeError, "plan: expected Plan"),  # type: ignore[arg-type]
        (lambda: unpermute(x, p, torch.ones(3, 2)), ValueError, "rows, weights: expected N = 6 rows"),
        (lambda: unpermute(torch.zeros(6, 5), p, EXAMPLE), TypeError, "weights: expected a floating-point dtype"),
    ):
        with pytest.raises(error, match=message):
            call()
