"""The chain of segments' summaries: how each acts on a state, ``S_out = M S_in + B``.

B is the final state from a given initial one (zeros, but for the first segment of a sequence), M that from the identity
without values. Columns of S go through the recurrence one by one,

    X^T = v^T + S^T (-Kd)^T      R^T = X^T T^T      S^T <- S^T diag(a) + R^T Kg

so that M is 128 more of them, with v = 0. Of four halves of 64 rows of S^T two are B's and two are M's. There is no O, so
that Qd and Aqk are not loaded; records stay in the workspace for the launch that runs the segments.
"""

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from kda_cute.device import ptx
from kda_cute.records import decay_start
from kda_sm90.config import HEAD_DIM
from kda_sm90.kernels import schedule
from kda_sm90.kernels.chain import HALF, WARPGROUP, Chain


class SummaryChain(Chain):
    """The chain without O, over B's halves of a stream or M's. B goes to ``final_state``, M to ``transitions``, both
    transposed where states are [V,K].

    Order of one chunk in a warpgroup: issue X | decay S | wait X, round it | issue R | wait R, round it | issue S | v of the
    next chunk | wait S, round it.
    """

    EARLY, LATE = ("kd", "a"), ("t", "kg")
    STORES = False

    def values_of(self, valid, half):
        """Rows of v that exist: none in M's halves."""
        return cutlass.min(valid, (2 - half // 2 * 2) * self.chunk)

    @cute.jit
    def chain(self, p, order, stream: Int32, tiles, x, carry: Int64, half: Int32):
        wg = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % WARPGROUP
        lane = thread % 32
        half = half + wg
        mma_tokens = self.mma(OperandMajorMode.K, self.chunk)
        mma_state = self.mma(OperandMajorMode.MN, HEAD_DIM)
        tokens, channels = mma_tokens.get_slice(thread), mma_state.get_slice(thread)

        tCsKd = tokens.make_fragment_B(tokens.partition_B(tiles["kd"]))
        tCsKg = channels.make_fragment_B(channels.partition_B(tiles["kg"]))
        tCsT = tokens.make_fragment_B(tokens.partition_B(tiles["t"]))
        accX = cute.make_rmem_tensor(mma_tokens.partition_shape_C((HALF, self.chunk)), Float32)  # and then R
        accS = cute.make_rmem_tensor(mma_state.partition_shape_C((HALF, HEAD_DIM)), Float32)
        tCrS = cute.make_rmem_tensor(mma_tokens.partition_shape_A((HALF, HEAD_DIM)), BFloat16)
        tCrX = cute.make_rmem_tensor(mma_state.partition_shape_A((HALF, self.chunk)), BFloat16)  # and then R

        v = p.v + wg * (self.chunk * HALF * 2)
        a = p.a + decay_start(lane % 4)
        early, late = Int32(0), Int32(0)
        early_phase, late_phase = Int32(0), Int32(0)
        steps = self.chunk // 16
        always = x.depth > 0  # as in `Chain`; it makes no difference to chunks of 32
        head, n, high, low = schedule.first_task(order, stream)
        end = high
        while end > low:
            s = schedule.part(order, head, n, end, low, high)
            matrix = Int64(s.sequence * x.HV + s.head) * (4 * HEAD_DIM * HEAD_DIM)
            if s.first > 0:
                self.take_over(order, stream - 1, carry, half, thread, accS)
            elif half >= 2:
                self.load_identity(half - 2, thread, accS)
            else:
                self.load_state(x, matrix, half, thread, accS)
            self.round(accS, tCrS)
            cute.arch.mbarrier_wait(p.early_full + early, early_phase)
            self.load_v(v + early * self.v_bytes, thread, accX)
            for _ in cutlass.range(s.chunks, unroll=1):
                warpgroup.wait_group(0)  # as in `Chain`
                seen = cute.arch.mbarrier_try_wait(p.late_full + late, late_phase)
                self.gemm(mma_tokens, accX, tCrS, tCsKd, early, range(HEAD_DIM // 16))
                self.wait(p.late_full + late, late_phase, seen)
                if always:
                    self.decay(self.load_decay(a + early * (4 * HEAD_DIM)), accS)
                warpgroup.wait_group(0)
                self.round(accX, tCrX)
                self.gemm(mma_tokens, accX, tCrX, tCsT, late, range(steps), zero=True)
                warpgroup.wait_group(0)
                self.round(accX, tCrX)
                self.gemm(mma_state, accS, tCrX, tCsKg, late, range(steps))
                self.release(p.early_empty + early)
                early += 1
                if early == self.early:
                    early = Int32(0)
                    early_phase = early_phase ^ 1
                cute.arch.mbarrier_wait(p.early_full + early, early_phase)
                if always:
                    self.load_v(v + early * self.v_bytes, thread, accX)
                warpgroup.wait_group(0)
                self.release(p.late_empty + late)
                self.round(accS, tCrS)
                late += 1
                if late == self.late:
                    late = Int32(0)
                    late_phase = late_phase ^ 1
            self.release(p.early_empty + early)  # the stage without bytes
            early += 1
            if early == self.early:
                early = Int32(0)
                early_phase = early_phase ^ 1
            if s.cut:
                self.hand_over(order, stream, carry, half, wg, thread, accS)
            elif half >= 2:
                self.store_state(x.transitions, matrix, x.v_first, half - 2, thread, accS)
            else:
                self.store_state(x.final_state, matrix, x.v_first, half, thread, accS)
            end = s.begin
            head, n = schedule.next_task(order, head, n)

    def load_identity(self, half, thread, acc):
        """Rows of the identity: element (e, r, j) of the accumulator is in row 8r + lane // 4 of its warp's 16, and in column
        8j + 2 * (lane % 4) + e."""
        row = half * HALF + 16 * (thread // 32) + thread % 32 // 4
        column = 2 * (thread % 4)
        for i in range(HEAD_DIM // 2):
            on = row + 8 * (i // 2 % 2) == column + 8 * (i // 4) + i % 2
            acc[i] = ptx.select(on, Float32(1.0), Float32(0.0))
