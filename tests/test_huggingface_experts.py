"""A config.json of a mixture of experts or a vision-language model gives the model the preset gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from op_graphs.model import LayerOverride, ModelError
from op_graphs.parameters import count_active_parameters, count_parameters
from op_graphs.presets import load_model, model_from_mapping

MIXTRAL_8X7B: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
MIXTRAL_8X22B = MIXTRAL_8X7B | {
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "max_position_embeddings": 65536,
    "num_attention_heads": 48,
    "num_hidden_layers": 56,
    "vocab_size": 32768,
}
DEEPSEEK_V2: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1536,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 160,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 128,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
    "v_head_dim": 128,
    "vocab_size": 102400,
}
DEEPSEEK_V2_LITE = DEEPSEEK_V2 | {
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "topk_group": 1,
    "topk_method": "greedy",
}
DEEPSEEK_V3 = DEEPSEEK_V2 | {
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "first_k_dense_replace": 1,
    "model_type": "kimi_k2",
    "n_group": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "topk_group": 1,
    "vocab_size": 163840,
}
MOONLIGHT = KIMI_K2 | {
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
}
QWEN3_30B: dict[str, Any] = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_235B = QWEN3_30B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_window_layers": 94,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}
QWEN15_MOE_A27B: dict[str, Any] = {
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "max_position_embeddings": 8192,
    "max_window_layers": 21,
    "model_type": "qwen2_moe",
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 16,
    "shared_expert_intermediate_size": 5632,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
GPT_OSS_20B: dict[str, Any] = {
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
GPT_OSS_120B = GPT_OSS_20B | {"layer_types": None, "num_hidden_layers": 36, "num_local_experts": 128}
SCOUT_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "max_position_embeddings": 10485760,
    "model_type": "llama4_text",
    "no_rope_layers": [],
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "router_aux_loss_coef": 0.001,
    "use_qk_norm": True,
    "vocab_size": 202048,
}
SCOUT: dict[str, Any] = {
    "model_type": "llama4",
    "text_config": SCOUT_TEXT,
    "vision_config": {
        "hidden_act": "gelu",
        "hidden_size": 1408,
        "image_size": 336,
        "intermediate_size": 5632,
        "model_type": "llama4_vision_model",
        "num_attention_heads": 16,
        "num_channels": 3,
        "num_hidden_layers": 34,
        "patch_size": 14,
        "pixel_shuffle_ratio": 0.5,
        "projector_input_dim": 4096,
        "projector_output_dim": 4096,
        "vision_output_dim": 4096,
    },
}
QWEN25_VL_7B: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vision_config": {
        "depth": 32,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu",
        "hidden_size": 1280,
        "in_chans": 3,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 3584,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
        "window_size": 112,
    },
    "vocab_size": 152064,
}
VIT_L: dict[str, Any] = {
    "hidden_act": "gelu",
    "hidden_size": 1024,
    "id2label": {str(number): "" for number in range(1000)},
    "image_size": 224,
    "intermediate_size": 4096,
    "model_type": "vit",
    "num_attention_heads": 16,
    "num_channels": 3,
    "num_hidden_layers": 24,
    "patch_size": 16,
    "qkv_bias": True,
}


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        (MIXTRAL_8X7B, "mixtral-8x7b"),
        (MIXTRAL_8X22B, "mixtral-8x22b"),
        (DEEPSEEK_V2, "deepseek-v2"),
        (DEEPSEEK_V2_LITE, "deepseek-v2-lite"),
        (DEEPSEEK_V3, "deepseek-v3"),
        (KIMI_K2, "kimi-k2"),
        (MOONLIGHT, "moonlight-16b-a3b"),
        (QWEN3_30B, "qwen3-30b-a3b"),
        (QWEN3_235B, "qwen3-235b-a22b"),
        (GPT_OSS_20B, "gpt-oss-20b"),
        (GPT_OSS_120B, "gpt-oss-120b"),
        (SCOUT, "llama4-scout"),
        (QWEN25_VL_7B, "qwen2.5-vl-7b"),
        (VIT_L, "vit-l"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_config_gives_the_model_of_the_preset(config: dict[str, Any], preset: str):
    assert model_from_mapping(config, name=preset) == load_model(preset)


def test_qwen_moe_has_the_published_counts_with_its_gated_shared_expert():
    # Qwen1.5-MoE-A2.7B: 14,315,784,192 parameters in the checkpoint, 2.7 billion active.
    model = model_from_mapping(QWEN15_MOE_A27B)
    assert model.moe is not None
    assert model.moe.shared_gate
    assert count_parameters(model) == 14_315_784_192
    assert count_active_parameters(model) / 1e9 == pytest.approx(2.7, abs=0.05)


def test_the_language_model_of_a_vision_language_model_stands_alone():
    assert model_from_mapping(SCOUT_TEXT, name="llama4-scout") == replace(
        load_model("llama4-scout"), vision=None
    )


def test_newer_files_nest_the_text_and_mean_the_same():
    text = {key: value for key, value in QWEN25_VL_7B.items() if key != "vision_config"}
    nested = {
        "model_type": "qwen2_5_vl",
        "text_config": text,
        "vision_config": QWEN25_VL_7B["vision_config"],
    }
    assert model_from_mapping(nested, name="qwen2.5-vl-7b") == load_model("qwen2.5-vl-7b")


def test_absent_keys_mean_what_they_mean_to_the_type():
    def bare(config: dict[str, Any], *keys: str) -> dict[str, Any]:
        return {key: value for key, value in config.items() if key not in keys}

    v3 = bare(DEEPSEEK_V3, "n_group", "topk_group", "first_k_dense_replace", "n_shared_experts")
    assert model_from_mapping(v3, name="deepseek-v3") == load_model("deepseek-v3")
    oss = bare(GPT_OSS_20B, "layer_types", "num_experts_per_tok", "head_dim", "sliding_window")
    assert model_from_mapping(oss, name="gpt-oss-20b") == load_model("gpt-oss-20b")
    mixtral = bare(MIXTRAL_8X7B, "num_local_experts", "num_experts_per_tok", "num_key_value_heads")
    assert model_from_mapping(mixtral, name="mixtral-8x7b") == load_model("mixtral-8x7b")


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (QWEN3_30B | {"decoder_sparse_step": 2}, list(range(1, 48, 2))),
        (QWEN3_30B | {"mlp_only_layers": [0, 5]}, [*range(1, 5), *range(6, 48)]),
        (DEEPSEEK_V3 | {"moe_layer_freq": 2}, list(range(4, 61, 2))),
        (SCOUT_TEXT | {"interleave_moe_layer_step": 2}, list(range(1, 48, 2))),
        (
            SCOUT_TEXT | {"interleave_moe_layer_step": 2, "moe_layers": list(range(1, 48, 2))},
            list(range(1, 48, 2)),
        ),
        (SCOUT_TEXT | {"moe_layers": [0, 1, 7]}, [0, 1, 7]),
    ],
)
def test_the_layers_with_experts_are_those_of_the_config(config: dict[str, Any], layers: list[int]):
    model = model_from_mapping(config)
    assert [layer for layer in range(model.layers) if model.is_moe_layer(layer)] == layers


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MIXTRAL_8X7B | {"router_aux_loss_coef": 0.0}, {"moe.aux_loss": False}),
        (MIXTRAL_8X7B | {"sliding_window": 4096}, {"window": 4096, "window_pattern": "w"}),
        (DEEPSEEK_V2 | {"topk_method": "greedy"}, {"moe.routing_groups": 1, "moe.top_groups": 1}),
        (DEEPSEEK_V2 | {"n_routed_experts": None}, {"moe": None, "ffn_size": 12288}),
        (DEEPSEEK_V3 | {"n_shared_experts": 0}, {"moe.shared_ffn_size": 0}),
        (QWEN3_30B | {"mlp_only_layers": [2]}, {"layer_overrides": (LayerOverride(2, 2, moe=False),)}),
        (SCOUT_TEXT | {"use_qk_norm": False}, {"qk_norm": False}),
        (
            SCOUT_TEXT | {"no_rope_layers": [1, 1, 0] * 16},
            {"window_pattern": "wwf", "rotary_on_full_attention": False},
        ),
        (
            SCOUT_TEXT | {"no_rope_layers": [1] * 48},
            {"window_pattern": "w", "rotary_on_full_attention": True},
        ),
        (SCOUT_TEXT | {"no_rope_layers": [1] * 48, "attention_chunk_size": None}, {"window": 0}),
        (GPT_OSS_20B | {"sliding_window": None}, {"window": 0, "window_pattern": "w"}),
        (SCOUT | {"vision_config": None}, {"vision": None}),
        (QWEN25_VL_7B | {"tie_word_embeddings": True}, {"tied_embeddings": True}),
    ],
)
def test_keys_that_change_the_model_are_honoured(config: dict[str, Any], expected: dict[str, Any]):
    model = model_from_mapping(config)
    for path, value in expected.items():
        found: Any = model
        for name in path.split("."):
            found = getattr(found, name)
        assert found == value, path


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DEEPSEEK_V3 | {"topk_method": "greedy"}, "topk_method: must be one of noaux_tc, not 'greedy'"),
        (
            DEEPSEEK_V3 | {"attention_bias": True},
            "attention_bias: biases of latent attention are not supported",
        ),
        (DEEPSEEK_V3 | {"kv_lora_rank": None}, "kv_lora_rank: is missing"),
        (DEEPSEEK_V3 | {"n_group": 7}, "moe.routing_groups: 7 does not divide the 256 experts; nearest: 4"),
        (DEEPSEEK_V3 | {"moe_layer_freq": [1] * 61}, "moe_layer_freq: must be a whole number from 1"),
        (MIXTRAL_8X7B | {"num_experts_per_tok": 9}, "moe.top_k: 9 is more than the 8 experts"),
        (
            MIXTRAL_8X7B | {"router_aux_loss_coef": "0.02"},
            "router_aux_loss_coef: must be a number, not '0.02'",
        ),
        (
            QWEN3_30B | {"mlp_only_layers": [48]},
            "mlp_only_layers: must be a list of layer numbers below 48, not [48]",
        ),
        (
            GPT_OSS_20B | {"layer_types": ["full_attention"]},
            "layer_types: must be a list with a word for each of 24 layers",
        ),
        (
            SCOUT_TEXT | {"no_rope_layers": [1]},
            "no_rope_layers: must be a list of 0 or 1 for each of 48 layers",
        ),
        (
            SCOUT_TEXT | {"attention_chunk_size": None},
            "attention_chunk_size: layers without positions need layers with chunks",
        ),
        (SCOUT | {"text_config": None}, "text_config: must be a mapping of its keys, not None"),
        (
            SCOUT | {"vision_config": SCOUT["vision_config"] | {"hidden_size": "big"}},
            "vision_config.hidden_size: must be a whole",
        ),
        (
            SCOUT | {"vision_config": SCOUT["vision_config"] | {"pixel_shuffle_ratio": 0.3}},
            "vision_config.pixel_shuffle_ratio",
        ),
        (
            QWEN25_VL_7B | {"vision_config": QWEN25_VL_7B["vision_config"] | {"out_hidden_size": 2048}},
            "must be hidden_size 3584",
        ),
        (
            QWEN25_VL_7B | {"vision_config": QWEN25_VL_7B["vision_config"] | {"patch_size": 200}},
            "patches.image_size: 448",
        ),
        (VIT_L | {"num_attention_heads": 15}, "num_attention_heads: 15 does not divide hidden_size 1024"),
    ],
)
def test_a_config_that_is_wrong_or_not_supported_says_so(config: dict[str, Any], message: str):
    with pytest.raises(ModelError) as error:
        model_from_mapping(config, where="config.json")
    assert str(error.value).startswith("config.json: ")
    assert message in str(error.value)
