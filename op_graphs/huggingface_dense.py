"""Dense decoders from Hugging Face configurations: Llama, Mistral, Qwen, Phi, Gemma, GLM, GPT and others."""

from __future__ import annotations

from typing import Any

from .huggingface_keys import Keys, Reader
from .model_checks import MOST_LAYERS

_SIDE_BY_SIDE = "attention and MLP side by side are not supported, only in sequence"


def llama_family(
    keys: Keys, kv_heads: int | None = None, head_size: int | None = None, *, reads_activation: bool = True
) -> dict[str, Any]:
    """Keys that the Llama line of models shares: RMSNorm, rotary positions, a gated MLP."""
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    return {
        "layers": keys.size("num_hidden_layers", limit=MOST_LAYERS),
        "hidden_size": hidden,
        "ffn_size": keys.size("intermediate_size"),
        "heads": heads,
        "kv_heads": keys.size("num_key_value_heads", kv_heads or heads),
        "head_size": keys.head_size(hidden, heads, head_size),
        "vocab_size": keys.size("vocab_size"),
        "activation": keys.activation("hidden_act", "silu", gated=True) if reads_activation else "swiglu",
        "norm": "rmsnorm",
        "positions": "rotary",
        "tied_embeddings": keys.switch("tie_word_embeddings", False),
        "attention_dropout": keys.dropout("attention_dropout", 0.0),
    }


def _llama(keys: Keys) -> dict[str, Any]:
    bias = keys.switch("attention_bias", False)
    return llama_family(keys) | {
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": keys.switch("mlp_bias", False),
    }


def _mistral(keys: Keys) -> dict[str, Any]:
    fields = llama_family(keys, kv_heads=None if "num_key_value_heads" in keys else 8)
    default = None if "sliding_window" in keys else 4096
    return fields | keys.window(keys.layer_letters(fields["layers"], switch=True), default=default)


def _qwen2(keys: Keys) -> dict[str, Any]:
    default = None if "num_key_value_heads" in keys else 32
    fields = llama_family(keys, kv_heads=default) | {"qkv_bias": True}
    return fields | qwen_window(keys, fields["layers"])


def _qwen3(keys: Keys) -> dict[str, Any]:
    bias = keys.switch("attention_bias", False)
    default = None if "num_key_value_heads" in keys else 32
    fields = llama_family(keys, kv_heads=default, head_size=128) | {
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "qk_norm": True,
    }
    return fields | qwen_window(keys, fields["layers"])


def qwen_window(keys: Keys, layers: int) -> dict[str, Any]:
    """The window of a Qwen model: the layers from ``max_window_layers`` on have it, if it is switched on."""
    switch = keys.switch("use_sliding_window", False)
    first = keys.size("max_window_layers", 28, least=0) if switch else 0
    return keys.window(keys.layer_letters(layers, switch, first), default=4096)


