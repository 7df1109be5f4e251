"""Comparing two traces of 200,000 events, beside reading them.

The traces are two public recordings of a recommendation model on different devices, one of them compiled, so that most
of their kernels have other names and orders. Each is repeated in time until it has 200,000 slices. Times are processor
time, taken in turns in one run, since a busy machine disturbs them less than wall time.
"""

from __future__ import annotations

import gc
import gzip
import json
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tracesim.diff import compare_timelines
from tracesim.readers import read_trace

TRACES = ("hta/trace_diff/control/control.json.gz", "hta/trace_diff/test/test.json.gz")
SLICES = 200_000
_FOLDER = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "traces"
_REPEATS = 3
_STEP = re.compile(r"ProfilerStep#(\d+)")
_NUMBERS = ("correlation", "External id")


def trace_comparison() -> dict[str, float]:
    """Seconds of reading both traces and of comparing them, each the best of three, and how often the first the second.

    Raises:
        FileNotFoundError: if the traces are not there.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number, name in enumerate(TRACES):
            source = _FOLDER / name
            if not source.is_file():
                raise FileNotFoundError(
                    f"{source}: the traces this figure compares are not part of the project"
                )
            paths.append(Path(folder) / f"{number}.json")
            paths[-1].write_text(
                json.dumps(repeated(json.loads(gzip.decompress(source.read_bytes())), SLICES))
            )
        reading, comparing = [], []
        for _ in range(_REPEATS):
            seconds, timelines = _timed(lambda: [read_trace(path) for path in paths])
            reading.append(seconds)
            seconds, _ = _timed(lambda timelines=timelines: compare_timelines(*timelines))  # type: ignore[misc]
            comparing.append(seconds)
        return {
            "slices": sum(len(timeline.slices) for timeline in timelines),
            "reading_s": min(reading),
            "comparing_s": min(comparing),
            "comparing_of_reading": min(comparing) / min(reading),
        }


def repeated(document: dict[str, Any], slices: int) -> dict[str, Any]:
    """A trace with its events one after another until there are so many slices; steps and launches are renumbered."""
    events = document["traceEvents"]
    complete = [event for event in events if event.get("ph") == "X"]
    begin = min(event["ts"] for event in complete)
    span = max(event["ts"] + event.get("dur", 0) for event in complete) - begin
    steps = [int(found[1]) for event in complete if (found := _STEP.match(str(event["name"])))]
    copies = -(-slices // len(complete))
    numbers = 1 + max(_number(event.get("args", {}), name) for event in complete for name in _NUMBERS)
    repeated_events = [event for event in events if event.get("ph") == "M"]
    for copy in range(copies):
        more_steps = copy * (max(steps, default=0) - min(steps, default=0) + 1)
        for event in events:
            if event.get("ph") == "M":
                continue
            moved = {**event, "ts": event["ts"] + copy * span}
            if match := _STEP.match(str(event.get("name"))):
                moved["name"] = f"ProfilerStep#{int(match[1]) + more_steps}"
            if "args" in event:
                moved["args"] = {
                    key: value + copy * numbers
                    if key in _NUMBERS and isinstance(value, int) and value > 0
                    else value
                    for key, value in event["args"].items()
                }
            if isinstance(event.get("id"), int):
                moved["id"] = event["id"] + copy * numbers
            repeated_events.append(moved)
    return {**document, "traceEvents": repeated_events}


def _number(arguments: dict[str, Any], name: str) -> int:
    value = arguments.get(name, 0)
    return value if isinstance(value, int) else 0


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    begin = time.process_time()
    result = run()
    return time.process_time() - begin, result
