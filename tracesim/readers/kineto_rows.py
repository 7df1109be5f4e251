"""The slices of a Kineto file sorted into rows: category, track, host thread, and the places of device events."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from op_graphs.columns import Bool, Int8, Int32, Int64
from tracesim.readers import kineto_arguments as arguments
from tracesim.readers.distinct import distinct
from tracesim.readers.kineto_columns import KinetoDocument

KERNEL, COPY, FILL, OPERATOR, RUNTIME, PYTHON, ANNOTATION, DEVICE_ANNOTATION, OTHER_HOST, SKIPPED = range(10)

_CATEGORIES: dict[str, int] = {
    "kernel": KERNEL,
    "mtia_ccp_events": KERNEL,
    "hpu_op": KERNEL,
    "xpu_kernel": KERNEL,
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
    "hip_driver": RUNTIME,
    "mtia_runtime": RUNTIME,
    "privateuse1_runtime": RUNTIME,
    "privateuse1_driver": RUNTIME,
    "xpu_runtime": RUNTIME,
    "python_function": PYTHON,
    "user_annotation": ANNOTATION,
    "gpu_user_annotation": DEVICE_ANNOTATION,
    "cuda_profiler_range": DEVICE_ANNOTATION,
    "overhead": OTHER_HOST,
    "cuda_sync": OTHER_HOST,
    "trace": SKIPPED,
}


@dataclass(frozen=True)
class Rows:
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
    bytes: Int64
    """Bytes a copy or fill says it moves, for each row of ``device``; 0 if it does not say."""
    external: Int64
    """External id of each row of ``device``, -1 if none."""
    described: Bool
    """Which rows of ``device`` carry arguments of a transfer."""
    correlation: Int64
    flow_thread: Int32
    """Host thread number of each end of a forward-backward flow."""
    track_keys: npt.NDArray[np.int64]
    """Shape [tracks, 3]: group (0 device, 1 device annotation, 2 annotation, 3 host), device or pid, stream or tid."""

    @classmethod
    def build(cls, document: KinetoDocument, keep_all: bool = False) -> Rows:
        """The rows of a file; ``keep_all`` also keeps the profiler's own slices."""
        columns = document.complete
        category = _categories(document)
        kept = np.arange(len(category)) if keep_all else np.flatnonzero(category != SKIPPED)
        category = category[kept]
        process, thread_id = columns.numbers(columns.process)[kept], columns.numbers(columns.thread)[kept]
        device = np.flatnonzero(category <= FILL)
        places = arguments.decode_arguments(
            [columns.arguments[i] for i in kept[device].tolist()], arguments.PlaceArguments
        )
        first, second = process.copy(), thread_id.copy()
        devices = arguments.integers([a.device for a in places], -1)
        streams = arguments.integers([a.stream for a in places], -1)
        first[device] = np.where(devices >= 0, devices, first[device])
        second[device] = np.where(streams >= 0, streams, second[device])
        correlation = np.full(len(kept), -1, dtype=np.int64)
        correlation[device] = arguments.integers([a.correlation for a in places])
        runtime = np.flatnonzero(category == RUNTIME)
        launches = arguments.decode_arguments(
            [columns.arguments[i] for i in kept[runtime].tolist()], arguments.CorrelationArgument
        )
        correlation[runtime] = arguments.integers([a.correlation for a in launches])
        track, keys = _number(_track_group(category), first, second)
        flows = document.flow_ends
        thread, _ = _number(
            np.zeros(len(kept) + len(flows.time), dtype=np.int64),
            np.concatenate((process, columns.numbers(flows.process))),
            np.concatenate((thread_id, columns.numbers(flows.thread))),
        )
        start, duration = columns.time[kept], columns.duration[kept]
        order = np.lexsort((-duration, start, track))
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        by_place = np.argsort(place[device])
        return cls(
            event=kept[order],
            category=category[order],
            track=track[order],
            start=start[order],
            end=(start + duration)[order],
            name=columns.name[kept][order],
            thread=thread[: len(kept)][order].astype(np.int32),
            device=place[device][by_place],
            bytes=arguments.integers([a.bytes for a in places], 0)[by_place],
            external=arguments.integers([a.external for a in places])[by_place],
            described=np.array([a.collective is not None for a in places], dtype=np.bool_)[by_place],
            correlation=correlation[order],
            flow_thread=thread[len(kept) :].astype(np.int32),
            track_keys=keys,
        )


def _categories(document: KinetoDocument) -> Int8:
    columns = document.complete
    used, local = distinct(columns.category)
    names = [columns.strings[i] for i in used]
    known = np.array([_CATEGORIES.get(name.lower(), OTHER_HOST) for name in names], dtype=np.int8)
    strange = [i for i, name in enumerate(names) if name.lower() not in _CATEGORIES]
    document.note(
        "slices of an unknown category, kept as host slices",
        int(np.isin(local, strange).sum()),
        ", ".join(names[i][:40] or "(none)" for i in strange[:5]),
    )
    return np.asarray(known[local], dtype=np.int8)


def _track_group(category: Int8) -> Int64:
    group = np.full(len(category), 3, dtype=np.int64)
    group[category <= FILL] = 0
    group[category == DEVICE_ANNOTATION] = 1
    group[(category == ANNOTATION) | (category == SKIPPED)] = 2
    return group


def _number(group: Int64, first: Int64, second: Int64) -> tuple[Int64, npt.NDArray[np.int64]]:
    """Consecutive numbers for the triples, rising with them, and the distinct triples."""
    firsts, first_code = distinct(first)
    seconds, second_code = distinct(second)
    used, number = distinct((group * len(firsts) + first_code) * len(seconds) + second_code)
    pair, last = np.divmod(used, max(len(seconds), 1))
    outer, middle = np.divmod(pair, max(len(firsts), 1))
    return number, np.column_stack((outer, firsts[middle], seconds[last]))
