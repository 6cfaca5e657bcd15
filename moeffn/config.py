"""Frozen, keyword-only configuration objects. They validate themselves once, on construction, and hold no tensors."""

from __future__ import annotations

import ast
import enum
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal

from . import checks

ActivationKind = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "identity"]
ACTIVATION_KINDS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "identity")

STAND_IN = 1e30  # routers read +Inf logits as this, -Inf and NaN as its negative
NORM_FLOOR = 1e-30  # what weights are divided by at least, so that a row of zeros stays zero

_ACTIVATION_FIELDS = ("kind", "gated", "alpha", "limit", "limit_after", "up_offset", "softcap_gate", "softcap_up")
_NOT_NUMBERS = ("kind", "gated", "limit_after")


def _brief(config: Any, *always: str) -> str:
    """The fields without a default, those named, and those that differ from their default: what is enough to rebuild
    it."""
    shown = [f.name for f in fields(config) if f.init
             and (f.name in always or f.default is MISSING or getattr(config, f.name) != f.default)]
    return f"{type(config).__name__}({', '.join(f'{n}={getattr(config, n)!r}' for n in shown)})"


class Layout(str, enum.Enum):
    """Order of the gate and up rows of a gated `w_in` (E, 2F, D). Stated by the caller, never guessed from a shape.

    CONCAT: rows 0..F-1 are the gate, rows F..2F-1 the up projection. INTERLEAVED: g0, u0, g1, u1, … (gpt-oss).
    """

    CONCAT = "concat"
    INTERLEAVED = "interleaved"

    def __repr__(self) -> str:
        return f"Layout.{self.name}"


@dataclass(frozen=True, kw_only=True)
class Activation:
    """What an expert does between its two projections.

    Not gated: `act(h)`. Gated: `act(g) * (u + up_offset)` with g, u the two halves of the pre-activation.

    kind          silu | gelu (erf) | gelu_tanh | relu | relu2 (relu squared) | sigmoid | identity
    alpha         silu only: `g * sigmoid(alpha * g)`; 1.702 is gpt-oss and "quick GELU"
    limit         clamp, gated kinds: the gate from above at `limit`, up to [-limit, limit] (gpt-oss, DeepSeek V4)
    limit_after   with `limit`: the gate's clamp falls on `act(g)` instead of g (Step 3.7)
    up_offset     added to up after the clamp (gpt-oss: 1)
    softcap_gate, softcap_up
                  gated silu only: `c*tanh(g/c)*sigmoid(g)` and `c*tanh(u/c)` (soft-capped SwiGLU)

    Raises ValueError for a combination that has no meaning.
    """

    kind: ActivationKind = "silu"
    gated: bool = True
    alpha: float = 1.0
    limit: float | None = None
    limit_after: bool = False
    up_offset: float = 0.0
    softcap_gate: float | None = None
    softcap_up: float | None = None
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.one_of("Activation.kind", self.kind, ACTIVATION_KINDS)
        checks.instance("Activation.gated", self.gated, bool)
        checks.instance("Activation.limit_after", self.limit_after, bool)
        checks.finite("Activation.up_offset", self.up_offset)
        checks.positive("Activation.alpha", self.alpha)
        for name in ("limit", "softcap_gate", "softcap_up"):
            if getattr(self, name) is not None:
                checks.positive(f"Activation.{name}", getattr(self, name))
        if self.alpha != 1.0 and self.kind != "silu":
            raise checks.bad("Activation.alpha", "1.0 unless kind is 'silu'", f"{self.alpha} with kind {self.kind!r}")
        if not self.gated and (self.limit or self.up_offset or self.softcap_up or self.softcap_gate):
            raise checks.bad("Activation", "limit, up_offset and softcaps only with gated=True", "gated=False")
        if (self.softcap_gate or self.softcap_up) and (self.kind != "silu" or self.limit or self.alpha != 1.0):
            raise checks.bad("Activation.softcap_*", "kind 'silu', alpha 1, no limit", f"{self}")
        if self.limit_after and self.limit is None:
            raise checks.bad("Activation.limit_after", "a limit to apply", "limit=None")
        object.__setattr__(self, "key", "|".join([str(getattr(self, name)) for name in _ACTIVATION_FIELDS]))

    def __repr__(self) -> str:
        return _brief(self, "kind")

    @staticmethod
    def from_key(key: str) -> Activation:
        """The activation whose `key` (its fields as one string, for operators that take no objects) this is."""
        values = dict(zip(_ACTIVATION_FIELDS, key.split("|"), strict=True))
        numbers = {n: None if v == "None" else float(v) for n, v in values.items() if n not in _NOT_NUMBERS}
        flags = {n: values[n] == "True" for n in ("gated", "limit_after")}
        return Activation(kind=values["kind"], **flags, **numbers)  # type: ignore[arg-type]

    def width_in(self, d_expert: int) -> int:
        """Rows of `w_in` for hidden width F: 2F gated, else F."""
        return 2 * d_expert if self.gated else d_expert


