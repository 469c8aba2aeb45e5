"""Pairs of a diagonal block without factors, for rows whose decay since the block's first row is beyond the range of factors.

A pair (i, j) of rows i >= j has the decay 2^{G_i - G_j}, computed for each channel. It concerns rows i from ``kept`` on, against all
columns j of the block. It occurs for unbounded gates only, and there only in blocks that forget almost everything. Both sides of a
pair multiply in the same order, so that what they contribute to dg cancels to the bit. A token's product with itself contributes
nothing to dg.
"""

import cutlass
from cutlass import Float32, Int32, cute

from kda_cute.device import ptx
from kda_cute.device.gradients import elements, memory
from kda_cute.device.gradients.loads import row_offset
from kda_cute.device.gradients.memory import BLOCK, OFFSETS, RUN, TILES, Sum


def row_loaders(x, place, step):
    """Returns functions that load the thread's 16 channels of a row of the chunk in fp32: of scaled q, of k, and of beta k."""

    def row(source, kind, i, factor):
        inverse = ptx.rsqrt(elements.load_sum(place, kind, i) + Float32(1e-6))
        scale = ptx.select(x.l2norm > 0, inverse, Float32(1.0)) * factor
        start = source + row_offset(place, step.token + i, x.H, step.key_head)
        pairs = [y for n in (0, 16) for y in ptx.load_global_words(start + n, 4, i < step.valid)]
        return [y * scale for pair in pairs for y in ptx.unpack_bf16x2(pair)]

    query = lambda i: row(x.q, Sum.Q_SQUARE, i, x.scale)
    key = lambda i: row(x.k, Sum.K_SQUARE, i, Float32(1.0))
    column = lambda j: row(x.k, Sum.K_SQUARE, j, ptx.load_shared(memory.beta(step.address, j), Float32))
    return query, key, column


def decays_of(place, i, j):
    """Returns 2^(G_i - G_j) of the thread's 16 channels, at most 1; pairs with i < j have no weight."""
    found = []
    for channel in range(0, RUN, 4):
        below, above = (
            memory.load_floats(memory.exponent(place.base, n, place.channel + channel)) for n in (i, j)
        )
        found += [ptx.ex2(ptx.minimum(x - y, Float32(0.0))) for x, y in zip(below, above, strict=True)]
    return found


def load_d(base, name, i, j):
    """Loads [i, j] of an image [64, 64]."""
    low, high = ptx.unpack_bf16x2(ptx.load_shared(memory.image(base + OFFSETS[name], i, j & -2), Int32))
    return ptx.select(j & 1 == 0, low, high)


@cute.jit
def add_rows(
    place, kept: Int32, query, key, column, grad_q: cute.Tensor, grad_k: cute.Tensor, terms: cute.Tensor
):
    """Adds the pairs of the thread's rows from ``kept`` on to the gradient of q and to the negative one of k.

    ``query``, ``key``, ``column``: functions of `row_loaders`.
    """
    if kept < BLOCK:
        start = place.block * BLOCK
        for r in cutlass.range_constexpr(2):  # rows 0 to 7 of the block, then 8 to 15
            i = place.row + 8 * r
            rows = query(start + i), key(start + i)
            columns = 8 * (r + 1)
            for j in cutlass.range(ptx.select(kept < columns, Int32(columns), Int32(0)), unroll=1):
                decayed = [
                    x * y
                    for x, y in zip(decays_of(place, start + i, start + j), column(start + j), strict=True)
                ]
                for kind, gradient in enumerate((grad_q, grad_k)):
                    d = load_d(place.base, ("d_q", "d_k")[kind], start + i, start + j)
                    weight = ptx.select((i >= kept) & (j <= i - kind), d, Float32(0.0))
                    apart = ptx.select(j < i, weight, Float32(0.0)) * Float32(1.0 - 2.0 * kind)
                    for m in cutlass.range_constexpr(2 * TILES):
                        n = m // 2 * 4 + 2 * r + m % 2
                        gradient[n] = gradient[n] + weight * decayed[m]
                        terms[n] = terms[n] + (apart * rows[kind][m]) * decayed[m]


@cute.jit
def add_columns(place, kept: Int32, query, key, column, gradient: cute.Tensor, terms: cute.Tensor):
    """Adds the pairs of rows from ``kept`` on to the gradients of the thread's columns."""
    if kept < BLOCK:
        start = place.block * BLOCK
        for r in cutlass.range_constexpr(2):  # columns 0 to 7 of the block, then 8 to 15
            j = place.row + 8 * r
            b = column(start + j)
            for i in cutlass.range(cutlass.max(kept, 8 * r), BLOCK, unroll=1):
                decays = decays_of(place, start + i, start + j)
                for kind in cutlass.range_constexpr(2):
                    row = query(start + i) if kind == 0 else key(start + i)
                    d = load_d(place.base, ("d_q", "d_k")[kind], start + i, start + j)
                    d = d * Float32(1.0 if kind == 0 else -1.0)
                    apart = ptx.select(j < i, d, Float32(0.0))
                    weight = ptx.select(j <= i, d, Float32(0.0)) if kind == 0 else apart
                    for m in cutlass.range_constexpr(2 * TILES):
                        n = m // 2 * 4 + 2 * r + m % 2
                        gradient[n] = gradient[n] + weight * (decays[m] * row[m])
                        terms[n] = terms[n] - (apart * row[m]) * (decays[m] * b[m])
