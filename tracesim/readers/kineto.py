"""Reader of torch.profiler (Kineto) traces: JSON, plain or packed, one file a rank.

Kernels, copies and fills go to one DEVICE track a (device, stream); operators, Python functions and runtime calls to
HOST tracks; annotations to ANNOTATION tracks. ``ProfilerStep#N`` becomes a step, a common correlation a LAUNCH flow,
``fwdbwd`` arrows FORWARD_BACKWARD flows, ``[memory]`` events counters. The first forms of the format (``Kernel``,
``Operator``, ``Runtime``) and begin/end pairs are read too. Left out: metadata but for what a conversion keeps, and
``ac2g`` arrows, which say what the correlations say.
"""

from __future__ import annotations

import gc
import re

import msgspec
import numpy as np
import numpy.typing as npt

from op_graphs.columns import Bool, Float64, Int8, Int32, Int64, StringTable
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
from op_graphs.vocabulary import Communication, FlowKind, OpKind, TrackRole
from tracesim.errors import TraceError
from tracesim.kernel_kinds import is_expert_parallel, kind_of_communication
from tracesim.readers import host_only, launches, origins, own_chrome
from tracesim.readers import kineto_arguments as arguments
from tracesim.readers.kineto_columns import KinetoDocument, read_document
from tracesim.readers.kineto_json import integer, looks_like_kineto
from tracesim.readers.kineto_rows import (
    ANNOTATION,
    COPY,
    DEVICE_ANNOTATION,
    FILL,
    KERNEL,
    OPERATOR,
    PYTHON,
    RUNTIME,
    SKIPPED,
    Rows,
)
from tracesim.readers.memory_events import memory_counters
from tracesim.readers.sources import Source

_STEP = re.compile(r"ProfilerStep#?\s*(\d{1,18})")


def recognise(source: Source) -> bool:
    """Whether a file is JSON in the shape of a profiler trace."""
    return looks_like_kineto(source.data)


def read(source: Source) -> Timeline:
    """The timeline of one Kineto file: one rank, number -1 where the file does not say.

    Raises:
        TraceError: if the file is damaged or no trace; the message says what to do.
    """
    collecting = gc.isenabled()
    # Hundreds of thousands of small objects and no cycle among them: looking for cycles costs more than reading.
    gc.disable()
    try:
        return _read(source)
    finally:
        if collecting:
            gc.enable()


def _read(source: Source) -> Timeline:
    document = read_document(source.path, source.data, source.progress)
    if own_chrome.is_own(document):
        return own_chrome.build(document)
    rows = Rows.build(document, keep_all=source.keep_origins)
    timeline = _Builder(document, rows).timeline()
    if not source.keep_origins:
        return timeline
    try:
        return origins.with_origins(timeline, document, rows.event)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # Arguments stay undecoded while reading, so damage inside them shows only here.
        raise TraceError(
            f"{source.path}: arguments that are no valid JSON ({str(error)[:200]}), so they cannot be kept. "
            "Repair the file, or analyze it without converting."
        ) from error


