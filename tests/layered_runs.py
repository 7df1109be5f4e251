"""Runs of a few ranks in lockstep that can be edited: layers of kernels, each closed by an all-reduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from op_graphs.timeline import CommunicationGroup, Timeline
from op_graphs.vocabulary import Communication, OpKind, Phase, TrackRole
from tests.timelines import timeline_of

TRANSFER = 5_000


@dataclass(frozen=True)
class Kernel:
    """A kernel of every rank."""

    name: str
    duration: int
    kind: OpKind = OpKind.GEMM
    phase: Phase = Phase.FORWARD


@dataclass(frozen=True)
class LayeredRun:
    """What runs: ``layers[i]`` back to back on each rank, then an all-reduce that ends when all ranks are there."""

    layers: tuple[tuple[Kernel, ...], ...]
    ranks: int = 2
    delays: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """Nanoseconds by (rank, layer) in which nothing runs before the layer."""
    slower: Mapping[tuple[int, int, int], int] = field(default_factory=dict)
    """Nanoseconds by (rank, layer, kernel) that a kernel takes longer."""
    steps: int = 1
    epoch: int = 0
    """What the clock shows at the start."""

    def edited(self, layer: int, kernels: Sequence[Kernel]) -> LayeredRun:
        """With other kernels in a layer."""
        return replace(self, layers=(*self.layers[:layer], tuple(kernels), *self.layers[layer + 1 :]))

    def timeline(self) -> Timeline:
        """The run, measured: a member of a collective starts on arrival and waits inside."""
        rows: list[dict[str, Any]] = []
        steps = []
        now = self.epoch
        for step in range(self.steps):
            begin = now
            for number, layer in enumerate(self.layers):
                arrivals = [self._layer(rows, rank, number, layer, now) for rank in range(self.ranks)]
                now = max(arrivals) + TRANSFER
                rows += [
                    {"track": 2 * rank + 1, "start": arrival, "duration": now - arrival, "name": "all_reduce",
                     "kind": OpKind.COLLECTIVE, "communication": Communication.ALL_REDUCE,
                     "communication_bytes": 1 << 20, "group": 0, "layer": number}
                    for rank, arrival in enumerate(arrivals)
                ]  # fmt: skip
            steps += [(rank, step, begin, now) for rank in range(self.ranks)]
        return timeline_of(
            rows,
            tracks=[
                (rank, TrackRole.DEVICE, name)
                for rank in range(self.ranks)
                for name in ("stream 7", "stream 20")
            ],
            ranks=[{"rank": rank} for rank in range(self.ranks)],
            steps=steps,
            groups=(CommunicationGroup("dp", tuple(range(self.ranks)), self.ranks),),
            world_size=self.ranks,
        )

    def _layer(
        self, rows: list[dict[str, Any]], rank: int, number: int, layer: Sequence[Kernel], now: int
    ) -> int:
        now += self.delays.get((rank, number), 0)
        for index, kernel in enumerate(layer):
            duration = kernel.duration + self.slower.get((rank, number, index), 0)
            rows.append(
                {"track": 2 * rank, "start": now, "duration": duration, "name": kernel.name, "kind": kernel.kind,
                 "phase": kernel.phase, "layer": number}
            )  # fmt: skip
            now += duration
        return now
