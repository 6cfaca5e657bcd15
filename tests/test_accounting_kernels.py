"""FLOPs and bytes of each kernel: their sums are the block's, their bytes those of the tensors launched with."""

from dataclasses import replace

import pytest
import torch
from interpreted import INTERPRETING

from moeffn.accounting import Block, block, kernels
from moeffn.accounting.kernels import device_of
from moeffn.backends import Needs
from moeffn.backends.triton import TritonBackend
from moeffn.config import SWIGLU, Activation
from moeffn.kernels.launch import recorded
from moeffn.kernels.tiles import pick_tiles
from moeffn.types import ExpertWeights

pytestmark = pytest.mark.skipif(INTERPRETING, reason="meta tensors are not interpreted")


@pytest.mark.parametrize("gated", [True, False])
def test_sums_are_the_blocks(gated):
    b = Block(d_model=96, d_expert=40, num_experts=12, top_k=3, gated=gated)
    forward, train = kernels(b, 50), kernels(b, 50, train=True)
    assert sum(k.flops for k in forward) == block.forward_flops(b, 50)
    assert sum(k.flops for k in train) == block.forward_flops(b, 50) + block.backward_flops(b, 50)
    assert len({k.name for k in train}) == len(train)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("split", [(1, 1), (2, 4)])
def test_bytes_are_those_of_the_tensors_a_launch_is_given(gated, split):
    """Enough tokens that every expert is met; what schedules and offsets add is below 1 %."""
    T, D, F, E, K = 4096, 256, 128, 16, 4
    H = 2 * F if gated else F

    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    def pick(problem):
        return replace(pick_tiles(problem), split_k={"up": split[0], "down": split[1]}.get(problem.kernel, 1))

    backend, x, w = TritonBackend(pick, "sm90"), meta(T, D), meta(T, K, dtype=torch.float32)
    activation = SWIGLU if gated else Activation(kind="relu", gated=False)
    ew = ExpertWeights(meta(E, H, D), meta(E, D, F), activation=activation)
    with recorded() as launches:
        plan = backend.plan(meta(T, K, dtype=torch.int32), E)
        _, h = backend.forward(x, plan, w, ew, apply_to="output", save=True)
        backend.backward(x, x, h, plan, w, ew, apply_to="output", needs=Needs(b_in=False, b_out=False))
    b = Block(d_model=D, d_expert=F, num_experts=E, top_k=K, gated=gated)
    costs = {k.name: k for k in kernels(b, T, train=True, split=split)}
    order = ["up", *["up sum"][: split[0] - 1], "down", "combine", "dh", "dw out", "dw in", "dx", "combine dx"]
    big = [one for one in launches if one.name in ("up", "up_sum", "rows", "combine", "dh", "dw")]
    assert len(big) == len(order)
    for name, one in zip(order, big, strict=True):
        given = [getattr(t, "base", t) for t in one.args.values()]
        size = sum(t.numel() * t.element_size() for t in given if isinstance(t, torch.Tensor))
        assert size == pytest.approx(costs[name].nbytes, rel=0.01), name


def test_time_is_the_longer_of_computing_and_moving():
    b = Block(d_model=2048, d_expert=768, num_experts=128, top_k=8)
    up = {k.name: k for k in kernels(b, 32768)}["up"]
    assert up.seconds("H200") == up.flops / 989.5e12 > up.nbytes / 4800e9
    up = {k.name: k for k in kernels(b, 1)}["up"]
    assert up.seconds("H200") == up.nbytes / 4800e9
    weights = 2 * 8 * 2 * 768 * 2048
    assert weights < up.nbytes < 1.001 * weights


@pytest.mark.parametrize("name, found", [
    ("NVIDIA H200", "H200"), ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA GB200", "GB200"), ("NVIDIA B200", "B200"),
    ("AMD Instinct MI300X", "MI300X"), ("NVIDIA A100-SXM4-80GB", "A100"), ("Some card", None)])
def test_a_gpus_name_finds_its_rates(name, found):
    device = device_of(name)
    assert (device and device.name) == found
