"""Sizes for which every named schedule can be built, for property tests, and rows of a schedule as text."""

from __future__ import annotations

from hypothesis import strategies as st

from schedules import Schedule, schedule_names


def rows(schedule: Schedule) -> list[str]:
    return [" ".join(map(str, row)) for row in schedule.actions]


@st.composite
def plans(draw: st.DrawFn) -> tuple[str, int, int, int, int | None]:
    name = draw(st.sampled_from(schedule_names()))
    if not name.startswith("interleaved"):
        return name, draw(st.integers(1, 6)), 1, draw(st.integers(1, 9)), None
    pp, chunks = draw(st.integers(2, 5)), draw(st.integers(2, 4))
    group = draw(st.integers(pp, 2 * pp + 1))
    last = draw(st.sampled_from([0, *range(pp, group)]))
    return name, pp, chunks, group * draw(st.integers(1, 3)) + last, group
