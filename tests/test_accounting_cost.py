"""FLOPs, bytes, memory and rooflines, anchored on published figures and on closed formulas."""

from itertools import pairwise, product
from math import comb

import pytest

from moeffn.accounting import (
    Block,
    Convention,
    block,
    cost,
    count,
    decode_bytes,
    devices,
    find_preset,
    measure_this_machine,
    measured_device,
    prefill,
    roofline,
    saved_activations,
    stored,
    training_memory,
)


def test_deepseek_v3_checkpoint():
    """Parameters, elements and bytes of the published files, to the unit: F8 680,571,043,840, F32 41,555,600."""
    found = stored("DeepSeek-V3", "fp8", mtp=True)
    assert found.parameters == 684_489_830_400
    assert found.quantised == 680_571_043_840
    assert found.scales + found.buffers == 41_555_600
    assert found.nbytes == 688_574_839_360


@pytest.mark.parametrize(("name", "nbytes"), [("gpt-oss-20b", 13_761_264_768), ("gpt-oss-120b", 65_248_815_744)])
def test_gpt_oss_checkpoints(name, nbytes):
    assert stored(name, "mxfp4").nbytes == nbytes


@pytest.mark.parametrize(("fmt", "bits"), [("mxfp4", 4.25), ("nvfp4", 4.5), ("int4", 4.125), ("bf16", 16)])
def test_bits_a_weight(fmt, bits):
    """DeepSeek-V3's experts divide by every block; what is over is the bf16 rest and nvfp4's scale a matrix."""
    found, plain = stored("DeepSeek-V3", fmt), stored("DeepSeek-V3", "bf16")
    routed = count("DeepSeek-V3").part("routed").total
    matrices = 58 * 256 * 3 if fmt == "nvfp4" else 0
    assert plain.nbytes - found.nbytes == routed * (16 - bits) / 8 - 4 * matrices
    assert found.parameters == plain.parameters == count("DeepSeek-V3").total


def test_incomplete_blocks_have_a_scale_each():
    config = {**find_preset("DeepSeek-V3").config, "num_hidden_layers": 1, "first_k_dense_replace": 1}
    assert stored(config, "fp8").scales == (12 * 56 + 192 * 12 + 5 * 56 + 256 * 4 + 56 * 128) + 3 * 56 * 144
    with pytest.raises(ValueError, match="format: expected a Format or one of fp32"):
        stored(config, "fp3")


def test_torchtitan_figure_of_qwen3_30b():
    """37,578,559,488 FLOPs a token at 8192, not halved; that formula also multiplies norms, which is not a product."""
    norms = count("Qwen3-30B-A3B").part("norm").active
    assert cost("Qwen3-30B-A3B", context=8192, causal=False).training + 6 * norms == 37_578_559_488
    every_expert = {**find_preset("Qwen3-30B-A3B").config, "num_experts_per_tok": 128}
    assert cost(every_expert, context=8192, causal=False).training > 5 * 37_578_559_488  # the fault of counting all


def test_verl_figure_of_qwen3_30b_without_its_embedding_product():
    lengths = (512, 1024, 2048)
    total = sum(cost("Qwen3-30B-A3B", tokens=n, context=n).training for n in lengths)
    as_published = 78_593_069_678_592
    assert total == 71_901_779_066_880 == as_published - 6 * 151936 * 2048 * sum(lengths)


def test_causal_halves_attention_alone():
    full, half = (cost("Llama-3.1-8B", context=4096, causal=causal) for causal in (False, True))
    assert full.weights == half.weights == 2 * (8_030_261_248 - 128256 * 4096 - 266_240)
    assert full.attention == 2 * half.attention == 32 * 4 * 32 * 128 * 4096


def test_windows_bound_attention():
    """Half of gpt-oss's layers see 128 positions."""
    full = cost("gpt-oss-20b", context=128, causal=False).attention
    assert cost("gpt-oss-20b", context=1024, causal=False).attention == full // 2 * (1 + 8)


