"""What tells operations of two runs apart: columns of both sides in common numbers, keys, and similarity.

A feature counts only where both sides know it: names of framework operators around launches are useless against a
simulation, which has none, and layers against a trace that does not name them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from op_graphs.columns import Bool, Float64, Int32, Int64, StringTable
from op_graphs.timeline import Timeline
from op_graphs.vocabulary import FlowKind, OpKind, Phase, TrackRole
from tracesim.analysis import slice_dimensions
from tracesim.readers.nesting import Nesting

Float32 = npt.NDArray[np.float32]

_OPERATOR = re.compile(r"^[A-Za-z_]\w*(::\w+)+|^[A-Za-z_]\w*Backward\d*$|^Optimizer|^nccl:|^triton_|Compiled")
_NUMBERS = re.compile(r"0x[0-9a-fA-F]+|#\d+")
_LAUNCHES_OF_ANNOTATION = 16
_COUNTER = re.compile(r"\d+")
_TOKEN = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_PLAIN = frozenset(
    (
        "void", "at", "native", "kernel", "cuda", "hip", "anonymous", "namespace", "operator", "const", "float", "int",
        "long", "bool", "std", "array", "unsigned",
    )
)  # fmt: skip
"""Words that nearly every kernel's name has."""


@dataclass(frozen=True)
class Operations:
    """Device slices of one run as they are compared; columns of shape [slices], strings in common numbers."""

    kind: Int64
    phase: Int64
    name: Int64
    operator: Int64
    """Framework operator that launched it, with the one around that; -1 unknown."""
    instance: Int64
    """Host slice of that operator, so that the kernels of one call are known; -1 unknown."""
    call_size: Int64
    """Kernels of that call; 0 unknown."""
    call_place: Int64
    """The how many-th of them it is; 0 unknown."""
    call_longest: Int64
    """1 for the kernel of that call that takes longest, the first of equal ones; else 0."""
    layer: Int64
    module: Int64
    chunk: Int64
    microbatch: Int64
    flops: Float64
    communication: Int64
    communication_bytes: Int64
    dimension: Int64
    members: Int64
    """Ranks of the process group; 0 where not known."""
    copied_bytes: Int64
    """Bytes of a copy or fill; 0 for everything else."""
    duration: Int64


def operations_of(a: Timeline, b: Timeline) -> tuple[Operations, Operations, tuple[str, ...]]:
    """The columns of both runs, and the strings that their numbers stand for."""
    strings = StringTable()
    first, second = (_Columns(timeline, strings).operations() for timeline in (a, b))
    return first, second, strings.strings()


