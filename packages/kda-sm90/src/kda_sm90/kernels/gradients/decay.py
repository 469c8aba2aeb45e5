"""Cumulative log decays of a chunk, relative to integer anchors.

G is the inclusive cumulative sum of the log decays in base 2. A warp computes one block of 16 rows and one half of the channels, a
lane two channels. The anchor M of a block lies in the middle of its range, channel by channel. What crosses blocks is an integer
and a fraction, so that no precision is lost behind a steep gate.
"""

import cutlass
from cutlass import Float32, Int32, cute

from kda_cute.device import ptx
from kda_cute.device.ptx import LOG2E
from kda_sm90.kernels.gradients import memory
from kda_sm90.kernels.gradients.memory import BLOCK, BLOCKS, HALF, Table

#: Rows of a block have columns with the middle anchor within this many bits. Factors are then within 2^49 of 1. A factor that moves
#: to another block loses, at 2^-126, what is 2^-29 of the row's own products or less.
SPAN = 96.0


def floor(x: Float32) -> Float32:
    """Returns the largest integer that is at most x."""
    return Float32(cute.math.floor(x))


def ceiling(x: Float32) -> Float32:
    """Returns the smallest integer that is at least x."""
    return Float32(cute.math.ceil(x))


class Lane:
    """The calling thread where a warp has a block of 16 rows and a lane two channels of the half."""

    def __init__(self, place):
        self.base, self.half, self.block, self.lane = place.base, place.half, place.block, place.lane
        self.channel = place.half * HALF + 2 * place.lane  # the first of the two, of 128
        self.row = place.block * BLOCK
        self.first_exponent = memory.exponent(place.base, self.row, place.half * HALF) + 8 * place.lane

    def exponent(self, row):
        """Returns the address of the exponents of the lane's channels in a row of the block, 0 to 15."""
        return (self.first_exponent ^ row % 8 * 32) + row * memory.TABLE_ROW

    def table(self, kind, block):
        """Returns the address of a table's entries for the lane's channels."""
        return memory.table(self.base, kind, block, self.channel)


class Decay:
    """Stage 1 of a chunk: gates, their sums, anchors."""

    def __init__(self, config):
        self.config = config

    def log_decays(self, gate, raw, biases, block, valid):
        """Returns the cumulative log decays of a block in base 2, [16 rows][2 channels]. ``raw``: as `Raw.gates` returns them."""
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

    @cute.jit
    def store_kept(self, rows: list, address: Int32):
        """Stores how many rows of a block have columns with the middle anchor: those before the first one that has fallen by more than
        `SPAN` in some channel. So a row's number depends on its past alone."""
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

    def store_exponents(self, at: Lane, rows, kept):
        """Stores G - M of a block and its tables, once the log decays of the blocks before it are there. ``kept``: the rows whose
        columns have the anchor M, or None for all."""
        whole, part = (
            [Float32(0.0)] * 2 for _ in range(2)
        )  # the sum of the blocks before: an integer and a fraction
        for before in range(BLOCKS - 1):
            totals = memory.load_pair(at.table(Table.TOTAL, before))
            for i, total in enumerate(totals):
                added = part[i] + ptx.select(before < at.block, total, Float32(0.0))
                n = ceiling(added)
                whole[i], part[i] = whole[i] + n, added - n
        lowest = rows[-1]
        if kept is not None:
            lowest = rows[0]
            for row in range(1, BLOCK):
                lowest = [ptx.select(row < kept, x, y) for x, y in zip(rows[row], lowest, strict=True)]
        middles = [floor((x + y) * Float32(0.5) + p) for x, y, p in zip(rows[0], lowest, part, strict=True)]
        shifts = [p - m for p, m in zip(part, middles, strict=True)]
        exponents = [[total + shift for total, shift in zip(row, shifts, strict=True)] for row in rows]
        for row, values in enumerate(exponents):
            ptx.store_shared_x2(at.exponent(row), values)
        ptx.store_shared_x2(
            at.table(Table.MIDDLE, at.block), [w + m for w, m in zip(whole, middles, strict=True)]
        )
        ptx.store_shared_x2(at.table(Table.LAST, at.block), exponents[-1])
