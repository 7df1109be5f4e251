"""A scenario suggested from a trace: dimensions from shapes, degrees from groups, and what is not known is said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from op_graphs.timeline import CommunicationGroup, Origins, Timeline
from op_graphs.vocabulary import Communication, OpKind, TrackRole
from tests.timelines import timeline_of
from tracesim.cli import main
from tracesim.errors import TraceError
from tracesim.readers import read_trace
from tracesim.scenario import load_scenario
from tracesim.simulation import simulate
from tracesim.suggest_scenario import suggest_scenario


def profiled(
    calls: list[tuple[str, list[Any]]], transfers: Sequence[tuple[int, Communication, int]] = (), **facts: Any
) -> Timeline:
    """Host operators one after another, with the shapes of their inputs; a call ``X > Y`` is a Y inside a node X.

    Transfers are (group, kind, how many times); the device runs them one after another.
    """
    rows, texts, now = [], [], 0
    for name, dims in calls:
        outer, _, inner = name.rpartition(" > ")
        for depth, part in enumerate([*([outer] if outer else []), inner]):
            rows.append(
                {
                    "track": 0,
                    "start": now + depth,
                    "duration": 10 - 2 * depth,
                    "name": part,
                    "kind": OpKind.HOST,
                }
            )
            texts.append(json.dumps({"Input Dims": dims, "Input type": ["c10::BFloat16"]}).encode())
        now += 10
    for group, communication, count in transfers:
        for _ in range(count):
            rows.append(
                {"track": 1, "start": now, "duration": 5, "name": "nccl", "kind": OpKind.COLLECTIVE,
                 "communication": communication, "group": group}
            )  # fmt: skip
            texts.append(b"{}")
            now += 5
    unknown = np.full(len(rows), -1, dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum([len(t) for t in texts])]).astype(np.int64)
    origins = Origins(unknown, unknown, unknown, offsets, b"".join(texts), ("",))
    tracks = [(0, TrackRole.HOST, "thread"), (0, TrackRole.DEVICE, "stream 20")]
    return timeline_of(rows, tracks=tracks, origins=origins, **facts)


def linear(inner: int, outer: int) -> tuple[str, list[Any]]:
    return "aten::linear", [[2, 512, inner], [outer, inner], []]


LAYER = [
    linear(256, 256), linear(256, 64), linear(256, 64),
    ("aten::scaled_dot_product_attention", [[2, 8, 512, 32], [2, 2, 512, 32], [2, 2, 512, 32]]),
    linear(256, 256), linear(256, 1024), linear(256, 1024), linear(1024, 256),
]  # fmt: skip
STEP = [("aten::embedding", [[5000, 256], [2, 512]]), *LAYER * 3, linear(256, 5000)]


def loaded(timeline: Timeline, folder: Path) -> Any:
    path = folder / "suggested.yaml"
    path.write_text(suggest_scenario(timeline).text)
    return load_scenario(path)


def test_dimensions_of_a_dense_model(tmp_path):
    scenario = loaded(profiled(STEP * 4, device="NVIDIA H100 80GB HBM3"), tmp_path)
    model = scenario.model
    assert (model.layers, model.hidden_size, model.ffn_size, model.vocab_size) == (3, 256, 1024, 5000)
    assert (model.heads, model.kv_heads, model.head_size, model.activation) == (8, 2, 32, "swiglu")
    training = scenario.training
    assert (training.micro_batch_size, training.seq_len, training.num_microbatches) == (2, 512, 4)
    assert scenario.hardware.name == "h100-sxm"


def test_degrees_come_from_process_groups_and_shards_are_put_together(tmp_path):
    groups = (CommunicationGroup("mesh_tp", (0, 1), 2), CommunicationGroup("dp", (0, 2), 2))
    scenario = loaded(profiled(STEP, groups=groups, world_size=8), tmp_path)
    assert (scenario.parallel.tp, scenario.parallel.dp, scenario.parallel.world_size) == (2, 4, 8)
    assert (scenario.model.heads, scenario.model.ffn_size) == (16, 2048)


def test_linear_layers_inside_backward_nodes_are_recompute(tmp_path):
    again = [(f"CheckpointFunctionBackward > {name}", dims) for name, dims in LAYER * 3]
    scenario = loaded(profiled([*STEP, *again]), tmp_path)
    assert scenario.model.layers == 3
    assert "recompute: full" in suggest_scenario(profiled([*STEP, *again])).text


MICROBATCH, FORWARD = ("aten::embedding", [[5000, 256], [2, 512]]), LAYER * 3


def again(calls: list[tuple[str, list[Any]]]) -> list[tuple[str, list[Any]]]:
    return [(f"CheckpointFunctionBackward > {name}", dims) for name, dims in calls]


@pytest.mark.parametrize(
    ("recomputed", "suggested"),
    [
        ([], None),
        (LAYER * 3, "recompute: full"),
        (LAYER * 2, "recompute: {layers: 2, method: block}"),
        ([LAYER[3]] * 3, "recompute: {modules: [core_attn]}"),
        (LAYER[5:] * 3, "recompute: {modules: [mlp]}"),
    ],
)
def test_what_runs_again_in_the_backward_pass_is_recompute(tmp_path, recomputed, suggested):
    timeline = profiled([MICROBATCH, *FORWARD, linear(256, 5000), *again(recomputed)])
    text = suggest_scenario(timeline).text
    assert (suggested in text) if suggested else ("recompute" not in text)
    assert loaded(timeline, tmp_path).model.layers == 3


def product(name: str, tokens: int, inner: int, outer: int) -> tuple[str, list[Any]]:
    """A product on flattened tokens, as a function of the framework's own calls it."""
    dims = [[tokens, inner], [inner, outer]]
    return f"aten::{name}", dims if name == "mm" else [[outer], *dims]


