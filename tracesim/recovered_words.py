"""Words of kernels: a stretch of compute as the names of its kernels, compared with those of other stretches.

Bursts that hold several actions are split, pieces of interleaved actions joined, by which words stand alone between
transfers; see ``tracesim.recovered_bursts``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, takewhile

from op_graphs.columns import Int32

FORWARD, BACKWARD, WEIGHT = "F", "B", "W"


@dataclass(frozen=True)
class Burst:
    """Kernels of one action. Times in nanoseconds."""

    letter: str
    """``F``, ``B`` (whole, or for the input where ``W`` stand beside it) or ``W``."""
    start: int
    end: int
    word: tuple[int, ...]
    """Names of the kernels."""
    ends: tuple[int, ...]
    """End of each kernel."""
    starts: tuple[int, ...]
    sends: tuple[int, ...] = ()
    """Rows of the sends of its output."""
    behind: tuple[int, ...] = ()
    """For each send how many of the kernels it was posted behind."""
    cuts: tuple[int, ...] = ()
    """Places of the kernels right before which a transfer was posted."""

    @property
    def follows_transfer(self) -> bool:
        """Whether a transfer was posted right before it."""
        return 0 in self.cuts

    def sending(self, rows: Sequence[int]) -> Burst:
        """The same with these sends, behind all of its kernels."""
        return replace(self, sends=tuple(rows), behind=(len(self.word),) * len(rows))

    def part(self, begin: int, end: int) -> Burst:
        """Some of its kernels; sends stay with those they were posted behind."""
        sends = [(row, at) for row, at in zip(self.sends, self.behind, strict=True) if begin < at <= end]
        return replace(
            self,
            start=self.starts[begin],
            end=max(self.ends[begin:end]),
            word=self.word[begin:end],
            ends=self.ends[begin:end],
            starts=self.starts[begin:end],
            sends=tuple(row for row, _ in sends),
            behind=tuple(at - begin for _, at in sends),
            cuts=tuple(at - begin for at in self.cuts if begin <= at < end),
        )


def sends_shared(bursts: list[Burst], peers: Int32, readers: Mapping[int, str]) -> list[Burst]:
    """Give the sends posted behind several bursts to those that made what they send.

    The bursts between two transfers, but weight gradients, may have made it: the last, unless its kernels do not send
    to that rank where they stand alone between transfers: then the last of the direction that the receiver goes on with
    (``readers``), or of which that is not known. Of several sends that of the forward is posted first, as frameworks do
    behind a pair.
    """
    stretches: list[list[int]] = []
    for number, burst in enumerate(bursts):
        if burst.follows_transfer or not stretches:
            stretches.append([])
        stretches[-1].append(number)
    makers = [[n for n in stretch if bursts[n].letter != WEIGHT] for stretch in stretches]
    alone: dict[tuple[str, tuple[int, ...]], set[int]] = {}
    for numbers, stretch in zip(makers, stretches, strict=True):
        sends = [row for n in stretch for row in bursts[n].sends]
        if len(numbers) == 1:
            kind = bursts[numbers[0]].letter, bursts[numbers[0]].word
            alone.setdefault(kind, set()).update(int(peers[row]) for row in sends)
    for numbers, stretch in zip(makers, stretches, strict=True):
        sends = sorted(row for n in stretch for row in bursts[n].sends)
        if not sends or not numbers:
            continue
        for number in stretch:
            bursts[number] = bursts[number].sending(())
        open_ = sorted(
            numbers[-len(sends) :] if len(sends) > 1 else numbers, key=lambda n: bursts[n].letter != FORWARD
        )
        for row in sends:
            seen = {n: alone.get((bursts[n].letter, bursts[n].word)) for n in open_}
            known = [n for n, to in seen.items() if to is not None and int(peers[row]) in to]
            possible = [n for n, to in seen.items() if to is None or int(peers[row]) in to]
            if len(sends) > 1:
                maker = known[0] if len(known) == 1 else open_[0]
            else:
                read = [n for n in open_ if bursts[n].letter == readers.get(row)]
                maker = max(numbers[-1:] if numbers[-1] in possible else read or known or open_)
            bursts[maker] = bursts[maker].sending((row,))
            open_.remove(maker)
            if not open_:
                break
    return bursts


def tails_moved(bursts: list[Burst]) -> list[Burst]:
    """Weight gradients at the end of a backward for the input (of an embedding), split from the burst behind it."""
    certain = set()
    for before, burst, behind in zip([None, *bursts[:-1]], bursts, [*bursts[1:], None], strict=True):
        begins = burst.follows_transfer or before is None or before.letter == FORWARD
        ends = behind is None or behind.follows_transfer or behind.letter == FORWARD
        if burst.letter == WEIGHT and begins and ends:
            certain.add(burst.word)
    found = list(bursts)
    for number, burst in enumerate(bursts[1:], 1):
        before = found[number - 1]
        if burst.letter != WEIGHT or burst.follows_transfer or before.letter != BACKWARD:
            continue
        for word in sorted(certain, key=lambda word: (-len(word), word)):
            rest = len(burst.word) - len(word)
            if 0 < 2 * rest < len(word) and burst.word[rest:] == word:
                found[number - 1] = join((before, burst.part(0, rest))).sending(before.sends)
                found[number] = burst.part(rest, len(burst.word))
                break
    return found


def split_by_known(bursts: list[Burst], *, each_sends: bool = False) -> list[Burst]:
    """Bursts that are several shorter ones of the rank in a row, split.

    A part of a forward or backward begins as one does behind a transfer: pieces of interleaved ones do not. With
    ``each_sends`` one that is a shorter one several times over is whole, where those by themselves send each what they
    made.
    """
    begins, found = _begins(bursts), bursts
    for letter in (FORWARD, BACKWARD, WEIGHT):
        words = {burst.word for burst in found if burst.letter == letter}
        known = [word for word in words if letter == WEIGHT or word[0] in begins[letter]]
        alone = _alone(found, letter)
        pieces: list[Burst] = []
        for burst in found:
            bounds: Sequence[int] = ()
            if burst.letter == letter:
                shorter = [word for word in known if len(word) < len(burst.word)]
                if not (each_sends and _sends_once(burst, alone)):
                    bounds = _parse(burst.word, shorter) or _beside(burst, alone)
            pieces += [burst.part(begin, end) for begin, end in pairwise(bounds)] or [burst]
        found = pieces
    return found


def _sends_once(burst: Burst, alone: Mapping[tuple[int, ...], set[bool]]) -> bool:
    """Whether a burst sends once, and is a word over and over that sends whenever it stands alone."""
    count = len(burst.word)
    return len(burst.sends) == 1 and any(
        sends == {True}
        and len(word) < count
        and not count % len(word)
        and _repeats(burst.word, count // len(word))
        and burst.word[: len(word)] == word
        for word, sends in alone.items()
    )


def _beside(burst: Burst, known: Mapping[tuple[int, ...], set[bool]]) -> list[int]:
    """Bounds of a burst that ends or begins with a known word, and of the rest; empty if it does not.

    Where its layers are alike it may do both: it ends with one that sends as it does, or begins with one that does not.
    """
    word, found = burst.word, []
    for part in sorted(known, key=lambda part: (-len(part), part)):
        rest = len(word) - len(part)
        if 2 * rest < len(part):
            continue
        if word[rest:] == part:
            found.append(([0, rest, len(word)], bool(burst.sends) in known[part]))
        if word[: len(part)] == part:
            found.append(([0, len(part), len(word)], False in known[part]))
        if found:
            break
    return next((bounds for bounds, fits in found if fits), found[0][0] if found else [])


def _begins(bursts: Sequence[Burst]) -> dict[str, set[int]]:
    """First kernels of the bursts of each direction that follow a transfer, or of all where none does."""
    found = {}
    for letter in (FORWARD, BACKWARD, WEIGHT):
        mine = [burst for burst in bursts if burst.letter == letter]
        behind = {burst.word[0] for burst in mine if burst.follows_transfer}
        found[letter] = behind or {burst.word[0] for burst in mine}
    return found


def _parse(word: tuple[int, ...], known: Sequence[tuple[int, ...]]) -> list[int]:
    """Bounds of a concatenation of known words, long ones first; empty if it is none."""
    ways: dict[int, int] = {0: 0}
    for place in range(len(word)):
        if place not in ways:
            continue
        for part in sorted(known, key=len):
            if word[place : place + len(part)] == part:
                ways[place + len(part)] = place
    if len(word) not in ways:
        return []
    bounds = [len(word)]
    while bounds[-1]:
        bounds.append(ways[bounds[-1]])
    return bounds[::-1]


def joined(bursts: list[Burst]) -> list[Burst]:
    """Pieces of interleaved forwards and backwards that together are a whole one of the rank, joined.

    Their kernels may stand in another order: weight gradients move behind an exchange. Pieces that make no whole one
    that stands elsewhere are one with those that follow them between the same two transfers.
    """
    found = [burst for burst in bursts if burst.letter == WEIGHT]
    stretch = dict(zip(bursts, accumulate(int(burst.follows_transfer) for burst in bursts), strict=True))
    for letter in (FORWARD, BACKWARD):
        mine = [burst for burst in bursts if burst.letter == letter]
        # Words of half the length of one that stands alone are no pieces; nor of the longest, where none stands alone
        # and one is several times as long as others.
        alone = set(_alone(bursts, letter)) or {burst.word for burst in mine}
        least = max(map(len, alone), default=0) / 2
        whole = {burst.word for burst in mine if len(burst.word) >= least}
        words = {tuple(sorted(word)): word for word in whole}
        longest = max(map(len, words), default=0)
        place = 0
        while place < len(mine):
            count = 1 if mine[place].word in whole else _pieces(mine[place:], words, longest)
            if count == 1 and mine[place].word not in whole:
                count = _between_transfers(mine[place:], whole, stretch)
            joined = join(mine[place : place + count])
            parts = _peeled(joined, words) if count > 1 else [joined]
            found += [replace(part, word=words.get(tuple(sorted(part.word)), part.word)) for part in parts]
            place += count
    return sorted(found, key=lambda burst: burst.start)


def _alone(bursts: Sequence[Burst], letter: str) -> dict[tuple[int, ...], set[bool]]:
    """Kernels of the bursts of a direction that stand alone between transfers, and whether these send something."""
    found: dict[tuple[int, ...], set[bool]] = {}
    for burst, behind in zip(bursts, [*bursts[1:], None], strict=True):
        if burst.letter == letter and burst.follows_transfer and (not behind or behind.follows_transfer):
            found.setdefault(burst.word, set()).add(bool(burst.sends))
    return found


def _pieces(bursts: Sequence[Burst], words: Collection[tuple[int, ...]], longest: int) -> int:
    """How many bursts from the first on make the longest of some words (sorted) together; 1 if they make none."""
    names: list[int] = []
    best = 1
    for count, burst in enumerate(bursts, 1):
        names += burst.word
        if len(names) > longest:
            break
        if tuple(sorted(names)) in words:
            best = count
    return best


def _peeled(burst: Burst, words: Collection[tuple[int, ...]]) -> list[Burst]:
    """Joined pieces of two actions, parted where those at one end are the kernels (sorted) of a whole one."""
    length = len(burst.word)
    for word in sorted(words, key=len, reverse=True):
        rest = length - len(word)
        # What is left is about as long; a shorter rest may be a part of the whole one.
        if 2 * rest < len(word):
            continue
        if tuple(sorted(burst.word[rest:])) == word:
            return [burst.part(0, rest), burst.part(rest, length)]
        if tuple(sorted(burst.word[: len(word)])) == word:
            return [burst.part(0, len(word)), burst.part(len(word), length)]
    return [burst]


def _between_transfers(
    bursts: Sequence[Burst], whole: Collection[tuple[int, ...]], stretch: Mapping[Burst, int]
) -> int:
    """How many bursts from the first on are pieces between the same two transfers as it is."""
    same = takewhile(lambda burst: burst.word not in whole and stretch[burst] == stretch[bursts[0]], bursts)
    return max(1, sum(1 for _ in same))


def join(bursts: Sequence[Burst]) -> Burst:
    """Bursts of one direction as one."""
    if len(bursts) == 1:
        return bursts[0]
    offsets = [0, *accumulate(len(burst.word) for burst in bursts)]
    placed = list(zip(bursts, offsets, strict=False))
    return Burst(
        bursts[0].letter,
        bursts[0].start,
        max(burst.end for burst in bursts),
        tuple(name for burst in bursts for name in burst.word),
        tuple(end for burst in bursts for end in burst.ends),
        tuple(start for burst in bursts for start in burst.starts),
        tuple(row for burst in bursts for row in burst.sends),
        tuple(offset + at for burst, offset in placed for at in burst.behind),
        tuple(offset + at for burst, offset in placed for at in burst.cuts),
    )


def split_by_count(bursts: list[Burst], needed: int) -> list[Burst]:
    """Bursts that hold several actions in equal parts, so that there are as many as are needed of each direction."""
    for letter in (FORWARD, BACKWARD, WEIGHT):
        mine = Counter(burst.word for burst in bursts if burst.letter == letter)
        wanted = needed if letter != WEIGHT else _weights_needed(bursts)
        parts = _parts_of_each(mine, wanted - sum(mine.values()))
        if letter == WEIGHT and not parts:
            parts = _by_length(mine, bursts)
        bursts = [
            part
            for burst in bursts
            for part in _equal_parts(burst, parts.get(burst.word, 1) if burst.letter == letter else 1)
        ]
    return bursts


def _weights_needed(bursts: Sequence[Burst]) -> int:
    """How many weight gradients there must be: one for each backward, where all of these are of one length."""
    backwards = [len(burst.word) for burst in bursts if burst.letter == BACKWARD]
    return len(backwards) if len(set(backwards)) == 1 else 0


def _by_length(words: Mapping[tuple[int, ...], int], bursts: Sequence[Burst]) -> dict[tuple[int, ...], int]:
    """Into how many parts weight gradients are to be cut: each is what a whole backward is longer than one without.

    Only where there are then as many of them as backwards without.
    """
    backwards = Counter(len(burst.word) for burst in bursts if burst.letter == BACKWARD)
    longer = {whole - part: part for whole in sorted(backwards) for part in backwards if whole > part}
    found = {
        word: len(word) // length
        for word in words
        for length in longer
        if len(word) > length and not len(word) % length and _repeats(word, len(word) // length)
    }
    without = sum(backwards[part] for part in {longer[length] for length in longer})
    return found if sum(count * found.get(word, 1) for word, count in words.items()) == without else {}


def _parts_of_each(words: Mapping[tuple[int, ...], int], missing: int) -> dict[tuple[int, ...], int]:
    """Into how many equal parts bursts are to be cut, by their kernels, to make so many more of them.

    All of them into parts of one length, or those of one word.
    """
    if missing <= 0:
        return {}
    length, rest = divmod(
        sum(len(word) * count for word, count in words.items()), sum(words.values()) + missing
    )
    if not rest and all(_repeats(word, len(word) // length) for word in words if len(word) % length == 0):
        found = {word: len(word) // length for word in words if len(word) % length == 0}
        if len(found) == len(words):
            return found
    for word in sorted(words, key=lambda word: (-len(word), word)):
        more, rest = divmod(missing, words[word])
        if not rest and _repeats(word, more + 1):
            return {word: more + 1}
    return {}


def _repeats(word: tuple[int, ...], count: int) -> bool:
    """Whether a word is one word so many times over."""
    length, rest = divmod(len(word), count)
    return not rest and word == word[:length] * count


def _equal_parts(burst: Burst, count: int) -> list[Burst]:
    length = len(burst.word) // count
    return [burst.part(begin, begin + length) for begin in range(0, len(burst.word), length)]
