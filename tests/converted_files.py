"""Strict readers of converted files that use nothing of ours: what a viewer would refuse fails while reading."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from decimal import Decimal
from pathlib import Path

from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import TrackEvent

from tests.test_export_perfetto import Parsed


def nanoseconds(microseconds):
    return round(Decimal(str(microseconds)) * 1000)


def slice_key(event, base):
    """Category, name, start, duration and arguments of a complete event."""
    arguments = json.dumps(event.get("args") or {}, sort_keys=True, default=float)
    start, duration = nanoseconds(event["ts"]) - base, max(nanoseconds(event.get("dur") or 0), 0)
    return event.get("cat"), str(event.get("name")), start, duration, arguments


class Profile:
    """A profiler file read with nothing of ours; what a strict viewer refuses is checked while reading."""

    def __init__(self, path: Path, strict: bool = True) -> None:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        document = json.loads(data, parse_float=Decimal)
        self.events = document["traceEvents"] if isinstance(document, dict) else document
        self.head = document if isinstance(document, dict) else {}
        self.complete = [event for event in self.events if event["ph"] == "X"]
        first = min((nanoseconds(event["ts"]) for event in self.complete), default=0)
        self.start = int(self.head.get("baseTimeNanoseconds", 0)) + first
        self.slices = Counter(slice_key(event, first) for event in self.complete)
        self.categories = Counter(event.get("cat") for event in self.complete)
        if strict:
            assert b"\\ud8" not in data.lower()
            self._check_nesting()
            self._check_arrows()

    def _check_nesting(self) -> None:
        threads = defaultdict(list)
        for event in self.complete:
            start, duration = nanoseconds(event["ts"]), nanoseconds(event["dur"])
            assert start >= 0
            assert duration >= 0
            threads[str(event.get("pid")), str(event.get("tid"))].append((start, -duration))
        for members in threads.values():
            still_open: list[int] = []
            for start, negative in sorted(members):
                while still_open and still_open[-1] <= start:
                    still_open.pop()
                assert not still_open or start - negative <= still_open[-1], "slices cross"
                if negative:
                    still_open.append(start - negative)

    def _check_arrows(self) -> None:
        """Each id once on both ends, with one category and name, at the begin of a slice, the end bound to it."""
        begins = {(str(e.get("pid")), str(e.get("tid")), e["ts"]) for e in self.complete}
        ends = defaultdict(list)
        for event in self.events:
            if event["ph"] in ("s", "f"):
                ends[event["id"]].append(event)
                assert (str(event.get("pid")), str(event.get("tid")), event["ts"]) in begins
        self.arrows = len(ends)
        for start, finish in ends.values():
            assert (start["ph"], finish["ph"], finish["bp"]) == ("s", "f", "e")
            assert (start["cat"], start["name"]) == (finish["cat"], finish["name"])
            assert start["ts"] <= finish["ts"]


class Trace(Parsed):
    """A Perfetto file read with the official bindings, checked strictly while reading; times without the shift."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.read_bytes())
        names: dict[int, str] = {}
        for packet in self.trace.packet:
            names |= {entry.iid: entry.name for entry in packet.interned_data.event_categories}
        self.categories = Counter(
            names[packet.track_event.category_iids[0]] if packet.track_event.category_iids else None
            for packet in self.trace.packet
            if packet.track_event.type == TrackEvent.TYPE_SLICE_BEGIN
        )
        shift = self.facts["time_shift_ns"]
        self.times = Counter((s["name"], s["start"] - shift, s["end"] - s["start"]) for s in self.slices)
        assert all(len(ends) == 2 for ends in self.flows.values())
