"""Optimizer states in the memory of the host: bytes, memory and time in closed form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from op_graphs.graph import OpGraph
from op_graphs.parameters import count_parameters
from op_graphs.vocabulary import MemoryCategory, Phase, Stream
from tests.dense_scenarios import dense_mapping
from tracesim.scenario import load_scenario
from tracesim.simulation import Simulation, simulate

LINK, MEMORY = 10.0, 5.0
"""Of the host, in GB/s, that is bytes a nanosecond."""


def step(optimizer: str = "adam", **changes: Any) -> Simulation:
    hardware = {"base": "toy", "host": {"link_gb_per_s": LINK, "memory_gb_per_s": MEMORY}}
    return simulate(load_scenario(dense_mapping(hardware=hardware, training__optimizer=optimizer, **changes)))


def moved(fraction: float, *, overlap: bool = True, **changes: Any) -> Simulation:
    return step(training__offload={"optimizer": fraction, "optimizer_overlap": overlap}, **changes)


def parameters(simulation: Simulation) -> int:
    scenario = simulation.scenario
    return count_parameters(scenario.model, seq_len=scenario.training.seq_len)


def on(graph: OpGraph, stream: Stream) -> np.ndarray:
    return np.flatnonzero((graph.operations.stream == stream) & (graph.operations.phase == Phase.OPTIMIZER))


def states(simulation: Simulation) -> int:
    return int(simulation.memory[0].by_category[MemoryCategory.OPTIMIZER_STATES][0])


def test_gradients_go_in_fp32_and_parameters_come_back_in_bf16() -> None:
    simulation = moved(1.0)
    graph, count = simulation.graph, parameters(simulation)
    assert graph.operations.bytes_read[on(graph, Stream.COPY_TO_HOST)].sum() == 4 * count
    assert graph.operations.bytes_written[on(graph, Stream.COPY_TO_DEVICE)].sum() == 2 * count
    host = on(graph, Stream.HOST)
    # Reads gradient, parameter and both moments in fp32, writes the last three, and the parameter in bf16.
    assert graph.operations.bytes_read[host].sum() == 16 * count
    assert graph.operations.bytes_written[host].sum() == 14 * count
    assert not np.isin("adam", np.array(graph.strings)[graph.operations.name])


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_states_leave_the_device_and_the_host_holds_them_with_the_gradient(optimizer: str) -> None:
    plain, simulation = step(optimizer), moved(1.0, optimizer=optimizer)
    count, kept = parameters(plain), {"adam": 12, "sgd": 8}[optimizer]
    assert states(plain) == kept * count
    assert states(simulation) == 0
    assert simulation.graph.host_bytes == ((kept + 4) * count,)
    assert simulation.report["host_memory_gib"] == (kept + 4) * count / 2**30


def test_a_fraction_moves_whole_parameters_until_it_is_reached() -> None:
    simulation = moved(0.5)
    count, left = parameters(simulation), states(simulation) / 12
    assert 0.25 * count < left <= 0.5 * count
    assert states(moved(0.0)) == 12 * count
    shares = [states(moved(part / 4)) for part in range(5)]
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize("plan", [{"dp": 4}, {"tp": 2, "dp": 2}, {"dp": 4, "zero": 0}])
def test_ranks_that_share_states_share_the_host(plan: dict[str, int]) -> None:
    simulation = moved(1.0, parallel=plan)
    held = step(parallel=plan)
    assert simulation.graph.host_bytes[0] == pytest.approx(states(held) / 12 * 16, rel=1e-6)
    assert states(simulation) == 0


def test_without_overlap_copy_update_and_copy_add_up() -> None:
    plain, simulation = step(), moved(1.0, overlap=False)
    count = parameters(plain)
    added = 4 * count / LINK + 30 * count / MEMORY + 2 * count / LINK
    # The device is spared its update, 4 + 24 bytes a parameter, and the copy of masters to weights, 4 + 2.
    spared = 34 * count / 1000
    change = simulation.execution.end.max() - plain.execution.end.max()
    assert change == pytest.approx(added - spared, rel=1e-4)
    figures = simulation.report["stages"][0]["offload"]
    assert 1e6 * figures["exposed_ms"] == pytest.approx(added, rel=1e-4)


def test_with_overlap_the_slowest_of_them_hides_the_others() -> None:
    """Layers form a pipeline: the processor works throughout, but for the first gradient and the last parameter."""
    plain, simulation = step(), moved(1.0)
    graph, execution, count = simulation.graph, simulation.execution, parameters(plain)
    host = on(graph, Stream.HOST)
    busy = execution.end[host].max() - execution.start[host].min()
    assert busy == pytest.approx(30 * count / MEMORY, rel=1e-4)
    assert execution.end.max() < moved(1.0, overlap=False).execution.end.max()


def test_updates_wait_for_their_gradient_and_parameters_for_their_update() -> None:
    simulation = moved(0.75)
    graph, execution = simulation.graph, simulation.execution
    out, host, back = (on(graph, s) for s in (Stream.COPY_TO_HOST, Stream.HOST, Stream.COPY_TO_DEVICE))
    assert len(out) == len(host) == len(back) > 1
    assert (execution.end[out] <= execution.start[host]).all()
    assert (execution.end[host] <= execution.start[back]).all()


def test_weights_are_gathered_once_all_parameters_are_back() -> None:
    simulation = moved(1.0, parallel={"dp": 4}, overlap__param_gather=False)
    graph, execution = simulation.graph, simulation.execution
    gathers = np.flatnonzero(np.array(graph.strings)[graph.operations.name] == "parameter_all_gather")
    assert execution.start[gathers].min() >= execution.end[on(graph, Stream.COPY_TO_DEVICE)].max()


def test_sharded_parameters_are_masters_themselves() -> None:
    """With zero 3 the fp32 parameter stays where it is computed with, and comes back in fp32."""
    simulation = moved(1.0, parallel={"dp": 2, "zero": 3})
    graph, shard = simulation.graph, parameters(simulation) / 2
    assert graph.operations.bytes_written[on(graph, Stream.COPY_TO_DEVICE)].sum() == pytest.approx(4 * shard)
    assert states(simulation) == 0
