"""16x16 blocks of L, T and Aqk: conversions of MMA fragments, and stores to shared memory and to images."""

from cutlass import Int32, cute

from kda_cute.device import ptx
from kda_cute.device.intra_chunk.memory import Layout
from kda_cute.records import BLOCK, image_offset


def pack(values):
    """Returns fp32 values as bf16x2, in pairs."""
    return [ptx.pack_bf16x2(values[i], values[i + 1]) for i in range(0, len(values), 2)]


def split(tiles):
    """Returns two accumulator tiles as the A fragment of their [16, 16], in two bf16 parts."""
    pairs = [tiles[i // 2][2 * (i % 2) : 2 * (i % 2) + 2] for i in range(4)]
    parts = [ptx.split_bf16x2(*pair) for pair in pairs]
    return [head for head, _ in parts], [tail for _, tail in parts]


def store_parts(address, parts):
    """Stores the two parts of a block, the lane's 16 bytes of each; ``address``: of the lane in the first part."""
    for i, part in enumerate(parts):
        ptx.store_shared_x4(address + 512 * i, part)


def load_parts(address):
    """Returns what `store_parts` stored."""
    return [ptx.load_shared_x4(address + 512 * i, Int32) for i in range(2)]


class Image:
    """Stores of blocks to the images [C, C] of T and Aqk in global memory."""

    def __init__(self, layout: Layout):
        self.layout = layout

    def address(self, image, i, j, lane):
        """Returns the address of a lane's 16 bytes of block (i, j): 8 columns from 8*(lane//16) on, of row lane % 16."""
        row, column = i * BLOCK + lane % BLOCK, j * BLOCK + 8 * (lane // BLOCK)
        return image + image_offset(row, column, self.layout.chunk, self.layout.chunk) * 2

    def store(self, image, fragment, i, j, lane, base):
        """Stores block (i, j), an A fragment, by way of the scratch of the calling warp, whose block is j."""
        scratch = self.layout.scratch(base, j) + lane * 16
        cute.arch.sync_warp()  # other lanes may still read the previous block
        ptx.stmatrix_x4(scratch, [fragment[0], fragment[1], fragment[2], fragment[3]])
        cute.arch.sync_warp()
        words = ptx.load_shared_x4(scratch, Int32)
        ptx.store_global_x4(self.address(image, i, j, lane), words, keep=True)

    def clear(self, image, i, j, lane):
        """Stores zeros to block (i, j), above the diagonal."""
        ptx.store_global_x4(self.address(image, i, j, lane), [Int32(0)] * 4, keep=True)
