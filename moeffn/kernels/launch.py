"""The one place through which every kernel is launched, so that launches can also be recorded instead of run.

A recording (`with recorded() as launches:`) on meta tensors yields exactly the kernels, tiles and argument kinds that a
GPU would be given; `moeffn.kernels.aot` compiles those without a device.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton


@dataclass(frozen=True)
class Launch:
    """One kernel launch: the jit function, its grid, its arguments by name, warps and pipeline stages."""

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    num_warps: int
    num_stages: int

    @property
    def name(self) -> str:
        return self.kernel.__name__.strip("_")


_recording: list[Launch] | None = None


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches inside the block are appended to the list and not run. Not for several threads at once."""
    global _recording
    outer, _recording = _recording, []
    try:
        yield _recording
    finally:
        _recording = outer


def launch(kernel: Any, grid: tuple[int, ...], *, num_warps: int = 4, num_stages: int = 2, **args: Any) -> None:
    """Run `kernel` on the device of its first tensor. A grid with a zero is no launch: drivers refuse it."""
    if 0 in grid:
        return
    made = Launch(kernel, grid, args, num_warps, num_stages)
    if _recording is not None:
        _recording.append(made)
    else:
        run(made)


def run(made: Launch) -> None:
    """Run a launch, recorded or not."""
    # fused multiply-adds are asked for by name: their default changes between triton versions
    options = {"num_warps": made.num_warps, "num_stages": made.num_stages, "enable_fp_fusion": True}
    device = next(a.device for a in made.args.values() if isinstance(a, torch.Tensor))
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            made.kernel[made.grid](**made.args, **options)
    else:
        made.kernel[made.grid](**made.args, **options)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many a device has; what is not a GPU counts as an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def interpreting() -> bool:
    """True when TRITON_INTERPRET=1 was set before triton was imported: kernels then run on CPU tensors."""
    return bool(triton.knobs.runtime.interpret)


def next_power_of_2(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and `least`."""
    return max(least, 1 << max(0, n - 1).bit_length())


def cdiv(a: int, b: int) -> int:
    return -(-a // b)