def _gpt2(keys: Keys) -> dict[str, Any]:
    hidden, heads = keys.size("n_embd"), keys.size("n_head")
    if keys.switch("add_cross_attention", False):
        keys.refuse("add_cross_attention", True, "cross-attention is not supported")
    if hidden % heads and not keys.problems:
        keys.problems.append(f"n_head: {heads} does not divide n_embd {hidden}")
    return {
        "layers": keys.size("n_layer", limit=MOST_LAYERS),
        "hidden_size": hidden,
        "ffn_size": keys.size("n_inner", 4 * hidden),
        "heads": heads,
        "kv_heads": heads,
        "head_size": max(hidden // heads, 1),
        "vocab_size": keys.size("vocab_size"),
        "max_positions": keys.size("n_positions"),
        "activation": keys.activation("activation_function", "gelu_new", gated=False),
        "norm": "layernorm",
        "positions": "learned",
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "tied_embeddings": keys.switch("tie_word_embeddings", True),
        "hidden_dropout": keys.dropout("resid_pdrop", 0.1),
        "attention_dropout": keys.dropout("attn_pdrop", 0.1),
    }


def _gpt_neox(keys: Keys) -> dict[str, Any]:
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    if keys.switch("use_parallel_residual", True):
        keys.refuse("use_parallel_residual", True, _SIDE_BY_SIDE)
    bias = keys.switch("attention_bias", True)
    return {
        "layers": keys.size("num_hidden_layers", limit=MOST_LAYERS),
        "hidden_size": hidden,
        "ffn_size": keys.size("intermediate_size"),
        "heads": heads,
        "kv_heads": heads,
        "head_size": keys.head_size(hidden, heads),
        "vocab_size": keys.size("vocab_size"),
        "activation": keys.activation("hidden_act", "gelu", gated=False),
        "norm": "layernorm",
        "positions": "rotary",
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": True,
        "tied_embeddings": keys.switch("tie_word_embeddings", False),
        "hidden_dropout": keys.dropout("hidden_dropout", 0.0),
        "attention_dropout": keys.dropout("attention_dropout", 0.0),
    }


def _phi3(keys: Keys) -> dict[str, Any]:
    fields = llama_family(keys)
    # The projections of queries, keys and values are one linear without bias, as those of the gate and the MLP are.
    fields["hidden_dropout"] = keys.dropout("resid_pdrop", 0.0)
    return fields | keys.window(
        keys.layer_letters(fields["layers"], switch=keys.raw("sliding_window") is not None)
    )


def _gemma(keys: Keys) -> dict[str, Any]:
    """Gemma 1; later ones have norms behind attention and MLP as well."""
    bias = keys.switch("attention_bias", False)
    name = "hidden_activation" if keys.raw("hidden_activation") is not None else "hidden_act"
    return llama_family(keys, head_size=256, reads_activation=False) | {
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "activation": keys.activation(name, "gelu_pytorch_tanh", gated=True),
        "tied_embeddings": keys.switch("tie_word_embeddings", True),
    }


def _glm(keys: Keys) -> dict[str, Any]:
    default = None if "num_key_value_heads" in keys else 2
    fields = llama_family(keys, kv_heads=default, head_size=128)
    return fields | {"qkv_bias": keys.switch("attention_bias", True)}


def _seed_oss(keys: Keys) -> dict[str, Any]:
    default = None if "num_key_value_heads" in keys else 8
    return llama_family(keys, kv_heads=default, head_size=128) | {
        "qkv_bias": keys.switch("attention_bias", True),
        "attention_output_bias": keys.switch("attention_out_bias", False),
        "mlp_bias": keys.switch("mlp_bias", False),
        "hidden_dropout": keys.dropout("residual_dropout", 0.1),
        "attention_dropout": keys.dropout("attention_dropout", 0.1),
    }


def _ernie(keys: Keys) -> dict[str, Any]:
    default = None if "num_key_value_heads" in keys else 2
    bias = keys.switch("use_bias", False)
    return llama_family(keys, kv_heads=default, head_size=128) | {
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": bias,
        "tied_embeddings": keys.switch("tie_word_embeddings", True),
    }


def _stablelm(keys: Keys) -> dict[str, Any]:
    default = None if "num_key_value_heads" in keys else 32
    if keys.switch("use_parallel_residual", False):
        keys.refuse("use_parallel_residual", True, _SIDE_BY_SIDE)
    if keys.switch("qk_layernorm", False):
        keys.refuse("qk_layernorm", True, "a norm of its own for each head is not supported")
    return llama_family(keys, kv_heads=default) | {
        "norm": "layernorm",
        "qkv_bias": keys.switch("use_qkv_bias", False),
        "hidden_dropout": keys.dropout("hidden_dropout", 0.0),
    }


def _starcoder2(keys: Keys) -> dict[str, Any]:
    default = None if "num_key_value_heads" in keys else 2
    bias = keys.switch("use_bias", True)
    fields = llama_family(keys, kv_heads=default, reads_activation=False) | {
        "activation": keys.activation("hidden_act", "gelu_pytorch_tanh", gated=False),
        "norm": "layernorm",
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": bias,
        "tied_embeddings": keys.switch("tie_word_embeddings", True),
        "hidden_dropout": keys.dropout("residual_dropout", 0.0),
    }
    letters = keys.layer_letters(fields["layers"], switch=keys.raw("sliding_window") is not None)
    return fields | keys.window(letters)


def _gpt_bigcode(keys: Keys) -> dict[str, Any]:
    """GPT-2 with one head of keys and values (SantaCoder, StarCoder)."""
    fields = _gpt2(keys)
    return fields | {"kv_heads": 1 if keys.switch("multi_query", True) else fields["heads"]}


def _nemotron(keys: Keys) -> dict[str, Any]:
    """Nemotron-4 and Minitron: squared ReLU, LayerNorm."""
    bias = keys.switch("attention_bias", False)
    keys.choice("hidden_act", ("relu2",), "relu2")
    return llama_family(keys, reads_activation=False) | {
        "activation": "squared_relu",
        "norm": "layernorm",
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": keys.switch("mlp_bias", False),
    }


DENSE_READERS: dict[str, Reader] = {
    "llama": _llama,
    "granite": _llama,
    "phi3": _phi3,
    "gemma": _gemma,
    "glm": _glm,
    "seed_oss": _seed_oss,
    "ernie4_5": _ernie,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
    "gpt_bigcode": _gpt_bigcode,
    "nemotron": _nemotron,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_vl_text": _qwen3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}
