"""Reading profiler files, beside HTA's parser and a bare typed decode of the same bytes.

The bare decode is :mod:`msgspec` into one struct an event with undecoded arguments, kept until all are read: what any
reader that uses it must at least do. HTA (holistictraceanalysis, extra ``peers``) runs in the interpreter that
``TRACESIM_PEERS_PYTHON`` names, or in this one; where it is missing its figures are left out, with the reason.

Times are processor time (all three run on one thread), which a busy machine disturbs less than wall time. Beside HTA,
reading includes unpacking the file, as HTA's does; beside the bare decode neither does. Memory is above that of a
process that only imports the reader.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from tracesim.readers import kineto
from tracesim.readers.sources import Source, load

TRACES = {
    "df_index_resolver": "hta/df_index_resolver/df_index_resolver.json.gz",
    "trace_diff_control": "hta/trace_diff/control/control.json.gz",
}
_FOLDER = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "traces"
_REPEATS = 5

_Number = int | float | str | None


class _Event(msgspec.Struct, gc=False):
    ph: str | None = None
    cat: str | None = None
    name: str | int | float | None = None
    pid: int | str | float | None = None
    tid: int | str | float | None = None
    ts: _Number = None
    dur: _Number = None
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Document(msgspec.Struct, gc=False):
    traceEvents: list[_Event]  # noqa: N815


def kineto_reading() -> dict[str, float]:
    """Seconds, events a second and peak memory for each trace; the best of five runs, side by side in one run.

    Raises:
        FileNotFoundError: if the traces are not there.
    """
    figures: dict[str, float] = {}
    for label, name in TRACES.items():
        path = _FOLDER / name
        if not path.is_file():
            raise FileNotFoundError(f"{path}: the traces this figure reads are not part of the project")
        source = load(path)
        bare, ours, count = _side_by_side(source)
        peer = _peer_seconds(path)
        figures.update(
            {
                f"{label}_events": count,
                f"{label}_events_per_s": count / ours,
                f"{label}_of_bare_decode": bare / ours,
                f"{label}_peak_memory_of_file": _peak_bytes(path) / len(source.data),
            }
        )
        if peer:
            whole = _best(lambda path=path: kineto.read(load(path)))  # type: ignore[misc]
            figures[f"{label}_times_hta"] = peer / whole
    return figures


def _side_by_side(source: Source) -> tuple[float, float, int]:
    """Best seconds of the bare decode and of our reader, taken in turns, and the events of the file."""
    decoder = msgspec.json.Decoder(_Document)
    count = len(decoder.decode(source.data).traceEvents)
    bare, ours = [], []
    for _ in range(_REPEATS):
        bare.append(_best(lambda: decoder.decode(source.data), 1))
        ours.append(_best(lambda: kineto.read(source), 1))
    return min(bare), min(ours), count


def _best(run: Callable[[], object], repeats: int = _REPEATS) -> float:
    best = float("inf")
    for _ in range(repeats):
        gc.collect()
        gc.disable()
        begin = time.process_time()
        kept = run()
        best = min(best, time.process_time() - begin)
        gc.enable()
        del kept
    return best


def _peak_bytes(path: Path) -> int:
    """Peak memory of a process that reads the file, above one that only imports the reader."""
    return _child_peak(f"from tracesim.readers import read_trace; read_trace({str(path)!r})") - _child_peak(
        "from tracesim.readers import read_trace"
    )


_PEAK = r"""
import re, resource, sys
try:
    print(int(re.search(r"VmHWM:\s*(\d+)", open("/proc/self/status").read())[1]) << 10)
except OSError:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
"""Prints the peak memory of this very program: what the kernel counts for a child includes its parent at the fork."""


def _child_peak(program: str) -> int:
    ran = subprocess.run([sys.executable, "-c", program + _PEAK], capture_output=True, text=True, check=True)
    return int(ran.stdout)


_PEER = """
import json, sys, time, logging
logging.disable(logging.CRITICAL)
from hta.common.trace import parse_trace_file
best = 1e9
for _ in range(3):
    begin = time.process_time()
    parse_trace_file(sys.argv[1])
    best = min(best, time.process_time() - begin)
print(json.dumps(best))
"""


def _peer_seconds(path: Path) -> float:
    """Best seconds of HTA's parser on the file; 0, with the reason on standard error, where it cannot run."""
    python = os.environ.get("TRACESIM_PEERS_PYTHON", sys.executable)
    ran = subprocess.run([python, "-c", _PEER, str(path)], capture_output=True, text=True, check=False)
    if ran.returncode:
        reason = (ran.stderr.strip().splitlines() or ["no message"])[-1]
        sys.stderr.write(f"HTA left out: {reason} (set TRACESIM_PEERS_PYTHON to a Python with it)\n")
        return 0.0
    return float(json.loads(ran.stdout.strip().splitlines()[-1]))
