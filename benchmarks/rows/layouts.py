"""Pipeline layouts of rows whose layers do not divide evenly over the stages, as ``parallel.layout`` takes them."""

from __future__ import annotations

from collections.abc import Sequence


def layout_text(layers_by_stage: Sequence[int], prediction_heads: int = 0) -> str:
    """The layout of stages that hold so many layers, embedding first and loss last."""
    stages = ["t" * count for count in layers_by_stage]
    stages[0] = "E" + stages[0]
    stages[-1] += "m" * prediction_heads + "L"
    return "|".join(stages)


def ends_count_as_layers(layers: int, stages: int) -> list[int] | None:
    """Layers of each stage where embedding and loss take the place of a layer each; None if they do not divide."""
    each, left = divmod(layers + 2, stages)
    if left or each < 1 or (stages == 1):
        return None
    return [each - 1, *([each] * (stages - 2)), each - 1]


def evenly(layers: int, stages: int) -> list[int]:
    """Layers spread over the stages with at most one more on the first ones (DeepSpeed ``partition_uniform``)."""
    each, left = divmod(layers, stages)
    return [each + (stage < left) for stage in range(stages)]
