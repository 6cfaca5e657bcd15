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


def test_prediction_layer_of_glm_5_next():
    """Latent attention with an index of its own and experts, without the residual streams of the other layers."""
    sizes = {"model_type": "glm5_next_text", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
             "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20,
             "linear_num_heads": 4, "linear_head_dim": 16, "linear_conv_kernel_dim": 4, "index_n_heads": 2,
             "index_head_dim": 12, "index_kpool": 4, "hc_mult": 2, "moe_intermediate_size": 48, "n_routed_experts": 8,
             "num_experts_per_tok": 2, "n_shared_experts": 1, "intermediate_size": 96, "vocab_size": 100,
             "layer_types": ["linear_attention", "indexed_attention"], "indexer_types": ["full", "full"],
             "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "tie_word_embeddings": False}
    found, d, maps = count(sizes), 64, 2 * 2 + 2 * 2
    indexed = next(layer for layer in found.layers if layer.kind == "sparse")
    streams = 2 * (maps * 2 * d + maps + 3)
    assert found.mtp_total == indexed.total - streams + 2 * d * d + 3 * d
    assert found.excluded == ()
    inner = {"num_heads": 4, "head_dim": 16, "short_conv_kernel_size": 4}
    published = {key: v for key, v in sizes.items() if not key.startswith("linear_")}
    published |= {"linear_attn_config": inner, "layer_types": ["linear_attention", "deepseek_sparse_attention"]}
    assert count(published).total == found.total


@pytest.mark.parametrize(("keys", "own"), [
    ({}, 78), ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, 3 + 18), ({"index_topk_freq": 4}, 2 + 19),
    ({"index_topk_pattern": "FSS" * 26}, 26), ({"index_topk_freq": 4, "indexer_types": ["full"] * 78}, 78),
])
def test_layers_that_share_an_index(keys, own):
    """GLM-5: as its code reads the keys; the layers without an index of their own have no weights for one."""
    shared, full = count(config("GLM-5", **keys)), count("GLM-5")
    given = find_preset("GLM-5").config
    heads, width = given["index_n_heads"], given["index_head_dim"]
    each = heads * width * given["q_lora_rank"] + given["hidden_size"] * (width + heads) + 2 * width
    assert full.total - shared.total == (78 - own) * each
    assert full.mtp_total == shared.mtp_total > 0  # a prediction layer has its own
    with pytest.raises(ValueError, match=r"index_topk_pattern: expected 78 letters of F and S, got 'FSX'"):
        count(config("GLM-5", index_topk_pattern="FSX"))


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
    ("Qwen3-30B-A3B", {"model_type": "sdar_moe"}),
    ("Ling-mini-2.0", {"model_type": "llada2_moe", "num_nextn_predict_layers": 0}),
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


def test_a_mixture_of_a_dense_family_is_refused():
    """OpenMoE says it is a Llama, Phixtral a Phi: counted as dense they would lose most of their weights."""
    llama = dense("llama", 2048, 24, 24, 256384, num_key_value_heads=24, head_dim=128, intermediate_size=8192)
    with pytest.raises(ValueError, match="num_experts: a 'llama' with experts has no weight table, got 32"):
        count({**llama, "num_experts": 32})
    assert count({**llama, "num_experts": 1}).total == count(llama).total
    phi = {"model_type": "phi-msft", "n_embd": 2560, "n_head": 32, "n_layer": 32, "vocab_size": 51200}
    with pytest.raises(ValueError, match="num_local_experts: a 'phi-msft' with experts"):
        count({**phi, "num_local_experts": 4, "num_experts_per_tok": 2})


def blocks(*runs):
    """Blocks of Llama-Nemotron: (how many, with attention, FFN multiple)."""
    return [{"attention": {"n_heads_in_group": 8 if on else None, "no_op": not on}, "ffn": {"ffn_mult": times}}
            for count, on, times in runs for _ in range(count)]


def test_llama_nemotron_super():
    """49B: 31 of its 80 layers have no attention and so one norm, FFNs of six widths."""
    found = blocks((1, 1, 2.625), (5, 1, 5.25), (2, 0, 2.625), (3, 1, 5.25), (1, 0, 3.28125), (30, 1, 5.25),
                   (6, 0, 1.3125), (3, 0, 2.625), (1, 0, 5.25), (1, 1, 5.25), (4, 0, 1.3125), (8, 0, 1.0), (6, 0, 0.5),
                   (9, 1, 5.25))
    sizes = dense("nemotron-nas", 8192, 80, 64, 128256, num_key_value_heads=None, intermediate_size=None)
    assert count({**sizes, "block_configs": found}).total == 49_867_145_216


