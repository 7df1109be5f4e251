"""Policies of overlap: what each lets run beside what, held by rows, closed forms and simulated steps."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from op_graphs.graph import GemmShape, OpGraph
from op_graphs.graph_names import GraphNames
from op_graphs.lowering_context import LoweringContext
from op_graphs.overlap.policy import TensorPlacement
from op_graphs.overlap.registry import OVERLAP_POINTS, TENSOR, describe_policies
from op_graphs.plan import OverlapPlan
from op_graphs.program import Program, ProgramBuilder
from op_graphs.vocabulary import DType, OpKind, Phase, Stream
from schedules import (
    Action,
    Schedule,
    add_communication,
    build_schedule,
    check_blocking_sends,
    check_schedule,
    schedule_names,
    usual_chunks,
    without_communication,
)
from tests.dense_scenarios import dense_mapping
from tests.graphs import graph_of, naive_times
from tests.one_operation_programs import durations_of, one_operation_step
from tracesim.cli import main
from tracesim.engine import execute
from tracesim.errors import ScenarioError
from tracesim.lowering import lower_scenario
from tracesim.scenario import Scenario, load_scenario
from tracesim.simulation import Simulation, simulate

DOCS = Path(__file__).resolve().parent.parent / "docs" / "overlap.md"
MOE: dict[str, Any] = {
    "model": {
        "name": "moe",
        "layers": 8,
        "hidden_size": 2048,
        "ffn_size": 4096,
        "heads": 8,
        "kv_heads": 8,
        "head_size": 64,
        "vocab_size": 1024,
        "moe": {"experts": 16, "top_k": 2, "expert_ffn_size": 4096},
    },
    # A host that is ahead of the device: what runs beside what is the policies' alone.
    "hardware": {"base": "h100-sxm", "host": {"operation_us": 20.0}},
    "parallel": {"pp": 2, "dp": 8, "ep": 8},
    "training": {"seq_len": 4096, "num_microbatches": 8},
    "schedule": "dualpipe",
}


def chosen(**policies: bool | str) -> dict[str, bool | str]:
    return {f"overlap__{point}": name for point, name in policies.items()}


def step(**changes: Any) -> Simulation:
    return simulate(load_scenario(dense_mapping(**changes)))


def moe(**overlap: bool | str) -> Simulation:
    return simulate(load_scenario({**MOE, "overlap": overlap}))


# -- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", OVERLAP_POINTS)
def test_true_and_false_stand_for_named_policies(point: str) -> None:
    scenario = {"parallel__tp": 2, "parallel__sp": True, "parallel__dp": 2, "parallel__pp": 2}

    def graph(value: bool | str) -> OpGraph:
        mapping = dense_mapping(**scenario, **chosen(**{point: value}))
        return lower_scenario(load_scenario(mapping))

    for value, policy in zip((True, False), OVERLAP_POINTS[point].policies, strict=False):
        assert graph(value).dependencies.tolist() == graph(policy.name).dependencies.tolist()


def test_the_page_lists_every_policy() -> None:
    """The table of docs/overlap.md is what ``tracesim overlap`` prints."""
    lines = DOCS.read_text("utf-8").splitlines()
    for row in describe_policies():
        means = "".join(f", `{value}`" for value in row["means"])
        default = " (default)" if row["default"] else ""
        named = f"`{row['name']}`{means}{default}"
        assert f"| `{row['point']}` | {named} | {row['beside']} | {row['follows']} |" in lines
    listed = [line for line in lines if re.match(r"\| `(\w+)` \| `[\w-]+`", line)]
    assert len(listed) == len(describe_policies())


def test_the_command_lists_every_policy() -> None:
    result = CliRunner().invoke(main, ["overlap", "--json"])
    assert json.loads(result.output) == describe_policies()
    assert all(row["name"] in CliRunner().invoke(main, ["overlap"]).output for row in describe_policies())


def test_names_of_a_point_differ() -> None:
    for point in OVERLAP_POINTS.values():
        assert len(set(point.names())) == len(point.names()) >= 2


# -- tensor parallelism --------------------------------------------------------------------------------------------

TENSOR_NAMES = TENSOR.names()
WHOLE = dense_mapping(parallel__tp=4, parallel__sp=True)


def context_of(mapping: dict[str, Any]) -> LoweringContext:
    scenario = load_scenario(mapping)
    return LoweringContext(
        scenario.model, scenario.parallel, scenario.training, scenario.overlap, GraphNames(), rank=0
    )


def gathered_program(policy: TensorPlacement) -> Program:
    """A kernel, a gather, the GEMM that reads it, and a kernel behind it."""
    context = context_of(WHOLE)
    builder = ProgramBuilder(context.names, chunk=0, phase=Phase.FORWARD)
    builder.memory_bound("before", OpKind.ELEMENTWISE, read=1, written=1)
    gather = policy.gather(builder, context, "input", 4096.0, DType.BF16)
    gather.gemm("product", GemmShape(256, 8, 8))
    builder.memory_bound("behind", OpKind.ELEMENTWISE, read=1, written=1)
    return builder.build()


def reduced_program(policy: TensorPlacement) -> Program:
    """A GEMM, the reduction of its output, and a kernel that reads it."""
    context = context_of(WHOLE)
    builder = ProgramBuilder(context.names, chunk=0, phase=Phase.FORWARD)
    reduction = policy.reduction(builder, context, "output", 4096.0, scatter=True)
    reduction.gemm("product", GemmShape(256, 8, 8))
    builder.wait_for(reduction.finish())
    builder.memory_bound("behind", OpKind.ELEMENTWISE, read=1, written=1)
    return builder.build()


def time_of(program: Program, gemm: int, transfer: int) -> int:
    """End of the last operation, if GEMMs and transfers take so long altogether and nothing else takes any time."""
    operations = program.operations
    after = [[] for _ in range(len(program))]  # type: list[list[int]]
    for row, source in zip(program.dependency_rows.tolist(), program.dependencies.tolist(), strict=True):
        after[row].append(source)
    graph = graph_of(
        {"stream": stream, "after": sources}
        for stream, sources in zip(operations.stream.tolist(), after, strict=True)
    )
    work = np.where(operations.kind == OpKind.GEMM, operations.flops, 0.0)
    moved = operations.communication_bytes.astype(float)
    durations = gemm * work / max(1, work.sum()) + transfer * moved / max(1, moved.sum())
    times = naive_times(graph, durations.round().astype(np.int64).tolist())
    assert times is not None
    return max(end for _, end in times)


@pytest.mark.parametrize(
    ("name", "gemm", "transfer", "expected"),
    [
        ("in-place", 400, 300, 700),
        ("beside-weights", 400, 300, 700),
        # four pieces on shards, three of which arrive: product bound, the transfers are hidden altogether ...
        ("userbuffers", 400, 300, 400),
        ("async-tp", 400, 300, 400),
        # ... or transfer bound: only the last piece is left behind the last arrival
        ("userbuffers", 400, 900, 1000),
        ("async-tp", 400, 900, 1000),
    ],
)
def test_a_gather_runs_beside_the_pieces_of_its_gemm(
    name: str, gemm: int, transfer: int, expected: int
) -> None:
    assert time_of(gathered_program(TENSOR.chosen(name)), gemm, transfer) == expected


@pytest.mark.parametrize(
    ("name", "gemm", "transfer", "expected"),
    [
        ("in-place", 400, 300, 700),
        # four pieces, each reduced under the next: the last reduction has nothing to run beside
        ("userbuffers", 400, 300, 475),
        ("userbuffers", 400, 800, 900),
        # pieces for the three others are sent under the next piece; the own piece is last
        ("async-tp", 400, 300, 400),
        ("async-tp", 400, 900, 1000),
    ],
)
def test_a_reduction_runs_beside_the_pieces_of_its_gemm(
    name: str, gemm: int, transfer: int, expected: int
) -> None:
    assert time_of(reduced_program(TENSOR.chosen(name)), gemm, transfer) == expected


@pytest.mark.parametrize("dtype", ["bf16", "fp8-tensorwise", "mxfp8"])
@pytest.mark.parametrize("name", TENSOR_NAMES)
def test_pieces_are_the_same_work(name: str, dtype: str) -> None:
    """Whatever the policy: the same FLOPs, and as many bytes over each rank's links."""

    def totals(policy: str) -> tuple[float, float]:
        mapping = dense_mapping(
            parallel__tp=4,
            parallel__sp=True,
            training__dtype=dtype,
            hardware="b200-sxm" if dtype == "mxfp8" else "h100-sxm",
            **chosen(tp=policy),
        )
        graph = lower_scenario(load_scenario(mapping))
        operations = graph.operations
        rings = (operations.kind == OpKind.P2P) & (operations.stream == Stream.TP)
        whole = (operations.kind == OpKind.COLLECTIVE) & (operations.stream == Stream.TP)
        # A ring moves each shard once; a gather or scatter (tp - 1) / tp of its bytes.
        moved = (
            operations.communication_bytes[rings].sum() + 0.75 * operations.communication_bytes[whole].sum()
        )
        return float(operations.flops.sum()), float(moved)

    flops, moved = totals(name)
    expected_flops, expected_moved = totals("in-place")
    assert flops == pytest.approx(expected_flops)
    if not TENSOR.chosen(name).gathers_again and dtype == "bf16":
        # The input that it keeps whole is not gathered again.
        assert moved < expected_moved
    else:
        assert moved == pytest.approx(expected_moved)


