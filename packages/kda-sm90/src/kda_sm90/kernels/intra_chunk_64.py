"""The intra-chunk stage of chunks of 64 tokens with bounded gates: two warpgroups per chunk and value head.

It is the stage of `kernels.intra_chunk` with twice as many warps. Differences:

- One warpgroup multiplies the rows k0 to k3, the other q0 to q3, with the columns of all blocks at the anchors of their own and all later
  blocks (160 columns)::

            c0   | c0   c1   | c0   c1   c2   | c0   c1   c2   c3        at the anchor of
      at    A_0  |    A_1    |      A_2       |         A_3
      k0    L00                                                          warp 0
      k1           L10  L11                                              warp 1
      k2                       L20  L21  L22                             warp 2
      k3                                        L30  L31  L32  L33       warp 3

- The warps of k invert L as in `kda_cute.device.intra_chunk.inverse`: each a diagonal block, then each a column of blocks.
- All threads store the record to global memory with ordinary stores. So there are no bulk copies, and shared memory holds no image of Kg, T
  and Aqk.
"""

from types import SimpleNamespace

import cutlass
from cutlass import Float32, cute

from kda_cute.device import ptx
from kda_cute.device.intra_chunk import Worker
from kda_cute.device.intra_chunk.blocks import Image, fragment, fragment_in_parts, store_parts
from kda_cute.device.intra_chunk.inverse import COLUMN, Inverse
from kda_cute.device.intra_chunk.strided import StridedInputs
from kda_cute.records import BLOCK
from kda_sm90.kernels.barriers import WARPGROUP
from kda_sm90.kernels.intra_chunk import Layout, Place, WarpgroupIntraChunk, first_column

PARTS_BYTES = 1024  # of a block in two bf16 parts


class SquaresLayout:
    """`kda_cute.device.intra_chunk.memory.Layout` as `Inverse` and `Image` use it, for a warp of `TwoWarpgroupIntraChunk`."""

    def __init__(self, layout: Layout, chunk: int, warp):
        self.layout, self.chunk, self.warp = layout, chunk, warp
        self.blocks = chunk // BLOCK

    def l_block(self, base, i, j):
        return base + self.layout.l_block + (i * (i - 1) // 2 + j) * PARTS_BYTES

    def inverse(self, base, block):
        return base + self.layout.minus_l + block * (BLOCK * COLUMN)

    def scratch(self, base, block):
        return base + self.layout.squares + self.warp * TwoWarpgroupIntraChunk.scratch


class TwoWarpgroupIntraChunk(WarpgroupIntraChunk):
    """The intra-chunk stage of one group; calls as in `WarpgroupIntraChunk`."""

    threads = 2 * WARPGROUP
    leader = 224  # in a warp of q, which inverts nothing
    has_images = False
    scratch = 512

    def rows_of_warpgroup(self, p: Place):
        return p.warp // 4 * self.image_bytes

    # ---- places of a record

    def kg_cell(self, p: Place, record):
        return self.cell(p, record("kg"))

    def store_kg_row(self, cell, r, words):
        self.store_row(cell, r, words)

    # ---- L, Aqk and T

    def squares(self, p: Place) -> SquaresLayout:
        """Returns where the warp stores blocks of L, T and Aqk."""
        return SquaresLayout(self.layout, self.chunk, p.warp)

    def block_of(self, p: Place):
        """Returns the thread's place as `Inverse` takes it: block w of warp w of k."""
        return SimpleNamespace(
            base=p.base, block=p.warp % 4, row=p.lane // 4, quad_lane=p.lane % 4, lane=p.lane
        )

    @cute.jit
    def store_blocks(self, p: Place, blocks, record):
        """Stores the blocks of L below the diagonal and the inverses of the diagonal blocks for `finish`, and those of Aqk to the record.
        ``blocks``: of `multiply`."""
        row = p.warp % 4
        diagonal = self.diagonal(row, blocks)
        for i in cutlass.range_constexpr(1, self.blocks):
            if row == i:
                below = blocks[first_column(i) : first_column(i) + i]
                if p.warp < self.blocks:
                    self.store_l(p, i, below)
                else:
                    self.store_aqk(p, i, below, record)
        if p.warp < self.blocks:
            self.invert_diagonal(p, diagonal, record)
        else:
            self.store_diagonal_aqk(p, diagonal, record)
            for j in cutlass.range_constexpr(1, self.blocks):
                if row < j:
                    self.clear_aqk(p, j, record)

    def diagonal(self, row, blocks):
        """Returns the block of the diagonal in the warp's rows."""
        found = blocks[0]
        for i in range(1, self.blocks):
            own = blocks[first_column(i) + i]
            found = [
                [ptx.select(row == i, y, z) for y, z in zip(*tiles, strict=True)]
                for tiles in zip(own, found, strict=True)
            ]
        return found

    def store_l(self, p: Place, i, blocks):
        """Stores blocks (i, 0) to (i, i - 1) of L."""
        for j, tiles in enumerate(blocks):
            store_parts(self.squares(p).l_block(p.base, i, j) + p.lane * 16, fragment_in_parts(tiles))

    def store_aqk(self, p: Place, i, blocks, record):
        """Stores the same blocks of Aqk."""
        image = Image(self.squares(p))
        for j, tiles in enumerate(blocks):
            image.store(record("aqk"), fragment(tiles), i, j, p.lane, p.base)

    def invert_diagonal(self, p: Place, tiles, record):
        """Inverts the warp's diagonal block of I + L."""
        Inverse(self.squares(p)).invert_diagonal(self.block_of(p), tiles, record("t"))

    def store_diagonal_aqk(self, p: Place, tiles, record):
        """Stores the warp's diagonal block of Aqk, which is 0 above the diagonal."""
        image, block = Image(self.squares(p)), p.warp % 4
        row, pair = p.lane // 4, 2 * (p.lane % 4)
        masked = [
            [
                ptx.select(row + 8 * (e // 2) >= 8 * tile + pair + e % 2, tiles[tile][e], Float32(0.0))
                for e in range(4)
            ]
            for tile in range(2)
        ]
        image.store(record("aqk"), fragment(masked), block, block, p.lane, p.base)

    def clear_aqk(self, p: Place, j, record):
        """Stores zeros to the block of Aqk in column j of the warp's rows, above the diagonal."""
        Image(self.squares(p)).clear(record("aqk"), p.warp % 4, j, p.lane)

    @cute.jit
    def finish(self, worker: Worker, record):
        """Computes the blocks of T below the diagonal. A barrier of the group must follow."""
        p = self.place(worker)
        if p.warp < self.blocks:
            self.assemble(p, record)

    def assemble(self, p: Place, record):
        """Computes the blocks of T below the diagonal in the warp's column of blocks."""
        Inverse(self.squares(p)).assemble(self.block_of(p), record("t"))


class StridedTwoWarpgroupIntraChunk(StridedInputs, TwoWarpgroupIntraChunk):
    """`TwoWarpgroupIntraChunk` over strided inputs."""
