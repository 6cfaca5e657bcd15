"""Every recorded family through replace_ffn: the block built by transformers must give what it gave before."""

from __future__ import annotations

import hf_golden as golden
import pytest
import torch

from moeffn import backends, last_backend
from moeffn.integrations import experts as contract
from moeffn.integrations.transformers import replace_ffn

CPU = torch.device("cpu")
NATIVE = backends.available("native", CPU, torch.float32) is None
BACKENDS = ["torch", pytest.param("auto", marks=pytest.mark.skipif(not NATIVE, reason="auto is torch here"))]


@pytest.fixture
def chosen(monkeypatch):
    """The expert ids of every routing that the replaced block computes with."""
    seen = []
    original = contract.routing_of

    def spy(index, weights):
        seen.append(index)
        return original(index, weights)

    monkeypatch.setattr(contract, "routing_of", spy)
    return seen


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", golden.FAMILIES)
def test_float32_output_gradients_and_choice(family, backend, chosen):
    want = golden.tensors(family)
    block = golden.block(family)
    before = {n: p for n, p in block.named_parameters()}
    report = replace_ffn(block, backend=backend)
    assert [r for r in report.replaced if r.kind == "moe"] and not report.left
    x = want["in.x"].clone().requires_grad_()
    y = golden.run(block, family, torch.float32, x)
    assert golden.relative(y, want["f32.out"].reshape(y.shape)) <= 2e-5
    routed = want["f32.topk_idx"].reshape(len(y), -1)
    if family == "switch_transformers":  # recorded as one-hot rows, all zero beyond the expert's capacity
        routed = torch.where(routed.sum(-1) > 0, routed.argmax(-1), -1)[:, None]
    assert torch.equal(chosen[-1].sort(-1).values, routed.sort(-1).values)
    y.backward(want["in.g"].reshape(y.shape))
    assert golden.relative(x.grad, want["f32.grad_x"]) <= 2e-5
    parameters = dict(block.named_parameters())
    assert all(parameters[n] is p for n, p in before.items()) and len(parameters) == len(before)
    recorded = [k for k in want if k.startswith("f32.grad_router.")]
    assert recorded
    for key in recorded:
        assert golden.relative(parameters[key.removeprefix("f32.grad_router.")].grad, want[key]) <= 2e-5
    assert last_backend() != "reference"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", [f for f in golden.FAMILIES if golden.INDEX[f]["float64"]])
def test_float64(family, backend):
    want = golden.tensors(family)
    own, block = (golden.block(family, torch.float64) for _ in range(2))
    replace_ffn(block, backend=backend)
    outs, grads = [], []
    for module in (own, block):
        x = want["in.x"].double().requires_grad_()
        outs.append(golden.run(module, family, torch.float64, x))
        outs[-1].backward(want["in.g"].double().reshape(outs[-1].shape))
        grads.append(x.grad)
    exact = family not in golden.FLOAT32_INSIDE
    assert golden.relative(outs[1], outs[0]) <= (1e-11 if exact else 1e-6)
    assert golden.relative(grads[1], grads[0]) <= (1e-11 if exact else 1e-6)
    # a router that computes in float32 rounds differently on another machine
    exact = exact and golden.INDEX[family]["float64_router"]
    assert golden.relative(outs[1], want["f64.out"].reshape(outs[1].shape)) <= (1e-11 if exact else 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", golden.FAMILIES)
def test_bfloat16_within_twice_the_error_of_the_block_itself(family, backend):
    bf16, f64 = torch.bfloat16, torch.float64
    given = golden.tensors(family)
    exact = golden.block(family, bf16).to(f64 if golden.INDEX[family]["float64"] else torch.float32)
    own, block = golden.block(family, bf16), golden.block(family, bf16)
    replace_ffn(block, backend=backend)
    results = []
    # Where a clamp sits the gradient jumps, and one rounding of a pre-activation decides: stay inside the limits.
    scale = 0.25 if family in golden.CLAMPED else 1.0
    for module, dtype in ((exact, next(exact.parameters()).dtype), (own, bf16), (block, bf16)):
        x = (scale * given["in.x"]).to(bf16).to(dtype).requires_grad_()
        y = golden.run(module, family, dtype, x)
        y.backward(given["in.g"].to(bf16).to(dtype).reshape(y.shape))
        results.append((y.detach(), x.grad.reshape(y.shape)))
    # Tokens whose choice of experts flips in bfloat16 differ by more than rounding, in the block itself as well.
    off = (results[1][0].double() - results[0][0].double()).norm(dim=1) / results[0][0].double().norm(dim=1)
    same = off < 0.1
    assert same.sum() >= len(same) - 3
    for want, plain, got in zip(*results, strict=True):
        want, plain, got = want[same], plain[same], got[same]
        assert golden.relative(got, want) <= 2 * golden.relative(plain, want)
        assert golden.worst_row(got, want) <= 2 * golden.worst_row(plain, want)
