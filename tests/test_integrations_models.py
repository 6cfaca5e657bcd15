"""What transformers itself checks of an experts implementation, on tiny models of the families with an MoE."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
import transformers as hf

from moeffn import last_backend
from moeffn.integrations.transformers import register, replace_ffn

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
         "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64}
MODELS = {
    "qwen3_moe": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig, {"moe_intermediate_size": 24, "intermediate_size": 40,
                                                              "num_experts": 8, "num_experts_per_tok": 2}),
    "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig, {"intermediate_size": 24, "num_local_experts": 4,
                                                          "num_experts_per_tok": 2}),
    "olmoe": (hf.OlmoeForCausalLM, hf.OlmoeConfig, {"intermediate_size": 24, "num_experts": 8,
                                                    "num_experts_per_tok": 2}),
    "gpt_oss": (hf.GptOssForCausalLM, hf.GptOssConfig, {"intermediate_size": 24, "num_local_experts": 8,
                                                        "num_experts_per_tok": 2}),
    "glm4_moe": (hf.Glm4MoeForCausalLM, hf.Glm4MoeConfig, {
        "moe_intermediate_size": 24, "intermediate_size": 40, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}),
    "deepseek_v3": (hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config, {
        "moe_intermediate_size": 24, "intermediate_size": 40, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
        "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4}),
}
AUX = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss")  # families with output_router_logits and an auxiliary loss
IDS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(0))


def model_of(family, implementation="eager", **extra):
    cls, config, sizes = MODELS[family]
    torch.manual_seed(0)
    made = config(**(SMALL | sizes | extra))
    made._experts_implementation = implementation
    model = cls(made).eval()
    with torch.no_grad():  # routers that start at zero choose nothing in particular
        for name, p in model.named_parameters():
            values = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
            p.copy_(values * (1.0 if p.ndim == 1 else 0.2))
    return model


def gradients(model, **inputs):
    model.zero_grad()
    out = model(**inputs)
    out.loss.backward()
    return out, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def close(got, want, bound=1e-5):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert (got[name] - value).norm() <= bound * max(float(value.norm()), 1e-4), name


@pytest.fixture(scope="module", autouse=True)
def registered():
    register()


@pytest.mark.parametrize("family", MODELS)
def test_registered_logits_and_gradients_equal_eager(family):
    eager, model = model_of(family), model_of(family)
    model.set_experts_implementation("moeffn")
    out, grads = gradients(eager, input_ids=IDS, labels=IDS)
    mine, my_grads = gradients(model, input_ids=IDS, labels=IDS)
    assert last_backend() in ("torch", "native")
    torch.testing.assert_close(mine.logits, out.logits, rtol=1e-5, atol=1e-5)
    close(my_grads, grads)


@pytest.mark.parametrize("family", MODELS)
def test_replaced_logits_and_gradients_equal_eager(family):
    eager, model = model_of(family), model_of(family)
    report = replace_ffn(model)
    kinds = [r.kind for r in report.replaced]
    assert kinds.count("moe") == sum(hasattr(m, "has_gate") for m in eager.modules()) and not report.left
    out, grads = gradients(eager, input_ids=IDS, labels=IDS)
    mine, my_grads = gradients(model, input_ids=IDS, labels=IDS)
    torch.testing.assert_close(mine.logits, out.logits, rtol=1e-5, atol=1e-5)
    close(my_grads, grads)


@pytest.mark.parametrize("how", ["register", "replace"])
@pytest.mark.parametrize("family", MODELS)
def test_generate(family, how):
    model = model_of(family)
    want = model.generate(IDS, max_new_tokens=5, do_sample=False)
    if how == "register":
        model.set_experts_implementation("moeffn")
    else:
        replace_ffn(model)
    assert torch.equal(model.generate(IDS, max_new_tokens=5, do_sample=False), want)


@pytest.mark.parametrize("how", ["register", "replace"])
@pytest.mark.parametrize("family", AUX)
def test_router_logits_and_auxiliary_loss(family, how):
    eager, model = model_of(family), model_of(family)
    if how == "register":
        model.set_experts_implementation("moeffn")
    else:
        replace_ffn(model)
    out, grads = gradients(eager, input_ids=IDS, labels=IDS, output_router_logits=True)
    mine, my_grads = gradients(model, input_ids=IDS, labels=IDS, output_router_logits=True)
    assert len(mine.router_logits) == len(out.router_logits) == 2
    for got, want in zip(mine.router_logits, out.router_logits, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine.aux_loss, out.aux_loss, rtol=1e-5, atol=1e-5)
    close(my_grads, grads)


@pytest.mark.parametrize("family", MODELS)
def test_save_pretrained_of_a_replaced_model_loads_as_the_original(family, tmp_path):
    model = model_of(family)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    model.save_pretrained(tmp_path / "before")
    replace_ffn(model)
    assert list(model.state_dict()) == list(before)
    model.save_pretrained(tmp_path / "after")
    files = [sorted(p.name for p in (tmp_path / d).iterdir()) for d in ("before", "after")]
    assert files[0] == files[1]
    assert (tmp_path / "before/model.safetensors").read_bytes() == (tmp_path / "after/model.safetensors").read_bytes()
    again, info = MODELS[family][0].from_pretrained(tmp_path / "after", output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    loaded = again.state_dict()
    assert loaded.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(loaded[name], value), name
    assert {type(m).__name__ for m in again.modules()} == {type(m).__name__ for m in model_of(family).modules()}


@pytest.mark.parametrize("family", MODELS)
def test_from_pretrained_with_the_implementation_by_name(family, tmp_path):
    model = model_of(family)
    model.save_pretrained(tmp_path)
    loaded = MODELS[family][0].from_pretrained(tmp_path, experts_implementation="moeffn").eval()
    assert loaded.config._experts_implementation == "moeffn"
    with torch.no_grad():
        torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", ["register", "replace"])
@pytest.mark.parametrize("family", MODELS)
def test_gradient_checkpointing(family, how):
    model = model_of(family)
    if how == "register":
        model.set_experts_implementation("moeffn")
    else:
        replace_ffn(model)
    model.train()
    _, want = gradients(model, input_ids=IDS, labels=IDS)
    model.gradient_checkpointing_enable()
    _, got = gradients(model, input_ids=IDS, labels=IDS)
    close(got, want, 1e-6)


def test_bfloat16_model_with_float32_router_weights():
    eager, model = model_of("deepseek_v3").bfloat16(), model_of("deepseek_v3").bfloat16()
    replace_ffn(model)
    with torch.no_grad():
        want, got = eager(IDS).logits, model(IDS).logits
    assert got.dtype == want.dtype == torch.bfloat16
    exact = model_of("deepseek_v3")
    exact.load_state_dict({n: t.float() for n, t in eager.state_dict().items()})
    with torch.no_grad():
        truth = exact(IDS).logits
    assert (got.float() - truth).norm() <= 2 * (want.float() - truth).norm()


def test_copies_and_pickles_stay_replaced_and_independent():
    model = model_of("qwen3_moe")
    replace_ffn(model)
    want = model(IDS).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert {type(m) for m in twin.modules()} == {type(m) for m in model.modules()}
        torch.testing.assert_close(twin(IDS).logits, want)
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()
        gc.collect()
        assert torch.equal(model(IDS).logits, want)


def test_routers_and_experts_keep_their_classes_and_parameters():
    from transformers.models.qwen3_moe import modeling_qwen3_moe as code

    model = model_of("qwen3_moe")
    before = dict(model.named_parameters())
    classes = {n: type(m) for n, m in model.named_modules()}
    replace_ffn(model)
    assert all(p is before[n] for n, p in model.named_parameters())
    assert all(isinstance(m, classes[n]) for n, m in model.named_modules())
    assert sum(isinstance(m, code.Qwen3MoeTopKRouter) for m in model.modules()) == 2


@pytest.mark.parametrize("how", ["register", "replace"])
def test_a_block_compiles_to_one_graph_without_having_run_before(how):
    model = model_of("qwen3_moe")
    own = copy.deepcopy(model.model.layers[0].mlp)
    if how == "register":
        model.set_experts_implementation("moeffn")
        own.experts.config = copy.deepcopy(own.experts.config)
        own.experts.config._experts_implementation = "eager"
    else:
        replace_ffn(model)
    block = model.model.layers[0].mlp
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 9, 32)
    torch.testing.assert_close(compiled(x), own(x), rtol=1e-5, atol=1e-5)
