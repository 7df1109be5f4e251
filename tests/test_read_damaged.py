"""Damaged files of every format: a message for the user or a timeline, never another error and never a hang."""

from __future__ import annotations

import contextlib
import copy
import gzip
import json
import math
import time
from typing import Any

import numpy as np
import pytest
import trace_files
from hypothesis import example, given, settings
from hypothesis import strategies as st

from op_graphs.timeline import Timeline
from tracesim.errors import TraceError
from tracesim.readers import read_trace, sources

FILES = trace_files.all_files()
SLOWEST_S = 20.0
"""Far above what a file of some kilobytes takes on a busy machine; a hang is minutes."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("damaged")


def read_or_refuse(folder, name: str, data: bytes, keep_origins: bool = False) -> Timeline | None:
    """A whole timeline, or None for a refusal of one line that names the file."""
    path = folder / name
    path.write_bytes(data)
    begin = time.monotonic()
    timeline, message = None, ""
    try:
        timeline = read_trace(path, keep_origins=keep_origins)
    except TraceError as error:
        message = str(error)
    assert time.monotonic() - begin < SLOWEST_S
    if timeline is None:
        assert str(path) in message
        assert "\n" not in message
        assert len(message) < 2000
    else:
        assert_whole(timeline)
    return timeline


def assert_whole(timeline: Timeline) -> None:
    """Every reference of a timeline leads somewhere, and no time runs backwards."""
    slices, flows, samples = timeline.slices, timeline.flows, timeline.counter_samples
    for column, size in (
        (slices.track, len(timeline.tracks)),
        (slices.name, len(timeline.strings)),
        (timeline.tracks.rank, len(timeline.ranks)),
        (timeline.tracks.name, len(timeline.strings)),
        (flows.source, len(slices)),
        (flows.target, len(slices)),
        (samples.track, len(timeline.counter_tracks)),
    ):
        assert not len(column) or (column.min() >= 0 and column.max() < size)
    assert not len(slices.group) or slices.group.max() < max(len(timeline.groups), 0) or not timeline.groups
    assert (slices.duration >= 0).all()
    assert np.isfinite(samples.value).all()
    assert np.isfinite(slices.flops).all()


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=60)
@given(data=st.data())
def test_files_with_damaged_bytes(folder, name, data):
    """Cut anywhere, some bytes replaced, or a stretch of them written twice."""
    damaged = bytearray(FILES[name])
    for _ in range(data.draw(st.integers(0, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    if len(damaged) and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at:at] = damaged[at : at + data.draw(st.integers(1, 200))]
    read_or_refuse(folder, name, bytes(damaged), keep_origins=data.draw(st.booleans()))


@pytest.mark.parametrize("name", FILES)
def test_files_cut_at_every_place(folder, name):
    whole = FILES[name]
    for length in range(0, len(whole), max(1, len(whole) // 120)):
        read_or_refuse(folder, name, whole[:length])


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


STRANGE = st.sampled_from(
    [
        None, True, -1, 0, 10**15, 10**18, 10**19, -(10**18), 10**400, 1e300, -0.5, 1.5, math.nan, math.inf, "", "x",
        "12",
        "-7.25", "nan", "1e400", "9" * 400, "x" * 100_000, "\ud7ff\n\0", [], [1], [[]], {}, {"a": 1}, [None, "a", {}],
        nested(50), "[0, 1, 2]", "stream 7", -(2**63), 2**63, 2**31, "ProfilerStep#" + "9" * 30,
        "PP:" + "9" * 30 + "F1",
    ]
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything in a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(inner for key, entry in items for inner in places(entry, (*path, key)))]


PLACES = {name: places(make()) for name, make in trace_files.JSON_FILES.items()}


def changed(document: Any, path: tuple[Any, ...], change: Any) -> Any:
    """A document whose value at a path is replaced, or left out where ``change`` is ``...``."""
    if not path:
        return None if change is ... else change
    around = document
    with contextlib.suppress(KeyError, IndexError, TypeError):
        for key in path[:-1]:
            around = around[key]
        if change is ...:
            del around[path[-1]]
        else:
            around[path[-1]] = copy.deepcopy(change)
    return document


@pytest.mark.parametrize("name", trace_files.JSON_FILES)
@settings(max_examples=150)
@given(data=st.data())
def test_documents_with_strange_values(folder, name, data):
    """Types swapped, keys missing, NaN, negative and huge numbers, names of 10^5 characters."""
    document = trace_files.JSON_FILES[name]()
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(PLACES[name]))
        document = changed(document, path, data.draw(st.one_of(STRANGE, st.just(...))))
    text = json.dumps(document, ensure_ascii=data.draw(st.booleans()))
    read_or_refuse(folder, name, text.encode("utf-8", "surrogatepass"), keep_origins=data.draw(st.booleans()))


@settings(max_examples=100)
@given(
    values=st.lists(
        st.tuples(st.sampled_from(places(trace_files.memory_snapshot())), STRANGE), min_size=1, max_size=3
    )
)
@example(values=[((), [1, 2])])
def test_snapshots_with_strange_values(folder, values):
    import pickle

    document: Any = trace_files.memory_snapshot()
    for path, value in values:
        document = changed(document, path, value)
    read_or_refuse(folder, "t.pickle", pickle.dumps(document))


@settings(max_examples=100)
@given(
    table=st.sampled_from(["CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY", "NVTX_EVENTS", "StringIds"]),
    column=st.sampled_from(
        ["start", "end", "deviceId", "streamId", "correlationId", "bytes", "globalTid", "id", "value"]
    ),
    value=st.one_of(
        st.none(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=5), st.binary(max_size=5)
    ),
)  # fmt: skip
def test_databases_with_strange_values(folder, table, column, value):
    import sqlite3

    path = folder / "work.sqlite"
    path.write_bytes(FILES["nsys.sqlite"])
    with contextlib.closing(sqlite3.connect(path)) as database:
        with contextlib.suppress(sqlite3.Error):
            database.execute(f'UPDATE "{table}" SET "{column}" = ?', (value,))
        database.commit()
    read_or_refuse(folder, "t.sqlite", path.read_bytes())


@pytest.mark.parametrize("depth", [1_000, 200_000])
@pytest.mark.parametrize(
    "around", [b"%s", b'{"traceEvents": %s}', b'{"traceEvents": [{"ph": "X", "ts": 1, "args": %s}]}']
)
def test_deep_nesting(folder, depth, around):
    for inner in (b"[" * depth + b"]" * depth, b'{"a":' * depth + b"1" + b"}" * depth, b"[" * depth):
        read_or_refuse(folder, "deep.json", around % inner)


@pytest.mark.parametrize("level", [1, 9])
def test_an_archive_bomb_is_refused_at_the_stated_limit(folder, monkeypatch, level):
    monkeypatch.setattr(sources, "DECOMPRESSION_LIMIT", 1 << 22)
    monkeypatch.setattr(sources, "_CHUNK", 1 << 16)
    packed = gzip.compress(b" " * (1 << 26), level)
    (folder / "bomb.json.gz").write_bytes(packed)
    with pytest.raises(TraceError, match=r"unpacks to more than 0\.00390625 GiB"):
        read_trace(folder / "bomb.json.gz")


def test_what_follows_the_document(folder):
    """A second document is joined, garbage is ignored and counted."""
    whole = FILES["kineto.json"]
    joined = read_or_refuse(folder, "t.json", whole + b"\n" + whole)
    garbage = read_or_refuse(folder, "t.json", whole + b"\x00\x00garbage")
    padded = read_or_refuse(folder, "t.json", b"\xef\xbb\xbf  " + whole + b"\n\0\0\0")
    assert joined is not None
    assert garbage is not None
    assert padded is not None
    assert [len(t.slices) for t in (joined, garbage, padded)] == [12, 6, 6]
    noted = [{q.name: q.count for q in t.quirks} for t in (joined, garbage, padded)]
    assert noted[0]["further JSON documents in the file, joined"] == 1
    assert noted[1]["bytes after the end of the JSON ignored"] == 9
    assert "bytes after the end of the JSON ignored" not in noted[2]
