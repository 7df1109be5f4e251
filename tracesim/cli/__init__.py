"""The command line. It parses, calls and prints; it knows no format, model or formula."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from .errors import USER_ERRORS, report_error
from .hardware import hardware
from .models import models
from .run import run, scenarios
from .traces import diff, open_command, read


class _ErrorReportingGroup(click.Group):
    """Turns every error a user can cause into one message and exit code 2."""

    def main(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Run a command; exit code 0, 1 for a failed check, 2 for bad input, 130 when interrupted."""
        try:
            result = super().main(*args, **{"prog_name": "tracesim", **kwargs, "standalone_mode": False})
            # Click returns the code of an Exit it swallowed.
            sys.exit(result if isinstance(result, int) else 0)
        except click.ClickException as error:
            error.show()
            sys.exit(2)
        except (click.Abort, KeyboardInterrupt):
            click.echo("interrupted; nothing was left half-written", err=True)
            sys.exit(130)
        except BrokenPipeError:
            # The reader of our output (head, less) went away: not an error, and nothing more can be printed.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        except USER_ERRORS as error:
            report_error(error)
            sys.exit(2)


@click.group(cls=_ErrorReportingGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tracesim")
def main() -> None:
    """Simulate distributed LLM training steps, and compare them with real profiler traces."""


for _command in (run, scenarios, models, hardware, read, diff, open_command):
    main.add_command(_command)
