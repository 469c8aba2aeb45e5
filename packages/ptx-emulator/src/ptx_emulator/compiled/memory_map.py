"""What compiled code knows about memory: the regions of a launch, and its counters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ptx_emulator.compiled.layout import MACHINE, REGION
from ptx_emulator.lanes import Array

if TYPE_CHECKING:
    from ptx_emulator.memory import GlobalMemory, Region


class RegionMap:
    """The fields of a region (`layout.REGION`). `memory.Region` and `races.Shadow` report what changes.

    Attributes:
        address: of the fields.
    """

    def __init__(self, region: Region, warps: int):
        self._region, self._warps = region, warps
        self._fields = np.zeros(len(REGION), np.int64)
        self.address = self._fields.ctypes.data
        self._readers: Array | None = None
        self._by_warp: Array | None = None
        self._set("low", region.low)
        self._set("high", region.high)
        self._set("base", region.base)
        self._set("data", region.data.ctypes.data)
        self._set("written", region.written.ctypes.data)
        self._set("writer", region.writer.ctypes.data)
        self._set("scratch", int(region.scratch))
        self.tracked()
        if region.shadow is not None:
            self._set("shadow_writer", region.shadow.writer.ctypes.data)
            self._set("shadow_lane", region.shadow.write_lane.ctypes.data)
            self._set("shadow_written", region.shadow.written.ctypes.data)
            self._readers = np.zeros((warps, 3), np.int64)
            self._by_warp = np.zeros((warps, 2), np.int64)
            self._set("readers", self._readers.ctypes.data)
            self._set("by_warp", self._by_warp.ctypes.data)

    def _set(self, name: str, value: int) -> None:
        self._fields[REGION[name]] = value

    def tracked(self) -> None:
        """Note that `Region.known` is another array."""
        known = self._region.known
        self._set("known", 0 if known is None else known.ctypes.data)

    def reader(self, index: int, times: Array, lanes: Array) -> None:
        """Note that warp ``index`` of the launch has read the region for the first time (`Shadow.read`)."""
        assert self._readers is not None and self._by_warp is not None
        count = self._fields[REGION["reader_count"]]
        self._readers[count] = index, times.ctypes.data, lanes.ctypes.data
        self._by_warp[index] = self._readers[count, 1:]
        self._set("reader_count", count + 1)


class MachineMap:
    """The fields of a launch (`layout.MACHINE`).

    Attributes:
        address: of the fields.
    """

    def __init__(self, memory: GlobalMemory, warps: int):
        self._warps = warps
        self._fields = np.zeros(len(MACHINE), np.int64)
        self._view = memoryview(self._fields)
        self.address = self._fields.ctypes.data
        self._regions = np.array([self.of(region) for region in memory.regions], np.int64)
        self._fields[MACHINE["count"]] = len(self._regions)
        self._fields[MACHINE["regions"]] = self._regions.ctypes.data

    def of(self, region: Region) -> int:
        """Return the address of the fields of a region; create them first if there are none."""
        if region.map is None:
            region.map = RegionMap(region, self._warps)
        return region.map.address

    @property
    def clock(self) -> int:
        """`Machine.clock`."""
        return self._view[MACHINE["clock"]]

    @clock.setter
    def clock(self, value: int) -> None:
        self._view[MACHINE["clock"]] = value

    @property
    def changes(self) -> int:
        """`Machine.changes`."""
        return self._view[MACHINE["changes"]]

    @changes.setter
    def changes(self, value: int) -> None:
        self._view[MACHINE["changes"]] = value
