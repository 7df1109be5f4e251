"""Activations in the memory of the host: which bytes move, when, what waits, and what leaves the device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from op_graphs.graph import OpGraph
from op_graphs.offload_activations import LAYER, MODULES
from op_graphs.vocabulary import MemoryCategory, OpKind, Phase, Stream, TrackRole
from tests.dense_scenarios import SMALL, dense_mapping
from tests.scenario_mappings import problems_of, scenario
from tests.test_lowering import assert_nothing_leaks
from tracesim.lowering import lower_scenario
from tracesim.offload_report import peak_host_bytes
from tracesim.scenario import Scenario, load_scenario, scenario_to_mapping
from tracesim.simulation import Simulation, simulate

BATCH, LENGTH, HIDDEN, LAYERS = 2, 128, 256, 4
TOKENS = BATCH * LENGTH
HEADS, QUERY, KEY = 8, 256, 128
"""Query outputs, and key outputs (value outputs are as many), of SMALL."""
EXPERTS = {
    **SMALL["model"],
    "moe": {"experts": 4, "top_k": 2, "expert_ffn_size": 128, "first_dense_layers": 1},
}


def offloaded(link: float = 1e6, schedule: str = "gpipe", **offload: Any) -> dict[str, Any]:
    """Keys of a scenario on round figures; ``link`` in GB/s. With gpipe no backward follows its forward at once."""
    return {
        "hardware": {"base": "toy", "compute_capability": 90, "host": {"link_gb_per_s": link}},
        "schedule": schedule,
        "training__offload": {"minimum_bytes": 0, **offload} if offload else None,
    }


def build(changes: dict[str, Any], **more: Any) -> Scenario:
    return load_scenario(dense_mapping(**{**changes, **more}))


def names(graph: OpGraph) -> np.ndarray:
    return np.array(graph.strings)[graph.operations.name]


def rows_named(graph: OpGraph, name: str) -> np.ndarray:
    return np.flatnonzero(names(graph) == name)


def peak_activations(simulation: Simulation) -> int:
    return max(
        int(curve.by_category[MemoryCategory.ACTIVATIONS].max(initial=0)) for curve in simulation.memory
    )


LOG_SUM_EXP = 4 * TOKENS * HEADS
KEPT: dict[str, float] = {
    "attn_norm": 2 * TOKENS * HIDDEN,
    "qkv_linear": 2 * TOKENS * HIDDEN,
    "core_attn": 2 * TOKENS * (QUERY + 2 * KEY) + LOG_SUM_EXP,
    "attn_proj": 2 * TOKENS * QUERY,
    "mlp_norm": 2 * TOKENS * HIDDEN,
    "expert_fc1": 2 * (2 * TOKENS) * HIDDEN,
    "moe_act": 2 * (2 * TOKENS) * 2 * 128,
}
"""Bytes a module of a layer of SMALL, or of EXPERTS (two copies of each token), keeps."""


@pytest.mark.parametrize("module", MODULES)
def test_each_module_sends_what_it_keeps_and_gets_it_back(module: str) -> None:
    modules = ["core_attn", module] if module == "attn_proj" else [module]
    graph = lower_scenario(build(offloaded(modules=modules), model=EXPERTS))
    layers = LAYERS - 1 if module in ("expert_fc1", "moe_act") else LAYERS
    for name, column in ((f"offload_{module}", "bytes_read"), (f"reload_{module}", "bytes_written")):
        rows = rows_named(graph, name)
        assert Counter(getattr(graph.operations, column)[rows].tolist()) == {KEPT[module]: 2 * layers}
        assert set(graph.operations.kind[rows].tolist()) == {OpKind.MEMCPY}
    assert_nothing_leaks(graph)


def test_sequence_parallelism_moves_shards_and_a_recipe_its_quantised_copies() -> None:
    changes = offloaded(modules=["qkv_linear"])
    sharded = lower_scenario(build(changes, parallel={"tp": 2, "sp": True}))
    assert set(sharded.operations.bytes_read[rows_named(sharded, "offload_qkv_linear")]) == {
        KEPT["qkv_linear"] / 2
    }
    changes["hardware"] = {"base": "h100-sxm"}
    quantised = lower_scenario(build(changes, training__dtype="fp8-tensorwise"))
    # One byte an element in the place of two.
    assert set(quantised.operations.bytes_read[rows_named(quantised, "offload_qkv_linear")]) == {
        KEPT["qkv_linear"] / 2
    }


@pytest.mark.parametrize(
    "modules", [["core_attn"], ["core_attn", "attn_proj", "attn_norm", "mlp_norm", "qkv_linear"]]
)
def test_memory_falls_by_what_is_away_and_the_host_holds_it(modules: list[str]) -> None:
    plain, moved = simulate(build(offloaded())), simulate(build(offloaded(modules=modules)))
    layer = sum(KEPT[module] for module in modules)
    # All microbatches of gpipe are in flight at the first backward; its last layer comes back beside the last forward.
    assert peak_activations(plain) - peak_activations(moved) == pytest.approx(
        (2 * LAYERS - 1) * layer, abs=layer
    )
    away = (2 * LAYERS - 1) * layer
    assert peak_host_bytes(moved.graph, moved.execution, 0) == away
    assert moved.report["stages"][0]["offload"]["host_memory_gib"] == away / 2**30
    assert moved.report["host_memory_gib"] == away / 2**30


def test_a_fast_link_costs_nothing() -> None:
    plain, moved = simulate(build(offloaded())), simulate(build(offloaded(layers=LAYERS)))
    assert moved.execution.end.max() == pytest.approx(plain.execution.end.max(), rel=1e-3)


def test_a_slow_link_is_the_step() -> None:
    """Nothing hides beside copies that take far longer than compute: all of them add up, there and back."""
    moved = simulate(build(offloaded(link=0.01, layers=LAYERS, in_flight=100), training__num_microbatches=1))
    start, end = moved.execution.start, moved.execution.end
    out, back = rows_named(moved.graph, "offload_layer"), rows_named(moved.graph, "reload_layer")
    sent = float(moved.graph.operations.bytes_read[out].sum())
    each_way = sent / 0.01
    assert end[out].max() - start[out].min() == pytest.approx(each_way, rel=1e-6)
    assert end[back].max() - start[back].min() == pytest.approx(each_way, rel=1e-6)
    assert start[back].min() == end[out].max()
    # What is left: the first layer forward, and the last backward of it with what frames the step.
    assert 2 * each_way < end.max() < 2.01 * each_way
    exposed = 1e6 * moved.report["stages"][0]["offload"]["exposed_ms"]
    assert exposed == pytest.approx(2 * each_way, rel=0.01)
    assert exposed <= 1e6 * moved.report["stages"][0]["idle_ms"] + 1


@pytest.mark.parametrize(("in_flight", "waits"), [(0, LAYERS), (1, LAYERS - 1), (2, LAYERS - 2), (LAYERS, 0)])
def test_compute_runs_ahead_of_so_many_copies(in_flight: int, waits: int) -> None:
    changes = offloaded(link=0.01, layers=LAYERS, in_flight=in_flight)
    moved = simulate(build(changes, training__num_microbatches=1))
    out = rows_named(moved.graph, "offload_layer")
    copy = float(moved.graph.operations.bytes_read[out[0]]) / 0.01
    head = rows_named(moved.graph, "final_norm")[0]
    first = moved.execution.start[out[0]]
    assert round((moved.execution.start[head] - first) / copy) == waits


def test_a_layer_is_back_before_its_backward_and_two_at_most_are_there() -> None:
    """Double buffering: beside the layer at work, one more has come back."""
    moved = simulate(build(offloaded(link=20, layers=LAYERS), training__num_microbatches=1))
    graph, execution = moved.graph, moved.execution
    phases = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
    backward = np.isin(graph.operations.phase, phases) & (graph.operations.stream == Stream.COMPUTE)
    for row in rows_named(graph, "reload_layer").tolist():
        layer = int(graph.operations.layer[row])
        own = np.flatnonzero(backward & (graph.operations.layer == layer))
        assert execution.end[row] <= execution.start[own].min()
        if layer + 2 < LAYERS:
            above = np.flatnonzero(backward & (graph.operations.layer == layer + 2))
            assert execution.start[row] >= execution.end[above].max()


def test_a_module_comes_back_one_layer_ahead() -> None:
    moved = simulate(build(offloaded(link=20, modules=["core_attn"]), training__num_microbatches=1))
    graph, execution = moved.graph, moved.execution
    kernel = {int(graph.operations.layer[row]): row for row in rows_named(graph, "flash_attention_backward")}
    for row in rows_named(graph, "reload_core_attn").tolist():
        layer = int(graph.operations.layer[row])
        assert execution.end[row] <= execution.start[kernel[layer]]
        if layer + 1 < LAYERS:
            assert execution.start[row] >= execution.end[kernel[layer + 1]]


def test_the_last_layer_stays_where_its_backward_follows_at_once() -> None:
    graph = lower_scenario(build(offloaded(schedule="1f1b", modules=["mlp_norm"]), parallel={"pp": 2}))
    layers = {
        stage: set(
            graph.operations.layer[rows_named(graph, "offload_mlp_norm")][
                graph.operations.rank[rows_named(graph, "offload_mlp_norm")] == stage
            ].tolist()
        )
        for stage in (0, 1)
    }
    assert layers == {0: {0, 1}, 1: {2}}


def test_with_full_recompute_the_inputs_of_layers_move() -> None:
    graph = lower_scenario(build(offloaded(layers=LAYERS), training__recompute="full"))
    assert set(graph.operations.bytes_read[rows_named(graph, "offload_layer")]) == {2 * TOKENS * HIDDEN}
    assert_nothing_leaks(graph)


def test_small_tensors_stay() -> None:
    changes = offloaded(modules=["core_attn"], minimum_bytes=LOG_SUM_EXP + 1)
    graph = lower_scenario(build(changes))
    assert set(graph.operations.bytes_read[rows_named(graph, "offload_core_attn")]) == {
        KEPT["core_attn"] - LOG_SUM_EXP
    }


SCHEDULES = [
    ("1f1b", {"pp": 2}, 4),
    ("gpipe", {"pp": 4}, 4),
    ("interleaved-1f1b", {"pp": 2, "vpp": 2}, 4),
    ("interleaved-zb", {"pp": 2, "vpp": 2}, 4),
    ("zb-h1", {"pp": 2}, 4),
    ("zb-v", {"pp": 2, "vpp": 2}, 4),
    ("dualpipev", {"pp": 2, "vpp": 2}, 8),
    ("1f1b-overlap", {"pp": 2}, 4),
    ("dualpipe", {"pp": 2}, 8),
]


@pytest.mark.parametrize(("schedule", "plan", "microbatches"), SCHEDULES)
@pytest.mark.parametrize("offload", [{"layers": 1}, {"modules": [m for m in MODULES if m != "qkv_linear"]}])
@pytest.mark.parametrize("model", [SMALL["model"], EXPERTS])
def test_under_every_schedule_all_that_leaves_comes_back_after_it_left(
    schedule: str, plan: dict[str, int], microbatches: int, offload: dict[str, Any], model: dict[str, Any]
) -> None:
    if "moe" not in model and "modules" in offload:
        offload = {"modules": [m for m in offload["modules"] if "norm" in m or "attn" in m]}
    more = {"model": model, "parallel": {**plan, "dp": 2}, "training__num_microbatches": microbatches}
    plain = simulate(build(offloaded(schedule=schedule), **more))
    moved = simulate(build(offloaded(link=20, schedule=schedule, **offload), **more))
    graph, execution = moved.graph, moved.execution
    assert_nothing_leaks(graph)
    operations = graph.operations
    sent, back = ({}, {})
    for found, stream in ((sent, Stream.COPY_TO_HOST), (back, Stream.COPY_TO_DEVICE)):
        for row in np.flatnonzero(operations.stream == stream).tolist():
            part = names(graph)[row].split("_", 1)[1]
            key = (
                part,
                *(int(getattr(operations, c)[row]) for c in ("rank", "chunk", "layer", "microbatch")),
            )
            assert key not in found
            found[key] = row
    assert sent.keys() == back.keys()
    assert sent
    for key, row in sent.items():
        assert operations.bytes_read[row] == operations.bytes_written[back[key]]
        assert execution.end[row] <= execution.start[back[key]]
    for before, now in zip(plain.memory, moved.memory, strict=True):
        assert now.peak <= before.peak
    assert float(operations.flops.sum()) == float(plain.graph.operations.flops.sum())


def test_latent_attention_context_parallelism_and_sharded_weights_go_with_it() -> None:
    latent = {"kv_lora_rank": 64, "qk_nope_head_size": 32, "qk_rope_head_size": 16, "v_head_size": 32}
    model = {key: value for key, value in EXPERTS.items() if key not in ("kv_heads", "head_size")}
    modules = list(MODULES)
    for plan in (
        {"cp": 2},
        {"cp": 2, "cp_comm": "a2a"},
        {"dp": 2, "zero": 3},
        {"tp": 2, "sp": True, "ep": 2},
    ):
        for recompute in ("none", {"modules": ["mla_up_proj", "moe_act"]}):
            changes = offloaded(link=20, modules=modules)
            scenario_ = build(
                changes,
                model={**model, "latent_attention": latent},
                parallel=plan,
                training__recompute=recompute,
            )
            moved = simulate(scenario_)
            assert_nothing_leaks(moved.graph)
            assert moved.report["stages"][0]["offload"]["to_host_gib"] > 0


def test_nothing_to_move_is_the_same_as_no_offload() -> None:
    plain, empty = lower_scenario(build(offloaded())), lower_scenario(build(offloaded(optimizer=0.0)))
    for table in ("operations", "buffers", "segments"):
        first, second = vars(getattr(plain, table)), vars(getattr(empty, table))
        assert all(np.array_equal(first[column], second[column]) for column in first)
    assert np.array_equal(plain.dependencies, empty.dependencies)


def test_copies_have_tracks_of_their_own() -> None:
    moved = simulate(build(offloaded(modules=["core_attn"])))
    timeline = moved.timeline()
    tracks = {
        timeline.strings[name]: role
        for name, role in zip(timeline.tracks.name, timeline.tracks.role, strict=True)
    }
    assert tracks["copies to host"] == tracks["copies to device"] == TrackRole.DEVICE


def test_the_field_survives_a_round_trip() -> None:
    for offload in (
        {"modules": ["core_attn", "attn_proj"], "in_flight": 2},
        {"layers": 3},
        {"optimizer": 0.5},
    ):
        loaded = build(offloaded(**offload))
        assert load_scenario(scenario_to_mapping(loaded)) == loaded


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"training__offload": {}},
            "training.offload: {} (from scenario) is a mapping, must be {modules: [core_attn]}",
        ),
        (
            {"training__offload": {"module": []}},
            "training.offload.module: unknown key (from scenario); did you mean modules?",
        ),
        (
            {"training__offload": {"modules": ["core_atn"]}},
            "training.offload.modules: core_atn (from scenario) is not a module; did you mean core_attn?",
        ),
        (
            {"training__offload": {"modules": ["moe_act"]}},
            "moe_act (from scenario) llama3-8b has no experts; what can be moved: attn_norm, qkv_linear, core_attn",
        ),
        (
            {"training__offload": {"modules": ["attn_proj"]}},
            "attn_proj (from scenario) moves the output of core attention, which the backward pass of core attention "
            "keeps; add core_attn",
        ),
        (
            {
                "training__offload": {"modules": ["qkv_linear"]},
                "training__recompute": {"modules": ["layernorm"]},
            },
            "qkv_linear (from scenario) its input, the output of a norm, is recomputed",
        ),
        (
            {"training__offload": {"modules": ["core_attn"]}, "training__recompute": "full"},
            "is empty where whole layers are recomputed, which keep their input only; use layers",
        ),
        (
            {"training__offload": {"modules": ["core_attn"], "layers": 2}},
            "moves whole layers and modules parts of every layer; give one or the other",
        ),
        (
            {"training__offload": {"layers": 33}},
            "training.offload.layers: 33 (from scenario) llama3-8b has 32; nearest: 32",
        ),
        ({"training__offload": {"optimizer": 2}}, "must be the part of the parameters to move, from 0 to 1"),
        (
            {"training__offload": {"optimizer": 1.0}, "training__optimizer": "muon"},
            "there is no muon for the processor of the host; set optimizer: adam, or leave it out",
        ),
        (
            {"hardware": {"base": "toy", "host": {"link_gb_per_s": 0.0}}, "training__offload": {"layers": 2}},
            "does not know host.link_gb_per_s, which copies to the host need",
        ),
    ],
)
def test_what_cannot_be_moved_is_refused(changes: dict[str, Any], said: str) -> None:
    assert said in problems_of(scenario(**changes))


def test_a_whole_layer_stands_for_all_it_keeps() -> None:
    """Inputs and outputs of both norms, q, k, v, the attention output and its statistics, both inputs of the MLP."""
    graph = lower_scenario(build(offloaded(layers=LAYERS)))
    kept = 4 * 2 * TOKENS * HIDDEN + KEPT["core_attn"] + KEPT["attn_proj"] + 2 * TOKENS * 3 * 512
    assert set(graph.operations.bytes_read[rows_named(graph, f"offload_{LAYER}")]) == {kept}


def test_copies_share_memory_bandwidth_and_take_no_sms() -> None:
    changes = offloaded(link=20, modules=["core_attn", "attn_proj"])
    changes["hardware"] = {"base": "h100-sxm"}
    alone = simulate(build(changes))
    shared = simulate(build(changes, overlap__contention=True))
    assert alone.execution.end.max() <= shared.execution.end.max() < 1.2 * alone.execution.end.max()


def test_modules_are_counted_free_when_their_copy_is_queued_and_layers_when_it_has_ended() -> None:
    """``torch.cuda.max_memory_allocated`` counts a block as free while an event still holds it back."""
    peaks = {}
    for link in (1e6, 0.01):
        for kind, plan in (
            ("module", {"modules": ["core_attn"]}),
            ("layer", {"layers": 4, "in_flight": 100}),
        ):
            changes = offloaded(link=link, **plan)
            peaks[kind, link] = peak_activations(simulate(build(changes, training__num_microbatches=1)))
    assert peaks["module", 1e6] == peaks["module", 0.01]
    assert peaks["layer", 1e6] < peaks["layer", 0.01]


# -- placement (overlap.offload) -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [{"layers": LAYERS}, {"modules": ["core_attn", "mlp_norm"]}])
def test_policies_move_the_same_and_hide_less_and_less(kind: dict[str, Any]) -> None:
    runs = {
        policy: simulate(build(offloaded(link=5, in_flight=100, **kind), overlap__offload=policy))
        for policy in ("ahead", "on-demand", "in-place")
    }
    sizes = [
        sorted(run.graph.operations.bytes_read[run.graph.operations.kind == OpKind.MEMCPY].tolist())
        for run in runs.values()
    ]
    assert sizes[0] == sizes[1] == sizes[2]
    ends = [int(run.execution.end.max()) for run in runs.values()]
    assert ends == sorted(set(ends))
    for run in runs.values():
        assert_nothing_leaks(run.graph)


def test_in_place_adds_every_copy_to_the_step() -> None:
    """One stage and one microbatch: compute stands still for as long as anything is copied."""
    plain = simulate(build(offloaded(), training__num_microbatches=1))
    changes = offloaded(link=0.5, modules=["core_attn", "mlp_norm"])
    moved = simulate(build(changes, training__num_microbatches=1, overlap__offload="in-place"))
    copies = np.isin(moved.graph.operations.stream, (Stream.COPY_TO_HOST, Stream.COPY_TO_DEVICE))
    copied = int((moved.execution.end - moved.execution.start)[copies].sum())
    assert int(moved.execution.end.max()) == pytest.approx(int(plain.execution.end.max()) + copied, rel=1e-3)


def test_on_demand_asks_for_a_layer_when_its_backward_begins() -> None:
    changes = offloaded(link=20, layers=LAYERS)
    moved = simulate(build(changes, training__num_microbatches=1, overlap__offload="on-demand"))
    graph, execution = moved.graph, moved.execution
    phases = (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT)
    backward = np.isin(graph.operations.phase, phases) & (graph.operations.stream == Stream.COMPUTE)
    for row in rows_named(graph, "reload_layer").tolist():
        layer = int(graph.operations.layer[row])
        own = np.flatnonzero(backward & (graph.operations.layer == layer))
        assert execution.end[row] <= execution.start[own].min()
        if layer + 1 < LAYERS:
            above = np.flatnonzero(backward & (graph.operations.layer == layer + 1))
            assert execution.start[row] >= execution.end[above].max()


@pytest.mark.parametrize("policy", ["on-demand", "in-place"])
def test_nothing_comes_back_in_front_of_the_backward_pass_that_reads_it(policy: str) -> None:
    scenario = build(
        offloaded(modules=["core_attn"], schedule="1f1b"), parallel={"pp": 2}, overlap__offload=policy
    )
    graph = lower_scenario(scenario)
    owner = np.full(len(graph.operations), -1)
    for number, (begin, end) in enumerate(zip(graph.segments.begin, graph.segments.end, strict=True)):
        owner[begin:end] = number
    back = rows_named(graph, "reload_core_attn")
    assert len(back)
    assert (owner[back] >= 0).all()
    assert_nothing_leaks(graph)
