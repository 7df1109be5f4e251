"""Records ``cpu_traces/``: small real training runs on CPU, one profiler trace a process, as data for tests and docs.

Needs ``pip install torch==2.13.0 numpy`` (a CPU build is enough); the tests read only the files, so they run without.

    python tests/data/record_cpu_traces.py [RUN...]

Every run is two processes on this machine that talk over gloo, each with one compute thread, and its last steps are
recorded with shapes. Files are compressed as they come; nothing is edited. A new recording has other times, so tests
ask for what holds of any recording: structure, matches, and how near a replay comes.

| run | what |
|---|---|
| ``ddp`` | DistributedDataParallel, two buckets of gradients, an all-reduce of the loss; memory is recorded |
| ``ddp_slow_rank`` | the same with four times the batch on rank 1 |
| ``pipeline_1f1b`` | a stage on each rank, four microbatches, Schedule1F1B |
| ``pipeline_interleaved`` | two stages on each rank, four microbatches, ScheduleInterleaved1F1B (``PP:`` annotations) |
"""

from __future__ import annotations

import gzip
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.profiler import ProfilerActivity, profile, schedule

OUTPUT = Path(__file__).with_name("cpu_traces")
WARM_UP_STEPS = 3
WIDTH = 512
BATCH = 256
MICROBATCHES = 4


def _profile(step: Callable[[], object], path: Path, steps: int, *, memory: bool) -> None:
    """Run some steps and record the last of them."""
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=WARM_UP_STEPS, active=steps, repeat=1),
        record_shapes=True,
        profile_memory=memory,
    ) as profiler:
        for _ in range(WARM_UP_STEPS + steps):
            step()
            profiler.step()
    profiler.export_chrome_trace(str(path))


def data_parallel(rank: int, folder: Path, batch: int, memory: bool) -> None:
    """A bucket of gradients a layer, and the mean loss over all ranks."""
    layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    model = nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(batch, WIDTH)

    def step() -> None:
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)

    _profile(step, folder / f"rank{rank}.json", 3, memory=memory)


def pipeline(rank: int, folder: Path, chunks: int) -> None:
    """A stage a chunk, with one optimizer; the last stage has the loss."""
    ranks = dist.get_world_size()
    stages = [
        PipelineStage(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()),
            rank + chunk * ranks,
            ranks * chunks,
            torch.device("cpu"),
        )
        for chunk in range(chunks)
    ]
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.submod.parameters()], lr=1e-3)
    loss = nn.functional.mse_loss
    runs = (
        Schedule1F1B(stages[0], MICROBATCHES, loss_fn=loss)
        if chunks == 1
        else ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=loss)
    )
    inputs = torch.randn(BATCH * MICROBATCHES, WIDTH)

    def step() -> None:
        if rank == 0:
            runs.step(inputs)
        elif rank == ranks - 1:
            runs.step(target=inputs)
        else:
            runs.step()
        optimizer.step()
        optimizer.zero_grad()

    _profile(step, folder / f"rank{rank}.json", 2, memory=False)


RUNS: dict[str, tuple[int, Callable[[int, Path], None]]] = {
    "ddp": (2, lambda rank, folder: data_parallel(rank, folder, BATCH, memory=True)),
    "ddp_slow_rank": (
        2,
        lambda rank, folder: data_parallel(rank, folder, 4 * BATCH if rank else BATCH, memory=False),
    ),
    "pipeline_1f1b": (2, lambda rank, folder: pipeline(rank, folder, 1)),
    "pipeline_interleaved": (2, lambda rank, folder: pipeline(rank, folder, 2)),
}
"""Processes of each run, and what one of them does."""


def _process(rank: int, run: str, folder: str) -> None:
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    ranks, body = RUNS[run]
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    body(rank, Path(folder))
    dist.barrier()
    dist.destroy_process_group()


def main(chosen: list[str]) -> None:
    """Record the chosen runs, by default all."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for run in chosen or list(RUNS):
        folder = OUTPUT / run
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as written:
            multiprocessing.spawn(_process, args=(run, written), nprocs=RUNS[run][0])
            for trace in sorted(Path(written).glob("rank*.json")):
                packed = folder / f"{trace.name}.gz"
                packed.write_bytes(gzip.compress(trace.read_bytes(), compresslevel=9, mtime=0))
                print(f"{packed}: {packed.stat().st_size} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
