"""Columns of unbounded gates without split factors, in the intra-chunk stage of `kernels.intra_chunk`.

A row has a column factor 2^-X while X, which contains `OFFSET`, is above -`SPLIT_LIMIT`. If X is lower in some channel of a panel, the row
is *lost* in this panel: its column becomes 0 there, and `kda_cute.device.intra_chunk.refine` computes its products with the rows of its
block over the channels of the panel. Only gates up to the row decide whether it is lost, so later tokens do not change the rounding of
earlier ones.

The warp of a block and a panel refines the lost rows of both. It does so only if the whole block falls far enough (`SteepColumns.vote`).
"""

from types import SimpleNamespace

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from kda_cute.device import ptx
from kda_cute.device.intra_chunk.decay import SPLIT_LIMIT
from kda_cute.device.intra_chunk.refine import Refinement, element
from kda_cute.records import BLOCK

#: Added to X of unbounded gates, so that twice as steep a block has split factors. It cancels in every product.
OFFSET = 60.0

ROW = 128  # bytes of a row of k or q in a panel
EXPONENTS_ROW = 256  # bytes of X of a row over the channels of a panel
PITCH = 17 * 4  # bytes from a row of the refined products to the next
FLAG = BLOCK * PITCH  # offset of whether there are such products
BYTES = FLAG + 16  # of a warp


class PanelRefinement(Refinement):
    """`Refinement` of a block over a panel of 64 channels. ``p`` of its methods: `SteepColumns.place`."""

    slices = 2

    def exponents(self, p, m, row):
        start = ptx.select(row >= 8, p.exponents[1], p.exponents[0]) + row % 8 * EXPONENTS_ROW
        units = [start + ((8 * m + 2 * p.quad_lane + unit) ^ row % 8) * 16 for unit in range(2)]
        return [x for unit in units for x in ptx.load_shared_x4(unit, Float32)]

    def fragment(self, p, name, half, m):
        start = getattr(p, name) + (p.row + 8 * half) * ROW
        return ptx.load_shared_x4(start + ((4 * m + p.quad_lane) ^ p.row) * 16, Int32)


