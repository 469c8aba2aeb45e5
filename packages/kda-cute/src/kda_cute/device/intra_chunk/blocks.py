"""16x16 blocks of L, T and Aqk: conversions of MMA fragments, and stores to shared memory and to images.

A block is two accumulator tiles [16, 8], or the A fragment of the [16, 16] that they form. A block *in two parts* is the sum of
two bf16 matrices, the head (the rounded value) and the tail (the rounded remainder): 16 bits of each element. In shared memory
the parts follow one another, 512 bytes each, 16 bytes a lane: its registers of the A fragment.
"""

from cutlass import Int32, cute

from kda_cute.device import ptx
from kda_cute.device.intra_chunk.memory import Layout
from kda_cute.records import BLOCK, image_offset


def pack(values):
    """Returns fp32 values as bf16x2: neighbours become pairs."""
    return [ptx.pack_bf16x2(values[i], values[i + 1]) for i in range(0, len(values), 2)]


def fragment(tiles):
    """Returns two accumulator tiles, rounded to bf16, as the A fragment of their [16, 16]."""
    return pack([*tiles[0], *tiles[1]])


def fragment_in_parts(tiles):
    """Returns two accumulator tiles as the A fragment of their [16, 16] in two parts: (head, tail)."""
    pairs = [tiles[i // 2][2 * (i % 2) : 2 * (i % 2) + 2] for i in range(4)]
    parts = [ptx.split_bf16x2(*pair) for pair in pairs]
    return [head for head, _ in parts], [tail for _, tail in parts]


def store_parts(address, parts):
    """Stores a block in two parts. ``address``: of the lane's 16 bytes of the head."""
    for i, part in enumerate(parts):
        ptx.store_shared_x4(address + 512 * i, part)


def load_parts(address):
    """Returns the block in two parts that `store_parts` stored at ``address``: [head, tail]."""
    return [ptx.load_shared_x4(address + 512 * i, Int32) for i in range(2)]


class Image:
    """Stores blocks to the images [C, C] of T and Aqk in global memory."""

    def __init__(self, layout: Layout):
        self.layout = layout

    def address(self, image, i, j, lane):
        """Returns the address of a lane's 16 bytes of block (i, j): 8 columns from 8*(lane//16) on, of row lane % 16."""
        row, column = i * BLOCK + lane % BLOCK, j * BLOCK + 8 * (lane // BLOCK)
        return image + image_offset(row, column, self.layout.chunk, self.layout.chunk) * 2

    def store(self, image, fragment, i, j, lane, base):
        """Stores block (i, j), an A fragment in bf16. The calling warp's block is j.

        The fragment passes through the warp's scratch, so that each lane stores 16 contiguous bytes. The scratch is free
        once the warp has loaded its columns in stage 3.
        """
        scratch = self.layout.scratch(base, j) + lane * 16
        cute.arch.sync_warp()  # other lanes may still read the previous block
        ptx.stmatrix_x4(scratch, [fragment[0], fragment[1], fragment[2], fragment[3]])
        cute.arch.sync_warp()
        words = ptx.load_shared_x4(scratch, Int32)
        ptx.store_global_x4(self.address(image, i, j, lane), words, keep=True)

    def clear(self, image, i, j, lane):
        """Stores zeros to block (i, j), above the diagonal."""
        ptx.store_global_x4(self.address(image, i, j, lane), [Int32(0)] * 4, keep=True)
