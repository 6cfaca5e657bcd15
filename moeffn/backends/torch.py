"""Backend "torch": plain torch on any device. Loops over experts that have rows, never over E.

On a GPU the loop would read the counts on the host, so there F.grouped_mm takes its place where it can run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from ..permutation import sorted_plan, sum_dtype, weighted_sum
from ..types import ExpertWeights, Plan
from .activation import activate, activate_backward, halves, joined
from .base import Grads, Needs
from .memory import gradient


class TorchBackend:
    name = "torch"

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        return None

    def plan(self, experts: Tensor, num_experts: int) -> Plan:
        return sorted_plan(experts, num_experts)

    def forward(self, x: Tensor, plan: Plan, weights: Tensor, experts: ExpertWeights, *, apply_to: str, save: bool
                ) -> tuple[Tensor, Tensor | None]:
        T, D = x.shape
        N, width = plan.num_slots, experts.w_in.shape[1]
        h = x.new_empty((N, width)) if save else None
        rows_out = x.new_empty((N, D))
        for group in grouped(active_experts(plan), _GROUP_ROWS):
            first, end = group[0][1], group[-1][2]
            slots = plan.slot_of_row[first:end]
            rows = x.index_select(0, slots // (N // T))
            if apply_to == "input":
                rows = (rows * weights.reshape(-1)[slots, None]).to(x.dtype)
            hidden = None if h is None else h[first:end]
            if len(group) > 1:
                _few_rows(rows, group, experts, hidden, rows_out[first:end])
                continue
            e = group[0][0]
            pre = _linear(rows, experts.w_in[e], _row(experts.b_in, e), hidden, _FEW_ROWS)
            act = activate(*halves(pre, experts.activation, experts.layout), experts.activation)
            _linear(act, experts.w_out[e], _row(experts.b_out, e), rows_out[first:end], _FEW_ROWS_COPIED)
        w = None if apply_to == "input" else weights
        return weighted_sum(rows_out, plan.row_of_slot, w, T).to(x.dtype), h

    def backward(self, dy: Tensor, x: Tensor | None, h: Tensor, plan: Plan, weights: Tensor, experts: ExpertWeights, *,
                 apply_to: str, needs: Needs, into: Grads | None = None) -> Grads:
        T, D = dy.shape
        N, K = plan.num_slots, plan.num_slots // max(1, T)
        wide = sum_dtype(dy, weights)
        flat_w = weights.reshape(-1)
        out = _Outputs(experts, needs, into, plan)
        dx_rows = dy.new_empty((N, D)) if needs.x else None
        dots = torch.zeros(N, dtype=wide, device=dy.device) if needs.weights else None
        on_input = apply_to == "input"
        for e, a, b in active_experts(plan):
            slots = plan.slot_of_row[a:b]
            tokens = slots // K
            dye = dy.index_select(0, tokens)
            w = flat_w[slots, None].to(wide)
            da = torch.mm(dye, _as(experts.w_out[e], dye)).to(wide)
            gate, up = halves(h[a:b].to(wide), experts.activation, experts.layout)
            act, d_gate, d_up = activate_backward(gate, up, da, experts.activation)
            dh = joined(d_gate, d_up, experts.layout)
            if dots is not None and not on_input:
                dots[a:b] = (da * act).sum(1)
                if experts.b_out is not None:
                    dots[a:b] += torch.mv(dye.to(wide), experts.b_out[e].to(wide))
            out.outer("w_out", e, dye, (act if on_input else act * w).to(dye.dtype))
            out.column_sum("b_out", e, dye.to(wide) if on_input else dye.to(wide) * w)
            if not on_input:
                dh = dh * w
            out.column_sum("b_in", e, dh)
            dh = dh.to(dye.dtype)
            if needs.w_in:
                assert x is not None
                xe = x.index_select(0, tokens)
                out.outer("w_in", e, dh, (xe * w).to(x.dtype) if on_input else xe)
            if dx_rows is not None or (on_input and dots is not None):
                dxe = torch.mm(dh, _as(experts.w_in[e], dh))
                if on_input and dots is not None:
                    assert x is not None
                    dots[a:b] = (dxe.to(wide) * x.index_select(0, tokens).to(wide)).sum(1)
                if dx_rows is not None:
                    dx_rows[a:b] = dxe
        dx = dw = None
        if dx_rows is not None:
            dx = weighted_sum(dx_rows, plan.row_of_slot, weights if on_input else None, T).to(dy.dtype)
        if dots is not None:
            index = plan.row_of_slot
            dw = dots.new_zeros(N)
            if N:
                dw = torch.where(index >= 0, dots[index.clamp(min=0)], dw)
            dw = dw.view(weights.shape).to(weights.dtype)
        return Grads(x=dx, weights=dw, **out.fresh)


def active_experts(plan: Plan) -> list[tuple[int, int, int]]:
    """(expert, first row, end row) of every expert that has rows. Reads the counts on the host."""
    bounds = plan.offsets.tolist()
    return [(e, a, b) for e, (a, b) in enumerate(itertools.pairwise(bounds)) if b > a]


def grouped(experts: list[tuple[int, int, int]], max_rows: int) -> Iterator[list[tuple[int, int, int]]]:
    """Neighbouring experts of few rows in groups of at most `max_rows` rows, every other expert alone."""
    group: list[tuple[int, int, int]] = []
    for item in experts:
        alone = item[2] - item[1] > _TINY
        if group and (alone or item[2] - group[0][1] > max_rows):
            yield group
            group = []
        if alone:
            yield [item]
        else:
            group.append(item)
    if group:
        yield group


def _as(weight: Tensor, like: Tensor) -> Tensor:
    """One expert's weight or bias in the dtype of `like`, in memory without gaps.

    oneDNN's low-precision products read past the rows of a slice of wider rows; a NaN there spoils the result.
    """
    weight = weight if weight.dtype == like.dtype else weight.to(like.dtype)
    if weight.element_size() == 2 and not (weight.is_contiguous() or weight.t().is_contiguous()):
        return weight.contiguous()
    return weight


_TINY = 8  # rows up to which the calls cost more than the copies of sharing one activation among experts
_GROUP_ROWS = 128  # of the experts that share one
# bf16, 1536x2048 weights, 2 threads: W·xᵀ takes 0.54x the time of x·Wᵀ at 64 rows, 0.74x at 256, 1.07x at 1024;
# with a transposing copy of the result 0.65x, 0.90x, 1.5x
_FEW_ROWS, _FEW_ROWS_COPIED = 256, 64


def _row(bias: Tensor | None, e: int) -> Tensor | None:
    return None if bias is None else bias[e]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None, few_rows: int) -> Tensor:
    """x (n, i) · weight (o, i)ᵀ + bias (o,), also written to `out` when given; the result may be a transposed view.

    oneDNN reorders the right-hand operand of a low-precision product at every call, so up to `few_rows` that should
    be x. The choice does not depend on `out`: training and inference give the same bits.
    """
    weight = _as(weight, x)
    n = x.shape[0]
    if x.device.type == "cpu" and x.element_size() == 2 and n <= few_rows:
        y = torch.mv(weight, x[0])[None] if n == 1 else torch.mm(weight, x.t()).t()
        if bias is not None:
            y += _as(bias, x)
        if out is not None:
            out.copy_(y)
        return y
    if bias is None:
        return torch.mm(x, weight.t(), out=out) if out is not None else torch.mm(x, weight.t())
    bias = _as(bias, x)
    return torch.addmm(bias, x, weight.t(), out=out) if out is not None else torch.addmm(bias, x, weight.t())


def _few_rows(rows: Tensor, group: list[tuple[int, int, int]], experts: ExpertWeights, hidden: Tensor | None,
              out: Tensor) -> None:
    """The experts of one group on their rows (R, D) -> out (R, D), and the pre-activations to `hidden` when given.

    Products are weight · rowsᵀ into columns of one transposed buffer, which is turned once: turning each expert's few
    rows costs 5 to 15% of its product. The buffer has one of few widths, as oneDNN compiles a kernel for every new
    stride; its columns from R on hold anything.
    """
    first, act, R = group[0][1], experts.activation, rows.shape[0]
    width = -(-R // 32) * 32

    def products(columns: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
        """columns (i, R | width), weights (E, o, i), biases (E, o) -> (o, width)."""
        result = columns.new_empty((weights.shape[1], width))
        for e, a, b in group:
            weight, mine = _as(weights[e], columns), slice(a - first, b - first)
            if b - a == 1:
                result[:, a - first] = torch.mv(weight, columns[:, a - first])
            else:
                torch.mm(weight, columns[:, mine], out=result[:, mine])
            if biases is not None:
                result[:, mine] += _as(biases[e], columns)[:, None]
        return result

    pre = products(rows.t(), experts.w_in, experts.b_in).t()
    if hidden is not None:
        hidden.copy_(pre[:R])
    y = products(activate(*halves(pre, act, experts.layout), act).t(), experts.w_out, experts.b_out)
    out.copy_(y[:, :R].t())


class _Outputs:
    """Parameter gradients of one backward: written expert by expert, zeros only where an expert had no rows."""

    def __init__(self, experts: ExpertWeights, needs: Needs, into: Grads | None, plan: Plan) -> None:
        idle = [e for e, count in enumerate(plan.counts.tolist()) if count == 0]
        self.fresh: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        for name, param in experts.named_tensors():
            if not getattr(needs, name):
                continue
            given = getattr(into, name) if into else None
            if given is None:
                self.fresh[name], zeroed = gradient(param)
                for e in () if zeroed else idle:
                    self.fresh[name][e].zero_()
            else:
                self.buffers[name] = given

    def outer(self, name: str, e: int, left: Tensor, right: Tensor) -> None:
        """leftᵀ (o, n) · right (n, i) into gradient `name` of expert e. A contiguous leftᵀ halves the time."""
        if name in self.fresh:
            out = self.fresh[name][e]
            if left.shape[0] == 1 and out.dtype == left.dtype:
                torch.mul(left.t(), right, out=out)
            elif out.dtype == left.dtype:
                torch.mm(left.t().contiguous(), right, out=out)
            else:
                out.copy_(torch.mm(left.t().to(out.dtype), right.to(out.dtype)))
        elif name in self.buffers:
            buffer = self.buffers[name][e]
            buffer.addmm_(left.t().to(buffer.dtype), right.to(buffer.dtype))

    def column_sum(self, name: str, e: int, rows: Tensor) -> None:
        if name in self.fresh:
            self.fresh[name][e] = rows.sum(0).to(self.fresh[name].dtype)
        elif name in self.buffers:
            self.buffers[name][e] += rows.sum(0).to(self.buffers[name].dtype)
