"""FLOPs and bytes of each kernel of one MoE layer, and the time that a device's rates allow for it.

Letters as in `block`: N = T·K slots, H = 2F gated, F when not. Bytes are compulsory: each operand once in and once out;
a gathered source counts once (its rows come again from the cache), weights count for the experts expected to be met.
"""

from __future__ import annotations

from dataclasses import dataclass

from .block import Block, distinct_experts
from .roofline import Device, devices, find_device


@dataclass(frozen=True)
class KernelCost:
    """flops: of matrix products, a multiply-add is 2. nbytes: read and written."""

    name: str
    flops: float
    nbytes: float

    def seconds(self, device: str | Device, dtype: str = "bf16") -> float:
        """The longer of computing and moving at the device's rates. ValueError for an unknown device or dtype."""
        chip = find_device(device)
        return max(self.flops / (chip.rate(dtype) * 1e12), self.nbytes / (chip.hbm_gbs * 1e9))


def kernels(b: Block, tokens: int, *, element: int = 2, train: bool = False, split: tuple[int, int] = (1, 1)
            ) -> tuple[KernelCost, ...]:
    """The kernels of a forward over `tokens` tokens, and with `train` (which saves h) those of the backward.

    Routed experts only, weights on the output, no biases. element: bytes of a weight and of an activation.
    split: programs that share each inner sum of the up- and of the down-projection and leave float32 parts of it.
    """
    T, D, F, E, N = tokens, b.d_model, b.d_expert, b.num_experts, tokens * b.top_k
    H = F * (b.matrices - 1)
    met = distinct_experts(E, b.top_k, T)
    ids, one = 4 * N, element
    logits = 4 * T * E
    up_parts, down_parts = (4 * n if n > 1 else 0 for n in split)  # bytes of one element's parts
    hidden = one * (N * F + train * N * H)
    out = (down_parts or one) * N * D
    found = [
        KernelCost("logits", 2 * T * D * E, one * (T * D + E * D) + logits),
        KernelCost("route", 0, logits + 2 * ids),
        KernelCost("plan", 0, 3 * ids),
        KernelCost("up", 2 * N * D * H, one * (T * D + met * D * H) + (up_parts * N * H or hidden) + ids),
        *([KernelCost("up sum", 0, up_parts * N * H + hidden)] if up_parts else []),
        KernelCost("down", 2 * N * D * F, one * (N * F + met * D * F) + out),
        KernelCost("combine", 0, out + one * T * D + 2 * ids),
    ]
    if train:
        found += [
            KernelCost("dh", 2 * N * D * F, one * (T * D + met * D * F + 2 * N * H + N * F) + 2 * ids),
            KernelCost("dw out", 2 * N * D * F, one * (T * D + N * F + E * D * F) + ids),
            KernelCost("dw in", 2 * N * D * H, one * (T * D + N * H + E * D * H) + ids),
            KernelCost("dx", 2 * N * D * H, one * (N * H + met * D * H + N * D)),
            KernelCost("combine dx", 0, one * (N * D + T * D) + ids),
            KernelCost("weight grad", 0, 3 * ids),
            KernelCost("route backward", 0, 2 * logits + 2 * ids),
            KernelCost("logits dx", 2 * T * D * E, logits + one * (E * D + T * D)),
            KernelCost("logits dw", 2 * T * D * E, logits + one * (T * D + E * D)),
        ]
    return tuple(found)


def device_of(name: str) -> Device | None:
    """The entry of devices.json that a GPU's name contains ("NVIDIA H200" -> H200), the longest match; else None."""
    found = [d for label, d in devices().items() if label.lower() in name.lower().replace(" ", "")]
    return max(found, key=lambda d: len(d.name), default=None)
