"""What a thread does to its elements: factors of rows and columns, and gradients from the products' accumulators.

Thread (row, quad) of the warp of block w in warpgroup h has rows ``16w + row`` and ``16w + row + 8`` and the channels ``64h + 8j +
2 quad + e``. All arrays of 32 elements are in the order of an accumulator: e, then r, then j.
"""

from __future__ import annotations

import cutlass
from cutlass import Boolean, Float32, Int32, Int64, cute

from kda_cute.device import ptx
from kda_sm90.config import HEAD_DIM
from kda_sm90.kernels.gradients import memory
from kda_sm90.kernels.gradients.memory import BLOCKS, HALF, OFFSETS, PANEL, Table
from kda_sm90.kernels.gradients.products import TILES


class Place:
    """The calling thread of the two compute warpgroups."""

    def __init__(self, base, thread):
        self.base = base
        self.thread = thread
        self.half = thread // 128
        self.block = thread % 128 // 32
        self.lane = thread % 32
        self.row = self.lane // 4
        self.quad = self.lane % 4

    def rows(self):
        """Returns the thread's two rows of the chunk."""
        return [self.block * 16 + self.row + 8 * r for r in range(2)]

    def channel(self, tile):
        """Returns the first of the thread's two channels of a tile, in its half."""
        return 8 * tile + 2 * self.quad

    def panel(self, name):
        """Returns the address of the half's image in a region of factors."""
        return self.base + OFFSETS[name] + self.half * PANEL


def quad_sum(x):
    """Returns the sum over the four lanes that share a row."""
    x = x + cute.arch.shuffle_sync_bfly(x, 1)
    return x + cute.arch.shuffle_sync_bfly(x, 2)


def load_pairs(x, place, token, heads, head, valid):
    """Loads the thread's elements of ``x`` [B, T, heads, 128] in bf16, as bf16x2 [tile][r]; zeros behind the sequence."""
    found = []
    for tile in range(TILES):
        found.append(
            [
                ptx.load_global_i32(x + offset(place, token + row, heads, head, tile), row < valid)
                for row in place.rows()
            ]
        )
    return found


def offset(place, token, heads, head, tile):
    """Returns the byte offset of the thread's two channels of a tile in a bf16 tensor [B, T, heads, 128]."""
    return (Int64(token * heads + head) * HEAD_DIM + place.half * HALF + place.channel(tile)) * 2


def store_pairs(x, place, token, heads, head, valid, values):
    """Stores the thread's 32 elements to ``x`` [B, T, heads, 128] in bf16."""
    for tile in range(TILES):
        for r, row in enumerate(place.rows()):
            pair = ptx.pack_bf16x2(values[4 * tile + 2 * r], values[4 * tile + 2 * r + 1])
            ptx.store_global_if(x + offset(place, token + row, heads, head, tile), pair, row < valid)


def store_square_sums(place, kind, pairs):
    """Stores the sums of squares of the thread's rows over the half's channels."""
    for r, row in enumerate(place.rows()):
        total = Float32(0.0)
        for tile in range(TILES):
            for y in ptx.unpack_bf16x2(pairs[tile][r]):
                total = ptx.fma(y, y, total)
        store_sum(place, kind, row, total)


def store_sum(place, kind, row, total):
    """Stores a row's sum over the channels of the half."""
    total = quad_sum(total)
    store_shared_if(place.quad == 0, memory.sum_address(place.base, kind, place.half, row), [total])


@cute.jit
def store_shared_if(condition: Boolean, address: Int32, values: list):
    """Stores one or two fp32 if the condition holds."""
    if condition:
        if cutlass.const_expr(len(values) == 2):
            ptx.store_shared_x2(address, values)
        else:
            ptx.store_shared(address, values[0])


def load_sum(place, kind, row):
    """Loads a row's sum over all channels."""
    halves = [ptx.load_shared(memory.sum_address(place.base, kind, half, row), Float32) for half in range(2)]
    return halves[0] + halves[1]


def norms(place, kind, l2norm):
    """Returns 1/|x| of the thread's two rows, or 1."""
    inverse = [ptx.rsqrt(load_sum(place, kind, row) + Float32(1e-6)) for row in place.rows()]
    return [ptx.select(l2norm, y, Float32(1.0)) for y in inverse]


def tables(place, tile, *kinds):
    """Loads entries of the thread's block for the two channels of a tile."""
    channel = place.half * HALF + place.channel(tile)
    return [memory.load_pair(memory.table(place.base, kind, place.block, channel)) for kind in kinds]


