"""route: every option against the token-loop oracle, and what users have reported."""

from __future__ import annotations

import dataclasses
import random
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor

from moeffn import RouterConfig, Routing, reference, route

NAN, INF = float("nan"), float("inf")

# One config for each way of scoring, with selection bias where the family has one: (config, has bias)
V3 = RouterConfig(num_experts=16, top_k=4, score="sigmoid", num_groups=4, topk_groups=2, renormalize=True,
                  renorm_eps=1e-20, scale=2.5)
MODES = {
    "softmax": (RouterConfig(num_experts=8, top_k=4), False),
    "softmax_renorm": (RouterConfig(num_experts=8, top_k=4, renormalize=True), False),
    "topk_softmax": (RouterConfig(num_experts=8, top_k=4, order="topk_score"), False),
    "topk_sigmoid": (RouterConfig(num_experts=8, top_k=4, score="sigmoid", order="topk_score"), True),
    "sigmoid_groups": (V3, True),
    "sigmoid_renorm_no_eps": (RouterConfig(num_experts=8, top_k=4, score="sigmoid", renormalize=True), True),
    "sqrtsoftplus": (RouterConfig(num_experts=8, top_k=4, score="sqrtsoftplus", renormalize=True), True),
    "softmax_groups_zero": (dataclasses.replace(V3, score="softmax", group_reduce="max", group_fill="zero"), False),
    "sparsemixer": (RouterConfig(num_experts=8, top_k=2, score="sparsemixer", jitter_eps=0.1), False),
    "joint_logsigmoid": (RouterConfig(num_experts=8, top_k=3, score="joint_logsigmoid", num_shared=2), True),
    "identity": (RouterConfig(num_experts=8, top_k=4, num_identity_experts=4, scale=6.0), True),
    "pnorm_softcap": (RouterConfig(num_experts=8, top_k=4, renormalize=True, norm_p=2.0, logit_softcap=3.0), False),
}


def selection_bias(config: RouterConfig, present: bool) -> Tensor | None:
    g = torch.Generator().manual_seed(1)
    return torch.randn(config.num_experts + config.num_identity_experts, generator=g) * 0.1 if present else None


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> tuple[RouterConfig, Tensor | None]:
    config, has_bias = MODES[request.param]
    return config, selection_bias(config, has_bias)


