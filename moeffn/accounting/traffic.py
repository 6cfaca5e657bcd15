"""What expert parallelism sends: distinct destinations, bytes on each link, load imbalance.

Letters: R ranks, n ranks a node (an NVLink domain), N = R / n nodes, E experts, K experts a token, T tokens a rank.
Routing is taken as uniform without replacement unless a trace is given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush, heapreplace
from math import comb


def distinct_groups(num_experts: int, top_k: int, groups: int) -> float:
    """Expected groups of experts a token goes to: G·(1 - C(E - E/G, K) / C(E, K)); uneven groups differ by one.

    DeepEP sizes its buffers by it; UCCL-EP's reported bytes agree within 1.1%.
    """
    if groups < 1:
        raise ValueError(f"groups: expected at least 1, got {groups}")
    base, over = divmod(num_experts, groups)
    return distinct_of_sizes([base + 1] * over + [base] * (groups - over), top_k)


def distinct_of_sizes(sizes: Sequence[int], top_k: int) -> float:
    """Expected groups a token goes to, for groups of these numbers of experts: sum of 1 - C(E - e, K) / C(E, K)."""
    total = sum(sizes)
    if not 0 < top_k <= total:
        raise ValueError(f"top_k: expected 1 to {total}, got {top_k}")
    every = comb(total, top_k)
    counted = Counter(sizes)
    return sum(many * (1 - comb(total - size, top_k) / every) for size, many in counted.items())


def distinct_when_limited(num_experts: int, top_k: int, groups: int, limit: int) -> float:
    """As `distinct_groups` when a token may use `limit` groups at most (node-limited routing, DeepSeek-V3)."""
    if not 1 <= limit <= groups:
        raise ValueError(f"limit: expected 1 to {groups} groups, got {limit}")
    return distinct_groups(num_experts * limit // groups, top_k, limit)


def row_bytes(d_model: int, dtype: str = "bf16", *, header: int = 0) -> int:
    """Bytes of one token's row on the wire: fp8 with a float32 scale for 128 values, bf16 or fp32; `header` bytes
    more (16 in DeepEP's low-latency mode)."""
    sizes = {"fp8": d_model + 4 * -(-d_model // 128), "bf16": 2 * d_model, "fp32": 4 * d_model}
    if dtype not in sizes:
        raise ValueError(f"dtype: expected one of {', '.join(sizes)}, got {dtype!r}")
    return sizes[dtype] + header


@dataclass(frozen=True)
class Traffic:
    """Rows that a token sends, by what is sent once: each expert's copy, each rank's, or each node's.

    remote_*: to other ranks. nic_*: across nodes. forward: inside the receiving node, when a node gets one copy.
    Multiply by `row_bytes` for bytes.
    """

    remote_per_expert: float
    remote_per_rank: float
    nic_per_expert: float
    nic_per_rank: float
    nic_per_node: float
    forward: float


@lru_cache(maxsize=4096)
def traffic(num_experts: int, top_k: int, ranks: int, domain: int, *, node_limit: int | None = None) -> Traffic:
    """Rows a token sends in one dispatch; the combine is its transpose."""
    nodes = max(1, -(-ranks // domain))
    in_node = min(domain, ranks)
    holders = min(ranks, num_experts)  # ranks beyond the experts hold replicas; a token uses one of each
    to_ranks = distinct_groups(num_experts, top_k, holders)
    to_nodes = distinct_groups(num_experts, top_k, min(nodes, num_experts))
    if node_limit and node_limit < nodes:
        to_nodes = distinct_when_limited(num_experts, top_k, nodes, node_limit)
        to_ranks = distinct_groups(num_experts * node_limit // nodes, top_k, node_limit * in_node)
    off_rank, off_node = 1 - 1 / ranks, 1 - 1 / nodes
    return Traffic(top_k * off_rank, to_ranks * off_rank, top_k * off_node, to_ranks * off_node, to_nodes * off_node,
                   to_ranks * (1 - 1 / in_node))


def expert_counts(trace: Iterable[Sequence[int]], num_experts: int) -> list[int]:
    """Slots each expert gets in a routing trace, rows of expert ids (a tensor or array works too); -1 is no expert."""
    counts = [0] * num_experts
    for row in trace.tolist() if hasattr(trace, "tolist") else trace:
        for expert in row:
            if expert >= num_experts:
                raise ValueError(f"trace: expert {expert} of {num_experts}")
            if expert >= 0:
                counts[expert] += 1
    return counts


def distinct_in_trace(trace: Iterable[Sequence[int]], group_of: Sequence[int]) -> float:
    """Mean number of groups a token of the trace goes to; group_of[e] is the group of expert e."""
    rows = [{group_of[e] for e in row if e >= 0} for row in trace]
    return sum(map(len, rows)) / max(1, len(rows))


def _copies(loads: Sequence[float], replicas: int) -> list[int]:
    """Copies of each expert: one replica after another goes to the expert with most load a copy."""
    copies = [1] * len(loads)
    hottest = [(-float(load), expert) for expert, load in enumerate(loads)]
    heapify(hottest)
    for _ in range(replicas):
        _, expert = hottest[0]
        copies[expert] += 1
        heapreplace(hottest, (-loads[expert] / copies[expert], expert))
    return copies


def place(loads: Sequence[float], ranks: int, replicas: int = 0) -> list[list[tuple[int, float]]]:
    """Experts on ranks, as EPLB places them: one replica after another to the expert with most load a copy, then
    copies in descending load to the least loaded rank with room. Returns (expert, load) for each rank.

    Without replicas the experts stay in order, the first ranks having one more where they do not divide.
    """
    slots = len(loads) + replicas
    if ranks < 1 or slots < ranks:
        raise ValueError(f"ranks: expected 1 to {slots} (experts and replicas), got {ranks}")
    base, over = divmod(slots, ranks)
    room = [base + (r < over) for r in range(ranks)]
    placed: list[list[tuple[int, float]]] = [[] for _ in range(ranks)]
    if not replicas:
        rank = 0
        for expert, load in enumerate(loads):
            if len(placed[rank]) == room[rank]:
                rank += 1
            placed[rank].append((expert, float(load)))
        return placed
    copies = _copies(loads, replicas)
    items = sorted(((loads[e] / copies[e], e) for e in range(len(loads)) for _ in range(copies[e])), reverse=True)
    emptiest = [(0.0, rank) for rank in range(ranks)]  # a heap already
    for load, expert in items:
        held, rank = heappop(emptiest)
        placed[rank].append((expert, load))
        if len(placed[rank]) < room[rank]:
            heappush(emptiest, (held + load, rank))
    return placed


def imbalance(loads: Sequence[float], ranks: int, replicas: int = 0) -> float:
    """Load of the fullest rank over the mean, at least 1: the factor by which compute and exchange slow down."""
    total = sum(loads)
    if total <= 0:
        return 1.0
    if ranks == len(loads) + replicas:  # one copy a rank, wherever it lies
        return max(load / n for load, n in zip(loads, _copies(loads, replicas), strict=True)) * ranks / total
    return max(sum(load for _, load in rank) for rank in place(loads, ranks, replicas)) * ranks / total
