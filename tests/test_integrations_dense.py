"""Dense FFNs of transformers models, and modules of the same shape, through replace_ffn."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import transformers as hf
from torch import nn

from moeffn.integrations import ffn
from moeffn.integrations.swap import is_swapped
from moeffn.integrations.transformers import replace_ffn

SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
DECODER = SMALL | {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS = {
    "bert": lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL)),
    "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64)),
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**DECODER)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**DECODER)),
    "olmo3": lambda: hf.Olmo3ForCausalLM(hf.Olmo3Config(**DECODER)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**DECODER)),
    "mistral": lambda: hf.MistralForCausalLM(hf.MistralConfig(**DECODER)),
    "phi3": lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**DECODER)),  # one fused gate_up_proj
    "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**DECODER)),  # fc1, fc2 with biases
    "vit": lambda: hf.ViTForImageClassification(hf.ViTConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4)),
    "clip": lambda: hf.CLIPTextModel(hf.CLIPTextConfig(**DECODER)),  # quick GELU
    "dpt": lambda: hf.DPTModel(hf.DPTConfig(**{k: v for k, v in SMALL.items() if k != "vocab_size"}, image_size=16,
                                            patch_size=4, is_hybrid=False)),  # intermediate + output with the residual
    "bloom": lambda: hf.BloomForCausalLM(hf.BloomConfig(  # adds the residual itself
        hidden_size=32, n_layer=2, n_head=4, vocab_size=64)),
    "t5": lambda: hf.T5ForConditionalGeneration(hf.T5Config(
        d_model=32, d_ff=48, num_layers=2, num_heads=4, d_kv=8, vocab_size=64, feed_forward_proj="gated-gelu")),
}
ACTIVATIONS = {"bert": "gelu", "gpt2": "gelu_tanh", "llama": "silu", "gemma3": "gelu_tanh", "clip": "silu",
               "vit": "gelu"}


def inputs(name):
    if name in ("vit", "dpt"):
        return {"pixel_values": torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(0)).double()}
    ids = torch.randint(3, 64, (2, 7), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "decoder_input_ids": ids} if name == "t5" else {"input_ids": ids}


def run(model, given):
    out = model(**given)
    y = out.logits if hasattr(out, "logits") else out.last_hidden_state
    model.zero_grad()
    (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)).sum().backward()
    return y.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_same_outputs_and_parameter_gradients(name):
    torch.manual_seed(0)
    own = MODELS[name]().double().eval()
    model = copy.deepcopy(own)
    keys, before = list(model.state_dict()), dict(model.named_parameters())
    report = replace_ffn(model)
    assert len(report.replaced) == (4 if name == "t5" else 2) and not report.left
    assert {r.kind for r in report.replaced} == {"dense"} and report.replaced[0].family == name
    assert report.replaced[0].activation.kind == ACTIVATIONS.get(name, report.replaced[0].activation.kind)
    assert list(model.state_dict()) == keys and all(p is before[n] for n, p in model.named_parameters())
    y, grads = run(model, inputs(name))
    want, own_grads = run(own, inputs(name))
    assert (y - want).norm() <= (1e-10 if name == "bloom" else 1e-12) * want.norm()  # Bloom rounds sqrt(2/pi)
    whole = torch.stack([g.norm() for g in own_grads.values()]).norm()
    assert grads.keys() == own_grads.keys()
    for key, grad in own_grads.items():  # key biases of attention have gradients of rounding size only
        assert (grads[key] - grad).norm() <= (1e-9 if name == "bloom" else 1e-11) * grad.norm() + 1e-14 * whole, key


def test_the_replaced_ffn_saves_only_its_input_and_pre_activations():
    model = MODELS["llama"]().eval()
    block = model.model.layers[0].mlp
    replace_ffn(block)
    saved = []
    x = torch.randn(3, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        block(x)
    parameters = {p.data_ptr() for p in block.parameters()}
    held = {t.data_ptr(): tuple(t.shape) for t in saved if t is not None and t.data_ptr() not in parameters}
    assert sorted(held.values()) == [(3, 32), (3, 48), (3, 48)]


def test_save_and_reload(tmp_path):
    for name in ("bert", "gpt2"):
        model = MODELS[name]().eval()
        want = model(**inputs(name)).logits
        replace_ffn(model)
        model.save_pretrained(tmp_path / name)
        again = type(model).from_pretrained(tmp_path / name).eval()
        torch.testing.assert_close(again(**inputs(name)).logits, want, rtol=1e-5, atol=1e-5)


class Gated(nn.Module):
    """Names that say nothing, biases, up before gate, a clamp, dropout at the end."""

    def __init__(self, act=torch.tanh, inner=0.0, tail=0.0):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)
        self.act, self.inner, self.tail = act, nn.Dropout(inner), nn.Dropout(tail)
        self.limit = 0.75

    def forward(self, x):
        return self.tail(self.c(self.inner(self.act(self.b(x).clamp(max=self.limit)) * self.a(x).clamp(-0.75, 0.75))))


def test_roles_and_clamps_are_found_by_evaluation_not_by_names():
    own = Gated(act=nn.functional.silu).eval()
    block = copy.deepcopy(own)
    report = replace_ffn(block)
    plan = block._moeffn.reading
    assert plan.w_in == ("b", "a") and plan.w_out == "c" and report.replaced[0].activation.limit == 0.75
    x = torch.randn(2, 5, 16) * 5
    torch.testing.assert_close(block(x), own(x))
    block_of_three = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 16))
    same = copy.deepcopy(block_of_three)
    replace_ffn(block_of_three)
    torch.testing.assert_close(block_of_three(x), same(x))


class Fused(nn.Module):
    """One (2F, D) projection whose halves are up, gate, or interleaved."""

    def __init__(self, order):
        super().__init__()
        self.w, self.v, self.order = nn.Linear(16, 48, bias=order == "up first"), nn.Linear(24, 16), order

    def forward(self, x):
        h = self.w(x)
        if self.order == "interleaved":
            gate, up = h[..., ::2], h[..., 1::2]
        else:
            up, gate = h.chunk(2, -1)
        return self.v(nn.functional.gelu(gate) * up)


@pytest.mark.parametrize("order", ["up first", "interleaved"])
def test_fused_projection_layouts(order):
    own = Fused(order)
    block = copy.deepcopy(own)
    replace_ffn(block)
    x = torch.randn(3, 16)
    torch.testing.assert_close(block(x), own(x))
    block(x).sum().backward()
    own(x).sum().backward()
    for got, want in zip(block.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)


def test_dropout_keeps_its_place():
    x = torch.ones(4, 16)
    at_end = Gated(act=nn.functional.silu, tail=0.5)
    own = copy.deepcopy(at_end)
    replace_ffn(at_end)
    at_end.train(), own.train()
    for module in (at_end, own):
        torch.manual_seed(0)
        module.result = module(x)
    torch.testing.assert_close(at_end.result, own.result)
    assert (at_end.result == 0).any()
    inside = Gated(act=nn.functional.silu, inner=0.5)
    own = copy.deepcopy(inside)
    report = replace_ffn(inside)
    assert "own forward" in report.replaced[0].note
    inside.train(), own.train()
    for module in (inside, own):
        torch.manual_seed(0)
        module.result = module(x)
    assert torch.equal(inside.result, own.result)
    inside.eval(), own.eval()
    torch.testing.assert_close(inside(x), own(x))


class FunctionalDropout(Gated):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


def test_training_noise_without_a_module_is_found_too():
    block = FunctionalDropout(act=nn.functional.silu)
    own = copy.deepcopy(block)
    before = torch.random.get_rng_state()
    report = replace_ffn(block)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert "own forward" in report.replaced[0].note
    for module in (block, own):
        torch.manual_seed(1)
        module.result = module.train()(torch.ones(3, 16))
    assert torch.equal(block.result, own.result)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(x)))


class Normed(Residual):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(12)

    def forward(self, x):
        return self.fc2(self.norm(torch.relu(self.fc1(x))))


class TwoArguments(Residual):
    def forward(self, x, scale):
        return self.fc2(torch.relu(self.fc1(x))) * scale


class Optional(Residual):
    def forward(self, x, residual, scale=None):
        y = self.fc2(torch.relu(self.fc1(x))) + residual
        return y if scale is None else y * scale


def test_a_residual_argument_is_added_and_an_optional_one_runs_the_own_forward():
    block = Optional()
    own = copy.deepcopy(block)
    report = replace_ffn(block)
    assert "scale is given" in report.replaced[0].note
    x, r = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    for args, kwargs in (((x, r), {}), ((x,), {"residual": r}), ((x, r), {"scale": 3.0}), ((x, r, 2.0), {}),
                         ((), {"x": x, "residual": r}), ((), {"residual": r, "x": x})):
        torch.testing.assert_close(block(*args, **kwargs), own(*args, **kwargs))


@pytest.mark.parametrize(("mlp", "reason"), [
    (Residual(), "does not compute"), (Normed(), "norm.weight"), (TwoArguments(), "does not compute"),
    (Gated(act=torch.tanh), "does not compute")],
    ids=["residual inside", "norm inside", "two arguments", "unknown activation"])
def test_what_is_not_a_plain_ffn_is_left_with_the_reason(mlp, reason):
    holder = nn.ModuleDict({"mlp": mlp, "good": nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))})
    report = replace_ffn(holder)
    assert [r.name for r in report.replaced] == ["good"]
    assert [x.name for x in report.left] == ["mlp"] and reason in report.left[0].reason
    assert type(holder["mlp"]) is type(mlp) and reason in report.describe()
    with pytest.raises(ValueError, match="mlp"):
        replace_ffn(nn.ModuleDict({"mlp": mlp}))


def test_hooks_and_patched_forwards_are_not_lost():
    for spoil in (lambda m: m.fc1.register_forward_hook(lambda *a: None), lambda m: setattr(m, "forward", m.forward),
                  lambda m: setattr(m.fc2, "forward", m.fc2.forward)):
        mlp = nn.ModuleDict({"mlp": Residual()})
        mlp["mlp"].__class__ = type("Plain", (Residual,), {"forward": lambda s, x: s.fc2(torch.relu(s.fc1(x)))})
        spoil(mlp["mlp"])
        with pytest.raises(ValueError, match=r"hooks on fc1|forward was replaced on the instance"):
            replace_ffn(mlp)


def test_projections_wrapped_after_the_replacement_run_as_wrapped():
    model = MODELS["llama"]().eval()
    mlp = model.model.layers[0].mlp
    own = copy.deepcopy(mlp)
    replace_ffn(mlp)
    for module in (mlp, own):
        module.gate_proj = nn.Sequential(module.gate_proj, nn.Tanh())
    x = torch.randn(2, 32)
    with pytest.warns(UserWarning, match="wrapped or hooked"):
        got = mlp(x)
    torch.testing.assert_close(got, own(x))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mlp(x)
    bert = MODELS["bert"]().eval()
    layer = bert.bert.encoder.layer[0]
    own = copy.deepcopy(layer)
    replace_ffn(layer)
    for module in (layer, own):
        module.output.dense = nn.Sequential(module.output.dense, nn.Tanh())
    x = torch.randn(1, 3, 32)
    with pytest.warns(UserWarning, match="wrapped or hooked"):
        got = layer.output(layer.intermediate(x), x)
    torch.testing.assert_close(got, own.output(own.intermediate(x), x))


class OtherUse(nn.Module):
    """A layer that also keeps what `intermediate` returned: handing the input through would change `kept`."""

    def __init__(self, layer):
        super().__init__()
        self.intermediate, self.output = layer.intermediate, layer.output

    def forward(self, x):
        h = self.intermediate(x)
        self.kept = h.mean()
        return self.output(h, x)


def test_a_pair_is_left_where_the_layer_uses_the_intermediate_result():
    layer = OtherUse(MODELS["bert"]().bert.encoder.layer[0])
    with pytest.raises(ValueError, match="OtherUse uses what its intermediate module returns"):
        replace_ffn(layer)


def test_inline_projections_are_reported():
    model = hf.OPTModel(hf.OPTConfig(hidden_size=32, ffn_dim=48, num_hidden_layers=1, num_attention_heads=4,
                                     vocab_size=64, word_embed_proj_dim=32))
    with pytest.raises(ValueError, match="fc1 and fc2 in its own forward"):
        replace_ffn(model)


def test_planning_needs_no_weights():
    with torch.device("meta"):
        model = hf.LlamaModel(hf.LlamaConfig(num_hidden_layers=2))
    report = replace_ffn(model)
    assert len(report.replaced) == 2 and all(is_swapped(layer.mlp) for layer in model.layers)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_replacing_twice_says_so(name):
    model = MODELS[name]()
    first = replace_ffn(model, backend="torch")
    again = replace_ffn(model, backend="torch")
    why = {left.name: left.reason for left in again.left}
    assert not again.replaced and {why[r.name] for r in first.replaced} == {"already replaced (backend 'torch')"}
    with pytest.raises(ValueError, match=r"backend: expected 'torch', by which .* is already replaced .*, got 'auto'"):
        replace_ffn(model)


def test_a_backend_for_experts_is_not_silently_dropped_for_dense_ffns():
    for name in ("llama", "bert"):
        report = replace_ffn(MODELS[name](), backend="native")
        assert all("plain torch: backend 'native' is for experts" in r.note for r in report.replaced)
        assert "is for experts" not in replace_ffn(MODELS[name](), backend="torch").describe()


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_an_exchanged_activation_is_honoured(name):
    model = MODELS[name]().eval()
    if name == "llama":
        block, holder, attribute = model.model.layers[0].mlp, "", "act_fn"
    else:
        block, holder, attribute = model.bert.encoder.layer[0], "intermediate", "intermediate_act_fn"
    own = copy.deepcopy(block)
    replace_ffn(block)
    x = torch.randn(1, 3, 32)
    twins = [block, copy.deepcopy(block), pickle.loads(pickle.dumps(block))]
    for twin in twins:  # a copy's own activation is not an exchanged one
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            before = through(twin, x)
        torch.testing.assert_close(before, through(own, x))
    for module in (*twins, own):
        setattr(module.get_submodule(holder), attribute, nn.Tanh())
    for twin in twins:
        with pytest.warns(UserWarning, match=f"{attribute} of .* was exchanged"):
            got = through(twin, x)
        torch.testing.assert_close(got, through(own, x))


def test_an_activation_hooked_later_is_called():
    mlp = MODELS["llama"]().eval().model.layers[0].mlp
    own = copy.deepcopy(mlp)
    replace_ffn(mlp)
    for module in (mlp, own):
        module.act_fn.register_forward_hook(lambda m, args, out: 2 * out)
    x = torch.randn(2, 32)
    with pytest.warns(UserWarning, match=r"act_fn of \w* was exchanged or hooked"):
        got = mlp(x)
    torch.testing.assert_close(got, own(x))


def through(block, x):
    return block.output(block.intermediate(x), x) if hasattr(block, "intermediate") else block(x)


def test_shared_modules_are_replaced_once():
    mlp = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
    model = nn.ModuleList([mlp, mlp])
    assert len(replace_ffn(model).replaced) == 1
    assert isinstance(ffn.linears(mlp)["0"], nn.Linear)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "bert", "gpt2"])
def test_dtypes_follow_those_of_the_module_itself(name, dtype, autocast):
    model = MODELS[name]().to(dtype).eval()
    layer = {"llama": "model.layers.0.mlp", "gpt2": "transformer.h.0.mlp", "bert": "bert.encoder.layer.0"}[name]
    block = model.get_submodule(layer)
    own = copy.deepcopy(block)
    replace_ffn(block)
    x = torch.randn(2, 5, 32).to(dtype).requires_grad_()
    results = []
    for module in (own, block):
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            y = module.output(module.intermediate(x), x) if name == "bert" else module(x)
        y.float().square().sum().backward()
        results.append((y, x.grad, [p.grad for p in module.parameters() if p.grad is not None]))
        x.grad = None
    assert results[0][0].dtype == results[1][0].dtype and results[0][1].dtype == results[1][1].dtype
    bound = 1e-5 if dtype == torch.float32 and autocast is None else 0.03
    assert (results[1][0] - results[0][0]).norm() <= bound * results[0][0].norm()
    assert (results[1][1] - results[0][1]).norm() <= bound * results[0][1].norm()
    for got, want in zip(results[1][2], results[0][2], strict=True):
        assert got.dtype == want.dtype and (got - want).norm() <= bound * want.norm()