class SteepColumns:
    """The lost columns of a group. ``p`` of the methods: the `Place` of the calling thread in `kernels.intra_chunk`."""

    def __init__(self, layout):
        self.layout, self.refinement = layout, PanelRefinement()

    def vote(self, p, first, block_sum) -> Boolean:
        """Returns whether a row of the warp's block may be lost in its panel, and stores this for `with_refined`. A barrier must lie between.

        ``first``, ``block_sum``: log decays of the block's first row and of all its rows, of the lane's channels.
        """
        falls = [x - y for x, y in zip(first, block_sum, strict=True)]
        most = ptx.maximum(ptx.maximum(falls[0], falls[1]), ptx.maximum(falls[2], falls[3]))
        # An anchor is up to 0.5 above the first row. 1 also covers the rounding of the sums.
        steep = cute.arch.vote_any_sync(most >= Float32(OFFSET + SPLIT_LIMIT - 1.0))
        ptx.store_shared(self.products(p, p.warp) + FLAG, Int32(steep))
        return steep

    def products(self, p, warp):
        """Returns the address of the refined products of a warp: fp32 [16, 16], L below the diagonal, Aqk transposed on and above it."""
        return p.base + self.layout.refined + warp * BYTES

    def refine(self, p, kg, exponents):
        """Stores the refined products of the warp's block and panel.

        Args:
            kg: shared address of the panel's image of Kg. It and the columns hold X meanwhile, where only this warp writes.
            exponents: X [8 rows][4 channels] of the lane.

        Returns:
            The exponents again, and the lost ones of the lane's 8 rows: bit 4r of row r.
        """
        place = self.place(p, kg)
        own = ptx.select(p.half > 0, place.exponents[1], place.exponents[0])
        cells = [own + r * EXPONENTS_ROW + (p.quad_of_channels ^ r) * 16 for r in range(8)]
        for cell, x in zip(cells, exponents, strict=True):
            ptx.store_shared_x4(cell, x)
        cute.arch.sync_warp()
        products, falls = (cute.make_rmem_tensor((n,), Float32) for n in (16, 2))
        products.fill(0.0)
        falls.fill(0.0)
        self.refinement.refine(place, products, falls)
        lost = [cute.arch.vote_ballot_sync(falls[half] >= Float32(SPLIT_LIMIT)) for half in range(2)]
        self.store_products(p, place, products, lost)
        exponents = [ptx.load_shared_x4(cell, Float32) for cell in cells]
        cute.arch.sync_warp()  # operands overwrite k, q and the exponents
        return exponents, ptx.select(p.half > 0, Int32(lost[1]), Int32(lost[0]))

    def place(self, p, kg):
        """Returns the thread's place in the fragments of `Refinement`, and the addresses of its operands."""
        rows = p.block * (BLOCK * ROW)
        columns = p.panel + self.layout.columns
        # Block 0: the columns c0 and c0 hopped. Block 1: c1, and its rows of Kg.
        low = columns + p.block * (2 * BLOCK * ROW)
        high = ptx.select(p.block > 0, kg + BLOCK * ROW, columns + BLOCK * ROW)
        return SimpleNamespace(
            row=p.lane // 4, quad_lane=p.lane % 4, k=p.panel + rows, q=p.panel + self.layout.q + rows,
            exponents=(low, high),
        )  # fmt: skip

    def store_products(self, p, place, products, lost):
        """Stores the refined products times the scales of their rows and columns, 0 in columns that are not lost."""
        scales = p.base + self.layout.scales + p.warp * 256
        of_row = [
            [ptx.load_shared(scales + at + (place.row + 8 * half) * 4, Float32) for half in range(2)]
            for at in (0, 64)
        ]
        start = self.products(p, p.warp)
        for tile in range(2):
            for e in range(2):
                in_tile = 2 * place.quad_lane + e
                is_lost = (Int32(lost[tile]) >> (4 * in_tile)) & 1 > 0
                column = 8 * tile + in_tile
                factor = ptx.load_shared(scales + 128 + column * 4, Float32)
                factor = ptx.select(is_lost, factor, Float32(0.0))
                for half in range(2):
                    row = place.row + 8 * half
                    l, aqk = (
                        products[element(kind, tile, half, e)] * of_row[kind][half] * factor
                        for kind in range(2)
                    )
                    ptx.store_shared_if(start + row * PITCH + column * 4, l, row > column)
                    ptx.store_shared_if(start + column * PITCH + row * 4, aqk, row >= column)

    @cute.jit
    def with_refined(self, p, diagonal: list):
        """Returns the diagonal block of the calling warp, two accumulator tiles of L (warps 0 and 1) or Aqk, plus the refined products of
        both panels."""
        total = cute.make_rmem_tensor((8,), Float32)
        for i in cutlass.range_constexpr(8):
            total[i] = diagonal[i // 4][i % 4]
        is_l = p.warp < 2
        for panel in cutlass.range_constexpr(2):
            start = self.products(p, p.warp % 2 * 2 + panel)
            if ptx.load_shared(start + FLAG, Int32) > 0:
                for i in cutlass.range_constexpr(8):
                    row = p.lane // 4 + 8 * (i % 4 // 2)
                    column = 8 * (i // 4) + 2 * (p.lane % 4) + i % 2
                    at = ptx.select(is_l, row * PITCH + column * 4, column * PITCH + row * 4)
                    x = ptx.load_shared(start + at, Float32)
                    total[i] = total[i] + ptx.select(
                        (is_l & (row > column)) | ((is_l == False) & (row >= column)), x, Float32(0.0)
                    )
        return [[total[4 * tile + i] for i in range(4)] for tile in range(2)]
