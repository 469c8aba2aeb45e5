"""Products by mma.sync of 16 rows, a warp's, with an image of 128 columns in shared memory.

Sums are 64 fp32 of a thread: of each 8 columns elements [lane // 4, 2 * (lane % 4)], its right neighbour, and the two 8 rows
further down.
"""

from cutlass import Float32, cute

from kda_cute.device import ptx
from kda_cute.records import BLOCK, HEAD_DIM, image_offset

PAIRS = HEAD_DIM // 16  # of tiles of 8 columns


def zeros():
    """Sums to begin with."""
    acc = cute.make_rmem_tensor((HEAD_DIM // 2,), Float32)
    acc.fill(0.0)
    return acc


def place(image, row, column, rows, columns, lane):
    """Where a lane's row of 16 bytes is, of the four 8x8 matrices of the 16x16 from ``row``, ``column`` on."""
    return image + image_offset(row + lane % BLOCK, column + 8 * (lane // BLOCK), rows, columns) * 2


def add(acc, a, image, row, rows, lane):
    """acc += a B: 16 columns of a, as an A fragment, times 16 rows from ``row`` on of an image [rows, 128]."""
    for pair in range(PAIRS):
        b = ptx.ldmatrix_x4(place(image, row, pair * 16, rows, HEAD_DIM, lane), transpose=True)
        for tile in range(2):
            at = 8 * pair + 4 * tile
            c = [acc[at + i] for i in range(4)]
            for i, value in enumerate(ptx.mma_m16n8k16(a, b[2 * tile : 2 * tile + 2], c)):
                acc[at + i] = value


def store(acc, image, row, rows, lane):
    """The sums, rounded, to 16 rows from ``row`` on of an image [rows, 128]."""
    for pair in range(PAIRS):
        words = [ptx.pack_bf16x2(acc[8 * pair + i], acc[8 * pair + i + 1]) for i in (0, 2, 4, 6)]
        ptx.stmatrix_x4(place(image, row, pair * 16, rows, HEAD_DIM, lane), words)
