"""Hybrid decoders from Hugging Face configurations: Nemotron-H, Nemotron 3, Qwen3-Next and Qwen 3.5."""

from __future__ import annotations

from typing import Any

from .huggingface_experts import qwen_experts
from .huggingface_keys import Keys, Reader, shortest_period
from .model import GatedDeltaNet, MixtureOfExperts, StateSpace
from .model_checks import MOST_LAYERS, shown

_LETTERS = {
    "mamba": "M",
    "linear_attention": "M",
    "attention": "*",
    "full_attention": "*",
    "moe": "E",
    "mlp": "-",
}
"""Letters of layers by the words of ``layers_block_type``, old and new."""


def _nemotron_h(keys: Keys) -> dict[str, Any]:
    """Keys and defaults of ``NemotronHConfig``."""
    pattern = _pattern(keys, "layers_block_type", "hybrid_override_pattern")
    if not pattern:
        keys.refuse("hybrid_override_pattern", None, "or layers_block_type must say what each layer is")
    stated = keys.size("num_hidden_layers", len(pattern) or 1, limit=MOST_LAYERS)
    if pattern and stated != len(pattern):
        keys.refuse("num_hidden_layers", stated, f"the pattern of layers names {len(pattern)}")
    for key in ("use_bias", "mamba_proj_bias"):
        if keys.switch(key, False):
            keys.refuse(key, True, "biases of these linears are not supported")
    if not keys.switch("use_conv_bias", True):
        keys.refuse("use_conv_bias", False, "a convolution without bias is not supported")
    keys.choice("mlp_hidden_act", ("relu2",), "relu2")
    bias = keys.switch("attention_bias", False)
    heads = keys.size("num_attention_heads", 32)
    fields: dict[str, Any] = {
        "layers": stated,
        "layer_pattern": pattern,
        "hidden_size": keys.size("hidden_size", 4096),
        "ffn_size": keys.size("intermediate_size", 21504),
        "heads": heads,
        "kv_heads": keys.size("num_key_value_heads", 8),
        "head_size": keys.size("head_dim", keys.size("attention_head_dim", 128)),
        "vocab_size": keys.size("vocab_size", 131072),
        "activation": "squared_relu",
        "norm": "rmsnorm",
        "positions": "none",
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": keys.switch("mlp_bias", False),
        "tied_embeddings": keys.switch("tie_word_embeddings", False),
        "hidden_dropout": keys.dropout("hidden_dropout", 0.0),
        "attention_dropout": keys.dropout("attention_dropout", 0.0),
        "mtp_layers": keys.size("num_nextn_predict_layers", 0, least=0),
    }
    if fields["mtp_layers"]:
        fields["mtp_pattern"] = _pattern(keys, "mtp_layers_block_type", "mtp_hybrid_override_pattern") or "*E"
    letters = pattern + fields.get("mtp_pattern", "")
    if "M" in letters:
        fields["state_space"] = StateSpace(
            heads=keys.size("mamba_num_heads", 128),
            head_size=keys.size("mamba_head_dim", 64),
            state_size=keys.size("ssm_state_size", 128),
            groups=keys.size("n_groups", 8),
            conv_width=keys.size("conv_kernel", 4),
            chunk_size=keys.size("chunk_size", 128),
        )
    return fields | ({"moe": _experts(keys)} if "E" in letters else {})


def _experts(keys: Keys) -> MixtureOfExperts:
    return MixtureOfExperts(
        experts=keys.size("n_routed_experts", 8),
        top_k=keys.size("num_experts_per_tok", 2),
        expert_ffn_size=keys.size("moe_intermediate_size", 7688),
        shared_ffn_size=keys.size("moe_shared_expert_intermediate_size", 7688, least=0),
        latent_size=keys.size("moe_latent_size", 0),
        router_score="sigmoid",
        router_fp32=True,
        router_bias=True,
        normalize_top_k=keys.switch("norm_topk_prob", True),
        aux_loss=True,
        routing_groups=keys.size("n_group", 1),
        top_groups=keys.size("topk_group", 1),
    )


