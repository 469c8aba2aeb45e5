"""The memory that compiled code shares with Python: registers of a warp, its context, records of instructions, regions.

| structure | what |
| --- | --- |
| register file | per register the set of undefined lanes; a byte of state (`WRITTEN`, `PACKED`); the words of all registers |
| context | one for each warp: 8-byte fields, `CONTEXT` |
| machine | one for each launch: 8-byte fields, `MACHINE` |
| record | one for each instruction: `RECORD_TYPE` |
| region | one for each `memory.Region`: 8-byte fields, `REGION` |
"""

from __future__ import annotations

import numpy as np

#: Bits of a register's state: it was written since the last `wgmma.fence`; its bytes differ in state (`Warp.packed`).
WRITTEN, PACKED = 1, 2


def _numbered(names: str) -> dict[str, int]:
    return {name: n for n, name in enumerate(names.split())}


#: Fields of a context. ``flight``: a byte for each register, nonzero if it is in flight; null: none is. ``stop`` is -1, or the
#: number of the instruction at which the fragment has to merge. ``index``, ``now``, ``known``, ``transitive``: of `races.Clock`, the
#: latter 0 or -1. The fields of the second line are in the context of `memory_map.Request` only.
CONTEXT = _numbered(
    "file state code pc lanes budget stop flight index now known transitive machine shared parameters alive cta "
    "region cells cell_lanes cell_count generic"
)
#: Fields of a machine: `Machine.clock`, `Machine.changes`, and the regions of global memory.
MACHINE = _numbered("clock changes count regions")
#: Fields of a region: those of `memory.Region`, then those of its `races.Shadow` (null: there is none), and its `races.FurtherReads`:
#: their times and lanes; (index of the clock, address of its rows) of those that exist, and how many there are; per index the address of
#: its rows, or null.
REGION = _numbered(
    "low high base data known written writer scratch shadow_writer shadow_lane shadow_written shadow_generic "
    "shadow_reader shadow_read_lane shadow_read shadow_constant shadow_reading shadow_apart shadow_words "
    "further_times further_lanes readers reader_count rows"
)

#: An operand of a record: the number of its register, and the place of its words in the register file.
OPERAND_BYTES = 8

#: ``kind``: `CLOSURE`, `COMPILED` or `BRANCH`. ``guard``: the register of the guard, -1 if there is none; ``guard_place``: its
#: place; ``negated``: a set of lanes. ``touched``: the registers that `Warp` checks for instructions in flight.
RECORD_TYPE = np.dtype(
    [
        ("function", "u8"),
        ("operands", "u8"),
        ("touched", "u8"),
        ("immediate", "i8"),
        ("touched_count", "i4"),
        ("guard", "i4"),
        ("guard_place", "i4"),
        ("negated", "u4"),
        ("kind", "i4"),
        ("target", "i4"),
        ("padding", "u8"),
    ]
)
_POINTERS = ("function", "operands", "touched")
#: Per field of a record: its offset, its bytes, and whether it is a pointer.
RECORD = {
    name: (RECORD_TYPE.fields[name][1], RECORD_TYPE.fields[name][0].itemsize, name in _POINTERS)  # type: ignore[index]
    for name in RECORD_TYPE.names or ()
}
CLOSURE, COMPILED, BRANCH = 0, 1, 2
