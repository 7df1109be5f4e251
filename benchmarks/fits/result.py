"""What a fit gives: a value, the one installed, and the residuals before and after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.accuracy import read_rows
from benchmarks.composed import composed_ms
from benchmarks.rows import MeasuredRow, RowFile, RowSkippedError, express
from benchmarks.rows.dispatch import source_name
from hardware_profiles import load_profile
from tracesim.lowering import lower_scenario
from tracesim.scenario import Scenario
from tracesim.simulation import iteration_ms

TOLERANCE_POINTS = 0.25
"""Percentage points by which an installed value may fit worse: it is rounded, and figures of one table are fitted
together, so that a valley leads to nearly equal optima."""


@dataclass(frozen=True)
class Fit:
    """A figure fitted on named rows."""

    figure: str
    """Path of the figure in a profile."""
    profile: str
    """Installed profile that holds it."""
    rows: str
    """What it was fitted on."""
    criterion: str
    value: float
    residual: str
    """What the residuals are, with their unit."""
    before: float
    """Residual at the neutral value: without what the figure stands for."""
    after: float
    """Residual at the fitted value."""
    at_installed: float
    """Residual at the installed value."""
    details: tuple[str, ...] = field(default=())
    """What single layouts or rows ask for."""

    @property
    def installed(self) -> float:
        """Value in the installed profile."""
        return installed_value(self.profile, self.figure)

    @property
    def differs(self) -> bool:
        """Whether the installed value fits worse than the fitted one."""
        return abs(self.at_installed) - abs(self.after) > TOLERANCE_POINTS


def installed_value(profile: str, figure: str) -> float:
    """A figure of an installed profile, by its path."""
    found: object = load_profile(profile)
    for name in figure.split("."):
        found = found[name] if isinstance(found, Mapping) else getattr(found, name)
    assert isinstance(found, (int, float))
    return float(found)


def expressed(files: Sequence[Path]) -> Iterator[tuple[str, MeasuredRow]]:
    """Source and measured row of everything in the files that can be expressed and has a time of a whole step."""
    for path in files:
        rows, source = read_rows(path)
        file = RowFile(path, source)
        for index, row in enumerate(rows):
            try:
                measured = express(row, index, file)
            except RowSkippedError:
                continue
            if measured.time_ms and measured.smaller is None:
                yield source_name(row, file), measured


def time_ms(scenario: Scenario, *, composed: bool = False) -> float:
    """Iteration time of a simulated scenario, or the sum of parts that rows with ``composed`` hold."""
    return composed_ms(scenario, lower_scenario(scenario)) if composed else iteration_ms(scenario)
