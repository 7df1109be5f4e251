"""The host's launches: a step is as long as the longer of its kernels and their launches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from op_graphs.vocabulary import OpKind, Stream
from tests.graphs import graph_of
from tracesim.host import HostTimes, execute_with_host, host_times
from tracesim.scenario import load_scenario
from tracesim.simulation import simulate


def row_of(count: int, segments: int = 1):
    """Segments of ``count`` equal operations each, one behind the other on the compute stream."""
    rows = [{"stream": Stream.COMPUTE} for _ in range(count * segments)]
    return graph_of(rows, [(s * count, (s + 1) * count, 0) for s in range(segments)])


@pytest.mark.parametrize(
    ("kernel", "launch", "expected"),
    [
        # kernels longer than their launches hide them
        (100, 40, 500),
        # launches longer than kernels: the last of five is launched after four, then runs
        (10, 40, 170),
        # no host
        (10, 0, 50),
        (40, 40, 200),
    ],
)
def test_a_segment_takes_its_kernels_or_its_launches(kernel, launch, expected):
    graph = row_of(5)
    run = execute_with_host(graph, np.full(5, kernel), host=HostTimes(launch))
    assert int(run.end.max()) == expected


@given(st.integers(1, 9), st.integers(1, 6), st.integers(0, 50), st.integers(0, 50))
def test_segments_follow_each_other_and_the_host_keeps_up_between_them(count, segments, kernel, launch):
    run = execute_with_host(
        row_of(count, segments), np.full(count * segments, kernel), host=HostTimes(launch)
    )
    assert int(run.end.max()) == segments * max(count * kernel, (count - 1) * launch + kernel)


def test_gathers_and_reductions_of_data_parallelism_are_launched_by_hooks_ahead_of_time():
    graph = graph_of(
        [{"stream": Stream.COMPUTE, "after": [2]}, {"stream": Stream.COMPUTE}, {"stream": Stream.DP}],
        [(0, 3, 0)],
    )
    run = execute_with_host(graph, np.array([10, 10, 5]), host=HostTimes(100))
    assert run.start.tolist() == [5, 105, 0]


def test_launches_count_from_what_the_host_waits_for():
    rows = [{"stream": Stream.COMPUTE, "kind": OpKind.HOST if row == 2 else OpKind.NORM} for row in range(5)]
    run = execute_with_host(graph_of(rows, [(0, 5, 0)]), np.array([50, 5, 0, 5, 5]), host=HostTimes(20))
    # The host is ahead until it waits at 55; the next two are launched 20 and 40 later.
    assert run.start.tolist() == [0, 50, 55, 75, 95]


def test_an_action_resumes_after_a_transfer_that_the_host_waits_for():
    graph = graph_of(
        [
            {"stream": Stream.PP_RECEIVE_PREVIOUS},
            {"stream": Stream.COMPUTE, "after": [0]},
            {"stream": Stream.COMPUTE},
            {"stream": Stream.PP_SEND_NEXT, "after": [2]},
        ],
        [(1, 3, 0)],
    )
    durations = np.array([7, 10, 10, 7])
    assert execute_with_host(graph, durations, host=HostTimes()).start.tolist() == [0, 7, 17, 27]
    run = execute_with_host(graph, durations, host=HostTimes(resume_ns=100))
    # Only compute behind a transfer waits, not a transfer behind compute.
    assert run.start.tolist() == [0, 107, 117, 127]
    both = execute_with_host(graph, durations, host=HostTimes(operation_ns=30, resume_ns=100))
    assert both.start.tolist() == [0, 107, 137, 147]


def test_each_action_of_a_blocking_pipeline_resumes_once():
    def iteration_us(microbatches: int, resume_us: float, p2p: bool = False) -> float:
        mapping = {
            "model": "gpt3-125m",
            "hardware": "a100-sxm-80g",
            "parallel": {"pp": 4},
            "training": {"seq_len": 1024, "num_microbatches": microbatches},
            "schedule": "1f1b",
            "overlap": {"p2p": p2p},
        }
        scenario = load_scenario(mapping)
        # Launches hide nothing here: the transfers decide when an action starts.
        host = replace(scenario.hardware.host, operation_us=0.0, resume_us=resume_us)
        changed = replace(scenario, hardware=replace(scenario.hardware, host=host))
        assert host_times(changed).resume_ns == (0 if p2p else round(1e3 * resume_us))
        return 1e3 * float(simulate(changed).report["iteration_time_ms"])

    def added(microbatches: int) -> float:
        return (iteration_us(microbatches, 50_000.0) - iteration_us(microbatches, 0.0)) / 50_000.0

    # In the steady state a stage in the middle resumes before its forward and before its backward.
    assert (added(24) - added(12)) / 12 == pytest.approx(2, abs=0.1)
    assert iteration_us(6, 5000.0, p2p=True) == iteration_us(6, 0.0, p2p=True)


def test_a_small_model_is_bound_by_its_launches_and_a_large_one_is_not():
    def iteration_ms(model: str, operation_us: float) -> float:
        scenario = load_scenario(
            {"model": model, "hardware": "h100-sxm", "training": {"seq_len": 1024, "num_microbatches": 2}}
        )
        host = replace(scenario.hardware.host, operation_us=operation_us)
        hardware = replace(scenario.hardware, host=host)
        return float(simulate(replace(scenario, hardware=hardware)).report["iteration_time_ms"])

    assert iteration_ms("gpt3-125m", 100) > 3 * iteration_ms("gpt3-125m", 0)
    assert iteration_ms("gpt3-125m", 200) == pytest.approx(2 * iteration_ms("gpt3-125m", 100), rel=0.1)
    assert iteration_ms("gpt3-175b", 100) == pytest.approx(iteration_ms("gpt3-175b", 0), rel=0.02)
