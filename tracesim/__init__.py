"""tracesim: a trace-driven replay simulator for distributed LLM training.

``load_scenario`` reads what to train on what; ``simulate`` runs one step of it; ``read_trace`` reads a measured or
simulated trace; ``diff_timelines`` compares two.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .diff import diff_timelines
    from .errors import OutputError, ScenarioError, SimulationError, TraceError
    from .readers import read_trace
    from .scenario import Scenario, list_scenarios, load_scenario
    from .simulation import Simulation, simulate

__all__ = [
    "OutputError",
    "Scenario",
    "ScenarioError",
    "Simulation",
    "SimulationError",
    "TraceError",
    "diff_timelines",
    "list_scenarios",
    "load_scenario",
    "read_trace",
    "simulate",
]

_FOUND_IN = {
    "OutputError": "errors",
    "Scenario": "scenario",
    "ScenarioError": "errors",
    "Simulation": "simulation",
    "SimulationError": "errors",
    "TraceError": "errors",
    "diff_timelines": "diff",
    "list_scenarios": "scenario",
    "load_scenario": "scenario",
    "read_trace": "readers",
    "simulate": "simulation",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401
    """Import a name when it is asked for: reading a trace needs no simulator, and starting the command neither."""
    if name not in _FOUND_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f".{_FOUND_IN[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
