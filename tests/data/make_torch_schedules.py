"""Writes ``torch_schedules.csv.gz``: the orders of compute actions that PyTorch itself builds, as an oracle.

Needs ``pip install torch==2.13.0`` (a CPU build is enough); the tests read only the file, so they run without it.

    python tests/data/make_torch_schedules.py

Each line of the file is ``schedule;pp;chunks;microbatches;rank;actions``, the actions as PyTorch prints them with a
space between. Only compute actions are kept: idle steps and gradient reductions come from other passes.
"""

from __future__ import annotations

import gzip
import logging
from pathlib import Path

import torch
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

OUTPUT = Path(__file__).with_name("torch_schedules.csv.gz")
PIPELINE_SIZES = (2, 4, 8)
CHUNKS = {"GPipe": (1,), "1F1B": (1,), "Interleaved1F1B": (2, 4)}
MICROBATCHES = range(1, 17)


def lines() -> list[str]:
    """One line a rank of every schedule PyTorch accepts."""
    found = []
    for name, chunk_counts in CHUNKS.items():
        for pp in PIPELINE_SIZES:
            for chunks in chunk_counts:
                for microbatches in MICROBATCHES:
                    try:
                        order = get_schedule_ops(name, pp, microbatches, chunks)
                    except ValueError:
                        continue  # PyTorch refuses this number of microbatches
                    for rank, actions in enumerate(order):
                        computes = " ".join(str(a) for a in actions if a is not None and a.is_compute_op)
                        found.append(f"{name};{pp};{chunks};{microbatches};{rank};{computes}")
    return found


def main() -> None:
    """Write the file; equal bytes for equal content (no time stamp in the gzip header)."""
    logging.disable(logging.WARNING)
    text = "\n".join([f"# torch {torch.__version__.split('+')[0]}", *lines()]) + "\n"
    OUTPUT.write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))
    print(f"{OUTPUT}: {OUTPUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
