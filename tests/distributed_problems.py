"""Problems for the dispatchers, and what one process makes of them. Used in this process and by spawned ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moeffn import ExpertWeights, Routing, moe_ffn
from moeffn.distributed import AllGather, AllToAll, Dispatcher, Handle, Placement, Transport, TwoLevel, local_experts


@dataclass
class Problem:
    """Weights of E experts, and each rank's tokens, ids, weights and output gradients."""

    placement: Placement
    w_in: Tensor
    w_out: Tensor
    x: list[Tensor]
    ids: list[Tensor]
    weights: list[Tensor]
    dy: list[Tensor]
    apply_to: str

    @property
    def W(self) -> int:
        return self.placement.num_ranks


def random_problem(seed: int, dtype: torch.dtype = torch.float64, W: int | None = None,
                   device: torch.device | None = None) -> Problem:
    """A random problem; the seed also walks through the special cases that break exchanges."""
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    W = rng.choice([1, 2, 3, 4, 4, 6, 8, 16]) if W is None else W
    E = rng.choice([1, 3, W, W + 1, 2 * W, 3 * W + 2])  # fewer experts than ranks, one each, uneven
    K = rng.randint(1, min(E, 6))
    D, F = rng.randint(1, 9), rng.randint(1, 6)
    placement = Placement.balanced(E, W) if rng.random() < 0.5 else Placement.chunked(E, W)
    if rng.random() < 0.3:  # replicas: every rank gets another expert that it lacks, when there is one
        held = [list(h) for h in placement.experts_of_rank]
        for h in held:
            spare = sorted(set(range(E)) - set(h))
            h += rng.sample(spare, min(1, len(spare)))
        placement = Placement(E, tuple(tuple(h) for h in held))
    if rng.random() < 0.2 and W > 1:  # a rank that is gone: its experts live elsewhere or nowhere
        placement = placement.without([rng.randrange(W)])
    kind = rng.choice(["random", "hot", "distinct", "hole", "none"])
    ids, x = [], []
    for _ in range(W):
        T = rng.choice([0, 1, 2, 5, 11])
        if kind == "hot":  # every slot to rank 0's first expert: duplicates and idle ranks
            one = torch.zeros(T, K, dtype=torch.int64)
        elif kind == "distinct":
            one = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(T)]) if T else torch.zeros(0, K)
        elif kind == "hole":  # ids beyond E and -1 are not routed
            one = torch.randint(-2, E + 2, (T, K), generator=g)
        elif kind == "none":
            one = torch.full((T, K), -1)
        else:
            one = torch.randint(0, E, (T, K), generator=g)
        ids.append(one.to(torch.int32))
        x.append(torch.randn(T, D, generator=g, dtype=torch.float64).to(dtype))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights = [torch.rand(i.shape, generator=g, dtype=torch.float64).to(wide) for i in ids]
    w_in = (torch.randn(E, 2 * F, D, generator=g, dtype=torch.float64) / D**0.5).to(dtype)
    w_out = (torch.randn(E, D, F, generator=g, dtype=torch.float64) / F**0.5).to(dtype)
    dy = [torch.randn(t.shape, generator=g, dtype=torch.float64).to(dtype) for t in x]
    w_in, w_out = w_in.to(device), w_out.to(device)
    x, ids, weights, dy = ([t.to(device) for t in ts] for ts in (x, ids, weights, dy))
    return Problem(placement, w_in, w_out, x, ids, weights, dy, rng.choice(["output", "input"]))


def leaf(t: Tensor) -> Tensor:
    return t.clone().requires_grad_()


def one_process(p: Problem) -> dict[str, Tensor]:
    """Output and gradients of all tokens in one process; slots of missing experts do not exist."""
    ids = torch.cat(p.ids)
    lost = torch.tensor([*(e in p.placement.missing for e in range(p.placement.num_experts)), False], device=ids.device)
    inside = (ids >= 0) & (ids < p.placement.num_experts)
    ids = torch.where(inside & ~lost[torch.where(inside, ids, -1).long()], ids, -1)
    x, w, a, b = leaf(torch.cat(p.x)), leaf(torch.cat(p.weights)), leaf(p.w_in), leaf(p.w_out)
    y = moe_ffn(x, Routing(ids, w, apply_to=p.apply_to), ExpertWeights(a, b), backend="torch")
    y.backward(torch.cat(p.dy))
    return {"y": y.detach(), "x": x.grad, "weights": w.grad, "w_in": a.grad, "w_out": b.grad}


@dataclass
class Ran:
    """What one rank computed."""

    tensors: dict[str, Tensor]
    handle: Handle
    sent: dict[str, int]
    exchanges: int


def on_rank(p: Problem, dispatcher: Dispatcher, transport: Transport) -> Ran:
    r = transport.rank
    held = list(p.placement.experts_of_rank[r])
    x, w, a, b = leaf(p.x[r]), leaf(p.weights[r]), leaf(p.w_in[held]), leaf(p.w_out[held])
    batch = dispatcher.dispatch(x, Routing(p.ids[r], w, apply_to=p.apply_to))
    out = dispatcher.combine(local_experts(batch.x, batch.routing, ExpertWeights(a, b), backend="torch"), batch.handle)
    out.backward(p.dy[r])
    sent = dict(transport.sent_bytes)
    exchanges = transport.exchanges
    for inner in (getattr(dispatcher, "across", None), getattr(dispatcher, "inside", None)):
        for key, n in (inner.sent_bytes if inner else {}).items():
            sent[key] = sent.get(key, 0) + n
        exchanges += inner.exchanges if inner else 0
    return Ran({"y": out.detach(), "x": x.grad, "weights": w.grad, "w_in": a.grad, "w_out": b.grad}, batch.handle, sent,
               exchanges)


def gathered(p: Problem, ran: list[Ran]) -> dict[str, Tensor]:
    """The ranks' results as one process has them: tokens in rank order, experts by id, replicas' gradients summed."""
    out = {name: torch.cat([r.tensors[name] for r in ran]) for name in ("y", "x", "weights")}
    for name, like in (("w_in", p.w_in), ("w_out", p.w_out)):
        total = torch.zeros_like(like)
        for r, held in zip(ran, p.placement.experts_of_rank, strict=True):
            for slot, e in enumerate(held):
                total[e] += r.tensors[name][slot]
        out[name] = total
    return out


Make = Callable[[Transport, Placement], Dispatcher]
DISPATCHERS: dict[str, Make] = {
    "rank": lambda t, p: AllToAll(t, p),
    "none": lambda t, p: AllToAll(t, p, dedup="none"),
    "gather": lambda t, p: AllGather(t, p),
    "two level": lambda t, p: TwoLevel(t, p, ranks_per_node=2 if t.size % 2 == 0 else t.size),
    "budget": lambda t, p: AllToAll(t, p, budget=11),  # the largest T: nothing is dropped
}
