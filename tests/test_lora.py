"""Low-rank adapters beside frozen weights: what is trained, what runs, what is kept and moved, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from op_graphs.adapters import TARGETS, count_adapter_parameters, layer_adapters
from op_graphs.graph import OpGraph
from op_graphs.model_flops import model_flops_per_token
from op_graphs.plan import LowRankAdapters
from op_graphs.presets import load_model
from op_graphs.vocabulary import Communication, MemoryCategory, Phase, Stream
from tests.dense_scenarios import dense_mapping, dense_scenarios
from tests.test_lowering import assert_nothing_leaks
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.scenario import Scenario, load_scenario, scenario_to_mapping
from tracesim.simulation import Simulation, simulate

RANK = 8
MODULES = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
PER_LAYER = RANK * ((256 + 512) + (256 + 256) + (256 + 1024) + (512 + 256))
"""Adapter parameters of a layer of the small model: rank * (inputs + outputs) of its four linears."""


def scenario(lora: dict[str, Any] | None = None, **changes: Any) -> Scenario:
    return load_scenario(dense_mapping(training__lora=lora or {"rank": RANK}, **changes))


def run(lora: dict[str, Any] | None = None, **changes: Any) -> Simulation:
    return simulate(scenario(lora, **changes))


def names(graph: OpGraph, rows: Any) -> set[str]:
    return {graph.strings[name] for name in graph.operations.name[rows]}


def held(simulation: Simulation, category: MemoryCategory) -> int:
    """Bytes of a category that are there before the step begins."""
    return int(simulation.memory[0].by_category[category][0])


def problems(**changes: Any) -> str:
    with pytest.raises(ScenarioError) as caught:
        load_scenario(dense_mapping(**changes))
    return str(caught.value)


# -- what is trained ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "rank", "targets", "published"),
    [
        # What print_trainable_parameters of Hugging Face PEFT says for these.
        ("llama3-8b", 16, ["q_proj", "v_proj"], 6_815_744),
        ("llama2-7b", 8, ["q_proj", "v_proj"], 4_194_304),
        (
            "llama3-8b",
            16,
            ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
            41_943_040,
        ),
        # One adapter for the fused projections, as Megatron Bridge has them: 16 * 32 * (10240 + 8192 + 32768 + 18432).
        ("llama3-8b", 16, MODULES, 35_651_584),
    ],
)
def test_adapters_have_the_parameters_that_are_published(
    model: str, rank: int, targets: list[str], published: int
) -> None:
    lora = LowRankAdapters(rank, targets=tuple(targets))
    assert count_adapter_parameters(load_model(model), lora) == published


def test_the_report_tells_trained_parameters_from_all() -> None:
    figures = run().report["model"]
    assert figures["trained_parameters"] == 4 * PER_LAYER
    plain = simulate(load_scenario(dense_mapping())).report["model"]
    assert plain["trained_parameters"] == plain["parameters"] == figures["parameters"]


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_gradients_and_states_are_those_of_the_adapters(zero: int) -> None:
    simulation = run(parallel={"dp": 4, "zero": zero})
    trained, parameters = 4 * PER_LAYER, simulation.report["model"]["parameters"]
    assert held(simulation, MemoryCategory.WEIGHTS) == 2 * (parameters + trained)
    assert held(simulation, MemoryCategory.GRADIENTS) == 4 * trained / (4 if zero == 2 else 1)
    assert held(simulation, MemoryCategory.OPTIMIZER_STATES) == 12 * trained / (4 if zero else 1)


def test_sharded_frozen_weights_have_no_fp32_master() -> None:
    simulation = run(parallel={"dp": 4, "zero": 3})
    trained, parameters = 4 * PER_LAYER, simulation.report["model"]["parameters"]
    assert held(simulation, MemoryCategory.WEIGHTS) == (2 * parameters + 4 * trained) / 4
    assert held(simulation, MemoryCategory.OPTIMIZER_STATES) == 8 * trained / 4


# -- what runs ---------------------------------------------------------------------------------------------------


def test_only_adapters_have_weight_gradients() -> None:
    step = scenario()
    graph = lower_scenario(step)
    operations = graph.operations
    rows = operations.phase == Phase.BACKWARD_WEIGHT
    assert {name.removesuffix("_wgrad") for name in names(graph, rows)} == {
        f"{linear}_lora_{side}" for linear in ("qkv", "proj", "fc1", "fc2") for side in ("in", "out")
    }
    assert operations.flops[rows].sum() == 2 * step.tokens * 4 * PER_LAYER


def test_every_linear_still_has_an_input_gradient() -> None:
    graph = lower_scenario(scenario())
    rows = graph.operations.phase == Phase.BACKWARD_INPUT
    assert {f"{name}_dgrad" for name in ("qkv", "proj", "fc1", "fc2", "head")} <= names(graph, rows)
    assert not any("embedding" in name for name in names(graph, rows))


def test_the_step_has_four_sixths_of_the_work_of_the_model_and_that_of_its_adapters() -> None:
    step, plain = scenario(), load_scenario(dense_mapping())
    flops = float(lower_scenario(step).operations.flops.sum())
    all_trained = float(lower_scenario(plain).operations.flops.sum())
    model, length = plain.model, plain.training.seq_len
    matrices = model_flops_per_token(model, length, causal=False)
    attention = 12 * model.layers * model.query_size * length
    frozen = plain.tokens * (matrices - attention) / 3
    assert flops == pytest.approx(all_trained - frozen + 6 * plain.tokens * 4 * PER_LAYER)


def test_model_flops_are_those_of_megatron_bridge() -> None:
    # flop_utils.py, LoRA: 2/3 of L h^2 (12 + 12 kv/heads + 18 ffn/h + 6 V / (L h)) for a token, attention whole.
    model, lora = load_model("llama3-70b"), LowRankAdapters(16)
    matrices = 80 * 8192**2 * (12 + 12 * 8 / 64 + 18 * 28672 / 8192 + 6 * 128256 / (80 * 8192))
    attention = 12 * 80 * 8192 * 4096 / 2
    found = model_flops_per_token(model, 4096, convention="megatron", lora=lora)
    assert found == pytest.approx(matrices * 2 / 3 + attention)
    whole = model_flops_per_token(model, 4096, lora=lora)
    assert whole == pytest.approx(found + 6 * count_adapter_parameters(model, lora))


@pytest.mark.parametrize("target", ["linear_qkv", "linear_fc1"])
def test_beside_a_column_parallel_linear_the_low_rank_is_gathered(target: str) -> None:
    linear = target.removeprefix("linear_")
    step = scenario({"rank": RANK, "targets": [target]}, parallel={"tp": 2, "sp": True})
    graph = lower_scenario(step)
    tokens = step.training.micro_batch_size * step.training.seq_len
    # One gather of the input serves linear and adapter, and none is made again in backward.
    assert moved(graph, f"{linear}_all_gather") == 2 * tokens * 256
    assert moved(graph, f"{linear}_lora_all_gather") == 2 * tokens * RANK
    assert moved(graph, f"{linear}_lora_low_gradient_all_reduce") == 2 * tokens * RANK
    assert moved(graph, f"{linear}_gradient_reduce_scatter") == 2 * tokens * 256
    assert not any("input_all_gather" in name for name in names(graph, slice(None)))


@pytest.mark.parametrize("target", ["linear_proj", "linear_fc2"])
def test_beside_a_row_parallel_linear_outputs_are_gathered(target: str) -> None:
    linear = target.removeprefix("linear_")
    step = scenario({"rank": RANK, "targets": [target]}, parallel={"tp": 2, "sp": True})
    graph = lower_scenario(step)
    tokens = step.training.micro_batch_size * step.training.seq_len
    assert moved(graph, f"{linear}_lora_all_reduce") == 2 * tokens * RANK
    assert moved(graph, f"{linear}_lora_output_all_gather") == 2 * tokens * 256
    assert moved(graph, f"{linear}_lora_gradient_all_gather") == 2 * tokens * 256


def moved(graph: OpGraph, name: str) -> int:
    """Bytes of the one message of a collective, each time it runs."""
    rows = np.flatnonzero(graph.operations.name == graph.strings.index(name))
    (size,) = set(graph.operations.communication_bytes[rows].tolist())
    return int(size)


def test_only_gradients_of_adapters_are_reduced() -> None:
    graph = lower_scenario(scenario(parallel={"dp": 4, "zero": 1}))
    operations = graph.operations
    scattered = operations.communication == Communication.REDUCE_SCATTER
    assert operations.communication_bytes[scattered].sum() == 4 * 4 * PER_LAYER
    gathered = (operations.communication == Communication.ALL_GATHER) & (operations.stream == Stream.DP)
    assert operations.communication_bytes[gathered].sum() == 2 * 4 * PER_LAYER


def test_sharded_units_are_gathered_with_their_frozen_weights() -> None:
    step = scenario(parallel={"dp": 4, "zero": 3}, training__num_microbatches=1)
    graph = lower_scenario(step)
    operations = graph.operations
    scattered = operations.communication == Communication.REDUCE_SCATTER
    assert operations.communication_bytes[scattered].sum() == 4 * 4 * PER_LAYER
    parameters = simulate(step).report["model"]["parameters"]
    gathered = operations.communication == Communication.ALL_GATHER
    assert operations.communication_bytes[gathered].sum() == 2 * 2 * (parameters + 4 * PER_LAYER)


# -- what is kept ------------------------------------------------------------------------------------------------


def kept(lora: dict[str, Any], **changes: Any) -> float:
    """Bytes of activations that a microbatch leaves on the device, in hidden states ``[tokens, 256]`` of bf16."""
    many = run(lora, training__num_microbatches=2, schedule="gpipe", **changes)
    few = run(lora, training__num_microbatches=1, schedule="gpipe", **changes)
    peaks = [m.by_category[MemoryCategory.ACTIVATIONS].max() for m in (many.memory[0], few.memory[0])]
    return float(peaks[0] - peaks[1]) / (2 * 256 * 256)


def test_the_input_of_a_frozen_linear_is_kept_only_for_its_adapter() -> None:
    lows = 4 * RANK / 256
    every = kept({"rank": RANK, "targets": MODULES})
    # Outputs of both norms and the input of FC2, 512 wide; that of the projection is kept by attention anyway.
    assert every - kept({"rank": RANK, "targets": ["linear_proj"]}) == pytest.approx(
        4 * (1 + 1 + 2 + lows * 3 / 4)
    )
    assert every - kept({"rank": RANK, "targets": ["linear_fc1", "linear_fc2"]}) == pytest.approx(
        4 * (1 + lows / 2)
    )


def test_dropout_keeps_what_it_let_pass_and_a_mask() -> None:
    targets = ["linear_fc2"]
    plain = kept({"rank": RANK, "targets": targets})
    # The dropped-out input stays in the place of the input, and a byte an element of mask: 512 wide, four layers.
    assert kept({"rank": RANK, "targets": targets, "dropout": 0.1}) - plain == pytest.approx(4 * 1)
    after = kept({"rank": RANK, "targets": targets, "dropout": 0.1, "dropout_position": "post"})
    assert after - plain == pytest.approx(4 * 0.5)


def test_frozen_linears_are_quantised_along_rows_only() -> None:
    graph = lower_scenario(scenario(training__dtype="fp8-tensorwise"))
    casts = {name for name in names(graph, slice(None)) if "cast" in name}
    assert {name for name in casts if "transpose" in name} == {
        f"{linear}_weight_cast_transpose" for linear in ("qkv", "proj", "fc1", "fc2")
    }


def test_adapters_are_not_quantised() -> None:
    step = scenario(training__dtype="fp8-tensorwise")
    graph = lower_scenario(step)
    products = {graph.strings[graph.operations.name[row]] for row in np.flatnonzero(graph.operations.flops)}
    assert {name for name in products if "lora" in name}
    assert not any("lora" in name and "cast" in name for name in names(graph, slice(None)))
    assert held(simulate(step), MemoryCategory.GRADIENTS) == 4 * 4 * PER_LAYER


@settings(max_examples=25, deadline=None)
@given(
    dense_scenarios(training__attention="flash", model__attention_dropout=0.0),
    st.lists(st.sampled_from(MODULES), min_size=1, unique=True),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from(["pre", "post"]),
)
def test_every_plan_takes_adapters(plain: Scenario, targets: list[str], dropout: float, place: str) -> None:
    mapping = scenario_to_mapping(plain)
    mapping["training"]["lora"] = {
        "rank": 4,
        "targets": targets,
        "dropout": dropout,
        "dropout_position": place,
    }
    step = load_scenario(mapping)
    assert load_scenario(scenario_to_mapping(step)) == step
    graph = lower_scenario(step)
    assert_nothing_leaks(graph)
    weights = graph.operations.phase == Phase.BACKWARD_WEIGHT
    per_rank = graph.operations.flops[weights].sum() * step.parallel.tp * step.parallel.dp
    lora = step.training.lora
    assert lora is not None
    assert per_rank == 2 * step.tokens * count_adapter_parameters(step.model, lora)


# -- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (16, "must be a mapping such as {rank: 16}"),
        ({}, "training.lora.rank: null"),
        ({"rank": 0}, "must be a whole number from 1"),
        ({"rank": 8, "tragets": []}, "did you mean targets?"),
        ({"rank": 8, "targets": ["linear_fc3"]}, "did you mean linear_fc2?"),
        ({"rank": 8, "targets": []}, f"must be a list of one or more of {', '.join(TARGETS)}"),
        ({"rank": 8, "targets": ["linear_qkv", "q_proj"]}, "two adapters at self_attention.linear_qkv"),
        ({"rank": 8, "dropout": 1.0}, "must be a probability from 0 to below 1"),
        ({"rank": 8, "dropout_position": "front"}, "must be one of pre, post"),
        ({"rank": 8, "alpha": 0}, "must be a number above 0"),
        ({"rank": 256}, "not below the smaller side of linear_qkv in small, 256; give 1 to 255"),
        ({"rank": 128, "targets": ["q_proj", "k_proj"]}, "smaller side of k_proj in small, 128"),
    ],
)
def test_wrong_adapters_are_refused(lora: Any, message: str) -> None:
    assert message in problems(training__lora=lora)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parallel": {"tp": 4}, "training__lora": {"rank": 6}}, "tp is 4; nearest: 4 or 8"),
        (
            {"training__dtype": "fp8-tensorwise", "training__fp8_param_gather": True},
            "training.fp8_param_gather: true",
        ),
        ({"training__recompute": {"keep": "products"}}, "training.recompute.keep"),
        ({"training__deferred_head_gradients": 2}, "a head that training.lora freezes"),
        ({"model": "mixtral-8x7b"}, "mixtral-8x7b has experts"),
        ({"model": "deepseek-v2-lite"}, "experts and latent attention"),
        ({"model": "nemotron-h-8b"}, "state-space layers and layers of one part"),
        (
            {"model__activation": "gelu", "training__lora": {"rank": 8, "targets": ["gate_proj"]}},
            "no gate; nearest: up_proj",
        ),
    ],
)
def test_what_does_not_go_with_adapters_is_refused(changes: dict[str, Any], message: str) -> None:
    assert message in problems(**{"training__lora": {"rank": RANK}, **changes})


def test_shards_of_adapters_are_whole_adapters_together() -> None:
    model, lora = load_model("llama3-8b"), LowRankAdapters(16)
    cut = [adapter.elements for adapter in layer_adapters(model, lora, 4, 0)]
    whole = [adapter.elements for adapter in layer_adapters(model, lora, 1, 0)]
    assert [4 * elements for elements in cut] == whole
