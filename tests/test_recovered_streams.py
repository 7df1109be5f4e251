"""Pairs recovered from kernels alone: for any sizes the schedule that made a run comes back, or the run is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from op_graphs.graph import Segments
from op_graphs.timeline import Timeline
from schedules import build_schedule, usual_chunks, without_communication
from tests.stripped_timelines import stripped, with_launches
from tests.test_overlap_policies import MOE
from tracesim.analysis import analyze
from tracesim.lowering import lower_scenario
from tracesim.recovered_schedule import RecoveredSchedule, recover_schedule
from tracesim.recovered_words import BACKWARD, FORWARD, Burst, split_by_known
from tracesim.scenario import Scenario, load_scenario
from tracesim.simulation import Simulation, run_graph, simulate, step_durations


def scenario(name: str, pp: int, microbatches: int, layers: int, **changes: Any) -> Scenario:
    mapping: dict[str, Any] = {
        **MOE,
        "schedule": name,
        "model": {**MOE["model"], "layers": layers},
        "parallel": {**MOE["parallel"], "pp": pp, "vpp": usual_chunks(name)},
        "training": {**MOE["training"], "num_microbatches": microbatches},
    }
    for field, value in changes.items():
        section, key = field.split("__")
        mapping[section] = {**mapping.get(section, {}), key: value}
    return load_scenario(mapping)


def jittered(of: Scenario, by: float) -> Timeline:
    """A run in which every operation takes longer or shorter at random, collectives on all members alike."""
    graph = lower_scenario(of)
    durations, meets = step_durations(of, graph), graph.operations.rendezvous
    random = np.random.default_rng(1)
    factor = random.lognormal(0, by, len(durations))
    factor = np.where(meets >= 0, random.lognormal(0, by, int(meets.max()) + 2)[meets], factor)
    graph = replace(graph, segments=Segments.empty())
    return Simulation(
        of, graph, run_graph(of, graph, np.rint(durations * factor).astype(np.int64))
    ).timeline()


def recovered(timeline: Timeline) -> RecoveredSchedule:
    found = recover_schedule(analyze(with_launches(stripped(timeline))))
    assert found.method == "kernels"
    return found


EVEN: list[tuple[str, int, int, int, dict[str, Any]]] = [
    ("dualpipev", 2, 4, 8, {}),
    ("dualpipev", 2, 9, 8, {"overlap__contention": True}),
    ("dualpipev", 3, 7, 6, {}),
    ("dualpipev", 4, 11, 8, {}),
    ("dualpipev", 6, 12, 12, {"overlap__p2p": "in-place"}),
    ("dualpipev", 2, 6, 8, {"training__recompute": "full"}),
    ("dualpipe", 2, 8, 8, {"training__recompute": "full"}),
]
UNEVEN: list[tuple[str, int, int, int, dict[str, Any]]] = [
    ("dualpipe", 2, 6, 15, {"parallel__first_stage_layers": 3}),
    ("dualpipev", 2, 6, 9, {"parallel__layout": "Et*2|t*3|t*3|tL"}),
    ("dualpipev", 2, 6, 14, {"parallel__layout": "Et*2|t*4|t*5|t*3L"}),
    ("dualpipev", 4, 8, 13, {"parallel__layout": "Et*2|t|t*2|t*2|tt|t|t*2|tL"}),
]


@pytest.mark.parametrize(("name", "pp", "microbatches", "layers", "changes"), EVEN + UNEVEN)
def test_the_schedule_of_pairs_comes_back(
    name: str, pp: int, microbatches: int, layers: int, changes: dict[str, Any]
) -> None:
    found = recovered(simulate(scenario(name, pp, microbatches, layers, **changes)).timeline())
    plan = without_communication(build_schedule(name, pp, usual_chunks(name), microbatches))
    assert found.times.schedule.actions == plan.actions
    assert found.matches == (name,)


@pytest.mark.parametrize(("pp", "microbatches", "by"), [(2, 5, 0.05), (4, 10, 0.2)])
def test_jitter_changes_no_order(pp: int, microbatches: int, by: float) -> None:
    found = recovered(jittered(scenario("dualpipev", pp, microbatches, 8), by))
    plan = without_communication(build_schedule("dualpipev", pp, 2, microbatches))
    assert found.times.schedule.actions == plan.actions


# -- bursts ------------------------------------------------------------------------------------------------------------


def burst(letter: str, word: str, sends: int = 0, *, after_transfer: bool = True) -> Burst:
    length = len(word)
    times = tuple(range(length))
    return Burst(
        letter,
        0,
        length,
        tuple(map(ord, word)),
        tuple(time + 1 for time in times),
        times,
        tuple(range(sends)),
        (length,) * sends,
        (0,) if after_transfer else (),
    )


def words(bursts: list[Burst]) -> list[str]:
    return ["".join(map(chr, burst.word)) for burst in bursts]


def test_a_part_of_a_burst_keeps_its_own_sends_and_transfers() -> None:
    whole = replace(burst(BACKWARD, "abcdef"), sends=(7, 8), behind=(3, 6), cuts=(0, 3))
    first, second = whole.part(0, 3), whole.part(3, 6)
    assert (first.sends, first.behind, first.follows_transfer) == ((7,), (3,), True)
    assert (second.sends, second.behind, second.follows_transfer) == ((8,), (3,), True)
    assert not whole.part(1, 3).follows_transfer


@pytest.mark.parametrize(
    ("alone", "double", "expected"),
    [
        (burst(FORWARD, "ab", sends=1), burst(FORWARD, "abab", sends=1), ["ab", "abab"]),
        (burst(FORWARD, "ab", sends=1), burst(FORWARD, "abab", sends=2), ["ab", "ab", "ab"]),
        (burst(FORWARD, "ab"), burst(FORWARD, "abab", sends=1), ["ab", "ab", "ab"]),
    ],
)
def test_what_sends_once_where_each_sends_is_one(alone: Burst, double: Burst, expected: list[str]) -> None:
    """A stage of twice the layers has the kernels of two forwards of another stage."""
    assert words(split_by_known([alone, double], each_sends=True)) == expected


@pytest.mark.parametrize(
    ("sends", "expected"), [(0, ["abx", "abx", "abxcabx"]), (1, ["abx", "abxabxc", "abx"])]
)
def test_of_two_ways_to_split_the_one_whose_parts_send_as_they_do_alone(
    sends: int, expected: list[str]
) -> None:
    """What sends at its end begins and ends with a known one; it ends with it only if that one sends."""
    both = burst(FORWARD, "abxabxcabx", sends=1)
    assert words(split_by_known([burst(FORWARD, "abx", sends=sends), both])) == expected
