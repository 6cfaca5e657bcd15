"""Products that end in a pointer's offset, looked for in what the compiler makes of a kernel."""

from __future__ import annotations

import re


def narrow_products(ttir: str) -> list[str]:
    """32-bit products of two run-time values that end in a pointer's offset, as lines of the kernel's Triton IR.

    An index times a constant is fine (it stays below a size that fits 32 bits); an index times a stride or a width is
    what overflows beyond 2^31 elements. Divisors are not followed: a quotient is no larger than its dividend.
    """
    made: dict[str, tuple[str, list[str], str]] = {}
    offsets: list[str] = []
    for line in ttir.splitlines():
        for argument, start in re.findall(r"(%[\w#]+) = (%[\w#]+)(?=[,)])", line):
            made[argument] = ("start", [start], line)
        found = re.match(r"\s*(%\w+)(?::\d+)? = \"?([\w.]+)\"?(.*)", line)
        if not found:
            continue
        name, op, rest = found.groups()
        operands = re.findall(r"%[\w#]+", rest.split(" : ")[0])
        made[name] = (op, operands, line)
        if op == "tt.addptr":
            offsets.append(operands[1])
    bad, seen = [], set()
    while offsets:
        name = offsets.pop().split("#")[0]
        if name in seen or name not in made:
            continue
        seen.add(name)
        op, operands, line = made[name]
        if op in ("tt.load", "tt.gather", "tt.histogram", "tt.scan", "tt.reduce"):
            continue
        if op == "arith.muli" and re.search(r"[ x]i32>?\s*(?:loc.*)?$", line) and not any(
                _constant(made, o) for o in operands):
            bad.append(line.strip())
        offsets += operands[:1] if op in ("arith.divsi", "arith.remsi") else operands
    return bad


def _constant(made: dict[str, tuple[str, list[str], str]], name: str) -> bool:
    op, operands, _ = made.get(name.split("#")[0], ("argument", [], ""))
    if op in ("tt.splat", "tt.broadcast", "tt.expand_dims"):
        return _constant(made, operands[0])
    return op == "arith.constant"
