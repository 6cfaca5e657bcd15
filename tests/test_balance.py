"""Load-balance losses, the bias update, load statistics, and the loss that travels with the output."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moeffn import (
    RouterConfig,
    Routing,
    attach_loss,
    load_balance_loss,
    load_stats,
    route,
    update_selection_bias,
    z_loss,
)


def router(E: int = 8, K: int = 2, **kwargs: object) -> RouterConfig:
    return RouterConfig(num_experts=E, top_k=K, **kwargs)  # type: ignore[arg-type]


def even_routing(T: int, E: int, K: int) -> Routing:
    """Every expert gets T·K/E slots, every score is equal."""
    ids = torch.arange(T * K).view(T, K) % E
    return Routing(ids, torch.full((T, K), 1.0 / K), torch.zeros(T, E))


# ---- conventions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("E", "K"), [(4, 1), (8, 2), (8, 8), (64, 6), (128, 8)])
@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_even_load_gives_one_whatever_the_shape(E: int, K: int, score: str) -> None:
    # huggingface/transformers#31464, #28255; allenai/OLMoE#45: a value that grew with k, layers pooled
    r = even_routing(2 * E, E, K)
    config = router(E, K, score=score)
    for layers in (r, [r], [r] * 5):
        assert float(load_balance_loss(layers, config)) == pytest.approx(1.0, abs=1e-6)
    assert float(load_balance_loss(r, E)) == pytest.approx(1.0, abs=1e-6)
    assert float(load_balance_loss(r, config, convention="hf")) == pytest.approx(K, rel=1e-6)


def test_one_expert_taking_all_gives_the_number_of_experts() -> None:
    logits = torch.zeros(10, 8)
    logits[:, 3] = 50.0
    assert float(load_balance_loss(route(logits, router(K=1)), router(K=1))) == pytest.approx(8.0, rel=1e-5)


def test_layers_are_averaged_not_pooled() -> None:
    # Two layers, each on one expert: the pooled form sees half the imbalance
    a, b = torch.zeros(10, 8), torch.zeros(10, 8)
    a[:, 0], b[:, 1] = 50.0, 50.0
    layers = [route(a, router(K=1)), route(b, router(K=1))]
    assert float(load_balance_loss(layers, 8)) == pytest.approx(8.0, rel=1e-5)
    assert float(load_balance_loss(layers, 8, convention="hf")) == pytest.approx(4.0, rel=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_hf_convention_is_the_number_of_transformers(masked: bool) -> None:
    # huggingface/transformers#31464: those who compare runs need this very number
    modeling = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    B, S, E, K = 3, 11, 8, 2
    logits = tuple((torch.randn(B * S, E) * 2).requires_grad_() for _ in range(3))
    mask = (torch.rand(B, S) < 0.6).long() if masked else None
    want = modeling.load_balancing_loss_func(logits, E, K, mask)
    for layers in (logits, [route(z, router(E, K)) for z in logits]):
        got = load_balance_loss(layers, router(E, K), convention="hf", token_mask=mask)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
        for a, b in zip(torch.autograd.grad(got, logits), torch.autograd.grad(want, logits, retain_graph=True),
                        strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "sqrtsoftplus"])
def test_switch_loss_by_hand_and_its_gradient(score: str) -> None:
    # NVIDIA-NeMo/Automodel#1408; hpcaitech/ColossalAI#1633: the gradient never reached the router
    config = router(5, 2, score=score)
    logits = torch.randn(12, 5, dtype=torch.float64).requires_grad_()
    ids = route(logits, config).experts
    s = {"softmax": lambda z: torch.softmax(z, -1), "sigmoid": torch.sigmoid,
         "sqrtsoftplus": lambda z: torch.nn.functional.softplus(z).sqrt()}[score](logits)
    P = (s / s.sum(1, keepdim=True)).mean(0)
    f = torch.bincount(ids.flatten(), minlength=5) / ids.numel()
    torch.testing.assert_close(load_balance_loss(route(logits, config), config), 5 * (f * P).sum())

    def loss(z: Tensor) -> Tensor:  # the choice is held: it is piecewise constant
        return load_balance_loss(Routing(ids, torch.ones(12, 2), z), config)

    assert torch.autograd.gradcheck(loss, (logits,))
    assert torch.autograd.gradcheck(z_loss, (logits,))
    torch.testing.assert_close(z_loss(logits), torch.logsumexp(logits, -1).square().mean())


def test_identity_and_shared_columns_are_left_out() -> None:
    config = router(4, 2, num_identity_experts=4)
    logits = torch.zeros(8, 8)
    ids = torch.arange(16).view(8, 2) % 4
    assert float(load_balance_loss(Routing(ids, torch.ones(8, 2), logits), config)) == pytest.approx(1.0)
    shared = router(4, 2, score="joint_logsigmoid", num_shared=2)
    assert float(load_balance_loss(Routing(ids, torch.ones(8, 2), logits[:, :6]), shared)) == pytest.approx(1.0)


# ---- padding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("convention", ["switch", "hf"])
@pytest.mark.parametrize("pad", [0.0, 1e4, math.nan])
def test_padding_counts_nowhere(convention: str, pad: float) -> None:
    # huggingface/transformers#28505: padding tokens were counted in the loss
    config, real = router(), torch.randn(20, 8)
    mask = torch.arange(40) % 2 == 0
    padded = torch.full((40, 8), pad)
    padded[mask] = real
    padded.requires_grad_()
    for token_mask in (None, mask):  # whether or not the padding was routed
        how: Any = {"convention": convention}
        r = route(padded, config, token_mask=token_mask)
        got = load_balance_loss(r, config, token_mask=mask.view(4, 10), **how)
        want = load_balance_loss(route(real, config), config, **how)
        torch.testing.assert_close(got, want)
        (grad,) = torch.autograd.grad(got, padded)
        assert bool((grad[~mask] == 0).all()) and float(grad[mask].abs().max()) > 0
    torch.testing.assert_close(z_loss(padded, token_mask=mask), z_loss(real))
    (grad,) = torch.autograd.grad(z_loss(padded, token_mask=mask), padded)
    assert bool((grad[~mask] == 0).all())


@pytest.mark.parametrize("T", [0, 6])
def test_nothing_but_padding_gives_zero(T: int) -> None:
    # huggingface/transformers#28505: NaN for a batch without tokens
    config, mask = router(), torch.zeros(T, dtype=torch.bool)
    logits = torch.randn(T, 8, requires_grad=True)
    r = route(logits, config, token_mask=mask)
    for loss in (load_balance_loss(r, config, token_mask=mask), z_loss(logits, token_mask=mask),
                 load_balance_loss(r, config, convention="hf", token_mask=mask)):
        assert float(loss.detach()) == 0.0
        loss.backward()
    assert logits.grad is not None and bool((logits.grad == 0).all())


# ---- micro-batches and ranks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("M", [1, 2, 4])
def test_microbatches_of_equal_routing_add_up_like_the_main_loss(M: int) -> None:
    # NVIDIA-NeMo/Automodel#3359; NVIDIA/Megatron-LM#5047: weighted M times under gradient accumulation
    config, piece = router(), torch.randn(6, 8)
    weight = piece.clone().requires_grad_()  # stands for the router: every micro-batch has the same tokens
    load_balance_loss(route(weight.repeat(4, 1), config), config).backward()
    whole, weight.grad = weight.grad, None
    for _ in range(M):
        (load_balance_loss(route(weight.repeat(4 // M, 1), config), config) / M).backward()
    torch.testing.assert_close(weight.grad, whole, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("M", [2, 4])
def test_counts_of_the_whole_batch_make_any_microbatches_exact(M: int) -> None:
    # NVIDIA/Megatron-LM#3672: local scores with global sums, a gradient 1/dp too small. Micro-batch = rank here.
    config, logits = router(), torch.randn(24, 8) + torch.arange(8) * 0.3
    full = logits.clone().requires_grad_()
    loss = load_balance_loss(route(full, config), config)
    loss.backward()
    counts = load_stats(route(logits, config), 8).counts
    kept = counts.clone()
    parts = [p.requires_grad_() for p in logits.clone().chunk(M)]
    losses = [load_balance_loss(route(p, config), config, counts=counts) / M for p in parts]
    sum(losses).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(sum(losses), loss)
    torch.testing.assert_close(torch.cat([p.grad for p in parts if p.grad is not None]), full.grad)
    assert torch.equal(counts, kept)  # NVIDIA/Megatron-LM#7452: the caller's counts were overwritten


# ---- the loss that travels with the output -------------------------------------------------------------------------


def moe_like(weight: Tensor, x: Tensor, coefficient: float | Tensor, config: RouterConfig) -> Tensor:
    r = route(x @ weight.T, config)
    return attach_loss(x * r.weights.sum(1, keepdim=True), load_balance_loss(r, config), coefficient)


@pytest.mark.parametrize("mode", ["plain", "checkpoint", "reentrant"])
@pytest.mark.parametrize("coefficient", [0.0, 0.5, 2.0])
def test_attached_loss_reaches_the_router(mode: str, coefficient: float) -> None:
    # NVIDIA-NeMo/Automodel#1408: thrown away; hpcaitech/ColossalAI#1633: coefficient never multiplied;
    # huggingface/transformers#44242: off unless an output flag was set. Recomputation must not send it twice.
    config, x = router(), torch.randn(30, 16)
    weight = torch.randn(8, 16, requires_grad=True)

    def grad(c: float, how: str) -> Tensor:
        args = (weight, x, c, config)
        y = moe_like(*args) if how == "plain" else checkpoint(moe_like, *args, use_reentrant=how == "reentrant")
        return torch.autograd.grad(y.square().sum(), weight)[0] if how != "reentrant" else _backward(y, weight)

    aux = load_balance_loss(route(x @ weight.T, config), config)
    want = grad(0.0, "plain") + coefficient * torch.autograd.grad(aux, weight)[0]
    torch.testing.assert_close(grad(coefficient, mode), want, rtol=1e-4, atol=1e-5)


def _backward(y: Tensor, weight: Tensor) -> Tensor:
    weight.grad = None
    y.square().sum().backward()
    assert weight.grad is not None
    return weight.grad


def test_attached_loss_leaves_the_output_alone() -> None:
    y, loss = torch.randn(4, 3, dtype=torch.bfloat16).requires_grad_(), torch.tensor(2.0, requires_grad=True)
    out = attach_loss(y, loss, torch.tensor(3.0))
    assert torch.equal(out, y) and out.dtype == torch.bfloat16
    (out.float().sum() * 7.0).backward()  # the size of what flows back into y does not matter to the loss
    assert float(loss.grad) == 3.0 and bool((y.grad == 7).all())
    with pytest.raises(ValueError, match="loss: expected 0 dimensions"):
        attach_loss(y, torch.ones(3))


def test_attached_loss_compiles() -> None:
    config, x, weight = router(), torch.randn(30, 16), torch.randn(8, 16, requires_grad=True)
    compiled = torch.compile(moe_like, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(weight, x, 0.5, config).sum(), weight)[0]
    want = torch.autograd.grad(moe_like(weight, x, 0.5, config).sum(), weight)[0]
    torch.testing.assert_close(got, want)


# ---- the bias update -----------------------------------------------------------------------------------------------


def test_bias_update_sees_one_slot_of_difference() -> None:
    # NVIDIA/Megatron-LM#7081: a bf16 count buffer flipped the sign (40 840 became 41 216)
    counts = torch.tensor([40_000, 40_001], dtype=torch.int32)
    bias = torch.tensor([0.25, -0.25])
    new = update_selection_bias(bias, counts, 1e-3)
    assert torch.equal(new, bias + 1e-3 * torch.tensor([1.0, -1.0]))
    assert torch.equal(counts, torch.tensor([40_000, 40_001], dtype=torch.int32))  # NVIDIA/Megatron-LM#7452
    assert torch.equal(bias, torch.tensor([0.25, -0.25])) and new.dtype == torch.float32
    huge = torch.tensor([2**40, 2**40 + 1], dtype=torch.int64)
    assert torch.equal(torch.sign(update_selection_bias(torch.zeros(2), huge)), torch.tensor([1.0, -1.0]))


def test_bias_update_rests_at_balance_and_can_be_kept_from_drifting() -> None:
    # pytorch/torchtitan#1506: more experts under the mean than over it push the biases up together
    assert torch.equal(update_selection_bias(torch.ones(4), torch.full((4,), 7)), torch.ones(4))
    assert torch.equal(update_selection_bias(torch.ones(4), torch.zeros(4, dtype=torch.long)), torch.ones(4))
    counts = torch.tensor([100, 1, 2, 3])
    assert float(update_selection_bias(torch.zeros(4), counts, 1.0).mean()) == 0.5
    assert float(update_selection_bias(torch.zeros(4), counts, 1.0, center=True).mean()) == 0.0


def test_bias_update_evens_out_a_skewed_router() -> None:
    config, logits = router(8, 2, score="sigmoid"), torch.randn(500, 8) * 0.3 + torch.arange(8) * 0.2
    bias = torch.zeros(8)
    first = load_stats(route(logits, config), 8).max_over_mean
    for _ in range(120):
        bias = update_selection_bias(bias, load_stats(route(logits, config, selection_bias=bias), 8).counts, 1e-2)
    last = load_stats(route(logits, config, selection_bias=bias), 8).max_over_mean
    assert first > 2.5 and last < 1.3


@pytest.mark.parametrize("bias", [torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.float64)])
def test_bias_must_be_float32(bias: Tensor) -> None:
    with pytest.raises(TypeError, match="bias: expected dtype float32"):
        update_selection_bias(bias, torch.ones(4, dtype=torch.long))


def test_counts_must_be_integers() -> None:
    with pytest.raises(TypeError, match="counts: expected an integer dtype"):
        update_selection_bias(torch.zeros(4), torch.ones(4))
    with pytest.raises(ValueError, match=r"counts: expected shape \(4,\)"):
        update_selection_bias(torch.zeros(4), torch.ones(3, dtype=torch.long))


# ---- statistics ----------------------------------------------------------------------------------------------------


def test_load_stats_count_every_slot_once() -> None:
    # kekzl/imp#1741; databricks/megablocks#100: the imbalance that sets the cost could not be seen
    stats = load_stats(Routing(torch.tensor([[2, 0], [2, 3], [0, 2], [-1, 2]]), torch.ones(4, 2)), 5)
    assert stats.counts.tolist() == [2, 0, 4, 1, 0] and stats.counts.dtype == torch.int64
    assert int(stats.dropped) == 1 and stats.idle_experts == 2
    assert stats.max_over_mean == pytest.approx(4 / (7 / 5))
    empty = load_stats(Routing(torch.full((3, 2), -1), torch.zeros(3, 2)), 4)
    assert empty.max_over_mean == 0.0 and int(empty.dropped) == 6 and empty.idle_experts == 4


def test_load_stats_do_not_count_recomputation() -> None:
    # NVIDIA-NeMo/Automodel#3247; pytorch/torchtitan#4772: counters in forward counted twice under checkpointing
    config, logits = router(), torch.randn(10, 8, requires_grad=True)

    def f(z: Tensor) -> tuple[Tensor, Tensor]:
        r = route(z, config)
        return r.weights.sum(), load_stats(r, 8).counts

    total = torch.zeros(8, dtype=torch.int64)
    y, counts = checkpoint(f, logits, use_reentrant=False)
    total += counts
    y.backward()
    assert torch.equal(total, f(logits)[1]) and int(total.sum()) == 20


# ---- bad arguments -------------------------------------------------------------------------------------------------


def test_bad_arguments_name_what_was_expected() -> None:
    config = router()
    r = route(torch.randn(5, 8), config)
    bare = Routing(r.experts, r.weights)
    for call, error, message in (
        (lambda: load_balance_loss(r, config, convention="mean"), ValueError, "convention: expected one of"),  # type: ignore[arg-type]
        (lambda: load_balance_loss([], config), ValueError, "layers: expected at least one"),
        (lambda: load_balance_loss(bare, config), ValueError, "a Routing with logits"),
        (lambda: load_balance_loss(bare, config, convention="hf"), ValueError, "a Routing with logits"),
        (lambda: load_balance_loss(torch.zeros(3, 8), config), TypeError, "convention 'switch'"),
        (lambda: load_balance_loss(r, 9), ValueError, "at least E = 9 columns"),
        (lambda: load_balance_loss(torch.zeros(3, 8), 8, convention="hf"), ValueError, "router: expected a Router"),
        (lambda: load_balance_loss(r, config, token_mask=torch.ones(4)), ValueError, "token_mask: expected T = 5"),
        (lambda: load_balance_loss(r, config, counts=torch.ones(8)), TypeError, "counts: expected an integer dtype"),
        (lambda: z_loss(torch.zeros(8)), ValueError, "logits: expected 2 dimensions"),
        (lambda: load_stats(r.experts, 8), TypeError, "routing: expected Routing"),  # type: ignore[arg-type]
        (lambda: load_stats(r, 0), ValueError, "num_experts: expected at least 1"),
    ):
        with pytest.raises(error, match=message):
            call()
