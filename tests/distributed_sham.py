"""A second device without hardware: tensors with values on the CPU that say otherwise, and refuse to meet others.

    with Sham() as sham:
        y = layer(there(x))              there(x).device.type is not "cpu": the library takes its GPU branches;
                                         an operator given tensors of both devices raises, as on a GPU
    sham.to_host, sham.to_device         copies between the two, by operator: what makes a GPU wait or a graph fail

The device's name is "meta", because autograd runs that one in the thread that calls, as ranks in threads need.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
# Sizes and values of the device that the host asks for: each waits for all that was launched before.
READS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2", "bincount"}


class Away(torch.Tensor):
    """A tensor of the second device; `here` holds its values."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> Away:
        made = torch.Tensor._make_wrapper_subclass(cls, here.shape, strides=here.stride(), dtype=here.dtype,
                                                   storage_offset=here.storage_offset(), device=DEVICE)
        made.here = here
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} on the second device outside of Sham()")


def there(t: Tensor) -> Tensor:
    """A copy of t on the second device, not counted."""
    return Away(t.detach().clone())


def home(t: Any) -> Any:
    """The values of a tensor of the second device, not counted; anything else as it is."""
    return t.here if isinstance(t, Away) else t


def is_second(device: Any) -> bool:
    return device is not None and torch.device(device) == DEVICE


class Sham(TorchDispatchMode):
    """Runs on the CPU what the second device is asked to do; lists the copies between the two."""

    def __init__(self) -> None:
        super().__init__()
        self.to_host: list[str] = []
        self.to_device: list[str] = []
        self._made = _Made(self)

    def __enter__(self):
        self._made.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._made.__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = func.overloadpacket.__name__
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        away = any(isinstance(t, Away) for t in tensors)
        to_second = away if kwargs.get("device") is None else is_second(kwargs["device"])
        if name in ("_to_copy", "copy_"):
            source, to_second = (args[0], to_second) if name == "_to_copy" else (args[1], isinstance(args[0], Away))
            if isinstance(source, Away) != to_second:
                (self.to_device if to_second else self.to_host).append(name)
        elif away and any(t.dim() and not isinstance(t, Away) for t in tensors):
            raise RuntimeError(f"{func}: tensors of two devices")
        elif away and name in READS:
            self.to_host.append(name)
        if is_second(kwargs.get("device")):
            kwargs["device"] = "cpu"
        args, kwargs = tree_map(home, (args, kwargs))
        out = func(*args, **kwargs)
        return tree_map(lambda t: Away(t) if isinstance(t, Tensor) else t, out) if to_second else out


class _Made(TorchFunctionMode):
    """torch.tensor(…, device=second) makes a tensor on the host and copies it. (For "meta" torch drops the values.)"""

    def __init__(self, sham: Sham) -> None:
        super().__init__()
        self.sham = sham

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and is_second(kwargs.get("device")):
            self.sham.to_device.append(func.__name__)
            return Away(func(*args, **{**kwargs, "device": "cpu"}))
        return func(*args, **kwargs)
