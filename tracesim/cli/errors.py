"""What counts as the user's error, and how it is printed."""

from __future__ import annotations

import click

from exporters import ExportError
from exporters.pipeline_png import PictureError
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
    PictureError,
)


_HELP_INSTEAD: tuple[type[click.ClickException], ...] = tuple(
    kind for kind in (getattr(click.exceptions, "NoArgsIsHelpError", None),) if kind is not None
)
"""What newer versions of Click raise where a group is called without a command."""


def report_error(error: ValueError | str) -> None:
    """Print a user's error to stderr."""
    click.echo(f"error: {error}", err=True)


def report_usage_error(error: click.ClickException) -> None:
    """Print what is wrong with a command line to stderr, and which ``--help`` explains it."""
    if isinstance(error, _HELP_INSTEAD):
        error.show()
        return
    context = getattr(error, "ctx", None)
    message = error.format_message().rstrip(".")
    report_error(f"{message}; see {context.command_path} --help" if context else message)