def test_what_is_passed_several_times_counts_once_as_a_weight():
    """Zamba's shared block: three layers through one block."""
    zamba = {"model_type": "zamba", "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
             "attention_head_dim": 32, "num_key_value_heads": 4, "intermediate_size": 96, "n_mamba_heads": 2,
             "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 4, "vocab_size": 100,
             "layers_block_type": ["mamba", "hybrid", "hybrid", "hybrid"], "tie_word_embeddings": True}
    once = {**zamba, "layers_block_type": ["mamba", "mamba", "mamba", "hybrid"]}
    block_weights = 3 * 128 * 128 + 128 * 64 + 3 * 64 * 96
    assert count(zamba).total == count(once).total + 2 * 64 * 64  # a projection for each, one block for all
    assert cost(zamba).weights - cost(once).weights == 2 * 2 * (block_weights + 64 * 64)


def test_latent_attention_uses_its_own_widths():
    assert cost("DeepSeek-V3", context=1000, causal=False).attention == 61 * 2 * 128 * (192 + 128) * 1000


def test_backward_recompute_router_and_head():
    base, full = cost("Mixtral-8x7B-v0.1", tokens=7), cost("Mixtral-8x7B-v0.1", tokens=7, recompute="full")
    assert base.training == 3 * base.forward
    assert full.training == 4 * base.forward
    assert base.forward - cost("Mixtral-8x7B-v0.1", tokens=7, router=False).forward == 7 * 2 * 32 * 8 * 4096
    assert base.forward - cost("Mixtral-8x7B-v0.1", tokens=7, head=False).forward == 7 * 2 * 32000 * 4096
    with pytest.raises(ValueError, match="recompute: expected none or full"):
        cost("GPT-2", recompute="some")


def test_flops_follow_active_not_total_weights():
    """Linear in K, blind to the number of experts but for the router; tied and untied alike."""
    config = find_preset("Mixtral-8x7B-v0.1").config
    flops = [cost({**config, "num_experts_per_tok": k}).forward for k in (1, 2, 3, 4)]
    assert {b - a for a, b in pairwise(flops)} == {2 * 32 * 3 * 4096 * 14336}
    assert cost({**config, "num_local_experts": 16}).forward - flops[1] == 2 * 32 * 8 * 4096
    assert cost({**config, "tie_word_embeddings": True}).forward == flops[1]


def test_decode_table_of_qwen3_30b():
    """Expected experts and gigabytes; min(T·K, E) would overstate both."""
    table = {1: (8.0, 6.0837), 8: (51.6199, 25.8429), 32: (111.7710, 53.0904), 256: (128.0, 60.4419)}
    for batch, (distinct, gigabytes) in table.items():
        found = decode_bytes("Qwen3-30B-A3B", batch)
        assert found.distinct == pytest.approx(distinct, abs=1e-3)
        assert found.total / 1e9 == pytest.approx(gigabytes, abs=1e-4)


@pytest.mark.parametrize(("name", "device", "options", "table"), [
    ("Qwen3-30B-A3B", "H100", {}, {1: 551, 64: 3603, 1024: 56755}),
    ("Qwen3-30B-A3B", "B200", {}, {1: 1315, 4096: 369839}),
    ("DeepSeek-V3", "H200", {"bytes_per_weight": 1, "dtype": "fp8"}, {8: 236, 4096: 27017}),
    ("gpt-oss-120b", "H100", {"expert_bytes": 17 / 32}, {16: 1959, 4096: 96389}),
])
def test_roofline_table(name, device, options, table):
    for bound in roofline(name, device, tuple(table), **options):
        assert bound.tokens_per_s == pytest.approx(table[bound.batch], rel=1e-3)


def test_roofline_says_what_binds():
    small, large = roofline("Qwen3-30B-A3B", "H100", (1, 4096))
    assert (small.binds, large.binds) == ("memory", "compute")
    assert prefill("Qwen3-30B-A3B", "H100", 8192).binds == "compute"
    assert prefill("Qwen3-30B-A3B", "H100", 1).binds == "memory"
    with pytest.raises(ValueError, match="device: expected a Device or one of H100"):
        roofline("GPT-2", "H1000")
    with pytest.raises(ValueError, match="A100 has rates for bf16, got 'fp8'"):
        roofline("GPT-2", "A100", dtype="fp8")
    with pytest.raises(ValueError, match="gbs: expected a positive rate"):
        measured_device("box", gbs=0, tflops=1)


