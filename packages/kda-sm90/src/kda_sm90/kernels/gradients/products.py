"""Products of a chunk: those between chunks on wgmma, those within the chunk on mma.sync.

An accumulator [64 tokens, 64 channels] of a warpgroup has the layout of a wgmma accumulator, which is that of ``mma.sync``: warp w
has block w of 16 rows, and thread (row, quad) of it the elements (e, r, j) at row ``16w + 8r + row`` and channel ``8j + 2 quad +
e``. So all that belongs to one token and channel meets in one thread.
"""

import cutlass
from cutlass import BFloat16, Float32, Int32, cute
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.utils import hopper_helpers

from kda_cute.device import ptx
from kda_sm90.config import HEAD_DIM
from kda_sm90.kernels.gradients import memory
from kda_sm90.kernels.gradients.memory import BLOCKS, CHUNK, HALF, OFFSETS, Table

TILES = HALF // 8  # of 8 channels, of a warpgroup


def tiled_mma():
    """Returns the wgmma [64, 64] of two operands in shared memory."""
    return hopper_helpers.make_trivial_tiled_mma(
        BFloat16, BFloat16, OperandMajorMode.K, OperandMajorMode.K, Float32, (1, 1, 1), (CHUNK, HALF)
    )


def matrix(shared: cute.Pointer, name, rows):
    """Returns the tensor [rows, 128] of a region, an image in two panels of 64 columns."""
    from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind, make_smem_layout_atom

    atom = make_smem_layout_atom(SmemLayoutAtomKind.K_SW128, BFloat16)
    layout = cute.tile_to_shape(atom, (rows, HEAD_DIM), order=(0, 1))
    pointer = cute.recast_ptr(shared + OFFSETS[name], layout.inner, dtype=BFloat16)
    return cute.make_tensor(pointer, layout.outer)