def assert_same_routing(got: Routing, want: Routing, rtol: float = 2e-6) -> None:
    assert torch.equal(got.experts, want.experts)
    torch.testing.assert_close(got.weights, want.weights, rtol=rtol, atol=1e-12)
    for name in ("identity_weights", "shared_weights"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        if a is not None:
            torch.testing.assert_close(a, b, rtol=rtol, atol=1e-12)


# ---- equal to the oracle -------------------------------------------------------------------------------------------


def random_config(rng: random.Random) -> RouterConfig | None:
    """A config drawn over every option; None where the options do not go together."""
    score = rng.choice(["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer", "joint_logsigmoid"])
    E, Z, G = rng.choice([1, 2, 3, 8, 12, 33, 64]), rng.choice([0, 0, 1, 4]), rng.choice([1, 1, 2, 4])
    try:
        return RouterConfig(
            num_experts=E, top_k=rng.randint(1, min(E + Z, 8)), num_identity_experts=Z,
            score=score,  # type: ignore[arg-type]
            order=rng.choice(["score_topk", "topk_score"]),
            num_groups=G, topk_groups=rng.randint(1, G), group_reduce=rng.choice(["max", "sum_top2"]),
            group_fill=rng.choice(["neg_inf", "zero"]), norm_p=rng.choice([1.0, 1.0, 2.0, 0.5]),
            renormalize=score not in ("sparsemixer", "joint_logsigmoid") and rng.random() < 0.5,
            renorm_eps=rng.choice([0.0, 1e-20, 1e-6]), renorm_eps_mode=rng.choice(["add", "clamp"]),
            scale=rng.choice([1.0, 2.5]), logit_scale=rng.choice([1.0, 0.17677]),
            logit_softcap=rng.choice([None, None, 5.0]), identity_kind=rng.choice(["identity", "skip"]),
            num_shared=rng.choice([1, 2]) if score == "joint_logsigmoid" else 0,
            apply_to=rng.choice(["output", "input"]))
    except ValueError:
        return None


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.filterwarnings("ignore:RouterConfig with top_k=1")
def test_every_option_equals_the_oracle_with_gradient(seed: int) -> None:
    rng, tried = random.Random(seed), 0
    torch.manual_seed(seed)
    while tried < 40:
        config = random_config(rng)
        if config is None:
            continue
        tried += 1
        T, C = rng.choice([0, 1, 2, 7, 20]), config.num_experts + config.num_identity_experts
        logits = torch.randn(T, config.num_logits) * rng.choice([0.1, 1.0, 5.0, 30.0])
        if rng.random() < 0.4:
            logits = (logits * 2).round() / 2  # ties
        if T and rng.random() < 0.3:
            logits[rng.randrange(T), rng.randrange(config.num_logits)] = rng.choice([NAN, INF, -INF])
            logits[0] = rng.choice([NAN, INF, -INF, -1e20])
        bias = torch.randn(C) * 0.1 if rng.random() < 0.4 else None
        mask = torch.rand(T) < 0.7 if rng.random() < 0.3 else None
        ids = None
        if config.score != "sparsemixer" and rng.random() < 0.15:
            ids, bias = torch.randint(0, C, (T, config.top_k)), None
        a, b = logits.clone().requires_grad_(), logits.clone().requires_grad_()
        got = route(a, config, selection_bias=bias, token_mask=mask, expert_ids=ids)
        want = reference.route(b, config, selection_bias=bias, token_mask=mask, expert_ids=ids)
        assert_same_routing(got, want)
        assert got.apply_to == want.apply_to == config.apply_to
        if T:
            g = torch.randn(T, config.top_k)
            (got.weights * g).sum().backward()
            (want.weights * g).sum().backward()
            torch.testing.assert_close(a.grad, b.grad, rtol=2e-4, atol=2e-5, msg=lambda m, c=config: f"{m}\n{c}")


def test_gradient_equals_float64_finite_differences(mode: tuple[RouterConfig, Tensor | None]) -> None:
    config, bias = mode
    # Logits far from ties, so that a small step changes no choice; the sparsemixer threshold is a step as well.
    logits = torch.stack([torch.randperm(config.num_logits).double() * 0.37 - 1.0 for _ in range(3)]).requires_grad_()

    def weights(z: Tensor) -> tuple[Tensor, ...]:
        r = route(z, config, selection_bias=bias)
        extra = [t for t in (r.identity_weights, r.shared_weights) if t is not None]
        return (r.weights, *extra)

    assert torch.autograd.gradcheck(weights, (logits,), eps=1e-6, atol=1e-7)


def test_float64_logits_stay_float64() -> None:
    r = route(torch.randn(3, 8, dtype=torch.float64), MODES["softmax"][0])
    assert r.weights.dtype == torch.float64 and r.logits is not None and r.logits.dtype == torch.float64


# ---- what users have reported --------------------------------------------------------------------------------------

BAD_ROWS = {"all_nan": [NAN] * 99, "one_nan": [0.3, NAN], "all_inf": [INF] * 99, "all_minus_inf": [-INF] * 99,
            "mixed": [NAN, INF, -INF, INF]}


@pytest.mark.parametrize("kind", BAD_ROWS)
@pytest.mark.parametrize("T", [4, 512, 4096], ids="T{}".format)  # the reported fault changed with the batch size
def test_bad_rows_give_distinct_ids_and_leave_others_alone(mode: tuple[RouterConfig, Tensor | None], kind: str, T: int
                                                           ) -> None:
    # vllm-project/vllm#39391, #39244; intel/torch-xpu-ops#4839: NaN rows gave expert 0 in every slot, or index -1
    config, bias = mode
    clean = torch.randn(T, config.num_logits)
    row = T // 2
    dirty = clean.clone()
    values = torch.tensor(BAD_ROWS[kind][: config.num_logits])
    dirty[row, : len(values)] = values
    want, got = (route(z, config, selection_bias=bias) for z in (clean, dirty.requires_grad_()))
    chosen = got.experts[row][got.experts[row] >= 0]
    assert chosen.unique().numel() == chosen.numel() and bool((chosen < config.num_experts).all())
    if not config.num_identity_experts:
        assert chosen.numel() == config.top_k
    others = torch.arange(T) != row
    assert torch.equal(got.experts[others], want.experts[others])
    assert torch.equal(got.weights[others], want.weights[others])
    assert bool(got.weights[row].isfinite().all())
    (got.weights * torch.randn_like(got.weights)).sum().backward()
    assert dirty.grad is not None and bool(dirty.grad.isfinite().all())
    assert bool((dirty.grad[row][~dirty[row].isfinite()] == 0).all())


@pytest.mark.parametrize("kwargs", [{"renormalize": True}, {"order": "topk_score"}], ids=str)
def test_top1_router_without_gradient_warns_once(kwargs: dict) -> None:
    # NVIDIA/Megatron-LM#894: a top-1 MoE no better than dense, because its weight was the constant 1
    config = RouterConfig(num_experts=7, top_k=1, scale=1.25, **kwargs)
    logits = torch.randn(5, 7, requires_grad=True)
    with pytest.warns(UserWarning, match="no gradient reaches the router"):
        route(logits, config).weights.sum().backward()
    assert logits.grad is not None and float(logits.grad.abs().max()) < 1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        route(logits, config)


def test_top1_router_with_softmax_first_learns() -> None:
    # NVIDIA/Megatron-LM#894, the other half; databricks/megablocks#87: k = 1 keeps its axis
    logits = torch.randn(5, 7, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        r = route(logits, RouterConfig(num_experts=7, top_k=1))
    r.weights.sum().backward()
    assert logits.grad is not None and float(logits.grad.abs().max()) > 1e-3
    assert r.weights.shape == (5, 1)
    one = route(logits.detach(), RouterConfig(num_experts=7, top_k=1, renormalize=True)).weights
    assert torch.equal(one, torch.ones(5, 1))


def test_orders_of_softmax_topk_and_renormalisation() -> None:
    # pytorch/torchtitan#1448; NVIDIA/Megatron-LM#955, #1593; Lightning-AI/litgpt#2013: modes taken for one another.
    # Written out by hand for one token: probabilities 0.4, 0.3, 0.2, 0.1.
    p = torch.tensor([[0.1, 0.4, 0.2, 0.3]], dtype=torch.float64)
    z = p.log()

    def weights(**kwargs: object) -> list[float]:
        r = route(z, RouterConfig(num_experts=4, top_k=2, **kwargs))  # type: ignore[arg-type]
        assert r.experts.tolist() == [[1, 3]]
        return r.weights[0].tolist()

    assert weights() == pytest.approx([0.4, 0.3])
    assert weights(renormalize=True) == pytest.approx([4 / 7, 3 / 7])
    assert weights(order="topk_score") == pytest.approx([4 / 7, 3 / 7])
    odds = [x / (1 + x) for x in (0.4, 0.3)]
    assert weights(score="sigmoid", order="topk_score") == pytest.approx(odds)
    assert weights(score="sigmoid", renormalize=True) == pytest.approx([x / sum(odds) for x in odds])
    assert weights(renormalize=True, norm_p=2.0) == pytest.approx([0.8, 0.6])
    assert weights(score="sqrtsoftplus") == pytest.approx([np.log(1.4) ** 0.5, np.log(1.3) ** 0.5])


def test_weights_without_renormalisation_are_softmax_over_all() -> None:
    # sgl-project/sglang#35160: raw logits were used as weights when renormalize was off
    logits = torch.randn(40, 8) * 3
    r = route(logits, RouterConfig(num_experts=8, top_k=3))
    assert torch.equal(r.weights, torch.softmax(logits, -1).gather(1, r.experts.long()))
    assert bool((r.weights >= 0).all()) and bool((r.weights.sum(1) <= 1 + 1e-6).all())


def test_scale_multiplies_exactly_once(mode: tuple[RouterConfig, Tensor | None]) -> None:
    # sgl-project/sglang-jax#1282; kvcache-ai/sglang#86; PaddlePaddle/PaddleFleet#1299: skipped, or 1.5 became 2.25.
    # A factor of two is exact in binary floating point, so equality is exact.
    config, bias = mode
    logits = torch.randn(30, config.num_logits)
    once = route(logits, config, selection_bias=bias)
    twice = route(logits, dataclasses.replace(config, scale=2 * config.scale), selection_bias=bias)
    assert torch.equal(twice.weights, 2 * once.weights) and torch.equal(twice.experts, once.experts)
    if once.identity_weights is not None:
        assert torch.equal(twice.identity_weights, 2 * once.identity_weights)


def test_selection_bias_moves_choices_and_never_weights() -> None:
    logits = torch.zeros(1, 4)
    bias = torch.tensor([0.0, 0.0, 0.3, 0.1])
    r = route(logits, RouterConfig(num_experts=4, top_k=2, score="sigmoid"), selection_bias=bias)
    assert r.experts.tolist() == [[2, 3]] and r.weights.tolist() == [[0.5, 0.5]]


def test_group_fill_decides_about_negative_biased_scores() -> None:
    # Group 0 is kept, its second expert's biased score is negative: a masked expert at 0 beats it, one at -inf does not
    logits, bias = torch.zeros(1, 4), torch.tensor([1.0, -0.9, -0.1, -0.1])
    config = RouterConfig(num_experts=4, top_k=2, score="sigmoid", num_groups=2, topk_groups=1, group_reduce="max")
    assert route(logits, config, selection_bias=bias).experts.tolist() == [[0, 1]]
    zero = dataclasses.replace(config, group_fill="zero")
    assert route(logits, zero, selection_bias=bias).experts.tolist() == [[0, 2]]


def test_k_equal_to_the_number_of_experts_is_a_dense_mixture() -> None:
    # laekov/fastmoe#197; ml-explore/mlx-examples#504: k > E refused (see test_config), k = E is every expert
    logits = torch.randn(9, 5)
    r = route(logits, RouterConfig(num_experts=5, top_k=5))
    assert torch.equal(torch.zeros(9, 5).scatter(1, r.experts.long(), r.weights), torch.softmax(logits, -1))


def test_renormalising_a_row_of_zeros_stays_finite() -> None:
    logits = torch.full((2, 4), -1e20, requires_grad=True)
    r = route(logits, RouterConfig(num_experts=4, top_k=2, score="sigmoid", renormalize=True))
    r.weights.sum().backward()
    assert torch.equal(r.weights, torch.zeros(2, 2)) and bool(logits.grad.isfinite().all())


def test_very_negative_logits_have_finite_gradients() -> None:
    # softplus(-200) is 0 in float32, and the square root's slope there is infinite
    for score in ("sqrtsoftplus", "sigmoid", "softmax"):
        logits = torch.full((3, 8), -200.0, requires_grad=True)
        config = RouterConfig(num_experts=8, top_k=2, score=score, renormalize=True)  # type: ignore[arg-type]
        (route(logits, config).weights * torch.tensor([1.0, 3.0])).sum().backward()
        assert bool(logits.grad.isfinite().all()), score


def test_a_token_does_not_depend_on_its_batch(mode: tuple[RouterConfig, Tensor | None]) -> None:
    config, bias = mode
    logits = torch.randn(133, config.num_logits)
    full = route(logits, config, selection_bias=bias)
    order = torch.randperm(133)
    shuffled = route(logits[order], config, selection_bias=bias)
    alone = [route(row[None], config, selection_bias=bias) for row in logits]
    assert torch.equal(shuffled.experts, full.experts[order]) and torch.equal(shuffled.weights, full.weights[order])
    assert torch.equal(torch.cat([r.experts for r in alone]), full.experts)
    assert torch.equal(torch.cat([r.weights for r in alone]), full.weights)


def test_masked_tokens_are_not_routed_and_get_no_gradient(mode: tuple[RouterConfig, Tensor | None]) -> None:
    config, bias = mode
    logits = torch.randn(6, config.num_logits)
    logits[1] = NAN
    mask = torch.tensor([True, False, True, True, False, True])
    got = route(logits.requires_grad_(), config, selection_bias=bias, token_mask=mask)
    full = route(logits.detach(), config, selection_bias=bias)
    assert bool((got.experts[~mask] == -1).all()) and bool((got.weights[~mask] == 0).all())
    assert torch.equal(got.experts[mask], full.experts[mask]) and torch.equal(got.weights[mask], full.weights[mask])
    got.weights.sum().backward()
    assert bool((logits.grad[~mask] == 0).all())


def test_identity_experts_leave_the_ids() -> None:
    logits = torch.tensor([[0.0, 0.0, 5.0, 4.0], [5.0, 4.0, 0.0, 0.0], [5.0, 0.0, 4.0, 0.0]])
    config = RouterConfig(num_experts=2, top_k=2, num_identity_experts=2)
    r = route(logits, config)
    p = torch.softmax(logits, -1)
    assert r.experts.tolist() == [[-1, -1], [0, 1], [0, -1]]
    torch.testing.assert_close(r.identity_weights, torch.stack([p[0, 2] + p[0, 3], p[1, 0] * 0, p[2, 2]]))
    assert r.weights[0].tolist() == [0.0, 0.0]
    assert route(logits, dataclasses.replace(config, identity_kind="skip")).identity_weights is None


def test_given_ids_take_their_weights_from_the_scores() -> None:
    logits, ids = torch.randn(7, 8), torch.stack([torch.randperm(8)[:3] for _ in range(7)])
    r = route(logits, RouterConfig(num_experts=8, top_k=3), expert_ids=ids)
    assert torch.equal(r.experts, ids.to(torch.int32))
    assert torch.equal(r.weights, torch.softmax(logits, -1).gather(1, ids))


def test_routing_twice_is_bitwise_equal_and_needs_no_forbidden_operation(mode: tuple[RouterConfig, Tensor | None]
                                                                        ) -> None:
    # huggingface/transformers#43583; pytorch/torchtitan#3436: counting and top-k failed under deterministic algorithms
    torch.use_deterministic_algorithms(True)
    config, bias = mode
    logits = (torch.randn(77, config.num_logits) * 2).round().requires_grad_()
    runs = []
    for _ in range(20):
        r = route(logits, config, selection_bias=bias)
        grad, = torch.autograd.grad((r.weights * torch.arange(r.weights.numel()).view_as(r.weights)).sum(), logits)
        runs.append((r.experts, r.weights.detach(), grad))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], run, strict=True))


