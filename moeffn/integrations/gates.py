"""Which `Activation` a module computes: found by evaluating it, so that a clamp or a soft cap can never be overlooked.

Candidates are built from the numbers the module holds (limits, alphas, caps) and compared with what the module returns,
in float64, well beyond every limit. What agrees with no candidate is not recognised, and the caller says so.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..config import ACTIVATION_KINDS, Activation, Layout
from ..reference import activate

TOLERANCE = 2e-6  # relative: modules that compute in float32 inside agree to 1e-7, the two GELUs differ by 4e-4
_SHAPING = ("limit", "cap", "alpha", "beta", "clamp")
_cache: dict[Any, Activation | None] = {}


def attribute(module: Any, path: str) -> Any:
    """The attribute at a dotted path, None where there is none."""
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def module_of(module_id: int) -> Any:
    """The living module with this id: while torch 2.11's dynamo traces, an id is a constant and a module is none."""
    return ctypes.cast(module_id, ctypes.py_object).value


Held = tuple[tuple[str, Any], ...]


def hold(module: Any, *paths: str) -> Held:
    """The attributes at these paths as they are now, for `exchanged`."""
    return tuple((path, attribute(module, path)) for path in paths)


def exchanged(module: Any, held: Held) -> str | None:
    """The first path whose attribute is no longer the object held (numbers: no longer equal), or None."""
    for path, value in held:
        now = attribute(module, path)
        if now is not value and not (isinstance(value, (int, float)) and now == value):
            return path
    return None


def close(a: Tensor, b: Tensor, scale: Tensor | float = 1.0) -> bool:
    """Whether a equals b to TOLERANCE of `scale` or of the value, whichever is more; shapes must agree."""
    if a.shape != b.shape or not torch.isfinite(a).all():
        return False
    floor = torch.as_tensor(scale, dtype=torch.float64, device=b.device).clamp(min=1e-30)
    return bool(((a.double() - b.double()).abs() <= TOLERANCE * torch.maximum(b.double().abs(), floor)).all())


def numbers_of(*objects: Any) -> tuple[float, ...]:
    """Numbers by which an activation may be shaped: `shaping` of the objects (and of an activation's submodules), each
    once."""
    found: dict[float, None] = {}
    for obj in objects:
        for part in obj.modules() if isinstance(obj, nn.Module) and obj is not objects[0] else (obj,):
            found.update((float(value), None) for value in shaping(part).values())
    return tuple(found)


def shaping(obj: Any) -> dict[str, float]:
    """The positive floats among the object's plain attributes, and integers under a name that says limit, cap, alpha,
    beta or clamp."""
    found = {}
    for name, value in getattr(obj, "__dict__", {}).items():
        number = isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)
                                              and any(word in name for word in _SHAPING))
        if number and 0 < value < 1e6:
            found[name] = value
    return found


@torch.no_grad()
def elementwise(fn: Callable[[Tensor], Tensor]) -> Activation | None:
    """The ungated Activation that `fn` computes element by element, or None. Functions with parameters are None."""
    if isinstance(fn, nn.Module) and (any(True for _ in fn.parameters()) or any(True for _ in fn.buffers())):
        return None
    if not isinstance(fn, nn.Module):
        return _elementwise(fn)
    key = _identity(fn)
    if key not in _cache:
        _cache[key] = _elementwise(fn)
    return _cache[key]


def _identity(fn: Any) -> Any:
    """What two activations must share to be taken for one: the functions, classes and plain values they are made of."""
    if not isinstance(fn, nn.Module):
        return fn
    return tuple((type(part), repr(part), *((k, v) for k, v in part.__dict__.items()
                                            if isinstance(v, (int, float, str)) or inspect.isroutine(v)))
                 for part in fn.modules())


def _elementwise(fn: Callable[[Tensor], Tensor]) -> Activation | None:
    x = _probe_values(16.0)
    try:
        got = fn(x.clone())
    except Exception:
        return None
    if not isinstance(got, Tensor):
        return None
    for act in UNGATED:
        if close(got, activate(x, act, Layout.CONCAT), 1 + x.abs()):
            return act
    return None


@torch.no_grad()
def gate(fn: Callable[[Tensor], Tensor], numbers: Iterable[float], layout: Layout) -> Activation | None:
    """The gated Activation that fn: (S, 2F) -> (S, F) computes, its limits, alphas and caps in `numbers`; or None."""
    numbers = tuple(numbers)
    h = _probe_gate(layout, numbers)
    try:
        got = fn(h.clone())
    except Exception:
        return None
    if not isinstance(got, Tensor) or got.shape != (h.shape[0], h.shape[1] // 2):
        return None
    scale = 1 + activate(h.abs(), Activation(kind="identity"), layout)  # |gate * up|: what float32 inside rounds at
    return next((act for act in candidates(numbers) if close(got, activate(h, act, layout), scale)), None)


UNGATED = (*(Activation(kind=k, gated=False) for k in ACTIVATION_KINDS),  # type: ignore[arg-type]
           Activation(kind="silu", alpha=1.702, gated=False))


def candidates(numbers: tuple[float, ...]) -> Iterable[Activation]:
    """Gated activations that a module holding these numbers may compute, plain ones first."""
    for kind in ACTIVATION_KINDS:
        yield Activation(kind=kind)  # type: ignore[arg-type]
    limits = [None, *numbers]
    kinds = [(k, 1.0) for k in ACTIVATION_KINDS] + [("silu", a) for a in (1.702, *numbers) if a != 1.0]
    for (kind, alpha), limit, after, offset in itertools.product(kinds, limits, (False, True), (0.0, 1.0)):
        if limit is None and after:
            continue
        yield Activation(kind=kind, alpha=alpha, limit=limit, limit_after=after, up_offset=offset)  # type: ignore[arg-type]
    for cap_gate, cap_up in itertools.product([None, *numbers], repeat=2):
        if cap_gate or cap_up:
            yield Activation(softcap_gate=cap_gate, softcap_up=cap_up)


def _probe_values(span: float) -> Tensor:
    """Both signs, small, around one, and beyond `span`; float64 on the CPU, free of special values."""
    steps = torch.linspace(-1.0, 1.0, 61, dtype=torch.float64, device="cpu")
    return torch.cat([steps * 0.37, steps * 3.1, steps * span * 1.9])


def _probe_gate(layout: Layout, numbers: tuple[float, ...]) -> Tensor:
    values = _probe_values(max([8.0, *numbers]))
    n = values.numel()
    up = values[torch.arange(n, device="cpu") * 58 % n]  # 58 and 183 have no common divisor: every value once
    both = (values, up) if layout is Layout.CONCAT else None
    rows = torch.stack([values.roll(i) for i in range(3)]), torch.stack([up.roll(2 * i) for i in range(3)])
    return torch.cat(rows, 1) if both else torch.stack(rows, 2).flatten(1)


def of_experts(experts: Any, layout: Layout) -> Activation | None:
    """The Activation of a module with transformers' experts contract: `has_gate`, `act_fn`, `_apply_gate`."""
    if not getattr(experts, "has_gate", True):
        act = getattr(experts, "act_fn", None)
        return None if act is None else elementwise(act)
    own = getattr(experts, "_apply_gate", None)
    if own is None:
        return None
    own = getattr(own, "__func__", own)
    numbers = numbers_of(experts, getattr(experts, "act_fn", None))
    key = (own, layout, _identity(getattr(experts, "act_fn", None)), numbers)
    if key not in _cache:
        _cache[key] = gate(experts._apply_gate, numbers, layout)
    return _cache[key]
