"""A what-if against published figures: ``python -m benchmarks.replay_stragglers FOLDER [--json]``.

FOLDER holds a job of "Understanding Stragglers in Large Model Training Using What-if Analysis"
(https://arxiv.org/abs/2505.05713) as its authors publish it: ``timeline-NAME.json.gz``, every operation of every rank
as measured, and ``result-NAME.json.gz``, with their step times as measured, without launch delay (what an operation
starts later than everything it waits for allows), and ideal (every compute operation also takes the mean of its type
over the job, and every transfer the median). The replay rebuilds the first file, removes the same causes, and is held
against the second. Printed are medians over the steps; the worst error is of single steps.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tracesim.errors import SimulationError, TraceError
from tracesim.readers import read_trace
from tracesim.replay.graph import Rebuilt
from tracesim.replay.rebuild import rebuild
from tracesim.replay.run import replay, step_times
from tracesim.replay.what_if.stragglers import without_stragglers

CASES = {
    "as measured": (None, "step_t_base"),
    "without launch delay": ("launch-delays", "step_t_nodelay"),
    "ideal": ("both", "step_t_noblk"),
}
"""What is removed, and where the published step times of that are."""


def against_published(folder: Path) -> list[dict[str, Any]]:
    """Replayed and published step times of a job, in seconds.

    Raises:
        TraceError: if the folder does not hold one such job.
    """
    timelines, results = sorted(folder.glob("timeline-*.json.gz")), sorted(folder.glob("result-*.json.gz"))
    if len(timelines) != 1 or len(results) != 1:
        raise TraceError(
            f"{folder}: {len(timelines)} files timeline-*.json.gz and {len(results)} result-*.json.gz; "
            "one of each is needed"
        )
    published = json.loads(gzip.decompress(results[0].read_bytes()))
    run = rebuild(read_trace([timelines[0]]))
    rows = []
    for name, (removed, key) in CASES.items():
        ours = _slowest_rank(run if removed is None else without_stragglers(run, removed))
        theirs = {int(step): float(time) for step, time in published[key].items()}
        both = sorted(set(ours) & set(theirs))
        replayed = np.array([ours[step] for step in both])
        truth = np.array([theirs[step] for step in both])
        median, median_truth = float(np.median(replayed)), float(np.median(truth))
        rows.append(
            {
                "case": name,
                "steps": len(both),
                "replayed_s": median,
                "published_s": median_truth,
                "error_pct": 100 * (median / median_truth - 1),
                "worst_step_error_pct": float(
                    100 * (replayed / truth - 1)[np.argmax(np.abs(replayed / truth - 1))]
                ),
            }
        )
    return rows


def _slowest_rank(run: Rebuilt) -> dict[int, float]:
    """Seconds of each step by its number."""
    steps: dict[int, float] = {}
    for time in step_times(replay(run)):
        steps[time.step] = max(steps.get(time.step, 0.0), time.replayed / 1e9)
    return steps


def main(arguments: Sequence[str]) -> int:
    """Print the table; exit code 2 for bad input."""
    paths = [Path(a) for a in arguments if a != "--json"]
    if len(paths) != 1:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        rows = against_published(paths[0])
    except (TraceError, SimulationError, OSError, KeyError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if "--json" in arguments:
        print(json.dumps(rows, indent=2))
        return 0
    print(
        f"{'step time':22} {'steps':>5} {'replayed s':>11} {'published s':>12} {'error %':>8} {'worst step %':>13}"
    )
    for row in rows:
        print(
            f"{row['case']:22} {row['steps']:>5} {row['replayed_s']:>11.4f} {row['published_s']:>12.4f} "
            f"{row['error_pct']:>8.2f} {row['worst_step_error_pct']:>13.2f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
