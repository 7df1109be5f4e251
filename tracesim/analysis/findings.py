"""What in an analysis is worth saying first, in words: late ranks, stalls, host-bound steps, bubbles, clocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from op_graphs.vocabulary import Communication
from tracesim.analysis.analysis import Analysis
from tracesim.analysis.idle import HOST, IDLE_CAUSES
from tracesim.analysis.matching import communication_rows
from tracesim.analysis.pipeline import longest_stage
from tracesim.analysis.transfers import stragglers

_NOTABLE_SHARE = 0.05
_LONG_STAGE = 1.1
_OFTEN = 0.5


@dataclass(frozen=True)
class Finding:
    """One observation: a keyword for programs, a sentence for people."""

    what: str
    text: str


def find_findings(analysis: Analysis) -> list[Finding]:
    """What stands out, the costliest kinds first within each rank."""
    found = _clocks(analysis) + _stragglers(analysis) + _stalls(analysis) + _host(analysis)
    return found + _exposed(analysis) + _pipeline(analysis) + _unmatched(analysis)


def _number(analysis: Analysis, row: int) -> int:
    return int(analysis.timeline.ranks.rank[row])


def _clocks(analysis: Analysis) -> list[Finding]:
    clocks = analysis.clocks
    return [
        Finding(
            "clock_offset",
            f"the clock of rank {_number(analysis, row)} is {clocks.offset[row] / 1e3:+.1f} us off "
            f"(+-{clocks.spread[row] / 1e3:.1f}, from {clocks.operations[row]} collectives); it was corrected",
        )
        for row in range(len(clocks.offset))
        if clocks.corrected[row]
    ]


def _stragglers(analysis: Analysis) -> list[Finding]:
    timeline, transfers = analysis.timeline, analysis.transfers
    found = []
    directed = np.isin(
        timeline.slices.communication[transfers.matches.row], (Communication.SEND, Communication.RECEIVE)
    )
    total = int((transfers.wait + transfers.transfer)[~directed].sum())
    for rank in stragglers(timeline, transfers):
        if rank.last and rank.caused_wait > _NOTABLE_SHARE * total:
            found.append(
                Finding(
                    "straggler",
                    f"rank {_number(analysis, rank.rank)} arrives last at {rank.last} of {rank.operations} "
                    f"collectives; the others wait {rank.caused_wait / 1e6:.3f} ms for it, "
                    f"{rank.delay / 1e6:.3f} ms of that because of it alone",
                )
            )
        if rank.waited > _OFTEN * total and rank.median_wait > 0:
            found.append(
                Finding(
                    "waits",
                    f"rank {_number(analysis, rank.rank)} waits {rank.waited / 1e6:.3f} ms for others, "
                    f"{rank.median_wait / 1e3:.1f} us in the median of {rank.operations} collectives",
                )
            )
    return found


def _by_rank(analysis: Analysis) -> dict[int, list[int]]:
    """Indices of the steps of each rank."""
    found: dict[int, list[int]] = {}
    for number, step in enumerate(analysis.steps):
        found.setdefault(step.window.rank, []).append(number)
    return found


def _stalls(analysis: Analysis) -> list[Finding]:
    found = []
    for rank, numbers in _by_rank(analysis).items():
        steps = [analysis.steps[number] for number in numbers]
        total = sum(step.stalls.total for step in steps)
        span = sum(step.window.length for step in steps)
        count = sum(step.stalls.count for step in steps)
        if total > _NOTABLE_SHARE * span:
            found.append(
                Finding(
                    "device_stall",
                    f"device stall: rank {_number(analysis, rank)} starts {count} launched "
                    f"kernels late on a free stream, {total / 1e6:.3f} of {span / 1e6:.3f} ms, without a recorded "
                    "reason; a GPU shared with another process looks like this",
                )
            )
    return found


def _host(analysis: Analysis) -> list[Finding]:
    found = []
    for rank, numbers in _by_rank(analysis).items():
        steps = [analysis.steps[number] for number in numbers]
        span = sum(step.window.length for step in steps)
        idle = sum(step.idle.totals()[IDLE_CAUSES[HOST]] for step in steps)
        if span and idle > _OFTEN * span:
            found.append(
                Finding(
                    "host_bound",
                    f"host bound: the device of rank {_number(analysis, rank)} idles {100 * idle / span:.1f} % of the "
                    "time because its next kernel is not launched yet",
                )
            )
    return found


def _exposed(analysis: Analysis) -> list[Finding]:
    span = sum(step.window.length for step in analysis.steps)
    exposed = sum(step.breakdown.exposed for step in analysis.steps)
    if not span or exposed <= 2 * _NOTABLE_SHARE * span:
        return []
    waiting = sum(step.exposed_wait for step in analysis.steps)
    known = len(analysis.transfers.matches.row) > 0 and not analysis.timeline.simulated
    share = f", {100 * waiting / exposed:.1f} % of it waiting for other ranks" if known else ""
    return [
        Finding(
            "exposed_communication",
            f"{100 * exposed / span:.1f} % of the time is exposed communication{share}",
        )
    ]


def _pipeline(analysis: Analysis) -> list[Finding]:
    stages = analysis.pipeline
    if not stages:
        return []
    span = sum(stage.span for stage in stages)
    bubble = sum(stage.bubble for stage in stages)
    found = (
        [Finding("bubble", f"{100 * bubble / span:.1f} % of the pipeline's time is bubble")] if span else []
    )
    longest = longest_stage(stages)
    if longest is not None and longest[1] > _LONG_STAGE:
        found.append(
            Finding(
                "long_stage",
                f"the pipeline stage of rank {_number(analysis, longest[0])} works {longest[1]:.2f} times as long as "
                "the median one",
            )
        )
    return found


def _unmatched(analysis: Analysis) -> list[Finding]:
    timeline = analysis.timeline
    rows = len(communication_rows(timeline))
    left = rows - len(analysis.transfers.matches.row)
    if not left or timeline.simulated:
        return []
    text = (
        f"{left} of {rows} communication slices have no counterpart in the trace: their time may hold waiting"
    )
    return [Finding("unmatched", text)]