def test_device_table():
    ridges = {"H100": 295, "H200": 206, "B200": 281}
    assert {name: round(devices()[name].ridge()) for name in ridges} == ridges
    assert {"A100", "L40S", "MI300X"} <= devices().keys()
    assert all(device.source for device in devices().values())


def test_context_adds_cache_and_attention():
    base = decode_bytes("DeepSeek-V3", 4, bytes_per_weight=1)
    long = decode_bytes("DeepSeek-V3", 4, bytes_per_weight=1, context=1000)
    assert long.total - base.total == long.cache == 4 * 1000 * 61 * 576 * 2
    half = decode_bytes("DeepSeek-V3", 4, bytes_per_weight=1, ranks=8)
    assert half.routed * 8 == pytest.approx(base.routed)
    assert half.dense == base.dense


def test_idle_experts_take_places():
    """LongCat: 12 of 512 + 256, so a token meets 8 real experts on average."""
    assert decode_bytes("LongCat-Flash", 1).distinct == pytest.approx(8)


def test_training_memory():
    """18 bytes a parameter of all weights, experts by the expert-data-parallel size, the rest by all ranks."""
    routed = count("Qwen3-30B-A3B").part("routed").total
    other = 30_532_122_624 - routed
    assert training_memory("Qwen3-30B-A3B", sharded="none").total == 18 * 30_532_122_624
    found = training_memory("Qwen3-30B-A3B", ranks=64, expert_parallel=8)
    assert found.total == pytest.approx(routed / 8 * (6 + 12 / 8) + other * (6 + 12 / 64))
    sharded = training_memory("Qwen3-30B-A3B", ranks=64, expert_parallel=8, sharded="all")
    assert sharded.total == pytest.approx(18 * 30_532_122_624 / 64)
    muon = training_memory("Qwen3-30B-A3B", sharded="none", optimizer_bytes=8)
    assert muon.total == 14 * 30_532_122_624
    spare = training_memory("Qwen3-30B-A3B", ranks=64, expert_parallel=8, redundant=1)
    assert spare.weights - found.weights == 2 * 48 * 3 * 2048 * 768
    with pytest.raises(ValueError, match="ranks: expected a multiple"):
        training_memory("Qwen3-30B-A3B", ranks=6, expert_parallel=4)


QWEN = Block(d_model=2048, d_expert=768, num_experts=128, top_k=8)


def test_block_of_qwen3_30b():
    expert = 3 * 2048 * 768
    assert block.total_weights(QWEN) == 128 * expert + 128 * 2048
    assert block.active_weights(QWEN) == 8 * expert + 128 * 2048
    assert block.forward_flops(QWEN, 10) == 2 * 10 * block.active_weights(QWEN)
    assert block.forward_flops(QWEN, 1, router=False) == 6 * 8 * 2048 * 768
    assert block.backward_flops(QWEN, 1, router=False) == 12 * 8 * 2048 * 768
    assert block.backward_flops(QWEN, 1, router=False, frozen_experts=True) == 6 * 8 * 2048 * 768
    assert block.saved_bytes(QWEN, 4096) == 2 * 4096 * 2048 + 4 * 32768 * 768 + 16 * 32768 + 4 * 129
    naive = 2 * 4096 * 2048 + 32768 * (4 * 2048 + 4 * 768 + 2 * 768) + 4 * 4096 * 128 + 12 * 32768
    assert block.naive_saved_bytes(QWEN, 4096) == naive
    assert block.weight_bytes(QWEN, expert_bytes=0.5) == 64 * expert + 2 * 128 * 2048


def test_saved_activations_of_a_model():
    """Those of its blocks; they follow the experts a token uses and not their number (but for the router)."""
    found = saved_activations("Qwen3-30B-A3B", 1000)
    assert (found.layers, found.saved) == (48, 48 * block.saved_bytes(QWEN, 1000))
    assert found.naive == 48 * block.naive_saved_bytes(QWEN, 1000) > 2.5 * found.saved
    assert saved_activations("DeepSeek-V3", 10).layers == 58
    nano = Block(d_model=2688, d_expert=1856, num_experts=128, top_k=6, gated=False)  # two matrices
    assert saved_activations("Nemotron-3-Nano-30B-A3B", 7).saved == 23 * block.saved_bytes(nano, 7)
    wide = {**find_preset("Qwen3-30B-A3B").config, "num_experts": 512}
    assert saved_activations(wide, 1000).saved - found.saved == 48 * 4 * (512 - 128)
    assert saved_activations("Llama-3.1-8B", 10).saved == 0
    with pytest.raises(ValueError, match="tokens: expected at least 0"):
        saved_activations("Qwen3-30B-A3B", -1)