def start(mma, acc, a, b, thread):
    """Starts ``acc = a b^T`` as one group of wgmmas. ``a`` [64, 128], ``b`` [64, 128]: tensors in shared memory."""
    part = mma.get_slice(thread)
    tCrA = mma.make_fragment_A(part.partition_A(a))
    tCrB = mma.make_fragment_B(part.partition_B(b))
    atom = cute.make_mma_atom(mma.op)
    atom.set(warpgroup.Field.ACCUMULATE, False)
    warpgroup.fence()
    for k in range(HEAD_DIM // 16):
        cute.gemm(atom, acc, tCrA[None, None, k], tCrB[None, None, k], acc)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def accumulator(mma):
    """Returns an accumulator [64, 64]."""
    return cute.make_rmem_tensor(mma.partition_shape_C((CHUNK, HALF)), Float32)


def store_masked(shared, acc, block, lane, strict, sign):
    """Stores ``sign`` times the lower triangle of an accumulator [64 rows, 64 columns] as an image in bf16.

    ``strict``: without the diagonal; 0 or 1.
    """
    row, quad = lane // 4, lane % 4
    for j in range(TILES):
        for r in range(2):
            i = block * 16 + 8 * r + row
            values = []
            for e in range(2):
                inside = i >= 8 * j + 2 * quad + e + strict
                values.append(ptx.select(inside, acc[4 * j + 2 * r + e] * sign, Float32(0.0)))
            ptx.store_shared(memory.image(shared, i, 8 * j + 2 * quad), ptx.pack_bf16x2(*values))


# ---- products within the chunk, of one warp


def multiply(acc, a, columns, place, lane, factors):
    """Adds ``a`` [16, 16], an A fragment, times rows ``columns`` to ``columns + 15`` of the image at ``place`` [64 tokens, 64
    channels], times powers of two: ``factors``, for each tile of 8 channels as `scales` returns them, or None."""
    matrix, row = lane // 8, lane % 8
    token = columns + 8 * (matrix % 2) + row
    for pair in range(TILES // 2):
        b = ptx.ldmatrix_x4(memory.image(place, token, 16 * pair + 8 * (matrix // 2)), transpose=True)
        for i in range(2):
            tile = 2 * pair + i
            operand = [b[2 * i], b[2 * i + 1]]
            if factors is not None:
                operand = [ptx.mul_bf16x2(y, scale) for y, scale in zip(operand, factors[tile], strict=True)]
            found = ptx.mma_m16n8k16(a, operand, [acc[4 * tile + n] for n in range(4)])
            for n in range(4):
                acc[4 * tile + n] = found[n]


def row_fragment(place, i, j, lane):
    """Loads block (i, j) of an image [64, 64] as an A fragment."""
    matrix, row = lane // 8, lane % 8
    return ptx.ldmatrix_x4(memory.image(place, i * 16 + 8 * (matrix % 2) + row, j * 16 + 8 * (matrix // 2)))


def column_fragment(place, i, j, lane):
    """Loads the transpose of block (i, j) of an image [64, 64] as an A fragment."""
    matrix, row = lane // 8, lane % 8
    address = memory.image(place, i * 16 + 8 * (matrix // 2) + row, j * 16 + 8 * (matrix % 2))
    return ptx.ldmatrix_x4(address, transpose=True)


def kept_rows(a, kept, lane):
    """Returns an A fragment of D without the rows that have no middle anchor."""
    row = lane // 4
    return [ptx.select(row + 8 * (n % 2) < kept, y, Int32(0)) for n, y in enumerate(a)]


def kept_columns(a, kept, lane):
    """Returns an A fragment of D^T without the columns that have no middle anchor."""
    first = 2 * (lane % 4)
    found = []
    for n, y in enumerate(a):
        column = first + 8 * (n // 2)
        mask = ptx.select(column + 1 < kept, Int32(-1), ptx.select(column < kept, Int32(0xFFFF), Int32(0)))
        found.append(y & mask)
    return found


def entry(base, kind, block, channel):
    """Loads an entry of a table."""
    return ptx.load_shared(memory.table(base, kind, block, channel), Float32)


def column_scales(base, half, lane, j, block, kept):
    """Returns the factors that move columns of block j to the anchor of a later block; see `scales`."""
    found = []
    for tile in range(TILES):
        channel = half * HALF + 8 * tile + lane // 4
        target = entry(base, Table.ANCHOR, block, channel)
        fall = target - entry(base, Table.ANCHOR, j, channel)
        following = target - entry(base, Table.ANCHOR, j + 1, channel)
        found.append(scales(fall - entry(base, Table.MIDDLE, j, channel), following, kept, lane))
    return found


def row_scales(base, half, lane, i, following, kept):
    """Returns the factors that move rows of block i to the anchor of an earlier block; see `scales`."""
    found = []
    for tile in range(TILES):
        channel = half * HALF + 8 * tile + lane // 4
        fall = entry(base, Table.ANCHOR, i, channel) - entry(base, Table.ANCHOR, following, channel)
        found.append(scales(fall + entry(base, Table.MIDDLE, i, channel), fall, kept, lane))
    return found


def scales(middle, outer, kept, lane):
    """Returns powers of two as bf16x2, for the upper and the lower 8 tokens of a block.

    ``middle``, ``outer``: exponents for tokens with and without the middle anchor. ``kept``: the number of those with it, or None
    for all.
    """
    inside, outside = bf16_power(middle), bf16_power(outer)
    if kept is None:
        return [inside | inside << 16] * 2
    token, found = 2 * (lane % 4), []
    for first in (token, token + 8):
        low, high = (ptx.select(at < kept, inside, outside) for at in (first, first + 1))
        found.append(low | high << 16)
    return found


def bf16_power(n):
    """Returns the bits of 2^n in bf16 for an integer n below 128; 0 below -126."""
    exponent = Int32(n) + 127
    return ptx.select(exponent > 0, exponent << 7, Int32(0))


@cute.jit
def row_products(
    base: Int32, d: Int32, columns: Int32, outer: cute.Tensor, inner: cute.Tensor, block: Int32, half: Int32, lane: Int32,
    unbounded: cutlass.Constexpr[bool],
):  # fmt: skip
    """Adds D c of a block of rows: ``outer`` over the blocks of columns before it, relative to the block's anchor, ``inner`` over
    its own block, relative to its middle anchor. ``d``, ``columns``: addresses of the images of D and of c."""
    for j in cutlass.range(block, unroll=1):
        factors = column_scales(base, half, lane, j, block, memory.kept(base, j) if unbounded else None)
        multiply(outer, row_fragment(d, block, j, lane), j * 16, columns, lane, factors)
    a = row_fragment(d, block, block, lane)
    if cutlass.const_expr(unbounded):
        a = kept_rows(a, memory.kept(base, block), lane)
    multiply(inner, a, block * 16, columns, lane, None)


@cute.jit
def column_products(
    base: Int32, d: Int32, rows: Int32, outer: cute.Tensor, inner: cute.Tensor, block: Int32, half: Int32, lane: Int32,
    unbounded: cutlass.Constexpr[bool],
):  # fmt: skip
    """Adds D^T r of a block of columns: ``outer`` over the blocks of rows behind it, relative to the anchor of the next block,
    ``inner`` over its own block, relative to its middle anchor."""
    following = block + 1
    for i in cutlass.range(following, BLOCKS, unroll=1):
        factors = row_scales(base, half, lane, i, following, memory.kept(base, i) if unbounded else None)
        multiply(outer, column_fragment(d, i, block, lane), i * 16, rows, lane, factors)
    a = column_fragment(d, block, block, lane)
    if cutlass.const_expr(unbounded):
        a = kept_columns(a, memory.kept(base, block), lane)
    multiply(inner, a, block * 16, rows, lane, None)
