"""Products by mma.sync of a warp's 16 rows with an image of 128 columns in shared memory.

A thread has 64 fp32 accumulators. For every 8 columns these are the elements [lane // 4, 2 * (lane % 4)], its right neighbour,
and the two elements 8 rows below.
"""

from cutlass import Float32, cute

from kda_cute.device import ptx
from kda_cute.records import BLOCK, HEAD_DIM, image_offset

PAIRS = HEAD_DIM // 16  # pairs of tiles of 8 columns


def zeros():
    """Returns accumulators of 0."""
    acc = cute.make_rmem_tensor((HEAD_DIM // 2,), Float32)
    acc.fill(0.0)
    return acc


def lane_address(image, row, column, rows, columns, lane):
    """Returns the address of the lane's 16 bytes of the four 8x8 matrices that cover [row..row+15, column..column+15]."""
    return image + image_offset(row + lane % BLOCK, column + 8 * (lane // BLOCK), rows, columns) * 2


def multiply_add(acc, a, image, row, rows, lane):
    """Computes acc += a B. ``a``: an A fragment of 16 columns. B: 16 rows from ``row`` on of an image [rows, 128]."""
    for pair in range(PAIRS):
        b = ptx.ldmatrix_x4(lane_address(image, row, pair * 16, rows, HEAD_DIM, lane), transpose=True)
        for tile in range(2):
            at = 8 * pair + 4 * tile
            c = [acc[at + i] for i in range(4)]
            for i, value in enumerate(ptx.mma_m16n8k16(a, b[2 * tile : 2 * tile + 2], c)):
                acc[at + i] = value


def store(acc, image, row, rows, lane):
    """Stores the accumulators, rounded, to 16 rows from ``row`` on of an image [rows, 128]."""
    for pair in range(PAIRS):
        words = [ptx.pack_bf16x2(acc[8 * pair + i], acc[8 * pair + i + 1]) for i in (0, 2, 4, 6)]
        ptx.stmatrix_x4(lane_address(image, row, pair * 16, rows, HEAD_DIM, lane), words)