def exponents(place, tile, row):
    """Loads G - A of a row, the two channels of a tile."""
    return memory.load_pair(memory.exponent(place.base, row, place.half * HALF + place.channel(tile)))


def store_factors(place, q, k, q_norms, k_norms, betas, kept):
    """Stores the factors of the thread's elements: rows ``q 2^(G - M)``, ``k 2^(G - M)``, columns ``beta k 2^(M - G)``.

    M is the middle anchor of the block. Rows that have none (``kept``: the number of those that have, or None for all) are relative
    to the block's anchor, columns to that of the next block. ``q_norms`` contain the scale.
    """
    for tile in range(TILES):
        (middle,) = tables(place, tile, Table.MIDDLE)
        hop = hops(place, tile)
        for r, row in enumerate(place.rows()):
            row_q, row_k, column = [], [], []
            es = exponents(place, tile, row)
            for e, (y, z) in enumerate(
                zip(ptx.unpack_bf16x2(q[tile][r]), ptx.unpack_bf16x2(k[tile][r]), strict=True)
            ):
                up, down = anchors(place, r, middle[e], hop[e], kept)
                fall, rise = ptx.ex2(es[e] - up), ptx.ex2(down - es[e])
                z = z * k_norms[r]
                row_q.append(y * q_norms[r] * fall)
                row_k.append(z * fall)
                column.append(z * betas[r] * rise)
            for name, values in (("row_q", row_q), ("row_k", row_k), ("column", column)):
                address = memory.image(place.panel(name), row, place.channel(tile))
                ptx.store_shared(address, ptx.pack_bf16x2(*values))


def anchors(place, r, middle, hop, kept):
    """Returns the anchors of the factors of row ``r`` of the thread, relative to the block's anchor: as row, and as column."""
    if kept is None:
        return middle, middle
    has = place.row + 8 * r < kept
    return ptx.select(has, middle, Float32(0.0)), ptx.select(has, middle, hop)


def hops(place, tile):
    """Returns the anchor of the next block relative to that of the thread's, for the two channels of a tile; for the last block, of
    which no row is behind, the lowest exponent, so that factors stay finite."""
    last = place.block == BLOCKS - 1
    following = ptx.select(last, place.block, place.block + 1)
    channel = place.half * HALF + place.channel(tile)
    ahead = memory.load_pair(memory.table(place.base, Table.ANCHOR, following, channel))
    own, lowest = tables(place, tile, Table.ANCHOR, Table.LAST)
    return [ptx.select(last, z, x - y) for x, y, z in zip(ahead, own, lowest, strict=True)]


def row_gradient(place, name, pairs, norms_of_rows, across, outer, inner, terms, kept):
    """Turns ``outer`` into the gradient of normalised q or k as rows.

    Adds to ``terms`` what rows contribute to dg. ``across``: dO S^T or -dX S^T. ``outer``, ``inner``: as `row_products` leaves them.
    """
    for tile in range(TILES):
        anchor, middle = tables(place, tile, Table.ANCHOR, Table.MIDDLE)
        for r, row in enumerate(place.rows()):
            factors = ptx.unpack_bf16x2(
                ptx.load_shared(memory.image(place.panel(name), row, place.channel(tile)), Int32)
            )
            xs = [y * norms_of_rows[r] for y in ptx.unpack_bf16x2(pairs[tile][r])]
            es = exponents(place, tile, row)
            for e in range(2):
                n = 4 * tile + 2 * r + e
                fall = ptx.ex2(es[e])
                grown = fall * memory.power(anchor[e]) * across[n]
                up, _ = anchors(place, r, middle[e], Float32(0.0), kept)
                paired = factors[e] * memory.power(up) * outer[n] + factors[e] * inner[n]
                terms[n] = terms[n] + paired + xs[e] * grown
                outer[n] = fall * outer[n] + ptx.ex2(es[e] - up) * inner[n] + grown


