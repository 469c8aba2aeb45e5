"""Products of a diagonal block without split factors, for columns whose decay is too steep.

A block is halved: rows of its lower half are multiplied with columns of its upper half, both decayed relative to the first row
of the lower half, so that no factor is above 1. Each half is then halved again, down to single rows, whose own product has no
decay. The *size* of a product is the number of its rows and columns. Which size computes which pair of rows::

         column  0 1 2 3 4 5 6 7                   rows 8 to 15:
    row 0        d                                 columns 0 to 7   size 8
        1        1 d                               columns 8 to 15  as on the left, the second half
        2        2 2 d
        3        2 2 1 d                           d: the diagonal, size 0
        4        4 4 4 4 d
        5        4 4 4 4 1 d
        6        4 4 4 4 2 2 d
        7        4 4 4 4 2 2 1 d

One MMA computes all products of a size in a half, because the result has 8 columns: rows of k of that half are the upper 8 rows
of its A operand, giving L, and the same rows of q the lower 8, giving Aqk. It also computes pairs that belong to another size;
`select_products` drops these. Rows of k and q are taken as loaded: norms, scale and beta multiply the products.
"""

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, cute

from kda_cute.device import ptx
from kda_cute.device.intra_chunk.blocks import pack
from kda_cute.device.intra_chunk.memory import Place, load_exponents, load_fragment

#: Sizes of the products inside a half, in the order of their accumulators. 0 is the diagonal.
SIZES = 4, 2, 1, 0


def accumulator(size, half=0):
    """Returns the index of the first of the four accumulators of a product: two of L, two of Aqk. Size 8 has no half."""
    return 0 if size == 8 else 4 + 16 * half + 4 * SIZES.index(size)


def element(kind, tile, half, e):
    """Returns the index in ``products`` of a thread's element: kind 0 is L, 1 is Aqk; its row ``half``; column
    ``8*tile + 2*quad_lane + e``."""
    return 8 * kind + 4 * tile + 2 * half + e


class RowScales(NamedTuple):
    """Factors of the thread's two rows of k and of q: the inverse norm or 1; in ``q`` also the scale of the call."""

    k: list[Float32]
    q: list[Float32]


