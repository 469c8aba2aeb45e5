"""The chain of the mode ``summarize``: computes the summary of every segment, ``S_out = M S_in + B``.

B is the exit state: the final state from a given initial state, which is zero except for the first segment of a
sequence. M is the transition: the final state from the identity, without values. The recurrence treats the columns of
S independently,

    X^T = v^T + S^T (-Kd)^T      R^T = X^T T^T      S^T <- S^T diag(a) + R^T Kg

so M is 128 more columns, with v = 0. (Folded records, see `chain`, have X in the place of R, and Kg~ in that of Kg.) There are
four halves of 64 rows of S^T: 0 and 1 belong to B, 2 and 3 to M. There is no O, so Qd and Aqk are not loaded. The records stay in
the workspace for the launch that executes the segments.
"""

import cutlass
from cutlass import Int32, Int64, const_expr, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineUserType

from kda_sm90.config import HEAD_DIM
from kda_sm90.kernels import barriers, fragments, schedule
from kda_sm90.kernels.chain import Chain


class SummaryChain(Chain):
    """The chain without O, over the halves of B or of M of a queue.

    It stores B to ``final_state`` and M to ``transitions``, both transposed where states are [V, K].
    """

    STORES = False
    STATES_IN_RINGS = False

    @staticmethod
    def arrays(config):
        return ("kd", "a"), ("kg",) if config.folded else ("t", "kg")

    def valid_rows(self, valid, half):
        """Returns the rows of v to load: ``valid`` for the halves 0 and 1 (B), none for 2 and 3 (M). The upper bound is two
        chunks for B, which is no restriction, and 0 for M."""
        return cutlass.min(valid, (2 - half // 2 * 2) * self.chunk)

    @cute.jit
    def chain(self, smem, sched, queue: Int32, tiles, args, carry: Int64, half: Int32):
        """Runs the recurrence over every part of the queue."""
        thr = self.thread_view(smem, tiles, half)
        early, late = self.rings(PipelineUserType.Consumer)
        # As in `Chain.chain`. For chunks of 32 it changes nothing.
        opaque_true = args.depth > 0
        head, n, high, low = schedule.first_task(sched, queue)
        end = high
        while end > low:
            part = schedule.part(sched, head, n, end, low, high)
            self.load_state(sched, queue, args, carry, part, thr)
            fragments.round_to_bf16(thr.accS, thr.tCrS)
            barriers.wait(smem.early_full, early)
            fragments.load_v(thr.v + early.index * self.v_bytes, thr.index, self.chunk, thr.accX)
            for _ in cutlass.range(part.chunks, unroll=1):
                warpgroup.wait_group(0)  # as in `Chain.chain`
                early, late = self.chunk_of_summary(smem, thr, early, late, opaque_true)
            barriers.release(smem.early_empty + early.index)  # the stage without bytes
            early.advance()
            self.store_state(sched, queue, args, carry, part, thr)
            end = part.begin
            head, n = schedule.next_task(sched, head, n)

    @cute.jit
    def chunk_of_summary(self, smem, thr, early, late, opaque_true):
        """Runs one chunk. Returns both rings for the next chunk, whose v it has loaded.

        Groups of wgmmas, each of which waits for the one before. Folded records have no R::

            group  product             ALU work meanwhile
            X      accX += tCrS (-Kd)  decay accS; wait; round X to tCrX
            R      accX  = tCrX T      wait; round R to tCrX
            S      accS += tCrX Kg     load v of the next chunk into accX; wait; round S to tCrS

        The early stage is released before S completes: without Qd, its last reader is X.
        """
        steps = range(self.chunk // 16)
        late_full = barriers.test(smem.late_full, late)
        self.gemm(thr.mma_tokens, thr.accX, thr.tCrS, thr.tCsKd, early, range(HEAD_DIM // 16))
        barriers.wait_unless(late_full, smem.late_full, late)
        if opaque_true:
            fragments.multiply_columns(thr.accS, fragments.load_decays(thr.a + early.index * (4 * HEAD_DIM)))
        warpgroup.wait_group(0)
        fragments.round_to_bf16(thr.accX, thr.tCrX)
        if const_expr(not self.config.folded):
            self.gemm(thr.mma_tokens, thr.accX, thr.tCrX, thr.tCsT, late, steps, zero=True)
            warpgroup.wait_group(0)
            fragments.round_to_bf16(thr.accX, thr.tCrX)
        self.gemm(thr.mma_state, thr.accS, thr.tCrX, thr.tCsKg, late, steps)
        barriers.release(smem.early_empty + early.index)
        early.advance()
        barriers.wait(smem.early_full, early)
        if opaque_true:
            fragments.load_v(thr.v + early.index * self.v_bytes, thr.index, self.chunk, thr.accX)
        warpgroup.wait_group(0)
        barriers.release(smem.late_empty + late.index)
        fragments.round_to_bf16(thr.accS, thr.tCrS)
        late.advance()
        return early, late

    @cute.jit
    def load_initial_state(self, args, part, thr):
        """Loads the initial state for the halves of B, and the identity for those of M."""
        if thr.half >= 2:
            fragments.fill_identity(thr.half - 2, thr.index, thr.accS)
        else:
            Chain.load_initial_state(self, args, part, thr)

    @cute.jit
    def store_state(self, sched, queue: Int32, args, carry: Int64, part, thr):
        """Stores the state at the end of a part: for the next queue, as transition, or as exit state."""
        if part.cut:
            self.publish_carry(sched, queue, carry, thr)
        elif thr.half >= 2:
            self.store_matrix(args.transitions, args, part, thr.half - 2, thr)
        else:
            self.store_matrix(args.final_state, args, part, thr.half, thr)
