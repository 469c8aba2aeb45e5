"""Shared memory of a group of warps: the byte map, and the part of each region that a thread owns."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Int32

from kda_cute.device import ptx
from kda_cute.records import BLOCK, HEAD_DIM, IntraChunkConfig

BLOCK_BYTES = 8192  # exponents of a block: [4 groups of channels][16 rows][32 channels] fp32
GROUP_BYTES = 2048  # of one group of channels; later 1024 bytes of k rows, then 1024 of q rows
FRAGMENT_BYTES = 4096  # k or q of a block, in fragment order: [2 halves][4 groups][32 lanes] of 16 bytes
TABLE_ROW = 4 * HEAD_DIM  # bytes of a block's row of a table [blocks][128] fp32
TILE = 1024  # bytes of a 16x16 matrix in fp32, or of its two bf16 parts in fragment order


@dataclass(frozen=True)
class Layout:
    """Byte offsets of the regions of a group's shared memory.

    What a region holds, stage by stage; ``x -> y``: y replaces x; blank: nothing. C tokens, B = C/16 blocks.

    ============= ====== ======= ================ ============== ==================== =====================
    region        bytes  request stage 1          stage 2        stage 3              stage 4
    ============= ====== ======= ================ ============== ==================== =====================
    exponents     8192 B g       g -> G - A_b     -> row factors row factors          g of the next chunk
    k             4096 B         k                k -> columns   columns -> inverse   inverse and scratch
    q             4096 B q       q                q -> columns   columns              q of the next chunk
    first_decay    512 B         g, first rows                   -> blocks of L       blocks of L
    last_exponent  512 B         G - A_b, last                   -> blocks of L       blocks of L
    anchor_scale   512 B         2^A_b            2^A_b          -> blocks of L       blocks of L
    hop_scale      512 B         2^(A_b+1 - A_b)  the same       the same
    hop_exponent   512 B         A_b+1 - A_b      the same
    beta           4 C           beta             beta           beta
    row_unit       4 C           units of gates
    ============= ====== ======= ================ ============== ==================== =====================

    Row factors: rows of k and q times 2^(G - A_b), bf16. Columns: rows of k times 2^(A_b+1 - G), fp32, each thread's in its
    own 16-byte units; channels of even MMA steps lie in ``k``, of odd ones in ``q``. Inverse: diagonal blocks of
    (I + L)^-1. ``hop_exponent`` exists for unbounded gates only.
    """

    chunk: int
    exponents: int
    k: int
    q: int
    first_decay: int
    last_exponent: int
    anchor_scale: int
    hop_scale: int
    hop_exponent: int
    beta: int
    row_unit: int
    bytes: int

    @classmethod
    def of(cls, config: IntraChunkConfig) -> Layout:
        """Returns the layout of a configuration."""
        blocks = config.chunk // BLOCK
        table = TABLE_ROW * blocks
        sizes = {
            "exponents": BLOCK_BYTES * blocks,
            "k": FRAGMENT_BYTES * blocks,
            "q": FRAGMENT_BYTES * blocks,
            "first_decay": table,
            "last_exponent": table,
            "anchor_scale": table,
            "hop_scale": table,
            "hop_exponent": table if config.unbounded else 0,
            "beta": 4 * config.chunk,
            "row_unit": 4 * config.chunk,
        }
        offsets, end = {}, 0
        for name, size in sizes.items():
            offsets[name] = end
            end += size
        return cls(config.chunk, **offsets, bytes=end)

    @property
    def blocks(self) -> int:
        """Blocks of 16 rows of a chunk."""
        return self.chunk // BLOCK

    @property
    def tables(self) -> int:
        """Start of the first three tables, which the blocks of L replace in stage 3."""
        return self.first_decay

    def l_block(self, base, i, j):
        """Returns the address of block (i, j) of L, j < i, in two bf16 parts."""
        return base + self.tables + (i * (i - 1) // 2 + j) * TILE

    def inverse(self, base, block):
        """Returns the address of a diagonal block of (I + L)^-1: fp32 while it is computed, then in two bf16 parts."""
        return base + self.k + block * FRAGMENT_BYTES

    def scratch(self, base, block):
        """Returns the address of the 512 bytes of scratch of a block's warp in stages 3 and 4, after its block of the inverse."""
        return self.inverse(base, block) + TILE


class Place:
    """The calling thread in its group: its block, its row and quad in MMA fragments, and the addresses of the regions.

    ``row`` = lane // 4 and ``row + 8`` are the thread's two rows of the block, its *halves*. ``quad`` = lane % 4: of each
    group of 32 channels m it holds ``32m + 8*quad + 0..7``.
    """

    def __init__(self, layout: Layout, thread, block, base):
        lane = thread % 32
        self.base = base
        self.exponents = base + layout.exponents
        self.k = base + layout.k
        self.q = base + layout.q
        self.first_decay = base + layout.first_decay
        self.last_exponent = base + layout.last_exponent
        self.anchor_scale = base + layout.anchor_scale
        self.hop_scale = base + layout.hop_scale
        self.hop_exponent = base + layout.hop_exponent
        self.beta = base + layout.beta
        self.row_unit = base + layout.row_unit
        self.thread, self.block, self.lane = thread, block, lane
        self.warp, self.row, self.quad = thread // 32, lane // 4, lane % 4


def fragment_address(region, block, lane, half, m):
    """Returns the address of a thread's 16 bytes of k or q: group m of its row ``half``."""
    return region + block * FRAGMENT_BYTES + (half * 4 + m) * 512 + lane * 16


def load_fragment(p: Place, region, half, m):
    """Loads bf16x2 [4]: group m of the thread's row ``half`` of k or q."""
    return ptx.load_shared_x4(fragment_address(region, p.block, p.lane, half, m), Int32)


def load_exponents(p: Place, m, row):
    """Loads G - A_b of a row of the thread's block, its 8 channels of group m."""
    start = p.exponents + p.block * BLOCK_BYTES + m * GROUP_BYTES + row * 128
    units = [start + ((2 * p.quad + unit) ^ (row % 2)) * 16 for unit in range(2)]
    return [x for unit in units for x in ptx.load_shared_x4(unit, Float32)]


def load_channels(table, block, m, quad):
    """Loads a thread's 8 channels of group m from a block's row of a table."""
    place = table + block * TABLE_ROW + m * 128 + quad * 32
    return [x for unit in range(2) for x in ptx.load_shared_x4(place + 16 * unit, Float32)]
