"""The chain of the mode ``reverse``: the recurrence of the backward, from the last chunk of a sequence to the first.

With dO of a chunk, its record (Kd, Qd, Kg, Aqk, T, a), and dS', the gradient of the state behind the chunk:

    Y^T  = dO^T Aqk + dS'^T Kg^T         dX^T = Y^T T
    dS^T = dS'^T diag(a) + dO^T Qd - dX^T Kd

dX is the gradient of v, and dS the gradient of the state before the chunk. The recurrence is the mirror image of the forward's:
the same records, five products of the same sizes, and three dependent steps. It needs neither v nor the states.

The roles, rings and barriers are those of `chain`. What differs:

========================= ======================== =======================================================================
                          forward                  here
========================= ======================== =======================================================================
``v`` of the arguments    v                        dO, the gradient of the outputs
``o``                     O                        dX, of the chunk itself instead of the one before
``initial_state``         initial state            gradient of the final state
``final_state``           final state              gradient of the initial state
``states``                before some chunks       dS' behind every chunk, as images (`layouts.unpack_states`)
early ring                Kd, Qd, a, v             Aqk, Kg, dO
late ring                 Kg, Aqk, T               Qd, T, Kd, a
========================= ======================== =======================================================================

A record has the same bytes; only the major mode of four operands differs, because the products sum over the other index. dO^T is
loaded from shared memory as a register operand, so that no operand A lies in shared memory.

**Issue order of a chunk** (`ReverseChain.run_chunk`), the mirror image of the forward's: products that do not depend on what is
rounded run meanwhile. tCrS, tCrX and tCrO are the operands of dS', of Y or dX, and of dO::

    group  product                        in flight  ALU work of the warpgroup
    A      accX  = tCrO Aqk               A          round dS' to tCrS
    Y      accX += tCrS Kg                A Y        load decays, decay accS
    Q1     accS += tCrO Qd, half of C     A Y Q1     publish dS'; wait for Y (Q1 in flight); release the early stage; round Y to
                                                     tCrX
    X      accX  = tCrX T                 Q1 X
    Q2     accS += tCrO Qd, the other     Q1 X Q2    wait for X (Q2 in flight); round dX to tCrX
           half
    S      accS += tCrX (-Kd)             Q2 S       publish dX; wait for Q2, the last reader of tCrO; load dO of the next chunk to
                                                     tCrO; wait for S; release the late stage
"""

from types import SimpleNamespace
from typing import ClassVar

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.pipeline import PipelineUserType

from kda_cute.records import decay_start
from kda_sm90.config import HEAD_DIM
from kda_sm90.kernels import barriers, fragments, schedule
from kda_sm90.kernels.barriers import WARPGROUP, NamedBarrier
from kda_sm90.kernels.chain import Chain
from kda_sm90.kernels.fragments import HALF
from kda_sm90.kernels.store import ReverseStoreWarp
from kda_sm90.layouts import kg_layout, operand_layout, transposed_square_layout


