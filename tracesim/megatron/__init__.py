"""Argument lists of Megatron-LM turned into scenarios (``tracesim import-megatron``)."""

from __future__ import annotations

from .importing import ImportedScenario, import_megatron
from .reading import LaunchFile, read_launch_file

__all__ = ["ImportedScenario", "LaunchFile", "import_megatron", "read_launch_file"]
