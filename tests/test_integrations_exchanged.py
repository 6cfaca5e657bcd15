"""What is exchanged inside a MoE block after `replace_ffn`: activations and limits are read anew or refused by name."""

from __future__ import annotations

import copy
import pickle

import hf_blocks
import pytest
import torch
from hf_golden import relative
from torch import nn

from moeffn.integrations import families
from moeffn.integrations.transformers import register, replace_ffn

ROWS = list({row.adapter: row for row in reversed(hf_blocks.rows())}.values())  # one family of each adapter
ROWS += [row for row in hf_blocks.rows() if row.family in ("nemotron_h", "aria", "qwen2_moe", "step3p7")]
NAMES = ("act_fn", "act", "activation", "activation_fn")


def activations(block):
    """(module, attribute) of what the experts apply, shared experts and routers left out."""
    for name, part in block.named_modules():
        if "shared" in name or families.lookup(part, "router") or ".router" in name:
            continue
        for attribute in NAMES:
            if callable(getattr(part, attribute, None)) and not isinstance(part, nn.ModuleList):
                yield part, attribute


def exchange(block, act):
    found = list(activations(block))
    for part, attribute in found:
        setattr(part, attribute, act)
    return found


def output(block, row):
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1)).double()
    return hf_blocks.call(block, row, x)[0].detach()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.adapter}-{row.family}")
def test_an_exchanged_activation_is_honoured_or_refused(row):
    own = hf_blocks.build(row, torch.float64)
    block = copy.deepcopy(own)
    replace_ffn(block)
    twins = [block, copy.deepcopy(block), pickle.loads(pickle.dumps(block))]
    before = output(own, row)
    for twin in twins:
        assert relative(output(twin, row), before) < 1e-6
    for act in (nn.Sigmoid(), nn.Identity()):
        for module in (own, *twins):
            assert exchange(module, act)
        want = output(own, row)
        assert relative(want, before) > 1e-3
        for twin in twins:
            assert relative(output(twin, row), want) < 1e-6
    for twin in twins:
        exchange(twin, nn.Tanh())
        with pytest.raises(ValueError, match=r"act\w*: expected .*Activation expresses.*, got Tanh|act_fn|_apply_gate"):
            output(twin, row)
        exchange(twin, nn.Identity())
        assert relative(output(twin, row), want) < 1e-6


def test_experts_with_unlike_activations_are_refused():
    row = next(r for r in hf_blocks.rows() if r.family == "switch_transformers")
    block = hf_blocks.build(row)
    list(activations(block))[-1][0].act = nn.SiLU()
    with pytest.raises(ValueError, match=r"expert_7\.act: expected .* the same for all experts, got SiLU"):
        replace_ffn(block)


def test_an_exchanged_limit_and_gate_are_honoured():
    row = next(r for r in hf_blocks.rows() if r.family == "gpt_oss")
    own = hf_blocks.build(row, torch.float64)
    block = copy.deepcopy(own)
    replace_ffn(block)
    before = output(block, row)
    for module in (own, block):
        module.experts.limit = 0.5
    assert relative(output(own, row), before) > 1e-3
    assert relative(output(block, row), output(own, row)) < 1e-11
    block.experts._apply_gate = lambda h: h[..., ::2] * 3
    with pytest.raises(ValueError, match=r"GptOssExperts\._apply_gate"):
        output(block, row)


def test_activations_of_one_name_are_told_apart():
    """What was recognised is remembered: by what an activation is made of, never by its printed name."""
    row = next(r for r in hf_blocks.rows() if r.family == "qwen3_moe")

    class Act(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.function = function

        def forward(self, x):
            return self.function(x)

    for function in (nn.functional.silu, nn.functional.relu, nn.functional.gelu):
        own = hf_blocks.build(row, torch.float64)
        own.experts.act_fn = Act(function)
        block = copy.deepcopy(own)
        replace_ffn(block)
        assert relative(output(block, row), output(own, row)) < 1e-11


def test_as_an_experts_implementation_and_compiled():
    row = next(r for r in hf_blocks.rows() if r.family == "qwen3_moe")
    register("moeffn_exchanged")
    own = hf_blocks.build(row, torch.float64)
    block = copy.deepcopy(own)
    block.experts.config._experts_implementation = "moeffn_exchanged"
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    for act in (None, nn.GELU(), nn.ReLU()):
        if act is not None:
            own.experts.act_fn = block.experts.act_fn = act
        want = output(own, row)
        assert relative(output(block, row), want) < 1e-11
        assert relative(output(compiled, row), want) < 1e-11