def test_checkpointed_routing_equals_plain_routing(mode: tuple[RouterConfig, Tensor | None]) -> None:
    # NVIDIA-NeMo/Automodel#2635, #3140; unslothai/unsloth-zoo#1008: recomputation routed tied tokens elsewhere
    from torch.utils.checkpoint import checkpoint

    config, bias = mode
    logits = torch.zeros(9, config.num_logits)
    logits[3:] = torch.randn(6, config.num_logits).round()
    seen: list[Tensor] = []

    def f(z: Tensor) -> Tensor:
        r = route(z, config, selection_bias=bias)
        seen.append(r.experts)
        return (r.weights * (1 + r.experts)).sum()

    grads = []
    for reentrant in (None, False, True):
        z = logits.clone().requires_grad_()
        (f(z) if reentrant is None else checkpoint(f, z, use_reentrant=reentrant)).backward()
        grads.append(z.grad)
    assert len(seen) == 5 and all(torch.equal(s, seen[0]) for s in seen)
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])


def test_empty_batch(mode: tuple[RouterConfig, Tensor | None]) -> None:
    config, bias = mode
    logits = torch.zeros(0, config.num_logits, requires_grad=True)
    r = route(logits, config, selection_bias=bias)
    assert r.experts.shape == r.weights.shape == (0, config.top_k)
    r.weights.sum().backward()
    assert logits.grad.shape == (0, config.num_logits)


