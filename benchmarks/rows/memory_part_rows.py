"""Rows that measure a part of the memory: activations, or parameters with optimizer state (calculon's constants).

The bars are Figures 1 and 7 of Korthikanti et al. 2022 (arXiv:2205.05198), digitised by calculon's authors: closed
forms of the paper for the first pipeline stage, so a test of formulas more than of memory. They count layers alone
(section 4.3 neglects embedding, last norm and output): of activations what a forward pass keeps, of state 18 bytes a
parameter, so gradients in fp32. The models of 175B and 530B run the interleaved schedule with three chunks a device
(section 6). Figure 7 is relative to a run with tensor parallelism alone: no sequence parallelism, nothing recomputed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import training_rows
from .row import MeasuredRow, RowSkippedError, mapping_at, number_at, text_at

_FIGURE_7: dict[str, dict[str, Any]] = {
    "none": {"sp": False, "recompute": "none"},
    "seq": {"sp": True, "recompute": "none"},
    "sel": {"sp": False, "recompute": "selective"},
    "seqsel": {"sp": True, "recompute": "selective"},
    "full": {"sp": False, "recompute": "full"},
}
"""What the bars of Figure 7 are called, and what they mean."""
_INTERLEAVED, _CHUNKS = ("GPT-3 175B", "MT-NLG 530B"), 3
"""Models whose layers the paper cuts into so many chunks a device."""
_RELATIVE = "activation_mem_pct_of_tp_baseline"


def is_memory_part_row(row: Mapping[str, Any]) -> bool:
    """Whether a row gives a part of the memory."""
    metrics = row.get("metrics")
    return isinstance(metrics, Mapping) and ("activation_mem_gib" in metrics or _RELATIVE in metrics)


def express(row: Mapping[str, Any], label: str, source: str) -> MeasuredRow:
    """The scenario of a row, and for a relative figure that of its baseline."""
    metrics, parallel = mapping_at(row, "metrics"), mapping_at(row, "parallel")
    relative = number_at(metrics, _RELATIVE)
    if relative is None:
        scenario = training_rows.scenario_for(_interleaved(row, parallel), label, source)
        return MeasuredRow(
            label,
            scenario,
            activations=number_at(metrics, "activation_mem_gib"),
            state_gib=number_at(metrics, "param_optimizer_mem_gib"),
        )
    named = text_at(row, "recompute")
    if named not in _FIGURE_7:
        raise RowSkippedError(f"recompute {named!r} is not a bar of the figure")

    def bar(name: str) -> Mapping[str, Any]:
        meant = _FIGURE_7[name]
        pipeline = parallel.get("pp", 1)
        plan = {**parallel, "sp": meant["sp"], "dp": 1}
        # As many microbatches as fill the pipeline; the activations of the first stage are full then.
        return {**row, "parallel": plan, "recompute": meant["recompute"], "num_microbatches": pipeline}

    return MeasuredRow(
        label,
        training_rows.scenario_for(bar(named), label, source),
        activations=relative,
        baseline=training_rows.scenario_for(bar("none"), label, source),
    )


def _interleaved(row: Mapping[str, Any], parallel: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row of Figure 1 with the paper's schedule, and as many microbatches as fill the first stage."""
    pipeline = parallel.get("pp", 1)
    if text_at(mapping_at(row, "model"), "name") not in _INTERLEAVED or not isinstance(pipeline, int):
        return row
    plan = {**parallel, "vpp": _CHUNKS, "dp": 1}
    filling = {key: value for key, value in row.items() if key != "gbs"}
    return {**filling, "parallel": plan, "num_microbatches": 2 * pipeline}
