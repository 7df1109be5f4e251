"""Reader of torch.profiler (Kineto) traces: JSON or gzipped JSON, one file a rank.

Kernels, copies and fills go to one DEVICE track a (device, stream); operators, Python functions and runtime calls to
HOST tracks; annotations to ANNOTATION tracks. ``ProfilerStep#N`` becomes a step, a common correlation a LAUNCH flow,
``[memory]`` events counters. The first forms of the format (``Kernel``, ``Operator``, ``Runtime``) are read too.
Left out: metadata but for thread names, forward-backward flows, begin/end pairs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from op_graphs.columns import Bool, Int8, Int32, Int64, StringTable
from op_graphs.timeline import (
    SLICE_DEFAULTS,
    CommunicationGroup,
    Flows,
    Quirk,
    Ranks,
    Slices,
    Steps,
    Timeline,
    Tracks,
)
from op_graphs.vocabulary import FlowKind, OpKind, TrackRole
from tracesim.kernel_kinds import is_expert_parallel, kind_of_communication
from tracesim.readers import kineto_arguments as arguments
from tracesim.readers import launches, own_chrome
from tracesim.readers.kineto_json import KinetoDocument, decode, integer, looks_like_kineto
from tracesim.readers.memory_events import memory_counters
from tracesim.readers.sources import Source

KERNEL, COPY, FILL, OPERATOR, RUNTIME, PYTHON, ANNOTATION, DEVICE_ANNOTATION, OTHER_HOST, SKIPPED = range(10)

_CATEGORIES: dict[str, int] = {
    "kernel": KERNEL,
    "mtia_ccp_events": KERNEL,
    "gpu_memcpy": COPY,
    "memcpy": COPY,
    "gpu_memset": FILL,
    "memset": FILL,
    "cpu_op": OPERATOR,
    "operator": OPERATOR,
    "runtime": RUNTIME,
    "cuda_runtime": RUNTIME,
    "cuda_driver": RUNTIME,
    "hip_runtime": RUNTIME,
    "mtia_runtime": RUNTIME,
    "privateuse1_runtime": RUNTIME,
    "privateuse1_driver": RUNTIME,
    "xpu_runtime": RUNTIME,
    "python_function": PYTHON,
    "user_annotation": ANNOTATION,
    "gpu_user_annotation": DEVICE_ANNOTATION,
    "overhead": OTHER_HOST,
    "cuda_profiler_range": DEVICE_ANNOTATION,
    "trace": SKIPPED,
}
_STEP = re.compile(r"ProfilerStep#?\s*(\d+)")


def recognise(source: Source) -> bool:
    """Whether a file is JSON in the shape of a profiler trace."""
    return looks_like_kineto(source.data)


def read(source: Source) -> Timeline:
    """The timeline of one Kineto file: one rank, number -1 where the file does not say.

    Raises:
        TraceError: if the file is damaged or no trace; the message says what to do.
    """
    document = decode(source.path, source.data)
    if own_chrome.is_own(document):
        return own_chrome.build(document)
    rows = _Rows.build(document)
    return _Builder(document, rows).timeline()


@dataclass(frozen=True)
class _Rows:
    """The kept slices of a file, sorted by track, start and falling duration."""

    event: Int64
    """Row in the document's columns."""
    category: Int8
    track: Int64
    start: Int64
    end: Int64
    name: Int64
    thread: Int32
    """Host thread number, common to the operators, annotations and launches of one thread."""
    device: Int64
    """Rows that are kernels, copies or fills."""
    device_arguments: list[arguments.DeviceArguments]
    correlation: Int64
    track_keys: npt.NDArray[np.int64]
    """Shape [tracks, 3]: group (0 device, 1 device annotation, 2 annotation, 3 host), device or pid, stream or tid."""

    @classmethod
    def build(cls, document: KinetoDocument) -> _Rows:
        columns = document.complete
        category = _categories(document)
        kept = np.nonzero(category != SKIPPED)[0]
        category = category[kept]
        numbers = np.array([integer(s, -2 - i) for i, s in enumerate(columns.strings)], dtype=np.int64)
        first, second = numbers[columns.process[kept]], numbers[columns.thread[kept]]
        process, thread_id = first.copy(), second.copy()
        device = np.nonzero(category <= FILL)[0]
        decoded = arguments.decode_arguments(
            [columns.arguments[i] for i in kept[device]], arguments.DeviceArguments
        )
        streams = arguments.integers([a.stream for a in decoded], -1)
        devices = arguments.integers([a.device for a in decoded], -1)
        first[device] = np.where(devices >= 0, devices, first[device])
        second[device] = np.where(streams >= 0, streams, second[device])
        correlation = np.full(len(kept), -1, dtype=np.int64)
        correlation[device] = arguments.integers([a.correlation for a in decoded])
        runtime = np.nonzero(category == RUNTIME)[0]
        launch_arguments = arguments.decode_arguments(
            [columns.arguments[i] for i in kept[runtime]], arguments.CorrelationArgument
        )
        correlation[runtime] = arguments.integers([a.correlation for a in launch_arguments])
        track, keys = _number(_track_group(category), first, second)
        thread, _ = _number(np.zeros_like(process), process, thread_id)
        start, duration = columns.time[kept], columns.duration[kept]
        order = np.lexsort((-duration, start, track))
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        device_order = np.argsort(place[device])
        return cls(
            event=kept[order],
            category=category[order],
            track=track[order],
            start=start[order],
            end=(start + duration)[order],
            name=columns.name[kept][order],
            thread=thread[order].astype(np.int32),
            device=place[device][device_order],
            device_arguments=[decoded[i] for i in device_order],
            correlation=correlation[order],
            track_keys=keys,
        )


