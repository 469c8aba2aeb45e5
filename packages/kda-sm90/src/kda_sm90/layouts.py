"""Workspace of a launch: chunk records, counters, and the states that chains pass on.

A chunk record holds the operands of one chunk of one value head: six arrays, one after the other. `kernels.schedule` maps chunks to
records: each queue has a ring of records, or each slot has a record of its own. The arrays are byte images of shared memory, so the chain
loads each of them with one bulk copy and needs no tensor map.

====  ===============  =======================================================================================
kd    ``-Kd`` [C, K]    bf16, K-major image of a wgmma B operand with N = C. Negated: the chain adds it to v.
qd    ``Qd`` [C, K]     bf16, the same image, scale included.
kg    ``Kg`` [C, K]     bf16, MN-major image of a B operand with N = K, reduced over tokens: the same bytes
                        as the K-major image of [C, K].
aqk   ``Aqk`` [C, C]    bf16, K-major image of a B operand with N = C rows, reduced over columns.
t     ``T`` [C, C]      bf16, the same image.
a     ``a`` [K]         fp32, decay of the whole chunk, ``2^G_end``, in the order of ``decay_offset``.
====  ===============  =======================================================================================

Folded records (`PrefillConfig.folded`) hold ``T^T Kg`` in kg and ``Aqk T`` in aqk. Their t is written only where
`PrefillConfig.keeps_inverse` says so.

*carry* [queues, halves, 64*128] fp32 holds the states that one chain passes to the next, in the order of its registers. It has
more halves in the mode ``recompute`` (`PrefillConfig.carries`).

`kda_cute.records` defines the images.

Importing this module needs only torch. The functions that return CuTe layouts import the DSL when they are called.
"""

from __future__ import annotations

import functools
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from kda_cute.records import decay_offset, image_offset, require
from kda_sm90.config import HEAD_DIM

require(1, "kda-sm90")  # version of the record layout that the chain reads

#: Counters per line of 128 bytes. Counters that different CTAs write lie in different lines of the L2.
LINE = 32

#: Most packed sequences whose slots are compact (`kernels.schedule`). Their first slots take the shared memory that the other buffers of a chain
#: leave in every variant.
COMPACT_SEQUENCES = 223

#: Bytes of one half of a state: 64 rows of S^T in fp32.
CARRY_BYTES = 2 * HEAD_DIM * HEAD_DIM


class QueueCounter(IntEnum):
    """First counter of each kind in the line of a queue. Each kind has one counter per half (`config.HALVES`)."""

    READ = 0
    STATE_READY = 4


class LaunchCounter(IntEnum):
    """Counters in the line of the launch. The ticket takes two of them."""

    CLAIMED = 0
    CLEAR_SEEN = 1
    TICKET = 2


class Workspace(NamedTuple):
    """Views of a workspace. The arrays of records are columns of one matrix of bytes, a record per row.

    Shapes: kd, qd, kg [records, C*128] bf16; aqk, t [records, C*C] bf16; a [records, 128] fp32;
    counters int32 [(queues + 1)*LINE + records, rounded up to whole lines]; carry [queues, halves, 64*128] fp32.
    """

    kd: torch.Tensor
    qd: torch.Tensor
    kg: torch.Tensor
    aqk: torch.Tensor
    t: torch.Tensor
    a: torch.Tensor
    counters: torch.Tensor
    carry: torch.Tensor


