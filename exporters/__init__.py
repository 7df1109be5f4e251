"""Exporters: a Timeline as a file, one format a module.

- ``write_perfetto``: Perfetto protobuf; holds everything, for ui.perfetto.dev
- ``write_chrome``: Chrome JSON like ``torch.profiler`` writes it, one file a rank
- ``format_slices``: one line a slice, for tests

What is where in these files: ``docs/trace_layout.md``.
"""

from __future__ import annotations

from .chrome import write_chrome
from .files import ExportError
from .perfetto import WrittenCounts, write_perfetto
from .text import format_slices

__all__ = ["ExportError", "WrittenCounts", "format_slices", "write_chrome", "write_perfetto"]
