"""plan, permute, unpermute: grouping tokens by expert and back, differentiable, stable, without atomics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import checks
from .types import Plan


def plan(experts: Tensor, num_experts: int) -> Plan:
    """Group slots by expert: experts (T, K) int32 or int64 -> Plan with E = num_experts.

    Slots keep their order inside an expert (the permutation is stable). Ids below 0 or from `num_experts` on are
    dropped. No host synchronisation on a GPU. Raises ValueError/TypeError for other shapes and dtypes.
    Reference: `moeffn.reference.plan`.
    """
    checks.tensor("experts", experts, 2)
    checks.index_dtype("experts", experts)
    checks.positive_int("num_experts", num_experts)
    return sorted_plan(experts, num_experts)


def sorted_plan(experts: Tensor, num_experts: int) -> Plan:
    """`plan` in plain torch, by one stable sort; unchecked."""
    flat = experts.reshape(-1)
    valid = (flat >= 0) & (flat < num_experts)
    keys = torch.where(valid, flat, num_experts).to(torch.int32)
    sorted_keys, order = torch.sort(keys, stable=True)
    bounds = torch.arange(num_experts + 1, device=keys.device, dtype=torch.int32)
    offsets = torch.searchsorted(sorted_keys, bounds, out_int32=True)
    row = torch.empty_like(keys)
    row[order] = torch.arange(keys.numel(), device=keys.device, dtype=torch.int32)
    row_of_slot = torch.where(valid, row, -1)
    slot_of_row = torch.where(sorted_keys < num_experts, order.to(torch.int32), -1)
    return Plan(offsets.diff(), offsets, slot_of_row, row_of_slot)


def permute(x: Tensor, plan: Plan) -> Tensor:
    """x (T, D) -> rows (N, D): row r holds the token of slot_of_row[r]; rows beyond the routed ones are zero.

    Differentiable; the gradient of x sums its rows in slot order in float32 (float64 for float64).
    Reference: `moeffn.reference.permute`.
    """
    checks.tensor("x", x, 2)
    checks.instance("plan", plan, Plan)
    T, N = x.shape[0], plan.num_slots
    if N % max(1, T) or (T == 0) != (N == 0):
        raise checks.bad("x", f"T tokens with T * K = {N} slots of the plan", f"T = {T}")
    return _Permute.apply(x, plan.slot_of_row, plan.row_of_slot)


def unpermute(rows: Tensor, plan: Plan, weights: Tensor) -> Tensor:
    """rows (N, D), weights (T, K) -> (T, D): Σ_k weights[t, k] · rows[row_of_slot[t, k]], slot order, float32 sums.

    Slots that are not routed contribute nothing, whatever their weight. Differentiable in rows and weights.
    Reference: `moeffn.reference.unpermute`.
    """
    checks.tensor("rows", rows, 2)
    checks.tensor("weights", weights, 2)
    checks.instance("plan", plan, Plan)
    checks.floating("weights", weights)
    if rows.shape[0] != plan.num_slots or weights.numel() != plan.num_slots:
        raise checks.bad("rows, weights", f"N = {plan.num_slots} rows and slots, those of the plan",
                         f"{rows.shape[0]} rows and weights {tuple(weights.shape)}")
    return _Unpermute.apply(rows, weights, plan.slot_of_row, plan.row_of_slot)


def sum_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 when any input is, else float32: the dtype in which rows are summed."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def weighted_sum(rows: Tensor, row_of_slot: Tensor, weights: Tensor | None, T: int) -> Tensor:
    """Σ_k w[t, k] · rows[row_of_slot[t·K + k]] -> (T, D) in `sum_dtype`, one slot after the other; w None means 1."""
    D = rows.shape[1]
    wide = sum_dtype(rows) if weights is None else sum_dtype(rows, weights)
    out = torch.zeros(T, D, dtype=wide, device=rows.device)
    if T == 0 or row_of_slot.numel() == 0:
        return out
    K = row_of_slot.numel() // T
    index = row_of_slot.view(T, K)
    all_routed = rows.device.type == "cpu" and bool((index >= 0).all())  # elsewhere the answer would be a sync
    for k in range(K):
        term = rows.index_select(0, index[:, k].clamp(min=0)).to(wide)
        if weights is not None:
            term = term.mul_(weights[:, k, None].to(wide))
        # a dropped slot never lets a NaN of row 0 through
        out += term if all_routed else torch.where(index[:, k, None] >= 0, term, 0.0)
    return out


def gather_tokens(x: Tensor, slot_of_row: Tensor, K: int) -> Tensor:
    """rows (N, D): the token of each row's slot, zeros where slot_of_row is -1."""
    rows = x.index_select(0, (slot_of_row.clamp(min=0) // max(1, K)))
    return torch.where((slot_of_row >= 0)[:, None], rows, 0.0)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slot_of_row: Tensor, row_of_slot: Tensor) -> Tensor:
        ctx.save_for_backward(row_of_slot)
        ctx.T, ctx.dtype = x.shape[0], x.dtype
        if x.shape[0] == 0:
            return x.new_zeros((0, x.shape[1]))
        return gather_tokens(x, slot_of_row, slot_of_row.numel() // x.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (row_of_slot,) = ctx.saved_tensors
        return weighted_sum(grad, row_of_slot, None, ctx.T).to(ctx.dtype), None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, slot_of_row: Tensor, row_of_slot: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, slot_of_row, row_of_slot)
        return weighted_sum(rows, row_of_slot, weights, weights.shape[0]).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:  # type: ignore[override]
        rows, weights, slot_of_row, row_of_slot = ctx.saved_tensors
        T, K = weights.shape
        wide = sum_dtype(rows, weights)
        d_rows = d_weights = None
        if rows.shape[0] == 0:
            return torch.zeros_like(rows), torch.zeros_like(weights), None, None
        dy = gather_tokens(grad, slot_of_row, K)
        if ctx.needs_input_grad[0]:
            w = weights.reshape(-1)[slot_of_row.clamp(min=0)].to(wide)
            d_rows = torch.where((slot_of_row >= 0)[:, None], dy.to(wide) * w[:, None], 0.0).to(rows.dtype)
        if ctx.needs_input_grad[1]:
            dots = torch.where(slot_of_row >= 0, (dy.to(wide) * rows.to(wide)).sum(1), 0.0)
            d_weights = torch.where(row_of_slot >= 0, dots[row_of_slot.clamp(min=0)], 0.0)
            d_weights = d_weights.view(T, K).to(weights.dtype)
        return d_rows, d_weights, None, None
