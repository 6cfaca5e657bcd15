"""`moeffn check`: the promises of the runtime, tried on a device. Error budgets, determinism, memory, compile; on a GPU
also host synchronisation, CUDA graphs and tensors of more than 2^31 elements.

Each check is a function of a `Target` that returns a short line of figures or raises AssertionError.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

import typer

from .. import checks
from .check_data import Target, errors, problem, run
from .check_device import GPU_CHECKS


def register(app: typer.Typer) -> None:
    @app.command()
    def check(ep: bool = typer.Option(False, "--ep", help="Expert parallelism over the ranks that torchrun started."),
              device: str = typer.Option("", help="cpu or cuda (default: cuda where there is one; cpu with --ep)."),
              backend: str = typer.Option("auto", help="auto, triton, torch or native; not with --ep."),
              seed: int = typer.Option(0, help="Seed of the random shapes and data; not with --ep.")) -> None:
        """The promises of the runtime, tried on a device: budgets, determinism, memory, syncs, graphs, big tensors.

        With --ep: every dispatcher on the ranks that torchrun started against one process, in float64.
        """
        if ep:
            from ..distributed import commands

            checks.one_of("--device", device or "cpu", ("cpu", "cuda"))
            raise typer.Exit(0 if commands.check(device=device or "cpu") else 1)
        import torch

        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        raise typer.Exit(1 if run_checks(device, backend, seed, typer.echo) else 0)


def run_checks(device: str, backend: str, seed: int, say: Callable[[str], object]) -> list[str]:
    """Run every check that fits the device, one line each through `say`; -> the names of those that failed.

    ValueError when the device is not there or the backend cannot run on it.
    """
    import torch

    from .. import backends

    checks.one_of("--device", device, ("cpu", "cuda"))
    checks.one_of("--backend", backend, ("auto", "triton", "torch", "native"))  # the reference is what they are held to
    if device == "cuda" and not torch.cuda.is_available():
        raise checks.bad("--device", "a machine with a CUDA or ROCm GPU", "no such device: nothing was checked")
    place = torch.device(device, 0) if device == "cuda" else torch.device("cpu")
    target = Target(place, backends.resolve(backend, place, torch.float32), seed)
    say(f"{_describe(place)}, backend {target.backend}, torch {torch.__version__}")
    failed = []
    for name, function in (CHECKS | GPU_CHECKS if device == "cuda" else CHECKS).items():
        start = time.perf_counter()
        try:
            result = function(target)
            word = "skip  " if result.startswith("skipped") else "ok    "
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


def error_budget(target: Target) -> str:
    """Frobenius and worst-row error of y and every gradient, at most twice those of torch in the same dtype."""
    import torch

    g = torch.Generator().manual_seed(target.seed)
    worst = 0.0
    big = target.device.type == "cuda"
    for dtype in target.dtypes:
        for i in range(4 if big else 2):
            top = 3000 if big else 40
            T, D, F = (int(torch.randint(1, n, (), generator=g)) for n in (top, top // 4, top // 4))
            E = int(torch.randint(2, 64 if big else 8, (), generator=g))
            K = int(torch.randint(1, min(E, 8) + 1, (), generator=g))
            leaves, ids = problem(target, T, D, F, E, K, dtype, i, bias=i % 2 == 1)
            worst = max(worst, _used(target, leaves, ids, dtype))
    return f"worst error is {worst:.2f} of the budget over {len(target.dtypes)} dtypes"


def decoding(target: Target) -> str:
    """The same budget for y of a few tokens without gradients; on GPUs also sizes of which inner sums are split."""
    sizes = [(1, 48, 40, 6, 3), (7, 96, 33, 5, 2)]
    if target.device.type == "cuda":
        sizes += [(1, 4096, 64, 8, 2), (8, 2048, 768, 128, 8), (40, 1024, 1024, 8, 2)]
    worst = 0.0
    for dtype in target.dtypes:
        for i, (T, D, F, E, K) in enumerate(sizes):
            leaves, ids = problem(target, T, D, F, E, K, dtype, i, bias=i % 2 == 1)
            worst = max(worst, _used(target, leaves, ids, dtype, grads=False))
    return f"worst error is {worst:.2f} of the budget over {len(sizes)} sizes"


def _used(target: Target, leaves: dict[str, Any], ids: Any, dtype: Any, grads: bool = True) -> float:
    """Which part of its error budget the backend uses at most, in y and with `grads` in every gradient."""
    import torch

    truth = run(leaves, ids, "torch", torch.float64, grads)
    plain, got = run(leaves, ids, "torch", None, grads), run(leaves, ids, target.backend, None, grads)
    worst = 0.0
    for name in got:
        pair = errors(got[name], truth[name]), errors(plain[name], truth[name])
        for mine, theirs in zip(*pair, strict=True):
            allowed = 2 * theirs + torch.finfo(dtype).eps
            worst = max(worst, mine / allowed)
            shape = {n: tuple(t.shape) for n, t in leaves.items()}
            assert mine <= allowed, f"{name}, {dtype}, {shape}: error {mine:.3g}, torch {theirs:.3g}"
    return worst


def own_router(target: Target) -> str:
    """The backend's own router: ids of torch's operations, weights and gradients to rounding, NaN and ties included."""
    import torch

    from .. import RouterConfig, backends, route

    configs = [RouterConfig(num_experts=128, top_k=8, renormalize=True),
               RouterConfig(num_experts=128, top_k=4, order="topk_score"),
               RouterConfig(num_experts=256, top_k=8, score="sigmoid", num_groups=8, topk_groups=4, renormalize=True),
               RouterConfig(num_experts=512, top_k=10, score="sqrtsoftplus", renormalize=True)]
    g = torch.Generator().manual_seed(target.seed)
    for config in configs:
        if not backends.routes(target.backend, config.key, torch.float32):
            return f"{target.backend} routes by torch's operations, which are the standard here"
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
    leaves, ids = problem(target, 300, 64, 48, 8, 4, target.dtypes[0])
    first = run(leaves, ids, target.backend)
    for _ in range(times):
        again = run(leaves, ids, target.backend)
        for name in first:
            assert torch.equal(first[name], again[name]), f"{name} differs between two runs"
    return f"{times + 1} runs bitwise equal"


def saved_memory(target: Target) -> str:
    """What forward saves beyond the weights: x, H and the routing metadata (2TD + 4NF bytes in 16 bits, 12 a slot)."""
    import torch

    from .. import ExpertWeights, Routing, moe_ffn

    T, D, F, E, K = 256, 64, 32, 8, 4
    dtype = target.dtypes[0]
    leaves, ids = problem(target, T, D, F, E, K, dtype)
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

    from .. import MoEConfig, MoEFFN

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


GOLDEN = ("qwen3_moe", "gpt_oss", "deepseek_v3", "llama4", "nemotron_h", "step3p7", "mixtral", "dbrx")
"""Families whose routers, activations, biases and layouts differ; all of them are in the tests."""


def golden_families(target: Target) -> str:
    """Blocks of transformers with recorded results, their experts replaced: y and gradients in float32 as recorded."""
    import sys
    from pathlib import Path

    tests = Path(__file__).parents[2] / "tests"
    if not (tests / "data" / "golden").is_dir():
        return "skipped: needs the recorded results of a source tree: `python -m moeffn check` in a checkout"
    sys.path.insert(0, str(tests))
    try:
        import hf_golden as golden
    except ImportError as error:
        return f"skipped: {error}"
    finally:
        sys.path.remove(str(tests))
    import torch

    from ..integrations.transformers import replace_ffn

    worst = 0.0
    for family in GOLDEN:
        want = golden.tensors(family)
        block = golden.block(family).to(target.device)
        report = replace_ffn(block, backend=target.backend)
        assert report.replaced and not report.left, f"{family}: not replaced"
        x = want["in.x"].clone().to(target.device).requires_grad_()
        y = golden.run(block, family, torch.float32, x)
        y.backward(want["in.g"].to(target.device).reshape(y.shape))
        pairs = {"y": (y, want["f32.out"]), "x": (x.grad, want["f32.grad_x"])}
        parameters = dict(block.named_parameters())
        for key in (k for k in want if k.startswith("f32.grad_router.")):
            name = key.removeprefix("f32.grad_router.")
            pairs[name] = parameters[name].grad, want[key]
        for name, (got, recorded) in pairs.items():
            far = golden.relative(got.cpu().reshape(recorded.shape), recorded)
            worst = max(worst, far)
            assert far <= 2e-5, f"{family}, {name}: relative error {far:.3g} of what was recorded"
    return f"{len(GOLDEN)} families, worst error {worst:.1e}"


CHECKS: dict[str, Callable[[Target], str]] = {
    "error budget": error_budget, "decoding": decoding, "golden families": golden_families, "router": own_router,
    "determinism": determinism, "saved memory": saved_memory, "compile": compiles_once}
