"""Expert parallelism: tokens travel to the ranks of their experts and back, exactly, over NCCL or gloo."""

from .dispatchers import AllGather, AllToAll, Batch, Dispatcher, Handle, Local, TwoLevel
from .errors import ExchangeError, MismatchError, RankAbsentError
from .functional import expert_parallel_ffn, local_experts
from .placement import Placement
from .transport import GroupTransport, LoopbackTransport, Transport, run_loopback

__all__ = [
    "AllGather", "AllToAll", "Batch", "Dispatcher", "ExchangeError", "GroupTransport", "Handle", "Local",
    "LoopbackTransport", "MismatchError", "Placement", "RankAbsentError", "Transport", "TwoLevel",
    "expert_parallel_ffn", "local_experts", "run_loopback",
]
