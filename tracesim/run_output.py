"""What ``tracesim run -o DIR`` writes: trace, report and picture, each file whole or not there."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from exporters import write_perfetto
from exporters.chrome import ChromeWriter, file_names
from exporters.pipeline_png import pipeline_png, require_pillow
from exporters.pipeline_svg import pipeline_svg
from op_graphs.timeline import Timeline

from .output import atomic_write
from .simulation import Simulation


def _perfetto(timeline: Timeline, folder: Path) -> list[Path]:
    path = folder / "trace.pftrace"
    with atomic_write(path) as stream:
        write_perfetto(timeline, stream)
    return [path]


def _chrome(timeline: Timeline, folder: Path) -> list[Path]:
    writer = ChromeWriter(timeline)
    paths = [folder / f"{name}.json" for name in file_names(timeline)]
    for row, path in enumerate(paths):
        with atomic_write(path) as stream:
            writer.write(row, stream)
    return paths


def _svg(timeline: Timeline, folder: Path) -> list[Path]:
    path = folder / "pipeline.svg"
    with atomic_write(path) as stream:
        stream.write(pipeline_svg(timeline).encode())
    return [path]


def _png(timeline: Timeline, folder: Path) -> list[Path]:
    path = folder / "pipeline.png"
    with atomic_write(path) as stream:
        stream.write(pipeline_png(timeline))
    return [path]


_WRITERS: dict[str, Callable[[Timeline, Path], list[Path]]] = {
    "perfetto": _perfetto,
    "chrome": _chrome,
    "svg": _svg,
    "png": _png,
}
FORMATS = tuple(_WRITERS)
"""Names of the formats a run can be written in."""


def check_formats(formats: Sequence[str]) -> None:
    """Raise PictureError if a PNG is asked for and cannot be drawn."""
    if "png" in formats:
        require_pillow()


def write_outputs(
    simulation: Simulation, folder: Path, formats: Sequence[str], ranks: Sequence[int] | None
) -> list[Path]:
    """Write the trace in each format, and ``report.json``; returns the files in that order.

    Raises:
        PictureError: as :func:`check_formats`; nothing is written then.
    """
    check_formats(formats)
    timeline = simulation.timeline(ranks)
    written = [path for name in formats for path in _WRITERS[name](timeline, folder)]
    report = folder / "report.json"
    with atomic_write(report) as stream:
        text = json.dumps(simulation.report, indent=2, ensure_ascii=False, allow_nan=False)
        stream.write((text + "\n").encode())
    return [*written, report]
