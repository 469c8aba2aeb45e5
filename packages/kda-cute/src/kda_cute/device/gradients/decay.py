"""Cumulative log decays of a chunk, relative to integer anchors.

G is the inclusive cumulative sum of the log decays in base 2. A warp computes one block of 16 rows and one half of the channels. A
lane has four channels and 8 rows: the lanes 0 to 15 the first 8 of the block, the others the last 8. The anchor M of a block lies in
the middle of its range, channel by channel. What crosses blocks is an integer and a fraction, so that no precision is lost behind a
steep gate.
"""

import cutlass
from cutlass import Float32, Int32, cute

from kda_cute.device import ptx
from kda_cute.device.gradients import memory
from kda_cute.device.gradients.memory import BLOCK, BLOCKS, HALF, Table
from kda_cute.device.ptx import LOG2E

#: Rows and channels of a lane.
ROWS, WIDTH = BLOCK // 2, HALF // 16

#: Rows of a block have columns with the middle anchor within this many bits. Factors are then within 2^49 of 1. A factor that moves
#: to another block loses, at 2^-126, what is 2^-29 of the row's own products or less.
SPAN = 96.0


def floor(x: Float32) -> Float32:
    """Returns the largest integer that is at most x."""
    return Float32(cute.math.floor(x))


def ceiling(x: Float32) -> Float32:
    """Returns the smallest integer that is at least x."""
    return Float32(cute.math.ceil(x))


def from_lane(values, lane):
    """Returns the values of another lane."""
    return [cute.arch.shuffle_sync(x, lane) for x in values]


class Lane:
    """The calling thread where a lane has four channels and 8 rows of the warp's block."""

    def __init__(self, place):
        self.base, self.half, self.block = place.base, place.half, place.block
        self.unit, self.late = place.lane & 15, place.lane >> 4
        self.channel = place.half * HALF + WIDTH * self.unit  # the first of the four, of 128
        self.row = place.block * BLOCK + ROWS * self.late  # the first of the 8
        self.first_exponent = memory.exponent(place.base, self.row, self.channel)

    def exponent(self, row):
        """Returns the address of the exponents of the lane's channels in one of its rows, 0 to 7."""
        return (self.first_exponent ^ row % 2 * 32) + row * memory.TABLE_ROW

    def table(self, kind, block):
        """Returns the address of a table's entries for the lane's channels."""
        return memory.table(self.base, kind, block, self.channel)


class Decay:
    """Stage 1 of a chunk: gates, their sums, anchors."""

    def __init__(self, config):
        self.config = config

    def log_decays(self, gate, raw, biases, at: Lane, valid):
        """Returns the cumulative log decays of a block in base 2, [8 rows][4 channels]. ``raw``: as `Raw.gates` returns them."""
        total, rows, left = [Float32(0.0)] * WIDTH, [], valid - at.row
        for row in range(ROWS):
            unit = Float32(-LOG2E) if self.config.gate == "precomputed" else gate.log_scale
            unit = ptx.select(row < left, unit, Float32(0.0))
            total = [
                ptx.fma(gate.activate(g, bias), unit, t)
                for g, bias, t in zip(raw[row], biases, total, strict=True)
            ]
            rows.append(total)
        before = [ptx.select(at.late > 0, x, Float32(0.0)) for x in from_lane(total, at.unit)]
        return [[x + y for x, y in zip(row, before, strict=True)] for row in rows]

    def store_total(self, at: Lane, rows):
        """Stores the log decay of the block."""
        store_if(at.late > 0, at.table(Table.TOTAL, at.block), rows[-1])

    @cute.jit
    def store_kept(self, rows: list, unit: Int32, address: Int32):
        """Stores how many rows of a block have columns with the middle anchor: those before the first one that has fallen by more than
        `SPAN` in some channel. So a row's number depends on its past alone."""
        first = from_lane(rows[0], unit)
        kept = Int32(BLOCK)
        if cute.arch.vote_any_sync(self.falls_far(first, rows[-1])):
            kept = Int32(0)
            for row in cutlass.range_constexpr(ROWS):
                far = Int32(cute.arch.vote_ballot_sync(self.falls_far(first, rows[row])))
                kept = kept + ptx.select(far & 0xFFFF == 0, Int32(1), Int32(0))
                kept = kept + ptx.select(far & ~0xFFFF == 0, Int32(1), Int32(0))
        ptx.store_shared(address, kept)

    def falls_far(self, first, row):
        """Returns whether one of the lane's channels has fallen by more than `SPAN` from the first row of the block."""
        falls = [x - y for x, y in zip(first, row, strict=True)]
        return ptx.maximum(ptx.maximum(*falls[:2]), ptx.maximum(*falls[2:])) > Float32(SPAN)

    def lowest(self, at: Lane, rows, kept):
        """Returns G of the last row of the block whose column has the anchor M: row 15, or row ``kept`` - 1."""
        if kept is None:
            return from_lane(rows[-1], at.unit + 16)
        lowest, last = rows[0], kept - ROWS * at.late  # rows of the lane with the anchor
        for row in range(1, ROWS):
            lowest = [ptx.select(row < last, x, y) for x, y in zip(rows[row], lowest, strict=True)]
        return from_lane(lowest, ptx.select(kept > ROWS, at.unit + 16, at.unit))

    def store_exponents(self, at: Lane, rows, kept):
        """Stores G - M of a block and its tables, once the log decays of the blocks before it are there. ``kept``: the rows whose
        columns have the anchor M, or None for all."""
        whole, part = (
            [Float32(0.0)] * WIDTH for _ in range(2)
        )  # the sum of the blocks before: an integer and a fraction
        for before in range(BLOCKS - 1):
            totals = memory.load_floats(at.table(Table.TOTAL, before))
            for i, total in enumerate(totals):
                added = part[i] + ptx.select(before < at.block, total, Float32(0.0))
                n = ceiling(added)
                whole[i], part[i] = whole[i] + n, added - n
        first, lowest = from_lane(rows[0], at.unit), self.lowest(at, rows, kept)
        middles = [floor((x + y) * Float32(0.5) + p) for x, y, p in zip(first, lowest, part, strict=True)]
        shifts = [p - m for p, m in zip(part, middles, strict=True)]
        exponents = [[total + shift for total, shift in zip(row, shifts, strict=True)] for row in rows]
        for row, values in enumerate(exponents):
            ptx.store_shared_x4(at.exponent(row), values)
        anchors = [w + m for w, m in zip(whole, middles, strict=True)]
        store_if(at.late == 0, at.table(Table.MIDDLE, at.block), anchors)
        store_if(at.late > 0, at.table(Table.LAST, at.block), exponents[-1])


@cute.jit
def store_if(condition: cutlass.Boolean, address: Int32, values: list):
    """Stores four fp32 if the condition holds."""
    if condition:
        ptx.store_shared_x4(address, values)
