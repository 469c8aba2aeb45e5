"""Cuts sequences into segments, and groups segments into windows. Pure arithmetic on token counts."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kda_core.contract import SAVED_SPACING, ProblemShape

Segments = tuple[tuple[int, ...], ...]
"""For each sequence the lengths of its segments, in tokens."""

GRANULE = 64
"""The planner cuts at multiples of this number of tokens. It is a multiple of every kernel's chunk size, and of the default
`chunk_size` of intermediate states."""


def granule_of(shape: ProblemShape) -> int:
    """Returns the number of tokens at whose multiples automatic plans of a call have their cuts."""
    return SAVED_SPACING if shape.options.needs_backward else GRANULE


COUNTS = (*range(2, 13), 14, 16, 18, 21, 24, 28, 32, 37, 42, 48, 56, 64)
"""Numbers of segments that the planner tries for the longest sequence."""

MAX_SEGMENTS = COUNTS[-1]

WHOLE = (1, 2, 4)
"""Multiples of the segment length. For each of them the planner tries a cut that leaves sequences up to it whole."""


def cut(length: int, segments: int, granule: int) -> tuple[int, ...]:
    """Returns the lengths of at most `segments` segments of nearly equal length that `length` tokens are cut into.

    All segments but the last are multiples of `granule` tokens.
    """
    granules = -(-length // granule)
    segments = max(1, min(segments, granules))
    ends = [granules * i // segments * granule for i in range(segments)]
    ends.append(length)
    return tuple(map(operator.sub, ends[1:], ends))


def outer_ends(length: int, segments: int, granule: int) -> tuple[int, int]:
    """Returns the token at which the first segment of `cut(length, segments, granule)` ends, and the last but one."""
    granules = -(-length // granule)
    return granules // segments * granule, granules * (segments - 1) // segments * granule


def longest_segment(length: int, segments: int, granule: int) -> int:
    """Returns the longest of `cut(length, segments, granule)`. There must be at most as many segments as granules."""
    granules = -(-length // granule)
    each, remainder = divmod(granules, segments)
    if (
        segments == 1 or remainder == 1
    ):  # only the last segment has `each` + 1 granules, and its last one may not be full
        return length - granules * (segments - 1) // segments * granule
    return (each + (remainder > 0)) * granule


class CutByLength(NamedTuple):
    """Cuts each sequence into the fewest segments of at most a given length.

    Attributes:
        longest: longest segment in tokens.
        whole: sequences of at most this many tokens stay whole.
        granule: cuts are at multiples of this number of tokens.
    """

    longest: int
    whole: int
    granule: int = GRANULE

    def number(self, length: int) -> int:
        """Returns the number of segments of a sequence."""
        return -(-length // self.longest) if length > self.whole else 1

    def segments(self, lengths: tuple[int, ...]) -> Segments:
        """Returns the segments of sequences of these lengths."""
        longest, whole, granule = self
        return tuple([cut(n, -(-n // longest), granule) if n > whole else (n,) for n in lengths])


class CutByNumber(NamedTuple):
    """Cuts each sequence into the same number of segments, or fewer if it is short.

    Attributes:
        most: largest number of segments of a sequence.
        shortest: shortest segment in tokens, to within a granule.
        granule: as in `CutByLength`.
    """

    most: int
    shortest: int
    granule: int = GRANULE

    def number(self, length: int) -> int:
        """Returns the number of segments of a sequence."""
        return max(1, min(self.most, length // self.shortest))

    def segments(self, lengths: tuple[int, ...]) -> Segments:
        """Returns the segments of sequences of these lengths."""
        most, shortest, granule = self
        return tuple(
            [cut(n, min(most, n // shortest), granule) if n >= 2 * shortest else (n,) for n in lengths]
        )


Cut = CutByLength | CutByNumber
"""A rule that cuts all sequences of a call."""


def candidates(
    ordered: Sequence[int], shortest: int, lanes: Iterable[int], windows: int, granule: int = GRANULE
) -> list[Cut]:
    """Returns the cuts that the planner compares, about 100. Each splits at least one sequence.

    There are two kinds:

    - `CutByLength`. The segment length divides the longest sequence into one of `COUNTS` segments. Sequences of at most
      one, two or four (`WHOLE`) segment lengths stay whole.
    - `CutByNumber`, with one of `COUNTS` as the number.

    Args:
        ordered: lengths of the sequences, ascending.
        shortest: shortest segment in tokens, at least `granule`.
        lanes: numbers of segments that are tried like those of `COUNTS`, because they fill the lanes of the backend.
        windows: number of windows of the call. Each number of segments is also tried per window.
        granule: cuts are at multiples of this number of tokens.
    """
    longest = ordered[-1] if ordered else 0
    single = {*COUNTS, *lanes}
    counts = sorted({*single, *(n * windows for n in single)})
    found: list[Cut] = []
    for size in dict.fromkeys(max(shortest, _round_up(-(-longest // n), granule)) for n in counts):
        # Two limits give the same cut if they leave the same number of sequences whole.
        for whole in dict.fromkeys(bisect_right(ordered, limit * size) for limit in WHOLE):
            if whole < len(ordered):
                found.append(CutByLength(size, ordered[whole - 1] if whole else 0, granule))
    if len(ordered) > 1 and longest >= 2 * shortest:
        found += [CutByNumber(count, shortest, granule) for count in counts]
    return found


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def windows(
    segments: Sequence[Sequence[int]], tokens: int, granule: int = GRANULE
) -> list[list[tuple[int, int]]]:
    """Groups all segments, in order, into windows of at most `tokens` tokens.

    The numbers of tokens of the windows are equal to within about half a segment. A segment that is longer than a window
    is cut further.

    Args:
        segments: lengths of the segments of each sequence.
        tokens: a multiple of `granule`; 0 for one window.
        granule: a segment is cut further at multiples of this number of tokens.

    Returns:
        For each window its segments as pairs (sequence, length).
    """
    flat = [(n, length) for n, lengths in enumerate(segments) for length in lengths]
    total, longest = sum(length for _, length in flat), max((length for _, length in flat), default=0)
    if tokens < 1 or total <= tokens:
        return [flat]
    if longest > tokens:
        flat = [(n, length) for n, long in flat for length in cut(long, -(-long // tokens), granule)]
    even = -(-total // -(-total // tokens))
    limit = max(granule, min(tokens, even + min(longest, tokens) // 2))
    found: list[list[tuple[int, int]]] = [[]]
    remaining = limit  # tokens that the last window may still get
    for n, length in flat:
        if length > remaining:
            found.append([])
            remaining = max(limit, length)
        found[-1].append((n, length))
        remaining -= length
    return found
