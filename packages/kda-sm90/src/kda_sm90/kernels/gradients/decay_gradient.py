"""The gradient of the gates: the running sum over the rows of a chunk, and what a gate makes of it.

With w = (rows' terms - columns' terms - Kg dKg) of each token, dg of token t is ``a sum_v S dS' + total of Kg dKg + sum_{i >= t} w_i``.
A warp has a block of 16 rows and a lane two channels, as where the gates were summed, and adds from the last row.
"""

from cutlass import Float32

from kda_cute.device import ptx
from kda_cute.device.intra_chunk.gates import sigmoid
from kda_cute.device.ptx import LOG2E
from kda_sm90.config import HEAD_DIM
from kda_sm90.kernels.gradients import memory
from kda_sm90.kernels.gradients.loads import gate_offset
from kda_sm90.kernels.gradients.memory import BLOCK, BLOCKS, HALF, Table


class DecayGradient:
    """The last stage of a chunk."""

    def __init__(self, config):
        self.config = config
        self.wide = config.gate_dtype == "float32"

    def suffix_sums(self, at):
        """Returns the sums of terms from each row to the end of the block, [16 rows][2 channels], and stores the total."""
        total, found = [Float32(0.0)] * 2, []
        for row in reversed(range(BLOCK)):
            total = [x + y for x, y in zip(total, memory.load_pair(at.exponent(row)), strict=True)]
            found.insert(0, total)
        ptx.store_shared_x2(at.table(Table.TERMS, at.block), total)
        return found

    def chunk_decays(self, at):
        """Returns the decays over the chunk, a, of two channels."""
        middles, lasts = (memory.load_pair(at.table(kind, BLOCKS - 1)) for kind in (Table.MIDDLE, Table.LAST))
        return [ptx.ex2(middle + last) for middle, last in zip(middles, lasts, strict=True)]

    def behind(self, at, decays):
        """Returns what dg of every row of the block contains besides, for two channels: ``a sum_v S dS'``, the total of Kg dKg, and the
        terms of the later blocks."""
        through = memory.load_pair(memory.through_address(at.base, at.half, 2 * at.lane))
        found = [a * y for a, y in zip(decays, through, strict=True)]
        for block in range(BLOCKS):
            ends = memory.load_pair(at.table(Table.ENDS, block))
            found = [x + y for x, y in zip(found, ends, strict=True)]
        for block in range(1, BLOCKS):
            totals = memory.load_pair(at.table(Table.TERMS, block))
            found = [
                x + ptx.select(block > at.block, y, Float32(0.0)) for x, y in zip(found, totals, strict=True)
            ]
        return found

    def store(self, x, at, token, valid, head, gate, raw, biases, sums, behind):
        """Stores dg of the warp's rows, and the sums over them for A_log and dt_bias."""
        address, pitch = gate_offset(x, at, token, head, 4 if self.wide else 2)
        address = x.grad_g + address
        rate_sums, bias_sums = [Float32(0.0)] * 2, [Float32(0.0)] * 2
        for row in range(BLOCK):
            exists = at.row + row < valid
            pair = []
            for i in range(2):
                d = ptx.select(exists, sums[row][i] + behind[i], Float32(0.0))
                gradient, of_rate = self.gate_gradient(gate, d, raw[row][i], biases[i], x.lower_bound)
                bias_sums[i] = bias_sums[i] + gradient
                rate_sums[i] = rate_sums[i] + of_rate
                pair.append(gradient)
            if self.wide:
                ptx.store_global_f32_x2_if(address, pair, exists)
            else:
                ptx.store_global_if(address, ptx.pack_bf16x2(*pair), exists)
            address = address + pitch
        if self.config.gate != "precomputed":
            ptx.store_shared_x2(at.table(Table.RATE_SUM, at.block), rate_sums)
            ptx.store_shared_x2(at.table(Table.BIAS_SUM, at.block), bias_sums)

    def store_partials(self, place, partials):
        """Stores the sums over the chunk for A_log and dt_bias to ``partials`` [2 kinds][128]; a thread has one of them."""
        thread = place.thread % 128
        kind, channel = thread // HALF, place.half * HALF + thread % HALF
        total = Float32(0.0)
        for block in range(BLOCKS):
            rate, bias = (
                ptx.load_shared(memory.table(place.base, table, block, channel), Float32)
                for table in (Table.RATE_SUM, Table.BIAS_SUM)
            )
            total = total + ptx.select(kind > 0, rate, bias)
        ptx.store_global(partials + (kind * HEAD_DIM + channel) * 4, total)

    def gate_gradient(self, gate, d, raw, bias, bound):
        """Returns the gradients of ``raw + bias`` and of A_log from that of the log decay (natural logarithm)."""
        at, rate = raw + bias, gate.rate
        if self.config.gate == "precomputed":
            return d, Float32(0.0)
        if self.config.gate == "bounded":
            s = sigmoid(rate * at)
            gradient = d * ptx.fma(-s, s, s) * (bound * rate)
            return gradient, gradient * at
        slope = ptx.select(at > Float32(20.0), Float32(1.0), sigmoid(at))
        return -d * rate * slope, d * gate.activate(raw, bias) * gate.log_scale * Float32(1.0 / LOG2E)
