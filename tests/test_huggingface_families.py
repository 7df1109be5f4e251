"""Hugging Face configurations of further model families against the parameters that were published for them.

Keys are those of the published files that decide a size; where a count is not known to the last digit, the figure of
the name or the paper is the oracle.
"""

from __future__ import annotations

from typing import Any

import pytest

from op_graphs.huggingface import READERS
from op_graphs.model import ModelError
from op_graphs.parameters import count_active_parameters, count_parameters
from op_graphs.presets import model_from_mapping
from tests.dense_scenarios import dense_mapping
from tracesim.scenario import load_scenario
from tracesim.simulation import simulate


def config(model_type: str, sizes: tuple[int, int, int, int, int, int], **more: Any) -> dict[str, Any]:
    """Layers, width, MLP width, heads, key-value heads, words; and what else the file says."""
    names = (
        "num_hidden_layers",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    )
    return {"model_type": model_type, **dict(zip(names, sizes, strict=True)), **more}


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "phi-4": (config("phi3", (40, 5120, 17920, 40, 10, 100352), sliding_window=None), 14_659_507_200),
    "phi-3-mini-4k": (
        config("phi3", (32, 3072, 8192, 32, 32, 32064), sliding_window=2047, max_position_embeddings=4096),
        3_821_079_552,
    ),
    "gemma-2b": (config("gemma", (18, 2048, 16384, 8, 1, 256000), head_dim=256), 2_506_172_416),
    "gemma-7b": (config("gemma", (28, 3072, 24576, 16, 16, 256000), head_dim=256), 8_537_680_896),
    "glm-4-9b": (config("glm", (40, 4096, 13696, 32, 2, 151552)), 9_399_951_360),
    "granite-3.0-8b": (
        config("granite", (40, 4096, 12800, 32, 8, 49155), tie_word_embeddings=True),
        8_170_848_256,
    ),
    "stablelm-2-1.6b": (
        config("stablelm", (24, 2048, 5632, 32, 32, 100352), use_qkv_bias=True),
        1_644_515_328,
    ),
    "starcoder2-3b": (config("starcoder2", (30, 3072, 12288, 24, 2, 49152)), 3_030_371_328),
    "ernie-4.5-0.3b": (config("ernie4_5", (18, 1024, 3072, 16, 2, 103424), head_dim=128), 360_748_032),
    "starcoder": (
        {
            "model_type": "gpt_bigcode",
            "n_layer": 40,
            "n_embd": 6144,
            "n_inner": 24576,
            "n_head": 48,
            "n_positions": 8192,
            "vocab_size": 49152,
        },
        15_517_456_384,
    ),
    "granite-3.0-1b-a400m": (
        config(
            "granitemoe",
            (24, 1024, 512, 16, 8, 49155),
            num_local_experts=32,
            num_experts_per_tok=8,
            tie_word_embeddings=True,
        ),
        1_334_628_352,
    ),
    "phi-3.5-moe": (
        config(
            "phimoe",
            (32, 4096, 6400, 32, 8, 32064),
            num_local_experts=16,
            num_experts_per_tok=2,
            attention_bias=True,
            lm_head_bias=True,
        ),
        41_873_153_344,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_family_has_the_parameters_of_its_published_files(name):
    keys, parameters = PUBLISHED[name]
    assert count_parameters(model_from_mapping(keys, where=name)) == parameters


GLM_MOE = {
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "attention_bias": True,
    "head_dim": 128,
    "num_nextn_predict_layers": 1,
}
NAMED: dict[str, tuple[dict[str, Any], float, float, float]] = {
    # billions of parameters, of active ones, and how far off a name may be
    "seed-oss-36b": (config("seed_oss", (64, 5120, 27648, 80, 8, 155136), head_dim=128), 36, 36, 0.01),
    "nemotron-4-340b": (config("nemotron", (96, 18432, 73728, 96, 8, 256000)), 341, 341, 0.005),
    "glm-4.5-air-106b-a12b": (
        config("glm4_moe", (46, 4096, 10944, 96, 8, 151552), n_routed_experts=128, moe_intermediate_size=1408)
        | {"first_k_dense_replace": 1, **GLM_MOE},
        106,
        12,
        0.15,
    ),
    "glm-4.5-355b-a32b": (
        config("glm4_moe", (92, 5120, 12288, 96, 8, 151552), n_routed_experts=160, moe_intermediate_size=1536)
        | {"first_k_dense_replace": 3, "use_qk_norm": True, **GLM_MOE},
        355,
        32,
        0.06,
    ),
    "glm-4.7-flash-30b-a3b": (
        config("glm4_moe_lite", (47, 2048, 10240, 20, 20, 154880), n_routed_experts=64, n_shared_experts=1)
        | {
            "moe_intermediate_size": 1536,
            "num_experts_per_tok": 4,
            "first_k_dense_replace": 1,
            "head_dim": 64,
        }
        | {"kv_lora_rank": 512, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64}
        | {"v_head_dim": 256},
        30,
        3.6,
        0.1,
    ),
    "minimax-m2-230b-a10b": (
        config("minimax_m2", (62, 3072, 1536, 48, 8, 200064), head_dim=128, num_local_experts=256)
        | {"num_experts_per_tok": 8, "use_qk_norm": True, "use_mtp": True, "num_mtp_modules": 3},
        230,
        10,
        0.12,
    ),
    "olmoe-1b-7b": (
        config("olmoe", (16, 2048, 1024, 16, 16, 50304), num_experts=64, num_experts_per_tok=8),
        6.92,
        1.28,
        0.01,
    ),
    "dots.llm1-142b-a14b": (
        config("dots1", (62, 4096, 10944, 32, 32, 152064), n_routed_experts=128, n_shared_experts=2)
        | {
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "head_dim": 128,
        },
        142,
        14,
        0.05,
    ),
    "ernie-4.5-21b-a3b": (
        config("ernie4_5_moe", (28, 2560, 12288, 20, 4, 103424), head_dim=128, moe_num_experts=64, moe_k=6)
        | {"moe_intermediate_size": 1536, "moe_num_shared_experts": 2, "moe_layer_start_index": 1}
        | {"moe_layer_end_index": 27, "moe_layer_interval": 1},
        21.8,
        3.4,
        0.12,
    ),
    "qwen3.5-397b-a17b": (
        config("qwen3_5_moe_text", (60, 4096, 0, 32, 2, 248320), head_dim=256, num_experts=512)
        | {"intermediate_size": 5632, "num_experts_per_tok": 10, "moe_intermediate_size": 1024}
        | {
            "shared_expert_intermediate_size": 1024,
            "linear_num_value_heads": 64,
            "full_attention_interval": 4,
        }
        | {"mtp_num_hidden_layers": 1},
        397,
        17,
        0.05,
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_family_has_about_the_parameters_of_its_name(name):
    keys, billions, active, tolerance = NAMED[name]
    model = model_from_mapping(keys, where=name)
    assert count_parameters(model) / 1e9 == pytest.approx(billions, rel=0.025)
    assert count_active_parameters(model) / 1e9 == pytest.approx(active, rel=tolerance)


@pytest.mark.parametrize(
    ("keys", "read", "expected"),
    [
        (PUBLISHED["phi-3-mini-4k"][0], lambda m: m.window, 2047),
        (PUBLISHED["gemma-2b"][0], lambda m: (m.activation, m.tied_embeddings), ("geglu", True)),
        (PUBLISHED["starcoder"][0], lambda m: (m.kv_heads, m.positions, m.activation), (1, "learned", "gelu")),
        (NAMED["nemotron-4-340b"][0], lambda m: (m.activation, m.norm), ("squared_relu", "layernorm")),
        (NAMED["glm-4.5-355b-a32b"][0], lambda m: (m.qkv_bias, m.attention_output_bias, m.qk_norm, m.mtp_layers),
         (True, False, True, 1)),
        (NAMED["minimax-m2-230b-a10b"][0], lambda m: (m.moe.router_score, m.mtp_layers), ("sigmoid", 3)),
        (NAMED["ernie-4.5-21b-a3b"][0] | {"moe_layer_end_index": 3, "moe_layer_interval": 2},
         lambda m: [m.is_moe_layer(layer) for layer in range(6)], [False, True, False, True, False, False]),
        (NAMED["glm-4.7-flash-30b-a3b"][0] | {"mlp_layer_types": ["dense"] * 2 + ["sparse", "dense"] + ["sparse"] * 43},
         lambda m: [m.is_moe_layer(layer) for layer in range(5)], [False, False, True, False, True]),
        (NAMED["qwen3.5-397b-a17b"][0] | {"num_experts": None}, lambda m: (m.moe, m.mixer(0), m.mixer(3)),
         (None, "delta_net", "attention")),
    ],
)  # fmt: skip
def test_what_a_key_means(keys, read, expected):
    assert read(model_from_mapping(keys, where="config.json")) == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (config("gemma2", (26, 2304, 9216, 8, 4, 256000)), "model_type 'gemma2' is not supported, it has norms behind"),
        ({"model_type": "falcon"}, "it has attention and MLP side by side"),
        ({"model_type": "deepseek_v32"}, "it has sparse attention with an indexer"),
        ({"model_type": "qwen3_vl", "text_config": {"model_type": "qwen3_vl_text"}},
         "but its language model is: text_config, of model_type qwen3_vl_text, as a file of its own"),
        ({"model_type": "mistral3", "text_config": {"model_type": "mistral"}}, "of model_type mistral"),
        (PUBLISHED["stablelm-2-1.6b"][0] | {"use_parallel_residual": True}, "use_parallel_residual: attention and MLP"),
        (PUBLISHED["stablelm-2-1.6b"][0] | {"qk_layernorm": True}, "a norm of its own for each head"),
        (NAMED["nemotron-4-340b"][0] | {"hidden_act": "silu"}, "hidden_act: must be one of relu2"),
        (NAMED["glm-4.7-flash-30b-a3b"][0] | {"mlp_layer_types": ["dense"]}, "must be dense or sparse for each of 47"),
    ],
)  # fmt: skip
def test_what_is_refused(keys, message):
    with pytest.raises(ModelError) as caught:
        model_from_mapping(keys, where="config.json")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [*PUBLISHED, *NAMED])
def test_a_family_can_be_simulated(name):
    """A model of two layers of each family trains, also without Transformer Engine's layers missing anything."""
    keys = (PUBLISHED.get(name) or NAMED[name])[0]
    small = {"num_hidden_layers": 4, "n_layer": 4, "moe_layer_end_index": -1, "first_k_dense_replace": 1}
    changed = keys | {key: value for key, value in small.items() if key in keys}
    scenario = load_scenario(dense_mapping(model=changed, hardware="h200-sxm", training__seq_len=128))
    assert simulate(scenario).report["iteration_time_ms"] > 0


def test_every_type_of_the_reasons_is_one_that_has_no_reader():
    from op_graphs.huggingface import _REASONS

    named = [kind for kinds in _REASONS.values() for kind in kinds]
    assert len(named) == len(set(named))
    assert not set(named) & set(READERS)
