"""Measured rows turned into scenarios, one module a family of sources.

A row is what a public source says about one measured run. :func:`express` finds the family by what the row holds and
returns the scenario and the measured figures, or raises :class:`~benchmarks.rows.row.RowSkippedError` with the reason.
Settings that hold for all rows of a source are in ``source_settings``; nothing is ever set for a single row.
"""

from __future__ import annotations

from .dispatch import express
from .row import MeasuredRow, RowFile, RowSkippedError, RunReport

__all__ = ["MeasuredRow", "RowFile", "RowSkippedError", "RunReport", "express"]
