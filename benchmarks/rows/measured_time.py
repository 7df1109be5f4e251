"""Iteration time of a row from whichever figure it gives: time, throughput, TFLOP/s or MFU.

TFLOP/s and MFU carry the FLOPs convention of their source; they are used only where the source's convention is
known (``SourceSettings.tflops``) and nothing more direct is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from op_graphs.model_flops import attention_flops_per_token, layer_matrix_elements, model_flops_per_token
from tracesim.scenario import Scenario

from .row import number_at
from .source_settings import SourceSettings, TflopsConvention


def iteration_ms(metrics: Mapping[str, Any], scenario: Scenario, settings: SourceSettings) -> float | None:
    """Measured time of an iteration in ms, None if no figure of the row gives it."""
    gpus, tokens = scenario.parallel.world_size, scenario.tokens
    if seconds := number_at(metrics, "iter_time_s"):
        return 1e3 * seconds
    if rate := number_at(metrics, "tokens_per_s_per_gpu"):
        return 1e3 * tokens / (rate * gpus)
    if rate := number_at(metrics, "tokens_per_s"):
        return 1e3 * tokens / rate
    if rate := number_at(metrics, "samples_per_gpu_s"):
        return 1e3 * scenario.global_batch_size / (rate * gpus)
    if rate := number_at(metrics, "samples_per_s"):
        return 1e3 * scenario.global_batch_size / rate
    if settings.tflops is None:
        return None
    tflops = number_at(metrics, "tflops_per_gpu") or number_at(metrics, "model_tflops_per_gpu")
    if tflops is None:
        return None
    return 1e3 * tokens * flops_per_token(scenario, settings.tflops) / (tflops * 1e12 * gpus)


def flops_per_token(scenario: Scenario, convention: TflopsConvention) -> float:
    """FLOPs of a token as a source counts them."""
    model, seq_len = scenario.model, scenario.training.seq_len
    flops = model_flops_per_token(
        model, seq_len, convention.causal, convention.formula, tp=scenario.parallel.tp
    )
    if convention.counts_recompute:
        # Equation 3 of arXiv:2104.04473: four passes over the layers instead of three, the head stays at three.
        flops += 2.0 * model.layers * layer_matrix_elements(model)
        flops += attention_flops_per_token(model, seq_len, convention.causal)
    return flops
