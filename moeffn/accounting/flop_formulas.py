"""FLOP formulas of this runtime's operators for `torch.utils.flop_counter.FlopCounterMode`.

Without them a counter sees nothing of a grouped or custom operator, and every expert's FLOPs vanish from its total.
Matrix products alone are counted, as torch does. Imports torch; `moeffn.functional` registers on import.
"""

from __future__ import annotations

from typing import Any

from torch.utils.flop_counter import flop_registry, register_flop_formula

Shape = tuple[int, ...]


def _products(slot_of_row: Shape, w_in: Shape, w_out: Shape) -> tuple[int, int]:
    """FLOPs of the two grouped products over N rows: w_in (E, 2F | F, D), w_out (E, D, F)."""
    rows = slot_of_row[0]
    return 2 * rows * w_in[1] * w_in[2], 2 * rows * w_out[1] * w_out[2]


def forward_flops(x: Shape, weights: Shape, offsets: Shape, slot_of_row: Shape, row_of_slot: Shape, w_in: Shape,
                  w_out: Shape, *args: Any, out_shape: Any = None, **kwargs: Any) -> int:
    """`moeffn::forward`: 2·N·D·(2F | F) + 2·N·F·D."""
    return sum(_products(slot_of_row, w_in, w_out))


def backward_flops(dy: Shape, x: Shape | None, h: Shape, weights: Shape, offsets: Shape, slot_of_row: Shape,
                   row_of_slot: Shape, w_in: Shape, w_out: Shape, *args: Any, out_shape: Any = None,
                   **kwargs: Any) -> int:
    """`moeffn::backward`: the gradient of the hidden rows, and one product more for each of x, w_in and w_out that
    needs a gradient. `needs` (x, weights, w_in, w_out, b_in, b_out) is the last argument."""
    into, out = _products(slot_of_row, w_in, w_out)
    need_x, _, need_in, need_out, *_ = kwargs["needs"] if "needs" in kwargs else args[-1]
    return out * (1 + need_out) + into * (need_x + need_in)


def register(forward: Any, backward: Any) -> None:
    """Register the formulas for two operators (`torch.ops.moeffn.forward`, `.backward`), once."""
    for operator, formula in ((forward, forward_flops), (backward, backward_flops)):
        if operator not in flop_registry:
            register_flop_formula(operator)(formula)
