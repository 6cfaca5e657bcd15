"""MoE blocks of transformers with recorded weights, inputs and results (`data/golden`), built and run for the tests.

Each file holds in.* (inputs, in.g the output's gradient), w.* (the block's state dict), and what the block itself gave
with transformers 5.24: f32.*, f64.*, bf16.* out, topk_idx, grad_x, grad_router.<parameter>.
"""

from __future__ import annotations

import functools
import importlib
import json
from pathlib import Path

import torch
import transformers
from hf_blocks import RouterAndExperts
from safetensors.torch import load_file
from torch import Tensor, nn

DATA = Path(__file__).parent / "data" / "golden"
INDEX = json.loads((DATA / "index.json").read_text())["families"]
FAMILIES = sorted(INDEX)
# Experts (or routers) that round to float32 inside, whatever the dtype they are given.
FLOAT32_INSIDE = {"beam", "inkling", "inkling2", "muse_spark", "nemotron_h", "openai_privacy_filter"}
CLAMPED = {"deepseek_v4", "deepseek_v4_hash", "gpt_oss", "openai_privacy_filter", "step3p7"}


@functools.cache
def tensors(family: str) -> dict[str, Tensor]:
    return load_file(DATA / f"{family}.safetensors")


def config(family: str):
    meta = INDEX[family]
    module = importlib.import_module(meta["module"])
    cls = getattr(module, meta["config_class"], None) or getattr(transformers, meta["config_class"])
    made = cls(**meta["config_kwargs"])
    made._experts_implementation = "eager"
    return made


def block(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The family's block with the recorded weights, in evaluation mode, its float32-only tensors kept in float32."""
    meta = INDEX[family]
    module, made = importlib.import_module(meta["module"]), config(family)
    if "+" in meta["block_class"]:
        built = RouterAndExperts(*(getattr(module, name)(made) for name in meta["block_class"].split("+")))
    else:
        built = getattr(module, meta["block_class"])(made, *meta["ctor_args"])
    built.load_state_dict({k[2:]: v for k, v in tensors(family).items() if k.startswith("w.")}, strict=True)
    if dtype != torch.float32:
        kept = {n: t for n, t in built.state_dict().items() if n in meta["kept_float32"]}
        built.to(dtype)
        if dtype != torch.float64:
            for name, value in kept.items():
                owner, _, leaf = name.rpartition(".")
                getattr(built.get_submodule(owner), leaf).data = value
    return built.eval()


def run(built: nn.Module, family: str, dtype: torch.dtype, x: Tensor | None = None) -> Tensor:
    """The block on the recorded input (or `x`), (T, D) whatever shape the block returns."""
    given = tensors(family)
    x = given["in.x"].to(dtype) if x is None else x
    extra = {}
    if "in.input_ids" in given:
        extra["input_ids"] = given["in.input_ids"].to(x.device)
    if "in.router_states" in given:
        extra["prev_router_hidden_states"] = given["in.router_states"].to(x.device, dtype)
    out = built(x, **extra)
    out = out[0] if isinstance(out, tuple) else out
    return out.reshape(-1, out.shape[-1])


def relative(got: Tensor, want: Tensor) -> float:
    """Relative Frobenius error."""
    got, want = got.detach(), want.detach()
    return float((got.double() - want.double()).norm() / want.double().norm())


def worst_row(got: Tensor, want: Tensor) -> float:
    """Largest row error over the root mean square of a row."""
    rows = (got.double() - want.double()).norm(dim=1)
    return float(rows.max() / want.double().norm(dim=1).square().mean().sqrt())
