"""moeffn inside Hugging Face transformers: as an experts implementation, or in place of the FFNs of a model or block.

    register(); model.set_experts_implementation("moeffn")          families that follow transformers' experts contract
    report = replace_ffn(model); print(report.describe())           every MoE block, and every dense FFN

Both keep the model's own routers and parameters. Needs transformers 5.20 or later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

try:
    from transformers.integrations.moe import ExpertsInterface
except ImportError as error:
    raise ImportError("moeffn.integrations.transformers needs transformers 5.20 or later: pip install 'moeffn[hf]' "
                      f"({error})") from error

from .. import backends, checks
from ..config import RouterConfig
from . import experts as contract
from . import families, ffn, pairs
from .adapters import ADAPTERS
from .report import Left, Replaced, ReplacementReport
from .routers import family_router_config
from .swap import SwapState, is_swapped, original_class, swap

__all__ = ["Left", "Replaced", "ReplacementReport", "family_router_config", "register", "replace_ffn", "unsupported"]


def register(name: str = "moeffn", *, backend: str = "auto") -> None:
    """Adds moeffn to transformers' experts implementations under `name`, for the whole process.

    Then choose it by `experts_implementation=name` in `from_pretrained`, or `model.set_experts_implementation(name)`.
    Models with FP8 experts get a NotImplementedError when they run. Raises ValueError for an unknown backend.
    """
    backends.check_name(backend)

    def moeffn_experts_forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor,
                               top_k_weights: Tensor) -> Tensor:
        return contract.run(self, hidden_states, top_k_index, top_k_weights, backend)

    ExpertsInterface.register(name, moeffn_experts_forward)
    try:
        from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    except ImportError:  # before the second registry there was nothing to refuse
        return
    FP8ExpertsInterface.register(name, _no_fp8)


def _no_fp8(self: Any, *args: Any, **kwargs: Any) -> Tensor:
    raise NotImplementedError(f"moeffn has no FP8 experts: {type(self).__name__} holds quantised weights. Load it "
                              "dequantised, or choose another experts_implementation")


def unsupported() -> dict[str, str]:
    """Families that moeffn does not serve, with the reason."""
    return dict(families.UNSUPPORTED.values())


@dataclass
class _Step:
    """One swap that the plan wants: the module, what it becomes, and its line in the report."""

    module: nn.Module
    state: SwapState
    entry: Replaced | None


def replace_ffn(model: nn.Module, *, backend: str = "auto", moe: bool = True, dense: bool = True,
                on_unsupported: Literal["raise", "leave"] = "raise") -> ReplacementReport:
    """Makes the FFNs of `model` run on moeffn, in place: MoE blocks (`moe`) and dense FFNs (`dense`).

    `model` is a transformers model, one of its blocks, or any module with FFNs inside. Parameters, state dict keys,
    routers, return values and `save_pretrained` files stay what they were; `experts_implementation` no longer matters
    to what was replaced. Everything is planned and checked before anything changes: after an error the model is
    untouched. Dense FFNs run on plain torch whatever the backend, which the report says of each where another was asked
    for. What an earlier call replaced stays as it is and is listed as left; a model in which nothing else is to be done
    is no error.

    Hooks on blocks, routers and shared experts run as before. Those inside a MoE block's experts (on their activation,
    on a module of one expert) do not, as moeffn calls neither; a dense FFN with hooks inside, put there later, runs its
    own forward, of which a warning tells. An activation exchanged later is honoured, or refused by name.

    Raises ValueError when there is nothing to replace, when an earlier call replaced with another backend, when a MoE
    block is of an unsupported family or computes what moeffn cannot (`on_unsupported="leave"` lists both in the report
    instead), or when `backend` cannot run here.
    """
    checks.instance("model", model, nn.Module)
    backends.check_name(backend)
    checks.one_of("on_unsupported", on_unsupported, ("raise", "leave"))
    planner = _Planner(model, backend, moe, dense, on_unsupported)
    planner.walk("", model)
    if not planner.steps and not planner.replaced_before:
        reasons = "; ".join(f"{left.name or left.cls}: {left.reason}" for left in planner.left) or "it holds none"
        raise checks.bad("model", "a model or block with an FFN that moeffn can replace",
                         f"{type(model).__name__} ({reasons})")
    for step in planner.steps:
        swap(step.module, step.state)
    entries = tuple(step.entry for step in planner.steps if step.entry is not None)
    return ReplacementReport(entries, tuple(planner.left), backend)


class _Planner:
    def __init__(self, root: nn.Module, backend: str, moe: bool, dense: bool, on_unsupported: str) -> None:
        self.root, self.backend, self.moe, self.dense = root, backend, moe, dense
        self.lenient = on_unsupported == "leave"
        self.steps: list[_Step] = []
        self.left: list[Left] = []
        self.seen: set[nn.Module] = set()
        self.replaced_before = False

    def walk(self, name: str, module: nn.Module) -> None:
        if module in self.seen:
            return
        self.seen.add(module)
        taken: tuple[str, ...] = ()
        before = len(self.steps), len(self.left)
        cls = original_class(module).__name__
        if is_swapped(module):
            taken = ("*",)
            self.note_replaced(name, module)
        elif families.lookup(module, "router") is not None:
            taken = ("*",)
        elif cls in families.LEFT and families.from_transformers(original_class(module)):
            taken = ("*",)
            self.leave(name, module, families.LEFT[cls])
        elif cls in families.UNSUPPORTED and families.from_transformers(original_class(module)):
            taken = ("*",)
            if self.moe:
                self.refuse(name, module, families.UNSUPPORTED[cls][1])
        elif families.lookup(module, "swapped") is not None or contract.is_decorated(module):
            taken = self.plan_moe(name, module) if self.moe else ("*",)
        elif self.dense and ffn.candidate(module):
            taken = ("*",) if self.plan_dense(name, module) else ()
        elif self.dense and pairs.candidate(module):
            taken = self.plan_pair(name, module)
        if "*" in taken:
            return
        for child_name, child in module.named_children():
            if child_name not in taken:
                self.walk(f"{name}.{child_name}".lstrip("."), child)
        reason = ffn.unreachable(name, module) if self.dense and not taken else None
        if reason and before == (len(self.steps), len(self.left)):
            self.leave(name, module, reason)

    def leave(self, name: str, module: nn.Module, reason: str) -> None:
        self.left.append(Left(name, original_class(module).__name__, reason))

    def note_replaced(self, name: str, module: Any) -> None:
        earlier = module._moeffn.backend
        if earlier != self.backend and not self.lenient:
            raise checks.bad("backend", f"{earlier!r}, by which {name or 'the model'} is already replaced (load the "
                             "model anew to choose another)", repr(self.backend))
        self.replaced_before = True
        self.leave(name, module, f"already replaced (backend {earlier!r})")

    def refuse(self, name: str, module: nn.Module, reason: str) -> None:
        if not self.lenient:
            raise checks.bad("model", "MoE blocks that moeffn can replace", f"{name or 'the root'}, a "
                             f"{original_class(module).__name__}: {reason}")
        self.leave(name, module, reason)

    def plan_moe(self, name: str, module: nn.Module) -> tuple[str, ...]:
        row = families.lookup(module, "swapped")
        chosen = row.adapter if row is not None else "experts"
        adapter = ADAPTERS[chosen]
        problem = _moe_obstacle(module, row)
        reading: Any = None
        if problem is None:
            try:
                reading = adapter.read(module)
                self.resolve(module)
                if chosen == "experts" and contract.is_decorated(module):
                    contract.agree(module, reading)
            except ValueError as error:
                problem = str(error)
        if problem is not None:
            self.refuse(name, module, problem)
            return ("*",)
        routing = self.routing(module, row)
        entry = Replaced(name, "moe", type(module).__name__, families.family_of(module), reading.activation, routing,
                         adapter.note)
        self.steps.append(_Step(module, SwapState(chosen, self.backend, reading), entry))
        return adapter.takes

    def routing(self, module: nn.Module, row: families.Family | None) -> RouterConfig | None:
        if row is None or not row.routing:
            return None
        for source in (module, self.root):
            try:
                return family_router_config(source)
            except (ValueError, TypeError, AttributeError):  # a configuration that leaves its routing open
                continue
        return None

    def resolve(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            if parameter.device.type != "meta":
                backends.resolve(self.backend, parameter.device, parameter.dtype)

    def plan_dense(self, name: str, module: nn.Module) -> bool:
        found = ffn.plan(module)
        if isinstance(found, str):
            if ffn.looks_like_ffn(name, module):
                self.leave(name, module, found)
            return False
        entry = Replaced(name, "dense", type(module).__name__, families.family_of(module), found.activation,
                         note=_note(found, self.backend))
        self.steps.append(_Step(module, SwapState("dense", self.backend, found), entry))
        return True

    def plan_pair(self, name: str, parent: Any) -> tuple[str, ...]:
        found = pairs.plan(parent)
        if isinstance(found, str):
            self.leave(f"{name}.intermediate".lstrip("."), parent.intermediate, found)
            return ()
        note = "intermediate hands its input on; output.dense runs the FFN. " + _note(found.plan, self.backend)
        entry = Replaced(f"{name}.intermediate".lstrip("."), "dense", type(parent.intermediate).__name__,
                         families.family_of(parent), found.plan.activation, note=note.strip())
        self.steps.append(_Step(parent.intermediate, SwapState("pair_in", self.backend, found), entry))
        self.steps.append(_Step(parent.output.dense, SwapState("pair_out", self.backend, found), None))
        return ("intermediate", "output")


def _note(plan: ffn.DensePlan, backend: str) -> str:
    notes = []
    if backend not in ("auto", "torch"):
        notes.append(f"plain torch: backend {backend!r} is for experts")
    if plan.inner or plan.noisy:
        notes.append("in training with dropout between the projections, its own forward runs")
    if plan.optional:
        notes.append(f"its own forward runs when {' or '.join(plan.optional)} is given")
    return "; ".join(notes)


def _moe_obstacle(module: nn.Module, row: families.Family | None) -> str | None:
    if "forward" in module.__dict__:
        return ("its forward was replaced on the instance (expert parallelism and offloading do so); use register() "
                "and experts_implementation='moeffn' there")
    if contract.is_decorated(module):
        return None
    assert row is not None
    home: Any = next(c for c in type(module).__mro__ if families.from_transformers(c) and c.__name__ == row.swapped)
    if type(module).forward is home.forward:
        return None
    return f"{type(module).__name__} overrides the forward of {home.__name__}"
