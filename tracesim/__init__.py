"""tracesim: a trace-driven replay simulator for distributed LLM training.

``load_scenario`` reads what to train on what; ``simulate`` runs one step of it; ``read_trace`` reads a measured or
simulated trace; ``diff_timelines`` compares two.
"""

from .diff import diff_timelines
from .errors import OutputError, ScenarioError, SimulationError, TraceError
from .readers import read_trace
from .scenario import Scenario, list_scenarios, load_scenario
from .simulate import Simulation, simulate

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
