"""What kernels lose beside communication, measured in real traces, and the parameters of contention fitted on it.

``python -m benchmarks.fit --figure contention DATA`` with a folder that holds ``traces`` and ``measured``. Used by
:mod:`benchmarks.fit`.

A kernel is compared with itself: the same name, grid and place in a period (a profiled step, or an annotated part of a
layer), once with nothing beside it and once with a communication kernel beside it for all of its time. Only kernels of
:data:`LEAST_US` and more count, for most traces have whole microseconds. Three parameters are fitted, each on all
pairs of its kind together:

- ``SECOND_WAVE``: what kernels launched with just as many blocks as fit at once need again where SMs are gone;
- ``SEND_SMS``: SMs that a send or receive really takes, whatever its grid;
- the rate at which expert exchanges use a NIC in training (``measured_collectives`` of ``h800-sxm``).

Everything else that predicts a pair follows from launch parameters: blocks, threads, registers and shared memory say
how many blocks fit on an SM, and whether a block of communication leaves room beside it.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, exp, log
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from hardware_profiles import load_profile
from op_graphs.columns import Float64
from op_graphs.graph import ExchangeShape
from op_graphs.vocabulary import Communication, OpKind
from tracesim.cost.collective_plans import SENDS
from tracesim.cost.contention import SECOND_WAVE, SEND_SMS
from tracesim.kernel_kinds import classify_kernels

LEAST_US = 30.0
"""Shortest kernels that are compared, microseconds."""

_BESIDE, _ALONE = 0.95, 0.02
"""Parts of a kernel's time that communication must cover at least, or may cover at most."""

TRACES = (
    "deepseek/train.json.gz",
    "hta/nccl_parser_config/nccl_data.json.gz",
    "hta/trace_diff/control/control.json.gz",
    "hta/trace_diff/test/test.json.gz",
    "torchrec/sst_*/*.json.gz",
)

_PRODUCTS = (OpKind.GEMM, OpKind.GROUPED_GEMM, OpKind.ATTENTION, OpKind.CONVOLUTION)


