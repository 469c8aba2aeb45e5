"""The chain of a training forward: it saves S before every 512 tokens in fp32, or before every 64 tokens in bf16 with R.

Slots and layouts are those of `kda_core.contract.KdaOutputs`: [K, V] whatever the layout of other states. The state warps store the
few states in fp32. The output warps store what belongs to every chunk: they read the operands S and R from tensor memory.
"""

import cutlass
from cutlass import Int32, Int64, const_expr, cute
from cutlass.pipeline import PipelineUserType, make_pipeline_state

from kda_cute.device import varlen
from kda_cute.records import HEAD_DIM
from kda_sm100.arguments import SAVING_CHAIN
from kda_sm100.config import SPACINGS
from kda_sm100.kernels import tensor, workspace
from kda_sm100.kernels.chain import ACCUMULATORS, WARPGROUP, ChainKernel, Mbarriers

MATRIX = 2 * HEAD_DIM * HEAD_DIM  # bytes of a state in bf16
EVERY = max(SPACINGS)


class StoresCheckpoints:
    """Mixin of a chain kernel that stores S before every 512 tokens of a sequence in fp32.

    A task has ``saved``: the sequence's first slot of 512 tokens.
    """

    def task(self, values, index):
        args, seqs, task = super().task(values, index)
        task.saved = varlen.extent(workspace.sequences(args, EVERY), task.sequence)[2]
        return args, seqs, task

    @cute.jit
    def save_checkpoint(self, args, target: Int64, task, c: Int32, row: Int32, S: cute.Tensor):
        """Stores S before chunk ``c`` of the sequence if that is the first one of a slot."""
        chunks = EVERY // self.chunk
        if c % chunks == 0:
            matrix = (task.saved + c // chunks) * args.HV + task.head
            self.store_tile(self.matrix(target, matrix, (1, HEAD_DIM)), row, S)


class StoresChunks:
    """Mixin of a chain kernel whose output warps store S before every chunk in bf16, and R if it ``stores_residual``.

    The state warps may write the next operand S or R when the output warps have read this one (`await_reader`). When they have read S
    of a chunk, they have also loaded O of the chunk before it. So the accumulators of O need no barrier: S of chunk c is published
    after S of chunk c - 1 has been read, and O of chunk c has the accumulator of c - 2. The state of a chunk has the number of its
    record.
    """

    stores_chunks = True
    stores_residual = True

    def output_images(self):
        return max(int(self.OUTPUTS), self.stores_chunks * HEAD_DIM // self.chunk)

    def mbarriers(self):
        groups = super().mbarriers()
        if self.stores_chunks:
            del groups["o_empty"]
            groups["s_read"] = Mbarriers(1, 4)
            if self.stores_residual:
                groups["r_read"] = Mbarriers(1, 4)
        return groups

    def await_reader(self, smem, name, c):
        if self.stores_chunks:
            self.wait(getattr(smem, name), c % 2 ^ 1)

    def await_accumulator(self, smem, output):
        if not self.stores_chunks:
            super().await_accumulator(smem, output)

    def write_outputs(self, smem, values, index):
        write = self.write_chunks if self.stores_chunks else super().write_outputs
        write(smem, values, index)

    @cute.jit
    def write_chunks(self, smem, values: tuple, index: Int32):
        """Stores S, R and O of every chunk, one after the other through one image."""
        args, _, task = self.task(values, index)
        thread, _, _ = cute.arch.thread_idx()
        thread = thread % WARPGROUP
        row = thread // 32 * tensor.ROWS
        column, base = self.tensor_columns, self.columns(smem, row)
        image = Int32(smem.o.data_ptr().toint())
        output = make_pipeline_state(PipelineUserType.Consumer, ACCUMULATORS)
        for c in cutlass.range(task.chunks, unroll=1):
            at = self.chunk_at(task, c)
            self.wait(smem.s_bf16_full, c % 2)
            words = tensor.load_bf16(base + column.s_bf16, HEAD_DIM // 2)
            self.publish(smem.s_read)
            self.store_transposed(image, words, row, HEAD_DIM)
            matrix = args.states + Int64(task.record + at * args.HV) * MATRIX
            self.copy_state(image, matrix, thread)
            if const_expr(self.stores_residual):
                self.wait(smem.r_bf16_full, c % 2)
                words = tensor.load_bf16(base + column.r_bf16, self.chunk // 2)
                self.publish(smem.r_read)
                self.copy_tokens(
                    image, words, row, thread, args, task, at, args.residual, self.residual_row(args)
                )
            if const_expr(self.OUTPUTS):
                self.wait(smem.o_full, output.phase, output.index)
                words = self.round(tensor.load(base + column.o + output.index * self.chunk, self.chunk))
                output.advance()
                self.copy_tokens(image, words, row, thread, args, task, at, args.o, 2 * HEAD_DIM)

    def residual_row(self, args):
        """Returns the bytes of a row of R."""
        return 2 * HEAD_DIM

    def copy_state(self, image, matrix, thread):
        """Copies the image of a state to the matrix [K, V] at an address."""
        self.copy_out(image, matrix, Int64(2 * HEAD_DIM), thread, Int32(HEAD_DIM), HEAD_DIM)

    def copy_tokens(self, image, words, row, thread, args, task, at, target, row_bytes):
        """Copies the rows of chunk ``at`` of the task that exist to ``target`` [B, T, HV, 128], whose rows lie ``row_bytes`` apart.
        ``words``: the transpose of these rows, as a tile."""
        self.store_transposed(image, words, row, self.chunk)
        pitch, done = Int64(args.HV) * row_bytes, at * self.chunk
        address = target + (task.token * args.HV + task.head) * row_bytes + pitch * done
        self.copy_out(image, address, pitch, thread, task.length - done)


class SavingChainKernel(StoresCheckpoints, StoresChunks, ChainKernel):
    """Takes o and `SavingArguments`."""

    interface = SAVING_CHAIN

    @property
    def stores_chunks(self):
        return self.config.saves < EVERY

    def save_state(self, args, task, number, c, row, S):
        if not self.stores_chunks:
            self.save_checkpoint(args, args.states, task, c, row, S)
