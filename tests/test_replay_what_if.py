"""What-ifs: each changes what it says and nothing else, they combine, and none changes a run by being looked at."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from hardware_profiles import load_profile
from op_graphs.timeline import CommunicationGroup
from op_graphs.vocabulary import OpKind, Phase
from tests.recordings import US, Recording, queued_kernels, two_ranks
from tracesim.errors import ScenarioError
from tracesim.replay import WHAT_IFS, Outcome, Rebuilt, ask, parse_what_ifs, rebuild, unexplained
from tracesim.replay.what_if.outcome import change
from tracesim.replay.what_if.registry import WhatIf


def outcome(rebuilt: Rebuilt, *texts: str) -> Outcome:
    return ask(rebuilt, texts, unexplained(rebuilt))


def step_us(recording: Recording, *texts: str) -> float:
    return outcome(rebuild(recording.timeline()), *texts).step / US


def training(communication: float = 200.0) -> Recording:
    """10 GEMMs and 10 elementwise kernels of 50 us, a host that runs ahead, and an all-reduce they wait for at the end.

    The first kernel starts at 7 us, the others follow without a gap.
    """
    recording = Recording()
    for number in range(20):
        kind = {
            "kind": OpKind.GEMM if number < 10 else OpKind.ELEMENTWISE,
            "layer": number % 2,
            "phase": 1 + number // 10,
        }
        recording.launch(f"kernel{number}", 6 * number, 7 + 50 * number, 50, columns=kind)
    recording.launch(
        "all_reduce",
        130,
        1009,
        communication,
        "stream 20",
        columns={"kind": OpKind.COLLECTIVE, "communication": 1},
    )
    recording.call("cudaStreamWaitEvent", 136, 1)
    recording.launch("optimizer", 138, 1011 + communication, 100)
    return recording


BASE = 7 + 20 * 50 + 2 + 200 + 2 + 100 - 7
"""Device time of :func:`training`: kernels, and the delays of two events."""


@pytest.mark.parametrize(
    ("what_if", "microseconds"),
    [
        ("scale=1", BASE),
        ("scale.kind.gemm=0.5", BASE - 250 - 50),
        ("scale.kind.elementwise=2", BASE + 500),
        ("scale.phase.forward=0.5", BASE - 250),
        ("scale.layer.1=2", BASE + 500),
        ("scale.name=^kernel[0-4]$:3", BASE + 500),
        ("set.name=optimizer:300", BASE + 200),
        ("fuse=elementwise", BASE - 450),
        ("communication=0.5", BASE - 100),
        ("communication=0", BASE - 200),
        ("drop=all_reduce", BASE - 200),
        ("network.bandwidth=2", BASE - 85),
        ("network.latency=2", BASE + 30),
        ("overlap=none", BASE),
        ("overlap=full", 20 * 50 + 2 + 200),
        ("host=1", BASE),
        ("remove=unexplained", BASE),
    ],
)
def test_a_what_if_gives_the_step_time_that_follows_by_hand(what_if: str, microseconds: float) -> None:
    assert step_us(training(), what_if) == pytest.approx(microseconds, abs=8)


def test_every_what_if_of_the_list_is_tested_here_or_has_a_test_of_its_own() -> None:
    keys = {what_if.key for what_if in WHAT_IFS}
    assert keys == {
        "scale", "scale.kind.", "scale.phase.", "scale.layer.", "scale.name", "set.name", "rank.", "fuse", "hardware",
        "network.bandwidth", "network.latency", "communication", "drop", "overlap", "host", "remove",
        # in test_replay_micro_operations.py
        "even",
        # in test_replay_what_if_network.py
        "network.algorithm", "network.topology", "network.domain", "dp", "communication.sms",
        # in test_replay_what_if_streams.py
        "scale.shape", "stream.", "stream.name", "overlap.",
        # in test_replay_what_if_pipeline.py
        "microbatches", "schedule",
        # in test_replay_what_if_recompute.py
        "recompute.on", "recompute.off",
    }  # fmt: skip


def test_no_what_if_is_no_change() -> None:
    rebuilt = rebuild(training().timeline())
    same = change(rebuilt, [])
    assert same is rebuilt
    assert outcome(rebuilt, "scale=1").change == 0


@pytest.mark.parametrize(
    "text",
    [
        "scale=1",
        "scale.kind.gemm=1",
        "scale.phase.forward=1",
        "scale.layer.1=1",
        "scale.name=kernel:1",
        "set.name=optimizer:100",
        "rank.0=1",
        "hardware=h100-sxm:h100-sxm",
        "network.bandwidth=1",
        "network.latency=1",
        "network.algorithm=h100-sxm:ring:ring",
        "network.topology=h100-sxm:h100-sxm",
        "network.domain=h100-sxm:8",
        "dp=h100-sxm:4",
        "communication=1",
        "communication.sms=h100-sxm:24:24",
        "stream.gemm=stream 7",
        "stream.name=all_reduce:stream 20",
        "microbatches=1",
        "schedule=1f1b",
        "host=1",
    ],
)
def test_every_what_if_that_has_a_neutral_value_changes_nothing_at_it(text: str) -> None:
    recording = training()
    reduce = next(row for row in recording.slices if row["name"] == "all_reduce")
    reduce |= {"group": 0, "communication_bytes": 1 << 24, "phase": Phase.GRADIENT_SYNC}
    rebuilt = rebuild(recording.timeline([CommunicationGroup("dp", (0, 8, 16, 24), 4)]))
    found = outcome(rebuilt, text)
    assert found.step == found.base_step == found.low == found.high


def test_twice_all_durations_is_twice_the_time_where_nothing_waits_for_the_host() -> None:
    durations = [50.0, 30, 70, 20, 90]
    recording = queued_kernels(durations, gap=0)
    base, doubled = step_us(recording, "scale=1"), step_us(recording, "scale=2")
    assert doubled == 2 * base


def test_what_ifs_on_different_slices_commute() -> None:
    rebuilt = rebuild(training().timeline())
    texts = ("scale.kind.gemm=0.5", "communication=0.25", "scale.layer.1=3", "host=0.5", "overlap=none")
    found = {outcome(rebuilt, *order).step for order in permutations(texts)}
    assert len(found) == 1


def test_a_rank_that_computes_faster_waits_longer_and_one_that_is_the_last_decides() -> None:
    recording = two_ranks(slow=200, transfer=50)
    base = step_us(recording, "scale=1")
    assert step_us(recording, "rank.0=0.5") == pytest.approx(base, abs=3)
    assert step_us(recording, "rank.1=0.5") == pytest.approx(base - 100, abs=6)
    assert step_us(recording, "rank.0=3") == base + 2 * 50 + 10


def test_a_collective_that_is_dropped_is_not_waited_for() -> None:
    rebuilt = rebuild(two_ranks(slow=200, transfer=50).timeline())
    dropped = change(rebuilt, parse_what_ifs(["drop=all_reduce"]))
    assert (dropped.graph.operations.rendezvous < 0).all()
    assert (rebuilt.graph.operations.rendezvous >= 0).sum() == 2


def _host_bound(between: float) -> Recording:
    recording = Recording()
    for number in range(10):
        recording.launch(f"k{number}", (5 + between) * number, (5 + between) * number + 7, 20)
    return recording


@pytest.mark.parametrize(
    ("between", "removed", "microseconds"),
    [
        (95, "launch-gaps", 10 * 20 + 9 * 1),
        (95, "host-stalls", 920),
        (495, "host-stalls", 10 * 20 + 9 * 1),
        (495, "launch-gaps", 9 * 495 + 20),
    ],
)
def test_removing_what_the_host_does_between_calls(between: float, removed: str, microseconds: float) -> None:
    assert step_us(_host_bound(between), f"remove={removed}") == pytest.approx(microseconds, abs=12)


def test_removing_the_waits_of_the_host_lets_it_run_ahead() -> None:
    recording = Recording()
    for number in range(5):
        recording.launch(f"k{number}", 600 * number, 600 * number + 7, 500)
        recording.call("cudaDeviceSynchronize", 600 * number + 10, 505)
    assert step_us(recording, "remove=host-waits") == pytest.approx(5 * 500 + 4 * 1, abs=20)


def test_another_machine_scales_matrix_products_with_its_peak_and_the_rest_with_its_bandwidth() -> None:
    first, second = load_profile("a100-sxm-80g"), load_profile("h100-sxm")
    rebuilt = rebuild(training().timeline())
    moved = change(rebuilt, parse_what_ifs(["hardware=a100-sxm-80g:h100-sxm"]))
    ratio = moved.durations[rebuilt.on_device()] / rebuilt.durations[rebuilt.on_device()]
    kind = rebuilt.graph.operations.kind[rebuilt.on_device()]
    peak = first.peak_tflops["bf16"] / second.peak_tflops["bf16"]
    memory = first.memory.bandwidth_gb_per_s / second.memory.bandwidth_gb_per_s
    assert ratio[kind == OpKind.ELEMENTWISE] == pytest.approx(memory, rel=1e-3)
    assert ratio[kind == OpKind.GEMM][0] == pytest.approx(peak, rel=1e-3)
    back = change(moved, parse_what_ifs(["hardware=h100-sxm:a100-sxm-80g"]))
    assert np.abs(back.durations - rebuilt.durations).max() <= 2


def test_the_range_of_another_machine_is_what_a_kernel_may_be_bound_by() -> None:
    first, second = load_profile("a100-sxm-80g"), load_profile("h100-sxm")
    rebuilt = rebuild(queued_kernels([500, 300], gap=0).timeline())
    found = outcome(rebuilt, "hardware=a100-sxm-80g:h100-sxm")
    peak = first.peak_tflops["bf16"] / second.peak_tflops["bf16"]
    memory = first.memory.bandwidth_gb_per_s / second.memory.bandwidth_gb_per_s
    base = found.base_step
    assert found.step == pytest.approx(peak * base, rel=0.02)
    assert found.low == pytest.approx(min(peak, memory) * base, rel=0.02)
    assert found.high == pytest.approx(max(peak, memory) * base, rel=0.02)
    assert any("0 % of compute time is scaled by known FLOPs and bytes" in note for note in found.notes)


def test_what_limits_the_changed_run_is_said() -> None:
    found = outcome(rebuild(training().timeline()), "communication=20")
    assert max(found.limits, key=lambda what: found.limits[what]) == "communication"


def test_a_run_that_hangs_on_unexplained_lateness_is_refused() -> None:
    recording = queued_kernels([50, 30, 20, 40])
    recording.launch("stalled", 60, 5000, 10)
    with pytest.raises(ScenarioError, match=r"refused, because .* of the step hangs on lateness"):
        outcome(rebuild(recording.timeline()), "scale=2")


@pytest.mark.parametrize("what_if", WHAT_IFS, ids=lambda what_if: f"{what_if.key}{what_if.value}")
def test_every_what_if_is_refused_on_such_a_run(what_if: WhatIf) -> None:
    recording = queued_kernels([50, 30, 20, 40])
    recording.launch("stalled", 60, 5000, 10)
    text = f"{what_if.key}{'name' if what_if.prefix else ''}={what_if.value}"
    with pytest.raises(ScenarioError, match="refused, because"):
        outcome(rebuild(recording.timeline()), text)


def test_a_run_with_some_unexplained_lateness_gets_a_range() -> None:
    recording = queued_kernels([500, 300, 200, 400])
    recording.launch("stalled", 60, 1801, 1000)
    found = outcome(rebuild(recording.timeline()), "scale.name=k:0.5")
    assert found.as_range
    assert found.low < found.high
    assert found.low <= found.step <= found.high


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scale", "no value. Write KEY=VALUE"),
        ("scale=", "no value. Write KEY=VALUE"),
        ("scael=2", "no what-if 'scael'. Did you mean scale"),
        ("scale=-1", "scale=-1: a factor is a number from 0 on"),
        ("scale=nan", "scale=nan: a factor is a number"),
        ("scale.kind.gem=2", "scale.kind.gem: not one of other, gemm"),
        ("scale.layer.x=2", "'x' is no number"),
        ("scale.layer.7=2", "scale.layer.7: no device slice"),
        ("scale.name=(:2", "no regular expression"),
        ("scale.name=absent:2", "no device slice of the trace is meant"),
        ("rank.9=2", "rank.9: the trace holds the ranks 0"),
        ("hardware=h100-sxm", "write FROM:TO"),
        ("overlap=some", "write overlap=none or overlap=full"),
        ("remove=all", "write launch-gaps, host-stalls, host-waits, allocator or unexplained"),
        ("fuse=gemm", "only elementwise"),
        ("remove=allocator", "the trace shows no call of the device allocator"),
        ("even=some", "write even=stragglers"),
    ],
)
def test_what_cannot_be_done_is_said(text: str, message: str) -> None:
    with pytest.raises(ScenarioError) as error:
        outcome(rebuild(training().timeline()), text)
    assert message in str(error.value)


def test_host_what_ifs_need_launches() -> None:
    recording = Recording()
    for number in range(4):
        recording.kernel(f"k{number}", 100 * number, 90)
    with pytest.raises(ScenarioError, match="the trace has no launches"):
        outcome(rebuild(recording.timeline()), "host=0.5")
