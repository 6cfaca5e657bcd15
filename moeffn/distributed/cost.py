"""What a dispatcher costs before it runs: expected destinations, bytes, seconds, and the choice that follows.

Model (uniform routing without replacement, the usual case of a balanced router; skew multiplies it by max/mean load):

    D(G)  = Σ_g 1 - C(E - e_g, K) / C(E, K)      distinct groups (ranks or nodes) that a token's K experts live on
    time  = Σ over exchanges of  latency + max(bytes inside the node / link inside, bytes across / link across)

D(G) is what DeepEP computes for its buffers (elastic buffer, `get_expected_topk`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import checks
from ..accounting.traffic import distinct_of_sizes
from .payload import RowFormat
from .placement import Placement


@dataclass(frozen=True)
class Links:
    """A cluster's links, each way, per rank: GB/s inside a node and across nodes, seconds before the first byte.

    The defaults are an H100 node with one 400 Gb/s adapter per GPU at nine tenths of its rate, and 30 µs for a small
    NCCL all-to-all.
    """

    inside_gb_s: float = 450.0
    across_gb_s: float = 45.0
    latency_s: float = 30e-6

    def __post_init__(self) -> None:
        for name in ("inside_gb_s", "across_gb_s", "latency_s"):
            checks.positive(f"Links.{name}", getattr(self, name))


@dataclass(frozen=True)
class Estimate:
    """One dispatcher, one layer, one rank: rows and bytes of dispatch and combine that leave it, seconds of both."""

    name: str
    rows_inside: float
    rows_across: float
    bytes: float
    seconds: float


def expected_destinations(num_experts: int, top_k: int, group_sizes: Sequence[int]) -> float:
    """D: the mean number of groups that hold at least one of K distinct experts drawn uniformly from E."""
    checks.positive_int("num_experts", num_experts)
    checks.positive_int("top_k", top_k)
    if sum(group_sizes) != num_experts or top_k > num_experts:
        raise checks.bad("group_sizes, top_k", f"sizes that sum to E = {num_experts} and top_k <= E",
                         f"{list(group_sizes)}, {top_k}")
    return distinct_of_sizes(group_sizes, top_k)


def estimate(placement: Placement, *, tokens: int, d_model: int, top_k: int, dtype: torch.dtype = torch.bfloat16,
             ranks_per_node: int | None = None, links: Links | None = None) -> list[Estimate]:
    """Every dispatcher that fits this placement, cheapest first; `tokens` T per rank. A placement without replicas."""
    links = links or Links()
    W, E = placement.num_ranks, placement.num_experts
    n = ranks_per_node or W
    if W % n:
        raise checks.bad("ranks_per_node", f"a divisor of the {W} ranks", n)
    if placement.has_replicas or placement.missing:
        raise checks.bad("placement", "one home for every expert", "replicas or missing experts")
    sizes = [len(held) for held in placement.experts_of_rank]
    nodes = [sum(sizes[i : i + n]) for i in range(0, W, n)]
    share_inside, share_across = (n - 1) / W, (W - n) / W
    per_rank = expected_destinations(E, top_k, sizes)
    per_node = expected_destinations(E, top_k, nodes)
    out = RowFormat.token(d_model, dtype, top_k, torch.float32).row_bytes
    alone = RowFormat.token(d_model, dtype, 1, torch.float32).row_bytes
    back = RowFormat.vector(d_model, dtype).row_bytes

    def single(name: str, copies: float, row: int) -> Estimate:
        inside, across = tokens * copies * share_inside, tokens * copies * share_across
        both = row + back
        slow = max(inside * both / links.inside_gb_s, across * both / links.across_gb_s) / 1e9
        return Estimate(name, inside, across, (inside + across) * both, 3 * links.latency_s + slow)

    found = [single("all_to_all, dedup rank", per_rank, out), single("all_to_all, dedup none", top_k, alone),
             single("all_gather", W, out)]
    if n < W and n > 1:
        # hop 1 per node over the slow link; hop 2 hands every copy of the node's tokens to its ranks
        across = tokens * per_node * (1 - n / W)
        inside = tokens * per_rank * (1 - 1 / n)
        both = out + back
        slow = (across * both / links.across_gb_s + inside * both / links.inside_gb_s) / 1e9
        found.append(Estimate("two_level", inside, across, (inside + across) * both, 5 * links.latency_s + slow))
    return sorted(found, key=lambda e: e.seconds)


def describe(estimates: Sequence[Estimate]) -> str:
    """A table of the estimates, the first of them the choice."""
    lines = [f"{'dispatcher':<24}{'rows inside':>12}{'rows across':>12}{'MB':>10}{'µs':>10}"]
    for e in estimates:
        lines.append(f"{e.name:<24}{e.rows_inside:>12.0f}{e.rows_across:>12.0f}{e.bytes / 1e6:>10.3f}"
                     f"{e.seconds * 1e6:>10.0f}")
    return "\n".join(lines)
