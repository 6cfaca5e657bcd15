"""Fill README.md's table of measurements from benchmarks/results/*.csv, between its two markers.

    python benchmarks/fill_readme.py

Takes the figures of every file that bench_cpu.py, bench_torch.py or bench_ep.py wrote. Nothing is written by hand.
"""

from __future__ import annotations

import csv
from pathlib import Path

HERE = Path(__file__).parent
BEGIN, END = "<!-- results -->", "<!-- end of results -->"


def table(path: Path) -> list[str]:
    """One Markdown table: a line per (shape, T, pass), a column per contender, milliseconds."""
    with path.open() as f:
        rows = [r for r in csv.DictReader(f) if {"shape", "T", "pass", "contender", "ms", "cpu"} <= r.keys()]
    if not rows:
        return []
    names = list(dict.fromkeys(r["contender"] for r in rows))
    cells: dict[tuple[str, str, str], dict[str, str]] = {}
    for r in rows:
        cells.setdefault((r["shape"], r["T"], r["pass"]), {})[r["contender"]] = f"{float(r['ms']):.2f}"
    first = rows[0]
    lines = [f"`{path.name}`: {first['dtype']}, {first['cpu']}, {first['threads']} threads, torch {first['torch']}, "
             f"{first['date']}; milliseconds, median.", "",
             "| shape | T | pass | " + " | ".join(names) + " |", "|---|---|---|" + "---|" * len(names)]
    for (shape, T, what), found in cells.items():
        lines.append(f"| {shape} | {T} | {what} | " + " | ".join(found.get(n, "") for n in names) + " |")
    return [*lines, ""]


def exchange_table(path: Path) -> list[str]:
    """What expert parallelism costs: a line per dispatcher of bench_ep.py's file."""
    if not path.exists():
        return []
    with path.open() as f:
        rows = list(csv.DictReader(f))
    first = rows[0]
    lines = [f"`{path.name}`: {first['shape']}, {first['dtype']}, forward + backward of {first['tokens_per_rank']} "
             f"tokens on each of {first['ranks']} gloo ranks with {first['threads_per_rank']} thread each, "
             f"{first['cpu']}, torch {first['torch']}, {first['date']}. Bare gloo: the same bytes and nothing else; "
             "overhead: (exchanges with idle experts - bare gloo) / step.", "",
             "| dispatcher | step ms | exchanges ms | bare gloo ms | overhead | MB sent in forward |",
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
    lines = [line for path in sorted((HERE / "results").glob("*.csv")) for line in table(path)]
    lines += exchange_table(HERE / "results" / "ep.csv")
    body = "\n".join(lines) if lines else "No results are stored yet: `benchmarks/bench_*.py` write them.\n"
    readme.write_text(f"{before}{BEGIN}\n{body}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
