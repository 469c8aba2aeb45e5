"""The reverse chain: the recurrence of the backward, from the last chunk of a sequence to the first.

With dO of a chunk, its record (w = -T Kd, Qd, Kg, Aqk, T, a), and dS', the gradient of the state behind the chunk:

    Y^T  = dO^T Aqk + dS'^T Kg^T      dS^T = dS'^T diag(a) + dO^T Qd + Y^T w      dX^T = Y^T T

dX is the gradient of v, and dS the gradient of the state before the chunk. The recurrence is the mirror image of the chain's: Y has the
place of R, dX that of O. Since w contains T, dS does not depend on dX, and a chunk has two dependent steps. It needs neither v nor the
states.

The roles, rings and barriers are those of `chain`. What differs:

============== ========================= ========================================================================
               forward                   here
============== ========================= ========================================================================
initial state  initial state             gradient of the final state
final state    final state               gradient of the initial state
o              O                         dX
states         before some chunks        dS' behind every chunk, as images (`kda_cute.records.image_offset`)
early ring     w, u, Qd, a               Kg, Aqk, dO, a
late ring      Kg, Aqk                   Qd, w, T
last two warps idle                      copy dO, whose rows are zeros behind the end of a sequence
============== ========================= ========================================================================

Order of one chunk, as in `chain`:

    state warps                               MMA warp                 output warps
                                              Y = dO Aqk
    round dS', store it   - s_bf16_full ->    Y += dS' Kg              copy dS' out of tensor memory
    decay dS', store it   - s_decayed ->      dS += dO Qd
    load Y                <- r_full -         (Y is done)
    round Y, store it     - r_bf16_full ->    dS += Y w
    load dS               <- s_full -         dX = Y T
                                                           - o_full ->    load dX, copy it out

The commit that publishes Y of the next chunk also shows that dX has read the old Y, as in `chain`.
"""

import cutlass
from cutlass import Int32, Int64, cute
from cutlass.pipeline import PipelineUserType, make_pipeline_state

from kda_cute.device import ptx
from kda_cute.records import HEAD_DIM, image_offset
from kda_sm100.arguments import BACKWARD_CHAINS
from kda_sm100.config import BackwardChainConfig, ChainConfig
from kda_sm100.kernels import tensor
from kda_sm100.kernels.chain import ACCUMULATORS, WARPGROUP, ChainKernel, FirstWarp, Mbarriers
from kda_sm100.kernels.saving import MATRIX, StoresChunks
from kda_sm100.kernels.slabs import SlabChain
from kda_sm100.kernels.tensor import Operand
from kda_sm100.layouts import record_bytes

COPIERS = 2  # warps that copy dO


