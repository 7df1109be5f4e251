"""Pipeline schedules: pure functions to lists of actions, their checks, and the passes over them."""

from .actions import Action, ActionKind, Schedule, ScheduleError, parse_action
from .check import check_schedule
from .communication import add_communication, without_communication
from .csv_format import format_csv, parse_csv, read_schedule_csv, write_schedule_csv
from .order import requirements
from .registry import build_schedule, schedule_names
from .unit_times import UnitTimes, peak_activations, simulate_unit_times

__all__ = [
    "Action",
    "ActionKind",
    "Schedule",
    "ScheduleError",
    "UnitTimes",
    "add_communication",
    "build_schedule",
    "check_schedule",
    "format_csv",
    "parse_action",
    "parse_csv",
    "peak_activations",
    "read_schedule_csv",
    "requirements",
    "schedule_names",
    "simulate_unit_times",
    "without_communication",
    "write_schedule_csv",
]
