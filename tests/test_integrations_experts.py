"""The experts contract of transformers: flags, gates, ids beyond the experts, dtypes; and what is refused."""

from __future__ import annotations

import subprocess
import sys

import hf_blocks
import pytest
import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

from moeffn import backends
from moeffn.integrations import experts as contract
from moeffn.integrations.transformers import register, replace_ffn

E, D, F = 5, 12, 10
CPU = torch.device("cpu")
NATIVE = backends.available("native", CPU, torch.float32) is None


def make(gate=None, act=None, **flags):
    """An experts class of one's own, as a model outside transformers would write it, and an instance."""
    flags = {"is_concatenated": True, "is_transposed": False, "has_bias": False, "has_gate": True,
             "has_post_expert_norm": False} | flags

    class Experts(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts = E
            rows = 2 * F if flags["has_gate"] else F
            name = "gate_up_proj" if flags["has_gate"] else "up_proj"
            shapes = {name: (E, rows, D), "down_proj": (E, D, F)}
            for key, (e, a, b) in shapes.items():
                setattr(self, key, nn.Parameter(torch.randn(e, *((b, a) if flags["is_transposed"] else (a, b))) * 0.5))
            if flags["has_bias"]:
                setattr(self, name + "_bias", nn.Parameter(torch.randn(E, rows)))
                self.down_proj_bias = nn.Parameter(torch.randn(E, D))
            if flags["has_post_expert_norm"]:
                self.post_expert_norm = nn.RMSNorm(D, eps=1e-6)
            self.act_fn = act or nn.SiLU()
            self.limit = 1.5

        def forward(self, hidden_states, top_k_index, top_k_weights):
            out = torch.zeros_like(hidden_states)
            w_in, w_out = getattr(self, "gate_up_proj" if self.has_gate else "up_proj"), self.down_proj
            if self.is_transposed:
                w_in, w_out = w_in.mT, w_out.mT
            for t in range(len(hidden_states)):
                for k, e in enumerate(top_k_index[t].tolist()):
                    if e >= self.num_experts:
                        continue
                    h = w_in[e] @ hidden_states[t]
                    if self.has_bias:
                        h = h + getattr(self, "gate_up_proj_bias" if self.has_gate else "up_proj_bias")[e]
                    h = self._apply_gate(h[None])[0] if self.has_gate else self.act_fn(h)
                    y = w_out[e] @ h
                    y = y + self.down_proj_bias[e] if self.has_bias else y
                    y = self.post_expert_norm(y) if self.has_post_expert_norm else y
                    out[t] += (top_k_weights[t, k] * y).to(out.dtype)
            return out

    if gate is not None:
        Experts._apply_gate = gate
    config = PreTrainedConfig()
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    return use_experts_implementation(Experts, **flags)(config)


def clamped(self, h):
    gate, up = h[..., ::2].clamp(max=self.limit), h[..., 1::2].clamp(-self.limit, self.limit)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


def swish_after(self, h):
    gate, up = h.chunk(2, -1)
    return nn.functional.silu(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


def wide_gelu(self, h):
    gate, up = h.chunk(2, -1)
    return (nn.functional.gelu(gate.float()) * up.float()).to(h.dtype)


VARIANTS = {
    "plain": {}, "transposed": {"is_transposed": True}, "bias": {"has_bias": True},
    "no gate": {"has_gate": False, "act": nn.GELU()}, "no gate, all flags": {
        "has_gate": False, "has_bias": True, "is_transposed": True, "act": nn.ReLU()},
    "gpt-oss like": {"is_concatenated": False, "is_transposed": True, "has_bias": True, "gate": clamped},
    "clamp after the activation": {"gate": swish_after}, "norm": {"has_post_expert_norm": True},
    "gelu tanh gate": {"act": nn.GELU("tanh")},
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    register()


def slots(T=7, K=2, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(T, D, generator=generator).to(dtype)
    index = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(T)])
    return x, index, torch.rand(T, K, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("how", ["register", "replace"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_flag_and_gate(variant, how):
    experts = make(**VARIANTS[variant]).double()
    results = []
    for turn in ("eager", how):
        if turn == "register":
            experts.config._experts_implementation = "moeffn"
        elif turn == "replace":
            replace_ffn(experts)
        x, index, weights = slots()
        x.requires_grad_(), weights.requires_grad_()
        experts.zero_grad()
        y = experts(x, index, weights)
        y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape))
        results.append([y.detach(), x.grad, weights.grad, *(p.grad for p in experts.parameters())])
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_ids_from_num_experts_on_contribute_nothing():
    experts = make().double()
    replace_ffn(experts)
    x, index, weights = slots(K=3)
    cut = index.clone()
    cut[:, 1] = E
    weights.requires_grad_()
    y = experts(x, cut, weights)
    y.sum().backward()
    torch.testing.assert_close(y, experts(x, index[:, [0, 2]], weights[:, [0, 2]]))
    assert torch.equal(weights.grad[:, 1], torch.zeros(7, dtype=torch.float64))
    assert torch.equal(experts(x, torch.full_like(index, E), weights), torch.zeros_like(x))


def test_k_may_change_from_call_to_call_and_tokens_may_be_none():
    experts = make().double()
    replace_ffn(experts)
    x, index, weights = slots(K=4)
    single = sum(experts(x, index[:, k: k + 1], weights[:, k: k + 1]) for k in range(4))
    torch.testing.assert_close(experts(x, index, weights), single)
    empty = experts(x[:0], index[:0], weights[:0])
    assert empty.shape == (0, D)


def test_sizes_come_from_the_tensors():
    experts = make().double()
    experts.intermediate_dim, experts.hidden_dim = 999, 999
    with torch.no_grad():
        half = torch.cat([experts.gate_up_proj[:, : F // 2], experts.gate_up_proj[:, F: F + F // 2]], 1)
    experts.gate_up_proj = nn.Parameter(half)
    experts.down_proj = nn.Parameter(experts.down_proj.detach()[..., : F // 2])
    want = experts(*slots())
    replace_ffn(experts)
    torch.testing.assert_close(experts(*slots()), want)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("states", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_of_states_weights_and_autocast(states, weight, autocast):
    experts = make().to(weight)
    replace_ffn(experts)
    x, index, routing = slots(dtype=states)
    x.requires_grad_()
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        y = experts(x, index, routing.float())
    y.float().square().sum().backward()
    assert y.dtype == states and x.grad.dtype == states
    assert all(p.grad.dtype == p.dtype and torch.isfinite(p.grad).all() for p in experts.parameters())
    exact = make().to(weight).double()
    want = exact(x.detach().double(), index, routing.float().double())
    assert (y.double() - want).norm() <= 0.02 * want.norm()


def test_a_gate_that_no_activation_expresses_is_refused_and_nothing_changes():
    def odd(self, h):
        gate, up = h.chunk(2, -1)
        return torch.sin(gate) * up

    experts = make(gate=odd)
    holder = nn.ModuleDict({"good": make(), "odd": experts})
    with pytest.raises(ValueError, match=r"Experts\._apply_gate"):
        replace_ffn(holder)
    with pytest.raises(ValueError, match=r"Experts\._apply_gate"):
        contract.run(experts, *slots(dtype=torch.float32), "auto")
    assert not hasattr(holder["good"], "_moeffn")
    with pytest.raises(ValueError, match="act_fn"):
        replace_ffn(make(has_gate=False, act=nn.Mish()))
    report = replace_ffn(holder, on_unsupported="leave")
    assert [r.name for r in report.replaced] == ["good"] and [x.name for x in report.left] == ["odd"]
    assert "_apply_gate" in report.left[0].reason


def test_a_gate_in_float32_is_recognised():
    spec = contract.read_spec(make(gate=wide_gelu))
    assert (spec.activation.kind, spec.activation.limit) == ("gelu", None)


def test_a_layout_flag_that_the_gate_contradicts_is_refused():
    with pytest.raises(ValueError, match=r"is_concatenated.*interleaved"):
        replace_ffn(make(gate=clamped, is_concatenated=True))
    with pytest.raises(ValueError, match=r"is_concatenated.*concat"):
        replace_ffn(make(is_concatenated=False))


def test_experts_that_compute_something_else_than_their_flags_say_are_refused():
    experts = make()
    cls = type(experts)
    plain = cls.forward

    def doubled(self, *args):
        return 2 * plain.__wrapped__(self, *args)

    cls.forward = plain.__class__(plain.__code__, plain.__globals__, closure=plain.__closure__)
    cls.forward.__wrapped__ = doubled
    with pytest.raises(ValueError, match="another result from its own forward"):
        replace_ffn(experts)


def test_a_forward_put_on_the_instance_is_refused():
    experts = make()
    experts.forward = experts.forward
    with pytest.raises(ValueError, match="use register"):
        replace_ffn(experts)


def test_interleaved_and_concatenated_are_told_apart():
    """The same tensor read in the other layout is finite and wrong: the flag decides, and it shows."""
    one, other = (make(is_concatenated=c, gate=None if c else clamped, act=nn.SiLU()) for c in (True, False))
    assert contract.read_spec(one).layout.value == "concat" and contract.read_spec(other).layout.value == "interleaved"
    x, index, weights = slots(dtype=torch.float32)
    for experts in (one, other):
        want = experts(x, index, weights)
        replace_ffn(experts)
        torch.testing.assert_close(experts(x, index, weights.float()), want, rtol=1e-5, atol=1e-5)


def test_registry_names_and_fp8():
    assert "moeffn" in ALL_EXPERTS_FUNCTIONS and "moeffn" in ALL_FP8_EXPERTS_FUNCTIONS
    function = ALL_FP8_EXPERTS_FUNCTIONS["moeffn"]
    with pytest.raises(NotImplementedError, match="FP8"):
        function(make(), *slots())
    with pytest.raises(ValueError, match=r"backend.*'cuda'"):
        register(backend="cuda")


def test_bad_arguments():
    with pytest.raises(TypeError, match="model"):
        replace_ffn(3)
    with pytest.raises(ValueError, match="backend"):
        replace_ffn(make(), backend="fast")
    with pytest.raises(ValueError, match="on_unsupported"):
        replace_ffn(make(), on_unsupported="ignore")
    with pytest.raises(ValueError, match="it holds none"):
        replace_ffn(nn.Linear(3, 3))
    experts = make().double()
    name = "triton" if backends.available("triton", CPU, torch.float64) else "native"
    with pytest.raises(ValueError, match=name):
        replace_ffn(experts, backend=name)
    assert not hasattr(experts, "_moeffn")


SEPARATE = [r for r in hf_blocks.rows() if r.family in ("dbrx", "switch_transformers")]


@pytest.mark.parametrize("backend", ["reference", pytest.param("native", marks=pytest.mark.skipif(
    not NATIVE, reason="not built"))])
@pytest.mark.parametrize("row", SEPARATE, ids=lambda r: r.family)
def test_experts_in_separate_tensors_run_on_a_named_backend_too(row, backend):
    own, block = hf_blocks.build(row), hf_blocks.build(row)
    replace_ffn(block, backend=backend)
    x = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(block(x), own(x), rtol=1e-5, atol=1e-5)
    block(x).sum().backward()
    own(x).sum().backward()
    for got, want in zip(block.parameters(), own.parameters(), strict=True):
        want = torch.zeros_like(got) if want.grad is None else want.grad
        torch.testing.assert_close(got.grad, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_quantised_weights_are_refused(dtype):
    experts = make()
    experts.down_proj = nn.Parameter(experts.down_proj.detach().to(dtype), requires_grad=False)
    with pytest.raises(ValueError, match=f"down_proj.*quantised.*{dtype}"):
        replace_ffn(experts)


def test_a_subclass_that_overrides_an_undecorated_forward_is_refused():
    row = next(r for r in hf_blocks.rows() if r.family == "step3p7")
    block = hf_blocks.build(row)
    block.experts.__class__ = type("Mine", (type(block.experts),), {"forward": lambda self, *a: a[0]})
    with pytest.raises(ValueError, match="Mine overrides the forward of Step3p7Experts"):
        replace_ffn(block)


def test_moe_and_dense_can_be_chosen():
    row = next(r for r in hf_blocks.rows() if r.family == "deepseek_v3")
    assert [r.kind for r in replace_ffn(hf_blocks.build(row), dense=False).replaced] == ["moe"]
    assert [r.kind for r in replace_ffn(hf_blocks.build(row), moe=False).replaced] == ["dense"]


def test_without_transformers_the_import_says_what_to_install():
    code = ("import sys; sys.modules['transformers'] = None\n"
            "try:\n import moeffn.integrations.transformers\n"
            "except ImportError as error: print(error)")
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "pip install 'moeffn[hf]'" in out
