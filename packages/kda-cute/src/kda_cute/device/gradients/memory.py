"""Shared memory of the gradients kernel: the byte map, and addresses within regions.

============= ====== ===================================================================================================
region        bytes  holds
============= ====== ===================================================================================================
grad_o        16384  dO [64, V]: image in two panels of 64 values, operand A
grad_v        16384  dX, the same, behind dO: a warpgroup indexes the two
residual      16384  R, the same; operand A of R dS'^T, and B [N = 64 tokens, K = V] of dO R^T and dX R^T
state         32768  S [K, V]: image in two panels of 64 values, operand B [N = K, K = V]; rows in the order of `position`
grad_state    32768  dS' [K, V], the same
row_q, row_k  16384  raw q and k, an image in two panels of 64 channels; then rows with factors, an image with channels in the order
                     of `position`; those of k are negative
column        16384  columns with factors, the same
d_q, d_k       8192  dO R^T and dX R^T [64, 64], an image; their upper triangles do not count
exponent      32768  raw g; then G - M of every token and channel in fp32; then what the running sum of dg adds up
scales        3072   powers of two as bf16x2 that move factors between blocks: `scale_place`; twice for unbounded gates
tables        8192   one fp32 for each block of 16 rows and channel; see `Table`
sums          2560   sums over the channels of a half: [kind][half][row] fp32
kept          32     rows of a block whose columns have the middle anchor, by the channels of a half: [half][block]
steps         1600   two steps, see `Step`
barriers      112    full and empty mbarriers of the operands and of the steps
============= ====== ===================================================================================================
"""

from __future__ import annotations

from enum import IntEnum

import cutlass
from cutlass import Float32, Int32

from kda_cute.device import ptx
from kda_cute.records import HEAD_DIM

CHUNK = 64
BLOCKS = 4
BLOCK = 16
PAIRS = 6  # of a block of rows and an earlier block of columns
HALF = HEAD_DIM // 2  # channels of a warpgroup
TILES = HALF // 8  # of 8 channels, of a warpgroup
RUN = HALF // 4  # consecutive channels of a thread where it has a fragment of an accumulator
COMPUTE = 256  # threads
PANEL = CHUNK * 128  # bytes of an image [64, 64]
TABLE_ROW = 4 * HEAD_DIM


class Operand(IntEnum):
    """Operands that the producer loads, in the order of its loads. Each has a full and an empty mbarrier."""

    GRAD_O = 0
    RESIDUAL = 1
    GRAD_V = 2
    STATE = 3
    GRAD_STATE = 4


class Table(IntEnum):
    """Tables [4 blocks][128 channels] of fp32.

    ``TOTAL``: log decay of the block. ``MIDDLE``: the anchor M, an integer in the middle of G of the block. ``LAST``: G - M in
    the last row. ``END``: G - M of the last row of the chunk, with M of the block. A later stage of the chunk overwrites them:
    ``ENDS``: sums of Kg dKg over the rows of the block. ``RATE_SUM`` and ``BIAS_SUM``: sums of the gradients of A_log and dt_bias.
    ``TERMS``: sum of the terms of dg over the block.
    """

    TOTAL = 0
    MIDDLE = 1
    LAST = 2
    END = 3
    ENDS = 0
    RATE_SUM = 1
    BIAS_SUM = 2
    TERMS = 3


class Sum(IntEnum):
    """Sums over the channels of a row that cross the warpgroups."""

    Q_SQUARE = 0
    K_SQUARE = 1
    Q_DOT = 2  # q . uq
    BETA_DOT = 3  # k . ub
    K_DOT = 4  # k . dk


class Step(IntEnum):
    """Words of a step: a chunk and value head. Beta of the 64 tokens and dt_bias of the 128 channels follow them, in fp32.

    ``TOKEN``: the first one in B*T. ``VALID``: tokens of the chunk, 1 to 64; 0 behind the last step. ``HEAD``: the value head.
    ``KEY_HEAD``: its query and key head. ``MEMBER``: its number in its group. ``SLOT``: number of the chunk in the slab. ``RATE``: exp(A_log) in
    fp32. ``ZERO``: for `ptx.unpack_bf16x2_again`.
    """

    TOKEN = 0
    VALID = 1
    HEAD = 2
    KEY_HEAD = 3
    MEMBER = 4
    SLOT = 5
    RATE = 6
    ZERO = 7


STEP_BYTES = 32 + 4 * CHUNK + 4 * HEAD_DIM


