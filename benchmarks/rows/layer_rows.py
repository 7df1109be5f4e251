"""Rows that measure one transformer layer (Korthikanti et al. 2022, arXiv:2205.05198, Table 4).

The layer is simulated as the difference between a model of many layers and one of half as many on the same rank, so
that embedding, loss and optimizer cancel out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from . import training_rows
from .row import MeasuredRow, RowSkippedError, mapping_at, number_at

_LAYERS = 8


def is_layer_row(row: Mapping[str, Any]) -> bool:
    """Whether a row gives the time of a layer."""
    metrics = row.get("metrics")
    return isinstance(metrics, Mapping) and any(str(key).startswith("layer_") for key in metrics)


def express(row: Mapping[str, Any], label: str, source: str) -> MeasuredRow:
    """Two scenarios whose difference is the layers measured; raise RowSkippedError if the row says too little."""
    metrics = mapping_at(row, "metrics")
    total = number_at(metrics, "layer_total_ms")
    forward, backward = number_at(metrics, "layer_fwd_ms"), number_at(metrics, "layer_bwd_ms")
    if total is None:
        if forward is None or backward is None:
            raise RowSkippedError("a layer's forward and backward time are both needed")
        total = forward + backward
    one_rank = {**row, "parallel": {"pp": 1, "dp": 1, **mapping_at(row, "parallel")}, "num_microbatches": 1}
    scenario = training_rows.scenario_for(one_rank, label, source)
    if scenario.parallel.pp != 1:
        raise RowSkippedError("the time of a layer is expressed without a pipeline only")
    larger = dataclasses.replace(scenario, model=dataclasses.replace(scenario.model, layers=2 * _LAYERS))
    smaller = dataclasses.replace(scenario, model=dataclasses.replace(scenario.model, layers=_LAYERS))
    return MeasuredRow(label, larger, time_ms=total, smaller=smaller, layers_between=_LAYERS)
