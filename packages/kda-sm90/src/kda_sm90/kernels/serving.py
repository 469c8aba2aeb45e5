"""The chain for serving: states in the slots of a pool, checkpoints inside of sequences, strided v. `pool_segments` has those of calls
in segments.

The rules are those of `kda_core.contract.KdaPool` and `KdaCheckpoints`; `kda_cute.device.slots` reads the slots. No chunk is special:
all that a pool needs comes before the first chunk of a part and behind the last one of a *run*. Without checkpoints a part is one run.
With checkpoints a run ends at the next one, where the warps that hold the state store it.

The last rounding of the state to an operand, tCrS, has the bits that a bf16 pool needs. A bf16 state that is read is an operand already.
"""

from types import SimpleNamespace

import cutlass
from cutlass import BFloat16, Float32, Int32, Int64, cute

from kda_cute.device import ptx, slots
from kda_sm90.config import HEAD_DIM
from kda_sm90.kernels import fragments
from kda_sm90.kernels.chain import Chain
from kda_sm90.kernels.store import StoreWarp

#: Checkpoints are at multiples of this many tokens (`kda_core.contract.CHECKPOINT_SPACING`).
SPACING = 64

#: Position of a checkpoint that no sequence reaches.
NOWHERE = 0x7FFFFFFF


def pool_of(args):
    """Returns the arguments of a launch as `kda_cute.device.slots` takes them."""
    return SimpleNamespace(
        read=args.read, write=args.write, has_initial_state=args.has_initial_state, accepted=Int64(0),
        first_slot=args.least_slot, slots=args.slots, W=1, index_bytes=args.read_bytes,
    )  # fmt: skip


def is_skipped(args, n):
    """Returns whether sequence n has neither a slot from which it starts nor one for its final state."""
    pool = pool_of(args)
    return slots.is_skipped(pool, n, slots.read_slot(pool, n))


class ServingStoreWarp(StoreWarp):
    """The store warp, which stores zeros as o of skipped sequences."""

    def kept(self, args, part):
        return ptx.select(is_skipped(args, self.sequence_of(args, part)), Int32(0), Int32(-1))

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

    def tokens_before(self, args, part):
        """Returns the tokens of the sequence before the first chunk that `schedule` counts for a part."""
        return Int32(0)

    # ---- initial and final states

    @cute.jit
    def load_initial_state(self, args, part, thr):
        """Loads the state of a sequence from its slot, or zeros."""
        pool = pool_of(args)
        slot = slots.read_slot(pool, part.sequence)
        fragments.fill_zero(thr.accS)
        if (args.pool != Int64(0)) & slots.has_state(pool, part.sequence, slot):
            matrix = matrix_address(args.pool, args.pool_pitch, slot, part.head, args.narrow)
            self.load_from_slot(matrix, args.narrow, args.v_first, thr)

    @cute.jit
    def store_state(self, sched, queue: Int32, args, carry: Int64, part, thr):
        """Stores the state at the end of a part: for the next queue, or in the slot of the final state."""
        if part.cut:
            self.publish_carry(sched, queue, carry, thr)
        else:
            pool = pool_of(args)
            pool.index_bytes = args.write_bytes
            named = slots.write_slot(pool, part.sequence, Int32(0), True)
            slot = ptx.select(args.write_bytes > 0, named, Int64(part.sequence))
            if (args.into != Int64(0)) & slots.is_slot(pool, slot):
                matrix = matrix_address(args.into, args.into_pitch, slot, part.head, args.into_narrow)
                self.store_in_slot(matrix, args.into_narrow, args.v_first, thr)

    # ---- checkpoints

    @cute.jit
    def run_part(self, smem, sched, args, part, thr, early, late, o_phase: Int32, opaque_true):
        """Runs the chunks of a part in runs, each of which ends at a checkpoint or at the end of the part."""
        last = part.first + part.chunks
        number, end = first_checkpoint(args, self.store_warp.sequence_of(args, part))
        before = self.tokens_before(args, part)
        first, highest = part.first, Int32(0)
        while first < last:
            number, highest, position = self.next_checkpoint(args, part, first, before, number, end, highest)
            stop = cutlass.min(position // self.chunk, last)
            early, late, o_phase = self.run_chunks(
                smem, sched, args, part, first, stop - first, thr, early, late, o_phase, opaque_true
            )
            first = stop
            if first * self.chunk == position:
                self.store_checkpoint(args, part, number - 1, thr)
        return early, late, o_phase

    @cute.jit
    def next_checkpoint(
        self, args, part, first: Int32, before: Int32, number: Int32, end: Int32, highest: Int32
    ):
        """Finds the first valid checkpoint behind the first ``first`` chunks of a part's line of chunks.

        Args:
            before: `tokens_before` of the part.
            number, end: the next checkpoint to be examined, and the end of those of the sequence.
            highest: the largest position before ``number``, at least 0.

        Returns:
            ``number`` behind the checkpoint, ``highest``, and its position behind ``before``, `NOWHERE` if there is none.
        """
        least = first * self.chunk
        position = Int32(NOWHERE)
        while (position == NOWHERE) & (number < end):
            found = ptx.load_global_i32(args.checkpoint_positions + Int64(number) * 4, True)
            valid = (found > highest) & (found % SPACING == 0) & (found - before <= part.length)
            if valid & (found - before > least):
                position = found - before
            highest = cutlass.max(highest, found)
            number += 1
        return number, highest, position

    @cute.jit
    def store_checkpoint(self, args, part, number: Int32, thr):
        """Stores the state in the slot of a checkpoint, unless it names no slot."""
        slot = slots.load_index(
            args.checkpoint_indices + Int64(number) * args.read_bytes, args.read_bytes, True
        )
        if (slot >= args.least_slot) & (slot < args.checkpoint_slots):
            matrix = matrix_address(
                args.checkpoint_states, args.checkpoint_pitch, slot, part.head, args.checkpoint_narrow
            )
            self.store_in_slot(matrix, args.checkpoint_narrow, args.v_first, thr)


@cute.jit
def first_checkpoint(args, n: Int32):
    """Returns the range of the checkpoints of sequence n, which is empty if the sequence is skipped."""
    number, end = Int32(0), Int32(0)
    if args.checkpoint_cu != Int64(0):
        at = args.checkpoint_cu + Int64(n) * 4
        number = cutlass.max(ptx.load_global_i32(at, True), 0)
        end = cutlass.min(ptx.load_global_i32(at + 4, True), args.checkpoint_count)
        end = ptx.select(is_skipped(args, n), number, end)
    return number, end


def matrix_address(states: Int64, pitch: Int64, slot: Int64, head: Int32, narrow: Int32):
    """Returns the address of a value head's state in a slot."""
    return states + slot * pitch + Int64(head) * (HEAD_DIM * HEAD_DIM * (4 - 2 * narrow))


def operand_of(thr):
    """Returns the bf16 operand tCrS in the shape of the accumulator accS, whose order it has."""
    return cute.make_tensor(thr.tCrS.iterator, thr.accS.layout)