@dataclass(frozen=True)
class Launch:
    """How a kernel was launched on a device."""

    name: str
    blocks: int
    threads: int
    registers: int
    """Of a thread."""
    shared: int
    """Bytes of shared memory of a block."""

    def resident(self, device: Device, taken: Launch | None = None) -> int:
        """Blocks that fit on an SM, beside a block of another kernel where one is there; 0 if none does."""
        registers, threads, shared = device.registers, device.threads, device.shared
        if taken is not None:
            registers -= taken.threads * taken.registers
            threads -= taken.threads
            shared -= taken.shared
        fits = [registers // max(1, self.threads * self.registers), threads // max(1, self.threads), 32]
        if self.shared:
            fits.append(shared // self.shared)
        return max(0, min(fits))


@dataclass(frozen=True)
class Device:
    """What the SMs of a device hold."""

    name: str
    sms: int
    registers: int = 65536
    threads: int = 2048
    shared: int = 167936


@dataclass(frozen=True)
class Pair:
    """One kernel at one place, alone and beside a communication kernel."""

    trace: str
    device: Device
    launch: Launch
    beside: Launch
    kind: OpKind
    alone_us: float
    beside_us: float

    @property
    def ratio(self) -> float:
        """Times as long beside communication."""
        return self.beside_us / self.alone_us

    @property
    def is_send(self) -> bool:
        """Whether the communication kernel sends between two ranks."""
        return Communication(int(classify_kernels([self.beside.name])[1][0])) in SENDS

    @property
    def waves(self) -> tuple[int, int]:
        """Blocks on all SMs at once, and blocks in all."""
        return self.launch.resident(self.device) * self.device.sms, self.launch.blocks

    @property
    def fits_once(self) -> bool:
        """Whether the kernel's blocks fill the device just once, but no longer beside the communication kernel."""
        at_once, blocks = self.waves
        return self.device.sms <= blocks <= at_once and blocks > self._left(self.beside.blocks)

    def predicted(self, send_sms: float, second_wave: float) -> float:
        """Times as long by the rules of :mod:`tracesim.sharing`."""
        taken = min(self.beside.blocks, send_sms) if self.is_send else self.beside.blocks
        at_once, blocks = self.waves
        left = self._left(taken)
        if at_once <= 0 or left <= 0 or left >= at_once:
            return 1.0
        if self.fits_once:
            return 1 + second_wave
        if self.kind in _PRODUCTS:
            return max(1.0, ceil(blocks / left) / ceil(blocks / at_once))
        return float(at_once / left) if blocks > left else 1.0

    def _left(self, taken: float) -> float:
        """Blocks that fit at once where ``taken`` SMs hold a block of communication."""
        beside = self.launch.resident(self.device, self.beside)
        return self.launch.resident(self.device) * (self.device.sms - taken) + beside * taken


# -- reading ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kernel:
    launch: Launch
    kind: OpKind
    start: float
    lasts: float
    stream: int
    period: tuple[str, int]
    """What is repeated, and which repetition the kernel belongs to."""

    @property
    def end(self) -> float:
        return self.start + self.lasts


def kernel_pairs(data: Path) -> list[Pair]:
    """Every kernel of the traces below ``data`` that ran both alone and beside communication."""
    pairs = []
    for pattern in TRACES:
        folders: dict[str, list[Path]] = defaultdict(list)
        for path in sorted((data / "traces").glob(pattern)):
            folders[path.parent.name if "*" in pattern else path.name.split(".")[0]].append(path)
        for name, paths in folders.items():
            pairs += _pairs_of(pattern.split("/")[0] if name == "train" else name, paths)
    return pairs


def _pairs_of(trace: str, paths: Sequence[Path]) -> list[Pair]:
    """Pairs of the files of one run, their kernels pooled."""
    alone: dict[_Place, list[float]] = defaultdict(list)
    beside: dict[_Place, dict[Launch, list[float]]] = defaultdict(lambda: defaultdict(list))
    found: dict[_Place, tuple[Device, _Kernel]] = {}
    for path in paths:
        device, kernels = _read_kernels(path)
        for key, kernel, company in _in_company(kernels):
            found.setdefault(key, (device, kernel))
            if company is None:
                alone[key].append(kernel.lasts)
            else:
                beside[key][company].append(kernel.lasts)
    return [
        Pair(trace, *found[key][:1], found[key][1].launch, company, found[key][1].kind,
             median(alone[key]), median(lengths))
        for key, companies in beside.items()
        if key in alone and median(alone[key]) >= LEAST_US
        for company, lengths in companies.items()
    ]  # fmt: skip


def _read_kernels(path: Path) -> tuple[Device, list[_Kernel]]:
    document = json.loads(gzip.decompress(path.read_bytes()))
    events = document["traceEvents"]
    properties = (document.get("deviceProperties") or [{}])[0]
    device = Device(
        str(properties.get("name", "")),
        int(properties.get("numSms", 0)),
        shared=int(properties.get("sharedMemPerMultiprocessor", Device.shared)),
    )
    launched = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in ("cuda_runtime", "Runtime") and "correlation" in event.get("args", {})
    }
    rows = [event for event in events if event.get("cat") in ("kernel", "Kernel") and event.get("dur", 0) > 0]
    rows.sort(key=lambda event: float(event["ts"]))
    launches = [launched.get(row["args"].get("correlation")) for row in rows]
    periods = _periods(events, launches, [int(row["args"]["stream"]) for row in rows])
    kinds, _ = classify_kernels([row["name"] for row in rows])
    return device, [
        _Kernel(
            _launch(row), OpKind(int(kind)), float(row["ts"]), float(row["dur"]), int(row["args"]["stream"]), period
        )
        for row, kind, period in zip(rows, kinds, periods, strict=True)
    ]  # fmt: skip


def _launch(event: Mapping[str, Any]) -> Launch:
    arguments = event["args"]
    return Launch(
        event["name"],
        int(np.prod(arguments["grid"])),
        int(np.prod(arguments["block"])),
        int(arguments["registers per thread"]),
        int(arguments["shared memory"]),
    )


def _periods(
    events: Iterable[Mapping[str, Any]],
    launches: Sequence[Mapping[str, Any] | None],
    streams: Sequence[int],
) -> list[tuple[str, int]]:
    """The repetition that each kernel belongs to: its profiled step, or with one step the annotation around it."""
    notes = [event for event in events if event.get("cat") == "user_annotation" and event.get("dur")]
    steps = sorted(
        (event for event in notes if event["name"].startswith("ProfilerStep")), key=lambda event: float(event["ts"])
    )  # fmt: skip
    if len({event["name"] for event in steps}) > 1:
        begins = np.array([float(event["ts"]) for event in steps])
        times = [float(launch["ts"]) if launch else -1.0 for launch in launches]
        return [("step", int(number)) for number in np.searchsorted(begins, times, side="right")]
    parts = [event for event in notes if not event["name"].startswith("ProfilerStep")]
    numbers: Counter[tuple[int, str]] = Counter()
    found, running = [], dict[int, str]()
    for launch, stream in zip(launches, streams, strict=True):
        name = _innermost(parts, launch)
        if running.get(stream) != name:
            numbers[stream, name] += 1
            running[stream] = name
        found.append((name, numbers[stream, name]))
    return found


def _innermost(parts: Iterable[Mapping[str, Any]], launch: Mapping[str, Any] | None) -> str:
    if launch is None:
        return ""
    around = [
        part
        for part in parts
        if part["tid"] == launch["tid"] and part["ts"] <= launch["ts"] < part["ts"] + part["dur"]
    ]
    return str(min(around, key=lambda part: float(part["dur"]))["name"]) if around else ""


def _in_company(kernels: Sequence[_Kernel]) -> Iterable[tuple[_Place, _Kernel, Launch | None]]:
    """Compute kernels with their place, and the communication kernel beside all of each; None where there is none."""
    communication = [kernel for kernel in kernels if kernel.kind in (OpKind.COLLECTIVE, OpKind.P2P)]
    by_launch: dict[Launch, list[_Kernel]] = defaultdict(list)
    for kernel in communication:
        by_launch[kernel.launch].append(kernel)
    compute = [kernel for kernel in kernels if kernel.kind not in (OpKind.COLLECTIVE, OpKind.P2P)]
    streams = {kernel.stream for kernel in compute}
    others = {stream: [kernel for kernel in compute if kernel.stream != stream] for stream in streams}
    crowded = {stream: _coverage(others[stream], compute) for stream in streams}
    shares = {launch: _coverage(group, compute) for launch, group in by_launch.items()}
    total = sum(shares.values(), np.zeros(len(compute)))
    places = _places(compute)
    for row, kernel in enumerate(compute):
        place = places[row]
        if place is None or crowded[kernel.stream][row] > _ALONE:
            continue
        if total[row] <= _ALONE:
            yield place, kernel, None
            continue
        company = max(shares, key=lambda launch: float(shares[launch][row]))
        if shares[company][row] >= _BESIDE and total[row] - shares[company][row] <= _ALONE:
            yield place, kernel, company


_Context = tuple[Launch | None, Launch, Launch | None]
_Place = tuple[_Context, str, int]


def _places(kernels: Sequence[_Kernel]) -> list[_Place | None]:
    """What tells a kernel from others of its name: its neighbours on the stream, the period, and its number among such.

    None where repetitions of the period have different numbers of them.
    """
    by_stream: dict[int, list[int]] = defaultdict(list)
    for row, kernel in enumerate(kernels):
        by_stream[kernel.stream].append(row)
    around: dict[int, _Context] = {}
    for rows in by_stream.values():
        launches = [kernels[row].launch for row in rows]
        before, after = [None, *launches[:-1]], [*launches[1:], None]
        around.update(zip(rows, zip(before, launches, after, strict=True), strict=True))
    counts: Counter[tuple[_Context, tuple[str, int]]] = Counter()
    ordinals = []
    for row, kernel in enumerate(kernels):
        counts[around[row], kernel.period] += 1
        ordinals.append(counts[around[row], kernel.period])
    of_period: dict[tuple[_Context, str], list[int]] = defaultdict(list)
    for (context, (name, _)), count in counts.items():
        of_period[context, name].append(count)
    places: list[_Place | None] = []
    for row, (kernel, ordinal) in enumerate(zip(kernels, ordinals, strict=True)):
        context, name = around[row], kernel.period[0]
        same = counts[context, kernel.period] == round(median(of_period[context, name]))
        places.append((context, name, ordinal) if same else None)
    return places


def _coverage(group: Sequence[_Kernel], kernels: Sequence[_Kernel]) -> Float64:
    """Part of each kernel's time in which one of a group runs; kernels of a group may overlap."""
    if not group:
        return np.zeros(len(kernels))
    bounds = sorted({time for kernel in group for time in (kernel.start, kernel.end)})
    change: Counter[float] = Counter()
    for kernel in group:
        change[kernel.start] += 1
        change[kernel.end] -= 1
    running = np.cumsum([change[bound] for bound in bounds])[:-1] > 0
    covered = np.concatenate([[0.0], np.cumsum(np.diff(bounds) * running)])
    start = np.array([kernel.start for kernel in kernels])
    end = np.array([kernel.end for kernel in kernels])
    parts: Float64 = (np.interp(end, bounds, covered) - np.interp(start, bounds, covered)) / (end - start)
    return parts


# -- fitting ---------------------------------------------------------------------------------------------------


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


def fit_exchange_rate(data: Path) -> ContentionFit:
    """The share of a NIC that dispatch and combine of DeepSeek-V3's trace use, of 4,096 tokens over 64 ranks.

    The dispatch whose sizes the host waits for is left out: other ranks start it at other times.
    """
    profile = load_profile("h800-sxm")
    nic = profile.network.fabric.bandwidth_gb_per_s
    _, kernels = _read_kernels(data / "traces" / TRACES[0])
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
            _error_pct(group, SEND_SMS, SECOND_WAVE),
        )
        for (trace, beside), group in sorted(groups.items())
    ]


def _short(name: str) -> str:
    """A kernel's name without namespaces and arguments."""
    plain = name.removeprefix("void ").split("(")[0].split("<")[0].split("::")[-1]
    return plain.removeprefix("nccl").removeprefix("Dev").removeprefix("Kernel_").split("_RING")[0]


def _error_pct(pairs: Sequence[Pair], send_sms: float, second_wave: float) -> float:
    return 100 * _mean([abs(pair.predicted(send_sms, second_wave) / pair.ratio - 1) for pair in pairs])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
