"""Errors a user can cause. Their messages say the value, the limit, where it came from and what to do."""

from __future__ import annotations


class ScenarioError(ValueError):
    """A scenario file or an override is wrong; the message lists every problem found, one a line."""


class TraceError(ValueError):
    """A file is not a trace that can be read, or is damaged."""


class SimulationError(ValueError):
    """The operation graph cannot be executed (deadlock); the message lists what each stuck rank waits for."""


class OutputError(ValueError):
    """An output file or folder cannot be written."""
