"""The command line. It parses, calls and prints; it knows no format, model or formula."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from .analyze import analyze
from .convert import convert
from .errors import USER_ERRORS, report_error, report_usage_error
from .hardware import hardware
from .import_megatron import import_megatron_command
from .models import models
from .overlap import overlap
from .replay import replay
from .run import run, scenarios
from .schedule import schedule
from .traces import diff, open_command, read


class _ReaderWentAwayError(Exception):
    """The reader of our output (head, less) closed it: not an error, and nothing more can be printed."""


class _ErrorReportingGroup(click.Group):
    """Turns every error a user can cause into one message and exit code 2."""

    def main(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run a command; exit code 0, 1 for a failed check, 2 for bad input, 130 when interrupted."""
        try:
            result = super().main(*args, **{"prog_name": "tracesim", **kwargs, "standalone_mode": False})
            # Click returns the code of an Exit it swallowed.
            sys.exit(result if isinstance(result, int) else 0)
        except click.ClickException as error:
            report_usage_error(error)
            sys.exit(2)
        except (click.Abort, KeyboardInterrupt):
            click.echo("interrupted; nothing was left half-written", err=True)
            sys.exit(130)
        except _ReaderWentAwayError:
            _drop_output()
            sys.exit(0)
        except USER_ERRORS as error:
            report_error(error)
            sys.exit(2)
        except OSError as error:
            # What concerns files of the user has been put in words where they are opened.
            if error.filename is None:
                _drop_output()
            report_error(f"{error.filename or 'standard output'}: {(error.strerror or str(error)).lower()}")
            sys.exit(2)

    def invoke(self, context: click.Context) -> Any:  # noqa: ANN401
        """Run a command and print all of it."""
        try:
            result = super().invoke(context)
            if sys.stdout is not None:
                sys.stdout.flush()
        except BrokenPipeError as error:
            # Said in another class, because Click would end with exit code 1, which is a failed check.
            raise _ReaderWentAwayError from error
        return result


def _drop_output() -> None:
    """Send what is still buffered for stdout nowhere, or the interpreter complains about it once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@click.group(cls=_ErrorReportingGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tracesim")
def main() -> None:
    """Simulate distributed LLM training steps, and compare them with real profiler traces."""


for _command in (
    run,
    scenarios,
    models,
    hardware,
    import_megatron_command,
    overlap,
    read,
    analyze,
    replay,
    diff,
    convert,
    open_command,
    schedule,
):
    main.add_command(_command)
