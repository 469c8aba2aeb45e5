"""Shared memory of the gradients kernel: the byte map, and addresses within regions.

============= ====== ===================================================================================================
region        bytes  holds
============= ====== ===================================================================================================
grad_o        16384  dO [64, V]: image in two panels of 64 values, operand A
grad_v        16384  dX, the same
residual      16384  R, the same; operand A of R dS'^T, and B [N = 64 tokens, K = V] of dO R^T and dX R^T
state         32768  S [K, V]: image in two panels of 64 values, operand B [N = K, K = V]
grad_state    32768  dS' [K, V], the same
row_q, row_k  16384  rows with factors, [2 halves of K][64 tokens][64 channels], each half an image
column        16384  columns with factors, the same
exponent      32768  G - A of every token and channel in fp32; then what the running sum of dg adds up
d_q, d_k       8192  Dq and Dk [64, 64], an image
tables        2048   one fp32 for each block of 16 rows and channel; see `Table`
sums          2560   sums over the channels of a half: [kind][half][row] fp32
through       1024   sum over the values of a half of S dS': [half][channel] fp32
kept          32     rows of a block whose factors have the middle anchor, by the channels of a half: [half][block]
============= ====== ===================================================================================================
"""

from __future__ import annotations

from enum import IntEnum

import cutlass
from cutlass import Float32, Int32

from kda_cute.device import ptx
from kda_sm90.config import HEAD_DIM

CHUNK = 64
BLOCKS = 4
BLOCK = 16
HALF = HEAD_DIM // 2  # channels of a warpgroup
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

    ``TOTAL``: log decay of the block. ``ANCHOR``: A, the ceiling of G in the block's first row, an integer. ``MIDDLE``: the
    middle anchor minus A, an integer. ``LAST``: G in the last row minus A. ``ENDS``: sums of Kg dKg over the rows of the block.
    """

    TOTAL = 0
    ANCHOR = 1
    MIDDLE = 2
    LAST = 3
    ENDS = 4


class Sum(IntEnum):
    """Sums over the channels of a row that cross the warpgroups."""

    Q_SQUARE = 0
    K_SQUARE = 1
    Q_DOT = 2  # q . uq
    K_DOT = 3  # k . uk
    BETA_DOT = 4  # k . ub


SIZES = {
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
    "tables": len(Table) * BLOCKS * TABLE_ROW,
    "sums": len(Sum) * 2 * CHUNK * 4,
    "through": 2 * TABLE_ROW,
    "kept": 2 * BLOCKS * 4,
    "barriers": 2 * len(Operand) * 8,
}

OFFSETS = {name: sum(list(SIZES.values())[:i]) for i, name in enumerate(SIZES)}
BYTES = sum(SIZES.values())

#: Shared memory that holds each operand.
REGION = {
    Operand.GRAD_O: "grad_o",
    Operand.RESIDUAL: "residual",
    Operand.GRAD_V: "grad_v",
    Operand.STATE: "state",
    Operand.GRAD_STATE: "grad_state",
}


def table(base, kind: Table, block, channel):
    """Returns the address of a table's entry."""
    return base + OFFSETS["tables"] + int(kind) * (BLOCKS * TABLE_ROW) + block * TABLE_ROW + channel * 4


def sum_address(base, kind: Sum, half, row):
    """Returns the address of a row's sum over the channels of a half."""
    return base + OFFSETS["sums"] + int(kind) * (2 * CHUNK * 4) + half * (CHUNK * 4) + row * 4


def exponent(base, row, channel):
    """Returns the address of the exponent of a row and channel. Units of 16 bytes are swizzled by the row, so that the rows of
    a fragment lie in different banks."""
    unit = channel // 4 ^ row % 8 * 2
    return base + OFFSETS["exponent"] + row * TABLE_ROW + unit * 16 + channel % 4 * 4


def kept_address(base, half, block):
    """Returns the address of a block's number of kept rows."""
    return base + OFFSETS["kept"] + (half * BLOCKS + block) * 4


def kept(base, block):
    """Loads the number of rows of a block whose factors have the middle anchor."""
    return cutlass.min(*(ptx.load_shared(kept_address(base, half, block), Int32) for half in range(2)))


def image(start, row, column):
    """Returns the address of an element of an image [rows, 64] of bf16 whose column is even."""
    return start + row * 128 + (column // 8 ^ row % 8) * 16 + column % 8 * 2


def load_pair(address):
    """Loads two fp32."""
    return ptx.load_shared_x2(address, Float32)


def power(n: Float32) -> Float32:
    """Returns 2^n for an integer n below 128; 0 below -126."""
    exponent = Int32(n) + 127
    return Float32(ptx.float_of_bits(ptx.select(exponent > 0, exponent << 23, Int32(0))))
