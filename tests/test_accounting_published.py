"""Figures that papers, model cards and files print for parts and families without a live model to compare with."""

import pytest

from moeffn.accounting import count, find_preset


def config(name, **changes):
    return {**find_preset(name).config, **changes}


@pytest.mark.parametrize(("name", "changes", "layers", "each"), [
    ("MiMo-V2-Flash", {"num_nextn_predict_layers": 3}, 3, 329_273_408),  # its report: "0.33B a block"
    ("LongCat-Flash", {"num_nextn_predict_layers": 1}, 1, 392_593_408),
    ("MiMo-7B", {}, 1, 210_790_400),
    ("DeepSeek-V3", {}, 1, 11_610_067_968),
    ("GLM-4.5", {}, 1, 3_988_069_632),
])
def test_prediction_layers(name, changes, layers, each):
    found = count(config(name, **changes))
    assert found.mtp_total == layers * each
    assert count(config(name, **changes), convention="scope=model+mtp").total == found.total + layers * each


def test_files_with_prediction_layers():
    assert count("MiMo-7B", convention="scope=model+mtp").total == 7_833_409_536
    # Its files hold the embedding once more: 562B, of a model of 560B.
    longcat = count(config("LongCat-Flash", num_nextn_predict_layers=1), convention="scope=checkpoint")
    assert longcat.total - longcat.buffers == 560_664_958_976 + 392_593_408 + 131072 * 6144 == 561_862_858_752


def test_prediction_layers_are_sequences_of_sublayers_in_nemotron():
    """One attention and one mixture of its own, behind a 2d -> d projection with two norms, before another norm."""
    name = "Nemotron-3-Ultra-550B-A55B"
    ultra, d = count(name), 8192
    kinds = find_preset(name).config["layers_block_type"]
    one = {kind: count(config(name, layers_block_type=[kind], num_nextn_predict_layers=0),
                       convention="scope=layers").total for kind in ("attention", "moe")}
    assert ultra.mtp_total == one["attention"] + one["moe"] + 2 * d * d + 3 * d
    letters = {**config(name), "mtp_hybrid_override_pattern": "*E", "mtp_layers_block_type": None}
    assert count(letters).mtp_total == ultra.mtp_total
    assert len(kinds) == 108
    with pytest.raises(ValueError, match=r"mtp_hybrid_override_pattern: expected letters of ME\*-, got \['X'\]"):
        count({**letters, "mtp_hybrid_override_pattern": "*X"})


def test_prediction_layer_of_deepseek_v4():
    """Two d x d projections in place of one of 2d, three norms, a layer, and the map that joins the streams."""
    found = count("DeepSeek-V4-Flash")
    given = find_preset("DeepSeek-V4-Flash").config
    d, streams = given["hidden_size"], given["hc_mult"]
    head = streams * streams * d + streams + 1
    alone = count({**given, "num_hidden_layers": 1, "compress_ratios": [0], "num_hash_layers": 0, "layer_types": None,
                   "mlp_layer_types": None, "num_nextn_predict_layers": 0}, convention="scope=layers").total
    assert found.mtp_total == alone + 2 * d * d + 3 * d + head


def test_window_layers_of_step_run_on_over_its_predictions():
    sizes = {"model_type": "step3p5", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
             "head_dim": 16, "num_attention_groups": 2, "num_nextn_predict_layers": 1, "intermediate_size": 96,
             "attention_other_setting": {"num_attention_heads": 6}, "moe_intermediate_size": 32, "share_expert_dim": 32,
             "moe_num_experts": 4, "moe_top_k": 2, "moe_layers_enum": "1,2", "vocab_size": 100,
             "tie_word_embeddings": False, "layer_types": ["full_attention", "sliding_attention", "full_attention",
                                                           "sliding_attention"]}
    found = count(sizes)
    attention = 64 * 16 * (2 * 6 + 2 * 2) + 6 * 64
    assert found.mtp_total == attention + 3 * 64 * 96 + 2 * 64 * 64 + 5 * 64 + 2 * 16
    assert found.excluded == ()
    assert count(sizes, convention="scope=checkpoint").total == found.total + found.buffers + found.mtp_total + 100 * 64


def rwkv(name, layers, d, **ranks):
    return {"model_type": name, "hidden_size": d, "num_hidden_layers": layers, "head_dim": 64, "head_size": 64,
            "vocab_size": 65536, "tie_word_embeddings": False, **{f"{k}_low_rank_dim": v for k, v in ranks.items()}}


@pytest.mark.parametrize(("name", "slope"), [("rwkv5", 14), ("rwkv6", 464)])
@pytest.mark.parametrize(("layers", "d"), [(24, 2048), (32, 2560)])
def test_formula_of_eagle_and_finch(name, slope, layers, d):
    """arXiv 2404.05892, section on sizes: 13·D²·L + 14·D·L (464 for Finch) + 4·D + 2·D·V."""
    assert count(rwkv(name, layers, d)).total == 13 * d * d * layers + slope * d * layers + 4 * d + 2 * d * 65536


@pytest.mark.parametrize(("layers", "d", "decay", "a", "v", "gate", "total"), [
    (12, 768, 64, 64, 32, 128, 191_034_624), (24, 1024, 64, 64, 32, 128, 450_767_872),
    (24, 2048, 96, 96, 64, 256, 1_527_404_544), (32, 2560, 96, 96, 64, 320, 2_947_735_040),
])
def test_goose_as_its_paper_counts(layers, d, decay, a, v, gate, total):
    found = count(rwkv("rwkv7", layers, d, decay=decay, a=a, v=v, gate=gate)).total
    low = decay + a + v + gate
    assert found == total == (2 * d * 65536 + 4 * d + layers * d * (12 * d + 2 * low + 19) - (2 * d * v + d))


