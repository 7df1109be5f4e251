"""Which stage and microbatch each stretch of compute belongs to, followed along the transfers between ranks.

What a rank receives is used in the order in which it was posted, and what it sends was made in that order. So each
forward has a predecessor: the one whose output it received, on another rank, or, where a rank holds two neighbouring
stages, one of its own whose output was not sent. A forward without any begins on the first stage; the number of
predecessors is the stage, the order of the first ones the microbatch. Backwards are followed in the same way from the
last stage, where they come in the order of their forwards; weight gradients follow the backwards of their rank in
order.

From which rank the forwards of a rank receive, if at all, is told by their kernels and by where they send: stretches
of the same kernels that send to one rank are alike in this, and of the choices that fit the numbers of receives one is
taken in which every receive has ended before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from op_graphs.columns import Int64
from op_graphs.timeline import Timeline
from schedules import Action, ActionKind

from .analysis.transfers import Transfers
from .errors import TraceError
from .recovered_bursts import RankBursts
from .recovered_words import BACKWARD, FORWARD, WEIGHT, Burst

_Place = tuple[int, int]
"""Index of a rank among those given, and of a burst on it."""
_MOST_KINDS = 6
"""Bursts of more kinds than this on a rank, of one direction, are not told apart."""
_LATE_NS = 2_000
"""A receive may end so much after its reader starts: the resolution of a trace."""


@dataclass(frozen=True)
class RankActions:
    """The actions of one pipeline rank in order, with their times in nanoseconds."""

    rank: int
    """Row of :attr:`Timeline.ranks`."""
    actions: tuple[Action, ...]
    start: Int64
    end: Int64


@dataclass
class _Labels:
    """Stage and microbatch of bursts as far as they are known."""

    forward: dict[_Place, tuple[int, int]]
    backward: dict[_Place, tuple[int, int]]


def follow_flow(
    timeline: Timeline, partner: Mapping[int, int], ranks: Sequence[RankBursts]
) -> list[tuple[tuple[Action, Burst], ...]]:
    """The bursts of each rank in order, each with its action.

    Raises:
        TraceError: if what was sent and received does not make a pipeline.
    """
    flow = _Flow(timeline, partner, ranks)
    labels = flow.labels()
    weights = flow.weights(labels)
    split = set(weights.values())
    found = []
    for place, rank in enumerate(ranks):
        row = []
        for number, burst in enumerate(rank.bursts):
            at = place, number
            if burst.letter == FORWARD:
                row.append((Action(labels.forward[at][0], ActionKind.FORWARD, labels.forward[at][1]), burst))
            elif burst.letter == BACKWARD:
                kind = ActionKind.BACKWARD_INPUT if at in split else ActionKind.FULL_BACKWARD
                row.append((Action(labels.backward[at][0], kind, labels.backward[at][1]), burst))
            else:
                stage, microbatch = labels.backward[weights[at]]
                row.append((Action(stage, ActionKind.BACKWARD_WEIGHT, microbatch), burst))
        found.append(tuple(row))
    return found


class _Flow:
    def __init__(self, timeline: Timeline, partner: Mapping[int, int], ranks: Sequence[RankBursts]) -> None:
        self.timeline, self.ranks = timeline, ranks
        self.end = timeline.slices.start + timeline.slices.duration
        self.rank = timeline.slice_ranks()
        self.place = {rank.rank: place for place, rank in enumerate(ranks)}
        self.partner = partner
        self.producer: dict[int, _Place] = {
            row: (place, number)
            for place, rank in enumerate(ranks)
            for number, burst in enumerate(rank.bursts)
            for row in burst.sends
        }
        """Burst that made what a send sends."""

    def labels(self) -> _Labels:
        """Stage and microbatch of every forward and backward."""
        before, first = self._predecessors(FORWARD)
        chains, stages = self._along(before, first)
        # Two copies of the model begin at the two ends; the second numbers its stages on.
        begins = sorted({place for place, _ in first})
        copy = {number: begins.index(place) for number, (place, _) in enumerate(first)}
        forward = {at: (copy[number] * stages + depth, number) for at, (depth, number) in chains.items()}
        self._check(forward, stages * len(begins), "forward")
        after, last = self._predecessors(BACKWARD)
        backward = self._backwards(forward, stages, after, last)
        self._check(backward, stages * len(begins), "backward")
        return _Labels(forward, backward)

    # -- predecessors ----------------------------------------------------------------------------------------

    def _predecessors(self, letter: str) -> tuple[dict[_Place, _Place], list[_Place]]:
        """The burst whose output each burst of a direction reads, and those that read no burst's, in order of time."""
        before: dict[_Place, _Place] = {}
        first: list[_Place] = []
        for place, rank in enumerate(self.ranks):
            mine = [number for number, burst in enumerate(rank.bursts) if burst.letter == letter]
            sources = self._sources(rank, letter)
            read_from = self._read_from(rank, mine, sources, letter)
            for source, producers in sources.items():
                reading = [number for number in mine if read_from[number] == source]
                for number, (_, producer) in zip(reading, producers, strict=True):
                    before[place, number] = producer
            alone = {number for number in mine if read_from[number] is None}
            first += self._local(place, rank, mine, alone, before)
        order = {at: self.ranks[at[0]].bursts[at[1]].start for at in first}
        return before, sorted(first, key=lambda at: (at[0], order[at]))

    def _sources(self, rank: RankBursts, letter: str) -> dict[int, list[tuple[int, _Place]]]:
        """Receives of a direction by the rank they come from, in order, each with the burst that made it."""
        found: dict[int, list[tuple[int, _Place]]] = {}
        for row in rank.receives.tolist():
            producer = self.producer.get(self.partner.get(row, -1))
            if producer is not None and self.ranks[producer[0]].bursts[producer[1]].letter == letter:
                found.setdefault(producer[0], []).append((row, producer))
        return found

    def _read_from(
        self,
        rank: RankBursts,
        mine: Sequence[int],
        sources: Mapping[int, Sequence[tuple[int, _Place]]],
        letter: str,
    ) -> dict[int, int | None]:
        """The rank each burst of a direction receives from, None for nothing; see the module."""
        alike: dict[tuple[tuple[int, ...], int], list[int]] = {}
        for number in mine:
            burst = rank.bursts[number]
            alike.setdefault((burst.word, self._sends_to(burst)), []).append(number)
        best: tuple[int, dict[int, int | None]] | None = None
        groups = list(alike.items())
        choices = product((*sources, None), repeat=len(groups)) if len(groups) <= _MOST_KINDS else ()
        for chosen in choices:
            found = {n: source for (_, numbers), source in zip(groups, chosen, strict=True) for n in numbers}
            # What neither sends nor receives is no stage; what comes back to where it came from is the turn of a V.
            if any(source is None and to < 0 for ((_, to), _), source in zip(groups, chosen, strict=True)):
                continue
            turns = sum(source == to for ((_, to), _), source in zip(groups, chosen, strict=True))
            if (best is None or turns < best[0]) and self._fits(rank, found, sources):
                best = turns, found
        if best is not None:
            return best[1]
        words = {FORWARD: "forwards", BACKWARD: "backwards"}
        raise TraceError(
            f"rank {self.timeline.ranks.rank[rank.rank]} has {len(mine)} {words[letter]} and "
            f"{sum(map(len, sources.values()))} matched receives for them, and its kernels do not tell which of them "
            "receive what; give the files of all pipeline ranks, or a trace with PP: annotations"
        )

    def _sends_to(self, burst: Burst) -> int:
        """Index of the rank that gets the output of a burst; -1 for none."""
        if not burst.sends:
            return -1
        receiver = self.partner.get(burst.sends[0], -1)
        return self.place.get(int(self.rank[receiver]), -2) if receiver >= 0 else -2

    def _fits(
        self,
        rank: RankBursts,
        read_from: Mapping[int, int | None],
        sources: Mapping[int, Sequence[tuple[int, _Place]]],
    ) -> bool:
        """Whether as many bursts read from a rank as receives come from it, and each of these ends before its burst."""
        for source, receives in sources.items():
            reading = [number for number, read in read_from.items() if read == source]
            if len(reading) != len(receives):
                return False
            if any(
                self.end[row] > rank.bursts[number].start + _LATE_NS
                for number, (row, _) in zip(sorted(reading), receives, strict=True)
            ):
                return False
        return True

    def _local(
        self,
        place: int,
        rank: RankBursts,
        mine: Sequence[int],
        alone: set[int],
        before: dict[_Place, _Place],
    ) -> list[_Place]:
        """Join bursts that receive nothing to those of the rank that send nothing; returns what is left of them."""
        makers = [number for number in mine if not rank.bursts[number].sends]
        readers = sorted(alone)
        fits = len(makers) == len(readers) and all(
            rank.bursts[maker].end <= rank.bursts[reader].start + _LATE_NS
            for maker, reader in zip(makers, readers, strict=True)
        )
        if not fits:
            return [(place, number) for number in readers]
        for maker, reader in zip(makers, readers, strict=True):
            before[place, reader] = place, maker
        return []

    # -- numbers ---------------------------------------------------------------------------------------------

    def _along(
        self, before: Mapping[_Place, _Place], first: Sequence[_Place]
    ) -> tuple[dict[_Place, tuple[int, int]], int]:
        """Number of predecessors of each burst, and which of ``first`` is the first of them; and the longest chain."""
        found = {at: (0, number) for number, at in enumerate(first)}
        for at in before:
            chain: list[_Place] = []
            following = at
            while following not in found:
                chain.append(following)
                if len(chain) > len(before) or following not in before:
                    raise TraceError("what the ranks of the trace send and receive goes round in a circle")
                following = before[following]
            depth, number = found[following]
            for further, member in enumerate(reversed(chain), 1):
                found[member] = depth + further, number
        return found, max((depth for depth, _ in found.values()), default=-1) + 1

    def _backwards(
        self,
        forward: Mapping[_Place, tuple[int, int]],
        stages: int,
        after: Mapping[_Place, _Place],
        last: Sequence[_Place],
    ) -> dict[_Place, tuple[int, int]]:
        """Stage and microbatch of backwards, from those of the last stages in the order of their forwards."""
        ends: dict[int, list[tuple[int, int]]] = {}
        for (place, _), (stage, microbatch) in sorted(forward.items()):
            if stage % stages == stages - 1:
                ends.setdefault(place, []).append((stage, microbatch))
        begun: list[tuple[int, int]] = []
        for place, _ in last:
            if not ends.get(place):
                raise TraceError(
                    "the trace has backwards of the last stage whose forwards it does not show, or their sends and "
                    "receives are not matched; give whole steps of all pipeline ranks"
                )
            begun.append(ends[place].pop(0))
        chains, _ = self._along(after, last)
        return {at: (begun[number][0] - depth, begun[number][1]) for at, (depth, number) in chains.items()}

    def _check(self, labels: Mapping[_Place, tuple[int, int]], stages: int, name: str) -> None:
        count: dict[int, int] = {}
        for stage, _ in labels.values():
            count[stage] = count.get(stage, 0) + 1
        if set(count) != set(range(stages)) or len(set(count.values())) != 1:
            listed = ", ".join(f"{count.get(stage, 0)}" for stage in range(max(stages, 1)))
            raise TraceError(
                f"the stages of the trace have {listed} {name}s: some are cut off, or their sends and receives are "
                "not matched; give whole steps of all pipeline ranks"
            )

    def weights(self, labels: _Labels) -> dict[_Place, _Place]:
        """The backward for the input that each weight gradient follows: the first of its rank that is open."""
        found: dict[_Place, _Place] = {}
        for place, rank in enumerate(self.ranks):
            open_: list[int] = []
            split = _split_words(rank.bursts)
            for number, burst in enumerate(rank.bursts):
                if burst.letter == BACKWARD and burst.word in split:
                    open_.append(number)
                elif burst.letter == WEIGHT:
                    if not open_:
                        raise TraceError(
                            f"rank {self.timeline.ranks.rank[rank.rank]} has weight gradients before their backward"
                        )
                    found[place, number] = place, open_.pop(0)
        return found


