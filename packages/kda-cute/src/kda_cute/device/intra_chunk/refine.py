"""Products of a diagonal block without split factors, for columns whose decay is too steep.

A block is halved: rows of its lower half against columns of its upper half, both decayed relative to the first row of the
lower half, so that no factor is above 1. Each half is then halved again, down to single rows, whose own product has no
decay. Rows of k and q are taken as loaded; norms are applied to the products at the end.
"""

from typing import NamedTuple

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from kda_cute.device import ptx
from kda_cute.device.intra_chunk.blocks import pack
from kda_cute.device.intra_chunk.memory import Layout, Place, load_exponents, load_fragment


class Norms(NamedTuple):
    """What the thread's two rows of k and of q are multiplied with: 1 or the inverse norm, and for q the scale."""

    k: list[Float32]
    q: list[Float32]


class Refinement:
    """What a warp computes for the columns of its block that have no split factors."""

    def __init__(self, layout: Layout):
        self.layout = layout

    @cute.jit
    def refine_if(
        self,
        steep: Boolean,
        products: cute.Tensor,
        falls: cute.Tensor,
        thread: Int32,
        block: Int32,
        base: Int32,
    ):
        """Calls `refine` where ``steep``. Whether a column then takes refined products depends on this column alone, and on
        no later one."""
        if steep:
            self.refine(products, falls, thread, block, base)

    @cute.jit
    def refine(self, products: cute.Tensor, falls: cute.Tensor, thread: Int32, block: Int32, base: Int32):
        """Fills ``products`` [16], four tiles of L, L, Aqk, Aqk without norms and beta, and ``falls`` [2], how far the
        exponents of each of the thread's rows are below the anchor at most."""
        p = Place(self.layout, thread, block, base)
        # [rows 8 to 15 against 0 to 7; of each half: sizes 4, 2, 1, the diagonal][2 of L, 2 of Aqk]
        acc = cute.make_rmem_tensor((36,), Float32)
        acc.fill(0.0)
        # Unrolled: ptxas schedules the whole kernel for fewer registers once a loop has accumulators of its own.
        for m in cutlass.range_constexpr(4):
            self.add_group(p, acc, falls, m)
        for half in cutlass.range_constexpr(2):
            falls[half] = ptx.quad_max(falls[half])
        self.select(p, acc, products)

    def add_group(self, p: Place, acc, falls, m):
        """Adds the products of group m of the channels. Rows of k and of the same 8 rows of q are one A operand, so that a
        product has L in its upper half and Aqk in its lower one."""

        def add(at, k, q, columns):
            for t in (0, 2):
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
        for level, size in enumerate((8, 4, 2)):
            first = (p.row | size) & -size
            columns = None
            for half in range(2):
                anchor = load_exponents(p, m, first % 8 + 8 * max(half, size // 8))
                # A row has the same factor as row and as column.
                factors = pack(
                    [ptx.ex2(-ptx.absolute(x - y)) for x, y in zip(exponents[half], anchor, strict=True)]
                )
                k = decayed(keys[half], factors)
                if size == 8 and half == 0:
                    columns = k
                else:
                    q = decayed(queries[half], factors)
                    add(0 if size == 8 else 4 + 16 * half + 4 * (level - 1), k, q, columns or k)
        for half in range(2):  # the anchor is an odd row, so that only columns decay
            anchor = load_exponents(p, m, (p.row | 1) + 8 * half)
            factors = pack([ptx.ex2(y - x) for x, y in zip(exponents[half], anchor, strict=True)])
            add(4 + 16 * half + 8, keys[half], queries[half], decayed(keys[half], factors))
            add(4 + 16 * half + 12, keys[half], queries[half], keys[half])

    def select(self, p: Place, acc, products):
        """Selects for each pair of rows the product of the size at which the two part."""
        for kind in range(2):
            for e in range(2):
                column = 2 * p.quad + e
                # rows of the lower half, columns of the upper one
                products[8 * kind + 2 + e] = acc[2 * kind + e]
                for half in range(2):
                    at = 4 + 16 * half + 2 * kind + e
                    x = ptx.select(p.row == column, acc[at + 12], Float32(0.0))
                    for level, size in enumerate((4, 2, 1)):
                        # The two agree in all higher bits, and only the row has this bit.
                        parted = (p.row ^ column) & (8 - size)
                        here = (parted | (~p.row & size) << 3) == size
                        x = ptx.select(here, acc[at + 4 * level], x)
                    products[8 * kind + half * 4 + half * 2 + e] = x

    def normalised(self, p: Place, products, splits, norms: Norms):
        """Returns the refined products with the norms of their rows and columns, as four tiles; 0 in columns that have
        split factors, by ``splits`` of the thread's two rows."""
        refined = [ptx.select(one, Float32(0.0), x) for one, x in zip(splits, norms.k, strict=True)]
        # Column 8*tile + 2*quad + e is row 2*quad + e, or that plus 8, of the thread in the first lane of its quad.
        of_column = [cute.arch.shuffle_sync(x, (2 * p.quad + e) * 4) for x in refined for e in range(2)]
        found = [[], [], [], []]
        for n in range(16):
            factor = norms[n // 8][n // 2 % 2] * of_column[n // 4 % 2 * 2 + n % 2]
            found[n // 4].append(products[n] * factor)
        return found