@pytest.mark.parametrize(("published", "total", "active"), [
    # Encoders from the keys of their own code, one a mixture: 475M, 305M of them active.
    ({"model_type": "nomic_bert", "activation_function": "gelu", "moe_every_n_layers": 2, "moe_top_k": 2,
      "num_experts": 8, "n_embd": 768, "n_head": 12, "n_inner": 3072, "n_layer": 12, "vocab_size": 250048,
      "type_vocab_size": 1, "qkv_proj_bias": True, "mlp_fc1_bias": True}, 475_292_928, 305_423_616),
    ({"model_type": "nomic_bert", "activation_function": "swiglu", "n_embd": 768, "n_head": 12, "n_inner": 3072,
      "n_layer": 12, "vocab_size": 30528, "type_vocab_size": 2, "qkv_proj_bias": False, "mlp_fc1_bias": False},
     136_731_648, 136_731_648),
    ({"model_type": "hf_olmo", "d_model": 4096, "n_layers": 32, "n_heads": 32, "mlp_hidden_size": 22016,
      "activation_type": "swiglu", "block_type": "sequential", "layer_norm_type": "default", "vocab_size": 50280,
      "embedding_size": 50304, "weight_tying": False}, 6_888_095_744, 6_888_095_744),
    ({"model_type": "llada", "d_model": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 32,
      "mlp_hidden_size": 12288, "activation_type": "silu", "block_type": "llama", "layer_norm_type": "rms",
      "layer_norm_with_affine": True, "vocab_size": 126464, "embedding_size": 126464, "weight_tying": False},
     8_015_581_184, 8_015_581_184),
    ({"model_type": "phi3small", "hidden_size": 4096, "ff_intermediate_size": 14336, "num_hidden_layers": 32,
      "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 100352}, 7_392_272_384, 7_392_272_384),
    ({"model_type": "openelm", "model_dim": 2048, "num_transformer_layers": 28, "head_dim": 64, "vocab_size": 32000,
      "num_query_heads": [16] * 3 + [20] * 7 + [24] * 8 + [28] * 6 + [32] * 4, "ffn_dim_divisor": 256,
      "num_kv_heads": [4] * 3 + [5] * 7 + [6] * 8 + [7] * 6 + [8] * 4, "ffn_with_glu": True,
      "normalize_qk_projections": True, "share_input_output_layers": True,
      "ffn_multipliers": [0.5, 0.63, 0.76, 0.89, 1.02, 1.15, 1.28, 1.41, 1.54, 1.67, 1.8, 1.93, 2.06, 2.19, 2.31, 2.44,
                          2.57, 2.7, 2.83, 2.96, 3.09, 3.22, 3.35, 3.48, 3.61, 3.74, 3.87, 4.0]},
     1_079_891_456, 1_079_891_456),
], ids=["nomic-v2-moe", "nomic-v1.5", "OLMo-7B", "LLaDA-8B", "Phi-3-small", "OpenELM-1.1B"])
def test_other_layouts_as_published(published, total, active):
    found = count(published)
    assert (found.total, found.active) == (total, active)


def test_a_wrapper_with_flat_keys():
    """Qwen2.5-VL 7B as published: the keys of the language model, Qwen2.5 7B, beside those of the tower."""
    published = {**find_preset("Qwen2.5-7B").config, "model_type": "qwen2_5_vl", "vision_config": {"hidden_size": 1280}}
    assert count(published).total == count("Qwen2.5-7B").total
    assert count(published).excluded == ("vision_config",)


def test_longcat_flash_lite():
    """68.5B, 31.4B of them in tables of n-grams, and 2.9B to 4.5B active without the input tables."""
    lite = config("LongCat-Flash", model_type="longcat_flash_ngram", hidden_size=3072, ffn_hidden_size=6144,
                  expert_ffn_hidden_size=1024, num_layers=14, num_attention_heads=32, n_routed_experts=256,
                  zero_expert_num=128, ngram_vocab_size_ratio=78, emb_neighbor_num=4, emb_split_num=4)
    found = count(lite)
    assert found.total == pytest.approx(68.5e9, rel=1e-3)
    assert found.part("embedding").total - 131072 * 3072 == sum(78 * 131072 + 2 * i + 1 for i in range(12)) * 256
    bounds = [count(lite, convention=f"active=head,idle={idle}").active for idle in ("min", "max")]
    assert [round(bound / 1e9, 1) for bound in bounds] == [2.9, 4.5]


def test_ring_mini_linear():
    """16.4B, 1.6B active: lightning attention with all heads, a gate and a norm in four of five layers."""
    changes = {"model_type": "bailing_moe_linear", "layer_group_size": 5, "num_nextn_predict_layers": 0}
    found, full = count(config("Ling-mini-2.0", **changes)), count("Ling-mini-2.0")
    d = 2048  # 16 heads of 128 fill it; the full layers have 4 key/value heads
    linear = 16 * ((4 * d * d + d * d + d) - (2 * d * d + 2 * d * 4 * 128))
    assert found.total - full.total == found.active - full.active == linear
    assert (round(found.total / 1e9, 1), round(found.active / 1e9, 1)) == (16.4, 1.6)
