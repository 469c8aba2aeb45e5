"""Assigns chunks to CTAs, orders them, and synchronises the CTAs.

**Slots, tasks, queues.** All chunks of a launch form one line: value head by value head, and in each head the
sequences in order, each with its *slots* (``layouts.slot_count``; a slot may have no chunk; in a ``padded`` launch T
ends with the last sequence). In variants that are ``compact`` the slots of up to `COMPACT_SEQUENCES` packed sequences
are compact (`kda_cute.device.varlen`): each CTA computes the first slots of all sequences when it starts. A *task* is
one sequence of one head: its slots up to those of the next sequence. The line is cut into ``queues`` ranges of ``width``
slots, one *queue* per chain, regardless of task boundaries. A *part* is the share of a task in a queue. Example: 3
heads of one sequence of 4 chunks, 2 queues, width 6::

    slot of the line  |  0   1   2   3 |  4   5   6   7 |  8   9  10  11 |
    task              |     head 0     |     head 1     |     head 2     |
    queue             |          queue 0       |         queue 1         |
    number            |  2   3   4   5    0   1|  4   5    0   1   2   3 |

**Order of a chain.** A chain executes the parts of its queue from the last to the first, and the slots of a part in
order. The *number* of a slot is its position in this order: slot x of the part [begin, end) in a queue that ends at
slot ``high`` has number ``high - end + x - begin``. If a task is cut, its first part is the first work of one chain
(numbers 0 and 1 of queue 0), and its second part is the last work of the next chain (numbers 4 and 5 of queue 1).
``width`` is at least the longest task. So both parts together have at most ``width`` slots, the first part ends at a
lower number than the second begins, and the state has time to pass through global memory. This is McNaughton's
wrap-around rule: all chains have the same amount of work, and none waits for another.

**Order of the intra-chunk stage.** Intra-chunk groups take the slots of all queues in turn, number by number: item i
is number ``i // queues`` of queue ``i % queues``. In the example the items are slots 4, 8, 5, 9, 0, 10, ... A group claims
its next item while it computes the current one.

**Counters.** CTAs wait for one another only through counters in global memory:

=============  =========  ==========================================================================================
counter        one per    value
=============  =========  ==========================================================================================
claimed        launch     items claimed so far. The first item of each group is not claimed: it is the group's index
ticket         launch     the launch's ticket once the counters are cleared (`clear`, `wait_for_clear`)
clear_seen     launch     waiters that have seen the ticket (`see_clear`)
ready          record     1 + number of the slot whose record it holds
read           queue and  the chain has read the records of all lower numbers
               half
state_ready    queue and  1 when the next queue may read the state at the end of the first part
               half
=============  =========  ==========================================================================================

In reverse (the modes of a backward) the line, its queues and the order of a part are mirrored: a chain executes the parts of its
queue from the first to the last, and the slots of a part from the last to the first.

**Slabs.** A launch of a backward has some consecutive slots of every head, from ``first_slot`` on. The line consists of these alone,
and a sequence has the slots that lie in the slab. The gradient of its state passes from slab to slab through global memory.

**Slots of several chunks.** In the mode ``recompute`` a slot holds 8 chunks, and all of the above is in slots. A chunk's number is
``8 * number of its slot + rank in the slot``. A chain reads the records of a slot in ascending order, then in descending order, and
only then they are free. The rank in its slot of the n-th record to become free is therefore ``7 - n % 8``, and a record takes the
place of the one that became free ``depth`` before it (`place`).

**Local records.** In some variants the CTA of a chain computes the records of every P-th number of its queue itself (`is_local`). These
numbers are no items, and their places in the ring stay empty.

A group writes number n to place ``n % depth`` of the ring once the chain has read number ``n - depth``. In the modes
that keep records (``keeps_records``), numbers are slots of the line, ``depth`` is the number of records, and no group
waits for room.

**No deadlock.** All CTAs are co-resident. The lowest unpublished item is always first in its group's work, so its
group computes it or waits for room. The records that must be read before there is room have lower numbers, so they
are published, and so are the records of the part that produces a state that the chain waits for. A chain requests at
most ``chain.IN_FLIGHT`` more records before it publishes that it has read one. A ring therefore has at least 3 places, with local records
5, unless it holds its whole queue. A chain that helps begins late, but its groups wait for no room and for no chain.
docs/kernels/prefill.md has the full argument.
"""

