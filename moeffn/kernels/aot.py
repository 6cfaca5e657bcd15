"""Ahead-of-time compilation of recorded launches for devices that are not here, and what the compiler says of them.

    with recorded() as launches:            # meta tensors: nothing runs
        backend.forward(...)
    for launch in launches:
        print(report(compile_launch(launch, "sm90"), "sm90"))

Registers, spills and instructions come from the machine code, read with the tools in triton's wheel; on gfx9 from
the assembly's own metadata.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import mangle_type
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import Launch

TARGETS = {"sm80": GPUTarget("cuda", 80, 32), "sm90": GPUTarget("cuda", 90, 32), "sm100": GPUTarget("cuda", 100, 32),
           "gfx9": GPUTarget("hip", "gfx942", 64)}
_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
_MATRIX_UNITS = {"wgmma": "HGMMA", "tcgen05": "UTC[A-Z]*MMA", "mma": r"[HIQ]MMA\.", "mfma": "v_mfma"}


@dataclass(frozen=True)
class Report:
    """What one kernel costs on one target.

    registers: per thread (gfx9: VGPRs, accumulation registers included); spills: loads and stores of local memory
    (gfx9: spilled VGPRs); shared_bytes: per program; matrix_unit: the instructions that multiply matrices, "" for none;
    bulk_copies: instructions that copy a tile through a descriptor (TMA).
    """

    registers: int
    spills: int
    shared_bytes: int
    matrix_unit: str
    bulk_copies: int


def source(launch: Launch) -> ASTSource:
    """The launch as the just-in-time compiler would specialise it: 16-divisible sizes and pointers, 1 a constant."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for i, param in enumerate(launch.kernel.params):
        value = launch.args[param.name]
        one = isinstance(value, int) and value == 1 and not param.do_not_specialize
        if param.is_constexpr or value is None or one:
            signature[param.name], constants[param.name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = "*" + _TYPES[value.dtype]
            attributes[i,] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            signature[param.name] = mangle_type(value)
        else:
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                attributes[i,] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def compile_launch(launch: Launch, family: str) -> Any:
    """The compiled kernel for a family of `TARGETS`. Raises what the compiler raises when it cannot."""
    options = {"num_warps": launch.num_warps, "num_stages": launch.num_stages, "enable_fp_fusion": True}
    return triton.compile(source(launch), target=TARGETS[family], options=options)


def report(compiled: Any, family: str) -> Report:
    """What the machine code of a compiled kernel says."""
    shared = compiled.metadata.shared
    if family == "gfx9":
        text = compiled.asm["amdgcn"]
        spills = _field(text, r"\.vgpr_spill_count:\s+(\d+)")
        return Report(_field(text, r"\.vgpr_count:\s+(\d+)"), spills, shared, _matrix_unit(text), 0)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", file.name)
        sass = _tool("nvdisasm", "-c", "-ndf", file.name)  # the code alone, which takes half the time of all
    spills = len(re.findall(r"\b(?:LDL|STL)\b", sass))
    return Report(_field(usage, r"REG:(\d+)"), spills, shared, _matrix_unit(sass),
                  compiled.asm["ptx"].count("cp.async.bulk.tensor"))


def _field(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    assert found, pattern
    return int(found[1])


def _matrix_unit(code: str) -> str:
    return next((name for name, pattern in _MATRIX_UNITS.items() if re.search(pattern, code)), "")


def _tool(name: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([path, *arguments], check=True, capture_output=True, text=True).stdout
