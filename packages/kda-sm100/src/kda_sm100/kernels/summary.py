"""The summary kernel: how a sequence, which is a segment of a longer one, acts on a state: ``S_out = M S_in + B``.

The recurrence treats each column of S by itself. B is therefore the chain's final state from the given initial one. M is the final
state of another chain, which starts from the identity and has u = 0:

    R^T = u^T + S^T w^T      S^T <- S^T diag(a) + R^T Kg

One CTA computes B of a sequence and value head, and the next CTA computes M. Both run `StateChainKernel`. The CTA of M holds zeros in the shared memory of u.
"""

import cutlass
from cutlass import Int32, cute

from kda_cute.device import ptx
from kda_sm100.arguments import SUMMARY
from kda_sm100.config import ChainConfig, SummaryConfig
from kda_sm100.kernels.chain import WARPS
from kda_sm100.kernels.state_chain import StateChainKernel


class SummaryKernel(StateChainKernel):
    """Takes v, or any tensor of the device, and `ChainArguments`. Writes B to final_state and M to transitions."""

    interface = SUMMARY

    def __init__(self, config: SummaryConfig):
        super().__init__(ChainConfig(config.chunk))

    @cute.jit
    def initialize(self, smem, index: Int32):
        if index % 2 > 0:
            self.clear(self.stage(smem, "u", 0), self.early_depth * self.bytes["u"])

    def clear(self, shared, size):
        """Stores zeros to ``size`` bytes of shared memory. Executed by all threads."""
        thread, _, _ = cute.arch.thread_idx()
        step = 16 * 32 * WARPS
        for start in range(0, size, step):
            at = start + thread * 16
            self.clear_unit(shared + at, at < size)

    @cute.jit
    def clear_unit(self, shared: Int32, exists: cutlass.Boolean):
        if exists:
            ptx.store_shared_x4(shared, [Int32(0)] * 4)

    def task(self, values, index):
        """Returns the same as the chain's method, with ``transition``: 1 if the CTA computes M."""
        args, seqs, task = super().task(values, index // 2)
        task.transition = index % 2
        return args, seqs, task

    @cute.jit
    def load_early(self, smem, address, record: Int32, stage: Int32, task):
        if task.transition > 0:
            self.load(smem, address, record, smem.early_full, stage, ("w", "a"))
        else:
            self.load(smem, address, record, smem.early_full, stage, self.EARLY)

    @cute.jit
    def load_initial(self, args, task, row: Int32, S: cute.Tensor):
        if task.transition > 0:
            self.load_identity(row, S)
        else:
            self.load_state(args.initial_state, args.v_first, task.matrix, row, S)

    def store_final(self, args, task, row, S):
        target = ptx.select(task.transition > 0, args.transitions, args.final_state)
        self.store_state(target, args.v_first, task.matrix, row, S)
