"""What the chains of a backward share: a state and a matrix [C, 64] of every chunk leave for global memory."""

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import warpgroup
from cutlass.pipeline import PipelineUserType

from kda_sm90.kernels import barriers, fragments, schedule
from kda_sm90.kernels.barriers import NamedBarrier
from kda_sm90.kernels.chain import Chain
from kda_sm90.kernels.store import EachChunkStoreWarp


class EachChunkChain(Chain):
    """Base of the chains of ``recompute`` and ``reverse``, which run one chunk in `run_chunk`.

    A chunk publishes its state (`publish_state`), then its matrix (`publish_o`). The matrix is the operand tCrX, rounded.
    """

    StoreWarp = EachChunkStoreWarp

    @cute.jit
    def chain(self, smem, sched, queue: Int32, tiles, args, carry: Int64, half: Int32):
        """Runs the recurrence over every part of the queue."""
        thr = self.thread_view(smem, tiles, half)
        early, late = self.rings(PipelineUserType.Consumer)
        o_phase = Int32(0)
        head, n, high, low = schedule.first_task(sched, queue)
        end = high
        while end > low:
            part = schedule.part(sched, head, n, end, low, high)
            self.load_state(sched, queue, args, carry, part, thr)
            fragments.round_to_bf16(thr.accS, thr.tCrS)
            barriers.wait(smem.early_full, early)
            self.load_tokens(early, thr)
            for _ in cutlass.range(part.chunks, unroll=1):
                warpgroup.wait_group(0)  # as in `Chain.chain`
                early, late, o_phase = self.run_chunk(smem, thr, early, late, o_phase)
            barriers.release(smem.early_empty + early.index)  # the trailing stage
            early.advance()
            self.store_state(sched, queue, args, carry, part, thr)
            end = part.begin
            head, n = schedule.next_task(sched, head, n)

    def load_tokens(self, early, thr):
        """Loads v of a stage."""
        fragments.load_v(thr.v + early.index * self.v_bytes, thr.index, self.chunk, thr.accX)

    def publish_o(self, smem, thr):
        """Stores the transpose of tCrX as an image [C, 64] and publishes it to the store warp."""
        place = smem.o + thr.wg * self.store_warp.o_bytes
        fragments.store_transposed(place, thr.index, fragments.words_of(thr.tCrX), self.chunk)
        barriers.arrive(NamedBarrier.O_READY, thr.wg)