class _Builder:
    """Puts the tables of one rank together."""

    def __init__(self, document: KinetoDocument, rows: Rows) -> None:
        self.document = document
        self.rows = rows
        self.strings = StringTable(document.complete.strings)
        self.base = int(min(rows.start.min(), document.complete.time.min())) if len(rows.start) else 0
        self.host = self._host()

    def timeline(self) -> Timeline:
        rows, document = self.rows, self.document
        launch = launches.launch_rows(
            np.where(rows.category == RUNTIME, rows.correlation, -1), rows.correlation[rows.device]
        )
        slices, groups = self._slices(launch)
        self._note_oddities(launch)
        tracks = self._tracks()
        counter_tracks, samples = memory_counters(
            document, self.strings, self.base, host_only=not len(rows.device)
        )
        rank = integer(document.distributed.get("rank"), -1)
        return Timeline(
            strings=self.strings.strings(),
            ranks=Ranks.from_rows(
                [{"rank": rank if 0 <= rank < 1 << 31 else -1}], tp=-1, cp=-1, ep=-1, pp=-1, dp=-1
            ),
            tracks=tracks,
            slices=slices,
            flows=self._flows(launch),
            counter_tracks=counter_tracks,
            counter_samples=samples,
            steps=self._steps(),
            groups=groups,
            name=document.path.name,
            device=self._device_name(),
            world_size=max(integer(document.distributed.get("world_size"), 0), 0),
            time_base_ns=document.base_ns + self.base,
            quirks=tuple(
                Quirk(name, count, example) for name, (count, example) in sorted(document.notes.found.items())
            ),
            properties=self._properties(),
        )

    def _slices(self, launch: Int64) -> tuple[Slices, tuple[CommunicationGroup, ...]]:
        rows, device, strings = self.rows, self.rows.device, self.document.complete.strings
        context = launches.contexts(self.host, *self._launched_at(launch))
        kind, communication = launches.kinds(strings, rows.name[device], context)
        category = rows.category[device]
        kind[category == COPY], kind[category == FILL] = OpKind.MEMCPY, OpKind.MEMSET
        communication[category != KERNEL] = 0
        communication, found, groups = self._transfers(communication, context)
        for transfer in np.unique(communication[communication > 0]):
            kind[communication == transfer] = kind_of_communication(int(transfer))
        group, groups = self._expert_groups(communication, found["group"].astype(np.int32), groups)
        phase, kind = launches.phases(context, kind, communication)
        columns: dict[str, npt.NDArray[np.generic]] = {
            "kind": kind, "phase": phase, "communication": communication, **found, "group": group,
            "chunk": launches.chunks(context), "microbatch": context.microbatch, "bytes": np.maximum(rows.bytes, 0),
            "flops": self._flops(kind, context),
        }  # fmt: skip
        count = len(rows.start)
        filled = {name: np.full(count, default) for name, default in SLICE_DEFAULTS.items()}
        for name in ("flops", "bytes"):
            filled[name] = filled[name].astype(np.float64)
        filled["kind"][:] = OpKind.HOST
        filled["kind"][np.isin(rows.category, (ANNOTATION, DEVICE_ANNOTATION, SKIPPED))] = OpKind.ANNOTATION
        for name, values in columns.items():
            filled[name][device] = values
        filled["correlation"] = rows.correlation
        if not len(device):
            groups = host_only.describe_host(filled, rows, self.host, self._raw, self.document.distributed)
        slices = Slices(
            track=rows.track.astype(np.int32),
            start=rows.start - self.base,
            duration=rows.end - rows.start,
            name=rows.name.astype(np.int32),
            **filled,
        )
        return slices, groups

    def _launched_at(self, launch: Int64) -> tuple[Int32, Int64]:
        """Thread and time of the launch of each device slice, time -1 below all if there is none.

        Where no runtime call was recorded, the operator with the same External id stands for it.
        """
        rows = self.rows
        source = launch.copy()
        lost = np.flatnonzero(
            (launch < 0) & (rows.external >= 0) & (rows.external != rows.correlation[rows.device])
        )
        if len(lost):
            operators = np.flatnonzero(rows.category == OPERATOR)
            decoded = arguments.decode_arguments(self._raw(operators), arguments.ExternalArgument)
            external = np.full(len(rows.start), -1, dtype=np.int64)
            external[operators] = arguments.integers([a.external for a in decoded])
            source[lost] = launches.launch_rows(external, rows.external[lost])
            self.document.note(
                "kernels without a launch, placed by their External id", int((source[lost] >= 0).sum())
            )
        found = source >= 0
        return (
            np.where(found, rows.thread[source], 0).astype(np.int32),
            np.where(found, rows.start[source], np.iinfo(np.int64).min),
        )

    def _raw(self, chosen: Int64) -> list[msgspec.Raw]:
        """The arguments of some rows."""
        written = self.document.complete.arguments
        return [written[i] for i in self.rows.event[chosen].tolist()]

    def _transfers(
        self, communication: Int8, context: launches.Context
    ) -> tuple[Int8, dict[str, npt.NDArray[np.generic]], tuple[CommunicationGroup, ...]]:
        """Transfer of communication kernels, the other columns that tell of it, and the groups.

        They come from the arguments of the kernel or of its ``record_param_comms``.
        """
        rows = self.rows
        chosen = np.flatnonzero((communication > 0) | rows.described)
        told = rows.described[chosen]
        source = np.where(told, rows.device[chosen], context.record_row[chosen])
        known = source >= 0
        chosen, source, told = chosen[known], source[known], told[known]
        found = arguments.read_transfers(
            arguments.decode_arguments(self._raw(source), arguments.CommunicationArguments),
            arguments.configured_groups(self.document.distributed),
        )
        named = (found.communication > 0) & (told | (found.communication != Communication.UNKNOWN))
        self.document.note(
            "transfers described by record_param_comms only",
            int((named & ~told).sum()),
            "their kernels carry no arguments",
        )
        communication = communication.copy()
        communication[chosen[named]] = found.communication[named]
        columns: dict[str, npt.NDArray[np.generic]] = {}
        told_of: dict[str, Int64 | Int32] = {
            "communication_bytes": found.bytes,
            "group": found.group,
            "sequence": found.sequence,
            "peer": found.peer,
        }
        for name, values in told_of.items():
            columns[name] = np.full(len(communication), SLICE_DEFAULTS[name], dtype=values.dtype)
            columns[name][chosen[named]] = values[named]
        return communication, columns, found.groups

    def _flops(self, kind: Int8, context: launches.Context) -> Float64:
        """Operations of matrix products by the shapes of their operators, on the longest kernel of each."""
        rows = self.rows
        flops = np.zeros(len(kind))
        chosen = np.flatnonzero((kind == OpKind.GEMM) & (context.operator_row >= 0))
        if not len(chosen):
            return flops
        length = (rows.end - rows.start)[rows.device[chosen]]
        operator = context.operator_row[chosen]
        order = np.lexsort((length, operator))
        last = np.append(operator[order][1:] != operator[order][:-1], True)
        chosen = chosen[order[last]]
        names = self.document.complete.strings
        called = context.operator_row[chosen]
        shapes = arguments.decode_arguments(self._raw(called), arguments.ShapeArguments)
        flops[chosen] = arguments.matrix_flops([names[i] for i in rows.name[called].tolist()], shapes)
        return flops

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
        rows, names = self.rows, self.document.complete.strings
        chosen = np.isin(rows.category, (OPERATOR, ANNOTATION))
        python = np.unique(rows.name[rows.category == PYTHON]).tolist()
        frames = [i for i in python if launches.is_checkpoint_frame(names[i])]
        if frames:
            chosen |= (rows.category == PYTHON) & np.isin(rows.name, frames)
        return launches.Host.build(
            row=np.flatnonzero(chosen),
            thread=rows.thread[chosen],
            start=rows.start[chosen],
            end=rows.end[chosen],
            name=rows.name[chosen],
            is_operator=rows.category[chosen] == OPERATOR,
            names=names,
        )

    def _flows(self, launch: Int64) -> Flows:
        rows, ends = self.rows, self.document.flow_ends
        launched = launch >= 0
        bound = self.host.operator_at(rows.flow_thread, ends.time)
        starts = np.flatnonzero((ends.starts > 0) & (bound >= 0))
        targets = np.flatnonzero((ends.starts == 0) & (bound >= 0))
        at = launches.launch_rows(ends.identifier[starts], ends.identifier[targets])
        source, target = bound[starts[at[at >= 0]]], bound[targets[at >= 0]]
        self.document.note(
            "forward-backward arrows that join nothing dropped", int(ends.starts.sum()) - len(source)
        )
        kinds = [FlowKind.LAUNCH] * int(launched.sum()) + [FlowKind.FORWARD_BACKWARD] * len(source)
        return Flows(
            source=np.concatenate((launch[launched], source)).astype(np.int32),
            target=np.concatenate((rows.device[launched], target)).astype(np.int32),
            kind=np.array(kinds, dtype=np.int8),
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
    shift = max(0, ((int(end.max()) - low + 1) * (int(track.max()) + 1)).bit_length() - 62)
    stride = (int(end.max()) - low >> shift) + 1
    base = track * stride
    reach = np.maximum.accumulate((end - low >> shift) + base)
    excess = reach[:-1] - ((start - low >> shift) + base)[1:] << shift
    same: Bool = track[1:] == track[:-1]
    return np.concatenate((np.zeros(1, dtype=np.int64), np.where(same, np.maximum(excess, 0), 0)))
