"""An automatic schedule from the times of the passes of the scenario it runs in (``greedy:times=profiled``)."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from op_graphs.vocabulary import OpKind
from schedules import ScheduleError, build_schedule
from tests.dense_scenarios import dense_mapping
from tracesim.cli import main
from tracesim.lowering import lower_scenario
from tracesim.profiled_schedule import pass_costs, posting_ns
from tracesim.scenario import load_scenario
from tracesim.simulation import iteration_ms, simulate


def scenario_with(schedule: str, **changes):
    changes = {"parallel__pp": 4, "training__num_microbatches": 12, "model__layers": 8, **changes}
    return load_scenario(dense_mapping(schedule=schedule, overlap__p2p=True, **changes))


def options(name: str) -> dict[str, str]:
    return dict(part.split("=") for part in name.partition(":")[2].split(","))


def test_the_times_are_those_of_the_passes_it_then_runs():
    simulation = simulate(scenario_with("greedy:memory=8,weight_memory=0.5,times=profiled"))
    used = options(simulation.scenario.schedule)
    assert set(used) == {"memory", "weight_memory", "forward", "input", "weight", "transfer"}
    posting = posting_ns(simulation.scenario)
    ran = pass_costs(simulation.graph, simulation.execution, 2, posting=posting)
    for option, time in (
        ("forward", ran.forward),
        ("input", ran.backward_input),
        ("weight", ran.backward_weight),
        ("transfer", ran.transfer),
    ):
        # In the profile passes run as they do in the step, and times are rounded to the microsecond.
        assert float(used[option]) == pytest.approx(time / 1e6, rel=0.02, abs=1e-3), option


def test_a_profiled_transfer_is_received_waited_for_and_sent_on():
    """A chain of transfers that the host launches one by one: over both kinds of links, with two launches a link."""
    scenario = scenario_with("1f1b", parallel__pp=16, model__layers=16)
    simulation = simulate(scenario)
    operations = simulation.graph.operations
    lasts = (simulation.execution.end - simulation.execution.start)[operations.kind == OpKind.P2P]
    assert lasts.max() > 1.5 * lasts.min()
    costs = pass_costs(simulation.graph, simulation.execution, 2, posting=posting_ns(scenario))
    launch_ns = 1e3 * scenario.hardware.host.operation_us
    assert costs.transfer == pytest.approx(lasts.mean() + 2 * launch_ns)


def test_the_step_is_that_of_the_schedule_with_these_times():
    scenario = scenario_with("greedy:memory=8,times=profiled")
    simulation = simulate(scenario)
    again = simulate(scenario_with(simulation.scenario.schedule))
    assert (again.execution.end == simulation.execution.end).all()
    assert iteration_ms(scenario) == simulation.report["iteration_time_ms"]


def test_a_profile_sees_the_host_fetch_a_batch():
    """Its timer waits for the device, starts, and then the forward fetches its batch."""
    kept, waits = (
        float(options(simulate(scenario).scenario.schedule)["forward"])
        for scenario in (
            scenario_with("greedy:times=profiled", libraries__batch_fetch_waits=flag)
            for flag in (False, True)
        )
    )
    resume_ms = scenario_with("1f1b").hardware.host.resume_us / 1e3
    assert resume_ms > 0
    assert waits - kept == pytest.approx(resume_ms, abs=2e-3)


@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (2, 2), (2, 4)])
def test_any_number_of_chunks_can_be_profiled(pp, vpp):
    simulation = simulate(
        scenario_with(
            "greedy:times=profiled", parallel__pp=pp, parallel__vpp=vpp, training__num_microbatches=4
        )
    )
    used = options(simulation.scenario.schedule)
    assert float(used["forward"]) > 0
    assert float(used["weight"]) > 0


def test_a_flushed_schedule_is_profiled_in_one_call_of_a_few_microbatches():
    """Six microbatches a call on four ranks, and a profile of four: the times are those without flushes."""
    flushed = simulate(scenario_with("greedy:flush=6,times=profiled")).scenario.schedule
    whole = simulate(scenario_with("greedy:times=profiled")).scenario.schedule
    assert options(flushed) == {**options(whole), "flush": "6"}


def test_without_a_scenario_to_profile_it_is_refused():
    with pytest.raises(ScheduleError, match="there is none here"):
        build_schedule("greedy:times=profiled", 4, 1, 8)
    with pytest.raises(ScheduleError, match="there is none here"):
        lower_scenario(scenario_with("greedy:times=profiled"))
    shown = CliRunner().invoke(
        main, ["schedule", "show", "greedy:times=profiled", "--pp", "4", "--microbatches", "8"]
    )
    assert shown.exit_code == 2
    assert "give forward=..., input=..., weight=... and transfer=... instead" in shown.output


def test_the_command_compares_it_on_a_scenario():
    arguments = [
        "schedule",
        "compare",
        "1f1b",
        "greedy:times=profiled",
        "--scenario",
        "llama3-8b-tp2-pp4-dp8",
    ]
    rows = json.loads(CliRunner().invoke(main, [*arguments, "--json"]).output)["rows"]
    assert rows[1]["iteration_time_ms"] < rows[0]["iteration_time_ms"]


def test_the_check_command_takes_what_weight_gradients_hold():
    arguments = ["schedule", "check", "greedy:memory=8,weight=0.5,weight_memory=0.25", "--pp", "4"]
    arguments += ["--microbatches", "16", "--memory-limit", "8"]
    assert CliRunner().invoke(main, [*arguments, "--weight-memory", "0.25"]).exit_code == 0
    refused = CliRunner().invoke(main, arguments)
    assert refused.exit_code == 1
    assert "the limit is 8" in refused.output
