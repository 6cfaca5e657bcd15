"""Router, Experts, MoEFFN: parameters, state, shapes, losses, counting, precision of routing."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from problems import CPU_BACKENDS
from torch.utils.checkpoint import checkpoint

import moeffn
from moeffn import (
    SWIGLU_OAI,
    Experts,
    Layout,
    MoEConfig,
    MoEFFN,
    Router,
    RouterConfig,
    backends,
    reference,
)

BASE = {"d_model": 16, "d_expert": 12, "num_experts": 6, "top_k": 2}


def build(seed=0, dtype=torch.float64, **changes) -> MoEFFN:
    torch.manual_seed(seed)
    layer = MoEFFN(MoEConfig(**(BASE | changes)), dtype=dtype)
    with torch.no_grad():
        for name, p in layer.named_parameters():
            if "b_" in name or name.endswith("bias"):
                p.normal_()
    return layer


CONFIGS = {
    "plain": {},
    "top-1": {"top_k": 1},
    "all experts": {"top_k": 6},
    "one expert": {"num_experts": 1, "top_k": 1},
    "gpt-oss": {"activation": SWIGLU_OAI, "layout": Layout.INTERLEAVED, "bias": True, "router_bias": True,
                "router": RouterConfig(num_experts=6, top_k=2, order="topk_score")},
    "deepseek": {"router": RouterConfig(num_experts=6, top_k=2, score="sigmoid", num_groups=3, topk_groups=2,
                                        renormalize=True, renorm_eps=1e-20, scale=2.5), "selection_bias": True,
                 "d_shared": 9},
    "llama4": {"router": RouterConfig(num_experts=6, top_k=1, score="sigmoid", order="topk_score", apply_to="input"),
               "top_k": 1, "d_shared": 12},
    "qwen2": {"d_shared": 20, "shared_gate": True},
    "cohere2": {"d_shared": 12, "shared_combine": "average"},
    "longcat": {"router": RouterConfig(num_experts=6, top_k=2, num_identity_experts=3, scale=6.0)},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_forward_and_gradients_equal_the_oracle(name):
    layer = build(**CONFIGS[name])
    c = layer.config
    x = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)
    params = [x, *layer.parameters()]
    y = layer.eval()(x)

    flat = x.reshape(-1, 16)
    logits = flat @ layer.router.weight.T + (0 if layer.router.bias is None else layer.router.bias)
    routing = reference.route(logits, c.route, selection_bias=layer.router.selection_bias)
    want = reference.moe_ffn(flat, routing, layer.experts.weights)
    if layer.shared is not None:
        s = layer.shared
        dense = reference.activate(flat @ s.w_in.T, c.activation, c.layout) @ s.w_out.T
        want = want + (dense if s.gate is None else torch.sigmoid(flat @ s.gate.T) * dense)
        want = want / 2 if c.shared_combine == "average" else want
    want = want.reshape(x.shape)
    g = torch.randn_like(y)
    got, expected = ((out, *torch.autograd.grad(out, params, g)) for out in (y, want))
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-11)


@pytest.mark.parametrize("name", ["qwen2", "cohere2"])
def test_shared_expert_runs_in_the_experts_call_without_gradients(name):
    if backends.available("native", torch.device("cpu"), torch.float32):
        pytest.skip("needs the native backend")
    layer = build(**CONFIGS[name]).float().eval()
    x = torch.randn(2, 7, 16)
    with torch.no_grad(), mock.patch.object(type(layer.shared), "forward", side_effect=AssertionError("called")):
        y = layer(x)
    exact = layer.double()(x.double())
    assert ((y - exact).norm() / exact.norm()).item() <= 1e-6


def test_state_dict_names_and_absent_parts():
    full = build(bias=True, router_bias=True, selection_bias=True, d_shared=4, shared_gate=True)
    assert sorted(full.state_dict()) == sorted(
        ["router.weight", "router.bias", "router.selection_bias", "experts.w_in", "experts.w_out", "experts.b_in",
         "experts.b_out", "shared.w_in", "shared.w_out", "shared.b_in", "shared.b_out", "shared.gate"])
    plain = build()
    assert sorted(plain.state_dict()) == ["experts.w_in", "experts.w_out", "router.weight"]
    again = build(seed=9)
    again.load_state_dict(plain.state_dict())
    x = torch.randn(5, 16, dtype=torch.float64)
    assert torch.equal(again(x), plain(x))


@pytest.mark.parametrize("shape", [(16,), (5, 16), (2, 3, 16), (2, 0, 16), (0, 16), (1, 2, 3, 4, 16)])
def test_any_leading_dimensions(shape):
    layer = build()
    x = torch.randn(shape, dtype=torch.float64)
    y = layer(x)
    assert y.shape == x.shape
    if x.numel():
        assert torch.allclose(y.reshape(-1, 16), torch.stack([layer(t) for t in x.reshape(-1, 16)]), atol=1e-12)


def test_router_is_float32_in_a_bfloat16_model():
    # vllm#14027, sglang#38695: 8.000 and 8.004 collapse in bfloat16, whose spacing there is 0.0625
    router = Router(2, RouterConfig(num_experts=3, top_k=1), dtype=torch.bfloat16)
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[8.0, 0.0], [8.0, 0.00390625], [1.0, 0.0]]))
    routing = router(torch.ones(4, 2, dtype=torch.bfloat16))
    assert routing.logits.dtype == routing.weights.dtype == torch.float32
    assert routing.experts.flatten().tolist() == [1, 1, 1, 1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert router(torch.ones(4, 2, dtype=torch.bfloat16)).logits.dtype == torch.float32


def test_selection_bias_and_counts_keep_their_dtype():
    # Megatron-LM#7081: a token-count buffer in bfloat16 flipped the sign of the update
    layer = build(selection_bias=True, dtype=torch.float32)
    bias = torch.tensor([0.1, 1e-4, -0.1, 3.0001, 0.0, 7.0], dtype=torch.float32)
    layer.router.selection_bias.copy_(bias)
    layer.bfloat16()
    assert layer.router.selection_bias.dtype == torch.float32 and torch.equal(layer.router.selection_bias, bias)
    assert layer.router.counts.dtype == torch.int64 and layer.router.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("mode", ["plain", "reentrant", "non-reentrant", "eval", "no_grad"])
def test_load_is_counted_once_a_backward(mode):
    # Automodel#3247, torchtitan#4772: recomputation counted the load twice
    layer = build(selection_bias=True)
    layer.train(mode != "eval")
    x = torch.randn(11, 16, dtype=torch.float64, requires_grad=True)
    if mode == "no_grad":
        with torch.no_grad():
            layer(x)
    elif "reentrant" in mode:
        checkpoint(layer, x, use_reentrant=mode == "reentrant").sum().backward()
    else:
        layer(x).sum().backward()
    want = torch.bincount(layer.router(x).experts.flatten(), minlength=6)
    assert torch.equal(layer.router.counts, want if mode in ("plain", "reentrant", "non-reentrant") else want * 0)
    layer.router.reset_counts()
    assert layer.router.counts.sum() == 0


@pytest.mark.parametrize("how", ["plain", "reentrant", "non-reentrant"])
def test_losses_reach_the_router_without_plumbing(how):
    # transformers#44242: silently off unless an output flag was set; Automodel#1408: thrown away
    x = torch.randn(30, 16, dtype=torch.float64, requires_grad=True)
    grads = {}
    for coef in (0.0, 0.1, 0.2):
        layer = build(aux_loss_coef=coef, z_loss_coef=coef / 2)
        y = layer(x) if how == "plain" else checkpoint(layer, x, use_reentrant=how == "reentrant")
        (y * 0.0).sum().backward()
        grads[coef] = layer.router.weight.grad.clone()
    assert grads[0.0].abs().max() == 0 and grads[0.1].abs().max() > 0
    assert torch.allclose(grads[0.2], 2 * grads[0.1], rtol=1e-12)
    for aux, z in ((0.1, 0.05), (0.1, 0.0), (0.0, 0.05)):
        layer = build(aux_loss_coef=aux, z_loss_coef=z)
        routing = layer.router(x)
        loss = aux * moeffn.load_balance_loss(routing, layer.config.route) + z * moeffn.z_loss(routing.logits)
        (by_hand,) = torch.autograd.grad(loss, layer.router.weight)
        (layer(x) * 0.0).sum().backward()
        assert torch.allclose(layer.router.weight.grad, by_hand, rtol=1e-10)
        assert (aux, z) != (0.1, 0.05) or torch.allclose(grads[0.1], by_hand, rtol=1e-10)


def test_losses_are_attached_only_in_training_and_never_beside_a_returned_routing():
    x = torch.randn(30, 16, dtype=torch.float64)
    for layer, kwargs in ((build(aux_loss_coef=1.0).eval(), {}), (build(aux_loss_coef=1.0), {"return_routing": True})):
        out = layer(x, **kwargs)
        y = out[0] if kwargs else out
        (y * 0.0).sum().backward()
        assert layer.router.weight.grad.abs().max() == 0


def test_padding_is_routed_nowhere():
    layer = build(aux_loss_coef=0.5)
    x = torch.randn(4, 8, 16, dtype=torch.float64)
    mask = torch.arange(8).expand(4, 8) < 5
    y, routing = layer(x, token_mask=mask, return_routing=True)
    assert (y[~mask] == 0).all() and (routing.experts[~mask.reshape(-1)] == -1).all()
    assert torch.equal(y[mask], layer(x[mask].view(4, 5, 16)).reshape(-1, 16))
    assert layer.load_stats().counts.sum() == 20 * 2
    layer(x, token_mask=mask)
    assert int(layer.load_stats().dropped) == 12 * 2


def test_nan_in_padding_reaches_no_gradient():
    layer = build()
    x = torch.randn(4, 8, 16, dtype=torch.float64)
    mask = torch.arange(8).expand(4, 8) < 5
    x[~mask] = float("nan")
    layer(x, token_mask=mask)[mask].sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())


def test_shapes_on_the_meta_device():
    layer = MoEFFN(MoEConfig(**BASE, d_shared=8), device="meta")
    assert layer(torch.empty(2, 3, 16, device="meta")).shape == (2, 3, 16)


def test_capacity_drops_are_counted():
    layer = build(capacity_factor=0.5)
    x = torch.randn(60, 16, dtype=torch.float64)
    y, routing = layer(x, return_routing=True)
    stats = layer.load_stats()
    assert stats.counts.max() <= 10 and int(stats.dropped) == (routing.experts < 0).sum() > 0
    assert stats.counts.sum() + stats.dropped == 120
    lost = (routing.experts < 0).all(1)
    assert (y[lost] == 0).all()
    with torch.no_grad():
        layer.router.weight.zero_()  # every token ties: all go to experts 0 and 1
        layer(torch.randn(61, 16, dtype=torch.float64))
    assert layer.load_stats().counts.tolist() == [11, 11, 0, 0, 0, 0]  # ceil(0.5 * 122 / 6)


def test_no_capacity_means_no_drop():
    layer = build()
    with torch.no_grad():
        layer.router.weight.zero_()  # every token ties: all go to experts 0 and 1
    layer(torch.randn(500, 16, dtype=torch.float64))
    assert layer.load_stats().counts.tolist() == [500, 500, 0, 0, 0, 0] and int(layer.load_stats().dropped) == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("changes", [{}, {"selection_bias": True, "aux_loss_coef": 0.1, "d_shared": 8}])
def test_layer_compiles_to_one_graph(changes):
    torch._dynamo.reset()
    layer = build(dtype=torch.float32, **changes)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for T in (5, 8, 13):
        x = torch.randn(T, 16)
        for m in (layer, twin):
            m.zero_grad()
        a, b = layer(x), compiled(x)
        a.square().sum().backward()
        b.square().sum().backward()
        assert torch.allclose(a, b, atol=1e-6)
        for p, q in zip(layer.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad, atol=1e-5)
    if changes:
        assert torch.equal(layer.router.counts, twin.router.counts)


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_training_reduces_a_loss(backend):
    torch.manual_seed(0)
    layer = MoEFFN(MoEConfig(**BASE, aux_loss_coef=0.01), backend=backend)
    x = torch.randn(128, 16)
    target = torch.tanh(x @ torch.randn(16, 16))
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("make, message", [
    (lambda: MoEConfig(**(BASE | {"top_k": 7})), "MoEConfig.top_k: expected at most num_experts = 6, got 7"),
    (lambda: MoEConfig(**(BASE | {"top_k": 0})), "MoEConfig.top_k: expected at least 1, got 0"),
    (lambda: MoEConfig(**(BASE | {"num_experts": 0})), "MoEConfig.num_experts: expected at least 1, got 0"),
    (lambda: MoEConfig(**(BASE | {"d_model": 1.5})), "MoEConfig.d_model: expected an int, got float 1.5"),
    (lambda: MoEConfig(**BASE, router=RouterConfig(num_experts=4, top_k=2)), "MoEConfig.router: expected num_experts"),
    (lambda: MoEConfig(**BASE, shared_gate=True), "MoEConfig.shared_gate: expected d_shared > 0"),
    (lambda: moeffn.Activation(gated=1), "Activation.gated: expected bool, got int 1"),
    (lambda: MoEFFN(BASE), "config: expected MoEConfig, got dict"),
    (lambda: Experts(4, 8, -1), "d_expert: expected at least 1, got -1"),
    (lambda: build()(torch.zeros(3, 15)), "x: expected last dimension d_model = 16, got shape"),
    (lambda: build()(torch.zeros(3, 16, dtype=torch.int64)), "x: expected a floating-point dtype"),
    (lambda: build()(torch.zeros(3, 16), token_mask=torch.ones(4, dtype=torch.bool)), "token_mask: expected shape"),
    (lambda: build()(torch.zeros(3, 16), token_mask=torch.ones(3, dtype=torch.bool, device="meta")),
     "token_mask: expected device cpu (that of x), got device meta"),
    (lambda: build()(torch.zeros(3, 16).to_sparse()), "x: expected a dense tensor, got layout torch.sparse_coo"),
    (lambda: MoEFFN(MoEConfig(**BASE), backend="nothing"), "backend: expected one of"),
    (lambda: MoEFFN(MoEConfig(**BASE), backend=None), "backend: expected str, got NoneType None"),
    (lambda: moeffn.Router(16, RouterConfig(num_experts=6, top_k=2), backend="nothing"), "backend: expected one of"),
    (lambda: build().experts(torch.zeros(1, 16), moeffn.Routing(torch.zeros(1, 1).int(), torch.ones(1, 1)),
                             backend=["torch"]), "backend: expected str, got list ['torch']"),
    (lambda: moeffn.DenseFFN(8, 4)(torch.zeros(3, 8, dtype=torch.complex64)), "x: expected a floating-point dtype"),
])
def test_bad_input(make, message):
    with pytest.raises((ValueError, TypeError)) as info:
        make()
    assert str(info.value).startswith(message)


def test_a_layer_prints_as_one_line():
    config = MoEConfig(d_model=16, d_expert=12, num_experts=8, top_k=2, d_shared=4, aux_loss_coef=0.01)
    assert repr(MoEFFN(config, backend="torch")) == (
        "MoEFFN(d_model=16, d_expert=12, num_experts=8, top_k=2, d_shared=4, aux_loss_coef=0.01, backend='torch')")
