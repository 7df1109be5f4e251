"""A what-if against the truth: ``python -m benchmarks.replay_cross_check RUN OTHER [--json]``.

RUN and OTHER are folders of ranks of one program that differ in what they send. Every communication of RUN is scaled to
the median transfer time that the same communication takes in OTHER, and the step time predicted so is compared with the
one measured in OTHER. Two runs also differ in how long their hosts stall (data loading, other processes), which no
what-if knows; so the comparison is made once more with host work of 200 us and more taken out of both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from op_graphs.columns import Float64, Int64
from tracesim.errors import SimulationError, TraceError
from tracesim.readers import read_trace
from tracesim.replay.graph import Rebuilt
from tracesim.replay.rebuild import rebuild
from tracesim.replay.run import replay, step_duration, step_times
from tracesim.replay.what_if.outcome import change
from tracesim.replay.what_if.registry import parse_what_ifs


def with_transfers_of(run: Rebuilt, other: Rebuilt) -> Rebuilt:
    """A run whose communication takes the time it takes in another run, by name and order in the step."""
    ours, theirs = _Communication(run), _Communication(other)
    durations = run.durations.astype(np.float64)
    known = {place: float(np.median(times)) for place, times in theirs.times.items()}
    for place, rows in ours.rows.items():
        own = float(np.median(run.durations[rows]))
        if place in known and own > 0:
            durations[rows] *= known[place] / own
    return replace(run, durations=np.rint(durations).astype(np.int64))


class _Communication:
    """Communication of a run by (name, how many-th in its step on its rank)."""

    def __init__(self, run: Rebuilt) -> None:
        self.rows: dict[tuple[str, int], Int64] = {}
        self.times: dict[tuple[str, int], Float64] = {}
        operations, rows = run.graph.operations, run.rows
        chosen = np.flatnonzero(run.on_device() & run.graph.is_communication() & (rows.step >= 0))
        chosen = chosen[np.argsort(rows.end[chosen], kind="stable")]
        counts: dict[tuple[int, int, int], int] = {}
        found: dict[tuple[str, int], list[int]] = {}
        for row in chosen.tolist():
            key = int(rows.rank[row]), int(rows.step[row]), int(operations.name[row])
            counts[key] = counts.get(key, -1) + 1
            found.setdefault((run.graph.strings[operations.name[row]], counts[key]), []).append(row)
        for place, members in found.items():
            self.rows[place] = np.array(members, dtype=np.int64)
            self.times[place] = run.durations[members].astype(np.float64)


def cross_check(run: Rebuilt, other: Rebuilt) -> list[dict[str, Any]]:
    """Measured, predicted and true step times in ms: as they are, and without host stalls."""
    rows = []
    stalls = parse_what_ifs(["remove=host-stalls"])
    for name, what_ifs in (("as measured", []), ("without host stalls in both", stalls)):
        before, truth, predicted = (
            step_duration(step_times(replay(change(r, what_ifs)))) / 1e6
            for r in (run, other, with_transfers_of(run, other))
        )
        rows.append(
            {
                "comparison": name,
                "run_ms": before,
                "predicted_ms": predicted,
                "other_ms": truth,
                "error_pct": 100 * (predicted / truth - 1),
            }
        )
    return rows


def main(arguments: Sequence[str]) -> int:
    """Print the comparison; exit code 2 for bad input."""
    paths = [Path(a) for a in arguments if a != "--json"]
    if len(paths) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        rows = cross_check(*(rebuild(read_trace([path])) for path in paths))
    except (TraceError, SimulationError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if "--json" in arguments:
        print(json.dumps(rows, indent=2))
        return 0
    print(f"{'comparison':30} {'run ms':>10} {'predicted':>10} {'other ms':>10} {'error %':>8}")
    for row in rows:
        print(
            f"{row['comparison']:30} {row['run_ms']:>10.2f} {row['predicted_ms']:>10.2f} {row['other_ms']:>10.2f} "
            f"{row['error_pct']:>8.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
