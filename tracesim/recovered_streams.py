"""Ranks that run a forward beside a backward: where one action ends in the row of the kernels of its direction.

The kernels of one direction of a rank, those of pairs included, stand in one row, in which the actions follow each
other. Where pieces of a pair do not add up to known actions one by one, the whole row is cut at once, by the kernels of
actions that stand by themselves elsewhere. Every place where a transfer was posted has to be an end of one.

- *Forwards* are those.
- *Backwards* are those, and a backward for the input with the weight gradients that stand behind it, in any order.
- *Where a rank turns*, it holds two neighbouring stages (DualPipeV's last): a backward of one follows that of the next
  without a transfer, and the first kernels of one stand in a row with the last ones of the other. None stands by itself
  then, but there are as many as forwards, of each stage half, with lengths in the proportion of their forwards, for
  every microbatch the later stage first; and all are the same kernels, until they leave weight gradients to the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from .recovered_words import BACKWARD, FORWARD, WEIGHT, Burst, join, joined, split_by_known

_Word = tuple[int, ...]
_BACKWARDS = (BACKWARD, WEIGHT)


def cut_in_streams(turns: list[Burst]) -> list[Burst]:
    """The stretches of a rank, cut direction by direction where pieces of pairs do not add up.

    Args:
        turns: stretches between changes of direction or transfers, in order.
    """
    if max(map(_changes, _stretches(turns)), default=0) < 2:
        return joined(split_by_known(turns))
    pieces = split_by_known(turns, each_sends=True)
    found = joined(pieces)
    known = _known(pieces, surely=True)
    if _is_whole(found, known):
        return found
    forward = _row(pieces, (FORWARD,))
    backward = _row(pieces, _BACKWARDS)
    if forward is None or backward is None:
        return found
    for surely in (True, False):
        known = _known(pieces, surely=surely)
        bounds = _forward_bounds(forward, known)
        forwards = [forward.whole.part(begin, end) for begin, end in pairwise(bounds)]
        backwards = _by_words(backward, known, len(forwards)) or _at_a_turn(backward, forwards)
        if forwards and backwards:
            return sorted([*forwards, *_weights_in_turn(_alike(backwards))], key=lambda burst: burst.start)
    return found


# -- what is known -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Known:
    """Kernels of actions that stand by themselves, in order, once each."""

    sends: dict[_Word, set[bool]]
    """Whether forwards of these kernels send something."""
    forwards: tuple[_Word, ...]
    inputs: tuple[_Word, ...]
    """Of backwards, whole or for the input."""
    weights: tuple[_Word, ...]
    pairs: tuple[_Word, ...]
    """Of backwards for the input with their weight gradients behind them."""


def _known(pieces: Sequence[Burst], *, surely: bool) -> _Known:
    """Actions that stand by themselves.

    Between two transfers where directions change once at most, all pieces do. Where they change back, ``surely``: none;
    else the first and the last, which may be a little more than one action.
    """
    found: dict[str, dict[_Word, None]] = {FORWARD: {}, BACKWARD: {}, WEIGHT: {}, "": {}}
    sends: dict[_Word, set[bool]] = {}
    before: Burst | None = None
    for stretch in _stretches(pieces):
        whole = _changes(stretch) <= 1
        for number, burst in enumerate(stretch):
            stands = whole or (not surely and number in (0, len(stretch) - 1))
            if stands:
                found[burst.letter][burst.word] = None
                sends.setdefault(burst.word, set()).add(bool(burst.sends))
                if before is not None and (before.letter, burst.letter) == _BACKWARDS:
                    found[""][before.word + burst.word] = None
            before = burst if stands else None
    return _Known(sends, *(tuple(words) for words in found.values()))


def _stretches(pieces: Sequence[Burst]) -> list[list[Burst]]:
    """Pieces between transfers."""
    found: list[list[Burst]] = []
    for burst in pieces:
        if burst.follows_transfer or not found:
            found.append([])
        found[-1].append(burst)
    return found


def _changes(stretch: Sequence[Burst]) -> int:
    """How often pieces of a stretch change between forward and backward."""
    return sum((one.letter == FORWARD) != (other.letter == FORWARD) for one, other in pairwise(stretch))


def _is_whole(found: Sequence[Burst], known: _Known) -> bool:
    """Whether there are as many backwards as forwards, and these are all known."""
    count = Counter(burst.letter for burst in found)
    told = all(burst.word in known.forwards for burst in found if burst.letter == FORWARD)
    kinds = {_sorted(burst.word) for burst in found if burst.letter == BACKWARD}
    return told and count[FORWARD] == count[BACKWARD] and len(kinds) <= 2 * len(known.forwards)


@dataclass(frozen=True)
class _Row:
    """The kernels of a direction of a rank."""

    whole: Burst
    ends: frozenset[int]
    """Places where an action begins or ends: behind transfers, and around those that surely stand by themselves."""
    sends: frozenset[int]
    """Those of them behind which something was sent, by this direction or the other one of a pair."""


def _row(pieces: Sequence[Burst], letters: Collection[str]) -> _Row | None:
    mine: list[Burst] = []
    ends, sends, place, after = {0}, set[int](), 0, False
    for stretch in _stretches(pieces):
        stands = _changes(stretch) <= 1
        ends.add(place)
        for burst in stretch:
            if burst.letter in letters:
                ends |= {place} if stands or after else set()
                mine.append(burst)
                place += len(burst.word)
                after = stands
        if stretch[-1].sends:
            sends.add(place)
    if not mine:
        return None
    whole = join(mine)
    return _Row(
        whole, frozenset({*ends, *whole.cuts, *whole.behind, place}), frozenset({*sends, *whole.behind})
    )


def _sorted(word: _Word) -> _Word:
    return tuple(sorted(word))


# -- cutting -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Kind:
    """What a part of a row may be."""

    letter: str
    kernels: _Word
    """Sorted where their order does not count."""
    sends: bool | None = None
    """Whether it sends something, None where it may or may not."""


def _forward_bounds(row: _Row, known: _Known) -> list[int]:
    """Bounds of the forwards of a row; empty if it is not made of the known ones.

    One may be the other several times over, or begin with it. So those are taken that send where the known ones do, and
    of two kinds as many, if that can be.
    """
    words = sorted(known.forwards, key=lambda word: (-len(word), word))
    plain = [_Kind(FORWARD, word) for word in words]
    told = [replace(kind, sends=_only(known.sends[kind.kernels])) for kind in plain]
    for kinds, even in ((told, True), (told, False), (plain, True), (plain, False)):
        if even and len(kinds) != 2:
            continue
        if parsed := _parse(row, kinds, lambda word: word, even=even):
            return [0, *(end for end, _ in parsed)]
    return []


def _only(found: set[bool]) -> bool | None:
    return next(iter(found)) if len(found) == 1 else None


def _by_words(row: _Row, known: _Known, count: int) -> list[Burst]:
    """Backwards and weight gradients of a row by those that stand alone; empty if that does not make so many."""
    kinds = {
        _Kind(letter, _sorted(word)): None
        for words, letter in ((known.pairs, BACKWARD), (known.inputs, BACKWARD), (known.weights, WEIGHT))
        for word in words
    }
    ordered = sorted(kinds, key=lambda kind: (-len(kind.kernels), kind.letter, kind.kernels))
    parsed = _parse(row, ordered, _sorted)
    begins = [0, *(end for end, _ in parsed)]
    found = [
        replace(row.whole.part(begin, end), letter=kind.letter)
        for begin, (end, kind) in zip(begins, parsed, strict=False)
    ]
    return found if sum(burst.letter == BACKWARD for burst in found) == count else []


def _parse(
    row: _Row, kinds: Sequence[_Kind], as_known: Callable[[_Word], _Word], *, even: bool = False
) -> list[tuple[int, _Kind]]:
    """Ends and kinds of the parts of a row, long ones first; empty if it has none.

    Weight gradients begin at an end of something else, or behind others. ``even``: as many of the first kind as of the
    second.
    """
    word, stops = row.whole.word, sorted(row.ends)
    came: dict[tuple[int, int], tuple[tuple[int, int], _Kind] | None] = {(0, 0): None}
    waiting = [(0, 0)]
    while waiting:
        at = waiting.pop()
        place, balance = at
        previous = came[at]
        if place == len(word):
            continue
        stop = next(stop for stop in stops if stop > place)
        for number, kind in reversed(list(enumerate(kinds))):
            end = place + len(kind.kernels)
            if end > stop or as_known(word[place:end]) != kind.kernels:
                continue
            if kind.sends is not None and kind.sends != (end in row.sends):
                continue
            behind_weight = previous is not None and previous[1].letter == WEIGHT
            if kind.letter == WEIGHT and place not in row.ends and not behind_weight:
                continue
            after = (end, balance + (1, -1)[number] if even else 0)
            if after not in came:
                came[after] = (at, kind)
                waiting.append(after)
    found: list[tuple[int, _Kind]] = []
    step = came.get((len(word), 0))
    end = len(word)
    while step is not None:
        found.append((end, step[1]))
        end = step[0][0]
        step = came[step[0]]
    return found[::-1]


def _weights_in_turn(backwards: list[Burst]) -> list[Burst]:
    """The same, weight gradients in a row cut by what each backward for the input before has left, in their order.

    Those of stages that are alike but for their number of layers look like several. Nothing changes where the numbers
    do not fit.
    """
    left = _left_by_inputs(backwards)
    open_: list[int] = []
    found: list[Burst] = []
    for letter, group in groupby(backwards, key=lambda burst: burst.letter):
        run = list(group)
        if letter != WEIGHT:
            open_ += [left[burst.word] for burst in run if burst.word in left]
            found += run
            continue
        whole, bounds = join(run), [0]
        while open_ and bounds[-1] < len(whole.word):
            bounds.append(bounds[-1] + open_.pop(0))
        if bounds[-1] != len(whole.word):
            return backwards
        found += [whole.part(begin, end) for begin, end in pairwise(bounds)]
    return found if not open_ else backwards


def _left_by_inputs(backwards: Sequence[Burst]) -> dict[_Word, int]:
    """For backwards for the input how many kernels whole ones of theirs have more."""
    words = {burst.word for burst in backwards if burst.letter == BACKWARD}
    weights = {name for burst in backwards if burst.letter == WEIGHT for name in burst.word}
    found: dict[_Word, int] = {}
    for word in words:
        for whole in words:
            more = Counter(whole)
            more.subtract(word)
            if len(whole) > len(word) and min(more.values()) >= 0 and set(+more) <= weights:
                found[word] = min(found.get(word, len(whole)), len(whole) - len(word))
    return found


# -- the turn ----------------------------------------------------------------------------------------------------------


def _at_a_turn(row: _Row, forwards: Sequence[Burst]) -> list[Burst]:
    """Backwards and weight gradients of a rank with two neighbouring stages; empty if it is none."""
    sides = _lengths_of_sides(forwards)
    if sides is None:
        return []
    pairs, rest = divmod(len(row.whole.word), len(forwards) // 2)
    if rest or pairs * sides[0] % sum(sides):
        return []
    later = pairs * sides[0] // sum(sides)
    whole, count = (later, pairs - later), len(forwards)
    kernels = [_sorted(row.whole.word[:later]), _sorted(row.whole.word[later:pairs])]
    for split in range(count + 1):
        lengths = [whole[side % 2] for side in range(count - split)]
        places = _places(lengths)
        if not all(
            _sorted(row.whole.word[begin:end]) == kernels[side % 2]
            for side, (begin, end) in enumerate(pairwise(places))
        ):
            continue
        for inputs in _lengths_of_inputs(whole, sides) if split else [(0, 0)]:
            tail = [inputs[side % 2] for side in range(count - split, count)]
            weights = [whole[side % 2] - inputs[side % 2] for side in range(count - split, count)]
            bounds = _places([*lengths, *tail, *weights])
            if _fits(row, bounds) and _repeat(row.whole.word, bounds, count, split, kernels):
                letters = [BACKWARD] * count + [WEIGHT] * split
                return [
                    replace(row.whole.part(begin, end), letter=letter)
                    for letter, (begin, end) in zip(letters, pairwise(bounds), strict=True)
                ]
    return []


def _lengths_of_sides(forwards: Sequence[Burst]) -> tuple[int, int] | None:
    """Kernels of a forward of the later and of the earlier stage; None if they are not as many of two."""
    counts = Counter(burst.word for burst in forwards)
    if not forwards or len(forwards) % 2 or len(counts) > 2 or len(set(counts.values())) > 1:
        return None
    # The later stage sends to where its microbatches came from; the earlier one hands them over on the rank.
    sending = Counter(burst.word for burst in forwards if burst.sends)
    words = sorted(counts, key=lambda word: (-sending[word], word))
    return len(words[0]), len(words[-1])


def _lengths_of_inputs(whole: tuple[int, int], sides: tuple[int, int]) -> list[tuple[int, int]]:
    """Possible lengths of backwards for the input, of both sides, in their proportion, long ones first."""
    return [
        (length, length * sides[1] // sides[0])
        for length in range(whole[0] - 1, 0, -1)
        if not length * sides[1] % sides[0]
    ]


def _places(lengths: Sequence[int]) -> list[int]:
    found = [0]
    for length in lengths:
        found.append(found[-1] + length)
    return found


def _fits(row: _Row, bounds: Sequence[int]) -> bool:
    """Whether no part goes on beyond an end."""
    return row.ends <= set(bounds)


def _repeat(word: _Word, bounds: Sequence[int], count: int, split: int, kernels: Sequence[_Word]) -> bool:
    """Whether split backwards are the same kernels each, and with their weight gradients those of whole ones."""
    parts = [word[begin:end] for begin, end in pairwise(bounds)]
    seen: dict[tuple[int, bool], _Word] = {}
    for number in range(count - split, count):
        own, weights = parts[number], parts[number + split]
        if _sorted(own + weights) != kernels[number % 2]:
            return False
        for part, is_weight in ((own, False), (weights, True)):
            if seen.setdefault((number % 2, is_weight), _sorted(part)) != _sorted(part):
                return False
    return True


def _alike(bursts: Sequence[Burst]) -> list[Burst]:
    """The same with one order of kernels for those that have the same in several."""
    words = {(burst.letter, _sorted(burst.word)): burst.word for burst in reversed(bursts)}
    return [replace(burst, word=words[burst.letter, _sorted(burst.word)]) for burst in bursts]
