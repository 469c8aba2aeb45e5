"""What `preparation` makes of a chunk's tokens, and the chains of both GPU backends take: kinds of gates, sizes, and the
byte images of matrices.

An image swizzles rows of 128 bytes: 16-byte column index XOR row mod 8 (byte address bits 4-6 with bits 7-9). Rows of
64 bytes, which occur where a chunk has 32 tokens, swizzle bits 4-5 with bits 7-8. Wider rows are cut into panels of 64
columns, one after the other. wgmma and tcgen05 take such images as operands, K-major, or MN-major as their transposes.

Importing this needs neither torch nor the DSL.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

#: Version of the record layout. It rises with every change of an image, of ``decay_offset`` or of what an operand holds, so
#: that a kernel never reads records of another layout.
RECORDS = 1

#: Channels of a query or key head, and of a value head. The kernels are written for these.
HEAD_DIM = 128

#: Rows of a diagonal block: the span in which decay may be split into a row and a column factor.
BLOCK = 16

#: Columns of an image's panel: 128 bytes of bf16.
PANEL = 64

#: How g becomes a log decay. ``precomputed``: it is one. ``bounded``: ``lower_bound * sigmoid(exp(A_log) *
#: (g + dt_bias))``. ``softplus``: ``-exp(A_log) * softplus(g + dt_bias)``, linear above 20.
Gate = Literal["precomputed", "bounded", "softplus"]
GateDtype = Literal["bfloat16", "float32"]


def require(version: int, package: str) -> None:
    """Raises ImportError unless `RECORDS` is ``version``, the layout that ``package`` was written for."""
    if version != RECORDS:
        raise ImportError(
            f"{package} needs version {version} of the record layout; the installed kda-cute has version {RECORDS}; "
            f"install {package} and kda-cute at the same version"
        )


class IntraChunkConfig(Protocol):
    """What the code of `preparation.IntraChunk` depends on: a part of a kernel's configuration.

    ``chunk``: tokens a chunk, 32 or 64. ``gate``: the form of the gate. ``unbounded``: the log decays may lie below -5, so
    that columns of a block have to vote on split factors; False is the promise that they do not. ``gate_dtype``: of g.
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
    """Element offset of [row, column] in the image of a bf16 [rows, columns].

    ``rows`` and ``columns`` are ints; ``row`` and ``column`` ints, torch integer tensors or DSL integers: it is
    arithmetic alone, so that tests and kernels share it. Columns: 32 or a multiple of 64.
    """
    if columns == 32:
        # two rows share 128 bytes: bits 4-5 XOR bits 7-8
        return row * 32 + ((((column // 8) % 4) ^ ((row // 2) % 4)) * 8 + column % 8)
    panel = (column // PANEL) * (rows * PANEL)
    return panel + row * PANEL + ((((column // 8) % 8) ^ (row % 8)) * 8 + column % 8)


def decay_offset(channel: Any) -> Any:
    """Where the decay of a channel is. A thread of a chain needs those of channels 8j + 2*quad + 0..1: they lie side
    by side for each quad, in 16-byte units that differ in their banks from those of the other quads."""
    quad, unit = channel % 8 // 2, channel // 16
    return quad * 32 + (unit ^ quad) * 4 + channel // 8 % 2 * 2 + channel % 2


def decay_start(quad: Any) -> Any:
    """Byte offset of the first of the eight units of `decay_units`. ``quad``: lane % 4."""
    return quad * (4 * 32 + 16)


def decay_units(start: Any) -> list[Any]:
    """Byte addresses of the eight 16-byte units that hold the decays of one thread: the inverse of `decay_offset`.

    Unit u holds channels ``16u + 2*quad + {0, 1, 8, 9}``, in this order. ``start``: `decay_start` plus the address of the
    record's decays, a multiple of 128.
    """
    swizzled = [start ^ (unit * 16) for unit in range(4)]
    # The sum, and not an exclusive or with 64: a load takes it as its immediate offset.
    return [swizzled[unit % 4] + unit // 4 * 64 for unit in range(8)]
