"""Writes ``torch_schedules.csv.gz``: the orders of compute actions that PyTorch itself builds, as an oracle.

Needs ``pip install torch==2.13.0`` (a CPU build is enough); the tests read only the file, so they run without it.

    python tests/data/make_torch_schedules.py

A line is ``schedule;pp;chunks;microbatches;rank;actions``, the actions as PyTorch prints them with a space between.
Only compute actions are kept: idle steps and gradient reductions come from other passes. A larger plan has one line,
whose rank is ``*`` and whose actions are the first 16 hexadecimal digits of the SHA-256 of its rows, joined by line
feeds.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
from pathlib import Path
from unittest import mock

import torch
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

OUTPUT = Path(__file__).with_name("torch_schedules.csv.gz")
PIPELINE_SIZES = (2, 4, 8, 16)
CHUNKS = {
    "GPipe": (1,),
    "1F1B": (1,),
    "Interleaved1F1B": (2, 4),
    "LoopedBFS": (2, 4),
    "InterleavedZeroBubble": (2, 4),
    "ZBVZeroBubble": (2,),
    "DualPipeV": (2,),
}
MICROBATCHES = (*range(1, 17), 20, 24, 31, 32, 33, 40, 47, 48, 63, 64)
MOST_SPELLED_OUT = 9000
"""Characters of a plan's rows; longer ones are hashed."""


def lines() -> list[str]:
    """The lines of every plan PyTorch accepts."""
    found = []
    for name, chunk_counts in CHUNKS.items():
        for pp in PIPELINE_SIZES:
            for chunks in chunk_counts:
                for microbatches in MICROBATCHES:
                    try:
                        order = get_schedule_ops(name, pp, microbatches, chunks)
                    except ValueError:
                        continue  # PyTorch refuses this number of microbatches
                    rows = [
                        " ".join(str(a) for a in actions if a is not None and a.is_compute_op)
                        for actions in order
                    ]
                    plan = f"{name};{pp};{chunks};{microbatches}"
                    found += plan_lines(plan, rows)
    return found


def plan_lines(plan: str, rows: list[str]) -> list[str]:
    """The lines of one plan."""
    text = "\n".join(rows)
    if len(text) > MOST_SPELLED_OUT:
        return [f"{plan};*;{hashlib.sha256(text.encode()).hexdigest()[:16]}"]
    return [f"{plan};{rank};{row}" for rank, row in enumerate(rows)]


def main() -> None:
    """Write the file; equal bytes for equal content (no time stamp in the gzip header)."""
    logging.disable(logging.WARNING)
    # Sends and receives are not asked for, and take most of the time.
    with mock.patch.object(_PipelineScheduleRuntime, "_prepare_schedule_with_comms"):
        text = "\n".join([f"# torch {torch.__version__.split('+')[0]}", *lines()]) + "\n"
    OUTPUT.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))
    print(f"{OUTPUT}: {OUTPUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