class _Columns:
    def __init__(self, timeline: Timeline, strings: StringTable) -> None:
        self.timeline, self.strings = timeline, strings
        self.device = np.flatnonzero(timeline.on_device())

    def operations(self) -> Operations:
        slices = self.timeline.slices
        operator, instance = self._operators()
        return Operations(
            kind=slices.kind.astype(np.int64),
            phase=slices.phase.astype(np.int64),
            name=self._common(slices.name),
            operator=operator,
            instance=instance,
            **self._calls(instance),
            layer=slices.layer.astype(np.int64),
            module=self._common(slices.module),
            chunk=slices.chunk.astype(np.int64),
            microbatch=slices.microbatch.astype(np.int64),
            flops=slices.flops,
            communication=slices.communication.astype(np.int64),
            communication_bytes=slices.communication_bytes,
            members=self._members(),
            copied_bytes=np.where(np.isin(slices.kind, _MOVES), slices.bytes, 0).astype(np.int64),
            dimension=slice_dimensions(self.timeline).astype(np.int64),
            duration=slices.duration,
        )

    def _members(self) -> Int64:
        """Size of the process group of each slice."""
        sizes = [group.size or len(group.ranks) for group in self.timeline.groups]
        return np.array([*sizes, 0], dtype=np.int64)[self.timeline.slices.group]

    def _calls(self, instance: Int64) -> dict[str, Int64]:
        """The columns that place a kernel in its call."""
        slices = self.timeline.slices
        size, place, longest = (np.zeros(len(slices), dtype=np.int64) for _ in range(3))
        rows = self.device[instance[self.device] >= 0]
        rows = rows[np.lexsort((rows, slices.start[rows], instance[rows]))]
        _, first, number, count = np.unique(
            instance[rows], return_index=True, return_inverse=True, return_counts=True
        )
        size[rows] = count[number.ravel()]
        place[rows] = np.arange(len(rows)) - first[number.ravel()]
        by_length = rows[np.lexsort((place[rows], -slices.duration[rows], instance[rows]))]
        longest[by_length[first]] = 1
        return {"call_size": size, "call_place": place, "call_longest": longest}

    def _common(self, ids: npt.NDArray[np.int32]) -> Int64:
        """Ids of device slices in the common numbers; -1 for the others and for -1."""
        numbers = np.full(len(self.timeline.strings) + 1, -1, dtype=np.int64)
        for identifier in np.unique(ids[self.device]).tolist():
            if identifier >= 0:
                numbers[identifier] = self.strings.intern(self.timeline.strings[identifier])
        found = np.full(len(ids), -1, dtype=np.int64)
        found[self.device] = numbers[ids[self.device]]
        return found

    def _operators(self) -> tuple[Int64, Int64]:
        timeline, slices = self.timeline, self.timeline.slices
        operator = np.full(len(slices), -1, dtype=np.int64)
        instance = np.full(len(slices), -1, dtype=np.int64)
        flows = timeline.flows
        launches = flows.kind == FlowKind.LAUNCH
        source, target = flows.source[launches], flows.target[launches]
        if not len(source):
            return operator, instance
        # Annotations of a thread have a track of their own, with the number of the thread.
        places = np.stack([timeline.tracks.rank.astype(np.int64), timeline.tracks.stream])
        _, number = np.unique(places, axis=1, return_inverse=True)
        thread: Int32 = number.ravel().astype(np.int32)
        role = timeline.tracks.role
        on_thread = (role == TrackRole.HOST) | (
            (role == TrackRole.ANNOTATION) & np.isin(thread, thread[role == TrackRole.HOST])
        )
        host = np.flatnonzero(on_thread[slices.track])
        of_slice: Int32 = thread[slices.track[host]]
        nesting = Nesting.build(of_slice, slices.start[host], (slices.start + slices.duration)[host])
        ordered = host[nesting.order]
        is_operator = np.array([bool(_OPERATOR.search(name)) for name in timeline.strings], dtype=np.bool_)
        marked = is_operator[slices.name[ordered]]
        noted = (role[slices.track[ordered]] == TrackRole.ANNOTATION) & ~marked
        nearest = nesting.nearest_marked(marked)
        position = nesting.innermost(thread[slices.track[source]], slices.start[source])
        inner = np.where(position >= 0, nearest[position], -1)
        above = np.where(inner >= 0, nesting.parent[inner], -1)
        outer = np.where(above >= 0, nearest[above], -1)
        inner = np.where(
            inner >= 0, inner, self._annotation(nesting, noted, np.where(inner >= 0, -1, position))
        )
        rows = np.append(ordered, -1)
        names = np.append(slices.name, -1)
        instance[target] = rows[inner]
        operator[target] = self._paths(names[rows[inner]], names[rows[outer]])
        return operator, instance

    @staticmethod
    def _annotation(nesting: Nesting, noted: Bool, position: Int64) -> Int64:
        """The annotation around launches without an operator, where it holds so few that it may be one operation."""
        nearest = nesting.nearest_marked(noted)
        found = np.where(position >= 0, nearest[position], -1)
        launches = np.bincount(found[found >= 0], minlength=len(noted) + 1)
        return np.where(launches[found] <= _LAUNCHES_OF_ANNOTATION, found, -1)

    def _paths(self, inner: npt.NDArray[np.int32], outer: npt.NDArray[np.int32]) -> Int64:
        """Operator and the one around it as one string of the common numbers."""
        code = inner.astype(np.int64) * (len(self.timeline.strings) + 1) + outer
        distinct, first, number = np.unique(code, return_index=True, return_inverse=True)
        numbers = np.full(len(distinct), -1, dtype=np.int64)
        for place, at in enumerate(first.tolist()):
            if inner[at] >= 0:
                name = self.timeline.string(int(inner[at]))
                name = name if _OPERATOR.search(name) else _COUNTER.sub("#", name)
                path = f"{name} < {self.timeline.string(int(outer[at]))}"
                numbers[place] = self.strings.intern(_NUMBERS.sub("", path))
        return np.asarray(numbers[number.ravel()], dtype=np.int64)


_FEATURES = ("phase", "layer", "module", "chunk", "microbatch", "operator", "dimension", "members")
_UNKNOWN = {"phase": 0, "dimension": 0, "members": 0}


def known_features(a: Operations, b: Operations, rows_a: Int64, rows_b: Int64) -> frozenset[str]:
    """The features that both sides know of some of their rows."""
    return frozenset(
        name
        for name in _FEATURES
        if all(
            (getattr(side, name)[rows] > _UNKNOWN.get(name, -1)).any()
            for side, rows in ((a, rows_a), (b, rows_b))
        )
    )