def _pattern(keys: Keys, listed: str, written: str) -> str:
    """Letters of layers, listed as words under one key or written as letters under another."""
    words, text = keys.raw(listed), keys.raw(written)
    if isinstance(words, list):
        unknown = next((word for word in words if word not in _LETTERS), None)
        if unknown is not None:
            keys.refuse(listed, unknown, f"only {', '.join(_LETTERS)} layers are supported")
            return ""
        return "".join(_LETTERS[word] for word in words)
    if isinstance(text, str) and not set(text) - set(_LETTERS.values()):
        return text
    if text is not None or words is not None:
        keys.refuse(
            written, shown(text), f"must be letters {', '.join(sorted(set(_LETTERS.values())))}, one a layer"
        )
    return ""


def _qwen3_next(keys: Keys) -> dict[str, Any]:
    """Keys and defaults of ``Qwen3NextConfig``."""
    layers, bias = keys.size("num_hidden_layers", 48, limit=MOST_LAYERS), keys.switch("attention_bias", False)
    pattern = _qwen3_next_mixers(keys, layers)
    fields: dict[str, Any] = {
        "layers": layers,
        "mixer_pattern": pattern,
        "hidden_size": keys.size("hidden_size", 2048),
        "ffn_size": keys.size("intermediate_size", 5632),
        "heads": keys.size("num_attention_heads", 16),
        "kv_heads": keys.size("num_key_value_heads", 2),
        "head_size": keys.size("head_dim", 256),
        "vocab_size": keys.size("vocab_size", 151936),
        "activation": keys.activation("hidden_act", "silu", gated=True),
        "norm": "rmsnorm",
        "positions": "rotary",
        "qk_norm": True,
        "attention_output_gate": True,
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "tied_embeddings": keys.switch("tie_word_embeddings", False),
        "attention_dropout": keys.dropout("attention_dropout", 0.0),
    }
    if "G" in pattern:
        fields["delta_net"] = GatedDeltaNet(
            key_heads=keys.size("linear_num_key_heads", 16),
            value_heads=keys.size("linear_num_value_heads", 32),
            key_head_size=keys.size("linear_key_head_dim", 128),
            value_head_size=keys.size("linear_value_head_dim", 128),
            conv_width=keys.size("linear_conv_kernel_dim", 4),
        )
    shared = keys.size("shared_expert_intermediate_size", 512)
    defaults = {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
    gate = {"shared_ffn_size": shared, "shared_gate": True}
    return fields | qwen_experts(keys, layers, gate, defaults)


def _qwen3_next_mixers(keys: Keys, layers: int) -> str:
    """Letters of mixers from ``layer_types``; without it every ``full_attention_interval``-th is attention."""
    words, letters = keys.raw("layer_types"), {"linear_attention": "G", "full_attention": "*"}
    interval = keys.size("full_attention_interval", 4)
    if words is None:
        words = [
            "linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)
        ]
    if not isinstance(words, list) or len(words) != layers or any(word not in letters for word in words):
        keys.refuse(
            "layer_types",
            words,
            f"must be a list of {' or '.join(letters)} for each of {layers} layers",
        )
        return "*"
    return shortest_period("".join(letters[word] for word in words))


def _qwen3_5_text(keys: Keys) -> dict[str, Any]:
    """The language model of Qwen 3.5: Qwen3-Next's layers, with one MLP where no experts are."""
    fields = _qwen3_next(keys)
    fields["mtp_layers"] = keys.size("mtp_num_hidden_layers", 0, least=0)
    if keys.raw("num_experts") is None:
        del fields["moe"], fields["layer_overrides"]
    return fields


HYBRID_READERS: dict[str, Reader] = {
    "nemotron_h": _nemotron_h,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _qwen3_5_text,
    "qwen3_5_moe_text": _qwen3_5_text,
}
