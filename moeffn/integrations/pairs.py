"""BERT's form of the dense FFN: `intermediate` (up projection and activation) and `output` (down projection, dropout,
LayerNorm with the residual), called one after the other by their parent layer.

`intermediate` then hands its input through, and the first thing `output` does with it, its `dense` layer, becomes the
whole FFN. That is sound only if the parent gives what `intermediate` returns to `output` and to nothing else, which is
read in the parent's source, and if `output` gives it to `dense` first, which is tried.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import ffn, probe
from .swap import adapter, own_forward


@dataclass(frozen=True)
class PairReading:
    """The plan of the two projections, and the modules that hold them."""

    plan: ffn.DensePlan
    intermediate: nn.Module
    output: Any


class _Joined(nn.Module):
    """`intermediate` followed by `output.dense`, as one module."""

    def __init__(self, intermediate: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.intermediate, self.down = intermediate, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.intermediate(x))


def candidate(parent: nn.Module) -> bool:
    first, second = (getattr(parent, n, None) for n in ("intermediate", "output"))
    if not isinstance(first, nn.Module) or not isinstance(second, nn.Module):
        return False
    down = getattr(second, "dense", None)
    return len(ffn.linears(first)) == 1 and isinstance(down, nn.Linear) and ffn.candidate(_Joined(first, down))


def plan(parent: Any) -> PairReading | str:
    """The reading for a `candidate`, or why it must be left."""
    joined = _Joined(parent.intermediate, parent.output.dense)
    found = ffn.plan(joined)
    if isinstance(found, str):
        return found
    if found.w_out != "down" or found.noisy:
        return "its intermediate module does more than project and activate"
    if parent.output._forward_pre_hooks or "forward" in parent.output.__dict__:
        return "hooks on output would see another input"
    cls: Any = type(parent)
    if not _only_to_output(cls):
        return f"{type(parent).__name__} uses what its intermediate module returns elsewhere than in output(...)"
    if not _dense_first(parent.output):
        return "its output module does not give its first argument to dense"
    names = tuple(n.removeprefix("intermediate.") for n in found.w_in)
    held = tuple((path.removeprefix("intermediate."), value) for path, value in found.held)
    return PairReading(ffn.replace(found, w_in=names, w_out="", tail=(), held=held), parent.intermediate,
                       parent.output)


@functools.cache
def _only_to_output(cls: Any) -> bool:
    """Whether in the class's source all that `self.intermediate(...)` returns goes to `self.output(...)` alone."""
    seen = False
    for base in cls.__mro__:
        if base in (nn.Module, object):
            break
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            return False
        for function in (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name != "__init__"):
            uses = [n for n in ast.walk(function) if _is_self(n, "intermediate")]
            if not uses:
                continue
            seen = True
            calls = [n for n in ast.walk(function) if isinstance(n, ast.Call) and _is_self(n.func, "intermediate")]
            given = [n.args[0] for n in ast.walk(function)
                     if isinstance(n, ast.Call) and _is_self(n.func, "output") and n.args]
            if len(uses) != len(calls) or not all(c in given or _named_for(function, c, given) for c in calls):
                return False
    return seen


def _named_for(function: ast.FunctionDef, call: ast.Call, given: list[ast.expr]) -> bool:
    """Whether `call` is bound to a name that, until it is bound again, is read only as one of the nodes `given`."""
    for block in (getattr(n, "body", None) for n in ast.walk(function)):
        if not isinstance(block, list):
            continue
        for i, statement in enumerate(block):
            if not isinstance(statement, ast.Assign) or statement.value is not call:
                continue
            target = statement.targets[0]
            if block is not function.body or len(statement.targets) != 1 or not isinstance(target, ast.Name):
                return False
            for later in block[i + 1:]:
                reads = [n for n in ast.walk(later)
                         if isinstance(n, ast.Name) and n.id == target.id and isinstance(n.ctx, ast.Load)]
                if any(n not in given for n in reads):
                    return False
                bound = later.targets if isinstance(later, ast.Assign) else []
                if any(isinstance(t, ast.Name) and t.id == target.id for t in bound):
                    return True
            return True
    return False


def _is_self(node: ast.AST, name: str) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.value, ast.Name)
            and node.value.id == "self")


class _Recorder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return x.new_zeros(*x.shape[:-1], ffn.D)


@torch.no_grad()
def _dense_first(output: nn.Module) -> bool:
    """Whether output(h, residual) calls dense(h), once and with h itself."""
    recorder = _Recorder()
    ones = torch.ones(ffn.D, dtype=torch.float64, device="cpu")
    tensors = {n: ones.clone() for n, p in output.named_parameters() if p.ndim == 1}
    tensors.update({n: t for n, t in tensors.items() if not n.startswith("dense.")})

    def swap_out(name: str, child: nn.Module) -> nn.Module | None:
        if isinstance(child, nn.LayerNorm):
            return nn.Identity()
        return recorder if name == "dense" else None

    twin = probe.stand_in(output, tensors, replace=swap_out)
    h = probe.random(1, 2, ffn.F, seed=0)
    residual = probe.random(1, 2, ffn.D, seed=1)
    takes = [p for p in inspect.signature(type(output).forward).parameters.values() if p.default is p.empty]
    try:
        type(output).forward(twin, *(h, residual)[: len(takes) - 1])
    except Exception:
        return False
    return len(recorder.seen) == 1 and recorder.seen[0] is h


@adapter("pair_in")
def _pair_in(self: Any, hidden_states: Tensor) -> Tensor:
    p: PairReading = self._moeffn.reading
    return own_forward(self, hidden_states) if _own_now(p) else hidden_states


@adapter("pair_out")
def _pair_out(self: Any, input: Tensor) -> Tensor:
    p: PairReading = self._moeffn.reading
    if _own_now(p):
        return own_forward(self, input)
    return ffn.run(input, p.plan, _up(p), self)


def _up(p: PairReading) -> list[nn.Module]:
    return [p.intermediate.get_submodule(n) for n in p.plan.w_in]


def _own_now(p: PairReading) -> bool:
    return ffn.own_forward_now(p.intermediate, p.plan, [*_up(p), p.output.dense])
