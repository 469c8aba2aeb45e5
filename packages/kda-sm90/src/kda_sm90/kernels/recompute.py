"""The chain of the mode ``recompute``: the states and residuals that the backward needs, from a forward that did not save them.

It runs the forward's recurrence without outputs,

    X^T = v^T + S^T (-Kd)^T      R^T = X^T T^T      S^T <- S^T diag(a) + R^T Kg

and stores S before every chunk to ``states`` [slots of a head, HV, K, V] whatever ``v_first``, and R to ``o``, both in bf16. The
records stay in the workspace for the mode ``reverse``.
"""

from cutlass import Int32, cute
from cutlass.cute.nvgpu import warpgroup

from kda_sm90.config import HEAD_DIM
from kda_sm90.kernels import barriers, fragments
from kda_sm90.kernels.each_chunk import EachChunkChain


class RecomputeChain(EachChunkChain):
    """The chain without O, which stores every state and R."""

    EARLY, LATE = ("kd", "a"), ("t", "kg")

    def run_chunk(self, smem, thr, early, late, o_phase):
        """Runs one chunk. Returns both rings and the phase of R for the next chunk, whose v it has loaded.

        Issue order: X | store S, decay it | wait for X, round it | R | wait for R, round it | S | store R, v of the next chunk |
        wait for S, round it.
        """
        steps = range(self.chunk // 16)
        self.gemm(thr.mma_tokens, thr.accX, thr.tCrS, thr.tCsKd, early, range(HEAD_DIM // 16))
        self.publish_state(smem, Int32(0), thr)  # [K, V], whatever the states of the call
        fragments.multiply_columns(thr.accS, fragments.load_decays(thr.a + early.index * (4 * HEAD_DIM)))
        barriers.wait(smem.late_full, late)
        warpgroup.wait_group(0)
        barriers.release(smem.early_empty + early.index)
        fragments.round_to_bf16(thr.accX, thr.tCrX)
        self.gemm(thr.mma_tokens, thr.accX, thr.tCrX, thr.tCsT, late, steps, zero=True)
        warpgroup.wait_group(0)
        fragments.round_to_bf16(thr.accX, thr.tCrX)
        self.gemm(thr.mma_state, thr.accS, thr.tCrX, thr.tCsKg, late, steps)
        cute.arch.mbarrier_wait(smem.o_free + thr.wg, o_phase)
        self.publish_o(smem, thr)
        early.advance()
        barriers.wait(smem.early_full, early)
        self.load_tokens(early, thr)
        warpgroup.wait_group(0)
        barriers.release(smem.late_empty + late.index)
        fragments.round_to_bf16(thr.accS, thr.tCrS)
        late.advance()
        return early, late, o_phase ^ 1
