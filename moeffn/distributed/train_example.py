"""A worked example: train a small expert-parallel model on the processes that torchrun starts, CPUs or GPUs.

    torchrun --nproc-per-node 2 -m moeffn.distributed.train_example

Each rank draws its own batches of one synthetic task (each token's class decides which linear map made its target); the
loss printed is that of all ranks. With --checkpoint FOLDER model, optimizer and step are written at the end; start it
again with more or fewer processes and it goes on from there.
"""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.functional import mse_loss

from ..config import MoEConfig
from ..layer import MoEFFN
from .gradients import clip_grad_norm_, reduce_gradients, update_selection_biases
from .parallel import ParallelConfig, make_mesh, parallelize

D, CLASSES, TOKENS = 32, 8, 256


class Block(nn.Module):
    """Pre-norm residual block with a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D)
        self.ffn = MoEFFN(MoEConfig(d_model=D, d_expert=32, num_experts=8, top_k=2, d_shared=32, selection_bias=True,
                                    aux_loss_coef=1e-3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(self.norm(x))


class Training:
    """Model, optimizer and steps done, as torch.distributed.checkpoint keeps them: by name and global expert id."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer, self.steps = model, optimizer, 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"],
                       optim_state_dict=state["optimizer"])
        self.steps = state["steps"]


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens (T, D) around CLASSES centres, and their targets: each class has its own linear map."""
    task = torch.Generator().manual_seed(1)
    centres = torch.randn(CLASSES, D, generator=task) * 2
    maps = torch.randn(CLASSES, D, D, generator=task) / D**0.5
    g = torch.Generator().manual_seed(1000 * step + rank)
    which = torch.randint(CLASSES, (TOKENS,), generator=g)
    x = centres[which] + torch.randn(TOKENS, D, generator=g)
    return x, torch.einsum("td,tdf->tf", x, maps[which])


def train(steps: int, folder: Path | None = None) -> list[float]:
    """Losses of the global batch, one a step. Needs a running process group."""
    kind = "cuda" if dist.get_backend() == "nccl" else "cpu"
    mesh = make_mesh(ep=dist.get_world_size(), device_type=kind)
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(D, D)).to(kind)
    parallelize(model, mesh, ParallelConfig(loss="mean"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    training = Training(model, optimizer)
    if folder is not None and folder.exists():
        dcp.load({"training": training}, checkpoint_id=str(folder))
    losses = []
    for _ in range(steps):
        training.steps += 1
        x, target = (t.to(kind) for t in batch(training.steps, dist.get_rank()))
        loss = mse_loss(model(x), target)
        loss.backward()
        reduce_gradients(model)
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        update_selection_biases(model)
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        losses.append(float(shown) / dist.get_world_size())
    if folder is not None:
        dcp.save({"training": training}, checkpoint_id=str(folder))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path, default=None)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if cuda else "gloo")
    losses = train(arguments.steps, arguments.checkpoint)
    if dist.get_rank() == 0:
        for step in range(0, len(losses), max(1, len(losses) // 10)):
            print(f"step {step:>4}  loss {losses[step]:.4f}")
        print(f"last       loss {losses[-1]:.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
