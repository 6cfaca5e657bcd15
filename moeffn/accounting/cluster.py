"""Expert parallelism over a cluster: tokens/s per GPU, memory and step time as the number of ranks and the batch vary.

The model: attention and dense weights are replicated and each rank serves its own T tokens; routed experts are spread
over R ranks. A step is, for every layer, dense work, dispatch, experts, combine. More ranks read fewer expert weights
each, and pay for it in messages: the sweep shows where the second outgrows the first. Times are what the device's
rates allow (efficiencies are parameters, 1 where nothing is measured), so they are bounds with a measured exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from .block import distinct_experts
from .cost import attention_flops, cache_elements, decode_bytes, matmul_weights
from .counting import load
from .links import Direct, curve_factor, direct_bytes, fitted, hierarchical_us
from .roofline import Device, find_device
from .traffic import imbalance, row_bytes, traffic
from .weights import Architecture
from .workload import Cluster, Workload, find_cluster


@dataclass(frozen=True)
class Point:
    """One size of the cluster and batch. Times in microseconds for the whole model and one step; memory in GB.

    experts_per_rank: of the fullest rank. rho: load of the fullest rank over the mean. exchange: the one used.
    exchange_error: worst relative error of the fitted direct model on its table, 0 for the others. binds: which
    of dense work, expert weights, expert arithmetic and exchange takes longest.
    """

    ranks: int
    nodes: int
    tokens_per_rank: int
    experts_per_rank: int
    rho: float
    exchange: str
    exchange_error: float
    dense_us: float
    dispatch_us: float
    expert_us: float
    combine_us: float
    step_us: float
    tokens_per_s_per_gpu: float
    weights_gb: float
    cache_gb: float
    buffer_gb: float
    fits: bool
    binds: str

    @property
    def tokens_per_s(self) -> float:
        return self.tokens_per_s_per_gpu * self.ranks

    @property
    def memory_gb(self) -> float:
        return self.weights_gb + self.cache_gb + self.buffer_gb


@dataclass(frozen=True)
class ClusterPlan:
    """All points of a sweep, in the order of `tokens_per_rank`, then `ranks`."""

    model: str
    cluster: str
    points: tuple[Point, ...]

    @property
    def best(self) -> Point | None:
        """The point with most tokens/s a GPU among those that fit in memory; None when none does."""
        return max((p for p in self.points if p.fits), key=lambda p: p.tokens_per_s_per_gpu, default=None)

    def stops_paying(self, tokens_per_rank: int, gain: float = 0.01) -> Point | None:
        """The first size that fits after which no larger one gains more than `gain` a GPU."""
        line = [p for p in self.points if p.tokens_per_rank == tokens_per_rank and p.fits]
        for i, point in enumerate(line):
            if all(q.tokens_per_s_per_gpu <= point.tokens_per_s_per_gpu * (1 + gain) for q in line[i + 1 :]):
                return point
        return None


@dataclass(frozen=True)
class _Model:
    """What a plan needs of a model."""

    name: str
    model: Architecture
    sparse: int
    num_experts: int
    top_k: int
    routed_active: float  # weights of routed experts a token is multiplied by
    routed_total: int
    other_bytes: float
    other_flops: float  # a token


def _read(source: Any, work: Workload, tokens: int) -> _Model:
    name, model = load(source)
    sparse = [layer for layer in model.layers if layer.num_experts]
    if not sparse:
        raise ValueError(f"source: {name} has no routed experts to spread over ranks")
    routed = [w for layer in sparse for w in layer.routed if w.used is not None]
    active = float(sum(w.active() for w in routed if w.kind == "matrix"))
    context = tokens if work.prefill else work.context
    flops = 2 * (float(matmul_weights(model)) - active) + float(attention_flops(model, context, causal=work.prefill))
    other = decode_bytes(model, 1, bytes_per_weight=work.bytes_per_weight, expert_bytes=0.0).dense
    first = next(w for w in sparse[-1].routed if w.used is not None)
    return _Model(name, model, len(sparse), first.copies, first.used or 0, active, sum(w.total for w in routed), other,
                  flops)


def _exchange(m: _Model, c: Cluster, work: Workload, ranks: int, tokens: int, rho: float) -> tuple:
    """(name, dispatch us, combine us, worst error of the fit) of one layer's exchange: the quickest allowed."""
    if ranks == 1:
        return "none", 0.0, 0.0, 0.0
    sent = traffic(m.num_experts, m.top_k, ranks, c.domain, node_limit=work.node_limit)
    nodes = -(-ranks // c.domain)
    rows = [row_bytes(m.model.d_model, work.dispatch), row_bytes(m.model.d_model, work.combine)]
    nic = c.nic_gbs * c.nic_efficiency
    found: dict[str, tuple] = {}

    def speed(per_token: float, row: int, peers: int) -> float:
        return nic * curve_factor(c.curve, tokens * per_token * row / max(1, peers))

    if c.low_latency and work.exchange in ("auto", "direct"):
        times, errors = [], []
        for direction, row in zip(("dispatch", "combine"), rows, strict=True):
            fit: Direct = fitted(c.low_latency, direction)
            inside = tokens * (sent.remote_per_expert - sent.nic_per_expert) * row / c.domain_gbs / 1000
            outside = direct_bytes(tokens, m.top_k, row, ranks, c.domain) / fit.gbs / 1000
            times.append(fit.a_us + rho * max(inside, outside))
            errors.append(fit.worst_error)
        found["direct"] = ("direct", *times, max(errors))
    if work.exchange in ("auto", "hierarchical"):
        times = [hierarchical_us(tokens * sent.nic_per_node * row, tokens * sent.forward * row,
                                 nic_gbs=speed(sent.nic_per_node, row, nodes - 1), domain_gbs=c.domain_gbs,
                                 latency_us=c.latency_us * min(2, nodes), rho=rho) for row in rows]
        found["hierarchical"] = ("hierarchical", *times, 0.0)
    if work.exchange in ("auto", "alltoall"):  # counts first, then rows without deduplication, links one by one
        times = [c.latency_us * extra + rho * tokens * row * (
            sent.nic_per_expert / speed(sent.nic_per_expert, row, ranks - c.domain)
            + (sent.remote_per_expert - sent.nic_per_expert) / c.domain_gbs) / 1000
            for row, extra in zip(rows, (2, 1), strict=True)]
        found["alltoall"] = ("alltoall", *times, 0.0)
    if not found:
        raise ValueError(f"workload.exchange: {c.name} has no measured table for {work.exchange!r}")
    return min(found.values(), key=lambda item: item[1] + item[2])


def _times(m: _Model, c: Cluster, chip: Device, work: Workload, ranks: int, tokens: int, local: int,
           rho: float) -> tuple:
    """(exchange, error, dense, dispatch, expert weights, expert arithmetic, combine), us for the whole model."""
    rate, hbm = chip.rate(work.dtype) * work.compute * 1e6, chip.hbm_gbs * work.bandwidth * 1e3  # a microsecond
    caches = 1 if work.prefill else tokens
    cache = cache_elements(m.model, work.context) * work.cache_bytes * caches
    dense = max(m.other_flops * tokens / rate, (m.other_bytes + cache) / hbm)
    hit = distinct_experts(m.num_experts, m.top_k, tokens * ranks) / m.num_experts
    each = work.bytes_per_weight if work.expert_bytes is None else work.expert_bytes
    reading = m.routed_total / m.num_experts * local * hit * each / hbm
    products = 2 * m.routed_active * tokens * rho / rate
    name, dispatch, combine, error = _exchange(m, c, work, ranks, tokens, rho)
    return name, error, dense, dispatch * m.sparse, reading, products, combine * m.sparse


def _step(m: _Model, c: Cluster, chip: Device, work: Workload, ranks: int, tokens: int, local: int,
          rho: float) -> tuple[float, tuple]:
    """Step time in us under the workload's overlap, and the parts without it."""
    parts = _times(m, c, chip, work, ranks, tokens, local, rho)
    _, _, dense, dispatch, reading, products, combine = parts
    expert = max(reading, products)
    if work.overlap == "two_batches" and tokens > 1:
        half = _times(m, c, chip, work, ranks, -(-tokens // 2), local, rho)
        compute, exchange = half[2] + max(half[4], half[5]), half[3] + half[6]
        return 2 * max(compute, exchange) + min(compute, exchange) / len(m.model.layers), parts
    if work.overlap == "chunks" and work.chunks > 1:
        stages = (dispatch, expert, combine)
        starts = c.latency_us * m.sparse * (work.chunks - 1) if ranks > 1 else 0.0
        return dense + max(stages) + (sum(stages) - max(stages)) / work.chunks + starts, parts
    return dense + dispatch + expert + combine, parts


_MOST_RANKS = 1 << 17  # more than any cluster has; each is placed


def plan_cluster(source: Any, cluster: str | Cluster, *, ranks: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128, 256),
                 tokens_per_rank: Sequence[int] = (128,), workload: Workload | None = None,
                 loads: Sequence[float] | None = None, replicas: int = 0) -> ClusterPlan:
    """The sweep over ranks and tokens a rank, for a model (source as for `count`) on a cluster of clusters.json.

    loads: slots of each expert, e.g. `expert_counts` of a routing trace; uniform when None. replicas: further copies
    of hot experts, placed as EPLB does; sizes beyond the number of experts get as many as they need.
    """
    c = find_cluster(cluster)
    chip = find_device(c.device)
    work = workload or Workload()
    for name, values in (("tokens_per_rank", tokens_per_rank), ("ranks", ranks)):
        if not values or min(values) < 1:
            raise ValueError(f"{name}: expected at least 1, got {min(values, default='none')}")
    if max(ranks) > _MOST_RANKS:
        raise ValueError(f"ranks: expected at most {_MOST_RANKS}, got {max(ranks)}")
    models = {tokens: _read(source, work, tokens) for tokens in tokens_per_rank}
    first = models[tokens_per_rank[0]]
    spreads = {size: _spread(first.num_experts, size, loads, replicas) for size in ranks}
    points = [_point(models[tokens], c, chip, work, size, tokens, *spreads[size])
              for tokens in tokens_per_rank for size in ranks]
    return ClusterPlan(first.name, c.name, tuple(points))


def _spread(experts: int, ranks: int, loads: Sequence[float] | None, replicas: int) -> tuple[int, float]:
    """Experts of the fullest rank, and its load over the mean."""
    if replicas < 0:
        raise ValueError(f"replicas: expected at least 0, got {replicas}")
    if loads is not None and len(loads) != experts:
        raise ValueError(f"loads: expected one for each of {experts} experts, got {len(loads)}")
    if loads is not None and not all(0 <= load < inf for load in loads):
        raise ValueError("loads: expected numbers that are finite and not negative")
    copies = max(replicas, ranks - experts)
    return -(-(experts + copies) // ranks), imbalance([1.0] * experts if loads is None else loads, ranks, copies)


def _point(m: _Model, c: Cluster, chip: Device, work: Workload, ranks: int, tokens: int, local: int,
           rho: float) -> Point:
    step, parts = _step(m, c, chip, work, ranks, tokens, local, rho)
    exchange, error, dense, dispatch, reading, products, combine = parts
    each = work.bytes_per_weight if work.expert_bytes is None else work.expert_bytes
    weights = m.other_bytes + m.routed_total / m.num_experts * local * each
    if not m.model.tied:
        weights += m.model.vocab * m.model.d_model * work.bytes_per_weight
    cache = cache_elements(m.model, tokens if work.prefill else work.context) * work.cache_bytes
    cache *= 1 if work.prefill else tokens
    rows = row_bytes(m.model.d_model, work.dispatch) + row_bytes(m.model.d_model, work.combine)
    # Low-latency buffers hold every rank's tokens for every local expert; the others what really arrives.
    buffer = rows * (local * ranks * tokens if exchange == "direct" else tokens * m.top_k * rho) * (ranks > 1)
    costs = {"dense": dense, "expert weights": reading, "expert arithmetic": products, "exchange": dispatch + combine}
    if reading >= products:
        del costs["expert arithmetic"]
    else:
        del costs["expert weights"]
    return Point(ranks, -(-ranks // c.domain), tokens, local, rho, exchange, error, dense, dispatch,
                 max(reading, products), combine, step, tokens / step * 1e6, weights / 1e9, cache / 1e9, buffer / 1e9,
                 (weights + cache + buffer) / 1e9 <= chip.hbm_gb, max(costs, key=lambda key: costs[key]))