def keys(
    a: Operations, b: Operations, rows_a: Int64, rows_b: Int64, known: frozenset[str]
) -> list[tuple[Int64, Int64]]:
    """Keys of operations from exact to coarse: equal keys mean the same operation.

    The first holds the name; the second what the operation does instead of how it is called, which needs something to
    say so beside its kind; the third neither the size nor the position in the model. Of calls that launch several
    kernels, those of as many compare place by place, then the longest kernel of any with that of any.
    """
    features = tuple(name for name in _FEATURES if name in known)
    sizes = ("flops", "communication_bytes", "copied_bytes")
    found = [_key(a, b, rows_a, rows_b, ("kind", "name", "communication", *features, *sizes))]
    coarse: list[tuple[str, ...]] = []
    if known & {"operator", "layer", "module"}:
        coarse.append(("kind", "communication", *features, *sizes))
    if known & {"operator", "module"}:
        kept = tuple(name for name in ("operator", "module", "phase") if name in known)
        coarse.append(("kind", "communication", *kept))
    found += [_key(a, b, rows_a, rows_b, (*columns, "call_size", "call_place")) for columns in coarse]
    if "operator" in known:
        found += [_of_longest(a, b, rows_a, rows_b, columns) for columns in coarse]
    return found


def _of_longest(
    a: Operations, b: Operations, rows_a: Int64, rows_b: Int64, columns: Sequence[str]
) -> tuple[Int64, Int64]:
    """Keys of the longest kernel of each call; all others differ from each other."""
    keys_of = _key(a, b, rows_a, rows_b, columns)
    single = []
    for side, (operations, rows, key) in enumerate(zip((a, b), (rows_a, rows_b), keys_of, strict=True)):
        chosen = (operations.call_longest[rows] > 0) | (operations.instance[rows] < 0)
        single.append(np.where(chosen, key, -1 - side - 2 * np.arange(len(rows))))
    return single[0], single[1]


def structure_keys(
    a: Operations, b: Operations, rows_a: Int64, rows_b: Int64, known: frozenset[str]
) -> list[tuple[Int64, Int64]]:
    """What is left to go by where names say nothing and no operators are known: long runs of the same kinds."""
    if "operator" in known:
        return []
    return [_key(a, b, rows_a, rows_b, ("kind", "communication", *sorted(known & {"phase"})))]


def _key(
    a: Operations, b: Operations, rows_a: Int64, rows_b: Int64, columns: Sequence[str]
) -> tuple[Int64, Int64]:
    number = np.zeros(len(rows_a) + len(rows_b), dtype=np.int64)
    for name in columns:
        values = np.concatenate((getattr(a, name)[rows_a], getattr(b, name)[rows_b]))
        _, dense = np.unique(values, return_inverse=True)
        _, number = np.unique(number * (int(dense.max(initial=0)) + 1) + dense.ravel(), return_inverse=True)
        number = number.ravel().astype(np.int64)
    return number[: len(rows_a)], number[len(rows_a) :]


def tokens(name: str) -> frozenset[str]:
    """The words of a name that say something, in lower case."""
    return frozenset(
        t for t in (word.lower() for word in _TOKEN.findall(name)) if len(t) > 1 and t not in _PLAIN
    )


def name_similarity(a: Sequence[str], b: Sequence[str]) -> Float32:
    """Weighted Jaccard index of the words of names, in [0, 1]; shape [len(a), len(b)]. Rare words weigh more."""
    words_a, words_b = [tokens(name) for name in a], [tokens(name) for name in b]
    number: dict[str, int] = {}
    for words in (*words_a, *words_b):
        for word in sorted(words):
            number.setdefault(word, len(number))
    inside_a, inside_b = _incidence(words_a, number), _incidence(words_b, number)
    often = inside_a.sum(axis=0) + inside_b.sum(axis=0)
    weight = np.log1p((len(a) + len(b)) / np.maximum(often, 1)).astype(np.float32)
    shared = (inside_a * weight) @ inside_b.T
    total = (inside_a @ weight)[:, None] + (inside_b @ weight)[None, :] - shared
    similar: Float32 = np.where(total > 0, shared / np.maximum(total, 1e-9), 0).astype(np.float32)
    same = np.array(a, dtype=object)[:, None] == np.array(b, dtype=object)[None, :]
    similar[same] = 1
    return similar


def _incidence(rows: Iterable[frozenset[str]], number: dict[str, int]) -> Float32:
    listed = list(rows)
    found = np.zeros((len(listed), len(number)), dtype=np.float32)
    for row, words in enumerate(listed):
        found[row, [number[word] for word in words]] = 1
    return found