@pytest.mark.parametrize("name", ["userbuffers", "async-tp"])
def test_rings_need_sequence_parallelism(name: str) -> None:
    lacking = dense_mapping(parallel__tp=2, parallel__sp=False, **chosen(tp=name))
    with pytest.raises(ScenarioError, match=r"overlap\.tp: .* needs parallel\.sp: true"):
        load_scenario(lacking)
    alone = step(parallel__tp=1, **chosen(tp=name)).report
    assert alone["iteration_time_ms"] == step(parallel__tp=1).report["iteration_time_ms"]


@pytest.mark.parametrize("policy", [name for name in TENSOR_NAMES if name != "in-place"])
def test_each_tensor_policy_exposes_less_than_in_place(policy: str) -> None:
    sizes = {
        "parallel__tp": 4,
        "parallel__sp": True,
        "training__seq_len": 8192,
        "model__hidden_size": 4096,
        "model__ffn_size": 16384,
    }

    def exposed(name: str) -> float:
        return float(step(**sizes, **chosen(tp=name)).report["stages"][0]["exposed_communication_ms"]["tp"])

    assert exposed(policy) < exposed("in-place")


@pytest.mark.parametrize(
    "recompute", ["none", "full", {"modules": ["layernorm", "mlp"]}, {"keep": "products"}]
)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("policy", TENSOR_NAMES)
def test_every_buffer_is_released_under_every_tensor_policy(
    policy: str, schedule: str, recompute: Any
) -> None:
    scenario = load_scenario(
        dense_mapping(
            parallel__tp=2,
            parallel__pp=2,
            parallel__sp=True,
            schedule=schedule,
            training__recompute=recompute,
            **chosen(tp=policy),
        )
    )
    buffers = lower_scenario(scenario).buffers
    kept = buffers.take(np.flatnonzero((buffers.allocate >= 0) & (buffers.release < 0)))
    assert len(kept) == 0
    assert (buffers.release[buffers.allocate >= 0] >= buffers.allocate[buffers.allocate >= 0]).all()