def partners(transfers: Transfers) -> dict[int, int]:
    """The other end of each matched send and receive."""
    matches = transfers.matches
    members: dict[int, list[int]] = {}
    for row, operation in zip(matches.row.tolist(), matches.operation.tolist(), strict=True):
        members.setdefault(operation, []).append(row)
    return {row: other for pair in members.values() if len(pair) == 2 for row, other in _both(pair)}


def _both(pair: Sequence[int]) -> Iterator[tuple[int, int]]:
    yield pair[0], pair[1]
    yield pair[1], pair[0]


def _split_words(bursts: Sequence[Burst]) -> set[tuple[int, ...]]:
    """Kernels of the backwards that leave weight gradients to others: all, or the shorter ones where some are whole.

    Those that with weight gradients are the kernels of whole ones, where they are as many as the weight gradients.
    """
    words = {burst.word for burst in bursts if burst.letter == BACKWARD}
    weights = sum(burst.letter == WEIGHT for burst in bursts)
    if not weights:
        return set()
    wholes = {tuple(sorted(word)) for word in words}
    left = {burst.word for burst in bursts if burst.letter == WEIGHT}
    parts = {word for word in words if any(tuple(sorted(word + other)) in wholes for other in left)}
    if sum(burst.letter == BACKWARD and burst.word in parts for burst in bursts) == weights:
        return parts
    chosen: set[tuple[int, ...]] = set()
    for word in sorted(words, key=len):
        if sum(burst.letter == BACKWARD and burst.word in chosen for burst in bursts) >= weights:
            break
        chosen.add(word)
    return chosen


