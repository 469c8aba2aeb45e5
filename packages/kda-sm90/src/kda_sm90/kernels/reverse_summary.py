"""The chain of the mode ``reverse_summarize``: how every segment acts on the gradient of a state, ``dS_in = M^T dS_out + N``.

It is to `reverse` what `summary` is to `chain`. N is the gradient of the state at the start of the segment, from a given gradient of
the state at its end, which is zero except for the last segment of a sequence. M^T is the transposed transition: the same recurrence
from the identity, with dO = 0. Columns of dS are independent, so M^T is 128 more columns. There are four halves of 64 rows of dS^T:
0 and 1 belong to N, 2 and 3 to M^T.

Nothing is stored for single chunks, and nothing depends on v or on states.
"""

from cutlass import Int32, Int64, cute

from kda_sm90.kernels.chain import Chain
from kda_sm90.kernels.reverse import ReverseChain
from kda_sm90.kernels.summary import SummaryChain


class ReverseSummaryChain(ReverseChain):
    """The chain over dO and records, over the halves of N or of M^T of a queue. It runs chunks as `ReverseChain` does.

    It stores N to ``final_state`` and M^T to ``transitions``, both transposed where states are [V, K].
    """

    STORES = False

    valid_rows = SummaryChain.valid_rows
    load_initial_state = SummaryChain.load_initial_state
    store_state = SummaryChain.store_state

    @cute.jit
    def load_state(self, sched, queue: Int32, args, carry: Int64, part, thr):
        """Loads dS behind a part. The launch has a single slab."""
        Chain.load_state(self, sched, queue, args, carry, part, thr)

    # There is no store warp.

    def test_free(self, barrier, phase, thr):
        return True

    def publish_state(self, smem, phase, free, thr):
        pass

    def publish_o(self, smem, phase, free, thr):
        pass
