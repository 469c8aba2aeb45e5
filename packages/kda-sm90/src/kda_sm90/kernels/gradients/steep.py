"""Pairs of a diagonal block without factors, for rows whose decay since the block's first row is beyond the range of factors.

A pair (i, j) of rows i >= j has the decay 2^{G_i - G_j}, computed for each channel. It concerns rows i from ``kept`` on, against all
columns j of the block. It occurs for unbounded gates only, and there only in blocks that forget almost everything. Both sides of a
pair multiply in the same order, so that what they contribute to dg cancels to the bit. A token's product with itself contributes
nothing to dg.
"""

import cutlass
from cutlass import Float32, Int32, cute

from kda_cute.device import ptx
from kda_sm90.kernels.gradients import elements, memory
from kda_sm90.kernels.gradients.memory import BLOCK
from kda_sm90.kernels.gradients.products import TILES


def load_d(d, i, j):
    """Loads [i, j] of an image [64, 64]."""
    low, high = ptx.unpack_bf16x2(ptx.load_shared(memory.image(d, i, j & -2), Int32))
    return ptx.select(j & 1 == 0, low, high)


def load_row(x, place, token, heads, head, row, valid):
    """Loads a row of q or k, the thread's 16 channels, as bf16x2."""
    return [
        ptx.load_global_i32(x + elements.offset(place, token + row, heads, head, tile), row < valid)
        for tile in range(TILES)
    ]


@cute.jit
def add_rows(
    place,
    d: Int32,
    kept: Int32,
    pairs: cute.Tensor,
    norms: cute.Tensor,
    columns,
    gradient: cute.Tensor,
    terms: cute.Tensor,
):
    """Adds to the rows of the thread from ``kept`` on. ``pairs``, ``norms``: its elements of q or k, and their factors.
    ``columns(j)``: the thread's channels of row j of the block of beta k, in fp32."""
    start = place.block * BLOCK
    for j in cutlass.range(BLOCK, unroll=1):
        b = columns(start + j)
        for r in cutlass.range_constexpr(2):
            i = place.row + 8 * r
            on = (i >= kept) & (j <= i)
            weight = ptx.select(on, load_d(d, start + i, start + j), Float32(0.0))
            apart = ptx.select(j < i, weight, Float32(0.0))
            for tile in cutlass.range_constexpr(TILES):
                below = elements.exponents(place, tile, start + i)
                above = elements.exponents(place, tile, start + j)
                xs = ptx.unpack_bf16x2(pairs[2 * tile + r])
                for e in cutlass.range_constexpr(2):
                    n = 4 * tile + 2 * r + e
                    decayed = decay(below[e], above[e]) * b[2 * tile + e]
                    gradient[n] = gradient[n] + weight * decayed
                    terms[n] = terms[n] + (apart * (xs[e] * norms[r])) * decayed


@cute.jit
def add_columns(
    place, d: Int32, kept: Int32, rows, b: cute.Tensor, gradient: cute.Tensor, terms: cute.Tensor
):
    """Adds to all rows of the thread as columns. ``rows(i)``: the thread's channels of row i of normalised q or k. ``b``: the thread's
    elements of beta k."""
    start = place.block * BLOCK
    for i in cutlass.range(kept, BLOCK, unroll=1):
        x = rows(start + i)
        for r in cutlass.range_constexpr(2):
            j = place.row + 8 * r
            weight = ptx.select(j <= i, load_d(d, start + i, start + j), Float32(0.0))
            apart = ptx.select(j < i, weight, Float32(0.0))
            for tile in cutlass.range_constexpr(TILES):
                below = elements.exponents(place, tile, start + i)
                above = elements.exponents(place, tile, start + j)
                for e in cutlass.range_constexpr(2):
                    n = 4 * tile + 2 * r + e
                    fall = decay(below[e], above[e])
                    gradient[n] = gradient[n] + weight * (fall * x[2 * tile + e])
                    terms[n] = terms[n] - (apart * x[2 * tile + e]) * (fall * b[n])


def decay(below, above):
    """Returns 2^(G_i - G_j), at most 1; pairs with i < j have no weight."""
    return ptx.ex2(ptx.minimum(below - above, Float32(0.0)))
