"""How well replays reproduce measured step times: ``python -m benchmarks.replay PATH... [--json] [--across]``.

A PATH is a trace file or a folder with a file a rank. The time of a step is the device window of its slowest rank, from
the first slice launched in it to the first launched in the next. With ``--across`` the graph of each step is also run
with the durations of every other step of the same trace, for our rules and two others to compare with.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracesim.errors import SimulationError, TraceError
from tracesim.readers import read_trace
from tracesim.replay.across import predict_across_steps, summary
from tracesim.replay.limits import unexplained
from tracesim.replay.rebuild import rebuild
from tracesim.replay.run import StepTime, replay, step_times, stream_deviations


def measure_path(path: Path) -> list[dict[str, Any]]:
    """One row a step of a trace, with the figures of its slowest rank.

    Raises:
        TraceError: if it cannot be read or replayed.
    """
    rebuilt = rebuild(read_trace([path]))
    replayed = replay(rebuilt)
    by_step: dict[int, list[StepTime]] = {}
    for time in step_times(replayed):
        by_step.setdefault(time.step, []).append(time)
    same_order = all(stream.same_order for stream in stream_deviations(replayed))
    lateness = unexplained(rebuilt)
    rows = []
    for step, times in sorted(by_step.items()):
        measured, replay_time = max(t.measured for t in times), max(t.replayed for t in times)
        rows.append(
            {
                "path": str(path),
                "step": step,
                "ranks": len(times),
                "measured_ms": measured / 1e6,
                "replayed_ms": replay_time / 1e6,
                "error_pct": 100 * (replay_time / measured - 1),
                "worst_rank_error_pct": max((100 * t.error for t in times), key=abs),
                "worst_host_error_pct": max((100 * t.host_error for t in times), key=abs),
                "same_kernel_order": same_order,
                "unexplained_us": sum(lateness.nanoseconds.values()) / 1e3,
            }
        )
    return rows


def main(arguments: Sequence[str]) -> int:
    """Print the table; exit code 2 if no path could be replayed."""
    paths = [Path(a) for a in arguments if not a.startswith("--")]
    flags = {a for a in arguments if a.startswith("--")}
    if not paths or flags - {"--json", "--across"}:
        print(__doc__, file=sys.stderr)
        return 2
    rows: list[dict[str, Any]] = []
    across: dict[str, dict[str, tuple[float, float, float]]] = {}
    refused: list[dict[str, str]] = []
    for path in paths:
        reason = _measure_into(path, rows, across if "--across" in flags else None)
        if reason:
            refused.append({"path": str(path), "reason": reason})
    mean = sum(abs(row["error_pct"]) for row in rows) / len(rows) if rows else None
    result: dict[str, Any] = {"traces": rows, "mean_abs_error_pct": mean, "refused": refused}
    if across:
        result["across_steps_error_pct"] = {
            path: {rules: dict(zip(("p50", "p90", "max"), e, strict=True)) for rules, e in table.items()}
            for path, table in across.items()
        }
    if "--json" in flags:
        print(json.dumps(result, indent=2))
    else:
        _print_tables(result, across)
    return 0 if rows else 2


def _measure_into(
    path: Path, rows: list[dict[str, Any]], across: dict[str, dict[str, tuple[float, float, float]]] | None
) -> str:
    """Add the rows of a trace; the reason if it is refused, else empty."""
    try:
        rows += measure_path(path)
        if across is not None:
            across[str(path)] = summary(predict_across_steps(read_trace([path])))
    except (TraceError, SimulationError) as error:
        return str(error)
    return ""


def _print_tables(result: dict[str, Any], across: dict[str, dict[str, tuple[float, float, float]]]) -> None:
    print(
        f"{'trace':60} {'step':>6} {'ranks':>5} {'measured ms':>12} {'replayed ms':>12} {'error %':>8} {'order':>6}"
    )
    for row in result["traces"]:
        order = "same" if row["same_kernel_order"] else "DIFFERS"
        print(
            f"{row['path'][-60:]:60} {row['step']:>6} {row['ranks']:>5} {row['measured_ms']:>12.3f} "
            f"{row['replayed_ms']:>12.3f} {row['error_pct']:>8.2f} {order:>6}"
        )
    if result["traces"]:
        worst = max(abs(row["error_pct"]) for row in result["traces"])
        print(f"mean |error| {result['mean_abs_error_pct']:.3f} %, worst {worst:.2f} %")
    for refused in result["refused"]:
        print(f"refused: {refused['reason']}")
    for path, table in across.items():
        print(
            f"\nacross steps, {path}: |error| of the device end in %\n{'rules':24} {'p50':>7} {'p90':>7} {'worst':>7}"
        )
        for rules, errors in table.items():
            print(f"{rules:24} " + " ".join(f"{error:>7.2f}" for error in errors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
