"""Dense FFNs inside a model: found by their shape, accepted only when their own code agrees with `dense_ffn`.

A candidate holds two linear layers (F, D), (D, F), or (2F, D), (D, F), or three, and no other parameters. Which is gate
and which is up, the layout, the activation with its clamp, and where dropout sits are settled by running the module's
code on a float64 stand-in, never by names.
"""

from __future__ import annotations

import inspect
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.pytorch_utils import Conv1D

from ..config import Activation, Layout
from ..dense import dense_ffn
from ..reference import activate
from . import gates, probe
from .swap import adapter, own_forward

D, F = 12, 10  # sizes of the stand-in
_REASON_MATHS = ("its own code does not compute a two- or three-matrix FFN with an activation that moeffn.Activation "
                 "expresses")


@dataclass(frozen=True)
class DensePlan:
    """How to run one dense FFN. w_in: names of the linear layers (one, or gate and up); up_first: the fused layer holds
    up before gate; tail: dropout after w_out; inner: dropouts elsewhere, noisy: randomness in training without a
    module; with either active in training the module's own forward runs. takes: names of the forward's arguments, x and
    possibly a residual that is added; optional: further ones, which when given make the module's own forward run.
    held: the activation and what else the module's code may call, by attribute path; when one of them was exchanged
    the module's own forward runs."""

    w_in: tuple[str, ...]
    w_out: str
    activation: Activation
    layout: Layout = Layout.CONCAT
    up_first: bool = False
    tail: tuple[str, ...] = ()
    inner: tuple[str, ...] = ()
    noisy: bool = False
    takes: tuple[str, ...] = ("x",)
    optional: tuple[str, ...] = ()
    held: gates.Held = field(default=(), repr=False, compare=False)

    @property
    def residual(self) -> bool:
        return len(self.takes) == 2


def linears(module: nn.Module) -> dict[str, nn.Module]:
    return {n: m for n, m in module.named_modules() if isinstance(m, (nn.Linear, Conv1D)) and n}


def sizes(layer: Any) -> tuple[int, int]:
    """(out, in) of a linear layer or a GPT-2 Conv1D, which stores its weight transposed."""
    rows, cols = layer.weight.shape
    return (cols, rows) if isinstance(layer, Conv1D) else (rows, cols)


def weight(layer: Any) -> Tensor:
    """The weight (out, in), a view."""
    return layer.weight.t() if isinstance(layer, Conv1D) else layer.weight


def candidate(module: nn.Module) -> bool:
    """Whether the module has the outline of a dense FFN: its linear layers alone hold parameters, with FFN shapes."""
    found = linears(module)
    if len(found) not in (2, 3) or any(layer.weight.ndim != 2 for layer in found.values()):  # type: ignore[union-attr]
        return False
    held = {n for n, _ in module.named_parameters()}
    return held <= {f"{n}.{p}" for n in found for p in ("weight", "bias")} and any(True for _ in _orders(found))


def _orders(found: dict[str, nn.Module]) -> Iterator[tuple[tuple[str, ...], str, bool]]:
    """Every reading of the shapes: (w_in names, w_out name, whether w_in is fused or a pair, hence gated)."""
    for *w_in, w_out in itertools.permutations(found):
        shapes = {sizes(found[n]) for n in w_in}
        width, hidden = sizes(found[w_out])
        if len(shapes) != 1:
            continue
        rows, cols = shapes.pop()
        if cols != width:
            continue
        if rows == hidden:
            yield tuple(w_in), w_out, len(w_in) == 2
        elif rows == 2 * hidden and len(w_in) == 1:
            yield tuple(w_in), w_out, True


def plan(module: nn.Module) -> DensePlan | str:
    """The plan for a `candidate`, or the reason why it must be left as it is."""
    found = linears(module)
    blocked = obstacle(module, found)
    if blocked:
        return blocked
    numbers = gates.numbers_of(module, *(m for m in module.children() if not list(m.parameters())))
    for w_in, w_out, gated in _orders(found):
        outcome = _try(module, found, w_in, w_out, gated, numbers)
        if outcome is not None:
            return replace(outcome, held=tuple(_held(module)))
    return _REASON_MATHS


def obstacle(module: nn.Module, found: dict[str, nn.Module]) -> str | None:
    """Why a module cannot be replaced whatever it computes: hooks, patched forwards, other arguments, dtypes."""
    for name, part in module.named_modules():
        if "forward" in part.__dict__:
            return f"forward was replaced on the instance{' of ' + name if name else ''}"
        if name and _hooked(part):
            return f"hooks on {name} would no longer run"
    kinds = {layer.weight.dtype for layer in found.values()}
    if len(kinds) > 1 or not next(iter(kinds)).is_floating_point:
        return f"its projections are {', '.join(sorted(str(k) for k in kinds))}"
    required, _ = arguments(module)
    if not 1 <= len(required) <= 2:
        return f"its forward takes other arguments: {', '.join(required[1:]) or 'none at all'}"
    return None


