"""The simulation of a scenario, with the ranks that a measured trace shows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from op_graphs.timeline import Timeline
from tracesim.scenario import list_scenarios, load_scenario
from tracesim.simulation import simulate

_SUFFIXES = (".yaml", ".yml")


def is_scenario(path: str) -> bool:
    """Whether a command's argument means a scenario rather than a trace: a YAML file, or the name of a bundled one."""
    return Path(path).suffix.lower() in _SUFFIXES or (not Path(path).exists() and path in list_scenarios())


def simulate_beside(scenario: str, measured: Timeline | None = None) -> Timeline:
    """The timeline of a simulated step of a scenario, for comparison with a measured trace.

    It holds the ranks of the trace where there is one and the scenario has them all, else one a pipeline stage.

    Raises:
        ScenarioError: if the scenario is wrong, or cannot be simulated.
    """
    loaded = load_scenario(scenario)
    numbers = [] if measured is None else np.unique(measured.ranks.rank).tolist()
    shown = bool(numbers) and numbers[0] >= 0 and numbers[-1] < loaded.parallel.world_size
    return simulate(loaded).timeline(numbers if shown else None)
