"""One rank's share against one process: what the cases of the suites have in common.

Every rank builds the whole problem from seeds on the CPU, puts it on its device, and computes the one-process answer
itself.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from moeffn import MoEConfig, MoEFFN
from moeffn.distributed import ParallelConfig, Placement, clip_grad_norm_, make_mesh, parallelize, reduce_gradients

D, F = 8, 6


def config(E: int = 5, K: int = 2, **more: object) -> MoEConfig:
    return MoEConfig(d_model=D, d_expert=F, num_experts=E, top_k=K, **more)


def close(got: Tensor, want: Tensor, what: str, rtol: float = 1e-11, atol: float = 1e-12) -> None:
    got = got.to_local() if isinstance(got, DTensor) else got
    assert got.shape == want.shape, (what, got.shape, want.shape)
    assert torch.allclose(got, want, rtol=rtol, atol=atol), (what, (got - want).abs().max())


def own_part(name: str, whole: Tensor, mesh: DeviceMesh, placement: Placement) -> Tensor:
    """This rank's share of a whole tensor of the one-process layer."""
    if "experts." not in name:
        return whole
    held = placement.experts_of_rank[mesh.get_local_rank("ep")]
    return whole[list(held)]


def same_gradients(parallel: nn.Module, whole: nn.Module, mesh: DeviceMesh, E: int) -> None:
    placement = Placement.chunked(E, mesh["ep"].size())
    reference = dict(whole.named_parameters())
    seen = 0
    for name, p in parallel.named_parameters():
        want = reference[name].grad
        assert p.grad is not None and want is not None, name
        close(p.grad, own_part(name, want, mesh, placement), name)
        seen += 1
    assert seen == len(reference)


class Ranks:
    """W ranks of a running group, each with its device; subclasses hold the cases, methods whose names start with
    case_. What they compute with goes through `put`, `layer` or `batches`, or names self.device."""

    def __init__(self, W: int, rank: int, folder: Path, device: torch.device) -> None:
        self.W, self.rank, self.folder, self.device = W, rank, folder, device
        self.mesh = self.mesh_of(W)
        self.checkpoint = folder.parent / "checkpoint"

    def mesh_of(self, ep: int) -> DeviceMesh:
        return make_mesh(ep, device_type=self.device.type)

    def put(self, thing: Any) -> Any:
        """A tensor or module that was built on the CPU, on this rank's device."""
        return thing.to(self.device)

    def layer(self, c: MoEConfig, seed: int = 11) -> MoEFFN:
        torch.manual_seed(seed)
        return self.put(MoEFFN(c, backend="torch", dtype=torch.float64))

    def batches(self, tokens: list[int], seed: int = 5) -> list[Tensor]:
        g = torch.Generator().manual_seed(seed)
        return [self.put(torch.randn(t, D, generator=g, dtype=torch.float64)) for t in tokens]

    def _tokens(self) -> list[int]:
        return [7, 0, 4, 1, 3, 5, 0, 2][: self.W] if self.W > 2 else [5, 3]

    def _compare(self, c: MoEConfig, mesh: DeviceMesh, parallel_config: ParallelConfig, tokens: list[int], *,
                 steps: int = 1, recompute: bool = False) -> None:
        """Forward, `steps` accumulated micro-batches backward, reduce, norm: all equal to one process."""
        whole = self.layer(c)
        par = parallelize(copy.deepcopy(whole), mesh, parallel_config)
        W, rank, total = self.W, self.rank, sum(tokens)
        data = [self.batches(tokens, seed=5 + i) for i in range(steps)]
        for xs in data:
            X = torch.cat(xs).requires_grad_()
            Y = whole(X)
            loss = (Y.square().sum(1)).sum() / total
            loss.backward()
            x = xs[rank].clone().requires_grad_()
            y = checkpoint(par, x, use_reentrant=False) if recompute else par(x)
            # loss="sum": the global loss is the sum of these; "mean": their mean
            part = y.square().sum() / total
            (part * W if parallel_config.loss == "mean" else part).backward()
            close(y.detach(), Y.detach().split(tokens)[rank], "y")
            gx = x.grad / (W if parallel_config.loss == "mean" else 1)
            close(gx, X.grad.split(tokens)[rank], "x.grad")
        reduce_gradients(par)
        same_gradients(par, whole, mesh, c.num_experts)
        want = nn.utils.clip_grad_norm_(whole.parameters(), 0.01)
        got = clip_grad_norm_(par, 0.01)
        close(got, want.to(got.dtype), "norm")
        same_gradients(par, whole, mesh, c.num_experts)  # after clipping, too
