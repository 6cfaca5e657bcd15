"""Cases of a training step: losses, accumulation, recomputation, masks, the bias, data parallel, FSDP2."""

from __future__ import annotations

import copy

import torch
from distributed_compare import D, Ranks, close, config, own_part, same_gradients
from distributed_ranks import only_on
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import moeffn
from moeffn import MoEFFN
from moeffn.distributed import (
    ParallelConfig,
    ParallelExperts,
    Placement,
    clip_grad_norm_,
    fsdp,
    parallelize,
    reduce_gradients,
    update_selection_biases,
)


class TrainingCases(Ranks):
    """What a training loop does with the layer."""

    def case_layer_with_shared_expert_sum(self) -> None:
        self._compare(config(d_shared=4, bias=True, router_bias=True), self.mesh, ParallelConfig(loss="sum",
                      deadline=30), self._tokens())

    def case_losses_of_the_global_batch(self) -> None:
        """Load-balance and z losses: identical data on every rank, and different; both loss conventions."""
        for loss in ("sum", "mean"):
            self._compare(config(aux_loss_coef=0.3, z_loss_coef=0.1), self.mesh, ParallelConfig(loss=loss),
                          self._tokens())
            c = config(aux_loss_coef=0.3)
            whole = self.layer(c)
            par = parallelize(copy.deepcopy(whole), self.mesh, ParallelConfig(loss=loss))
            x = self.batches([6])[0]
            whole(x.repeat(self.W, 1)).mul(0).sum().backward()
            par(x).mul(0).sum().backward()
            reduce_gradients(par)
            assert whole.router.weight.grad.abs().max() > 1e-4
            close(par.router.weight.grad, whole.router.weight.grad, loss)

    def case_gradient_accumulation(self) -> None:
        self._compare(config(d_shared=4), self.mesh, ParallelConfig(loss="sum"), self._tokens(), steps=3)

    def case_activation_checkpointing(self) -> None:
        self._compare(config(d_shared=4, aux_loss_coef=0.3), self.mesh, ParallelConfig(loss="sum"), self._tokens(),
                      recompute=True)

    def case_masked_tokens(self) -> None:
        """A mask on the losses and the routing: as one process; the mask and the caller's counts are not changed."""
        c = config(aux_loss_coef=0.3, selection_bias=True)
        whole = self.layer(c)
        par = parallelize(copy.deepcopy(whole), self.mesh, ParallelConfig(loss="sum"))
        tokens = self._tokens()
        xs = self.batches(tokens)
        masks = [self.put(torch.arange(len(x)) % 3 != 1) for x in xs]
        kept = masks[self.rank].clone()
        whole(torch.cat(xs), token_mask=torch.cat(masks)).sum().backward()
        par(xs[self.rank], token_mask=masks[self.rank]).sum().backward()
        assert torch.equal(masks[self.rank], kept)
        mine = par.router.counts.clone()
        assert int(mine.sum()) == 2 * int(kept.sum())
        reduce_gradients(par)
        same_gradients(par, whole, self.mesh, c.num_experts)

    def case_selection_bias_and_optimizer_steps(self) -> None:
        """Three AdamW steps of two micro-batches, one of them recomputed: clipped, and one bias update a step from the
        load of all expert- and data-parallel ranks. Parameters and bias stay those of one process."""
        c = config(selection_bias=True, d_shared=4)
        mesh = self.mesh_of(2) if self.W % 2 == 0 else self.mesh
        whole = self.layer(c)
        par = parallelize(copy.deepcopy(whole), mesh, ParallelConfig(loss="sum"))
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False) for m in (par, whole))
        placement = Placement.chunked(5, mesh["ep"].size())
        for step in range(3):
            for part in range(2):
                xs = self.batches(self._tokens(), seed=2 * step + part)
                whole(torch.cat(xs)).square().sum().backward()
                mine = xs[self.rank].requires_grad_()
                y = checkpoint(par, mine, use_reentrant=False) if part else par(mine)
                y.square().sum().backward()
            reduce_gradients(par)
            clip_grad_norm_(par, 1.0)
            nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
            ours.step()
            theirs.step()
            assert int(whole.router.counts.sum()) == 2 * 2 * sum(self._tokens())
            bias = moeffn.update_selection_bias(whole.router.selection_bias, whole.router.counts, 1e-2)
            whole.router.selection_bias.copy_(bias)
            whole.router.reset_counts()
            update_selection_biases(par, 1e-2)
            assert int(par.router.counts.sum()) == 0
            assert torch.equal(par.router.selection_bias, whole.router.selection_bias)
            assert bool(bias.any())
            ours.zero_grad()
            theirs.zero_grad()
        reference = dict(whole.named_parameters())
        for name, p in par.named_parameters():
            got = p.detach().to_local() if isinstance(p, DTensor) else p.detach()
            want = own_part(name, reference[name].detach(), mesh, placement)
            assert torch.allclose(got, want, rtol=1e-9, atol=1e-9), name

    def case_every_rank_starts_from_the_first(self) -> None:
        """Different seeds on the ranks: parallelize gives all of them rank 0's values."""
        par = parallelize(self.layer(config(d_shared=4), seed=self.rank), self.mesh)
        want = dict(self.layer(config(d_shared=4), seed=0).named_parameters())
        for name, p in par.named_parameters():
            close(p.detach(), own_part(name, want[name].detach(), self.mesh, Placement.chunked(5, self.W)), name)

    def case_data_parallel_times_expert_parallel(self) -> None:
        """Whatever part of the ranks shares the experts, from none: the same gradients."""
        for ep in (1, 2) if self.W % 2 == 0 else (1,):
            for loss in ("sum", "mean"):
                self._compare(config(d_shared=4, aux_loss_coef=0.3), self.mesh_of(ep), ParallelConfig(loss=loss),
                              self._tokens())

    @only_on(2, 4, 8)
    def case_fsdp(self) -> None:
        """Gradients and norm of one process."""
        self._fsdp(torch.float64)

    @only_on(2, 4, 8)
    def case_fsdp_in_float32(self) -> None:
        """FSDP2 reduces what may overflow, float64 among it, by another operation than float32."""
        self._fsdp(torch.float32, rtol=1e-4, atol=1e-5)

    def _fsdp(self, dtype: torch.dtype, **limits: float) -> None:
        """A model of two blocks under FSDP2, experts over ep (and dp at W=4), against one process in float64."""
        mesh = self.mesh if self.W == 2 else self.mesh_of(2)

        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(D, D, dtype=torch.float64)
                self.ffn = MoEFFN(config(E=8, d_shared=4), backend="torch", dtype=torch.float64)

            def forward(self, x: Tensor) -> Tensor:
                return x + self.ffn(torch.tanh(self.inner(x)))

        for loss in ("sum", "mean"):
            torch.manual_seed(2)
            whole = self.put(nn.Sequential(Block(), Block()).to(dtype).double())
            par = parallelize(copy.deepcopy(whole).to(dtype), mesh, ParallelConfig(loss=loss))
            fsdp(par)
            tokens = [5, 3, 0, 4, 1, 2, 6, 0][: self.W]
            xs = [x.to(dtype) for x in self.batches(tokens)]
            Y = whole(torch.cat(xs).double())
            Y.square().sum().backward()
            y = par(xs[self.rank])
            part = y.square().sum()
            (part * self.W if loss == "mean" else part).backward()
            reduce_gradients(par)
            close(y.detach().double(), Y.detach().split(tokens)[self.rank], "y", **limits)
            reference = dict(whole.named_parameters())
            for name, p in par.named_parameters():
                assert p.grad is not None and p.grad.dtype == dtype
                got = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
                close(got.double(), reference[name].grad, name, **limits)
            want = nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
            close(clip_grad_norm_(par, 1.0).double(), want, "norm", **limits)
            assert any(isinstance(m, ParallelExperts) for m in par.modules())

    @only_on(2, 4, 8)
    def case_fsdp_with_ranks_that_use_different_experts(self) -> None:
        """Rank r's tokens go to expert r alone, under FSDP2: one packed parameter is gathered whoever uses it."""
        mesh, E = self.mesh if self.W == 2 else self.mesh_of(2), self.W
        whole = self.layer(config(E=E, K=1))
        with torch.no_grad():
            whole.router.weight.copy_(self.put(torch.eye(E, D, dtype=torch.float64) * 50))
        par = fsdp(parallelize(copy.deepcopy(whole), mesh, ParallelConfig(loss="sum", deadline=15)))
        xs = [self.put(torch.eye(E, D, dtype=torch.float64)[[r] * 3]) for r in range(self.W)]
        whole(torch.cat(xs)).square().sum().backward()
        for _ in range(2):  # the second step would hang where a rank had skipped the first's collectives
            par.zero_grad()
            par(xs[self.rank]).square().sum().backward()
            reduce_gradients(par)
        reference = dict(whole.named_parameters())
        for name, p in par.named_parameters():
            close(p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad, reference[name].grad, name)
        assert all(bool(g.abs().sum() > 0) for g in reference["experts.w_in"].grad)
