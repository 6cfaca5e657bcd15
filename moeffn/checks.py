"""Every message a user can get for a bad argument: it names the argument, what was expected and what came."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def bad(name: str, expected: str, got: object) -> ValueError:
    """The ValueError for an argument `name`; the caller raises it."""
    return ValueError(f"{name}: expected {expected}, got {got}")


def bad_type(name: str, expected: str, got: object) -> TypeError:
    """The TypeError for an argument `name`; the caller raises it."""
    return TypeError(f"{name}: expected {expected}, got {type(got).__name__} {got!r:.80}")


def only_reference(does: str) -> NotImplementedError:
    """The error for what no backend but the reference does; the caller raises it."""
    return NotImplementedError(f"backend: expected 'reference', which alone {does}, got another")


def one_of(name: str, value: object, allowed: Iterable[object]) -> None:
    allowed = tuple(allowed)
    if value not in allowed:
        raise bad(name, "one of " + ", ".join(repr(a) for a in allowed), repr(value))


def positive_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad_type(name, "an int", value)
    if value < 1:
        raise bad(name, "at least 1", value)


def non_negative_int(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad_type(name, "an int", value)
    if value < 0:
        raise bad(name, "at least 0", value)


def positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise bad_type(name, "a number", value)
    if not value > 0:
        raise bad(name, "a number above 0", value)


def finite(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise bad_type(name, "a number", value)
    if not math.isfinite(value):
        raise bad(name, "a finite number", value)


def non_negative(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise bad_type(name, "a number", value)
    if not 0 <= value < math.inf:
        raise bad(name, "a number of at least 0", value)


def instance(name: str, value: object, cls: type | tuple[type, ...]) -> None:
    if not isinstance(value, cls):
        names = " or ".join(c.__name__ for c in (cls if isinstance(cls, tuple) else (cls,)))
        raise bad_type(name, names, value)


def layout(name: str, value: object, cls: Any) -> Any:
    if isinstance(value, cls):
        return value
    try:
        return cls(value)
    except ValueError:
        raise bad(name, "'concat' or 'interleaved'", repr(value)) from None


def tensor(name: str, value: object, ndim: int | None = None) -> None:
    import torch

    if not isinstance(value, torch.Tensor):
        raise bad_type(name, "a torch.Tensor", value)
    if value.layout != torch.strided or value.is_nested:
        raise bad_type(name, "a dense tensor", value if value.is_nested else value.layout)
    if ndim is not None and value.ndim != ndim:
        raise bad(name, f"{ndim} dimensions", f"shape {tuple(value.shape)}")


def shape(name: str, value: Tensor, expected: tuple[int, ...], meaning: str) -> None:
    if tuple(value.shape) != expected:
        raise bad(name, f"shape {expected} = {meaning}", f"shape {tuple(value.shape)}")


def floating(name: str, value: Tensor) -> None:
    if not value.dtype.is_floating_point:
        raise bad_type(name, "a floating-point dtype", value.dtype)
    if value.dtype.itemsize < 2:  # float8 and float4 hold values of a quantised format: their scales are elsewhere
        raise bad_type(name, "float16, bfloat16, float32 or float64", value.dtype)


def index_dtype(name: str, value: Tensor) -> None:
    import torch

    if value.dtype not in (torch.int32, torch.int64):
        raise bad_type(name, "int32 or int64", value.dtype)


def boolean(name: str, value: Tensor) -> None:
    import torch

    if value.dtype != torch.bool:
        raise bad_type(name, "dtype bool", value.dtype)


def float32(name: str, value: Tensor) -> None:
    import torch

    if value.dtype != torch.float32:
        raise bad_type(name, "dtype float32", value.dtype)


def integer(name: str, value: Tensor) -> None:
    if value.dtype.is_floating_point or value.dtype.is_complex:
        raise bad_type(name, "an integer dtype", value.dtype)


def ids_in_range(name: str, value: Tensor, classes: int) -> None:
    """Ids of 0 .. classes - 1. Looked at on a CPU only: elsewhere it would make the host wait for the device."""
    import torch

    if value.device.type != "cpu" or torch.compiler.is_compiling() or not value.numel():
        return
    low, high = (int(v) for v in value.aminmax())
    if low < 0 or high >= classes:
        raise bad(name, f"ids of 0 .. {classes - 1}", f"{low} .. {high}")


def same_device(name: str, value: Tensor, device: Any, other: str) -> None:
    if value.device != device:
        raise bad(name, f"device {device} (that of {other})", f"device {value.device}")