class Refinement:
    """The products of a warp's diagonal block in the columns that have no split factors."""

    @cute.jit
    def refine_if(self, p: Place, steep: Boolean, products: cute.Tensor, falls: cute.Tensor):
        """Calls `refine` if ``steep``, which holds for the whole warp or not at all. ``products`` and ``falls`` are zeros
        before.

        ``falls`` then decides for each column whether it takes refined products. That depends on this column alone: later
        tokens do not change the rounding of earlier ones.
        """
        if steep:
            self.refine(p, products, falls)

    @cute.jit
    def refine(self, p: Place, products: cute.Tensor, falls: cute.Tensor):
        """Fills ``products`` [16] (`element`), without norms, scale and beta, and ``falls`` [2]: for each of the thread's
        rows the largest A_b - G over the channels."""
        acc = cute.make_rmem_tensor((36,), Float32)  # `accumulator`
        acc.fill(0.0)
        # Unrolled: ptxas schedules the whole kernel for fewer registers once a loop has accumulators of its own.
        for m in cutlass.range_constexpr(4):
            self.add_slice(p, acc, falls, m)
        for half in cutlass.range_constexpr(2):
            falls[half] = ptx.quad_max(falls[half])
        select_products(p, acc, products)

    def add_slice(self, p: Place, acc, falls, m):
        """Adds to all products those of the channels of slice m."""

        def add(at, k, q, columns):
            """Adds (rows of k, rows of q) @ columns^T over the 32 channels to the accumulators from ``at`` on."""
            for t in (0, 2):  # pairs of a k16 step
                a, b = [k[t], q[t], k[t + 1], q[t + 1]], [columns[t], columns[t + 1]]
                for i, x in enumerate(ptx.mma_m16n8k16(a, b, [acc[at + i] for i in range(4)])):
                    acc[at + i] = x

        def decayed(x, factors):
            return [ptx.mul_bf16x2(pair, factor) for pair, factor in zip(x, factors, strict=True)]

        exponents = [load_exponents(p, m, p.row + 8 * half) for half in range(2)]
        keys, queries = ([load_fragment(p, x, half, m) for half in range(2)] for x in (p.k, p.q))
        for half in range(2):
            for x in exponents[half]:
                falls[half] = ptx.maximum(falls[half], -x)
        for size in (8, 4, 2):
            # First row of the lower half of the 2*size rows around the thread's row; of size 8 it is row 8 for all.
            first = (p.row | size) & -size
            columns = None
            for half in range(2):
                anchor = load_exponents(p, m, first % 8 + 8 * max(half, size // 8))
                # 2^(G - G_anchor) for a row, 2^(G_anchor - G) for a column: rows are at or below the anchor, columns above it.
                factors = pack(
                    [ptx.ex2(-ptx.absolute(x - y)) for x, y in zip(exponents[half], anchor, strict=True)]
                )
                k = decayed(keys[half], factors)
                if size == 8 and half == 0:
                    columns = k
                else:
                    q = decayed(queries[half], factors)
                    add(accumulator(size, half), k, q, columns or k)
        for half in range(2):
            # Size 1: the row is the anchor itself, an odd row, so that only columns decay. Size 0: nothing decays.
            anchor = load_exponents(p, m, (p.row | 1) + 8 * half)
            factors = pack([ptx.ex2(y - x) for x, y in zip(exponents[half], anchor, strict=True)])
            add(accumulator(1, half), keys[half], queries[half], decayed(keys[half], factors))
            add(accumulator(0, half), keys[half], queries[half], keys[half])

    def scaled(self, p: Place, products, splittable, scales: RowScales):
        """Returns the refined products times the scales of their rows and columns, as four tiles: two of L, two of Aqk.
        They are 0 in the columns that have split factors. ``splittable``: whether the thread's two rows, as columns, have."""
        own = [ptx.select(one, Float32(0.0), x) for one, x in zip(splittable, scales.k, strict=True)]
        # Column 8*tile + r, r = 2*quad_lane + e, is row 8*tile + r of the block, which quad r holds.
        of_column = [[cute.arch.shuffle_sync(x, (2 * p.quad_lane + e) * 4) for e in range(2)] for x in own]
        tiles = []
        for kind in range(2):
            for tile in range(2):
                values = []
                for half in range(2):
                    for e in range(2):
                        factor = scales[kind][half] * of_column[tile][e]
                        values.append(products[element(kind, tile, half, e)] * factor)
                tiles.append(values)
        return tiles


def select_products(p, acc, products, halves=(0, 1)):
    """Takes each pair of rows from the product of its size, the highest bit in which the numbers of row and column differ. Pairs above the
    diagonal stay 0.

    Args:
        p: has the thread's ``row`` and ``quad_lane``.
        acc: products of all sizes (`accumulator`).
        products: those that are taken (`element`).
        halves: of the columns: 0 stands for columns 0 to 7, 1 for the others.
    """
    for kind in range(2):
        for e in range(2):
            column = 2 * p.quad_lane + e
            if 0 in halves:
                products[element(kind, 0, 1, e)] = acc[accumulator(8) + 2 * kind + e]
            for half in halves:
                of_size = lambda size: acc[accumulator(size, half) + 2 * kind + e]  # noqa: B023 - called at once
                x = ptx.select(p.row == column, of_size(0), Float32(0.0))
                for size in (4, 2, 1):
                    # Of the bits from `size` up, only `size` differs; and the row has it, so it is below the diagonal.
                    # If the row lacks it, a bit that `size` never has makes the two sides differ.
                    differing = (p.row ^ column) & (8 - size)
                    here = (differing | (~p.row & size) << 3) == size
                    x = ptx.select(here, of_size(size), x)
                products[element(kind, half, half, e)] = x
