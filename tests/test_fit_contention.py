"""Kernels of a trace beside themselves, with and without communication, and what is fitted on them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import kernel_pairs as pairs_of_kernels
from benchmarks.fit import main
from benchmarks.fit_contention import (
    fit_exchange_rate,
    fit_second_wave,
    fit_send_sms,
    fit_stall,
    residuals,
)
from benchmarks.kernel_pairs import LEAST_STALL_US, Device, Launch, Pair, kernel_pairs
from benchmarks.step_pairs import chunk_pairs, setting_pairs, step_pairs
from op_graphs.vocabulary import OpKind
from tracesim.cost.contention import SECOND_WAVE

A100 = Device("A100", 108)
RING = Launch("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", 8, 640, 96, 0)
SEND = Launch("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", 24, 640, 96, 0)


def pair(launch: Launch, beside: Launch, kind: OpKind, ratio: float = 1.0) -> Pair:
    return Pair("made up", A100, launch, beside, kind, 100.0, 100.0 * ratio)


@pytest.mark.parametrize(
    ("threads", "registers", "shared", "beside", "fits"),
    [
        (256, 128, 0, None, 2),
        (128, 32, 0, None, 16),
        (256, 32, 100_000, None, 1),
        # 640 threads of 96 registers leave 4,096 registers
        (256, 128, 0, RING, 0),
        (64, 32, 0, RING, 2),
    ],
)
def test_blocks_fit_by_registers_threads_and_shared_memory(threads, registers, shared, beside, fits):
    assert Launch("kernel", 1, threads, registers, shared).resident(A100, beside) == fits


@pytest.mark.parametrize(
    ("blocks", "kind", "beside", "expected"),
    [
        # one block an SM: 108 fit at once, 100 beside the ring
        (96, OpKind.GEMM, RING, 1.0),
        (216, OpKind.GEMM, RING, 3 / 2),
        (400, OpKind.GEMM, RING, 4 / 4),
        (10_000, OpKind.ELEMENTWISE, RING, 108 / 100),
        (108, OpKind.NORM, RING, 1 + SECOND_WAVE),
        # a send takes two
        (10_000, OpKind.ELEMENTWISE, SEND, 108 / 106),
    ],
)
def test_times_as_long_by_waves(blocks, kind, beside, expected):
    launch = Launch("kernel", blocks, 256, 255, 0)
    assert pair(launch, beside, kind).predicted(2, SECOND_WAVE) == pytest.approx(expected)


def test_the_second_wave_is_the_geometric_mean_of_what_norms_lose():
    norm = Launch("ln_fwd_kernel", 108, 256, 255, 0)
    found = fit_second_wave([pair(norm, RING, OpKind.NORM, ratio) for ratio in (1.6, 1.8)])
    assert found.value == pytest.approx((1.6 * 1.8) ** 0.5 - 1, abs=0.005)
    assert found.residual_after_pct < found.residual_before_pct


def test_the_sms_of_a_send_are_those_that_explain_the_total_time():
    launch = Launch("kernel", 10**6, 256, 255, 0)
    found = fit_send_sms([pair(launch, SEND, OpKind.ELEMENTWISE, 108 / (108 - taken)) for taken in (2, 3, 4)])
    assert found.value == 3
    assert found.residual_after_pct < 0.1


def test_a_stall_is_the_median_of_what_kernels_lose_beyond_waves():
    launch = Launch("kernel", 50, 256, 255, 0)
    pairs = [
        Pair("made up", A100, launch, RING, OpKind.GEMM, alone, alone + more, transfers=True)
        for alone, more in ((5.0, 15.0), (50.0, 16.0), (90.0, 21.0))
    ]
    waiting = Pair("made up", A100, launch, RING, OpKind.GEMM, 50.0, 50.0)
    found = fit_stall([*pairs, waiting])
    assert found.value == 16
    assert waiting.predicted(2, SECOND_WAVE, 16.0) == 1
    assert found.residual_after_pct < found.residual_before_pct / 4


def write_trace(folder: Path) -> None:
    """Three steps of a product and a copy; in the second a ring is beside the product."""
    events: list[dict[str, Any]] = []
    for step in range(3):
        begin = 1000.0 * step
        events.append(
            {
                "ph": "X",
                "cat": "user_annotation",
                "name": f"ProfilerStep#{step}",
                "ts": begin,
                "dur": 900,
                "tid": 1,
            }
        )
        lengths = [("gemm", 7, 10.0, 130.0 if step == 1 else 100.0), ("copy_kernel", 7, 300.0, 50.0)]
        if step == 1:
            lengths.append((RING.name, 20, 0.0, 200.0))
        for number, (name, stream, at, lasts) in enumerate(lengths):
            correlation = 10 * step + number
            events.append({"ph": "X", "cat": "cuda_runtime", "name": "launch", "ts": begin + 1, "dur": 1, "tid": 1,
                           "args": {"correlation": correlation}})  # fmt: skip
            arguments = {"stream": stream, "correlation": correlation, "grid": [216, 1, 1], "block": [256, 1, 1],
                         "registers per thread": 255, "shared memory": 0}  # fmt: skip
            events.append(
                {"ph": "X", "cat": "kernel", "name": name, "ts": begin + at, "dur": lasts, "args": arguments}
            )
    device = {"name": "A100", "numSms": 108, "sharedMemPerMultiprocessor": 167936}
    path = folder / "traces/hta/nccl_parser_config/nccl_data.json.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(
        gzip.compress(json.dumps({"deviceProperties": [device], "traceEvents": events}).encode())
    )


def test_a_kernel_is_compared_with_itself_in_another_step(tmp_path):
    write_trace(tmp_path)
    (found,) = kernel_pairs(tmp_path)
    assert (found.launch.name, found.kind, found.alone_us, found.beside_us) == ("gemm", OpKind.GEMM, 100, 130)
    (group,) = residuals([found])
    assert (group.trace, group.pairs, group.measured_ratio) == ("nccl_data", 1, pytest.approx(1.3))


@pytest.mark.shared_data
def test_what_is_installed_is_what_the_trace_of_deepseek_gives(shared_data, monkeypatch):
    monkeypatch.setattr(pairs_of_kernels, "TRACES", pairs_of_kernels.TRACES[:1])
    second_wave = fit_second_wave(kernel_pairs(shared_data))
    assert second_wave.value == pytest.approx(second_wave.installed, abs=0.01)
    rate = fit_exchange_rate(shared_data)
    assert rate.value == pytest.approx(rate.installed, abs=0.005)
    assert rate.residual_after_pct < 6 < 30 < rate.residual_before_pct


@pytest.mark.shared_data
def test_kernels_beside_an_all_reduce_lose_the_same_time_whatever_their_length(shared_data, monkeypatch):
    monkeypatch.setattr(pairs_of_kernels, "TRACES", ("hta/trace_diff/control/control.json.gz",))
    pairs = kernel_pairs(shared_data, LEAST_STALL_US)
    found = fit_stall(pairs)
    assert found.value == pytest.approx(found.installed, abs=1)
    assert found.residual_after_pct < found.residual_before_pct / 2
    medians = [
        median(
            pair.beside_us - pair.alone_us * pair.predicted(2, SECOND_WAVE)
            for pair in pairs
            if pair.transfers and low <= pair.alone_us < high
        )
        for low, high in ((4, 8), (8, 16))
    ]
    assert medians == pytest.approx([found.value] * 2, abs=3)
    # ... and beside sends next to nothing
    assert median(p.beside_us - p.alone_us for p in pairs if p.is_send and p.alone_us < 16) <= 2


def test_the_pair_of_chunks_is_among_what_the_fit_prints():
    time, hidden = chunk_pairs()
    assert (time.without_contention, time.with_contention) == (pytest.approx(time.measured, rel=0.05),) * 2
    assert hidden.without_contention == pytest.approx(hidden.measured, abs=5)


@pytest.mark.shared_data
def test_asynchronous_tensor_parallelism_is_compared_as_the_scoreboard_runs_it(shared_data):
    found = step_pairs(shared_data)
    assert len(found) == 5
    for pair in found:
        assert 1 < pair.with_contention < pair.without_contention
        assert pair.with_contention == pytest.approx(pair.measured, rel=0.15)


@pytest.mark.shared_data
def test_settings_of_one_heading_are_compared_with_its_first_row(shared_data):
    found = setting_pairs(shared_data)
    assert len(found) >= 2
    for pair in found:
        assert (pair.measured < 1) == (pair.without_contention < 1) == (pair.with_contention < 1)


def test_a_folder_without_data_is_refused(tmp_path):
    result = CliRunner().invoke(main, [str(tmp_path), "--figure", "contention"])
    assert result.exit_code == 2
    assert "reads one folder with traces and measured" in result.output