_MATRIX = (OpKind.GEMM, OpKind.GROUPED_GEMM, OpKind.CONVOLUTION)
_LIGHT = (
    OpKind.OTHER, OpKind.ELEMENTWISE, OpKind.CAST, OpKind.PERMUTE, OpKind.REDUCTION, OpKind.NORM, OpKind.SOFTMAX,
    OpKind.LOSS, OpKind.EMBEDDING, OpKind.ROUTER, OpKind.OPTIMIZER,
)  # fmt: skip
_MOVES = (OpKind.MEMCPY, OpKind.MEMSET)
_ANY_MATCH = np.float32(0.05)
"""What a match counts that is just alike enough."""
DISTINCT = (
    OpKind.GEMM,
    OpKind.GROUPED_GEMM,
    OpKind.CONVOLUTION,
    OpKind.ATTENTION,
    OpKind.COLLECTIVE,
    OpKind.P2P,
)
"""Kinds that alone make two operations alike; of the others many different ones lie beside each other."""


def kind_similarity() -> Float32:
    """How alike kinds are, in [0, 1]; shape [kinds, kinds]."""
    similar = np.eye(len(OpKind), dtype=np.float32)
    for family, value in (
        (_MATRIX, 0.5),
        (_LIGHT, 0.4),
        (_MOVES, 0.3),
        ((OpKind.COLLECTIVE, OpKind.P2P), 0.5),
    ):
        for x in family:
            for y in family:
                similar[x, y] = max(similar[x, y], value)
    for x in (*_LIGHT, *_MATRIX, OpKind.ATTENTION):
        similar[x, OpKind.OTHER] = similar[OpKind.OTHER, x] = max(similar[x, OpKind.OTHER], 0.3)
    return similar


def phase_similarity() -> Float32:
    """How alike phases are: the backward phases are near each other, an unknown one is near all."""
    similar = np.eye(len(Phase), dtype=np.float32)
    similar[Phase.UNKNOWN, :] = similar[:, Phase.UNKNOWN] = 0.5
    similar[Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT] = 0.8
    similar[Phase.BACKWARD_WEIGHT, Phase.BACKWARD_INPUT] = 0.8
    return similar


WEIGHTS = {
    "kind": 0.30,
    "name": 0.20,
    "operator": 0.25,
    "phase": 0.10,
    "layer": 0.15,
    "module": 0.15,
    "chunk": 0.05,
    "microbatch": 0.10,
    "dimension": 0.15,
    "members": 0.10,
    "size": 0.20,
    "duration": 0.15,
}
"""What each feature counts; those that are not known on both sides are left out, and the rest is scaled to 1."""
LEAST = 0.5
"""Similarity from which on two operations may be the same."""
LEAST_OFDISTINCT = 0.35
"""The same for two operations of one distinct kind, such as two GEMMs."""


_PLACES = ("layer", "chunk", "microbatch")
"""Features that number repetitions: they are compared element by element, the others in a table."""
_LARGEST_TABLE = 1 << 24


