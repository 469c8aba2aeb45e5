"""The workspace between the intra-chunk kernel and the chain: six arrays of chunk records, seven for the backward.

A slot holds a chunk of a sequence or is empty (`kda_cute.device.varlen`). The record of slot s and value head h has the number
``s * HV + h``. Records are byte images of shared memory (`kda_cute.records`), so the chain loads each array of a record with one
bulk copy and needs no tensor map.

====  ===============  =======================================================================================
w     ``-T Kd`` [C, K]  bf16, K-major image of a tcgen05 operand B with N = C. Negated, because the chain adds it.
u     ``T V`` [C, V]    bf16, the same image; not an operand.
qd    ``Qd`` [C, K]     bf16, the same image, scale included; operand B with N = C.
kg    ``Kg`` [C, K]     bf16, the same image, used MN-major: operand B with N = K, reduced over tokens.
aqk   ``Aqk`` [C, C]    bf16, K-major image of an operand B with N = C rows, reduced over columns.
a     ``a`` [K]         fp32, decay of the whole chunk, ``2^G_end``, in the order of ``decay_offset``.
t     ``T`` [C, C]      bf16, the same image as aqk, used MN-major; only for the backward.
====  ===============  =======================================================================================

While a CTA computes a record, w holds -Kd. Without t, the first half of u holds T. The reverse chain uses aqk, qd and w MN-major
and kg K-major, because its products sum over the other index.
"""

from __future__ import annotations

from typing import Any

from kda_cute.records import HEAD_DIM, require

require(1, "kda-sm100")  # version of the record layout that the chain reads


def slot_count(B: int, T: int, C: int, N: int | None = None) -> int:
    """Returns the slots of a head: ``B * ceil(T/C)``, or ``T//C + N`` for N sequences packed along T."""
    return B * -(-T // C) if N is None else T // C + N


def record_bytes(C: int, backward: bool = False) -> dict[str, int]:
    """Returns the bytes of a record in each array, in the order of the arrays in the workspace.

    All sizes are multiples of 128. C: tokens per chunk. ``backward``: whether the record has T.
    """
    wide, square = 2 * C * HEAD_DIM, 2 * C * C
    sizes = {"w": wide, "u": wide, "qd": wide, "kg": wide, "aqk": square, "a": 4 * HEAD_DIM}
    return sizes | {"t": square} if backward else sizes


def workspace_bytes(records: int, C: int, backward: bool = False) -> int:
    """Returns the bytes of a workspace with this number of records."""
    return records * sum(record_bytes(C, backward).values())


def addresses(workspace: Any, records: Any, C: int, backward: bool = False) -> dict[str, Any]:
    """Returns the address of each array in a workspace.

    Args:
        workspace: address of the workspace, an int or a 64-bit integer of the DSL.
        records: number of records, of the same type.
        C: tokens per chunk.
        backward: whether records have T.
    """
    found = {}
    for name, size in record_bytes(C, backward).items():
        found[name] = workspace
        workspace = workspace + records * size
    return found
