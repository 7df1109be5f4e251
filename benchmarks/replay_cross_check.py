"""A what-if against the truth: ``python -m benchmarks.replay_cross_check RUN OTHER [--json]``.

RUN and OTHER are folders of ranks of one program that differ in what they send. Every communication of RUN is scaled to
the median transfer time that the same communication takes in OTHER, and the step time predicted so is compared with the
one measured in OTHER. Where that fails is shown in two ways:

- the difference of the two measured runs in the parts of ``tracesim diff``, which add up to it, beside the time in
  calls of the device allocator. What sends less changes exposed communication and adds kernels that only OTHER has
  (quantising and back); launch gaps it does not change;
- the comparison again with what differs taken out: without allocator calls in both runs, and with the kernels that only
  OTHER has put into RUN, each in front of the kernel it precedes, and those that only RUN has taken out. The last is an
  upper bound where OTHER has more of them: there they may hide behind launches.
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
from tracesim.diff import Comparison, compare_timelines
from tracesim.errors import ScenarioError, SimulationError, TraceError
from tracesim.readers import read_trace
from tracesim.replay.graph import Rebuilt, RowRole
from tracesim.replay.rebuild import rebuild
from tracesim.replay.run import replay, step_duration, step_times
from tracesim.replay.what_if.allocator import allocator_time, without_allocator


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


def with_kernels_of(run: Rebuilt, comparison: Comparison) -> Rebuilt:
    """A run with the kernels of the other: its own alone take no time, those of the other alone lengthen the next.

    The next is the first on the stream of the other that both have.
    """
    alignment, durations = comparison.alignment, run.durations.copy()
    row_of_slice = np.full(len(run.timeline.slices), -1, dtype=np.int64)
    device = np.flatnonzero(run.rows.role == RowRole.DEVICE)
    row_of_slice[run.rows.slice_row[device]] = device
    partner = np.full(len(alignment.b.slices), -1, dtype=np.int64)
    partner[alignment.row_b] = row_of_slice[alignment.row_a]
    own = alignment.entries[0]
    durations[row_of_slice[own.row[~own.matched]]] = 0
    entries, slices = alignment.entries[1], alignment.b.slices
    alone = np.zeros(len(slices), dtype=np.bool_)
    alone[entries.row[~entries.matched]] = True
    rows = entries.row[np.lexsort((slices.start[entries.row], slices.track[entries.row]))]
    waiting, track = 0, -1
    for row in rows.tolist():
        waiting, track = waiting if slices.track[row] == track else 0, int(slices.track[row])
        if alone[row]:
            waiting += int(slices.duration[row])
        elif partner[row] >= 0:
            durations[partner[row]] += waiting
            waiting = 0
    return replace(run, durations=durations)


def cross_check(run: Rebuilt, other: Rebuilt) -> dict[str, Any]:
    """Predicted and true step times in ms, and what the measured difference consists of."""
    comparison = compare_timelines(run.timeline, other.timeline)
    sized = with_transfers_of(run, other)
    with_kernels = with_kernels_of(sized, comparison)
    rows = [
        _row("as measured", run, sized, other),
        _row("with the kernels of the other", run, with_kernels, other),
    ]
    # Some runs never call the allocator.
    if allocator_time(run).any() and allocator_time(other).any():
        bare, truth = without_allocator(run), without_allocator(other)
        rows += [
            _row("without allocator calls in both", bare, without_allocator(sized), truth),
            _row("both of these", bare, without_allocator(with_kernels), truth),
        ]
    found = comparison.result["attribution"]
    allocators = [_allocator_ms(r) for r in (run, other)]
    return {
        "predictions": rows,
        "difference_ms": found["difference_ns"] / 1e6,
        "parts_ms": {part: ns / 1e6 for part, ns in found["parts_ns"].items()},
        "allocator_ms": {
            "run": allocators[0],
            "other": allocators[1],
            "difference": allocators[1] - allocators[0],
        },
    }


def _row(comparison: str, run: Rebuilt, predicted: Rebuilt, other: Rebuilt) -> dict[str, Any]:
    before, prediction, truth = (step_duration(step_times(replay(r))) / 1e6 for r in (run, predicted, other))
    return {
        "comparison": comparison,
        "run_ms": before,
        "predicted_ms": prediction,
        "other_ms": truth,
        "error_pct": 100 * (prediction / truth - 1),
    }


def _allocator_ms(run: Rebuilt) -> float:
    """Milliseconds in calls of the device allocator, a step of a rank."""
    steps = max(len(run.timeline.steps), 1)
    return float(allocator_time(run)[run.rows.step >= 0].sum()) / 1e6 / steps


def main(arguments: Sequence[str]) -> int:
    """Print the comparison; exit code 2 for bad input."""
    paths = [Path(a) for a in arguments if a != "--json"]
    if len(paths) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        found = cross_check(*(rebuild(read_trace([path])) for path in paths))
    except (TraceError, SimulationError, ScenarioError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if "--json" in arguments:
        print(json.dumps(found, indent=2))
        return 0
    print(
        f"{'predicted from the communication of the other':46} {'run ms':>9} {'predicted':>10} {'other ms':>9} "
        f"{'error %':>8}"
    )
    for row in found["predictions"]:
        print(
            f"{row['comparison']:46} {row['run_ms']:>9.2f} {row['predicted_ms']:>10.2f} {row['other_ms']:>9.2f} "
            f"{row['error_pct']:>8.2f}"
        )
    print(
        f"\nwhy the other was measured {found['difference_ms']:+.2f} ms a step from this one, mean over ranks:"
    )
    for part, ms in found["parts_ms"].items():
        print(f"  {part.replace('_', ' '):24} {ms:>+9.2f}")
    allocator = found["allocator_ms"]
    print(
        f"  calls of the device allocator take {allocator['run']:.2f} ms a step here and {allocator['other']:.2f} ms "
        f"in the other ({allocator['difference']:+.2f}); they show as launch gaps"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
