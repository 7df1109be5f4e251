"""Mixture-of-experts decoders from Hugging Face configurations: Mixtral, DeepSeek, Qwen, gpt-oss, Llama 4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .huggingface_dense import llama_family, qwen_window
from .huggingface_keys import Keys, Reader, shortest_period
from .model import LatentAttention, LayerOverride, MixtureOfExperts


def _mixtral(keys: Keys) -> dict[str, Any]:
    fields = llama_family(keys, kv_heads=None if "num_key_value_heads" in keys else 8)
    moe = MixtureOfExperts(
        experts=keys.size("num_local_experts", 8),
        top_k=keys.size("num_experts_per_tok", 2),
        expert_ffn_size=fields["ffn_size"],
        aux_loss=keys.positive("router_aux_loss_coef", 0.001),
    )
    switch = keys.raw("sliding_window") is not None
    return fields | {"moe": moe} | keys.window(keys.layer_letters(fields["layers"], switch))


def _deepseek_v2(keys: Keys) -> dict[str, Any]:
    method = keys.choice("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    grouped = method == "group_limited_greedy"
    groups = (keys.size("n_group"), keys.size("topk_group")) if grouped else (1, 1)
    shared, dense = keys.size("n_shared_experts", 0, least=0), keys.size("first_k_dense_replace", 0, least=0)
    router = {"normalize_top_k": keys.switch("norm_topk_prob", False)}
    return _deepseek(keys, groups, shared, dense, router)


def _deepseek_v3(keys: Keys, groups: tuple[int, int] = (8, 4), dense: int = 3) -> dict[str, Any]:
    keys.choice("topk_method", ("noaux_tc",), "noaux_tc")
    score = keys.choice("scoring_func", ("sigmoid", "softmax"), "sigmoid")
    router = {
        "router_score": score,
        "router_bias": True,
        "normalize_top_k": keys.switch("norm_topk_prob", True),
    }
    groups = (keys.size("n_group", groups[0]), keys.size("topk_group", groups[1]))
    shared, dense = (
        keys.size("n_shared_experts", 1, least=0),
        keys.size("first_k_dense_replace", dense, least=0),
    )
    heads = keys.size("num_nextn_predict_layers", 0, least=0)
    return _deepseek(keys, groups, shared, dense, router) | {"mtp_layers": heads}


def _glm4_moe_lite(keys: Keys) -> dict[str, Any]:
    """GLM 4.7 Flash: DeepSeek-V3 with other defaults, and layers by words."""
    fields = _deepseek_v3(keys, groups=(1, 1), dense=1)
    words, layers = keys.raw("mlp_layer_types"), fields["layers"]
    if words is None:
        return fields
    if not isinstance(words, list) or len(words) != layers or set(words) - {"dense", "sparse"}:
        keys.refuse("mlp_layer_types", words, f"must be dense or sparse for each of {layers} layers")
        return fields
    dense = words.index("sparse") if "sparse" in words else layers
    plain = (layer for layer, word in enumerate(words) if layer > dense and word == "dense")
    return fields | {
        "moe": replace(fields["moe"], first_dense_layers=dense),
        "layer_overrides": tuple(LayerOverride(layer, layer, moe=False) for layer in plain),
    }


def _deepseek(
    keys: Keys, groups: tuple[int, int], shared: int, dense: int, router: dict[str, Any]
) -> dict[str, Any]:
    """What DeepSeek's versions share; they differ in the router, and in what an absent key means."""
    if keys.switch("attention_bias", False):
        keys.refuse("attention_bias", True, "biases of latent attention are not supported")
    latent = LatentAttention(
        kv_lora_rank=keys.size("kv_lora_rank"),
        qk_nope_head_size=keys.size("qk_nope_head_dim"),
        qk_rope_head_size=keys.size("qk_rope_head_dim"),
        v_head_size=keys.size("v_head_dim"),
        q_lora_rank=keys.size("q_lora_rank", 0),
    )
    fields = llama_family(keys, head_size=latent.qk_head_size)
    fields |= {"kv_heads": fields["heads"], "head_size": latent.qk_head_size, "latent_attention": latent}
    if keys.raw("n_routed_experts") is None:
        return fields
    width = keys.size("moe_intermediate_size")
    moe = MixtureOfExperts(
        experts=keys.size("n_routed_experts"),
        top_k=keys.size("num_experts_per_tok"),
        expert_ffn_size=width,
        shared_ffn_size=width * shared,
        first_dense_layers=dense,
        layer_frequency=keys.size("moe_layer_freq", 1),
        router_fp32=True,
        aux_loss=keys.positive("aux_loss_alpha", 0.001),
        routing_groups=groups[0],
        top_groups=groups[1],
        **router,
    )
    return fields | {"moe": moe}


def _qwen2_moe(keys: Keys) -> dict[str, Any]:
    default = None if "num_key_value_heads" in keys else 16
    fields = llama_family(keys, kv_heads=default) | {"qkv_bias": keys.switch("qkv_bias", True)}
    shared = keys.size("shared_expert_intermediate_size", 5632)
    experts = qwen_experts(keys, fields["layers"], {"shared_ffn_size": shared, "shared_gate": True})
    return fields | experts | qwen_window(keys, fields["layers"])


