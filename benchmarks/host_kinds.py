"""What kinds of operations cost the host in public traces, beside the shares that are installed.

Reads traces of ``torch.profiler`` as they are and takes, on each thread, the operators that lie in no other. An
operator is given the time from the end of the one that launched something before it to its own end, so the Python in
front of it and operators that launch nothing (views) are its own; a node of the backward pass, which the engine calls,
its duration. Left out is what waits: where the host synchronises, copies to itself, or a launch takes over 100 us (a
full queue).

The profiler adds to each operator, about in proportion to how many it is made of, so times are too long and ratios of
kinds less so. Only ratios are used: of a kind to a function in Python of the same trace, or where there is none to an
operation of PyTorch, times what that is of a function in the others.

    python -m benchmarks.host_kinds ../shared/data/traces
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click

from tracesim import host_work
from tracesim.errors import TraceError

TRACES = (
    "megatron-lm/tp2_v100/rank0.pt.trace.json.gz",
    "megatron-lm/tp2_v100/rank1.pt.trace.json.gz",
    "deepseek/train.json.gz",
    "hta/nccl_parser_config/nccl_data.json.gz",
    "hta/trace_diff/control/control.json.gz",
    "hta/trace_diff/test/test.json.gz",
    "tracelens/mi300__resnet_act_checkpoint.json.gz",
    "triosim/profiler_vgg13-iter41.json.gz",
    "torchrec/sst_long_a2a_optimizer_5/p0.pt.trace.json.gz",
    "param/dlrm_8rank_v100/kineto/worker0_step_12.1694128201545.pt.trace.json.gz",
)
"""Traces of training whose host is seen: of Megatron-LM with its own functions, of DeepSeek-V3, and of others."""
FUNCTION, FUNCTION_BACKWARD = "function in Python", "its backward node"
OPERATION, NODE = "operation of PyTorch", "node of the engine"
COLLECTIVE, GRADIENT = "collective", "accumulated gradient"
INSTALLED = {
    FUNCTION: host_work.MODULE,
    FUNCTION_BACKWARD: host_work.BACKWARD,
    OPERATION: host_work.PLAIN,
    NODE: host_work.PLAIN,
    COLLECTIVE: host_work.COLLECTIVE,
}
"""Shares of a function; an accumulated gradient is part of the products of a backward node."""
_NODE = "autograd::engine::evaluate_function: "
_WAITS_US = 100.0


@dataclass(frozen=True)
class Operator:
    """An operator on a thread, in microseconds."""

    name: str
    start: float
    duration: float
    inside: tuple[str, ...]
    """Operators that it called."""

    @property
    def end(self) -> float:
        """When it returned."""
        return self.start + self.duration


def kind_of(name: str, inside: Iterable[str], launches: int) -> str | None:
    """The kind of an operator; None for one that launches nothing or has a collective in it, which is not measured."""
    communicates = any(other.startswith(("c10d::", "nccl:", "record_param_comms")) for other in inside)
    if name.startswith(_NODE):
        node = name.removeprefix(_NODE)
        if communicates:
            return None
        if node.endswith("AccumulateGrad"):
            return GRADIENT
        if not launches:
            return None
        in_engine = re.search(r"Backward\d+$", node) or node.startswith("torch::autograd")
        return NODE if in_engine else FUNCTION_BACKWARD
    if not launches or communicates or name.startswith(("c10d::", "record_param_comms", "aten::_foreach")):
        return None
    return OPERATION if "::" in name else FUNCTION


def outermost(operators: Iterable[tuple[float, float, str]]) -> list[Operator]:
    """Operators (start, duration, name) of one thread that lie in no other, with the names of those in them."""
    found: list[tuple[str, float, float, list[str]]] = []
    end = float("-inf")
    for start, duration, name in sorted(operators, key=lambda one: (one[0], -one[1])):
        if start >= end:
            found.append((name, start, duration, []))
            end = start + duration
        else:
            found[-1][3].append(name)
    return [Operator(name, start, duration, tuple(inside)) for name, start, duration, inside in found]


def measured(events: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Microseconds of every operator of a trace, by kind."""
    operators: dict[object, list[tuple[float, float, str]]] = defaultdict(list)
    calls: dict[object, list[tuple[float, float, str]]] = defaultdict(list)
    for event in events:
        kept = {"cpu_op": operators, "cuda_runtime": calls, "cuda_driver": calls}.get(str(event.get("cat")))
        if event.get("ph") == "X" and kept is not None:
            kept[event["tid"]].append((float(event["ts"]), float(event["dur"]), str(event["name"])))
    times: dict[str, list[float]] = defaultdict(list)
    for thread, of_thread in operators.items():
        times[COLLECTIVE] += [duration for _, duration, name in of_thread if name.startswith("c10d::")]
        _measure(outermost(of_thread), sorted(calls[thread]), times)
    return {kind: values for kind, values in times.items() if values}


