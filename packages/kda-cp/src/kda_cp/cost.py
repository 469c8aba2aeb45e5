"""The cost model: predicted device times of direct calls and of splits, from measured constants.

A call of the backend works on tasks: one task per sequence and value head. `kda_cp.constants.Pass` gives its time.

==========================================  ==================================================================
execution                                   calls
==========================================  ==================================================================
serial                                      one forward call
generic split                               a forward call over the segments that need an exit state (all but the
                                            last of a sequence); ceil(K/V) over those that need a transition
                                            (neither first nor last); the merge; one over all segments
native split (the backend summarises        `summarize` over all segments, the merge, `execute_segments` over all
segments itself)                            segments; for each window of tokens
==========================================  ==================================================================

The backward has the same form, with constants of its own (`kda_cp.constants.Constants.of_backward`).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kda_cp.constants import Constants, Pass
from kda_cp.cuts import (
    GRANULE,
    MAX_SEGMENTS,
    Cut,
    CutByLength,
    Segments,
    longest_segment,
    outer_ends,
    windows,
)

LARGEST_SIMULATION = 4096
"""List scheduling is simulated up to this number of tasks. With more tasks, rounding to whole tasks hardly matters."""

BOUNDED = 8
"""The lower bound of a cut counts the summaries of this many sequences, the longest ones."""


def busiest_lane(lengths: Sequence[int], heads: int, lanes: int) -> float:
    """Returns the tokens of the busiest of `lanes` lanes.

    Each length occurs `heads` times. Tasks go, longest first, to the lane with the fewest tokens (Graham's LPT list
    scheduling). Above `LARGEST_SIMULATION` tasks the result is a lower bound that is within one segment.
    """
    tasks, longest = len(lengths) * heads, max(lengths)
    if tasks <= lanes:
        return longest
    if min(lengths) == longest:
        return -(-tasks // lanes) * longest
    if tasks > LARGEST_SIMULATION:
        return max(longest, sum(lengths) * heads / lanes)
    # Tasks come in groups of equal length, and so do the loads of lanes: one lane of each group is enough.
    same = math.gcd(heads, lanes)
    heads, lanes = heads // same, lanes // same
    ordered = [n for n in sorted(lengths, reverse=True) for _ in range(heads)]
    loads = ordered[:lanes][::-1]  # ascending, hence a heap
    for n in ordered[lanes:]:
        heapq.heapreplace(loads, loads[0] + n)
    return max(loads)


class Tasks:
    """The tasks of one packed call, `HV` for each sequence. It caches the busiest lanes.

    Args:
        HV: value heads.
        lengths: tokens of each sequence; empty if only `tokens` and `longest` are known.
        tokens: sum of the lengths. Used if `lengths` is empty.
        longest: largest length. Used if `lengths` is empty.
    """

    def __init__(self, HV: int, lengths: Sequence[int] = (), tokens: int = 0, longest: int = 0) -> None:
        self.lengths, self.HV = lengths, HV
        self.tokens, self.longest = (sum(lengths), max(lengths)) if lengths else (tokens, longest)
        self._lanes: dict[tuple[int, bool], float] = {}

    def busiest_lane(self, lanes: int, exact: bool) -> float:
        """Returns `busiest_lane`, or a lower bound of it if `exact` is false."""
        if (lanes, exact) not in self._lanes:
            tokens = busiest_lane(self.lengths, self.HV, lanes) if exact else self._bound(lanes)
            self._lanes[lanes, exact] = tokens
        return self._lanes[lanes, exact]

    def even_lane(self, lanes: int) -> float:
        """Returns the larger of the longest task and an even share: a lower bound of the busiest lane."""
        return max(self.longest, self.tokens * self.HV / lanes)

    def _bound(self, lanes: int) -> float:
        tasks = len(self.lengths) * self.HV
        if not lanes < tasks <= LARGEST_SIMULATION:
            return self.even_lane(lanes)
        # Of the n * lanes + 1 longest tasks, one lane has at least n + 1.
        ordered = sorted(self.lengths, reverse=True)
        rounds = range(1, -(-tasks // lanes))
        return max(self.even_lane(lanes), *((n + 1) * ordered[n * lanes // self.HV] for n in rounds))


def call_us(p: Pass, lengths: Sequence[int], HV: int) -> float:
    """Returns the time in us of a call over sequences of these lengths, of which there is at least one."""
    return _call_us(p, Tasks(HV, lengths), True)


def _call_us(p: Pass, tasks: Tasks, exact: bool) -> float:
    """Returns the time in us of a call (`Pass`); without `exact`, or without the lengths of the tasks, a lower bound."""
    work = tasks.tokens * tasks.HV
    if p.even or not tasks.lengths:
        latency = min([tasks.even_lane(lanes) * ns for lanes, ns in p.chain])
    else:
        latency = min([tasks.busiest_lane(lanes, exact) * ns for lanes, ns in p.chain])
    return p.call_us + (p.intra_chunk_ns * work + max(latency, p.work_ns * work)) / 1e3


@dataclass(frozen=True)
class CostModel:
    """Predicts the times of one kind of call on one device, in us.

    Attributes:
        constants: constants of the device, the backend and the dtype.
        HV: value heads.
        transition_calls: number of calls that compute all columns of the transitions, ceil(K/V).
        vanished: whether no transition is computed, because certified decay leaves all of them out.
        native: whether the backend summarises segments itself.
        window: tokens of a window of such a backend; 0 for no limit.
        crossing: whether the sequences are fragments of longer ones. Even whole ones are summarised then.
        granule: windows are cut at multiples of this number of tokens.
    """

    constants: Constants
    HV: int
    transition_calls: int
    vanished: bool
    native: bool
    window: int
    crossing: bool = False
    granule: int = GRANULE

    @property
    def native_passes(self) -> tuple[Pass, Pass] | None:
        """`summarize` and `execute`; None if splits are executed by forward calls."""
        c = self.constants
        if not self.native or self.vanished or c.summarize is None or c.execute is None:
            return None
        return c.summarize, c.execute

    @property
    def filling_counts(self) -> set[int]:
        """Numbers of segments that one sequence needs to fill the lanes of a pass."""
        passes = (self.constants.forward, self.constants.summarize, self.constants.execute)
        return {
            min(max(lanes // self.HV, 2), MAX_SEGMENTS)
            for p in passes
            if p is not None
            for lanes, _ in p.chain
        }

    def total(self, segments: Segments, exact: bool = True) -> float:
        """Returns the time of a plan; without `exact`, a lower bound that needs no list scheduling."""
        flat, most = [length for s in segments for length in s], max(map(len, segments), default=0)
        everything = Tasks(self.HV, flat)
        if most < 2 and not self.crossing:
            return self._forward(everything, exact)
        if self.native_passes is None:
            return self._generic_split(segments, everything, most, exact)
        if not self.window or everything.tokens <= self.window:
            return self._native_split(everything, most, exact)
        time = 0.0
        for window in windows(segments, self.window, self.granule):
            tasks = Tasks(self.HV, [length for _, length in window])
            most = max(Counter(n for n, _ in window).values())
            if most == 1 and not self.crossing:
                time += self._forward(tasks, exact)
            else:
                time += self._native_split(tasks, most, exact)
        return time

    def _generic_split(self, segments: Segments, everything: Tasks, most: int, exact: bool) -> float:
        c, split = self.constants, [s for s in segments if len(s) > 1]
        if self.crossing:
            exits = inner = everything
        else:
            exits = Tasks(self.HV, [length for s in split for length in s[:-1]])
            inner = Tasks(self.HV, [length for s in split for length in s[1:-1]])
        time = self._forward(everything, exact) + self._forward(exits, exact)
        if not self.vanished:
            time += self.transition_calls * self._forward(inner, exact)
        if len(split) > 1:
            time += c.gather_ns * (exits.tokens + inner.tokens) * self.HV / 1e3
        return time + c.merge_us * (most - 1)

    def _native_split(self, tasks: Tasks, most: int, exact: bool) -> float:
        """Returns the time of `summarize`, merge and `execute_segments`.

        `most`: largest number of segments of a sequence.
        """
        assert self.native_passes is not None
        summarize, execute = self.native_passes
        merge = self.constants.merge_us * (most - 1)
        return _call_us(summarize, tasks, exact) + merge + _call_us(execute, tasks, exact)

    def bound_of_any_split(self, lengths: tuple[int, ...]) -> float:
        """Returns a lower bound of the time of every split: of the calls that each needs, with all work spread evenly."""
        c, everything = self.constants, Tasks(self.HV, tokens=sum(lengths))
        if self.native_passes is None:
            return c.forward.call_us + _call_us(c.forward, everything, False)
        return self._native_split(everything, 1, False)

    def bound(self, ordered: list[int], tokens: int, cut: Cut) -> float:
        """Returns a lower bound of the time of a cut. It counts the summaries of the `BOUNDED` longest sequences only.

        Args:
            ordered: lengths of the sequences, ascending.
            tokens: their sum.
            cut: the cut.
        """
        c, longest = self.constants, ordered[-1]
        number = cut.number(longest)
        whole = cut.whole if isinstance(cut, CutByLength) else 0
        segment = longest_segment(longest, number, cut.granule)
        everything = Tasks(self.HV, tokens=tokens, longest=max(segment, whole))
        if self.native_passes is not None:
            if self.window and tokens > self.window:
                return 0.0
            return self._native_split(everything, number, False)
        if self.crossing:
            exits = inner = everything
        else:
            exits, inner = Tasks(self.HV), Tasks(self.HV)
            for n in ordered[-BOUNDED:]:
                if (count := cut.number(n)) > 1:
                    first, last_but_one = outer_ends(n, count, cut.granule)
                    exits.tokens += last_but_one
                    inner.tokens += last_but_one - first
                    exits.longest = max(exits.longest, first)
            inner.longest = exits.longest if inner.tokens else 0
        time = _call_us(c.forward, everything, False) + _call_us(c.forward, exits, False)
        if not self.vanished and inner.tokens:
            time += self.transition_calls * _call_us(c.forward, inner, False)
        return time + c.merge_us * (number - 1)

    def _forward(self, tasks: Tasks, exact: bool) -> float:
        return _call_us(self.constants.forward, tasks, exact) if tasks.lengths else 0.0
