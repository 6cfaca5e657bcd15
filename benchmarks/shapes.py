"""The layer shapes that every benchmark uses, with the models they are taken from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One MoE FFN: width D, hidden width F, E experts, K of them per token. Weights are 3 E D F elements (gated)."""

    name: str
    D: int
    F: int
    E: int
    K: int

    def flops(self, T: int) -> int:
        """Multiply-adds of a gated forward over T tokens, counted as two."""
        return 6 * T * self.K * self.D * self.F

    def weight_bytes(self, active: int, element: int) -> int:
        """Bytes of the weights of `active` experts."""
        return 3 * active * self.D * self.F * element


SHAPES = {
    "S1": Shape("S1", 2048, 1024, 64, 8),  # OLMoE
    "S2": Shape("S2", 2048, 768, 128, 8),  # Qwen3-30B-A3B
    "S3": Shape("S3", 1024, 3584, 8, 2),  # Mixtral-like, quarter width
    "S4": Shape("S4", 2880, 2880, 32, 4),  # gpt-oss-20b
}
TOKENS = (1, 4, 16, 64, 256, 1024)
