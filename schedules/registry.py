"""The schedules by name. Adding one is a file with a pure function, and an entry in ``SCHEDULES``.

A name may carry options, as in ``interleaved-1f1b:group=8`` or ``greedy:memory=8,forward=1,input=0.9,weight=0.7``;
``flush=N`` drains the pipeline of any schedule after every N microbatches.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .actions import Schedule, ScheduleError
from .costs import ActionCosts
from .csv_format import read_schedule_csv
from .dualpipe import dualpipe
from .dualpipev import dualpipev
from .flushed import flushed
from .forward_only import forward_only
from .gpipe import gpipe
from .greedy import Objective, greedy
from .interleaved import interleaved_one_forward_one_backward
from .interleaved_zero_bubble import interleaved_zero_bubble
from .looped_bfs import looped_bfs
from .one_forward_one_backward import one_forward_one_backward
from .overlapped_1f1b import overlapped_one_forward_one_backward, overlapped_with_delayed_weights
from .v_half import v_half
from .v_min import v_min
from .zb_h1 import zb_h1
from .zb_h2 import zb_h2
from .zb_v import zb_v


class ChunkRule(Enum):
    """How many model chunks a rank may hold; the value says it in words."""

    ONE = "one model chunk a rank"
    TWO = "two model chunks a rank, laid out as a V"
    SEVERAL = "at least 2 model chunks a rank"
    ANY = "any number of model chunks a rank"

    def allows(self, chunks: int) -> bool:
        """Whether a rank may hold so many chunks."""
        if self is ChunkRule.ANY:
            return True
        if self is ChunkRule.SEVERAL:
            return chunks >= 2
        return chunks == (1 if self is ChunkRule.ONE else 2)

    @property
    def usual(self) -> int:
        """The number of chunks to take where none is given."""
        return 2 if self in (ChunkRule.TWO, ChunkRule.SEVERAL) else 1


@dataclass(frozen=True)
class Entry:
    """A schedule by name."""

    build: Callable[..., Schedule]
    """Takes pp, chunks and microbatches, and the options by name."""
    chunks: ChunkRule
    options: Mapping[str, type] = field(default_factory=dict)
    """Options and the type of each; ``group`` is the parameter ``group_size``."""
    least_pp: int = 1


_GROUP = {"group": int}
_FLUSH = {"flush": int}
"""What every schedule by name takes (:mod:`schedules.flushed`)."""


class Times(str, Enum):
    """Where the automatic schedule has the times of the passes from."""

    GIVEN = "given"
    """From its other options."""
    PROFILED = "profiled"
    """From a profile of the scenario it runs in; to be put in by :func:`with_times`."""


_GREEDY: Mapping[str, type] = {
    "memory": int,
    "times": Times,
    "weight_memory": float,
    "minimize": Objective,
    **dict.fromkeys(("forward", "input", "weight", "transfer"), float),
}


def _greedy(
    pp: int,
    chunks: int,
    microbatches: int,
    memory: int | None = None,
    forward: float = 1.0,
    input: float = 1.0,  # noqa: A002 - the option's name
    weight: float = 1.0,
    transfer: float = 0.0,
    weight_memory: float = 1.0,
    minimize: Objective = Objective.MAKESPAN,
    times: Times = Times.GIVEN,
) -> Schedule:
    if times is Times.PROFILED:
        raise ScheduleError(
            "greedy: times=profiled takes the times of passes from the scenario it runs in, and there is none here; "
            "give forward=..., input=..., weight=... and transfer=... instead"
        )
    costs = ActionCosts(forward, input, weight, transfer=transfer)
    return greedy(pp, chunks, microbatches, memory, costs, weight_memory, minimize)


SCHEDULES: Mapping[str, Entry] = {
    "gpipe": Entry(gpipe, ChunkRule.ONE),
    "1f1b": Entry(one_forward_one_backward, ChunkRule.ONE),
    "interleaved-1f1b": Entry(
        interleaved_one_forward_one_backward, ChunkRule.SEVERAL, options=_GROUP, least_pp=2
    ),
    "1f1b-overlap": Entry(overlapped_one_forward_one_backward, ChunkRule.ANY, options=_GROUP),
    "1f1b-overlap-wgrad": Entry(overlapped_with_delayed_weights, ChunkRule.ANY, options=_GROUP),
    "looped-bfs": Entry(looped_bfs, ChunkRule.SEVERAL),
    "interleaved-zb": Entry(interleaved_zero_bubble, ChunkRule.SEVERAL, options=_GROUP, least_pp=2),
    "zb-h1": Entry(zb_h1, ChunkRule.ONE),
    "zb-h2": Entry(zb_h2, ChunkRule.ONE),
    "zb-v": Entry(zb_v, ChunkRule.TWO),
    "v-half": Entry(v_half, ChunkRule.TWO),
    "v-min": Entry(v_min, ChunkRule.TWO),
    "dualpipe": Entry(dualpipe, ChunkRule.ONE, least_pp=2),
    "dualpipev": Entry(dualpipev, ChunkRule.TWO),
    "greedy": Entry(_greedy, ChunkRule.ANY, options=_GREEDY),
    "forward": Entry(forward_only, ChunkRule.ANY),
}


def schedule_names() -> tuple[str, ...]:
    """Names :func:`build_schedule` knows."""
    return tuple(SCHEDULES)


def usual_chunks(name: str) -> int:
    """Model chunks a rank holds in a schedule where nobody says: 2 where it needs several, else 1.

    Raises:
        ScheduleError: if the name is unknown.
    """
    return _lookup(name)[1].chunks.usual


MOST_FORWARDS = 4_000_000
"""Forwards on all ranks that a schedule may have: 128 stages of 30000 microbatches."""


def build_schedule(
    name: str, pp: int, vpp: int, microbatches: int, group_size: int | None = None
) -> Schedule:
    """The schedule of a name (in any case, options behind a colon) or of a CSV file.

    Args:
        name: one of :func:`schedule_names`, perhaps with options, or a path that ends in ``.csv``.
        pp: pipeline ranks.
        vpp: model chunks (stages) of a rank.
        microbatches: microbatches of a step.
        group_size: microbatches an interleaved schedule passes through a chunk before the next; pp if not given.

    Raises:
        ScheduleError: if the name or an option is unknown, a size is below 1, or the schedule cannot have these sizes.
    """
    for label, value in (("pp", pp), ("vpp", vpp), ("microbatches", microbatches)):
        if value < 1:
            raise ScheduleError(f"schedule {name}: {label}={value} must be at least 1")
    if pp * vpp * microbatches > MOST_FORWARDS:
        raise ScheduleError(
            f"schedule {name}: pp={pp}, vpp={vpp} and microbatches={microbatches} are {pp * vpp * microbatches} "
            f"forwards on all ranks, and at most {MOST_FORWARDS} are written out; take fewer microbatches"
        )
    if name.lower().endswith(".csv"):
        return _from_file(name, pp, vpp, microbatches)
    plain, entry, options = _lookup(name)
    if not entry.chunks.allows(vpp) or pp < entry.least_pp:
        raise ScheduleError(_wrong_sizes(plain, entry, pp, vpp))
    if group_size is not None:
        if "group" not in entry.options:
            raise ScheduleError(f"schedule {plain} has no microbatch groups; remove group_size={group_size}")
        options["group"] = group_size
    if "group" in options:
        options["group_size"] = options.pop("group")
    flush = options.pop("flush", None)
    if flush is None:
        return entry.build(pp, vpp, microbatches, **options)
    return flushed(lambda count: entry.build(pp, vpp, count, **options), microbatches, flush)


def takes_profiled_times(name: str) -> bool:
    """Whether a schedule of this name waits for the times of its passes (``times=profiled``).

    Raises:
        ScheduleError: if the name or an option is unknown.
    """
    return not name.lower().endswith(".csv") and _lookup(name)[2].get("times") is Times.PROFILED


def with_times(name: str, costs: ActionCosts) -> str:
    """The name with times of passes in place of ``times=profiled``."""
    plain, _, text = name.partition(":")
    kept = [part for part in text.split(",") if not part.strip().lower().startswith("times")]
    given = [
        f"{option}={value:g}"
        for option, value in (
            ("forward", costs.forward),
            ("input", costs.backward_input),
            ("weight", costs.backward_weight),
            ("transfer", costs.transfer),
        )
    ]
    return f"{plain}:{','.join([*kept, *given])}"


def without_flushes(name: str) -> str:
    """The name without ``flush=N``."""
    plain, _, text = name.partition(":")
    kept = [part for part in text.split(",") if part and not part.strip().lower().startswith("flush")]
    return f"{plain}:{','.join(kept)}" if kept else plain


def _lookup(name: str) -> tuple[str, Entry, dict[str, Any]]:
    """Plain name, entry and options of a name with or without options."""
    plain, colon, text = name.lower().partition(":")
    entry = SCHEDULES.get(plain)
    if entry is None:
        raise ScheduleError(_unknown(plain))
    options: dict[str, Any] = {}
    for part in text.split(",") if colon else ():
        key, _, value = part.partition("=")
        key = key.strip()
        known = {**entry.options, **_FLUSH}
        if key not in known:
            takes = ", ".join(f"{option}=..." for option in known)
            raise ScheduleError(
                f"schedule {name}: {part.strip()!r} is no option of {plain}, which takes {takes}"
            )
        try:
            options[key] = known[key](value)
        except ValueError:
            wanted = _wanted(known[key])
            raise ScheduleError(f"schedule {name}: {key}={value.strip()} must be {wanted}") from None
    return plain, entry, options


def _wanted(option: type) -> str:
    """What an option of a type takes, in words."""
    if issubclass(option, Enum):
        return " or ".join(member.value for member in option)
    return "a whole number" if option is int else "a number"


def _wrong_sizes(name: str, entry: Entry, pp: int, vpp: int) -> str:
    needs = entry.chunks.value + (f" and {entry.least_pp} ranks" if entry.least_pp > 1 else "")
    if entry.chunks is ChunkRule.ONE and vpp != 1:
        advice = "use interleaved-1f1b, or vpp=1"
    elif not entry.chunks.allows(vpp):
        advice = "use 1f1b, or vpp=2" if vpp == 1 else "use interleaved-1f1b, or vpp=2"
    else:
        advice = "use 1f1b, or a larger pp"
    return f"schedule {name} needs {needs}, not vpp={vpp} and pp={pp}; {advice}"


def _unknown(name: str) -> str:
    nearest = difflib.get_close_matches(name, SCHEDULES, n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
    return f"unknown schedule {name!r}: valid are {', '.join(SCHEDULES)}, or the path of a .csv file{hint}"


def _from_file(path: str, pp: int, vpp: int, microbatches: int) -> Schedule:
    schedule = read_schedule_csv(path)
    wanted = {"pp": pp, "stages (pp * vpp)": pp * vpp, "microbatches": microbatches}
    held = {
        "pp": schedule.pp,
        "stages (pp * vpp)": schedule.model_stages,
        "microbatches": schedule.microbatches,
    }
    wrong = [f"{held[key]} {key} instead of {wanted[key]}" for key in wanted if held[key] != wanted[key]]
    if wrong:
        raise ScheduleError(f"schedule {path} has {', '.join(wrong)}; change the plan or the file")
    return schedule
