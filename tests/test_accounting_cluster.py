"""The plan of a cluster: what rises, what falls and what binds as ranks, batch, exchange and balance vary."""

import time
from itertools import pairwise

import pytest

from moeffn.accounting import Workload, count, plan_cluster
from moeffn.accounting.links import measured
from moeffn.accounting.workload import Cluster, clusters

WORK = Workload(context=4096)


def test_plan_of_deepseek_v3():
    """More ranks read fewer experts each, and pay for it in messages: one rises, the other falls, one of them binds."""
    found = plan_cluster("DeepSeek-V3", "H800", ranks=(8, 16, 32, 64, 128, 256), tokens_per_rank=(32,), workload=WORK)
    points = found.points
    assert [p.experts_per_rank for p in points] == [32, 16, 8, 4, 2, 1]
    assert not points[0].fits
    assert points[1].fits
    expert = 58 * 3 * 7168 * 2048
    assert points[0].weights_gb - points[1].weights_gb == pytest.approx(16 * expert / 1e9)
    assert all(a.expert_us > b.expert_us and a.dispatch_us < b.dispatch_us for a, b in pairwise(points))
    assert points[0].binds == "expert weights"
    assert points[-1].binds in ("exchange", "dense")
    for p in points:
        assert p.step_us == pytest.approx(p.dense_us + p.dispatch_us + p.expert_us + p.combine_us)
        assert p.tokens_per_s == pytest.approx(p.ranks * p.tokens_per_rank / p.step_us * 1e6)
    stop = found.stops_paying(32)
    assert found.best is not None and stop is not None
    assert stop.ranks <= found.best.ranks
    large = plan_cluster("DeepSeek-V3", "H800", ranks=(16, 32, 64, 128, 256), tokens_per_rank=(128,), workload=WORK)
    assert large.stops_paying(128).ranks < 256  # a larger batch reads its experts anyway


def test_exchange_of_the_plan_is_the_table():
    """At the table's own sizes the plan's direct exchange is the fitted model, layer by layer."""
    work = Workload(context=0, exchange="direct")
    p = plan_cluster("DeepSeek-V3", "H800", ranks=(64,), tokens_per_rank=(128,), workload=work).points[0]
    table = measured()["low_latency"]["H800+CX7"]
    assert p.dispatch_us / 58 == pytest.approx(table["dispatch_us"]["64"], rel=0.05)
    assert p.combine_us / 58 == pytest.approx(table["combine_us"]["64"], rel=0.05)
    assert 0 < p.exchange_error < 0.05


def test_node_copies_matter_most_at_few_nodes():
    """Hierarchical against plain all-to-all: more to gain at 2 nodes than at 32; auto never takes the slower."""
    times = {}
    for exchange in ("hierarchical", "alltoall", "auto"):
        points = plan_cluster("DeepSeek-V3", "H100", ranks=(16, 256), tokens_per_rank=(4096,),
                              workload=Workload(prefill=True, exchange=exchange)).points
        times[exchange] = [p.dispatch_us + p.combine_us for p in points]
    gain = [plain / better for plain, better in zip(times["alltoall"], times["hierarchical"], strict=True)]
    assert gain[0] > 2 * gain[1] > 2
    assert all(auto <= other for auto, other in zip(times["auto"], times["hierarchical"], strict=True))
    limited = plan_cluster("DeepSeek-V3", "H100", ranks=(64,), tokens_per_rank=(4096,),
                           workload=Workload(prefill=True, exchange="hierarchical", node_limit=4)).points[0]
    free = plan_cluster("DeepSeek-V3", "H100", ranks=(64,), tokens_per_rank=(4096,),
                        workload=Workload(prefill=True, exchange="hierarchical")).points[0]
    assert limited.dispatch_us < 0.8 * free.dispatch_us


def test_imbalance_slows_a_plan_and_replicas_mend_it():
    loads = [10.0] * 8 + [1.0] * 248
    options = {"ranks": (32,), "tokens_per_rank": (256,), "workload": Workload(exchange="hierarchical")}
    even = plan_cluster("DeepSeek-V3", "H800", **options).points[0]
    skewed = plan_cluster("DeepSeek-V3", "H800", loads=loads, **options).points[0]
    mended = plan_cluster("DeepSeek-V3", "H800", loads=loads, replicas=32, **options).points[0]
    assert skewed.rho == pytest.approx(80 / (328 / 32))
    assert even.rho == 1 < mended.rho < 1.3 < skewed.rho
    assert even.step_us < mended.step_us < skewed.step_us
    assert mended.experts_per_rank == 9
    with pytest.raises(ValueError, match="loads: expected one for each of 256 experts"):
        plan_cluster("DeepSeek-V3", "H800", loads=[1.0], **options)
    with pytest.raises(ValueError, match="loads: expected numbers that are finite and not negative"):
        plan_cluster("DeepSeek-V3", "H800", loads=[float("nan")] * 256, **options)


