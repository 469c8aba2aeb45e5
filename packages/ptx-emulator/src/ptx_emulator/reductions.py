"""`redux.sync`: reductions over the lanes of a warp.

Source: PTX ISA, "Parallel Synchronization and Communication Instructions: redux.sync".
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx_emulator.decode import Decoder, Execute, handler
from ptx_emulator.lanes import INDICES
from ptx_emulator.machine import Warp
from ptx_emulator.parser import Instruction
from ptx_emulator.synchronize import of_members

_REDUX: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


@handler("redux")
def _redux(d: Decoder, i: Instruction) -> Execute:
    """`redux.sync`: a reduction over the lanes of the member mask."""
    operation, kind, how = i.modifiers[1], i.modifiers[-1], i.modifiers[2:-1]
    d.only(i.modifiers[:1], "sync")
    bits = operation in ("and", "or", "xor")
    if operation not in _REDUX or kind not in (("b32",) if bits else ("u32", "s32", "f32")):
        d.refuse("this form of redux is not modelled")
    d.only(how, *(("abs", "NaN") if kind == "f32" and operation != "add" else ()))
    if kind == "f32" and operation == "add":
        d.refuse("redux.sync.add.f32 does not exist")
    to, source = d.destination(i.operands[0], "b32"), d.source(i.operands[1], "b32")
    dtype: Any = {"s32": np.int32, "f32": np.float32}.get(kind, np.uint32)

    def reduce(w: Warp, lanes: int) -> None:
        values = w.regs[source].view(dtype)[INDICES[lanes]]
        if kind == "f32":
            values = np.abs(values) if "abs" in how else values
            # A number wins over NaN, without .NaN. Of zeros, -0 is less than +0.
            if np.isnan(values).any() and ("NaN" in how or np.isnan(values).all()):
                found = np.uint32(0x7FFFFFFF)
            else:
                order = np.lexsort((~np.signbit(values), np.where(np.isnan(values), np.inf, values)))
                order = order[: np.count_nonzero(~np.isnan(values))]
                found = values[order[-1 if operation == "max" else 0]].view(np.uint32)
        else:
            found = _REDUX[operation].reduce(values).astype(dtype).view(np.uint32)
        w.put(to, np.full(32, found, np.uint32), lanes if w.unknown[source] & lanes else 0, lanes)

    return of_members(d, i, 2, reduce)
