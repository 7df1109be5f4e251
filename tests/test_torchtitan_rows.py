"""Rows of torchtitan: what its releases did differently."""

from __future__ import annotations

import pytest

from benchmarks.rows import RowSkippedError
from tests.measured_rows import expressed
from tests.test_accuracy_sources import TITAN


@pytest.mark.parametrize(
    ("table", "technique", "loss"),
    [
        ("2024-12 Table 2", "compile", "torch"),
        ("2025-06 async TP", "compile", "compiled"),
        ("2025-06", "eager", "torch"),
    ],
)
def test_torchtitan_compiles_the_loss_since_2025(table, technique, loss, tmp_path):
    row = {
        **TITAN,
        "source": "torchtitan-bench",
        "table": table,
        "technique": technique,
        "recompute": "full AC",
    }
    assert expressed(row, tmp_path).scenario.training.cross_entropy == loss


@pytest.mark.parametrize(
    ("table", "pp", "batch", "microbatches"),
    [
        ("2024-12 Table 5", 8, 32, 8),
        ("2024-12 Table 6", 8, 8, 8),
        ("2025-06", 8, 32, 32),
        ("2024-12 Table 5", 1, 4, 1),
    ],
)
def test_torchtitan_cuts_a_batch_for_its_stages_in_2024_and_into_sequences_since(
    table, pp, batch, microbatches, tmp_path
):
    row = {
        **TITAN,
        "source": "torchtitan-bench",
        "table": table,
        "recompute": "full AC",
        "local_batch": batch,
        "parallel": {"fsdp": 64 // pp, "pp": pp},
    }
    training = expressed(row, tmp_path).scenario.training
    assert (training.num_microbatches, training.micro_batch_size) == (microbatches, batch // microbatches)
    assert (training.recompute.mode, training.recompute.stops_early) == ("full", True)


def test_a_batch_that_does_not_divide_into_microbatches_is_not_expressed(tmp_path):
    row = {
        **TITAN,
        "source": "torchtitan-bench",
        "table": "2024-12",
        "recompute": "full AC",
        "local_batch": 12,
        "parallel": {"fsdp": 8, "pp": 8},
    }
    with pytest.raises(RowSkippedError, match="12 does not divide into 8 microbatches"):
        expressed(row, tmp_path)