class Similarity:
    """Similarity of some operations of both sides, from a table of the distinct operations of each."""

    def __init__(
        self,
        a: Operations,
        b: Operations,
        rows: tuple[Int64, Int64],
        strings: Sequence[str],
        known: frozenset[str],
        slower: Float64 | None = None,
    ) -> None:
        """Compare the operations in ``rows`` of a and of b.

        ``slower`` says for each kind by what factor operations of b take longer as a rule, as a logarithm.
        """
        used = {name: WEIGHTS[name] for name in ("kind", "name", "size", "duration", *sorted(known))}
        total = sum(used.values())
        self.weights = {name: np.float32(weight / total) for name, weight in used.items()}
        sides = tuple(zip((a, b), rows, strict=True))
        log_a, log_b = (np.log(np.maximum(side.duration[mine], 1)).astype(np.float32) for side, mine in sides)
        expected = log_a if slower is None else (log_a + slower[a.kind[rows[0]]]).astype(np.float32)
        self.logarithms = (expected, log_b)
        self.places = [
            (self.weights[name], a_values[rows[0]], b_values[rows[1]])
            for name in _PLACES
            if name in known
            for a_values, b_values in ((getattr(a, name), getattr(b, name)),)
        ]
        for columns in (
            ("kind", "name", "flops", "communication_bytes", "copied_bytes", *sorted(known - {*_PLACES})),
            ("kind", "name", *sorted(known - {*_PLACES, "module"})),
        ):
            (self.type_a, of_a), (self.type_b, of_b) = (
                _distinct(side, mine, columns) for side, mine in sides
            )
            if len(of_a) * len(of_b) <= _LARGEST_TABLE:
                break
        self.table = self._table(a, b, of_a, of_b, strings, known)

    def _table(
        self, a: Operations, b: Operations, x: Int64, y: Int64, strings: Sequence[str], known: frozenset[str]
    ) -> Float32:
        """Similarity without durations of the operations in rows ``x`` and ``y``; 0 where it does not suffice."""
        weights = self.weights
        kind_a, kind_b = a.kind[x][:, None], b.kind[y][None, :]
        kinds = kind_similarity()[kind_a, kind_b]
        found = weights["kind"] * kinds + weights["name"] * _by_words(a.name[x], b.name[y], strings)
        if "operator" in known:
            found += weights["operator"] * _by_words(a.operator[x], b.operator[y], strings)
        if "phase" in known:
            found += weights["phase"] * phase_similarity()[a.phase[x][:, None], b.phase[y][None, :]]
        size = np.exp(-np.abs(_sizes(a, x)[:, None] - _sizes(b, y)[None, :]))
        found += weights["size"] * np.where(np.isnan(size), np.float32(0.5), size)
        for name in sorted(known - {"operator", "phase", *_PLACES}):
            first, second = getattr(a, name)[x][:, None], getattr(b, name)[y][None, :]
            told: Bool = (first > _UNKNOWN.get(name, -1)) & (second > _UNKNOWN.get(name, -1))
            found += weights[name] * np.where(told, first == second, np.float32(0.5)).astype(np.float32)
        distinct = np.isin(kind_a, DISTINCT) & np.isin(kind_b, DISTINCT)
        least = np.where(distinct, LEAST_OFDISTINCT, LEAST).astype(np.float32)
        # What the table holds is by how much an operation is over what suffices, before its duration and place.
        result: Float32 = np.where(kinds > 0, found - least, np.float32(-2)).astype(np.float32)
        return result

    def score(self, a: Int64, b: Int64, most_off: float) -> Float32:
        """By how much elements are more alike than they have to be, by their position in ``rows``; broadcasts.

        0 where they cannot be the same, and where durations are off from what is expected by a factor whose logarithm
        is above ``most_off``. What is above the least is what counts, so that an alignment prefers one good match to
        two poor ones.
        """
        off = np.abs(self.logarithms[0][a] - self.logarithms[1][b])
        found: Float32 = self.table[self.type_a[a], self.type_b[b]]
        found = found + self.weights["duration"] * np.exp(-off)
        for weight, places_a, places_b in self.places:
            first, second = places_a[a], places_b[b]
            told = (first >= 0) & (second >= 0)
            found = found + weight * np.where(told, first == second, np.float32(0.5))
        alike = (found >= 0) & (off <= np.float32(most_off))
        return np.asarray(np.where(alike, found + _ANY_MATCH, np.float32(0)), dtype=np.float32)


def _distinct(side: Operations, rows: Int64, columns: Sequence[str]) -> tuple[Int64, Int64]:
    """A number for each distinct operation, and a row of each."""
    number = np.zeros(len(rows), dtype=np.int64)
    for name in columns:
        _, dense = np.unique(getattr(side, name)[rows], return_inverse=True)
        _, number = np.unique(number * (int(dense.max(initial=0)) + 1) + dense.ravel(), return_inverse=True)
        number = number.ravel().astype(np.int64)
    _, first = np.unique(number, return_index=True)
    return number, rows[first]


def _sizes(side: Operations, rows: Int64) -> Float32:
    """Logarithm of the FLOPs, the message or what is copied, NaN where not known."""
    size = np.maximum(side.flops[rows], np.maximum(side.communication_bytes, side.copied_bytes)[rows])
    return np.where(size > 0, np.log(np.maximum(size, 1)), np.nan).astype(np.float32)


def _by_words(a: Int64, b: Int64, strings: Sequence[str]) -> Float32:
    """Similarity of strings by their numbers; 0.5 where one is not known."""
    (distinct_a, at_a), (distinct_b, at_b) = (np.unique(ids, return_inverse=True) for ids in (a, b))
    words = [[strings[i] if i >= 0 else "" for i in ids.tolist()] for ids in (distinct_a, distinct_b)]
    table = name_similarity(words[0], words[1])
    table[distinct_a < 0, :] = 0.5
    table[:, distinct_b < 0] = 0.5
    return np.asarray(table[np.ix_(at_a.ravel(), at_b.ravel())], dtype=np.float32)
