"""Measured runs for tests, made by hand: calls on threads, and the kernels they launch on streams.

Times are in microseconds; a kernel is given with its start, so what it waited for is for the replay to find out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from op_graphs.timeline import Timeline
from op_graphs.vocabulary import Communication, FlowKind, OpKind, TrackRole
from tests.timelines import timeline_of

US = 1_000
ALL_REDUCE = {
    "kind": OpKind.COLLECTIVE,
    "communication": Communication.ALL_REDUCE,
    "communication_bytes": 1 << 20,
}
COPY = {"kind": OpKind.MEMCPY}


class Recording:
    """Collects slices; a track is a name such as ``thread 1`` or ``stream 7`` on a rank."""

    def __init__(self) -> None:
        self.slices: list[dict[str, Any]] = []
        self.tracks: list[tuple[int, TrackRole, str]] = []
        self.flows: list[tuple[int, int, FlowKind]] = []
        self.steps: list[tuple[int, int, int, int]] = []
        self.ranks = 1

    def _track(self, name: str, rank: int) -> int:
        self.ranks = max(self.ranks, rank + 1)
        role = TrackRole.HOST if name.startswith("thread") else TrackRole.DEVICE
        track = (rank, role, name)
        if track not in self.tracks:
            self.tracks.append(track)
        return self.tracks.index(track)

    def call(self, name: str, start: float, duration: float, thread: str = "thread 1", rank: int = 0) -> int:
        """A host slice; returns its row."""
        track = self._track(thread, rank)
        self.slices.append(
            {
                "track": track,
                "start": round(start * US),
                "duration": round(duration * US),
                "name": name,
                "kind": OpKind.HOST,
            }
        )
        return len(self.slices) - 1

    def kernel(
        self,
        name: str,
        start: float,
        duration: float,
        stream: str = "stream 7",
        rank: int = 0,
        launch: int | None = None,
        **columns: int,
    ) -> int:
        """A device slice; returns its row. ``launch`` is the row of the call that launched it."""
        track = self._track(stream, rank)
        row = {"track": track, "start": round(start * US), "duration": round(duration * US), "name": name}
        self.slices.append({"kind": OpKind.GEMM, **row, **columns})
        if launch is not None:
            self.flows.append((launch, len(self.slices) - 1, FlowKind.LAUNCH))
        return len(self.slices) - 1

    def launch(
        self,
        name: str,
        called: float,
        start: float,
        duration: float,
        stream: str = "stream 7",
        thread: str = "thread 1",
        rank: int = 0,
        columns: Mapping[str, int] | None = None,
    ) -> int:
        """A launching call of 5 us and its kernel; returns the row of the kernel."""
        call = self.call("cudaLaunchKernel", called, 5, thread, rank)
        return self.kernel(name, start, duration, stream, rank, call, **(columns or {}))

    def step(self, number: int, start: float, end: float, rank: int = 0) -> None:
        """A training step on the host."""
        self.steps.append((rank, number, round(start * US), round(end * US)))

    def timeline(self, groups: Sequence[Any] = ()) -> Timeline:
        """The run as a timeline."""
        return timeline_of(
            self.slices,
            tracks=self.tracks,
            ranks=[{"rank": rank} for rank in range(self.ranks)],
            flows=self.flows,
            steps=self.steps,
            groups=tuple(groups),
            name="recording",
        )


def queued_kernels(durations: Sequence[float], gap: float = 1.0) -> Recording:
    """Kernels ``k0``, ``k1``, ... launched every 10 us, far ahead of the device, one stream."""
    recording = Recording()
    moment = 10.0 * len(durations) + 100
    first = recording.kernel("first", 7, moment - 7, launch=recording.call("cudaLaunchKernel", 0, 5))
    assert first >= 0
    for number, duration in enumerate(durations):
        moment += gap
        recording.launch(f"k{number}", 10.0 * (number + 1), moment, duration)
        moment += duration
    return recording


def two_ranks(slow: float = 200.0, transfer: float = 50.0) -> Recording:
    """Two ranks that compute for 100 and ``slow`` us, then all-reduce: the first waits inside its kernel."""
    recording = Recording()
    for rank, compute in ((0, 100.0), (1, slow)):
        recording.launch("compute", 0, 7, compute, rank=rank)
        arrival = 7 + compute + 3
        recording.launch(
            "all_reduce",
            10,
            arrival,
            10 + slow + transfer - arrival,
            stream="stream 20",
            rank=rank,
            columns=ALL_REDUCE,
        )
    return recording
