"""Expert parallelism: tokens travel to the ranks of their experts and back, exactly, over NCCL or gloo."""

from .dispatchers import AllGather, AllToAll, Batch, Dispatcher, Handle, Local, TwoLevel
from .errors import ExchangeError, MismatchError, RankAbsentError
from .functional import expert_parallel_ffn, local_experts
from .gradients import clip_grad_norm_, grad_norm, reduce_gradients, update_selection_biases
from .parallel import ParallelConfig, ParallelExperts, ParallelMoEFFN, make_dispatcher, make_mesh, parallelize
from .placement import Placement
from .replicas import Replicator, balance_replicas
from .sharding import fsdp
from .transport import GroupTransport, LoopbackTransport, Transport, run_loopback

__all__ = [
    "AllGather", "AllToAll", "Batch", "Dispatcher", "ExchangeError", "GroupTransport", "Handle", "Local",
    "LoopbackTransport", "MismatchError", "ParallelConfig", "ParallelExperts", "ParallelMoEFFN", "Placement",
    "RankAbsentError", "Replicator", "Transport", "TwoLevel", "balance_replicas", "clip_grad_norm_",
    "expert_parallel_ffn", "fsdp", "grad_norm", "local_experts", "make_dispatcher", "make_mesh", "parallelize",
    "reduce_gradients", "run_loopback", "update_selection_biases",
]