def _categories(document: KinetoDocument) -> Int8:
    columns = document.complete
    used, local = np.unique(columns.category, return_inverse=True)
    names = [columns.strings[i] for i in used]
    known = np.array([_CATEGORIES.get(name.lower(), OTHER_HOST) for name in names], dtype=np.int8)
    strange = [i for i, name in enumerate(names) if name.lower() not in _CATEGORIES]
    document.note(
        "slices of an unknown category, kept as host slices",
        int(np.isin(local, strange).sum()),
        ", ".join(names[i] or "(none)" for i in strange[:5]),
    )
    return np.asarray(known[local], dtype=np.int8)


def _track_group(category: Int8) -> Int64:
    group = np.full(len(category), 3, dtype=np.int64)
    group[category <= FILL] = 0
    group[category == DEVICE_ANNOTATION] = 1
    group[category == ANNOTATION] = 2
    return group


def _number(group: Int64, first: Int64, second: Int64) -> tuple[Int64, npt.NDArray[np.int64]]:
    """Consecutive numbers for the triples, rising with them, and the distinct triples."""
    firsts, first_code = np.unique(first, return_inverse=True)
    seconds, second_code = np.unique(second, return_inverse=True)
    key = (group * len(firsts) + first_code) * len(seconds) + second_code
    distinct, number = np.unique(key, return_inverse=True)
    pair, last = np.divmod(distinct, max(len(seconds), 1))
    outer, middle = np.divmod(pair, max(len(firsts), 1))
    return number, np.column_stack((outer, firsts[middle], seconds[last]))


