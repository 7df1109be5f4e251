"""Replay of measured runs: rebuild the graph of a trace, run it, change it."""

from __future__ import annotations

from tracesim.replay.across import Prediction, predict_across_steps
from tracesim.replay.comparison import side_by_side
from tracesim.replay.graph import EdgeKind, Edges, Rebuilt, RowRole, Rows
from tracesim.replay.limits import Unexplained, describe_limits, unexplained
from tracesim.replay.rebuild import Rules, rebuild
from tracesim.replay.report import describe_replay, render_replay
from tracesim.replay.run import Replayed, StepTime, limited_by, replay, step_times, stream_deviations
from tracesim.replay.steps import cut_step
from tracesim.replay.what_if.outcome import Outcome, ask
from tracesim.replay.what_if.registry import WHAT_IFS, parse_what_ifs

__all__ = [
    "WHAT_IFS",
    "EdgeKind",
    "Edges",
    "Outcome",
    "Prediction",
    "Rebuilt",
    "Replayed",
    "RowRole",
    "Rows",
    "Rules",
    "StepTime",
    "Unexplained",
    "ask",
    "cut_step",
    "describe_limits",
    "describe_replay",
    "limited_by",
    "parse_what_ifs",
    "predict_across_steps",
    "rebuild",
    "render_replay",
    "replay",
    "side_by_side",
    "step_times",
    "stream_deviations",
    "unexplained",
]
