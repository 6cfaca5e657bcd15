"""Memory of gradients, activations and exchanged rows on a CPU: large, short-lived, written once a step."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

_native: ModuleType | None
try:
    from .. import _native  # type: ignore[attr-defined,no-redef]  # after torch, whose OpenMP library it shares
except ImportError:
    _native = None

_KEPT_FROM = 4 << 20  # bytes; smaller gradients come from torch's allocator


def gradient(param: Tensor) -> tuple[Tensor, bool]:
    """A contiguous buffer of param's shape and dtype on its device, and whether it is known to hold zeros.

    Large ones on a CPU lie on pages that earlier gradients gave back (`moeffn._native.pages_held`, `pages_release`;
    MOEFFN_KEEP_MIB bounds them), or without the compiled module on untouched pages from calloc: torch's allocator would
    pay for fresh small pages, about half of a training step of few tokens.
    """
    size = param.numel() * param.element_size()
    if param.device.type != "cpu" or size < _KEPT_FROM:
        return torch.empty(param.shape, dtype=param.dtype, device=param.device), False
    if _native is not None:
        memory, zeroed = _native.gradient_memory(size)
    else:
        block = np.zeros(size + 64, dtype=np.uint8)
        start = -block.ctypes.data % 64
        memory, zeroed = torch.from_numpy(block[start : start + size]), True
    return memory.view(param.dtype).view(param.shape), zeroed


def buffer(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised contiguous tensor; a large one on a CPU on kept pages, like a gradient, where they are."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < _KEPT_FROM or _native is None:
        return torch.empty(shape, dtype=dtype, device=device)
    return _native.gradient_memory(size)[0].view(dtype).view(shape)