# -- transfers between stages ----------------------------------------------------------------------------------------


def pipeline_time(name: str, policy: str, transfer: int, pp: int = 4, microbatches: int = 8) -> int:
    schedule = build_schedule(name, pp, usual_chunks(name), microbatches)
    graph = one_operation_step(schedule, OverlapPlan(p2p=policy))
    times = durations_of(graph, F=10, B=20, I=10, W=10, transfer=transfer)
    return int(execute(graph, times).end.max())


@pytest.mark.parametrize("name", [name for name in schedule_names() if name != "forward"])
def test_transfers_in_batches_run_every_schedule_and_never_beat_transfers_ahead(name: str) -> None:
    ahead, batched = (pipeline_time(name, policy, 3) for policy in ("ahead", "batched"))
    assert ahead <= batched


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("policy", OVERLAP_POINTS["p2p"].names())
def test_free_transfers_leave_the_closed_form(name: str, policy: str) -> None:
    """(m + p - 1) (F + B), whatever waits for a transfer that takes no time."""
    assert pipeline_time(name, policy, 0) == (8 + 4 - 1) * (10 + 20)


def test_batches_of_two_stages_by_hand() -> None:
    """Two stages, two microbatches, F 10, B 20, transfers 5.

    Stage 0 sends 0F0 in [10, 15], then runs 0F1 in [15, 25]. The batch behind it holds the send of 0F1 and the receive
    of 1B0, that of stage 1 behind 1B0 in [25, 45] its other ends: both in [45, 50]. Then both go on: 0B0 in [50, 70],
    and 1F1, 1B1 in [50, 80], whose gradient arrives at 85 for 0B1 in [85, 105].
    """
    assert pipeline_time("1f1b", "batched", 5, pp=2, microbatches=2) == 105
    # Posted ahead, 0F1 does not wait for the first send, nor 1F1 for its activation: 1F1 follows 1B0 at once.
    assert pipeline_time("1f1b", "ahead", 5, pp=2, microbatches=2) == 100


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 2), (2, 6), (4, 4), (4, 12), (8, 16)])
@pytest.mark.parametrize("transfer", [0, 7])
def test_interleaved_batches_run_in_lockstep(pp: int, microbatches: int, transfer: int) -> None:
    """One batch behind a forward and a backward: against a recurrence over the batches of all ranks."""
    schedule = build_schedule("interleaved-1f1b", pp, 2, microbatches)
    graph = one_operation_step(schedule, OverlapPlan(p2p="batched"))
    found = execute(graph, durations_of(graph, F=10, B=20, transfer=transfer))
    assert found.end.max() == lockstep_time(schedule, {"F": 10, "B": 20}, transfer)


