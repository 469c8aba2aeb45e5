"""Sets of lanes: an int with a bit for each of the 32, as predicates and masks are kept, and the same as
arrays."""

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


#: The lanes of a set as 32 bools, and as their numbers in order.
BOOLS, INDICES = _Bools(), _Indices()


def to_bits(flags: Array) -> int:
    """The set of 32 bools."""
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")
