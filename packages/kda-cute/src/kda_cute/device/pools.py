"""The states of a prefill in the slots of a pool, and checkpoints inside of sequences.

``args`` are the arguments of a kernel, which contain `kda_cute.pools.PoolArguments`. The rules are those of
`kda_core.contract.KdaPool` and `KdaCheckpoints`.

In a call in segments, ``args`` also contain `kda_cute.pools.SegmentArguments`. The slots belong to the sequences of the call. States with
one row for each segment are [K, V] in fp32, whatever the layout of the pool. A slot may be read and written by one call, and the last
segment may end before the first one starts. So only the launch that summarises segments reads slots: it keeps the states that it finds in
``initial_state``. The launch that executes segments writes slots and starts from there.
"""

from types import SimpleNamespace

import cutlass
from cutlass import Int32, Int64, cute

from kda_cute.device import ptx, slots
from kda_cute.records import HEAD_DIM

#: Checkpoints are at multiples of this many tokens (`kda_core.contract.CHECKPOINT_SPACING`).
SPACING = 64

#: Position of a checkpoint that no sequence reaches.
NOWHERE = 0x7FFFFFFF


def pool_of(args, index_bytes):
    """Returns the arguments of a launch as `kda_cute.device.slots` takes them. ``index_bytes``: of the slots that are read, or written."""
    return SimpleNamespace(
        read=args.read, write=args.write, has_initial_state=args.has_initial_state, accepted=Int64(0),
        first_slot=args.least_slot, slots=args.slots, W=1, index_bytes=index_bytes,
    )  # fmt: skip


def is_skipped(args, n):
    """Returns whether sequence n has neither a slot from which it starts nor one for its final state."""
    pool = pool_of(args, args.read_bytes)
    return slots.is_skipped(pool, n, slots.read_slot(pool, n))


def initial_state(args, n, head):
    """Returns whether sequence n starts from a state, and the address of its matrix."""
    pool = pool_of(args, args.read_bytes)
    slot = slots.read_slot(pool, n)
    exists = (args.pool != Int64(0)) & slots.has_state(pool, n, slot)
    return exists, matrix_address(args.pool, args.pool_pitch, slot, head, args.narrow)


def final_state(args, n, head):
    """Returns whether the final state of sequence n is stored, and the address of its matrix."""
    pool = pool_of(args, args.write_bytes)
    named = slots.write_slot(pool, n, Int32(0), True)
    slot = ptx.select(args.write_bytes > 0, named, Int64(n))
    exists = (args.into != Int64(0)) & slots.is_slot(pool, slot)
    return exists, matrix_address(args.into, args.into_pitch, slot, head, args.into_narrow)


@cute.jit
def checkpoints_of(args, n: Int32):
    """Returns the range of the checkpoints of sequence n, which is empty if the sequence is skipped."""
    number, end = Int32(0), Int32(0)
    if args.checkpoint_cu != Int64(0):
        at = args.checkpoint_cu + Int64(n) * 4
        number = cutlass.max(ptx.load_global_i32(at, True), 0)
        end = cutlass.min(ptx.load_global_i32(at + 4, True), args.checkpoint_count)
        end = ptx.select(is_skipped(args, n), number, end)
    return number, end


@cute.jit
def next_checkpoint(
    args, length: Int32, done: Int32, before: Int32, number: Int32, end: Int32, highest: Int32
):
    """Finds the first valid checkpoint behind the first ``done`` of ``length`` tokens, those of a sequence or of a segment of one.

    Args:
        before: tokens of the sequence before these.
        number, end: the next checkpoint to be examined, and the end of those of the sequence.
        highest: the largest position before ``number``, at least 0.

    Returns:
        ``number`` behind the checkpoint, ``highest``, and its position behind ``before``, `NOWHERE` if there is none.
    """
    position = Int32(NOWHERE)
    while (position == NOWHERE) & (number < end):
        found = ptx.load_global_i32(args.checkpoint_positions + Int64(number) * 4, True)
        valid = (found > highest) & (found % SPACING == 0) & (found - before <= length)
        if valid & (found - before > done):
            position = found - before
        highest = cutlass.max(highest, found)
        number += 1
    return number, highest, position


def checkpoint_state(args, number, head):
    """Returns whether checkpoint ``number`` names a slot, and the address of its matrix."""
    slot = slots.load_index(args.checkpoint_indices + Int64(number) * args.read_bytes, args.read_bytes, True)
    exists = (slot >= args.least_slot) & (slot < args.checkpoint_slots)
    return exists, matrix_address(
        args.checkpoint_states, args.checkpoint_pitch, slot, head, args.checkpoint_narrow
    )


def matrix_address(states, pitch, slot, head, narrow):
    """Returns the address of a value head's state in a slot."""
    return states + slot * pitch + Int64(head) * (HEAD_DIM * HEAD_DIM * (4 - 2 * narrow))


# ---- segments


def segment_sequence(args, segment):
    """Returns the sequence of a segment."""
    return ptx.load_global_i32(args.segment_sequence + Int64(segment) * 4, True)


def tokens_before(args, segment):
    """Returns the tokens of the sequence before a segment."""
    return ptx.load_global_i32(args.segment_before + Int64(segment) * 4, True)


def row_of(states, args, segment, head):
    """Returns the address of the matrix of a segment and value head in ``states`` [N, HV, 128, 128] fp32."""
    return states + (Int64(segment) * args.HV + head) * (4 * HEAD_DIM * HEAD_DIM)


def segment_start(args, segment, head):
    """Returns where the state at the start of a segment is found, for the launch that summarises: for a first segment in its slot, for
    another one in its row of ``initial_state``.

    Returns:
        whether there is a state, if not zeros; the address of its matrix; 1 if it is bf16, else 0; 1 if it is [V, K], else 0; whether the
        segment is a first one, whose state is to be kept; and the address of its row.
    """
    pool, n = pool_of(args, args.read_bytes), segment_sequence(args, segment)
    before = tokens_before(args, segment)
    is_first, is_inside = before == 0, before != 0
    slot = slots.read_slot(pool, n)
    row = row_of(args.initial_state, args, segment, head)
    found = matrix_address(args.pool, args.pool_pitch, slot, head, args.narrow)
    return (
        slots.has_state(pool, n, slot) | is_inside,
        ptx.select(is_first, found, row),
        ptx.select(is_first, args.narrow, Int32(0)),
        ptx.select(is_first, args.v_first, Int32(0)),
        is_first,
        row,
    )


def segment_end(args, segment, head):
    """Returns where the state at the end of a segment goes, in the launch that executes: of a last segment to the slot of the final state
    of its sequence, of another one to its row of ``final_state``.

    Returns:
        whether the state is stored; the address of its matrix; 1 if it is bf16, else 0; 1 if it is [V, K], else 0.
    """
    pool, n = pool_of(args, args.write_bytes), segment_sequence(args, segment)
    flag = ptx.load_global_u8(args.segment_ends + Int64(segment), True)
    ends, goes_on = flag != 0, flag == 0
    slot = slots.write_slot(pool, n, Int32(0), True)
    found = matrix_address(args.into, args.into_pitch, slot, head, args.into_narrow)
    in_pool = ends & (args.into != Int64(0)) & slots.is_slot(pool, slot)
    return (
        in_pool | (goes_on & (args.final_state != Int64(0))),
        ptx.select(ends, found, row_of(args.final_state, args, segment, head)),
        ptx.select(ends, args.into_narrow, Int32(0)),
        ptx.select(ends, args.v_first, Int32(0)),
    )
