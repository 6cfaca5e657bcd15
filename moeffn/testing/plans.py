"""check_plan: is a grouping of slots by expert a bijection, counted right and stable?"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from ..types import Plan
from .report import CheckReport, fail, run_properties
from .workloads import make_routing


def check_plan(make: Callable[[Tensor, int], Plan], *, skip: Collection[str] = ()) -> CheckReport:
    """Check a function (experts (T, K) int32, num_experts) -> Plan on even, skewed, dropped and empty routings.

    Properties: "counts", "bijection" (each routed slot has one row of its expert, each row one slot), "stable order"
    (slots ascend inside an expert). Raises AssertionError when one does not hold.
    """
    cases = [make_routing(spec, T, K, E, seed=3).experts for spec in ("uniform", "zipf:1.5", "single", "zero-expert")
             for T, K, E in ((13, 2, 5), (1, 1, 1), (40, 4, 64))]
    dropped = cases[0].clone()
    dropped[::3] = -1
    cases += [dropped, torch.full_like(dropped[:3], -1), dropped[:0]]

    def each(compare: Callable[[Plan, Tensor, int], None]) -> Callable[[], None]:
        def check() -> None:
            for ids in cases:
                E = int(ids.max()) + 2 if ids.numel() else 2
                compare(make(ids, E), ids, E)
        return check

    def counts(plan: Plan, ids: Tensor, E: int) -> None:
        want = [int((ids == e).sum()) for e in range(E)]
        if plan.counts.tolist() != want:
            fail(f"counts {want}", plan.counts.tolist())
        sums = [sum(want[:e]) for e in range(E + 1)]
        if plan.offsets.tolist() != sums:
            fail(f"offsets {sums}", plan.offsets.tolist())

    def bijection(plan: Plan, ids: Tensor, E: int) -> None:
        offsets, row_of_slot, slot_of_row = (t.tolist() for t in (plan.offsets, plan.row_of_slot, plan.slot_of_row))
        K = ids.shape[1]
        for slot, e in enumerate(ids.flatten().tolist()):
            row = row_of_slot[slot]
            if e < 0:
                if row != -1:
                    fail(f"row -1 for slot {slot}, which is not routed", row, slot // K)
            elif not offsets[e] <= row < offsets[e + 1] or slot_of_row[row] != slot:
                fail(f"slot {slot} in a row of expert {e}, {offsets[e]}..{offsets[e + 1] - 1}, that points back",
                      f"row {row}", slot // K)
        if any(s != -1 for s in slot_of_row[offsets[-1]:]):
            fail(f"-1 in rows from {offsets[-1]} on", slot_of_row[offsets[-1]:])

    def order(plan: Plan, ids: Tensor, E: int) -> None:
        offsets, rows = plan.offsets.tolist(), plan.slot_of_row.tolist()
        for e in range(E):
            mine = rows[offsets[e] : offsets[e + 1]]
            if mine != sorted(mine):
                fail(f"ascending slots for expert {e}", mine)

    properties = {"counts": counts, "bijection": bijection, "stable order": order}
    return run_properties("plan", {name: each(compare) for name, compare in properties.items()}, skip)
