"""The checks of `moeffn check` that need a GPU: host synchronisation, CUDA graphs, more than 2^31 elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .check_data import Target, errors, problem, run, upstream


def no_host_sync(target: Target) -> str:
    """Forward and backward of the layer with torch.cuda.set_sync_debug_mode("error")."""
    import torch

    from .. import MoEConfig, MoEFFN

    layer = MoEFFN(MoEConfig(d_model=256, d_expert=128, num_experts=16, top_k=4), backend=target.backend)
    layer = layer.to(target.device, target.dtypes[0])
    x = torch.randn(512, 256, device=target.device, dtype=target.dtypes[0], requires_grad=True)
    layer(x).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "forward and backward"


def cuda_graph(target: Target) -> str:
    """One captured forward + backward, replayed on other tokens and routings, equals the eager run bit for bit."""
    import torch

    from .. import MoEConfig, MoEFFN

    dtype = target.dtypes[0]
    layer = MoEFFN(MoEConfig(d_model=256, d_expert=128, num_experts=16, top_k=4), backend=target.backend)
    layer = layer.to(target.device, dtype)
    static = torch.randn(512, 256, device=target.device, dtype=dtype, requires_grad=True)

    def step() -> list[Any]:
        y = layer(static)
        return [y, *torch.autograd.grad(y.float().square().sum(), [static, *layer.parameters()])]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for i in range(3):
        with torch.no_grad():
            static.copy_(torch.randn(512, 256, generator=torch.Generator().manual_seed(i)))
        graph.replay()
        for mine, truth in zip(captured, step(), strict=True):
            assert torch.equal(mine, truth), "a replay differs from the eager run"
    return "forward + backward captured, 3 replays equal"


def cuda_graph_inference(target: Target) -> str:
    """A captured forward without gradients, at sizes from one token on, replayed on other tokens: equal bit for bit."""
    import torch

    from .. import MoEConfig, MoEFFN

    layer = MoEFFN(MoEConfig(d_model=256, d_expert=128, num_experts=16, top_k=4), backend=target.backend)
    layer = layer.to(target.device, target.dtypes[0])
    sizes = (1, 5, 16, 40, 300, 3000)  # the path of a few slots, then small, medium and large tiles
    with torch.no_grad():
        for T in sizes:
            static = torch.randn(T, 256, device=target.device, dtype=target.dtypes[0])
            layer(static)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = layer(static)
            for i in range(2):
                static.copy_(torch.randn(T, 256, generator=torch.Generator().manual_seed(i)))
                graph.replay()
                assert torch.equal(captured, layer(static)), f"T={T}: a replay differs from the eager run"
    return f"T = {', '.join(map(str, sizes))}"


def beyond_int32(target: Target) -> str:
    """More than 2^31 elements: of weights and their gradients, then of rows; the last expert's results are right."""
    import torch

    free = torch.cuda.mem_get_info(target.device)[0]
    if free < 40 * 2**30:
        return f"skipped: needs 40 GiB, {free / 2**30:.0f} are free"
    sizes = [last_expert(target, E=513, F=1024, D=2048, others=0), last_expert(target, E=8, F=1040, D=128,
                                                                                 others=1 << 20)]
    torch.cuda.empty_cache()
    assert sizes[0][0] > 2**31 and sizes[1][1] > 2**31
    return f"w_in of {sizes[0][0]}, h of {sizes[1][1]} elements"


def last_expert(target: Target, *, E: int, F: int, D: int, others: int) -> tuple[int, int]:
    """64 tokens on the last of E experts, after `others` on the experts before: their y and gradients, and the last
    expert's, within the error budget of those 64 alone. -> elements of w_in, of h."""
    import torch

    from .. import ExpertWeights, Routing, moe_ffn

    dtype, T = target.dtypes[0], 64
    small, _ = problem(target, T, D, F, 1, 1, dtype)
    small["weights"] = torch.ones_like(small["weights"])
    ids = torch.zeros(T, 1, dtype=torch.int32, device=target.device)
    truth, plain = run(small, ids, "torch", torch.float64), run(small, ids, "torch")
    weights = {}
    for name in ("w_in", "w_out"):
        weights[name] = torch.zeros(E, *small[name].shape[1:], device=target.device, dtype=dtype)
        weights[name][-1] = small[name][0].detach()
        weights[name].requires_grad_()
    x = torch.ones(others + T, D, device=target.device, dtype=dtype)
    x[others:] = small["x"].detach()
    x.requires_grad_()
    before = torch.arange(others, device=target.device) % max(1, E - 1)
    ids = torch.cat([before, torch.full((T,), E - 1, device=target.device)])[:, None].to(torch.int32)
    y = moe_ffn(x, Routing(ids, torch.ones(others + T, 1, device=target.device)),
                ExpertWeights(weights["w_in"], weights["w_out"]), backend=target.backend)
    dy = torch.zeros_like(y)
    dy[others:] = upstream((T, D)).to(y)
    grads = dict(zip(("x", "w_in", "w_out"), torch.autograd.grad(y, [x, *weights.values()], dy), strict=True))
    got = {"y": y.detach()[others:], "x": grads["x"][others:]} | {n: grads[n][-1:] for n in weights}
    for name, value in got.items():
        for mine, theirs in zip(errors(value, truth[name]), errors(plain[name], truth[name]), strict=True):
            assert mine <= 2 * theirs + torch.finfo(dtype).eps, f"{name}: error {mine:.3g}, torch {theirs:.3g}"
    for name, rest in {"x": grads["x"][:others], **{n: grads[n][:-1] for n in weights}}.items():
        assert not bool(rest.any()), f"gradient of {name} where the upstream gradient is zero"
    return weights["w_in"].numel(), x.shape[0] * 2 * F


GPU_CHECKS: dict[str, Callable[[Target], str]] = {
    "no host sync": no_host_sync, "CUDA graph": cuda_graph, "CUDA graph, inference": cuda_graph_inference,
    "more than 2^31": beyond_int32}