def without_transfers(ranks: Sequence[RankBursts]) -> list[tuple[tuple[Action, Burst], ...]]:
    """The bursts of each rank with their actions, if each rank is one stage, in the order given, and nothing is sent.

    Microbatches are numbered in the order of the forwards of a rank, and of its backwards.

    Raises:
        TraceError: if the ranks have different numbers of forwards or backwards.
    """
    found = []
    counts = set()
    for stage, rank in enumerate(ranks):
        seen = {FORWARD: 0, BACKWARD: 0, WEIGHT: 0}
        split = _split_words(rank.bursts)
        row = []
        for burst in rank.bursts:
            kind = {FORWARD: ActionKind.FORWARD, WEIGHT: ActionKind.BACKWARD_WEIGHT}.get(burst.letter)
            if kind is None:
                kind = ActionKind.BACKWARD_INPUT if burst.word in split else ActionKind.FULL_BACKWARD
            row.append((Action(stage, kind, seen[burst.letter]), burst))
            seen[burst.letter] += 1
        counts |= {seen[FORWARD], seen[BACKWARD]}
        found.append(tuple(row))
    if len(counts) > 1:
        raise TraceError(
            f"the trace shows no matched sends and receives, and its ranks {_listed(counts)} forwards and backwards"
        )
    return found


def _listed(counts: set[int]) -> str:
    return "differ in their number of" if counts else "have no"
