"""Small argument lists of Megatron-LM, and the scenarios that they become."""

from __future__ import annotations

import pytest

from tracesim.errors import ScenarioError
from tracesim.megatron import import_megatron
from tracesim.scenario import load_scenario

GPT = {
    "num-layers": 12,
    "hidden-size": 512,
    "num-attention-heads": 8,
    "seq-length": 1024,
    "max-position-embeddings": 1024,
    "micro-batch-size": 4,
    "global-batch-size": 32,
    "bf16": True,
    "use-mcore-models": True,
}
EXPERTS = {"num-experts": 8, "sequence-parallel": True, "tensor-model-parallel-size": 2}
LATENT = {"multi-latent-attention": True, "kv-lora-rank": 512, "q-lora-rank": 1536, "qk-layernorm": True}


def scenario_of(changes=(), **options):
    """The scenario of a small GPT with some arguments changed; None takes one away."""
    arguments = {key: value for key, value in {**GPT, **dict(changes)}.items() if value is not None}
    return load_scenario(import_megatron(arguments, "h100-sxm", **options).mapping)


def problems_of(changes, **options):
    with pytest.raises(ScenarioError) as caught:
        scenario_of(changes, **options)
    return str(caught.value)
