"""The intra-chunk stage of chunks of 64 tokens: two warpgroups per chunk and value head.

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
- Records are folded (`kda_cute.device.intra_chunk.fold`): Kg~ = T^T Kg and Aqk~ = Aqk T replace Kg and Aqk. The columns at the last anchor
  are Kg but for 2^(G_end - A_3), which scales the rows of Kg~^T = Kg^T T. So Kg itself is not computed. With unbounded gates the last block
  is stored twice: rows that are lost (`kernels.steep`) are 0 as columns, but not in Kg. `complete` has the order::

    all warps        wgmma: each warpgroup a panel of Kg~^T
    warps of q       wgmma: Aqk~ -> shared memory, in the place of L
    |
    all warps        Kg~ -> shared memory, in the place of the columns
    |
    leader           Kg~, Aqk~ (and T, if the record holds it) -> record, by bulk copies
"""

from types import SimpleNamespace

import cutlass
from cutlass import BFloat16, Float32, Int32, const_expr, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from kda_cute.device import ptx
from kda_cute.device.intra_chunk import Worker
from kda_cute.device.intra_chunk.blocks import fragment, fragment_in_parts, pack, store_parts
from kda_cute.device.intra_chunk.inverse import COLUMN, Inverse
from kda_cute.device.intra_chunk.strided import StridedInputs
from kda_cute.records import BLOCK, PANEL
from kda_sm90.kernels import fragments
from kda_sm90.kernels.barriers import WARPGROUP
from kda_sm90.kernels.intra_chunk import (
    Layout,
    Place,
    WarpgroupIntraChunk,
    first_column,
    store_square,
)

PARTS_BYTES = 1024  # of a block in two bf16 parts


