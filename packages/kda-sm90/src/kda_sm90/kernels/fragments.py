"""Moves the register fragments of a chain warpgroup: wgmma accumulators and register operands.

A warpgroup has 128 threads and holds 64 rows (of V). Thread 32w + lane of it holds, of an fp32 accumulator [64, N], the
elements (e, r, j), e < 2, r < 2, j < N/8, in this order, e fastest:

    row 16w + 8r + lane // 4, column 8j + 2 * (lane % 4) + e

A bf16 register operand [64, N] has the same order, two elements in each 32-bit register: register i holds elements 2i
and 2i + 1 of an accumulator. So rounding the elements in order turns an accumulator into an operand of the next product.

All inline PTX here is volatile, because LLVM would move pure operations past the next wait.
"""

from cutlass import Float32, Int32, Int64, cute

from kda_cute.device import ptx
from kda_cute.records import decay_units
from kda_sm90.config import HEAD_DIM
from kda_sm90.kernels.barriers import WARPGROUP
from kda_sm90.layouts import CARRY_BYTES

HALF = HEAD_DIM // 2  # rows of V per warpgroup
MATRIX_BYTES = 4 * HEAD_DIM * HEAD_DIM  # of an fp32 state
DECAY_UNITS = range(HEAD_DIM // 16)


# ---- arithmetic


def round_to_bf16(acc, bf16):
    """Rounds an accumulator to bf16 pairs. ``bf16``: a register tensor of as many elements, or of half as many 32-bit
    words."""
    pairs = cute.size(acc) // 2
    words = cute.make_tensor(cute.recast_ptr(bf16.iterator, dtype=Int32), cute.make_layout(pairs))
    for i in range(pairs):
        words[i] = cute.arch.inline_ptx(
            "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};",
            write_only_types=[Int32],
            read_only_args=[acc[2 * i + 1], acc[2 * i]],
        )


def widen(bf16, acc):
    """Fills an accumulator with an operand: the inverse of `round_to_bf16`."""
    words = words_of(bf16)
    for i in range(cute.size(acc) // 2):
        acc[2 * i], acc[2 * i + 1] = ptx.unpack_bf16x2(words[i])


def multiply_columns(acc, factors, units=DECAY_UNITS):
    """Multiplies columns of an accumulator [64, 128]. ``factors``: those of the thread's columns in ``units``, from `load_decays`."""
    for n, unit in enumerate(units):
        for i in range(8):  # columns j = 2 * unit and j + 1
            acc[8 * unit + i] = cute.arch.inline_ptx(
                "mul.rn.f32 {$w0}, {$r0}, {$r1};",
                write_only_types=[Float32],
                read_only_args=[acc[8 * unit + i], factors[4 * n + 2 * (i // 4) + i % 2]],
            )


def fill_zero(acc):
    """Sets an accumulator to zero. A function, because the DSL would carry a namespace whose member's method is
    called through every branch."""
    acc.fill(0.0)


def fill_identity(half, thread, acc):
    """Sets an accumulator to rows ``64 * half`` to ``64 * half + 63`` of the identity [128, 128]."""
    row = half * HALF + 16 * (thread // 32) + thread % 32 // 4
    column = 2 * (thread % 4)
    for i in range(HEAD_DIM // 2):
        diagonal = row + 8 * (i // 2 % 2) == column + 8 * (i // 4) + i % 2
        acc[i] = ptx.select(diagonal, Float32(1.0), Float32(0.0))


# ---- shared memory. Addresses are 32-bit; images are those of `kda_cute.records`


def load_v(shared, thread, chunk, acc):
    """Loads an accumulator [64, chunk] from the transpose of the image [chunk, 64] of v. An ldmatrix loads 16 tokens by
    the warp's 16 rows of V, as four 8x8 matrices: matrix m has tokens 8 (m // 2) and rows 8 (m % 2) on."""
    place = _matrix_address(shared, thread)
    for i in range(chunk // 16):
        for j, pair in enumerate(ptx.ldmatrix_x4(place + i * (16 * 2 * HALF), transpose=True)):
            acc[8 * i + 2 * j], acc[8 * i + 2 * j + 1] = cute.arch.inline_ptx(
                "shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000;",
                write_only_types=[Float32, Float32],
                read_only_args=[pair],
            )


def load_transposed(shared, thread, chunk, words):
    """Loads an operand [64, chunk], as 32-bit words, from the transpose of an image [chunk, 64]; see `load_v`."""
    place = _matrix_address(shared, thread)
    for i in range(chunk // 16):
        for j, pair in enumerate(ptx.ldmatrix_x4(place + i * (16 * 2 * HALF), transpose=True)):
            words[4 * i + j] = pair


def _matrix_address(shared, thread):
    """Returns the row address that a thread passes to the ldmatrix of the first 16 tokens of an image [tokens, 64]."""
    warp, lane = thread // 32, thread % 32
    matrix, token = lane // 8, lane % 8
    return shared + (8 * (matrix // 2) + token) * (2 * HALF) + ((2 * warp + matrix % 2) ^ token) * 16


def words_of(operand):
    """Returns a bf16 register tensor as 32-bit words."""
    return cute.make_tensor(
        cute.recast_ptr(operand.iterator, dtype=Int32), cute.make_layout(cute.size(operand) // 2)
    )


def load_decays(address, units=DECAY_UNITS):
    """Loads the decays of the thread's columns in ``units`` of 16 columns each, four per unit in the order of the columns. ``address``:
    of the thread's first decays (``decay_start``)."""
    places = decay_units(address)
    return [x for unit in units for x in ptx.load_shared_x4(places[unit], Float32)]


def store_rows(shared, thread, words):
    """Stores an operand [64, 128], given as 32-bit words, as a swizzled image of rows of 256 bytes."""
    warp, lane = thread // 32, thread % 32
    matrix, row = lane // 8, lane % 8
    start = shared + (16 * warp + 8 * (matrix % 2) + row) * (2 * HEAD_DIM)
    for i in range(HEAD_DIM // 16):
        place = start + ((2 * i + matrix // 2) ^ row) * 16
        ptx.stmatrix_x4(place, [words[4 * i + j] for j in range(4)])


def store_transposed(shared, thread, words, rows):
    """Stores the transpose of an operand [64, rows], given as 32-bit words, as a swizzled image of rows of 128 bytes."""
    warp, lane = thread // 32, thread % 32
    matrix, row = lane // 8, lane % 8
    place = shared + (8 * (matrix // 2) + row) * (2 * HALF) + ((2 * warp + matrix % 2) ^ row) * 16
    for i in range(rows // 16):
        ptx.stmatrix_x4(place + i * (16 * 2 * HALF), [words[4 * i + j] for j in range(4)], transpose=True)


# ---- fp32 states in shared memory: rows of a matrix [K, V] or [V, K], 512 bytes apart. So the lanes of a load that differ in the row access the same
# banks. Every second lane loads two values in the other order, which halves these conflicts.


def load_channels(shared, half, thread, first, count, acc):
    """Loads ``count`` columns of an accumulator [64, 128], from channel ``first`` on. ``shared``: address of the rows of these channels of a
    matrix [K, V]."""
    lane = thread % 32
    odd = lane % 2
    start = shared + lane % 4 * (2 * 4 * HEAD_DIM) + (half * HALF + thread // 32 * 16 + lane // 4) * 4
    one, other = start + 32 * odd, start + 32 - 32 * odd  # 8 rows of V apart
    for i in range(count // 4):
        place, j = (8 * (i // 2) + i % 2) * (4 * HEAD_DIM), first // 2 + 4 * (i // 2) + i % 2
        x, y = ptx.load_shared(one + place, Float32), ptx.load_shared(other + place, Float32)
        acc[j], acc[j + 2] = ptx.select(odd > 0, y, x), ptx.select(odd > 0, x, y)


def load_rows(shared, thread, acc):
    """Loads an accumulator [64, 128]. ``shared``: address of the warp's 16 rows of a matrix [V, K]."""
    lane = thread % 32
    odd = lane // 4 % 2
    start = shared + lane // 4 * (4 * HEAD_DIM) + lane % 4 * 8
    one, other = start + 32 * odd, start + 32 - 32 * odd  # 8 channels apart
    for i in range(HEAD_DIM // 8):
        place, j = i % 2 * (8 * 4 * HEAD_DIM) + i // 2 * 64, 8 * (i // 2) + 2 * (i % 2)
        x, y = ptx.load_shared_x2(one + place, Float32), ptx.load_shared_x2(other + place, Float32)
        for e in range(2):
            acc[j + e], acc[j + 4 + e] = ptx.select(odd > 0, y[e], x[e]), ptx.select(odd > 0, x[e], y[e])


# ---- global memory


def carry_address(carry, queue, halves, half, thread):
    """Returns where a thread's share of a state starts that a queue passes to the next one. The order is that of the
    registers: for each j, 16 bytes of each thread side by side."""
    return carry + (Int64(queue) * halves + half) * CARRY_BYTES + thread * 16


def load_carry(address, acc):
    """Loads an accumulator [64, 128] from a `carry_address`."""
    for i in range(HEAD_DIM // 8):
        values = ptx.load_global_f32_x4(address + i * (16 * WARPGROUP))
        for j in range(4):
            acc[4 * i + j] = values[j]


def store_carry(address, acc):
    """Stores an accumulator [64, 128] to a `carry_address`."""
    for i in range(HEAD_DIM // 8):
        ptx.store_global_x4(address + i * (16 * WARPGROUP), [acc[4 * i + j] for j in range(4)])
