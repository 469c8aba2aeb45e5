"""The chains of calls in segments over a pool of states (`kda_core.contract.KdaSegments`).

Everywhere else in these launches a sequence of the schedule is a segment. The slots belong to the sequences of the call. Exits,
transitions, and the states of `SegmentArguments` with one row for each segment are [K, V] in fp32, whatever the layout of the pool.

A slot may be read and written by one call. The chain of a last segment may end before that of the first one starts, so only ``summarize``
reads slots: it keeps the states that it finds in ``initial_state``, and ``execute``, which writes slots, starts from there.
"""

from cutlass import Int32, Int64, cute

from kda_cute.device import ptx, slots
from kda_cute.device.pools import matrix_address, pool_of
from kda_sm90.config import HEAD_DIM
from kda_sm90.kernels import fragments
from kda_sm90.kernels.fragments import MATRIX_BYTES
from kda_sm90.kernels.serving import ServingChain, ServingStoreWarp, SlotStates
from kda_sm90.kernels.summary import SummaryChain


def sequence_of(args, part):
    """Returns the sequence to which the segment of a part belongs."""
    return ptx.load_global_i32(args.segment_sequence + Int64(part.sequence) * 4, True)


def tokens_before(args, part):
    """Returns the tokens of the sequence before the segment of a part."""
    return ptx.load_global_i32(args.segment_before + Int64(part.sequence) * 4, True)


def row_of(states, args, part):
    """Returns the address of the matrix of a part's segment in ``states`` [N, HV, 128, 128] fp32."""
    return states + Int64(part.sequence * args.HV + part.head) * MATRIX_BYTES


class PoolSummaryChain(SlotStates, SummaryChain):
    """The chain of the mode ``summarize`` over a pool."""

    @cute.jit
    def load_initial_state(self, args, part, thr):
        """Loads the state of a first segment from its slot, or zeros, and keeps it; that of another one from its row. Loads the identity
        for the halves of M."""
        if thr.half >= 2:
            fragments.fill_identity(thr.half - 2, thr.index, thr.accS)
        else:
            pool, n = pool_of(args, args.read_bytes), sequence_of(args, part)
            before = tokens_before(args, part)
            is_first, is_inside = before == 0, before != 0
            slot = slots.read_slot(pool, n)
            row = row_of(args.initial_state, args, part)
            found = matrix_address(args.pool, args.pool_pitch, slot, part.head, args.narrow)
            fragments.fill_zero(thr.accS)
            if slots.has_state(pool, n, slot) | is_inside:
                self.load_from_slot(
                    ptx.select(is_first, found, row),
                    ptx.select(is_first, args.narrow, Int32(0)),
                    ptx.select(is_first, args.v_first, Int32(0)),
                    thr,
                )
            if is_first:
                self.store_in_slot(row, Int32(0), Int32(0), thr)

    @cute.jit
    def store_matrix(self, states: Int64, args, part, half: Int32, thr):
        """Stores S as a half of the matrix of a segment and head in ``states``."""
        cute.autovec_copy(thr.accS, self.state_fragment(states, args, part, half, thr, (1, HEAD_DIM)))


class PoolSegmentStoreWarp(ServingStoreWarp):
    """The store warp of `PoolSegmentChain`."""

    def sequence_of(self, args, part):
        return sequence_of(args, part)


class PoolSegmentChain(ServingChain):
    """The chain of the mode ``execute`` over a pool."""

    StoreWarp = PoolSegmentStoreWarp

    def tokens_before(self, args, part):
        return tokens_before(args, part)

    @cute.jit
    def load_initial_state(self, args, part, thr):
        """Loads the state at the start of a segment, which ``summarize`` and the merge have found."""
        states = self.state_fragment(args.initial_state, args, part, thr.half, thr, (1, HEAD_DIM))
        cute.autovec_copy(states, thr.accS)

    @cute.jit
    def store_state(self, sched, queue: Int32, args, carry: Int64, part, thr):
        """Stores the state at the end of a part: for the next queue, in the slot of the final state of its sequence, or as final state of
        its segment."""
        if part.cut:
            self.publish_carry(sched, queue, carry, thr)
        else:
            pool, n = pool_of(args, args.write_bytes), sequence_of(args, part)
            flag = ptx.load_global_u8(args.segment_ends + Int64(part.sequence), True)
            ends, goes_on = flag != 0, flag == 0
            slot = slots.write_slot(pool, n, Int32(0), True)
            found = matrix_address(args.into, args.into_pitch, slot, part.head, args.into_narrow)
            in_pool = ends & (args.into != Int64(0)) & slots.is_slot(pool, slot)
            if in_pool | (goes_on & (args.final_state != Int64(0))):
                self.store_in_slot(
                    ptx.select(ends, found, row_of(args.final_state, args, part)),
                    ptx.select(ends, args.into_narrow, Int32(0)),
                    ptx.select(ends, args.v_first, Int32(0)),
                    thr,
                )
