"""Low-rank adapters on fused expert weights: axis order, exact merging, and refusal of partial or foreign adapters."""

from __future__ import annotations

import copy

import hf_blocks
import pytest
import torch
from torch import nn

from moeffn.integrations.lora import attach_lora, load_lora, lora_state_dict, merge_lora, unmerge_lora
from moeffn.integrations.transformers import register, replace_ffn

FAMILIES = ["qwen3_moe", "gpt_oss", "nemotron_h"]  # (E, out, in); transposed and interleaved with biases; no gate


def block_of(family, **extra):
    return hf_blocks.build(next(r for r in hf_blocks.rows() if r.family == family), torch.float64, **extra)


def run(block):
    x = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = block(x)
    return y[0] if isinstance(y, tuple) else y


def fill(block):
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for tensor in lora_state_dict(block).values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype) * 0.3)


@pytest.mark.parametrize("how", ["register", "replace"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_output_is_that_of_the_weights_with_the_delta_added_expert_by_expert(family, how):
    block, plain = block_of(family), block_of(family)
    if how == "replace":
        replace_ffn(block)
    else:
        register()
        block.experts.config._experts_implementation = "moeffn"
    before = run(block)
    names = attach_lora(block, rank=3, alpha=6.0)
    assert names == [f"experts.{n}" for n in ("up_proj" if family == "nemotron_h" else "gate_up_proj", "down_proj")]
    torch.testing.assert_close(run(block), before, rtol=0, atol=0)
    fill(block)
    state = lora_state_dict(block)
    for name in names:
        weight = plain.get_parameter(name)
        a, b = state[f"{name}.a"], state[f"{name}.b"]
        for e in range(weight.shape[0]):
            delta = 2.0 * b[e] @ a[e]
            with torch.no_grad():
                weight[e] += delta.T if family == "gpt_oss" else delta
    bound = 1e-5 if family == "nemotron_h" else 1e-11  # its own sum over experts is in float32
    assert (run(block) - run(plain)).norm() <= bound * run(plain).norm()
    assert (run(block) - before).norm() > 0.1 * before.norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_only_adapters_learn_and_merging_is_exact_both_ways(family):
    block = block_of(family)
    replace_ffn(block)
    names = attach_lora(block, rank=2)
    fill(block)
    run(block).square().sum().backward()
    for name in names:
        holder = block.get_submodule(f"{name.replace('experts.', 'experts.parametrizations.')}")
        assert holder.original.grad is None
        assert all(p.grad.abs().sum() > 0 for p in (holder[0].a, holder[0].b))
    separate = run(block)
    bits = {n: block.get_submodule(n.replace("experts.", "experts.parametrizations.")).original.clone() for n in names}
    assert merge_lora(block) == names
    assert torch.equal(run(block), separate)
    assert not [n for n in block.state_dict() if "parametrizations" in n]
    assert unmerge_lora(block) == names
    for name in names:
        holder = block.get_submodule(name.replace("experts.", "experts.parametrizations."))
        assert torch.equal(holder.original, bits[name])
    assert torch.equal(run(block), separate)
    with pytest.raises(ValueError, match="merged"):
        unmerge_lora(block)


def test_nothing_or_part_of_what_was_asked_for_is_an_error():
    block = block_of("qwen3_moe")
    both = nn.ModuleList([block, block_of("nemotron_h")])
    with pytest.raises(ValueError, match=r"gate_up_proj.*1\.experts"):
        attach_lora(both, rank=2, targets=("gate_up_proj",))
    with pytest.raises(ValueError, match="q_proj"):
        attach_lora(block, rank=2, targets=("down_proj", "q_proj"))
    assert not lora_state_dict(both) and all(p.requires_grad for p in both.parameters())
    with pytest.raises(ValueError, match="holds none"):
        attach_lora(nn.Linear(3, 3), rank=2)
    with pytest.raises(ValueError, match="rank"):
        attach_lora(block, rank=0)
    assert len(attach_lora(both, rank=2)) == 4
    with pytest.raises(ValueError, match="which has one"):
        attach_lora(both, rank=2)
    with pytest.raises(ValueError, match="adapters"):
        merge_lora(block_of("qwen3_moe"))


def test_an_adapter_for_other_experts_is_refused_before_anything_is_written():
    block, other = block_of("qwen3_moe"), block_of("qwen3_moe", num_experts=6)
    for each in (block, other):
        attach_lora(each, rank=2)
        fill(each)
    before = copy.deepcopy(lora_state_dict(block))
    with pytest.raises(ValueError, match=r"\(8, 2, 32\).*\(6, 2, 32\)"):
        load_lora(block, lora_state_dict(other))
    with pytest.raises(ValueError, match=r"missing.*down_proj\.a"):
        load_lora(block, {n: t for n, t in before.items() if "down_proj" not in n})
    assert all(torch.equal(t, before[n]) for n, t in lora_state_dict(block).items())
    twin = block_of("qwen3_moe")
    attach_lora(twin, rank=2)
    load_lora(twin, before)
    torch.testing.assert_close(run(twin), run(block))