def test_compiles_to_one_graph() -> None:
    def weigh(z: Tensor, config: RouterConfig, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        r = route(z, config, selection_bias=bias)
        return r.experts, r.weights

    for name in ("softmax_renorm", "sigmoid_groups", "sparsemixer", "joint_logsigmoid", "identity"):
        config, has_bias = MODES[name]
        torch._dynamo.reset()
        bias = selection_bias(config, has_bias)
        compiled = torch.compile(weigh, fullgraph=True, backend="eager", dynamic=True)
        for T in (5, 30):
            logits = torch.randn(T, config.num_logits).round()
            got, want = compiled(logits, config, bias), weigh(logits, config, bias)
            assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


# ---- bad arguments -------------------------------------------------------------------------------------------------

LOGITS, EIGHT = torch.randn(5, 8), RouterConfig(num_experts=8, top_k=2)
BAD_CALLS = {
    "columns": (dict(logits=LOGITS[:, :7]), ValueError, r"logits: expected shape \(T, 8\).*\(5, 7\)"),
    "ndim": (dict(logits=LOGITS[0]), ValueError, "logits: expected 2 dimensions"),
    "integers": (dict(logits=LOGITS.long()), TypeError, "logits: expected a floating-point dtype"),
    "not_a_tensor": (dict(logits=[[0.0] * 8]), TypeError, "logits: expected a torch.Tensor, got list"),
    "config": (dict(config=8), TypeError, "config: expected RouterConfig, got int"),
    "bias": (dict(selection_bias=torch.zeros(7)), ValueError, r"selection_bias: expected shape \(8,\)"),
    "mask_shape": (dict(token_mask=torch.ones(4, dtype=torch.bool)), ValueError, r"token_mask: expected shape \(5,\)"),
    "mask_dtype": (dict(token_mask=torch.ones(5)), TypeError, "token_mask: expected dtype bool"),
    "ids_shape": (dict(expert_ids=torch.zeros(5, 3, dtype=torch.long)), ValueError, r"expert_ids: expected shape"),
    "ids_dtype": (dict(expert_ids=torch.zeros(5, 2)), TypeError, "expert_ids: expected int32 or int64"),
    "ids_range": (dict(expert_ids=torch.full((5, 2), 8)), ValueError, r"expert_ids: expected ids of 0 .. 7, got 8"),
    "ids_and_bias": (dict(expert_ids=torch.zeros(5, 2, dtype=torch.long), selection_bias=torch.zeros(8)), ValueError,
                     "no selection_bias"),
}


@pytest.mark.parametrize("case", BAD_CALLS)
def test_bad_arguments_name_what_was_expected(case: str) -> None:
    changed, error, message = BAD_CALLS[case]
    args = {"logits": LOGITS, "config": EIGHT, **changed}
    with pytest.raises(error, match=message):
        route(args.pop("logits"), args.pop("config"), **args)