def regions(unbounded: bool) -> dict[str, int]:
    """Returns the bytes of every region."""
    return {
        "grad_o": 2 * PANEL,
        "grad_v": 2 * PANEL,
        "residual": 2 * PANEL,
        "state": 4 * PANEL,
        "grad_state": 4 * PANEL,
        "row_q": 2 * PANEL,
        "row_k": 2 * PANEL,
        "column": 2 * PANEL,
        "d_q": PANEL,
        "d_k": PANEL,
        "exponent": 4 * CHUNK * HEAD_DIM,
        "tables": 4 * BLOCKS * TABLE_ROW,
        "sums": len(Sum) * 2 * CHUNK * 4,
        "kept": 2 * BLOCKS * 4,
        "steps": 2 * STEP_BYTES,
        "barriers": 2 * (len(Operand) + 2) * 8,
        "scales": (1 + unbounded) * PAIRS * TABLE_ROW,
    }


SIZES = regions(unbounded=False)
#: The offsets are those of both variants, because the region that differs is the last.
OFFSETS = {name: sum(list(SIZES.values())[:i]) for i, name in enumerate(SIZES)}


def shared_bytes(unbounded: bool) -> int:
    """Returns the bytes of shared memory of a variant."""
    return sum(regions(unbounded).values())


#: Shared memory that holds each operand.
REGION = {
    Operand.GRAD_O: "grad_o",
    Operand.RESIDUAL: "residual",
    Operand.GRAD_V: "grad_v",
    Operand.STATE: "state",
    Operand.GRAD_STATE: "grad_state",
}


def position(channel):
    """Returns the place of a channel, 0 to 63 of a half, among the columns of an accumulator and the rows of a B operand.

    A thread of a fragment has columns ``8 tile + 2 quad + e``. In this order they are the channels ``16 quad + 2 tile + e``, which
    follow one another in memory."""
    return ((channel & 15) >> 1) * 8 + (channel >> 4) * 2 + (channel & 1)


def table(base, kind: Table, block, channel):
    """Returns the address of a table's entry.

    Units of 16 bytes are swizzled, so that four quads access different banks, as those of `exponent`."""
    start = base + OFFSETS["tables"] + int(kind) * (BLOCKS * TABLE_ROW) + block * TABLE_ROW
    return start + ((channel * 4) ^ (channel >> 1 & 16))


def sum_address(base, kind: Sum, half, row):
    """Returns the address of a row's sum over the channels of a half."""
    return base + OFFSETS["sums"] + int(kind) * (2 * CHUNK * 4) + half * (CHUNK * 4) + row * 4


def through_address(base, half, place):
    """Returns the address of ``sum_v S dS'`` of the channel at a `position` of a half. It lies in the sums of Q_DOT: the warp that writes
    positions 16b to 16b + 15 is one of the two that read rows 16b to 16b + 15 of Q_DOT, and has met the other since."""
    return sum_address(base, Sum.Q_DOT, half, place)


def exponent(base, row, channel):
    """Returns the address of the exponent of a row and channel.

    Units of 16 bytes are swizzled, so that what 8 threads access at a time lies in different banks: four quads with units 4 apart of
    two neighbouring rows, or 8 neighbouring units."""
    unit = channel >> 2
    unit = unit ^ ((unit >> 3) & 1) ^ (row & 1) * 2
    return base + OFFSETS["exponent"] + row * TABLE_ROW + unit * 16 + (channel & 3) * 4


def raw_gate(place, row):
    """Returns the address of raw g of a row of the warp's block, the half's channels. It lies in the place of exponents of the row."""
    start = place.base + OFFSETS["exponent"] + place.half * (4 * HALF)
    return start + (place.block * BLOCK + row) * TABLE_ROW


def scale_place(base, i, j, half, row, kind=0):
    """Returns the address of the powers of two, as bf16x2, that move factors between the anchors of the blocks i > j: of the channels at
    positions ``row``, 8 + ``row``, ... of a half. ``kind`` 1: columns of j without the middle anchor."""
    pair = i * (i - 1) // 2 + j + kind * PAIRS
    return base + OFFSETS["scales"] + pair * TABLE_ROW + half * (4 * HALF) + row * (4 * TILES)


def kept_address(base, half, block):
    """Returns the address of a block's number of kept rows."""
    return base + OFFSETS["kept"] + (half * BLOCKS + block) * 4


def kept(base, block):
    """Loads the number of rows of a block whose columns have the middle anchor."""
    return cutlass.min(*(ptx.load_shared(kept_address(base, half, block), Int32) for half in range(2)))


def step(base, number):
    """Returns the address of a step by its number."""
    return base + OFFSETS["steps"] + (number & 1) * STEP_BYTES


def beta(step, row):
    """Returns the address of beta of a row of a step."""
    return step + 32 + 4 * row


def bias(step, channel):
    """Returns the address of dt_bias of a channel of a step's value head."""
    return step + 32 + 4 * CHUNK + 4 * channel


def image(start, row, column):
    """Returns the address of an element of an image [rows, 64] of bf16 whose column is even."""
    return start + row * 128 + ((column >> 3) ^ (row & 7)) * 16 + (column & 7) * 2


def load_floats(address):
    """Loads four fp32."""
    return ptx.load_shared_x4(address, Float32)


assert shared_bytes(unbounded=True) <= 227 * 1024