class _Builder:
    """Puts the tables of one rank together."""

    def __init__(self, document: KinetoDocument, rows: _Rows) -> None:
        self.document = document
        self.rows = rows
        self.strings = StringTable(document.complete.strings)
        self.base = int(min(rows.start.min(), document.complete.time.min())) if len(rows.start) else 0
        self.device_arguments = rows.device_arguments

    def timeline(self) -> Timeline:
        rows, document = self.rows, self.document
        launch = launches.launch_rows(
            np.where(rows.category == RUNTIME, rows.correlation, -1), rows.correlation[rows.device]
        )
        slices, groups = self._slices(launch)
        launched = launch >= 0
        flows = Flows(
            source=launch[launched].astype(np.int32),
            target=rows.device[launched].astype(np.int32),
            kind=np.full(int(launched.sum()), FlowKind.LAUNCH, dtype=np.int8),
        )
        self._note_oddities(launch)
        tracks = self._tracks()
        counter_tracks, samples = memory_counters(document, self.strings, self.base)
        rank = integer(document.distributed.get("rank"), -1)
        return Timeline(
            strings=self.strings.strings(),
            ranks=Ranks.from_rows([{"rank": rank}], tp=-1, cp=-1, ep=-1, pp=-1, dp=-1),
            tracks=tracks,
            slices=slices,
            flows=flows,
            counter_tracks=counter_tracks,
            counter_samples=samples,
            steps=self._steps(),
            groups=groups,
            name=document.path.name,
            device=self._device_name(),
            world_size=integer(document.distributed.get("world_size"), 0),
            time_base_ns=document.base_ns + self.base,
            quirks=tuple(
                Quirk(name, count, example) for name, (count, example) in sorted(document.quirks.items())
            ),
            properties=self._properties(),
        )

    def _slices(self, launch: Int64) -> tuple[Slices, tuple[CommunicationGroup, ...]]:
        rows, device = self.rows, self.rows.device
        facts = arguments.read_facts(
            self.device_arguments, arguments.configured_groups(self.document.distributed)
        )
        context = launches.contexts(
            self._host(),
            np.where(launch >= 0, rows.thread[launch], 0).astype(np.int32),
            np.where(launch >= 0, rows.start[launch], np.iinfo(np.int64).min),
        )
        kind, communication = launches.kinds(self.document.complete.strings, rows.name[device], context)
        category = rows.category[device]
        kind[category == COPY], kind[category == FILL] = OpKind.MEMCPY, OpKind.MEMSET
        communication[category != KERNEL] = 0
        communication = np.where(facts.communication > 0, facts.communication, communication).astype(np.int8)
        for transfer in np.unique(communication[communication > 0]):
            kind[communication == transfer] = kind_of_communication(int(transfer))
        group, groups = self._expert_groups(communication, facts.group, facts.groups)
        phase, kind = launches.phases(context, kind, communication)
        kind = np.where(facts.kind > 0, facts.kind, kind)
        phase = np.where(facts.phase > 0, facts.phase, phase)
        module = np.array([self.strings.intern(m) if m else -1 for m in facts.module], dtype=np.int32)
        columns: dict[str, npt.NDArray[np.generic]] = {
            "kind": kind, "phase": phase, "communication": communication, "module": module,
            "layer": facts.layer, "chunk": facts.chunk, "microbatch": facts.microbatch, "flops": facts.flops,
            "bytes": facts.bytes, "communication_bytes": facts.communication_bytes, "group": group,
            "wait": facts.wait,
        }  # fmt: skip
        count = len(rows.start)
        filled = {name: np.full(count, default) for name, default in SLICE_DEFAULTS.items()}
        for name in ("flops", "bytes"):
            filled[name] = filled[name].astype(np.float64)
        filled["kind"][:] = OpKind.HOST
        filled["kind"][np.isin(rows.category, (ANNOTATION, DEVICE_ANNOTATION))] = OpKind.ANNOTATION
        for name, values in columns.items():
            filled[name][device] = values
        filled["correlation"] = rows.correlation
        slices = Slices(
            track=rows.track.astype(np.int32),
            start=rows.start - self.base,
            duration=rows.end - rows.start,
            name=rows.name.astype(np.int32),
            **filled,
        )
        return slices, groups

    def _expert_groups(
        self, communication: Int8, group: Int32, groups: tuple[CommunicationGroup, ...]
    ) -> tuple[Int32, tuple[CommunicationGroup, ...]]:
        """Kernels of expert-parallel libraries carry no group; they get one named ``ep``."""
        strings, rows = self.document.complete.strings, self.rows
        unnamed = np.nonzero((communication > 0) & (group < 0))[0]
        names = rows.name[rows.device[unnamed]]
        expert = [i for i in np.unique(names).tolist() if is_expert_parallel(strings[i])]
        if not expert:
            return group, groups
        group = group.copy()
        group[unnamed[np.isin(names, expert)]] = len(groups)
        return group, (*groups, CommunicationGroup("ep"))

    def _host(self) -> launches.Host:
        rows = self.rows
        chosen = np.isin(rows.category, (OPERATOR, ANNOTATION))
        return launches.Host(
            thread=rows.thread[chosen],
            start=rows.start[chosen],
            end=rows.end[chosen],
            name=rows.name[chosen],
            is_operator=rows.category[chosen] == OPERATOR,
            names=self.document.complete.strings,
        )

    def _tracks(self) -> Tracks:
        roles = (TrackRole.DEVICE, TrackRole.ANNOTATION, TrackRole.ANNOTATION, TrackRole.HOST)
        several = len(np.unique(self.rows.track_keys[self.rows.track_keys[:, 0] == 0, 1])) > 1
        described = []
        for group, first, second in self.rows.track_keys.tolist():
            device = f"GPU {first} " if several and group < 2 else ""
            name = (f"{device}stream {second}", f"{device}annotations of stream {second}",
                    f"annotations of thread {second}", f"thread {second}")[group]  # fmt: skip
            described.append(
                {"rank": 0, "role": roles[group], "stream": second, "name": self.strings.intern(name)}
            )
        return Tracks.from_rows(described)

    def _steps(self) -> Steps:
        rows, strings = self.rows, self.document.complete.strings
        number = np.full(len(strings), -1, dtype=np.int64)
        for identifier, string in enumerate(strings):
            match = _STEP.match(string)
            if match:
                number[identifier] = int(match.group(1))
        found = number[rows.name] >= 0
        on_host = found & (rows.category != DEVICE_ANNOTATION)
        chosen = np.nonzero(on_host if on_host.any() else found)[0]
        chosen = chosen[np.argsort(rows.start[chosen], kind="stable")]
        _, first = np.unique(number[rows.name[chosen]], return_index=True)
        chosen = chosen[np.sort(first)]
        return Steps(
            rank=np.zeros(len(chosen), dtype=np.int32),
            number=number[rows.name[chosen]],
            start=rows.start[chosen] - self.base,
            end=rows.end[chosen] - self.base,
        )

    def _device_name(self) -> str:
        used = {key[1] for key in self.rows.track_keys.tolist() if key[0] == 0}
        properties = self.document.device_properties
        named = [p for p in properties if integer(p.get("id"), -1) in used] or properties
        return str(named[0].get("name", "")) if named else ""

    def _properties(self) -> dict[str, str]:
        distributed = self.document.distributed
        found = {"format": "kineto"}
        for key in ("backend", "nccl_version"):
            if distributed.get(key) not in (None, "", "undefined"):
                found[key] = str(distributed[key])
        return found

    def _note_oddities(self, launch: Int64) -> None:
        rows, note, strings = self.rows, self.document.note, self.document.complete.strings
        device, launched = rows.device, launch >= 0
        if len(device):
            example = strings[rows.name[device[~launched]][0]] if not launched.all() else ""
            note("device slices without a launch", int((~launched).sum()), example)
            early = rows.start[launch[launched]] - rows.start[device[launched]]
            worst = int(early.max()) if len(early) else 0
            note(
                "kernels that start before their launch",
                int((early > 0).sum()),
                f"by up to {worst / 1000:g} us",
            )
            counts = np.bincount(launch[launched]) if launched.any() else np.zeros(1, dtype=np.int64)
            note(
                "launches with more than one kernel (graphs)",
                int((counts > 1).sum()),
                f"up to {counts.max()} kernels",
            )
            note("device slices of zero duration", int((rows.end[device] == rows.start[device]).sum()))
            crossing = _overlaps(rows.track[device], rows.start[device], rows.end[device])
            worst = int(crossing.max()) if len(crossing) else 0
            note(
                "kernels that overlap on one stream",
                int((crossing > 0).sum()),
                f"by up to {worst / 1000:g} us",
            )
        else:
            note("no device slices", 1, "the trace shows the host only")
        if not self._device_name():
            note("device name missing", 1)
        if integer(self.document.distributed.get("rank"), -1) < 0:
            note("rank missing", 1)


def _overlaps(track: Int64, start: Int64, end: Int64) -> Int64:
    """Nanoseconds each slice starts before the end of an earlier one on its track; rows sorted by track and start."""
    if not len(track):
        return np.zeros(0, dtype=np.int64)
    # Shifting each track past all ends of the one before makes one running maximum serve all tracks.
    low = int(start.min())
    stride = int(end.max()) - low + 1
    base = track * stride - low
    reach = np.maximum.accumulate(end + base)
    excess = reach[:-1] - (start + base)[1:]
    same: Bool = track[1:] == track[:-1]
    return np.concatenate((np.zeros(1, dtype=np.int64), np.where(same, np.maximum(excess, 0), 0)))
