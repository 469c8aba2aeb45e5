"""The intra-chunk stage with T multiplied into Kg and Aqk: *folded* records.

With X = v - Kd S, the chain of other records computes R = T X, then O = Qd S + Aqk R and S' = a S + Kg^T R. A folded record holds

    Kg~ = T^T Kg        Aqk~ = Aqk T

in the places of Kg and Aqk, so O = Qd S + Aqk~ X and S' = a S + Kg~^T X: the chain needs neither T nor the product R.

Stage 4 has one more step. The warp that has computed the blocks of T in column b multiplies them:

    Kg~_b   = sum_{i >= b} T_ib^T Kg_i
    Aqk~_ib = sum_{b <= l <= i} Aqk_il T_lb

Its accumulators of T^T are A operands of the first product, and B operands of the second one. Kg and Aqk of all blocks, rounded to bf16,
lie in shared memory, where stage 3 has put them.
"""

import cutlass
from cutlass import Float32, Int32, Int64, cute

from kda_cute.device import ptx
from kda_cute.device.intra_chunk import IntraChunk, Worker
from kda_cute.device.intra_chunk.blocks import fragment, pack
from kda_cute.device.intra_chunk.columns import Columns
from kda_cute.device.intra_chunk.inverse import Inverse
from kda_cute.device.intra_chunk.memory import FRAGMENT_BYTES, TILE, Layout, Place, fragment_address
from kda_cute.device.intra_chunk.rows import RowImage
from kda_cute.device.intra_chunk.strided import StridedInputs
from kda_cute.records import IntraChunkConfig


class NoImage:
    """Takes the blocks of a T that no record holds."""

    def store(self, image, fragment, i, j, lane, base):
        pass

    def clear(self, image, i, j, lane):
        pass


class KeptColumns(Columns):
    """`Columns` that leaves Kg and Aqk in shared memory.

    ======= =============== ====================================================================================================
    operand region          layout
    ======= =============== ====================================================================================================
    Kg      q, by blocks    8x8 matrices [4 slices m][2 halves][4 tiles] of 128 bytes. Column n of tile t is channel
                            ``8 * (n // 2) + 2t + n % 2`` of the slice, so a lane stores and gets eight neighbouring channels.
    Aqk     k, by columns   A fragments of 512 bytes, behind the inverse of the diagonal block: `aqk_address`
    ======= =============== ====================================================================================================
    """

    def store_kg(self, p: Place, columns, kg_image):
        cute.arch.sync_warp()  # all lanes have loaded the columns that lay here
        for m in range(4):
            for half in range(2):
                kg = pack([columns[16 * m + 8 * half + c] for c in range(8)])
                ptx.stmatrix_x4(self.kg_address(p, p.block, m, half), kg)

    def store_aqk(self, p: Place, tiles, distance, aqk_image):
        ptx.store_shared_x4(self.aqk_address(p, p.block, distance), fragment(tiles))

    def kg_address(self, p: Place, block, m, half):
        """Returns the address that the lane passes to an stmatrix or ldmatrix of four tiles of Kg."""
        return fragment_address(p.q, block, p.lane, half, m)

    def aqk_address(self, p: Place, column, distance):
        """Returns the address of the lane's 16 bytes of the block of Aqk at ``distance`` below the diagonal."""
        # The column of a diagonal block is 1280 bytes long while it is inverted; 2048 to 2560 are scratch.
        at = 1536 if distance == 0 else 2 * TILE + 512 * distance
        return p.k + column * FRAGMENT_BYTES + at + p.lane * 16


class Fold:
    """The products of a warp with its column of blocks of T."""

    def __init__(self, layout: Layout, columns: KeptColumns):
        self.layout, self.blocks, self.columns = layout, layout.blocks, columns

    @cute.jit
    def multiply(self, p: Place, parts, kg_image: Int64, aqk_image: Int64):
        """Stores Kg~ of the warp's block of tokens, and Aqk~ of its column of blocks. ``parts``: what `Inverse.assemble` returned."""
        kg = cute.make_rmem_tensor((64,), Float32)  # [4 slices m][4 tiles][4]
        kg.fill(0.0)
        for distance in cutlass.range_constexpr(self.blocks):
            if p.block + distance < self.blocks:
                self.add_kg(p, kg, parts, distance)
        rows = RowImage(self.layout, p, kg_image)
        for m in cutlass.range_constexpr(4):
            for half in cutlass.range_constexpr(2):
                words = pack([kg[16 * m + 4 * t + 2 * half + e] for t in range(4) for e in range(2)])
                ptx.store_global_x4(rows.address(m, half), words, keep=True)
        for distance in cutlass.range_constexpr(self.blocks):
            if p.block + distance < self.blocks:
                self.multiply_aqk(p, parts, distance, aqk_image)

    def transposed(self, parts, distance):
        """Returns the A fragment of the transposed block of T at ``distance`` below the diagonal, rounded to bf16."""
        return [parts[8 * distance + n] for n in range(4)]

    def add_kg(self, p: Place, kg, parts, distance):
        """Adds T_ib^T Kg_i, i at ``distance`` below the warp's block b."""
        a = self.transposed(parts, distance)
        for m in range(4):
            low, high = (
                ptx.ldmatrix_x4(self.columns.kg_address(p, p.block + distance, m, half), transpose=True)
                for half in range(2)
            )
            for t in range(4):
                start = 16 * m + 4 * t
                acc = ptx.mma_m16n8k16(a, [low[t], high[t]], [kg[start + i] for i in range(4)])
                for i, x in enumerate(acc):
                    kg[start + i] = x

    def multiply_aqk(self, p: Place, parts, distance, aqk_image):
        """Stores the block of Aqk~ at ``distance`` below the diagonal."""
        total = [[Float32(0.0)] * 4 for _ in range(2)]
        for d in range(distance + 1):
            a = ptx.load_shared_x4(self.columns.aqk_address(p, p.block + d, distance - d), Int32)
            x = self.transposed(parts, d)  # as a B fragment, that of the block itself
            total = [ptx.mma_m16n8k16(a, [x[tile], x[tile + 2]], total[tile]) for tile in range(2)]
        Columns.store_aqk(self.columns, p, total, distance, aqk_image)


class FoldedIntraChunk(IntraChunk):
    """`IntraChunk` that writes folded records.

    ``keeps_inverse``: whether the record also holds T.
    """

    requests_q = False  # Kg lies in the region of q until `finish` has multiplied it

    def __init__(self, config: IntraChunkConfig, keeps_inverse: bool):
        super().__init__(config)
        self.columns = KeptColumns(self.layout)
        self.inverse = Inverse(self.layout, None if keeps_inverse else NoImage())
        self.fold = Fold(self.layout, self.columns)

    @cute.jit
    def finish(self, worker: Worker, record):
        """Computes stage 4 of the chunk. A barrier of the group must follow before the next `compute`."""
        p = self.place(worker)
        parts = self.inverse.assemble(p, record("t"))
        self.fold.multiply(p, parts, record("kg"), record("aqk"))


class StridedFoldedIntraChunk(StridedInputs, FoldedIntraChunk):
    """`FoldedIntraChunk` over strided inputs."""
