"""What a plan is made for: the clusters of clusters.json, and the work that their ranks do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

EXCHANGES = ("auto", "direct", "hierarchical", "alltoall")
OVERLAPS = ("none", "two_batches", "chunks")


@dataclass(frozen=True)
class Cluster:
    """domain: ranks that share fast links (a node, an NVLink domain); domain_gbs, nic_gbs: GB/s a GPU and direction;
    nic_efficiency: part of it that is sustained; latency_us: of one exchange; low_latency, curve: names of the tables
    of measured.json that the direct model is fitted to and that gives bandwidth by message size."""

    name: str
    device: str
    domain: int
    domain_gbs: float
    nic_gbs: float
    nic_efficiency: float
    latency_us: float
    low_latency: str | None
    curve: str | None
    source: str


@lru_cache(maxsize=1)
def clusters() -> dict[str, Cluster]:
    """The table of clusters.json, by name."""
    data = json.loads(files(__package__).joinpath("clusters.json").read_text(encoding="utf-8"))
    return {entry["name"]: Cluster(**entry) for entry in data}


def find_cluster(cluster: str | Cluster) -> Cluster:
    if isinstance(cluster, Cluster):
        return cluster
    if cluster not in clusters():
        raise ValueError(f"cluster: expected a Cluster or one of {', '.join(clusters())}, got {cluster!r}")
    return clusters()[cluster]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What the ranks do, and in which formats.

    context: past tokens of each sequence. prefill: each rank works on a prompt of its T tokens (causal), else each
    token is a sequence of its own (decoding). dtype: of products; bytes_per_weight, expert_bytes, cache_bytes: of what
    is read. dispatch, combine: formats on the wire. exchange: auto takes the quickest the cluster has. overlap: none;
    two_batches (one computes while the other communicates); chunks (each exchange in `chunks` pieces).
    node_limit: nodes a token may go to (node-limited routing). compute, bandwidth: reached part of the device's rates.
    """

    context: int = 0
    prefill: bool = False
    dtype: str = "fp8"
    bytes_per_weight: float = 1.0
    expert_bytes: float | None = None
    cache_bytes: float = 1.0
    dispatch: str = "fp8"
    combine: str = "bf16"
    exchange: str = "auto"
    overlap: str = "none"
    chunks: int = 1
    node_limit: int | None = None
    compute: float = 1.0
    bandwidth: float = 1.0

    def __post_init__(self) -> None:
        for name, value, allowed in (("exchange", self.exchange, EXCHANGES), ("overlap", self.overlap, OVERLAPS)):
            if value not in allowed:
                raise ValueError(f"workload.{name}: expected one of {', '.join(allowed)}, got {value!r}")
        for name in ("compute", "bandwidth"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"workload.{name}: expected a part of 1, got {getattr(self, name)}")
        for name, least in (("context", 0), ("chunks", 1), ("node_limit", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"workload.{name}: expected at least {least}, got {value}")
        for name in ("bytes_per_weight", "expert_bytes", "cache_bytes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"workload.{name}: expected more than 0, got {value}")
