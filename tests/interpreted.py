"""Running kernels under Triton's interpreter: the marker, small tiles, and a sanitizer for every load and store."""

from __future__ import annotations

import contextlib
import dataclasses
import os

import numpy as np
import pytest
import torch

from moeffn import backends
from moeffn.kernels.tiles import TileConfig

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(
    not INTERPRETING, reason="runs with TRITON_INTERPRET=1, in the process that test_triton.py starts")


def tiny_tiles(problem):
    """16-wide tiles, so that a few dozen rows and columns reach every kind of edge; dh cut as in the shipped tiles."""
    if problem.kernel == "dh":
        return TileConfig(16, 32, 16, 4, 2, group_m=2, pieces=2)
    return TileConfig(16, 32, 16, 4, 2, group_m=2, pieces=2 if problem.kernel == "up" else 1)


def bulk_tiles(problem):
    """The same read through descriptors where the layout allows, by three programs that go from tile to tile."""
    return dataclasses.replace(tiny_tiles(problem), tma=True, persistent=int(problem.kernel != "dw"))


@contextlib.contextmanager
def tiles(pick):
    """The triton backend with tiles chosen by `pick`."""
    backend = backends.get("triton")
    before, backend.pick = backend.pick, pick
    try:
        yield backend
    finally:
        backend.pick = before


class Violation(AssertionError):
    pass


@contextlib.contextmanager
def sanitized():
    """Raise Violation at a load or store of an active lane outside the tensors given to the kernel that runs."""
    from triton.runtime import interpreter

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    load, store, call = builder.create_masked_load, builder.create_masked_store, executor.__call__
    spans: list[tuple[int, int]] = []
    seen = {"lanes": 0}

    def check(pointers, mask):
        at = pointers.data[np.broadcast_to(np.asarray(mask.data).astype(bool), pointers.data.shape)].astype(np.int64)
        size = pointers.get_element_ty().primitive_bitwidth // 8
        inside = np.zeros(at.shape, dtype=bool)
        for low, high in spans:
            inside |= (at >= low) & (at + size <= high)
        seen["lanes"] += at.size
        if not inside.all():
            raise Violation(f"{(~inside).sum()} of {at.size} lanes outside the kernel's tensors")

    def checked_load(self, ptrs, mask, other, *rest, **more):
        check(ptrs, mask)
        return load(self, ptrs, mask, other, *rest, **more)

    def checked_store(self, ptrs, value, mask, *rest):
        check(ptrs, mask)
        return store(self, ptrs, value, mask, *rest)

    def checked_call(self, *args, **kwargs):
        given = [getattr(t, "base", t) for t in (*args, *kwargs.values())]
        spans[:] = [_span(t) for t in given if isinstance(t, torch.Tensor) and t.numel()]
        return call(self, *args, **kwargs)

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    executor.__call__ = checked_call
    try:
        yield seen
    finally:
        builder.create_masked_load, builder.create_masked_store, executor.__call__ = load, store, call


def _span(t: torch.Tensor) -> tuple[int, int]:
    extent = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + extent * t.element_size()


@contextlib.contextmanager
def poisoned(monkeypatch):
    """Every uninitialised tensor made inside is full of NaN (floats) or a wild number (integers)."""
    empty, new_empty, empty_like = torch.empty, torch.Tensor.new_empty, torch.empty_like

    def fill(t):
        return t.fill_(float("nan") if t.dtype.is_floating_point else -(2**30))

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *a, **k: fill(empty(*a, **k)))
        patch.setattr(torch, "empty_like", lambda *a, **k: fill(empty_like(*a, **k)))
        patch.setattr(torch.Tensor, "new_empty", lambda *a, **k: fill(new_empty(*a, **k)))
        yield
