"""The fused router under the interpreter: ids equal to those of torch's operations, weights to rounding, gradients as
near to float64 as torch's float32 ones; every access inside its tensor."""

import random

import pytest
import torch
from interpreted import interpreted, poisoned, sanitized
from test_routing import BAD_ROWS, MODES, NAN, assert_same_routing, random_config, selection_bias
from test_routing_families import FAMILIES, golden

from moeffn import MoEConfig, MoEFFN, RouterConfig, route, routing
from moeffn.backends import get
from moeffn.kernels.launch import recorded

pytestmark = [interpreted, pytest.mark.filterwarnings("ignore:RouterConfig with top_k=1")]
F32 = torch.float32
FUSED = sorted(set(MODES) - {"sparsemixer", "joint_logsigmoid", "pnorm_softcap"})


@pytest.fixture(autouse=True)
def checked():
    with sanitized():
        yield


def gradient(logits, config, dweights, **options):
    z = logits.clone().requires_grad_()
    r = route(z, config, **options)
    loss = (r.weights * dweights).sum()
    if r.identity_weights is not None:
        loss = loss + (r.identity_weights * dweights[:, 0]).sum()
    return torch.autograd.grad(loss, z)[0]


def check(logits, config, bias=None, mask=None):
    """Routing and gradient against torch's; the truth of the gradient is float64's at the same ids."""
    assert get("triton").routes(config, F32)
    options = {"selection_bias": bias, "token_mask": mask}
    got, want = (route(logits, config, backend=b, **options) for b in ("triton", "torch"))
    assert_same_routing(got, want)
    with recorded() as launches:
        route(logits, config, backend="triton", **options)
    assert [x.name for x in launches] == ["route"] * (len(logits) > 0)
    classes, weights = get("triton").route(logits.float(), config, bias)
    g = torch.randn(got.weights.shape)
    mine, torchs = (gradient(logits, config, g, backend=b, **options) for b in ("triton", "torch"))
    truth = gradient(logits.double(), config, g.double(), token_mask=mask, expert_ids=classes)
    assert mine.isfinite().all()
    for t in range(len(logits)):
        error, allowed = (float((d[t] - truth[t]).norm()) for d in (mine, torchs))
        # what exp, quotient, sum and product round, where torch's error happens to be less
        rounding = 4 * torch.finfo(F32).eps * float((g[t] * weights[t]).norm() + truth[t].norm())
        assert error <= 2 * allowed + rounding, (t, config)


@pytest.mark.parametrize("seed", range(4))
def test_every_option(seed):
    rng, tried = random.Random(seed), 0
    torch.manual_seed(seed)
    while tried < 15:
        config = random_config(rng)
        if config is None or not get("triton").routes(config, F32):
            continue
        tried += 1
        T, C = rng.choice([1, 2, 7, 20]), config.num_logits
        logits = torch.randn(T, C) * rng.choice([0.1, 1.0, 5.0, 30.0])
        if rng.random() < 0.4:
            logits = (logits * 2).round() / 2  # ties
        if rng.random() < 0.3:
            logits[rng.randrange(T), rng.randrange(C)] = rng.choice([NAN, float("inf"), -float("inf"), -1e20])
        check(logits, config, torch.randn(C) * 0.1 if rng.random() < 0.4 else None,
              torch.rand(T) < 0.7 if rng.random() < 0.3 else None)


@pytest.mark.parametrize("T, E, K, options, reason", [
    (3, 1, 1, {}, "one expert"),
    (5, 4096, 64, {"renormalize": True}, "the most classes and choices that are taken"),
    (2, 4095, 3, {"score": "sqrtsoftplus"}, "one short of a power of two"),
    (9, 257, 10, {"score": "sigmoid"}, "one more than a power of two, K not one"),
    (4, 64, 64, {"order": "topk_score"}, "every expert is chosen"),
    (130, 8, 2, {}, "several programs, the last not full"),
    (6, 60, 6, {"score": "sigmoid", "num_groups": 5, "topk_groups": 2}, "neither groups nor their size a power of two"),
    (6, 96, 4, {"num_groups": 32, "topk_groups": 3, "group_reduce": "max", "group_fill": "zero"}, "groups of three"),
])
def test_shapes(T, E, K, options, reason, monkeypatch):
    with poisoned(monkeypatch):
        check(torch.randn(T, E) * 2, RouterConfig(num_experts=E, top_k=K, **options), torch.randn(E) * 0.1)


