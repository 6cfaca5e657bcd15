"""Imports point one way, and importing moeffn is cheap: read from the source, and measured in a fresh process."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import moeffn

PACKAGE = Path(moeffn.__file__).parent

# What each room may import at run time besides itself. A room that is not listed here fails the test.
BASE = {"config", "types", "checks"}
VERBS = BASE | {"reference", "backends", "permutation", "functional", "routing", "dense"}
ROOMS: dict[str, set[str]] = {
    "checks": set(),
    "config": {"checks"},
    "types": {"checks", "config"},
    "reference": {"config", "types"},
    "kernels": set(),
    "backends": BASE | {"reference", "kernels", "permutation"},
    "permutation": {"checks", "types"},
    "routing": BASE | {"backends", "kernels"},
    "balance": BASE | {"permutation", "routing"},
    "listing": set(),
    "dense": BASE | {"backends", "permutation"},
    "functional": BASE | {"reference", "backends", "permutation", "dense", "accounting"},  # operators count FLOPs
    "layer": VERBS | {"balance"},
    "testing": BASE | {"reference", "permutation", "functional"},
    "accounting": BASE,
    "distributed": VERBS | {"balance", "layer", "accounting"},
    "upcycling": VERBS | {"balance", "layer", "accounting", "integrations", "listing"},
    "integrations": VERBS | {"balance", "layer", "accounting", "upcycling", "distributed", "listing"},
    "presets": BASE | {"accounting"},
    "measure": VERBS | {"testing"},
    "cli": VERBS | {"balance", "layer", "accounting", "upcycling", "distributed", "integrations", "testing", "presets",
                    "measure"},
    "__init__": set(),
    "__main__": {"cli"},
}
# Third-party packages that only these rooms may import when they are imported (not inside a function).
ONLY = {"triton": {"kernels"}, "transformers": {"integrations"}, "typer": {"cli"}, "rich": {"cli"},
        "safetensors": {"integrations"}, "matplotlib": {"cli"}}
DISTRIBUTED = {"distributed", "integrations"}  # integrations only recognise DTensors


def room_of(path: Path) -> str:
    """The room of a file; a room's `commands.py` holds its part of the command line."""
    top = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "cli" if top in ("cli", "demo") or path.name == "commands.py" else top


def imports_of(path: Path) -> set[tuple[str, bool]]:
    """(dotted absolute module, whether at import time), for every import outside `if TYPE_CHECKING`."""
    found: set[tuple[str, bool]] = set()
    package = ("moeffn", *path.relative_to(PACKAGE).parent.parts)

    def visit(node: ast.AST, top: bool) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            return
        if isinstance(node, ast.Import):
            found.update((alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(p for p in (base, node.module or "") if p)
            found.update((f"{module}.{alias.name}", top) for alias in node.names)
        inside = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, top and not inside)

    visit(ast.parse(path.read_text()), True)
    return found


SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=[str(p.relative_to(PACKAGE)) for p in SOURCES])
def test_imports_point_one_way(path: Path) -> None:
    room = room_of(path)
    assert room in ROOMS, f"{room} is not a room of the design"
    for module, at_import in imports_of(path):
        parts = module.split(".")
        if parts[0] == "moeffn":
            target = parts[1] if len(parts) > 1 else "__init__"
            known = target in ROOMS and target != "__init__"
            assert not known or target == room or target in ROOMS[room], f"{room} imports {target}"
            assert known or room in ("cli", "integrations", "testing", "distributed", "backends"), module
        elif parts[0] in ONLY and at_import:
            assert room in ONLY[parts[0]], f"{room} imports {parts[0]} when it is imported"
        home = path.relative_to(PACKAGE).parts[0]
        assert not module.startswith("torch.distributed") or home in DISTRIBUTED, f"{room} imports {module}"


def test_the_reader_of_imports_reads_all_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "backends").mkdir()
    file = tmp_path / "backends" / "x.py"
    file.write_text("from .. import checks\nfrom ..config import A\nfrom .base import B\nimport triton.language as tl\n"
                    "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ..layer import C\n"
                    "def f():\n    import transformers\n")
    assert imports_of(file) == {
        ("moeffn.checks", True), ("moeffn.config.A", True), ("moeffn.backends.base.B", True),
        ("triton.language", True), ("typing.TYPE_CHECKING", True), ("transformers", False)}


MAKERS = {"empty", "zeros", "ones", "full", "arange", "linspace", "eye", "tensor", "as_tensor", "rand", "randn",
          "randint", "randperm"}
OWN_PROCESS = ("cli", "demo.py", "distributed/bench.py", "distributed/train_example.py")  # nobody sets a default there


@pytest.mark.parametrize("path", SOURCES, ids=[str(p.relative_to(PACKAGE)) for p in SOURCES])
def test_every_new_tensor_names_its_device(path: Path) -> None:
    # torch.set_default_device moves the others under the feet of kernels that write to their address
    if str(path.relative_to(PACKAGE)).startswith(OWN_PROCESS):
        return
    for call in ast.walk(ast.parse(path.read_text())):
        if isinstance(call, ast.Call) and ast.unparse(call.func) in {f"torch.{m}" for m in MAKERS}:
            assert any(k.arg in ("device", None) for k in call.keywords), f"{path}:{call.lineno}"


def test_every_public_name_is_there() -> None:
    for name in moeffn.__all__:
        assert getattr(moeffn, name) is not None
    with pytest.raises(AttributeError, match="module 'moeffn' has no attribute 'Mixture'"):
        moeffn.Mixture  # noqa: B018
    assert set(dir(moeffn)) == {*moeffn.__all__, "__version__"}


def test_no_module_hides_a_public_function() -> None:
    # Importing a submodule puts it on the package under its name, over a function of that name
    modules = {p.stem for p in PACKAGE.glob("*.py")} | {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    functions = {n for n in moeffn.__all__ if not isinstance(getattr(moeffn, n), type(moeffn))}
    assert not modules & functions


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          cwd=PACKAGE.parent).stdout


def test_importing_moeffn_is_cheap_and_pulls_in_nothing_heavy() -> None:
    code = ("import time, torch, sys\nbefore = set(sys.modules)\nt = time.perf_counter()\nimport moeffn\n"
            "print(time.perf_counter() - t)\nnew = set(sys.modules) - before\n"
            "print([m for m in new if m.split('.')[0] in ('triton', 'transformers', 'typer', 'rich', 'matplotlib')])")
    times = []
    for _ in range(5):  # the best of several: other work on the machine is not the import's
        seconds, heavy = run(code).splitlines()
        assert heavy == "[]"
        times.append(float(seconds))
        if times[-1] < 0.2:
            break
    assert min(times) < 0.2, times


def test_inference_on_a_cpu_needs_neither_the_compiler_nor_transformers() -> None:
    # torch._dynamo takes seconds to import; a process that only serves must not pay for it
    code = ("import torch, sys\nbefore = set(sys.modules)\nimport moeffn\n"
            "ffn = moeffn.MoEFFN(moeffn.MoEConfig(d_model=8, d_expert=8, num_experts=4, top_k=2))\n"
            "with torch.no_grad():\n    ffn(torch.randn(3, 8))\n"
            "print(sorted((set(sys.modules) - before) & {'transformers', 'typer', 'torch._dynamo'}))")
    assert run(code).strip() == "[]"
