"""Pipeline schedules: pure functions to lists of actions, their checks, and the passes over them."""

from .actions import Action, ActionKind, Schedule, ScheduleError, parse_action
from .blocking import check_blocking_sends
from .check import check_schedule
from .communication import add_communication, without_communication
from .costs import ActionCosts
from .csv_format import format_csv, parse_csv, read_schedule_csv, write_schedule_csv
from .greedy import Objective, greedy
from .order import requirements
from .registry import build_schedule, schedule_names, usual_chunks
from .unit_times import UnitTimes, activations_held, peak_activations, simulate_costs, simulate_unit_times

__all__ = [
    "Action",
    "ActionCosts",
    "ActionKind",
    "Objective",
    "Schedule",
    "ScheduleError",
    "UnitTimes",
    "activations_held",
    "add_communication",
    "build_schedule",
    "check_blocking_sends",
    "check_schedule",
    "format_csv",
    "greedy",
    "parse_action",
    "parse_csv",
    "peak_activations",
    "read_schedule_csv",
    "requirements",
    "schedule_names",
    "simulate_costs",
    "simulate_unit_times",
    "usual_chunks",
    "without_communication",
    "write_schedule_csv",
]
