"""Refit the figures of hardware profiles that are fitted on measured training runs, and print the residual.

``python -m benchmarks.fit PATH... [--figure NAME] [--json]``. A PATH is a file of measured rows, as for
``benchmarks.accuracy``.

``training_clock_ratio`` (the default figure): how much slower matrix products and attention run in a sustained
training step than in back-to-back runs of one kernel. Only layouts without tensor parallelism count, on one node, with
a hidden size of at least 4,096: their kernels take milliseconds, so that neither communication nor kernel launches can
explain much.

Where a layout was run with several counts of microbatches, the *slope* of the iteration time over the count is fitted,
so that fixed costs (optimizer, gradient reduction) cannot hide in it. Sources that run each layout once are fitted by
level: the upper quartile over their rows of the ratio that each row asks for, since whatever else slows a row down
makes it ask for less.

``contention``: what kernels and steps lose beside communication (:mod:`benchmarks.fit_contention`,
:mod:`benchmarks.step_pairs`); PATH is the folder that holds ``traces`` and ``measured``.

``operation_us``: what launching one lowered operation takes the host. Only small models count (hidden size up to 1,024,
one node), whose steps are mostly bound by launches: the value at which the median error of a source is zero.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median, quantiles

import click

from benchmarks.accuracy import InputError, find_files, read_rows
from benchmarks.fit_contention import (
    fit_exchange_rate,
    fit_second_wave,
    fit_send_sms,
    kernel_pairs,
    residuals,
)
from benchmarks.rows import MeasuredRow, RowFile, RowSkippedError, express
from benchmarks.rows.dispatch import source_name
from benchmarks.step_pairs import step_pairs
from tracesim.scenario import Scenario
from tracesim.simulation import simulate

_LEAST_HIDDEN = 4096
_NODE = 8
_LEAST_ROWS = 4
_SMALL_HIDDEN, _SMALL_LAYERS = 1024, 24
_BISECTIONS = 7


@dataclass(frozen=True)
class ClockFit:
    """The ratio a layout, or the rows of a machine, ask for."""

    source: str
    hardware: str
    layout: str
    measured_ms: float
    """Slope a microbatch, or mean iteration time."""
    at_full_clock_ms: float
    ratio: float


def fit_training_clock(files: Sequence[Path]) -> list[ClockFit]:
    """One fit by slope for each layout with several counts of microbatches; else one by level for each machine."""
    fits: list[ClockFit] = []
    for path in files:
        rows, source = read_rows(path)
        file = RowFile(path, source)
        layouts: dict[tuple[str, str], list[MeasuredRow]] = defaultdict(list)
        for index, row in enumerate(rows):
            try:
                measured = express(row, index, file)
            except RowSkippedError:
                continue
            if measured.time_ms and measured.smaller is None and _is_compute_bound(measured.scenario):
                training = replace(measured.scenario.training, num_microbatches=1)
                key = repr((measured.scenario.model, measured.scenario.parallel, training))
                layouts[source_name(row, file), key].append(measured)
        by_slope = [
            _fit_slope(name, found)
            for (name, _), found in layouts.items()
            if len({row.scenario.training.num_microbatches for row in found}) > 1
        ]
        fits += by_slope or _fit_levels(layouts)
    return fits


def _is_compute_bound(scenario: Scenario) -> bool:
    return (
        scenario.parallel.tp == 1
        and scenario.parallel.world_size <= _NODE
        and scenario.model.hidden_size >= _LEAST_HIDDEN
    )


def _fit_slope(source: str, rows: Sequence[MeasuredRow]) -> ClockFit:
    """The ratio at which the predicted time a microbatch is the measured one."""
    ordered = sorted(rows, key=lambda row: row.scenario.training.num_microbatches)
    few, many = ordered[0], ordered[-1]
    counts = few.scenario.training.num_microbatches, many.scenario.training.num_microbatches
    span = counts[1] - counts[0]
    assert few.time_ms is not None
    assert many.time_ms is not None
    measured = (many.time_ms - few.time_ms) / span
    full, half = (
        (_time_ms(many.scenario, clock) - _time_ms(few.scenario, clock)) / span for clock in (1.0, 0.5)
    )
    layout = f"{few.label}, {counts[0]} to {counts[1]} microbatches"
    return ClockFit(
        source, few.scenario.hardware.name, layout, measured, full, round(_ratio(measured, full, half), 3)
    )


def _fit_levels(layouts: Mapping[tuple[str, str], Sequence[MeasuredRow]]) -> list[ClockFit]:
    """One fit for each source and machine with at least four rows."""
    machines: dict[tuple[str, str], list[tuple[float, float, float]]] = defaultdict(list)
    for (source, _), rows in layouts.items():
        for row in rows:
            assert row.time_ms is not None
            full, half = _time_ms(row.scenario, 1.0), _time_ms(row.scenario, 0.5)
            ratio = _ratio(row.time_ms, full, half)
            machines[source, row.scenario.hardware.name].append((row.time_ms, full, ratio))
    return [
        ClockFit(
            source,
            hardware,
            f"{len(found)} rows on one node",
            mean(measured for measured, _, _ in found),
            mean(predicted for _, predicted, _ in found),
            round(quantiles([ratio for _, _, ratio in found], n=4, method="inclusive")[2], 3),
        )
        for (source, hardware), found in machines.items()
        if len(found) >= _LEAST_ROWS
    ]


@dataclass(frozen=True)
class HostFit:
    """The host time of an operation that the launch-bound rows of a source ask for."""

    source: str
    hardware: str
    rows: int
    median_error_pct_without: float
    operation_us: float


def fit_host_operation(files: Sequence[Path]) -> list[HostFit]:
    """One fit for each source and machine with launch-bound rows."""
    fits = []
    for path in files:
        rows, source = read_rows(path)
        file = RowFile(path, source)
        machines: dict[tuple[str, str], list[MeasuredRow]] = defaultdict(list)
        for index, row in enumerate(rows):
            try:
                measured = express(row, index, file)
            except RowSkippedError:
                continue
            scenario = measured.scenario
            small = scenario.model.hidden_size <= _SMALL_HIDDEN and scenario.model.layers <= _SMALL_LAYERS
            if (
                measured.time_ms
                and measured.smaller is None
                and small
                and scenario.parallel.world_size <= _NODE
            ):
                machines[source_name(row, file), scenario.hardware.name].append(measured)
        for (name, hardware), found in machines.items():
            if len(found) < _LEAST_ROWS:
                continue
            low, high = 0.0, 200.0
            for _ in range(_BISECTIONS):
                middle = (low + high) / 2
                low, high = (middle, high) if _median_error(found, middle) < 0 else (low, middle)
            fits.append(
                HostFit(name, hardware, len(found), _median_error(found, 0.0), round((low + high) / 2, 1))
            )
    return fits


def _median_error(rows: Sequence[MeasuredRow], operation_us: float) -> float:
    errors = []
    for row in rows:
        assert row.time_ms is not None
        hardware = row.scenario.hardware
        changed = replace(hardware, host=replace(hardware.host, operation_us=operation_us))
        report = simulate(replace(row.scenario, hardware=changed)).report
        errors.append(100 * (report["iteration_time_ms"] / row.time_ms - 1))
    return float(median(errors))


def _ratio(measured: float, full: float, half: float) -> float:
    """The clock that explains a time, from the times at full and at half the clock."""
    # Half the clock adds once more what runs at the clock.
    clocked = half - full
    return clocked / (measured - (full - clocked))


def _time_ms(scenario: Scenario, ratio: float) -> float:
    hardware = replace(scenario.hardware, training_clock_ratio=ratio)
    return float(simulate(replace(scenario, hardware=hardware)).report["iteration_time_ms"])


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--figure",
    type=click.Choice(["training_clock_ratio", "operation_us", "contention"]),
    default="training_clock_ratio",
    show_default=True,
)
@click.option("--json", "as_json", is_flag=True)
def main(paths: tuple[Path, ...], figure: str, as_json: bool) -> None:
    """Refit a figure of the hardware profiles on the measured rows in PATHS."""
    if figure == "contention":
        _print_contention(paths, as_json)
        return
    try:
        files = find_files(paths)
    except InputError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    clock = fit_training_clock(files) if figure == "training_clock_ratio" else []
    host = fit_host_operation(files) if figure == "operation_us" else []
    if as_json:
        click.echo(json.dumps([vars(fit) for fit in (*clock, *host)], indent=2))
        return
    for fit in clock:
        residual = 100 * (fit.at_full_clock_ms / fit.measured_ms - 1)
        click.echo(
            f"{fit.source}, {fit.hardware}: {fit.layout}: {fit.measured_ms:.2f} ms measured, "
            f"{fit.at_full_clock_ms:.2f} at full clock ({residual:+.1f} %), training_clock_ratio {fit.ratio}"
        )
    for found in host:
        click.echo(
            f"{found.source}, {found.hardware}: {found.rows} launch-bound rows, median error without the host "
            f"{found.median_error_pct_without:+.1f} %, operation_us {found.operation_us}"
        )


def _print_contention(paths: Sequence[Path], as_json: bool) -> None:
    (data, *others) = paths
    missing = [name for name in ("traces", "measured") if not (data / name).is_dir()]
    if others or missing:
        click.echo(
            f"error: --figure contention reads one folder with traces and measured, not {', '.join(map(str, paths))}",
            err=True,
        )
        sys.exit(2)
    pairs = kernel_pairs(data)
    fits = (fit_second_wave(pairs), fit_send_sms(pairs), fit_exchange_rate(data))
    groups, steps = residuals(pairs), step_pairs(data)
    if as_json:
        document = {"fits": fits, "kernels": groups, "steps": steps}
        click.echo(json.dumps({key: [vars(row) for row in rows] for key, rows in document.items()}, indent=2))
        return
    click.echo("parameter: fitted (installed), on what, error without and with it")
    for fit in fits:
        click.echo(
            f"  {fit.parameter}: {fit.value:g} ({fit.installed:g}), {fit.fitted_on}, "
            f"{fit.residual_before_pct:.1f} % and {fit.residual_after_pct:.1f} %"
        )
    click.echo(
        "kernels beside communication: pairs, times as long, mean error without and with the parameters"
    )
    for group in groups:
        click.echo(
            f"  {group.trace}, {group.beside}: {group.pairs}, {group.measured_ratio:.3f}, "
            f"{group.before_pct:.1f} % and {group.after_pct:.1f} %"
        )
    click.echo("speed-up of a step by asynchronous tensor parallelism: measured, without and with contention")
    for step in steps:
        click.echo(
            f"  {step.layout}: {step.measured:.3f}, {step.without_contention:.3f} and {step.with_contention:.3f}"
        )


if __name__ == "__main__":
    main()
