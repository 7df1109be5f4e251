"""What launching an operation costs the host, by what the framework runs for it, and how traces say so."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import host_kinds
from op_graphs.graph import GemmShape, MemoryShape, Shape
from op_graphs.vocabulary import OpKind, Phase, Stream
from tests.graphs import graph_of
from tracesim.host import HostTimes, execute_with_host
from tracesim.host_work import (
    BACKWARD,
    CHECKPOINT,
    CHECKPOINT_AGAIN,
    COLLECTIVE,
    INSIDE,
    MODULE,
    PLAIN,
    launch_work,
)
from tracesim.scenario import load_scenario
from tracesim.simulation import simulate

PRODUCT, EXPERTS = GemmShape(8, 8, 8), GemmShape(8, 8, 8, count=4)
KERNEL, KERNELS, EAGER = MemoryShape("reduction"), MemoryShape("strided", 5), MemoryShape("stream", 8)
FUNCTION, SEVERAL = MemoryShape(function=True), MemoryShape(function=True, launches=4)
SMALL = MemoryShape(launches=12)

CASES: dict[str, tuple[dict[str, Any], Shape, float]] = {
    # A linear is a module; its backward node launches two products.
    "product": ({"kind": OpKind.GEMM}, PRODUCT, MODULE),
    "product of a gradient": ({"kind": OpKind.GEMM, "phase": Phase.BACKWARD_WEIGHT}, PRODUCT, MODULE),
    "norm": ({"kind": OpKind.NORM}, KERNEL, MODULE),
    "norm backward": ({"kind": OpKind.NORM, "phase": Phase.BACKWARD_INPUT}, KERNEL, BACKWARD),
    "norms of queries and keys": ({"kind": OpKind.NORM}, MemoryShape("reduction", 2), 2 * MODULE),
    "norm written out": ({"kind": OpKind.NORM}, EAGER, 8 * PLAIN),
    "fused activation": ({"kind": OpKind.ELEMENTWISE}, FUNCTION, MODULE),
    "fused activation backward": (
        {"kind": OpKind.ELEMENTWISE, "phase": Phase.BACKWARD_INPUT},
        FUNCTION,
        BACKWARD,
    ),
    "fused permutation": ({"kind": OpKind.PERMUTE}, SEVERAL, MODULE + 3 * PLAIN),
    "permutation of PyTorch": ({"kind": OpKind.PERMUTE}, KERNELS, 5 * PLAIN),
    "residual": ({"kind": OpKind.ELEMENTWISE}, MemoryShape(), PLAIN),
    "sum of gradients": (
        {"kind": OpKind.ELEMENTWISE, "phase": Phase.BACKWARD_INPUT},
        MemoryShape(),
        PLAIN,
    ),
    "router of PyTorch": ({"kind": OpKind.ROUTER}, SMALL, 12 * PLAIN),
    "collective of a module": ({"kind": OpKind.COLLECTIVE, "stream": Stream.TP}, None, COLLECTIVE),
    "exchange of experts": ({"kind": OpKind.COLLECTIVE, "stream": Stream.EP}, None, MODULE + COLLECTIVE),
    "cast inside a module": ({"kind": OpKind.CAST}, KERNEL, INSIDE),
    "checkpoint": ({"kind": OpKind.HOST, "stream": Stream.HOST, "phase": Phase.FORWARD}, None, CHECKPOINT),
    "checkpoint again": (
        {"kind": OpKind.HOST, "stream": Stream.HOST, "phase": Phase.RECOMPUTE},
        None,
        CHECKPOINT_AGAIN,
    ),
    "token counts": ({"kind": OpKind.HOST, "stream": Stream.HOST}, SMALL, 12 * PLAIN),
}


@pytest.mark.parametrize("name", CASES)
def test_an_operation_costs_what_the_framework_runs_for_it(name: str) -> None:
    columns, shape, expected = CASES[name]
    row = {"phase": Phase.FORWARD, "stream": Stream.COMPUTE, **columns, "shape": -1 if shape is None else 0}
    graph = replace(graph_of([row]), shapes=() if shape is None else (shape,))
    shares, further = launch_work(graph, np.array([0]), launches_experts=False)
    assert shares.tolist() == [pytest.approx(expected)]
    assert further.tolist() == [0]


def test_kernels_of_experts_and_rings_are_launched_in_a_loop() -> None:
    rows: list[dict[str, Any]] = [
        {"kind": OpKind.GROUPED_GEMM, "shape": 0},
        {"kind": OpKind.CAST, "shape": 1},
        {"kind": OpKind.P2P, "stream": Stream.TP},
    ]
    graph = replace(graph_of(rows), shapes=(EXPERTS, KERNELS))
    at = np.arange(3)
    assert launch_work(graph, at, launches_experts=True)[1].tolist() == [3, 4, 1]
    assert launch_work(graph, at, launches_experts=False)[1].tolist() == [0, 4, 1]


def test_the_host_takes_its_share_of_the_time_of_a_module() -> None:
    rows = [{"kind": OpKind.ELEMENTWISE, "shape": 0, "stream": Stream.COMPUTE} for _ in range(4)]
    graph = replace(graph_of(rows, [(0, 4, 0)]), shapes=(MemoryShape(),))
    run = execute_with_host(graph, np.full(4, 1), host=HostTimes(100))
    assert run.start.tolist() == [0, 30, 60, 90]


def test_a_router_of_pytorch_takes_the_host_longer_than_a_fused_one() -> None:
    def iteration_ms(fused: bool) -> float:
        mapping = {
            "model": "moonlight-16b-a3b",
            "hardware": "h100-sxm",
            "parallel": {"ep": 8, "dp": 8},
            "training": {"seq_len": 1024},
            "libraries": {"router_fusion": fused},
        }
        return float(simulate(load_scenario(mapping)).report["iteration_time_ms"])

    layers, forward, backward = 26, 28 * PLAIN - MODULE, 20 * PLAIN - BACKWARD
    assert iteration_ms(False) - iteration_ms(True) == pytest.approx(
        layers * (forward + backward) * 0.15, rel=0.3
    )


# -- traces --------------------------------------------------------------------------------------------------------


def operator(
    name: str, start: float, duration: float, category: str = "cpu_op", thread: int = 1
) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": thread}


def launch(at: float, duration: float = 1, thread: int = 1) -> dict[str, Any]:
    return operator("cudaLaunchKernel", at, duration, "cuda_runtime", thread)


NODE = "autograd::engine::evaluate_function: "
TRACE = [
    operator("aten::empty", 0, 1),
    operator("aten::mul", 5, 5),
    launch(6),
    # Python and a view in front of a function are its own: 10 to 40.
    operator("aten::view", 12, 1),
    operator("Linear", 20, 20),
    operator("aten::mm", 25, 5),
    launch(27),
    # 40 to 50
    operator("aten::add", 45, 5),
    launch(46),
    # not counted: a full queue
    operator("aten::add", 50, 500),
    launch(51, 300),
    operator(NODE + "LinearBackward", 0, 33, thread=2),
    launch(5, thread=2),
    operator(NODE + "MulBackward0", 40, 9, thread=2),
    launch(41, thread=2),
    operator(NODE + "ReduceBackward", 60, 50, thread=2),
    operator("c10d::allreduce_", 65, 15, thread=2),
    launch(66, thread=2),
]


def test_operators_of_a_trace_are_timed_by_kind() -> None:
    times = host_kinds.measured(TRACE)
    assert times == {
        host_kinds.COLLECTIVE: [15.0],
        host_kinds.FUNCTION: [30.0],
        host_kinds.OPERATION: [10.0],
        host_kinds.FUNCTION_BACKWARD: [33.0],
        host_kinds.NODE: [9.0],
    }
    shares = host_kinds.shares(
        {"one": times, "without functions": {host_kinds.OPERATION: [5.0], host_kinds.NODE: [6.0]}}
    )
    # Five of an operation are a third of a function here too.
    assert shares[host_kinds.NODE] == [pytest.approx(0.3), pytest.approx(0.4)]
    assert shares[host_kinds.OPERATION] == [pytest.approx(1 / 3)]


def test_traces_are_printed_beside_what_is_installed(tmp_path: Path) -> None:
    path = tmp_path / host_kinds.TRACES[0]
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": TRACE}).encode()))
    printed = CliRunner().invoke(host_kinds.main, [str(tmp_path)]).output
    assert f"collective: 0.50 of a function (0.50), installed {COLLECTIVE:g}" in printed
    empty = CliRunner().invoke(host_kinds.main, [str(path.parent)])
    assert empty.exit_code == 2
    assert "has none of the traces" in empty.output


@pytest.mark.parametrize(
    "content",
    [b"no gzip", gzip.compress(b"{}", mtime=0), gzip.compress(b"{", mtime=0), gzip.compress(b"[]", mtime=0)],
)
def test_a_trace_that_cannot_be_read_is_named(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / host_kinds.TRACES[0]
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    result = CliRunner().invoke(host_kinds.main, [str(tmp_path)])
    assert result.exit_code == 2
    assert "rank0.pt.trace.json.gz is no gzipped trace of torch.profiler" in " ".join(result.output.split())