class SquaresLayout:
    """`kda_cute.device.intra_chunk.memory.Layout` as `Inverse` uses it, for `TwoWarpgroupIntraChunk`."""

    def __init__(self, layout: Layout, chunk: int):
        self.layout, self.chunk = layout, chunk
        self.blocks = chunk // BLOCK

    def l_block(self, base, i, j):
        return base + self.layout.l_block + (i * (i - 1) // 2 + j) * PARTS_BYTES

    def inverse(self, base, block):
        return base + self.layout.minus_l + block * (BLOCK * COLUMN)


class SharedImage:
    """`kda_cute.device.intra_chunk.blocks.Image` of T in shared memory."""

    def __init__(self, chunk):
        self.chunk = chunk

    def store(self, image, fragment, i, j, lane, base):
        store_square(image, self.chunk, fragment, i, j, lane)

    def clear(self, image, i, j, lane):
        self.store(image, [Int32(0)] * 4, i, j, lane, None)


class TwoWarpgroupIntraChunk(WarpgroupIntraChunk):
    """The intra-chunk stage of one group; calls as in `WarpgroupIntraChunk`."""

    threads = 2 * WARPGROUP
    leader, claimer = 224, 4  # in warps of q, which invert nothing
    # All copies are in `complete`. The next turn soon overwrites what they read, so it waits for all of them.
    early_copies = late_copies = 0

    def rows_of_warpgroup(self, p: Place):
        return p.warp // 4 * self.image_bytes

    # ---- L and Aqk

    @cute.jit
    def store_blocks(self, p: Place, blocks, record, sync):
        """Stores the blocks of L below the diagonal and the inverses of the diagonal blocks for `finish`, and those of Aqk for `complete`.
        ``blocks``: of `tiles_of`. ``sync``: the group's barrier."""
        row = p.warp % 4
        diagonal = self.diagonal(row, blocks)
        if const_expr(self.config.unbounded):
            diagonal = self.steep.with_refined(p, diagonal)
            sync()  # blocks of L and their inverses replace the refined products
        for i in cutlass.range_constexpr(1, self.blocks):
            if row == i:
                below = blocks[first_column(i) : first_column(i) + i]
                if p.warp < self.blocks:
                    self.store_l(p, i, [minus(y) for y in below])
                else:
                    self.keep_aqk(p, i, below)
        if p.warp < self.blocks:
            self.inverse().invert_diagonal(self.block_of(p), minus(diagonal), p.base + self.layout.squares)
        else:
            self.keep_diagonal_aqk(p, diagonal)

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
            store_parts(self.blocks_of_l().l_block(p.base, i, j) + p.lane * 16, fragment_in_parts(tiles))

    def kept_aqk(self, p: Place, i, j):
        """Returns the shared address of the lane's 16 bytes of block (i, j) of Aqk, an A fragment, between `store_blocks` and `complete`."""
        return p.base + self.layout.sums + (i * (i + 1) // 2 + j) * 512 + p.lane * 16

    def keep_aqk(self, p: Place, i, blocks):
        """Keeps blocks (i, 0) to (i, i - 1) of Aqk for `complete`."""
        for j, tiles in enumerate(blocks):
            ptx.store_shared_x4(self.kept_aqk(p, i, j), fragment(tiles))

    def keep_diagonal_aqk(self, p: Place, tiles):
        """Keeps the warp's diagonal block of Aqk, which is 0 above the diagonal, for `complete`."""
        block = p.warp % self.blocks
        ptx.store_shared_x4(self.kept_aqk(p, block, block), fragment(self.causal(p, tiles)))

    # ---- T

    def inverse(self) -> Inverse:
        """Returns the inverse, which stores T to shared memory."""
        return Inverse(self.blocks_of_l(), SharedImage(self.chunk))

    def blocks_of_l(self) -> SquaresLayout:
        """Returns where blocks of L lie."""
        return SquaresLayout(self.layout, self.chunk)

    def block_of(self, p: Place):
        """Returns the thread's place as `Inverse` takes it: block w of warp w of k."""
        return SimpleNamespace(
            base=p.base, block=p.warp % 4, row=p.lane // 4, quad_lane=p.lane % 4, lane=p.lane
        )

    @cute.jit
    def finish(self, worker: Worker, record):
        """Computes the blocks of T below the diagonal. A barrier of the group must follow."""
        p = self.place(worker)
        if p.warp < self.blocks:
            self.inverse().assemble(self.block_of(p), p.base + self.layout.squares)
        cute.arch.fence_proxy("async.shared", space="cta")

    # ---- Kg~ and Aqk~

    @cute.jit
    def complete(self, worker: Worker, record, sync):
        """Computes Kg~ and Aqk~, and completes the record. ``sync``: the barrier of the group, which must separate `finish` from this call."""
        p = self.place(worker)
        panel = p.base + p.warp // 4 * self.layout.panel
        words = self.multiply_kg(p, panel)
        if p.warp >= self.blocks:
            self.multiply_aqk(p)
        sync()  # the products of all warps have read the columns, where Kg~ will lie
        fragments.store_transposed(panel + self.layout.kg, p.thread % WARPGROUP, words, self.chunk)
        cute.arch.fence_proxy("async.shared", space="cta")
        sync()
        self.copy_to_record(worker, record)

    def multiply_kg(self, p: Place, panel):
        """Returns the warpgroup's panel of Kg~^T = Kg^T T, an accumulator [64 channels, C], in bf16. ``panel``: its shared address."""
        mma = hopper_helpers.make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.MN, OperandMajorMode.MN, Float32, (1, 1, 1), (64, self.chunk)
        )  # fmt: skip
        kg = transposed_image(panel + self.layout.kg, self.chunk)
        a = mma.make_fragment_A(mma.get_slice(p.thread % WARPGROUP).partition_A(kg))
        products = self.multiply_t(p, mma, a)
        # from the last anchor to the end of the chunk
        first = p.base + self.layout.ends + (p.warp * 16 + p.lane // 4) * 4
        ends = [ptx.load_shared(first + 32 * half, Float32) for half in range(2)]
        return pack([x * ends[i // 2 % 2] for i, x in enumerate(products)])

    def multiply_aqk(self, p: Place):
        """Stores the image of Aqk~ = Aqk T. The warpgroup of q calls it: a warp has the rows of block w of Aqk."""
        mma = hopper_helpers.make_trivial_tiled_mma(
            BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.MN, Float32, (1, 1, 1), (64, self.chunk),
            warpgroup.OperandSource.RMEM,
        )  # fmt: skip
        block = p.warp % self.blocks
        a = cute.make_rmem_tensor(mma.partition_shape_A((64, self.chunk)), BFloat16)
        rows = fragments.words_of(a)
        for j in range(self.blocks):
            words = ptx.load_shared_x4(self.kept_aqk(p, block, j), Int32)
            for n in range(4):
                rows[4 * j + n] = ptx.select(block >= j, words[n], Int32(0))
        words = pack(self.multiply_t(p, mma, a))
        for j in range(self.blocks):
            store_square(p.base + self.layout.minus_l, self.chunk, words[4 * j : 4 * j + 4], block, j, p.lane)

    def multiply_t(self, p: Place, mma, a):
        """Returns the thread's elements of A T [64, C], in fp32. ``a``: the A fragment of the warpgroup."""
        t = transposed_image(p.base + self.layout.squares, self.chunk)
        b = mma.make_fragment_B(mma.get_slice(p.thread % WARPGROUP).partition_B(t))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((64, self.chunk)), Float32)
        atom = cute.make_mma_atom(mma.op)
        atom.set(warpgroup.Field.ACCUMULATE, False)
        warpgroup.fence()
        for k in range(self.chunk // 16):
            cute.gemm(atom, acc, a[None, None, k], b[None, None, k], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        warpgroup.wait_group(0)
        return [acc[i] for i in range(self.chunk // 2)]

    @cute.jit
    def copy_to_record(self, worker: Worker, record):
        """Copies Kg~, Aqk~, and T if the record holds it, to the record asynchronously."""
        if worker.thread == self.leader:
            for panel in cutlass.range_constexpr(2):
                shared = worker.base + panel * self.layout.panel + self.layout.kg
                ptx.bulk_store(
                    record("kg") + panel * self.image_bytes, shared, Int32(self.image_bytes), keep=True
                )
            aqk = worker.base + self.layout.minus_l
            ptx.bulk_store(record("aqk"), aqk, Int32(self.square_bytes), keep=True)
            if const_expr(self.config.keeps_inverse):
                t = worker.base + self.layout.squares
                ptx.bulk_store(record("t"), t, Int32(self.square_bytes), keep=True)


class StridedTwoWarpgroupIntraChunk(StridedInputs, TwoWarpgroupIntraChunk):
    """`TwoWarpgroupIntraChunk` over strided inputs."""


def minus(tiles):
    """Returns the negative of accumulator tiles."""
    return [[-y for y in tile] for tile in tiles]


def transposed_image(address: Int32, rows: int):
    """Returns the tensor [64, rows] of the transpose of an image of rows of 64 elements at a shared address, a multiple of 1024."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.MN_SW128, BFloat16)
    layout = cute.tile_to_shape(atom, (PANEL, rows), order=(1, 0))
    pointer = cute.make_ptr(BFloat16, address, cute.AddressSpace.smem, assumed_align=1024)
    return cute.make_tensor(cute.recast_ptr(pointer, layout.inner, dtype=BFloat16), layout.outer)
