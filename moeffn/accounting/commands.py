"""`moeffn params` and `moeffn plan`. Presentation alone; typer and rich are imported here and nowhere else."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .cluster import ClusterPlan, plan_cluster
from .counting import VENDORS, Count, LayerCount, count
from .presets import presets
from .storage import FORMATS, stored
from .traffic import expert_counts
from .workload import Workload, clusters

SOURCE = "A preset (`moeffn params list` shows all), or the path of a config.json or its folder."


def register(app: typer.Typer) -> None:
    """Add the commands to the command line's application."""
    app.command("params")(params)
    app.command("plan")(plan)


def _fail(error: Exception) -> typer.Exit:
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(2)


def _list(value: str, name: str) -> tuple[int, ...]:
    try:
        found = tuple(int(part) for part in value.split(","))
    except ValueError:
        raise _fail(ValueError(f"{name}: expected integers separated by commas, got {value!r}")) from None
    return found


def params(
    source: Annotated[str, typer.Argument(help=SOURCE)],
    convention: Annotated[str, typer.Option(
        help=f"What counts: {', '.join(VENDORS)}; or pairs, as in scope=model+mtp,active=none,idle=max.")] = "all",
    fmt: Annotated[str, typer.Option("--format", help=f"Bytes in this format: {', '.join(FORMATS)}.")] = "bf16",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Total and active weights of a model, and where they are."""
    if source == "list":
        for preset in presets().values():
            typer.echo(preset.name)
        return
    try:
        found = count(source, convention=convention)
        size = stored(source, fmt)
    except (ValueError, TypeError) as error:
        raise _fail(error) from None
    if as_json:
        typer.echo(json.dumps({**found.to_dict(), "stored": asdict(size)}, indent=1))
        return
    _show(found, convention, size.nbytes, fmt)


def _table(first: str, *others: str) -> Table:
    """Figures to the right, below each other."""
    table = Table(first)
    for name in others:
        table.add_column(name, justify="left" if name == "kind" else "right")
    return table


def _show(found: Count, convention: str, nbytes: int, fmt: str) -> None:
    console = Console()
    console.print(f"[bold]{found.name}[/bold] ({found.family}), convention {convention}: "
                  f"total {found.total:,}, active {found.active:,} ({found.active / found.total:.1%})")
    table = _table("component", "total", "active", "share of total")
    whole = sum(p.total for p in found.parts)
    for part in found.parts:
        table.add_row(part.part, f"{part.total:,}", f"{part.active:,}", f"{part.total / whole:.1%}")
    table.add_row("FFN in all", f"{found.ffn_total:,}", f"{found.ffn_active:,}", f"{found.ffn_share:.1%}")
    console.print(table)
    table = _table("active, by embeddings counted", "weights")
    for label, value in (("all", found.active_all), ("head, not the input table", found.active_head),
                         ("none", found.active_none)):
        table.add_row(label, f"{value:,}")
    console.print(table)
    table = _table("layers", "kind", "experts", "top-k", "total each", "active each")
    alike: dict[tuple, list[LayerCount]] = {}
    for layer in found.layers:
        alike.setdefault((layer.kind, layer.num_experts, layer.top_k, layer.total, layer.active), []).append(layer)
    for (kind, experts, top_k, total, active), runs in alike.items():
        table.add_row(_places(runs), kind, str(experts or "-"), str(top_k or "-"), f"{total:,}", f"{active:,}")
    console.print(table)
    console.print(f"{fmt}: {nbytes / 1e9:.2f} GB ({nbytes / 2**30:.2f} GiB)")
    if found.mtp_total:
        console.print(f"multi-token prediction besides: {found.mtp_total:,}, active {found.mtp_active:,}")
    if found.buffers:
        console.print(f"buffers that are no parameters: {found.buffers:,}")
    if found.assumed:
        console.print("read as absent: " + ", ".join(f"{key} = {value}" for key, value in found.assumed))
    if found.excluded:
        console.print("not counted: " + ", ".join(found.excluded))


def _places(runs: list[LayerCount]) -> str:
    """Where equal layers are, and how many: "3-60 (58x)", "0-2, 4-6, 8-10, … (36x)"."""
    spans = [f"{run.index}-{run.index + run.count - 1}" if run.count > 1 else str(run.index) for run in runs]
    count = sum(run.count for run in runs)
    places = ", ".join(spans[:3]) + (", …" if len(spans) > 3 else "")
    return f"{places} ({count}x)" if count > 1 else places


def plan(
    source: Annotated[str, typer.Argument(help=SOURCE)],
    cluster: Annotated[str, typer.Option(
        help=f"GPUs and links: {', '.join(clusters())}; `moeffn plan list` explains them.")] = "H800",
    ranks: Annotated[str, typer.Option(help="Expert-parallel sizes, split by commas.")] = "1,2,4,8,16,32,64,128,256",
    tokens: Annotated[str, typer.Option(help="Tokens per rank (decoding: sequences), split by commas.")] = "32,128",
    context: Annotated[int, typer.Option(help="Past tokens of each sequence.")] = 4096,
    prefill: Annotated[bool, typer.Option(help="Prompts instead of decoding.")] = False,
    exchange: Annotated[str, typer.Option(help="How tokens travel: auto, direct, hierarchical or alltoall.")] = "auto",
    overlap: Annotated[str, typer.Option(help="What hides the exchange: none, two_batches or chunks.")] = "none",
    dtype: Annotated[str, typer.Option(help="Format of weights, products and dispatch: fp8 or bf16.")] = "fp8",
    replicas: Annotated[int, typer.Option(help="Further copies of hot experts.")] = 0,
    trace: Annotated[Path | None, typer.Option(help="JSON file: rows of expert ids, or one load per expert.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write a plot to this file (needs matplotlib).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Tokens/s per GPU, memory and step time against the number of expert-parallel ranks: bounds, not measurements."""
    if source == "list":
        _show_clusters()
        return
    try:
        size = {"fp8": 1.0, "bf16": 2.0}.get(dtype)
        if size is None:
            raise ValueError(f"dtype: expected fp8 or bf16, got {dtype!r}")
        work = Workload(context=context, prefill=prefill, exchange=exchange, overlap=overlap, dtype=dtype,
                        bytes_per_weight=size, dispatch=dtype, chunks=4 if overlap == "chunks" else 1)
        found = plan_cluster(source, cluster, ranks=_list(ranks, "ranks"), tokens_per_rank=_list(tokens, "tokens"),
                             workload=work, replicas=replicas, loads=_loads(source, trace) if trace else None)
        if png is not None:
            plot(found, png)
    except ModuleNotFoundError as error:
        raise _fail(ValueError(f"png: needs matplotlib ({error})")) from None
    except OSError as error:
        problem = f"png: expected a path that can be written, got {str(png)!r} ({error.strerror})"
        raise _fail(ValueError(problem)) from None
    except (ValueError, TypeError) as error:
        raise _fail(error) from None
    if as_json:
        typer.echo(json.dumps(_plan_data(found), indent=1))
        return
    _show_plan(found)


def _show_clusters() -> None:
    console, table = Console(), Table(box=SIMPLE_HEAD)
    for name in ("cluster", "GPU", "domain", "GB/s inside", "GB/s NIC", "direct exchange"):
        table.add_column(name, justify="left" if name in ("cluster", "GPU", "direct exchange") else "right")
    for c in clusters().values():
        table.add_row(c.name, c.device, str(c.domain), f"{c.domain_gbs:g}", f"{c.nic_gbs:g}", c.low_latency or "-")
    console.print(table)
    console.print("domain: GPUs joined by fast links (a node, a rack); GB/s: a GPU and direction;\n"
                  "direct exchange: the published low-latency table that its times are fitted to")
    for c in clusters().values():
        console.print(f"{c.name}: {c.source}")


def _loads(source: str, path: Path) -> list[float]:
    """Loads of the experts, from a file of loads or of a routing trace."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # of JSON (too deep, too), or of bytes that are no text
        raise ValueError(f"trace: expected a JSON file, got {error}") from None
    if not isinstance(data, list) or not data:
        raise ValueError(f"trace: expected a list that is not empty, got {str(data)[:40]}")
    if isinstance(data[0], list):
        if not all(isinstance(row, list) and all(type(e) is int and e >= -1 for e in row) for row in data):
            raise ValueError(f"trace: expected rows of expert ids (-1: none), got {str(data)[:40]}")
        return [float(n) for n in expert_counts(data, max(layer.num_experts for layer in count(source).layers))]
    if not all(isinstance(n, (int, float)) and not isinstance(n, bool) and 0 <= n < float("inf") for n in data):
        raise ValueError(f"trace: expected finite loads of at least 0, got {str(data)[:40]}")
    return [float(n) for n in data]


def _batches(found: ClusterPlan) -> list[int]:
    return list(dict.fromkeys(p.tokens_per_rank for p in found.points))


def _plan_data(found: ClusterPlan) -> dict[str, Any]:
    """For JSON: every point, and for each batch where more ranks stop paying (None where none fits in memory)."""
    stops = {tokens: found.stops_paying(tokens) for tokens in _batches(found)}
    return {
        "model": found.model, "cluster": found.cluster,
        "points": [{**asdict(p), "memory_gb": p.memory_gb, "tokens_per_s": p.tokens_per_s} for p in found.points],
        "stops_paying": {str(tokens): stop and {"ranks": stop.ranks, "binds": stop.binds}
                         for tokens, stop in stops.items()},
    }


def _show_plan(found: ClusterPlan) -> None:
    console = Console()
    names = {"direct": "direct", "hierarchical": "2-hop", "alltoall": "a2a"}
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("ranks", "tok", "exp", "via", "dense", "expert", "exch", "step", "tok/s", "GB", "binds"):
        table.add_column(name, justify="left" if name in ("via", "binds") else "right")
    for p in found.points:
        times = (p.dense_us, p.expert_us, p.dispatch_us + p.combine_us, p.step_us)
        table.add_row(str(p.ranks), str(p.tokens_per_rank), str(p.experts_per_rank), names.get(p.exchange, "-"),
                      *(f"{t / 1000:.1f}" for t in times), f"{p.tokens_per_s_per_gpu:.0f}",
                      f"{p.memory_gb:.0f}" + ("" if p.fits else "!"), p.binds)
    console.print(f"[bold]{found.model}[/bold] on {found.cluster}: bounds of the model, not measurements")
    console.print("tok: tokens a rank; exp: experts of the fullest rank; times: ms a step; tok/s a GPU;\n"
                  "GB a rank, with ! where it does not fit")
    console.print(table)
    largest = max(p.ranks for p in found.points)
    for tokens in _batches(found):
        stop = found.stops_paying(tokens)
        if stop is None:
            where = "no size fits in memory"
        elif stop.ranks == largest and len(found.points) > 1:
            where = f"more ranks pay up to {largest}, the most that were tried; there {stop.binds} binds"
        else:
            where = f"nothing is gained above {stop.ranks} ranks; there {stop.binds} binds"
        console.print(f"{tokens} tokens a rank: {where}")


def plot(found: ClusterPlan, path: Path) -> None:
    """Tokens/s a GPU against ranks, one line for each number of tokens a rank; sizes that do not fit are hollow."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for tokens in _batches(found):
        line = [p for p in found.points if p.tokens_per_rank == tokens]
        drawn = axes.plot([p.ranks for p in line], [p.tokens_per_s_per_gpu for p in line],
                          label=f"{tokens} tokens per GPU")[0]
        for p in line:
            axes.plot(p.ranks, p.tokens_per_s_per_gpu, "o", color=drawn.get_color(),
                      markerfacecolor=drawn.get_color() if p.fits else "none")
    sizes = sorted({p.ranks for p in found.points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_ylim(0, 1.2 * max(p.tokens_per_s_per_gpu for p in found.points))  # room for the legend
    axes.set_xlabel("Expert-parallel size (GPUs); hollow: does not fit in memory")
    axes.set_ylabel("Tokens/s per GPU (model, not measured)")
    axes.set_title(f"{found.model} on {found.cluster}")
    axes.legend()
    figure.savefig(path, dpi=120)
