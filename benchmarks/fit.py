"""Refit the figures of hardware profiles that are fitted, and print residuals before and after.

``python -m benchmarks.fit PATH... [--figure NAME] [--machines FOLDER] [--json]``. A PATH is a file of measured rows or
a folder of such files, as for ``benchmarks.accuracy``. What is fitted on what, and why, is said by the files of
``benchmarks/fits``: :mod:`~benchmarks.fits.clock`, :mod:`~benchmarks.fits.host`, :mod:`~benchmarks.fits.attention`,
:mod:`~benchmarks.fits.rates` and :mod:`~benchmarks.fits.jitter` on whole steps, :mod:`~benchmarks.fits.kernels` on the
measured shapes of machine files, :mod:`~benchmarks.fits.scan` on published timings of kernels,
:mod:`~benchmarks.fits.weight_passes` on published times of passes that are products alone.

``--figure contention``: what kernels and steps lose beside communication (:mod:`benchmarks.fit_contention`,
:mod:`benchmarks.step_pairs`); PATH is the folder that holds ``traces`` and ``measured``.

Every figure stands with the value in the installed profile; the exit code is 1 where one fits worse than what was found
(:data:`~benchmarks.fits.result.TOLERANCE_POINTS`).
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.accuracy import InputError, find_files, read_rows
from benchmarks.fit_contention import (
    fit_exchange_rate,
    fit_second_wave,
    fit_send_sms,
    fit_stall,
    residuals,
)
from benchmarks.fits import attention, clock, host, jitter, kernels, rates, scan, weight_passes
from benchmarks.fits.result import Fit
from benchmarks.kernel_pairs import LEAST_STALL_US, kernel_pairs
from benchmarks.step_pairs import chunk_pairs, setting_pairs, step_pairs

CONTENTION = "contention"
"""Not a figure of one profile: what kernels and steps lose beside communication."""
FIGURES = (
    clock.FIGURE,
    host.OPERATION,
    host.RESUME,
    *attention.FIGURES,
    jitter.FIGURE,
    *rates.FIGURES,
    *kernels.FIGURES,
    *scan.FIGURES,
    weight_passes.FIGURE,
    CONTENTION,
)
"""What ``--figure`` takes."""


def run_fits(paths: list[Path], machines: list[Path], figure: str) -> list[Fit]:
    """The fits of all figures, or of one, whose rows or machine files are there."""
    fits: list[Fit] = []
    if figure in ("", clock.FIGURE):
        fits += clock.fit(paths)
    if figure in ("", host.OPERATION, host.RESUME):
        fits += [found for found in host.fit(paths, figure) if figure in ("", found.figure)]
    if figure in ("", *attention.FIGURES):
        fits += attention.fit(paths, figure)
    if figure in ("", jitter.FIGURE):
        fits += jitter.fit(paths)
    if figure in ("", *rates.FIGURES):
        fits += rates.fit(paths, figure)
    if figure in ("", *kernels.FIGURES):
        fits += [found for found in kernels.fit(machines) if figure in ("", found.figure)]
    if figure in ("", *scan.FIGURES):
        fits += scan.fit(figure)
    if figure in ("", weight_passes.FIGURE):
        fits += weight_passes.fit()
    return fits


def machine_folders(paths: list[Path], given: tuple[Path, ...]) -> list[Path]:
    """Folders with machine files: those given, else ``../simumax_system`` beside each file of rows."""
    return list(given) or sorted({path.parent.parent / "simumax_system" for path in paths})


def _files_with_rows(paths: Sequence[Path]) -> list[Path]:
    """The files of the paths; those of a folder that hold no rows are named and left out.

    Raises:
        InputError: if a path does not exist, or a file that was given by its name holds no rows, or none is left.
    """
    problems = {path: _problem(path) for path in find_files(paths)}
    for path, problem in problems.items():
        if problem and path in paths:
            raise InputError(problem)
        if problem:
            click.echo(f"benchmarks.fit: left out: {problem}", err=True)
    files = [path for path, problem in problems.items() if not problem]
    if not files:
        raise InputError(f"{', '.join(map(str, paths))}: no file holds measured rows")
    return files


def _problem(path: Path) -> str:
    """Why a file is not one of measured rows; empty if it is."""
    try:
        read_rows(path)
    except InputError as error:
        return str(error)
    return ""


def _document(fit: Fit) -> dict[str, object]:
    return {**dataclasses.asdict(fit), "installed": fit.installed, "differs": fit.differs}


def _print(fit: Fit) -> None:
    click.echo(
        f"{fit.profile}: {fit.figure} = {fit.value:g} (installed {fit.installed:g}"
        f"{', DIFFERS' if fit.differs else ''})"
    )
    click.echo(f"  on {fit.rows}; {fit.criterion}")
    click.echo(
        f"  {fit.residual}: {fit.before:+.2f} before, {fit.after:+.2f} after, {fit.at_installed:+.2f} installed"
    )
    for detail in fit.details:
        click.echo(f"    {detail}")


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--figure",
    type=click.Choice(FIGURES),
    help="Only this figure.",
)
@click.option(
    "--machines",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Folder with machine files. By default ../simumax_system beside PATH.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def main(paths: tuple[Path, ...], figure: str | None, machines: tuple[Path, ...], as_json: bool) -> None:
    """Refit figures of the hardware profiles on the measured rows in PATHS."""
    if figure == CONTENTION:
        _print_contention(paths, as_json)
        return
    try:
        files = _files_with_rows(paths)
        fits = run_fits(files, machine_folders(files, machines), figure or "")
    except InputError as error:
        click.echo(f"benchmarks.fit: {error}", err=True)
        sys.exit(2)
    if as_json:
        click.echo(json.dumps([_document(fit) for fit in fits], indent=1, allow_nan=False))
    else:
        for fit in fits:
            _print(fit)
    sys.exit(1 if any(fit.differs for fit in fits) else 0)


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
    fits = (
        fit_second_wave(pairs),
        fit_send_sms(pairs),
        fit_stall(kernel_pairs(data, LEAST_STALL_US)),
        fit_exchange_rate(data),
    )
    groups, steps, settings, chunks = residuals(pairs), step_pairs(data), setting_pairs(data), chunk_pairs()
    if as_json:
        document = {"fits": fits, "kernels": groups, "steps": steps, "settings": settings, "chunks": chunks}
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
    for what, found in (("asynchronous tensor parallelism", steps), ("another setting", settings)):
        click.echo(f"speed-up of a step by {what}: measured, without and with contention")
        for step in found:
            click.echo(
                f"  {step.layout}: {step.measured:.3f}, {step.without_contention:.3f} and {step.with_contention:.3f}"
            )
    click.echo("pair of chunks of DeepSeek-V3: measured, without and with contention")
    for chunk in chunks:
        click.echo(
            f"  {chunk.figure}: {chunk.measured:.1f}, {chunk.without_contention:.1f} and {chunk.with_contention:.1f}"
        )


if __name__ == "__main__":
    main()