import functools
from enum import IntEnum
from types import SimpleNamespace

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from kda_cute.device import ptx
from kda_cute.device.division import divide, reciprocal
from kda_cute.device.varlen import (
    clamped,
    compact_slots,
    end_of_last,
    extent,
    finer_slot,
    owner,
    sequence_of,
    slots,
)
from kda_sm90.layouts import COMPACT_SEQUENCES, LINE, LaunchCounter, QueueCounter

#: Shared memory of `fill_table`: one Int32 per warp, the `reciprocal` of every `Divisor`, the number of compact slots, and in variants that may
#: have them the first slots and tokens of sequences.
RECIPROCALS_OFFSET, COUNT_OFFSET, SEQUENCES_OFFSET = 64, 96, 104
POLL_NS = 100  # time between two reads of a counter that is too low
ALL_READ = 0x7FFFFFFF  # value of the read counters of a chain that has ended


class Divisor(IntEnum):
    """Numbers that `item` and `place` divide by. Groups wait for `item`, so its divisions are fast ones."""

    QUEUES = 0  # queues of the launch
    DEPTH = 1  # records in the ring of a queue
    SPAN = 2  # slots of a head
    SEQUENCE = 3  # slots of a sequence as a row of B


# Schedules, queues and rings are namespaces, and these are functions instead of methods: the DSL carries an object
# whose method is called through every branch, which it can do only with values.


def schedule(config, offsets, offset_bytes, N, T, HV, queues, depth, counters):
    """Returns the schedule of one launch, without what `with_table` adds.

    Args:
        config: the kernel's configuration.
        offsets: address of N + 1 integers of ``offset_bytes``, the bounds of sequences packed along T.
            ``offset_bytes`` is 0 for N sequences of T tokens each.
        depth: records in the ring of a queue, with slots of several chunks from ``chunks_per_slot`` to twice as many; where records are
            kept, records in all.
        counters: address of the counters (``layouts``).

    ``chunk`` of the schedule are the tokens of a slot.
    """
    if config.padded:
        T = end_of_last(SimpleNamespace(offsets=offsets, offset_bytes=offset_bytes, N=N, T=T))
    span = slots(config.chunk * config.chunks_per_slot, offset_bytes, N, T)
    return SimpleNamespace(
        chunk=config.chunk * config.chunks_per_slot, chunks_per_slot=config.chunks_per_slot, keeps_records=config.keeps_records,
        step=config.step, offsets=offsets, offset_bytes=offset_bytes, N=N, T=T,
        queues=queues, depth=depth, counters=counters, HV=HV, span=span, total=HV * span,
        local_period=config.local_period, may_be_compact=config.compact,
    )  # fmt: skip


@cute.jit
def _bounds_of_slab(s, first_slot: Int32, count: Int32, chunk: cutlass.Constexpr[int]):
    first, last, chunks_before = Int32(0), s.N - 1, Int32(0)
    if first_slot > 0:
        first = sequence_of(s, first_slot)
        chunks_before = finer_slot(s, first_slot, chunk)
    if first_slot + count < s.span:
        last = sequence_of(s, first_slot + count - 1)
    return first, last, chunks_before