def arguments(module: nn.Module) -> tuple[list[str], tuple[str, ...]]:
    """Names of the arguments that the module's forward requires, and of those that default to None."""
    given = list(inspect.signature(type(module).forward).parameters.values())[1:]
    given = [p for p in given if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    required = [p.name for i, p in enumerate(given) if i == 0 or p.default is not None]
    return required, tuple(p.name for p in given if p.name not in required)


def _try(module: nn.Module, found: dict[str, nn.Module], w_in: tuple[str, ...], w_out: str, gated: bool,
         numbers: tuple[float, ...]) -> DensePlan | None:
    rows = 2 * F if gated and len(w_in) == 1 else F
    tensors, layers = {}, {}
    for i, name in enumerate((*w_in, w_out)):
        shape = (D, F) if name == w_out else (rows, D)
        w = probe.random(*shape, seed=i) / shape[1] ** 0.5
        b = None if getattr(found[name], "bias", None) is None else probe.random(shape[0], seed=10 + i)
        tensors[f"{name}.weight"] = w.t().contiguous() if isinstance(found[name], Conv1D) else w
        if b is not None:
            tensors[f"{name}.bias"] = b
        layers[name] = (w, b)
    scale = torch.tensor([0.2, 1.0, 4.0, 25.0 + 3.0 * max((1.0, *numbers))], dtype=torch.float64, device="cpu")[:, None]
    x = probe.random(2, 4, D, seed=20) * scale
    required, optional = arguments(module)
    residual = probe.random(2, 4, D, seed=21) * scale if len(required) == 2 else None
    out = _own(module, x, tensors, found, residual=residual)
    if out is None or out.shape != x.shape:
        return None
    got = out if residual is None else out - residual
    h = [linear(x, *layers[n]) for n in w_in]
    down = layers[w_out]
    for act, layout, up_first in _readings(gated, len(h), numbers):
        if len(h) == 2:
            pre = torch.cat(h, -1)
        else:
            pre = torch.cat([h[0][..., F:], h[0][..., :F]], -1) if up_first else h[0]
        want = linear(activate(pre, act, layout), *down)
        if gates.close(got, want, want.abs().amax(-1, keepdim=True)):
            plan = DensePlan(w_in, w_out, act, layout, up_first, takes=tuple(required), optional=optional)
            return _with_dropout(plan, module, lambda **how: _own(module, x, tensors, found, residual=residual, **how))
    return None


def _readings(gated: bool, parts: int, numbers: tuple[float, ...]) -> Iterator[tuple[Activation, Layout, bool]]:
    if not gated:
        yield from ((replace(a, gated=False), Layout.CONCAT, False) for a in gates.UNGATED)
        return
    for act in gates.candidates(numbers):
        yield act, Layout.CONCAT, False
        if parts == 1:
            yield act, Layout.CONCAT, True
            yield act, Layout.INTERLEAVED, False


@torch.no_grad()
def _own(module: nn.Module, x: Tensor, tensors: dict[str, Tensor], found: dict[str, nn.Module], *,
         residual: Tensor | None = None, factors: dict[str, float] | None = None, training: bool = False
         ) -> Tensor | None:
    """The module's own code on a stand-in, dropouts multiplied by `factors` (1 by default); None where it fails."""

    def swap_out(name: str, child: nn.Module) -> nn.Module | None:
        return probe.Scale((factors or {}).get(name, 1.0)) if is_dropout(child) else None

    twin = probe.stand_in(module, tensors, training=training, replace=swap_out)
    for name, layer in found.items():
        if isinstance(layer, Conv1D):
            twin.get_submodule(name).nf = tensors[f"{name}.weight"].shape[1]
    try:
        out = type(module).forward(twin, *(t.clone() for t in (x, residual) if t is not None))
    except Exception:
        return None
    return out if isinstance(out, Tensor) else None


def _held(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules without parameters and functions that the module's code may call, dropouts left out."""
    for path, part in module.named_modules():
        if path and not is_dropout(part) and not any(True for _ in part.parameters()):
            yield path, part
        for name, value in vars(part).items():
            if inspect.isroutine(value) and not name.startswith("_"):
                yield f"{path}.{name}".lstrip("."), value


def is_dropout(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd)


def _with_dropout(plan: DensePlan, module: nn.Module, own: Callable[..., Tensor | None]) -> DensePlan:
    """The plan with the places of the module's dropouts, found by `own`, its code on the stand-in."""
    out = own()
    assert out is not None
    tail: list[str] = []
    inner: list[str] = []
    for name in (n for n, m in module.named_modules() if is_dropout(m)):
        doubled = own(factors={name: 2.0})
        at_end = doubled is not None and torch.equal(doubled, out * 2)
        (tail if at_end else inner).append(name)
    with torch.random.fork_rng(devices=[]):
        trained = [own(training=True) for _ in range(2)]
    noisy = any(t is None or not torch.equal(t, out) for t in trained)
    return replace(plan, tail=tuple(tail), inner=tuple(inner), noisy=noisy)


@adapter("dense")
def _dense(self: Any, *args: Tensor, **kwargs: Any) -> Tensor:
    p: DensePlan = self._moeffn.reading
    x, *residual = [args[i] if i < len(args) else kwargs[name] for i, name in enumerate(p.takes)]
    extra = [*args[len(p.takes):], *(kwargs.get(name) for name in p.optional)]
    layers = [self.get_submodule(n) for n in (*p.w_in, p.w_out)]
    if own_forward_now(self, p, layers) or any(value is not None for value in extra):
        return own_forward(self, *args, **kwargs)
    y = run(x, p, layers[:-1], layers[-1])
    for name in p.tail:
        y = self.get_submodule(name)(y)
    return y + residual[0] if residual else y


def run(x: Tensor, p: DensePlan, layers: list[Any], out: Any) -> Tensor:
    """`dense_ffn` on the modules' parameters, as views."""
    w = tuple(weight(layer) for layer in layers)
    b = tuple(layer.bias for layer in layers)
    if p.up_first:
        half = w[0].shape[0] // 2
        w = (w[0][half:], w[0][:half])
        b = (None,) if b[0] is None else (b[0][half:], b[0][:half])
    if len(b) == 2 and (b[0] is None) != (b[1] is None):  # a projection was exchanged since
        b = tuple(torch.zeros_like(v[:, 0]) if u is None else u for u, v in zip(b, w, strict=True))
    b_in = None if b[0] is None else b if len(b) == 2 else b[0]
    return dense_ffn(x, w if len(w) == 2 else w[0], weight(out), b_in=b_in, b_out=out.bias, activation=p.activation,
                     layout=p.layout)


def own_forward_now(module: Any, p: DensePlan, layers: list[Any]) -> bool:
    """Whether the module's own forward must run: training noise between the projections, or, since the replacement,
    projections wrapped or hooked (adapters such as LoRA) or an activation exchanged or hooked, of which a warning tells
    once."""
    if module.training and (p.noisy or any(module.get_submodule(n).p > 0 for n in p.inner)):
        return True
    for layer in layers:
        if not isinstance(layer, (nn.Linear, Conv1D)) or _hooked(layer):
            _warn(module, f"a projection of {type(module).__name__} ({type(layer).__name__}) was wrapped or hooked")
            return True
    changed = gates.exchanged(module, p.held) or next((path for path, part in p.held if _hooked(part)), None)
    if changed is not None:
        _warn(module, f"{changed} of {type(module).__name__} was exchanged or hooked")
    return changed is not None


def _hooked(part: Any) -> bool:
    return isinstance(part, nn.Module) and bool(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks)


def _warn(module: Any, what: str) -> None:
    if not module.__dict__.get("_moeffn_warned"):
        module.__dict__["_moeffn_warned"] = True
        warnings.warn(f"{what} after replace_ffn: the module's own forward runs instead of moeffn's", stacklevel=4)


_INLINE = (("fc1", "fc2"), ("linear1", "linear2"), ("ffn", "ffn_output"), ("lin1", "lin2"))
_FFN_NAME = re.compile(r"mlp|ffn|ff$|^ff|feed|glu|dense|expert|intermediate", re.IGNORECASE)


def looks_like_ffn(name: str, module: nn.Module) -> bool:
    """Whether its name or class says FFN: what the report mentions when it is left."""
    return bool(_FFN_NAME.search(name.rpartition(".")[2]) or _FFN_NAME.search(type(module).__name__))


def unreachable(name: str, module: nn.Module) -> str | None:
    """Why what is clearly an FFN is no candidate: it holds other parameters, or a layer computes it in its own forward
    (BART, OPT); None where there is no FFN."""
    found = linears(module)
    if len(found) in (2, 3) and looks_like_ffn(name, module) and all(m.weight.ndim == 2 for m in found.values()):  # type: ignore[union-attr]
        held = {n: p.ndim for n, p in module.named_parameters()}
        others = held.keys() - {f"{n}.{p}" for n in found for p in ("weight", "bias")}
        if others and max(held[n] for n in others) < 2 and any(True for _ in _orders(found)):
            return f"it holds other parameters than its projections': {', '.join(sorted(others))}"
    for first, second in _INLINE:
        pair = [getattr(module, n, None) for n in (first, second)]
        if all(isinstance(p, nn.Linear) for p in pair):
            (rows, cols), (width, hidden) = (sizes(p) for p in pair)
            if (rows, cols) == (hidden, width):
                return f"it runs {first} and {second} in its own forward: there is no FFN module to swap"
    return None
