"""Figures of the host: ``host.operation_us`` and ``host.resume_us``.

``host.operation_us``, what launching one lowered operation takes. On A100 only small models count (hidden size up to
1,024, one node), whose steps are mostly bound by launches; on H100 mixtures of Megatron-Bridge's tables that run
without CUDA graphs, whose modules are Transformer Engine's. On A100 the value at which the median error of the rows is
zero; the mixtures lie on both sides of any value, so for them the one with the least mean error.

``host.resume_us``, what lies between a transfer that the host waits for and the pass behind it: arXiv:2401.10241 has,
for four models, the profiled times of a forward, of a backward for input and for weights, and of a transfer (table 6),
and how long whole 1F1B iterations took (table 4). An iteration of ``m`` microbatches over ``p`` stages has
``m + p - 1`` slots on its critical path, each a forward, a backward, and a transfer before either; what it takes longer
is divided among its passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, median

from benchmarks.rows import MeasuredRow

from .result import Fit, expressed, installed_value, time_ms

OPERATION, RESUME = "host.operation_us", "host.resume_us"
PROFILE = "a100-sxm-80g"
_SMALL_HIDDEN, _SMALL_LAYERS, _NODE = 1024, 24, 8
_VALUES_US = (0.0, 80.0, 120.0)
"""Where rows are simulated; the time of each is taken as linear in between."""
EAGER_PROFILE = "h100-sxm"
_EAGER_VALUES_US = (0.0, 110.0, 130.0, 150.0, 170.0, 190.0)
_REFINED_US = 4.0

PASSES_MS: dict[int, tuple[float, float, float, float]] = {
    2304: (18.513, 18.086, 9.331, 0.626),
    4096: (29.935, 29.621, 19.388, 0.535),
    5120: (11.307, 11.254, 8.101, 0.379),
    6144: (10.408, 10.204, 7.703, 0.408),
}
"""By width of the model: forward, backward for input, backward for weights, transfer (table 6)."""


def fit(files: Sequence[Path], figure: str = "") -> list[Fit]:
    """The fits whose rows are there; of one figure, or of both."""
    small, blocking, eager = [], [], []
    for source, row in expressed(files):
        model, parallel = row.scenario.model, row.scenario.parallel
        if source == "vtrain-ground-truth" and (
            model.hidden_size <= _SMALL_HIDDEN
            and model.layers <= _SMALL_LAYERS
            and parallel.world_size <= _NODE
        ):
            small.append(row)
        if (
            source == "megatron-bridge"
            and row.scenario.hardware.name == EAGER_PROFILE
            and model.moe is not None
            and not row.scenario.training.cuda_graphs
        ):
            eager.append(row)
        if source == "zero-bubble" and row.scenario.schedule == "1f1b":
            blocking.append(row)
    found = []
    if small and figure in ("", OPERATION):
        what = f"one-node rows of vtrain-ground-truth, hidden size up to {_SMALL_HIDDEN}, up to {_SMALL_LAYERS} layers"
        found.append(_operation(small, PROFILE, what, _VALUES_US))
    if eager and figure in ("", OPERATION):
        what = "rows of mixtures in Megatron-Bridge's tables without CUDA graphs"
        found.append(_operation(eager, EAGER_PROFILE, what, _EAGER_VALUES_US))
    if blocking and figure in ("", RESUME):
        found.append(_resume(blocking))
    return found


def _operation(rows: Sequence[MeasuredRow], profile: str, what: str, values: Sequence[float]) -> Fit:
    errors = {value: _errors(rows, value) for value in values}
    if profile == EAGER_PROFILE:
        rule = "smallest mean |error| in steps of 20 us"
        value = min(values, key=lambda at: (mean(map(abs, errors[at])), at))
    else:
        rule = "the median error is zero"
        value = zero_of_median(errors)
        # Once more around the first answer, where rows may bend.
        for near in (value - _REFINED_US, value + _REFINED_US):
            errors[near] = _errors(rows, near)
        value = round(zero_of_median({at: errors[at] for at in sorted(errors)}), 1)
        errors[value] = _errors(rows, value)
    at_value = errors[value]
    return Fit(
        OPERATION,
        profile,
        f"{len(rows)} {what}",
        rule,
        value,
        "mean |error| of the iteration time, %",
        mean(abs(error) for error in errors[0.0]),
        mean(abs(error) for error in at_value),
        mean(abs(error) for error in _errors(rows, installed_value(profile, OPERATION))),
        (f"median error {median(errors[0.0]):+.1f} % before, {median(at_value):+.2f} % after",),
    )


def _errors(rows: Sequence[MeasuredRow], operation_us: float) -> list[float]:
    errors = []
    for row in rows:
        assert row.time_ms is not None
        hardware = row.scenario.hardware
        changed = replace(hardware, host=replace(hardware.host, operation_us=operation_us))
        predicted = time_ms(replace(row.scenario, hardware=changed), composed=row.composed)
        errors.append(100 * (predicted / row.time_ms - 1))
    return errors


def zero_of_median(errors: dict[float, list[float]]) -> float:
    """Where the median of the rows' errors, interpolated between the values they are known at, is zero."""
    at = sorted(errors)
    low, high = at[0], at[-1]
    for _ in range(40):
        middle = (low + high) / 2
        right = next(index for index in range(1, len(at)) if at[index] >= middle)
        share = (middle - at[right - 1]) / (at[right] - at[right - 1])
        between = (
            (1 - share) * left + share * other
            for left, other in zip(errors[at[right - 1]], errors[at[right]], strict=True)
        )
        low, high = (middle, high) if median(between) < 0 else (low, middle)
    return (low + high) / 2


def _resume(rows: Sequence[MeasuredRow]) -> Fit:
    asked, without = [], []
    for row in rows:
        assert row.time_ms is not None
        forward, backward, weights, transfer = PASSES_MS[row.scenario.model.hidden_size]
        slots = row.scenario.training.num_microbatches + row.scenario.parallel.pp - 1
        passes = slots * (forward + backward + weights + 2 * transfer)
        asked.append((row.time_ms - passes) / (2 * slots) * 1e3)
        without.append((passes, slots, row.time_ms))
    value = float(round(median(asked)))

    def residual(resume_us: float) -> float:
        return mean(
            100 * ((passes + 2 * slots * resume_us / 1e3) / measured - 1)
            for passes, slots, measured in without
        )

    return Fit(
        RESUME,
        PROFILE,
        f"{len(rows)} rows of zero-bubble with 1F1B (arXiv:2401.10241, table 4) and the profiled passes of its table 6",
        "median of what the rows ask for",
        value,
        "mean error of the sum of passes and transfers, %",
        residual(0.0),
        residual(value),
        residual(installed_value(PROFILE, RESUME)),
        tuple(f"{row.label}: asks for {us:.0f} us" for row, us in zip(rows, asked, strict=True)),
    )