SWIGLU = Activation(kind="silu")
GEGLU = Activation(kind="gelu")
GEGLU_TANH = Activation(kind="gelu_tanh")
REGLU = Activation(kind="relu")
GLU = Activation(kind="sigmoid")
BILINEAR = Activation(kind="identity")
SWIGLU_OAI = Activation(kind="silu", alpha=1.702, limit=7.0, up_offset=1.0)

Score = Literal["softmax", "sigmoid", "sqrtsoftplus", "sparsemixer", "joint_logsigmoid"]
SCORES = ("softmax", "sigmoid", "sqrtsoftplus", "sparsemixer", "joint_logsigmoid")


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How logits (T, E + Z) become k experts and their weights. Defaults: softmax over all, top-k, no renormalisation.

    num_experts, top_k
    score          softmax | sigmoid | sqrtsoftplus (sqrt(softplus)) | sparsemixer (Phi-3.5-MoE, k = 2) |
                   joint_logsigmoid (selection by sigmoid; weights a softmax over the log-sigmoids of the k selected and
                   `num_shared` shared logits, which are the last columns: Inkling)
    order          "score_topk": score all, pick the top k scores; "topk_score": pick the top k logits, score those
                   (softmax over the k, sigmoid each)
    num_groups, topk_groups, group_reduce, group_fill
                   group-limited choice: keep the best `topk_groups` of `num_groups` equal groups; a group's worth is
                   the "max" or the "sum_top2" of its (biased) scores; experts elsewhere get "zero" (a negative biased
                   score then loses to them, as in DeepSeek V2) or "neg_inf" (never chosen, DeepSeek V3)
    renormalize    divide the k weights by their sum (`norm_p` = 1) or p-norm; `renorm_eps` is added to the sum
                   ("add") or its floor ("clamp")
    scale          multiplies the final weights once
    logit_softcap  c*tanh(l/c) before scoring;  logit_scale multiplies the logits before that
    jitter_eps     sparsemixer's mask threshold
    num_identity_experts, identity_kind
                   Z extra router classes with ids E..E+Z-1 that cost no weights: "identity" adds weight * x
                   (LongCat-Flash), "skip" adds nothing (Zaya)
    num_shared     shared experts weighted by the router (joint_logsigmoid only)
    apply_to       "output" (default) or "input": weights scale what enters the experts (Llama 4)

    A selection bias is an argument of `route`, added to what is ranked (scores, or logits for "topk_score") and never
    to the weights. Raises ValueError naming the fields for impossible values.
    """

    num_experts: int
    top_k: int
    score: Score = "softmax"
    order: Literal["score_topk", "topk_score"] = "score_topk"
    num_groups: int = 1
    topk_groups: int = 1
    group_reduce: Literal["max", "sum_top2"] = "sum_top2"
    group_fill: Literal["neg_inf", "zero"] = "neg_inf"
    renormalize: bool = False
    norm_p: float = 1.0
    renorm_eps: float = 0.0
    renorm_eps_mode: Literal["add", "clamp"] = "add"
    scale: float = 1.0
    logit_softcap: float | None = None
    logit_scale: float = 1.0
    jitter_eps: float = 0.01
    num_identity_experts: int = 0
    identity_kind: Literal["identity", "skip"] = "identity"
    num_shared: int = 0
    apply_to: Literal["output", "input"] = "output"
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        checks.positive_int("RouterConfig.num_experts", self.num_experts)
        checks.positive_int("RouterConfig.top_k", self.top_k)
        checks.non_negative_int("RouterConfig.num_identity_experts", self.num_identity_experts)
        checks.non_negative_int("RouterConfig.num_shared", self.num_shared)
        classes = self.num_experts + self.num_identity_experts
        if self.top_k > classes:
            raise checks.bad("RouterConfig.top_k", f"at most num_experts + num_identity_experts = {classes}",
                             self.top_k)
        checks.one_of("RouterConfig.score", self.score, SCORES)
        checks.one_of("RouterConfig.order", self.order, ("score_topk", "topk_score"))
        checks.one_of("RouterConfig.group_reduce", self.group_reduce, ("max", "sum_top2"))
        checks.one_of("RouterConfig.group_fill", self.group_fill, ("neg_inf", "zero"))
        checks.one_of("RouterConfig.renorm_eps_mode", self.renorm_eps_mode, ("add", "clamp"))
        checks.one_of("RouterConfig.identity_kind", self.identity_kind, ("identity", "skip"))
        checks.one_of("RouterConfig.apply_to", self.apply_to, ("output", "input"))
        checks.positive("RouterConfig.norm_p", self.norm_p)
        checks.non_negative("RouterConfig.renorm_eps", self.renorm_eps)
        checks.non_negative("RouterConfig.jitter_eps", self.jitter_eps)
        checks.finite("RouterConfig.scale", self.scale)
        checks.finite("RouterConfig.logit_scale", self.logit_scale)
        if self.logit_softcap is not None:
            checks.positive("RouterConfig.logit_softcap", self.logit_softcap)
        self._check_groups(classes)
        if self.score == "sparsemixer" and (self.top_k != 2 or self.order != "score_topk" or self.num_groups > 1):
            raise checks.bad("RouterConfig.score", "top_k=2, order 'score_topk', one group for 'sparsemixer'",
                             f"{self}")
        if (self.score == "joint_logsigmoid") != (self.num_shared > 0):
            raise checks.bad("RouterConfig.num_shared", "> 0 exactly when score is 'joint_logsigmoid'",
                             self.num_shared)
        if self.renormalize and self.score in ("sparsemixer", "joint_logsigmoid"):
            raise checks.bad("RouterConfig.renormalize", f"False with score {self.score!r}", True)
        if self.score == "sqrtsoftplus" and self.order == "topk_score":
            raise checks.bad("RouterConfig.order", "'score_topk' with score 'sqrtsoftplus'", self.order)
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        object.__setattr__(self, "key", repr(values))

    def __repr__(self) -> str:
        return _brief(self, "score", "order", "renormalize")

    @staticmethod
    def from_key(key: str) -> RouterConfig:
        """The config whose `key` (its fields as one string, for operators that take no objects) this is."""
        return RouterConfig(**ast.literal_eval(key))

    def _check_groups(self, classes: int) -> None:
        G, g = self.num_groups, self.topk_groups
        checks.positive_int("RouterConfig.num_groups", G)
        checks.positive_int("RouterConfig.topk_groups", g)
        if classes % G:
            raise checks.bad("RouterConfig.num_groups", f"a divisor of the {classes} router classes", G)
        if g > G:
            raise checks.bad("RouterConfig.topk_groups", f"at most num_groups = {G}", g)
        if g * (classes // G) < self.top_k:
            raise checks.bad(
                "RouterConfig.topk_groups", f"topk_groups * (classes / num_groups) >= top_k = {self.top_k}",
                f"{g} * {classes // G}",
            )
        if G > 1 and self.group_reduce == "sum_top2" and classes // G < 2:
            raise checks.bad("RouterConfig.group_reduce", "groups of at least 2 experts for 'sum_top2'", classes // G)

    @property
    def num_logits(self) -> int:
        """Columns of the router's logits: experts, identity experts, router-weighted shared experts."""
        return self.num_experts + self.num_identity_experts + self.num_shared


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """One MoE FFN block: `MoEFFN(MoEConfig(d_model=2048, d_expert=768, num_experts=128, top_k=8))`.

    router          None: softmax, top-k, renormalised to sum 1 (Mixtral, Qwen3); else of the same num_experts and top_k
    d_shared        hidden width of the shared expert added to every token; 0: none
    shared_gate     the shared expert is multiplied by sigmoid(x · w) (Qwen2-MoE)
    shared_combine  "sum", or "average": (routed + shared) / 2 (Cohere2)
    bias            expert biases b_in, b_out;  router_bias: a bias on the router's logits (gpt-oss)
    selection_bias  a float32 buffer added to the ranking scores, for aux-loss-free balancing
    aux_loss_coef, z_loss_coef
                    attached to the output's graph in training (Switch convention: 1.0 for uniform routing)
    capacity_factor None: nothing is ever dropped; else slots beyond ceil(factor * N / E) of an expert are dropped,
                    lowest weight first, and counted
    """

    d_model: int
    d_expert: int
    num_experts: int
    top_k: int
    router: RouterConfig | None = None
    activation: Activation = SWIGLU
    layout: Layout = Layout.CONCAT
    d_shared: int = 0
    shared_gate: bool = False
    shared_combine: Literal["sum", "average"] = "sum"
    bias: bool = False
    router_bias: bool = False
    selection_bias: bool = False
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0
    capacity_factor: float | None = None
    route: RouterConfig = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("d_model", "d_expert", "num_experts", "top_k"):
            checks.positive_int(f"MoEConfig.{name}", getattr(self, name))
        checks.non_negative_int("MoEConfig.d_shared", self.d_shared)
        checks.one_of("MoEConfig.shared_combine", self.shared_combine, ("sum", "average"))
        checks.instance("MoEConfig.activation", self.activation, Activation)
        object.__setattr__(self, "layout", checks.layout("MoEConfig.layout", self.layout, Layout))
        if self.router is not None:
            checks.instance("MoEConfig.router", self.router, RouterConfig)
        if self.router is None and self.top_k > self.num_experts:
            raise checks.bad("MoEConfig.top_k", f"at most num_experts = {self.num_experts}", self.top_k)
        route = self.router or RouterConfig(num_experts=self.num_experts, top_k=self.top_k, renormalize=self.top_k > 1)
        if (route.num_experts, route.top_k) != (self.num_experts, self.top_k):
            raise checks.bad(
                "MoEConfig.router", f"num_experts={self.num_experts}, top_k={self.top_k}",
                f"num_experts={route.num_experts}, top_k={route.top_k}",
            )
        if route.num_shared:
            raise checks.bad("MoEConfig.router", "num_shared = 0 (router-weighted shared experts are for `route` only)",
                             route.num_shared)
        if self.shared_gate and not self.d_shared:
            raise checks.bad("MoEConfig.shared_gate", "d_shared > 0", f"d_shared={self.d_shared}")
        checks.non_negative("MoEConfig.aux_loss_coef", self.aux_loss_coef)
        checks.non_negative("MoEConfig.z_loss_coef", self.z_loss_coef)
        if self.capacity_factor is not None:
            checks.positive("MoEConfig.capacity_factor", self.capacity_factor)
        object.__setattr__(self, "route", route)

    def __repr__(self) -> str:
        return _brief(self)
