"""What counts as the user's error, and how it is printed."""

from __future__ import annotations

import click

from exporters import ExportError
from hardware_profiles import ProfileError
from op_graphs.model import ModelError
from schedules.actions import ScheduleError

from ..errors import OutputError, ScenarioError, SimulationError, TraceError
from ..open_trace import PortError

USER_ERRORS: tuple[type[ValueError], ...] = (
    ScenarioError,
    TraceError,
    SimulationError,
    OutputError,
    ProfileError,
    ModelError,
    ScheduleError,
    ExportError,
    PortError,
)


def report_error(error: ValueError) -> None:
    """Print a user's error to stderr."""
    click.echo(f"error: {error}", err=True)
