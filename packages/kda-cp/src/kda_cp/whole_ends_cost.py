"""The cost model of plans with whole ends (`kda_cp.whole_ends`), and the best of these plans.

Step 1 runs two calls at the same time, the first segment as a whole call and `summarize` over the inner segments. It takes as long as the
slower one. Step 3 is the same with the last segment and `execute_segments`. `kda_cp.constants.Beside` has their constants.

A whole call gets the part of the device on which its chains limit it. It takes as long as one chain over its tokens, those of an end and of other
sequences. A longer end leaves less work to the calls over the inner segments, so the best ends take as long as the calls beside them.
"""

from __future__ import annotations

from collections.abc import Sequence

from kda_cp.constants import Constants, Pass
from kda_cp.cuts import GRANULE, Segments, cut

LARGEST_SHARE = 0.75
"""Largest part of the device of a whole call. The chains of more heads leave too little to the inner segments."""

INNER_COUNTS = (1, 2, 3, 4, 5, 6, 8, 11, 14, 18, 24)
"""Numbers of inner segments that are tried."""


class WholeEndsModel:
    """Predicts the times of plans with whole ends, in us.

    Args:
        constants: constants of the device, the backend and the dtype, with `beside`.
        HV: value heads.
        granule: cuts are at multiples of this number of tokens.
    """

    def __init__(self, constants: Constants, HV: int, granule: int = GRANULE) -> None:
        beside = constants.beside
        assert beside is not None
        self._wholes, self._inners = (beside.first, beside.last), (beside.summarize, beside.execute)
        self._merge_us, self._HV, self._granule = constants.merge_us, HV, granule
        lanes, _ = beside.first.chain[0]
        self._share = HV / lanes  # of the device, for a whole call

    def total(self, segments: Segments) -> float | None:
        """Returns the time of a plan; None if its heads need more than `LARGEST_SHARE` of the device."""
        if self._share > LARGEST_SHARE:
            return None
        return self._merge_us * (max(map(len, segments)) - 1) + sum(self.steps(segments))

    def steps(self, segments: Segments) -> tuple[float, float]:
        """Returns the times of `summarize_beside` and of `execute_beside`."""
        at = max(range(len(segments)), key=lambda n: len(segments[n]))
        first, *inner, last = segments[at]
        tokens, longest = sum(inner), max(inner)

        def time(end: int, others: Segments, whole: Pass, step: Pass) -> float:
            all_tokens = end + sum(n for (n,) in others)
            of_inner = step.call_us + self._inner_us(step, tokens, longest)
            return max(whole.call_us + all_tokens * _token_us(whole), of_inner)

        ends, others = (first, last), (segments[:at], segments[at + 1 :])
        of_first, of_last = map(time, ends, others, self._wholes, self._inners)
        return of_first, of_last

    def best(self, lengths: Sequence[int], limit: float = float("inf")) -> tuple[Segments, float] | None:
        """Returns the fastest plan that splits the longest of these sequences, and its time; None if no plan takes less than ``limit``."""
        if self._share > LARGEST_SHARE or not lengths:
            return None
        others = sum(lengths) - max(lengths)
        if others * min(map(_token_us, self._wholes)) >= limit:  # most calls of many sequences
            return None
        at = max(range(len(lengths)), key=lambda n: lengths[n])
        before, behind = (tuple((n,) for n in others) for others in (lengths[:at], lengths[at + 1 :]))
        found = (
            self._balanced(lengths[at], sum(lengths[:at]), sum(lengths[at + 1 :]), count)
            for count in self._counts()
        )
        plans = [(*before, split, *behind) for split in found if split]
        timed = [(self.total(segments) or 0.0, segments) for segments in plans]
        if not timed:
            return None
        time, segments = min(timed)
        return (segments, time) if time < limit else None

    def _counts(self) -> list[int]:
        """Returns the numbers of inner segments that are tried: `INNER_COUNTS`, and those that fill the lanes of a way."""
        lanes = [n for step in self._inners for n, _ in step.chain]
        filling = {round(n * (1 - self._share) / self._HV) for n in lanes}
        return sorted({*INNER_COUNTS, *(n for n in filling if 0 < n < INNER_COUNTS[-1])})

    def _balanced(self, tokens: int, before: int, behind: int, count: int) -> tuple[int, ...] | None:
        """Returns the segments of a sequence, with this number of inner ones, for which both calls of a step take about equally long; None
        for too few tokens. ``before``, ``behind``: tokens of the other sequences."""
        # A whole call has ``offset + inner * slope`` tokens.
        both = list(zip(self._wholes, self._inners))
        offsets = [(step.call_us - whole.call_us) / _token_us(whole) for whole, step in both]
        slopes = [self._inner_us(step, 1.0, 1 / count) / _token_us(whole) for whole, step in both]
        inner = (tokens + before + behind - sum(offsets)) / (1 + sum(slopes))
        first, last = (
            max(1, round((offset + inner * slope - others) / self._granule)) * self._granule
            for offset, slope, others in zip(offsets, slopes, (before, behind))
        )
        between = tokens - first - last
        return (
            (first, *cut(between, count, self._granule), last) if between >= count * self._granule else None
        )

    def _inner_us(self, step: Pass, tokens: float, longest: float) -> float:
        """Returns the time of `summarize` or `execute_segments` on the rest of the device, without its fixed time. Both spread tasks evenly."""
        rest = 1 - self._share
        chains = min(max(longest, tokens * self._HV / (lanes * rest)) * ns for lanes, ns in step.chain)
        is_memory = step is self._inners[1]  # the bandwidth of HBM is not shared by SMs
        work = (step.work_ns / (1.0 if is_memory else rest) + step.intra_chunk_ns / rest) * tokens * self._HV
        return max(chains, work) / 1e3


def _token_us(whole: Pass) -> float:
    """Returns the time of a token of a whole call in us."""
    return whole.chain[0][1] / 1e3
