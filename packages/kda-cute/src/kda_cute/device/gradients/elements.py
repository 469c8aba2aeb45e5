"""What a thread does to its elements: factors of rows and columns, and gradients from the products' accumulators.

Thread (row, quad) of the warp of block w in warpgroup h has rows ``16w + row`` and ``16w + row + 8`` and the 16 channels from ``64h + 16
quad`` on (`memory.position`). All lists and accumulators of 32 elements are in the order of an accumulator: ``4 tile + 2 r + e`` for row
r and channel ``2 tile + e``. Most loops take two tiles at a time, because their four channels lie together in shared memory.

With M the anchor of the thread's block, ``fall`` is 2^(G - M) and ``rise`` its inverse. Both are at most 2^55, since M lies in the
middle of the range of G. Products are relative to M as well, so one multiplication ends them: a row's gradient is fall times the
sum of its products, a column's rise times its.
"""

from __future__ import annotations

from cutlass import Boolean, Float32, Int32, cute

from kda_cute.device import ptx
from kda_cute.device.gradients import memory
from kda_cute.device.gradients.memory import BLOCK, BLOCKS, HALF, OFFSETS, PANEL, RUN, TILES, Table


class Place:
    """The calling thread of the two compute warpgroups.

    Shifts and masks instead of divisions, because a signed division by a power of two takes several instructions.
    """

    def __init__(self, base, thread):
        self.base = base
        self.thread = thread
        warp = cute.arch.make_warp_uniform(thread >> 5)
        self.half, self.block = warp >> 2, warp & 3
        self.lane = thread & 31
        self.row, self.quad = self.lane >> 2, self.lane & 3
        self.matrix, self.matrix_row = self.lane >> 3, self.lane & 7  # whose address it gives to ldmatrix
        self.channel = self.half * HALF + self.quad * RUN  # the first of the 16, of 128
        # Swizzles xor the numbers of units of 16 bytes. So an address of other tiles is that of the first ones, xored with the tile.
        self.first_image = memory.image(
            base + self.half * PANEL,
            self.block * BLOCK + 8 * (self.matrix & 1) + self.matrix_row,
            8 * (self.matrix >> 1),
        )
        self.first_exponent = memory.exponent(base, self.block * BLOCK + self.row, self.channel)
        self.first_entry = memory.table(base, Table.TOTAL, 0, self.channel)

    def rows(self):
        """Returns the thread's two rows of the chunk."""
        return [self.block * BLOCK + self.row + 8 * r for r in range(2)]

    def panel(self, name):
        """Returns the address of the half's image in a region of factors."""
        return self.base + OFFSETS[name] + self.half * PANEL

    def factors(self, name, pair):
        """Loads the thread's factors of two tiles, [2 * tile + r][e]."""
        words = ptx.ldmatrix_x4((self.first_image ^ pair * 32) + OFFSETS[name])
        return [ptx.unpack_bf16x2(y) for y in words]

    def store_factors(self, name, pair, values):
        """Stores the thread's factors of two tiles, [2 * tile + r][e]."""
        words = [ptx.pack_bf16x2(*y) for y in values]
        ptx.stmatrix_x4((self.first_image ^ pair * 32) + OFFSETS[name], words)

    def exponent(self, pair, r):
        """Returns the address of G - M of a row, the four channels of two tiles."""
        return (self.first_exponent ^ pair * 16) + r * (8 * memory.TABLE_ROW)

    def exponents(self, pair, r):
        """Loads G - M of a row, [4 channels of two tiles]."""
        return memory.load_floats(self.exponent(pair, r))

    def table(self, kind, pair):
        """Loads entries of the thread's block for the four channels of two tiles."""
        start = (int(kind) * BLOCKS + self.block) * memory.TABLE_ROW
        return memory.load_floats((self.first_entry ^ pair * 16) + start)


