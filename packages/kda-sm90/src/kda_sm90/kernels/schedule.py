"""Which CTA computes what, in which order, and where records lie in between.

All chunks of a launch stand in one line: value head by value head, in each the sequences in order, each with its *slots*
(``layouts.slot_count``; a slot may be without a chunk; in a ``padded`` launch T ends with the last sequence). A *task* is
one sequence of one head: its slots up to those of the next sequence. The line is cut into ``streams`` ranges of ``width``
slots, one for each chain, wherever that falls.

A chain takes the tasks of its range from the last to the first. So of a task that is cut, its first part is what one
chain does first, and the rest is what the next chain does last; as ``width`` is at least the longest task, the former
ends before the latter begins, and hands its state over through global memory (McNaughton's wrap-around rule: no chain
has more to do than another, and none waits). *Numbers* count the slots of a stream in this order, so that slot x of a
part [begin, end) of a range up to high has number ``high - end + x - begin``.

Preparing groups take the slots of all streams in turns, number by number: item i is number ``i // streams`` of
stream ``i % streams``; a group claims the next item while it is at work on one. CTAs never wait for one another but
through counters in global memory:

*claimed*   how many items are, but for the first one of each group, which is the group's own number.
*begun*     how many know that the counters are 0; and the *ticket* that tells them (`clear`, `wait_for_clear`).
*ready*     of each place of a stream's ring of ``depth`` records: 1 + the number of the record that it holds.
*read*      of each stream and half of V: all records of lower numbers have been read.
*handed*    of each stream and half of V: 1 when the state of its first part is there for the next stream.

Where every record is kept (``keeps``), numbers of parts and items are slots of the line, `depth` is the number of records,
and nobody waits for room.

A preparing group writes number n to place ``n % depth`` when number ``n - depth`` has been read. Nothing waits in a
circle: of the items that are not published, that of the lowest index is never behind another in its group, and what has
to be read before there is room for it has lower numbers, as has what the chain of its stream needs from another one. A ring
that does not hold all of its stream has more records than a chain asks for before it tells that the first was read
(``chain.IN_FLIGHT``): 3 at least.
"""

from types import SimpleNamespace

import cutlass
from cutlass import Boolean, Int32, Int64, cute

from kda_cute.device import ptx
from kda_cute.device.varlen import clamped, end_of_last, extent, owner, slots
from kda_sm90.layouts import BEGUN, HANDED, LINE, TICKET

TABLE_BYTES = 64  # shared memory of ``fill_table``
POLL_NS = 100  # from one look at a counter that was too low to the next


# Schedules, streams and rings are namespaces and these are functions, because the DSL carries an object whose method
# is called through every branch, which it can do with values alone.


def schedule(config, offsets, offset_bytes, N, T, HV, streams, depth, counters):
    """The order of one launch by its ``config``: N sequences of T tokens, or packed along T by ``offsets``, the address of
    N + 1 integers of ``offset_bytes`` (0: not packed); ``depth`` records in a ring, or in all (``keeps``); ``counters``:
    their address (``layouts``). Without ``width``, which ``with_width`` adds."""
    if config.padded:
        T = end_of_last(SimpleNamespace(offsets=offsets, offset_bytes=offset_bytes, N=N, T=T))
    span = slots(config.chunk, offset_bytes, N, T)
    return SimpleNamespace(
        chunk=config.chunk, keeps=config.keeps, offsets=offsets, offset_bytes=offset_bytes, N=N, T=T, streams=streams,
        depth=depth, counters=counters, span=span, total=HV * span,
    )  # fmt: skip


def task(s, n):
    """`extent`, from slot 0 on for the first sequence, with whatever token it begins: every slot is in a task."""
    token, length, slot, after = extent(s, n)
    return token, length, ptx.select(n == 0, Int32(0), slot), after


