"""The workspace between the preparation and the chain: six arrays of records, one for each slot and value head.

A slot holds a chunk of a sequence, or nothing (`kda_cute.device.varlen`); the record of slot s and head h is number
``s * HV + h``. Records are byte images of shared memory (`kda_cute.records`), so that the chain loads each with one
bulk copy and no tensor map.

====  ===============  =======================================================================================
w     ``-T Kd`` [C, K]  bf16, K-major image of an operand B of tcgen05 with N = C. Negated: the chain adds it.
u     ``T V`` [C, V]    bf16, the same image; not an operand.
qd    ``Qd`` [C, K]     bf16, the same image, scale included; B with N = C.
kg    ``Kg`` [C, K]     bf16, the same image, taken MN-major: B with N = K, reduced over tokens.
aqk   ``Aqk`` [C, C]    bf16, K-major image of B with N = C rows, reduced over columns.
a     ``a`` [K]         fp32, decay of the whole chunk, ``2^G_end``, in the order of ``decay_offset``.
====  ===============  =======================================================================================

While a record is made, w holds -Kd and u, in its first half, T.
"""

from __future__ import annotations

from typing import Any

from kda_cute.records import HEAD_DIM, require

require(1, "kda-sm100")  # the record layout that the chain reads


def slot_count(B: int, T: int, C: int, N: int | None = None) -> int:
    """Slots of a head: ``B * ceil(T/C)``, or ``T//C + N`` where N sequences are packed along T."""
    return B * -(-T // C) if N is None else T // C + N


def record_bytes(C: int) -> dict[str, int]:
    """Bytes of a record in each array, in their order in the workspace; all are multiples of 128."""
    wide = 2 * C * HEAD_DIM
    return {"w": wide, "u": wide, "qd": wide, "kg": wide, "aqk": 2 * C * C, "a": 4 * HEAD_DIM}


def workspace_bytes(records: int, C: int) -> int:
    """Bytes of a workspace."""
    return records * sum(record_bytes(C).values())


def addresses(workspace: Any, records: Any, C: int) -> dict[str, Any]:
    """Where each array begins; ``workspace`` and ``records`` are ints, or 64-bit integers of the DSL."""
    found = {}
    for name, size in record_bytes(C).items():
        found[name] = workspace
        workspace = workspace + records * size
    return found
