"""T = (I + L)^-1: diagonal blocks in stage 3, blocks below the diagonal in stage 4."""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from kda_cute.device import ptx
from kda_cute.device.intra_chunk.blocks import Image, load_parts, split, store_parts
from kda_cute.device.intra_chunk.memory import Layout, Place
from kda_cute.records import BLOCK


class Inverse:
    """One warp for each column of blocks."""

    def __init__(self, layout: Layout):
        self.layout, self.blocks, self.image = layout, layout.blocks, Image(layout)

    def invert_diagonal(self, p: Place, l_acc, t_image):
        """Inverts the warp's diagonal block of I + L by forward substitution in fp32, one lane for each column (both halves
        of the warp do the same). Stores the result in two bf16 parts to shared memory, and rounded to the image of T."""
        place = self.layout.inverse(p.base, p.block)
        for half in range(2):
            row = p.row + 8 * half
            for tile in range(2):
                for e in range(2):
                    column = 8 * tile + 2 * p.quad + e
                    ptx.store_shared(place + (column * 16 + row) * 4, -l_acc[tile][2 * half + e])
        cute.arch.sync_warp()
        column = p.lane % 16  # computed again: registers are scarce between stage 1 and here
        x = [ptx.select(column == i, Float32(1.0), Float32(0.0)) for i in range(BLOCK)]
        for i in range(BLOCK - 1):
            start = (i + 1) // 4 * 4
            minus_l = []
            for at in range(start, BLOCK, 4):
                minus_l += ptx.load_shared_x4(place + (i * 16 + at) * 4, Float32)
            for row in range(i + 1, BLOCK):
                x[row] = ptx.fma(minus_l[row - start], x[i], x[row])
        cute.arch.sync_warp()
        for row in range(BLOCK):
            ptx.store_shared(place + (row * 16 + column) * 4, x[row])
        cute.arch.sync_warp()
        # To fragment order, in two bf16 parts.
        values = []
        for i in range(4):
            at = (p.row + 8 * (i % 2)) * 16 + 2 * p.quad + 8 * (i // 2)
            values.append(ptx.load_shared_x2(place + at * 4, Float32))
        cute.arch.sync_warp()
        heads, tails = zip(*(ptx.split_bf16x2(*pair) for pair in values), strict=True)
        store_parts(place + p.lane * 16, (heads, tails))
        self.image.store(t_image, heads, p.block, p.block, p.lane, p.base)

    @cute.jit
    def assemble(self, thread: Int32, block: Int32, base: Int32, t_image: Int64):
        """Computes the blocks of T below the warp's diagonal block by forward substitution in blocks, top down:
        X_ij = -X_ii sum_{j <= k < i} L_ik X_kj. All blocks are transposed, so that an accumulator is the next product's A
        operand."""
        p = Place(self.layout, thread, block, base)
        parts = self.load_diagonal(p)
        for i in cutlass.range(block, unroll=1):
            self.image.clear(t_image, i, block, p.lane)
        for step in cutlass.range_constexpr(1, self.blocks):
            if block + step < self.blocks:
                self.assemble_block(p, parts, step, t_image)

    def load_diagonal(self, p: Place):
        """Returns a register tensor of bf16x2 [blocks][2 parts][4], the transposed blocks of T of the warp's column from the
        diagonal one on. That one is filled, the others are zeros."""
        parts = cute.make_rmem_tensor((self.blocks * 8,), Int32)
        parts.fill(0)
        for part, fragment in enumerate(load_parts(self.layout.inverse(p.base, p.block) + p.lane * 16)):
            for i, pair in enumerate(ptx.transpose_16x16(fragment)):
                parts[part * 4 + i] = pair
        return parts

    def assemble_block(self, p: Place, parts, step, t_image):
        """Computes block (block + step, block) from those above it."""
        i = p.block + step
        total = [[Float32(0.0)] * 4 for _ in range(2)]
        for d in range(step):
            x = [[parts[d * 8 + part * 4 + n] for n in range(4)] for part in range(2)]
            l_block = load_parts(self.layout.l_block(p.base, i, p.block + d) + p.lane * 16)
            total = self.exact_product(x, l_block, total)
        zero = [[Float32(0.0)] * 4 for _ in range(2)]
        x_ii = load_parts(self.layout.inverse(p.base, i) + p.lane * 16)
        product = self.exact_product(split(total), x_ii, zero)
        minus = [[-x for x in tile] for tile in product]
        heads, tails = split(minus)
        for n, x in enumerate(heads + tails):
            parts[step * 8 + n] = x
        self.image.store(t_image, ptx.transpose_16x16(heads), i, p.block, p.lane, p.base)

    def exact_product(self, a, b, acc):
        """Returns a @ b^T + acc of 16x16 matrices in two bf16 parts (A fragments both): three products, which count 16 bits
        of each factor."""
        for i, j in ((0, 1), (1, 0), (0, 0)):
            acc = [ptx.mma_m16n8k16(a[i], [b[j][tile], b[j][tile + 2]], acc[tile]) for tile in range(2)]
        return acc
