"""Chunk records: the layout of what the intra-chunk stage writes and the chains of both GPU backends read.

A record is the byte image of operands in shared memory, so that a chain loads each operand with one bulk copy. An image
swizzles rows of 128 bytes: 16-byte column index XOR row mod 8 (byte address bits 4-6 with bits 7-9). Rows of 64 bytes, which
occur in chunks of 32 tokens, swizzle bits 4-5 with bits 7-8. Wider rows are cut into panels of 64 columns, one after the
other. wgmma and tcgen05 accept such images as operands, K-major, or MN-major as their transposes.

Importing this needs neither torch nor the DSL.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

#: Version of the record layout. It rises with every change of `image_offset`, of `decay_offset`, or of what an operand holds.
#: A backend calls `require` at import, so that its chain never reads records of another layout.
RECORDS = 1

#: Channels of a query or key head, and of a value head. The kernels are written for these.
HEAD_DIM = 128

#: Rows of a diagonal block. Within a block decay may be split into a row factor and a column factor.
BLOCK = 16

#: Columns of a panel of an image: 128 bytes of bf16.
PANEL = 64

#: How a log decay follows from g. ``precomputed``: g is the log decay. ``bounded``: ``lower_bound * sigmoid(exp(A_log) *
#: (g + dt_bias))``. ``softplus``: ``-exp(A_log) * softplus(g + dt_bias)``, linear above 20.
Gate = Literal["precomputed", "bounded", "softplus"]
GateDtype = Literal["bfloat16", "float32"]
StateDtype = Literal["bfloat16", "float32"]


def require(version: int, package: str) -> None:
    """Raises ImportError unless `RECORDS` is ``version``, the layout that ``package`` was written for."""
    if version != RECORDS:
        raise ImportError(
            f"{package} needs version {version} of the record layout; the installed kda-cute has version {RECORDS}; "
            f"install {package} and kda-cute at the same version"
        )


class IntraChunkConfig(Protocol):
    """The part of a kernel's configuration that `kda_cute.device.intra_chunk.IntraChunk` reads.

    ``chunk``: tokens of a chunk, 32 or 64. ``gate``: the form of the gate. ``unbounded``: log decays may lie below -5, so that
    columns of a block need a vote on split factors; False promises that none does. ``gate_dtype``: dtype of g.
    """

    @property
    def chunk(self) -> int: ...
    @property
    def gate(self) -> Gate: ...
    @property
    def unbounded(self) -> bool: ...
    @property
    def gate_dtype(self) -> GateDtype: ...


def image_offset(row: Any, column: Any, rows: int, columns: int) -> Any:
    """Returns the element offset of [row, column] in the image of a bf16 [rows, columns] matrix.

    ``rows``, ``columns``: ints; 32 columns or a multiple of 64. ``row``, ``column``: ints, torch integer tensors or integers
    of the DSL, because tests and kernels share this arithmetic.
    """
    if columns == 32:
        # two rows share 128 bytes: bits 4-5 XOR bits 7-8
        return row * 32 + ((((column // 8) % 4) ^ ((row // 2) % 4)) * 8 + column % 8)
    panel = (column // PANEL) * (rows * PANEL)
    return panel + row * PANEL + ((((column // 8) % 8) ^ (row % 8)) * 8 + column % 8)


def decay_offset(channel: Any) -> Any:
    """Returns the position of a channel's decay in the record's array ``a`` (fp32, in elements).

    A thread of a chain reads channels 8j + 2*quad_lane + {0, 1}, quad_lane = lane % 4. The 32 values of a quad_lane are
    contiguous. The XOR puts the 16-byte units that the four lanes of a quad read at the same time on different banks.
    """
    quad_lane, unit = channel % 8 // 2, channel // 16
    return quad_lane * 32 + (unit ^ quad_lane) * 4 + channel // 8 % 2 * 2 + channel % 2


def decay_start(quad_lane: Any) -> Any:
    """Returns the byte offset of a thread's first unit; see `decay_units`. ``quad_lane``: lane % 4."""
    return quad_lane * (4 * 32 + 16)


def decay_units(start: Any) -> list[Any]:
    """Returns the byte addresses of the eight 16-byte units that hold a thread's decays: the inverse of `decay_offset`.

    Unit u holds channels ``16u + 2*quad_lane + {0, 1, 8, 9}``, in this order. ``start``: `decay_start` plus the address of the
    record's decays, a multiple of 128.
    """
    swizzled = [start ^ (unit * 16) for unit in range(4)]
    # Units 4 to 7 by a sum and not by XOR with 64, because a load takes a sum as its immediate offset.
    return [swizzled[unit % 4] + unit // 4 * 64 for unit in range(8)]
