"""What-ifs of collectives: each is scaled by the cost model, new over as measured, and by nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hardware_profiles import load_profile
from op_graphs.timeline import CommunicationGroup
from op_graphs.vocabulary import Communication, OpKind, Phase
from tests.recordings import Recording
from tracesim.cost import Algorithm, CollectiveCost
from tracesim.errors import ScenarioError
from tracesim.replay import Rebuilt, ask, parse_what_ifs, rebuild, unexplained
from tracesim.replay.what_if.outcome import change, memory_of

MACHINE = load_profile("h100-sxm")
COSTS = CollectiveCost(MACHINE)
SIZE = 1 << 28
ACROSS = tuple(range(0, 32, 8))
"""Four ranks in four nodes of eight GPUs."""


def training(
    ranks: tuple[int, ...] = ACROSS,
    *,
    communication: Communication = Communication.ALL_REDUCE,
    size: int = SIZE,
    name: str = "dp",
    phase: Phase = Phase.GRADIENT_SYNC,
) -> Rebuilt:
    """Two kernels of 1 ms and a collective of 4 ms behind them, of one rank."""
    recording = Recording()
    recording.launch("forward", 0, 7, 1000, columns={"phase": Phase.FORWARD})
    recording.launch("backward", 10, 1008, 1000, columns={"phase": Phase.BACKWARD_INPUT})
    columns = {
        "kind": OpKind.COLLECTIVE,
        "communication": communication,
        "communication_bytes": size,
        "group": 0,
        "phase": phase,
    }
    recording.launch("synchronise", 20, 2009, 4000, columns=columns)
    timeline = recording.timeline(groups=[CommunicationGroup(name, ranks, len(ranks))])
    return rebuild(replace(timeline, device="NVIDIA H100 80GB HBM3"))


def transfer_ns(rebuilt: Rebuilt) -> int:
    (row,) = np.flatnonzero(rebuilt.graph.is_communication())
    return int(rebuilt.durations[row])


def changed(rebuilt: Rebuilt, *texts: str) -> Rebuilt:
    return change(rebuilt, parse_what_ifs(texts))


RING, TREE = Algorithm.RING, Algorithm.TREE


def modelled(size: int, ranks: tuple[int, ...], algorithm: Algorithm | None = None) -> int:
    return COSTS.duration_ns(Communication.ALL_REDUCE, size, ranks, algorithm).time_ns


@pytest.mark.parametrize(
    ("what_if", "ratio"),
    [
        ("network.algorithm=ring:tree", modelled(SIZE, ACROSS, TREE) / modelled(SIZE, ACROSS, RING)),
        ("network.algorithm=tree:ring", modelled(SIZE, ACROSS, RING) / modelled(SIZE, ACROSS, TREE)),
        ("network.algorithm=ring", modelled(SIZE, ACROSS, RING) / modelled(SIZE, ACROSS)),
        ("network.algorithm=h100-sxm:ring", modelled(SIZE, ACROSS, RING) / modelled(SIZE, ACROSS)),
        ("network.domain=32", modelled(SIZE, (0, 1, 2, 3)) / modelled(SIZE, ACROSS)),
        ("dp=8", modelled(SIZE, tuple(range(0, 64, 8))) / modelled(SIZE, ACROSS)),
        ("dp=2", modelled(SIZE, (0, 8)) / modelled(SIZE, ACROSS)),
    ],
)  # fmt: skip
def test_a_collective_is_scaled_by_its_modelled_time_after_over_before(what_if: str, ratio: float) -> None:
    rebuilt = training()
    assert transfer_ns(changed(rebuilt, what_if)) == pytest.approx(ratio * transfer_ns(rebuilt), abs=1)


def test_another_network_is_the_ratio_of_two_profiles() -> None:
    rebuilt = training()
    other = CollectiveCost(load_profile("b200-sxm")).duration_ns(Communication.ALL_REDUCE, SIZE, ACROSS)
    found = changed(rebuilt, "network.topology=b200-sxm")
    assert transfer_ns(found) == pytest.approx(
        transfer_ns(rebuilt) * other.time_ns / modelled(SIZE, ACROSS), abs=1
    )
    computing = ~rebuilt.graph.is_communication()
    assert (found.durations[computing] == rebuilt.durations[computing]).all()


@pytest.mark.parametrize(
    "what_if",
    [
        "network.algorithm=tree:tree",
        "network.topology=h100-sxm:h100-sxm",
        f"network.domain={MACHINE.network.gpus_per_domain}",
        "dp=4",
    ],
)
def test_what_is_there_already_changes_nothing(what_if: str) -> None:
    rebuilt = training()
    assert (changed(rebuilt, what_if).durations == rebuilt.durations).all()


@pytest.mark.parametrize(
    ("there", "back"),
    [
        ("network.algorithm=ring:tree", "network.algorithm=tree:ring"),
        ("network.topology=h100-sxm:a100-sxm-80g", "network.topology=a100-sxm-80g:h100-sxm"),
    ],
)
def test_there_and_back_is_no_change(there: str, back: str) -> None:
    rebuilt = training()
    assert np.abs(changed(rebuilt, there, back).durations - rebuilt.durations).max() <= 2


def test_changes_of_the_network_and_of_kernels_commute() -> None:
    rebuilt = training()
    texts = ("network.algorithm=ring:tree", "dp=8", "scale.phase.forward=0.5", "host=2")
    forwards, backwards = changed(rebuilt, *texts), changed(rebuilt, *reversed(texts))
    assert np.abs(forwards.durations - backwards.durations).max() <= 4


def test_one_data_parallel_rank_does_not_communicate() -> None:
    rebuilt = training()
    assert transfer_ns(changed(rebuilt, "dp=1")) == 0


def test_waiting_for_peers_that_the_trace_does_not_show_is_not_scaled() -> None:
    """Two collectives alike, of 1 and 5 ms: at most 1 ms of each is transfer."""
    recording = Recording()
    columns = {
        "kind": OpKind.COLLECTIVE,
        "communication": Communication.ALL_REDUCE,
        "communication_bytes": SIZE,
        "group": 0,
    }
    recording.launch("synchronise", 0, 7, 1000, columns=columns)
    recording.launch("synchronise", 10, 1008, 5000, columns=columns)
    rebuilt = rebuild(recording.timeline(groups=[CommunicationGroup("dp", ACROSS, 4)]))
    ratio = modelled(SIZE, tuple(range(0, 64, 8))) / modelled(SIZE, ACROSS)
    found = changed(rebuilt, "dp=h100-sxm:8")
    more = found.durations - rebuilt.durations
    assert more[rebuilt.graph.is_communication()] == pytest.approx(1_000_000 * (ratio - 1), abs=1)


def test_memory_of_more_ranks_is_unknown_where_they_share_states_and_else_the_same() -> None:
    (what_if,) = parse_what_ifs(["dp=8"])
    assert memory_of(training(), [what_if]).peak_change == {}
    sharded = memory_of(training(communication=Communication.REDUCE_SCATTER), [what_if])
    assert sharded.peak_change is None
    assert "unknown: what is sharded over data-parallel ranks" in sharded.says


def test_what_was_taken_for_granted_is_said() -> None:
    rebuilt = training()
    notes = ask(rebuilt, ["dp=8"], unexplained(rebuilt)).notes
    assert any("8 data-parallel ranks instead of 4" in note for note in notes)


@pytest.mark.parametrize(
    ("rebuilt", "text", "message"),
    [
        (training(), "network.algorithm=rign", "write [PROFILE:][FROM:]TO with algorithms out of ring, tree, nvls"),
        (training(), "network.algorithm=exchange", "exchange does no ALL_REDUCE among 4 ranks in 4 domains"),
        (training(size=0), "network.algorithm=tree", "none of 1 communication slices can be modelled; looked for the"),
        (training(), "network.domain=0", "network.domain=0: write a whole number from 1 on"),
        (training(), "network.topology=h100", "h100"),
        (training(), "dp=x", "dp=x: write a whole number from 1 on"),
        (training(name="tp", phase=Phase.FORWARD), "dp=8", "no data-parallel communication found; looked for"),
        (training(ranks=()), "dp=8", "does not say how many ranks its data-parallel groups have"),
        (replace(training(), timeline=replace(training().timeline, device="NVIDIA GH100X")),
         "dp=8", "no hardware profile is known for NVIDIA GH100X; write one in front, as in dp="),
    ],
)  # fmt: skip
def test_what_cannot_be_modelled_is_said(rebuilt: Rebuilt, text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 - of profiles and of what-ifs
        changed(rebuilt, text)
    assert message in str(error.value)


def test_collectives_without_a_size_stay_and_are_counted() -> None:
    recording = Recording()
    shared = {"kind": OpKind.COLLECTIVE, "communication": Communication.ALL_REDUCE, "group": 0}
    recording.launch("sized", 0, 7, 1000, columns={**shared, "communication_bytes": SIZE})
    recording.launch("unsized", 10, 1008, 1000, columns=shared)
    rebuilt = rebuild(recording.timeline(groups=[CommunicationGroup("dp", ACROSS, 4)]))
    found = changed(rebuilt, "network.algorithm=h100-sxm:ring:tree")
    moved = found.durations != rebuilt.durations
    assert [rebuilt.graph.strings[name] for name in rebuilt.graph.operations.name[moved]] == ["sized"]
    assert any("1 of 2 communication slices have no size or group" in note for note in found.notes)


# -- SMs of communication --------------------------------------------------------------------------------------------


def beside(kind: OpKind = OpKind.COLLECTIVE, compute: float = 1000, communication: float = 2000) -> Rebuilt:
    """One kernel, beside a communication kernel from begin to end of the shorter."""
    recording = Recording()
    recording.launch("compute", 0, 7, compute)
    columns = {"kind": kind, "communication": Communication.ALL_REDUCE}
    recording.launch("communicate", 0, 7, communication, "stream 20", thread="thread 2", columns=columns)
    return rebuild(replace(recording.timeline(), device="NVIDIA H100 80GB HBM3"))


def durations_us(rebuilt: Rebuilt) -> dict[str, float]:
    rows = np.flatnonzero(rebuilt.on_device())
    names = [rebuilt.graph.strings[n] for n in rebuilt.graph.operations.name[rows]]
    return dict(zip(names, (rebuilt.durations[rows] / 1000).tolist(), strict=True))


def test_fewer_sms_give_compute_beside_them_more_and_collectives_less() -> None:
    found = durations_us(changed(beside(), "communication.sms=24:12"))
    assert found["compute"] == pytest.approx(1000 * (132 - 24) / (132 - 12), abs=0.01)
    assert found["communicate"] == pytest.approx(30 + 1970 * 2, abs=0.01)


def test_what_runs_alone_notices_nothing() -> None:
    found = durations_us(changed(beside(compute=3000, communication=1500), "communication.sms=24:12"))
    share = 0.5
    assert found["compute"] == pytest.approx(3000 * (1 - share + share * 108 / 120), abs=0.01)


def test_the_sms_of_the_profile_are_taken_where_none_are_given_and_the_same_number_is_no_change() -> None:
    assert (changed(beside(), "communication.sms=24").durations == beside().durations).all()
    assert durations_us(changed(beside(), "communication.sms=12")) == durations_us(
        changed(beside(), "communication.sms=h100-sxm:24:12")
    )


def test_more_sms_do_not_widen_a_link() -> None:
    found = durations_us(changed(beside(), "communication.sms=12:24"))
    assert found["communicate"] == 2000
    assert found["compute"] == pytest.approx(1000 * 120 / 108, abs=0.01)


def test_the_range_holds_collectives_that_keep_their_rate() -> None:
    rebuilt = beside()
    found = ask(rebuilt, ["communication.sms=24:12"], unexplained(rebuilt))
    assert found.step == pytest.approx(1000 * (30 + 1970 * 2), rel=1e-3)
    assert found.low == pytest.approx(2_000_000, rel=1e-3)
    assert found.high == found.step


@pytest.mark.parametrize(
    ("rebuilt", "text", "message"),
    [
        (beside(OpKind.P2P), "communication.sms=12", "no device slice of the trace is meant"),
        (beside(), "communication.sms=132", "a h100-sxm has 132 SMs"),
        (beside(), "communication.sms=1:2:3", "write [PROFILE:][FROM:]TO, numbers of SMs"),
        (beside(), "communication.sms=0", "write a whole number from 1 on"),
    ],
)
def test_sms_that_cannot_be(rebuilt: Rebuilt, text: str, message: str) -> None:
    with pytest.raises(ScenarioError) as error:
        changed(rebuilt, text)
    assert message in str(error.value)
