"""Initial states, which reach a chain through the rings of its shared memory.

A chain that loads a state from global memory waits for the loads between two parts. So the producer requests the state before the first record of
the part, while the chain still executes the part before (`request_initial_state`). The state occupies stages of both rings. The values warp has
nothing to add to them (`pass_initial_state`). The chain loads its fragment of the state from them (`receive_initial_state`).

A state consists of *blocks* of C / 2 rows: four blocks with chunks of 64, eight with chunks of 32. A stage of both rings holds three blocks, in the
places of Kd, Qd and Kg. A CTA of one half of V loads all blocks too.
"""

import cutlass
from cutlass import Int32, Int64, cute

from kda_cute.device import ptx
from kda_sm90.config import HEAD_DIM
from kda_sm90.kernels import barriers, fragments
from kda_sm90.kernels.barriers import WARPGROUP
from kda_sm90.kernels.fragments import HALF, MATRIX_BYTES

#: The arrays of a stage that hold its blocks: of the early ring, and of the late ring.
EARLY, LATE = ("kd", "qd"), ("kg",)
#: Blocks of a stage of both rings.
OF_STAGE = len(EARLY + LATE)


class InitialStates:
    """Mixin of `chain.Chain`, whose names it has: moves the initial state of a part from global memory to accS."""

    @property
    def blocks(self) -> int:
        """Blocks of a state."""
        return MATRIX_BYTES // self.bytes["kd"]

    def has_initial_state(self, args, part):
        """Returns whether a part starts from an initial state. If not, it starts from zeros, or continues what another queue began."""
        return (args.initial_state != Int64(0)) & (part.continues == False)

    def blocks_of_part(self, args, part):
        """Returns the blocks of the initial state of a part, 0 if it has none."""
        return ptx.select(self.has_initial_state(args, part), Int32(self.blocks), Int32(0))

    # ---- producer and values warps

    @cute.jit
    def request_initial_state(self, smem, args, part, early, late):
        """Requests the initial state of a part, if it has one, into stages of both rings. Returns the rings behind them. A whole warp calls
        it."""
        size, blocks = self.bytes["kd"], self.blocks_of_part(args, part)
        matrix = args.initial_state + Int64(part.sequence * args.HV + part.head) * MATRIX_BYTES
        for start in cutlass.range(0, blocks, OF_STAGE, unroll=1):
            first = start
            for names, ring, full, empty in (
                (EARLY, early, smem.early_full, smem.early_empty),
                (LATE, late, smem.late_full, smem.late_empty),
            ):
                count = cutlass.max(cutlass.min(blocks - first, len(names)), 0)
                barriers.wait(empty, ring)
                barrier = full + ring.index
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive_and_expect_tx(barrier, count * size)
                    for i in cutlass.range_constexpr(len(names)):
                        if i < count:
                            ptx.bulk_load(
                                getattr(smem, names[i]) + ring.index * size,
                                matrix + Int64(first + i) * size,
                                Int32(size),
                                Int32(barrier.toint()),
                            )
                first += len(names)
            early.advance()
            late.advance()
        return early, late

    @cute.jit
    def pass_initial_state(self, smem, args, part, early):
        """Passes the early stages of an initial state on, to which the values warp adds nothing. Returns the ring behind them."""
        for _ in cutlass.range(0, self.blocks_of_part(args, part), OF_STAGE, unroll=1):
            barriers.wait(smem.early_empty, early)
            ptx.cp_async_arrive(Int32((smem.early_full + early.index).toint()))
            early.advance()
        return early

    # ---- chain

    @cute.jit
    def receive_initial_state(self, smem, args, thr, early, late):
        """Loads the initial state of a part from its stages into accS. Returns the rings behind them."""
        thread = ptx.opaque(thr.index) & (WARPGROUP - 1)
        if args.v_first > 0:
            early, late = self.receive_rows(smem, thr, thread, early, late)
        else:
            early, late = self.receive_channels(smem, thr, thread, early, late)
        return early, late

    def receive_channels(self, smem, thr, thread, early, late):
        """Loads a state [K, V], whose blocks hold channels of all rows of V."""
        channels = HEAD_DIM // self.blocks
        for start in range(0, self.blocks, OF_STAGE):
            self.wait_for_blocks(smem, early, late)
            for i, place in enumerate(self.places_of_blocks(smem, early, late)[: self.blocks - start]):
                fragments.load_channels(place, thr.half, thread, channels * (start + i), channels, thr.accS)
            early, late = self.release_blocks(smem, early, late)
        return early, late

    @cute.jit
    def receive_rows(self, smem, thr, thread: Int32, early, late):
        """Loads a state [V, K], whose blocks hold rows of V. All 16 rows of a warp are in one block."""
        rows = HEAD_DIM // self.blocks
        # Uniform, else ptxas takes the branch below for one that diverges, and no longer keeps addresses of the chain's loop in uniform registers.
        row = cute.arch.make_warp_uniform(thr.half * HALF + thread // 32 * 16)
        for start in cutlass.range(0, self.blocks, OF_STAGE, unroll=1):
            self.wait_for_blocks(smem, early, late)
            own = row // rows - start
            if (own >= 0) & (own < OF_STAGE):
                kd, qd, kg = self.places_of_blocks(smem, early, late)
                block = ptx.select(own == 0, kd, ptx.select(own == 1, qd, kg))
                fragments.load_rows(block + row % rows * (4 * HEAD_DIM), thread, thr.accS)
            early, late = self.release_blocks(smem, early, late)
        return early, late

    def places_of_blocks(self, smem, early, late):
        """Returns the addresses of the blocks of a stage of both rings."""
        size = self.bytes["kd"]
        return [
            *(getattr(smem, name) + early.index * size for name in EARLY),
            *(getattr(smem, name) + late.index * size for name in LATE),
        ]

    def wait_for_blocks(self, smem, early, late):
        """Waits for the blocks of a stage of both rings."""
        barriers.wait(smem.early_full, early)
        barriers.wait(smem.late_full, late)

    def release_blocks(self, smem, early, late):
        """Releases a stage of both rings. Returns the rings behind it."""
        barriers.release(smem.early_empty + early.index)
        barriers.release(smem.late_empty + late.index)
        early.advance()
        late.advance()
        return early, late
