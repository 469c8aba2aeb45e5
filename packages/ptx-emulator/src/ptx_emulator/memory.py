"""Memory as bytes with bounds, and the state of each byte: defined or undefined.

Addresses of global memory are those of the host. The shared memory of a CTA starts at `SHARED_BASE`, with its rank in the bits
from `CTA_BITS` on. Windows of generic addresses are this emulator's choice; PTX ("Generic Addressing") does not fix them.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ptx_emulator.lanes import Array
from ptx_emulator.races import Shadow

if TYPE_CHECKING:
    from ptx_emulator.compiled.memory_map import RegionMap

UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SHARED_BASE = 1024  # the system reserves the bytes below
# An address of shared memory holds the rank of its CTA in the cluster in the bits from CTA_BITS on. PTX only says that the window
# shared::cta lies in shared::cluster. CUTLASS clears bit 24 of an address to reach the CTA of even rank, so devices do the same.
CTA_BITS = 24
WINDOW_BITS = 60  # bits of a generic address below its window number; window 0 is global memory
LOCAL_WINDOW, SHARED_WINDOW = 1, 2

Fail = Callable[[str], NoReturn]


class Region:
    """The bytes of the addresses ``[low, high)``.

    Attributes:
        name: for error messages.
        base: ``low`` rounded down to 32 bytes; ``data`` starts there.
        data: uint8, rounded up to 16 bytes at the end, or more.
        known: uint8, 255 for each defined byte and 0 for each undefined one. None: all are defined.
        scratch: whether an undefined value may be stored here. Elsewhere that is an error.
        written: per 16 bytes, `Machine.clock` at the last write of the generic proxy.
        writer: per 16 bytes, the CTA of that write; -1: none.
        shadow: the access history of the race check. None: races are not checked.
        map: what compiled code knows about the region. None: nothing.
    """

    def __init__(self, name: str, low: int, high: int, data: Array, *, initialized: bool, scratch: bool):
        self.name, self.low, self.high, self.base = name, low, high, low & -32
        self.data, self.scratch = data, scratch
        self.known: Array | None = None if initialized else np.zeros(len(data), np.uint8)
        self.written = np.zeros(-(-len(data) // 16), np.int64)
        self.writer = np.full(len(self.written), -1, np.int32)
        self.shadow: Shadow | None = None
        self.map: RegionMap | None = None
        self._views: dict[tuple[int, int], Array] = {}
        self._known_views: dict[tuple[int, int], Array] = {}

    def view(self, size: int, count: int) -> Array:
        """Return all bytes from ``base`` on as [n, count] words of ``size`` bytes."""
        found = self._views.get((size, count))
        if found is None:
            whole = len(self.data) // (size * count) * (size * count)
            found = self.data[:whole].view(UNSIGNED[size]).reshape(-1, count)
            self._views[size, count] = found
        return found

    def known_view(self, size: int, count: int) -> Array:
        """Return `known`, which must not be None, in the form of `view`."""
        found = self._known_views.get((size, count))
        if found is None:
            assert self.known is not None
            whole = len(self.known) // (size * count) * (size * count)
            found = self._known_views[size, count] = (
                self.known[:whole].view(UNSIGNED[size]).reshape(-1, count)
            )
        return found

    def track(self) -> Array:
        """Return `known`; create it first if it is None."""
        if self.known is None:
            self.known = np.full(len(self.data), 255, np.uint8)
            if self.map is not None:
                self.map.set("known", self.known)
        return self.known

    def stamp(self, addresses: Array, clock: int, cta: int, size: int = 16) -> None:
        """Record writes of the generic proxy: aligned, at most 32 bytes each. ``clock``: `Machine.clock`."""
        units = (addresses - self.base) >> 4
        if size > 16:
            units = np.concatenate([units, units + 1])
        self.written[units] = clock
        self.writer[units] = cta

    def load(self, addresses: Array, size: int, count: int) -> tuple[Array, Array | None]:
        """Read ``count`` words of ``size`` bytes at each of n aligned addresses within bounds.

        Returns:
            The words [n, count], and bool[n, count] of the undefined ones (None: all are defined).
        """
        index = (addresses - self.base) // (size * count)
        values = self.view(size, count)[index]
        if self.known is None:
            return values, None
        known = self.known_view(size, count)[index]
        unknown = known != UNSIGNED[size](-1 & (1 << 8 * size) - 1)
        return values, unknown if unknown.any() else None

    def store(self, addresses: Array, size: int, count: int, values: Array, unknown: Array | None) -> None:
        """Write ``values`` [n, count] as `load` reads them. ``unknown``: bool[n, count] of the undefined ones."""
        index = (addresses - self.base) // (size * count)
        self.view(size, count)[index] = values
        if self.known is None:
            if unknown is None:
                return
            self.track()
        word = UNSIGNED[size]
        mask = word((1 << 8 * size) - 1)
        self.known_view(size, count)[index] = mask if unknown is None else np.where(unknown, word(0), mask)


def shared_region(size: int, rank: int) -> Region:
    """Return the shared memory of the CTA of this rank, ``size`` bytes, all undefined."""
    padded, low = -(-size // 16) * 16, SHARED_BASE + (rank << CTA_BITS)
    data = np.frombuffer(bytearray(padded), np.uint8)
    return Region("shared memory", low, low + size, data, initialized=False, scratch=True)


def local_region(size: int) -> Region:
    """Return the local memory of a warp: ``size`` bytes for each of 32 threads, all undefined."""
    data = np.frombuffer(bytearray(32 * size), np.uint8)
    return Region("local memory", 0, 32 * size, data, initialized=False, scratch=True)


class GlobalMemory:
    """Global memory: the regions that a kernel may access. Every other address is out of bounds."""

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._lows: list[int] = []

    def add(self, name: str, address: int, size: int, *, initialized: bool = True) -> None:
        """Add ``size`` bytes of host memory. The caller keeps them alive for as long as this object is used.

        Without ``initialized`` the bytes are scratch memory: they are undefined, and undefined values may be stored there.

        Raises:
            ValueError: the bytes overlap another region.
        """
        if size == 0:
            return
        base, end = address & -32, -(-(address + size) // 32) * 32
        buffer = (ctypes.c_uint8 * (end - base)).from_address(base)
        data = np.ctypeslib.as_array(buffer)
        region = Region(name, address, address + size, data, initialized=initialized, scratch=not initialized)
        place = bisect_right(self._lows, address)
        before = self._regions[place - 1] if place else None
        after = self._regions[place] if place < len(self._regions) else None
        if (before and before.high > address) or (after and after.low < address + size):
            raise ValueError(f"{name} at {address:#x}, {size} bytes: overlaps another region")
        self._regions.insert(place, region)
        self._lows.insert(place, address)

    @property
    def regions(self) -> list[Region]:
        """The regions, in ascending order of their addresses."""
        return self._regions

    def watch(self) -> None:
        """Check all regions for races."""
        for region in self._regions:
            region.shadow = Shadow(region)

    def at(self, address: int, end: int, fail: Fail) -> Region:
        """Return the region that holds ``[address, end)``; call ``fail`` if there is none."""
        place = bisect_right(self._lows, address)
        if place:
            region = self._regions[place - 1]
            if end <= region.high:
                return region
        fail(f"global memory out of bounds: {end - address} bytes at {address:#x}; {self._near(address)}")

    def region(self, low: int, high: int) -> Region | None:
        """Return the region that holds all of ``[low, high)``, or None."""
        place = bisect_right(self._lows, low)
        if place and high <= self._regions[place - 1].high:
            return self._regions[place - 1]
        return None

    def _near(self, address: int) -> str:
        if not self._regions:
            return "the launch has no tensors"
        nearest = min(self._regions, key=lambda r: max(r.low - address, address - r.high + 1, 0))
        return (
            f"the nearest is {nearest.name} of {nearest.high - nearest.low} bytes; "
            f"the access is at offset {address - nearest.low} from its start"
        )


def copy(source: Region, start: int, target: Region, place: int, size: int) -> None:
    """Copy ``size`` bytes from address ``start`` to address ``place``, with their defined or undefined state."""
    a, b = start - source.base, place - target.base
    target.data[b : b + size] = source.data[a : a + size]
    if source.known is not None or target.known is not None:
        target.track()[b : b + size] = 255 if source.known is None else source.known[a : a + size]
