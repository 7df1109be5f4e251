"""Which pipeline stage holds how many layers.

The rule is Megatron-LM's (``num_layers_in_first_pipeline_stage`` and ``num_layers_in_last_pipeline_stage``, set by
``--decoder-first-pipeline-num-layers`` and ``--decoder-last-pipeline-num-layers``): the first and the last pipeline
*rank* may hold a number of layers of their own, the others share the rest equally, and a rank spreads its layers
equally over its ``vpp`` model chunks. Layout strings are not covered.
"""

from __future__ import annotations

from .plan import ParallelPlan


def layers_per_stage(layers: int, parallel: ParallelPlan) -> tuple[int, ...]:
    """Layers of each global stage, in order ``0 .. pp * vpp - 1``.

    Stage ``s`` runs on pipeline rank ``s % pp`` as its model chunk ``s // pp``; layers are numbered in order of the
    stages. Every entry is at least 1 and the sum is ``layers``.

    Raise ValueError if the layers cannot be split that way.
    """
    per_rank = _layers_per_rank(layers, parallel)
    for rank, held in enumerate(per_rank):
        if held % parallel.vpp:
            raise ValueError(
                f"{held} layers on pipeline rank {rank} do not divide over its {parallel.vpp} model chunks"
            )
    return tuple(per_rank[stage % parallel.pp] // parallel.vpp for stage in range(parallel.stages))


def _layers_per_rank(layers: int, parallel: ParallelPlan) -> list[int]:
    first, last = parallel.first_stage_layers, parallel.last_stage_layers
    if (first is not None or last is not None) and parallel.pp == 1:
        raise ValueError("a first or last stage of its own size needs pp > 1, pp is 1")
    fixed = (first or 0) + (last or 0)
    equal_ranks = parallel.pp - (first is not None) - (last is not None)
    remaining = layers - fixed
    if remaining < 0:
        raise ValueError(f"the first and last stages take {fixed} layers, the model has {layers}")
    if equal_ranks == 0 and remaining:
        raise ValueError(
            f"the two stages take {fixed} layers, {remaining} of the model's {layers} are left over"
        )
    if equal_ranks and remaining < equal_ranks * parallel.vpp:
        raise ValueError(
            f"{remaining} layers are fewer than the {equal_ranks * parallel.vpp} stages they are shared by "
            f"(pp = {parallel.pp}, vpp = {parallel.vpp})"
        )
    if equal_ranks and remaining % (equal_ranks * parallel.vpp):
        raise ValueError(
            f"{remaining} layers do not divide over {equal_ranks} pipeline ranks of {parallel.vpp} model chunks"
        )
    per_rank = [remaining // equal_ranks if equal_ranks else 0] * parallel.pp
    if first is not None:
        per_rank[0] = first
    if last is not None:
        per_rank[-1] = last
    return per_rank
