"""Products within a chunk, on mma.sync.

An accumulator [64 tokens, 64 channels] of a warpgroup has the layout of ``mma.sync``: warp w
has block w of 16 rows, and thread (row, quad) of it the elements (e, r, j) at row ``16w + 8r + row`` and column ``8j + 2 quad +
e``, the channel ``16 quad + 2j + e`` (`memory.position`). So all that belongs to one token and channel meets in one thread.
"""

import cutlass
from cutlass import Float32, Int32, cute

from kda_cute.device import ptx
from kda_cute.device.gradients import memory
from kda_cute.device.gradients.memory import BLOCK, BLOCKS, HALF, OFFSETS, PAIRS, PANEL, TILES, Table
from kda_cute.records import HEAD_DIM

# ---- images


def store_image(shared, acc, place):
    """Stores an accumulator [64 rows, 64 columns] as an image in bf16."""
    row = place.block * BLOCK + 8 * (place.matrix & 1) + place.matrix_row
    first = memory.image(shared, row, 8 * (place.matrix >> 1))
    for pair in range(TILES // 2):
        packed = [
            ptx.pack_bf16x2(acc[8 * pair + 2 * i], acc[8 * pair + 2 * i + 1]) for i in range(4)
        ]  # [tile][r]
        ptx.stmatrix_x4(first ^ 32 * pair, packed)


# ---- scales


def scale_bits(n):
    """Returns 2^n in bf16, twice, for an integer n below 128; 0 below -126."""
    exponent = Int32(n) + 127
    return ptx.select(exponent > 0, exponent * (0x10001 << 7), Int32(0))


def store_scales(place, unbounded):
    """Stores the powers of two that move factors between the anchors of two blocks, and the table END. A thread has a channel of the
    half, three of the six pairs of blocks, and two of the four blocks."""
    thread = place.thread & 127
    late, channel = thread >> 6, thread & 63
    address = lambda kind, block: memory.table(place.base, kind, block, place.half * HALF + channel)
    entry = lambda kind, block: ptx.load_shared(address(kind, block), Float32)
    middles = [entry(Table.MIDDLE, block) for block in range(BLOCKS)]
    end = entry(Table.LAST, BLOCKS - 1)
    of_pair = lambda one, other: ptx.select(late > 0, middles[other], middles[one])
    position = memory.position(channel)
    at = lambda i, j, kind: (
        memory.scale_place(place.base, i, j, place.half, position & 7, kind) + (position >> 3) * 4
    )
    pairs = [
        (
            ptx.select(late > 0, Int32(3), Int32((1, 2, 2)[n])),
            ptx.select(late > 0, Int32(n), Int32((0, 0, 1)[n])),
        )
        for n in range(PAIRS // 2)
    ]
    moves = [of_pair((1, 2, 2)[n], BLOCKS - 1) - of_pair((0, 0, 1)[n], n) for n in range(len(pairs))]
    for n in range(2):
        move = (middles[BLOCKS - 1] - of_pair(n, 2 + n)) + end
        ptx.store_shared(address(Table.END, 2 * late + n), move)
    lasts = [entry(Table.LAST, j) for _, j in pairs] if unbounded else moves
    for (i, j), move, last in zip(pairs, moves, lasts, strict=True):
        ptx.store_shared(at(i, j, 0), scale_bits(move))
        if unbounded:
            lower = move - Float32(cute.math.floor(last))
            ptx.store_shared(at(i, j, 1), scale_bits(lower))


def load_scales(place, i, j, kind=0):
    """Loads the scales between two blocks for the B fragments of the thread, [tile]."""
    address = memory.scale_place(place.base, i, j, place.half, place.row, kind)
    return [y for n in (0, 16) for y in ptx.load_shared_x4(address + n, Int32)]


def column_scales(place, i, j, unbounded):
    """Returns the factors that move columns of block j to the anchor of block i, [tile][upper and lower 8 tokens]."""
    inside = load_scales(place, i, j)
    if not unbounded:
        return [[y, y] for y in inside]
    outside, kept = load_scales(place, i, j, kind=1), memory.kept(place.base, j)
    masks = [kept_mask(2 * place.quad + 8 * n, kept) for n in range(2)]
    return [[(x & mask) | (y & ~mask) for mask in masks] for x, y in zip(inside, outside, strict=True)]


def row_scales(place, i, j, kind=0):
    """Returns the factors that move rows of block i to an anchor of block j; see `column_scales`. ``kind`` 1: to that of columns without
    the middle anchor."""
    return [[y, y] for y in load_scales(place, i, j, kind)]


# ---- within the chunk, of a warp


def fragments(place, columns, panel, scales):
    """Yields each pair of tiles of rows ``columns`` to ``columns + 15`` of the image at ``panel`` [64 tokens, 64 channels], times powers
    of two: [tile, B fragment]. ``scales``: see `column_scales`, or None."""
    first = memory.image(panel, columns + 8 * (place.matrix & 1) + place.matrix_row, 8 * (place.matrix >> 1))
    for pair in range(TILES // 2):
        b = ptx.ldmatrix_x4(first ^ 32 * pair, transpose=True)
        for i in range(2):
            tile, operand = 2 * pair + i, [b[2 * i], b[2 * i + 1]]
            if scales is not None:
                operand = [ptx.mul_bf16x2(y, scale) for y, scale in zip(operand, scales[tile], strict=True)]
            yield tile, operand


def add(acc, tile, a, b):
    """Adds ``a`` [16, 16], an A fragment, times a B fragment to a tile of an accumulator."""
    found = ptx.mma_m16n8k16(a, b, [acc[4 * tile + n] for n in range(4)])
    for n in range(4):
        acc[4 * tile + n] = found[n]


def row_fragment(image, i, j, place):
    """Loads block (i, j) of an image [64, 64] as an A fragment."""
    row = i * BLOCK + 8 * (place.matrix & 1) + place.matrix_row
    return ptx.ldmatrix_x4(memory.image(image, row, j * BLOCK + 8 * (place.matrix >> 1)))


def column_fragment(image, i, j, place):
    """Loads the transpose of block (i, j) of an image [64, 64] as an A fragment."""
    row = i * BLOCK + 8 * (place.matrix >> 1) + place.matrix_row
    return ptx.ldmatrix_x4(memory.image(image, row, j * BLOCK + 8 * (place.matrix & 1)), transpose=True)


def lower(a, place, strict):
    """Returns the A fragment of a diagonal block without what is above the diagonal; ``strict``: without the diagonal as well."""
    mask = pair_mask(place.row - 2 * place.quad - strict)
    return [a[0] & mask, a[1], Int32(0), a[3] & mask]


def upper(a, place, strict):
    """Returns the A fragment of a diagonal block's transpose without what is below the diagonal; see `lower`."""
    mask = ~pair_mask(place.row - 2 * place.quad - 1 + strict)
    return [a[0] & mask, Int32(0), a[2], a[3] & mask]


def pair_mask(last):
    """Returns a mask of a bf16x2: its low element if ``last`` >= 0, and the high one if ``last`` >= 1."""
    return ptx.select(last > 0, Int32(-1), ptx.select(last == 0, Int32(0xFFFF), Int32(0)))


def kept_mask(first, kept):
    """Returns a mask of a bf16x2 with the tokens ``first`` and ``first + 1`` of a block: those below ``kept``."""
    return pair_mask(kept - first - 1)


def kept_rows(a, kept, place, kind=0):
    """Returns an A fragment with the rows before ``kept`` only; ``kind`` 1: with the others only."""
    found = []
    for n, y in enumerate(a):
        inside = place.row + 8 * (n % 2) < kept
        found.append(ptx.select(inside, Int32(0), y) if kind else ptx.select(inside, y, Int32(0)))
    return found


def kept_columns(a, kept, place):
    """Returns an A fragment of D^T without the columns from ``kept`` on."""
    return [y & kept_mask(2 * place.quad + 8 * (n // 2), kept) for n, y in enumerate(a)]


@cute.jit
def add_row_products(
    base: Int32, thread, acc_q: cute.Tensor, acc_k: cute.Tensor, unbounded: cutlass.Constexpr[bool]
):
    """Adds Dq c to ``acc_q`` and Dk c to ``acc_k``: of a block of rows over its own and all earlier blocks of columns, relative to the
    block's anchor."""
    from kda_cute.device.gradients.elements import Place

    place = Place(base, thread)
    block, columns = place.block, place.panel("column")
    for j in cutlass.range(block, unroll=1):
        a_q, a_k = (row_fragment(base + OFFSETS[name], block, j, place) for name in ("d_q", "d_k"))
        scales = column_scales(place, block, j, unbounded)
        for tile, b in fragments(place, j * BLOCK, columns, scales):
            add(acc_q, tile, a_q, b)
            add(acc_k, tile, a_k, b)
    a_q, a_k = (
        lower(row_fragment(base + OFFSETS[name], block, block, place), place, strict)
        for strict, name in enumerate(("d_q", "d_k"))
    )
    if cutlass.const_expr(unbounded):
        a_q, a_k = (kept_rows(a, memory.kept(base, block), place) for a in (a_q, a_k))
    for tile, b in fragments(place, block * BLOCK, columns, None):
        add(acc_q, tile, a_q, b)
        add(acc_k, tile, a_k, b)


@cute.jit
def add_column_products(base: Int32, thread, acc: cute.Tensor, unbounded: cutlass.Constexpr[bool]):
    """Adds Dq^T r and Dk^T r of a block of columns over its own and all later blocks of rows, relative to the block's anchor."""
    from kda_cute.device.gradients.elements import Place

    place = Place(base, thread)
    add_outer_column_products(base, thread, acc, 0, unbounded)
    for strict, (d, rows) in enumerate((("d_q", "row_q"), ("d_k", "row_k"))):
        a = upper(column_fragment(base + OFFSETS[d], place.block, place.block, place), place, strict)
        if cutlass.const_expr(unbounded):
            a = kept_columns(a, memory.kept(base, place.block), place)
        for tile, b in fragments(place, place.block * BLOCK, place.panel(rows), None):
            add(acc, tile, a, b)
    if cutlass.const_expr(unbounded):
        kept = memory.kept(base, place.block)
        if kept < BLOCK:
            add_outer_column_products(base, thread, acc, 1, unbounded)


@cute.jit
def add_outer_column_products(
    base: Int32, thread, acc: cute.Tensor, kind: cutlass.Constexpr[int], unbounded: cutlass.Constexpr[bool]
):
    """Adds the products of a block of columns with all later blocks of rows: of columns with the middle anchor (``kind`` 0) or of the
    others (1)."""
    from kda_cute.device.gradients.elements import Place

    place = Place(base, thread)
    operands = [(base + OFFSETS[d], place.panel(rows)) for d, rows in (("d_q", "row_q"), ("d_k", "row_k"))]
    for i in cutlass.range(place.block + 1, BLOCKS, unroll=1):
        scales = row_scales(place, i, place.block, kind)
        for d, rows in operands:
            a = column_fragment(d, i, place.block, place)
            if cutlass.const_expr(unbounded):
                a = kept_rows(a, memory.kept(base, place.block), place, kind)
            for tile, b in fragments(place, i * BLOCK, rows, scales):
                add(acc, tile, a, b)


def through_diagonal(place):
    """Returns ``sum_v S dS'`` of the channels at positions ``16 block + row`` and ``16 block + 8 + row`` of the half, in the lane with
    quad == row // 2."""
    first = place.half * HALF + place.block * BLOCK + place.matrix_row
    low, high = place.matrix & 1, place.matrix >> 1
    state = memory.image(place.base + OFFSETS["state"], first + 8 * low, 8 * high)
    grad_state = memory.image(place.base + OFFSETS["grad_state"], first + 8 * high, 8 * low)
    found = [[Float32(0.0)] * 4 for _ in range(2)]
    for step in range(HEAD_DIM // 16):
        panel, column = step // 4 * (2 * PANEL), step % 4 * 32
        a, b = (ptx.ldmatrix_x4((y ^ column) + panel) for y in (state, grad_state))
        found = [ptx.mma_m16n8k16(a, b[2 * n : 2 * n + 2], found[n]) for n in range(2)]
    odd = (place.row & 1) > 0
    return [ptx.select(odd, found[n][2 * n + 1], found[n][2 * n]) for n in range(2)]