def lockstep_time(schedule: Schedule, costs: dict[str, int], transfer: int) -> int:
    """When all ranks are done, if each waits behind a run of compute for all transfers that follow it."""
    runs: list[list[tuple[int, list[Action]]]] = []
    for row in add_communication(schedule, joined=True).actions:
        found: list[tuple[int, list[Action]]] = [(0, [])]
        for action in row:
            if not action.is_compute:
                found[-1][1].append(action)
            elif found[-1][1]:
                found.append((costs[action.kind.value], []))
            else:
                found[-1] = (found[-1][0] + costs[action.kind.value], [])
        runs.append(found)
    place = {
        action: (rank, at)
        for rank, found in enumerate(runs)
        for at, (_, batch) in enumerate(found)
        for action in batch
    }
    posted: dict[tuple[int, int], int] = {}
    ended = {(rank, -1): 0 for rank in range(schedule.pp)}
    while len(ended) < schedule.pp + sum(map(len, runs)):
        before = len(posted), len(ended)
        for rank, found in enumerate(runs):
            for at, (cost, batch) in enumerate(found):
                if (rank, at - 1) in ended:
                    posted[rank, at] = ended[rank, at - 1] + cost
                peers = [place[action.peer] for action in batch]
                if (rank, at) in posted and all(peer in posted for peer in peers):
                    last = max([posted[rank, at], *(posted[peer] for peer in peers)])
                    ended[rank, at] = last + (transfer if batch else 0)
        assert before != (len(posted), len(ended)), "no rank can go on"
    return max(ended.values())


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_joined_batches_change_no_order_and_run_with_blocking_sends(
    pp: int, chunks: int, rounds: int
) -> None:
    schedule = build_schedule("interleaved-1f1b", pp, chunks, pp * rounds)
    joined = add_communication(schedule, joined=True)
    check_schedule(joined)
    check_blocking_sends(joined)
    assert without_communication(joined).actions == schedule.actions
    for row in joined.actions:
        kinds = "".join(action.kind.value if action.is_compute else "." for action in row)
        # Nothing between a forward and the backward behind it, but where all forwards are a warm-up.
        assert len(re.findall(r"F\.+B", kinds)) == ("FB" not in kinds)
        assert "FB" in kinds or kinds.count("F.") == schedule.microbatches * chunks


# -- data parallelism ------------------------------------------------------------------------------------------------


MANY_BUCKETS = {
    "model__layers": 8,
    "model__hidden_size": 2048,
    "model__ffn_size": 8192,
    "parallel__dp": 4,
    "parallel__zero": 1,
    "training__seq_len": 2048,
}
"""More than the 40 million parameters of one bucket."""


def starts(simulation: Simulation, name: str) -> list[int]:
    graph = simulation.graph
    rows = np.flatnonzero(graph.operations.name == graph.strings.index(name))
    return sorted(simulation.execution.start[rows].tolist())


