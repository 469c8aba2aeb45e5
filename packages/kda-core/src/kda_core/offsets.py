"""Checks of cumulative sequence lengths (cu_seqlens) that lie in host memory."""

from __future__ import annotations

from operator import sub

from kda_core.errors import ArgumentError

CUMULATE = "Lengths? cu_seqlens is their cumulative sum, F.pad(lengths.cumsum(0), (1, 0))"
"""The hint for callers who passed lengths instead of offsets."""


def lengths_of(name: str, offsets: list[int], T: int, *, may_end_early: bool) -> tuple[int, ...]:
    """Returns the lengths of the N sequences that N+1 cumulative `offsets` describe.

    Args:
        name: name of the argument for error messages.
        T: number of tokens of the call.
        may_end_early: whether the last offset may be below T.

    Raises:
        ArgumentError: the offsets do not begin with 0, decrease, or do not end with T (at most T with `may_end_early`).
    """
    lengths = tuple(map(sub, offsets[1:], offsets))
    if offsets[0] != 0:
        summed = sum(offsets) == T and min(offsets) >= 0
        raise ArgumentError(name, "a first value of 0", str(offsets[0]), CUMULATE if summed else "")
    if min(lengths) < 0:
        at = next(i for i, n in enumerate(lengths) if n < 0)
        raise ArgumentError(
            name, "values that never decrease", f"{offsets[at]} before {offsets[at + 1]} at {at}"
        )
    if offsets[-1] > T or (offsets[-1] < T and not may_end_early):
        wanted = f"a last value of {'at most ' if may_end_early else ''}T={T}"
        raise ArgumentError(name, wanted, str(offsets[-1]))
    return lengths


def check_copy(offsets: list[int], copied: list[int]) -> None:
    """Checks that cu_seqlens_cpu has the values of cu_seqlens.

    Raises:
        ArgumentError: the message names the first difference.
    """
    for at, (wanted, got) in enumerate(zip(offsets, copied)):
        if wanted != got:
            raise ArgumentError("cu_seqlens_cpu", f"the values of cu_seqlens, {wanted} at {at}", str(got))
