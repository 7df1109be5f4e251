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
from .huggingface_vision import VISION_READERS
from .model import ModelDescription, ModelError
from .model_checks import error_of, shown
from .model_consistency import inconsistencies

_MARKS = ("model_type", "architectures", "num_hidden_layers", "n_layer", "transformers_version")
_NOT_DENSE = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank")
READERS = DENSE_READERS | EXPERT_READERS | HYBRID_READERS | VISION_READERS
"""Functions from keys to fields, by ``model_type``."""


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
            f"{where}: model_type {found}; supported Hugging Face model types are {', '.join(sorted(READERS))}. "
            "Any other decoder of their kind can be written as a model YAML file."
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
