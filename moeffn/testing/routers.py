"""check_router: the properties of a router, one method each."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Collection
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import checks, reference
from ..config import RouterConfig
from ..types import Routing
from .report import CheckReport, Skip, Subject, compare_gradient, evaluating, fail, run_properties

_NAN, _INF = float("nan"), float("inf")
_BAD_ROWS = {"all NaN": (_NAN, None), "one NaN": (_NAN, 1), "all +Inf": (_INF, None), "all -Inf": (-_INF, None)}
_PROPERTIES = ("valid", "oracle", "float32 selection", "ties", "bad rows", "token order", "one token", "determinism",
               "gradient", "router gradient", "empty batch")


def check_router(router: Any, *, num_experts: int | None = None, top_k: int | None = None,
                 config: RouterConfig | None = None, takes: Literal["logits", "tokens"] | None = None,
                 width: int | None = None, repeats: int = 3, skip: Collection[str] = ()) -> CheckReport:
    """Check a router: a function or nn.Module from x (T, width) to a Routing, or to a tuple that holds ids (T, K) of
    an integer dtype, floating weights (T, K) and, if it likes, logits (T, E), in any order.

    num_experts, top_k  needed unless `config` or a RouterConfig at `router.config` gives them
    config    what the router means to compute: then its choices and weights are compared with the oracle's. A function
              of (logits, config), such as `moeffn.route`, is called with it (default: RouterConfig of the two numbers)
    takes     "logits" or "tokens" (hidden states); default: tokens for an nn.Module, logits for a function
    width     columns of the input; default: those of the logits, or the last dimension of a module's first matrix
    repeats   runs that must be bitwise equal;  skip: names of properties not to check

    Properties: "valid" (distinct ids in range, finite weights, also for skewed input), "oracle", "float32 selection"
    (for logits: under autocast; for tokens: a bfloat16 copy chooses as float32 arithmetic on the same values does),
    "ties" (lowest id; without logits, of a copy of the module with parameters of zero), "bad rows" (NaN and Inf stay in
    their row), "token order", "one token", "determinism", "gradient" (float64 differences), "router gradient" (weights
    depend on the input at all), "empty batch".

    The router is checked in evaluation mode. Returns the report, which says what was skipped and why; raises
    AssertionError when a property does not hold, or when the router gives no answer at all.
    """
    if not callable(router):
        raise checks.bad_type("router", "a function or an nn.Module", router)
    name = getattr(router, "__name__", type(router).__name__)
    config = config or getattr(router, "config", None)
    config = config if isinstance(config, RouterConfig) else None
    if config is not None:
        num_experts, top_k = num_experts or config.num_experts, top_k or config.top_k
    for argument, value in (("num_experts", num_experts), ("top_k", top_k)):
        if value is None:
            raise checks.bad_type(argument, "an int, as the router has no RouterConfig at .config", None)
        checks.positive_int(argument, value)
    takes = takes or ("tokens" if isinstance(router, nn.Module) else "logits")
    checks.one_of("takes", takes, ("logits", "tokens"))
    if width is None and takes == "logits":
        width = config.num_logits if config else num_experts
    elif width is None and isinstance(router, nn.Module):
        width = next((p.shape[-1] for p in router.parameters() if p.ndim == 2), None)
    if width is None:
        raise checks.bad_type("width", "an int, as the router shows no matrix to read it from", None)
    checks.positive_int("width", width)
    assert num_experts is not None and top_k is not None and width is not None
    if _wants_config(router):
        config = config or RouterConfig(num_experts=num_experts, top_k=top_k)
        router = functools.partial(router, config=config)
    subject = _Router(router, width, num_experts, top_k, config, takes, repeats)
    try:
        with evaluating(router):
            return run_properties(f"router {name}", {n: getattr(subject, n.replace(" ", "_")) for n in _PROPERTIES},
                                  skip, answer=lambda: subject.read(subject.randn(4)))
    except AssertionError as failure:
        if subject.low or "FAILED   float32 selection" in str(failure) or "same dtype" in str(failure):
            raise AssertionError(f"{failure}\nhint: compute logits in float32 whatever the model is in") from None
        raise


def _wants_config(router: Any) -> bool:
    """Whether it is a function with a required argument `config`."""
    try:
        taken = inspect.signature(router).parameters.get("config")
    except (TypeError, ValueError):  # some callables of C have none
        return False
    return not isinstance(router, nn.Module) and taken is not None and taken.default is taken.empty


class _Router(Subject):
    def __init__(self, call: Any, width: int, num_experts: int, top_k: int, config: RouterConfig | None, takes: str,
                 repeats: int) -> None:
        super().__init__(call, width)
        self.E, self.K, self.config, self.takes, self.repeats = num_experts, top_k, config, takes, repeats
        self.low = False  # whether its weights came in 16 bits

    def read(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """ids (T, K), weights (T, K), logits (T, >= E) or None of a Routing, or of a tuple of tensors in any order."""
        answer = self.call(x)
        if isinstance(answer, Routing):
            return answer.experts.long(), answer.weights, answer.logits
        tensors = [t for t in answer if isinstance(t, Tensor)] if isinstance(answer, (tuple, list)) else []
        shape = (x.shape[0], self.K)
        ids = [t for t in tensors if tuple(t.shape) == shape and not t.dtype.is_floating_point]
        floats = [t for t in tensors if t.dtype.is_floating_point and t.ndim == 2 and t.shape[0] == x.shape[0]]
        weights = [t for t in floats if t.shape[1] == self.K]
        if not ids or not weights:
            fail(f"a Routing, or a tuple with integer ids and floating weights of shape {shape}",
                 [f"{t.dtype} {tuple(t.shape)}" for t in tensors] or type(answer).__name__)
        self.low |= weights[-1].dtype.itemsize < 4
        logits = [t for t in floats if t is not weights[-1] and t.shape[1] >= self.E]
        if self.takes == "logits":
            logits = [x]
        return ids[0].long(), weights[-1], logits[0] if logits else None

    def read_valid(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and weights after the checks that every answer must pass."""
        ids, weights, _ = self.read(x)
        if tuple(ids.shape) != (x.shape[0], self.K) or ids.shape != weights.shape:
            fail(f"ids and weights of shape {(x.shape[0], self.K)}", f"{tuple(ids.shape)} and {tuple(weights.shape)}")
        for t, row in enumerate(ids.tolist()):
            used = [e for e in row if e >= 0]
            if len(set(used)) != len(used) or any(not -1 <= e < self.E for e in row):
                fail(f"{self.K} distinct ids in 0..{self.E - 1} (-1: not routed)", row, t)
        wrong = ~weights.isfinite() | (weights < 0) | ((ids < 0) & (weights != 0))
        if bool(wrong.any()):
            t = int(wrong.any(1).nonzero()[0])
            fail("finite weights of at least 0, and 0 where the id is -1", weights[t].tolist(), t)
        return ids, weights

    def valid(self) -> None:
        for scale in (1.0, 30.0, 1e-4):
            self.read_valid(self.randn(200) * scale)
        self.read_valid(self.randn(1).expand(9, -1))

    def oracle(self) -> None:
        c = self.config
        if c is None:
            raise Skip("no RouterConfig given")
        ids, weights, logits = self.read(self.randn(50))
        if logits is None or logits.shape[1] != c.num_logits:
            raise Skip("the router does not return its logits")
        want = reference.route(logits.detach(), c, selection_bias=getattr(self.call, "selection_bias", None))
        order, want_order = (i.argsort(dim=1, stable=True) for i in (ids, want.experts))
        far = weights.gather(1, order) - want.weights.gather(1, want_order)
        wrong = (ids.gather(1, order) != want.experts.gather(1, want_order)) | (far.abs() > 1e-6 + 1e-4 * weights.abs())
        if bool(wrong.any()):
            t = int(wrong.any(1).nonzero()[0])
            fail(f"ids {want.experts[t].tolist()} with weights {want.weights[t].tolist()}",
                 f"{ids[t].tolist()} with {weights[t].tolist()}", t)

    def float32_selection(self) -> None:
        if self.takes == "logits":
            x = 8.0 + self.randn(400) * 1e-3  # nearer to one another than bfloat16 can tell
            got = self.read(x)[0]
            with torch.autocast(self.device.type, torch.bfloat16):
                _same_sets(got, self.read(x)[0], "the choice without autocast")
            best = x.argmax(1, keepdim=True)
            missed = ~(got == best).any(1)
            if self.config is None and bool(missed.any()):
                t = int(missed.nonzero()[0])
                fail(f"the expert of the largest float32 logit, {int(best[t])}, among those chosen", got[t].tolist(), t)
            return
        if not isinstance(self.call, nn.Module):
            raise Skip("a function of tokens has no copy in bfloat16")
        low = copy.deepcopy(self.call).to(torch.bfloat16)
        high = copy.deepcopy(low).float()
        x = self.randn(400).to(torch.bfloat16)
        want, got = (self.with_call(c).read(z)[0] for c, z in ((high, x.float()), (low, x)))
        _same_sets(want, got, "the choice of float32 arithmetic on the same bfloat16 values")

    def ties(self) -> None:
        bias = getattr(self.call, "selection_bias", None)
        if bias is not None and bool((bias != 0).any()):
            raise Skip("the router has a selection bias that is not zero")
        subject = self
        if self.read(self.randn(1))[2] is None:
            subject = self._zeroed()
        for T in (1, 7, 200):
            x = torch.zeros(T, self.width, dtype=self.dtype, device=self.device)
            ids, weights, logits = subject.read(x)
            if subject is not self:
                if not bool((weights == weights[:, :1]).all()):
                    raise Skip("the router returns no logits, and parameters of zero do not give it equal weights")
            elif logits is None or not bool((logits == logits[:, :1]).all()):
                raise Skip("an input of zeros does not give the router equal logits")
            want = torch.arange(self.K, device=ids.device)
            if self.config is not None:
                equal = torch.zeros(1, self.config.num_logits, device=ids.device) if logits is None else logits[:1]
                want = reference.route(equal.detach(), self.config).experts[0].long().sort().values
            wrong = (ids.sort(1).values != want).any(1)
            if bool(wrong.any()):
                t = int(wrong.nonzero()[0])
                fail(f"the lowest ids {want.tolist()} for equal logits (T = {T})", ids[t].tolist(), t)

    def _zeroed(self) -> _Router:
        """The router with parameters and floating buffers of zero: whatever it computes from them, its logits tie."""
        if not isinstance(self.call, nn.Module):
            raise Skip("the router returns no logits, and a function has no parameters to make them equal by")
        twin = copy.deepcopy(self.call)
        with torch.no_grad():
            for tensor in (*twin.parameters(), *twin.buffers()):
                if tensor.is_floating_point():
                    tensor.zero_()
        return self.with_call(twin)

    def bad_rows(self) -> None:
        for T in (5, 600):
            clean = self.randn(T)
            want_ids, want_weights, _ = self.read(clean)
            for what, (value, count) in _BAD_ROWS.items():
                x = clean.clone()
                x[T // 2, :count] = value
                try:
                    ids, weights = self.read_valid(x)
                except ValueError as error:
                    raise Skip(f"the router refuses such input ({error})") from None
                except AssertionError as failure:
                    raise AssertionError(f"row {T // 2} of {T} {what}: {failure}") from None
                others = torch.arange(T, device=ids.device) != T // 2
                wrong = ((ids != want_ids).any(1) | (weights != want_weights).any(1)) & others
                if bool(wrong.any()):
                    t = int(wrong.nonzero()[0])
                    fail(f"{want_ids[t].tolist()}, as without the row {T // 2} that is {what}", ids[t].tolist(), t)

    def token_order(self) -> None:
        x, order = self.randn(40), self.shuffled(40)
        self._same_routing(x, x[order], order, "the same routing when tokens change places")

    def one_token(self) -> None:
        x = self.randn(40)
        changed = x.clone()
        changed[17] = self.randn(1, seed=9)[0] * 3
        x_rest = torch.tensor([t for t in range(40) if t != 17], device=self.device)
        self._same_routing(x, changed, x_rest, "no change when only token 17 changes", among=x_rest)

    def _same_routing(self, x: Tensor, other: Tensor, index: Tensor, meaning: str, among: Tensor | None = None) -> None:
        """Routing of x[index] equals that of `other` (of its rows `among`)."""
        (ids, weights, _), (new_ids, new_weights, _) = self.read(x), self.read(other)
        if among is not None:
            new_ids, new_weights = new_ids[among], new_weights[among]
        far = (weights[index] - new_weights).abs() > 1e-6 + 1e-5 * weights[index].abs()
        wrong = (ids[index] != new_ids).any(1) | far.any(1)
        if bool(wrong.any()):
            i = int(wrong.nonzero()[0])
            t = int(index[i])
            fail(f"{meaning}: {ids[t].tolist()} with {weights[t].tolist()}",
                 f"{new_ids[i].tolist()} with {new_weights[i].tolist()}", t)

    def determinism(self) -> None:
        first: list[Any] = []
        for run in range(max(2, self.repeats)):
            x = self.randn(64).requires_grad_()
            ids, weights, _ = self.read(x)
            now = [ids, weights.detach()]
            if weights.requires_grad:
                now += torch.autograd.grad((weights * self.randn(64, self.K, seed=2)).sum(), x, allow_unused=True)
            first = first or now
            for what, a, b in zip(("ids", "weights", "gradient"), first, now, strict=False):
                if a is not None and not torch.equal(a, b):
                    t = int((a != b).any(1).nonzero()[0])
                    fail(f"{what} of the first run, {a[t].tolist()}", f"{b[t].tolist()} in run {run}", t)

    def gradient(self) -> None:
        wide, c = self.double(), self.randn(9, self.K, seed=4).double()
        if not isinstance(self.call, nn.Module):
            try:
                self.call(self.randn(9, seed=3).double())
            except (RuntimeError, TypeError, ValueError) as error:  # weights in its closure stay in their dtype
                raise Skip(f"the function takes no float64 ({error})") from None
        compare_gradient(wide, lambda x: (wide.read(x)[1] * c).sum(), self.randn(9, seed=3).double())

    def router_gradient(self) -> None:
        x = self.randn(9).requires_grad_()
        weights = self.read(x)[1]
        grad = None
        if weights.requires_grad:
            (grad,) = torch.autograd.grad((weights * self.randn(9, self.K, seed=4)).sum(), x, allow_unused=True)
        if grad is None or float(grad.abs().max()) < 1e-6:
            if self.E == 1:
                raise Skip("the weight of the only expert may be constant")
            fail("weights that depend on the input (with top_k = 1 renormalised weights are always 1)",
                 "no gradient" if grad is None else f"a gradient of at most {float(grad.abs().max()):.1e}")

    def empty_batch(self) -> None:
        ids, weights, _ = self.read(self.randn(0))
        if tuple(ids.shape) != (0, self.K) or tuple(weights.shape) != (0, self.K):
            fail(f"shapes {(0, self.K)} for T = 0", f"{tuple(ids.shape)} and {tuple(weights.shape)}")


def _same_sets(want: Tensor, got: Tensor, meaning: str) -> None:
    wrong = (want.sort(1).values != got.sort(1).values).any(1)
    if bool(wrong.any()):
        t, n = int(wrong.nonzero()[0]), int(wrong.sum())
        fail(f"{want[t].tolist()}, {meaning}", f"{got[t].tolist()} ({n} of {len(want)} tokens differ)", t)