@cute.jit
def fill_table(s, table: Int32, warps: cutlass.Constexpr[int]):
    """The longest task that each warp sees, to a ``table`` of TABLE_BYTES, by all ``warps`` of the CTA, which then
    synchronises. Where bounds fall it is the whole line, so that one chain has all of it: tasks do not follow one another
    there, and chains would wait for states that nobody hands over."""
    thread, _, _ = cute.arch.thread_idx()
    longest = cute.ceil_div(s.T, s.chunk)
    if s.offset_bytes > 0:
        longest = Int32(0)
        for n in cutlass.range(thread, s.N, warps * 32, unroll=1):
            _, _, slot, after = task(s, n)
            falls = clamped(s, n + 1, Int32(0)) < clamped(s, n, Int32(0))
            longest = cutlass.max(longest, ptx.select(falls, s.total, after - slot))
        for i in cutlass.range_constexpr(5):
            longest = cutlass.max(longest, cute.arch.shuffle_sync_bfly(longest, 1 << i))
    if thread % 32 == 0:
        ptx.store_shared(table + thread // 32 * 4, longest)


def with_width(s, table, warps):
    """The schedule with its ``width``, from the table."""
    width = cute.ceil_div(s.total, s.streams)
    for i in range(warps):
        width = cutlass.max(width, ptx.load_shared(table + i * 4, Int32))
    return SimpleNamespace(**vars(s), width=width)


def range_of(s, stream):
    """First and last slot of a stream, in the line; the last is none of it. The line ends with the last range, so that
    only the first ones, which go on with no sequence, may have fewer slots: numbers of all others count alike."""
    high = cutlass.max(Int64(s.total) - Int64(s.streams - 1 - stream) * s.width, Int64(0))
    return Int32(cutlass.max(high - s.width, Int64(0))), Int32(high)


@cute.jit
def clear(s, ticket: Int64, threads: cutlass.Constexpr[int]):
    """Counters of 0, by one CTA for all of the launch. The workspace holds anything, so that a ticket tells the others
    (`wait_for_clear`). That what was there before is this ticket, has a chance of 2^-64."""
    thread, _, _ = cute.arch.thread_idx()
    last = _last_line(s)
    records = s.depth if s.keeps else s.streams * s.depth
    for i in cutlass.range(thread, (s.streams + 1) * LINE + records, threads, unroll=1):
        if i // 2 * 2 != s.streams * LINE + TICKET:
            ptx.store_global(s.counters + Int64(i) * 4, Int32(0))
    cute.arch.sync_threads()
    if thread == 0:
        ptx.store_release_i64(last + TICKET * 4, ticket)


@cute.jit
def wait_for_clear(s, ticket: Int64, count: Int32):
    """Until the counters are 0; by one thread for those that it synchronises with, ``count`` times in a launch. The last
    one takes the ticket away: a graph that is replayed comes with the same one."""
    last = _last_line(s)
    while ptx.load_acquire_i64(last + TICKET * 4) != ticket:
        pass
    if ptx.fetch_increment(last + BEGUN * 4) == count - 1:
        ptx.store_release_i64(last + TICKET * 4, Int64(0))


def _last_line(s):
    """The counters that are no stream's."""
    return s.counters + Int64(s.streams) * (LINE * 4)


# ---- the preparation's side


def claim(s) -> Int32:
    """How many items were claimed before, for one thread that claims the next."""
    return ptx.fetch_increment(_last_line(s))


@cute.jit
def item(s, i: Int32):
    """(stream, number: -1 if there are no more items, head, first token in B*T, tokens: 0 if there is no such chunk);
    by a whole warp."""
    number, stream = i // s.streams, i % s.streams
    head, token, valid = Int32(0), Int32(0), Int32(0)
    own = s.depth - 1  # slot of the line; the last record is that of items without one
    low, high = range_of(s, stream)
    if number < high - low:
        mirrored = high - 1 - number  # in the same part as the slot
        head = mirrored // s.span
        slot = mirrored - head * s.span
        n = slot // cute.ceil_div(s.T, s.chunk)
        if s.offset_bytes > 0:
            n = owner(s, slot)
        start, length, first, after = task(s, n)
        line = head * s.span
        begin, end = cutlass.max(line + first, low), cutlass.min(line + after, high)
        # Offsets that are not in order lead anywhere, but not out of the tensors.
        own = begin + end - 1 - mirrored
        done = cutlass.max(own - line - first, 0) * s.chunk
        token = Int32(start) + done
        valid = cutlass.max(cutlass.min(length - done, s.chunk), 0)
    if number >= s.width:
        number = Int32(-1)
    elif cutlass.const_expr(s.keeps):
        number = own
    return stream, number, head, token, valid


def read(r, halves):
    """Below which number all records of a ring have been read. What is written after this was known cannot reach them
    any more, so that no order is needed."""
    read = [ptx.load_relaxed(r.read + half * 4) for half in range(halves)]
    return read[0] if halves == 1 else cutlass.min(*read)


def has_room(s, number, read):
    """Whether the record that ``number`` replaces has been read."""
    return read > number - s.depth


@cute.jit
def wait_for_room(r, number: Int32, halves: cutlass.Constexpr[int]):
    """Until there is room; by one thread."""
    while not has_room(r, number, read(r, halves)):
        ptx.nanosleep(Int32(POLL_NS))


def publish(r, number):
    """The record has been written by threads that this one has synchronised with."""
    ptx.store_release(r.ready + Int64(number % r.depth) * 4, number + 1)


# ---- the chain's side


@cute.jit
def first_task(s, stream: Int32):
    """Where a chain begins: (head, sequence, end of its range, begin of it), slots in the line; by a whole warp."""
    low, high = range_of(s, stream)
    last = cutlass.max(high - 1, 0)
    head = last // s.span
    slot = last - head * s.span
    n = slot // cute.ceil_div(s.T, s.chunk)
    if s.offset_bytes > 0:
        n = owner(s, slot)
    return head, n, high, low


@cute.jit
def next_task(s, head: Int32, n: Int32):
    """The task before."""
    n -= 1
    if n < 0:
        n = s.N - 1
        head -= 1
    return head, n


@cute.jit
def _part(s, head: Int32, n: Int32, end: Int32, low: Int32, high: Int32):
    token, length, slot, after = task(s, n)
    line = head * s.span
    # Whatever the offsets are, a part has a slot, and leads neither out of the range nor out of the tensors.
    begin = cutlass.max(cutlass.min(line + slot, end - 1), low)
    first = cutlass.max(begin - line - slot, 0)
    chunks = cutlass.min(cute.ceil_div(length, s.chunk) - first, end - begin)
    number = begin if s.keeps else high - end
    return begin, token, length, first, cutlass.max(chunks, 0), Int32(end < line + after), number


def part(s, head, n, end, low, high):
    """The part of a task that ends with slot ``end`` of the line, in a range [low, high): sequence, head, first token
    in B*T and length of the sequence; ``first`` of its ``chunks``, their number, the slot where it begins, and whether
    the next stream goes on with the sequence."""
    begin, token, length, first, chunks, cut, number = _part(s, head, n, end, low, high)
    return SimpleNamespace(
        sequence=n, head=head, token=token, length=length, first=first, chunks=chunks, number=number,
        begin=begin, cut=cut > 0,
    )  # fmt: skip


def prepared(r, number, count):
    """How many records from ``number`` on are ready, of ``count`` <= 32; by a whole warp."""
    lane = cute.arch.lane_idx()
    look = number + lane
    seen = ptx.load_acquire(r.ready + Int64(look % r.depth) * 4, lane < cutlass.min(count, r.depth))
    ready = cute.arch.vote_ballot_sync(seen > look)
    cute.arch.sync_warp()  # what any lane has acquired, all have
    return cute.arch.popc(ready ^ (ready + 1)) - 1  # ones at the low end, 31 at most


def tell(r, half, number):
    """All records below ``number`` have been read. They are in shared memory, so that no order is needed: what is
    written later cannot reach them."""
    ptx.store_relaxed(r.read + half * 4, number)


def hand_over(r, half):
    """The state of a half of V has been written by threads that this one has synchronised with."""
    ptx.store_release(r.handed + half * 4, Int32(1))


@cute.jit
def wait_for_state(r, half: Int32):
    """Until it has been handed over; by each thread that reads of it."""
    while ptx.load_acquire(r.handed + half * 4, Boolean(True)) == 0:
        ptx.nanosleep(Int32(POLL_NS))


# ---- both


def ring(s, stream):
    """The records of one stream, and its counters."""
    done = s.counters + Int64(stream) * (LINE * 4)
    first = Int32(0) if s.keeps else stream * s.depth
    ready = _last_line(s) + LINE * 4 + Int64(first) * 4
    return SimpleNamespace(depth=s.depth, first=first, ready=ready, read=done, handed=done + HANDED * 4)


def record(r, number):
    """The record of a number."""
    return r.first + number % r.depth
