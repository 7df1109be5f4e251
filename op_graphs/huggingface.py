"""Model descriptions from the ``config.json`` of Hugging Face checkpoints: one function for each ``model_type``.

Keys, and what an absent key means, follow the configuration class of each type in the ``transformers`` library.
Keys that change no operator, size or count (token ids, initialisation, rotary base and scaling, ...) are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .huggingface_dense import DENSE_READERS
from .huggingface_experts import EXPERT_READERS
from .huggingface_hybrid import HYBRID_READERS
from .huggingface_keys import Keys
from .huggingface_mixtures import MIXTURE_READERS
from .huggingface_vision import VISION_READERS
from .model import ModelDescription, ModelError
from .model_checks import error_of, shown
from .model_consistency import inconsistencies

_MARKS = ("model_type", "architectures", "num_hidden_layers", "n_layer", "transformers_version")
_NOT_DENSE = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank")
READERS = DENSE_READERS | EXPERT_READERS | MIXTURE_READERS | HYBRID_READERS | VISION_READERS
"""Functions from keys to fields, by ``model_type``."""


_REASONS = {
    "norms behind attention and MLP": (
        ("gemma2", "gemma3_text", "gemma3n_text", "glm4", "olmo2", "olmo3", "exaone4")
    ),
    "attention and MLP side by side": ("falcon", "phi", "gptj", "cohere", "cohere2", "persimmon", "codegen"),
    "sparse attention with an indexer": ("deepseek_v32", "glm_moe_dsa", "deepseek_v4"),
    "a mixer that has no rule": (
        (
            "minimax",
            "minimax_text_01",
            "jamba",
            "zamba2",
            "bamba",
            "falcon_h1",
            "granitemoehybrid",
            "lfm2",
            "kimi_linear",
        )
    ),
    "biases of attention by distance": ("bloom", "mpt", "falcon_rw"),
    "an encoder beside the decoder": ("t5", "bart", "whisper", "umt5", "t5gemma"),
}
"""What the layers of a type have that is not simulated."""


def _reason(config: Mapping[Any, Any]) -> str:
    """Why a type is not supported, or what of it is: the language model of one that reads images."""
    text = config.get("text_config")
    if isinstance(text, Mapping) and text.get("model_type") in READERS:
        return f", but its language model is: text_config, of model_type {text['model_type']}, as a file of its own"
    kind = config.get("model_type")
    reason = next((reason for reason, kinds in _REASONS.items() if kind in kinds), None)
    return f", it has {reason}" if reason else ""


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
    reader = READERS.get(model_type) if isinstance(model_type, str) else None
    if reader is None:
        found = "is missing" if model_type is None else f"{shown(model_type)} is not supported"
        raise ModelError(
            f"{where}: model_type {found}{_reason(config)}; supported Hugging Face model types are "
            f"{', '.join(sorted(READERS))}. Any other decoder of their kind can be written as a model YAML file."
        )
    keys = Keys(config)
    if model_type in DENSE_READERS:
        for key in _NOT_DENSE:
            if config.get(key):
                keys.refuse(
                    key, config[key], f"model_type {model_type} has no experts and no latent attention"
                )
    fields = reader(keys)
    keys.check_heads(fields)
    given = config.get("_name_or_path")
    named = given.rstrip("/").split("/")[-1].lower() if isinstance(given, str) else ""
    model = ModelDescription(name=named or name or str(model_type), source=where, **fields)
    problems = keys.problems or inconsistencies(model)
    if problems:
        raise error_of(where, problems)
    return model
