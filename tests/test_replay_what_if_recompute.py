"""What-ifs of recompute: a module's forward in front of its backward, or gone; the simulation is the truth."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import permutations

import numpy as np
import pytest

from op_graphs.vocabulary import FlowKind, OpKind, Phase
from tests.recordings import ALL_REDUCE, US, Recording
from tracesim.errors import ScenarioError
from tracesim.replay import Rebuilt, ask, parse_what_ifs, rebuild, replay, step_times, unexplained
from tracesim.replay.run import step_duration
from tracesim.replay.what_if.outcome import change, memory_of
from tracesim.scenario import load_scenario
from tracesim.simulation import Simulation, simulate


def measured_us(rebuilt: Rebuilt) -> float:
    return step_duration(step_times(replay(rebuilt))) / US


def changed(rebuilt: Rebuilt, *texts: str) -> Rebuilt:
    return change(rebuilt, parse_what_ifs(texts))


def order(rebuilt: Rebuilt) -> list[str]:
    """Names of the device slices of rank 0 in the order in which they run."""
    found = replay(rebuilt)
    rows = np.flatnonzero(rebuilt.on_device() & (rebuilt.rows.rank == 0))
    rows = rows[np.argsort(found.start[rows], kind="stable")]
    return [rebuilt.graph.strings[name] for name in rebuilt.graph.operations.name[rows]]


def two_layers(*, layers: bool = True, recomputed: bool = False) -> Recording:
    """Two layers of attention (100 us) and mlp (50 us), their backwards (twice that), the host far ahead."""
    recording = Recording()
    kernels = [
        (f"{module} {layer}", layer, size, Phase.FORWARD) for layer in range(2) for module, size in MODULES
    ]
    for layer in (1, 0):
        for module, size in reversed(MODULES):
            if recomputed and module == "mlp":
                kernels.append((f"mlp {layer}", layer, size, Phase.RECOMPUTE))
            kernels.append((f"{module} grad {layer}", layer, 2 * size, Phase.BACKWARD_INPUT))
    start, calls = 7.0, {}
    for number, (name, layer, size, phase) in enumerate(kernels):
        forward = phase == Phase.FORWARD
        thread, at = ("thread 1" if forward else "thread 2"), 12.0 * number
        frame = recording.call(
            f"nn.Module: {name.split()[0]}" if forward else "MmBackward0", at - 1, 8, thread
        )
        calls[name, phase] = frame
        if not forward and phase != Phase.RECOMPUTE:
            recording.flows.append(
                (calls[name.replace("grad ", ""), Phase.FORWARD], frame, FlowKind.FORWARD_BACKWARD)
            )
        columns = {"phase": phase, "layer": layer if layers else -1}
        recording.launch(f"kernel of {name}", at, start, size, thread=thread, columns=columns)
        start += size
    return recording


MODULES = (("attention", 100.0), ("mlp", 50.0))
BASE = 3 * 2 * 150.0


@pytest.mark.parametrize("layers", [True, False])
def test_a_module_runs_again_in_front_of_its_backward(layers: bool) -> None:
    rebuilt = rebuild(two_layers(layers=layers).timeline())
    found = changed(rebuilt, "recompute.on=nn.Module: mlp")
    assert measured_us(found) == pytest.approx(BASE + 2 * 50, abs=3)
    assert order(found)[4:] == [
        *("kernel of mlp 1", "kernel of mlp grad 1", "kernel of attention grad 1"),
        *("kernel of mlp 0", "kernel of mlp grad 0", "kernel of attention grad 0"),
    ]


@pytest.mark.parametrize(
    ("pattern", "more"), [("layer 1", 150), ("layer", 300), ("attention", 200), ("kernel of mlp 0", 50)]
)
def test_modules_are_found_by_layer_and_by_name(pattern: str, more: float) -> None:
    rebuilt = rebuild(two_layers().timeline())
    assert measured_us(changed(rebuilt, f"recompute.on={pattern}")) == pytest.approx(BASE + more, abs=4)


def test_a_module_that_is_recomputed_no_longer_is() -> None:
    rebuilt = rebuild(two_layers(recomputed=True).timeline())
    assert measured_us(rebuilt) == pytest.approx(BASE + 100, abs=1)
    assert measured_us(changed(rebuilt, "recompute.off=mlp")) == pytest.approx(BASE, abs=2)
    assert measured_us(changed(rebuilt, "recompute.off=mlp 1")) == pytest.approx(BASE + 50, abs=2)


def test_on_and_off_is_no_change() -> None:
    rebuilt = rebuild(two_layers().timeline())
    back = changed(rebuilt, "recompute.on=mlp", "recompute.off=mlp")
    assert measured_us(back) == pytest.approx(measured_us(rebuilt), abs=3)


def test_recompute_microbatches_and_durations_commute() -> None:
    rebuilt = rebuild(two_layers().timeline())
    texts = ("recompute.on=mlp", "microbatches=3", "scale.name=attention:2")
    found = [measured_us(changed(rebuilt, *one)) for one in permutations(texts)]
    assert found == pytest.approx([3 * (BASE + 100 + 600)] * len(found), abs=12)


def test_a_host_that_is_late_launches_it_too() -> None:
    """A launch every 60 us: the step grows by one more, and by one operation each for entering and running again."""
    recording = Recording()
    forward, backward = Phase.FORWARD, Phase.BACKWARD_INPUT
    names = {"first": forward, "mlp": forward, "mlp grad": backward, "last": backward}
    for number, (name, phase) in enumerate(names.items()):
        recording.launch(name, 60 * number, 60 * number + 7, 20, columns={"phase": phase, "layer": 0})
    rebuilt = rebuild(recording.timeline())
    assert measured_us(rebuilt) == pytest.approx(3 * 60 + 20, abs=1)
    assert measured_us(changed(rebuilt, "recompute.on=^mlp$")) == pytest.approx((4 + 2) * 60 + 20, abs=2)


def profiled(every: float, norm: float = 30.0, mlp: float = 60.0) -> Recording:
    """Three steps of two blocks (norm, mlp) as a profiler writes them, one launch every so many us.

    Forward and autograd have threads of their own, every launch lies in its operator and that in the frame of its
    module, arrows lead from operators to their backwards, and nothing says which layer a kernel is of.
    """
    recording = Recording()
    at = start = 0.0
    for step in range(3):
        began, calls = at, {}
        blocks = [(module, block) for block in range(2) for module in ("norm", "mlp")]
        for backward, (module, block) in [(False, b) for b in blocks] + [(True, b) for b in blocks[::-1]]:
            thread, length = ("thread 2" if backward else "thread 1"), (norm if module == "norm" else mlp)
            if not backward:
                recording.call(f"nn.Module: {module.title()}_{block}", at - 4, 14, thread)
            operator = recording.call(f"aten::{module}", at - 2, 10, thread)
            if backward:
                recording.flows.append((calls[module, block], operator, FlowKind.FORWARD_BACKWARD))
            calls[module, block] = operator
            start = max(at + 7, start)
            phase = Phase.BACKWARD_INPUT if backward else Phase.FORWARD
            kind = OpKind.NORM if module == "norm" else OpKind.GEMM
            name = f"void {module}_{'bwd' if backward else 'fwd'}_kernel"
            recording.launch(name, at, start, length, thread=thread, columns={"phase": phase, "kind": kind})
            start += length
            at += every
        recording.step(step, began - every + 6, at - every + 6)
    return recording


@pytest.mark.parametrize(
    ("pattern", "copies", "device_us"),
    [("nn.Module: Norm", 2, 2 * (30 + 30)), ("nn.Module: Mlp", 0, 2 * 60), ("nn.Module: Norm_1", 1, 30 + 30)],
)
def test_a_checkpoint_of_a_norm_copies_its_output_and_one_of_an_mlp_does_not(
    pattern: str, copies: int, device_us: float
) -> None:
    """The host is far ahead, so what it does for checkpoints costs nothing."""
    rebuilt = rebuild(profiled(every=12).timeline())
    found = changed(rebuilt, f"recompute.on={pattern}")
    assert sum(name.endswith("kernel restored") for name in order(found)) == 3 * copies
    assert measured_us(found) - measured_us(rebuilt) == pytest.approx(device_us, abs=5)


@pytest.mark.parametrize(("pattern", "launches"), [("nn.Module: Norm", 2), ("nn.Module: Mlp", 1)])
def test_a_host_that_is_late_has_the_work_of_checkpoints_too(pattern: str, launches: int) -> None:
    """Every 100 us a launch: two passes launch again what they launched (and a copy), and take two operations each."""
    rebuilt = rebuild(profiled(every=100).timeline())
    found = changed(rebuilt, f"recompute.on={pattern}")
    assert measured_us(found) - measured_us(rebuilt) == pytest.approx(2 * (launches + 2) * 100, rel=0.02)


@pytest.mark.parametrize("every", [12.0, 60.0, 100.0])
@pytest.mark.parametrize("pattern", ["Norm", "nn.Module: Mlp", "kernel", "Norm_0"])
def test_on_and_off_of_a_profiled_run_returns_to_its_time(every: float, pattern: str) -> None:
    rebuilt = rebuild(profiled(every).timeline())
    back = changed(rebuilt, f"recompute.on={pattern}", f"recompute.off={pattern}")
    assert measured_us(back) == pytest.approx(measured_us(rebuilt), rel=0.002)


def test_without_launches_the_note_says_that_the_host_is_not_in() -> None:
    found = changed(rebuild(simulated(NO_PIPELINE, "none").timeline()), "recompute.on=layernorm")
    assert any("what the host does for checkpoints is not in" in note for note in found.notes)
    assert any("the outputs of 256 are copied to where they are read" in note for note in found.notes)


def test_communication_of_a_module_meets_its_peers_again() -> None:
    recording = Recording()
    for rank, slower in ((0, 0.0), (1, 30.0)):
        recording.launch(
            "product", 0, 7, 100 + slower, rank=rank, columns={"phase": Phase.FORWARD, "layer": 0}
        )
        columns = {**ALL_REDUCE, "phase": Phase.FORWARD, "layer": 0}
        recording.launch("reduce", 10, 107 + slower, 90 - slower, rank=rank, columns=columns)
        backward = {"phase": Phase.BACKWARD_INPUT, "layer": 0}
        recording.launch("grad", 20, 197, 200, rank=rank, columns=backward)
    rebuilt = rebuild(recording.timeline())
    found = changed(rebuilt, "recompute.on=layer 0")
    meetings = found.graph.operations.rendezvous
    assert np.unique(meetings[meetings >= 0], return_counts=True)[1].tolist() == [2, 2]
    assert measured_us(found) == pytest.approx(measured_us(rebuilt) + 130 + 60, abs=3)


# -- against the simulation ------------------------------------------------------------------------------------------

NO_PIPELINE, FOUR_STAGES = "llama2-7b-dp8", "llama3-8b-tp2-pp4-dp8"


@cache
def simulated(scenario: str, recompute: str, *, host_ahead: bool = False) -> Simulation:
    changes = ["training.global_batch_size=32", f"training.recompute={recompute}"]
    if host_ahead:
        changes.append("hardware={base: h100-sxm, host: {operation_us: 20}}")
    return simulate(load_scenario(scenario, changes))


def run_us(simulation: Simulation) -> float:
    return float(simulation.execution.end.max()) / US


@pytest.mark.parametrize("scenario", [NO_PIPELINE, FOUR_STAGES])
@pytest.mark.parametrize(
    ("before", "after", "what_if", "within"),
    [
        ("none", "{modules: [core_attn]}", "recompute.on=flash", 0.001),
        ("none", "{modules: [layernorm]}", "recompute.on=layernorm", 0.001),
        ("none", "{modules: [mlp]}", "recompute.on=mlp", 0.01),
        ("none", "full", "recompute.on=layer", 0.015),
        ("{modules: [mlp]}", "none", "recompute.off=mlp", 0.001),
        ("full", "none", "recompute.off=.", 0.001),
    ],
)
def test_the_simulation_of_the_changed_scenario_agrees(
    scenario: str, before: str, after: str, what_if: str, within: float
) -> None:
    """Kernels of another recompute, and copies of checkpoints; of a host that is late the traces tell nothing."""
    found = changed(rebuild(simulated(scenario, before, host_ahead=True).timeline()), what_if)
    truth = simulated(scenario, after, host_ahead=True)
    assert measured_us(found) == pytest.approx(run_us(truth), rel=within)


@pytest.mark.parametrize("scenario", [NO_PIPELINE, FOUR_STAGES])
@pytest.mark.parametrize(
    ("before", "after", "what_if", "least"),
    [
        ("none", "{modules: [layernorm]}", "recompute.on=layernorm", 0.88),
        ("none", "{modules: [mlp]}", "recompute.on=mlp", 0.7),
        ("{modules: [mlp]}", "none", "recompute.off=mlp", 0.8),
        ("full", "none", "recompute.off=.", 0.85),
    ],
)
def test_memory_is_an_upper_bound_of_what_the_simulation_gives(
    scenario: str, before: str, after: str, what_if: str, least: float
) -> None:
    measured, truth = simulated(scenario, before), simulated(scenario, after)
    effect = memory_of(rebuild(measured.timeline()), parse_what_ifs([what_if]))
    assert effect.peak_change is not None
    for rank, (old, new) in enumerate(zip(measured.memory, truth.memory, strict=True)):
        assert least <= (new.peak - old.peak) / effect.peak_change[rank] <= 1.01


def test_memory_is_unknown_without_a_curve() -> None:
    effect = memory_of(rebuild(two_layers().timeline()), parse_what_ifs(["recompute.on=mlp"]))
    assert effect.peak_change is None
    assert effect.says.startswith(
        "unknown: fewer activations; how much is not known: the trace has no memory events"
    )


# -- what cannot be told -----------------------------------------------------------------------------------------------


def untied() -> Rebuilt:
    """Without layers and without arrows."""
    recording = two_layers(layers=False)
    recording.flows = [flow for flow in recording.flows if flow[2] != FlowKind.FORWARD_BACKWARD]
    return rebuild(recording.timeline())


@pytest.mark.parametrize(
    ("rebuilt", "text", "message"),
    [
        (rebuild(two_layers().timeline()), "recompute.on=moe", "no slice of a forward pass matches; looked in module"),
        (rebuild(two_layers().timeline()), "recompute.off=mlp", "nothing is recomputed in the trace; looked for"),
        (rebuild(two_layers(recomputed=True).timeline()), "recompute.off=moe", "none of 2 recomputed slices match"),
        (untied(), "recompute.on=mlp", "nothing ties them to their backward; looked for backward"),
        (rebuild(two_layers().timeline()), "recompute.on=(", "no regular expression"),
    ],
)  # fmt: skip
def test_what_the_trace_does_not_show_is_said(rebuilt: Rebuilt, text: str, message: str) -> None:
    with pytest.raises(ScenarioError) as error:
        changed(rebuilt, text)
    assert message in str(error.value)


def test_the_outcome_says_time_limit_and_memory() -> None:
    rebuilt = rebuild(replace(two_layers().timeline(), device="GPU"))
    found = ask(rebuilt, ["recompute.on=mlp"], unexplained(rebuilt))
    assert found.step > found.base_step
    assert max(found.limits, key=lambda what: found.limits[what]) == "compute"
    assert any("2 slices in 2 passes run again" in note for note in found.notes)
