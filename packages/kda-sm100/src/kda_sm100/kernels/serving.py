"""The chain for serving: states in the slots of a pool, and checkpoints inside of sequences (`kda_cute.device.pools`). `pool_segments` has
those of calls in segments.

Only the state warps know of checkpoints. They carry the state in *runs*, each of which ends at the next checkpoint, where they store it,
or at the end of the sequence. A skipped sequence has no chunks; the output warps write zeros as its o.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from kda_cute.device import pools, ptx
from kda_cute.records import HEAD_DIM
from kda_sm100.arguments import SERVING_CHAIN
from kda_sm100.kernels.chain import WARPGROUP, ChainKernel


class SlotStates:
    """Mixin of a chain kernel: loads and stores states in slots, by the state warps."""

    @cute.jit
    def load_slot_state(
        self, exists, matrix: Int64, narrow: Int32, v_first: Int32, row: Int32, S: cute.Tensor
    ):
        """Loads S from the matrix at an address, from bf16 if ``narrow``, else from fp32; zeros unless it ``exists``."""
        lane = cute.arch.lane_idx()
        if narrow > 0:
            for i, (v, k) in enumerate(self.corners(row)):
                inside = (v + lane // 4) * HEAD_DIM + k + 2 * (lane % 4)
                if v_first == 0:
                    inside = (k + lane // 4) * HEAD_DIM + v + 2 * (lane % 4)
                pair = ptx.load_global_streaming(matrix + inside * 2, exists, Int32)
                if v_first == 0:
                    pair = ptx.transpose_8x8(pair)
                S[2 * i], S[2 * i + 1] = ptx.unpack_bf16x2(pair)
        elif v_first > 0:
            for i, (v, k) in enumerate(self.coordinates(row)[::2]):
                place = matrix + (v * HEAD_DIM + k) * 4
                S[2 * i], S[2 * i + 1] = ptx.load_global_streaming_words(place, 2, exists, Float32)
        else:
            for i, (v, k) in enumerate(self.coordinates(row)):
                S[i] = ptx.load_global_streaming(matrix + (k * HEAD_DIM + v) * 4, exists)

    @cute.jit
    def store_slot_state(
        self, exists, matrix: Int64, narrow: Int32, v_first: Int32, row: Int32, S: cute.Tensor
    ):
        """Stores S to the matrix at an address if it ``exists``, in bf16 if ``narrow``, else in fp32."""
        if exists:
            if narrow > 0:
                self.store_bf16_matrix(matrix, v_first, row, S)
            elif v_first > 0:
                for i, (v, k) in enumerate(self.coordinates(row)[::2]):
                    place = matrix + (v * HEAD_DIM + k) * 4
                    ptx.store_global_words_if(place, [S[2 * i], S[2 * i + 1]], True)
            else:
                for i, (v, k) in enumerate(self.coordinates(row)):
                    ptx.store_global(matrix + (k * HEAD_DIM + v) * 4, S[i])


class ServingChainKernel(SlotStates, ChainKernel):
    """Takes o and `ServingArguments`."""

    spill_allowance = 8  # of the variants with bf16 states; others: 0

    interface = SERVING_CHAIN

    def task(self, values, index):
        """Returns the same as the chain's method, with ``skipped``. A skipped sequence has no chunks."""
        args, seqs, task = super().task(values, index)
        task.skipped = pools.is_skipped(args, self.sequence_of(args, task))
        task.chunks = ptx.select(task.skipped, Int32(0), task.chunks)
        return args, seqs, task

    def sequence_of(self, args, task):
        """Returns the sequence of a task, by which its slots are indexed."""
        return task.sequence

    def tokens_before(self, args, task):
        """Returns the tokens of the sequence before the task."""
        return Int32(0)

    @cute.jit
    def write_outputs(self, smem, values: tuple, index: Int32):
        args, _, task = self.task(values, index)
        if task.skipped:
            self.clear_outputs(args, task)
        ChainKernel.write_outputs(self, smem, values, index)

    @cute.jit
    def clear_outputs(self, args, task):
        """Stores zeros to the rows of o of the task."""
        thread, _, _ = cute.arch.thread_idx()
        unit, first = thread % 16, thread % WARPGROUP // 16
        for row in cutlass.range(first, task.length, WARPGROUP // 16, unroll=1):
            place = (Int64(task.token + row) * args.HV + task.head) * (2 * HEAD_DIM)
            ptx.store_global_x4(args.o + place + unit * 16, [Int32(0)] * 4)

    # ---- runs

    @cute.jit
    def carry_task(self, smem, args, task, row: Int32, S: cute.Tensor, early, number: Int32):
        """Carries S from checkpoint to checkpoint, and to the end of the sequence."""
        point, end = pools.checkpoints_of(args, self.sequence_of(args, task))
        first, highest = Int32(0), Int32(0)
        while first < task.chunks:
            before = self.tokens_before(args, task)
            point, highest, position = pools.next_checkpoint(
                args, task.length, first * self.chunk, before, point, end, highest
            )
            last = cutlass.min(position // self.chunk, task.chunks)
            early = self.carry_chunks(smem, args, task, row, S, early, number, first, last)
            first = last
            if first * self.chunk == position:
                exists, matrix = pools.checkpoint_state(args, point - 1, task.head)
                self.store_slot_state(exists, matrix, args.checkpoint_narrow, args.v_first, row, S)

    # ---- states

    def load_initial(self, args, task, row, S):
        """Loads the state of the sequence from its slot; zeros if it has none."""
        exists, matrix = pools.initial_state(args, task.sequence, task.head)
        self.load_slot_state(exists, matrix, args.narrow, args.v_first, row, S)

    def store_final(self, args, task, row, S):
        exists, matrix = pools.final_state(args, task.sequence, task.head)
        self.store_slot_state(exists, matrix, args.into_narrow, args.v_first, row, S)
