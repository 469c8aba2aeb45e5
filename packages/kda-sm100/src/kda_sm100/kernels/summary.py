"""Summaries: how a sequence, which is a segment of another one, acts on a state, ``S_out = M S_in + B``.

Each column of S goes through the recurrence by itself. So B is the final state of the chain, from the initial
one, and M that of another chain, which begins with the identity and has no u:

    R^T = u^T + S^T w^T      S^T <- S^T diag(a) + R^T Kg

A CTA has B of one sequence and value head, the next one M. They are those of `ChainKernel` without Qd, Aqk
and O: its output warps are idle. M's u is zeros in shared memory.
"""

import cutlass
from cutlass import Float32, Int32, cute

from kda_cute.device import ptx
from kda_sm100.config import ChainConfig, SummaryConfig
from kda_sm100.kernels import tensor
from kda_sm100.kernels.chain import WARPS, ChainKernel


class SummaryKernel(ChainKernel):
    """Takes v, which tells the device, and ``chain.ARGUMENTS``: B goes to final_state, M to transitions."""

    EARLY, LATE = ("w", "a", "u"), ("kg",)
    IMAGES = ()
    CTAS = 2

    def __init__(self, config: SummaryConfig):
        super().__init__(ChainConfig(config.chunk))

    @cute.jit
    def begin(self, p, index: Int32):
        if index % 2 > 0:
            self.clear(p.u, self.early * self.bytes["u"])

    def clear(self, shared, size):
        """Zeros to shared memory, by all threads."""
        thread, _, _ = cute.arch.thread_idx()
        step = 16 * 32 * WARPS
        for start in range(0, size, step):
            at = start + thread * 16
            self.clear_unit(shared + at, at < size)

    @cute.jit
    def clear_unit(self, shared: Int32, exists: cutlass.Boolean):
        if exists:
            ptx.store_shared_x4(shared, [Int32(0)] * 4)

    def part(self, arguments, index):
        x, s, part = super().part(arguments, index // 2)
        part.transition = index % 2
        return x, s, part

    @cute.jit
    def load_early(self, p, records, record: Int32, stage: Int32, part):
        full = p.early_full + stage
        if part.transition > 0:
            self.load(p, records, record, full, stage, ("w", "a"))
        else:
            self.load(p, records, record, full, stage, self.EARLY)

    @cute.jit
    def multiply(self, p, arguments: tuple, index: Int32):
        _, _, part = self.part(arguments, index)
        early, late = Int32(0), Int32(0)
        early_phase, late_phase = Int32(0), Int32(0)
        memory = self.memory(p)
        s, s16, r, r16 = (memory + self.columns[name] for name in ("s", "s16", "r", "r16"))
        for c in cutlass.range(part.chunks, unroll=1):
            cute.arch.mbarrier_wait(p.early_full + early, early_phase)
            self.wait(p.s_rounded, c % 2)
            with cute.arch.elect_one():
                tensor.product(r, s16, self.rows, self.place(p, "w", early), add=False)
                self.commit(p.early_empty + early)
                self.commit(p.r_made)
            cute.arch.mbarrier_wait(p.late_full + late, late_phase)
            self.wait(p.r_rounded, c % 2)
            with cute.arch.elect_one():
                tensor.product(s, r16, self.kg, self.place(p, "kg", late), add=True)
                self.commit(p.late_empty + late)
                self.commit(p.s_made)  # the last one, as in `ChainKernel`
            early, early_phase = self.following(early, early_phase, self.early)
            late, late_phase = self.following(late, late_phase, self.late)

    def write_outputs(self, p, arguments, index):
        """There are none."""

    @cute.jit
    def enter(self, x, part, row: Int32, S: cute.Tensor):
        if part.transition > 0:
            self.load_identity(row, S)
        else:
            self.load_state(x, part.matrix, row, S)

    def load_identity(self, row, S):
        lane = cute.arch.lane_idx()
        below = row + lane // 4 - 2 * (lane % 4)  # the diagonal, the tile's first element is
        for i, at in enumerate(self.pairs(1, -1)):
            for e in range(2):
                S[2 * i + e] = ptx.select(below + at == e, Float32(1.0), Float32(0.0))

    def leave(self, x, part, row, S):
        target = ptx.select(part.transition > 0, x.transitions, x.final_state)
        self.store_state(x, target, part.matrix, row, S)
