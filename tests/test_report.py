"""The figures of a run: what they are by definition, and how they must move when a scenario changes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from hardware_profiles.profile import HardwareProfile
from op_graphs.vocabulary import MemoryCategory, OpKind, Phase, Stream
from tests.dense_scenarios import dense_mapping, dense_scenarios
from tracesim import load_scenario, simulate
from tracesim.confidence import ALLOCATED, ONE_DOMAIN, RESERVED, SEVERAL_DOMAINS, residuals
from tracesim.report_tables import render_report
from tracesim.scenario import Scenario

EXAMPLES = settings(max_examples=10, deadline=None)
GIB = 2**30


def report_of(**changes: Any) -> dict[str, Any]:
    return simulate(load_scenario(dense_mapping(**changes))).report


def iteration_ns(scenario: Scenario) -> int:
    return int(simulate(scenario).execution.end.max())


# -- definitions -------------------------------------------------------------------------------------------------


@EXAMPLES
@given(dense_scenarios())
def test_the_parts_of_every_stage_add_up_to_the_iteration(scenario):
    simulation = simulate(scenario)
    report = simulation.report
    assert report["iteration_time_ms"] == int(simulation.execution.end.max()) / 1e6
    for stage in report["stages"]:
        parts = [stage["compute_ms"], stage["optimizer_ms"], stage["idle_ms"]]
        parts += stage["exposed_communication_ms"].values()
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(report["iteration_time_ms"], rel=1e-12)


@EXAMPLES
@given(dense_scenarios())
def test_compute_and_optimizer_are_the_sums_of_their_kernels(scenario):
    simulation = simulate(scenario)
    operations, execution = simulation.graph.operations, simulation.execution
    lengths = execution.end - execution.start
    for rank, stage in enumerate(simulation.report["stages"]):
        kernels = (operations.rank == rank) & (operations.stream == Stream.COMPUTE)
        update = operations.phase == Phase.OPTIMIZER
        assert stage["compute_ms"] == int(lengths[kernels & ~update].sum()) / 1e6
        assert stage["optimizer_ms"] == int(lengths[kernels & update].sum()) / 1e6


@EXAMPLES
@given(dense_scenarios())
def test_throughput_and_utilisation(scenario):
    """MFU: model FLOPs over peak FLOPs (Chowdhery et al. 2022, arXiv:2204.02311, appendix B); HFU: executed ones."""
    simulation = simulate(scenario)
    report, model = simulation.report, scenario.model
    seconds, world = report["iteration_time_ms"] / 1e3, scenario.parallel.world_size
    tokens = scenario.training.seq_len * scenario.global_batch_size
    assert report["tokens_per_second"] == pytest.approx(tokens / seconds)
    assert report["tokens_per_second_per_gpu"] == pytest.approx(tokens / seconds / world)
    query, key_value = model.heads * model.head_size, model.kv_heads * model.head_size
    layer = model.hidden_size * (2 * query + 2 * key_value)
    layer += model.hidden_size * model.ffn_size * (2 if model.activation == "gelu" else 3)
    linear = 6 * (model.layers * layer + model.hidden_size * model.vocab_size)
    full = 12 * model.layers * query * scenario.training.seq_len
    peak = scenario.hardware.peak_tflops["bf16"] * 1e12 * world * seconds
    assert report["mfu"] == pytest.approx(tokens * (linear + full / 2) / peak)
    assert report["mfu_full_attention"] == pytest.approx(tokens * (linear + full) / peak)
    assert report["model_tflops_per_gpu"] == pytest.approx(
        report["mfu"] * scenario.hardware.peak_tflops["bf16"]
    )
    # Executed FLOPs are at least the model's: nothing is skipped but what the causal mask hides.
    assert report["mfu"] <= report["hfu"] * (1 + 1e-12) <= 1


@EXAMPLES
@given(dense_scenarios())
def test_fractions_and_totals(scenario):
    report = simulate(scenario).report
    stages = report["stages"]
    assert 0 <= report["pipeline_bubble_fraction"] < 1
    exposed = np.mean([sum(stage["exposed_communication_ms"].values()) for stage in stages])
    assert report["exposed_communication_fraction"] == pytest.approx(exposed / report["iteration_time_ms"])
    assert report["peak_allocated_gib"] == max(stage["peak_allocated_gib"] for stage in stages)
    assert report["peak_reserved_gib"] == max(stage["peak_reserved_gib"] for stage in stages)
    assert sum(stage["layers"] for stage in stages) == scenario.model.layers
    assert sum(stage["ranks"] for stage in stages) == report["world_size"] == scenario.parallel.world_size
    for rank, stage in enumerate(stages):
        assert stage["stage"] == rank
        assert scenario.parallel.coordinates(stage["representative_rank"])["pp"] == rank
        assert stage["peak_allocated_gib"] <= stage["peak_allocated_blocks_gib"] <= stage["peak_reserved_gib"]
        assert sum(stage["memory_at_peak_gib"].values()) == pytest.approx(stage["peak_allocated_gib"])
        assert 0 <= stage["peak_time_ms"] <= report["iteration_time_ms"]
        listed = sum(tensor["gib"] for tensor in stage["alive_at_peak"])
        assert listed <= stage["peak_allocated_gib"] * (1 + 1e-12)


def test_without_a_pipeline_there_is_no_exposed_transfer_and_the_bubble_is_gaps_alone():
    report = report_of(
        hardware={"base": "h100-sxm", "memory": {"kernel_gap_us": 0}, "host": {"operation_us": 0}}
    )
    (stage,) = report["stages"]
    assert report["pipeline_bubble_fraction"] == 0
    assert set(stage["exposed_communication_ms"].values()) == {0}
    assert stage["idle_ms"] == 0


@pytest.mark.parametrize(("room", "fits"), [(1.01, True), (1.0, True), (0.99, False)])
def test_it_fits_if_what_the_allocator_reserves_fits_beside_context_and_communicators(room, fits):
    before = report_of(parallel={"tp": 2})
    outside = sum(before["stages"][0]["outside_allocator_gib"].values())
    capacity = (before["peak_reserved_gib"] + outside) * room
    report = report_of(
        parallel={"tp": 2}, hardware={"base": "h100-sxm", "memory": {"capacity_gib": capacity}}
    )
    assert (report["memory_capacity_gib"], report["fits_in_memory"]) == (capacity, fits)
    assert report["memory_margin_gib"] == pytest.approx(capacity - before["peak_reserved_gib"] - outside)


def test_the_probability_of_running_out_falls_with_the_room():
    found = []
    peak = report_of()["peak_reserved_gib"]
    for room in (0.01, 0.9, 0.95, 1.0, 1.05, 1.1, 2.0):
        machine = {"base": "h100-sxm", "memory": {"capacity_gib": 0.75 + peak * room}}
        found.append(report_of(hardware=machine)["out_of_memory_probability"])
    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (1, 0)
    assert 0 < found[3] < 1
    # the context alone does not fit
    machine = {"base": "h100-sxm", "memory": {"capacity_gib": 0.7}}
    assert report_of(hardware=machine)["out_of_memory_probability"] == 1


@pytest.mark.parametrize(
    ("parallel", "communicators", "peers"),
    [
        ({}, 0, 0),
        ({"dp": 2}, 2, 0),  # and the world for the norm of the gradients
        ({"tp": 2, "dp": 2}, 3, 0),
        ({"pp": 4}, 2, 0),  # its pairs share one
        ({"cp": 4, "cp_comm": "a2a"}, 3, 3),
    ],
)
def test_what_a_process_takes_beside_its_allocator(parallel, communicators, peers):
    network = {"communicator_gib": 1.0, "exchange_peer_gib": 0.125}
    machine = {"base": "h100-sxm", "memory": {"context_gib": 0.5}, "network": network}
    for stage in report_of(parallel=parallel, hardware=machine)["stages"]:
        assert stage["outside_allocator_gib"]["context"] == 0.5
        held = stage["outside_allocator_gib"]["communicators"]
        assert held == communicators + 0.125 * peers


@EXAMPLES
@given(dense_scenarios())
def test_ranges_hold_what_past_errors_say(scenario):
    report = simulate(scenario).report
    for key, figure in (("peak_allocated_gib", ALLOCATED), ("peak_reserved_gib", RESERVED)):
        expected = residuals()[figure].range_of(report[key])
        assert (report["ranges"][key]["low"], report["ranges"][key]["high"]) == expected
    time = ONE_DOMAIN if scenario.parallel.world_size <= 8 else SEVERAL_DOMAINS
    low, high = residuals()[time].range_of(report["iteration_time_ms"])
    found = report["ranges"]["iteration_time_ms"]
    assert (found["low"], found["high"]) == (low, high)
    assert low < high
    assert found["basis"].startswith(f"{time}: ")


def test_durations_say_where_they_come_from():
    """Heads of 32 lie outside what the attention formula was fitted on; nothing of this model was measured."""
    basis = report_of()["duration_basis"]
    assert basis["measured"] == 0
    assert basis["modelled"] + basis["extrapolated"] == pytest.approx(1)
    named = basis["extrapolated_operations"]
    assert named
    assert any("attention" in operation["name"] for operation in named)
    assert sum(operation["share"] for operation in named) == pytest.approx(basis["extrapolated"])


def test_definitions_of_utilisation_side_by_side():
    report = report_of(model__vocab_size=1000)
    rows = {row["definition"]: row for row in report["utilisation"]}
    for row in rows.values():
        assert row["of_dense_peak"] == 2 * row["of_sparse_peak"]
    assert rows["matrix products, causal attention"]["of_dense_peak"] == pytest.approx(report["mfu"])
    assert rows["matrix products, full attention"]["of_dense_peak"] == pytest.approx(
        report["mfu_full_attention"]
    )
    assert rows["HFU: what is executed"]["of_dense_peak"] == pytest.approx(report["hfu"])
    # 24 more rows of the vocabulary as Megatron pads it, 128 wide: 6 FLOPs each and token
    tokens = report["tokens_per_second_per_gpu"]
    padded = rows["Megatron-LM, causal attention"]["tflops_per_gpu"] - report["model_tflops_per_gpu"]
    assert padded == pytest.approx(6 * 24 * 256 * tokens / 1e12)
    assert rows["6 N, no attention"]["tflops_per_gpu"] == pytest.approx(
        6 * report["model"]["active_parameters"] * tokens / 1e12
    )


def test_a_name_with_brackets_is_printed_whole(capsys):
    render_report(report_of(name="[red]x"), Console(width=120))
    assert capsys.readouterr().out.startswith("[red]x: small (")


# -- what must follow from a change ------------------------------------------------------------------------------


@EXAMPLES
@given(dense_scenarios(parallel__tp=1, model__kv_heads=4, model__heads=8, model__vocab_size=1000))
def test_more_tensor_parallelism_never_needs_more_memory_for_weights(scenario):
    held = []
    for tp in (1, 2, 4, 8):
        cut = dataclasses.replace(scenario, parallel=dataclasses.replace(scenario.parallel, tp=tp))
        held.append([stage["memory_at_peak_gib"]["weights"] for stage in simulate(cut).report["stages"]])
    for less_cut, more_cut in itertools.pairwise(held):
        assert all(more <= less for less, more in zip(less_cut, more_cut, strict=True))


@settings(max_examples=10, deadline=None)
@given(dense_scenarios(schedule="1f1b", parallel__vpp=1, parallel__pp=4, model__layers=4))
def test_activations_grow_with_the_microbatches_in_flight_and_no_further(scenario):
    """Rank r of 1F1B holds min(pp - r, microbatches)."""
    peaks = []
    for microbatches in range(1, 7):
        training = dataclasses.replace(scenario.training, num_microbatches=microbatches)
        simulation = simulate(dataclasses.replace(scenario, training=training))
        peaks.append(
            [int(curve.by_category[MemoryCategory.ACTIVATIONS].max()) for curve in simulation.memory]
        )
    for rank, curve in enumerate(np.transpose(peaks).tolist()):
        assert curve == sorted(curve)
        assert len(set(curve[4 - rank - 1 :])) == 1
    assert all(
        len(set(column[: 4 - rank])) == 4 - rank for rank, column in enumerate(np.transpose(peaks).tolist())
    )


def with_hardware(scenario: Scenario, **figures: Any) -> Scenario:
    """The scenario on a machine with some figures of its network or memory replaced."""
    hardware: HardwareProfile = scenario.hardware
    for path, value in figures.items():
        part, *inner = path.split("__")
        section = getattr(hardware, part)
        if len(inner) == 2:
            link = dataclasses.replace(getattr(section, inner[0]), **{inner[1]: value})
            section = dataclasses.replace(section, **{inner[0]: link})
        else:
            section = dataclasses.replace(section, **{inner[0]: value})
        hardware = dataclasses.replace(hardware, **{part: section})
    return dataclasses.replace(scenario, hardware=hardware)


@pytest.mark.parametrize(
    ("figure", "from_good_to_bad"),
    [
        ("network__domain__bandwidth_gb_per_s", (900, 450, 100, 10)),
        ("network__domain__latency_us", (0.5, 1, 10, 100)),
        ("network__fabric__bandwidth_gb_per_s", (400, 50, 5)),
        ("network__fabric__latency_us", (1, 10, 100)),
        ("memory__bandwidth_gb_per_s", (8000, 3350, 1000)),
        ("memory__kernel_gap_us", (0, 1, 5)),
    ],
)
@settings(max_examples=5, deadline=None)
@given(scenario=dense_scenarios(), spread=st.booleans())
def test_a_worse_machine_never_runs_a_step_faster(figure, from_good_to_bad, scenario, spread):
    if spread:
        # Fewer GPUs in a domain: the fabric carries more.
        scenario = with_hardware(scenario, network__gpus_per_domain=2)
    times = [iteration_ns(with_hardware(scenario, **{figure: value})) for value in from_good_to_bad]
    assert times == sorted(times)


@EXAMPLES
@given(dense_scenarios())
def test_more_microbatches_never_take_less_time(scenario):
    steps = [scenario.parallel.pp * factor for factor in (1, 2, 3)]
    times = []
    for microbatches in steps:
        training = dataclasses.replace(scenario.training, num_microbatches=microbatches)
        times.append(iteration_ns(dataclasses.replace(scenario, training=training)))
    assert times == sorted(times)
    assert times[0] < times[-1]


@EXAMPLES
@given(dense_scenarios(training__recompute="none"))
def test_full_recompute_trades_time_for_activations(scenario):
    again = dataclasses.replace(scenario.training.recompute, mode="full")
    training = dataclasses.replace(scenario.training, recompute=again)
    plain, recomputed = simulate(scenario), simulate(dataclasses.replace(scenario, training=training))
    assert recomputed.report["hfu"] * recomputed.report["iteration_time_ms"] > (
        plain.report["hfu"] * plain.report["iteration_time_ms"]
    )
    compute = [
        [stage["compute_ms"] for stage in simulation.report["stages"]] for simulation in (plain, recomputed)
    ]
    assert all(less < more for less, more in zip(*compute, strict=True))
    held = [
        [
            sum(int(size) for size in simulation.graph.buffers.size[_saved(simulation, rank)])
            for rank in range(scenario.parallel.pp)
        ]
        for simulation in (plain, recomputed)
    ]
    assert all(less < more for more, less in zip(*held, strict=True))


def _saved(simulation, rank: int) -> np.ndarray:
    """Buffers kept from a forward to its backward."""
    buffers, operations = simulation.graph.buffers, simulation.graph.operations
    passing = (buffers.allocate >= 0) & (buffers.rank == rank)
    forward = operations.phase == Phase.FORWARD
    return passing & forward[buffers.allocate] & ~forward[buffers.release]


@EXAMPLES
@given(dense_scenarios())
def test_no_step_is_faster_than_its_busiest_rank_or_the_peak_of_the_machine(scenario):
    simulation = simulate(scenario)
    operations, execution = simulation.graph.operations, simulation.execution
    lengths = execution.end - execution.start
    iteration = int(execution.end.max())
    gemms = operations.kind == OpKind.GEMM
    rate = operations.flops[gemms] / np.maximum(lengths[gemms], 1)
    assert rate.max() <= scenario.hardware.peak_tflops["bf16"] * 1e3
    for rank in range(len(simulation.graph.ranks)):
        for stream in Stream:
            rows = (operations.rank == rank) & (operations.stream == stream)
            assert int(lengths[rows].sum()) <= iteration
