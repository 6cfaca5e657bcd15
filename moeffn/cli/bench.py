"""`moeffn bench`: one MoE block at the real size of a published model, checked against the oracle and measured."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import TYPE_CHECKING, Any

import typer

from .. import checks
from ..config import MoEConfig

if TYPE_CHECKING:
    import torch

DTYPES = ("bfloat16", "float16", "float32")


def register(app: typer.Typer) -> None:
    @app.command()
    def bench(
        preset: str = typer.Argument(metavar="PRESET", help=(
            "A preset (Qwen3-30B-A3B, DeepSeek-V3, gpt-oss-20b, …; `moeffn params list` shows all) or the path of a "
            "config.json or its folder.")),
        tokens: str = typer.Option("1,64,1024", help="Token counts T, separated by commas."),
        backend: str = typer.Option("auto", help="auto, native, torch, triton or reference."),
        train: bool = typer.Option(False, "--train", help="Measure forward + backward too."),
        routing: str = typer.Option("uniform", help="uniform, balanced, zipf:A (exponent), hot:N (N experts "
                                                      "take all), single (one set of experts), zero-expert (half "
                                                      "are idle) or trace:FILE (ids of shape (rows, K))."),
        dtype: str = typer.Option("bfloat16", help=", ".join(DTYPES) + "."),
        device: str = typer.Option("cpu", help="cpu or cuda."),
        num_experts: int = typer.Option(0, help="Hold fewer experts than the model has; 0: all of them."),
        seed: int = typer.Option(0, help="Seed of weights, inputs and routing."),
        ep: bool = typer.Option(False, "--ep", help="Expert parallel over the ranks that torchrun started; --tokens "
                                                    "are per rank, routing is uniform."),
        as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of tables."),
    ) -> None:
        """Speed of one MoE block at the real size of a public model, checked and measured.

        The timed region is the whole block: router, permutation, experts, shared expert, weighted sum. The router is
        computed, then its choice is replaced by that of --routing, because random weights route in no realistic way.
        """
        from ..presets import load_block
        from . import UserError

        try:
            label, config = load_block(preset)
        except (ValueError, TypeError) as error:
            raise UserError(str(error)) from None
        if ep:
            from ..distributed.commands import bench as bench_ep

            bench_ep(label, _held(config, num_experts), tokens=_token_counts(tokens), dtype=dtype, device=device,
                     seed=seed, as_json=as_json)
            return
        result = run(label, _held(config, num_experts), all_experts=config.num_experts, tokens=_token_counts(tokens),
                     backend=backend, train=train, routing=routing, dtype=dtype, device=device, seed=seed,
                     quiet=as_json)
        if as_json:
            typer.echo(json.dumps(result, indent=2))
        else:
            _show(result)


def _token_counts(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise checks.bad("--tokens", "ints separated by commas", repr(text)) from None
    if min(found) < 1:
        raise checks.bad("--tokens", "counts of at least 1", repr(text))
    return found


def _held(config: MoEConfig, num_experts: int) -> MoEConfig:
    """The block with fewer experts; groups that no longer divide them are left out."""
    if num_experts == 0:
        return config
    if not config.top_k <= num_experts <= config.num_experts:
        raise checks.bad("--num-experts", f"top_k = {config.top_k} to {config.num_experts}", num_experts)
    r = config.route
    size = num_experts // r.num_groups
    fits = num_experts % r.num_groups == 0 and size >= 2 and size * r.topk_groups >= r.top_k
    router = dataclasses.replace(r, num_experts=num_experts, num_groups=r.num_groups if fits else 1,
                                 topk_groups=r.topk_groups if fits else 1)
    return dataclasses.replace(config, num_experts=num_experts, router=router)


def needed_bytes(config: MoEConfig, tokens: int, dtype_bytes: int, train: bool) -> int:
    """Bytes a run needs: weights (twice with gradients), rows, pre-activations and float32 sums of the largest T."""
    from ..accounting.block import Block, total_weights

    total = total_weights(Block.of(config))
    N = tokens * config.top_k
    rows = N * (config.activation.width_in(config.d_expert) + config.d_expert + 2 * config.d_model) * dtype_bytes
    return total * dtype_bytes * (2 if train else 1) + rows * (3 if train else 1) + 4 * tokens * config.d_model * 4


def run(label: str, config: MoEConfig, *, all_experts: int, tokens: list[int], backend: str, train: bool, routing: str,
        dtype: str, device: str, seed: int, quiet: bool) -> dict[str, Any]:
    """Everything `moeffn bench` prints, as plain data. Raises ValueError for arguments that cannot run here."""
    checks.one_of("--dtype", dtype, DTYPES)
    checks.one_of("--device", device, ("cpu", "cuda"))
    import torch

    from .. import backends
    from ..accounting.block import Block, active_weights, total_weights
    from ..measure import matmul_ceiling, read_ceiling
    from .doctor import cpu_model, kernel_of

    if device == "cuda" and not torch.cuda.is_available():
        raise checks.bad("--device", "'cpu' (torch sees no GPU here)", "'cuda'")
    where, kind = torch.device(device), getattr(torch, dtype)
    _refuse_if_too_large(label, config, max(tokens), kind, train, where)
    name = backends.resolve(backend, where, kind)
    # The largest buffers of a run are its weights: anything wrong with the workload should show before they are made.
    loads = {T: _routings(routing, T, config, seed) for T in tokens}

    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet) as progress:
        step = progress.add_task("")
        progress.update(step, description="measuring this machine's ceilings")
        ceilings = {"matmul_gflops": matmul_ceiling(where, kind) / 1e9, "read_gbytes": read_ceiling(where) / 1e9}
        progress.update(step, description=f"filling {config.num_experts} experts")
        block = _Block(config, backend, where, kind, seed)
        rows = []
        for T in tokens:
            progress.update(step, description=f"T = {T}: checking {name} against the float64 oracle")
            errors = block.check(T, loads[T][0], train)
            progress.update(step, description=f"T = {T}: measuring")
            rows.append(block.measure(T, loads[T], ceilings, train) | errors)
    sizes = Block.of(config)
    total = total_weights(sizes)
    return {
        "block": label, "config": _plain(config), "experts_held": config.num_experts,
        "experts_of_model": all_experts, "weights_total": total, "weights_active": active_weights(sizes),
        "weight_bytes": total * kind.itemsize, "dtype": dtype, "device": device, "routing": routing, "seed": seed,
        "backend": name, "kernel": kernel_of(name), "threads": torch.get_num_threads(),
        "torch": torch.__version__, "machine": torch.cuda.get_device_name() if device == "cuda" else cpu_model(),
        "ceilings": ceilings, "rows": rows,
    }


def _plain(config: MoEConfig) -> dict[str, Any]:
    """Its fields for JSON, without `key`, which is for operators."""
    return dataclasses.asdict(config, dict_factory=lambda pairs: {k: v for k, v in pairs if k != "key"})


def _refuse_if_too_large(label: str, config: MoEConfig, tokens: int, dtype: torch.dtype, train: bool,
                         device: torch.device) -> None:
    import torch

    from .doctor import memory

    available = torch.cuda.mem_get_info()[0] if device.type == "cuda" else memory()["available"]
    needed = needed_bytes(config, tokens, dtype.itemsize, train)
    if available is not None and needed > 0.9 * available:
        fixed = needed_bytes(dataclasses.replace(config, num_experts=config.top_k, router=None), tokens, dtype.itemsize,
                             train)
        each = (needed - fixed) / max(1, config.num_experts - config.top_k)
        fitting = config.top_k + int((0.8 * available - fixed) // each) if each else 0
        hint = f"; --num-experts {fitting} would fit" if fitting >= config.top_k else ""
        raise checks.bad(
            "PRESET", f"a block of at most {int(0.9 * available):,} bytes (90% of the memory available now){hint}",
            f"{label} with {config.num_experts} experts in {str(dtype)[6:]}{' and gradients' if train else ''}: "
            f"{needed:,} bytes")


def _routings(spec: str, T: int, config: MoEConfig, seed: int) -> list[torch.Tensor]:
    """Several choices of experts (T, K), so that small batches find cold weights."""
    from ..testing import make_routing

    sets = 8 if T <= 64 else 2
    return [make_routing(spec, T, config.top_k, config.num_experts, seed + i).experts for i in range(sets)]


class _Block:
    """The block under test: router, experts and shared expert with random weights."""

    def __init__(self, config: MoEConfig, backend: str, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        import torch

        from ..layer import MoEFFN
        from ..measure import fill_normal_

        self.config, self.device, self.dtype, self.seed, self.backend = config, device, dtype, seed, backend
        with torch.device("meta"):
            layer = MoEFFN(config, backend=backend, dtype=dtype)
        self.layer = layer.to_empty(device=device)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            fill_normal_((p for p in self.layer.parameters() if p.ndim > 1), generator)
            for t in [*(p for p in self.layer.parameters() if p.ndim == 1), *self.layer.buffers()]:
                t.zero_()
            for bias in (self.layer.experts.b_in, self.layer.experts.b_out):
                if bias is not None:
                    bias.normal_(generator=None, std=0.1)
        self.layer.eval()

    def inputs(self, T: int, i: int) -> torch.Tensor:
        import torch

        generator = torch.Generator().manual_seed(self.seed + 1000 + i)
        return torch.randn(T, self.config.d_model, generator=generator).to(self.device, self.dtype)

    def forward(self, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """MoEFFN.forward with the router's choice replaced by `experts`."""
        routing = dataclasses.replace(self.layer.router(x), experts=experts, identity_weights=None)
        y = self.layer.experts(x, routing, backend=self.backend)
        return y if self.layer.shared is None else y + self.layer.shared(x)

    def check(self, T: int, experts: torch.Tensor, train: bool) -> dict[str, float]:
        """Relative error of a sample of tokens against float64, next to the budget: twice that of plain torch."""
        from ..measure import sample_errors

        x, experts = self.inputs(T, 0), experts.to(self.device)
        return sample_errors(self.layer.experts.weights, x, experts, self.backend, train)

    def measure(self, T: int, experts: list[torch.Tensor], ceilings: dict[str, float], train: bool) -> dict[str, Any]:
        import torch

        from ..accounting.block import Block, always_active_weights, expert_weights, forward_flops
        from ..measure import median_seconds

        c = self.config
        experts = [e.to(self.device) for e in experts]
        xs = [self.inputs(T, i) for i in range(len(experts))]
        counts = torch.stack([torch.bincount(e[e >= 0].flatten().long(), minlength=c.num_experts) for e in experts])
        loads = counts.double()

        def forward(i: int) -> None:
            with torch.no_grad():
                self.forward(xs[i % len(xs)], experts[i % len(xs)])

        seconds = median_seconds(forward, self.device)
        sizes = Block.of(c)
        flops = forward_flops(sizes, T)
        touched = float((counts > 0).sum()) / len(experts)
        read = (touched * expert_weights(sizes) + always_active_weights(sizes)) * self.dtype.itemsize
        row = {
            "tokens": T, "max_over_mean_load": float((loads.amax(1) / loads.mean(1).clamp(min=1e-9)).mean()),
            "idle_experts": c.num_experts - touched, "forward": _figures(T, seconds, flops, ceilings),
            "read_gbytes_per_s": read / seconds / 1e9,
            "read_of_ceiling": read / seconds / 1e9 / ceilings["read_gbytes"],
        }
        if train:
            row["forward_backward"] = _figures(T, self._train_seconds(xs, experts), 3 * flops, ceilings)
        return row

    def _train_seconds(self, xs: list[torch.Tensor], experts: list[torch.Tensor]) -> float:
        import torch

        from ..measure import median_seconds

        dys = [torch.randn_like(x) for x in xs]

        def step(i: int) -> None:
            i %= len(xs)
            x = xs[i].requires_grad_()
            self.forward(x, experts[i]).backward(dys[i])
            x.grad = None
            self.layer.zero_grad(set_to_none=True)

        return median_seconds(step, self.device, calls=3, warmup=1)


