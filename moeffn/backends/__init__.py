"""The backends and the one function that chooses among them."""

from __future__ import annotations

import functools
import importlib
import warnings
from pathlib import Path

import torch

from .. import checks
from ..config import RouterConfig
from .base import Backend, Grads, Needs, differentiated, plain_inference

__all__ = ["BACKENDS", "Backend", "Grads", "Needs", "available", "check_name", "differentiated", "get",
           "plain_inference", "resolve", "routes"]

BACKENDS = {
    "reference": ("reference", "ReferenceBackend"),
    "torch": ("torch", "TorchBackend"),
    "native": ("native", "NativeBackend"),
    "triton": ("triton", "TritonBackend"),
}
_AUTO = {"cpu": ("native", "torch"), "cuda": ("triton", "torch")}


def check_name(backend: object) -> None:
    """TypeError or ValueError for what is neither "auto" nor a backend's name; whether it runs, `resolve` says."""
    checks.instance("backend", backend, str)
    checks.one_of("backend", backend, ("auto", *BACKENDS))


@functools.cache
def get(name: str) -> Backend:
    """The backend of that name (one instance a process). ValueError for a name that does not exist."""
    checks.one_of("backend", name, BACKENDS)
    module, cls = BACKENDS[name]
    return getattr(importlib.import_module(f".{module}", __name__), cls)()


@functools.cache
def available(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """None when backend `name` can run on this device and dtype here, else the reason."""
    try:
        return get(name).unavailable(device, dtype)
    except ImportError as error:
        return f"not built or not installed ({error})"


def routes(name: str, config_key: str, dtype: torch.dtype) -> bool:
    """Whether backend `name` has a differentiable router of its own (`route`, `route_backward`) for this config."""
    return _routes(name, config_key, dtype)


@functools.cache
def _routes(name: str, config_key: str, dtype: torch.dtype) -> bool:
    takes = getattr(get(name), "routes", None)
    return takes is not None and takes(RouterConfig.from_key(config_key), dtype)


def resolve(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that will run: "auto" takes the first available of native, torch on a CPU and triton, torch on a GPU.

    A backend asked for by name is taken or refused: ValueError with the reason, never another.
    """
    if not isinstance(backend, str):
        check_name(backend)
    return _resolve(backend, device, dtype)


# What torch.compiler.assume_constant_result does; calling it would import torch._dynamo here, for seconds.
resolve._dynamo_marked_constant = routes._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _resolve(backend: str, device: torch.device, dtype: torch.dtype) -> str:
    if backend == "auto":
        order = _AUTO.get(device.type, ("torch",))
        missing = available(order[0], device, dtype) or ""
        if "not built" in missing:
            _warn_of_slow_backend(missing)
        return next(name for name in order if available(name, device, dtype) is None)
    check_name(backend)
    reason = available(backend, device, dtype)
    if reason is not None:
        raise checks.bad("backend", f"one that runs on {device} in {dtype}", f"{backend!r}: {reason}")
    return backend


@functools.cache
def _warn_of_slow_backend(missing: str) -> None:
    """Once: what people meet who start Python in a clone, where the source tree hides the installed package."""
    warnings.warn(f"backend 'auto' runs torch, which is slower: {missing}. This moeffn is the one in "
                  f"{Path(__file__).parent.parent.parent}; a source tree has no compiled module", stacklevel=6)
