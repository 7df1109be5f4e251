"""A scenario suggested from a trace: dimensions from shapes, degrees from groups, and what is not known is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from op_graphs.timeline import CommunicationGroup, Origins, Timeline
from op_graphs.vocabulary import OpKind, TrackRole
from tests.timelines import timeline_of
from tracesim.cli import main
from tracesim.errors import TraceError
from tracesim.readers import read_trace
from tracesim.scenario import load_scenario
from tracesim.suggest_scenario import suggest_scenario


def profiled(calls: list[tuple[str, list[Any]]], **facts: Any) -> Timeline:
    """Host operators one after another, with the shapes of their inputs; a call named ``in X`` lies inside a node X."""
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
    unknown = np.full(len(rows), -1, dtype=np.int32)
    offsets = np.concatenate([[0], np.cumsum([len(t) for t in texts])]).astype(np.int64)
    origins = Origins(unknown, unknown, unknown, offsets, b"".join(texts), ("",))
    return timeline_of(rows, tracks=[(0, TrackRole.HOST, "thread")], origins=origins, **facts)


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


def test_what_is_not_known_is_said():
    suggestion = suggest_scenario(profiled([linear(256, 1024), linear(1024, 256)], device="abacus"))
    assert [text.partition(":")[0] for text in suggestion.unknown] == [
        "parallel.zero, parallel.sp and the schedule",
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
