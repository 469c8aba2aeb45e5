"""Cuts sequences into segments, and groups segments into windows. Pure arithmetic on token counts."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

Segments = tuple[tuple[int, ...], ...]
"""For each sequence the lengths of its segments, in tokens."""

GRANULE = 64
"""The planner cuts at multiples of this. They are multiples of every kernel's chunk size, and of the default
`chunk_size` of intermediate states."""

COUNTS = (*range(2, 13), 14, 16, 18, 21, 24, 28, 32, 37, 42, 48, 56, 64)
"""Numbers of segments that the planner tries for the longest sequence."""

MAX_SEGMENTS = COUNTS[-1]

WHOLE = (1, 2, 4)
"""Multiples of the segment length. For each of them, the planner tries to leave shorter sequences whole."""


def cut(length: int, segments: int, granule: int) -> tuple[int, ...]:
    """Cuts `length` tokens into at most `segments` segments of nearly equal length.

    All segments but the last are multiples of `granule`.
    """
    granules = -(-length // granule)
    segments = max(1, min(segments, granules))
    ends = [granules * i // segments * granule for i in range(segments)]
    ends.append(length)
    return tuple(map(operator.sub, ends[1:], ends))


def outer_ends(length: int, segments: int) -> tuple[int, int]:
    """Returns where the first and the last but one segment of `cut(length, segments, GRANULE)` end."""
    granules = -(-length // GRANULE)
    return granules // segments * GRANULE, granules * (segments - 1) // segments * GRANULE


def longest_segment(length: int, segments: int) -> int:
    """Returns the longest of `cut(length, segments, GRANULE)`, for at most as many segments as granules."""
    granules = -(-length // GRANULE)
    each, remainder = divmod(granules, segments)
    if segments == 1 or remainder == 1:  # the last segment has the additional granule, which may not be full
        return length - granules * (segments - 1) // segments * GRANULE
    return (each + (remainder > 0)) * GRANULE


class Cut(NamedTuple):
    """A rule that cuts all sequences of a call.

    Attributes:
        size: longest segment in tokens; 0 if all sequences get the same number of segments.
        whole: sequences of at most this many tokens stay whole. Used if `size` is not 0.
        most: largest number of segments of a sequence. Used if `size` is 0.
        shortest: shortest segment in tokens, to within a granule. Used if `size` is 0.
    """

    size: int
    whole: int
    most: int = 0
    shortest: int = 0

    def number(self, length: int) -> int:
        """Returns the number of segments of a sequence."""
        if self.size:
            return -(-length // self.size) if length > self.whole else 1
        return max(1, min(self.most, length // self.shortest))

    def segments(self, lengths: tuple[int, ...]) -> Segments:
        """Returns the segments of sequences of these lengths."""
        if self.size:
            size, whole = self.size, self.whole
            return tuple([cut(n, -(-n // size), GRANULE) if n > whole else (n,) for n in lengths])
        most, shortest = self.most, self.shortest
        return tuple(
            [cut(n, min(most, n // shortest), GRANULE) if n >= 2 * shortest else (n,) for n in lengths]
        )


def candidates(ordered: Sequence[int], shortest: int, lanes: Iterable[int], windows: int) -> list[Cut]:
    """Returns the cuts that the planner compares, about 100. Each splits at least one sequence.

    There are two kinds:

    - By length. The segment length divides the longest sequence into one of `COUNTS` segments. Sequences of at most
      one, two or four (`WHOLE`) segment lengths stay whole. The others are cut into the fewest segments of at most
      this length.
    - By number. Every sequence gets the same number of segments, if it is long enough.

    Args:
        ordered: lengths of the sequences, ascending.
        shortest: shortest segment in tokens.
        lanes: further numbers of segments, which fill the lanes of the backend.
        windows: windows of the call. Each number of segments is also tried per window.
    """
    longest = ordered[-1] if ordered else 0
    single = {*COUNTS, *lanes}
    counts = sorted({*single, *(n * windows for n in single)})
    found = []
    for size in dict.fromkeys(max(shortest, _round_up(-(-longest // n), GRANULE)) for n in counts):
        # Limits without a sequence length between them leave the same sequences whole.
        for whole in dict.fromkeys(bisect_right(ordered, limit * size) for limit in WHOLE):
            if whole < len(ordered):
                found.append(Cut(size, ordered[whole - 1] if whole else 0))
    if len(ordered) > 1 and longest >= 2 * shortest:
        found += [Cut(0, 0, count, shortest) for count in counts]
    return found


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def windows(segments: Sequence[Sequence[int]], tokens: int) -> list[list[tuple[int, int]]]:
    """Groups all segments, in order, into windows of at most `tokens` tokens.

    Windows have about equal numbers of tokens, to within half a segment. A segment that is longer than a window is
    cut further.

    Args:
        segments: lengths of the segments of each sequence.
        tokens: a multiple of `GRANULE`; 0 for one window.

    Returns:
        For each window its segments as pairs (sequence, length).
    """
    flat = [(n, length) for n, lengths in enumerate(segments) for length in lengths]
    total, longest = sum(length for _, length in flat), max((length for _, length in flat), default=0)
    if tokens < 1 or total <= tokens:
        return [flat]
    if longest > tokens:
        flat = [(n, length) for n, long in flat for length in cut(long, -(-long // tokens), GRANULE)]
    even = -(-total // -(-total // tokens))
    limit = max(GRANULE, min(tokens, even + min(longest, tokens) // 2))
    found: list[list[tuple[int, int]]] = [[]]
    room = limit
    for n, length in flat:
        if length > room:
            found.append([])
            room = max(limit, length)
        found[-1].append((n, length))
        room -= length
    return found
