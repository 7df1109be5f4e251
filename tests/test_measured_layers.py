"""Lowered layers beside measured ones: the same collectives and operations, in the same order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from op_graphs.graph import OpGraph
from op_graphs.vocabulary import Communication, OpKind, Phase
from tracesim.lowering import lower_scenario
from tracesim.readers import read_trace
from tracesim.scenario import load_scenario

TINY_GPT = {
    "model": {
        "name": "tiny-gpt",
        "layers": 2,
        "hidden_size": 12,
        "ffn_size": 48,
        "heads": 2,
        "kv_heads": 2,
        "head_size": 6,
        "vocab_size": 128,
        "activation": "gelu",
        "norm": "layernorm",
        "positions": "learned",
        "qkv_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "tied_embeddings": True,
        "max_positions": 64,
    },
    "hardware": "toy",
    "parallel": {"tp": 2},
    "training": {
        "seq_len": 64,
        "micro_batch_size": 8,
        "num_microbatches": 1,
        "dtype": "fp32",
        "attention": "unfused",
    },
}


def tensor_parallel_rows(graph: OpGraph) -> list[int]:
    operations = graph.operations
    tp = [number for number, group in enumerate(graph.groups) if group.name == "tp"]
    is_collective = operations.kind == OpKind.COLLECTIVE
    return np.flatnonzero(is_collective & np.isin(operations.group, tp)).tolist()


def test_a_tensor_parallel_step_has_thirteen_all_reduces_each_where_it_is() -> None:
    graph = lower_scenario(load_scenario(TINY_GPT))
    names = [graph.strings[graph.operations.name[row]] for row in tensor_parallel_rows(graph)]
    assert names == [
        "embedding_all_reduce",
        *("proj_all_reduce", "fc2_all_reduce") * 2,
        "loss_maximum_all_reduce",
        "loss_predicted_all_reduce",
        "loss_sum_all_reduce",
        "head_gradient_all_reduce",
        *("fc1_gradient_all_reduce", "qkv_gradient_all_reduce") * 2,
    ]


@pytest.mark.shared_data
def test_they_are_those_of_a_measured_megatron_step(shared_data: Path) -> None:
    measured = read_trace([shared_data / "traces/megatron-lm/tp2_v100/rank0.pt.trace.json.gz"])
    rows = np.flatnonzero((measured.slices.communication == Communication.ALL_REDUCE) & measured.on_device())
    rows = rows[np.argsort(measured.slices.start[rows], kind="stable")]
    graph = lower_scenario(load_scenario(TINY_GPT))
    lowered = graph.operations.communication_bytes[tensor_parallel_rows(graph)]
    assert measured.slices.communication_bytes[rows].tolist() == lowered.tolist()


def test_a_deepseek_layer_runs_its_operations_in_the_order_of_the_model() -> None:
    scenario = load_scenario(
        {
            "model": {"base": "deepseek-v3", "layers": 4, "mtp_layers": 0},
            "hardware": "h800-sxm",
            "parallel": {"ep": 64, "dp": 64},
            "training": {"num_microbatches": 1},
        }
    )
    graph = lower_scenario(scenario)
    operations = graph.operations
    forward = np.flatnonzero((operations.layer == 3) & (operations.phase == Phase.FORWARD))
    names = [graph.strings[operations.name[row]] for row in forward]
    landmarks = [
        "input_layernorm",
        "q_down",
        "kv_down",
        "q_up",
        "kv_up",
        "rotary_and_layout",
        "flash_attention",
        "proj",
        "pre_mlp_layernorm",
        "router",
        "dispatch_all_to_all",
        "expert_fc1",
        "expert_swiglu",
        "expert_fc2",
        "combine_all_to_all",
        "mlp_residual",
    ]
    assert [name for name in names if name in landmarks] == landmarks
