"""How uneven the ranks of a stage are: tokens that experts draw, documents that sequences are packed from.

Without a routing or a length distribution everything is balanced and every factor here is 1. With one, each rank has a
:class:`RankLoad`; the most loaded rank stands for its stage, the others are there to report the spread.

- **Routing.** Every expert has a chance to be among the ``top_k`` of a token; chances add up to ``top_k`` and none is
  above 1 (a token chooses an expert once; what is cut off goes to the others in proportion). By Zipf's law the i-th
  most popular expert has a weight of ``i**-a``, and experts are dealt to the ranks in order of popularity like cards;
  a histogram has a weight for each expert, which lies where its number puts it. All layers route alike. Of what
  chooses an expert beyond its capacity the rest is dropped; experts padded to their capacity are all alike.
- **Lengths.** Documents are drawn one after another (a fixed seed) and packed end to end into sequences of
  ``seq_len`` tokens, cut at the borders; attention stays inside a document. A rank's microbatches all do the mean of
  what its sequences of the step need.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

import numpy as np

from .columns import Int64
from .expert_tokens import capacity, padded, routed, routing_tokens, source_multiple, token_multiple
from .model import ModelDescription
from .plan import ParallelPlan, Routing, SequenceLengths, TrainingPlan

Level = Literal["most", "mean", "least"]
_MOST_DOCUMENTS = 1 << 21
"""Documents drawn at most; ranks repeat the draws of others behind that."""

_SMALLEST_WEIGHT = 1e-200
"""Relative to the largest; below it a weight is none."""


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents of the sequences of a rank: how many tokens, and how many such documents an average sequence has."""

    lengths: Int64
    counts: np.ndarray[tuple[int], np.dtype[np.float64]]

    def total(self, of_length: Callable[[int], float]) -> float:
        """Sum of a function of the length over the documents of an average sequence."""
        values = np.array([of_length(length) for length in self.lengths.tolist()])
        return float((values * self.counts).sum())

    @property
    def squares(self) -> float:
        """Sum of squared lengths over an average sequence."""
        return float((self.lengths.astype(np.float64) ** 2 * self.counts).sum())

    @property
    def effective_length(self) -> float:
        """Length of equal documents with as much attention: mean of squares over mean."""
        return self.squares / float((self.lengths * self.counts).sum())


@dataclass(frozen=True)
class RankLoad:
    """What one rank does relative to a balanced one; 1 where nothing is uneven.

    Pairs are (what this rank gets, what the most loaded rank of its group sends or gets).
    """

    sent: float = 1.0
    """Token copies a rank sends, relative to what it would send if routing were balanced: less where some are
    dropped."""
    copies: float = 1.0
    """Token copies its experts get, relative to those that a rank sends."""
    most_copies: float = 1.0
    padding: float = 1.0
    """Rows of its experts' products for each copy."""
    unique: float = 1.0
    """Tokens that reach it when each comes once, however many of its experts it wants."""
    most_unique: float = 1.0
    documents: Documents | None = None
    """None where a sequence is one document."""


BALANCED = RankLoad()


@dataclass(frozen=True)
class StageLoads:
    """Loads of the ranks of a stage at three levels, and which rank is the most and the least loaded."""

    most: RankLoad = BALANCED
    mean: RankLoad = BALANCED
    least: RankLoad = BALANCED
    coordinates: dict[Level, dict[str, int]] = field(default_factory=dict)
    """Coordinates (``ep``, or ``dp`` where experts are balanced) of the rank that has a level."""

    @property
    def balanced(self) -> bool:
        """Whether all ranks are alike."""
        return self.most is self.least

    def at(self, level: Level) -> RankLoad:
        """The load at a level."""
        return {"most": self.most, "mean": self.mean, "least": self.least}[level]

    def rank(self, parallel: ParallelPlan, pp: int, level: Level = "most") -> int:
        """The first rank of a pipeline stage that has a level of load; the first of all where ranks are alike."""
        wanted = self.coordinates.get(level, {})
        if "ep" not in wanted:
            return parallel.rank_of(pp=pp, **wanted)
        ranks = (
            parallel.rank_of(tp=tp, cp=cp, dp=dp, pp=pp)
            for dp in range(parallel.dp)
            for cp in range(parallel.cp)
            for tp in range(parallel.tp)
        )
        return min(rank for rank in ranks if parallel.coordinates(rank)["ep"] == wanted["ep"])


