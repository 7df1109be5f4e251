"""Model descriptions from the ``config.json`` of Hugging Face checkpoints: one function for each ``model_type``.

Keys, and what an absent key means, follow the configuration class of each type in the ``transformers`` library.
Keys that change no operator, size or count (token ids, initialisation, rotary base and scaling, ...) are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .model import Activation, ModelDescription, ModelError
from .model_checks import (
    LARGEST_SIZE,
    MOST_LAYERS,
    choice_problem,
    error_of,
    probability_problem,
    shown,
    switch_problem,
    whole_number_problem,
)

_GELU_NAMES = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python")
_SILU_NAMES = ("silu", "swish")
_MARKS = ("model_type", "architectures", "num_hidden_layers", "n_layer", "transformers_version")
_NOT_DENSE = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank")


def is_huggingface_config(mapping: Mapping[Any, Any]) -> bool:
    """Whether a mapping is a Hugging Face configuration: it has a key that only those have."""
    return any(mark in mapping for mark in _MARKS)


def model_from_huggingface(config: Mapping[Any, Any], where: str, name: str = "") -> ModelDescription:
    """The model a Hugging Face configuration describes.

    ``where`` names the origin in messages; the model is named after ``_name_or_path`` of the configuration, else
    ``name``.

    Raises:
        ModelError: for a ``model_type`` that is not supported (the message lists those that are), and for missing or
            wrong keys and for features of the model that are not supported, all at once.
    """
    model_type = config.get("model_type")
    reader = _READERS.get(model_type) if isinstance(model_type, str) else None
    if reader is None:
        found = "is missing" if model_type is None else f"{shown(model_type)} is not supported"
        raise ModelError(
            f"{where}: model_type {found}; supported Hugging Face model types are {', '.join(sorted(_READERS))} "
            "(dense decoders). Any other dense decoder can be written as a model YAML file."
        )
    keys = _Keys(config)
    for key in _NOT_DENSE:
        if config.get(key):
            keys.refuse(key, config[key], "mixture-of-experts and latent attention are not supported here")
    fields = reader(keys)
    keys.check_heads(fields)
    if keys.problems:
        raise error_of(where, keys.problems)
    given = config.get("_name_or_path")
    named = given.rstrip("/").split("/")[-1].lower() if isinstance(given, str) else ""
    return ModelDescription(name=named or name or str(model_type), source=where, **fields)


class _Keys:
    """Typed access to a configuration that collects what is wrong instead of stopping at the first."""

    def __init__(self, config: Mapping[Any, Any]) -> None:
        self._config = config
        self.problems: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self._config

    def raw(self, key: str) -> Any:  # noqa: ANN401
        return self._config.get(key)

    def refuse(self, key: str, value: object, reason: str) -> None:
        self.problems.append(f"{key}: {reason} (it is {shown(value)})")

    def size(self, key: str, default: int | None = None, limit: int = LARGEST_SIZE) -> int:
        """A positive whole number; ``default`` stands in for an absent or null key, else the key is required."""
        value = self._config.get(key)
        if value is None:
            if default is None:
                self.problems.append(f"{key}: is missing")
                return 1
            return default
        if self._rejects(key, whole_number_problem(value, 1, limit)):
            return 1
        return int(value)

    def switch(self, key: str, default: bool) -> bool:
        value = self._config.get(key)
        if value is None:
            return default
        return default if self._rejects(key, switch_problem(value)) else bool(value)

    def dropout(self, key: str, default: float) -> float:
        value = self._config.get(key)
        if value is None:
            return default
        return default if self._rejects(key, probability_problem(value)) else float(value)

    def activation(self, key: str, default: str, gated: bool) -> Activation:
        value = self._config.get(key)
        value = default if value is None else value
        names: dict[str, Activation] = dict.fromkeys(_GELU_NAMES, "geglu" if gated else "gelu")
        if gated:
            names.update(dict.fromkeys(_SILU_NAMES, "swiglu"))
        return "gelu" if self._rejects(key, choice_problem(value, sorted(names))) else names[value]

    def _rejects(self, key: str, problem: str) -> bool:
        if problem:
            self.problems.append(f"{key}: {problem}")
        return bool(problem)

    def check_heads(self, fields: Mapping[str, Any]) -> None:
        """Whether key-value heads divide the heads; only meaningful when the keys themselves were right."""
        heads, kv_heads = fields["heads"], fields["kv_heads"]
        if not self.problems and heads % kv_heads:
            self.problems.append(
                f"num_key_value_heads: {kv_heads} does not divide num_attention_heads {heads}"
            )

    def head_size(self, hidden: int, heads: int, default: int | None = None) -> int:
        """``head_dim`` if given, else what the type says, else the width split over the heads."""
        size = self._config.get("head_dim")
        if size is not None:
            return self.size("head_dim")
        if default is not None:
            return default
        if hidden % heads and not self.problems:
            self.problems.append(
                f"num_attention_heads: {heads} does not divide hidden_size {hidden}, and there is no head_dim"
            )
        return max(hidden // heads, 1)

    def full_attention(self, enabled: bool) -> None:
        """Refuse a sliding window that is in effect (``enabled``: the type's own switch is on)."""
        layer_types = self._config.get("layer_types")
        if isinstance(layer_types, list):
            other = sorted({str(kind) for kind in layer_types} - {"full_attention"})
            if other:
                self.refuse("layer_types", other, "only full_attention layers are supported")
            return
        window, longest = self._config.get("sliding_window"), self._config.get("max_position_embeddings")
        if not enabled or window is None:
            return
        if isinstance(window, int) and isinstance(longest, int) and window >= longest:
            return
        self.refuse(
            "sliding_window",
            window,
            "sliding-window attention is not supported; set it to null if no training sequence is longer",
        )


def _llama_family(keys: _Keys, kv_heads: int | None = None, head_size: int | None = None) -> dict[str, Any]:
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
        "activation": keys.activation("hidden_act", "silu", gated=True),
        "norm": "rmsnorm",
        "positions": "rotary",
        "tied_embeddings": keys.switch("tie_word_embeddings", False),
        "attention_dropout": keys.dropout("attention_dropout", 0.0),
    }


