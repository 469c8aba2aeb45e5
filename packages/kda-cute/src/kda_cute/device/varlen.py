"""Slots: which tokens of a value head each slot holds, for sequences as rows of B or packed along T by device offsets.

A sequence of L tokens has ceil(L / chunk) *slots*, one for each chunk. Packed sequence n, which starts at token s, has those
from slot ``s // chunk + n`` on. Ranges never overlap, because ``ceil(L / chunk) <= end // chunk - s // chunk + 1``, so that
no kernel needs a prefix sum; some slots stay unused.

Functions take a namespace ``s``: ``chunk``; N sequences of T tokens each, or packed along T by ``offsets``, the address
of N + 1 integers of ``offset_bytes`` (4, 8; 0: not packed); ``span``, the slots of a head.
"""

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from kda_cute.device import ptx


@cute.jit
def slots(chunk: cutlass.Constexpr[int], offset_bytes: Int32, N: Int32, T: Int32) -> Int32:
    """Returns the number of slots of a head."""
    count = N * cute.ceil_div(T, chunk)
    if offset_bytes > 0:
        count = T // chunk + N
    return count


def end_of_last(s):
    """Returns the end of the last packed sequence, at least 1. Used in place of T (which is at least 1), it excludes the slots
    of padding behind the last sequence, and offsets that point there."""
    return clamped(s, s.N, Int32(1))


def clamped(s, n, low):
    """Returns offset n clamped to [low, T], because offsets on the device are not trusted."""
    wide = s.offset_bytes == 8
    address = s.offsets + Int64(n) * s.offset_bytes
    value = ptx.load_global_i64(address, wide) + Int64(ptx.load_global_i32(address, s.offset_bytes == 4))
    return Int32(cutlass.min(cutlass.max(value, Int64(low)), Int64(s.T)))


@cute.jit
def owner(s, slot: Int32) -> Int32:
    """Returns the last sequence n whose first slot ``start // chunk + n`` is at most ``slot``. A whole warp searches, 32
    probes at a time."""
    lane = cute.arch.lane_idx()
    low, span = Int32(0), Int32(s.N)
    while span > 1:
        step = (span + 31) // 32
        probe = low + lane * step
        below = Boolean(False)
        if lane * step < span:
            below = clamped(s, probe, Int32(0)) // s.chunk + probe <= slot
        found = cute.arch.popc(cute.arch.vote_ballot_sync(below))
        skip = cutlass.max(found - 1, 0) * step
        low = low + skip
        span = cutlass.min(step, span - skip)
    return low


@cute.jit
def extent(s, n: Int32):
    """Returns a sequence's first token in B*T, length and first slot, and the first slot of the next sequence."""
    each = cute.ceil_div(s.T, s.chunk)
    start, length, slot, after = Int64(n) * s.T, Int32(s.T), n * each, (n + 1) * each
    if s.offset_bytes > 0:
        first = clamped(s, n, Int32(0))
        last = clamped(s, n + 1, first)
        start, length, slot = Int64(first), last - first, first // s.chunk + n
        after = ptx.select(n + 1 == s.N, s.span, last // s.chunk + n + 1)
    return start, length, slot, after