def test_this_machine_is_measured():
    found = measure_this_machine(megabytes=2, size=64, repeats=1)
    assert found.source == "measured"
    assert found.hbm_gbs > 0 and found.rate("fp32") > 0
    assert roofline("Qwen3-30B-A3B", found, (1,), dtype="fp32")[0].tokens_per_s > 0


def test_plain_ffn_identities():
    assert block.ffn_weights(512, 2048, gated=False, bias=True) == 2 * 512 * 2048 + 2048 + 512
    assert block.ffn_weights(4096, 4 * 4096, gated=False) == 8 * 4096**2
    assert block.ffn_weights(4096, 14336) == 176_160_768
    plain = Block(d_model=64, d_expert=32, num_experts=4, top_k=2, gated=False)
    assert block.forward_flops(plain, 1, router=False) == 4 * 2 * 64 * 32
    assert block.backward_flops(plain, 1, router=False) == 8 * 2 * 64 * 32


def test_shared_width_is_the_shared_experts_own():
    """Three matrices of the shared width, not of the routed one (the fault of an existing calculator)."""
    wide = Block(d_model=64, d_expert=16, num_experts=4, top_k=2, d_shared=96, shared_gate=True)
    base = Block(d_model=64, d_expert=16, num_experts=4, top_k=2)
    assert block.total_weights(wide) - block.total_weights(base) == 3 * 64 * 96 + 64
    assert block.forward_flops(wide, 5) - block.forward_flops(base, 5) == 2 * 5 * (3 * 64 * 96 + 64)


def test_block_agrees_with_the_model():
    layer = count("Qwen3-30B-A3B", convention=Convention(scope="ffn"))
    assert layer.total == 48 * block.total_weights(QWEN)
    assert layer.active == 48 * block.active_weights(QWEN)


def test_distinct_experts():
    for experts, k, tokens in product((1, 2, 7, 8, 32), (1, 2, 3, 8), (1, 2, 9, 40)):
        k = min(k, experts)
        found = block.distinct_experts(experts, k, tokens)
        assert k - 1e-9 <= found <= min(tokens * k, experts) + 1e-9
        assert block.distinct_experts(experts, k, 1) == pytest.approx(k)
        missed = (comb(experts - 1, k) / comb(experts, k)) ** tokens
        assert found == pytest.approx(experts * (1 - missed)), (experts, k, tokens)


def test_intensity_and_the_ridge():
    """Compute-bound batches are E/K times those of a dense FFN."""
    assert block.compute_bound_tokens(QWEN, 295) == 295 * 16
    assert block.arithmetic_intensity(QWEN, 1) == pytest.approx(1.0)
    many = block.arithmetic_intensity(QWEN, 100_000)
    assert many == pytest.approx(100_000 * block.active_weights(QWEN) / block.total_weights(QWEN), rel=1e-6)
    moved = block.decode_bytes(QWEN, 3, activations=True) - block.decode_bytes(QWEN, 3)
    assert moved == pytest.approx(2 * 3 * 2048 * 2)


@pytest.mark.parametrize(("change", "message"), [
    ({"top_k": 200}, "Block.top_k: expected at most num_experts = 128"), ({"d_model": 0}, "Block.d_model"),
    ({"d_shared": -1}, "Block.d_shared"),
])
def test_bad_blocks(change, message):
    with pytest.raises(ValueError, match=message):
        Block(**{"d_model": 2048, "d_expert": 768, "num_experts": 128, "top_k": 8, **change})


def test_block_formulas_are_exported():
    assert block.saved_bytes(Block(d_model=8, d_expert=4, num_experts=2, top_k=1, gated=False), 3) == (
        2 * (3 * 8 + 3 * 4) + 16 * 3 + 4 * 3)
