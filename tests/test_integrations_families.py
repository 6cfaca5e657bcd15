"""Every family of the table by a small block that transformers builds: replaced and untouched must agree."""

from __future__ import annotations

import copy

import hf_blocks
import pytest
import torch
from hf_golden import FLOAT32_INSIDE, relative

from moeffn.integrations import families
from moeffn.integrations.transformers import replace_ffn, unsupported

ROWS = hf_blocks.rows()
NOT_FLOAT64 = {"inkling2", "inkling2_loop"}  # their own code mixes float32 into other dtypes and fails
FLIPS = {"zaya"}  # with its router in bfloat16 nearly every choice of experts is another: compared by recorded blocks
NAMES = lambda row: row.block or row.family  # noqa: E731


def both(row, dtype, training=False, **options):
    """Outputs, input gradient and parameter gradients of the family's own block and of the replaced one."""
    own = hf_blocks.build(row, dtype, **options)
    block = copy.deepcopy(own)
    report = replace_ffn(block)
    x0 = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1)).to(dtype)
    results = []
    for module in (own, block):
        module.train(training)
        torch.manual_seed(3)
        x = x0.clone().requires_grad_()
        out = hf_blocks.call(module, row, x * 1)  # routers with jitter scale their input in place
        out[0].backward(torch.randn(out[0].shape, generator=torch.Generator().manual_seed(2)).to(dtype))
        results.append((out, x.grad, {n: p.grad for n, p in module.named_parameters()}))
    return report, *results


def agree(own, got, bound):
    assert [(o.shape, o.dtype) for o in own[0]] == [(g.shape, g.dtype) for g in got[0]]
    assert relative(got[0][0], own[0][0]) <= bound
    assert relative(got[1], own[1]) <= bound
    assert own[2].keys() == got[2].keys()
    for name, grad in own[2].items():
        assert (grad is None) == (got[2][name] is None), name
        if grad is not None and grad.norm() > 0:
            assert relative(got[2][name], grad) <= bound, name


@pytest.mark.parametrize("row", ROWS, ids=NAMES)
def test_float32(row):
    report, own, got = both(row, torch.float32)
    assert not report.left
    assert "moe" in {r.kind for r in report.replaced} and all(r.family == row.family for r in report.replaced)
    agree(own, got, 2e-6)


@pytest.mark.parametrize("row", [r for r in ROWS if r.family not in NOT_FLOAT64], ids=NAMES)
def test_float64(row):
    _, own, got = both(row, torch.float64)
    agree(own, got, 1e-6 if row.family in FLOAT32_INSIDE else 1e-11)


@pytest.mark.parametrize("row", [r for r in ROWS if r.family not in NOT_FLOAT64 | FLIPS], ids=NAMES)
def test_bfloat16_within_twice_the_error_of_the_block_itself(row):
    _, own, got = both(row, torch.bfloat16)
    exact = hf_blocks.build(row, torch.bfloat16).double()
    x = torch.randn(2, 12, 32, generator=torch.Generator().manual_seed(1)).bfloat16().double().requires_grad_()
    out = hf_blocks.call(exact, row, x * 1)[0]
    out.backward(torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).bfloat16().double())
    want, plain, mine = (t.flatten(0, -2) for t in (out, own[0][0], got[0][0]))
    # tokens whose choice of experts flips in bfloat16 differ by more than rounding, in the block itself as well
    same = (plain.double() - want.double()).norm(dim=1) < 0.1 * want.double().norm(dim=1)
    assert same.sum() >= 4
    assert relative(mine[same], want[same]) <= 2 * relative(plain[same], want[same])
    if same.all():
        assert relative(got[1], x.grad) <= 2 * relative(own[1], x.grad)


OPTIONS = [  # settings of a family that take another path than its defaults
    ("cohere2_moe", {"expert_selection_fn": "sigmoid"}), ("cohere2_moe", {"num_shared_experts": 0}),
    ("longcat_flash", {"zero_expert_num": 0}),
    ("dbrx", {"ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 8, "moe_top_k": 3, "hidden_size": 32,
                             "moe_normalize_expert_weights": None, "ffn_act_fn": {"name": "gelu"}}}),
    ("switch_transformers", {"expert_capacity": 2}), ("nemotron_h", {"moe_latent_size": None}),
    ("inkling", {"n_shared_experts": 2}), ("hy_v3", {"enable_moe_fp32_combine": True}),
    ("qwen3_moe", {"hidden_act": "quick_gelu"}), ("beam", {"hidden_act": "gelu"}),
    ("mixtral", {"router_jitter_noise": 0.1}), ("llama4", {"num_experts_per_tok": 1}),
    ("llama4", {"num_experts_per_tok": 8}), ("jetmoe", {"num_experts_per_tok": 8}),
    ("laguna", {"moe_router_logit_softcapping": 3.0}), ("minimax_m3_vl", {"swiglu_limit": 0.5}),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
]


@pytest.mark.parametrize(("family", "options"), OPTIONS, ids=lambda v: v if isinstance(v, str) else next(iter(v)))
def test_options_in_evaluation_and_training(family, options):
    row = next(r for r in ROWS if r.family == family)
    for training in (False, True):
        _, own, got = both(row, torch.float64, training, **options)
        agree(own, got, 1e-6 if family in FLOAT32_INSIDE else 1e-11)


def test_an_expert_that_a_capacity_drops_contributes_nothing():
    row = next(r for r in ROWS if r.family == "switch_transformers")
    _, own, got = both(row, torch.float64, expert_capacity=1)
    dropped = own[0][0].flatten(0, 1).abs().sum(1) == 0
    assert 0 < dropped.sum() < 24 and torch.equal(got[0][0].flatten(0, 1).abs().sum(1) == 0, dropped)


@pytest.mark.parametrize("act", ["tanh", "mish", "gelu_10"])
def test_activations_that_cannot_be_computed_are_refused(act):
    row = next(r for r in ROWS if r.family == "qwen3_moe")
    with pytest.raises(ValueError, match="Qwen3MoeExperts"):
        replace_ffn(hf_blocks.build(row, hidden_act=act))


def test_unsupported_families_are_named_with_the_reason():
    import transformers

    config = transformers.NllbMoeConfig(d_model=32, encoder_ffn_dim=24, num_experts=4, encoder_layers=2,
                                        decoder_layers=2, vocab_size=64)
    block = hf_blocks.modeling("nllb_moe").NllbMoeSparseMLP(config, 24)
    assert "nllb_moe" in unsupported()
    before = {n: type(m) for n, m in block.named_modules()}
    with pytest.raises(ValueError, match=r"NllbMoeSparseMLP.*0/1 mask"):
        replace_ffn(block)
    assert {n: type(m) for n, m in block.named_modules()} == before
    holder = torch.nn.ModuleList([block, torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(),
                                                             torch.nn.Linear(12, 8))])
    report = replace_ffn(holder, on_unsupported="leave")
    assert [r.name for r in report.replaced] == ["1"] and "0/1 mask" in report.left[0].reason
    holder[1] = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 8))
    assert not replace_ffn(holder, moe=False).left


def test_every_supported_family_is_in_the_table_once_a_class():
    swapped = [(row.family, row.swapped, row.block) for row in families.table()]
    assert len({row.family for row in families.table()}) >= 75
    assert all(row.adapter and row.swapped for row in families.table())
    for family, name, _ in swapped:
        assert hasattr(hf_blocks.modeling(family), name)
