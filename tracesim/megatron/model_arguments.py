"""The model that an argument list describes, as the ``model`` mapping of a scenario.

Defaults are those of Megatron-LM ``megatron/training/arguments.py``: a GPT with biases, LayerNorm, learned positions,
tied embeddings and dropout 0.1.
"""

from __future__ import annotations

from typing import Any

from .arguments import Arguments
from .delta_net_arguments import delta_net_fields
from .hybrid_arguments import HybridLayers, hybrid_fields
from .layer_patterns import layer_numbers

TOKENIZERS = {"GPT2BPETokenizer": 50257, "BertWordPieceLowerCase": 30522, "BertWordPieceCase": 28996}
"""Words of the tokenizers that come with their vocabulary."""
_POSITIONS = {
    "learned_absolute": "learned",
    "absolute": "learned",
    "rope": "rotary",
    "rotary": "rotary",
    "yarn": "rotary",
    "mrope": "rotary",
    "alibi": "none",
    "none": "none",
}
_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
_SOFTMAX = {"vanilla": False, "learnable": True, "off-by-one": False}


def model_mapping(
    arguments: Arguments, vocab_size: int | None, hybrid: HybridLayers | None = None, *, is_bert: bool = False
) -> dict[str, Any]:
    """The model; ``vocab_size`` is that of the tokenizer, where the arguments do not say it."""
    layers = len(hybrid.pattern) if hybrid is not None else layer_count(arguments)
    hidden = arguments.required("hidden-size")
    heads = arguments.required("num-attention-heads")
    activation = _activation(arguments, is_bert=is_bert)
    biased = not arguments.flag("disable-bias-linear")
    extra_bias, tied = (
        arguments.flag("add-qkv-bias"),
        not arguments.flag("untie-embeddings-and-output-weights"),
    )
    default_ffn = int(4 * hidden * 2 / 3 / 64) * 64 if activation == "swiglu" else 4 * hidden
    norm_without_weight = arguments.flag("qk-l2-norm")
    groups = arguments.count("num-query-groups")
    model: dict[str, Any] = {
        "name": "megatron-bert" if is_bert else "megatron-gpt",
        "layers": layers,
        "hidden_size": hidden,
        "ffn_size": arguments.count("ffn-hidden-size", default_ffn),
        "heads": heads,
        "kv_heads": groups if arguments.flag("group-query-attention") and groups else heads,
        "head_size": arguments.count("kv-channels", max(1, hidden // heads)),
        **_vocabulary(arguments, vocab_size, is_bert=is_bert),
        "activation": activation,
        "norm": arguments.choice("normalization", "LayerNorm", _NORMS),
        "positions": _positions(arguments),
        "qkv_bias": biased or extra_bias,
        "attention_output_bias": biased,
        "mlp_bias": biased,
        "qk_norm": arguments.flag("qk-layernorm") or norm_without_weight,
        "qk_norm_weight": not norm_without_weight,
        "attention_output_gate": arguments.flag("attention-output-gate"),
        "tied_embeddings": tied,
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
    _add_windows(arguments, model)
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


def layer_count(arguments: Arguments) -> int:
    """Layers; ``--encoder-num-layers`` is another name for them where there is no decoder beside, which is refused."""
    both = "decoder-num-layers" in arguments.values
    name = arguments.first_given("num-layers", "encoder-num-layers")
    if both and name != "num-layers":
        arguments.asked.discard(name)
        return 1
    return arguments.required(name)


def _activation(arguments: Arguments, *, is_bert: bool) -> str:
    old_name = arguments.text("glu-activation")
    switches = {
        "swiglu": arguments.flag("swiglu") or old_name == "swiglu",
        "geglu": any([arguments.flag("quick-geglu"), arguments.flag("geglu"), old_name == "geglu"]),
        "squared_relu": arguments.flag("squared-relu"),
    }
    if old_name and old_name not in switches:
        arguments.refuse("glu-activation", "must be swiglu or geglu to be simulated")
    chosen = [name for name, given in switches.items() if given]
    if len(chosen) > 1:
        arguments.problems.append(f"--{' and --'.join(chosen).replace('_', '-')} do not go together")
    if is_bert:
        arguments.flag("bert-no-binary-head")
    return chosen[0] if chosen else "gelu"


def _positions(arguments: Arguments) -> str:
    old_name = arguments.flag("use-rotary-position-embeddings")
    name = "position-embedding-type"
    stated = arguments.choice(name, "learned_absolute", _POSITIONS)
    if arguments.values.get(name) == "alibi":
        arguments.assumed.append("alibi: biases of attention by distance cost nothing of their own")
    no_table = arguments.flag("no-position-embedding")
    if old_name:
        return "rotary"
    return "none" if stated == "learned" and no_table else stated


def _add_windows(arguments: Arguments, model: dict[str, Any]) -> None:
    """Attention windows (``--window-size LEFT,RIGHT``, tokens beside a token's own) and sinks."""
    softmax = arguments.choice("softmax-type", "vanilla", {name: name for name in _SOFTMAX})
    model["attention_sinks"] = _SOFTMAX[softmax]
    if softmax == "off-by-one":
        arguments.assumed.append("--softmax-type off-by-one: priced as a plain softmax")
    sides = [word.lstrip("+") for word in arguments.words("window-size")]
    frequency = arguments.text("window-attn-skip-freq")
    if not sides or sides[0] == "-1":
        return
    if not sides[0].isdecimal() or len(sides) > 2:
        arguments.refuse("window-size", "must be two numbers such as 127,0; -1 is no limit")
        return
    if len(sides) == 2 and sides[1] not in ("0", "-1"):
        arguments.refuse("window-size", "windows that look ahead have no rule; the second number must be 0")
    model["window"] = int(sides[0]) + 1
    if not frequency:
        return
    if frequency.isdecimal() and int(frequency):
        model["window_pattern"] = "w" * (int(frequency) - 1) + "f"
        return
    numbers = layer_numbers(frequency)
    if numbers is None or len(numbers) < model["layers"]:
        arguments.refuse(
            "window-attn-skip-freq",
            f"must be a number above 0, or a list of 1 (window) or 0 for each of {model['layers']} layers",
        )
        return
    model["window_pattern"] = "".join("w" if number else "f" for number in numbers[: model["layers"]])


def _vocabulary(arguments: Arguments, vocab_size: int | None, *, is_bert: bool) -> dict[str, int]:
    """Words and the multiple they are padded to; a padded size stands as it is."""
    multiple = arguments.count("make-vocab-size-divisible-by", 128) or 128
    if arguments.flag("no-pad-vocab-size"):
        multiple = 1
    stated = arguments.count("vocab-size")
    padded = arguments.count(arguments.first_given("padded-vocab-size", "pad-vocab-size-to"))
    named = arguments.first_given("tokenizer-type", "patch-tokenizer-type")
    if padded:
        return {"vocab_size": padded, "vocab_padding_multiple": 1}
    words = vocab_size or stated
    if not words:
        words = _words_of_tokenizer(arguments, named, is_bert=is_bert)
    return {"vocab_size": words, "vocab_padding_multiple": multiple}


def _words_of_tokenizer(arguments: Arguments, name: str, *, is_bert: bool) -> int:
    tokenizer = arguments.text(name)
    if not tokenizer:
        tokenizer = "BertWordPieceLowerCase" if is_bert else "GPT2BPETokenizer"
        arguments.assumed.append(f"no tokenizer is named: {tokenizer} with {TOKENIZERS[tokenizer]} words")
    if tokenizer in TOKENIZERS:
        return TOKENIZERS[tokenizer]
    model = arguments.values.get("tokenizer-model") or arguments.values.get("tokenizer-name-or-path")
    of_model = f" ({str(model)[:60]})" if model else ""
    arguments.problems.append(
        f"--{name} {tokenizer}{of_model}: its vocabulary is in a file; say how many words it has "
        "(--vocab-size)"
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
    grouped = arguments.flag("moe-grouped-gemm")
    score = arguments.choice(
        "moe-router-score-function", "softmax", {"softmax": "softmax", "sigmoid": "sigmoid"}
    )
    choice_first = not arguments.flag("moe-router-pre-softmax")
    model["moe"] = {
        "experts": arguments.required("num-experts"),
        "top_k": arguments.count("moe-router-topk", 2),
        "expert_ffn_size": arguments.count("moe-ffn-hidden-size", model["ffn_size"]),
        "shared_ffn_size": arguments.count("moe-shared-expert-intermediate-size") or 0,
        "shared_gate": arguments.flag("moe-shared-expert-gate"),
        "router_score": score,
        "router_fp32": arguments.text("moe-router-dtype") in ("fp32", "fp64"),
        "router_bias": arguments.flag("moe-router-enable-expert-bias"),
        # Sigmoids are divided by their sum in any case (``moe_utils.topk_routing_with_score_function``).
        "normalize_top_k": choice_first or score == "sigmoid",
        "aux_loss": _has_auxiliary_loss(arguments),
        **_capacity(arguments),
        "latent_size": arguments.count("moe-latent-size") or 0,
        **_routing_groups(arguments),
        # Grouped GEMMs of Megatron-Core take no bias.
        "expert_bias": biased and not grouped,
    }


def _has_auxiliary_loss(arguments: Arguments) -> bool:
    """Whether a loss balances experts: its kind is one, and its coefficient, 0 by default, is not 0."""
    kinds = arguments.words("moe-router-load-balancing-type") or ["aux_loss"]
    name = arguments.first_given("moe-aux-loss-coeff", "moe-loss-coeff")
    try:
        balances = any(float(word) > 0 for word in arguments.words(name))
    except ValueError:
        arguments.refuse(name, "must be a number")
        balances = False
    return balances and any("aux_loss" in kind for kind in kinds)


def _routing_groups(arguments: Arguments) -> dict[str, int | None]:
    devices = arguments.count("moe-router-topk-limited-devices")
    groups, chosen = arguments.count("moe-router-num-groups"), arguments.count("moe-router-group-topk")
    if devices and not groups:
        # The older name: groups are the ranks that share experts.
        groups, chosen = arguments.count("expert-model-parallel-size", 1), devices
    return {"routing_groups": groups or 1, "top_groups": chosen or 1}


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
    pattern = layer_numbers(text)
    if pattern is None or set(pattern) - {0, 1}:
        arguments.refuse("moe-layer-freq", "must be a number or lists such as ([0]*3+[1]*11)")
        return
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
