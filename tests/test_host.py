"""The host's launches: a step is as long as the longer of its kernels and their launches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from op_graphs.vocabulary import Stream
from tests.graphs import graph_of
from tracesim.host import execute_with_host
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
    run = execute_with_host(graph, np.full(5, kernel), operation_ns=launch)
    assert int(run.end.max()) == expected


@given(st.integers(1, 9), st.integers(1, 6), st.integers(0, 50), st.integers(0, 50))
def test_segments_follow_each_other_and_the_host_keeps_up_between_them(count, segments, kernel, launch):
    run = execute_with_host(row_of(count, segments), np.full(count * segments, kernel), operation_ns=launch)
    assert int(run.end.max()) == segments * max(count * kernel, (count - 1) * launch + kernel)


def test_gathers_and_reductions_of_data_parallelism_are_launched_by_hooks_ahead_of_time():
    graph = graph_of(
        [{"stream": Stream.COMPUTE, "after": [2]}, {"stream": Stream.COMPUTE}, {"stream": Stream.DP}],
        [(0, 3, 0)],
    )
    run = execute_with_host(graph, np.array([10, 10, 5]), operation_ns=100)
    assert run.start.tolist() == [5, 105, 0]


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