@pytest.mark.parametrize(
    ("attention", "kv_heads"),
    [
        ([("flash_attn::_flash_attn_forward", [[2, 512, 8, 32], [2, 512, 2, 32], [2, 512, 2, 32]])], 2),
        ([("aten::_flash_attention_forward", [[2, 512, 8, 32], [2, 512, 2, 32], [2, 512, 2, 32]])], 2),
        ([("aten::matmul", [[2, 8, 512, 32], [2, 2, 32, 512]]), ("aten::matmul", [[2, 8, 512, 512], [2, 2, 512, 32]])],
         2),
        ([("aten::baddbmm", [[1], [16, 512, 32], [16, 32, 512]]), ("aten::bmm", [[16, 512, 512], [16, 512, 32]])], 2),
    ],
)  # fmt: skip
def test_products_and_attention_of_other_calls(tmp_path, attention, kv_heads):
    # Queries, keys and values come from one product: (8 + 2 * 2) * 32 features.
    layer = [product("mm", 1024, 256, 384), *attention, product("mm", 1024, 256, 256)]
    layer += [product("addmm", 1024, 256, 1024), product("addmm", 1024, 1024, 256)]
    scenario = loaded(profiled([MICROBATCH, *layer * 3]), tmp_path)
    model = scenario.model
    assert (model.layers, model.heads, model.kv_heads, model.head_size) == (3, 8, kv_heads, 32)
    assert (model.ffn_size, model.activation) == (1024, "gelu")
    assert (scenario.training.micro_batch_size, scenario.training.seq_len) == (2, 512)


def test_of_operators_inside_each_other_one_counts(tmp_path):
    nested = [(f"aten::linear > {name}", dims) for name, dims in [product("addmm", 1024, 256, 1024)]]
    timeline = profiled([*STEP, *nested])
    assert loaded(timeline, tmp_path).model.layers == 3


def test_experts_come_from_the_router(tmp_path):
    router = [linear(256, 8), ("aten::topk", [[2, 512, 8], []])]
    experts = [linear(256, 128), linear(256, 128), linear(128, 256)] * 8
    timeline = profiled([MICROBATCH, *[*LAYER[:5], *router, *experts] * 3])
    scenario = loaded(timeline, tmp_path)
    assert (scenario.model.layers, scenario.model.moe.experts, scenario.model.moe.expert_ffn_size) == (
        3,
        8,
        128,
    )
    assert any(text.startswith("moe.top_k") for text in suggest_scenario(timeline).unknown)


GROUPS = (
    CommunicationGroup("mesh_tp", (0, 1), 2),
    CommunicationGroup("mesh_dp", (0, 2), 2),
    CommunicationGroup("pp", (0, 4), 2),
    CommunicationGroup("pp", (4, 8), 2),
    CommunicationGroup("pp", (8, 12), 2),
)
GATHER, SCATTER, REDUCE = Communication.ALL_GATHER, Communication.REDUCE_SCATTER, Communication.ALL_REDUCE


