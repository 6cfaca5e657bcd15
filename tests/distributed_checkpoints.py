"""Cases of checkpoints: written by two ranks, read by any number, by global expert id; model and optimizer."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_compare import Ranks, config, own_part
from distributed_ranks import only_on
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from moeffn.distributed import (
    ParallelConfig,
    Placement,
    clip_grad_norm_,
    fsdp,
    parallelize,
    reduce_gradients,
    update_selection_biases,
)

C = config(E=7, bias=True, d_shared=4, selection_bias=True)
TOKENS = [5, 0, 3, 4]  # whatever the number of ranks, the global batch is these together


def whole(t: Tensor) -> Tensor:
    """All of a DTensor, by global expert id, or a tensor as it is; a copy on the host, where optimizers keep steps."""
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().cpu().clone()


def flat(tree: object, name: str = "") -> dict[str, object]:
    """Leaves of nested dicts by their joined keys."""
    if not isinstance(tree, dict):
        return {name: tree}
    return {k: v for key, value in tree.items() for k, v in flat(value, f"{name}/{key}").items()}


class CheckpointCases(Ranks):
    """Model and optimizer through torch.distributed.checkpoint."""

    def case_checkpoint_by_global_expert(self) -> None:
        """Written by two ranks; each suite reads it: bit-identical by expert id."""
        source = self.layer(C, seed=21)
        if self.W == 2:
            par = parallelize(copy.deepcopy(source), self.mesh, ParallelConfig(loss="sum"))
            dcp.save({"model": par.state_dict()}, checkpoint_id=str(self.checkpoint))
            dist.barrier()
        par = parallelize(self.layer(C), self.mesh, ParallelConfig(loss="sum"))
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

    def case_checkpoint_of_other_experts_is_refused(self) -> None:
        """Eight experts where seven were written, and a bias that was not: errors, on every rank."""
        for c, word in ((config(E=8, bias=True, d_shared=4, selection_bias=True), "ize mismatch"),
                        (config(E=7, bias=True, d_shared=4, selection_bias=True, router_bias=True), "router.bias")):
            par = parallelize(self.layer(c), self.mesh, ParallelConfig(loss="sum"))
            try:
                dcp.load({"model": par.state_dict()}, checkpoint_id=str(self.checkpoint))
            except dcp.api.CheckpointException as error:
                assert word in str(error), error
            else:
                raise AssertionError(f"loaded in spite of {word}")

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        """One step on a batch that is the same for every number of ranks."""
        model(torch.cat(self.batches(TOKENS, seed)).tensor_split(self.W)[self.rank]).square().sum().backward()
        reduce_gradients(model)
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        update_selection_biases(model, 1e-2)

    def _trainee(self, kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
        mesh = self.mesh_of(2) if kind == "fsdp" else self.mesh
        other = self.layer(C, seed=self.W)  # another start than the checkpoint's
        model = parallelize(other, mesh, ParallelConfig(loss="sum"))
        if kind == "fsdp":
            fsdp(model)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def case_training_goes_on_with_any_number_of_ranks(self) -> None:
        """Two ranks train and save model and AdamW state; others load them bit-identical and take the same step."""
        if self.W == 2:
            model, optimizer = self._trainee("plain")
            for seed in (1, 2):
                self._step(model, optimizer, seed)
            states, moments = get_state_dict(model, optimizer)
            dcp.save({"model": states, "optim": moments}, checkpoint_id=str(self.training))
            saved = {k: whole(v) for k, v in flat({"model": states, "optim": moments}).items() if isinstance(v, Tensor)}
            self._step(model, optimizer, 3)
            after = {name: whole(p) for name, p in model.named_parameters()}
            if self.rank == 0:
                torch.save({"saved": saved, "after": after}, self.truth)
            dist.barrier()
        self._goes_on("plain")

    @only_on(4, 8)
    def case_training_goes_on_under_fsdp(self) -> None:
        """The same checkpoint on a mesh of data parallel x expert parallel, sharded by FSDP2."""
        self._goes_on("fsdp")

    def _goes_on(self, kind: str) -> None:
        want = torch.load(self.truth)
        assert {"/optim/state/experts.w_in/exp_avg", "/optim/state/experts.w_in/exp_avg_sq"} <= want["saved"].keys()
        model, optimizer = self._trainee(kind)
        states, moments = get_state_dict(model, optimizer)
        before = whole(states["experts.w_in"])
        read = {"model": states, "optim": moments}
        dcp.load(read, checkpoint_id=str(self.training))
        set_state_dict(model, optimizer, model_state_dict=read["model"], optim_state_dict=read["optim"])
        states, moments = get_state_dict(model, optimizer)
        got = {k: v for k, v in flat({"model": states, "optim": moments}).items() if isinstance(v, Tensor)}
        assert got.keys() == want["saved"].keys()
        for name, value in got.items():
            assert torch.equal(whole(value), want["saved"][name]), name
        assert not torch.equal(before, want["saved"]["/model/experts.w_in"])
        self._step(model, optimizer, 3)
        for name, p in model.named_parameters():
            assert torch.allclose(whole(p), want["after"][name], rtol=1e-9, atol=1e-12), name

    @property
    def training(self) -> Path:
        return self.checkpoint.with_name("training")

    @property
    def truth(self) -> Path:
        return self.checkpoint.with_name("training.pt")
