"""family_router_config: the routing mode read from a configuration or a block, against the family's own router."""

from __future__ import annotations

import hf_blocks
import pytest
import torch
from transformers import DeepseekV2Config, PreTrainedConfig

from moeffn import route
from moeffn.integrations.transformers import family_router_config, replace_ffn

ROWS = [row for row in hf_blocks.rows() if row.routing]
AT_THE_BLOCK = {"beam", "minimax_m3_vl", "step3p7", "laguna"}  # these multiply the experts' sum, not the weights


def bias_of(block, router):
    state = dict(block.named_buffers()) | dict(block.named_parameters())
    found = [t for n, t in state.items() if n.endswith(("e_score_correction_bias", "expert_bias", "balancing_biases"))]
    return found[0].detach().reshape(-1) if found else None


def own_choice(row, block, router, x):
    """Logits, ids and weights of the family's own router, as its code returns them."""
    flat = x.reshape(-1, x.shape[-1])
    if row.family == "dbrx":
        logits = router(x)
        weights, ids = block.route_tokens_to_experts(logits)
    elif row.family == "llama4":
        scores, logits = router(flat)
        ids = scores.topk(router.top_k).indices
        weights = scores.gather(1, ids)
    elif row.family == "jetmoe":
        order, _, gates, counts, logits = router(flat)
        slot = order.argsort()
        ids = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))[slot].view(len(flat), -1)
        weights = gates[slot].view(len(flat), -1)
    elif row.family == "switch_transformers":
        chosen, weights, logits = (t.flatten(0, 1) for t in router(x))
        ids = chosen.argmax(-1, keepdim=True)
    elif row.family in ("hy_v3", "afmoe", "lfm2_moe", "minimax_m2") or row.block == "Dots3NoteVisionMoE":
        logits, weights, ids = router(x if row.family == "afmoe" else flat, bias_of(block, router))[:3]
    else:
        logits, weights, ids = router(x if row.family == "zaya" else flat)[:3]
    return logits.reshape(len(flat), -1), ids.reshape(len(flat), -1), weights.reshape(len(flat), -1)


@pytest.mark.parametrize("row", ROWS, ids=lambda r: r.block or r.family)
def test_route_by_the_configuration_equals_the_family_s_router(row):
    block = hf_blocks.build(row)
    router = next(m for m in block.modules() if type(m).__name__ == row.router)
    try:
        config = family_router_config(block)
    except ValueError as error:  # blocks that keep no configuration
        assert "configuration" in str(error) and row.family in ("dbrx", "jetmoe", "switch_transformers")
        config = family_router_config(hf_blocks.config(row))
    x = torch.randn(1, 40, 32, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        if row.family == "inkling":  # its router keeps the shared experts' logits to itself
            logits = torch.nn.functional.linear(x[0], router.weight)
            _, weights, ids = router(x[0])[:3]
            weights = weights / router.global_scale
        else:
            logits, ids, weights = own_choice(row, block, router, x)
        if row.family == "muse_spark":  # recorded after the multiplier
            logits = logits / config.logit_scale
        if row.family == "laguna" and config.logit_softcap:
            logits = torch.nn.functional.linear(x[0], router.weight)
    if hasattr(router, "per_expert_scale"):  # learned, so not a matter of configuration
        weights = weights / router.per_expert_scale.detach()[ids]
        logits = logits.log()  # these routers return probabilities
    if row.family in AT_THE_BLOCK:
        weights = weights * config.scale
    if row.family == "openai_privacy_filter":  # divided by k here and multiplied by k after the experts
        weights = weights * config.top_k
    got = route(logits, config, selection_bias=bias_of(block, router))
    mine = torch.zeros(40, config.num_experts).scatter_add_(1, got.experts.clamp(min=0).long(),
                                                             torch.where(got.experts >= 0, got.weights, 0.0))
    real = ids < config.num_experts
    own = torch.zeros(40, config.num_experts).scatter_add_(1, torch.where(real, ids, 0),
                                                           torch.where(real, weights, 0.0).float())
    assert torch.equal(mine != 0, own != 0)
    torch.testing.assert_close(mine, own, rtol=1e-5, atol=1e-6)


MODES = {"jamba": ("softmax", "score_topk", False), "mixtral": ("softmax", "score_topk", True),
         "gpt_oss": ("softmax", "topk_score", False), "deepseek_v3": ("sigmoid", "score_topk", True)}


@pytest.mark.parametrize("family", MODES)
def test_the_report_shows_the_routing_mode(family):
    row = next(r for r in hf_blocks.rows() if r.family == family)
    report = replace_ffn(hf_blocks.build(row))
    config = report.replaced[0].routing
    assert (config.score, config.order, config.renormalize) == MODES[family]
    score, order, renormalize = MODES[family]
    assert str(report) == report.describe()
    shown = report.describe().split("RouterConfig(")[1]
    assert all(text in shown for text in (f"score={score!r}", f"order={order!r}", f"renormalize={renormalize}"))


def test_the_mode_follows_the_configuration_not_the_family():
    row = next(r for r in hf_blocks.rows() if r.family == "qwen3_moe")
    for flag in (True, False):
        block = hf_blocks.build(row, norm_topk_prob=flag)
        assert family_router_config(block).renormalize is flag
        assert family_router_config(block.experts.config).renormalize is flag


def test_a_truncated_configuration_is_refused_by_name():
    cut = type("Cut", (PreTrainedConfig,), {"__module__": "transformers.models.qwen3_moe.configuration_qwen3_moe"})
    with pytest.raises(ValueError, match=r"whole configuration of qwen3_moe.*norm_topk_prob"):
        family_router_config(cut())
    with pytest.raises(TypeError, match=r"top_k.*NoneType"):
        family_router_config(DeepseekV2Config())  # its default leaves num_experts_per_tok open


def test_what_router_config_cannot_say_is_refused():
    row = next(r for r in hf_blocks.rows() if r.family == "doge")
    with pytest.raises(ValueError, match="doge"):
        family_router_config(hf_blocks.config(row))
    with pytest.raises(TypeError, match="source"):
        family_router_config({"num_experts": 8})
    with pytest.raises(ValueError, match="Linear"):
        family_router_config(torch.nn.Linear(3, 3))
