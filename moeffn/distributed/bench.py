"""One expert-parallel block measured on the ranks of a running group: what it takes, moves, and where time goes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..accounting.traffic import distinct_in_trace
from ..config import MoEConfig
from ..functional import moe_ffn
from ..types import ExpertWeights, Routing
from .cost import estimate, expected_destinations
from .dispatchers import Batch, Dispatcher, Handle, TwoLevel
from .functional import expert_parallel_ffn, local_experts
from .parallel import make_dispatcher
from .payload import RowFormat
from .placement import Placement
from .transport import GroupTransport


@dataclass(frozen=True)
class Measured:
    """Medians over the calls, of the slowest rank in each call, in seconds; bytes of rank 0 that leave it in one step.

    forward, step       the block without router and shared expert: forward, and forward + backward
    dispatch, experts, combine   the parts of the forward, each ended by a barrier
    exchange_only       dispatch, combine and their backwards with experts that do nothing
    raw                 bare all_to_all_single calls of the same bytes and splits, announcements included
    bytes_forward       what the handle says; bytes_sent: what the transport counted; bytes_expected: by D(G)
    destinations        ranks that a token of rank 0 goes to, its own included: the mean of this routing, and D(G)
    """

    dispatcher: str
    ranks: int
    tokens_per_rank: int
    forward: float
    step: float
    dispatch: float
    experts: float
    combine: float
    exchange_only: float
    raw: float
    bytes_forward: int
    bytes_sent: int
    bytes_expected: float
    destinations: float
    destinations_expected: float

    @property
    def overhead_of_step(self) -> float:
        """What the exchange costs beyond its bytes' own time, as a share of the step: measured by itself, because a
        step minus its experts is mostly the wait for whichever rank's experts were slower."""
        return (self.exchange_only - self.raw) / self.step

    def as_row(self) -> dict[str, Any]:
        return asdict(self) | {"overhead_of_step": self.overhead_of_step,
                               "tokens_per_s_per_rank": self.tokens_per_rank / self.step,
                               "tokens_per_s": self.ranks * self.tokens_per_rank / self.step}


class Block:
    """The experts of this rank with random weights, and one batch of uniformly routed tokens."""

    def __init__(self, config: MoEConfig, tokens: int, *, dispatcher: str, dtype: torch.dtype, device: torch.device,
                 seed: int = 0, local_first: bool = False) -> None:
        self.local_first = local_first
        self.config, self.tokens, self.dtype, self.name = config, tokens, dtype, dispatcher
        self.transport = GroupTransport(deadline=120.0 if device.type == "cpu" else None)
        E, K, D, F = config.num_experts, config.top_k, config.d_model, config.d_expert
        self.placement = Placement.balanced(E, self.transport.size)
        self.dispatcher: Dispatcher = make_dispatcher(dispatcher, self.transport, self.placement)
        g = torch.Generator().manual_seed(seed * 1009 + self.transport.rank)
        L = len(self.placement.experts_of_rank[self.transport.rank])
        shapes = ((L, config.activation.width_in(F), D), (L, D, F))
        w_in, w_out = ((torch.empty(s, dtype=dtype).uniform_(-1, 1, generator=g) * (3 / s[2]) ** 0.5).to(device)
                       for s in shapes)
        self.weights = ExpertWeights(w_in.requires_grad_(), w_out.requires_grad_(), activation=config.activation,
                                     layout=config.layout)
        self.x = torch.randn(tokens, D, generator=g).to(device, dtype).requires_grad_()
        ids = torch.rand(tokens, E, generator=g).topk(K).indices.to(torch.int32).to(device)
        self.routing = Routing(ids, torch.full((tokens, K), 1.0 / K, device=device))
        self.dy = torch.randn(tokens, D, generator=g).to(device, dtype)

    def forward(self) -> Tensor:
        return expert_parallel_ffn(self.x, self.routing, self.weights, self.dispatcher, local_first=self.local_first)

    def step(self) -> None:
        self.forward().backward(self.dy)
        self.x.grad = self.weights.w_in.grad = self.weights.w_out.grad = None

    def exchange_only(self) -> None:
        batch = self.dispatcher.dispatch(self.x, self.routing)
        self.dispatcher.combine(batch.x, batch.handle).backward(self.dy)
        self.x.grad = None

    def raw(self, handle: Handle) -> Callable[[], None]:
        """Bare collectives with the bytes and splits of one step of this handle."""
        D, G = self.config.d_model, self.transport.size
        announced = handle.bytes_counts // max(1, G - 1)
        calls: list[Any] = [(self.transport.group, announced, (1,) * G, (1,) * G)]
        for hop in handle.hops:
            group = hop.transport.group  # type: ignore[attr-defined]
            out = RowFormat.token(D, self.dtype, hop.C, torch.float32).row_bytes
            back = RowFormat.gradient(D, self.dtype, hop.C, torch.float32).row_bytes
            plain = RowFormat.vector(D, self.dtype).row_bytes
            calls += [(group, out, hop.send, hop.recv), (group, plain, hop.recv, hop.send),
                      (group, plain, hop.send, hop.recv), (group, back, hop.recv, hop.send)]
        buffers = [(torch.zeros(sum(send), row, dtype=torch.uint8, device=self.x.device),
                    torch.zeros(sum(recv), row, dtype=torch.uint8, device=self.x.device), list(send), list(recv), group)
                   for group, row, send, recv in calls]

        def run() -> None:
            for source, target, send, recv, group in buffers:
                dist.all_to_all_single(target, source, recv, send, group=group)

        return run

    def expected_bytes(self) -> float:
        """Dispatch and combine bytes that leave a rank, by D(G) for uniform routing: a mean over ranks."""
        c = self.config
        per_node = self.dispatcher.inside.size if isinstance(self.dispatcher, TwoLevel) else None
        table = estimate(self.placement, tokens=self.tokens, d_model=c.d_model, top_k=c.top_k, dtype=self.dtype,
                         ranks_per_node=per_node)
        return next(e.bytes for e in table if e.name == self.name)

    def destinations(self) -> float:
        """Mean number of ranks that a token of this rank goes to."""
        ranks = [self.placement.owner(e) for e in range(self.config.num_experts)]
        return distinct_in_trace(self.routing.experts.tolist(), ranks)

    def sent(self, handle: Handle) -> int:
        """Bytes of dispatches and combines that the transports have counted so far."""
        transports = {id(h.transport): h.transport for h in handle.hops}
        return sum(t.sent_bytes.get(k, 0) for t in transports.values() for k in ("dispatch", "combine"))

    def measure(self, calls: int = 7) -> Measured:
        """Every part once a round, so that what disturbs the machine disturbs all of them alike."""
        held: dict[str, Any] = {}

        def forward() -> None:
            self.forward()

        def dispatch() -> None:
            held["batch"] = self.dispatcher.dispatch(self.x, self.routing)

        def experts() -> None:
            held["y"] = local_experts(held["batch"].x, held["batch"].routing, self.weights)

        def combine() -> None:
            self.dispatcher.combine(held["y"], held["batch"].handle)

        with torch.no_grad():
            dispatch()
        batch: Batch = held["batch"]
        before = self.sent(batch.handle)
        self.step()
        sent = self.sent(batch.handle) - before
        parts: dict[str, Callable[[], None]] = {
            "forward": torch.no_grad()(forward), "dispatch": torch.no_grad()(dispatch),
            "experts": torch.no_grad()(experts), "combine": torch.no_grad()(combine), "step": self.step,
            "exchange_only": self.exchange_only, "raw": self.raw(batch.handle)}
        found: dict[str, list[float]] = {name: [] for name in parts}
        for i in range(calls + 1):
            for name, call in parts.items():
                seconds = slowest(call, self.x.device)
                if i:  # the first round warms up
                    found[name].append(seconds)
        return Measured(
            self.name, self.transport.size, self.tokens,
            **{name: statistics.median(samples) for name, samples in found.items()},
            bytes_forward=batch.handle.bytes_dispatch + batch.handle.bytes_combine, bytes_sent=sent,
            bytes_expected=self.expected_bytes(), destinations=self.destinations(),
            destinations_expected=expected_destinations(
                self.config.num_experts, self.config.top_k, [len(h) for h in self.placement.experts_of_rank]))


