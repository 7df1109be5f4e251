"""How far the ranks of a stage lie apart where they are unevenly loaded (``training.routing``, ``sequence_lengths``).

The most loaded rank of each stage is simulated; the least loaded one and one of mean load are lowered and costed for
this. Times are those of their own kernels, which do not depend on waiting.
"""

from __future__ import annotations

from collections.abc import Sequence

from op_graphs.graph import OpGraph
from op_graphs.imbalance import Level, stage_loads

from .cost import CostModel
from .engine import Execution
from .host import execute_with_host, host_times
from .lowering import lower_scenario
from .memory.curves import MemoryCurve, memory_curve
from .report import RankSpread, breakdown
from .scenario import Scenario

_KEYS: dict[Level, str] = {"least": "min", "mean": "mean", "most": "max"}


def rank_spread(
    scenario: Scenario, graph: OpGraph, execution: Execution, memory: Sequence[MemoryCurve]
) -> RankSpread | None:
    """The spread around a simulated scenario; None where all ranks of a stage are alike."""
    loads = stage_loads(scenario.model, scenario.parallel, scenario.training)
    if loads.balanced:
        return None
    stages = len(graph.ranks)
    costs = CostModel(scenario.hardware, reserved_sms=scenario.overlap.reserved_sms)
    compute: list[dict[str, int]] = [{} for _ in range(stages)]
    peak: list[dict[str, int]] = [{} for _ in range(stages)]
    flops = 0.0
    for level, key in _KEYS.items():
        other, run, curves = graph, execution, memory
        if level != "most":
            other = lower_scenario(scenario, level)
            run = execute_with_host(
                other, costs.durations_ns(other), gap_ns=costs.gap_ns, host=host_times(scenario)
            )
            curves = [memory_curve(other, run, stage) for stage in range(stages)]
        for stage in range(stages):
            compute[stage][key] = breakdown(other, run, stage)[0]
            peak[stage][key] = curves[stage].peak
        if level == "mean":
            flops = float(other.operations.flops.sum()) / stages
    documents = loads.mean.documents
    attended = round(documents.effective_length) if documents else scenario.training.seq_len
    return RankSpread(tuple(compute), tuple(peak), flops, attended)
