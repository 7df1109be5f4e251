"""Processes and threads of a Chrome JSON trace: a host and a device side for each rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from op_graphs.columns import Bool, Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import TrackRole

from .lanes import Placement
from .perfetto_tracks import process_ids, rank_names

STEPS_TID = 1
_FIRST_FREE_TID = 100_000
_FIRST_STREAM = 7
_HOST_PID = 1_000_000
_ROLES_ON_BOTH_SIDES = (TrackRole.PIPELINE,)


@dataclass(frozen=True)
class ChromeTracks:
    """Numbers of processes (by row of the ranks) and threads (by lane of the placement); 0 where not drawn there."""

    device_pid: Int64
    host_pid: Int64
    device_tid: Int64
    host_tid: Int64

    @classmethod
    def of(cls, timeline: Timeline, placement: Placement) -> ChromeTracks:
        """The device stream or thread id where it is still free on its side of the rank, else a number above."""
        pids = process_ids(timeline)
        lanes = len(placement.lane_track)
        device_tid, host_tid = np.zeros(lanes, dtype=np.int64), np.zeros(lanes, dtype=np.int64)
        taken = {(rank, False, STEPS_TID) for rank in range(len(timeline.ranks))}
        drawn_on_device, drawn_on_host = sides(timeline)
        for lane, track in enumerate(placement.lane_track.tolist()):
            rank, stream = int(timeline.tracks.rank[track]), int(timeline.tracks.stream[track])
            if timeline.simulated:
                # Streams of a simulated rank count from 0; CUDA's first stream in profiler files is 7.
                stream += _FIRST_STREAM
            for tids, drawn in ((device_tid, drawn_on_device), (host_tid, drawn_on_host)):
                if drawn[track]:
                    tid = stream if stream > 0 else _FIRST_FREE_TID
                    while (rank, tids is device_tid, tid) in taken:
                        tid = max(tid + 1, _FIRST_FREE_TID)
                    taken.add((rank, tids is device_tid, tid))
                    tids[lane] = tid
        return cls(pids, pids + _HOST_PID, device_tid, host_tid)

    def metadata(self, timeline: Timeline, placement: Placement, row: int) -> list[dict[str, object]]:
        """Names and order of the processes and threads of one rank."""
        name = rank_names(timeline)[row]
        found: list[dict[str, object]] = []
        for pid, label, order in (
            (self.host_pid[row], "CPU", 2 * row),
            (self.device_pid[row], "GPU 0", 2 * row + 1),
        ):
            found.append(_metadata("process_name", int(pid), 0, "name", f"{name} {label.split()[0].lower()}"))
            found.append(_metadata("process_labels", int(pid), 0, "labels", label))
            found.append(_metadata("process_sort_index", int(pid), 0, "sort_index", order))
        found.append(_metadata("thread_name", int(self.host_pid[row]), STEPS_TID, "name", "steps"))
        for lane in np.flatnonzero(timeline.tracks.rank[placement.lane_track] == row).tolist():
            track, number = int(placement.lane_track[lane]), int(placement.lane_number[lane])
            shown = timeline.string(int(timeline.tracks.name[track])) + (f" ({number + 1})" if number else "")
            for pids, tids in ((self.host_pid, self.host_tid), (self.device_pid, self.device_tid)):
                if tid := int(tids[lane]):
                    label = f"stream {tid} {shown}" if tids is self.device_tid else shown
                    found.append(_metadata("thread_name", int(pids[row]), tid, "name", label))
                    found.append(_metadata("thread_sort_index", int(pids[row]), tid, "sort_index", lane))
        return found


def sides(timeline: Timeline) -> tuple[Bool, Bool]:
    """Which tracks are drawn on the device side, and which on the host side; pipeline actions are on both."""
    role = timeline.tracks.role
    both = np.isin(role, _ROLES_ON_BOTH_SIDES)
    on_device = (role >= TrackRole.COMPUTE) & (role <= TrackRole.DEVICE)
    return on_device | both, ~on_device | both


def _metadata(name: str, pid: int, tid: int, argument: str, value: object) -> dict[str, object]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": {argument: value}}
