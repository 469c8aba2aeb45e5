"""Columns of unbounded gates without split factors, in the intra-chunk stage of `kernels.intra_chunk`.

A row has a column factor 2^-X while X, which contains `OFFSET`, is above -`LIMIT`. If X is lower in one of a lane's four channels (a *quad*), the
row is *lost* in this quad: its column becomes 0 there, and this module computes its products with the rows of its block, by the halves of
`kda_cute.device.intra_chunk.refine`. Only gates up to the row decide whether it is lost, so later tokens do not change the rounding of earlier ones.

The warp of a block and a panel refines the lost rows of both. It gathers the quads of lost rows, so that one MMA multiplies four of them. It does
so for columns 0 to 7 and for columns 8 to 15 apart, because steep channels lose their last rows first.
"""

import math
from types import SimpleNamespace

import cutlass
from cutlass import Boolean, Float32, Int32, cute

from kda_cute.device import ptx
from kda_cute.device.intra_chunk.blocks import pack
from kda_cute.device.intra_chunk.refine import accumulator, element, select_products
from kda_cute.records import BLOCK

#: Added to X of unbounded gates, so that steeper blocks have split factors. It cancels in every product. Operands of rows contain 2^`OFFSET`.
#: Decays below 2^-32 may become 0 in Kd, Qd and Kg.
OFFSET = 94.0

#: A column factor is at most 2^`LIMIT`. A row factor below 2^-126 is 0, and its product with a column factor would be below 2^-30.
LIMIT = 96.0

LEAST_POWER = -126.0  # binary logarithm of the least power of two that is not 0 as a factor
UPPER_LANES = 0xFFFF  # those of rows 0 to 7

ROW = 128  # bytes of a row of k or q in a panel
EXPONENTS_ROW = 256  # bytes of X of a row over the channels of a panel
PITCH = 18 * 4  # bytes from a row of the refined products to the next
FLAG = BLOCK * PITCH  # offset of the flag of the refined products
BYTES = FLAG + 16  # of a warp


