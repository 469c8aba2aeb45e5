"""The chain for serving: states in the slots of a pool, checkpoints inside of sequences, strided v. `pool_segments` has those of calls
in segments.

`kda_cute.device.pools` reads slots and checkpoints. No chunk is special:
all that a pool needs comes before the first chunk of a part and behind the last one of a *run*. Without checkpoints a part is one run.
With checkpoints a run ends at the next one, where the warps that hold the state store it.

The last rounding of the state to an operand, tCrS, has the bits that a bf16 pool needs. A bf16 state that is read is an operand already.
"""

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute

from kda_cute.device import pools, ptx
from kda_sm90.config import HEAD_DIM
from kda_sm90.kernels import fragments
from kda_sm90.kernels.chain import Chain
from kda_sm90.kernels.store import StoreWarp


class ServingStoreWarp(StoreWarp):
    """The store warp, which stores zeros as o of skipped sequences."""

    def kept(self, args, part):
        return ptx.select(pools.is_skipped(args, self.sequence_of(args, part)), Int32(0), Int32(-1))

    def sequence_of(self, args, part):
        """Returns the sequence of a part, by which its slots are indexed."""
        return part.sequence


class SlotStates:
    """Mixin of a chain: loads and stores states in slots, and reads strided v."""

    def value_pitch(self, args):
        return args.v_pitch

    def value_row(self, args, part):
        return args.v + part.token * args.v_pitch + Int64(part.head) * (2 * HEAD_DIM)

    @cute.jit
    def load_from_slot(self, matrix: Int64, narrow: Int32, v_first: Int32, thr):
        """Loads the half of the state at the address of its matrix, from bf16 if ``narrow``, else from fp32."""
        if narrow > 0:
            state = operand_of(thr)
            if v_first > 0:
                cute.autovec_copy(self.half_fragment(matrix, BFloat16, thr.half, thr, (HEAD_DIM, 1)), state)
            else:
                cute.autovec_copy(self.half_fragment(matrix, BFloat16, thr.half, thr, (1, HEAD_DIM)), state)
            fragments.widen(thr.tCrS, thr.accS)
        elif v_first > 0:
            cute.autovec_copy(self.half_fragment(matrix, Float32, thr.half, thr, (HEAD_DIM, 1)), thr.accS)
        else:
            cute.autovec_copy(self.half_fragment(matrix, Float32, thr.half, thr, (1, HEAD_DIM)), thr.accS)

    @cute.jit
    def store_in_slot(self, matrix: Int64, narrow: Int32, v_first: Int32, thr):
        """Stores the half of the state at the address of its matrix, in bf16 if ``narrow``, else in fp32."""
        if narrow > 0:
            state = operand_of(thr)
            if v_first > 0:
                cute.autovec_copy(state, self.half_fragment(matrix, BFloat16, thr.half, thr, (HEAD_DIM, 1)))
            else:
                cute.autovec_copy(state, self.half_fragment(matrix, BFloat16, thr.half, thr, (1, HEAD_DIM)))
        elif v_first > 0:
            cute.autovec_copy(thr.accS, self.half_fragment(matrix, Float32, thr.half, thr, (HEAD_DIM, 1)))
        else:
            cute.autovec_copy(thr.accS, self.half_fragment(matrix, Float32, thr.half, thr, (1, HEAD_DIM)))


class ServingChain(SlotStates, Chain):
    """The chain of the variants for serving (`PrefillConfig.serving`) in the mode ``whole``."""

    StoreWarp = ServingStoreWarp
    STATES_IN_RINGS = False

    def tokens_before(self, args, part):
        """Returns the tokens of the sequence before the first chunk that `schedule` counts for a part."""
        return Int32(0)

    # ---- initial and final states

    @cute.jit
    def load_initial_state(self, args, part, thr):
        """Loads the state of a sequence from its slot, or zeros."""
        exists, matrix = pools.initial_state(args, part.sequence, part.head)
        fragments.fill_zero(thr.accS)
        if exists:
            self.load_from_slot(matrix, args.narrow, args.v_first, thr)

    @cute.jit
    def store_state(self, sched, queue: Int32, args, carry: Int64, part, thr):
        """Stores the state at the end of a part: for the next queue, or in the slot of the final state."""
        if part.cut:
            self.publish_carry(sched, queue, carry, thr)
        else:
            exists, matrix = pools.final_state(args, part.sequence, part.head)
            if exists:
                self.store_in_slot(matrix, args.into_narrow, args.v_first, thr)

    # ---- checkpoints

    @cute.jit
    def run_part(self, smem, sched, args, part, thr, early, late, o_phase: Int32, opaque_true):
        """Runs the chunks of a part in runs, each of which ends at a checkpoint or at the end of the part."""
        last = part.first + part.chunks
        number, end = pools.checkpoints_of(args, self.store_warp.sequence_of(args, part))
        before = self.tokens_before(args, part)
        first, highest = part.first, Int32(0)
        while first < last:
            number, highest, position = pools.next_checkpoint(
                args, part.length, first * self.chunk, before, number, end, highest
            )
            stop = cutlass.min(position // self.chunk, last)
            early, late, o_phase = self.run_chunks(
                smem, sched, args, part, first, stop - first, thr, early, late, o_phase, opaque_true
            )
            first = stop
            if first * self.chunk == position:
                self.store_checkpoint(args, part, number - 1, thr)
        return early, late, o_phase

    @cute.jit
    def store_checkpoint(self, args, part, number: Int32, thr):
        """Stores the state in the slot of a checkpoint, unless it names no slot."""
        exists, matrix = pools.checkpoint_state(args, number, part.head)
        if exists:
            self.store_in_slot(matrix, args.checkpoint_narrow, args.v_first, thr)


def operand_of(thr):
    """Returns the bf16 operand tCrS in the shape of the accumulator accS, whose order it has."""
    return cute.make_tensor(thr.tCrS.iterator, thr.accS.layout)
