"""The chain of the mode ``recompute``: `reverse` with the states and R that the forward has not saved.

The forward has saved S before every 512 tokens, its *checkpoints*. The slots of the schedule are the 8 chunks behind a checkpoint
(fewer at the end of a sequence). A chain takes the slots of a sequence from the last to the first. In each slot it runs

1. forward from the checkpoint, without outputs: ``X^T = v^T + S^T (-Kd)^T``, ``R^T = X^T T^T``, ``S^T <- S^T diag(a) + R^T Kg``. It
   stores S before every chunk to ``forward_states``, as images (`layouts.unpack_states`), and R to ``residual``, both in bf16;
2. backward, as in `reverse`.

Both read the same records, which stay in the ring in between, so they come from the L2. There are no registers for S and dS at a
time: while the chain runs forward, dS lies in the workspace, in the L2 as well. The last chunk on the way forward needs no S behind
it, and loads dS instead.

**Shared memory.** The two directions are mirror images, and so are their uses of a stage. Only the arrays that differ:

======= =================== ===================
stage   forward             backward
======= =================== ===================
early   Kd in ``kg``        Kg in ``kg``, Aqk
        v in ``v``          dO in ``v``
late    Kg in ``kd``        Kd in ``kd``, Qd
======= =================== ===================

A part has one trailing stage, as in `reverse`. The last chunk of a slot loads "dO" from the next stage, which holds v of the slot that
follows, or zeros. Nothing uses it.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineUserType

from kda_sm90.config import HEAD_DIM
from kda_sm90.kernels import barriers, fragments, schedule
from kda_sm90.kernels.chain import IN_FLIGHT
from kda_sm90.kernels.fragments import HALF, MATRIX_BYTES
from kda_sm90.kernels.reverse import ReverseChain
from kda_sm90.kernels.store import RecomputeStoreWarp, chunks_of
from kda_sm90.layouts import square_layout


class RecomputeChain(ReverseChain):
    """The chain over v, dO, checkpoints and records, slot by slot forward and back."""

    StoreWarp = RecomputeStoreWarp

    # ---- producers

    @cute.jit
    def produce_records(self, smem, records, sched, queue: Int32, half: Int32, args):
        """Fills both rings with the records of each slot, twice, and publishes which ones have been read for the second time."""
        lane = cute.arch.lane_idx()
        ring = schedule.ring(sched, queue)
        early, late = self.rings(PipelineUserType.Producer)
        head, n, high, low = schedule.first_task(sched, queue)
        end = high
        while end > low:
            part = schedule.part(sched, head, n, end, low, high)
            for i in cutlass.range(part.chunks, unroll=1):
                base = (part.number + i) * sched.chunks_per_slot
                _, chunks = chunks_of(sched, part, i)
                if lane == 0:
                    schedule.publish_read(ring, half, base)
                ready = Int32(0)
                for c in cutlass.range(chunks, unroll=1):
                    if ready <= c:
                        ready = c + schedule.wait_for_records(ring, base + c, chunks - c)
                    self.load_forward(smem, records, schedule.record(ring, base + c), early, late)
                    early.advance()
                    late.advance()
                for c in cutlass.range(chunks, unroll=1):
                    number = base + chunks - 1 - c
                    self.load_record(smem, records, schedule.record(ring, number), early, late)
                    early.advance()
                    late.advance()
                    if c >= IN_FLIGHT:
                        self.wait_for_load(smem, IN_FLIGHT + 1, early, late)  # of c - IN_FLIGHT
                        free = sched.chunks_per_slot - chunks + c - IN_FLIGHT + 1
                        if lane == 0:
                            schedule.publish_read(ring, half, base + free)
                for back in cutlass.range_constexpr(1, IN_FLIGHT + 1):
                    if chunks >= back:
                        self.wait_for_load(smem, back, early, late)
            self.pass_trailing_stage(smem, early)
            early.advance()
            end = part.begin
            head, n = schedule.next_task(sched, head, n)
        if lane == 0:
            schedule.publish_read(ring, half, Int32(schedule.ALL_READ))

    def load_forward(self, smem, records, record, early, late):
        """Waits for a free stage of each ring, and requests what the forward direction needs of a record. A whole warp calls it."""
        arrays = {"kg": "kd"}, {"t": "t", "kd": "kg", "a": "a"}
        self.load_arrays(smem, records, record, early, late, *arrays, keep=True)

    @cute.jit
    def produce_values(self, smem, sched, queue: Int32, args, half: Int32):
        """Fills the early ring with v of a slot's chunks in ascending order, then with dO in descending order."""
        unit, _ = self.value_unit()
        pitch = self.value_pitch(args)
        early, _ = self.rings(PipelineUserType.Producer)
        head, n, high, low = schedule.first_task(sched, queue)
        end = high
        while end > low:
            part = schedule.part(sched, head, n, end, low, high)
            first = (part.token * args.HV + part.head) * (2 * HEAD_DIM) + half * (2 * HALF) + unit * 16
            for i in cutlass.range(part.chunks, unroll=1):
                start, chunks = chunks_of(sched, part, i)
                for c in cutlass.range(chunks, unroll=1):
                    barriers.wait(smem.early_empty, early)
                    row = start + c * self.chunk
                    source = args.forward_v + first + Int64(pitch) * row
                    self.copy_values(smem, early, source, pitch, part.length - row)
                    early.advance()
                for c in cutlass.range(chunks, unroll=1):
                    barriers.wait(smem.early_empty, early)
                    row = start + (chunks - 1 - c) * self.chunk
                    source = args.v + first + Int64(pitch) * row
                    self.copy_values(smem, early, source, pitch, part.length - row)
                    early.advance()
            barriers.wait(smem.early_empty, early)  # the trailing stage: zeros
            self.copy_values(smem, early, args.v + first, pitch, Int32(0))
            early.advance()
            end = part.begin
            head, n = schedule.next_task(sched, head, n)

    # ---- chain

    @cute.jit
    def run_part(self, smem, sched, queue, args, carry, part, thr, early, late, phase: Int32):
        """Runs the slots of a part, with dS behind them in accS. Returns both rings and the phase of the buffers behind them."""
        kept = fragments.carry_address(
            carry, queue, self.config.carries, self.config.halves + thr.half, thr.index
        )
        for i in cutlass.range(part.chunks, unroll=1):
            _, chunks = chunks_of(sched, part, i)
            fragments.store_carry(kept, thr.accS)
            matrix = Int64(sched.first_slot + part.slot + i * sched.step) * args.HV + part.head
            address = args.checkpoints + matrix * MATRIX_BYTES
            cute.autovec_copy(self.half_fragment(address, Float32, thr.half, thr, (1, HEAD_DIM)), thr.accS)
            fragments.round_to_bf16(thr.accS, thr.tCrS)
            barriers.wait(smem.early_full, early)
            self.load_v(thr, early)
            for _ in cutlass.range(chunks - 1, unroll=1):
                warpgroup.wait_group(0)  # as in `Chain.chain`
                early, late, phase = self.run_forward(smem, thr, early, late, phase)
            early, late, phase = self.turn(smem, thr, early, late, phase, kept)
            early, late, phase = self.run_back(smem, thr, early, late, phase, chunks)
        return early, late, phase

    def thread_view(self, smem, tiles, half):
        """Returns that of `ReverseChain`, with T as the operand of R."""
        thr = super().thread_view(smem, tiles, half)
        thr.tCsT_forward = thr.mma_tokens.make_fragment_B(
            thr.mma_tokens.get_slice(thr.index).partition_B(tiles["t_forward"])
        )
        return thr

    def tiles(self, storage):
        """Returns those of `ReverseChain`, and T in the layout of the forward direction."""
        layout = square_layout(self.chunk, self.stages["t"])
        return super().tiles(storage) | {
            "t_forward": storage.t.get_tensor(layout.outer, swizzle=layout.inner)
        }

    @cute.jit
    def run_forward(self, smem, thr, early, late, phase: Int32):
        """Runs one chunk forward, not the last one of its slot. Returns both rings and the phase of the buffers for the next
        chunk, whose v it has loaded.

        Issue order: X | decay S, store it | wait for X, round it | R | wait for R, round it | S | store R, v of the next chunk |
        wait for S, round it.
        """
        steps = range(self.chunk // 16)
        late_full = barriers.test(smem.late_full, late)
        state_free = cute.arch.mbarrier_try_wait(smem.state_free + thr.wg, phase)
        self.gemm(thr.mma_tokens, thr.accX, thr.tCrS, thr.tCsKg, early, range(HEAD_DIM // 16))
        barriers.wait_unless(late_full, smem.late_full, late)
        fragments.multiply_columns(thr.accS, fragments.load_decays(thr.a + late.index * (4 * HEAD_DIM)))
        self.publish_state(smem, phase, state_free, thr)
        warpgroup.wait_group(0)
        barriers.release(smem.early_empty + early.index)
        fragments.round_to_bf16(thr.accX, thr.tCrX)
        self.gemm(thr.mma_tokens, thr.accX, thr.tCrX, thr.tCsT_forward, late, steps, zero=True)
        early.advance()
        early_full = barriers.test(smem.early_full, early)
        o_free = cute.arch.mbarrier_try_wait(smem.o_free + thr.wg, phase)
        warpgroup.wait_group(0)
        fragments.round_to_bf16(thr.accX, thr.tCrX)
        self.gemm(thr.mma_state, thr.accS, thr.tCrX, thr.tCsKd, late, steps)
        self.publish_o(smem, phase, o_free, thr)
        barriers.wait_unless(early_full, smem.early_full, early)
        self.load_v(thr, early)
        warpgroup.wait_group(0)
        barriers.release(smem.late_empty + late.index)
        fragments.round_to_bf16(thr.accS, thr.tCrS)
        late.advance()
        return early, late, phase ^ 1

    @cute.jit
    def turn(self, smem, thr, early, late, phase: Int32, kept: Int64):
        """Runs the last chunk of a slot forward, without S behind it. Loads dS and the first dO. Returns both rings and the phase
        of the buffers. ``kept``: address of the thread's share of dS."""
        steps = range(self.chunk // 16)
        late_full = barriers.test(smem.late_full, late)
        state_free = cute.arch.mbarrier_try_wait(smem.state_free + thr.wg, phase)
        self.gemm(thr.mma_tokens, thr.accX, thr.tCrS, thr.tCsKg, early, range(HEAD_DIM // 16))
        fragments.load_carry(kept, thr.accS)
        barriers.wait_unless(late_full, smem.late_full, late)
        self.publish_state(smem, phase, state_free, thr)
        warpgroup.wait_group(0)
        barriers.release(smem.early_empty + early.index)
        fragments.round_to_bf16(thr.accX, thr.tCrX)
        self.gemm(thr.mma_tokens, thr.accX, thr.tCrX, thr.tCsT_forward, late, steps, zero=True)
        early.advance()
        early_full = barriers.test(smem.early_full, early)
        o_free = cute.arch.mbarrier_try_wait(smem.o_free + thr.wg, phase)
        barriers.wait_unless(early_full, smem.early_full, early)
        self.load_tokens(early, thr)
        warpgroup.wait_group(0)
        barriers.release(smem.late_empty + late.index)
        fragments.round_to_bf16(thr.accX, thr.tCrX)
        self.publish_o(smem, phase, o_free, thr)
        late.advance()
        return early, late, phase ^ 1