class ReverseChain(Chain):
    """The chain over dO and records, in descending order of the chunks.

    A chunk publishes dS' (`publish_state`), then dX (`publish_o`), the operand tCrX.
    """

    StoreWarp = ReverseStoreWarp
    STATES_IN_RINGS = False

    LAYOUTS: ClassVar = {
        "kg": operand_layout,
        "kd": kg_layout,
        "qd": kg_layout,
        "aqk": transposed_square_layout,
        "t": transposed_square_layout,
    }

    @staticmethod
    def arrays(config):
        return ("aqk", "kg"), ("qd", "t", "kd", "a")

    @cute.jit
    def chain(self, smem, sched, queue: Int32, tiles, args, carry: Int64, half: Int32):
        """Runs the recurrence over every part of the queue."""
        thr = self.thread_view(smem, tiles, half)
        early, late = self.rings(PipelineUserType.Consumer)
        phase = Int32(0)
        head, n, high, low = schedule.first_task(sched, queue)
        end = high
        while end > low:
            part = schedule.part(sched, head, n, end, low, high)
            self.load_state(sched, queue, args, carry, part, thr)
            early, late, phase = self.run_part(smem, sched, queue, args, carry, part, thr, early, late, phase)
            barriers.wait(
                smem.early_full, early
            )  # the trailing stage; the last chunk has waited for it, if there is one
            barriers.release(smem.early_empty + early.index)
            early.advance()
            self.store_state(sched, queue, args, carry, part, thr)
            end = part.begin
            head, n = schedule.next_task(sched, head, n)

    @cute.jit
    def run_part(self, smem, sched, queue, args, carry, part, thr, early, late, phase: Int32):
        """Runs the chunks of a part, with dS behind them in accS. Returns both rings and the phase of the buffers behind them."""
        barriers.wait(smem.early_full, early)
        self.load_tokens(early, thr)
        return self.run_back(smem, thr, early, late, phase, part.chunks)

    @cute.jit
    def load_state(self, sched, queue: Int32, args, carry: Int64, part, thr):
        """Loads dS behind a part: that of the next queue or slab, the gradient of the final state, or zeros."""
        if part.enters:
            fragments.load_carry(self.place_between_slabs(args.from_slab, part, thr), thr.accS)
        else:
            Chain.load_state(self, sched, queue, args, carry, part, thr)

    @cute.jit
    def store_state(self, sched, queue: Int32, args, carry: Int64, part, thr):
        """Stores dS before a part: for the queue or the slab before, or as gradient of the initial state."""
        if part.leaves:
            fragments.store_carry(self.place_between_slabs(args.to_slab, part, thr), thr.accS)
        else:
            Chain.store_state(self, sched, queue, args, carry, part, thr)

    def place_between_slabs(self, states, part, thr):
        """Returns the address of the thread's share of dS that passes from slab to slab."""
        return fragments.carry_address(states, part.head, 2, thr.half, thr.index)

    def thread_view(self, smem, tiles, half):
        """Returns the calling thread's place, its fragments, and its addresses of dO and of the decays in stage 0."""
        wg = cute.arch.make_warp_uniform(cute.arch.warp_idx()) // 4
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % WARPGROUP
        mma_state = self.tiled_mma(OperandMajorMode.MN, HEAD_DIM)
        mma_tokens = self.tiled_mma(OperandMajorMode.K, self.chunk)
        mma_transposed = self.tiled_mma(OperandMajorMode.MN, self.chunk)
        operand = lambda mma, name: mma.make_fragment_B(mma.get_slice(thread).partition_B(tiles[name]))
        return SimpleNamespace(
            wg=wg,
            index=thread,
            half=half + wg,
            mma_state=mma_state,
            mma_tokens=mma_tokens,
            mma_transposed=mma_transposed,
            tCsAqk=operand(mma_transposed, "aqk"),
            tCsKg=operand(mma_tokens, "kg"),
            tCsT=operand(mma_transposed, "t"),
            tCsQd=operand(mma_state, "qd"),
            tCsKd=operand(mma_state, "kd"),
            accX=cute.make_rmem_tensor(
                mma_tokens.partition_shape_C((HALF, self.chunk)), Float32
            ),  # Y, then dX
            accS=cute.make_rmem_tensor(mma_state.partition_shape_C((HALF, HEAD_DIM)), Float32),
            tCrS=cute.make_rmem_tensor(mma_tokens.partition_shape_A((HALF, HEAD_DIM)), BFloat16),
            tCrX=cute.make_rmem_tensor(mma_state.partition_shape_A((HALF, self.chunk)), BFloat16),
            tCrO=cute.make_rmem_tensor(mma_state.partition_shape_A((HALF, self.chunk)), BFloat16),
            v=smem.v + wg * (self.chunk * HALF * 2),
            a=smem.a + decay_start(thread % 32 % 4),
        )

    @cute.jit
    def run_back(self, smem, thr, early, late, phase: Int32, chunks: Int32):
        """Runs chunks, with dS behind them in accS and dO of the first one in tCrO. Returns both rings and the phase of the buffers
        behind them."""
        for _ in cutlass.range(chunks, unroll=1):
            warpgroup.wait_group(0)  # as in `Chain.chain`
            early, late, phase = self.run_chunk(smem, thr, early, late, phase)
        return early, late, phase

    @cute.jit
    def run_chunk(self, smem, thr, early, late, phase: Int32):
        """Runs one chunk in the issue order of the module's docstring, which names the groups. Returns both rings and the phase of
        the buffers for the next chunk, whose dO it has loaded. The last chunk loads that of the trailing stage."""
        steps, channels = range(self.chunk // 16), range(HEAD_DIM // 16)
        halves = steps[: len(steps) // 2], steps[len(steps) // 2 :]
        late_full = barriers.test(smem.late_full, late)
        state_free = self.test_free(smem.state_free, phase, thr)
        # A
        self.gemm(thr.mma_transposed, thr.accX, thr.tCrO, thr.tCsAqk, early, steps, zero=True)
        fragments.round_to_bf16(thr.accS, thr.tCrS)
        # Y
        self.gemm(thr.mma_tokens, thr.accX, thr.tCrS, thr.tCsKg, early, channels)
        barriers.wait_unless(late_full, smem.late_full, late)
        fragments.multiply_columns(thr.accS, fragments.load_decays(thr.a + late.index * (4 * HEAD_DIM)))
        # Q1
        self.gemm(thr.mma_state, thr.accS, thr.tCrO, thr.tCsQd, late, halves[0])
        self.publish_state(smem, phase, state_free, thr)
        warpgroup.wait_group(1)  # A and Y are done; Q1 is in flight
        barriers.release(smem.early_empty + early.index)
        fragments.round_to_bf16(thr.accX, thr.tCrX)
        # X, Q2
        self.gemm(thr.mma_transposed, thr.accX, thr.tCrX, thr.tCsT, late, steps, zero=True)
        self.gemm(thr.mma_state, thr.accS, thr.tCrO, thr.tCsQd, late, halves[1])
        early.advance()
        early_full = barriers.test(smem.early_full, early)
        o_free = self.test_free(smem.o_free, phase, thr)
        warpgroup.wait_group(1)  # Q1 and X are done; Q2 is in flight
        fragments.round_to_bf16(thr.accX, thr.tCrX)
        # S
        self.gemm(thr.mma_state, thr.accS, thr.tCrX, thr.tCsKd, late, steps)
        self.publish_o(smem, phase, o_free, thr)
        barriers.wait_unless(early_full, smem.early_full, early)
        warpgroup.wait_group(1)  # Q2, which reads tCrO, is done; S is in flight
        self.load_tokens(early, thr)
        warpgroup.wait_group(0)
        barriers.release(smem.late_empty + late.index)
        late.advance()
        return early, late, phase ^ 1

    def load_tokens(self, early, thr):
        """Loads dO^T of a stage as a register operand."""
        fragments.load_transposed(
            thr.v + early.index * self.v_bytes, thr.index, self.chunk, fragments.words_of(thr.tCrO)
        )

    def test_free(self, barrier, phase, thr):
        """Returns whether the store warp has read a buffer, for `publish_state` or `publish_o`. ``barrier``: of the first half."""
        return cute.arch.mbarrier_try_wait(barrier + thr.wg, phase)

    @cute.jit
    def publish_state(self, smem, phase: Int32, free, thr):
        """Stores the transpose of tCrS as an image [K, 64 of V] and publishes it to the store warp. ``free``: whether the image was
        found free."""
        if not free:
            cute.arch.mbarrier_wait(smem.state_free + thr.wg, phase)
        place = smem.state + thr.wg * self.store_warp.state_bytes
        fragments.store_transposed(place, thr.index, fragments.words_of(thr.tCrS), HEAD_DIM)
        cute.arch.fence_proxy(
            "async.shared", space="cta"
        )  # the store warp copies the image through the async proxy
        barriers.arrive(NamedBarrier.STATE_READY, thr.wg)

    @cute.jit
    def publish_o(self, smem, phase: Int32, free, thr):
        """Stores the transpose of tCrX as an image [C, 64] and publishes it to the store warp. ``free`` as in `publish_state`."""
        if not free:
            cute.arch.mbarrier_wait(smem.o_free + thr.wg, phase)
        place = smem.o + thr.wg * self.store_warp.o_bytes
        fragments.store_transposed(place, thr.index, fragments.words_of(thr.tCrX), self.chunk)
        barriers.arrive(NamedBarrier.O_READY, thr.wg)
