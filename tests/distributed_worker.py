"""One rank of the gloo suites: python distributed_worker.py SUITE W FOLDER RANK (started by test_distributed_gloo.py).

Every rank builds the whole problem from seeds and computes the one-process answer itself, then compares its own share.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_problems import DISPATCHERS, on_rank, one_process, random_problem
from distributed_ranks import join, run_cases
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import moeffn
from moeffn import MoEConfig, MoEFFN
from moeffn.distributed import (
    GroupTransport,
    ParallelConfig,
    ParallelExperts,
    Placement,
    balance_replicas,
    clip_grad_norm_,
    fsdp,
    make_mesh,
    parallelize,
    reduce_gradients,
    update_selection_biases,
)

D, F = 8, 6


def config(E: int = 5, K: int = 2, **more: object) -> MoEConfig:
    return MoEConfig(d_model=D, d_expert=F, num_experts=E, top_k=K, **more)


def layer(c: MoEConfig, dtype: torch.dtype = torch.float64) -> MoEFFN:
    torch.manual_seed(11)
    return MoEFFN(c, backend="torch", dtype=dtype)


def batches(tokens: list[int], seed: int = 5) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(t, D, generator=g, dtype=torch.float64) for t in tokens]


def shares(tokens: list[int]) -> Callable[[Tensor], list[Tensor]]:
    return lambda t: list(t.split(tokens))


def close(got: Tensor, want: Tensor, what: str) -> None:
    got = got.to_local() if isinstance(got, DTensor) else got
    assert got.shape == want.shape, (what, got.shape, want.shape)
    assert torch.allclose(got, want, rtol=1e-11, atol=1e-12), (what, (got - want).abs().max())


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


class Suite:
    """Cases for W ranks; each method whose name starts with case_ is one, run in the order of definition."""

    def __init__(self, W: int, rank: int, folder: Path) -> None:
        self.W, self.rank, self.folder = W, rank, folder
        self.mesh = make_mesh(W, device_type="cpu")
        self.checkpoint = folder.parent / "checkpoint"

    # -- dispatchers ---------------------------------------------------------------------------------------------------

    def case_dispatchers_equal_one_process(self) -> None:
        """Random problems of every kind: T=0, all to rank 0, uneven E, ids -1 and twice, replicas, lost ranks."""
        transport = GroupTransport(deadline=30)
        for seed in range(500, 512):
            p = random_problem(seed, W=self.W)
            want = one_process(p)
            tokens = [len(x) for x in p.x]
            for name, make in DISPATCHERS.items():
                ran = on_rank(p, make(transport, p.placement), transport)
                for key in ("y", "x", "weights"):
                    close(ran.tensors[key], want[key].split(tokens)[self.rank], f"{seed} {name} {key}")
                held = list(p.placement.experts_of_rank[self.rank])
                alone = [e for e in held if len(p.placement.places_of_expert[e]) == 1]
                for key in ("w_in", "w_out"):
                    slots = [held.index(e) for e in alone]
                    close(ran.tensors[key][slots], want[key][alone], f"{seed} {name} {key}")

    def case_all_tokens_to_rank_0_and_an_idle_rank(self) -> None:
        """Rank W-1 has no tokens, only rank 0's first expert gets any: nobody skips a call, zeros are exact."""
        c = config(E=2 * self.W, K=1)
        whole = layer(c)
        with torch.no_grad():
            whole.router.weight.zero_()  # all logits equal: ties go to expert 0
        par = parallelize(copy.deepcopy(whole), self.mesh, ParallelConfig(loss="sum", deadline=20))
        tokens = [3] * (self.W - 1) + [0]
        x = batches(tokens)[self.rank].requires_grad_()
        y = par(x)
        y.sum().backward()
        reduce_gradients(par)
        first = 2 * self.rank
        for name, p in par.experts.named_parameters():
            for slot, g in enumerate(p.grad.to_local()):
                assert bool((g == 0).all()) == (first + slot != 0), (name, slot)

    # -- the layer -----------------------------------------------------------------------------------------------------

    def _compare(self, c: MoEConfig, mesh: DeviceMesh, parallel_config: ParallelConfig, tokens: list[int], *,
                 steps: int = 1, recompute: bool = False) -> None:
        """Forward, `steps` accumulated micro-batches backward, reduce, norm: all equal to one process."""
        whole = layer(c)
        par = parallelize(copy.deepcopy(whole), mesh, parallel_config)
        W, rank, total = self.W, self.rank, sum(tokens)
        data = [batches(tokens, seed=5 + i) for i in range(steps)]
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

    def _tokens(self) -> list[int]:
        return [7, 0, 4, 1][: self.W] if self.W > 2 else [5, 3]

    def case_layer_with_shared_expert_sum(self) -> None:
        self._compare(config(d_shared=4, bias=True, router_bias=True), self.mesh, ParallelConfig(loss="sum",
                      deadline=30), self._tokens())

    def case_layer_mean_with_each_dispatcher(self) -> None:
        for name in ("all_to_all, dedup rank", "all_to_all, dedup none", "all_gather"):
            self._compare(config(), self.mesh, ParallelConfig(loss="mean", dispatcher=name), self._tokens())

    def case_tokens_in_chunks(self) -> None:
        """More chunks than some ranks have tokens: the number of calls is agreed, not derived."""
        for name in ("all_to_all, dedup rank", "all_gather"):
            self._compare(config(d_shared=4), self.mesh, ParallelConfig(loss="sum", dispatcher=name, chunks=3),
                          self._tokens())

    def case_fewer_experts_than_ranks_and_more_choices_than_local_experts(self) -> None:
        self._compare(config(E=self.W - 1 or 1, K=1), self.mesh, ParallelConfig(loss="sum"), self._tokens())
        self._compare(config(E=self.W + 1, K=self.W + 1), self.mesh, ParallelConfig(loss="sum"), self._tokens())

    def case_losses_of_the_global_batch(self) -> None:
        """Load-balance and z losses: identical data on every rank, and different; both loss conventions."""
        for loss in ("sum", "mean"):
            self._compare(config(aux_loss_coef=0.3, z_loss_coef=0.1), self.mesh, ParallelConfig(loss=loss),
                          self._tokens())
            c = config(aux_loss_coef=0.3)
            whole = layer(c)
            par = parallelize(copy.deepcopy(whole), self.mesh, ParallelConfig(loss=loss))
            x = batches([6])[0]
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
        whole = layer(c)
        par = parallelize(copy.deepcopy(whole), self.mesh, ParallelConfig(loss="sum"))
        tokens = self._tokens()
        xs = batches(tokens)
        masks = [torch.arange(len(x)) % 3 != 1 for x in xs]
        kept = masks[self.rank].clone()
        whole(torch.cat(xs), token_mask=torch.cat(masks)).sum().backward()
        par(xs[self.rank], token_mask=masks[self.rank]).sum().backward()
        assert torch.equal(masks[self.rank], kept)
        mine = par.router.counts.clone()
        assert int(mine.sum()) == 2 * int(kept.sum())
        reduce_gradients(par)
        same_gradients(par, whole, self.mesh, c.num_experts)

    def case_selection_bias_and_optimizer_steps(self) -> None:
        """Three AdamW steps with clipping and the bias update: parameters and bias stay those of one process."""
        c = config(selection_bias=True, d_shared=4)
        whole = layer(c)
        par = parallelize(copy.deepcopy(whole), self.mesh, ParallelConfig(loss="sum"))
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False) for m in (par, whole))
        placement = Placement.chunked(5, self.W)
        for step in range(3):
            tokens = self._tokens()
            xs = batches(tokens, seed=step)
            whole(torch.cat(xs)).square().sum().backward()
            par(xs[self.rank]).square().sum().backward()
            reduce_gradients(par)
            clip_grad_norm_(par, 1.0)
            nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
            ours.step()
            theirs.step()
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
            want = own_part(name, reference[name].detach(), self.mesh, placement)
            assert torch.allclose(got, want, rtol=1e-9, atol=1e-9), name

    def case_fixed_budget(self) -> None:
        """Enough rows: one process's answer; too few: counted, and dropped slots contribute exactly nothing."""
        wide = ParallelConfig(loss="sum", dispatcher="all_to_all, dedup rank", budget=7)
        self._compare(config(d_shared=4), self.mesh, wide, self._tokens())
        par = parallelize(layer(config(E=self.W, K=self.W)), self.mesh,
                          ParallelConfig(loss="sum", dispatcher="all_to_all, dedup rank", budget=2))
        x = batches([5])[0]
        y = par(x)  # every token goes to every rank; the last three find no row
        assert int(par.experts.dispatcher.dropped) == 3 * self.W
        assert bool((y[2:] == 0).all()) and bool((y[:2] != 0).any())

    def case_balanced_placement_of_uneven_experts(self) -> None:
        """Experts computed elsewhere than they are stored: sizes that differ by one, as one process."""
        E = 2 * self.W + 1
        c = ParallelConfig(loss="sum", placement=Placement.balanced(E, self.W))
        self._compare(config(E=E), self.mesh, c, self._tokens())

    def case_ranks_that_use_different_experts(self) -> None:
        """Rank r's tokens go to expert r alone: every parameter is one packed tensor, so nothing hangs."""
        E = self.W
        whole = layer(config(E=E, K=1))
        with torch.no_grad():
            whole.router.weight.copy_(torch.eye(E, D, dtype=torch.float64) * 50)
        par = parallelize(copy.deepcopy(whole), self.mesh, ParallelConfig(loss="sum"))
        xs = [torch.nn.functional.one_hot(torch.full((3,), (r + 1) % E), D).double() for r in range(self.W)]
        whole(torch.cat(xs)).square().sum().backward()
        par(xs[self.rank]).square().sum().backward()
        reduce_gradients(par)
        same_gradients(par, whole, self.mesh, E)

    def case_replicas_of_hot_experts(self) -> None:
        """Weights travel to the replicas, their gradients home; fewer rows wait on the hottest rank."""
        E = 2 * self.W
        load = [100.0, *[1.0] * (E - 1)]
        placement = balance_replicas(load, self.W, 3)
        assert len(placement.places_of_expert[0]) == self.W
        c = ParallelConfig(loss="sum", placement=placement)
        self._compare(config(E=E, K=2, bias=True), self.mesh, c, self._tokens())

    def case_every_rank_starts_from_the_first(self) -> None:
        """Different seeds on the ranks: parallelize gives all of them rank 0's values."""
        torch.manual_seed(self.rank)
        par = parallelize(MoEFFN(config(d_shared=4), dtype=torch.float64), self.mesh)
        torch.manual_seed(0)
        want = dict(MoEFFN(config(d_shared=4), dtype=torch.float64).named_parameters())
        for name, p in par.named_parameters():
            close(p.detach(), own_part(name, want[name].detach(), self.mesh, Placement.chunked(5, self.W)), name)

    def case_choice_is_the_cost_model_s(self) -> None:
        from moeffn.distributed import cost

        par = parallelize(layer(config(E=4 * self.W)), self.mesh, ParallelConfig(tokens=64))
        table = cost.estimate(Placement.chunked(4 * self.W, self.W), tokens=64, d_model=D, top_k=2, dtype=torch.float64)
        built = par.experts.dispatcher
        label = "all_gather" if built.dedup == "all" else f"all_to_all, dedup {built.dedup}"
        assert label == table[0].name

    def case_shared_expert_runs_while_tokens_fly(self) -> None:
        """After the dispatch has been started and before anything was received."""
        par = parallelize(layer(config(d_shared=4)), self.mesh, ParallelConfig(dispatcher="all_to_all, dedup rank"))
        transport, order = par.experts.dispatcher.transport, []
        start = transport.start

        def traced(rows, send, recv, what):
            pending = start(rows, send, recv, what)
            wait = pending.wait
            pending.wait = lambda: (order.append("received " + what), wait())[1]
            order.append("sent " + what)
            return pending

        transport.start = traced
        par.shared.register_forward_hook(lambda *_: order.append("shared"))
        par(batches([3])[0])
        assert order[-5:] == ["sent dispatch", "shared", "received dispatch", "sent combine", "received combine"], order

    def case_bench_counts_the_bytes_it_moves(self) -> None:
        from moeffn.distributed.bench import Block, largest_error

        for name in ("all_to_all, dedup rank", "all_to_all, dedup none", "all_gather"):
            assert largest_error(name) <= 1e-12
            block = Block(config(E=4 * self.W), 300, dispatcher=name, dtype=torch.float32, device=torch.device("cpu"))
            m = block.measure(calls=1)
            assert m.bytes_sent == m.bytes_forward > 0
            assert abs(m.bytes_forward / m.bytes_expected - 1) < 0.15  # one routing of 300 tokens against the mean
            assert min(m.step, m.forward, m.dispatch, m.experts, m.combine, m.raw, m.exchange_only) > 0

    def case_training_example(self) -> None:
        """The worked example learns, and its checkpoint goes on where it stopped."""
        from moeffn.distributed.train_example import train

        folder = self.folder / "example"
        losses = train(10, folder)
        assert losses[-1] < 0.6 * losses[0], losses
        again = train(1, folder)
        assert abs(again[0] - train(1)[0]) > 0.1 * losses[0], "the checkpoint was not loaded"

    def case_bad_arguments_are_refused(self) -> None:
        def refused(message: str, call: Callable[[], object]) -> None:
            try:
                call()
            except ValueError as error:
                assert message in str(error), error
            else:
                raise AssertionError(f"accepted: {message}")

        refused(f"ep: expected a divisor of the {self.W} ranks, got {self.W + 1}", lambda: make_mesh(self.W + 1))
        plain = init_device_mesh("cpu", (self.W,), mesh_dim_names=("tp",))
        refused("a dimension named 'ep'", lambda: parallelize(layer(config()), plain))
        refused("a MoEFFN", lambda: parallelize(nn.Linear(2, 2), self.mesh))
        refused("not distributed yet", lambda: parallelize(parallelize(layer(config()), self.mesh), self.mesh))
        refused("ParallelConfig.placement", lambda: parallelize(
            layer(config()), self.mesh, ParallelConfig(placement=Placement.balanced(5, self.W + 1))))
        refused("one that `parallelize` distributed", lambda: reduce_gradients(nn.Linear(2, 2)))

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def case_checkpoint_by_global_expert(self) -> None:
        """Written by two ranks; each suite reads it: bit-identical by expert id."""
        c = config(E=7, bias=True, d_shared=4, selection_bias=True)
        torch.manual_seed(21)
        source = MoEFFN(c, backend="torch", dtype=torch.float64)
        if self.W == 2:
            par = parallelize(copy.deepcopy(source), self.mesh, ParallelConfig(loss="sum"))
            dcp.save({"model": par.state_dict()}, checkpoint_id=str(self.checkpoint))
            dist.barrier()
        par = parallelize(layer(c), self.mesh, ParallelConfig(loss="sum"))
        state = {"model": par.state_dict()}
        dcp.load(state, checkpoint_id=str(self.checkpoint))
        par.load_state_dict(state["model"])
        want = source.state_dict()
        assert set(par.state_dict()) == set(want)
        for name, value in par.state_dict().items():
            got = value.to_local() if isinstance(value, DTensor) else value
            assert torch.equal(got, own_part(name, want[name], self.mesh, Placement.chunked(7, self.W))), name
            if isinstance(value, DTensor):
                assert value.shape == want[name].shape, name

    # -- composition ---------------------------------------------------------------------------------------------------

    def case_data_parallel_times_expert_parallel(self) -> None:
        if self.W != 4:
            return
        for loss in ("sum", "mean"):
            mesh = make_mesh(2, device_type="cpu")
            self._compare(config(d_shared=4, aux_loss_coef=0.3), mesh, ParallelConfig(loss=loss), self._tokens())

    def case_two_levels(self) -> None:
        if self.W != 4:
            return
        c = ParallelConfig(loss="sum", dispatcher="two_level", ranks_per_node=2)
        self._compare(config(E=7, K=3, d_shared=4), self.mesh, c, self._tokens())

    def case_fsdp(self) -> None:
        """A model of two blocks under FSDP2, experts over ep (and dp at W=4): gradients and norm of one process."""
        if self.W == 3:
            return
        mesh = self.mesh if self.W == 2 else make_mesh(2, device_type="cpu")

        class Block(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(D, D, dtype=torch.float64)
                self.ffn = MoEFFN(config(E=8, d_shared=4), backend="torch", dtype=torch.float64)

            def forward(self, x: Tensor) -> Tensor:
                return x + self.ffn(torch.tanh(self.inner(x)))

        for loss in ("sum", "mean"):
            torch.manual_seed(2)
            whole = nn.Sequential(Block(), Block())
            par = parallelize(copy.deepcopy(whole), mesh, ParallelConfig(loss=loss))
            fsdp(par)
            tokens = [5, 3, 0, 4][: self.W]
            xs = batches(tokens)
            Y = whole(torch.cat(xs))
            Y.square().sum().backward()
            y = par(xs[self.rank])
            part = y.square().sum()
            (part * self.W if loss == "mean" else part).backward()
            reduce_gradients(par)
            close(y.detach(), Y.detach().split(tokens)[self.rank], "y")
            reference = dict(whole.named_parameters())
            for name, p in par.named_parameters():
                close(p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad, reference[name].grad, name)
            want = nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
            close(clip_grad_norm_(par, 1.0), want, "norm")
            assert any(isinstance(m, ParallelExperts) for m in par.modules())


def main() -> None:
    _, W, folder, rank = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    join(W, rank, folder, "meet")
    suite = Suite(W, rank, folder)
    names = [n for n in vars(Suite) if n.startswith("case_")]
    run_cases({n[len("case_"):]: getattr(suite, n) for n in names}, rank, folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
