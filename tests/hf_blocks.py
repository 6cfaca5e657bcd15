"""One small MoE block of every family in the table, built by transformers from the family's own configuration class."""

from __future__ import annotations

import importlib
import inspect
import pkgutil

import torch
from torch import nn

from moeffn.integrations import families

SIZES = {
    "hidden_size": 32, "d_model": 32, "intermediate_size": 24, "moe_intermediate_size": 24, "d_ff": 24,
    "ffn_hidden_size": 24, "expert_ffn_hidden_size": 24, "shared_expert_intermediate_size": 20, "share_expert_dim": 20,
    "shared_intermediate_size": 20, "moe_shared_expert_intermediate_size": 20, "intermediate_size_mlp": 40,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8,
    "num_experts_per_tok": 3, "moe_topk": 3, "moe_k": 3, "moe_top_k": 3, "top_k_experts": 3,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1, "zero_expert_num": 2,
    "n_group": 2, "topk_group": 2, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
    "head_dim": 8, "vocab_size": 64, "expert_capacity": 64, "moe_hidden_size": 16, "moe_latent_size": 16,
    "router_hidden_size": 16, "mlp_layer_types": ["sparse", "sparse"], "layer_types": None, "enable_moe_block": True,
}
# what a family needs beside or instead of these
SPECIAL = {
    "dbrx": {"ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 8, "moe_top_k": 3, "hidden_size": 32}},
    "deepseek_v4": {"mlp_layer_types": ["hash_moe", "moe"]},
    "doge": {"num_experts": 16, "is_moe": True},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [24, 16]},
    "nemotron_h": {"layer_types": ["moe", "moe"], "hybrid_override_pattern": "EE", "mlp_layer_types": None},
    "phimoe": {"num_experts_per_tok": 2, "router_jitter_noise": 0.1},
    "vitpose_backbone": {"num_experts": 3, "part_features": 8, "mlp_ratio": 2},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_expand": 2},
    "Qwen3OmniMoeTalkerTextSparseMoeBlock": {"shared_expert_intermediate_size": 20},
    "kimi_linear": {"num_expert_group": 2},
    "bailing_hybrid": {"num_expert_group": 2},
    "Dots3NoteVisionMoE": {"hidden_size": 32, "adapter_in_dim": 32, "pyramid_layers": None},
    "zaya": {"num_experts_per_tok": 1},
    "step3p7": {"swiglu_limits": [0.0, 1.0], "swiglu_limits_shared": [0.0, 1.0]},
}

CONFIGS = {"Dots3NoteVisionMoE": "Dots3NoteVisionConfig",
           "Qwen3OmniMoeTalkerTextSparseMoeBlock": "Qwen3OmniMoeTalkerTextConfig"}


def rows() -> list[families.Family]:
    """The rows of the table that name a block, each block once."""
    found: dict[str, families.Family] = {}
    for row in families.table():
        if row.block or row.family in ("gemma4", "diffusion_gemma"):
            found.setdefault(row.block or row.family, row)
    return list(found.values())


def modeling(family: str):
    package = importlib.import_module(f"transformers.models.{family}")
    names = [m.name for m in pkgutil.iter_modules(package.__path__) if m.name.startswith("modeling_")]
    return importlib.import_module(f"transformers.models.{family}.{names[0]}")


def config_for(row: families.Family, cls: type, **extra):
    """A small configuration, of a class of the family that knows its number of experts."""
    module = modeling(row.family)
    parameters = list(inspect.signature(inspect.unwrap(cls.__init__)).parameters.values())
    annotation = parameters[1].annotation
    names = sorted((n for n in dir(module) if n.endswith("Config") and n != "PreTrainedConfig"),
                   key=lambda n: ("Text" not in n, "Thinker" not in n, n))
    candidates = [getattr(module, n) for n in ([CONFIGS[row.block]] if row.block in CONFIGS else names)]
    if inspect.isclass(annotation) and annotation in candidates:
        candidates.insert(0, annotation)
    experts = row.num_experts.split(".")[0]
    chosen = next((c for c in candidates if experts in _fields(c) or experts in c.attribute_map), candidates[0])
    given = {k: v for k, v in SIZES.items() if k in _fields(chosen) or k in chosen.attribute_map}
    special = SPECIAL.get(row.block, SPECIAL.get(row.family, {})) | extra
    made = chosen(**{k: v for k, v in given.items() if v is not None} | special)
    made._experts_implementation = "eager"
    return made


def _fields(cls: type) -> set[str]:
    annotated = {n for c in cls.__mro__ for n in getattr(c, "__annotations__", {})}
    return annotated | set(inspect.signature(cls.__init__).parameters)


class RouterAndExperts(nn.Module):
    """Families without a block class: what their decoder layer does with router and experts."""

    def __init__(self, router: nn.Module, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = router, experts

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        _, weights, index = self.router(flat)
        return self.experts(flat, index, weights).reshape(x.shape)


def config(row: families.Family, **extra):
    """The configuration that `build` uses for the row's block."""
    return config_for(row, getattr(modeling(row.family), row.block or row.router), **extra)


def build(row: families.Family, dtype: torch.dtype = torch.float32, **extra) -> nn.Module:
    """The row's block with random weights, the same for the same row."""
    module, made = modeling(row.family), config(row, **extra)
    if row.block:
        cls = getattr(module, row.block)
        wanted = inspect.signature(inspect.unwrap(cls.__init__)).parameters
        block = cls(made, **({"layer_idx": 1} if "layer_idx" in wanted else {}))
    else:
        block = RouterAndExperts(getattr(module, row.router)(made), getattr(module, row.swapped)(made))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in sorted(block.state_dict().items()):
            if tensor.is_floating_point():
                scale = 0.1 if "bias" in name else 0.3
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
    return block.to(dtype).eval()


def call(block, row, x):
    """The block's outputs as a tuple, with what else its forward asks for."""
    extra = {}
    if row.family == "vitpose_backbone":
        extra["indices"] = torch.arange(x.shape[0])
    if row.family == "ernie4_5_vl_moe":
        extra["moe_mm_token_type_ids"] = (torch.arange(x.shape[1]) % 3 == 0).int().expand(x.shape[:2])
    out = block(x, **extra)
    return out if isinstance(out, tuple) else (out,)
