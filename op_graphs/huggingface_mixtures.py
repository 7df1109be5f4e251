"""Mixtures of experts from Hugging Face configurations: GLM 4.5, MiniMax-M2, Ernie, Granite and others."""

from __future__ import annotations

from typing import Any

from .huggingface_dense import llama_family
from .huggingface_keys import Keys, Reader
from .model import LayerOverride, MixtureOfExperts


def _glm4_moe(keys: Keys) -> dict[str, Any]:
    """GLM 4.5 to 4.7: DeepSeek-V3's router before grouped-query attention."""
    default = None if "num_key_value_heads" in keys else 8
    fields = llama_family(keys, kv_heads=default)
    return fields | {
        "qkv_bias": keys.switch("attention_bias", False),
        "qk_norm": keys.switch("use_qk_norm", False),
        "mtp_layers": keys.size("num_nextn_predict_layers", 0, least=0),
        "moe": _sigmoid_experts(keys, shared=1, dense=1, normalize=True),
    }


def _dots1(keys: Keys) -> dict[str, Any]:
    bias = keys.switch("attention_bias", False)
    fields = llama_family(keys) | {
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "qk_norm": True,
        "moe": _sigmoid_experts(keys, shared=0, dense=0, normalize=False),
    }
    letters = keys.layer_letters(fields["layers"], switch=False)
    return fields | keys.window(letters, default=4096)


def _sigmoid_experts(keys: Keys, *, shared: int, dense: int, normalize: bool) -> MixtureOfExperts:
    """Experts chosen by sigmoids with a correction, as in DeepSeek-V3; the numbers are what an absent key means."""
    width = keys.size("moe_intermediate_size")
    return MixtureOfExperts(
        experts=keys.size("n_routed_experts"),
        top_k=keys.size("num_experts_per_tok"),
        expert_ffn_size=width,
        shared_ffn_size=width * keys.size("n_shared_experts", shared, least=0),
        first_dense_layers=keys.size("first_k_dense_replace", dense, least=0),
        router_score="sigmoid",
        router_fp32=True,
        router_bias=True,
        normalize_top_k=keys.switch("norm_topk_prob", normalize),
        routing_groups=keys.size("n_group", 1),
        top_groups=keys.size("topk_group", 1),
    )


def _minimax_m2(keys: Keys) -> dict[str, Any]:
    """The norm of queries and keys is over all heads at once here; it is counted and priced as over each."""
    default = None if "num_key_value_heads" in keys else 8
    fields = llama_family(keys, kv_heads=default, head_size=128)
    moe = MixtureOfExperts(
        experts=keys.size("num_local_experts", 256),
        top_k=keys.size("num_experts_per_tok", 8),
        expert_ffn_size=fields["ffn_size"],
        router_score="sigmoid",
        router_bias=True,
        aux_loss=keys.positive("router_aux_loss_coef", 0.001),
    )
    heads = keys.size("num_mtp_modules", 0, least=0) if keys.switch("use_mtp", False) else 0
    return fields | {"qk_norm": keys.switch("use_qk_norm", True), "mtp_layers": heads, "moe": moe}


def _olmoe(keys: Keys) -> dict[str, Any]:
    """The norm of queries and keys is over all heads at once here; it is counted and priced as over each."""
    bias = keys.switch("attention_bias", False)
    fields = llama_family(keys)
    moe = MixtureOfExperts(
        experts=keys.size("num_experts", 64),
        top_k=keys.size("num_experts_per_tok", 8),
        expert_ffn_size=fields["ffn_size"],
        normalize_top_k=keys.switch("norm_topk_prob", False),
        aux_loss=keys.positive("router_aux_loss_coef", 0.01),
    )
    return fields | {"qkv_bias": bias, "attention_output_bias": bias, "qk_norm": True, "moe": moe}


def _granitemoe(keys: Keys) -> dict[str, Any]:
    bias = keys.switch("attention_bias", False)
    fields = llama_family(keys)
    moe = MixtureOfExperts(
        experts=keys.size("num_local_experts", 8),
        top_k=keys.size("num_experts_per_tok", 2),
        expert_ffn_size=fields["ffn_size"],
        shared_ffn_size=keys.size("shared_intermediate_size", 0, least=0),
        aux_loss=keys.positive("router_aux_loss_coef", 0.001),
    )
    return fields | {"qkv_bias": bias, "attention_output_bias": bias, "moe": moe}


def _phimoe(keys: Keys) -> dict[str, Any]:
    default = None if "num_key_value_heads" in keys else 8
    bias = keys.switch("attention_bias", False)
    fields = llama_family(keys, kv_heads=default)
    moe = MixtureOfExperts(
        experts=keys.size("num_local_experts", 16),
        top_k=keys.size("num_experts_per_tok", 2),
        expert_ffn_size=fields["ffn_size"],
        aux_loss=keys.positive("router_aux_loss_coef", 0.001),
    )
    letters = keys.layer_letters(fields["layers"], switch=keys.raw("sliding_window") is not None)
    return (
        fields
        | {"norm": "layernorm", "qkv_bias": bias, "attention_output_bias": bias, "moe": moe}
        | {"head_bias": keys.switch("lm_head_bias", False)}
        | keys.window(letters)
    )


def _ernie4_5_moe(keys: Keys) -> dict[str, Any]:
    default = None if "num_key_value_heads" in keys else 4
    bias = keys.switch("use_bias", False)
    fields = llama_family(keys, kv_heads=default)
    layers, width = fields["layers"], keys.size("moe_intermediate_size", 1536)
    first, interval = keys.size("moe_layer_start_index", 1, least=0), keys.size("moe_layer_interval", 1)
    last = keys.raw("moe_layer_end_index")
    last = layers - 1 if last in (None, -1) else keys.size("moe_layer_end_index", least=0)
    moe = MixtureOfExperts(
        experts=keys.size("moe_num_experts", 64),
        top_k=keys.size("moe_k", 6),
        expert_ffn_size=width,
        shared_ffn_size=width * keys.size("moe_num_shared_experts", 2, least=0),
        first_dense_layers=first,
        layer_frequency=interval,
        layer_offset=interval - 1,
        router_fp32=True,
        router_bias=True,
        aux_loss=keys.positive("router_aux_loss_coef", 0.001),
    )
    return fields | {
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": bias,
        "tied_embeddings": keys.switch("tie_word_embeddings", True),
        "moe": moe,
        "layer_overrides": tuple(LayerOverride(layer, layer, moe=False) for layer in range(last + 1, layers)),
    }


MIXTURE_READERS: dict[str, Reader] = {
    "glm4_moe": _glm4_moe,
    "dots1": _dots1,
    "minimax_m2": _minimax_m2,
    "olmoe": _olmoe,
    "granitemoe": _granitemoe,
    "granitemoeshared": _granitemoe,
    "phimoe": _phimoe,
    "ernie4_5_moe": _ernie4_5_moe,
}
