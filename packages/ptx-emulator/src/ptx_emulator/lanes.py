"""Sets of lanes of a warp.

A set is an int: bit n stands for lane n. Predicates, masks and sets of undefined lanes have this form. `BOOLS` and
`INDICES` convert a set to arrays; `to_bits` converts back.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

FULL = 0xFFFFFFFF
LANES = np.arange(32)


class _Bools(dict[int, Array]):
    def __missing__(self, bits: int) -> Array:
        if len(self) > 1 << 16:
            self.clear()
        found = np.unpackbits(np.frombuffer(bits.to_bytes(4, "little"), np.uint8), bitorder="little").view(
            np.bool_
        )
        found.flags.writeable = False
        self[bits] = found
        return found


class _Indices(dict[int, Array]):
    def __missing__(self, bits: int) -> Array:
        if len(self) > 1 << 16:
            self.clear()
        found = self[bits] = np.flatnonzero(BOOLS[bits])
        return found


#: BOOLS[set]: bool[32], read-only. INDICES[set]: the lanes of the set in ascending order.
BOOLS, INDICES = _Bools(), _Indices()


def address_of(x: Array) -> int:
    """Return the address of the first element. ``ctypes.data`` takes longer."""
    place: int = x.__array_interface__["data"][0]
    return place


def to_bits(flags: Array) -> int:
    """Convert bool[32] to a set of lanes."""
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")
