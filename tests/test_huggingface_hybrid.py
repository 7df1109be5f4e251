"""Configurations of hybrid models from Hugging Face: what their keys mean, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from op_graphs.huggingface import model_from_huggingface
from op_graphs.model import ModelError
from op_graphs.presets import load_model

NANO: dict[str, Any] = {
    # config.json of nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16, what changes sizes.
    "model_type": "nemotron_h",
    "attention_bias": False,
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 128,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "intermediate_size": 1856,
    "mamba_head_dim": 64,
    "mamba_num_heads": 64,
    "mlp_hidden_act": "relu2",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_bias": False,
    "use_conv_bias": True,
    "vocab_size": 131072,
}
NEMOTRON_H_8B = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "attention_head_dim": 128,
    "num_hidden_layers": 52,
}


@pytest.mark.parametrize(
    ("config", "preset"), [(NANO, "nemotron3-nano-30b-a3b"), (NEMOTRON_H_8B, "nemotron-h-8b")]
)
def test_a_configuration_gives_the_preset(config: dict[str, Any], preset: str):
    assert model_from_huggingface(config, "config.json", preset) == load_model(preset)


def test_layers_may_be_listed_as_words_and_heads_for_further_tokens_have_a_pattern():
    changes = {
        "hybrid_override_pattern": None,
        "layers_block_type": ["mamba", "moe", "attention", "linear_attention", "full_attention", "mlp"],
        "num_hidden_layers": None,
        "num_nextn_predict_layers": 1,
        "mtp_hybrid_override_pattern": "*E",
        "moe_latent_size": 1024,
    }
    model = model_from_huggingface({**NANO, **changes}, "config.json")
    assert (model.layers, model.layer_pattern) == (6, "ME*M*-")
    assert (model.mtp_layers, model.mtp_pattern) == (1, "*E")
    assert model.moe is not None
    assert model.moe.latent_size == 1024


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hybrid_override_pattern": None}, "hybrid_override_pattern: or layers_block_type must say"),
        ({"hybrid_override_pattern": "MX"}, "must be letters *, -, E, M, one a layer"),
        ({"layers_block_type": ["mamba", "rnn"]}, "layers_block_type: only mamba, linear_attention, "),
        ({"num_hidden_layers": 51}, "num_hidden_layers: the pattern of layers names 52 (it is 51)"),
        ({"use_bias": True}, "use_bias: biases of these linears are not supported"),
        ({"use_conv_bias": False}, "use_conv_bias: a convolution without bias"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act: must be one of relu2"),
    ],
)
def test_what_is_not_understood_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ModelError) as refused:
        model_from_huggingface({**NANO, **changes}, "config.json")
    assert message in str(refused.value)
