"""Stage 3, columns: blocks of L and Aqk below the diagonal, and Kg."""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from kda_cute.device import ptx
from kda_cute.device.intra_chunk.blocks import Image, pack, split, store_parts
from kda_cute.device.intra_chunk.memory import (
    BLOCK_BYTES,
    GROUP_BYTES,
    TILE,
    Layout,
    Place,
    fragment_address,
    load_channels,
)
from kda_cute.device.intra_chunk.rows import RowImage
from kda_cute.records import BLOCK


class Columns:
    """Stage 3 of a group: one warp for each block, whose rows are now columns."""

    def __init__(self, layout: Layout):
        self.layout, self.blocks, self.image = layout, layout.blocks, Image(layout)

    @cute.jit
    def compute(self, thread: Int32, block: Int32, base: Int32, kg_image: Int64, aqk_image: Int64):
        """Multiplies the columns with the rows of each later block, and hops past that block's rows to the next anchor. At
        the end of the chunk the columns are Kg."""
        p = Place(self.layout, thread, block, base)
        columns = cute.make_rmem_tensor((64,), Float32)  # [4 groups m][2 rows][8 channels]
        first = p.beta + (block * BLOCK + p.row) * 4
        beta = [ptx.load_shared(first + 32 * half, Float32) for half in range(2)]
        for m in cutlass.range_constexpr(4):
            for half in cutlass.range_constexpr(2):
                for i, region in enumerate((p.k, p.q)):
                    place = fragment_address(region, block, p.lane, half, m)
                    for j, x in enumerate(ptx.load_shared_x4(place, Float32)):
                        columns[16 * m + 8 * half + 4 * i + j] = x * beta[half]
        for step in cutlass.range_constexpr(1, self.blocks):
            if block + step < self.blocks:
                self.multiply_block(p, columns, block + step, aqk_image)
        rows = RowImage(self.layout, p, kg_image)
        for m in cutlass.range_constexpr(4):
            for half in cutlass.range_constexpr(2):
                group = pack([columns[16 * m + 8 * half + c] for c in range(8)])
                ptx.store_global_x4(rows.address(m, half), group, keep=True)
        for i in cutlass.range(block, unroll=1):
            self.image.clear(aqk_image, i, block, p.lane)

    def multiply_block(self, p: Place, columns, target, aqk_image):
        """Computes block (``target``, the warp's block): L, in two bf16 parts, to shared memory for stage 4, Aqk to its
        image. Then the columns hop past the rows of ``target``."""
        l_acc, a_acc = ([[Float32(0.0)] * 4 for _ in range(2)] for _ in range(2))
        for m in range(4):
            place = p.exponents + target * BLOCK_BYTES + m * GROUP_BYTES + p.lane * 16
            for s in range(2):
                rows = [ptx.ldmatrix_x4(place + s * 512 + kind * TILE) for kind in range(2)]
                for half in range(2):
                    b = pack([columns[16 * m + 8 * half + 4 * s + i] for i in range(4)])
                    l_acc[half] = ptx.mma_m16n8k16(rows[0], b, l_acc[half])
                    a_acc[half] = ptx.mma_m16n8k16(rows[1], b, a_acc[half])
            hop = load_channels(p.hop_scale, target, m, p.quad)
            for half in range(2):
                for c in range(8):
                    columns[16 * m + 8 * half + c] = columns[16 * m + 8 * half + c] * hop[c]
        self.image.store(aqk_image, pack(a_acc[0] + a_acc[1]), target, p.block, p.lane, p.base)
        store_parts(self.layout.l_block(p.base, target, p.block) + p.lane * 16, split(l_acc))
