"""Where the host waits: for what ran before a forward whose batch it fetches, and for a loss that it looks at."""

from __future__ import annotations

import numpy as np
import pytest

from op_graphs.vocabulary import OpKind, Phase, Stream
from tests.dense_scenarios import dense_mapping
from tests.graphs import graph_of
from tracesim.host import HostTimes, execute_with_host, with_launches
from tracesim.scenario import load_scenario
from tracesim.simulation import Simulation, simulate

RESUME_US = 500.0
PLAN = {
    "model__layers": 4,
    "parallel__pp": 2,
    "parallel__dp": 1,
    "parallel__zero": 0,
    "training__num_microbatches": 4,
    "overlap__p2p": "ahead",
}


def step(schedule: str, fetches: bool, **changes: object) -> Simulation:
    mapping = dense_mapping(**{**PLAN, **changes}, schedule=schedule, libraries__batch_fetch_waits=fetches)
    return simulate(load_scenario(mapping, (f"hardware.host.resume_us={RESUME_US}",)))


def test_a_forward_waits_for_the_compute_and_the_transfer_before_it_and_a_backward_for_neither():
    graph = graph_of(
        [
            {"stream": Stream.COMPUTE, "phase": Phase.FORWARD},
            {"stream": Stream.PP_RECEIVE_PREVIOUS},
            {"stream": Stream.COMPUTE, "phase": Phase.FORWARD, "after": [1]},
            {"stream": Stream.COMPUTE, "phase": Phase.FORWARD},
            {"stream": Stream.COMPUTE, "phase": Phase.BACKWARD_INPUT},
        ],
        [(0, 1, 0), (2, 4, 0), (4, 5, 0)],
    )
    durations = np.array([10, 50, 10, 10, 10])
    without = execute_with_host(graph, durations, host=HostTimes())
    assert without.start.tolist() == [0, 0, 50, 60, 70]
    run = execute_with_host(graph, durations, host=HostTimes(batch_ns=100))
    assert run.start.tolist() == [0, 0, 150, 160, 170]
    # The compute before it may be what ends last.
    late = execute_with_host(graph, np.array([80, 50, 10, 10, 10]), host=HostTimes(batch_ns=100))
    assert late.start.tolist() == [0, 0, 180, 190, 200]


@pytest.mark.parametrize("schedule", ["zb-h1", "1f1b", "gpipe"])
def test_every_forward_of_a_step_begins_so_much_later(schedule):
    simulation = step(schedule, fetches=True)
    graph, run = simulation.graph, simulation.execution
    compute = graph.operations.stream == Stream.COMPUTE
    forwards = 0
    for begin, rank in zip(graph.segments.begin.tolist(), graph.segments.rank.tolist(), strict=True):
        if graph.operations.phase[begin] != Phase.FORWARD:
            continue
        forwards += 1
        before = compute & (graph.operations.rank == rank) & (run.end <= run.start[begin])
        assert run.start[begin] >= run.end[before].max() + RESUME_US * 1e3
    assert forwards == 8
    plain = step(schedule, fetches=False)
    assert int(run.end.max()) >= int(plain.execution.end.max()) + 4 * RESUME_US * 1e3


def test_where_the_host_waits_for_each_batch_of_transfers_the_fetch_costs_nothing_more():
    """But in the first forward of a rank, which has no transfer in front of it."""
    batched, fetching = (
        int(step("1f1b", fetches, overlap__p2p="batched").execution.end.max()) for fetches in (False, True)
    )
    assert batched <= fetching <= batched + 2 * RESUME_US * 1e3


def test_without_waits_the_graph_stays_as_it_is():
    graph = step("1f1b", fetches=False).graph
    launched, lags = with_launches(graph, np.zeros(len(graph.operations), dtype=np.int64), HostTimes())
    assert launched is graph
    assert lags is None


def test_what_follows_a_forward_with_a_loss_waits_for_the_host_to_have_seen_it():
    graph = graph_of(
        [
            {"stream": Stream.COMPUTE, "phase": Phase.FORWARD},
            {"stream": Stream.COMPUTE, "phase": Phase.FORWARD, "kind": OpKind.LOSS},
            {"stream": Stream.COMPUTE, "phase": Phase.BACKWARD_INPUT},
            {"stream": Stream.COMPUTE, "phase": Phase.FORWARD},
            {"stream": Stream.COMPUTE, "phase": Phase.BACKWARD_INPUT},
        ],
        [(0, 2, 0), (2, 3, 0), (3, 4, 0), (4, 5, 0)],
    )
    durations = np.full(5, 10)
    assert execute_with_host(graph, durations, host=HostTimes()).start.tolist() == [0, 10, 20, 30, 40]
    run = execute_with_host(graph, durations, host=HostTimes(loss_ns=100))
    # The second forward has no loss.
    assert run.start.tolist() == [0, 10, 120, 130, 140]


@pytest.mark.parametrize("pp", [1, 2])
def test_checks_of_the_loss_cost_a_wait_a_microbatch_on_the_last_stage(pp):
    runs = []
    for checks in (False, True):
        mapping = dense_mapping(**{**PLAN, "parallel__pp": pp}, schedule="1f1b", libraries__nan_checks=checks)
        simulation = simulate(load_scenario(mapping, (f"hardware.host.resume_us={RESUME_US}",)))
        last = simulation.graph.operations.rank == pp - 1
        runs.append(int(simulation.execution.end[last].max()))
    assert runs[1] - runs[0] == pytest.approx(4 * RESUME_US * 1e3, rel=0.05)


def test_gradients_are_read_for_the_check_before_they_are_reduced():
    read = []
    for checks in (False, True):
        mapping = dense_mapping(**{**PLAN, "parallel__dp": 2}, schedule="1f1b", libraries__nan_checks=checks)
        graph = simulate(load_scenario(mapping)).graph
        names = [graph.strings[name] for name in graph.operations.name]
        checked = [at for at, name in enumerate(names) if name == "gradient_check"]
        assert all(names[at + 1] == "gradient_scale" for at in checked)
        read.append([int(graph.operations.bytes_read[at]) for at in checked])
        scaled = [
            int(graph.operations.bytes_read[at]) for at, name in enumerate(names) if name == "gradient_scale"
        ]
    assert read == [[], scaled]
