"""Slots: which tokens of a value head each slot holds, for sequences as rows of B or packed along T by device offsets.

A sequence of L tokens has ceil(L / chunk) *slots*, one for each chunk. Packed sequence n, which starts at token ``start``, has
those from slot ``start // chunk + n`` on. No kernel needs a prefix sum, because ranges never overlap:
``ceil(L / chunk) <= end // chunk - start // chunk + 1``. Some slots stay unused. With chunk = 32 and offsets 0, 40, 50, 100::

    sequence 0: tokens  0 to 39    slots 0, 1
    sequence 1: tokens 40 to 49    slot  40 // 32 + 1 = 2
    sequence 2: tokens 50 to 99    slots 50 // 32 + 2 = 3 and 4;  slot 5 of 100 // 32 + 3 = 6 stays unused

A kernel that shares no slots with other kernels may use *compact* slots: it computes the prefix sum (`compact_slots`), so no slot stays
unused, except for the one that every empty sequence has.

Functions take a namespace ``s``:

================ =======================================================================================
``chunk``        tokens of a chunk, known at compile time
``N``, ``T``     N sequences of T tokens each; packed: N sequences in T tokens
``offsets``      address of the N + 1 offsets of packed sequences
``offset_bytes`` bytes of an offset: 4 or 8; 0: the sequences are not packed
``span``         slots of a head
``compact``      optional: positive if slots are compact, else 0
``table``        only with ``compact``: shared address of the first slot and the first token of every sequence, and of the end of the last
                 one, two Int32 each
================ =======================================================================================
"""

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from kda_cute.device import ptx


@cute.jit
def slots(chunk, offset_bytes: Int32, N: Int32, T: Int32) -> Int32:
    """Returns the number of slots of a head."""
    count = N * cute.ceil_div(T, chunk)
    if offset_bytes > 0:
        count = T // chunk + N
    return count


def end_of_last(s):
    """Returns the end of the last packed sequence, at least 1.

    A caller that uses it as T leaves out the slots of padding behind the last sequence, and clamps offsets to that end. T is
    at least 1 everywhere, so this is too."""
    return clamped(s, s.N, Int32(1))


def clamped(s, n, low):
    """Returns offset n clamped to [low, T], because offsets on the device are not trusted."""
    wide = s.offset_bytes == 8
    address = s.offsets + Int64(n) * s.offset_bytes
    value = ptx.load_global_i64(address, wide) + Int64(ptx.load_global_i32(address, s.offset_bytes == 4))
    return Int32(cutlass.min(cutlass.max(value, Int64(low)), Int64(s.T)))


@cute.jit
def compact_slots(
    s,
    table: Int32,
    most: cutlass.Constexpr[int],
    whole: Int32,
    warp: Int32,
    warps: cutlass.Constexpr[int],
):
    """Measures packed sequences, and stores their first slots, compact, and their first tokens to shared memory. All ``warps`` of a CTA call
    it.

    Slots are compact if there are at most ``most`` sequences, and if the offsets do not decrease.

    Args:
        table: address of ``2 (most + 1)`` Int32.
        most: 32 n - 1.
        whole: what stands for the slots of the longest sequence if offsets decrease.

    Returns:
        In warp 0 the slots of a head if they are compact, else 0. Then at least the slots of the longest sequence among those that the warp
        has measured.
    """
    each = (most + 1) // 32  # sequences of a lane at a time
    lane = cute.arch.lane_idx()
    is_compact = s.N <= most
    falls, longest, count = Boolean(False), Int32(0), Int32(0)
    for first in cutlass.range(warp * (32 * each), s.N, warps * (32 * each), unroll=1):
        n = first + lane * each
        offsets = [clamped(s, cutlass.min(n + i, s.N), Int32(0)) for i in range(each + 1)]
        counts = []
        behind = Int32(0)  # slots of the sequences of this lane and, after the loop below, of those before it
        for i in cutlass.range_constexpr(each):
            length = offsets[i + 1] - offsets[i]
            falls = falls | (length < 0)
            chunks = cutlass.max(cute.ceil_div(length, s.chunk), 1)
            counts.append(ptx.select(n + i < s.N, chunks, Int32(0)))
            behind += counts[i]
            # Slots that are not compact belong to a sequence even if they lie before the first offset or behind the last one.
            start = ptx.select(n + i == 0, Int32(0), offsets[i])
            end = ptx.select(n + i + 1 == s.N, Int32(s.T), offsets[i + 1])
            longest = cutlass.max(longest, cutlass.max(chunks, cute.ceil_div(end - start, s.chunk)))
        slot = Int32(0) - behind
        for i in cutlass.range_constexpr(5):
            before = cute.arch.shuffle_sync_up(behind, 1 << i)
            behind += ptx.select(lane >= 1 << i, before, Int32(0))
        slot += behind
        for i in cutlass.range_constexpr(each):
            ptx.store_shared_x2_if(table + (n + i) * 8, [slot, offsets[i]], is_compact & (n + i <= s.N))
            slot += counts[i]
        count = cute.arch.shuffle_sync(behind, 31)
    for i in cutlass.range_constexpr(5):
        longest = cutlass.max(longest, cute.arch.shuffle_sync_bfly(longest, 1 << i))
    ordered = cute.arch.vote_ballot_sync(falls) == 0
    longest += ptx.select(is_compact, Int32(0), Int32(1))  # an unused slot
    return ptx.select(is_compact & ordered, count, Int32(0)), ptx.select(ordered, longest, whole)


