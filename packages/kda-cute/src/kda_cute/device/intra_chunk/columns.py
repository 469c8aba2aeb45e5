"""Stage 3, columns: blocks of L and Aqk below the diagonal, and Kg.

Stage 2 left the columns of block b at the anchor of block b + 1: k_j 2^(A_{b+1} - G_j). So the columns of the last block are Kg
already, but for beta. The warp of block b works through the later blocks i:

    L_ib   = (rows of i: k 2^(G - A_i))         @ (beta columns at A_i)^T     to shared memory, for stage 4
    Aqk_ib = (rows of i: scale q 2^(G - A_i))   @ (beta columns at A_i)^T     to the record
    columns *= 2^hop_i                                                        now at A_{i+1}, at last at G_end: Kg
"""

import cutlass
from cutlass import Float32, Int64, cute

from kda_cute.device import ptx
from kda_cute.device.intra_chunk.blocks import Image, fragment, fragment_in_parts, pack, store_parts
from kda_cute.device.intra_chunk.memory import (
    BLOCK_BYTES,
    SLICE_BYTES,
    TILE,
    Layout,
    Place,
    fragment_address,
    load_channels,
)
from kda_cute.device.intra_chunk.rows import RowImage
from kda_cute.records import BLOCK


class Columns:
    """Stage 3 of a group: one warp for each block, whose rows are now columns of L and Aqk."""

    def __init__(self, layout: Layout):
        self.layout, self.blocks, self.image = layout, layout.blocks, Image(layout)

    @cute.jit
    def compute(self, p: Place, kg_image: Int64, aqk_image: Int64):
        """Computes the blocks of L and Aqk in the warp's column of blocks, and Kg. Blocks of Aqk above the diagonal become 0."""
        columns = cute.make_rmem_tensor((64,), Float32)  # [4 slices m][2 halves][2 steps][4 channels]
        first = p.beta + (p.block * BLOCK + p.row) * 4
        beta = [ptx.load_shared(first + 32 * half, Float32) for half in range(2)]
        for m in cutlass.range_constexpr(4):
            for half in cutlass.range_constexpr(2):
                for step, region in enumerate((p.k, p.q)):
                    address = fragment_address(region, p.block, p.lane, half, m)
                    for c, x in enumerate(ptx.load_shared_x4(address, Float32)):
                        columns[16 * m + 8 * half + 4 * step + c] = x * beta[half]
        for distance in cutlass.range_constexpr(1, self.blocks):
            if p.block + distance < self.blocks:
                self.multiply_block(p, columns, distance, aqk_image)
        self.store_kg(p, columns, kg_image)
        for i in cutlass.range(p.block, unroll=1):
            self.image.clear(aqk_image, i, p.block, p.lane)

    def store_kg(self, p: Place, columns, kg_image):
        """Stores the warp's rows of Kg. ``columns``: of `compute`, at the end of the chunk."""
        rows = RowImage(self.layout, p, kg_image)
        for m in range(4):
            for half in range(2):
                kg = pack([columns[16 * m + 8 * half + c] for c in range(8)])
                ptx.store_global_x4(rows.address(m, half), kg, keep=True)

    def store_aqk(self, p: Place, tiles, distance, aqk_image):
        """Stores the block of Aqk at ``distance`` below the diagonal, two accumulator tiles."""
        self.image.store(aqk_image, fragment(tiles), p.block + distance, p.block, p.lane, p.base)

    def multiply_block(self, p: Place, columns, distance, aqk_image):
        """Computes the blocks of L and Aqk at ``distance`` below the diagonal, and moves the columns by the hop of these rows.

        A B fragment has one row of the columns for each quad, so that the thread's row ``half`` belongs to tile ``half`` of
        the product.
        """
        target = p.block + distance
        l_acc, a_acc = ([[Float32(0.0)] * 4 for _ in range(2)] for _ in range(2))
        for m in range(4):
            start = p.exponents + target * BLOCK_BYTES + m * SLICE_BYTES + p.lane * 16
            for step in range(2):
                # The fragments that the warp of `target` stored in stage 2, with the same addresses.
                k_row, q_row = (ptx.ldmatrix_x4(start + step * 512 + kind * TILE) for kind in range(2))
                for half in range(2):
                    b = pack([columns[16 * m + 8 * half + 4 * step + c] for c in range(4)])
                    l_acc[half] = ptx.mma_m16n8k16(k_row, b, l_acc[half])
                    a_acc[half] = ptx.mma_m16n8k16(q_row, b, a_acc[half])
            hop = load_channels(p.hop_scale, target, m, p.quad_lane)
            for half in range(2):
                for c in range(8):
                    columns[16 * m + 8 * half + c] = columns[16 * m + 8 * half + c] * hop[c]
        self.store_aqk(p, a_acc, distance, aqk_image)
        store_parts(self.layout.l_block(p.base, target, p.block) + p.lane * 16, fragment_in_parts(l_acc))
