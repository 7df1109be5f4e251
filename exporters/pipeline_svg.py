"""A picture of a pipelined run as one SVG: what each rank did over time, what it waited for, what memory it took.

Each rank is a band of three: its pipeline actions (``F0``, ``B0``, ``optimizer``), a strip of its communication
(exposed above overlapped, darker where more of the time is spent so), and the curve of its allocated memory. The
file needs no fonts or scripts, has the same bytes for the same timeline, and stays below 300 kB: actions too many
to draw one by one become the colour that fills most of each pixel.

Colours are Okabe and Ito's, which people with any colour vision tell apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

import numpy as np

from op_graphs.columns import Bool, Float64, Int64
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import OpKind, TrackRole

_WIDTH = 1000
_LEFT, _RIGHT = 88, 84
_PLOT = _WIDTH - _LEFT - _RIGHT
_TOP = 74
_ACTION_HEIGHT, _STRIP_HEIGHT, _MEMORY_HEIGHT, _BAND_GAP = 24, 4, 26, 12
_BAND = _ACTION_HEIGHT + 2 * _STRIP_HEIGHT + _MEMORY_HEIGHT + 6 + _BAND_GAP
_MOST_RANKS = 32
_MOST_ACTIONS = 2000
"""Actions drawn one by one; more are drawn by pixel."""
_STRIP_LEVELS = 4

_FORWARD, _BACKWARD, _BACKWARD_WEIGHT, _OTHER = range(4)
_COLOURS = ("#0072B2", "#009E73", "#E69F00", "#8A8A8A")
_LATER_CHUNK_COLOURS = ("#6FB1DC", "#7ACDB4", "#F3CD80", "#BDBDBD")
_PAIR, _PAIR_COLOURS = 8, ("#F0E442", "#F8F2A1")
_ALL_COLOURS = (*_COLOURS, *_LATER_CHUNK_COLOURS, *_PAIR_COLOURS)
_EXPOSED_COLOUR, _OVERLAPPED_COLOUR, _MEMORY_COLOUR = "#D55E00", "#56B4E9", "#CC79A7"
_CLASS_NAMES = ("forward", "backward", "backward for weight", "optimizer and other")
_PAIR_NAME = "forward beside backward"
_ACTION_NAME = re.compile(r"\d*([FBIW])\d+(\+\d*[BIW]\d+)*")
_CLASS_OF_LETTER = {"F": _FORWARD, "B": _BACKWARD, "I": _BACKWARD, "W": _BACKWARD_WEIGHT}

_COMMUNICATION_ROLES = (
    TrackRole.COMMUNICATION_TP,
    TrackRole.COMMUNICATION_CP,
    TrackRole.COMMUNICATION_EP,
    TrackRole.COMMUNICATION_PP,
    TrackRole.COMMUNICATION_DP,
)


def pipeline_svg(timeline: Timeline) -> str:
    """The timeline as an SVG document, one band a rank in the order of ``timeline.ranks`` (32 at most).

    Raises:
        ValueError: if no rank has a pipeline track, as in traces of runs without annotated pipeline actions.
    """
    roles = timeline.slice_roles()
    on_pipeline = np.flatnonzero(roles == TrackRole.PIPELINE)
    if not len(on_pipeline):
        raise ValueError(
            f"timeline {timeline.name or 'without name'}: no rank has a track of pipeline actions to draw; "
            "simulate a scenario, or read a trace that annotates them"
        )
    shown = np.unique(timeline.slice_ranks()[on_pipeline])
    picture = _Picture(timeline, shown[:_MOST_RANKS].astype(np.int64))
    legend = list(picture.legend())
    bands = [line for row, rank in enumerate(picture.ranks) for line in picture.band(row, int(rank))]
    height = _TOP + len(picture.ranks) * _BAND + 34
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
            f'viewBox="0 0 {_WIDTH} {height}" font-family="Helvetica,Arial,sans-serif" font-size="11">',
            f"<style>{picture.style()}</style>",
            f'<rect width="{_WIDTH}" height="{height}" fill="#FFFFFF"/>',
            *picture.header(len(shown)),
            *legend,
            *picture.axis(height),
            *bands,
            "</svg>",
            "",
        ]
    )


@dataclass(frozen=True)
class _Actions:
    """The pipeline slices of a rank, by start."""

    start: Int64
    end: Int64
    colour: Int64
    """Index into ``_ALL_COLOURS``."""
    name: tuple[str, ...]


class _Picture:
    """Geometry and drawing; every method yields lines of SVG."""

    def __init__(self, timeline: Timeline, ranks: Int64) -> None:
        self.timeline = timeline
        self.ranks = ranks
        self.begin, self.end = timeline.span_ns
        self.scale = _PLOT / max(self.end - self.begin, 1)
        self.classes = np.array([_action_class(string) for string in timeline.strings], dtype=np.int64)
        self.slice_ranks = timeline.slice_ranks()
        self.actions = {int(rank): self._actions_of(int(rank)) for rank in ranks}
        self.memory = {int(rank): _allocated(timeline, int(rank)) for rank in ranks}
        self.peak = max(
            (float(values.max()) for _, values in self.memory.values() if len(values)), default=0.0
        )
        self.communicates = bool(_device_work(timeline)[0].any())
        self.draw_each = sum(len(actions.start) for actions in self.actions.values()) <= _MOST_ACTIONS

    def x(self, time: Int64 | int) -> Float64:
        """Horizontal position of a time."""
        return np.asarray(_LEFT + (np.asarray(time) - self.begin) * self.scale, dtype=np.float64)

    def _actions_of(self, rank: int) -> _Actions:
        slices = self.timeline.slices
        is_action = (self.timeline.slice_roles() == TrackRole.PIPELINE) & (self.slice_ranks == rank)
        rows = np.flatnonzero(is_action)
        rows = rows[np.argsort(slices.start[rows], kind="stable")]
        classes = self.classes[slices.name[rows]]
        later_chunk = (np.maximum(slices.chunk[rows], 0) % 2) * np.where(classes == _PAIR, 1, len(_COLOURS))
        return _Actions(
            slices.start[rows],
            slices.start[rows] + slices.duration[rows],
            classes + later_chunk,
            tuple(self.timeline.string(name) for name in slices.name[rows].tolist()),
        )

    def style(self) -> str:
        """Colours of actions and strips, as classes."""
        rules = [f".a{index}{{fill:{colour}}}" for index, colour in enumerate(_ALL_COLOURS)]
        for letter, colour in (("e", _EXPOSED_COLOUR), ("o", _OVERLAPPED_COLOUR)):
            rules += [
                f".{letter}{level}{{stroke:{colour};stroke-width:{_STRIP_HEIGHT};"
                f"stroke-opacity:{level / _STRIP_LEVELS:g}}}"
                for level in range(1, _STRIP_LEVELS + 1)
            ]
        rules += [
            ".d{fill:#FFFFFF;text-anchor:middle}",
            ".k{fill:#1A1A1A;text-anchor:middle}",
            ".s{fill:#5C5C5C}",
        ]
        return "".join(rules)

    def header(self, ranks_found: int) -> Iterator[str]:
        """Title, and a line of facts."""
        timeline = self.timeline
        yield f'<text x="16" y="24" font-size="15" font-weight="bold" fill="#1A1A1A">{escape(timeline.name)}</text>'
        facts = [timeline.device, f"{(self.end - self.begin) / 1e6:,.1f} ms"]
        facts.append("simulated" if timeline.simulated else "measured")
        drawn = len(self.ranks)
        facts.append(f"first {drawn} of {ranks_found} ranks" if drawn < ranks_found else f"{drawn} ranks")
        if timeline.world_size > ranks_found:
            facts[-1] += f" drawn for {timeline.world_size}"
        yield f'<text x="16" y="41" class="s">{escape(" · ".join(fact for fact in facts if fact))}</text>'

    def legend(self) -> Iterator[str]:
        """One swatch for each colour that occurs."""
        used = sorted(
            {int(colour) for actions in self.actions.values() for colour in np.unique(actions.colour)}
        )
        entries = [(_ALL_COLOURS[colour], _legend_name(colour)) for colour in used]
        if self.communicates:
            entries += [(_EXPOSED_COLOUR, "exposed communication"), (_OVERLAPPED_COLOUR, "overlapped")]
        if self.peak:
            entries.append((_MEMORY_COLOUR, "allocated memory"))
        if sum(21 + 6.6 * len(name) for _, name in entries) > _WIDTH - 16:
            # One line has no room for every shade: name the kinds, and what lighter means.
            kinds = dict.fromkeys(_PAIR if colour >= _PAIR else colour % len(_COLOURS) for colour in used)
            named = [(_ALL_COLOURS[kind], _legend_name(kind)) for kind in kinds]
            entries = [*named, (_LATER_CHUNK_COLOURS[_OTHER], "lighter: odd chunk"), *entries[len(used) :]]
        x = 16.0
        for colour, name in entries:
            yield f'<rect x="{x:g}" y="51" width="11" height="11" rx="2" fill="{colour}"/>'
            yield f'<text x="{x + 15:g}" y="60.5" fill="#1A1A1A">{name}</text>'
            x += 15 + 6.6 * len(name) + 10

    def axis(self, height: int) -> Iterator[str]:
        """Vertical lines at round times, with milliseconds below."""
        bottom = height - 30
        span_ms = (self.end - self.begin) / 1e6
        step = _round_step(span_ms / 10)
        decimals = max(0, -int(np.floor(np.log10(step))))
        for tick in range(int(span_ms / step + 1e-9) + 1):
            x = _LEFT + tick * step * 1e6 * self.scale
            yield f'<path d="M{x:.1f} {_TOP - 4}V{bottom}" stroke="#E4E4E4"/>'
            label = f"{tick * step:.{decimals}f}"
            yield f'<text x="{x:.1f}" y="{bottom + 14}" class="s" text-anchor="middle">{label}</text>'
        yield f'<text x="{_WIDTH - _RIGHT + 12}" y="{bottom + 14}" class="s">ms</text>'

    def band(self, row: int, rank: int) -> Iterator[str]:
        """Everything of one rank."""
        top = _TOP + row * _BAND
        ranks = self.timeline.ranks
        where = [
            f"{name}{int(getattr(ranks, name)[rank])}"
            for name in ("pp", "dp", "tp")
            if getattr(ranks, name)[rank] >= 0
        ]
        yield f'<text x="16" y="{top + 16}" fill="#1A1A1A">rank {int(ranks.rank[rank])}</text>'
        yield f'<text x="16" y="{top + 31}" class="s" font-size="9.5">{" ".join(where)}</text>'
        yield f'<rect x="{_LEFT}" y="{top}" width="{_PLOT}" height="{_ACTION_HEIGHT}" fill="#F1F1F1"/>'
        yield from self._action_shapes(self.actions[rank], top)
        if self.draw_each:
            yield from self._action_labels(self.actions[rank], top)
        yield from self._communication(rank, top + _ACTION_HEIGHT + 1)
        yield from self._memory(rank, top + _ACTION_HEIGHT + 2 * _STRIP_HEIGHT + 4)

    def _action_shapes(self, actions: _Actions, top: int) -> Iterator[str]:
        """One path a colour, so that a thousand actions are a few elements."""
        left, right, colour = self.x(actions.start), self.x(actions.end), actions.colour
        if not self.draw_each:
            left, right, colour = _by_pixel(left, right, colour)
        # Neighbours of one colour stay apart by a thin gap where there is room for one.
        right = np.where(right - left > 3, right - 0.6, np.maximum(right, left + 0.3))
        for value in np.unique(colour).tolist():
            mine = colour == value
            outlines = "".join(
                f"M{x:.1f} {top}h{width:.1f}v{_ACTION_HEIGHT}h-{width:.1f}z"
                for x, width in zip(left[mine].tolist(), (right - left)[mine].tolist(), strict=True)
            )
            yield f'<path class="a{value}" d="{outlines}"/>'

    def _action_labels(self, actions: _Actions, top: int) -> Iterator[str]:
        left, right = self.x(actions.start).tolist(), self.x(actions.end).tolist()
        for x, end, name, colour in zip(left, right, actions.name, actions.colour.tolist(), strict=True):
            size = 11 if end - x >= 8.0 * len(name) else 9
            if end - x < 6.2 * len(name):
                continue
            text_class = "d" if colour in (_FORWARD, _BACKWARD, _OTHER) else "k"
            small = f' font-size="{size}"' if size != 11 else ""
            yield f'<text class="{text_class}" x="{(x + end) / 2:.1f}" y="{top + 16}"{small}>{escape(name)}</text>'

    def _communication(self, rank: int, top: int) -> Iterator[str]:
        """Two strips: communication while nothing computes, and communication beside compute."""
        slices = self.timeline.slices
        communicates, computes = _device_work(self.timeline)
        mine = self.slice_ranks == rank
        bins = max(40, min(_PLOT, 9000 // len(self.ranks)))
        edges = np.linspace(self.begin, max(self.end, self.begin + 1), bins + 1)
        ends = slices.start + slices.duration

        def busy(selected: Bool) -> Float64:
            return np.diff(_covered(slices.start[selected], ends[selected], edges)) / np.diff(edges)

        exposed = busy(mine & (communicates | computes)) - busy(mine & computes)
        overlapped = busy(mine & communicates) - exposed
        for letter, share, offset in (("e", exposed, 0), ("o", overlapped, _STRIP_HEIGHT)):
            level = np.ceil(np.clip(share - 0.01, 0.0, 1.0) * _STRIP_LEVELS).astype(np.int64)
            y = top + offset + _STRIP_HEIGHT / 2
            for value, runs in _runs_by_value(level):
                moves = "".join(
                    f"M{_LEFT + first * _PLOT / bins:.1f} {y:g}h{(last - first) * _PLOT / bins:.1f}"
                    for first, last in runs
                )
                yield f'<path class="{letter}{value}" d="{moves}"/>'

    def _memory(self, rank: int, top: int) -> Iterator[str]:
        """Area under the allocated memory, to one scale for all ranks; the peak of a pixel is kept."""
        times, values = self.memory[rank]
        if not len(times) or not self.peak:
            return
        bottom = top + _MEMORY_HEIGHT
        bins = max(40, min(_PLOT, 7000 // len(self.ranks)))
        edges = np.linspace(self.begin, max(self.end, self.begin + 1), bins + 1)
        at_start = np.maximum(np.searchsorted(times, edges[:-1], side="right") - 1, 0)
        highest = values[at_start].copy()
        np.maximum.at(highest, np.clip(np.searchsorted(edges, times, side="right") - 1, 0, bins - 1), values)
        heights = bottom - np.round(highest / self.peak * _MEMORY_HEIGHT, 1)
        changes = np.flatnonzero(np.diff(heights, prepend=np.nan) != 0)
        path = "".join(
            f"H{_LEFT + index * _PLOT / bins:.1f}V{heights[index]:.1f}" for index in changes.tolist()
        )
        outline = f"M{_LEFT} {bottom}{path}H{_LEFT + _PLOT}V{bottom}z"
        yield f'<path d="{outline}" fill="{_MEMORY_COLOUR}" fill-opacity="0.45"/>'
        yield f'<path d="M{_LEFT} {bottom}h{_PLOT}" stroke="#C9C9C9"/>'
        yield (
            f'<text x="{_WIDTH - _RIGHT + 6}" y="{bottom - 8}" class="s" font-size="10">'
            f"{float(values.max()) / 2**30:.1f} GiB</text>"
        )


def _action_class(name: str) -> int:
    match = _ACTION_NAME.fullmatch(name)
    if match is None:
        return _OTHER
    return _PAIR if match.group(2) else _CLASS_OF_LETTER[match.group(1)]


def _legend_name(colour: int) -> str:
    if colour >= _PAIR:
        return f"{_PAIR_NAME}, odd chunk" if colour > _PAIR else _PAIR_NAME
    chunk, kind = divmod(colour, len(_COLOURS))
    return f"{_CLASS_NAMES[kind]}, odd chunk" if chunk else _CLASS_NAMES[kind]


def _round_step(at_least: float) -> float:
    """The smallest of 1, 2 or 5 times a power of ten that is not below ``at_least``."""
    power = 10.0 ** np.floor(np.log10(max(at_least, 1e-6)))
    return float(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= at_least * (1 - 1e-9)))


def _device_work(timeline: Timeline) -> tuple[Bool, Bool]:
    """Which slices are communication, and which are other work of the device."""
    roles = timeline.slice_roles()
    moves_data = (timeline.slices.kind == OpKind.COLLECTIVE) | (timeline.slices.kind == OpKind.P2P)
    on_device = roles == TrackRole.DEVICE
    communicates = np.isin(roles, _COMMUNICATION_ROLES) | (on_device & moves_data)
    return communicates, (roles == TrackRole.COMPUTE) | (on_device & ~moves_data)


def _covered(starts: Int64, ends: Int64, times: Float64) -> Float64:
    """Length of the union of intervals that lies before each of ``times``."""
    if not len(starts):
        return np.zeros(len(times))
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    opens = np.flatnonzero(np.concatenate([[True], starts[1:] > reach[:-1]]))
    first = starts[opens].astype(np.float64)
    last = reach[np.append(opens[1:] - 1, len(reach) - 1)].astype(np.float64)
    total = np.concatenate([[0.0], np.cumsum(last - first)])
    index = np.searchsorted(first, times, side="right")
    return total[index] - np.where(index > 0, np.maximum(last[index - 1] - times, 0.0), 0.0)


def _by_pixel(left: Float64, right: Float64, colour: Int64) -> tuple[Float64, Float64, Int64]:
    """Actions as runs of pixels, each of the colour that fills most of it; idle pixels are left out."""
    edges = np.arange(_LEFT, _LEFT + _PLOT + 1, dtype=np.float64)
    values = np.unique(colour)
    fill = np.array([np.diff(_covered(left[colour == v], right[colour == v], edges)) for v in values])
    most = fill.argmax(axis=0)
    filled = fill.sum(axis=0) >= 0.25
    winner = np.where(filled, values[most], -1) + 1
    runs = [(first, last, value - 1) for value, spans in _runs_by_value(winner) for first, last in spans]
    table = np.array(runs, dtype=np.int64).reshape(-1, 3)
    return _LEFT + table[:, 0].astype(np.float64), _LEFT + table[:, 1].astype(np.float64), table[:, 2]


def _runs_by_value(values: Int64) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Each value but 0, with the ranges ``[first, last)`` in which it stands."""
    changes = np.flatnonzero(np.diff(values)) + 1
    firsts = np.concatenate([[0], changes])
    lasts = np.append(changes, len(values))
    for value in np.unique(values).tolist():
        if value:
            mine = values[firsts] == value
            yield value, list(zip(firsts[mine].tolist(), lasts[mine].tolist(), strict=True))


def _allocated(timeline: Timeline, rank: int) -> tuple[Int64, Float64]:
    """Times and values of the allocated memory: the counter of that name, else the sum of all categories."""
    tracks, samples = timeline.counter_tracks, timeline.counter_samples
    mine = np.flatnonzero((tracks.rank == rank) & tracks.is_bytes)
    named = [row for row in mine.tolist() if "allocated" in timeline.string(int(tracks.name[row])).lower()]
    chosen = named[:1] or [row for row in mine.tolist() if tracks.category[row] >= 0]
    if not chosen:
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    times = np.unique(samples.time[np.isin(samples.track, chosen)])
    total = np.zeros(len(times))
    for row in chosen:
        own = samples.track == row
        index = np.searchsorted(samples.time[own], times, side="right") - 1
        if own.any():
            total += np.where(index >= 0, samples.value[own][np.maximum(index, 0)], 0.0)
    return times, total
