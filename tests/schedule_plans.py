"""Sizes for which every named schedule can be built, for property tests, and rows of a schedule as text."""

from __future__ import annotations

from hypothesis import strategies as st

from schedules import Schedule, schedule_names

GROUPED = ("interleaved-1f1b", "interleaved-zb", "1f1b-overlap", "1f1b-overlap-wgrad")
V_SHAPED = ("zb-v", "v-half", "v-min")

Plan = tuple[str, int, int, int, int | None]


def rows(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.actions]


@st.composite
def plans(draw: st.DrawFn, names: tuple[str, ...] = schedule_names()) -> Plan:
    name = draw(st.sampled_from(names))
    if name in GROUPED:
        return draw(grouped_plans(name))
    pp, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    if name == "looped-bfs":
        return name, pp, draw(st.integers(2, 4)), microbatches, None
    if name in V_SHAPED:
        return name, pp, 2, microbatches, None
    if name == "dualpipev":
        return name, pp, 2, 2 * pp + draw(st.integers(0, 4)), None
    if name == "dualpipe":
        pp = draw(st.sampled_from([2, 4, 6]))
        return name, pp, 1, 2 * (pp + draw(st.integers(0, 3))), None
    if name in ("greedy", "forward"):
        return name, pp, draw(st.integers(1, 3)), microbatches, None
    return name, pp, 1, microbatches, None


@st.composite
def grouped_plans(draw: st.DrawFn, name: str) -> Plan:
    pp, chunks = draw(st.integers(2, 5)), draw(st.integers(2, 4))
    if draw(st.booleans()):
        return name, pp, chunks, draw(st.integers(1, pp)), None
    group = draw(st.integers(pp, 2 * pp + 1))
    last = draw(st.sampled_from([0, *range(pp, group)]))
    return name, pp, chunks, group * draw(st.integers(1, 3)) + last, group