def pairs_of_tiles():
    """Returns an iterator over pairs of tiles."""
    return range(TILES // 2)


def elements_of(pair, r):
    """Yields (channel of a pair of tiles, index of the element in an accumulator, its index in factors) for row r."""
    for tile in range(2):
        for e in range(2):
            yield 2 * tile + e, 4 * (2 * pair + tile) + 2 * r + e, (2 * tile + r, e)


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


def store_dots(place, kind, x, values):
    """Stores the sums over the half's channels of the thread's rows of raw elements times ``values``."""
    for r in range(2):
        total = Float32(0.0)
        for tile in range(TILES):
            for e, y in enumerate(x[tile][r]):
                total = ptx.fma(y, values[4 * tile + 2 * r + e], total)
        store_sum(place, kind, r, total)


def combine(gradient, factors, rows):
    """Turns ``gradient`` of ``beta k`` into that of k: times the factors of the rows, minus ``rows``."""
    for n in range(4 * TILES):
        gradient[n] = ptx.fma(factors[n // 2 % 2], gradient[n], -rows[n])


def store_square_sums(place, kind, x):
    """Stores the sums of squares of the thread's rows over the half's channels."""
    for r in range(2):
        total = Float32(0.0)
        for tile in range(TILES):
            for y in x[tile][r]:
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


def rises(place, pair, r, exponents, kept):
    """Returns what a column multiplies by: 2^(M - G), from G - M. Without the anchor M (``kept``, as `memory.kept` returns it, or None)
    the column is relative to the end of the block, an integer: 2^(M + floor(LAST) - G), at most 1."""
    if kept is None:
        return [ptx.ex2(-y) for y in exponents]
    lowest = [Float32(cute.math.floor(y)) for y in place.table(Table.LAST, pair)]
    has = has_anchor(place, r, kept)
    return [ptx.ex2(ptx.select(has, Float32(0.0), low) - y) for y, low in zip(exponents, lowest, strict=True)]


def store_factors(place, q, k, q_factors, k_factors, column_factors, kept):
    """Stores the factors of the thread's elements: rows ``q 2^(G - M)`` and ``-k 2^(G - M)``, columns ``beta k 2^(M - G)``.

    ``*_factors``: of the two rows, by which raw elements are multiplied."""
    load = lambda pair: [place.exponents(pair, r) for r in range(2)]
    following = load(0)
    for pair in pairs_of_tiles():
        both = following
        if pair + 1 < TILES // 2:  # before the stores, because the compiler moves no load up past a store
            following = load(pair + 1)
        rows_q, rows_k, columns = ([None] * 4 for _ in range(3))
        for r, exponents in enumerate(both):
            falls, rise = [ptx.ex2(y) for y in exponents], rises(place, pair, r, exponents, kept)
            for tile in range(2):
                queries, keys = (x[2 * pair + tile][r] for x in (q, k))
                scaled = lambda xs, factor, powers, at=2 * tile: [
                    x * (factor * y) for x, y in zip(xs, powers[at : at + 2], strict=True)
                ]
                rows_q[2 * tile + r] = scaled(queries, q_factors[r], falls)
                rows_k[2 * tile + r] = scaled(keys, -k_factors[r], falls)
                columns[2 * tile + r] = scaled(keys, column_factors[r], rise)
        for name, values in (("row_q", rows_q), ("row_k", rows_k), ("column", columns)):
            place.store_factors(name, pair, values)


# ---- gradients


def to_anchor(place, *accs):
    """Multiplies dO S^T and dX S^T by 2^M, which makes them relative to the block's anchor."""
    for pair in pairs_of_tiles():
        powers = [ptx.ex2(y) for y in place.table(Table.MIDDLE, pair)]
        for acc in accs:
            for r in range(2):
                for channel, n, _ in elements_of(pair, r):
                    acc[n] = acc[n] * powers[channel]


def row_gradients(place, acc_q, acc_k, terms):
    """Turns the sums of products of rows into gradients, by their falls, and makes ``terms`` what rows contribute to dg.

    The factors of k are negative, and so ``acc_k`` becomes the negative gradient.
    """
    for pair in pairs_of_tiles():
        rows_q, rows_k = place.factors("row_q", pair), place.factors("row_k", pair)
        for r in range(2):
            falls = [ptx.ex2(y) for y in place.exponents(pair, r)]
            for channel, n, (i, e) in elements_of(pair, r):
                terms[n] = ptx.fma(rows_k[i][e], acc_k[n], rows_q[i][e] * acc_q[n])
                acc_q[n], acc_k[n] = falls[channel] * acc_q[n], falls[channel] * acc_k[n]


def column_gradients(place, k, column_factors, across, acc, terms, kept):
    """Turns ``acc``, the sums of the products of columns, into the gradient of ``beta k``.

    Subtracts from ``terms`` what columns contribute to dg, and stores the sums of Kg dKg over the rows of the block. ``across``: R
    dS'^T.
    """
    ends = []
    for pair in pairs_of_tiles():
        moves = place.table(Table.END, pair)
        powers = [ptx.ex2(y) for y in moves]
        if kept is not None:
            lowest = [Float32(cute.math.floor(y)) for y in place.table(Table.LAST, pair)]
            lower = [ptx.ex2(y - low) for y, low in zip(moves, lowest, strict=True)]
        columns = place.factors("column", pair)
        totals = [Float32(0.0)] * 4
        for r in range(2):
            rise = rises(place, pair, r, place.exponents(pair, r), kept)
            keys = [y for tile in range(2) for y in k[2 * pair + tile][r]]
            for channel, n, (i, e) in elements_of(pair, r):
                power = powers[channel]
                if kept is not None:
                    power = ptx.select(has_anchor(place, r, kept), power, lower[channel])
                left = rise[channel] * (power * across[n])
                end = (keys[channel] * column_factors[r]) * left
                terms[n] = ptx.fma(-columns[i][e], acc[n], terms[n]) - end
                totals[channel] = totals[channel] + end
                acc[n] = ptx.fma(rise[channel], acc[n], left)
        ends += totals
    store_ends(place, ends)


def store_ends(place, ends):
    """Stores the sums of the block's rows, by channel. The 8 lanes with different rows and the same channels share the sums: each step
    halves the channels of a lane."""
    lane = place.lane
    for bit in (16, 8, 4):
        # lanes with the bit keep the upper half of the channels
        upper, half = lane & bit != 0, len(ends) // 2
        kept = [ptx.select(upper, ends[half + n], ends[n]) for n in range(half)]
        given = [ptx.select(upper, ends[n], ends[half + n]) for n in range(half)]
        ends = [x + cute.arch.shuffle_sync_bfly(y, bit) for x, y in zip(kept, given, strict=True)]
    first = (lane & 16) // 2 + (lane & 8) // 2 + (lane & 4) // 2
    ptx.store_shared_x2(memory.table(place.base, Table.ENDS, place.block, place.channel + first), ends)


def store_terms(place, terms):
    """Stores what the running sum of dg adds up, in place of the exponents, which only this warp has read."""
    for pair in pairs_of_tiles():
        for r in range(2):
            ptx.store_shared_x4(place.exponent(pair, r), [terms[n] for _, n, _ in elements_of(pair, r)])


def project(x, gradient, inverse, dots, scale, l2norm):
    """Turns ``gradient`` into the gradient of raw rows x: ``scale (d - n (n . d)) / |x|`` with n = x / |x|.

    Args:
        x: raw elements.
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
            for e, y in enumerate(x[tile][r]):
                n = 4 * tile + 2 * r + e
                gradient[n] = ptx.fma(-y, along[r], gradient[n] * across[r])
