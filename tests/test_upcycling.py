"""upcycle: the same function at the start, whatever the form of the FFN; honest counts; errors that name the cause."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import moeffn
from moeffn import reference
from moeffn.layer import DenseFFN, MoEFFN
from moeffn.upcycling import upcycle

GELU = moeffn.Activation(kind="gelu", gated=False)


def dense(activation: moeffn.Activation = moeffn.SWIGLU, layout: str = "concat", bias: bool = True,
          dtype: torch.dtype = torch.float64) -> DenseFFN:
    """D = 12, F = 24 (divisible by 2, 3, 4); biases are not zero, so that a lost or doubled bias shows."""
    torch.manual_seed(0)
    ffn = DenseFFN(12, 24, activation=activation, layout=moeffn.Layout(layout), bias=bias, dtype=dtype)
    with torch.no_grad():
        for b in (ffn.b_in, ffn.b_out):
            if b is not None:
                b.normal_()
    return ffn


def relative(value: torch.Tensor, truth: torch.Tensor) -> float:
    return ((value - truth).norm() / truth.norm()).item()


# 1: plain copies; 2: two slices; 3 and 4: more slices than groups picked; F / 4 = 6 stays even
@pytest.mark.parametrize("granularity", [1, 2, 3, 4])
@pytest.mark.parametrize(("activation", "layout", "bias"), [
    (GELU, "concat", True),  # BERT
    (moeffn.SWIGLU, "concat", False),  # Llama
    (moeffn.SWIGLU_OAI, "interleaved", True),  # slices of interleaved rows
    (moeffn.GEGLU_TANH, "concat", True),  # gate and up bias cut together
])
def test_same_function_at_the_start(granularity, activation, layout, bias):
    ffn = dense(activation, layout, bias)
    moe = upcycle(ffn, 4, 2, granularity=granularity).module
    assert isinstance(moe, MoEFFN)
    assert (moe.config.num_experts, moe.config.top_k) == (4 * granularity, 2 * granularity)
    x = torch.randn(7, 3, 12, dtype=torch.float64)
    torch.testing.assert_close(moe(x), ffn(x), rtol=1e-6, atol=1e-6)  # routing weights are at least float32
    routing = moe.router(x.reshape(-1, 12))
    y = reference.moe_ffn(x, routing, moe.experts.weights)
    assert relative(y, ffn(x)) < 1e-12  # the function itself, in float64


def test_float32_error_is_within_twice_that_of_the_dense_ffn():
    truth_ffn = dense()
    ffn = copy.deepcopy(truth_ffn).float()
    x = torch.randn(256, 12, dtype=torch.float64)
    truth = truth_ffn.float().double()(x)
    budget = 2 * relative(ffn(x.float()).double(), truth)
    for granularity in (1, 2):
        moe = upcycle(ffn, 8, 2, granularity=granularity).module
        assert relative(moe(x.float()).double(), truth) <= budget


def test_groups_are_picked_whole_and_hold_each_slice_once():
    ffn = dense(GELU)
    moe = upcycle(ffn, 4, 2, granularity=3).module
    experts = moe.router(torch.randn(64, 12, dtype=torch.float64)).experts
    groups, slices = experts // 3, experts % 3
    for t in range(64):
        assert groups[t].unique().numel() == 2
        assert slices[t].sort().values.tolist() == [0, 0, 1, 1, 2, 2]
    assert experts.unique().numel() == 12  # the random router uses every group


def test_experts_are_copies_with_their_own_memory_and_gradients():
    ffn = dense()
    ffn.w_out.requires_grad_(False)
    moe = upcycle(ffn, 4, 2).module
    for e in range(4):
        assert torch.equal(moe.experts.w_in[e], ffn.w_in)
        assert torch.equal(moe.experts.w_out[e], ffn.w_out)
    assert moe.experts.w_in.data_ptr() != ffn.w_in.data_ptr()
    assert moe.experts.w_in.is_contiguous()
    assert moe.experts.w_in.requires_grad and not moe.experts.w_out.requires_grad


@pytest.mark.parametrize("with_bias", ["b_in", "b_out"])
def test_a_single_bias_stays_single(with_bias):
    ffn = dense(GELU)
    setattr(ffn, "b_out" if with_bias == "b_in" else "b_in", None)
    moe = upcycle(ffn, 4, 2, granularity=2).module
    x = torch.randn(9, 12, dtype=torch.float64)
    assert [n for n, _ in moe.experts.named_parameters()] == ["w_in", "w_out", with_bias]
    assert relative(reference.moe_ffn(x, moe.router(x), moe.experts.weights), ffn(x)) < 1e-12


def test_noise_has_the_asked_size_and_moves_experts_apart():
    ffn = dense()
    moe = upcycle(ffn, 64, 2, noise=0.1).module
    rms = ffn.w_in.square().mean().sqrt()
    added = moe.experts.w_in - ffn.w_in
    assert abs((added.std() / rms).item() - 0.1) < 0.01
    assert not torch.equal(moe.experts.w_in[0], moe.experts.w_in[1])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.ffn = dense(dtype=torch.float32)

    def forward(self, x):
        return x + self.ffn(self.norm(x))


def test_a_model_is_changed_in_place_and_counted():
    model = nn.Sequential(Block(), Block(), nn.Linear(12, 3))
    model.eval()
    x = torch.randn(5, 12)
    before, total = model(x), sum(p.numel() for p in model.parameters())
    report = upcycle(model, 4, 2)
    assert report.module is model
    assert [layer.name for layer in report.layers] == ["0.ffn", "1.ffn"]
    assert all(isinstance(model[i].ffn, MoEFFN) and not model[i].ffn.training for i in (0, 1))
    torch.testing.assert_close(model(x), before, rtol=1e-5, atol=1e-5)
    one = 12 * 48 + 48 + 24 * 12 + 12  # w_in, b_in, w_out, b_out
    assert report.total_before == report.active_before == total
    assert report.total_after == sum(p.numel() for p in model.parameters()) == total + 2 * (3 * one + 4 * 12)
    assert report.active_after == total + 2 * (one + 4 * 12)
    assert f"{report.total_after:,}" in str(report) and ".ffn (2): " in str(report)


def test_experts_that_were_there_already_are_not_all_active():
    model = nn.Sequential(Block(), Block())
    upcycle(model, 4, 1, where=lambda name: name.startswith("0"))
    sizes = [sum(p.numel() for p in m.parameters()) for m in (model, model[0].ffn.experts)]
    report = upcycle(model, 8, 2, where=lambda name: name.startswith("1"))
    one = sizes[1] // 4
    assert (report.total_before, report.active_before) == (sizes[0], sizes[0] - 3 * one)
    assert report.total_after == sizes[0] + 7 * one + 8 * 12
    assert report.active_after == report.active_before + one + 8 * 12


def test_experts_of_unknown_number_per_token_are_told():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.zeros(4, 6, 12))

    model = nn.ModuleDict({"a": Block(), "experts": Experts()})
    report = upcycle(model, 4, 2)
    assert report.idle is None and "nothing says how many a token uses" in str(report)
    assert report.total_after - report.active_after == report.layers[0].total - report.layers[0].active


def test_tied_weights_count_once():
    model = nn.Sequential(Block(), Block(), nn.Linear(12, 48, bias=False))
    model[1].ffn.w_out = model[0].ffn.w_out
    model[2].weight = model[0].ffn.w_in
    size = sum(p.numel() for p in model.parameters())
    report = upcycle(model, 4, 2)
    assert report.total_before == report.active_before == size
    assert report.total_after == sum(p.numel() for p in model.parameters())
    assert report.active_after == report.total_after - sum(layer.total - layer.active for layer in report.layers)


def test_where_chooses_layers_and_a_shared_module_stays_shared():
    model = nn.ModuleDict({"a": Block(), "b": Block()})
    model["c"] = model["b"]
    report = upcycle(model, 4, 1, where=lambda name: not name.startswith("a"))
    assert [layer.name for layer in report.layers] == ["b.ffn"]
    assert isinstance(model["a"].ffn, DenseFFN)
    assert model["b"].ffn is model["c"].ffn


def test_training_reaches_router_and_experts():
    moe = upcycle(dense(dtype=torch.float32), 4, 2, aux_loss_coef=0.01, noise=0.05).module
    moe(torch.randn(32, 12)).square().sum().backward()
    for name, p in moe.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, name


@pytest.mark.parametrize(("change", "words"), [
    ({"top_k": 5}, "top_k: expected at most num_experts = 4, got 5"),
    ({"top_k": 0}, "top_k: expected at least 1, got 0"),
    ({"granularity": 5}, "granularity: expected a divisor of the hidden width F = 24"),
    ({"noise": -1.0}, "noise: expected a number of at least 0, got -1.0"),
    ({"model_or_ffn": nn.Linear(3, 3)}, "model_or_ffn: expected a dense FFN that moeffn knows"),
    ({"model_or_ffn": DenseFFN(12, 24, output_gate=True)}, "without an output gate"),
])
def test_bad_arguments_name_themselves_and_change_nothing(change, words):
    model = Block()
    arguments = {"model_or_ffn": model, "num_experts": 4, "top_k": 2} | change
    with pytest.raises(ValueError, match=words):
        upcycle(**arguments)
    assert isinstance(model.ffn, DenseFFN)


TRANSFORMERS = {  # one model of each form of dense FFN: pair with residual, Conv1D with dropout behind, three matrices
    "BertModel": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
                  "vocab_size": 50, "max_position_embeddings": 32},
    "GPT2Model": {"n_embd": 16, "n_inner": 24, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 32},
    "LlamaModel": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
                   "num_key_value_heads": 2, "vocab_size": 50},
}


@pytest.mark.parametrize("granularity", [1, 2])
@pytest.mark.parametrize("replaced_before", [False, True])
@pytest.mark.parametrize("name", list(TRANSFORMERS))
def test_transformers_models(name, granularity, replaced_before):
    transformers = pytest.importorskip("transformers")
    from moeffn.integrations.transformers import replace_ffn

    torch.manual_seed(0)
    config = getattr(transformers, name.replace("Model", "Config"))(**TRANSFORMERS[name])
    model = getattr(transformers, name)(config).eval()
    ids = torch.randint(0, 50, (3, 7))
    with torch.no_grad():
        before = model(ids).last_hidden_state
        if replaced_before:
            replace_ffn(model)
        total = sum(p.numel() for p in model.parameters())
        report = upcycle(model, 4, 2, granularity=granularity)
        torch.testing.assert_close(model(ids).last_hidden_state, before, rtol=1e-5, atol=1e-5)
    assert len(report.layers) == len([m for m in model.modules() if isinstance(m, MoEFFN)]) == 2
    assert report.total_before == total
    assert report.total_after == sum(p.numel() for p in model.parameters())
    model.train()
    model(ids).last_hidden_state.square().sum().backward()
    for m in model.modules():
        if isinstance(m, MoEFFN):
            assert m.training and m.experts.w_in.grad.abs().sum() > 0


def test_dropout_behind_the_ffn_stays():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(**TRANSFORMERS["GPT2Model"], resid_pdrop=1.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = transformers.GPT2Model(config).train()
    upcycle(model, 4, 2)
    assert model.h[0].mlp(torch.randn(1, 3, 16)).abs().sum() == 0


def test_an_error_leaves_a_transformers_model_alone():
    transformers = pytest.importorskip("transformers")
    model = transformers.BertModel(transformers.BertConfig(**TRANSFORMERS["BertModel"]))
    classes = [type(m) for m in model.modules()]
    with pytest.raises(ValueError, match="granularity"):
        upcycle(model, 4, 2, granularity=5)
    assert [type(m) for m in model.modules()] == classes
