"""What-ifs of microbatches and schedules: closed forms, and the simulation of the changed scenario as the truth."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from op_graphs.timeline import CommunicationGroup
from op_graphs.vocabulary import Communication, OpKind, Phase
from schedules import Action, Schedule, build_schedule, peak_activations
from tests.recordings import US, Recording
from tracesim.errors import ScenarioError
from tracesim.readers import read_trace
from tracesim.replay import Outcome, Rebuilt, ask, parse_what_ifs, rebuild, replay, step_times, unexplained
from tracesim.replay.run import step_duration
from tracesim.replay.what_if.outcome import change, memory_of
from tracesim.replay.what_if.pipeline import measured_orders
from tracesim.replay.what_if.program import find_program
from tracesim.replay.what_if.transfers import arranged
from tracesim.scenario import load_scenario
from tracesim.simulation import Simulation, simulate

CPU_TRACES = Path(__file__).resolve().parent / "data/cpu_traces"
FORWARD, BACKWARD = 100.0, 200.0
PHASES = {
    "F": Phase.FORWARD,
    "B": Phase.BACKWARD_INPUT,
    "I": Phase.BACKWARD_INPUT,
    "W": Phase.BACKWARD_WEIGHT,
}
TIMES = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD / 2, "W": BACKWARD / 2}


def outcome(rebuilt: Rebuilt, *texts: str) -> Outcome:
    return ask(rebuilt, texts, unexplained(rebuilt))


def accumulating(microbatches: int, steps: int = 1) -> Recording:
    """One rank, forwards of 100 us each with its backward of 200 us behind it, then an optimizer of 50 us."""
    recording = Recording()
    called, start = 0.0, 7.0
    for number in range(steps):
        recording.step(number, called, called + (2 * microbatches + 1) * 10)
        kernels = [
            ("forward", FORWARD, Phase.FORWARD),
            ("backward", BACKWARD, Phase.BACKWARD_INPUT),
        ] * microbatches
        for name, duration, phase in [*kernels, ("optimizer", 50.0, Phase.OPTIMIZER)]:
            recording.launch(name, called, start, duration, columns={"phase": phase})
            start += duration
            called += 10
    return recording


@pytest.mark.parametrize("before", [1, 2, 3, 5])
@pytest.mark.parametrize("after", [1, 2, 4, 7])
def test_accumulated_gradients_take_as_long_as_their_forwards_and_backwards(before: int, after: int) -> None:
    found = outcome(rebuild(accumulating(before).timeline()), f"microbatches={after}")
    assert found.step / US == pytest.approx(after * (FORWARD + BACKWARD) + 50, abs=after)


def test_every_step_gets_the_microbatches() -> None:
    rebuilt = change(rebuild(accumulating(2, steps=3).timeline()), parse_what_ifs(["microbatches=4"]))
    assert [time.replayed / US for time in step_times(replay(rebuilt))] == pytest.approx([1250] * 3, abs=4)


@dataclass
class Clock:
    """What each rank of a pipeline with one stage a rank does when, in microseconds."""

    actions: list[tuple[int, Action, float, float]]
    """Rank, action, start, end."""
    sends: list[tuple[int, int, Action, float, float, float]]
    """Sender, receiver, what is sent, its start and end, and when the receive was posted."""


def clock(schedule: Schedule, transfer: float, scale: float = 1.0) -> Clock:
    """The run of a schedule with 100 us a forward and 200 us a backward; a receive is posted behind the one before."""
    found = Clock([], [])
    ends: dict[tuple[int, str, int], float] = {}
    posted: dict[tuple[int, int], float] = {}
    free = [0.0] * schedule.pp
    left = [list(row) for row in schedule.actions]
    while any(left):
        for rank, row in enumerate(left):
            while row:
                kind, microbatch = row[0].kind.value, row[0].microbatch
                neighbour = rank - 1 if kind == "F" else rank + 1
                source, start = (neighbour, kind, microbatch), free[rank]
                if kind != "W" and 0 <= neighbour < schedule.pp:
                    if source not in ends:
                        break
                    arrived = ends[source] + transfer
                    way = (neighbour, rank)
                    found.sends.append((*way, row[0], ends[source], arrived, posted.get(way, 0.0)))
                    posted[way] = arrived
                    start = max(start, arrived)
                free[rank] = ends[rank, kind, microbatch] = start + scale * TIMES[kind]
                found.actions.append((rank, row.pop(0), start, free[rank]))
    return found


def pipeline(
    name: str, pp: int, microbatches: int, transfer: float = 10.0, *, known: bool = True
) -> Recording:
    """One rank a stage; sends and receives meet on streams of their own; nothing is launched by a host."""
    recording = Recording()
    times = clock(build_schedule(name, pp, 1, microbatches), transfer)
    for rank, action, start, end in times.actions:
        kind = action.kind.value
        columns = {"phase": PHASES[kind], "microbatch": action.microbatch if known else -1, "chunk": 0}
        recording.kernel(f"{kind} of {rank}", start, end - start, "stream 7", rank, None, **columns)
    for sender, receiver, action, start, end, posted in times.sends:
        pair = {"kind": OpKind.P2P, "group": min(sender, receiver), "communication_bytes": 1 << 20}
        pair |= {"sequence": 2 * action.microbatch + (receiver < sender)}
        stream = f"stream {sender}{receiver}"
        for rank, what, begin in (
            (sender, Communication.SEND, start),
            (receiver, Communication.RECEIVE, posted),
        ):
            recording.kernel("transfer", begin, end - begin, stream, rank, None, communication=what, **pair)
    return recording


def rebuilt_pipeline(
    name: str, pp: int, microbatches: int, transfer: float = 10.0, *, known: bool = True
) -> Rebuilt:
    recording = pipeline(name, pp, microbatches, transfer, known=known)
    timeline = recording.timeline([CommunicationGroup("pp", (rank, rank + 1), 2) for rank in range(pp)])
    ranks = timeline.ranks.with_columns(pp=np.arange(pp))
    return rebuild(type(timeline)(**{**vars(timeline), "ranks": ranks}))


def measured_us(rebuilt: Rebuilt) -> float:
    return step_duration(step_times(replay(rebuilt))) / US


@pytest.mark.parametrize(
    ("before", "after", "what_if"),
    [
        (("1f1b", 4, 8), ("1f1b", 4, 12), "microbatches=12"),
        (("1f1b", 4, 8), ("1f1b", 4, 4), "microbatches=4"),
        (("1f1b", 3, 6), ("gpipe", 3, 6), "schedule=gpipe"),
        (("gpipe", 2, 4), ("1f1b", 2, 4), "schedule=1f1b"),
        (("gpipe", 2, 4), ("gpipe", 2, 9), "microbatches=9"),
        (("zb-h1", 4, 8), ("1f1b", 4, 8), "schedule=1f1b"),
        (("zb-h1", 4, 8), ("zb-h2", 4, 8), "schedule=zb-h2"),
        (("zb-h1", 4, 8), ("zb-h1", 4, 6), "microbatches=6"),
    ],
)
def test_the_changed_run_is_the_one_that_would_have_been_recorded(
    before: tuple[str, int, int], after: tuple[str, int, int], what_if: str
) -> None:
    found = outcome(rebuilt_pipeline(*before), what_if)
    assert found.step / US == pytest.approx(measured_us(rebuilt_pipeline(*after)), abs=1)


@pytest.mark.parametrize(("pp", "count"), [(2, 4), (4, 8)])
def test_the_bubble_is_the_one_of_the_paper(pp: int, count: int) -> None:
    """Without time for sends a step of 1F1B is (microbatches + stages - 1) forwards and backwards."""
    found = outcome(rebuilt_pipeline("1f1b", pp, count, 0.001), f"microbatches={2 * count}")
    assert found.step / US == pytest.approx((2 * count + pp - 1) * (FORWARD + BACKWARD), abs=1)


@pytest.mark.parametrize("text", ["microbatches=8", "schedule=1f1b"])
def test_what_is_there_already_changes_nothing(text: str) -> None:
    rebuilt = rebuilt_pipeline("1f1b", 4, 8)
    assert change(rebuilt, parse_what_ifs([text])) is rebuilt


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1"])
def test_put_together_as_it_was_the_run_takes_as_long(name: str) -> None:
    rebuilt = rebuilt_pipeline(name, 4, 8)
    program = find_program(rebuilt, "test")
    again = arranged(rebuilt, program, measured_orders(program))
    assert measured_us(again) == pytest.approx(measured_us(rebuilt), abs=1)


def test_there_and_back_is_no_change() -> None:
    rebuilt = rebuilt_pipeline("1f1b", 4, 8)
    back = change(
        rebuilt, parse_what_ifs(["microbatches=12", "schedule=gpipe", "schedule=1f1b", "microbatches=8"])
    )
    assert measured_us(back) == pytest.approx(measured_us(rebuilt), abs=1)


def test_microbatches_schedules_and_durations_commute() -> None:
    rebuilt = rebuilt_pipeline("1f1b", 3, 6)
    texts = ("microbatches=9", "schedule=gpipe", "scale.phase.forward=0.5")
    found = [measured_us(change(rebuilt, parse_what_ifs(order))) for order in permutations(texts)]
    assert found == pytest.approx([found[0]] * len(found), abs=1)


def test_twice_all_durations_is_twice_the_time_after_it_too() -> None:
    rebuilt = rebuilt_pipeline("1f1b", 4, 4)
    once = measured_us(change(rebuilt, parse_what_ifs(["microbatches=8"])))
    twice = measured_us(change(rebuilt, parse_what_ifs(["microbatches=8", "scale=2"])))
    assert twice == pytest.approx(2 * once, abs=1)


# -- as a profiler records it ---------------------------------------------------------------------------------------


WORDS = {"F": "Forward", "B": "Backward"}
SLOT = 50.0
"""Microseconds the host takes for an action: it runs ahead of the device."""


def profiled(folder: Path, microbatches: int, name: str) -> Path:
    """Two stages of 1F1B as torch.profiler writes them: a file a rank, actions named on the host, sends by NCCL.

    A forward takes 1 ms, a backward 2 ms, each in two kernels; forwards, sends and receives are launched by one thread,
    backwards by that of the autograd engine.
    """
    times = clock(build_schedule("1f1b", 2, 1, microbatches), 20.0, 10)
    for rank in range(2):
        mine = [(action, start, end) for owner, action, start, end in times.actions if owner == rank]
        events = [_event("user_annotation", "ProfilerStep#0", 1, -5, SLOT * len(mine) + 20)]
        for slot, (action, start, end) in enumerate(mine):
            kind = action.kind.value
            label = name.format(stage=rank, kind=kind, word=WORDS[kind], number=action.microbatch)
            events += _recorded(label, kind == "F", slot, start, end)
            for number, (sender, receiver, what, begin, until, posted) in enumerate(times.sends):
                sends = rank == sender and (what.kind, what.microbatch) == (action.kind, action.microbatch)
                if sends or (rank == receiver and what == action):
                    called = SLOT * slot + (40 if sends else 1)
                    begin = begin if sends else max(posted, called + 8)
                    events += _transfer(
                        sender, 10_000 + number, called, begin, until, 2 * what.microbatch + receiver
                    )
        document = {
            "schemaVersion": 1,
            "deviceProperties": [{"id": 0, "name": "NVIDIA H100"}],
            "distributedInfo": {"rank": rank, "world_size": 2, "backend": "nccl"},
            "traceEvents": events,
        }
        (folder / f"rank{rank}.json").write_text(json.dumps(document))
    return folder


def _event(
    category: str, name: str, thread: int, start: float, duration: float, **arguments: Any
) -> dict[str, Any]:
    device = category == "kernel"
    arguments |= {"stream": thread, "device": 0} if device else {}
    # The first kernel starts after its launch.
    moment = start + (120 if device else 100)
    place = {"pid": 0 if device else 1, "tid": thread, "ts": moment, "dur": duration}
    return {"ph": "X", "cat": category, "name": name, **place, "args": arguments}


def _recorded(name: str, forward: bool, slot: int, start: float, end: float) -> list[dict[str, Any]]:
    """An action: its annotation, an operator, two launches, two kernels."""
    thread, half, at = (1 if forward else 2), (end - start) / 2, SLOT * slot + 10
    around = "aten::linear" if forward else "autograd::engine::evaluate_function: MulBackward0"
    events = [_event("user_annotation", name, thread, at, 26), _event("cpu_op", around, thread, at + 1, 24)]
    for which in range(2):
        joined = {"correlation": 10 * slot + 1 + which}
        events.append(_event("cuda_runtime", "cudaLaunchKernel", thread, at + 3 + 8 * which, 5, **joined))
        events.append(_event("kernel", "gemm", 7, start + half * which, half, **joined))
    return events


def _transfer(
    sender: int, number: int, called: float, start: float, end: float, order: int
) -> list[dict[str, Any]]:
    """A send or receive on a stream for each direction."""
    joined = {"correlation": number}
    group = {"Process Group Name": "1", "Process Group Description": "pp", "Process Group Ranks": "[0, 1]"}
    what = {"Collective name": "send", "In msg nelems": 1024, "dtype": "Float", "Group size": 2, "Seq": order}
    return [
        _event("cuda_runtime", "cudaLaunchKernel", 1, called, 5, **joined),
        _event(
            "kernel", "ncclDevKernel_SendRecv", 20 + sender, start, end - start, **group, **what, **joined
        ),
    ]


@pytest.mark.parametrize("name", ["PP:{stage}{kind}{number}", "{word} {number}"])
@pytest.mark.parametrize("after", [4, 8])
def test_actions_of_a_profiled_pipeline_are_found(tmp_path: Path, name: str, after: int) -> None:
    rebuilt = rebuild(read_trace([profiled(tmp_path, 6, name)]))
    program = find_program(rebuilt, "test")
    assert program.schedule.actions == build_schedule("1f1b", 2, 1, 6).actions
    again = measured_us(arranged(rebuilt, program, measured_orders(program)))
    assert again == pytest.approx(measured_us(rebuilt), rel=0.01)
    changed = change(rebuilt, parse_what_ifs([f"microbatches={after}"]))
    times = clock(build_schedule("1f1b", 2, 1, after), 20.0, 10)
    assert measured_us(changed) == pytest.approx(max(end for _, _, _, end in times.actions), rel=0.01)


# -- against the simulation ------------------------------------------------------------------------------------------

FOUR_STAGES, TWO_CHUNKS, NO_PIPELINE = "llama3-8b-tp2-pp4-dp8", "llama3-8b-tp2-pp2-vpp2-dp2", "llama2-7b-dp8"


@cache
def simulated(scenario: str, *overrides: str) -> Simulation:
    return simulate(load_scenario(scenario, list(overrides)))


def batch(scenario: str, microbatches: int) -> str:
    ranks = {FOUR_STAGES: 8, TWO_CHUNKS: 2, NO_PIPELINE: 8}[scenario]
    return f"training.global_batch_size={ranks * microbatches}"


def run_us(simulation: Simulation) -> float:
    return float(simulation.execution.end.max()) / US


@pytest.mark.parametrize(
    ("scenario", "before", "after", "what_if", "within"),
    [
        (NO_PIPELINE, ("1f1b", 4), ("1f1b", 8), "microbatches=8", 0.001),
        (FOUR_STAGES, ("1f1b", 4), ("1f1b", 8), "microbatches=8", 0.002),
        (FOUR_STAGES, ("1f1b", 4), ("gpipe", 4), "schedule=gpipe", 0.002),
        (FOUR_STAGES, ("1f1b", 8), ("zb-h1", 8), "schedule=zb-h1", 0.015),
        (FOUR_STAGES, ("zb-h1", 8), ("1f1b", 8), "schedule=1f1b", 0.015),
        (TWO_CHUNKS, ("interleaved-1f1b", 4), ("looped-bfs", 4), "schedule=looped-bfs", 0.005),
        (TWO_CHUNKS, ("interleaved-1f1b", 4), ("interleaved-1f1b", 6), "microbatches=6", 0.005),
        (TWO_CHUNKS, ("zb-v", 4), ("v-half", 4), "schedule=v-half", 0.02),
    ],
)
def test_the_simulation_of_the_changed_scenario_agrees(
    scenario: str, before: tuple[str, int], after: tuple[str, int], what_if: str, within: float
) -> None:
    measured, truth = (
        simulated(scenario, f"schedule={name}", batch(scenario, count)) for name, count in (before, after)
    )
    found = change(rebuild(measured.timeline()), parse_what_ifs([what_if]))
    assert measured_us(found) == pytest.approx(run_us(truth), rel=within)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_memory_of_another_schedule_is_that_of_the_microbatches_held() -> None:
    measured = simulated(FOUR_STAGES, "schedule=1f1b", batch(FOUR_STAGES, 8))
    truth = simulated(FOUR_STAGES, "schedule=gpipe", batch(FOUR_STAGES, 8))
    effect = memory_of(rebuild(measured.timeline()), parse_what_ifs(["schedule=gpipe"]))
    assert effect.says.startswith(
        "activations of microbatches held at once: 4 -> 8 on pipeline rank 0, 3 -> 8"
    )
    assert effect.peak_change is not None
    for rank, (old, new) in enumerate(zip(measured.memory, truth.memory, strict=True)):
        assert effect.peak_change[rank] == pytest.approx(new.peak - old.peak, rel=0.12)


def test_more_microbatches_of_1f1b_hold_no_more_memory() -> None:
    assert memory_of(rebuilt_pipeline("1f1b", 4, 8), parse_what_ifs(["microbatches=16"])).peak_change == {}


def test_memory_is_said_in_microbatches_where_the_trace_has_no_curve() -> None:
    effect = memory_of(rebuilt_pipeline("1f1b", 3, 6), parse_what_ifs(["schedule=gpipe"]))
    assert effect.peak_change is None
    assert "unknown: activations of microbatches held at once: 3 -> 6 on pipeline rank 0" in effect.says
    assert peak_activations(build_schedule("1f1b", 3, 1, 6)) == (3, 2, 1)
    assert "the trace has no memory events (record with profile_memory=True)" in effect.says


@pytest.mark.parametrize("run", ["ddp", "ddp_slow_rank"])
def test_gradients_accumulated_on_cpu_take_a_forward_and_a_backward_more(run: str) -> None:
    """Threads are the devices there, and all-reduces of gloo are launched by the backward."""
    rebuilt = rebuild(read_trace([CPU_TRACES / run]))
    found = outcome(rebuilt, "microbatches=3")
    assert 2.6 <= found.step / found.base_step <= 3.1
    assert any("the trace has one microbatch" in note for note in found.notes)


def test_a_run_that_does_not_consist_of_its_actions_is_refused() -> None:
    """Two stages on busy cores: their sends and receives take longer than what they wait for explains."""
    rebuilt = rebuild(read_trace([CPU_TRACES / "pipeline_1f1b"]))
    assert find_program(rebuilt, "test").schedule.actions == build_schedule("1f1b", 2, 1, 4).actions
    with pytest.raises(ScenarioError, match=r"put together from its actions as it was, .* more than 10 %"):
        outcome(rebuilt, "microbatches=8")


# -- what cannot be told -----------------------------------------------------------------------------------------------


def without_backward() -> Rebuilt:
    recording = Recording()
    for number in range(4):
        recording.launch("forward", 10 * number, 7 + 100 * number, 100, columns={"phase": Phase.FORWARD})
    return rebuild(recording.timeline())


def last_in_first_out() -> Rebuilt:
    recording = Recording()
    actions = [("F", 0), ("F", 1), ("F", 2), ("B", 2), ("B", 1), ("B", 0)]
    for number, (kind, microbatch) in enumerate(actions):
        columns = {"phase": PHASES[kind], "microbatch": microbatch}
        recording.launch(kind, 10 * number, 7 + 100 * number, 100, columns=columns)
    return rebuild(recording.timeline())


def one_stage_of_several() -> Rebuilt:
    rebuilt = rebuilt_pipeline("1f1b", 3, 6)
    return rebuild(rebuilt.timeline.select_ranks(np.array([1], dtype=np.int32)))


@pytest.mark.parametrize(
    ("rebuilt", "text", "message"),
    [
        (without_backward(), "microbatches=4", "no step of whole forwards and backwards"),
        (rebuilt_pipeline("1f1b", 2, 4, known=False), "microbatches=8", "nothing says which microbatch a slice is of"),
        (one_stage_of_several(), "microbatches=8", "pipeline rank 0 is missing: give the files of one rank"),
        (rebuilt_pipeline("1f1b", 2, 4), "schedule=1f2b", "unknown schedule '1f2b': valid are"),
        (rebuilt_pipeline("1f1b", 2, 4), "schedule=interleaved-1f1b", "needs at least 2 model chunks a rank"),
        (rebuilt_pipeline("1f1b", 2, 4), "schedule=zb-h1", "does not tell it from that for the input; looked for"),
        (rebuilt_pipeline("1f1b", 2, 4), "schedule=dualpipe", "layers are not moved between ranks"),
        (rebuilt_pipeline("1f1b", 2, 4), "microbatches=0", "write a whole number from 1 on"),
        (last_in_first_out(), "microbatches=8", "is that of no known schedule"),
    ],
)  # fmt: skip
def test_what_the_trace_does_not_show_is_said(rebuilt: Rebuilt, text: str, message: str) -> None:
    with pytest.raises(ScenarioError) as error:
        change(rebuilt, parse_what_ifs([text]))
    assert message in str(error.value)