@pytest.mark.parametrize(("name", "convention", "total", "active"), [
    ("Pangu-Pro-MoE-72B", "all", 71.99e9, 16.50e9), ("XVERSE-MoE-A4.2B", "all", 25.8e9, 4.2e9),
    ("JetMoE-8B", "all", 8.52e9, 2.3e9), ("openPangu-Ultra-MoE-718B", "head", 719e9, 39e9),
    ("Skywork-MoE", "all", 146e9, 22.7e9), ("SmallThinker-21B-A3B", "none", 21.5e9, 2.9e9),
])
def test_models_published_with_code_of_their_own(name, convention, total, active):
    found = count(name, convention=convention)
    assert found.total == pytest.approx(total, rel=0.01)
    assert found.active == pytest.approx(active, rel=0.02)


# As vendors publish them: other names of the same sizes, another family's `model_type`, lists of one number.
@pytest.mark.parametrize(("name", "changes"), [
    ("MiniMax-M2", {"model_type": "minimax", "use_routing_bias": True, "num_mtp_modules": 3}),
    ("Ling-mini-2.0", {"model_type": "bailing_moe", "moe_router_enable_expert_bias": True,
                       "moe_shared_expert_intermediate_size": 512}),
    ("Mixtral-8x7B-v0.1", {"num_local_experts": None, "n_routed_experts": 8}),
    ("Mixtral-8x7B-v0.1", {"num_experts_per_tok": None, "moe_top_k": 2}),
    ("Qwen3-30B-A3B", {"num_experts": None, "num_local_experts": 128, "quantization_config": {"quant_method": "fp8"}}),
    ("gpt-oss-20b", {"num_experts_per_tok": None, "experts_per_token": 4}),
    ("ERNIE-4.5-21B-A3B", {"moe_k": [6], "moe_num_experts": [64]}),
    ("Hunyuan-A13B", {"moe_topk": [8] * 32, "num_shared_expert": [1] * 32}),
])
def test_names_that_vendors_use(name, changes):
    given = config(name, **changes)
    assert (count(given).total, count(given).active) == (count(name).total, count(name).active)


def test_laguna_as_published():
    """Heads and FFN by layer; 33B, 3B of them active."""
    published = {"model_type": "laguna", "vocab_size": 100352, "hidden_size": 2048, "intermediate_size": 8192,
                 "num_hidden_layers": 40, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128,
                 "attention_bias": False, "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
                 "shared_expert_intermediate_size": 512, "tie_word_embeddings": False, "gating": True,
                 "sliding_window": 512, "layer_types": (["full_attention"] + ["sliding_attention"] * 3) * 10,
                 "mlp_layer_types": ["dense"] + ["sparse"] * 39, "num_attention_heads_per_layer": [48, 64, 64, 64] * 10}
    found = count(published)
    assert (found.total, found.active, found.assumed) == (33_442_617_088, 3_017_135_872, ())


def test_ling_lite_as_published():
    """Its config.json names no head width, and a `model_type` that Ling 2.0 shares."""
    published = {"model_type": "bailing_moe", "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16,
                 "num_key_value_heads": 4, "intermediate_size": 1408, "moe_intermediate_size": 1408, "num_experts": 64,
                 "num_experts_per_tok": 6, "num_shared_experts": 2, "first_k_dense_replace": 0, "use_bias": False,
                 "use_qkv_bias": False, "vocab_size": 126464, "tie_word_embeddings": False}
    assert count(published).total == count("Ling-lite").total == 16_801_974_272


def dense(name, d, layers, heads, vocab, **more):
    return {"model_type": name, "hidden_size": d, "num_hidden_layers": layers, "num_attention_heads": heads,
            "vocab_size": vocab, "tie_word_embeddings": False, **more}


# Elements of the published files, from the keys of the published configs.
@pytest.mark.parametrize(("published", "total"), [
    (dense("arctic", 7168, 35, 56, 32000, num_key_value_heads=8, intermediate_size=4864, num_local_experts=128,
           num_experts_per_tok=2, parallel_attn_mlp_res=True, use_residual=True), 478_584_608_768),
    (dense("grok-1", 6144, 64, 48, 131072, num_key_value_heads=8, intermediate_size=32768, num_experts=8,
           num_experts_per_tok=2, tie_word_embeddings=True), 315_684_820_992),
    (dense("deepseek", 2048, 28, 16, 102400, num_key_value_heads=16, intermediate_size=10944, n_routed_experts=64,
           moe_intermediate_size=1408, n_shared_experts=2, num_experts_per_tok=6, moe_layer_freq=1,
           first_k_dense_replace=1), 16_375_728_128),
    (dense("falcon", 8192, 60, 128, 65024, num_kv_heads=8, new_decoder_architecture=True, bias=False,
           tie_word_embeddings=True), 41_303_293_952),
    (dense("gpt_neox", 5120, 36, 40, 50688, intermediate_size=20480), 11_846_072_320),
    (dense("opt", 1024, 24, 16, 50272, ffn_dim=4096, max_position_embeddings=2048, word_embed_proj_dim=512,
           do_layer_norm_before=False, tie_word_embeddings=True), 331_196_416),
    (dense("mistral", 5120, 40, 32, 131072, num_key_value_heads=8, intermediate_size=32768, head_dim=128),
     23_572_403_200),
    (dense("phi3", 5120, 40, 40, 32064, num_key_value_heads=10, intermediate_size=17920), 13_960_238_080),
    (dense("stablelm", 2048, 24, 32, 100352, num_key_value_heads=32, intermediate_size=5632, use_qkv_bias=True),
     1_644_515_328),
], ids=lambda v: v["model_type"] if isinstance(v, dict) else "")
def test_configs_as_published(published, total):
    assert count(published).total == total