def _figures(T: int, seconds: float, flops: int, ceilings: dict[str, float]) -> dict[str, float]:
    gflops = flops / seconds / 1e9
    return {"ms": seconds * 1e3, "tokens_per_s": T / seconds, "gflops": gflops,
            "of_matmul_ceiling": gflops / ceilings["matmul_gflops"]}


def _show(result: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Column, Table

    narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(highlight=False, width=None if narrow else 140)  # a pipe has no width: show whole numbers
    c = result["config"]
    model = result["experts_of_model"]
    held = "" if result["experts_held"] == model else f" of {model}, fewer held"
    shared = f", shared expert {c['d_shared']}" if c["d_shared"] else ""
    console.print(f"[bold]{result['block']}[/]: d_model {c['d_model']}, {result['experts_held']} experts{held}, "
                  f"d_expert {c['d_expert']}, top {c['top_k']}{shared}, {c['activation']['kind']}"
                  f"{' gated' if c['activation']['gated'] else ''}, {result['dtype']}")
    console.print(f"weights: {result['weights_total']:,} total ({result['weight_bytes'] / 1e9:.2f} GB), "
                  f"{result['weights_active']:,} active per token")
    kernel = f" ({result['kernel']})" if result["kernel"] else ""
    console.print(f"backend: {result['backend']}{kernel}, {result['threads']} threads, {result['machine']}")
    ceilings = result["ceilings"]
    console.print(f"ceilings measured in this run: matmul {ceilings['matmul_gflops']:.0f} GFLOP/s, "
                  f"memory read {ceilings['read_gbytes']:.1f} GB/s")
    table = Table("T", "pass", *(Column(name, justify="right") for name in (
        "ms", "tokens/s", "GFLOP/s", "MFU %", "GB/s", "MBU %", "load", "error")),
        title=f"routing {result['routing']}, seed {result['seed']}", title_justify="left", box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0))
    for row in result["rows"]:
        for key, what in (("forward", "fwd"), ("forward_backward", "fwd+bwd")):
            if key not in row:
                continue
            f, forward = row[key], key == "forward"
            checked = "output" if forward else "gradient"
            error = row[f"{checked}_error"] / row[f"{checked}_budget"]
            table.add_row(
                str(row["tokens"]), what, f"{f['ms']:.3f}", f"{f['tokens_per_s']:,.0f}", f"{f['gflops']:.0f}",
                f"{100 * f['of_matmul_ceiling']:.0f}", f"{row['read_gbytes_per_s']:.1f}" if forward else "",
                f"{100 * row['read_of_ceiling']:.0f}" if forward else "", f"{row['max_over_mean_load']:.2f}",
                f"{error:.2f}" + ("" if error <= 1 else " [bold red]WRONG[/]"))
    console.print(table)
    console.print("MFU, MBU: GFLOP/s and GB/s of weights, of the ceilings; load: the fullest expert's over the mean; "
                  "error: of a sample of tokens against float64, over twice that of plain torch in the same dtype: up "
                  "to 1 is right.", soft_wrap=True)
