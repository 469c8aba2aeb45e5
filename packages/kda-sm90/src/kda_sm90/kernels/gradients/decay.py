"""Cumulative log decays of a chunk, relative to integer anchors.

G is the inclusive cumulative sum of the log decays in base 2. A warp computes one block of 16 rows and one half of the channels, a
lane two channels. The anchor A of a block is the ceiling of G in the block's first row. What crosses blocks is an integer and a
fraction, so that no precision is lost behind a steep gate.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from kda_cute.device import ptx
from kda_cute.device.intra_chunk.gates import Gate
from kda_cute.device.ptx import LOG2E
from kda_sm90.config import HEAD_DIM
from kda_sm90.kernels.gradients import memory
from kda_sm90.kernels.gradients.memory import BLOCK, BLOCKS, Table

#: Rows of a block share the middle anchor within this many bits, so that exponents of factors lie within 61 of zero.
SPAN = 120.0


def floor(x: Float32) -> Float32:
    """Returns the largest integer that is at most x."""
    return Float32(cute.math.floor(x))


def ceiling(x: Float32) -> Float32:
    """Returns the smallest integer that is at least x."""
    return Float32(cute.math.ceil(x))


class Decay:
    """Stage 1 of a chunk: gates, their sums, anchors."""

    def __init__(self, config):
        self.config = config
        self.wide = config.gate_dtype == "float32"

    def raw_gates(self, x, chunk, head, block, channel):
        """Loads the raw g of 16 rows and two channels; zeros behind the end of the sequence."""
        pairs = []
        for row in range(BLOCK):
            at = block * BLOCK + row
            address = Int64((chunk.token + at) * x.HV + head) * HEAD_DIM + channel
            if self.wide:
                pairs.append(ptx.load_global_f32_x2(x.g + address * 4, at < chunk.valid))
            else:
                pairs.append(ptx.unpack_bf16x2(ptx.load_global_i32(x.g + address * 2, at < chunk.valid)))
        return pairs

    def log_decays(self, gate: Gate, raw, biases, block, valid):
        """Returns the cumulative log decays of a block in base 2, [16 rows][2 channels]."""
        total, rows = [Float32(0.0)] * 2, []
        for row in range(BLOCK):
            unit = Float32(-LOG2E) if self.config.gate == "precomputed" else gate.log_scale
            unit = ptx.select(block * BLOCK + row < valid, unit, Float32(0.0))
            total = [
                ptx.fma(gate.activate(g, bias), unit, t)
                for g, bias, t in zip(raw[row], biases, total, strict=True)
            ]
            rows.append(total)
        return rows

    def store_totals(self, base, rows, block, channel):
        """Stores the log decay of the block."""
        ptx.store_shared_x2(memory.table(base, Table.TOTAL, block, channel), rows[-1])

    @cute.jit
    def store_kept(self, rows: list, address: Int32):
        """Stores how many rows of a block keep the middle anchor: those before the first one that has fallen by more than `SPAN` in some
        channel. So a row's number depends on its past alone."""
        kept = Int32(BLOCK)
        if cute.arch.vote_any_sync(self.falls_far(rows, BLOCK - 1)):
            kept = Int32(0)
            for row in cutlass.range_constexpr(BLOCK):
                far = cute.arch.vote_any_sync(self.falls_far(rows, row))
                kept = kept + ptx.select(far, Int32(0), Int32(1))
        ptx.store_shared(address, kept)

    def falls_far(self, rows, row):
        """Returns whether one of the lane's channels has fallen by more than `SPAN` from the first row of the block."""
        falls = [first - last for first, last in zip(rows[0], rows[row], strict=True)]
        return ptx.maximum(*falls) > Float32(SPAN)

    def store_exponents(self, base, rows, block, channel, kept):
        """Stores exponents and anchors of a block, once the log decays of the blocks before it are there. ``kept``: the rows that have
        the middle anchor, or None for all."""
        whole, part = (
            [Float32(0.0)] * 2 for _ in range(2)
        )  # the sum of the blocks before, an integer and a fraction
        for before in range(BLOCKS - 1):
            totals = memory.load_pair(memory.table(base, Table.TOTAL, before, channel))
            for i, total in enumerate(totals):
                added = part[i] + ptx.select(before < block, total, Float32(0.0))
                n = ceiling(added)
                whole[i], part[i] = whole[i] + n, added - n
        anchors = [ceiling(p + first) for p, first in zip(part, rows[0], strict=True)]
        exponents = [
            [(p + total) - anchor for p, total, anchor in zip(part, row, anchors, strict=True)]
            for row in rows
        ]
        for row, values in enumerate(exponents):
            ptx.store_shared_x2(memory.exponent(base, block * BLOCK + row, channel), values)
        first, last = exponents[0], exponents[-1]
        lowest = last
        if kept is not None:
            lowest = first
            for row in range(1, BLOCK):
                lowest = [ptx.select(row < kept, x, y) for x, y in zip(exponents[row], lowest, strict=True)]
        middles = [floor((x + y) * Float32(0.5)) for x, y in zip(first, lowest, strict=True)]
        for kind, values in (
            (Table.ANCHOR, [w + a for w, a in zip(whole, anchors, strict=True)]),
            (Table.MIDDLE, middles),
            (Table.LAST, last),
        ):
            ptx.store_shared_x2(memory.table(base, kind, block, channel), values)


def gate_of(config, x, head):
    """Returns the gate of a value head."""
    rate = Float32(1.0)
    if config.gate != "precomputed":
        a_log = ptx.load_global_f32(x.a_log + Int64(head) * 4, x.a_log != Int64(0))
        rate = ptx.minimum(ptx.ex2(a_log * Float32(LOG2E)), Float32(2.0**60))
    return Gate(config, rate, x.lower_bound)


def biases_of(config, x, head, channel):
    """Returns dt_bias of two channels; zeros where there is none."""
    if config.gate == "precomputed":
        return [Float32(0.0)] * 2
    address = x.dt_bias + Int64(head * HEAD_DIM + channel) * 4
    return ptx.load_global_f32_x2(address, x.dt_bias != Int64(0))