def stage_loads(model: ModelDescription, parallel: ParallelPlan, training: TrainingPlan) -> StageLoads:
    """Loads of the ranks of every stage of a scenario."""
    experts = _expert_loads(model, parallel, training)
    documents = _document_loads(parallel, training)
    if experts is None and documents is None:
        return StageLoads()
    coordinates: dict[Level, dict[str, int]] = {}
    loads: dict[Level, RankLoad] = {}
    levels: tuple[Level, ...] = ("most", "mean", "least")
    for level in levels:
        place, load = experts[level] if experts else (-1, BALANCED)
        at_dp, packed = documents[level] if documents else (-1, None)
        loads[level] = replace(load, documents=packed)
        if place >= 0:
            coordinates[level] = {"ep": place}
        elif at_dp >= 0:
            coordinates[level] = {"dp": at_dp}
    if not coordinates:
        return StageLoads(loads["mean"], loads["mean"], loads["mean"])
    return StageLoads(loads["most"], loads["mean"], loads["least"], coordinates)


# -- experts -----------------------------------------------------------------------------------------------------


def expert_chances(routing: Routing, experts: int, top_k: int) -> tuple[float, ...]:
    """Chance of each expert, by its number, to be among the ``top_k`` of a token; the sum is ``top_k``.

    By Zipf's law experts are numbered by popularity.
    """
    if routing.zipf is not None:
        weights = np.arange(1, experts + 1, dtype=np.float64) ** -routing.zipf
    else:
        weights = np.array(routing.counts, dtype=np.float64)
    return tuple(_at_most_once(weights, top_k).tolist())


