"""Shared memory of a group of warps: the byte map by stage, the layouts inside a region, and a thread's addresses."""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Int32

from kda_cute.device import ptx
from kda_cute.records import BLOCK, HEAD_DIM, IntraChunkConfig

# Sizes in bytes. `Layout` draws what is inside.
BLOCK_BYTES = 8192  # exponents of a block, or its row factors
SLICE_BYTES = 2048  # of these, one slice of 32 channels
FRAGMENT_BYTES = 4096  # k or q of a block, or half of its columns
TABLE_ROW = 4 * HEAD_DIM  # a block's row of a table [blocks][128] fp32
TILE = 1024  # a 16x16 matrix in fp32, or its two bf16 parts (`blocks`)


@dataclass(frozen=True)
class Layout:
    """Byte offsets of the regions of a group's shared memory.

    Each region has one part for each block b of 16 rows. What a part holds, stage by stage (``x -> y``: y replaces x;
    blank: nothing):

    ============= ======== ======= ================== ============== ================== ===================
    region        bytes of request stage 1            stage 2        stage 3            stage 4
                  a block
    ============= ======== ======= ================== ============== ================== ===================
    exponents     8192     g       g -> G - A_b       -> row factors row factors        g of the next chunk
    k             4096             k                  k -> columns   columns -> inverse inverse, scratch
    q             4096     q       q                  q -> columns   columns            q of the next chunk
    first_decay    512             first_decay                       -> blocks of L     blocks of L
    last_exponent  512             last_exponent                     -> blocks of L     blocks of L
    anchor_scale   512             2^A_b              2^A_b          -> blocks of L     blocks of L
    hop_scale      512             2^hop              2^hop          2^hop
    hop_exponent   512             hop                hop
    beta            64             beta               beta           beta
    row_scale       64             `Gate.log_scale`
    ============= ======== ======= ================== ============== ================== ===================

    `fold.KeptColumns` puts Kg into q, and Aqk behind the inverse, from stage 3 to stage 4.

    first_decay is the log decay of row 0, last_exponent the G - A_b of row 15 (`decay`). A hop is A_{b+1} - A_b; that of the
    last block is G_end - A_b, to the end of the chunk. ``hop_exponent`` exists for unbounded gates only. Row factors are rows of k and q times 2^(G - A_b), in bf16. Columns are rows of k times
    2^(A_{b+1} - G), in fp32. The inverse is the diagonal block of (I + L)^-1.

    Offsets, with the end in the last row::

                      C = 64   unbounded     C = 32   unbounded
        exponents          0           0          0           0
        k              32768       32768      16384       16384
        q              49152       49152      24576       24576
        first_decay    65536       65536      32768       32768
        last_exponent  67584       67584      33792       33792
        anchor_scale   69632       69632      34816       34816
        hop_scale      71680       71680      35840       35840
        hop_exponent       -       73728          -       36864
        beta           73728       75776      36864       37888
        row_scale      73984       76032      36992       38016
        end            74240       76288      37120       38144

    Inside a part, with the slices m of 32 channels, the halves (row, row + 8) and the lane order of `Place`::

        exponents     [4 slices m][16 rows][8 units of 16 bytes], fp32. Unit u of a row lies at u ^ (row % 2): eight lanes
                      load from two adjacent rows at once, and then touch all banks.
          g, fp32     as the exponents, so that a lane overwrites only what it has read
          g, bf16     [2 panels of 64 channels][16 rows][128 bytes]; the panels lie at 0 and 4096, where slices 0 and 2 start
          row factors [4 slices m][k, q][2 steps] of 512 bytes: an A fragment, [4 matrices of 8x8][8 rows][16 bytes]
        k, q          [2 halves][4 slices m][32 lanes] of 16 bytes: 8 channels of a row in bf16
          columns     as k and q, but 4 channels in fp32: k has those of step 0, q those of step 1
          inverse     in k: 1280 bytes, the columns of a block while it is inverted; then 1024 bytes, the block in two parts. Behind
                      them 512 bytes of scratch
        tables        128 fp32, in the order of the channels
          blocks of L (1,0) (2,0) (2,1) (3,0) (3,1) (3,2) from first_decay on, 1024 bytes each, in two parts
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
    row_scale: int
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
            "row_scale": 4 * config.chunk,
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
        """Start of the three tables that the blocks of L replace in stage 3. No thread reads these tables after stage 2."""
        return self.first_decay

    def l_block(self, base, i, j):
        """Returns the address of block (i, j) of L, j < i, in two bf16 parts."""
        return base + self.tables + (i * (i - 1) // 2 + j) * TILE

    def inverse(self, base, block):
        """Returns the address of a diagonal block of (I + L)^-1: fp32 while it is computed, then in two bf16 parts."""
        return base + self.k + block * FRAGMENT_BYTES

    def scratch(self, base, block):
        """Returns the address of the 512 bytes of scratch of a block's warp in stages 3 and 4. They lie behind its inverse, and
        held columns before."""
        return self.inverse(base, block) + 2 * TILE


class Place:
    """Where the calling thread works in one turn: its block, its rows and channels, and the addresses of the regions.

    It follows from a `Worker`. ``row`` = lane // 4, the index of the thread's quad; rows ``row`` and ``row + 8`` of the block
    are the thread's two *halves*. ``quad_lane`` = lane % 4, its index in the quad: of each slice m of 32 channels it has
    channels ``32m + 8*quad_lane + 0..7``.
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
        self.row_scale = base + layout.row_scale
        self.thread, self.block, self.lane = thread, block, lane
        self.warp, self.row, self.quad_lane = thread // 32, lane // 4, lane % 4


def fragment_address(region, block, lane, half, m):
    """Returns the address of a thread's 16 bytes of k or q: slice m of its row ``half``."""
    return region + block * FRAGMENT_BYTES + (half * 4 + m) * 512 + lane * 16


def load_fragment(p: Place, region, half, m):
    """Loads bf16x2 [4]: the thread's 8 channels of slice m, in its row ``half`` of k or q."""
    return ptx.load_shared_x4(fragment_address(region, p.block, p.lane, half, m), Int32)


def load_exponents(p: Place, m, row):
    """Loads fp32 [8]: G - A_b of a row of the thread's block, its 8 channels of slice m."""
    start = p.exponents + p.block * BLOCK_BYTES + m * SLICE_BYTES + row * 128
    units = [start + ((2 * p.quad_lane + unit) ^ (row % 2)) * 16 for unit in range(2)]
    return [x for unit in units for x in ptx.load_shared_x4(unit, Float32)]


def load_channels(table, block, m, quad_lane):
    """Loads fp32 [8]: a thread's 8 channels of slice m, from a block's row of a table."""
    start = table + block * TABLE_ROW + m * 128 + quad_lane * 32
    return [x for unit in range(2) for x in ptx.load_shared_x4(start + 16 * unit, Float32)]
