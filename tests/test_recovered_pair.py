"""A forward beside a backward, told apart by the kernels of one rank: a public trace of DualPipe, and simulated."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks.chunk_pair import deepseek, pair_timeline, run_pair
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import Phase
from tests.stripped_timelines import stripped
from tests.test_overlap_policies import MOE
from tracesim.analysis import analyze
from tracesim.cli import main
from tracesim.readers import read_trace
from tracesim.recovered_pair import KernelPair, find_pair, pair_of_one_rank
from tracesim.scenario import load_scenario
from tracesim.simulation import simulate

TRACE = "traces/deepseek/train.json.gz"


def pair_of(timeline: Timeline) -> KernelPair | None:
    found = pair_of_one_rank(analyze(timeline), None)
    return found[0] if found is not None else None


@pytest.fixture
def unannotated(shared_data: Path, tmp_path: Path) -> Path:
    """The trace without the annotations that say what is forward, backward and weight gradient; the step is left."""
    document = json.loads(gzip.decompress((shared_data / TRACE).read_bytes()))
    document["traceEvents"] = [
        event
        for event in document["traceEvents"]
        if event.get("cat") != "user_annotation" or event["name"].startswith("ProfilerStep")
    ]
    path = tmp_path / "unannotated.json.gz"
    path.write_bytes(gzip.compress(json.dumps(document).encode(), compresslevel=1))
    return path


@pytest.mark.shared_data
def test_kernels_alone_tell_the_pair_as_its_annotations_do(shared_data: Path, unannotated: Path) -> None:
    annotated, bare = read_trace([shared_data / TRACE]), read_trace([unannotated])
    found, slices = pair_of(bare), annotated.slices
    assert found is not None
    assert (bare.slices.phase[found.forward] == Phase.UNKNOWN).any()
    told = {
        (start, lasts, name): phase == Phase.FORWARD
        for start, lasts, name, phase in zip(
            slices.start.tolist(),
            slices.duration.tolist(),
            [annotated.strings[name] for name in slices.name.tolist()],
            slices.phase.tolist(),
            strict=True,
        )
    }
    wrong, total = 0, 0
    for rows, is_forward in (
        (found.forward, True),
        (found.backward, False),
        (found.forward_exchanges, True),
        (found.backward_exchanges, False),
    ):
        for row in rows.tolist():
            start, lasts = int(bare.slices.start[row]), int(bare.slices.duration[row])
            total += lasts
            wrong += lasts * (told[start, lasts, bare.strings[bare.slices.name[row]]] != is_forward)
    assert total > 240e6
    assert wrong < 0.001 * total
    # four layers, each with a dispatch and a combine both ways, and what prepares them
    assert len(found.forward_exchanges) == len(found.backward_exchanges) == 20


@pytest.mark.shared_data
def test_its_figures_are_those_of_the_trace(shared_data: Path) -> None:
    timeline = read_trace([shared_data / TRACE])
    found = pair_of(timeline)
    assert found is not None
    figures = found.describe(timeline)
    assert figures["time"] == pytest.approx(129.0, abs=0.05)
    moving = figures["forward_exchanges"] + figures["backward_exchanges"]
    hidden = figures["forward_exchanges_hidden"] + figures["backward_exchanges_hidden"]
    assert hidden / moving == pytest.approx(0.963, abs=0.005)
    simulated = run_pair(deepseek(contention=True, jitter=False))
    compute = figures["forward_compute"] + figures["backward_compute"]
    assert compute == pytest.approx(simulated.compute / 1e6, rel=0.01)


@pytest.mark.shared_data
def test_the_command_shows_the_pair(shared_data: Path) -> None:
    result = CliRunner().invoke(main, ["schedule", "show", "--trace", str(shared_data / TRACE)])
    assert result.exit_code == 0, result.output
    assert "(0F1;0B0)OVERLAP_F_B" in result.output
    assert "a part of a step, which has no order to check" in result.output
    assert (
        "forward: compute 35.866 ms, exchanges of experts 61.497 ms, 98.5% of them beside compute"
        in result.output
    )
    result = CliRunner().invoke(main, ["schedule", "show", "--trace", str(shared_data / TRACE), "--json"])
    document = json.loads(result.output)
    assert (document["method"], document["ok"], document["problem"]) == ("kernels", None, None)
    assert document["pair"]["backward_compute"] == pytest.approx(88.4, abs=0.1)


def test_a_simulated_pair_is_found_whole() -> None:
    timeline = pair_timeline(deepseek())
    found = pair_of(stripped(timeline))
    assert found is not None
    slices = stripped(timeline).slices
    assert (slices.phase[found.forward] == Phase.FORWARD).all()
    assert (slices.phase[found.backward] != Phase.FORWARD).all()
    simulated = run_pair(deepseek())
    figures = found.describe(stripped(timeline))
    assert figures["time"] == pytest.approx(simulated.time / 1e6, rel=0.01)
    assert figures["forward_compute"] + figures["backward_compute"] == pytest.approx(
        simulated.compute / 1e6, rel=0.01
    )


@pytest.mark.parametrize("microbatches", [1, 4])
def test_microbatches_that_follow_each_other_are_no_pair(microbatches: int) -> None:
    mapping = {
        **MOE,
        "parallel": {"dp": 8, "ep": 8},
        "training": {**MOE["training"], "num_microbatches": microbatches},
        "schedule": "1f1b",
    }
    timeline = stripped(simulate(load_scenario(mapping)).timeline())
    assert pair_of(timeline) is None


def test_a_rank_without_exchanges_or_of_one_direction_is_no_pair() -> None:
    timeline = stripped(pair_timeline(deepseek()))
    window = analyze(timeline).steps[0].window
    slices = timeline.slices
    forward = slices.with_columns(phase=np.full(len(slices), Phase.FORWARD, dtype=np.int8))
    assert find_pair(replace(timeline, slices=forward), window) is None
    still = slices.with_columns(kind=np.zeros(len(slices), dtype=np.int8))
    assert find_pair(replace(timeline, slices=still), window) is None
