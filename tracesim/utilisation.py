"""Model FLOPs utilisation by every definition in use, side by side; they differ by up to a factor of two."""

from __future__ import annotations

from typing import Any

from op_graphs.adapters import count_adapter_parameters
from op_graphs.model_flops import (
    FlopsConvention,
    model_flops_per_token,
    mtp_flops_per_token,
    vision_flops_per_image,
)
from op_graphs.parameters import count_active_parameters

from .scenario import Scenario

_CONVENTIONS: tuple[tuple[str, FlopsConvention, bool], ...] = (
    ("matrix products, causal attention", "operators", True),
    ("matrix products, full attention", "operators", False),
    ("Megatron-LM, causal attention", "megatron", True),
    ("Megatron-LM, full attention", "megatron", False),
    ("PaLM: 6 N + 12 L q S", "palm", False),
)


def utilisation(
    scenario: Scenario, seconds: float, length: int, executed_flops: float
) -> list[dict[str, Any]]:
    """One entry a definition (``docs/models.md``, Model FLOPs).

    Args:
        scenario: the run.
        seconds: of an iteration.
        length: tokens of a sequence as attention sees it.
        executed_flops: FLOPs that a GPU executes in an iteration, on average.
    """
    tokens = scenario.tokens / scenario.parallel.world_size
    peak = scenario.hardware.peak_tflops[scenario.training.dtype.name.lower()] * 1e12
    rows = [
        (name, tokens * flops_per_token(scenario, length, causal=causal, convention=convention))
        for name, convention, causal in _CONVENTIONS
    ]
    model = scenario.model
    active, lora = count_active_parameters(model, scenario.training.seq_len), scenario.training.lora
    if lora is None:
        rows.append(("6 N, no attention", 6.0 * tokens * active))
    else:
        passed = 4.0 * active + 6.0 * count_adapter_parameters(model, lora)
        rows.append(("4 N + 6 N of adapters, no attention", tokens * passed))
    rows.append(("HFU: what is executed", executed_flops))
    return [
        {
            "definition": name,
            "tflops_per_gpu": flops / seconds / 1e12,
            "of_dense_peak": flops / seconds / peak,
            "of_sparse_peak": flops / seconds / (2 * peak),
        }
        for name, flops in rows
    ]


def flops_per_token(
    scenario: Scenario, length: int, *, causal: bool, convention: FlopsConvention = "operators"
) -> float:
    """Model FLOPs of a token with its share of prediction heads and images."""
    model, training = scenario.model, scenario.training
    options: dict[str, Any] = {"causal": causal, "convention": convention, "tp": scenario.parallel.tp}
    images = vision_flops_per_image(model) * training.images_per_sample / training.seq_len
    tokens = model_flops_per_token(model, length, lora=training.lora, **options)
    return tokens + mtp_flops_per_token(model, length, **options) + images
