"""The chain of the mode ``summarize``: computes the summary of every segment, ``S_out = M S_in + B``.

B is the exit state: the final state from a given initial state, which is zero except for the first segment of a
sequence. M is the transition: the final state from the identity, without values. The recurrence treats the columns of
S independently,

    X^T = v^T + S^T (-Kd)^T      R^T = X^T T^T      S^T <- S^T diag(a) + R^T Kg

so M is 128 more columns, with v = 0. There are four halves of 64 rows of S^T: 0 and 1 belong to B, 2 and 3 to M.
There is no O, so Qd and Aqk are not loaded. The records stay in the workspace for the launch that executes the
segments.
"""

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineUserType

from kda_sm90.config import HEAD_DIM
from kda_sm90.kernels import barriers, fragments, schedule
from kda_sm90.kernels.chain import Chain


class SummaryChain(Chain):
    """The chain without O, over the halves of B or of M of a queue.

    It stores B to ``final_state`` and M to ``transitions``, both transposed where states are [V, K].
    """

    EARLY, LATE = ("kd", "a"), ("t", "kg")
    STORES = False

    def valid_rows(self, valid, half):
        """Returns the rows of v to load: none for the halves of M."""
        return cutlass.min(valid, (2 - half // 2 * 2) * self.chunk)

    @cute.jit
    def chain(self, p, order, queue: Int32, tiles, x, carry: Int64, half: Int32):
        """Runs the recurrence over every part of the queue."""
        w = self.warpgroup_of_thread(p, tiles, half)
        early, late = self.rings(PipelineUserType.Consumer)
        opaque_true = x.depth > 0  # as in `Chain.chain`; it changes nothing for chunks of 32
        head, n, high, low = schedule.first_task(order, queue)
        end = high
        while end > low:
            part = schedule.part(order, head, n, end, low, high)
            self.load_state(order, queue, x, carry, part, w)
            fragments.round_to_bf16(w.accS, w.tCrS)
            barriers.wait(p.early_full, early)
            fragments.load_v(w.v + early.index * self.v_bytes, w.thread, self.chunk, w.accX)
            for _ in cutlass.range(part.chunks, unroll=1):
                warpgroup.wait_group(0)  # as in `Chain.chain`
                early, late = self.chunk_of_summary(p, w, early, late, opaque_true)
            barriers.release(p.early_empty + early.index)  # the stage without bytes
            early.advance()
            self.store_state(order, queue, x, carry, part, w)
            end = part.begin
            head, n = schedule.next_task(order, head, n)

    @cute.jit
    def chunk_of_summary(self, p, w, early, late, opaque_true):
        """Runs one chunk. Returns both rings for the next chunk, whose v it has loaded.

        Issue order: X | decay S | wait for X, round it | R | wait for R, round it | S | v of the next chunk | wait
        for S, round it.
        """
        steps = range(self.chunk // 16)
        late_full = barriers.test(p.late_full, late)
        self.gemm(w.mma_tokens, w.accX, w.tCrS, w.tCsKd, early, range(HEAD_DIM // 16))
        barriers.wait_unless(late_full, p.late_full, late)
        if opaque_true:
            fragments.multiply_columns(w.accS, fragments.load_decays(w.a + early.index * (4 * HEAD_DIM)))
        warpgroup.wait_group(0)
        fragments.round_to_bf16(w.accX, w.tCrX)
        self.gemm(w.mma_tokens, w.accX, w.tCrX, w.tCsT, late, steps, zero=True)
        warpgroup.wait_group(0)
        fragments.round_to_bf16(w.accX, w.tCrX)
        self.gemm(w.mma_state, w.accS, w.tCrX, w.tCsKg, late, steps)
        barriers.release(p.early_empty + early.index)
        early.advance()
        barriers.wait(p.early_full, early)
        if opaque_true:
            fragments.load_v(w.v + early.index * self.v_bytes, w.thread, self.chunk, w.accX)
        warpgroup.wait_group(0)
        barriers.release(p.late_empty + late.index)
        fragments.round_to_bf16(w.accS, w.tCrS)
        late.advance()
        return early, late

    @cute.jit
    def load_initial_state(self, x, part, w):
        """Loads the initial state for the halves of B, and the identity for those of M."""
        if w.half >= 2:
            fragments.fill_identity(w.half - 2, w.thread, w.accS)
        else:
            Chain.load_initial_state(self, x, part, w)

    @cute.jit
    def store_state(self, order, queue: Int32, x, carry: Int64, part, w):
        """Stores the state at the end of a part: for the next queue, as transition, or as exit state."""
        if part.cut:
            self.publish_carry(order, queue, carry, w)
        elif w.half >= 2:
            self.store_matrix(x.transitions, x, part, w.half - 2, w)
        else:
            self.store_matrix(x.final_state, x, part, w.half, w)
