"""T = (I + L)^-1: diagonal blocks in stage 3, blocks below the diagonal in stage 4.

Both are forward substitution. With X = T, for i > j:

    inside a diagonal block (elements)     X_ij = -sum_{j <= k < i} L_ik X_kj,     X_jj = 1
    in blocks                              X_ij = -X_ii sum_{j <= k < i} L_ik X_kj

A column of X needs no other column: a lane has a column of elements, a warp a column of blocks.
"""

from typing import Any

import cutlass
from cutlass import Float32, Int32, Int64, cute

from kda_cute.device import ptx
from kda_cute.device.intra_chunk.blocks import Image, fragment_in_parts, load_parts, store_parts
from kda_cute.device.intra_chunk.memory import Layout, Place
from kda_cute.records import BLOCK

#: Bytes from one column of a diagonal block to the next while it is inverted: 20 words, so that stores of four columns and loads of a
#: fragment touch all banks.
COLUMN = 80


class Inverse:
    """The inverse of a group's chunk: one warp for each diagonal block, and then for the column of blocks below it. ``image`` stores
    the blocks of T."""

    def __init__(self, layout: Layout, image: Any = None):
        self.layout, self.blocks = layout, layout.blocks
        self.image = Image(layout) if image is None else image

    def invert_diagonal(self, p: Place, l_acc, t_image):
        """Inverts the warp's diagonal block of I + L in fp32, one lane for each column; lanes 16 to 31 repeat the work of
        lanes 0 to 15. Stores the result in two parts to shared memory, and rounded to bf16 to the image of T.

        ``l_acc``: the diagonal block of L, two accumulator tiles. Only elements below its diagonal are read.
        """
        start = self.layout.inverse(p.base, p.block)
        # -L, column by column: lanes then load four rows of column i at once, all lanes the same. Columns are `COLUMN` apart.
        for half in range(2):
            row = p.row + 8 * half
            for tile in range(2):
                for e in range(2):
                    column = 8 * tile + 2 * p.quad_lane + e
                    ptx.store_shared(start + column * COLUMN + row * 4, -l_acc[tile][2 * half + e])
        eliminate(
            start, p.lane % 16
        )  # the column is computed again: registers are scarce between stage 1 and here
        # From columns to an A fragment, in two parts.
        values = []
        for i in range(4):
            at = start + (2 * p.quad_lane + 8 * (i // 2)) * COLUMN + (p.row + 8 * (i % 2)) * 4
            values.append([ptx.load_shared(at + e * COLUMN, Float32) for e in range(2)])
        cute.arch.sync_warp()
        heads, tails = zip(*(ptx.split_bf16x2(*pair) for pair in values), strict=True)
        store_parts(start + p.lane * 16, (heads, tails))
        self.image.store(t_image, heads, p.block, p.block, p.lane, p.base)

    @cute.jit
    def assemble(self, p: Place, t_image: Int64):
        """Computes the blocks of T below the warp's diagonal block, top down. Blocks above the diagonal become 0. Returns all blocks of the
        column as `load_diagonal` does.

        It computes the transposes, because an accumulator can then be the A operand of the next product without a move
        between threads, and X_kj^T stays in registers:

            X_ij^T = -(sum_k X_kj^T @ L_ik^T) @ X_ii^T
        """
        parts = self.load_diagonal(p)
        for i in cutlass.range(p.block, unroll=1):
            self.image.clear(t_image, i, p.block, p.lane)
        for distance in cutlass.range_constexpr(1, self.blocks):
            if p.block + distance < self.blocks:
                self.assemble_block(p, parts, distance, t_image)
        return parts

    def load_diagonal(self, p: Place):
        """Returns a register tensor of bf16x2 [distance from the diagonal][2 parts][4]: the transposed blocks of T of the
        warp's column. The diagonal block is filled, the others are zeros."""
        parts = cute.make_rmem_tensor((self.blocks * 8,), Int32)
        parts.fill(0)
        for part, fragment in enumerate(load_parts(self.layout.inverse(p.base, p.block) + p.lane * 16)):
            for i, pair in enumerate(ptx.transpose_16x16(fragment)):
                parts[part * 4 + i] = pair
        return parts

    def assemble_block(self, p: Place, parts, distance, t_image):
        """Computes the block at ``distance`` below the diagonal from those above it."""
        i = p.block + distance
        total = [[Float32(0.0)] * 4 for _ in range(2)]
        for d in range(distance):
            x = [[parts[d * 8 + part * 4 + n] for n in range(4)] for part in range(2)]
            l_block = load_parts(self.layout.l_block(p.base, i, p.block + d) + p.lane * 16)
            total = product_in_parts(x, l_block, total)
        zero = [[Float32(0.0)] * 4 for _ in range(2)]
        x_ii = load_parts(self.layout.inverse(p.base, i) + p.lane * 16)
        product = product_in_parts(fragment_in_parts(total), x_ii, zero)
        minus = [[-x for x in tile] for tile in product]
        heads, tails = fragment_in_parts(minus)
        for n, x in enumerate([*heads, *tails]):
            parts[distance * 8 + n] = x
        self.image.store(t_image, ptx.transpose_16x16(heads), i, p.block, p.lane, p.base)


def eliminate(start, column):
    """Replaces -L by (I + L)^-1, by forward substitution in fp32, one lane for each column.

    Both are a diagonal block by columns, `COLUMN` apart, from the shared address ``start`` on, of which only elements below the diagonal
    are read. A warp calls it, and sees all columns when it returns.
    """
    cute.arch.sync_warp()
    x = [ptx.select(column == i, Float32(1.0), Float32(0.0)) for i in range(BLOCK)]
    for i in range(BLOCK - 1):  # x[i] is final: add its part to all rows below
        first = (i + 1) // 4 * 4  # aligned to the 16 bytes of a load
        minus_l = []
        for at in range(first, BLOCK, 4):
            minus_l += ptx.load_shared_x4(start + i * COLUMN + at * 4, Float32)
        for row in range(i + 1, BLOCK):
            x[row] = ptx.fma(minus_l[row - first], x[i], x[row])
    cute.arch.sync_warp()
    for row in range(0, BLOCK, 4):
        ptx.store_shared_x4(start + column * COLUMN + row * 4, x[row : row + 4])
    cute.arch.sync_warp()


def product_in_parts(a, b, acc):
    """Returns a @ b^T + acc of 16x16 matrices in two parts, both as A fragments.

    An A fragment of b is a B fragment of b^T: registers 0 and 2 are its columns 0 to 7, 1 and 3 its columns 8 to 15.
    The product of the two tails is left out: it is at most 2^-18 of the product of the absolute values.
    """
    for i, j in ((0, 1), (1, 0), (0, 0)):
        acc = [ptx.mma_m16n8k16(a[i], [b[j][tile], b[j][tile + 2]], acc[tile]) for tile in range(2)]
    return acc
