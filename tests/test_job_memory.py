"""Reserved memory of a job: what its start and its first optimizer step leave in the cache, rank by rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from op_graphs.data_parallel import buffer_slice
from op_graphs.graph import RankStartup, Startup
from op_graphs.parameters import parameters_on_stage
from op_graphs.vocabulary import OpKind, Phase, Stream
from tests.graphs import graph_of
from tests.test_memory_of_megatron import scenario_of
from tracesim.lowering import lower_scenario
from tracesim.memory.job import reserved_by_rank, reserved_memory
from tracesim.simulation import simulate

MIB = 2**20


def job(operations, buffers, *entries):
    """A graph whose job begins with entries (row, MiB, until)."""
    row, size, until = np.array(entries, dtype=np.int64).reshape(-1, 3).T
    graph = graph_of(operations, buffers=buffers)
    startup = Startup(row=row, size=size * MIB, until=until, pool=np.zeros(len(row), dtype=np.int8))
    return replace(graph, startups=((RankStartup(0, startup),),))


def peak_mib(graph):
    return reserved_memory(graph, 0).usage.peak_reserved // MIB


STEP = [{}, {}, {}]
ACTIVATION = {"allocate": 0, "release": 1, "size": 40 * MIB}


@pytest.mark.parametrize(
    ("what", "buffers", "entries", "reserved"),
    [
        ("what one step leaves serves the next", [ACTIVATION], [], 40),
        ("states made at the start lie beside the activations", [ACTIVATION], [(-1, 40, -1)], 80),
        ("states of the first update take the activations' block, so the second step needs another",
         [ACTIVATION], [(2, 40, -1)], 80),
        ("smaller ones take a part of it, and the rest is too small", [ACTIVATION], [(2, 30, -1)], 80),
        ("what is gone before the step serves it", [ACTIVATION], [(-1, 40, 2), (-1, 24, -1)], 64),
        ("unless something that stays was put into it",
         [ACTIVATION], [(-1, 40, 1), (-1, 24, -1)], 80),
        ("what is first used in the step comes before the buffers of its operation",
         [ACTIVATION], [(-1, 40, 1), (0, 30, -1)], 80),
        ("blocks of one stream do not serve another",
         [ACTIVATION, {"allocate": 2, "release": 2, "size": 40 * MIB, "pool": int(Stream.CP)}], [], 80),
        ("what a step leaves behind is gone before the next one",
         [{"allocate": 2, "release": -1, "size": 40 * MIB}], [], 40),
    ],
)  # fmt: skip
def test_what_a_job_reserves(what, buffers, entries, reserved):
    assert peak_mib(job(STEP, buffers, *entries)) == reserved, what


def test_the_curve_is_that_of_the_last_step():
    found = reserved_memory(job(STEP, [ACTIVATION], (-1, 64, -1), (2, 30, -1)), 0)
    # The first step reserved 64 and 40; the second finds 10 of them free, and its first operation reserves 40 more.
    assert found.row.tolist() == [-1, 0]
    assert (found.reserved // MIB).tolist() == [104, 144]
    alone = reserved_memory(graph_of(STEP, buffers=[ACTIVATION]), 0)
    assert (alone.row.tolist(), (alone.reserved // MIB).tolist()) == ([-1, 0], [0, 40])


@pytest.mark.parametrize(
    ("elements", "shards", "slices"),
    [
        # The last parameter lies first.
        ((128, 256), 1, [[256, 128]]),
        ((128, 256), 3, [[128], [128], [128]]),
        ((256, 128), 2, [[128, 64], [192]]),
        # Each begins at a multiple of 64, the buffer ends at one of 128: 10 + gap + 100 fill 164 of 256.
        ((100, 10), 2, [[10, 64], [36]]),
        ((1,), 4, [[1], [], [], []]),
    ],
)
def test_each_member_holds_its_slice_of_the_buffer(elements, shards, slices):
    assert [buffer_slice(elements, shards, member) for member in range(shards)] == slices
    # Groups of several sets of shards begin again.
    assert buffer_slice(elements, shards, shards) == slices[0]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_what_the_start_leaves_is_what_a_step_finds(zero, dtype):
    changes = {"parallel__zero": zero, "parallel__dp": 4, "training__dtype": dtype}
    graph = lower_scenario(scenario_of(**changes))
    found = graph.buffers.size[graph.buffers.allocate < 0].sum()
    for one in graph.startups[0]:
        # Slices of the buffer differ by its padding, all else by rounding.
        kept = one.allocations.size[one.allocations.until < 0].sum()
        assert kept == pytest.approx(found, rel=1e-3), one.rank
    assert [one.rank for one in graph.startups[0]] == ([0, 3, 1, 2] if zero == 1 else [0])


@pytest.mark.parametrize(
    ("zero", "dtype", "late"),
    [(0, "bf16", 8), (1, "bf16", 8), (2, "bf16", 0), (3, "bf16", 8), (1, "fp32", 8)],
)
def test_moments_come_with_the_first_update(zero, dtype, late):
    graph = lower_scenario(scenario_of(parallel__zero=zero, parallel__dp=2, training__dtype=dtype))
    startup, operations = graph.startups[0][0].allocations, graph.operations
    update = int(
        np.flatnonzero((operations.kind == OpKind.OPTIMIZER) & (operations.phase == Phase.OPTIMIZER))[0]
    )
    held = sum(t.elements for t in _parameters(zero))
    made = startup.size[startup.row == update].sum()
    assert made == pytest.approx(late * held / (1 if zero == 0 else 2), rel=1e-2)


def _parameters(zero):
    scenario = scenario_of(parallel__zero=zero)
    return parameters_on_stage(
        scenario.model, range(scenario.model.layers), 1, False, True, True, seq_len=128
    )


def test_parameters_leave_their_blocks_to_the_distributed_optimizer_alone():
    gone = {}
    for zero in (0, 1):
        startup = lower_scenario(scenario_of(parallel__zero=zero, parallel__dp=2)).startups[0][0].allocations
        gone[zero] = int(startup.size[startup.until >= 0].sum())
    weights = 2 * sum(tensor.elements for tensor in _parameters(1))
    # Beside the parameters themselves the copies behind the master weights, two bytes an element of the shard.
    assert gone[1] == pytest.approx(weights + weights / 2, rel=1e-2)
    assert gone[0] == pytest.approx(weights, rel=1e-2)


def test_ranks_of_a_stage_reserve_different_amounts():
    scenario = scenario_of(
        parallel__zero=1, parallel__dp=4, model__vocab_size=1 << 16, training__seq_len=2048
    )
    simulation = simulate(scenario)
    found = {rank: one.usage.peak_reserved for rank, one in simulation.reserved[0].items()}
    assert sorted(found) == [0, 1, 2, 3]
    assert len(set(found.values())) > 1
    stage = simulation.report["stages"][0]
    assert stage["peak_reserved_gib"] == max(stage["peak_reserved_by_rank_gib"].values())
    assert list(stage["peak_reserved_by_rank_gib"]) == ["0", "1", "2", "3"]


def test_of_a_long_step_only_the_represented_rank_is_replayed(monkeypatch):
    graph = lower_scenario(scenario_of(parallel__zero=1, parallel__dp=4))
    assert [len(ranks) for ranks in reserved_by_rank(graph)] == [4]
    monkeypatch.setattr("tracesim.memory.job._MOST_EVENTS", 0)
    assert [list(ranks) for ranks in reserved_by_rank(graph)] == [[0]]


@pytest.mark.shared_data
def test_reserved_memory_of_measured_ranks(shared_data):
    from benchmarks.accuracy import evaluate, scores_by_source

    file = shared_data / "measured" / "simumax-b200.json"
    results, _ = evaluate([file])
    score = scores_by_source(results)["simumax-b200"]["reserved per rank"]
    assert score.n >= 170
    assert score.mean_abs_pct < 1.0
