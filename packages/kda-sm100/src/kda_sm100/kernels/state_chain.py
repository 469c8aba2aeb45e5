"""The chain without outputs: S, and R on the way. It needs neither Qd nor Aqk, and its output warps are idle."""

import cutlass
from cutlass import Int32, cute
from cutlass.pipeline import PipelineUserType

from kda_sm100.kernels import tensor
from kda_sm100.kernels.chain import ChainKernel


class StateChainKernel(ChainKernel):
    """Base of the kernels that write states only, or R as well."""

    EARLY, LATE = ("w", "a", "u"), ("kg",)
    OUTPUTS = False

    @cute.jit
    def multiply(self, smem, values: tuple, index: Int32):
        _, _, task = self.task(values, index)
        early, late = self.rings(PipelineUserType.Consumer)
        column, base = self.tensor_columns, self.columns(smem, 0)
        s, s_bf16, r, r_bf16 = base + column.s, base + column.s_bf16, base + column.r, base + column.r_bf16
        for c in cutlass.range(task.chunks, unroll=1):
            self.acquire(smem.early_full, early)
            self.wait(smem.s_bf16_full, c % 2)
            with cute.arch.elect_one():
                tensor.product(r, s_bf16, self.w, self.stage(smem, "w", early.index), add=False)
                self.commit(smem.early_empty, early.index)
                self.commit(smem.r_full)
            self.acquire(smem.late_full, late)
            self.wait(smem.r_bf16_full, c % 2)
            with cute.arch.elect_one():
                tensor.product(s, r_bf16, self.kg, self.stage(smem, "kg", late.index), add=True)
                self.commit(smem.late_empty, late.index)
                self.commit(smem.s_full)  # the last commit: after it, no product is in flight
            early.advance()
            late.advance()

    def write_outputs(self, smem, values, index):
        """Does nothing: there are no outputs. The state warps wait for the last commit, s_full, before the CTA ends."""