@cute.jit
def owner(s, slot: Int32) -> Int32:
    """Returns the last sequence n whose first slot is at most ``slot``. ``s`` is packed.

    A whole warp searches, 32 probes at a time. The answer is always in ``low`` to ``low + span - 1``. First slots increase
    with n, so the probes that are at most ``slot`` are those of the first lanes, and the last of them is the new ``low``."""
    lane = cute.arch.lane_idx()
    low, span = Int32(0), Int32(s.N)
    while span > 1:
        step = (span + 31) // 32
        probe = low + lane * step
        below = Boolean(False)
        if lane * step < span:
            if cutlass.const_expr(hasattr(s, "compact")):
                if s.compact > 0:
                    below = ptx.load_shared(s.table + probe * 8, Int32) <= slot
                else:
                    below = clamped(s, probe, Int32(0)) // s.chunk + probe <= slot
            else:
                below = clamped(s, probe, Int32(0)) // s.chunk + probe <= slot
        found = cute.arch.popc(cute.arch.vote_ballot_sync(below))
        skip = cutlass.max(found - 1, 0) * step
        low = low + skip
        span = cutlass.min(step, span - skip)
    return low


@cute.jit
def sequence_of(s, slot: Int32) -> Int32:
    """Returns the sequence of a slot. A whole warp calls it."""
    n = slot // cute.ceil_div(s.T, s.chunk)
    if s.offset_bytes > 0:
        n = owner(s, slot)
    return n


@cute.jit
def finer_slot(s, slot: Int32, fine: cutlass.Constexpr[int]) -> Int32:
    """Returns the slot of ``fine`` tokens at which a slot starts. A whole warp calls it.

    The slots of ``fine`` tokens of consecutive slots do not overlap, and ``n`` slots have at most ``n * s.chunk / fine`` of them.

    Args:
        slot: 0 to ``s.span``.
        fine: tokens of a finer slot; divides ``s.chunk``.
    """
    found = slots(fine, s.offset_bytes, s.N, s.T)
    if slot < s.span:
        n = sequence_of(s, slot)
        first = extent(s, n)[2]
        inside = slot - ptx.select(n == 0, Int32(0), first)  # slots of the sequence before this one
        found = n * cute.ceil_div(s.T, fine) + inside * (s.chunk // fine)
        if s.offset_bytes > 0:
            start = clamped(s, n, Int32(0))
            end = clamped(s, n + 1, start)
            behind = ptx.select(n + 1 == s.N, s.T // fine + s.N, end // fine + n + 1)
            begin = ptx.select(n == 0, Int32(0), start // fine + n)
            found = cutlass.min(begin + inside * (s.chunk // fine), behind)
    return found


@cute.jit
def slab(s, first_slot: Int32, slab_slots: Int32, fine: cutlass.Constexpr[int]):
    """Returns the first and the end slot of ``fine`` tokens of a slab, which has ``slab_slots`` slots from ``first_slot`` on, or fewer
    where they end. A whole warp calls it."""
    first = finer_slot(s, first_slot, fine)
    return first, finer_slot(s, cutlass.min(first_slot + slab_slots, s.span), fine)


@cute.jit
def extent(s, n: Int32):
    """Returns a sequence's first token in B*T, length and first slot, and the first slot of the next sequence."""
    each = cute.ceil_div(s.T, s.chunk)
    start, length, slot, after = Int64(n) * s.T, Int32(s.T), n * each, (n + 1) * each
    if s.offset_bytes > 0:
        if cutlass.const_expr(hasattr(s, "compact")):
            if s.compact > 0:
                slot, first = ptx.load_shared_x2(s.table + n * 8, Int32)
                after, last = ptx.load_shared_x2(s.table + n * 8 + 8, Int32)
                start, length = Int64(first), last - first
            else:
                start, length, slot, after = _closed_extent(s, n)
        else:
            start, length, slot, after = _closed_extent(s, n)
    return start, length, slot, after


def _closed_extent(s, n):
    """Returns the same as `extent` for a packed sequence whose slots are not compact."""
    first = clamped(s, n, Int32(0))
    last = clamped(s, n + 1, first)
    after = ptx.select(n + 1 == s.N, s.span, last // s.chunk + n + 1)
    return Int64(first), last - first, first // s.chunk + n, after
