"""`tune`: measure the tiles of the triton backend on the current GPU at some widths and token counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..config import SWIGLU
from ..kernels import timing
from ..kernels.launch import cdiv, recorded, run
from ..kernels.tiles import Kernel, Problem, TileConfig, pick_tiles
from ..kernels.tuned import Entry, save, search
from ..types import ExpertWeights
from .base import Needs
from .triton import TritonBackend, device_family, device_name

__all__ = ["KERNELS", "Step", "device_name", "problem", "save", "tune"]

KERNELS: tuple[Kernel, ...] = ("up", "down", "dh", "dx", "dw")
# what follows a split inner sum is timed with it: `combine` reads the parts of the down-projection
_LAUNCHES = {"up": ("up", "up_sum"), "down": ("rows", "combine"), "dh": ("dh",), "dx": ("rows",), "dw": ("dw",)}
Timer = Callable[[dict[str, Callable[[], object]]], dict[str, float]]


def tune(tokens: Sequence[int], *, d_model: int, d_expert: int, num_experts: int, top_k: int, dtype: torch.dtype,
         device: torch.device, say: Callable[[str], object] = print, timer: Timer | None = None) -> list[Entry]:
    """The tiles that measured faster than the shipped ones, for a SwiGLU layer under uniform routing, in each bucket
    of rows per expert that the token counts fall into (one count a bucket). `timer`: seconds of named calls.

    RuntimeError while a CUDA graph is being captured: tuning runs kernels and waits for them.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("tune: not while a CUDA graph is being captured")
    timer = timer or (lambda calls: timing.alternate(calls, seconds=0.02))
    found = []
    for T in tokens:
        sizes = T, d_model, d_expert, num_experts, top_k, dtype, device
        layer = Step(*sizes)
        for kernel in KERNELS:
            asked = problem(kernel, *sizes)

            def versus(a: TileConfig, b: TileConfig, kernel: Kernel = kernel, layer: Step = layer
                       ) -> tuple[float, float]:
                try:
                    calls = {"a": layer.call(kernel, a), "b": layer.call(kernel, b)}
                    times = timer(calls)
                except Exception as error:  # a tile that this compiler or device refuses is no candidate
                    say(f"  {b}: {type(error).__name__}")
                    return 1.0, float("inf")
                return times["a"], times["b"]

            entry = search(asked, versus)
            what = f"T={T} {kernel}: default {pick_tiles(asked)}"
            if entry is None:
                say(f"{what} stays")
            else:
                say(f"{what} {entry.default_s * 1e6:.1f} us -> {entry.tile} {entry.tile_s * 1e6:.1f} us")
                found.append(entry)
    return found


def problem(kernel: Kernel, T: int, D: int, F: int, E: int, K: int, dtype: torch.dtype, device: torch.device
            ) -> Problem:
    """What the backend asks tiles for at these sizes (gated)."""
    return Problem(kernel, cdiv(T * K, E), dtype.itemsize, True, device_family(device), D, F, E)


class Step:
    """Random data of one layer, and the launches of one kernel of its training step as a call."""

    def __init__(self, T: int, D: int, F: int, E: int, K: int, dtype: torch.dtype, device: torch.device) -> None:
        g = torch.Generator(device).manual_seed(0)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=g, device=device).mul_(shape[-1] ** -0.5).to(dtype)

        self.x = randn(T, D)
        self.experts = ExpertWeights(randn(E, 2 * F, D), randn(E, D, F), activation=SWIGLU)
        ids = torch.rand(T, E, generator=g, device=device).topk(K, -1).indices.to(torch.int32)
        self.weights = torch.rand(T, K, generator=g, device=device)
        self.backend = TritonBackend()
        self.plan = self.backend.plan(ids, E)
        self.h = randn(T * K, 2 * F)

    def call(self, kernel: Kernel, tile: TileConfig) -> Callable[[], object]:
        """Everything that `kernel` reads is computed once; the call runs its launches alone, with that tile."""
        backend = TritonBackend(lambda p: tile if p.kernel == kernel else pick_tiles(p))
        args = self.plan, self.weights, self.experts
        with recorded() as launches:
            if kernel in ("up", "down"):
                backend.forward(self.x, *args, apply_to="output", save=True)
            else:
                backend.backward(self.x, self.x, self.h, *args, apply_to="output",
                                 needs=Needs(b_in=False, b_out=False))
        mine = [one for one in launches if one.name in _LAUNCHES[kernel]]
        for one in launches:
            run(one)

        def call() -> None:
            for one in mine:
                run(one)
        return call