def test_the_next_bucket_is_gathered_when_the_one_before_is_read() -> None:
    together = step(**MANY_BUCKETS, **chosen(param_gather="buckets"))
    ahead = step(**MANY_BUCKETS, **chosen(param_gather="next-bucket"))
    assert len(starts(ahead, "parameter_all_gather")) == len(starts(together, "parameter_all_gather")) > 4
    assert starts(ahead, "parameter_all_gather")[-1] > starts(together, "parameter_all_gather")[-1]
    after = step(**MANY_BUCKETS, **chosen(param_gather="after-step"))
    times = [s.report["iteration_time_ms"] for s in (together, ahead, after)]
    assert times == sorted(times)


# -- context parallelism ---------------------------------------------------------------------------------------------


def test_a_ring_in_place_exposes_every_step() -> None:
    sizes = {"parallel__cp": 4, "parallel__cp_comm": "p2p", "training__seq_len": 65536}
    hidden, exposed = (step(**sizes, **chosen(cp=name)) for name in ("under-attention", "in-place"))
    operations, execution = exposed.graph.operations, exposed.execution
    rows = operations.stream == Stream.CP
    total = (execution.end - execution.start)[rows].sum() / 1e6
    found = exposed.report["stages"][0]["exposed_communication_ms"]["cp"]
    assert found == pytest.approx(total, rel=1e-3)
    assert hidden.report["stages"][0]["exposed_communication_ms"]["cp"] < 0.7 * found


# -- pairs -----------------------------------------------------------------------------------------------------------


def exposed_experts(simulation: Simulation) -> float:
    return sum(stage["exposed_communication_ms"]["ep"] for stage in simulation.report["stages"])


def test_pairs_hide_exchanges_and_pairs_in_sequence_do_not() -> None:
    turns, sequence = moe(ep="turns"), moe(ep="in-sequence", wgrad="in-place")
    operations, execution = sequence.graph.operations, sequence.execution
    total = (execution.end - execution.start)[operations.stream == Stream.EP].sum() / 1e6
    assert exposed_experts(sequence) == pytest.approx(total, rel=0.02)
    assert exposed_experts(turns) < 0.8 * total
    assert np.bincount(turns.graph.operations.kind).tolist() == np.bincount(operations.kind).tolist()


def test_weight_gradients_stand_behind_the_exchange_or_in_front_of_it() -> None:
    behind, before = moe(wgrad="behind-exchange"), moe(wgrad="in-place")

    def beside_weights(simulation: Simulation) -> int:
        """Exchanges during which a weight gradient of an expert starts."""
        graph, execution = simulation.graph, simulation.execution
        weights = np.flatnonzero(
            (graph.operations.phase == Phase.BACKWARD_WEIGHT) & (graph.operations.stream == Stream.COMPUTE)
        )
        exchanges = np.flatnonzero(
            (graph.operations.stream == Stream.EP) & (graph.operations.phase == Phase.BACKWARD_INPUT)
        )
        return sum(
            bool(
                (
                    (execution.start[weights] >= execution.start[row])
                    & (execution.start[weights] < execution.end[row])
                    & (graph.operations.rank[weights] == graph.operations.rank[row])
                    & (graph.operations.microbatch[weights] == graph.operations.microbatch[row])
                ).any()
            )
            for row in exchanges.tolist()
        )

    assert beside_weights(behind) > beside_weights(before)
    assert exposed_experts(behind) < exposed_experts(before)


# -- a policy of one's own -------------------------------------------------------------------------------------------


def test_a_policy_is_a_class_and_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reductions in the backward that it waits for, say: a subclass, and its name is a choice."""
    from op_graphs.overlap import registry
    from op_graphs.overlap.gradient_buckets import GradientBuckets

    class Waiting(GradientBuckets):
        name = "waiting"

        def behind_reduction(self, builder: ProgramBuilder, row: int) -> None:
            builder.wait_for(row)

    point = replace(registry.GRADIENTS, policies=(*registry.GRADIENTS.policies, Waiting()))
    for module in ("lower_stage", "lower_step", "unit_communication"):
        monkeypatch.setattr(f"op_graphs.{module}.GRADIENTS", point)
    scenario = load_scenario(dense_mapping(**MANY_BUCKETS))
    waiting = replace(scenario, overlap=replace(scenario.overlap, grad_reduce="waiting"))

    def exposed(of: Scenario) -> float:
        return float(simulate(of).report["stages"][0]["exposed_communication_ms"]["dp"])

    assert exposed(waiting) > exposed(scenario)
