"""torch.utils.flop_counter over this runtime's operators, against the formulas of the accounting."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import moeffn
from moeffn.accounting import Block, block, count


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_flop_counter_sees_the_experts(gated, frozen):
    """Forward and backward of a layer, as torch's counter adds them up, are the block's formulas."""
    act = moeffn.SWIGLU if gated else moeffn.Activation(kind="relu2", gated=False)
    config = moeffn.MoEConfig(d_model=32, d_expert=16, num_experts=4, top_k=2, activation=act)
    layer = moeffn.MoEFFN(config)
    layer.experts.requires_grad_(not frozen)
    x = torch.randn(12, 32, requires_grad=True)
    sizes = Block.of(config)
    with FlopCounterMode(display=False) as counter:
        y = layer(x)
    assert counter.get_total_flops() == block.forward_flops(sizes, 12)
    with FlopCounterMode(display=False) as counter:
        y.sum().backward()
    assert counter.get_total_flops() == block.backward_flops(sizes, 12, frozen_experts=frozen)
    assert sum(p.numel() for p in layer.parameters()) == block.total_weights(sizes)
    assert count(layer).total == block.total_weights(sizes)
    assert count(layer).active == block.active_weights(sizes)
