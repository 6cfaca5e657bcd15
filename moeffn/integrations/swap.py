"""Giving a module another forward in place: its object, parameters, buffers, hooks and base class all stay.

The instance's class becomes a subclass made for the purpose, so `isinstance` tests (transformers' output recorders,
weight initialisers, plans) still hold, and state dict keys cannot change. Such modules copy, pickle and save as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

Forward = Callable[..., Any]


@dataclass
class SwapState:
    """What a swapped module remembers: the adapter's name, the backend asked for, and the adapter's own reading."""

    adapter: str
    backend: str
    reading: Any = None


class Swapped:
    """First base of every swapped class. `_moeffn` is a plain attribute: no state dict sees it."""

    _moeffn: SwapState

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _rebuild, (original_class(self), self._moeffn.adapter), self.__dict__.copy()  # type: ignore[arg-type]


FORWARDS: dict[str, Forward] = {}


def adapter(name: str) -> Callable[[Forward], Forward]:
    """Registers forward(module, *args, **kwargs) as the forward of modules swapped under `name`."""

    def register(forward: Forward) -> Forward:
        FORWARDS[name] = forward
        return forward

    return register


def is_swapped(module: nn.Module) -> bool:
    return isinstance(module, Swapped)


def original_class(module: nn.Module) -> Any:
    """The class the module was built from."""
    mro = type(module).__mro__
    return mro[mro.index(Swapped) + 1] if Swapped in mro else mro[0]


def own_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of the class the module was built from."""
    return original_class(module).forward(module, *args, **kwargs)


def swap(module: nn.Module, state: SwapState) -> None:
    """Makes `module` run the adapter's forward. The caller has checked that it may."""
    module._moeffn = state  # type: ignore[assignment]
    base: Any = type(module)
    module.__class__ = _subclass(base, state.adapter)


@functools.cache
def _subclass(base: Any, name: str) -> Any:
    body = {"forward": FORWARDS[name], "__module__": __name__, "__doc__": f"{base.__name__}, its forward by moeffn."}
    return type(f"Moeffn{base.__name__}", (Swapped, base), body)


def _rebuild(base: Any, name: str) -> nn.Module:
    cls = _subclass(base, name)
    return cls.__new__(cls)
