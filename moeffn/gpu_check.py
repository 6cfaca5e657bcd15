"""`moeffn check`: the promises of the runtime, tried on a device. Error budgets, determinism, memory, compile; on a GPU
also host synchronisation, CUDA graphs and tensors of more than 2^31 elements.

Each check is a function of a `Target` that returns a short line of figures or raises AssertionError.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer

from . import checks


def register(app: typer.Typer) -> None:
    @app.command()
    def check(ep: bool = typer.Option(False, "--ep", help="Expert parallelism over the ranks that torchrun started."),
              device: str = typer.Option("", help="cpu or cuda (default: cuda; cpu with --ep)."),
              backend: str = typer.Option("auto", help="auto, triton, torch or native; not with --ep."),
              seed: int = typer.Option(0, help="Seed of the random shapes and data; not with --ep.")) -> None:
        """The promises of the runtime, tried on a device: budgets, determinism, memory, syncs, graphs, big tensors.

        With --ep: every dispatcher on the ranks that torchrun started against one process, in float64.
        """
        if ep:
            from .distributed import commands

            checks.one_of("--device", device or "cpu", ("cpu", "cuda"))
            raise typer.Exit(0 if commands.check(device=device or "cpu") else 1)
        raise typer.Exit(1 if run_checks(device or "cuda", backend, seed, typer.echo) else 0)


@dataclass(frozen=True)
class Target:
    """Where and what is checked: a torch device, a resolved backend name, and the seed."""

    device: Any
    backend: str
    seed: int

    @property
    def dtypes(self) -> list[Any]:
        import torch

        from . import backends

        every = (torch.bfloat16, torch.float16, torch.float32)
        return [d for d in every if backends.available(self.backend, self.device, d) is None]


def run_checks(device: str, backend: str, seed: int, say: Callable[[str], object]) -> list[str]:
    """Run every check that fits the device, one line each through `say`; -> the names of those that failed.

    ValueError when the device is not there or the backend cannot run on it.
    """
    import torch

    from . import backends

    checks.one_of("--device", device, ("cpu", "cuda"))
    if device == "cuda" and not torch.cuda.is_available():
        raise checks.bad("--device", "a machine with a CUDA or ROCm GPU", "no such device: nothing was checked")
    place = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    target = Target(place, backends.resolve(backend, place, torch.float32), seed)
    say(f"{_describe(place)}, backend {target.backend}, torch {torch.__version__}")
    failed = []
    for name, function in (CHECKS | GPU_CHECKS if device == "cuda" else CHECKS).items():
        start = time.perf_counter()
        try:
            result, word = function(target), "ok    "
        except AssertionError as error:
            result, word = str(error), "FAILED"
        except Exception:  # a crash of one check must not hide the others
            result, word = traceback.format_exc(limit=-3), "FAILED"
        if word == "FAILED":
            failed.append(name)
        say(f"{word} {name:<22} {time.perf_counter() - start:6.1f} s  {result}")
    say(f"{len(failed)} failed" if failed else "all passed")
    return failed


def _describe(device: Any) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def _problem(target: Target, T: int, D: int, F: int, E: int, K: int, dtype: Any, seed: int = 0,
             bias: bool = False) -> tuple[dict[str, Any], Any]:
    """Unit-variance leaves (x, weights, w_in, w_out[, b_in, b_out]) on the device, and ids (T, K) with some -1."""
    import torch

    g = torch.Generator().manual_seed(target.seed * 1000 + seed)

    def randn(*shape: int, scale: float = 1.0) -> Any:
        return (torch.randn(*shape, generator=g) * scale).to(target.device, dtype).requires_grad_()

    leaves = {"x": randn(T, D), "w_in": randn(E, 2 * F, D, scale=D**-0.5), "w_out": randn(E, D, F, scale=F**-0.5)}
    if bias:
        leaves |= {"b_in": randn(E, 2 * F), "b_out": randn(E, D)}
    leaves["weights"] = torch.rand(T, K, generator=g).to(target.device).requires_grad_()
    skew = torch.rand(E, generator=g) * 2  # some experts are popular, some idle
    ids = (torch.rand(T, E, generator=g) + skew).topk(K, -1).indices.to(torch.int32)
    ids = torch.where(torch.rand(T, K, generator=g) < 0.05, -1, ids).to(torch.int32)
    return leaves, ids.to(target.device)


def _run(leaves: dict[str, Any], ids: Any, backend: str, dtype: Any = None) -> dict[str, Any]:
    """y and every gradient, for an upstream gradient that depends on the shape alone."""
    import torch

    from . import ExpertWeights, Routing, moe_ffn

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    own = {n: t.detach().to(t.dtype if dtype is None else wide if n == "weights" else dtype).requires_grad_()
           for n, t in leaves.items()}
    ew = ExpertWeights(own["w_in"], own["w_out"], own.get("b_in"), own.get("b_out"))
    y = moe_ffn(own["x"], Routing(ids, own["weights"]), ew, backend=backend)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(7)).to(y)
    y.backward(dy)
    return {"y": y.detach(), **{n: t.grad for n, t in own.items()}}


def error_budget(target: Target) -> str:
    """Frobenius and worst-row error of y and every gradient, at most twice those of torch in the same dtype."""
    import torch

    g = torch.Generator().manual_seed(target.seed)
    worst = 0.0
    big = target.device.type == "cuda"
    for dtype in target.dtypes:
        for i in range(6 if big else 2):
            top = 3000 if big else 40
            T, D, F = (int(torch.randint(1, n, (), generator=g)) for n in (top, top // 4, top // 4))
            E = int(torch.randint(2, 64 if big else 8, (), generator=g))
            K = int(torch.randint(1, min(E, 8) + 1, (), generator=g))
            leaves, ids = _problem(target, T, D, F, E, K, dtype, i, bias=i % 2 == 1)
            truth = _run(leaves, ids, "torch", torch.float64)
            plain, got = _run(leaves, ids, "torch"), _run(leaves, ids, target.backend)
            for name in got:
                pair = _errors(got[name], truth[name]), _errors(plain[name], truth[name])
                for mine, theirs in zip(*pair, strict=True):
                    allowed = 2 * theirs + torch.finfo(dtype).eps
                    worst = max(worst, mine / allowed)
                    assert mine <= allowed, (f"{name}, {dtype}, T={T} D={D} F={F} E={E} K={K}: error {mine:.3g}, "
                                             f"torch {theirs:.3g}")
    return f"worst error is {worst:.2f} of the budget over {len(target.dtypes)} dtypes"


def _errors(got: Any, truth: Any) -> tuple[float, float]:
    got, truth = (t.double().reshape(-1, t.shape[-1]) for t in (got, truth))
    assert bool(got.isfinite().all()), "not finite"
    norm = float(truth.norm())
    if norm == 0:
        return (float(got.norm()),) * 2
    rows = float((got - truth).norm(dim=1).max()) * truth.shape[0] ** 0.5
    return float((got - truth).norm()) / norm, rows / norm


def own_router(target: Target) -> str:
    """The backend's own router: ids of torch's operations, weights and gradients to rounding, NaN and ties included."""
    import torch

    from . import RouterConfig, backends, route

    configs = [RouterConfig(num_experts=128, top_k=8, renormalize=True),
               RouterConfig(num_experts=128, top_k=4, order="topk_score"),
               RouterConfig(num_experts=256, top_k=8, score="sigmoid", num_groups=8, topk_groups=4, renormalize=True),
               RouterConfig(num_experts=512, top_k=10, score="sqrtsoftplus", renormalize=True)]
    g = torch.Generator().manual_seed(target.seed)
    for config in configs:
        if not backends.routes(target.backend, config.key, torch.float32):
            return f"{target.backend} has none: torch's operations"
        # multiples of 1/64: scores are equal or well apart, so that no rounding decides
        logits = ((torch.randn(1000, config.num_experts, generator=g) * 128).round() / 64).to(target.device)
        logits[7] = float("nan")
        dweights = torch.randn(1000, config.top_k, generator=g).to(target.device)
        found = []
        for name in (target.backend, "torch"):
            z = logits.clone().requires_grad_()
            routing = route(z, config, backend=name)
            found.append((routing.experts, routing.weights, torch.autograd.grad(routing.weights, z, dweights)[0]))
        (ids, weights, grad), (want_ids, want_weights, want_grad) = found
        assert torch.equal(ids, want_ids), f"{int((ids != want_ids).sum())} ids differ, {config}"
        torch.testing.assert_close(weights, want_weights, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(grad, want_grad, rtol=1e-4, atol=1e-6)
    return f"{len(configs)} routers of 1000 tokens"


def determinism(target: Target) -> str:
    """Repeated runs are bitwise equal, forward and backward."""
    import torch

    times = 20 if target.device.type == "cuda" else 3
    leaves, ids = _problem(target, 300, 64, 48, 8, 4, target.dtypes[0])
    first = _run(leaves, ids, target.backend)
    for _ in range(times):
        again = _run(leaves, ids, target.backend)
        for name in first:
            assert torch.equal(first[name], again[name]), f"{name} differs between two runs"
    return f"{times + 1} runs bitwise equal"


def saved_memory(target: Target) -> str:
    """What forward saves beyond the weights: x, H and the routing metadata (2TD + 4NF bytes in 16 bits, 12 a slot)."""
    import torch

    from . import ExpertWeights, Routing, moe_ffn

    T, D, F, E, K = 256, 64, 32, 8, 4
    dtype = target.dtypes[0]
    leaves, ids = _problem(target, T, D, F, E, K, dtype)
    ew = ExpertWeights(leaves["w_in"], leaves["w_out"])
    routing = Routing(ids, leaves["weights"])
    held: dict[int, int] = {}

    def keep(t: Any) -> Any:
        held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        moe_ffn(leaves["x"], routing, ew, backend=target.backend)
    for name in ("w_in", "w_out"):
        held.pop(leaves[name].untyped_storage().data_ptr(), None)
    N, size, got = T * K, dtype.itemsize, sum(held.values())
    allowed = size * (T * D + 2 * N * F) + 16 * N + 4 * (E + 1)
    assert size * (T * D + 2 * N * F) <= got <= allowed, f"{got} bytes saved, at most {allowed} allowed"
    return f"{got} bytes saved for {N} slots, formula allows {allowed}"


def compiles_once(target: Target) -> str:
    """torch.compile(fullgraph=True) takes ten token counts with at most two compilations."""
    import torch

    from . import MoEConfig, MoEFFN

    layer = MoEFFN(MoEConfig(d_model=64, d_expert=32, num_experts=8, top_k=2), backend=target.backend).to(target.device)
    count = 0

    def counting(graph: Any, inputs: Any) -> Any:
        nonlocal count
        count += 1
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=counting)
    for T in (16, 17, 33, 64, 100, 128, 200, 255, 256, 300):
        x = torch.randn(T, 64, device=target.device)
        torch.testing.assert_close(compiled(x), layer(x))
    assert count <= 2, f"{count} compilations"
    return f"{count} compilations for 10 token counts"


def no_host_sync(target: Target) -> str:
    """Forward and backward of the layer with torch.cuda.set_sync_debug_mode("error")."""
    import torch

    from . import MoEConfig, MoEFFN

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

    from . import MoEConfig, MoEFFN

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


def beyond_int32(target: Target) -> str:
    """Weights, rows and gradients of more than 2^31 elements: the last expert's answer and gradient are right."""
    import torch

    from . import ExpertWeights, Routing, moe_ffn

    E, F, D, T = 513, 1024, 2048, 64
    dtype = target.dtypes[0]
    free = torch.cuda.mem_get_info(target.device)[0]
    if free < 24 * 2**30:
        return f"skipped: needs 24 GiB, {free / 2**30:.0f} are free"
    w_in = torch.zeros(E, 2 * F, D, device=target.device, dtype=dtype)
    w_out = torch.zeros(E, D, F, device=target.device, dtype=dtype)
    g = torch.Generator(target.device).manual_seed(target.seed)
    w_in[-1].normal_(generator=g).mul_(D**-0.5)
    w_out[-1].normal_(generator=g).mul_(F**-0.5)
    assert w_in.numel() > 2**31
    x = torch.randn(T, D, device=target.device, generator=g).to(dtype)
    ids = torch.full((T, 1), E - 1, dtype=torch.int32, device=target.device)
    weights = torch.ones(T, 1, device=target.device)
    for t in (w_in, w_out):
        t.requires_grad_()
    moe_ffn(x, Routing(ids, weights), ExpertWeights(w_in, w_out), backend=target.backend).sum().backward()
    small = [w[-1:].detach().clone().requires_grad_() for w in (w_in, w_out)]
    y = moe_ffn(x, Routing(torch.zeros_like(ids), weights), ExpertWeights(*small), backend=target.backend)
    y.sum().backward()
    for big, one in zip((w_in, w_out), small, strict=True):
        assert big.grad is not None and one.grad is not None
        assert torch.equal(big.grad[-1], one.grad[0]), "gradient of the last expert"
        assert not bool(big.grad[:-1].any()), "gradient of an expert without rows"
    return f"w_in of {w_in.numel()} elements"


CHECKS: dict[str, Callable[[Target], str]] = {
    "error budget": error_budget, "router": own_router, "determinism": determinism, "saved memory": saved_memory,
    "compile": compiles_once}
GPU_CHECKS: dict[str, Callable[[Target], str]] = {
    "no host sync": no_host_sync, "CUDA graph": cuda_graph, "more than 2^31": beyond_int32}
