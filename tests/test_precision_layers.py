"""Layers at the ends of a model that a low-precision recipe leaves in bf16.

Oracles: with all layers left out the graph is that of bf16; with some, each layer's rows are those of bf16 or of the
recipe, whichever the layer is in.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from op_graphs.graph import OpGraph
from op_graphs.vocabulary import MemoryCategory
from tests.dense_scenarios import dense_mapping
from tests.megatron_lists import EXPERTS, problems_of, scenario_of
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.scenario import load_scenario, scenario_to_mapping
from tracesim.simulation import simulate

LAYERS = 4
RECIPES = [
    ("h100-sxm", "fp8-tensorwise"),
    ("h100-sxm", "fp8-blockwise"),
    ("h100-sxm", "fp8-rowwise"),
    ("b200-sxm", "mxfp8"),
    ("b200-sxm", "nvfp4"),
]
PLANS: list[dict[str, Any]] = [
    {},
    {"parallel__tp": 2, "parallel__sp": True},
    {"parallel__pp": 2},
    {"parallel__dp": 2, "parallel__zero": 3},
    {"parallel__dp": 2, "parallel__zero": 1, "overlap__grad_reduce": True},
    {"training__recompute": "full"},
    {"training__recompute": {"modules": ["layernorm", "mlp"]}},
]


def lowered(hardware: str, dtype: str, **changes: Any) -> OpGraph:
    fields = {"model__layers": LAYERS, "training__dtype": dtype, **changes}
    return lower_scenario(load_scenario(dense_mapping(hardware=hardware, **fields)))


def rows(graph: OpGraph, layer: int | None = None) -> list[tuple[object, ...]]:
    """What each operation is and does, of one layer or of all, in order."""
    operations = graph.operations
    chosen = range(len(operations)) if layer is None else np.flatnonzero(operations.layer == layer)
    columns = (
        operations.kind,
        operations.phase,
        operations.flops,
        operations.bytes_read,
        operations.bytes_written,
    )
    return [
        (graph.strings[operations.name[at]], *(column[at] for column in columns), operations.dtype[at])
        for at in chosen
    ]


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize(("hardware", "dtype"), RECIPES)
def test_a_recipe_that_leaves_all_layers_out_is_bf16(hardware, dtype, plan):
    left_out = lowered(hardware, dtype, training__bf16_first_layers=3, training__bf16_last_layers=1, **plan)
    plain = lowered(hardware, "bf16", **plan)
    assert rows(left_out) == rows(plain)
    for column in ("size", "category", "allocate", "release"):
        assert np.array_equal(getattr(left_out.buffers, column), getattr(plain.buffers, column))


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize(("hardware", "dtype"), RECIPES)
def test_each_layer_is_of_one_precision(hardware, dtype, plan):
    mixed = lowered(hardware, dtype, training__bf16_first_layers=1, training__bf16_last_layers=2, **plan)
    plain, quantized = lowered(hardware, "bf16", **plan), lowered(hardware, dtype, **plan)
    for layer, whole in enumerate((plain, quantized, plain, plain)):
        assert rows(mixed, layer) == rows(whole, layer)


@pytest.mark.parametrize(("hardware", "dtype"), RECIPES[:2] + RECIPES[3:4])
@pytest.mark.parametrize("gathered", [False, True])
def test_quantised_weights_exist_of_quantised_layers_only(hardware, dtype, gathered):
    changes = {"parallel__dp": 2, "parallel__zero": 1, "training__fp8_param_gather": gathered}

    def bytes_of(category: MemoryCategory, **more: Any) -> float:
        buffers = lowered(hardware, dtype, **changes, **more).buffers
        return float(buffers.size[buffers.category == category].sum())

    for category in (MemoryCategory.WEIGHTS, MemoryCategory.GRADIENTS, MemoryCategory.OPTIMIZER_STATES):
        none, one, all_of_them = (
            bytes_of(category, training__bf16_first_layers=first) for first in (0, 1, LAYERS)
        )
        assert none + (all_of_them - none) / LAYERS == pytest.approx(one, rel=1e-6)
    if not gathered:
        assert bytes_of(MemoryCategory.WEIGHTS) > bytes_of(
            MemoryCategory.WEIGHTS, training__bf16_first_layers=4
        )


def test_a_step_with_layers_left_out_lies_between_both_precisions():
    times = [
        simulate(
            load_scenario(
                dense_mapping(
                    model__layers=LAYERS,
                    model__hidden_size=8192,
                    model__ffn_size=16384,
                    training__seq_len=8192,
                    training__dtype="fp8-tensorwise",
                    training__bf16_first_layers=first,
                )
            )
        ).report["iteration_time_ms"]
        for first in range(LAYERS + 1)
    ]
    assert times == sorted(times)
    assert times[0] < times[-1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training__dtype": "bf16"}, "training.bf16_first_layers: 1 (from scenario) leaves layers out of a recipe"),
        ({"training__dtype": "fp8-tensorwise", "training__fp8_scaling": "delayed"}, "set fp8_scaling: current"),
        ({"training__dtype": "fp8-tensorwise", "training__bf16_last_layers": 4},
         "with both ends 5 layers, the model has 4; for none quantised set dtype: bf16"),
        ({"training__dtype": "fp8-tensorwise", "training__bf16_last_layers": -1}, "must be a whole number from 0"),
        ({"training__dtype": "fp8-tensorwise", "training__bf16_last_layers": False}, "must be a whole number from 0"),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_left_out(changes, message):
    mapping = dense_mapping(model__layers=LAYERS, **{"training__bf16_first_layers": 1, **changes})
    with pytest.raises(ScenarioError) as caught:
        load_scenario(mapping)
    assert message in str(caught.value)


def test_a_scenario_is_written_as_it_was_read():
    mapping = dense_mapping(training__dtype="fp8-tensorwise", training__bf16_first_layers=1)
    scenario = load_scenario(mapping)
    assert load_scenario(scenario_to_mapping(scenario)) == scenario


# -- argument lists of Megatron-LM ---------------------------------------------------------------------------------

FP8 = {"fp8-format": "hybrid", "fp8-recipe": "tensorwise", "first-last-layers-bf16": True}


@pytest.mark.parametrize(
    ("changes", "ends"),
    [
        (FP8, (1, 1)),
        ({**FP8, "num-layers-at-start-in-bf16": 0, "num-layers-at-end-in-bf16": 4}, (0, 4)),
        ({**FP8, "first-last-layers-bf16": None, "num-layers-at-start-in-bf16": 3}, (0, 0)),
        ({"first-last-layers-bf16": True}, (0, 0)),
        ({**EXPERTS, **FP8, "mtp-num-layers": 1, "position-embedding-type": "rope"}, (1, 1)),
    ],
)
def test_layers_left_out_by_an_argument_list(changes, ends):
    training = scenario_of(changes).training
    assert (training.bf16_first_layers, training.bf16_last_layers) == ends


def test_megatron_too_has_none_beside_delayed_scales():
    assert "does not go with scales from earlier steps" in problems_of({**FP8, "fp8-recipe": "delayed"})
