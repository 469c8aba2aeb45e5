"""The kernels of calls in segments over a pool of states (`kda_core.contract.KdaSegments`). A sequence of the kernels is a segment.

`kda_cute.device.pools` says where the states of segments lie. Exits and transitions are [K, V] in fp32, whatever the layout of the pool.
"""

from cutlass import Int32, cute

from kda_cute.device import pools, ptx
from kda_sm100.arguments import SEGMENT_CHAIN, SEGMENT_SUMMARY
from kda_sm100.kernels.serving import ServingChainKernel, SlotStates
from kda_sm100.kernels.summary import SummaryKernel


class PoolSummaryKernel(SlotStates, SummaryKernel):
    """Takes any tensor of the device, and `PoolSegmentArguments`. Writes B to final_state and M to transitions."""

    interface = SEGMENT_SUMMARY

    @cute.jit
    def load_initial(self, args, task, row: Int32, S: cute.Tensor):
        """Loads the state of a first segment from its slot, or zeros, and keeps it; that of another one from its row. Loads the identity
        for M."""
        if task.transition > 0:
            self.load_identity(row, S)
        else:
            exists, matrix, narrow, v_first, is_first, kept = pools.segment_start(
                args, task.sequence, task.head
            )
            self.load_slot_state(exists, matrix, narrow, v_first, row, S)
            self.store_slot_state(is_first, kept, Int32(0), Int32(0), row, S)

    def store_final(self, args, task, row, S):
        target = ptx.select(task.transition > 0, args.transitions, args.final_state)
        self.store_state(target, Int32(0), task.matrix, row, S)


class PoolSegmentChainKernel(ServingChainKernel):
    """Takes o and `PoolSegmentArguments`."""

    spill_allowance = 24  # of the variants with bf16 states; others: 0

    interface = SEGMENT_CHAIN

    def sequence_of(self, args, task):
        return pools.segment_sequence(args, task.sequence)

    def tokens_before(self, args, task):
        return pools.tokens_before(args, task.sequence)

    def load_initial(self, args, task, row, S):
        """Loads the state at the start of a segment, which the summaries and the merge have found."""
        self.load_state(args.initial_state, Int32(0), task.matrix, row, S)

    def store_final(self, args, task, row, S):
        exists, matrix, narrow, v_first = pools.segment_end(args, task.sequence, task.head)
        self.store_slot_state(exists, matrix, narrow, v_first, row, S)
