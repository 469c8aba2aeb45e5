"""The workspace between the preparation kernel and the chain: six arrays of chunk records.

A record belongs to one slot (a chunk of a sequence) and one value head; its index is ``slot * HV + head``.
Records are byte images of shared memory, so that the chain loads each with one bulk copy and no tensor map.

====  ===============  =======================================================================================
w     ``-w`` [C, K]     bf16, K-major image of a wgmma B operand with N = C. Negated: the chain adds it to u.
qd    ``Qd`` [C, K]     bf16, the same image, scale included.
kg    ``Kg`` [C, K]     bf16, MN-major image of a B operand with N = K, reduced over tokens: the same bytes
                        as the K-major image of [C, K].
aqk   ``Aqk`` [C, C]    bf16, K-major image of a B operand with N = C rows, reduced over columns.
u     ``u`` [C, V]      bf16, accumulator fragments of ``u^T``: [2 halves of V][C/16][128 threads][8].
a     ``a`` [K]         fp32, decay of the whole chunk, ``2^G_end``.
====  ===============  =======================================================================================

Images swizzle rows of 128 bytes: 16-byte column index XOR row mod 8 (byte address bits 4-6 with bits 7-9).
Rows of 64 bytes, which occur where C = 32, swizzle bits 4-5 with bits 7-8. Wider rows are cut into panels of
64 columns, one after the other.

Importing this module needs torch alone; what returns CuTe layouts imports the DSL when it is called.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kda_sm90.config import HEAD_DIM

PANEL = 64  # columns of an image's panel: 128 bytes of bf16
WARPGROUP = 128


class Workspace(NamedTuple):
    """Views of one workspace, in the order of the kernels' arguments.

    w, qd, kg, u [records, C*128] bf16; aqk [records, C*C] bf16; a [records, 128] fp32; records = slots * HV.
    """

    w: torch.Tensor
    qd: torch.Tensor
    kg: torch.Tensor
    aqk: torch.Tensor
    u: torch.Tensor
    a: torch.Tensor


def slot_count(B: int, T: int, C: int, N: int | None = None) -> int:
    """Slots of a call: ``B * ceil(T/C)``, or ``T//C + N`` where N sequences are packed along T.

    A packed sequence that starts at token s is number n, and its first slot is ``s//C + n``; ranges never
    overlap, because ``ceil(len/C) <= end//C - s//C + 1``. So no kernel needs a prefix sum, and a slot may
    stay unused.
    """
    return B * -(-T // C) if N is None else T // C + N


def _widths(C: int) -> Workspace:
    wide = C * HEAD_DIM
    return Workspace(w=wide, qd=wide, kg=wide, aqk=C * C, u=wide, a=HEAD_DIM)  # type: ignore[arg-type]


def _dtype(name: str) -> torch.dtype:
    return torch.float32 if name == "a" else torch.bfloat16


def workspace_bytes(slots: int, HV: int, C: int) -> int:
    """Bytes of the workspace of ``slots`` chunks and ``HV`` value heads; every array is a multiple of 128."""
    widths = _widths(C)._asdict()
    return slots * HV * sum(width * _dtype(name).itemsize for name, width in widths.items())


def split_workspace(buffer: torch.Tensor, slots: int, HV: int, C: int) -> Workspace:
    """The six arrays in one uint8 buffer of at least ``workspace_bytes``, aligned to 128 bytes.

    Raises ValueError on another dtype, on a buffer that is too short, and on one that is not aligned.
    """
    need = workspace_bytes(slots, HV, C)
    if buffer.dtype is not torch.uint8 or buffer.dim() != 1 or buffer.numel() < need:
        raise ValueError(
            f"workspace: expected at least {need} bytes of uint8 in one dimension, "
            f"got {tuple(buffer.shape)} of {buffer.dtype}"
        )
    if buffer.data_ptr() % 128:
        raise ValueError("workspace: expected an address that is a multiple of 128")
    views, start = [], 0
    for name, width in _widths(C)._asdict().items():
        dtype = _dtype(name)
        end = start + slots * HV * width * dtype.itemsize
        views.append(buffer[start:end].view(dtype).view(slots * HV, width))
        start = end
    return Workspace(*views)


# ---- images, in elements of two bytes


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


def fragment_offset(token: Any, channel: Any, C: int) -> Any:
    """Element offset of ``u[token, channel]`` in the image of u; the integers as in ``image_offset``.

    Thread t = 32*warp + lane of the warpgroup of a half holds, in this order, u^T rows 16*warp + lane//4 + 8r
    and columns 8j + 2*(lane%4) + e with index 4j + 2r + e; 8 of them are one 16-byte vector.
    """
    half, row = channel // 64, channel % 64
    lane = (row % 8) * 4 + (token % 8) // 2
    thread = (row // 16) * 32 + lane
    index = (token // 8) * 4 + ((row % 16) // 8) * 2 + token % 2
    return half * (C * 64) + ((index // 8) * WARPGROUP + thread) * 8 + index % 8


def _offsets(name: str, C: int) -> torch.Tensor:
    columns = C if name == "aqk" else HEAD_DIM
    row, column = torch.arange(C).view(-1, 1), torch.arange(columns).view(1, -1)
    return fragment_offset(row, column, C) if name == "u" else image_offset(row, column, C, columns)


def unpack(name: str, records: torch.Tensor, C: int) -> torch.Tensor:
    """Logical [..., C, columns] of the records [..., C*columns] of the array ``name``. Signs stay: w is -w."""
    if name == "a":
        return records
    return records[..., _offsets(name, C).to(records.device)]


def pack(name: str, logical: torch.Tensor, C: int) -> torch.Tensor:
    """The inverse of ``unpack``: records [..., C*columns] of a logical [..., C, columns]."""
    if name == "a":
        return logical
    offsets = _offsets(name, C).to(logical.device).flatten()
    records = torch.empty_like(logical).flatten(-2)
    records[..., offsets] = logical.flatten(-2)
    return records


# ---- the same as CuTe layouts


def operand_layout(C: int, stages: int) -> Any:
    """CuTe layout (C, K, stages) of w and qd: a K-major B operand with N = C."""
    return _b_layout("K_SW128", C, HEAD_DIM, stages)


def kg_layout(C: int, stages: int) -> Any:
    """CuTe layout (K, C, stages) of kg: an MN-major B operand with N = K, reduced over tokens."""
    return _b_layout("MN_SW128", HEAD_DIM, C, stages)


def aqk_layout(C: int, stages: int) -> Any:
    """CuTe layout (C, C, stages) of aqk: a K-major B operand."""
    return _b_layout("K_SW64" if C == 32 else "K_SW128", C, C, stages)


def _b_layout(kind: str, n: int, k: int, stages: int) -> Any:
    """Swizzle atoms, rows of 64 or 128 bytes, side by side along the contiguous mode last."""
    from cutlass import BFloat16, cute
    from cutlass.cute.nvgpu.warpgroup import SmemLayoutAtomKind, make_smem_layout_atom

    atom = make_smem_layout_atom(SmemLayoutAtomKind[kind], BFloat16)
    return cute.tile_to_shape(atom, (n, k, stages), order=(1, 0, 2) if kind.startswith("MN") else (0, 1, 2))


def u_layout(C: int, stages: int) -> Any:
    """CuTe layout (8 elements, 128 threads, C/16 vectors, 2 halves, stages) of u."""
    from cutlass import cute

    vectors = C // 16
    half = 8 * WARPGROUP * vectors
    return cute.make_layout((8, WARPGROUP, vectors, 2, stages), stride=(1, 8, 8 * WARPGROUP, half, 2 * half))
