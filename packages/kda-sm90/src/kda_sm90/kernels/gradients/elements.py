"""What a thread does to its elements: factors of rows and columns, and gradients from the products' accumulators.

Thread (row, quad) of the warp of block w in warpgroup h has rows ``16w + row`` and ``16w + row + 8`` and the channels ``64h + 8j +
2 quad + e``. All lists and accumulators of 32 elements are in the order of an accumulator: e, then r, then j.

With M the anchor of the thread's block, ``fall`` is 2^(G - M) and ``rise`` its inverse. Both are at most 2^55, since M lies in the
middle of the range of G. Products are relative to M as well, so one multiplication ends them: a row's gradient is fall times the
sum of its products, a column's rise times its.
"""

from __future__ import annotations

from cutlass import Boolean, Float32, Int32, cute

from kda_cute.device import ptx
from kda_sm90.kernels.gradients import memory
from kda_sm90.kernels.gradients.memory import BLOCKS, HALF, OFFSETS, PANEL, TILES, Table


class Place:
    """The calling thread of the two compute warpgroups."""

    def __init__(self, base, thread):
        self.base = base
        self.thread = thread
        warp = cute.arch.make_warp_uniform(thread // 32)
        self.half, self.block = warp // 4, warp % 4
        self.lane = thread % 32
        self.row = self.lane // 4
        self.quad = self.lane % 4
        # The swizzle of a row xors its number with that of a tile, so an address of a tile is that of tile 0 xored with the tile.
        self.first_image = (
            base + self.half * PANEL + (self.block * 16 + self.row) * 128 + self.quad * 4 + self.row * 16
        )
        self.first_exponent = (
            base
            + OFFSETS["exponent"]
            + (
                (self.block * 16 + self.row) * memory.TABLE_ROW
                + self.half * (4 * HALF)
                + self.quad * 8
                + self.row * 32
            )
        )

    def rows(self):
        """Returns the thread's two rows of the chunk."""
        return [self.block * 16 + self.row + 8 * r for r in range(2)]

    def channel(self, tile):
        """Returns the first of the thread's two channels of a tile, of 128."""
        return self.half * HALF + 8 * tile + 2 * self.quad

    def panel(self, name):
        """Returns the address of the half's image in a region of factors."""
        return self.base + OFFSETS[name] + self.half * PANEL

    def factors(self, name, tile):
        """Loads the thread's factors of a tile, [row][e]."""
        start = self.first_image ^ tile * 16
        return [
            ptx.unpack_bf16x2(ptx.load_shared(start + (OFFSETS[name] + r * 1024), Int32)) for r in range(2)
        ]

    def store_factors(self, name, tile, r, values):
        """Stores the thread's factors of a tile and row."""
        start = self.first_image ^ tile * 16
        ptx.store_shared(start + (OFFSETS[name] + r * 1024), ptx.pack_bf16x2(*values))

    def exponent(self, tile, r):
        """Returns the address of G - M of a row, the two channels of a tile."""
        return (self.first_exponent ^ tile * 32) + r * (8 * memory.TABLE_ROW)

    def exponents(self, tile, r):
        """Loads G - M of a row, the two channels of a tile."""
        return memory.load_pair(self.exponent(tile, r))

    def table(self, kind, tile, block=None):
        """Loads entries of a block, by default the thread's, for the two channels of a tile."""
        block = self.block if block is None else block
        return memory.load_pair(memory.table(self.base, kind, block, self.channel(tile)))


def quad_sum(x):
    """Returns the sum over the four lanes that share a row."""
    x = x + cute.arch.shuffle_sync_bfly(x, 1)
    return x + cute.arch.shuffle_sync_bfly(x, 2)


@cute.jit
def store_shared_if(condition: Boolean, address: Int32, value: Float32):
    """Stores one fp32 if the condition holds."""
    if condition:
        ptx.store_shared(address, value)


def store_sum(place, kind, r, total):
    """Stores the sum of row r of the thread over the channels of the half."""
    address = memory.sum_address(place.base, kind, place.half, place.rows()[r])
    store_shared_if(place.quad == 0, address, quad_sum(total))


def load_sum(place, kind, row):
    """Loads a row's sum over all channels."""
    halves = [ptx.load_shared(memory.sum_address(place.base, kind, half, row), Float32) for half in range(2)]
    return halves[0] + halves[1]


def store_dots(place, kind, pairs, values):
    """Stores the sums over the half's channels of the thread's rows of raw elements times ``values``."""
    for r in range(2):
        total = Float32(0.0)
        for tile in range(TILES):
            for e, y in enumerate(ptx.unpack_bf16x2(pairs[tile][r])):
                total = ptx.fma(y, values[4 * tile + 2 * r + e], total)
        store_sum(place, kind, r, total)


def combine(gradient, factors, rows):
    """Turns ``gradient`` of ``beta k`` into that of k: times the factors of the rows, minus ``rows``."""
    for n in range(4 * TILES):
        gradient[n] = ptx.fma(factors[n // 2 % 2], gradient[n], -rows[n])


def store_square_sums(place, kind, pairs):
    """Stores the sums of squares of the thread's rows over the half's channels."""
    for r in range(2):
        total = Float32(0.0)
        for tile in range(TILES):
            for y in ptx.unpack_bf16x2(pairs[tile][r]):
                total = ptx.fma(y, y, total)
        store_sum(place, kind, r, total)


def norms(place, kind, l2norm):
    """Returns 1/|x| of the thread's two rows, or 1."""
    inverse = [ptx.rsqrt(load_sum(place, kind, row) + Float32(1e-6)) for row in place.rows()]
    return [ptx.select(l2norm, y, Float32(1.0)) for y in inverse]


# ---- factors


def has_anchor(place, r, kept):
    """Returns whether the column of row r has the anchor M."""
    return place.row + 8 * r < kept


def rises(place, tile, r, exponents, kept):
    """Returns what a column multiplies by: 2^(M - G), from G - M. Without the anchor M (``kept``, as `memory.kept` returns it, or None)
    the column is relative to the end of the block, an integer: 2^(M + floor(LAST) - G), at most 1."""
    if kept is None:
        return [ptx.ex2(-y) for y in exponents]
    lowest = [Float32(cute.math.floor(y)) for y in place.table(Table.LAST, tile)]
    has = has_anchor(place, r, kept)
    return [ptx.ex2(ptx.select(has, Float32(0.0), low) - y) for y, low in zip(exponents, lowest, strict=True)]


def store_factors(place, q, k, q_factors, k_factors, column_factors, kept):
    """Stores the factors of the thread's elements: rows ``q 2^(G - M)`` and ``-k 2^(G - M)``, columns ``beta k 2^(M - G)``.

    ``*_factors``: of the two rows, by which raw elements are multiplied."""
    # Loads before all stores, which the compiler would not reorder.
    loaded = [place.exponents(tile, r) for tile in range(TILES) for r in range(2)]
    for tile in range(TILES):
        for r in range(2):
            exponents = loaded[2 * tile + r]
            fall, rise = [ptx.ex2(y) for y in exponents], rises(place, tile, r, exponents, kept)
            queries, keys = ptx.unpack_bf16x2(q[tile][r]), ptx.unpack_bf16x2(k[tile][r])
            scaled = lambda xs, factors, powers, r=r: [
                x * (factors[r] * y) for x, y in zip(xs, powers, strict=True)
            ]
            place.store_factors("row_q", tile, r, scaled(queries, q_factors, fall))
            place.store_factors("row_k", tile, r, scaled(keys, [-y for y in k_factors], fall))
            place.store_factors("column", tile, r, scaled(keys, column_factors, rise))


# ---- gradients


def to_anchor(place, acc):
    """Multiplies dO S^T or dX S^T by 2^M, which makes it relative to the block's anchor."""
    for tile in range(TILES):
        powers = [ptx.ex2(y) for y in place.table(Table.MIDDLE, tile)]
        for n in range(4):
            acc[4 * tile + n] = acc[4 * tile + n] * powers[n % 2]


def row_gradients(place, name, acc, terms, first):
    """Turns the sums of products of rows into a gradient, by their falls, and adds to ``terms`` what rows contribute to dg.

    Args:
        name: the region of the rows' factors. Those of k are negative, and so its sums are those of the negative gradient.
        first: whether ``terms`` is empty.
    """
    for tile in range(TILES):
        factors = place.factors(name, tile)
        for r in range(2):
            falls = [ptx.ex2(y) for y in place.exponents(tile, r)]
            for e in range(2):
                n = 4 * tile + 2 * r + e
                terms[n] = factors[r][e] * acc[n] if first else ptx.fma(factors[r][e], acc[n], terms[n])
                acc[n] = falls[e] * acc[n]


def column_gradients(place, k, column_factors, across, acc, terms, kept):
    """Turns ``acc``, the sums of the products of columns, into the gradient of ``beta k``.

    Subtracts from ``terms`` what columns contribute to dg, and stores the sums of Kg dKg over the rows of the block. ``across``: R
    dS'^T.
    """
    ends = [Float32(0.0)] * (2 * TILES)
    for tile in range(TILES):
        last = zip(
            place.table(Table.MIDDLE, tile, BLOCKS - 1),
            place.table(Table.LAST, tile, BLOCKS - 1),
            strict=True,
        )
        to_end = [(m - own) + y for (m, y), own in zip(last, place.table(Table.MIDDLE, tile), strict=True)]
        powers = [ptx.ex2(y) for y in to_end]
        if kept is not None:
            lowest = [Float32(cute.math.floor(y)) for y in place.table(Table.LAST, tile)]
            lower = [ptx.ex2(y - low) for y, low in zip(to_end, lowest, strict=True)]
        columns = place.factors("column", tile)
        for r in range(2):
            keys = ptx.unpack_bf16x2(k[tile][r])
            rise = rises(place, tile, r, place.exponents(tile, r), kept)
            for e in range(2):
                n = 4 * tile + 2 * r + e
                power = powers[e]
                if kept is not None:
                    power = ptx.select(has_anchor(place, r, kept), power, lower[e])
                left = rise[e] * (power * across[n])
                end = (keys[e] * column_factors[r]) * left
                terms[n] = ptx.fma(-columns[r][e], acc[n], terms[n]) - end
                ends[2 * tile + e] = ends[2 * tile + e] + end
                acc[n] = ptx.fma(rise[e], acc[n], left)
    store_ends(place, ends)


def store_ends(place, ends):
    """Stores the sums of the block's rows, by channel. The 8 lanes with different rows and the same channels share the sums: each step
    halves the channels of a lane."""
    lane = place.lane
    for step, bit in ((4, 16), (2, 8), (1, 4)):
        # lanes with the bit keep the upper half of the tiles
        upper = lane & bit != 0
        half = len(ends) // 2
        kept = [ptx.select(upper, ends[half + n], ends[n]) for n in range(half)]
        given = [ptx.select(upper, ends[n], ends[half + n]) for n in range(half)]
        ends = [x + cute.arch.shuffle_sync_bfly(y, bit) for x, y in zip(kept, given, strict=True)]
        assert len(ends) == 2 * step
    tile = (lane & 16) // 4 + (lane & 8) // 4 + (lane & 4) // 4
    address = memory.table(place.base, Table.ENDS, place.block, place.half * HALF + 8 * tile + 2 * place.quad)
    ptx.store_shared_x2(address, ends)


def store_terms(place, terms):
    """Stores what the running sum of dg adds up, in place of the exponents, which only this warp has read."""
    for tile in range(TILES):
        for r in range(2):
            ptx.store_shared_x2(place.exponent(tile, r), [terms[4 * tile + 2 * r + e] for e in range(2)])


def project(pairs, gradient, inverse, dots, scale, l2norm):
    """Turns ``gradient`` into the gradient of raw rows x: ``scale (d - n (n . d)) / |x|`` with n = x / |x|.

    Args:
        pairs: raw elements.
        gradient: d, with respect to the normalised and scaled rows.
        inverse: 1/|x| of the two rows, or 1.
        dots: sums of raw elements times d.
        l2norm: whether rows are normalised.
    """
    along = [
        ptx.select(l2norm, y * y * (y * (scale * total)), Float32(0.0))
        for y, total in zip(inverse, dots, strict=True)
    ]
    across = [y * scale for y in inverse]
    for tile in range(TILES):
        for r in range(2):
            for e, y in enumerate(ptx.unpack_bf16x2(pairs[tile][r])):
                n = 4 * tile + 2 * r + e
                gradient[n] = ptx.fma(-y, along[r], gradient[n] * across[r])
