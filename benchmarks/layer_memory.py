"""Memory of the layers of a stage alone, which the closed forms of papers count."""

from __future__ import annotations

import numpy as np

from op_graphs.graph import OpGraph
from op_graphs.parameters import elements_of, parameters_on_stage
from op_graphs.stage_layout import layers_per_stage
from op_graphs.vocabulary import MemoryCategory, Phase
from tracesim.engine import Execution
from tracesim.scenario import Scenario

_GIB = 2**30


def layer_memory(scenario: Scenario, graph: OpGraph, execution: Execution, rank: int) -> dict[str, float]:
    """What the layers of a stage hold, in GiB: at most, of what a forward pass keeps for its backward; and of state.

    These are the terms of papers' closed forms, which leave out embedding and output head, what is recomputed, and
    what lives within one pass. State is weights, gradients and optimizer states, in proportion to the parameters.
    """
    operations, buffers = graph.operations, graph.buffers
    kept = (buffers.rank == rank) & (buffers.allocate >= 0) & (buffers.release >= 0)
    kept &= buffers.category == MemoryCategory.ACTIVATIONS
    kept &= (operations.layer[buffers.release] >= 0) & (operations.phase[buffers.allocate] == Phase.FORWARD)
    kept &= operations.phase[buffers.release] != Phase.FORWARD
    own = buffers.take(np.flatnonzero(kept))
    time = np.concatenate([execution.start[own.allocate], execution.end[own.release]])
    change = np.concatenate([own.size, -own.size])[np.lexsort((np.arange(len(time)) < len(own), time))]
    parallel, stages = scenario.parallel, layers_per_stage(scenario.model.layers, scenario.parallel)
    tensors = [
        tensor
        for stage in range(rank, len(stages), parallel.pp)
        for tensor in parameters_on_stage(
            scenario.model,
            range(sum(stages[:stage]), sum(stages[: stage + 1])),
            parallel.tp,
            parallel.sp,
            has_embedding=stage == 0,
            has_head=stage == len(stages) - 1,
            seq_len=scenario.training.seq_len,
            ep=parallel.ep,
            etp=parallel.etp or 1,
        )
    ]
    of_layers = elements_of(tensor for tensor in tensors if tensor.layer >= 0) / elements_of(tensors)
    state = (MemoryCategory.WEIGHTS, MemoryCategory.GRADIENTS, MemoryCategory.OPTIMIZER_STATES)
    lasting = (buffers.rank == rank) & (buffers.allocate < 0) & np.isin(buffers.category, state)
    return {
        "layer_activations_gib": float(change.cumsum().max(initial=0)) / _GIB,
        "layer_state_gib": of_layers * float(buffers.size[lasting].sum()) / _GIB,
    }