@pytest.mark.parametrize(
    ("transfers", "zero", "sp"),
    [
        ([(0, REDUCE, 12), (1, REDUCE, 4)], 0, False),
        ([(0, REDUCE, 12), (1, SCATTER, 2), (1, GATHER, 2)], 1, False),
        ([(0, GATHER, 12), (0, SCATTER, 12), (1, SCATTER, 2), (1, GATHER, 2)], 1, True),
        ([(0, REDUCE, 12), (1, SCATTER, 4), (1, GATHER, 8)], 3, False),
    ],
)
def test_what_is_sharded_comes_from_the_transfers(tmp_path, transfers, zero, sp):
    parallel = loaded(profiled(STEP, transfers, groups=GROUPS[:2], world_size=8), tmp_path).parallel
    assert (parallel.tp, parallel.dp, parallel.zero, parallel.sp) == (2, 4, zero, sp)


def test_pairs_of_stages_that_hang_together_are_one_pipeline(tmp_path):
    timeline = profiled(STEP, [(1, REDUCE, 4)], groups=GROUPS, world_size=16)
    scenario = loaded(timeline, tmp_path)
    assert (scenario.parallel.tp, scenario.parallel.pp, scenario.parallel.dp) == (2, 4, 2)
    assert scenario.model.layers == 12
    assert {"parallel.pp", "model.layers"} <= {
        text.partition(":")[0] for text in suggest_scenario(timeline).unknown
    }


def test_a_simulated_trace_holds_its_scenario(tmp_path):
    written = load_scenario(
        {"name": "mine", "model": {"base": "llama3.2-1b", "layers": 2}, "hardware": "h100-sxm"}
    )
    suggestion = suggest_scenario(simulate(written).timeline())
    (tmp_path / "again.yaml").write_text(suggestion.text)
    assert load_scenario(tmp_path / "again.yaml") == written
    assert suggestion.unknown == ()


@pytest.mark.shared_data
def test_a_real_trace_of_experts_with_one_key_value_head(shared_data, tmp_path):
    trace = shared_data / "traces" / "misc" / "switchtransformers_trace.json.gz"
    scenario = loaded(read_trace(trace, keep_origins=True), tmp_path)
    model = scenario.model
    assert (model.layers, model.hidden_size, model.ffn_size, model.vocab_size) == (10, 1024, 4096, 100_000)
    assert (model.heads, model.kv_heads, model.head_size, model.moe.experts) == (8, 1, 128, 4)


def test_what_is_not_known_is_said():
    suggestion = suggest_scenario(profiled([linear(256, 1024), linear(1024, 256)], device="abacus"))
    assert [text.partition(":")[0] for text in suggestion.unknown] == [
        "model",
        "heads",
        "vocab_size",
        "activation",
        "norm, positions, tied_embeddings",
        "order of micro_batch_size and seq_len",
        "hardware",
    ]
    assert all(f"# - {text}" in suggestion.text for text in suggestion.unknown)


@pytest.mark.parametrize(
    ("calls", "said"),
    [
        ([], "no linear layers that lead to a wider size and back"),
        ([("aten::linear", None)], "record_shapes=True"),
        ([linear(256, 256)], "no linear layer leads from a wider size back to the hidden size 256"),
    ],
)
def test_a_trace_without_shapes(calls, said):
    with pytest.raises(TraceError, match="no scenario can be suggested") as error:
        suggest_scenario(profiled(calls))
    assert said in str(error.value)


@pytest.mark.shared_data
@pytest.mark.parametrize(("gpu", "hardware"), [("h100", "h100-sxm"), ("mi300", "mi300x")])
def test_a_real_trace_of_a_known_model(shared_data, tmp_path, gpu, hardware):
    trace = shared_data / "traces" / "tracelens" / f"{gpu}__Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz"
    scenario = loaded(read_trace(trace, keep_origins=True), tmp_path)
    model = scenario.model
    # config.json of Qwen/Qwen1.5-0.5B-Chat.
    assert (model.layers, model.hidden_size, model.ffn_size, model.vocab_size) == (24, 1024, 2816, 151_936)
    assert (model.heads, model.kv_heads, model.head_size, model.qkv_bias) == (16, 16, 64, True)
    assert (scenario.training.micro_batch_size, scenario.training.seq_len) == (16, 559)
    assert scenario.hardware.name == hardware
    printed = CliRunner().invoke(main, ["read", str(trace), "--suggest-scenario"], prog_name="tracesim")
    assert (printed.exit_code, printed.stdout) == (0, (tmp_path / "suggested.yaml").read_text())
