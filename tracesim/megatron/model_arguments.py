"""The model that an argument list describes, as the ``model`` mapping of a scenario.

Defaults are those of Megatron-LM ``megatron/training/arguments.py``: a GPT with biases, LayerNorm, learned positions,
tied embeddings and dropout 0.1.
"""

from __future__ import annotations

import re
from typing import Any

from .arguments import Arguments
from .delta_net_arguments import delta_net_fields
from .hybrid_arguments import HybridLayers, hybrid_fields

TOKENIZERS = {"GPT2BPETokenizer": 50257, "BertWordPieceLowerCase": 30522, "BertWordPieceCase": 28996}
"""Words of the tokenizers that come with their vocabulary."""
_POSITIONS = {"learned_absolute": "learned", "rope": "rotary", "yarn": "rotary", "none": "none"}
_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
_TERM = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d{1,6}))?")


def model_mapping(
    arguments: Arguments, vocab_size: int | None, hybrid: HybridLayers | None = None, *, is_bert: bool = False
) -> dict[str, Any]:
    """The model; ``vocab_size`` is that of the tokenizer, where the arguments do not say it."""
    layers = len(hybrid.pattern) if hybrid is not None else arguments.required("num-layers")
    hidden = arguments.required("hidden-size")
    heads = arguments.required("num-attention-heads")
    gated = arguments.flag("swiglu")
    biased = not arguments.flag("disable-bias-linear")
    default_ffn = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    groups = arguments.count("num-query-groups")
    model: dict[str, Any] = {
        "name": "megatron-bert" if is_bert else "megatron-gpt",
        "layers": layers,
        "hidden_size": hidden,
        "ffn_size": arguments.count("ffn-hidden-size", default_ffn),
        "heads": heads,
        "kv_heads": groups if arguments.flag("group-query-attention") and groups else heads,
        "head_size": arguments.count("kv-channels", max(1, hidden // heads)),
        "vocab_size": _vocabulary(arguments, vocab_size, is_bert=is_bert),
        "vocab_padding_multiple": arguments.count("make-vocab-size-divisible-by", 128),
        "activation": _activation(arguments, gated=gated, is_bert=is_bert),
        "norm": arguments.choice("normalization", "LayerNorm", _NORMS),
        "positions": _positions(arguments),
        "qkv_bias": biased or arguments.flag("add-qkv-bias"),
        "attention_output_bias": biased,
        "mlp_bias": biased,
        "qk_norm": arguments.flag("qk-layernorm"),
        "attention_output_gate": arguments.flag("attention-output-gate"),
        "tied_embeddings": not arguments.flag("untie-embeddings-and-output-weights"),
        "hidden_dropout": arguments.number("hidden-dropout", 0.1),
        "attention_dropout": arguments.number("attention-dropout", 0.1),
        "causal": not is_bert,
        "mtp_layers": arguments.count("mtp-num-layers") or 0,
        "source": "an argument list of Megatron-LM",
    }
    if model["positions"] == "learned":
        model["max_positions"] = arguments.required("max-position-embeddings")
    else:
        arguments.get("max-position-embeddings")
    if arguments.flag("multi-latent-attention"):
        _add_latent_attention(arguments, model)
    if arguments.count("num-experts") is not None:
        _add_experts(arguments, model, biased=biased)
        if hybrid is None:
            _add_layer_frequency(arguments, model)
        else:
            arguments.get("moe-layer-freq")
    if hybrid is not None:
        model |= hybrid_fields(arguments, hybrid, hidden)
    return model | delta_net_fields(arguments, layers)


def _activation(arguments: Arguments, *, gated: bool, is_bert: bool) -> str:
    squared = arguments.flag("squared-relu")
    if gated and squared:
        arguments.refuse("squared-relu", "does not go with --swiglu")
    arguments.flag("no-bias-gelu-fusion")
    if is_bert:
        arguments.flag("bert-no-binary-head")
    arguments.flag("no-bias-swiglu-fusion")
    return "swiglu" if gated else "squared_relu" if squared else "gelu"


def _positions(arguments: Arguments) -> str:
    arguments.flag("no-rope-fusion")
    old_name = arguments.flag("use-rotary-position-embeddings")
    stated = arguments.choice("position-embedding-type", "learned_absolute", _POSITIONS)
    no_table = arguments.flag("no-position-embedding")
    if old_name:
        return "rotary"
    return "none" if stated == "learned" and no_table else stated


def _vocabulary(arguments: Arguments, vocab_size: int | None, *, is_bert: bool) -> int:
    stated = arguments.count("vocab-size")
    padded = arguments.count("padded-vocab-size")
    tokenizer = arguments.text("tokenizer-type")
    if vocab_size or stated or padded:
        return vocab_size or stated or padded or 1
    if not tokenizer:
        tokenizer = "BertWordPieceLowerCase" if is_bert else "GPT2BPETokenizer"
        arguments.assumed.append(f"no tokenizer is named: {tokenizer} with {TOKENIZERS[tokenizer]} words")
    if tokenizer in TOKENIZERS:
        return TOKENIZERS[tokenizer]
    arguments.problems.append(
        f"--tokenizer-type {tokenizer}: its vocabulary is in a file; say how many words it has (--vocab-size)"
    )
    return 1


def _add_latent_attention(arguments: Arguments, model: dict[str, Any]) -> None:
    nope, rope = arguments.count("qk-head-dim", 128) or 1, arguments.count("qk-pos-emb-head-dim", 64) or 1
    # The norm of queries and keys is that of the latents here.
    model["qk_norm"] = False
    model["kv_heads"] = model["heads"]
    model["head_size"] = nope + rope
    model["latent_attention"] = {
        "q_lora_rank": arguments.count("q-lora-rank") or 0,
        "kv_lora_rank": arguments.count("kv-lora-rank", 32),
        "qk_nope_head_size": nope,
        "qk_rope_head_size": rope,
        "v_head_size": arguments.count("v-head-dim", 128),
    }


def _add_experts(arguments: Arguments, model: dict[str, Any], *, biased: bool) -> None:
    balancing = arguments.words("moe-router-load-balancing-type") or ["aux_loss"]
    grouped = arguments.flag("moe-grouped-gemm")
    model["moe"] = {
        "experts": arguments.required("num-experts"),
        "top_k": arguments.count("moe-router-topk", 2),
        "expert_ffn_size": arguments.count("moe-ffn-hidden-size", model["ffn_size"]),
        "shared_ffn_size": arguments.count("moe-shared-expert-intermediate-size") or 0,
        "shared_gate": arguments.flag("moe-shared-expert-gate"),
        "router_score": arguments.choice(
            "moe-router-score-function", "softmax", {"softmax": "softmax", "sigmoid": "sigmoid"}
        ),
        "router_fp32": arguments.text("moe-router-dtype") in ("fp32", "fp64"),
        "router_bias": arguments.flag("moe-router-enable-expert-bias"),
        "normalize_top_k": not arguments.flag("moe-router-pre-softmax"),
        "aux_loss": any("aux_loss" in word for word in balancing),
        **_capacity(arguments),
        "latent_size": arguments.count("moe-latent-size") or 0,
        "routing_groups": arguments.count("moe-router-num-groups", 1),
        "top_groups": arguments.count("moe-router-group-topk", 1),
        # Grouped GEMMs of Megatron-Core take no bias.
        "expert_bias": biased and not grouped,
    }
    arguments.get("moe-shared-expert-overlap")


def _capacity(arguments: Arguments) -> dict[str, Any]:
    """Capacity of experts, and what happens to tokens beyond it; a factor below 0 means none."""
    factor = arguments.number("moe-expert-capacity-factor", -1.0)
    padded = arguments.flag("moe-pad-expert-input-to-capacity")
    policy = arguments.choice("moe-token-drop-policy", "probs", {"probs": "probs", "position": "position"})
    if factor == 0:
        arguments.refuse("moe-expert-capacity-factor", "drops every token; a factor below 0 is none")
    if factor > 0:
        return {"capacity_factor": factor, "pad_to_capacity": padded, "drop_policy": policy}
    if padded:
        arguments.refuse("moe-pad-expert-input-to-capacity", "needs --moe-expert-capacity-factor")
    return {}


def _add_layer_frequency(arguments: Arguments, model: dict[str, Any]) -> None:
    """Which layers have experts: every n-th, or a pattern such as ``([0]*3+[1]*11)``."""
    text = arguments.text("moe-layer-freq", "1").replace(" ", "")
    if text.isdecimal() and int(text):
        model["moe"]["layer_frequency"] = int(text)
        return
    pattern: list[int] = []
    for term in text.strip("()").split("+"):
        match = _TERM.fullmatch(term)
        if match is None:
            arguments.refuse("moe-layer-freq", "must be a number or lists such as ([0]*3+[1]*11)")
            return
        pattern += [int(digit) for digit in match.group(1).split(",")] * int(match.group(2) or 1)
    if len(pattern) != model["layers"]:
        arguments.refuse("moe-layer-freq", f"names {len(pattern)} layers of {model['layers']}")
        return
    dense = pattern.index(1) if 1 in pattern else len(pattern)
    model["moe"]["first_dense_layers"] = dense
    model["layer_overrides"] = [
        {"first": layer, "last": layer, "moe": False}
        for layer, has_experts in enumerate(pattern)
        if layer > dense and not has_experts
    ]
