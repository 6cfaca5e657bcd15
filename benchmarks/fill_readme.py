"""Fill README.md's tables of measurements from benchmarks/results/*.csv, between its two markers.

    python benchmarks/fill_readme.py

Takes the figures of every file that bench_cpu.py, bench_torch.py or bench_ep.py wrote. Nothing is written by hand.
"""

from __future__ import annotations

import csv
import statistics
from pathlib import Path

HERE = Path(__file__).parent
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
NEEDED = {"shape", "T", "dtype", "pass", "contender", "ms", "cpu", "threads", "torch", "date"}
OURS = ("native", "moeffn torch")
PASSES = {"train": "forward + backward", "busy": "forward, busy"}
Row = dict[str, str]


def read(path: Path) -> list[Row]:
    with path.open() as f:
        return list(csv.DictReader(f))


def short(contender: str) -> str:
    return contender.removeprefix("transformers ").removeprefix("moeffn ")


def about(row: Row) -> str:
    """The machine of a result."""
    return f"{row['cpu']}, {row['threads']} threads, torch {row['torch']}"


def table(name: str, rows: list[Row]) -> list[str]:
    """One Markdown table: a line per (pass, shape), a column per T; a cell has our milliseconds and the time of the
    fastest other contender over ours, or, where we ran alone, the part of the bound that was reached."""
    contenders = {r["contender"] for r in rows}
    ours = next(n for n in OURS if n in contenders)
    cells: dict[tuple[str, str], dict[str, dict[str, Row]]] = {}
    for r in rows:
        cells.setdefault((r["pass"], r["shape"]), {}).setdefault(r["T"], {})[r["contender"]] = r
    tokens = list(dict.fromkeys(r["T"] for r in rows))
    ratios: dict[str, list[float]] = {}
    body = []
    for (what, shape), by_tokens in cells.items():
        line = f"| {PASSES.get(what, what)} | {shape} |"
        for T in tokens:
            found = by_tokens.get(T, {})
            ms = {n: float(r["busy_ms" if what == "busy" else "ms"]) for n, r in found.items()}
            if ours not in ms:
                line += " |"
                continue
            mine = ms.pop(ours)
            for other, value in ms.items():
                ratios.setdefault(other, []).append(value / mine)
            if ms:
                best = min(ms, key=ms.__getitem__)
                note = f"{ms[best] / mine:.2f}x" + (f" {short(best)}" if len(contenders) > 2 else "")
            else:
                note = f"{float(found[ours]['of_floor']):.0%} of bound"
            line += f" {mine:.2f} ({note}) |"
        body.append(line)
    isa = next((r["isa"] for r in rows if r.get("isa")), "")
    head = [f"`{name}`: {rows[0]['dtype']}, `{short(ours)}`" + (f", instructions up to {isa}" if isa else "") + "."]
    if ratios:
        means = sorted((statistics.geometric_mean(v), short(n)) for n, v in ratios.items())
        head = [f"{head[0]} Times of the others over it, geometric mean: "
                + ", ".join(f"{n} {mean:.2f}" for mean, n in means) + "."]
    return [*head, "", "| pass | shape | " + " | ".join(f"T = {T}" for T in tokens) + " |",
            "|---|---|" + "---|" * len(tokens), *body, ""]


def exchange_table(path: Path) -> list[str]:
    """What expert parallelism costs: a line per dispatcher of bench_ep.py's file."""
    if not path.exists():
        return []
    rows = read(path)
    first = rows[0]
    lines = [f"`{path.name}`: {first['shape']}, {first['dtype']}, forward + backward of {first['tokens_per_rank']} "
             f"tokens on each of {first['ranks']} gloo ranks of one machine, {first['threads_per_rank']} thread each. "
             "Bare gloo: the same bytes and nothing else; overhead: (exchanges with idle experts - bare gloo) / step. "
             "Local first calls the experts twice.",
             "", "| dispatcher | step ms | exchanges ms | bare gloo ms | overhead | MB sent in forward |",
             "|---|---|---|---|---|---|"]
    for r in rows:
        step, exchanges, raw = (f"{1e3 * float(r[k]):.1f}" for k in ("step", "exchange_only", "raw"))
        share, sent = f"{100 * float(r['overhead_of_step']):.1f} %", f"{int(r['bytes_sent']) / 1e6:.2f}"
        lines.append(f"| {r['dispatcher']} | {step} | {exchanges} | {raw} | {share} | {sent} |")
    return [*lines, ""]


def main() -> None:
    readme = HERE.parent / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    results = {path.name: read(path) for path in sorted((HERE / "results").glob("*.csv"))}
    layers = {name: rows for name, rows in results.items() if rows and rows[0].keys() >= NEEDED}
    dates: dict[str, set[str]] = {}  # of each machine
    for r in (r for rows in results.values() for r in rows if r.keys() >= {"cpu", "date"}):
        dates.setdefault(about(r), set()).add(r["date"])
    machines = [f"{machine}, {' to '.join(sorted({min(days), max(days)}))}" for machine, days in dates.items()]
    lines = ["; ".join(machines) + ".", ""] if machines else []
    lines += [line for name, rows in layers.items() for line in table(name, rows)]
    lines += exchange_table(HERE / "results" / "ep.csv")
    body = "\n".join(lines) if lines else "No results are stored yet: `benchmarks/bench_*.py` write them.\n"
    readme.write_text(f"{before}{BEGIN}\n{body}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
