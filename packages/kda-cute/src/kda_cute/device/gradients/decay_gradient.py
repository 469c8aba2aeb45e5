"""The gradient of the gates: the running sum over the rows of a chunk, and what a gate makes of it.

With w = (rows' terms - columns' terms - Kg dKg) of each token, dg of token t is ``a sum_v S dS' + total of Kg dKg + sum_{i >= t} w_i``.
A lane has four channels and 8 rows of the warp's block, as where the gates were summed (`decay`), and adds from the last row.
"""

from cutlass import Float32, Int64, cute

from kda_cute.device import ptx
from kda_cute.device.gradients import memory
from kda_cute.device.gradients.decay import ROWS, WIDTH, from_lane, store_if
from kda_cute.device.gradients.loads import gate_offset
from kda_cute.device.gradients.memory import BLOCKS, HALF, Table
from kda_cute.device.intra_chunk.gates import sigmoid
from kda_cute.device.ptx import LOG2E
from kda_cute.records import HEAD_DIM


def partial_offset(x, slot, head):
    """Returns the byte offset of the partial sums of a chunk and value head."""
    return (Int64(slot) * x.HV + head) * (2 * HEAD_DIM * 4)


#: Bytes from the table of sums for dt_bias to that for A_log.
RATE_BEHIND_BIAS = (int(Table.RATE_SUM) - int(Table.BIAS_SUM)) * BLOCKS * memory.TABLE_ROW


class DecayGradient:
    """The last stage of a chunk."""

    def __init__(self, config):
        self.config = config
        self.wide = config.gate_dtype == "float32"

    def suffix_sums(self, at):
        """Returns the sums of terms from each of the lane's rows to the end of the block, [8 rows][4 channels], and stores the total."""
        total, found = [Float32(0.0)] * WIDTH, []
        for row in reversed(range(ROWS)):
            total = [x + y for x, y in zip(total, memory.load_floats(at.exponent(row)), strict=True)]
            found.insert(0, total)
        after = [ptx.select(at.late > 0, Float32(0.0), x) for x in from_lane(total, at.unit + 16)]
        found = [[x + y for x, y in zip(row, after, strict=True)] for row in found]
        store_if(at.late == 0, at.table(Table.TERMS, at.block), found[0])
        return found

    def chunk_decays(self, at):
        """Returns the decays over the chunk, a, of the lane's channels."""
        middles, lasts = (
            memory.load_floats(at.table(kind, BLOCKS - 1)) for kind in (Table.MIDDLE, Table.LAST)
        )
        return [ptx.ex2(middle + last) for middle, last in zip(middles, lasts, strict=True)]

    def behind(self, at, decays):
        """Returns what dg of every row of the block contains besides, for its channels: ``a sum_v S dS'``, the total of Kg dKg, and the
        terms of the later blocks."""
        through = []
        for pair in range(WIDTH // 2):  # the channels of a pair lie at neighbouring positions
            place = memory.position(WIDTH * at.unit + 2 * pair)
            through += ptx.load_shared_x2(memory.through_address(at.base, at.half, place), Float32)
        found = [a * y for a, y in zip(decays, through, strict=True)]
        for block in range(BLOCKS):
            ends = memory.load_floats(at.table(Table.ENDS, block))
            found = [x + y for x, y in zip(found, ends, strict=True)]
        for block in range(1, BLOCKS):
            totals = memory.load_floats(at.table(Table.TERMS, block))
            found = [
                x + ptx.select(block > at.block, y, Float32(0.0)) for x, y in zip(found, totals, strict=True)
            ]
        return found

    def store(self, x, at, step, gate, raw, biases, sums, behind):
        """Stores dg of the lane's rows, and the sums over them for A_log and dt_bias."""
        address, pitch = gate_offset(x, at, step.token, step.head, 4 if self.wide else 2)
        address, left = x.grad_g + address, step.valid - at.row
        rate_sums, bias_sums = ([Float32(0.0)] * WIDTH for _ in range(2))
        for row in range(ROWS):
            exists = row < left
            weight = ptx.select(exists, Float32(1.0), Float32(0.0))
            if self.config.gate == "bounded":
                weight = weight * (x.lower_bound * gate.rate)
            found = []
            for i in range(WIDTH):
                gradient, of_rate = self.gate_gradient(
                    gate, sums[row][i] + behind[i], weight, raw[row][i], biases[i]
                )
                bias_sums[i] = bias_sums[i] + gradient
                rate_sums[i] = ptx.fma(*of_rate, rate_sums[i])
                found.append(gradient)
            if self.wide:
                ptx.store_global_words_if(address, found, exists)
            else:
                pairs = [ptx.pack_bf16x2(*found[i : i + 2]) for i in range(0, WIDTH, 2)]
                ptx.store_global_words_if(address, pairs, exists)
            address = address + pitch
        if self.config.gate != "precomputed":
            for kind, of_rows in ((Table.RATE_SUM, rate_sums), (Table.BIAS_SUM, bias_sums)):
                both = [x + cute.arch.shuffle_sync_bfly(x, 16) for x in of_rows]
                store_if(at.late == 0, at.table(kind, at.block), both)

    def store_partials(self, x, place, step):
        """Stores the sums over the chunk for A_log and dt_bias, [2 kinds][128]; a thread has one of them."""
        thread = place.thread & 127
        kind, channel = thread >> 6, place.half * HALF + (thread & 63)
        table = memory.table(place.base, Table.BIAS_SUM, 0, channel) + kind * RATE_BEHIND_BIAS
        total = Float32(0.0)
        for block in range(BLOCKS):
            total = total + ptx.load_shared(table + block * memory.TABLE_ROW, Float32)
        partials = x.partials + partial_offset(x, step.slot, step.head)
        ptx.store_global(partials + (kind * HEAD_DIM + channel) * 4, total)

    def gate_gradient(self, gate, d, weight, raw, bias):
        """Returns the gradient of ``raw + bias``, and two factors of that of A_log, from d, the gradient of the log decay (natural
        logarithm). ``weight``: 0 for a row that does not exist, else 1; times the derivative that a bounded gate's rows share."""
        if self.config.gate == "precomputed":
            return d, (Float32(0.0), Float32(0.0))
        d = d * weight
        if self.config.gate == "bounded":
            steepness = gate.rate * Float32(-LOG2E)
            s = ptx.rcp(ptx.ex2(ptx.fma(raw, steepness, bias * steepness)) + Float32(1.0))
            gradient = d * ptx.fma(-s, s, s)
            return gradient, (gradient, raw + bias)
        at = raw + bias
        slope = ptx.select(at > Float32(20.0), Float32(1.0), sigmoid(at))
        decay = gate.activate(raw, bias) * (gate.log_scale * Float32(1.0 / LOG2E))
        return -d * gate.rate * slope, (d, decay)
