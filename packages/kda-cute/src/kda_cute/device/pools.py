"""The states of a prefill in the slots of a pool, and checkpoints inside of sequences.

``args`` are the arguments of a kernel, which contain `kda_cute.pools.PoolArguments`. The rules are those of
`kda_core.contract.KdaPool` and `KdaCheckpoints`.
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