def _qwen3_moe(keys: Keys) -> dict[str, Any]:
    bias = keys.switch("attention_bias", False)
    default = None if "num_key_value_heads" in keys else 4
    fields = llama_family(keys, kv_heads=default) | {
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "qk_norm": True,
    }
    return fields | qwen_experts(keys, fields["layers"], {}) | qwen_window(keys, fields["layers"])


def qwen_experts(
    keys: Keys, layers: int, shared: dict[str, Any], defaults: Mapping[str, int] | None = None
) -> dict[str, Any]:
    """Experts of a Qwen model, and the layers that have none; keys without a default are required."""
    step, known = keys.size("decoder_sparse_step", 1), defaults or {}
    moe = MixtureOfExperts(
        experts=keys.size("num_experts", known.get("num_experts")),
        top_k=keys.size("num_experts_per_tok", known.get("num_experts_per_tok")),
        expert_ffn_size=keys.size("moe_intermediate_size", known.get("moe_intermediate_size")),
        layer_frequency=step,
        layer_offset=step - 1,
        normalize_top_k=keys.switch("norm_topk_prob", bool(known)),
        aux_loss=keys.positive("router_aux_loss_coef", 0.001),
        **shared,
    )
    dense = keys.layer_numbers("mlp_only_layers", layers) or []
    overrides = tuple(LayerOverride(layer, layer, moe=False) for layer in dense)
    return {"moe": moe, "layer_overrides": overrides}


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    default = None if "num_key_value_heads" in keys else 8
    fields = llama_family(keys, kv_heads=default, head_size=64)
    bias, layers = keys.switch("attention_bias", True), fields["layers"]
    old_key = keys.size("experts_per_token", 4)
    moe = MixtureOfExperts(
        experts=keys.size("num_local_experts"),
        top_k=keys.size("num_experts_per_tok", old_key),
        expert_ffn_size=fields["ffn_size"],
        router_linear_bias=True,
        expert_bias=True,
        aux_loss=keys.positive("router_aux_loss_coef", 0.9),
    )
    listed = keys.raw("layer_types") is not None
    letters = keys.layer_letters(layers, switch=False) if listed else ("wf" * layers)[:layers]
    return (
        fields
        | {"qkv_bias": bias, "attention_output_bias": bias, "attention_sinks": True, "moe": moe}
        | {"activation": "clamped_swiglu"}
        | keys.window(letters, default=128)
    )


def llama4_text(keys: Keys) -> dict[str, Any]:
    """The language model of Llama 4."""
    fields = llama_family(keys, head_size=128)
    bias, layers = keys.switch("attention_bias", False), fields["layers"]
    width, step = fields["ffn_size"], keys.size("interleave_moe_layer_step", 1)
    moe = MixtureOfExperts(
        experts=keys.size("num_local_experts"),
        top_k=keys.size("num_experts_per_tok", 1),
        expert_ffn_size=width,
        shared_ffn_size=width,
        layer_frequency=step,
        layer_offset=step - 1,
        router_score="sigmoid",
        normalize_top_k=False,
        aux_loss=keys.positive("router_aux_loss_coef", 0.001),
        scores_on_input=True,
    )
    fields |= {
        "ffn_size": keys.size("intermediate_size_mlp", 16384),
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "qk_norm": keys.switch("use_qk_norm", True),
        "qk_norm_weight": False,
        "moe": moe,
        "layer_overrides": _llama4_overrides(keys, moe, layers),
    }
    return fields | _llama4_positions(keys, layers)


def _llama4_overrides(keys: Keys, moe: MixtureOfExperts, layers: int) -> tuple[LayerOverride, ...]:
    """Where ``moe_layers`` differs from what ``interleave_moe_layer_step`` says."""
    listed = keys.layer_numbers("moe_layers", layers)
    if listed is None:
        return ()
    regular = set(range(moe.layer_offset, layers, moe.layer_frequency))
    return tuple(LayerOverride(layer, layer, moe=layer in listed) for layer in sorted(regular ^ set(listed)))


def _llama4_positions(keys: Keys, layers: int) -> dict[str, Any]:
    """Layers with rotary positions see a chunk, those without see everything."""
    interval = keys.size("no_rope_layer_interval", 4)
    listed = keys.raw("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(layers)]
    if not isinstance(listed, list) or len(listed) != layers or any(flag not in (0, 1) for flag in listed):
        keys.refuse("no_rope_layers", listed, f"must be a list of 0 or 1 for each of {layers} layers")
        return {}
    letters = "".join("w" if flag else "f" for flag in listed)
    if "f" not in letters and keys.raw("attention_chunk_size") is None:
        return {}
    if "w" not in letters:
        return {"positions": "none", "qk_norm": False}
    if keys.raw("attention_chunk_size") is None and "attention_chunk_size" in keys:
        keys.refuse(
            "attention_chunk_size", None, "layers without positions need layers with chunks beside them"
        )
        return {}
    return {
        "window": keys.size("attention_chunk_size", 8192),
        "window_kind": "chunked",
        "window_pattern": shortest_period(letters),
        "rotary_on_full_attention": "f" not in letters,
    }


EXPERT_READERS: dict[str, Reader] = {
    "mixtral": _mixtral,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "kimi_k2": _deepseek_v3,
    "glm4_moe_lite": _glm4_moe_lite,
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "qwen3_vl_moe_text": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "llama4_text": llama4_text,
}
