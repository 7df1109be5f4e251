"""Kernels of real traces that ran both with and without a communication kernel beside them.

A kernel is compared with itself: the same name, grid and place in a period (a profiled step, or an annotated part of a
layer), once with nothing beside it and once with a communication kernel beside it for all of its time.

What predicts a pair follows from launch parameters: blocks, threads, registers and shared memory say how many blocks
fit on an SM, and whether a block of communication leaves room beside it.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from op_graphs.columns import Float64
from op_graphs.vocabulary import Communication, OpKind
from tracesim.cost.collective_plans import SENDS
from tracesim.kernel_kinds import classify_kernels

LEAST_US = 30.0
"""Shortest kernels that are compared, microseconds."""

LEAST_STALL_US = 4.0
"""The same where what counts is a time added, which short kernels show best."""

_STEADY, _OFTEN = 1.5, 5
"""A collective that waits for no other rank takes about as long every time: longest over shortest, and how often."""

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
    transfers: bool = False
    """Whether the communication kernel is a collective that only transfers and waits for nobody."""

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

    def predicted(self, send_sms: float, second_wave: float, stall_us: float = 0.0) -> float:
        """Times as long by the rules of :mod:`tracesim.sharing`, without what is shared of bandwidths."""
        stall = stall_us / self.alone_us if self.transfers else 0.0
        return self._by_waves(send_sms, second_wave) + stall

    def _by_waves(self, send_sms: float, second_wave: float) -> float:
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


def kernel_pairs(data: Path, least_us: float = LEAST_US) -> list[Pair]:
    """Every kernel of the traces below ``data`` that ran alone, ``least_us`` or longer, and beside communication."""
    pairs = []
    for pattern in TRACES:
        folders: dict[str, list[Path]] = defaultdict(list)
        for path in sorted((data / "traces").glob(pattern)):
            folders[path.parent.name if "*" in pattern else path.name.split(".")[0]].append(path)
        for name, paths in folders.items():
            pairs += _pairs_of(pattern.split("/")[0] if name == "train" else name, paths, least_us)
    return pairs


def _pairs_of(trace: str, paths: Sequence[Path], least_us: float) -> list[Pair]:
    """Pairs of the files of one run, their kernels pooled."""
    alone: dict[_Place, list[float]] = defaultdict(list)
    beside: dict[_Place, dict[Launch, list[float]]] = defaultdict(lambda: defaultdict(list))
    found: dict[_Place, tuple[Device, _Kernel]] = {}
    collectives: dict[Launch, list[float]] = defaultdict(list)
    for path in paths:
        device, kernels = read_kernels(path)
        for kernel in kernels:
            if kernel.kind is OpKind.COLLECTIVE:
                collectives[kernel.launch].append(kernel.lasts)
        for key, kernel, company in _in_company(kernels):
            found.setdefault(key, (device, kernel))
            if company is None:
                alone[key].append(kernel.lasts)
            else:
                beside[key][company].append(kernel.lasts)
    steady = {
        launch
        for launch, lasts in collectives.items()
        if len(lasts) >= _OFTEN and max(lasts) <= _STEADY * min(lasts) and "AllReduce" in launch.name
    }
    return [
        Pair(trace, *found[key][:1], found[key][1].launch, company, found[key][1].kind,
             median(alone[key]), median(lengths), company in steady)
        for key, companies in beside.items()
        if key in alone and median(alone[key]) >= least_us
        for company, lengths in companies.items()
    ]  # fmt: skip


def read_kernels(path: Path) -> tuple[Device, list[_Kernel]]:
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
