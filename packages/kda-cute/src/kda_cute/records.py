"""What `preparation` makes of a chunk's tokens, and the chains of both GPU backends take: kinds of gates, sizes, and the
byte images of matrices.

An image swizzles rows of 128 bytes: 16-byte column index XOR row mod 8 (byte address bits 4-6 with bits 7-9). Rows of
64 bytes, which occur where a chunk has 32 tokens, swizzle bits 4-5 with bits 7-8. Wider rows are cut into panels of 64
columns, one after the other. wgmma and tcgen05 take such images as operands, K-major, or MN-major as their transposes.

Importing this needs neither torch nor the DSL.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

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


class IntraChunkConfig(Protocol):
    """What the code of `preparation.IntraChunk` depends on: a part of a kernel's configuration.

    ``chunk``: tokens a chunk, 32 or 64. ``gate``: the form of the gate. ``vote``: the log decays may lie below -5, so
    that columns of a block have to vote on split factors; False is the promise that they do not. ``gate_dtype``: of g.
    """

    @property
    def chunk(self) -> int: ...
    @property
    def gate(self) -> Gate: ...
    @property
    def vote(self) -> bool: ...
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