def test_overlap():
    plain, two, chunks = (
        plan_cluster("DeepSeek-V3", "H800", ranks=(64,), tokens_per_rank=(512,),
                     workload=Workload(context=4096, overlap=overlap, chunks=4)).points[0]
        for overlap in ("none", "two_batches", "chunks"))
    parts = plain.dense_us + plain.expert_us, plain.dispatch_us + plain.combine_us
    assert max(parts) < two.step_us < plain.step_us
    assert plain.dense_us + max(plain.dispatch_us, plain.expert_us, plain.combine_us) < chunks.step_us < plain.step_us


def test_one_rank_exchanges_nothing_and_agrees_with_the_roofline():
    from moeffn.accounting import roofline

    work = Workload(dtype="bf16", bytes_per_weight=2)
    point = plan_cluster("Qwen3-30B-A3B", "H200", ranks=(1,), tokens_per_rank=(16,), workload=work).points[0]
    assert (point.exchange, point.dispatch_us, point.buffer_gb) == ("none", 0, 0)
    bound = roofline("Qwen3-30B-A3B", "H200", (16,))[0]
    assert point.tokens_per_s_per_gpu == pytest.approx(bound.tokens_per_s, rel=1e-3)
    assert point.weights_gb == pytest.approx(2 * count("Qwen3-30B-A3B").total / 1e9)


def test_expert_parallelism_stays_inside_a_site():
    inside, across = plan_cluster("DeepSeek-V3", "sites", ranks=(64, 128)).points
    assert across.tokens_per_s_per_gpu < inside.tokens_per_s_per_gpu
    assert across.step_us / 1e6 > 58 * 2 * 0.02  # a round trip of 20 ms for each exchange


def test_a_sweep_to_thousands_of_ranks_is_quick():
    start = time.process_time()
    found = plan_cluster("Qwen3-30B-A3B", "GB200-NVL72", ranks=tuple(range(64, 4097, 64)), tokens_per_rank=(64,))
    assert len(found.points) == 64
    assert time.process_time() - start < 5
    assert found.points[-1].experts_per_rank == 1


def test_bad_plans():
    with pytest.raises(ValueError, match="cluster: expected a Cluster or one of H800"):
        plan_cluster("DeepSeek-V3", "H8000")
    with pytest.raises(ValueError, match="has no routed experts"):
        plan_cluster("Llama-3.1-8B", "H800")
    with pytest.raises(ValueError, match="ranks: expected at least 1"):
        plan_cluster("DeepSeek-V3", "H800", ranks=(0,))
    with pytest.raises(ValueError, match="ranks: expected at most 131072"):
        plan_cluster("DeepSeek-V3", "H800", ranks=[10**11])
    with pytest.raises(ValueError, match="tokens_per_rank: expected at least 1"):
        plan_cluster("DeepSeek-V3", "H800", tokens_per_rank=(0,))
    with pytest.raises(ValueError, match=r"workload\.overlap: expected one of none"):
        Workload(overlap="some")
    with pytest.raises(ValueError, match=r"workload\.compute: expected a part of 1"):
        Workload(compute=0)
    with pytest.raises(ValueError, match="has no measured table for 'direct'"):
        plan_cluster("DeepSeek-V3", "GB200-NVL72", ranks=(144,), workload=Workload(exchange="direct"))


def test_every_cluster_has_a_source_and_a_device():
    for cluster in clusters().values():
        assert isinstance(cluster, Cluster) and cluster.source
        plan_cluster("Qwen3-30B-A3B", cluster, ranks=(2, cluster.domain * 2), tokens_per_rank=(8,))


@pytest.mark.parametrize(("cluster", "ranks", "tokens", "context", "prefill", "published"), [
    ("H100", 72, 256, 2000, False, 22300 / 8),  # SGLang on 12 nodes, tokens/s a node of 8
    ("H100", 32, 8192, 0, True, 52300 / 8),
    ("H800", 144, 128, 4989, False, 14800 / 8),  # DeepSeek's own service
    ("H200", 16, 256, 2000, False, 2200),  # vLLM with wide expert parallelism
])
def test_published_deployments_are_below_the_bounds(cluster, ranks, tokens, context, prefill, published):
    """DeepSeek-V3 served, both batches overlapped: the plan is a bound, which real services reach a part of."""
    work = Workload(context=context, prefill=prefill, overlap="two_batches")
    point = plan_cluster("DeepSeek-V3", cluster, ranks=(ranks,), tokens_per_rank=(tokens,), workload=work).points[0]
    assert point.fits
    assert 0.2 < published / point.tokens_per_s_per_gpu < 0.7