def slowest(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a collective call that begins at a barrier, on the slowest rank."""
    dist.barrier()
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64, device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return float(seconds)


def largest_error(dispatcher: str, *, seed: int = 0, device: torch.device | None = None) -> float:
    """A float64 problem on every rank of the running group against one process: the largest relative error of outputs
    and gradients. Ranks have different numbers of tokens, the last none."""
    device = device or torch.device("cpu")
    transport = GroupTransport()
    W, rank = transport.size, transport.rank
    E, K, D, F = 2 * W + 1, min(3, 2 * W + 1), 16, 8
    placement = Placement.balanced(E, W)
    g = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(device)

    tokens = [0 if r == W - 1 and W > 1 else 5 + 3 * r for r in range(W)]
    w_in, w_out, x, dy = random(E, 2 * F, D), random(E, D, F), random(sum(tokens), D), random(sum(tokens), D)
    ids = torch.rand(sum(tokens), E, generator=g).topk(K).indices.to(torch.int32).to(device)
    weights = random(sum(tokens), K).abs()

    def leaf(t: Tensor) -> Tensor:
        return t.detach().clone().requires_grad_()

    def run(x: Tensor, ids: Tensor, w: Tensor, a: Tensor, b: Tensor, dy: Tensor,
            f: Callable[[Tensor, Routing, ExpertWeights], Tensor]) -> list[Tensor]:
        leaves = [leaf(t) for t in (x, w, a, b)]
        y = f(leaves[0], Routing(ids, leaves[1]), ExpertWeights(leaves[2], leaves[3]))
        y.backward(dy)
        return [y.detach(), *(t.grad for t in leaves if t.grad is not None)]

    d = make_dispatcher(dispatcher, transport, placement)

    def parallel(x: Tensor, routing: Routing, ew: ExpertWeights) -> Tensor:
        batch = d.dispatch(x, routing)
        return d.combine(local_experts(batch.x, batch.routing, ew), batch.handle)

    want = run(x, ids, weights, w_in, w_out, dy, moe_ffn)
    mine = slice(sum(tokens[:rank]), sum(tokens[: rank + 1]))
    held = list(placement.experts_of_rank[rank])
    got = run(x[mine], ids[mine], weights[mine], w_in[held], w_out[held], dy[mine], parallel)
    share = [want[0][mine], want[1][mine], want[2][mine], want[3][held], want[4][held]]
    worst = max(float((g - s).abs().max() / w.abs().max()) if s.numel() else 0.0
                for g, s, w in zip(got, share, want, strict=True))
    found = torch.tensor([worst], dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)
