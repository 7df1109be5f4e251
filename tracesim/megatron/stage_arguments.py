"""Which layers each pipeline stage holds by an argument list.

Source: Megatron-LM ``training/arguments.py`` and ``transformer/transformer_block.py``, ``get_num_layers_to_build``.
"""

from __future__ import annotations

from typing import Any

from op_graphs.stage_layout import parse_layout

from .arguments import Arguments

_PARTITIONS = {"type:transformer|embedding": True, "type:transformer": False, "uniform": False}
"""DeepSpeed's ``--pp-partition-method``, and whether embedding and head count as layers."""


def add_stages(arguments: Arguments, plan: dict[str, Any]) -> None:
    """Complete the plan with its model chunks, uneven stages and layout."""
    for end in ("first", "last"):
        name = arguments.first_given(
            f"decoder-{end}-pipeline-num-layers", f"num-layers-in-{end}-pipeline-stage"
        )
        plan[f"{end}_stage_layers"] = arguments.count(name)
    # Test files escape what a shell would read.
    plan["layout"] = arguments.text("pipeline-model-parallel-layout").replace("\\", "") or None
    counted = _counted_ends(arguments)
    plan["vpp"] = _chunks(arguments, plan, sum(counted))
    if any(counted) and not plan["layout"]:
        _count_ends_as_layers(arguments, plan, *counted)


def _counted_ends(arguments: Arguments) -> tuple[bool, bool]:
    """Whether embedding and loss count as a layer each."""
    embedding = arguments.flag("account-for-embedding-in-pipeline-split")
    loss = arguments.flag("account-for-loss-in-pipeline-split")
    both = arguments.choice("pp-partition-method", "uniform", {name: name for name in _PARTITIONS})
    return embedding or _PARTITIONS[both], loss or _PARTITIONS[both]


def _chunks(arguments: Arguments, plan: dict[str, Any], counted: int) -> int:
    """Model chunks of a rank; ``counted`` ends of the model count as layers."""
    layers, pp = arguments.count("num-layers", 1) or 1, int(plan["pp"])
    stages = arguments.count(
        arguments.first_given("num-virtual-stages-per-pipeline-rank", "virtual-pipeline-model-parallel-size")
    )
    each = arguments.count("num-layers-per-virtual-pipeline-stage")
    if plan["layout"]:
        return _layout_chunks(arguments, plan)
    if stages:
        return stages
    if not each or pp == 1:
        return 1
    uneven = [plan[name] for name in ("first_stage_layers", "last_stage_layers") if plan[name]]
    held: int = (layers - sum(uneven)) // max(1, pp - len(uneven)) if uneven else (layers + counted) // pp
    if held % each:
        arguments.refuse(
            "num-layers-per-virtual-pipeline-stage", f"does not divide the {held} layers of a pipeline rank"
        )
    return max(1, held // each)


def _layout_chunks(arguments: Arguments, plan: dict[str, Any]) -> int:
    try:
        stages = len(parse_layout(plan["layout"]))
    except ValueError as error:
        arguments.refuse("pipeline-model-parallel-layout", str(error))
        return 1
    return max(1, stages // int(plan["pp"]))


def _count_ends_as_layers(arguments: Arguments, plan: dict[str, Any], embedding: bool, loss: bool) -> None:
    """Give the plan the layout in which embedding and loss each take the place of a layer."""
    name = "account-for-embedding-in-pipeline-split" if embedding else "account-for-loss-in-pipeline-split"
    if plan["first_stage_layers"] or plan["last_stage_layers"]:
        arguments.refuse(name, "does not go with --decoder-first-pipeline-num-layers and its like")
        return
    layers, stages = arguments.count("num-layers", 1) or 1, int(plan["pp"] * plan["vpp"])
    counted = layers + embedding + loss
    if stages == 1:
        return
    if counted % stages:
        ends = " and ".join(["an embedding"] * embedding + ["a loss"] * loss)
        arguments.refuse(name, f"{layers} layers with {ends} do not divide over {stages} stages")
        return
    held = [counted // stages] * stages
    held[0] -= embedding
    held[-1] -= loss
    parts = [f"t*{count}" if count else "" for count in held]
    heads = arguments.count("mtp-num-layers") or 0
    plan["layout"] = "|".join(["E" + parts[0], *parts[1:-1], parts[-1] + "m" * heads + "L"])