class SteepColumns:
    """The lost columns of a group. ``p`` of the methods: the `Place` of the calling thread in `kernels.intra_chunk`."""

    def __init__(self, layout, blocks: int, folded: bool):
        self.layout, self.blocks, self.folded = layout, blocks, folded

    def last_shift(self, to_end):
        """Returns [4]: `Anchors.next_anchor` of the last block. ``to_end``: X of the chunk's last row.

        Without folded records this is the end of the chunk. With them, Kg is the columns at the last anchor, and `complete` multiplies Kg by
        2^(to_end - result). So the result is 0, except in a channel whose last row is lost: there 2^-X may be infinite, and the columns of the
        last block decay to the end of the chunk instead. The columns of earlier blocks are then below 2^-94.
        """
        if not self.folded:
            return to_end
        return [ptx.select(y <= Float32(-LIMIT), y, Float32(0.0)) for y in to_end]

    def vote(self, p, lowest, next_anchor) -> tuple[Int32, Boolean]:
        """Returns which lanes have lost rows, a bit for each, and whether the panel of the warp's block is steep. It is steep if a row is lost, or
        if the power of two between its anchor and the next one is below 2^-126. Kg and the columns at the next anchor then need exponentials of
        their own. Stores the flag for `with_refined`; a barrier must lie between.

        ``lowest``: X of the lane's last row. ``next_anchor``: of `Anchors`.
        """
        lost = Int32(cute.arch.vote_ballot_sync(-minimum(lowest) >= Float32(LIMIT)))
        # `last_shift` and ``lowest`` add the same decays in different orders. So the last block of folded records also votes by `last_shift`.
        of_last = -LIMIT / 2 if self.folded else -math.inf
        least = ptx.select(p.block < self.blocks - 1, Float32(LEAST_POWER), Float32(of_last))
        far = cute.arch.vote_any_sync(minimum(next_anchor) < least)
        flag = Int32((lost >> 16) & UPPER_LANES != 0) + 2 * Int32((lost & UPPER_LANES) != 0)
        self.store_flag(p, flag)
        return lost, (lost != 0) | far

    def store_flag(self, p, flag):
        """Stores the flag of the warp for `with_refined`."""
        ptx.store_shared(self.products(p, p.warp) + FLAG, flag)

    def without_lost(self, exponents, words):
        """Returns the words of a quad of a row, 0 if the row is lost there. ``exponents``: X of the quad."""
        is_lost = minimum(exponents) <= Float32(-LIMIT)
        return [ptx.select(is_lost, Int32(0), y) for y in words]

    def products(self, p, warp):
        """Returns the address of the refined products of a warp, fp32 [16, 18]. Row i has those of -L in the columns before i, and after
        them those of row 15 - i of Aqk. Behind them is the flag: 1 if columns 8 to 15 are refined, plus 2 if columns 0 to 7 are."""
        return p.base + self.layout.refined + warp * BYTES

    def refine(self, p, spare, exponents, lanes: Int32):
        """Stores the refined products of the warp's block and panel, and returns the exponents again.

        Args:
            spare: shared address where the warp of the panel's last block may store X of eight rows. Other rows are stored where the warp's
                columns will lie.
            exponents: X [8 rows][4 channels] of the lane.
            lanes: those with lost rows, of `vote`.
        """
        place = self.place(p, spare)
        own = ptx.select(p.half > 0, place.exponents[1], place.exponents[0]) + p.quad_of_channels * 16
        for r in range(8):
            ptx.store_shared_x4(exponents_cell(own, r), exponents[r])
        counts, quads = self.gather(p, lanes)
        for half in (1, 0):
            self.refine_columns(p, place, counts[half], quads, half)
        own = ptx.opaque(own)  # the addresses would occupy registers
        exponents = [ptx.load_shared_x4(exponents_cell(own, r), Float32) for r in range(8)]
        cute.arch.sync_warp()  # operands overwrite k, q and the exponents
        return exponents

    def gather(self, p, lanes):
        """Returns, for both halves of the rows, the number of quads with lost rows, and in lane ``16*half + i`` the i-th quad of a half; the others
        follow those with lost rows."""
        halves = [lanes & UPPER_LANES, (lanes >> 16) & UPPER_LANES]
        counts = [cute.arch.popc(y) for y in halves]
        own, count = (ptx.select(p.half > 0, y[1], y[0]) for y in (halves, counts))
        before = cute.arch.popc(own & ((Int32(1) << p.quad_of_channels) - 1))
        is_lost = (own >> p.quad_of_channels) & 1 > 0
        rank = ptx.select(is_lost, before, count + p.quad_of_channels - before)
        table = self.products(p, p.warp)  # which has no products yet
        ptx.store_shared(table + (p.half * 16 + rank) * 4, p.quad_of_channels)
        cute.arch.sync_warp()
        quads = ptx.load_shared(table + p.lane * 4, Int32)
        cute.arch.sync_warp()
        return counts, quads

    def place(self, p, spare):
        """Returns the thread's place in the fragments of an MMA, and the addresses of its operands. ``spare``: of `refine`."""
        rows = p.block * (BLOCK * ROW)
        columns = p.panel + self.layout.columns
        # The columns of the warp's block at its own anchor, and at the next one.
        low = columns + p.block * (p.block + 3) // 2 * (BLOCK * ROW)
        high = columns + ((p.block + 1) * (p.block + 2) // 2 + p.block) * (BLOCK * ROW)
        high = ptx.select(p.block < self.blocks - 1, high, spare)
        return SimpleNamespace(
            row=p.lane // 4, quad_lane=p.lane % 4, k=p.panel + rows, q=p.panel + self.layout.q + rows,
            exponents=(low, high),
        )  # fmt: skip

    @cute.jit
    def refine_columns(self, p, place, count: Int32, quads: Int32, half: cutlass.Constexpr[int]):
        """Stores the refined products of the columns ``8*half`` to ``8*half + 7``, if any is lost. ``count``, ``quads``: of `gather`."""
        if count > 0:
            acc, products = (cute.make_rmem_tensor((n,), Float32) for n in (36, 16))
            acc.fill(0.0)
            products.fill(0.0)
            for step in range((count + 3) // 4):
                quad = cute.arch.shuffle_sync(quads, 16 * half + 4 * step + place.quad_lane)
                self.add_quads(place, acc, quad, half)
            select_products(place, acc, products, (half,))
            self.store_products(p, place, products, half)

    def add_quads(self, place, acc, quad, half):
        """Adds the products of four quads to the accumulators. ``quad``: that of the thread's channels."""

        # The first row of every array is a multiple of 256 bytes, so the XOR of the swizzle may apply to a whole address.
        def exponents(row, half):
            start = place.exponents[half] + row * (EXPONENTS_ROW + 16)
            return ptx.load_shared_x4(start ^ (quad * 16), Float32)

        def words(region, half):
            start = (region + place.row * (ROW + 16)) ^ (quad * 8)
            return ptx.load_shared_x2(start + 8 * half * ROW, Int32)

        def decay(x, y):
            """Returns 2^-|x - y|."""
            return pack([ptx.ex2(-ptx.absolute(a - b)) for a, b in zip(x, y, strict=True)])

        def decayed(x, factors):
            return [ptx.mul_bf16x2(pair, factor) for pair, factor in zip(x, factors, strict=True)]

        def add(size, k, q, columns):
            """Adds (rows of k, rows of q) @ columns^T."""
            at = accumulator(size, half)
            a = [k[0], q[0], k[1], q[1]]
            for i, x in enumerate(ptx.mma_m16n8k16(a, columns, [acc[at + i] for i in range(4)])):
                acc[at + i] = x

        x, k, q = exponents(place.row, half), words(place.k, half), words(place.q, half)
        is_lost = minimum(x) <= Float32(-LIMIT)
        columns = [ptx.select(is_lost, y, Int32(0)) for y in k]  # the others have split factors
        if half == 0:
            anchor = exponents(Int32(0), 1)
            factors = decay(exponents(place.row, 1), anchor)
            rows = [decayed(words(region, 1), factors) for region in (place.k, place.q)]
            add(8, *rows, decayed(columns, decay(x, anchor)))
        for size in (4, 2):
            factors = decay(x, exponents((place.row | size) & -size, half))
            add(size, *(decayed(y, factors) for y in (k, q, columns)))
        # Size 1: the row is the anchor itself, an odd row, so that only columns decay. Size 0: nothing decays.
        add(1, k, q, decayed(columns, decay(x, exponents(place.row | 1, half))))
        add(0, k, q, columns)

    def cell(self, row, pair, kind):
        """Returns the offset of the products of a row, at most 7, with columns ``pair`` and ``pair + 1``, and the distance to those of the
        row 8 below. ``kind``: 0 is L, 1 is Aqk."""
        if kind == 0:
            return row * PITCH + pair * 4, 8 * PITCH
        # Aqk begins at an even column, behind the pair that ends L's.
        return (15 - row) * PITCH + (16 - row + (row & 1) + pair) * 4, -8 * (PITCH + 4)

    def store_products(self, p, place, products, tile):
        """Stores the refined products of a tile of columns times the scales of their rows and columns."""
        scales, pair = p.base + self.layout.scales + p.warp * 256, 2 * place.quad_lane
        halves = range(tile, 2)
        of_column = ptx.load_shared_x2(scales + 128 + (8 * tile + pair) * 4, Float32)
        for kind in range(2):
            start, step = self.cell(place.row, pair, kind)
            start += self.products(p, p.warp) + 32 * tile
            for half in halves:
                of_row = ptx.load_shared(scales + 64 * kind + (place.row + 8 * half) * 4, Float32)
                values = [products[element(kind, tile, half, e)] * (of_row * of_column[e]) for e in range(2)]
                # Of a diagonal tile, pairs that are above the diagonal have no place.
                below = place.row + kind > pair if half == tile else Boolean(True)
                ptx.store_shared_x2_if(start + step * half, values, below)

    @cute.jit
    def with_refined(self, p, diagonal: list):
        """Returns the diagonal block of the calling warp, two accumulator tiles of -L (the first half of the warps) or Aqk, plus the refined products
        of both panels. Elements that `finish` or `causal` ignore are meaningless."""
        total = cute.make_rmem_tensor((8,), Float32)
        for i in cutlass.range_constexpr(8):
            total[i] = diagonal[i // 4][i % 4]
        row, pair, is_l = p.lane // 4, 2 * (p.lane % 4), p.warp < self.blocks
        (start, step), of_aqk = self.cell(row, pair, 0), self.cell(row, pair, 1)
        start, step = ptx.select(is_l, start, of_aqk[0]), ptx.select(is_l, Int32(step), Int32(of_aqk[1]))
        below = row + ptx.select(is_l, Int32(0), Int32(1)) > pair
        for panel in cutlass.range_constexpr(2):
            products = self.products(p, p.warp % self.blocks * 2 + panel)
            flag = ptx.load_shared(products + FLAG, Int32)
            if flag & 1 > 0:
                self.add(total, products + start + step + 32, 3, below)
            if flag & 2 > 0:
                self.add(total, products + start, 0, below)
                self.add(total, products + start + step, 1, Boolean(True))
        return [[total[4 * tile + i] for i in range(4)] for tile in range(2)]

    @cute.jit
    def add(self, total: cute.Tensor, address, half_tile: cutlass.Constexpr[int], condition: Boolean):
        """Adds the pair of products at an address to half a tile of ``total`` if ``condition``."""
        if condition:
            for e, x in enumerate(ptx.load_shared_x2(address, Float32)):
                total[2 * half_tile + e] = total[2 * half_tile + e] + x


def exponents_cell(cell, r):
    """Returns the address of X of the lane's row r, from that of row 0."""
    return (cell ^ (r * 16)) + r * EXPONENTS_ROW


def minimum(values):
    """Returns the minimum of four values."""
    return ptx.minimum(ptx.minimum(values[0], values[1]), ptx.minimum(values[2], values[3]))
