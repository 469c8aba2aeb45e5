"""Memory as bytes with bounds, and which of its bytes hold anything.

A device's address is the host's for global memory; shared memory begins at `SHARED_BASE` in each CTA.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable
from copy import copy as copy_of
from typing import Any, NoReturn

import numpy as np

from ptx_emulator.lanes import Array
from ptx_emulator.races import Shadow

UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SHARED_BASE = 1024  # what the system keeps for itself
CTA_BITS = 24  # where an address of the cluster's shared memory has the rank of its CTA, counted from 1 (0: the own one)
WINDOW_BITS = 60  # of generic addresses; above them the window: 0 is global memory
LOCAL_WINDOW, SHARED_WINDOW = 1, 2

Fail = Callable[[str], NoReturn]


class Region:
    """Bytes ``[low, high)``. ``known``: 255 for each byte that holds something, 0 for others; None: all do.

    ``scratch``: a value that is not known may be stored here; elsewhere that is an error.
    """

    def __init__(self, name: str, low: int, high: int, data: Array, *, initialized: bool, scratch: bool):
        self.name, self.low, self.high, self.base = name, low, high, low & -16
        self.data, self.scratch = data, scratch
        self.known: Array | None = None if initialized else np.zeros(len(data), np.uint8)
        # Of each 16 bytes, when the generic proxy wrote them last (`Machine.clock`), and in which CTA.
        self.written = np.zeros(-(-len(data) // 16), np.int64)
        self.writer = np.full(len(self.written), -1, np.int32)
        self.shadow: Shadow | None = None  # where races are looked for
        self._views: dict[tuple[int, int], Array] = {}
        self._known_views: dict[tuple[int, int], Array] = {}

    def view(self, size: int, count: int) -> Array:
        """All of it from ``base`` on as [.., count] words of ``size`` bytes."""
        found = self._views.get((size, count))
        if found is None:
            whole = len(self.data) // (size * count) * (size * count)
            found = self.data[:whole].view(UNSIGNED[size]).reshape(-1, count)
            self._views[size, count] = found
        return found

    def known_view(self, size: int, count: int) -> Array:
        """`known` in the same way, which must be there."""
        found = self._known_views.get((size, count))
        if found is None:
            assert self.known is not None
            whole = len(self.known) // (size * count) * (size * count)
            found = self._known_views[size, count] = (
                self.known[:whole].view(UNSIGNED[size]).reshape(-1, count)
            )
        return found

    def moved(self, offset: int) -> Region:
        """The same bytes at other addresses."""
        assert self.known is not None
        found = copy_of(self)
        found.low, found.high, found.base = self.low + offset, self.high + offset, self.base + offset
        return found

    def forget(self) -> Array:
        """`known`, from now on there."""
        if self.known is None:
            self.known = np.full(len(self.data), 255, np.uint8)
        return self.known

    def stamp(self, addresses: Array, clock: int, cta: int) -> None:
        """Accesses of at most 16 bytes each, aligned, by the generic proxy."""
        units = (addresses - self.base) >> 4
        self.written[units] = clock
        self.writer[units] = cta

    def load(self, addresses: Array, size: int, count: int) -> tuple[Array, Array | None]:
        """[n, count] words at n aligned addresses within bounds; and which are not known (None: all are)."""
        index = (addresses - self.base) // (size * count)
        values = self.view(size, count)[index]
        if self.known is None:
            return values, None
        known = self.known_view(size, count)[index]
        unknown = known != UNSIGNED[size](-1 & (1 << 8 * size) - 1)
        return values, unknown if unknown.any() else None

    def store(self, addresses: Array, size: int, count: int, values: Array, unknown: Array | None) -> None:
        """The reverse; ``unknown`` are bools of the shape of ``values``."""
        index = (addresses - self.base) // (size * count)
        self.view(size, count)[index] = values
        if self.known is None:
            if unknown is None:
                return
            self.forget()
        mask = (1 << 8 * size) - 1
        self.known_view(size, count)[index] = (
            mask if unknown is None else np.where(unknown, 0, mask).astype(UNSIGNED[size])
        )


def shared_region(size: int) -> Region:
    """The shared memory of a CTA: nothing in it is known."""
    room = -(-size // 16) * 16
    data = np.frombuffer(bytearray(room), np.uint8)
    return Region("shared memory", SHARED_BASE, SHARED_BASE + size, data, initialized=False, scratch=True)


def local_region(size: int) -> Region:
    """The local memory of a warp: for each of 32 threads ``size`` bytes."""
    data = np.frombuffer(bytearray(32 * size), np.uint8)
    return Region("local memory", 0, 32 * size, data, initialized=False, scratch=True)


class GlobalMemory:
    """The regions that a kernel may touch; all else is out of bounds."""

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._lows: list[int] = []

    def add(self, name: str, address: int, size: int, *, initialized: bool = True) -> None:
        """``size`` bytes of the host's memory, which stay alive for as long as this is used. Not
        ``initialized``: they hold nothing that may be used, and may be given such."""
        if size == 0:
            return
        base, end = address & -16, -(-(address + size) // 16) * 16
        buffer = (ctypes.c_uint8 * (end - base)).from_address(base)
        data = np.ctypeslib.as_array(buffer)
        region = Region(name, address, address + size, data, initialized=initialized, scratch=not initialized)
        place = bisect_right(self._lows, address)
        before = self._regions[place - 1] if place else None
        after = self._regions[place] if place < len(self._regions) else None
        if (before and before.high > address) or (after and after.low < address + size):
            raise ValueError(f"{name}: overlaps another region")
        self._regions.insert(place, region)
        self._lows.insert(place, address)

    def watch(self) -> None:
        """Look for races in all regions."""
        for region in self._regions:
            region.shadow = Shadow(region)

    def at(self, address: int, end: int, fail: Fail) -> Region:
        """The region that holds ``[address, end)``."""
        place = bisect_right(self._lows, address)
        if place:
            region = self._regions[place - 1]
            if end <= region.high:
                return region
        fail(f"global memory out of bounds: {end - address} bytes at {address:#x}; {self._near(address)}")

    def region(self, low: int, high: int) -> Region | None:
        """The region that holds all of ``[low, high)``, if one does."""
        place = bisect_right(self._lows, low)
        if place and high <= self._regions[place - 1].high:
            return self._regions[place - 1]
        return None

    def _near(self, address: int) -> str:
        if not self._regions:
            return "there are no regions"
        nearest = min(self._regions, key=lambda r: max(r.low - address, address - r.high + 1, 0))
        return f"nearest is {nearest.name} of {nearest.high - nearest.low} bytes, offset {address - nearest.low} in it"


def copy(source: Region, start: int, target: Region, place: int, size: int) -> None:
    """Bytes with what is known of them."""
    a, b = start - source.base, place - target.base
    target.data[b : b + size] = source.data[a : a + size]
    if source.known is not None or target.known is not None:
        target.forget()[b : b + size] = 255 if source.known is None else source.known[a : a + size]