class ReverseChainKernel(StoresChunks, SlabChain, ChainKernel):
    """Takes any tensor of the device and `BackwardChainArguments`."""

    interface = BACKWARD_CHAINS["reverse"]
    stores_residual = False

    EARLY, LATE = ("kg", "aqk", "grad_o", "a"), ("qd", "w", "t")
    STEP = -1

    def __init__(self, config: BackwardChainConfig):
        super().__init__(ChainConfig())
        self.config = config
        C = self.chunk
        self.bytes = record_bytes(C, backward=True) | {"grad_o": 2 * C * HEAD_DIM}
        # Operands: [C, 128] reduced over channels, and reduced over tokens; [C, C] reduced over rows.
        self.rows, self.columns_of = Operand(C, HEAD_DIM), Operand(C, HEAD_DIM, mn_major=True)
        self.square = Operand(C, C, mn_major=True)

    def mbarriers(self):
        groups = super().mbarriers()
        full = groups["early_full"]
        copied = full._replace(arrivals=full.arrivals + COPIERS)
        return groups | {"early_full": copied, "s_decayed": Mbarriers(1, 4)}

    # ---- producer, one warp

    def load_early(self, smem, address, record, stage, task):
        self.load(smem, address, record, smem.early_full, stage, ("kg", "aqk", "a"))

    # ---- dO, two warps

    @cute.jit
    def produce_values(self, smem, values: tuple, index: Int32):
        """Copies dO of every chunk to the early ring. A warp publishes a copy after it has requested the next one."""
        args, _, task = self.task(values, index)
        early, _ = self.rings(PipelineUserType.Producer)
        thread, _, _ = cute.arch.thread_idx()
        thread = thread - 32 * (FirstWarp.MMA + 1)
        unit, first = thread % 16, thread // 16
        pitch = Int64(args.HV) * (2 * HEAD_DIM)
        source = args.grad_o + (task.token * args.HV + task.head) * (2 * HEAD_DIM) + unit * 16
        before = Int32(0)
        for c in cutlass.range(task.chunks, unroll=1):
            self.acquire(smem.early_empty, early)
            token = self.chunk_at(task, c) * self.chunk
            image = self.stage(smem, "grad_o", early.index)
            for start in range(0, self.chunk, 2 * COPIERS):
                row = start + first
                to = image + image_offset(row, unit * 8, self.chunk, HEAD_DIM) * 2
                ptx.cp_async_x4(to, source + pitch * (token + row), token + row < self.rows_of(task))
            cute.arch.cp_async_commit_group()
            if c > 0:
                self.publish_values(smem, before, 1)
            before = early.index
            early.advance()
        if task.chunks > 0:
            self.publish_values(smem, before, 0)

    def rows_of(self, task):
        """Returns how many rows of dO are copied. Those behind them are zeros."""
        return task.length

    def publish_values(self, smem, stage, pending):
        """Waits for all copies but the last ``pending`` ones, and publishes a stage. The products read it through the async proxy."""
        cute.arch.cp_async_wait_group(pending)
        cute.arch.fence_view_async_shared()
        self.release(smem.early_full, stage)

    # ---- MMA, one warp

    @cute.jit
    def multiply(self, smem, values: tuple, index: Int32):
        """Issues all products. This is the only issue order of the kernel."""
        _, _, task = self.task(values, index)
        early, late = self.rings(PipelineUserType.Consumer)
        column, base = self.tensor_columns, self.columns(smem, 0)
        output = make_pipeline_state(PipelineUserType.Producer, ACCUMULATORS)
        s, s_bf16, y, y_bf16 = base + column.s, base + column.s_bf16, base + column.r, base + column.r_bf16
        for c in cutlass.range(task.chunks, unroll=1):
            o = base + column.o + output.index * self.chunk
            stage = lambda name, at=early: self.stage(smem, name, at.index)
            self.acquire(smem.early_full, early)
            with cute.arch.elect_one():
                tensor.product_of_images(
                    y, self.columns_of, stage("grad_o"), self.square, stage("aqk"), add=False
                )
            self.wait(smem.s_bf16_full, c % 2)
            with cute.arch.elect_one():
                tensor.product(y, s_bf16, self.rows, stage("kg"), add=True)
                self.commit(smem.r_full)
            self.acquire(smem.late_full, late)
            self.wait(smem.s_decayed, c % 2)
            with cute.arch.elect_one():
                qd = self.stage(smem, "qd", late.index)
                tensor.product_of_images(s, self.columns_of, stage("grad_o"), self.columns_of, qd, add=True)
                self.commit(smem.early_empty, early.index)
            self.wait(smem.r_bf16_full, c % 2)
            with cute.arch.elect_one():
                tensor.product(s, y_bf16, self.columns_of, self.stage(smem, "w", late.index), add=True)
                self.commit(smem.s_full)
                tensor.product(o, y_bf16, self.square, self.stage(smem, "t", late.index), add=False)
                self.commit(smem.late_empty, late.index)
                # The last commit. When the output warps have seen it, no product is in flight.
                self.commit(smem.o_full, output.index)
            early.advance()
            late.advance()
            output.advance()

    # ---- state, four warps

    @cute.jit
    def carry_chunks(
        self, smem, args, task, row: Int32, S: cute.Tensor, early, number: Int32, first: Int32, last: Int32
    ):
        column, base = self.tensor_columns, self.columns(smem, row)
        for c in cutlass.range(first, last, unroll=1):
            self.await_reader(smem, "s_read", c)
            tensor.store(base + column.s_bf16, self.round([S[i] for i in range(HEAD_DIM)]))
            tensor.wait_stores()
            self.publish(smem.s_bf16_full)
            self.acquire(smem.early_full, early)
            decay = self.load_decay(self.stage(smem, "a", early.index))
            tensor.store(base + column.s, [S[i] * decay[i % 64 // 4 * 2 + i % 2] for i in range(HEAD_DIM)])
            tensor.wait_stores()
            self.publish(smem.s_decayed)
            self.release(smem.early_empty, early.index)
            self.wait(smem.r_full, c % 2)
            Y = tensor.load(base + column.r, self.chunk)
            tensor.store(base + column.r_bf16, self.round(Y))
            tensor.wait_stores()
            self.publish(smem.r_bf16_full)
            self.wait(smem.s_full, c % 2)
            for i, value in enumerate(tensor.load(base + column.s, HEAD_DIM)):
                S[i] = value
            early.advance()
        return early

    # ---- output, four warps

    def copy_state(self, image, matrix, thread):
        """Copies the image of dS' as it is."""
        for start in range(0, MATRIX, 16 * WARPGROUP):
            at = start + thread * 16
            ptx.store_global_x4(matrix + at, ptx.load_shared_x4(image + at, Int32))

    def load_initial(self, args, task, row, S):
        self.enter(args, task, task.end < task.all, row, S)

    def store_final(self, args, task, row, S):
        self.leave(args, task, task.begin > 0, args.exit, row, S)