def _llama(keys: _Keys) -> dict[str, Any]:
    bias = keys.switch("attention_bias", False)
    keys.full_attention(enabled=True)
    return _llama_family(keys) | {
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "mlp_bias": keys.switch("mlp_bias", False),
    }


def _mistral(keys: _Keys) -> dict[str, Any]:
    keys.full_attention(enabled=True)
    return _llama_family(keys, kv_heads=None if "num_key_value_heads" in keys else 8)


def _qwen2(keys: _Keys) -> dict[str, Any]:
    keys.full_attention(enabled=_windowed_layers(keys))
    default = None if "num_key_value_heads" in keys else 32
    return _llama_family(keys, kv_heads=default) | {"qkv_bias": True}


def _qwen3(keys: _Keys) -> dict[str, Any]:
    bias = keys.switch("attention_bias", False)
    keys.full_attention(enabled=_windowed_layers(keys))
    default = None if "num_key_value_heads" in keys else 32
    return _llama_family(keys, kv_heads=default, head_size=128) | {
        "qkv_bias": bias,
        "attention_output_bias": bias,
        "qk_norm": True,
    }


def _windowed_layers(keys: _Keys) -> bool:
    """Whether any layer of a Qwen model has a sliding window: those from ``max_window_layers`` on, if switched on."""
    if not keys.switch("use_sliding_window", False):
        return False
    first, layers = keys.raw("max_window_layers"), keys.raw("num_hidden_layers")
    return not (isinstance(first, int) and isinstance(layers, int) and first >= layers)


def _gpt2(keys: _Keys) -> dict[str, Any]:
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


def _gpt_neox(keys: _Keys) -> dict[str, Any]:
    hidden, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    if keys.switch("use_parallel_residual", True):
        keys.refuse(
            "use_parallel_residual",
            True,
            "attention and MLP side by side are not supported, only in sequence",
        )
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


_READERS: dict[str, Callable[[_Keys], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
}
