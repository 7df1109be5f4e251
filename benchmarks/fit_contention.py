"""What kernels lose beside communication, and the parameters of contention fitted on it.

``python -m benchmarks.fit --figure contention DATA`` with a folder that holds ``traces`` and ``measured``. Used by
:mod:`benchmarks.fit`. Four parameters are fitted, each on all pairs of its kind together
(:mod:`benchmarks.kernel_pairs`):

- ``SECOND_WAVE``: what kernels launched with just as many blocks as fit at once need again where SMs are gone;
- ``SEND_SMS``: SMs that a send or receive really takes, whatever its grid;
- ``network.collective_stall_us`` of the A100: what every kernel loses beside a collective that fills its links;
- the rate at which expert exchanges use a NIC in training (``measured_collectives`` of ``h800-sxm``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log
from pathlib import Path
from statistics import median

from benchmarks.kernel_pairs import TRACES, Pair, read_kernels
from hardware_profiles import load_profile
from op_graphs.graph import ExchangeShape
from op_graphs.vocabulary import OpKind
from tracesim.cost.contention import SECOND_WAVE, SEND_SMS


@dataclass(frozen=True)
class ContentionFit:
    """A parameter fitted on pairs."""

    parameter: str
    value: float
    installed: float
    """What the code or the profile holds."""
    fitted_on: str
    residual_before_pct: float
    """Error of the predicted times without it (by grids and whole waves, or the published rate), in per cent."""
    residual_after_pct: float
    """The same with the fitted value."""


@dataclass(frozen=True)
class Residual:
    """How well the rules predict the pairs of a trace beside one kind of communication."""

    trace: str
    beside: str
    pairs: int
    measured_ratio: float
    """Geometric mean over the pairs."""
    before_pct: float
    after_pct: float


def fit_second_wave(pairs: Sequence[Pair]) -> ContentionFit:
    """The further wave of norms, whose launches fit the device just once."""
    chosen = [pair for pair in pairs if pair.kind is OpKind.NORM and pair.fits_once and not pair.is_send]
    value = exp(_mean([log(pair.ratio) for pair in chosen])) - 1
    return ContentionFit(
        "SECOND_WAVE",
        round(value, 2),
        SECOND_WAVE,
        f"{len(chosen)} norms whose blocks fit just once, beside collectives",
        _error_pct(chosen, send_sms=0, second_wave=1.0),
        _error_pct(chosen, send_sms=0, second_wave=value),
    )


def fit_send_sms(pairs: Sequence[Pair]) -> ContentionFit:
    """The SMs of a send with which all kernels beside one together take as long as measured.

    The total and not the mean error decides: a send holds its SMs for a part of its time only, so that some kernels get
    another wave and others lose nothing, and no number of SMs is right for each of them.
    """
    chosen = [pair for pair in pairs if pair.is_send]
    most = max(pair.beside.blocks for pair in chosen)

    def error(sms: float) -> float:
        predicted = sum(pair.alone_us * pair.predicted(sms, SECOND_WAVE) for pair in chosen)
        return 100 * abs(predicted / sum(pair.beside_us for pair in chosen) - 1)

    value = min(range(most + 1), key=lambda sms: (error(sms), sms))
    return ContentionFit(
        "SEND_SMS",
        value,
        SEND_SMS,
        f"total time of {len(chosen)} kernels beside sends of {min(p.beside.blocks for p in chosen)} to {most} blocks",
        error(most),
        error(value),
    )


def fit_stall(pairs: Sequence[Pair]) -> ContentionFit:
    """What each kernel takes longer beside a collective that only transfers, beyond what waves of blocks explain.

    ``pairs`` with short kernels among them: they lose as many microseconds as long ones.
    """
    chosen = [pair for pair in pairs if pair.transfers and "A100" in pair.device.name]
    excess = [pair.beside_us - pair.alone_us * pair.predicted(SEND_SMS, SECOND_WAVE) for pair in chosen]
    value = round(median(excess), 0)
    return ContentionFit(
        "network.collective_stall_us of a100-sxm-80g",
        value,
        load_profile("a100-sxm-80g").network.collective_stall_us,
        f"{len(chosen)} kernels of {min(pair.alone_us for pair in chosen):.0f} us and more beside all-reduces",
        _error_pct(chosen, SEND_SMS, SECOND_WAVE),
        _error_pct(chosen, SEND_SMS, SECOND_WAVE, value),
    )


def fit_exchange_rate(data: Path) -> ContentionFit:
    """The share of a NIC that dispatch and combine of DeepSeek-V3's trace use, of 4,096 tokens over 64 ranks.

    The dispatch whose sizes the host waits for is left out: other ranks start it at other times.
    """
    profile = load_profile("h800-sxm")
    nic = profile.network.fabric.bandwidth_gb_per_s
    _, kernels = read_kernels(data / "traces" / TRACES[0])
    elements = 4096 * 7168.0
    sizes = {"combine": 2.0 * elements, "dispatch": (1 + 4 / 128) * elements}
    times, alone = [], []
    for kernel in kernels:
        what = next((name for name in sizes if f"::{name}<" in kernel.launch.name), None)
        if what is None or (what == "dispatch" and ", true, " not in kernel.launch.name):
            continue
        shape = ExchangeShape(sizes[what], top_k=8, groups=8, top_groups=4)
        sent = 7 * shape.chance(8) * sizes[what]
        times.append(kernel.lasts * 1e3)
        alone.append(sent / nic)
    value = exp(_mean([log(ideal / time) for ideal, time in zip(alone, times, strict=True)]))
    (installed,) = (row.efficiency for row in profile.measured_collectives if row.tier == "fabric")
    published = profile.network.fabric.efficiency

    def error(share: float) -> float:
        return 100 * _mean([abs(ideal / share / time - 1) for ideal, time in zip(alone, times, strict=True)])

    return ContentionFit(
        "measured_collectives all_to_all of h800-sxm",
        round(value, 2),
        installed,
        f"{len(times)} dispatch and combine kernels in training",
        error(published),
        error(value),
    )


def residuals(pairs: Sequence[Pair]) -> list[Residual]:
    """Residuals of all pairs by trace and kind of communication, longest kernels and short ones alike."""
    groups: dict[tuple[str, str], list[Pair]] = defaultdict(list)
    for pair in pairs:
        groups[pair.trace, f"{_short(pair.beside.name)} of {pair.beside.blocks} blocks"].append(pair)
    most = max((pair.beside.blocks for pair in pairs), default=0)
    return [
        Residual(
            trace,
            beside,
            len(group),
            exp(_mean([log(pair.ratio) for pair in group])),
            _error_pct(group, most, 1.0),
            _error_pct(group, SEND_SMS, SECOND_WAVE, _installed_stall(group[0])),
        )
        for (trace, beside), group in sorted(groups.items())
    ]


def _short(name: str) -> str:
    """A kernel's name without namespaces and arguments."""
    plain = name.removeprefix("void ").split("(")[0].split("<")[0].split("::")[-1]
    return plain.removeprefix("nccl").removeprefix("Dev").removeprefix("Kernel_").split("_RING")[0]


def _installed_stall(pair: Pair) -> float:
    return load_profile("a100-sxm-80g").network.collective_stall_us if "A100" in pair.device.name else 0.0


def _error_pct(pairs: Sequence[Pair], send_sms: float, second_wave: float, stall_us: float = 0.0) -> float:
    return 100 * _mean(
        [abs(pair.predicted(send_sms, second_wave, stall_us) / pair.ratio - 1) for pair in pairs]
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