def slab(s, HV, first_slot, count):
    """Returns the schedule of a slab of a backward: ``count`` slots of every head, from ``first_slot`` on. The schedule of the whole
    call is ``s``; the last slab may have fewer slots."""
    count = cutlass.min(count, s.span - first_slot)
    first, last, chunks_before = _bounds_of_slab(s, first_slot, count, s.chunk // s.chunks_per_slot)
    changes = {
        "span": count, "total": HV * count, "all_slots": s.span, "first_slot": first_slot,
        "first_sequence": first, "last_sequence": last, "chunks_before": chunks_before,
    }  # fmt: skip
    return SimpleNamespace(**(vars(s) | changes))


def task(s, n):
    """Returns (first token in B*T, length, first slot, end slot) of sequence n in a head. The first sequence starts
    at slot 0, wherever its first token is, so that every slot belongs to a task."""
    token, length, slot, after = extent(s, n)
    return token, length, ptx.select(n == 0, Int32(0), slot), after


def task_of_slab(s, n):
    """Returns the same as `task`, for the slots of the sequence that lie in the slab, counted from its start; then how many slots of
    the sequence lie before the slab, and whether some lie behind it."""
    token, length, slot, after = task(SimpleNamespace(**(vars(s) | {"span": s.all_slots})), n)
    slot, after = slot - s.first_slot, after - s.first_slot
    return (
        token, length, cutlass.max(slot, 0), cutlass.min(after, s.span), cutlass.max(-slot, 0), Int32(after > s.span)
    )  # fmt: skip


def table_bytes(config):
    """Returns the shared memory of `fill_table` in bytes."""
    return SEQUENCES_OFFSET + (8 * (COMPACT_SEQUENCES + 1) if config.compact else 0)


@cute.jit
def fill_table(s, table: Int32, warps: cutlass.Constexpr[int]):
    """Stores the longest task that each warp finds to ``table`` (shared address, `table_bytes`), and compact slots if the variant may have
    them. All ``warps`` of the CTA call it; the caller synchronises.

    If offsets decrease, the longest task counts as the whole line, so one chain executes all of it. The tasks then overlap,
    and several chains would wait for states that no chain produces.
    """
    thread, _, _ = cute.arch.thread_idx()
    longest, count = cute.ceil_div(s.T, s.chunk), Int32(0)
    if s.step < 0:
        longest = cutlass.min(longest, s.span)  # a task has at most the slots of the slab
    if cutlass.const_expr(s.may_be_compact):
        if s.offset_bytes > 0:
            sequences = table + SEQUENCES_OFFSET
            count, longest = compact_slots(s, sequences, COMPACT_SEQUENCES, s.total, thread // 32, warps)
        if thread == 0:
            ptx.store_shared(table + COUNT_OFFSET, count)
    elif s.offset_bytes > 0:
        longest = Int32(0)
        for n in cutlass.range(thread, s.N, warps * 32, unroll=1):
            _, _, slot, after = (task if s.step > 0 else task_of_slab)(s, n)[:4]
            falls = clamped(s, n + 1, Int32(0)) < clamped(s, n, Int32(0))
            longest = cutlass.max(longest, ptx.select(falls, s.total, after - slot))
        for i in cutlass.range_constexpr(5):
            longest = cutlass.max(longest, cute.arch.shuffle_sync_bfly(longest, 1 << i))
    if thread % 32 == 0:
        ptx.store_shared(table + thread // 32 * 4, longest)
    if thread < len(Divisor):  # in warp 0, which has the count
        divisor = ptx.select(count > 0, count, Int32(s.span))
        for which, value in (
            (Divisor.QUEUES, s.queues),
            (Divisor.DEPTH, s.depth),
            (Divisor.SEQUENCE, cute.ceil_div(s.T, s.chunk)),
        ):
            divisor = ptx.select(thread == which, Int32(value), divisor)
        ptx.store_shared_x2(table + RECIPROCALS_OFFSET + thread * 8, reciprocal(cutlass.max(divisor, 1)))


def quotient(s, x, divisor: Divisor):
    """Returns x // divisor for x >= 0. ``s``: a schedule or a ring."""
    return divide(x, *ptx.load_shared_x2(s.reciprocals + 8 * divisor, Int32))


def with_table(s, table, warps):
    """Returns the schedule with its ``width`` and ``first_queue`` (the first queue that is not empty), with compact slots if it has them, and
    with reciprocals, all from the table."""
    s = SimpleNamespace(**vars(s), reciprocals=table + RECIPROCALS_OFFSET)
    if s.may_be_compact:
        count = cute.arch.make_warp_uniform(ptx.load_shared(table + COUNT_OFFSET, Int32))
        span = ptx.select(count > 0, count, s.span)
        compact = {
            "compact": count,
            "table": table + SEQUENCES_OFFSET,
            "span": span,
            "total": s.HV * span,
        }
        s = SimpleNamespace(**(vars(s) | compact))
    width = cute.ceil_div(s.total, s.queues)
    for i in range(warps):
        width = cutlass.max(width, ptx.load_shared(table + i * 4, Int32))
    used = cutlass.max(s.total - 1, Int32(0)) // cutlass.max(width, Int32(1)) + 1
    return SimpleNamespace(**vars(s), width=width, first_queue=s.queues - used)


def range_of(s, queue):
    """Returns the range [low, high) of a queue in the line.

    ``queues * width`` may exceed the line. The shortage is at its start: the last queue ends where the line ends, and the
    first queues are short or empty. The second part of a task has the highest numbers of its queue. In a short queue these
    would be low, so its chain would reach that part too early. The first non-empty queue has no second part. In reverse the
    last queues are short or empty, for the same reason.
    """
    if s.step < 0:
        low = cutlass.min(Int64(queue) * s.width, Int64(s.total))
        return Int32(low), Int32(cutlass.min(low + s.width, Int64(s.total)))
    # The product of an empty queue may exceed 32 bits, and is not used.
    high = ptx.select(queue >= s.first_queue, s.total - (s.queues - 1 - queue) * s.width, Int32(0))
    return cutlass.max(high - s.width, Int32(0)), high


# ---- counters of the launch


def _launch_line(s):
    """Returns the address of the launch's counters, before the lines of the queues."""
    return s.counters


def _ready(s, record):
    """Returns the address of the counter of a record, after the lines of the queues."""
    return s.counters + (Int64(s.queues + 1) * (LINE * 4) + Int64(record) * 4)


@cute.jit
def clear(s, ticket: Int64, threads: cutlass.Constexpr[int]):
    """Clears all counters and publishes the ticket. One CTA calls it.

    The workspace may hold anything, so the other CTAs wait for the ticket. The probability that the workspace already
    held this ticket is 2^-64.
    """
    thread, _, _ = cute.arch.thread_idx()
    launch = _launch_line(s)
    records = s.depth if s.keeps_records else s.queues * s.depth
    for i in cutlass.range(thread, (s.queues + 1) * LINE + records, threads, unroll=1):
        if i // 2 * 2 != LaunchCounter.TICKET:
            ptx.store_global(s.counters + Int64(i) * 4, Int32(0))
    cute.arch.sync_threads()
    if thread == 0:
        ptx.store_release_i64(launch + LaunchCounter.TICKET * 4, ticket)


@cute.jit
def wait_for_clear(s, ticket: Int64):
    """Waits until the counters are cleared. One thread calls it for all threads that it synchronises with."""
    while ptx.load_acquire_i64(_launch_line(s) + LaunchCounter.TICKET * 4) != ticket:
        pass


@cute.jit
def see_clear(s, waiters: Int32):
    """Counts a waiter that has seen the ticket; ``waiters`` times per launch. The last one removes the ticket, because a replayed CUDA
    graph uses the same ticket again."""
    launch = _launch_line(s)
    if ptx.fetch_increment(launch + LaunchCounter.CLEAR_SEEN * 4) == waiters - 1:
        ptx.store_release_i64(launch + LaunchCounter.TICKET * 4, Int64(0))


def items(s):
    """Returns the number of items."""
    return s.queues * not_local(s, s.width) * s.chunks_per_slot


# ---- local records


def is_local(s, part, c):
    """Returns whether the CTA of the chain computes the record of chunk c of a part itself. It does not if there is no such chunk."""
    if not s.local_period:
        return False
    return _number_is_local(s, part.number + c) & (c < part.chunks)


def _number_is_local(s, number):
    return number % s.local_period == s.local_period - 1


def not_local(s, slots):
    """Returns how many of the first ``slots`` numbers of a queue are not `is_local`."""
    return slots - (slots // s.local_period if s.local_period else 0)


def number_of(s, rank):
    """Returns the number of the slot that is not `is_local` and has ``rank`` such slots before it in its queue."""
    return rank + (rank // (s.local_period - 1) if s.local_period else 0)


# ---- the ring of a queue


def ring(s, queue):
    """Returns the ring of a queue: its depth, the index of its first record, and the addresses of its counters."""
    line = s.counters + Int64(queue + 1) * (LINE * 4)
    first = Int32(0) if s.keeps_records else queue * s.depth
    return SimpleNamespace(
        depth=s.depth,
        chunks_per_slot=s.chunks_per_slot,
        local_period=s.local_period,
        first=first,
        reciprocals=s.reciprocals,
        ready=_ready(s, first),
        read=line + QueueCounter.READ * 4,
        state_ready=line + QueueCounter.STATE_READY * 4,
    )


def place(r, number):
    """Returns the place in the ring of a number. That of an item that does not exist (-1) is meaningless.

    In slots of several chunks, the ring has some *spare* places beside those of one slot. The first records of a slot take the places
    that were spare while the chain read the slot before, and the others take those that it frees first. Its last places to become free
    are then spare. So the places of a slot repeat every two slots, or every four for those that were spare.
    """
    size = r.chunks_per_slot
    if size == 1:
        return number - quotient(r, number, Divisor.DEPTH) * r.depth
    slot, rank, spare = number // size, number % size, r.depth - size
    first = rank < spare
    turned = ptx.select(first, slot >> 1, slot) & 1 > 0
    among = ptx.select(turned, ptx.select(first, spare, r.depth) - 1 - rank, rank)
    return among + ptx.select(first, slot & 1, Int32(0)) * size


def record(r, number):
    """Returns the index of the record that holds a number."""
    return r.first + place(r, number)


# ---- the intra-chunk stage


def claim(s) -> Int32:
    """Claims an item for the calling thread. Returns how many items were claimed before."""
    return ptx.fetch_increment(_launch_line(s) + LaunchCounter.CLAIMED * 4)


@cute.jit
def item(s, i: Int32):
    """Returns (queue, number, head, first token in B*T, tokens) of item i; a whole warp calls it. The number is -1 if
    there are no more items. The tokens are 0 if the slot has no chunk."""
    in_turn = quotient(s, i, Divisor.QUEUES)
    number, queue = number_of(s, in_turn), i - in_turn * s.queues
    rank, slot_number = Int32(0), number
    if cutlass.const_expr(s.chunks_per_slot > 1):
        rank, slot_number = number % s.chunks_per_slot, number // s.chunks_per_slot
    head, token, valid = Int32(0), Int32(0), Int32(0)
    line_slot = s.depth - 1  # of the item; items without a slot share the last record
    low, high = range_of(s, queue)
    if slot_number < high - low:
        # Parts take their numbers from the end of the queue, so the number-th slot from the end lies in the item's part.
        # Within the part the order is reversed: mirrored in the part, it is the item's slot. In reverse, parts take them from
        # the start.
        mirrored = high - 1 - slot_number
        if cutlass.const_expr(s.step < 0):
            mirrored = low + slot_number
        head = quotient(s, mirrored, Divisor.SPAN)
        slot = mirrored - head * s.span
        skipped = Int32(0)
        if cutlass.const_expr(s.step < 0):
            n = sequence_of(s, s.first_slot + slot)
            start, length, first, after, skipped, _ = task_of_slab(s, n)
        else:
            n = Int32(0)
            if (s.offset_bytes == 0) & (s.N > 1):  # a branch costs the warp less than a division
                n = quotient(s, slot, Divisor.SEQUENCE)
            if s.offset_bytes > 0:
                n = owner(s, slot)
            start, length, first, after = task(s, n)
        head_start = head * s.span
        begin, end = cutlass.max(head_start + first, low), cutlass.min(head_start + after, high)
        # Unordered offsets give an arbitrary chunk, but one inside of the tensors.
        line_slot = begin + end - 1 - mirrored
        done = (cutlass.max(line_slot - head_start - first, 0) + skipped) * s.chunk  # tokens before the chunk
        if cutlass.const_expr(s.chunks_per_slot > 1):
            done += rank * (s.chunk // s.chunks_per_slot)
        token = Int32(start) + done
        valid = cutlass.max(cutlass.min(length - done, s.chunk // s.chunks_per_slot), 0)
    if slot_number >= s.width:
        number = Int32(-1)
    elif cutlass.const_expr(s.keeps_records):
        number = line_slot
    return queue, number, head, token, valid


def numbers_read(r, first_halves):
    """Returns, for each chain CTA of a queue, the number below which it has read all records. A relaxed load suffices: the
    records are in shared memory, so a later write cannot reach what was read.

    ``first_halves``: those of the chain CTAs of the queue. A CTA publishes at the place of its first half.
    """
    return tuple(ptx.load_relaxed(r.read + half * 4) for half in first_halves)


def has_room(s, number, read):
    """Returns whether the record that ``number`` replaces has been read. ``read``: of `numbers_read`."""
    return functools.reduce(cutlass.min, read) > number - s.depth


@cute.jit
def wait_for_room(r, number: Int32, first_halves: cutlass.Constexpr[range]):
    """Waits until the ring has room for a number. One thread calls it."""
    while not has_room(r, number, numbers_read(r, first_halves)):
        ptx.nanosleep(Int32(POLL_NS))


def publish_record(s, index, number):
    """Publishes the record of a number, whose `record` is ``index``. The calling thread has synchronised with the threads that wrote it. A
    slot of several chunks may have many without tokens, which no chain waits for: they are published in any order."""
    address = _ready(s, index)
    if s.chunks_per_slot == 1:
        ptx.store_release(address, number + 1)
    else:
        ptx.raise_release(address, number + 1)


# ---- the chain


@cute.jit
def first_task(s, queue: Int32):
    """Returns (head, sequence, high, low): the first task of a queue, and the queue's range [low, high) in the line.
    A whole warp calls it."""
    low, high = range_of(s, queue)
    first = cutlass.max(high - 1, 0)
    if cutlass.const_expr(s.step < 0):
        first = cutlass.min(low, s.total - 1)
    head = first // s.span
    slot = first - head * s.span
    if cutlass.const_expr(s.step < 0):
        n = sequence_of(s, s.first_slot + slot)
    else:
        n = slot // cute.ceil_div(s.T, s.chunk)
        if s.offset_bytes > 0:
            n = owner(s, slot)
    return head, n, high, low


@cute.jit
def next_task(s, head: Int32, n: Int32):
    """Returns (head, sequence) of the task that a chain executes next: the one before in the line, in reverse the next."""
    if cutlass.const_expr(s.step < 0):
        n += 1
        if n > s.last_sequence:
            n = Int32(0) + s.first_sequence
            head += 1
    else:
        n -= 1
        if n < 0:
            n = s.N - 1
            head -= 1
    return head, n


@cute.jit
def _part(s, head: Int32, n: Int32, end: Int32, low: Int32, high: Int32):
    token, length, slot, after = task(s, n)
    head_start = head * s.span
    # For any offsets a part has at least one slot, and lies inside of the queue and of the tensors.
    begin = cutlass.max(cutlass.min(head_start + slot, end - 1), low)
    first = cutlass.max(begin - head_start - slot, 0)
    chunks = cutlass.min(cute.ceil_div(length, s.chunk) - first, end - begin)
    number = begin if s.keeps_records else high - end
    cut = Int32(end < head_start + after)
    return (
        begin,
        token,
        length,
        slot + first,
        first,
        cutlass.max(chunks, 0),
        cut,
        number,
        Int32(first > 0),
        Int32(0),
        Int32(0),
    )


@cute.jit
def _reverse_part(s, head: Int32, n: Int32, end: Int32, low: Int32, high: Int32):
    """Returns the same as `_part`. ``end`` and the part's begin are mirrored in the middle of the queue."""
    token, length, slot, after, skipped, remains = task_of_slab(s, n)
    head_start = head * s.span
    start = low + high - end
    stop = cutlass.max(cutlass.min(head_start + after, high), start + 1)
    before = cutlass.max(start - head_start - slot, 0)  # chunks of the sequence in the queue before
    total = cute.ceil_div(length, s.chunk) - skipped
    chunks = cutlass.max(cutlass.min(total, stop - head_start - slot) - before, 0)
    first = before + cutlass.max(chunks, 1) - 1  # of those in the slab
    cut, continues = Int32(before > 0), Int32(stop < head_start + after)
    # Slots without a chunk come before the chunks.
    number = start - low + stop - 1 - (head_start + slot + first)
    enters, leaves = remains * (1 - continues), Int32(skipped > 0) * (1 - cut)
    place = slot + first
    return (
        low + high - stop,
        token,
        length,
        place,
        skipped + first,
        chunks,
        cut,
        number,
        continues,
        enters,
        leaves,
    )


def part(s, head, n, end, low, high):
    """Returns the part of task (head, n) that ends before slot ``end`` of the line, in the queue [low, high). In reverse,
    positions are mirrored in the middle of the queue: a chain counts down from ``high`` to ``low`` as well.

    Fields:
        sequence, head: the task.
        token: first token of the sequence in B*T.
        length: tokens of the sequence.
        first: index in the sequence of the chunk that the chain executes first. The others follow in steps of ``s.step``.
        chunks: chunks of the part; 0 or more. Further slots have no chunk.
        slot: slot of the first chunk in its head, in the slab.
        number: number of the slot of the first chunk. Those of the others follow in steps of 1.
        begin: its first slot in the line.
        cut: whether the chain of another queue continues the sequence.
        continues: whether the part continues what the chain of another queue began.
        enters, leaves: whether it continues what the launch of another slab began; whether that of another slab continues it.

    A role visits the parts of a queue by `first_task` with ``end = high``, then ``end = part.begin`` and `next_task` while
    ``end > low``.
    """
    find = _part if s.step > 0 else _reverse_part
    begin, token, length, slot, first, chunks, cut, number, continues, enters, leaves = find(
        s, head, n, end, low, high
    )
    return SimpleNamespace(
        sequence=n, head=head, token=token, length=length, first=first, chunks=chunks, slot=slot, number=number,
        begin=begin, cut=cut > 0, continues=continues > 0, enters=enters > 0, leaves=leaves > 0,
    )  # fmt: skip


@cute.jit
def wait_for_records(r, number: Int32, count: Int32) -> Int32:
    """Waits for the record of a number. Returns how many records from ``number`` on are ready, without a gap, up to ``count`` <= 32. A whole
    warp calls it and acquires them. If all 32 are ready it returns 31, which costs the caller nothing."""
    lane = cute.arch.lane_idx()
    wanted = number + lane
    address, exists = r.ready + Int64(place(r, wanted)) * 4, lane < cutlass.min(count, r.depth)
    is_local = _number_is_local(r, wanted) if r.local_period else Boolean(False)
    count_ready = Int32(0)
    while count_ready == 0:
        ready = cute.arch.vote_ballot_sync((ptx.load_acquire(address, exists) > wanted) | is_local)
        count_ready = cute.arch.popc(ready ^ (ready + 1)) - 1  # number of trailing ones; 31 for 32 of them
    cute.arch.sync_warp()  # all lanes acquire what any lane has acquired
    return count_ready


def publish_read(r, half, number):
    """Publishes that the chain has read all records below ``number``. A relaxed store suffices (see `numbers_read`)."""
    ptx.store_relaxed(r.read + half * 4, number)


def publish_state(r, half):
    """Publishes a half of the state at the end of the first part. The calling thread has synchronised with the
    threads that wrote it."""
    ptx.store_release(r.state_ready + half * 4, Int32(1))


@cute.jit
def wait_for_state(r, half: Int32):
    """Waits for a half of the state at the end of the first part. Every thread that reads the state calls it."""
    while ptx.load_acquire(r.state_ready + half * 4, Boolean(True)) == 0:
        ptx.nanosleep(Int32(POLL_NS))
