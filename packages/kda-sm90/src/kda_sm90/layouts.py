"""The workspace between the preparation and the chain: six arrays of chunk records, states on the way, and counters.

A record is one chunk of a sequence and value head. ``kernels/schedule.py`` says which one is where when: each stream of
a launch has a ring of them, or each slot its own; and what is counted. Records are byte images of
shared memory, so that the chain loads each with one bulk copy and no tensor map.

====  ===============  =======================================================================================
kd    ``-Kd`` [C, K]    bf16, K-major image of a wgmma B operand with N = C. Negated: the chain adds it to v.
qd    ``Qd`` [C, K]     bf16, the same image, scale included.
kg    ``Kg`` [C, K]     bf16, MN-major image of a B operand with N = K, reduced over tokens: the same bytes
                        as the K-major image of [C, K].
aqk   ``Aqk`` [C, C]    bf16, K-major image of a B operand with N = C rows, reduced over columns.
t     ``T`` [C, C]      bf16, the same image.
a     ``a`` [K]         fp32, decay of the whole chunk, ``2^G_end``, in the order of ``decay_offset``.
====  ===============  =======================================================================================

*carry* [streams, halves, 64*128] fp32 are states that one chain hands over to another, as its registers hold them.

`kda_cute.records` defines the images.

Importing this module needs torch alone; what returns CuTe layouts imports the DSL when it is called.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from kda_cute.records import decay_offset, image_offset, require
from kda_sm90.config import HEAD_DIM

require(1, "kda-sm90")  # the record layout that the chain reads

LINE = 32  # counters in 128 bytes: those that different CTAs write lie in different lines of the L2
HANDED = 4  # the first of a stream's line that tells of states, behind those of what was read
BEGUN, TICKET = 1, 2  # in the last line, behind the number of items that were claimed; the ticket is two wide
CARRY_BYTES = 2 * HEAD_DIM * HEAD_DIM  # of a half: 64 rows of S^T in fp32


class Workspace(NamedTuple):
    """Views of one workspace, in the order in which they lie.

    kd, qd, kg [records, C*128] bf16; aqk, t [.., C*C] bf16; a [.., 128] fp32; carry [streams, halves, 64*128] fp32;
    counters int32 [streams*LINE + LINE + records, in whole lines].
    """

    kd: torch.Tensor
    qd: torch.Tensor
    kg: torch.Tensor
    aqk: torch.Tensor
    t: torch.Tensor
    a: torch.Tensor
    carry: torch.Tensor
    counters: torch.Tensor


def slot_count(B: int, T: int, C: int, N: int | None = None) -> int:
    """Slots of a call: ``B * ceil(T/C)``, or ``T//C + N`` where N sequences are packed along T.

    A packed sequence that starts at token s is number n, and its first slot is ``s//C + n``; ranges never
    overlap, because ``ceil(len/C) <= end//C - s//C + 1``. So no kernel needs a prefix sum, and a slot may
    stay unused.
    """
    return B * -(-T // C) if N is None else T // C + N


def record_bytes(C: int) -> dict[str, int]:
    """Bytes of a record in each array, in their order in the workspace."""
    wide, square = 2 * C * HEAD_DIM, 2 * C * C
    return {"kd": wide, "qd": wide, "kg": wide, "aqk": square, "t": square, "a": 4 * HEAD_DIM}


def _counters(records: int, streams: int) -> int:
    """A line of what its chains have done for each stream, a line of those that are no stream's, and one a record."""
    return (streams + 1 + -(-records // LINE)) * LINE


def _arrays(
    records: int, streams: int, C: int, halves: int
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of every array."""
    arrays: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for name, size in record_bytes(C).items():
        dtype = torch.float32 if name == "a" else torch.bfloat16
        arrays[name] = (dtype, (records, size // dtype.itemsize))
    arrays["carry"] = (torch.float32, (streams, halves, CARRY_BYTES // 4))
    return arrays | {"counters": (torch.int32, (_counters(records, streams),))}


def workspace_bytes(records: int, streams: int, C: int, halves: int = 2) -> int:
    """Bytes of a workspace; every array is a multiple of 128."""
    arrays = _arrays(records, streams, C, halves).values()
    return sum(math.prod(shape) * dtype.itemsize for dtype, shape in arrays)


def split_workspace(buffer: torch.Tensor, records: int, streams: int, C: int, halves: int = 2) -> Workspace:
    """The arrays in one uint8 buffer of at least ``workspace_bytes``, aligned to 128 bytes.

    Raises ValueError on another dtype, on a buffer that is too short, and on one that is not aligned.
    """
    need = workspace_bytes(records, streams, C, halves)
    if buffer.dtype is not torch.uint8 or buffer.dim() != 1 or buffer.numel() < need:
        raise ValueError(
            f"workspace: expected at least {need} bytes of uint8 in one dimension, "
            f"got {tuple(buffer.shape)} of {buffer.dtype}"
        )
    if buffer.data_ptr() % 128:
        raise ValueError("workspace: expected an address that is a multiple of 128")
    views, start = [], 0
    for dtype, shape in _arrays(records, streams, C, halves).values():
        end = start + math.prod(shape) * dtype.itemsize
        views.append(buffer[start:end].view(dtype).view(shape))
        start = end
    return Workspace(*views)


# ---- logical matrices


def _offsets(name: str, C: int) -> torch.Tensor:
    if name == "a":
        return decay_offset(torch.arange(HEAD_DIM))
    columns = C if name in ("aqk", "t") else HEAD_DIM
    row, column = torch.arange(C).view(-1, 1), torch.arange(columns).view(1, -1)
    return image_offset(row, column, C, columns)


def unpack(name: str, records: torch.Tensor, C: int) -> torch.Tensor:
    """Logical [..., C, columns] of the records [..., C*columns] of the array ``name``. Signs stay: kd is -Kd."""
    return records[..., _offsets(name, C).to(records.device)]


def pack(name: str, logical: torch.Tensor, C: int) -> torch.Tensor:
    """The inverse of ``unpack``: records [..., C*columns] of a logical [..., C, columns]."""
    flat = logical if name == "a" else logical.flatten(-2)
    records = torch.empty_like(flat)
    records[..., _offsets(name, C).to(logical.device).flatten()] = flat
    return records


# ---- the same as CuTe layouts


def operand_layout(C: int, stages: int) -> Any:
    """CuTe layout (C, K, stages) of kd and qd: a K-major B operand with N = C."""
    return _b_layout("K_SW128", C, HEAD_DIM, stages)


def kg_layout(C: int, stages: int) -> Any:
    """CuTe layout (K, C, stages) of kg: an MN-major B operand with N = K, reduced over tokens."""
    return _b_layout("MN_SW128", HEAD_DIM, C, stages)


def square_layout(C: int, stages: int) -> Any:
    """CuTe layout (C, C, stages) of aqk and t: a K-major B operand."""
    return _b_layout("K_SW64" if C == 32 else "K_SW128", C, C, stages)


def _b_layout(kind: str, n: int, k: int, stages: int) -> Any:
    """Swizzle atoms, rows of 64 or 128 bytes, side by side along the contiguous mode last."""
    from cutlass import BFloat16, cute
    from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind, make_smem_layout_atom

    atom = make_smem_layout_atom(SmemLayoutAtomKind[kind], BFloat16)
    return cute.tile_to_shape(atom, (n, k, stages), order=(1, 0, 2) if kind.startswith("MN") else (0, 1, 2))
