"""The gradient of the gates: the running sum over the rows of a chunk, and what a gate makes of it.

With w = (rows' terms - columns' terms - Kg dKg) of each token, dg of token t is ``a sum_v S dS' + total of Kg dKg + sum_{i >= t} w_i``.
A thread has one channel and half of the chunk's rows, and adds from the last row.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from kda_cute.device import ptx
from kda_cute.device.intra_chunk.gates import sigmoid
from kda_cute.device.ptx import LOG2E
from kda_sm90.config import HEAD_DIM
from kda_sm90.kernels.gradients import memory
from kda_sm90.kernels.gradients.memory import BLOCKS, CHUNK, HALF, OFFSETS, PANEL, TABLE_ROW, Table

ROWS = CHUNK // 2  # rows of a thread


class DecayGradient:
    """The last stage of a chunk, on 256 threads: thread c and c + 128 have channel c."""

    def __init__(self, config):
        self.config = config
        self.wide = config.gate_dtype == "float32"

    def store_through(self, base, thread):
        """Stores half of ``sum_v S dS'`` of the thread's channel: over the values of one panel."""
        channel, panel = thread % HEAD_DIM, thread // HEAD_DIM
        total = Float32(0.0)
        row = panel * (2 * PANEL) + channel * 128
        for unit in range(8):
            at = row + (unit ^ channel % 8) * 16
            pairs = zip(
                *(ptx.load_shared_x4(base + OFFSETS[name] + at, Int32) for name in ("state", "grad_state")),
                strict=True,
            )
            for pair in pairs:
                for x, y in zip(*map(ptx.unpack_bf16x2, pair), strict=True):
                    total = ptx.fma(x, y, total)
        ptx.store_shared(base + OFFSETS["through"] + panel * TABLE_ROW + channel * 4, total)

    def start(self, base, channel):
        """Returns what dg of every row of a channel contains: ``a sum_v S dS'`` and the total of Kg dKg."""
        entry = lambda kind, block: ptx.load_shared(memory.table(base, kind, block, channel), Float32)
        through = [
            ptx.load_shared(base + OFFSETS["through"] + panel * TABLE_ROW + channel * 4, Float32)
            for panel in range(2)
        ]
        decay = memory.power(entry(Table.ANCHOR, BLOCKS - 1)) * ptx.ex2(entry(Table.LAST, BLOCKS - 1))
        total = decay * (through[0] + through[1])
        for block in range(BLOCKS):
            total = total + entry(Table.ENDS, block)
        return total

    @cute.jit
    def run(self, x, base: Int32, thread: Int32, chunk, head: Int32, gate, partials: Int64):
        """Stores dg of the thread's channel and rows, and their sums for dt_bias and A_log to ``partials`` [2 kinds][2 halves of the
        rows][128]."""
        channel, part = thread % HEAD_DIM, thread // HEAD_DIM
        total = self.start(base, channel)
        bias, bias_sum, rate_sum = Float32(0.0), Float32(0.0), Float32(0.0)
        if cutlass.const_expr(self.config.gate != "precomputed"):
            bias = ptx.load_global_f32(
                x.dt_bias + Int64(head * HEAD_DIM + channel) * 4, x.dt_bias != Int64(0)
            )
        for step in cutlass.range(CHUNK - part * ROWS, unroll=4):
            row = CHUNK - 1 - step
            total = total + ptx.load_shared(memory.exponent(base, row, channel), Float32)
            mine = (row < chunk.valid) & (row // ROWS == part)
            element = Int64((chunk.token + row) * x.HV + head) * HEAD_DIM + channel
            raw = self.raw(x, element, mine)
            gradient, of_rate = self.gate_gradient(gate, total, raw, bias, x.lower_bound)
            self.store(x, element, gradient, mine)
            bias_sum = bias_sum + ptx.select(mine, gradient, Float32(0.0))
            rate_sum = rate_sum + ptx.select(mine, of_rate, Float32(0.0))
        ptx.store_global(partials + (part * HEAD_DIM + channel) * 4, bias_sum)
        ptx.store_global(partials + ((2 + part) * HEAD_DIM + channel) * 4, rate_sum)

    def raw(self, x, element, valid):
        """Loads a raw g."""
        if self.wide:
            return ptx.load_global_f32(x.g + element * 4, valid)
        return ptx.unpack_bf16x2(ptx.load_global_u16(x.g + element * 2, valid))[0]

    def store(self, x, element, gradient, valid):
        """Stores a dg."""
        if self.wide:
            ptx.store_global_f32_if(x.grad_g + element * 4, gradient, valid)
        else:
            ptx.store_global_u16(x.grad_g + element * 2, ptx.pack_bf16x2(gradient, Float32(0.0)), valid)

    def gate_gradient(self, gate, d, raw, bias, bound):
        """Returns the gradients of ``raw + bias`` and of A_log from that of the log decay (natural logarithm)."""
        at, rate = raw + bias, gate.rate
        if self.config.gate == "precomputed":
            return d, Float32(0.0)
        if self.config.gate == "bounded":
            s = sigmoid(rate * at)
            inner = d * bound * s * (Float32(1.0) - s)
            return inner * rate, inner * rate * at
        slope = ptx.select(at > Float32(20.0), Float32(1.0), sigmoid(at))
        return -d * rate * slope, d * gate.activate(raw, bias) * gate.log_scale * Float32(1.0 / LOG2E)


assert HEAD_DIM == 2 * HALF