def _measure(
    operators: Sequence[Operator], calls: Sequence[tuple[float, float, str]], times: dict[str, list[float]]
) -> None:
    before: float | None = None
    call = 0
    for operator in operators:
        launches, waits = 0, False
        while call < len(calls) and calls[call][0] < operator.end:
            _, duration, name = calls[call]
            launches += "Launch" in name
            waits |= "Synchronize" in name or (("Launch" in name or "emcpy" in name) and duration > _WAITS_US)
            call += 1
        kind = kind_of(operator.name, operator.inside, launches)
        in_backward = operator.name.startswith(_NODE)
        if kind is not None and not waits and (in_backward or before is not None):
            taken = operator.duration if in_backward else operator.end - (before or 0.0)
            times[kind].append(taken)
        if launches or waits or in_backward or kind is not None:
            before = operator.end


def shares(traces: Mapping[str, Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """What each kind takes of a function in Python, one value for each trace that has it."""
    of_function = [
        median(times[OPERATION]) / median(times[FUNCTION]) for times in traces.values() if FUNCTION in times
    ]
    found: dict[str, list[float]] = defaultdict(list)
    for times in traces.values():
        function = (
            median(times[FUNCTION]) if FUNCTION in times else median(times[OPERATION]) / median(of_function)
        )
        for kind, values in times.items():
            if kind != OPERATION or FUNCTION in times:
                found[kind].append(median(values) / function)
    return dict(found)


def read(folder: Path) -> dict[str, dict[str, list[float]]]:
    """Times of the traces that are there, by their name.

    Raises:
        TraceError: if one is no gzipped document of ``torch.profiler``.
    """
    found = {}
    for name in TRACES:
        path = folder / name
        if not path.exists():
            continue
        try:
            with gzip.open(path) as file:
                found[name] = measured(json.load(file)["traceEvents"])
        except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
            raise TraceError(
                f"{path} is no gzipped trace of torch.profiler ({type(error).__name__}: {error}); copy it again"
            ) from error
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(folder: Path) -> None:
    """Print what kinds of operations cost the host in the traces of FOLDER, and the shares that are installed."""
    try:
        traces = read(folder)
    except TraceError as error:
        raise click.UsageError(str(error)) from None
    if not traces:
        raise click.UsageError(f"{folder} has none of the traces this is measured on, such as {TRACES[0]}")
    for name, times in traces.items():
        parts = (f"{kind} {median(values):.0f} us ({len(values)})" for kind, values in times.items())
        click.echo(f"{name}: " + ", ".join(parts))
    for kind, values in shares(traces).items():
        installed = f", installed {INSTALLED[kind]:g}" if kind in INSTALLED else ""
        listed = " ".join(f"{value:.2f}" for value in values)
        click.echo(f"{kind}: {median(values):.2f} of a function ({listed}){installed}")


if __name__ == "__main__":
    main()
