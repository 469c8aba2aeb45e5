"""The chains of calls in segments over a pool of states (`kda_core.contract.KdaSegments`). A sequence of the schedule is a segment.

`kda_cute.device.pools` says where the states of segments lie. Exits and transitions are [K, V] in fp32, whatever the layout of the pool.
"""

from cutlass import Int32, Int64, cute

from kda_cute.device import pools
from kda_sm90.config import HEAD_DIM
from kda_sm90.kernels import fragments
from kda_sm90.kernels.serving import ServingChain, ServingStoreWarp, SlotStates
from kda_sm90.kernels.summary import SummaryChain


class PoolSummaryChain(SlotStates, SummaryChain):
    """The chain of the mode ``summarize`` over a pool."""

    @cute.jit
    def load_initial_state(self, args, part, thr):
        """Loads the state of a first segment from its slot, or zeros, and keeps it; that of another one from its row. Loads the identity
        for the halves of M."""
        if thr.half >= 2:
            fragments.fill_identity(thr.half - 2, thr.index, thr.accS)
        else:
            exists, matrix, narrow, v_first, is_first, row = pools.segment_start(
                args, part.sequence, part.head
            )
            fragments.fill_zero(thr.accS)
            if exists:
                self.load_from_slot(matrix, narrow, v_first, thr)
            if is_first:
                self.store_in_slot(row, Int32(0), Int32(0), thr)

    @cute.jit
    def store_matrix(self, states: Int64, args, part, half: Int32, thr):
        """Stores S as a half of the matrix of a segment and head in ``states``."""
        cute.autovec_copy(thr.accS, self.state_fragment(states, args, part, half, thr, (1, HEAD_DIM)))


class PoolSegmentStoreWarp(ServingStoreWarp):
    """The store warp of `PoolSegmentChain`."""

    def sequence_of(self, args, part):
        return pools.segment_sequence(args, part.sequence)


class PoolSegmentChain(ServingChain):
    """The chain of the mode ``execute`` over a pool."""

    StoreWarp = PoolSegmentStoreWarp

    def tokens_before(self, args, part):
        return pools.tokens_before(args, part.sequence)

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
            exists, matrix, narrow, v_first = pools.segment_end(args, part.sequence, part.head)
            if exists:
                self.store_in_slot(matrix, narrow, v_first, thr)
