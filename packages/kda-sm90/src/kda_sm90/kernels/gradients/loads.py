"""The producer: a warpgroup that copies the operands of the tensor core to shared memory."""

from cutlass import Int32, Int64, cute

from kda_cute.device import ptx
from kda_sm90.config import HEAD_DIM
from kda_sm90.kernels.gradients.memory import CHUNK, OFFSETS, PANEL, REGION, Operand

THREADS = 128
ROW = 2 * HEAD_DIM  # bytes of a row of 128 bf16


class Producer:
    """Copies dO, R, dX, S and dS' of one chunk and value head after the other. Rows behind the end of a sequence are zeros."""

    def load(self, x, base, barriers, thread, chunk, head, phase):
        """Copies the operands of a chunk as soon as their regions are free.

        The copies belong to the generic proxy, and wgmma reads through the async proxy. So each thread waits for its copies and
        executes a proxy fence before it arrives. It waits for an operand's copies after it has requested the next operand.
        """
        index = Int64(chunk.token) * x.HV + head
        row = index * ROW
        state = (Int64(chunk.slot) * x.HV + head) * (HEAD_DIM * ROW)
        pitch = Int64(x.HV) * ROW
        sources = {
            Operand.GRAD_O: (x.grad_o + row, pitch, CHUNK, chunk.valid),
            Operand.RESIDUAL: (
                x.residual + index * x.residual_row,
                Int64(x.HV) * x.residual_row,
                CHUNK,
                chunk.valid,
            ),
            Operand.GRAD_V: (x.grad_v + row, pitch, CHUNK, chunk.valid),
            Operand.STATE: (x.states + state, Int64(ROW), HEAD_DIM, Int32(HEAD_DIM)),
            Operand.GRAD_STATE: (x.grad_states + state, Int64(ROW), HEAD_DIM, Int32(HEAD_DIM)),
        }
        for operand, source in sources.items():
            cute.arch.mbarrier_wait(barriers.empty + int(operand), phase ^ 1)
            self.copy(base + OFFSETS[REGION[operand]], thread, *source)
            cute.arch.cp_async_commit_group()
            if operand > 0:
                self.arrive(barriers, operand - 1, pending=1)
        self.arrive(barriers, Operand.GRAD_STATE, pending=0)

    def copy(self, shared, thread, source, pitch, rows, valid):
        """Requests the copies of a matrix [rows, 128] to an image in two panels, its first ``valid`` rows."""
        unit, first = thread % 16, thread // 16
        place = shared + unit // 8 * (rows * 128) + first * 128 + (unit % 8 ^ first) * 16
        for start in range(0, rows, THREADS // 16):
            row = start + first
            ptx.cp_async_x4(place + start * 128, source + pitch * row + unit * 16, row < valid)

    def arrive(self, barriers, operand, pending):
        """Waits until at most ``pending`` later operands are missing, and arrives."""
        cute.arch.cp_async_wait_group(pending)
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.mbarrier_arrive(barriers.full + int(operand))


assert 2 * PANEL == CHUNK * ROW