def column_gradient(place, pairs, norms_of_rows, betas, across, outer, inner, terms, kept):
    """Turns ``outer`` into the gradient of ``beta k`` as columns.

    Subtracts from ``terms`` what columns contribute to dg, and stores the sums of Kg dKg over the rows of the block. ``across``: R
    dS'^T. ``outer``, ``inner``: as `column_products` leaves them.
    """
    ends = [Float32(0.0)] * (2 * TILES)
    for tile in range(TILES):
        anchor, middle = tables(place, tile, Table.ANCHOR, Table.MIDDLE)
        hop = hops(place, tile)
        channel = place.half * HALF + place.channel(tile)
        last_anchor, last = (
            memory.load_pair(memory.table(place.base, kind, BLOCKS - 1, channel))
            for kind in (Table.ANCHOR, Table.LAST)
        )
        for r, row in enumerate(place.rows()):
            factors = ptx.unpack_bf16x2(
                ptx.load_shared(memory.image(place.panel("column"), row, place.channel(tile)), Int32)
            )
            xs = [y * norms_of_rows[r] for y in ptx.unpack_bf16x2(pairs[tile][r])]
            es = exponents(place, tile, row)
            for e in range(2):
                n = 4 * tile + 2 * r + e
                _, down = anchors(place, r, middle[e], hop[e], kept)
                left = ptx.ex2(last_anchor[e] - anchor[e] + (last[e] - es[e])) * across[n]
                end = xs[e] * betas[r] * left
                paired = factors[e] * memory.power(hop[e] - down) * outer[n] + factors[e] * inner[n]
                terms[n] = terms[n] - paired - end
                ends[2 * tile + e] = ends[2 * tile + e] + end
                outer[n] = ptx.ex2(hop[e] - es[e]) * outer[n] + ptx.ex2(down - es[e]) * inner[n] + left
    store_ends(place, ends)


def store_dots(place, kind, pairs, norms_of_rows, gradient):
    """Stores the sums of the products of normalised rows and their gradients over the half's channels."""
    for r, row in enumerate(place.rows()):
        total = Float32(0.0)
        for tile in range(TILES):
            for e, y in enumerate(ptx.unpack_bf16x2(pairs[tile][r])):
                total = ptx.fma(y * norms_of_rows[r], gradient[4 * tile + 2 * r + e], total)
        store_sum(place, kind, row, total)


def store_ends(place, ends):
    """Stores the sums of the block's rows, by channel."""
    for tile in range(TILES):
        pair = []
        for e in range(2):
            total = ends[2 * tile + e]
            for step in (4, 8, 16):
                total = total + cute.arch.shuffle_sync_bfly(total, step)
            pair.append(total)
        address = memory.table(place.base, Table.ENDS, place.block, place.half * HALF + place.channel(tile))
        store_shared_if(place.row == 0, address, pair)


def store_terms(place, terms):
    """Stores what the running sum of dg adds up, in place of the exponents, which only this thread still reads."""
    for tile in range(TILES):
        for r, row in enumerate(place.rows()):
            address = memory.exponent(place.base, row, place.half * HALF + place.channel(tile))
            ptx.store_shared_x2(address, [terms[4 * tile + 2 * r + e] for e in range(2)])


def unit_rows(pairs, factors):
    """Returns the thread's 32 elements of q or k, each row times its factor."""
    found = [Float32(0.0)] * (4 * TILES)
    for tile in range(TILES):
        for r in range(2):
            for e, y in enumerate(ptx.unpack_bf16x2(pairs[tile][r])):
                found[4 * tile + 2 * r + e] = y * factors[r]
    return found


def through_l2norm(gradient, units, inverse, dots, l2norm):
    """Returns the gradient of raw rows from that of normalised ones: ``(d - n (n . d)) / |x|``."""
    found = []
    for n, d in enumerate(gradient):
        r = n // 2 % 2
        projected = (d - units[n] * dots[r]) * inverse[r]
        found.append(ptx.select(l2norm, projected, d))
    return found


def fill_zero(*accumulators):
    """Sets accumulators to zero."""
    for acc in accumulators:
        acc.fill(0.0)


@cute.jit
def accumulate(start: Int64, member: Int32, group: Int32, total: cute.Tensor):
    """Adds to ``total`` the sum that earlier members of a group left in the thread's scratch, and stores the new sum unless this
    member is the last."""
    if member > 0:
        for i in cutlass.range_constexpr(8):
            for n, y in enumerate(ptx.load_global_f32_x4(start + i * (256 * 16))):
                total[4 * i + n] = total[4 * i + n] + y
    if member < group - 1:
        for i in cutlass.range_constexpr(8):
            ptx.store_global_x4(start + i * (256 * 16), [total[4 * i + n] for n in range(4)])


def negate(acc):
    """Negates an accumulator."""
    for n in range(cute.size(acc)):
        acc[n] = -acc[n]


def packed(pairs):
    """Returns the thread's elements as `load_pairs` returns them in a register tensor, by tile, then row."""
    found = cute.make_rmem_tensor((2 * TILES,), Int32)
    for tile in range(TILES):
        for r in range(2):
            found[2 * tile + r] = pairs[tile][r]
    return found


def packed_norms(norms):
    """Returns the factors of the thread's two rows in a register tensor."""
    found = cute.make_rmem_tensor((2,), Float32)
    for r in range(2):
        found[r] = norms[r]
    return found
