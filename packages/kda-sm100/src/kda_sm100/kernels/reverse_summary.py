"""The summaries of a backward: how a sequence, which is a segment of a longer one, acts on the gradient of a state: ``dS_in = M^T dS_out + N``.

It is to `reverse` what `summary` is to `chain`. The reverse chain treats each column of dS by itself. N is its result from a given gradient
of the final state. M^T is that of another chain, which starts from the identity and has dO = 0:

    Y^T = dS'^T Kg^T      dS^T = dS'^T diag(a) + Y^T w

One CTA computes N of a sequence and value head, and the next CTA computes M^T, without the products of dO. Nothing is stored for single
chunks, and nothing depends on v or on states.
"""

import cutlass
from cutlass import Int32, cute
from cutlass.pipeline import PipelineUserType

from kda_cute.device import ptx
from kda_sm100.arguments import BACKWARD_CHAINS
from kda_sm100.kernels import tensor
from kda_sm100.kernels.reverse import ReverseChainKernel


class ReverseSummaryKernel(ReverseChainKernel):
    """Takes any tensor of the device and `BackwardChainArguments`. Writes N to exit and M^T to transitions.

    A task has ``transition``: 1 if the CTA computes M^T.
    """

    interface = BACKWARD_CHAINS["reverse_summarize"]
    stores_chunks = False
    OUTPUTS = False

    LATE = ("qd", "w")

    def task(self, values, index):
        args, seqs, task = super().task(values, index // 2)
        task.transition = index % 2
        task.between += task.transition * args.HV
        return args, seqs, task

    # ---- producer and dO

    @cute.jit
    def load_early(self, smem, address, record: Int32, stage: Int32, task):
        if task.transition > 0:
            self.load(smem, address, record, smem.early_full, stage, ("kg", "a"))
        else:
            ReverseChainKernel.load_early(self, smem, address, record, stage, task)

    @cute.jit
    def load_late(self, smem, address, record: Int32, stage: Int32, task):
        if task.transition > 0:
            self.load(smem, address, record, smem.late_full, stage, ("w",))
        else:
            self.load(smem, address, record, smem.late_full, stage, self.LATE)

    def rows_of(self, task):
        return ptx.select(task.transition > 0, Int32(0), task.length)

    # ---- MMA, one warp

    @cute.jit
    def multiply(self, smem, values: tuple, index: Int32):
        _, _, task = self.task(values, index)
        early, late = self.rings(PipelineUserType.Consumer)
        column, base = self.tensor_columns, self.columns(smem, 0)
        s, s_bf16, y, y_bf16 = base + column.s, base + column.s_bf16, base + column.r, base + column.r_bf16
        for c in cutlass.range(task.chunks, unroll=1):
            stage = lambda name, at=early: self.stage(smem, name, at.index)
            self.acquire(smem.early_full, early)
            if task.transition == 0:
                with cute.arch.elect_one():
                    tensor.product_of_images(
                        y, self.columns_of, stage("grad_o"), self.square, stage("aqk"), add=False
                    )
            self.wait(smem.s_bf16_full, c % 2)
            with cute.arch.elect_one():
                tensor.product(y, s_bf16, self.rows, stage("kg"), add=1 - task.transition)
                self.commit(smem.r_full)
            self.acquire(smem.late_full, late)
            self.wait(smem.s_decayed, c % 2)
            if task.transition == 0:
                with cute.arch.elect_one():
                    qd = self.stage(smem, "qd", late.index)
                    tensor.product_of_images(
                        s, self.columns_of, stage("grad_o"), self.columns_of, qd, add=True
                    )
            with cute.arch.elect_one():
                self.commit(smem.early_empty, early.index)
            self.wait(smem.r_bf16_full, c % 2)
            with cute.arch.elect_one():
                tensor.product(s, y_bf16, self.columns_of, self.stage(smem, "w", late.index), add=True)
                self.commit(smem.late_empty, late.index)
                self.commit(smem.s_full)  # the last commit: after it, no product is in flight
            early.advance()
            late.advance()

    # ---- state, four warps

    @cute.jit
    def load_initial(self, args, task, row: Int32, S: cute.Tensor):
        starts = (task.end >= task.all) | (task.chunks == 0)
        if (task.transition > 0) & starts:
            self.load_identity(row, S)
        else:
            ReverseChainKernel.load_initial(self, args, task, row, S)

    def store_final(self, args, task, row, S):
        exit = ptx.select(task.transition > 0, args.transitions, args.exit)
        self.leave(args, task, task.begin > 0, exit, row, S)

    def write_outputs(self, smem, values, index):
        """Does nothing: there are no outputs. The state warps wait for the last commit, s_full, before the CTA ends."""