def _at_most_once(
    weights: np.ndarray[tuple[int], np.dtype[np.float64]], total: int
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Weights scaled to a total with none above 1: what is cut off is shared by the rest in proportion."""
    weights = weights / weights.max()
    chances = np.zeros_like(weights)
    certain = np.zeros(len(weights), dtype=bool)
    while True:
        free = weights[~certain].sum()
        left = total - certain.sum()
        chances[certain] = 1.0
        if free > _SMALLEST_WEIGHT:
            chances[~certain] = weights[~certain] * (left / free)
        elif left > 0:
            # More experts are needed than have any weight: the others share the rest evenly.
            chances[~certain] = left / (~certain).sum()
        above = ~certain & (chances > 1)
        if not above.any():
            return chances
        certain |= above


def _expert_loads(
    model: ModelDescription, parallel: ParallelPlan, training: TrainingPlan
) -> dict[Level, tuple[int, RankLoad]] | None:
    """Place in the expert-parallel group and load of the most and least loaded rank, and of the mean."""
    moe, ep, routing = model.moe, parallel.ep, training.routing
    if moe is None or routing is None:
        return None
    chances = np.array(expert_chances(routing, moe.experts, moe.top_k))
    # Zipf's experts are dealt like cards, those of a histogram lie in the order of their numbers.
    by_rank = chances.reshape(-1, ep).T if routing.zipf is not None else chances.reshape(ep, -1)
    tokens, multiple = routing_tokens(parallel, training), source_multiple(parallel, training)
    counts = routed(moe, tokens, by_rank * tokens, multiple)
    balanced = moe.experts * routed(moe, tokens, tokens * moe.top_k / moe.experts, multiple)
    sent = float(counts.sum()) / balanced
    copies = counts.sum(axis=1) * ep / counts.sum()
    rows = padded(counts * ep * parallel.etp, token_multiple(training)).sum(axis=1)
    padding = rows / (counts.sum(axis=1) * ep * parallel.etp).clip(_SMALLEST_WEIGHT)
    # A token is dropped as often as an expert is chosen too often.
    limit = capacity(moe, tokens)
    kept = by_rank if limit is None else np.minimum(by_rank, limit / tokens)
    even = 1 - (1 - moe.top_k / moe.experts) ** (moe.experts // ep)
    unique = (1 - np.prod(1 - kept, axis=1)) / (even * counts.sum() / (tokens * moe.top_k))
    # A rank sends what a mean rank gets, so the exchange ends with the rank that gets the most.
    most_copies, most_unique = max(1.0, float(copies.max())), float(unique.max())
    most, least = int(copies.argmax()), int(copies.argmin())

    def load(place: int) -> RankLoad:
        numbers = (
            float(copies[place]),
            most_copies,
            float(padding[place]),
            float(unique[place]),
            most_unique,
        )
        return RankLoad(sent, *numbers)

    if ep == 1:
        return {"most": (-1, load(0)), "mean": (-1, load(0)), "least": (-1, load(0))}
    mean_padding = float(rows.sum() / (counts.sum() * ep * parallel.etp))
    mean = RankLoad(sent, 1.0, most_copies, mean_padding, float(unique.mean()), most_unique)
    return {"most": (most, load(most)), "mean": (-1, mean), "least": (least, load(least))}


# -- documents ---------------------------------------------------------------------------------------------------


def _document_loads(
    parallel: ParallelPlan, training: TrainingPlan
) -> dict[Level, tuple[int, Documents]] | None:
    if training.sequence_lengths is None:
        return None
    sequences = training.micro_batch_size * training.num_microbatches
    return _packed(training.sequence_lengths, training.seq_len, sequences, parallel.dp)


@lru_cache(maxsize=16)
def _packed(
    lengths: SequenceLengths, seq_len: int, sequences: int, ranks: int
) -> dict[Level, tuple[int, Documents]]:
    """Documents of the data-parallel rank with the most and with the least attention, and of all together."""
    most = max(1, int(_MOST_DOCUMENTS * mean_length(lengths) / seq_len))
    drawn = min(ranks, max(1, most // sequences))
    each = sequences if drawn > 1 else min(sequences, most)
    pieces, sequence = pack(lengths, seq_len, drawn * each)
    rank = sequence // each
    squares = np.bincount(rank, weights=pieces.astype(np.float64) ** 2, minlength=drawn)
    chosen = {"most": int(squares.argmax()), "least": int(squares.argmin())}
    loads: dict[Level, tuple[int, Documents]] = {"mean": (-1, _documents(pieces, drawn * each))}
    levels: tuple[Level, ...] = ("most", "least")
    for level in levels:
        loads[level] = chosen[level], _documents(pieces[rank == chosen[level]], each)
    return loads


def pack(lengths: SequenceLengths, seq_len: int, sequences: int) -> tuple[Int64, Int64]:
    """Draw documents and pack them end to end; returns the tokens of each piece and the sequence it lies in.

    A document that does not fit goes on in the next sequence, where it is a document of its own.
    """
    tokens = sequences * seq_len
    generator = np.random.default_rng(0)
    ends = np.zeros(0, dtype=np.int64)
    total = 0
    while total < tokens:
        wanted = math.ceil((tokens - total) / mean_length(lengths) * 1.05) + 16
        drawn = _draw(lengths, wanted, generator)
        added = np.cumsum(drawn) + total
        ends = np.concatenate([ends, added])
        total = int(added[-1])
    borders = np.arange(1, sequences + 1, dtype=np.int64) * seq_len
    cuts = np.unique(np.concatenate([ends[ends < tokens], borders]))
    starts = np.concatenate([np.zeros(1, dtype=np.int64), cuts[:-1]])
    return cuts - starts, starts // seq_len


def mean_length(lengths: SequenceLengths) -> float:
    """Mean tokens of a document."""
    if lengths.mean is not None:
        return lengths.mean
    return float(np.average(np.array(lengths.lengths), weights=np.array(lengths.weights)))


def _draw(lengths: SequenceLengths, count: int, generator: np.random.Generator) -> Int64:
    if lengths.mean is not None:
        # The mean of a lognormal is exp(mu + sigma^2 / 2).
        mu = math.log(lengths.mean) - lengths.sigma**2 / 2
        drawn = np.exp(np.minimum(mu + lengths.sigma * generator.standard_normal(count), 40.0))
        return np.maximum(np.rint(drawn), 1).astype(np.int64)
    weights = np.array(lengths.weights, dtype=np.float64)
    places = np.searchsorted(np.cumsum(weights) / weights.sum(), generator.random(count), side="right")
    return np.array(lengths.lengths, dtype=np.int64)[np.minimum(places, len(weights) - 1)]


def _documents(pieces: Int64, sequences: int) -> Documents:
    values, counts = np.unique(pieces, return_counts=True)
    return Documents(values.astype(np.int64), counts / sequences)
