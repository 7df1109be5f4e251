"""What a configuration adds to a row of a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Section = Mapping[str, Any]


@dataclass(frozen=True)
class Configuration:
    """What a configuration adds to a row."""

    row: Section = field(default_factory=dict)
    """Fields that the row leaves out, or prints in another sense."""
    scenario: Mapping[str, Section | str] = field(default_factory=dict)
    """Fields of the scenario by section; the schedule by its name."""
    notes: tuple[str, ...] = ()

    def completed(self, row: Section) -> dict[str, Any]:
        """The row with the fields of the configuration."""
        return {**row, **self.row}

    def apply(self, mapping: dict[str, Any]) -> None:
        """Put the configuration's fields into a scenario's mapping."""
        for section, values in self.scenario.items():
            given = mapping.get(section)
            if isinstance(values, Mapping):
                values = {**given, **values} if isinstance(given, dict) else dict(values)
            mapping[section] = values
