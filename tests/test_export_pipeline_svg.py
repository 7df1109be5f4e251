"""The picture of a pipelined run: what is drawn for a timeline, and what bounds its size."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from exporters.pipeline_svg import pipeline_svg
from op_graphs.columns import StringTable
from op_graphs.timeline import (
    SLICE_DEFAULTS,
    CounterSamples,
    CounterTracks,
    Flows,
    Ranks,
    Slices,
    Steps,
    Timeline,
    Tracks,
)
from op_graphs.vocabulary import TrackRole
from schedules import build_schedule, simulate_unit_times

MS = 1_000_000


def timeline_of(slices, counters=(), ranks=1, name="test") -> Timeline:
    """Slices are (rank, role, name, start ms, end ms[, chunk]); counters (rank, name, category, [(ms, bytes)])."""
    strings = StringTable()
    tracks = sorted({(rank, role) for rank, role, *_ in slices})
    return Timeline(
        slices=Slices.from_rows(
            [
                {
                    "track": tracks.index((rank, role)),
                    "start": start * MS,
                    "duration": (end - start) * MS,
                    "name": strings.intern(label),
                    "chunk": chunk[0] if chunk else -1,
                }
                for rank, role, label, start, end, *chunk in slices
            ],
            **SLICE_DEFAULTS,
        ),
        tracks=Tracks.from_rows(
            [
                {"rank": rank, "role": role, "stream": role, "name": strings.intern(TrackRole(role).name)}
                for rank, role in tracks
            ]
        ),
        ranks=Ranks.from_rows(
            [{"rank": r, "tp": 0, "cp": 0, "ep": 0, "pp": r, "dp": 0} for r in range(ranks)]
        ),
        flows=Flows.empty(),
        counter_tracks=CounterTracks.from_rows(
            [
                {"rank": rank, "name": strings.intern(label), "category": category, "is_bytes": True}
                for rank, label, category, _ in counters
            ]
        ),
        counter_samples=CounterSamples.from_rows(
            [
                {"track": track, "time": time * MS, "value": value}
                for track, (*_, samples) in enumerate(counters)
                for time, value in samples
            ]
        ),
        steps=Steps.empty(),
        strings=strings.strings(),
        name=name,
        simulated=True,
        device="h100-sxm",
        world_size=ranks,
    )


def schedule_timeline(name="1f1b", pp=4, vpp=1, microbatches=8) -> Timeline:
    """A unit-time run of a schedule with an optimizer step, sends, gradient reductions and memory."""
    schedule = build_schedule(name, pp, vpp, microbatches)
    times = simulate_unit_times(schedule)
    slices, counters = [], []
    end = times.makespan
    for rank, row in enumerate(schedule.actions):
        held, samples = 4, [(0, 4 * 2**30)]
        for action, start, stop in zip(row, times.starts[rank], times.ends[rank], strict=True):
            label = f"{action.kind.value}{action.microbatch}"
            slices.append((rank, TrackRole.PIPELINE, label, start, stop, action.stage // pp))
            slices.append((rank, TrackRole.COMPUTE, "gemm", start, stop - 0.1))
            slices.append((rank, TrackRole.COMMUNICATION_TP, "all_reduce", stop - 0.2, stop))
            if label.startswith("F"):
                held += 2
                samples.append((start, held * 2**30))
            else:
                held -= 2
                samples.append((stop, held * 2**30))
        slices.append((rank, TrackRole.COMMUNICATION_DP, "reduce_scatter", end - 1, end + 0.5))
        slices.append((rank, TrackRole.PIPELINE, "optimizer", end + 0.5, end + 2))
        slices.append((rank, TrackRole.COMPUTE, "adam", end + 0.5, end + 2))
        counters.append((rank, "allocated", -1, samples))
    return timeline_of(slices, counters, pp, name=f"{name} <pp{pp}> & co")


def shapes(svg: str, css_class: str) -> list[tuple[float, float]]:
    """(x, width) of the rectangles of an action class, or of the dashes of a strip."""
    found = []
    for path in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}path"):
        if path.get("class") == css_class:
            found += [
                (float(x), float(w)) for x, w in re.findall(r"M([\d.]+) [\d.]+h([\d.]+)", path.get("d"))
            ]
    return sorted(found)


def texts(svg: str) -> list[str]:
    return [element.text for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_actions_lie_at_their_true_times():
    """The plot is 828 px wide from x = 88; 0.6 px of an action are the gap to the next."""
    svg = pipeline_svg(
        timeline_of([(0, TrackRole.PIPELINE, "F0", 0, 1), (0, TrackRole.PIPELINE, "B0", 2, 4)])
    )
    assert shapes(svg, "a0") == [(88.0, 206.4)]
    assert shapes(svg, "a1") == [(502.0, 413.4)]
    assert {"F0", "B0", "rank 0", "pp0 dp0 tp0", "forward", "backward"} <= set(texts(svg))


@pytest.mark.parametrize(
    ("name", "chunk", "css_class"),
    [
        ("F0", -1, "a0"),
        ("2F7", 0, "a0"),
        ("B3", 2, "a1"),
        ("I3", -1, "a1"),
        ("W3", -1, "a2"),
        ("optimizer", -1, "a3"),
        ("Finish", -1, "a3"),
        ("F0", 1, "a4"),
        ("B0", 3, "a5"),
    ],
)
def test_the_letter_and_the_chunk_of_an_action_decide_its_colour(name, chunk, css_class):
    svg = pipeline_svg(timeline_of([(0, TrackRole.PIPELINE, name, 0, 1, chunk)]))
    assert len(shapes(svg, css_class)) == 1


def test_communication_is_exposed_where_nothing_computes():
    svg = pipeline_svg(
        timeline_of(
            [
                (0, TrackRole.PIPELINE, "F0", 0, 8),
                (0, TrackRole.COMPUTE, "gemm", 0, 4),
                (0, TrackRole.COMMUNICATION_TP, "all_reduce", 2, 6),
                (0, TrackRole.COMMUNICATION_PP, "send", 5, 6),
            ]
        )
    )
    assert shapes(svg, "e4") == [(pytest.approx(88 + 828 / 2), pytest.approx(828 / 4))]
    assert shapes(svg, "o4") == [(pytest.approx(88 + 828 / 4), pytest.approx(828 / 4))]


def test_a_strip_is_fainter_where_less_of_the_time_is_communication():
    svg = pipeline_svg(
        timeline_of(
            [(0, TrackRole.PIPELINE, "F0", 0, 828)]
            + [(0, TrackRole.COMMUNICATION_TP, "all_reduce", t, t + 0.4) for t in range(828)]
        )
    )
    assert shapes(svg, "e2") == [(88.0, 828.0)]


@pytest.mark.parametrize(
    "counters",
    [
        [(0, "allocated", -1, [(0, 2**30), (1, 3 * 2**30), (2, 2**30)])],
        [(0, "weights", 0, [(0, 2**30)]), (0, "activations", 3, [(1, 2 * 2**30), (2, 0)])],
    ],
)
def test_memory_is_the_allocated_counter_or_the_sum_of_the_categories(counters):
    svg = pipeline_svg(timeline_of([(0, TrackRole.PIPELINE, "F0", 0, 3)], counters))
    assert "3.0 GiB" in texts(svg)
    heights = re.search(r'd="M88 136H88.0V(\d+\.\d)H364.0V(\d+\.\d)H640.0V(\d+\.\d)H916V136z"', svg)
    assert heights
    assert [136 - float(height) for height in heights.groups()] == pytest.approx([8.7, 26.0, 8.7])


def test_without_memory_or_communication_only_actions_are_drawn():
    svg = pipeline_svg(timeline_of([(0, TrackRole.PIPELINE, "F0", 0, 3)]))
    assert "allocated memory" not in texts(svg)
    assert not shapes(svg, "e4")


def test_the_axis_has_round_milliseconds():
    labels = texts(pipeline_svg(timeline_of([(0, TrackRole.PIPELINE, "F0", 0, 42)])))
    assert [label for label in labels if re.fullmatch(r"\d+", label)] == [str(5 * tick) for tick in range(9)]


def test_the_picture_is_one_self_contained_document_with_equal_bytes():
    timeline = schedule_timeline()
    svg = pipeline_svg(timeline)
    assert svg == pipeline_svg(timeline)
    assert "1f1b <pp4> & co" in texts(svg)
    assert not re.search(r"<script|@import|url\(|href|<image", svg)
    assert [text for text in texts(svg) if text.startswith("rank ")] == [
        "rank 0",
        "rank 1",
        "rank 2",
        "rank 3",
    ]


@pytest.mark.parametrize("count", [1500, 60_000])
def test_a_picture_stays_small_however_many_slices(count):
    generator = np.random.default_rng(3)
    starts = np.sort(generator.integers(0, 10**6, count)) / 1000
    slices = [
        (i % 32, TrackRole.PIPELINE, f"{'FB'[i % 2]}{i}", start, start + 0.1 * (1 + i % 7))
        for i, start in enumerate(starts.tolist())
    ]
    slices += [
        (rank, TrackRole.COMMUNICATION_TP, "x", t, t + 0.3) for rank in range(32) for t in range(0, 1000, 3)
    ]
    counters = [
        (rank, "allocated", -1, [(t, float(generator.integers(2**36))) for t in range(1000)])
        for rank in range(32)
    ]
    svg = pipeline_svg(timeline_of(slices, counters, 32))
    assert len(svg.encode()) < 300_000
    assert shapes(svg, "a0")
    assert shapes(svg, "a1")


def test_actions_too_many_for_single_shapes_become_the_colour_that_fills_each_pixel():
    """3000 forwards, then a gap, then 2000 backwards."""
    slices = [(0, TrackRole.PIPELINE, f"F{i}", i / 1000, (i + 1) / 1000) for i in range(3000)]
    slices += [(0, TrackRole.PIPELINE, f"B{i}", 4 + i / 1000, 4 + (i + 1) / 1000) for i in range(2000)]
    svg = pipeline_svg(timeline_of(slices))
    assert shapes(svg, "a0") == [(88.0, pytest.approx(828 / 2, abs=1))]
    assert shapes(svg, "a1") == [(pytest.approx(88 + 828 * 2 / 3, abs=1), pytest.approx(828 / 3, abs=1))]


def test_more_ranks_than_fit_are_counted():
    svg = pipeline_svg(timeline_of([(r, TrackRole.PIPELINE, "F0", 0, 1) for r in range(40)], ranks=40))
    assert sum(text.startswith("rank ") for text in texts(svg)) == 32
    assert any("first 32 of 40 ranks" in text for text in texts(svg))


def test_a_timeline_without_pipeline_actions_is_refused():
    with pytest.raises(ValueError, match="no rank has a track of pipeline actions"):
        pipeline_svg(timeline_of([(0, TrackRole.COMPUTE, "gemm", 0, 1)], name="measured"))
