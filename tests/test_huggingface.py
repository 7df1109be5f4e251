"""A Hugging Face config.json gives the model the preset gives, or one message that says what is not supported."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from op_graphs.huggingface import READERS
from op_graphs.model import ModelError
from op_graphs.parameters import count_parameters
from op_graphs.presets import load_model, model_from_mapping

LLAMA3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
LLAMA32_1B = LLAMA3_8B | {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": {"factor": 32.0, "rope_type": "llama3"},
    "tie_word_embeddings": True,
}
LLAMA2_7B: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "pretraining_tp": 1,
    "vocab_size": 32000,
}
QWEN25_7B: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3_32B: dict[str, Any] = {
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "max_position_embeddings": 40960,
    "max_window_layers": 64,
    "model_type": "qwen3",
    "num_attention_heads": 64,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
MISTRAL_7B: dict[str, Any] = {
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "vocab_size": 32000,
}
GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "vocab_size": 50257,
}
NEOX_SERIAL: dict[str, Any] = {
    "hidden_act": "gelu",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "model_type": "gpt_neox",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "use_parallel_residual": False,
    "vocab_size": 50432,
}


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize(
    ("config", "preset"),
    [
        (LLAMA2_7B, "llama2-7b"),
        (LLAMA3_8B, "llama3-8b"),
        (LLAMA32_1B, "llama3.2-1b"),
        (QWEN25_7B, "qwen2.5-7b"),
        (QWEN3_32B, "qwen3-32b"),
    ],
)
def test_a_config_gives_the_model_of_the_preset(tmp_path: Path, config: dict[str, Any], preset: str):
    folder = tmp_path / preset
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    assert load_model(folder / "config.json") == load_model(preset)
    assert load_model(folder) == load_model(preset)
    assert model_from_mapping(config, name=preset) == load_model(preset)


@pytest.mark.parametrize(
    ("config", "count"),
    [
        # Published counts of GPT-2 (124M), Mistral 7B v0.1 and RedPajama-INCITE 3B.
        (GPT2, 124_439_808),
        (MISTRAL_7B, 7_241_732_096),
        (NEOX_SERIAL, 2_775_864_320),
    ],
)
def test_a_config_of_a_family_without_preset_has_the_published_count(config: dict[str, Any], count: int):
    assert count_parameters(model_from_mapping(config)) == count


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"attention_bias": True}, {"qkv_bias": True, "attention_output_bias": True}),
        ({"mlp_bias": True}, {"mlp_bias": True}),
        ({"tie_word_embeddings": True}, {"tied_embeddings": True}),
        ({"head_dim": 64}, {"head_size": 64}),
        ({"head_dim": None}, {"head_size": 128}),
        ({"num_key_value_heads": None}, {"kv_heads": 32}),
        ({"hidden_act": "gelu_pytorch_tanh"}, {"activation": "geglu"}),
        ({"attention_dropout": 0.25}, {"attention_dropout": 0.25}),
        ({"_name_or_path": "meta-llama/Meta-Llama-3-8B"}, {"name": "meta-llama-3-8b"}),
    ],
)
def test_keys_that_change_the_model_are_honoured(change: dict[str, Any], expected: dict[str, Any]):
    read = model_from_mapping(LLAMA3_8B | change, name="llama3-8b")
    assert read == replace(load_model("llama3-8b"), **expected)


@pytest.mark.parametrize(
    "window",
    [
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 64},
        {"sliding_window": 40960, "use_sliding_window": True, "max_window_layers": 10},
        {"sliding_window": None, "layer_types": ["full_attention"] * 64},
    ],
    ids=["switched off", "no layer has it", "as long as the longest sequence", "full in every layer"],
)
def test_a_sliding_window_without_effect_is_ignored(window: dict[str, Any]):
    assert model_from_mapping(QWEN3_32B | window, name="qwen3-32b") == load_model("qwen3-32b")


@pytest.mark.parametrize(
    ("config", "window", "pattern"),
    [
        (MISTRAL_7B | {"sliding_window": 4096}, 4096, "w"),
        (without(MISTRAL_7B, "sliding_window"), 4096, "w"),
        (
            QWEN25_7B | {"use_sliding_window": True, "max_window_layers": 14, "sliding_window": 8192},
            8192,
            "f" * 14 + "w" * 14,
        ),
        (
            QWEN3_32B | {"sliding_window": 512, "layer_types": ["sliding_attention", "full_attention"] * 32},
            512,
            "wf",
        ),
    ],
    ids=["every layer", "the default of the type", "from a layer on", "every other layer"],
)
def test_a_sliding_window_is_read_with_the_layers_that_have_it(
    config: dict[str, Any], window: int, pattern: str
):
    read = model_from_mapping(config)
    assert (read.window, read.window_pattern) == (window, pattern)
    expected = [window if pattern[i % len(pattern)] == "w" else 0 for i in range(read.layers)]
    assert [read.attention_window(layer) for layer in range(read.layers)] == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            LLAMA3_8B | {"model_type": "mamba"},
            "model_type 'mamba' is not supported; supported Hugging Face",
        ),
        (
            LLAMA3_8B | {"model_type": "gemma3"},
            f"are {', '.join(sorted(READERS))}. Any other",
        ),
        (LLAMA3_8B | {"model_type": ["llama"]}, "model_type ['llama'] is not supported"),
        (without(LLAMA3_8B, "model_type"), "model_type is missing; supported Hugging Face model types are"),
        (LLAMA3_8B | {"num_local_experts": 8}, "num_local_experts: model_type llama has no experts"),
        (MISTRAL_7B | {"sliding_window": 0}, "sliding_window: must be a whole number from 1"),
        (
            QWEN3_32B | {"layer_types": ["sliding_attention", "full_attention"]},
            "layer_types: must be a list with a word for each of 64 layers",
        ),
        (
            QWEN3_32B | {"layer_types": ["linear_attention"] * 64},
            "only sliding_attention, chunked_attention, full_attention layers are supported",
        ),
        (without(LLAMA3_8B, "intermediate_size"), "intermediate_size: is missing"),
        (
            LLAMA3_8B | {"num_hidden_layers": 32.0},
            "num_hidden_layers: must be a whole number from 1 to 10000, not 32.0",
        ),
        (LLAMA3_8B | {"hidden_act": "relu"}, "hidden_act: must be one of gelu"),
        (
            LLAMA3_8B | {"num_key_value_heads": 5},
            "num_key_value_heads: 5 does not divide num_attention_heads 32",
        ),
        (
            LLAMA3_8B | {"num_attention_heads": 24},
            "num_attention_heads: 24 does not divide hidden_size 4096, and there",
        ),
        (LLAMA3_8B | {"tie_word_embeddings": "no"}, "tie_word_embeddings: must be true or false, not 'no'"),
        (GPT2 | {"n_head": 7}, "n_head: 7 does not divide n_embd 768"),
        (GPT2 | {"activation_function": "silu"}, "activation_function: must be one of gelu"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention: cross-attention is not supported"),
        (
            without(NEOX_SERIAL, "use_parallel_residual"),
            "use_parallel_residual: attention and MLP side by side",
        ),
    ],
)
def test_a_config_that_is_wrong_or_not_supported_gets_one_message(config: dict[str, Any], message: str):
    with pytest.raises(ModelError) as error:
        model_from_mapping(config, where="config.json")
    assert str(error.value).startswith("config.json: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_all_problems_of_a_config_come_at_once():
    broken = without(LLAMA3_8B, "vocab_size") | {"hidden_size": -1, "hidden_act": "tanh"}
    with pytest.raises(ModelError, match="3 problems") as error:
        model_from_mapping(broken, where="config.json")
    assert [line.split(":")[0].strip() for line in str(error.value).splitlines()[1:]] == [
        "hidden_size",
        "vocab_size",
        "hidden_act",
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model_type": "llama"', "is not valid JSON"),
        ("{" * 100, "is not valid JSON"),
        ('{"a":' * 100_000, "cannot be read as JSON: RecursionError"),
        ('{"hidden_size": 4096}', "config.json: "),
        ("[]", "expected keys and values"),
    ],
)
def test_a_broken_config_file_gets_one_message(tmp_path: Path, content: str, message: str):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ModelError) as error:
        load_model(path)
    assert message in str(error.value)