@pytest.mark.parametrize("name", FUSED)
def test_bad_rows_stay_in_their_token(name):
    config, has_bias = MODES[name]
    bias = selection_bias(config, has_bias)
    clean = torch.randn(2 * len(BAD_ROWS), config.num_logits)
    dirty = clean.clone()
    for row, values in zip(dirty[::2], BAD_ROWS.values(), strict=True):
        row[: len(values)] = torch.tensor(values[: len(row)])
    check(dirty, config, bias)
    got, want = (route(z, config, selection_bias=bias, backend="triton") for z in (dirty, clean))
    assert torch.equal(got.experts[1::2], want.experts[1::2]) and torch.equal(got.weights[1::2], want.weights[1::2])
    grad = gradient(dirty, config, torch.ones_like(got.weights), selection_bias=bias, backend="triton")
    assert (grad[~dirty.isfinite()] == 0).all()


@pytest.mark.parametrize("order", ["score_topk", "topk_score"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_ties_go_to_the_lowest_id(score, order):
    """Equal logits, zeros of both signs, and scores that saturate although their logits differ."""
    rows = torch.zeros(3, 40)
    rows[0] = 1.7
    rows[1, ::2] = -0.0
    rows[2] = torch.arange(40) + 60.0
    config = RouterConfig(num_experts=40, top_k=5, score=score, order=order)
    check(rows, config)
    assert route(rows, config, backend="triton").experts[:2].tolist() == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "switch_transformers" and not f.endswith("_hash")])
def test_real_routers(family, data_dir):
    g = golden(data_dir, family)
    config = RouterConfig(**{"num_experts": 8, "top_k": 3, **FAMILIES[family]})
    with recorded() as launches:
        route(g["logits"], config, backend="triton")
    assert len(launches) == get("triton").routes(config, F32)
    if launches:
        check(g["logits"], config, g.get("selection_bias"))


def test_what_it_does_not_take_runs_in_torch():
    z = torch.randn(3, 8)
    for config in (MODES["sparsemixer"][0], MODES["pnorm_softcap"][0], RouterConfig(num_experts=5000, top_k=2),
                   RouterConfig(num_experts=100, top_k=65)):
        assert not get("triton").routes(config, F32)
    assert not get("triton").routes(MODES["softmax"][0], torch.float64)
    for config, options in ((MODES["pnorm_softcap"][0], {}),
                            (MODES["softmax"][0], {"expert_ids": torch.zeros(3, 4, dtype=torch.long)})):
        assert_same_routing(route(z, config, backend="triton", **options), route(z, config, **options))


def test_no_tokens():
    logits = torch.zeros(0, 8, requires_grad=True)
    weights = route(logits, MODES["softmax_renorm"][0], backend="triton").weights
    weights.sum().backward()
    assert weights.shape == (0, 4) and logits.grad.shape == (0, 8)


def test_strides_and_half_precision():
    """Transposed logits, one value for a whole row, an expanded gradient; float16 is read as float32."""
    config = MODES["sqrtsoftplus"][0]
    for z in (torch.randn(8, 5).t(), torch.randn(3, 1).expand(3, 8), torch.randn(4, 16)[:, ::2].half()):
        assert_same_routing(*(route(z, config, backend=b) for b in ("triton", "torch")))
        ones = torch.ones(1, 1).expand(z.shape[0], 4)
        torch.testing.assert_close(*(gradient(z.float(), config, ones, backend=b) for b in ("triton", "torch")))


def test_the_layer_routes_with_it_and_learns():
    layer = MoEFFN(MoEConfig(d_model=16, d_expert=16, num_experts=6, top_k=2), backend="triton")
    twin = MoEFFN(layer.config, backend="torch")
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(9, 16)
    for each in (layer, twin):
        each(x).square().sum().backward()
    torch.testing.assert_close(layer.router.weight.grad, twin.router.weight.grad, rtol=1e-4, atol=1e-5)
    with recorded() as launches:
        layer.router(x)
    assert [launch.name for launch in launches] == ["route"]


def test_operators_pass_opcheck_and_compile_to_one_graph():
    config, bias = MODES["sigmoid_groups"][0], torch.randn(16) * 0.1
    logits = torch.randn(5, 16, requires_grad=True)
    torch.library.opcheck(routing._route_op, (logits, bias, config.key, "triton"))
    weights, ids = routing._route_op(logits.detach(), bias, config.key, "triton")
    torch.library.opcheck(routing._route_backward_op, (weights, logits.detach(), ids, config.key, "triton"))
    count = 0

    def counting(graph, inputs):
        nonlocal count
        count += 1
        return graph.forward

    compiled = torch.compile(lambda z: route(z, config, selection_bias=bias, backend="triton").weights, fullgraph=True,
                             backend=counting)
    for T in (5, 6, 30):
        z = torch.randn(T, 16)
        assert torch.equal(compiled(z), route(z, config, selection_bias=bias, backend="triton").weights)
    assert count <= 2


def test_config_keys_come_back_as_the_config():
    for config, _ in MODES.values():
        assert RouterConfig.from_key(config.key) == config
