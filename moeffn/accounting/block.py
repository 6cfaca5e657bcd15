"""One FFN block in numbers: weights, FLOPs, bytes. Plain functions of sizes, without torch.

Letters as everywhere: T tokens, D model width, F expert width, E experts, K experts per token, N = T·K slots,
S shared width, g = 3 matrices an expert when gated, 2 when not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Block:
    """The sizes of a mixture-of-experts block. `Block.of(config)` reads a `moeffn.MoEConfig`.

    d_shared: width of the shared expert, 0 for none. bias: expert biases (and the shared expert's). router_bias: a
    bias on the logits. selection_bias: one value an expert, a buffer.
    """

    d_model: int
    d_expert: int
    num_experts: int
    top_k: int
    gated: bool = True
    d_shared: int = 0
    shared_gate: bool = False
    bias: bool = False
    router_bias: bool = False
    selection_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("d_model", "d_expert", "num_experts", "top_k"):
            if getattr(self, name) < 1:
                raise ValueError(f"Block.{name}: expected at least 1, got {getattr(self, name)}")
        if self.top_k > self.num_experts:
            raise ValueError(f"Block.top_k: expected at most num_experts = {self.num_experts}, got {self.top_k}")
        if self.d_shared < 0:
            raise ValueError(f"Block.d_shared: expected at least 0, got {self.d_shared}")

    @staticmethod
    def of(config: Any) -> Block:
        """The block of a `moeffn.MoEConfig`."""
        names = ("d_model", "d_expert", "num_experts", "top_k", "d_shared", "shared_gate", "bias", "router_bias",
                 "selection_bias")
        return Block(gated=config.activation.gated, **{name: getattr(config, name) for name in names})

    @property
    def matrices(self) -> int:
        """g: matrices of an expert."""
        return 3 if self.gated else 2


def ffn_weights(d_model: int, d_hidden: int, *, gated: bool = True, bias: bool = False) -> int:
    """Weights of one FFN or expert: g·D·F, and with biases (g-1)·F + D more (2·D·F + F + D for two matrices)."""
    g = 3 if gated else 2
    return g * d_model * d_hidden + ((g - 1) * d_hidden + d_model if bias else 0)


def expert_weights(b: Block) -> int:
    """Weights of one routed expert."""
    return ffn_weights(b.d_model, b.d_expert, gated=b.gated, bias=b.bias)


def always_active_weights(b: Block) -> int:
    """Weights every token uses: router, shared expert, its gate. Not the selection bias, a buffer."""
    shared = ffn_weights(b.d_model, b.d_shared, gated=b.gated, bias=b.bias) if b.d_shared else 0
    gate = b.d_model if b.d_shared and b.shared_gate else 0
    return b.num_experts * b.d_model + b.num_experts * b.router_bias + shared + gate


def total_weights(b: Block) -> int:
    return b.num_experts * expert_weights(b) + always_active_weights(b)


def active_weights(b: Block) -> int:
    """Weights a token uses. Active / total tends to K/E for the routed part alone."""
    return b.top_k * expert_weights(b) + always_active_weights(b)


def forward_flops(b: Block, tokens: int, *, router: bool = True) -> int:
    """2·g·T·K·D·F for the routed experts, 2·g·T·D·S for the shared one, 2·T·D·E for the router; matrix products
    alone (activations, softmax and sums are left out, a multiply-add is 2)."""
    d = b.d_model
    experts = 2 * b.matrices * tokens * b.top_k * d * b.d_expert
    shared = 2 * b.matrices * tokens * d * b.d_shared + (2 * tokens * d if b.d_shared and b.shared_gate else 0)
    return experts + shared + (2 * tokens * d * b.num_experts if router else 0)


def backward_flops(b: Block, tokens: int, *, router: bool = True, frozen_experts: bool = False) -> int:
    """Twice the forward: one product for the input's gradient and one for the weights'. Frozen experts need no
    gradient of their weights, which halves their part. Nothing is multiplied again: this runtime keeps the
    pre-activations and recomputes only elementwise work."""
    both = 2 * forward_flops(b, tokens, router=router)
    return both - 2 * b.matrices * tokens * b.top_k * b.d_model * b.d_expert if frozen_experts else both


def distinct_experts(num_experts: int, top_k: int, tokens: int) -> float:
    """Expected experts that `tokens` tokens use: E·(1 - (1 - K/E)^T).

    Exact in expectation for uniform routing without replacement inside a token, and an upper bound for any skewed
    routing of the same K (by concavity). min(T·K, E) would overstate it by up to 1.57 times (E=256, K=8, T=32).
    """
    return num_experts * (1 - (1 - top_k / num_experts) ** tokens)


def weight_bytes(b: Block, *, bytes_per_weight: float = 2.0, expert_bytes: float | None = None) -> float:
    """Bytes of all weights; `expert_bytes` for the routed experts' where they are quantised."""
    routed = b.num_experts * expert_weights(b)
    return routed * (bytes_per_weight if expert_bytes is None else expert_bytes) + (
        always_active_weights(b) * bytes_per_weight)


def decode_bytes(b: Block, tokens: int, *, bytes_per_weight: float = 2.0, expert_bytes: float | None = None,
                 activations: bool = False) -> float:
    """Bytes a forward pass over `tokens` tokens reads: the experts it expects to meet, router and shared expert.

    activations: also x in and y out, 2·T·D elements of `bytes_per_weight`.
    """
    distinct = distinct_experts(b.num_experts, b.top_k, tokens)
    routed = distinct * expert_weights(b) * (bytes_per_weight if expert_bytes is None else expert_bytes)
    moved = 2 * tokens * b.d_model * bytes_per_weight if activations else 0
    return routed + always_active_weights(b) * bytes_per_weight + moved


def arithmetic_intensity(b: Block, tokens: int, *, bytes_per_weight: float = 2.0,
                         expert_bytes: float | None = None) -> float:
    """FLOPs a byte of weights read, of a forward pass over `tokens` tokens."""
    return forward_flops(b, tokens) / decode_bytes(b, tokens, bytes_per_weight=bytes_per_weight,
                                                   expert_bytes=expert_bytes)


def saved_bytes(b: Block, tokens: int, *, element: int = 2) -> int:
    """Bytes this runtime keeps for the backward of the routed experts: x and the pre-activation H (2·T·D + 4·N·F in
    bf16 when gated, 2·T·D + 2·N·F when not), 16 a slot (expert, weight and the two permutations) and 4·(E+1)."""
    slots = tokens * b.top_k
    hidden = (2 if b.gated else 1) * b.d_expert
    return element * (tokens * b.d_model + slots * hidden) + 16 * slots + 4 * (b.num_experts + 1)


def naive_saved_bytes(b: Block, tokens: int, *, element: int = 2) -> int:
    """Bytes that autograd keeps when each step is an operation of its own: x, the gathered rows, gate and up, the
    activated product, the experts' outputs, float32 logits, int64 ids and float32 weights."""
    slots = tokens * b.top_k
    hidden = (2 if b.gated else 1) * b.d_expert
    rows = tokens * b.d_model + slots * (2 * b.d_model + hidden + b.d_expert)
    return element * rows + 4 * tokens * b.num_experts + 12 * slots


def compute_bound_tokens(b: Block, ridge: float, *, expert_bytes: float = 2.0) -> float:
    """Tokens from which the experts are bound by compute: ridge·bytes/2·E/K. ridge: the device's FLOPs a byte."""
    return ridge * expert_bytes / 2 * b.num_experts / b.top_k