def slot_count(B: int, T: int, C: int, N: int | None = None) -> int:
    """Returns the slots of a head: ``B * ceil(T/C)``, or ``T//C + N`` where N sequences are packed along T.

    Packed sequence n, which starts at token s, has its first slot at ``s//C + n``. The slots of two sequences never
    overlap, because ``ceil(len/C) <= end//C - s//C + 1``. So kernels need no prefix sum, and some slots stay unused. Compact slots
    (`COMPACT_SEQUENCES`) are no more than these.
    """
    return B * -(-T // C) if N is None else T // C + N


def record_bytes(C: int) -> dict[str, int]:
    """Returns the bytes of each array of a record, in memory order. C: tokens per chunk."""
    wide, square = 2 * C * HEAD_DIM, 2 * C * C
    return {"kd": wide, "qd": wide, "kg": wide, "aqk": square, "t": square, "a": 4 * HEAD_DIM}


@functools.cache
def record_pitch(C: int) -> int:
    """Returns the bytes from a record to the next, a multiple of 128."""
    return sum(record_bytes(C).values())


def counter_bytes(records: Any, queues: Any) -> Any:
    """Returns the bytes of the counters: one line for the launch, one line per queue, and one counter per record, in whole lines.
    ``records``, ``queues``: ints, or integers of the DSL."""
    return (queues + 1 + (records + LINE - 1) // LINE) * (LINE * 4)


def workspace_bytes(records: int, queues: int, C: int, halves: int = 2) -> int:
    """Returns the bytes of a workspace."""
    return records * record_pitch(C) + counter_bytes(records, queues) + queues * halves * CARRY_BYTES


def split_workspace(buffer: torch.Tensor, records: int, queues: int, C: int, halves: int = 2) -> Workspace:
    """Returns the arrays in a buffer, as views.

    Args:
        buffer: uint8 [at least ``workspace_bytes``], aligned to 128 bytes.
        records, queues, C, halves: number of records and queues, tokens per chunk, and `PrefillConfig.carries`.

    Raises:
        ValueError: the buffer is not 1-D uint8, is too short, or is not aligned.
    """
    need = workspace_bytes(records, queues, C, halves)
    if buffer.dtype is not torch.uint8 or buffer.dim() != 1 or buffer.numel() < need:
        raise ValueError(
            f"workspace: expected at least {need} bytes of uint8 in one dimension, "
            f"got {tuple(buffer.shape)} of {buffer.dtype}"
        )
    if buffer.data_ptr() % 128:
        raise ValueError(
            f"workspace: expected an address that is a multiple of 128, got {buffer.data_ptr():#x}"
        )
    parts = records * record_pitch(C), counter_bytes(records, queues), queues * halves * CARRY_BYTES
    all_records, counters, carry = buffer[:need].split(parts)
    arrays = all_records.view(records, record_pitch(C)).split(list(record_bytes(C).values()), dim=1)
    dtypes = [torch.float32 if name == "a" else torch.bfloat16 for name in record_bytes(C)]
    views = [array.view(dtype) for array, dtype in zip(arrays, dtypes, strict=True)]
    views += [counters.view(torch.int32), carry.view(torch.float32).view(queues, halves, CARRY_BYTES // 4)]
    return Workspace(*views)


# ---- images and the matrices that they hold


def _offsets(name: str, C: int) -> torch.Tensor:
    """Returns the offset in the image, in elements, of each element of the matrix."""
    if name == "a":
        return decay_offset(torch.arange(HEAD_DIM))
    columns = C if name in ("aqk", "t") else HEAD_DIM
    row, column = torch.arange(C).view(-1, 1), torch.arange(columns).view(1, -1)
    return image_offset(row, column, C, columns)


def unpack(name: str, records: torch.Tensor, C: int) -> torch.Tensor:
    """Returns the matrices [..., C, columns] in records [..., C*columns] of the array ``name``. kd stays negated."""
    return records[..., _offsets(name, C).to(records.device)]


def pack(name: str, logical: torch.Tensor, C: int) -> torch.Tensor:
    """Returns the records [..., C*columns] of matrices [..., C, columns]: the inverse of ``unpack``."""
    flat = logical if name == "a" else logical.flatten(-2)
    records = torch.empty_like(flat)
    records[..., _offsets(name, C).to(logical.device).flatten()] = flat
    return records


def unpack_states(images: torch.Tensor) -> torch.Tensor:
    """Returns the states [..., 128, 128], as [K, V], that the chains of a backward store as images: for each half of V, the swizzled
    image of [K, 64] in shared memory."""
    row, column = torch.arange(HEAD_DIM).view(-1, 1), torch.arange(HEAD_DIM).view(1, -1)
    return images.flatten(-2)[..., image_offset(row, column, HEAD_DIM, HEAD_DIM).to(images.device)]


# ---- images as CuTe layouts


def operand_layout(C: int, stages: int) -> Any:
    """Returns the CuTe layout (C, K, stages) of kd and qd: a K-major B operand with N = C."""
    return _b_layout("K_SW128", C, HEAD_DIM, stages)


def kg_layout(C: int, stages: int) -> Any:
    """Returns the CuTe layout (K, C, stages) of kg: an MN-major B operand with N = K, reduced over tokens."""
    return _b_layout("MN_SW128", HEAD_DIM, C, stages)


def square_layout(C: int, stages: int) -> Any:
    """Returns the CuTe layout (C, C, stages) of aqk and t: a K-major B operand."""
    return _b_layout("K_SW64" if C == 32 else "K_SW128", C, C, stages)


def transposed_square_layout(C: int, stages: int) -> Any:
    """Returns the CuTe layout (C, C, stages) of aqk and t as MN-major B operands, reduced over their rows."""
    return _b_layout("MN_SW64" if C == 32 else "MN_SW128", C, C, stages)


def _b_layout(kind: str, n: int, k: int, stages: int) -> Any:
    """Returns the layout (n, k, stages) of swizzle atoms with rows of 64 or 128 bytes, repeated along the strided
    mode first and along the contiguous mode last."""
    from cutlass import BFloat16, cute
    from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind, make_smem_layout_atom

    atom = make_smem_layout_atom(SmemLayoutAtomKind[kind], BFloat16)
    return cute.tile_to_shape(atom, (n, k, stages), order=(1, 0, 2) if kind.startswith("MN") else (0, 1, 2))
