"""What compiled code knows about memory: the regions of a launch, and its counters."""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_emulator.compiled import shadow
from ptx_emulator.compiled.engine import engine
from ptx_emulator.compiled.layout import CONTEXT, MACHINE, REGION
from ptx_emulator.lanes import Array, address_of
from ptx_emulator.races import SECTIONS, Clock, FurtherReads, Shadow

if TYPE_CHECKING:
    from ptx_emulator.memory import GlobalMemory, Region

_Cells = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4, ctypes.c_int64, ctypes.c_bool)


_NOTHING = np.zeros(0, np.int64)
_INDEX, _NOW, _KNOWN, _TRANSITIVE = (CONTEXT[name] for name in ("index", "now", "known", "transitive"))


@functools.cache
def _routine(what: str) -> Any:
    return _Cells(engine().function(*shadow.build(what)))


@functools.lru_cache(maxsize=256)
def _lane(lane: int, count: int) -> Array:
    """Return the same lane ``count`` times."""
    return np.full(count, lane, np.int8)


class RegionMap:
    """The fields of a region (`layout.REGION`). `memory.Region` and `races.Shadow` report what changes.

    Attributes:
        address: of the fields.
    """

    def __init__(self, region: Region, clocks: int):
        """``clocks``: the number of indices of clocks in the launch (`races.Clock`)."""
        self._fields = np.zeros(len(REGION), np.int64)
        self.address = self._fields.ctypes.data
        self._whole_context = np.zeros(len(CONTEXT), np.int64)
        self._context, self._context_address = self._whole_context.data, self._whole_context.ctypes.data
        for name in ("low", "high", "base", "scratch"):
            self._fields[REGION[name]] = int(getattr(region, name))
        for name in ("data", "known", "written", "writer"):
            self.set(name, getattr(region, name))
        self._clocks, self._readers, self._rows = clocks, _NOTHING, _NOTHING
        if region.shadow is not None:
            self.watch(region.shadow)

    def set(self, name: str, array: Array | None) -> None:
        """Note the array of a field."""
        self._fields[REGION[name]] = 0 if array is None else array.ctypes.data

    def watch(self, shadow: Shadow) -> None:
        """Note all arrays of the race check."""
        self.set("shadow_lane", shadow.write_lane)
        names = "writer", "written", "generic", "reader", "read_lane", "read", "constant", "reading", "apart"
        for name in names:
            self.set(f"shadow_{name}", getattr(shadow, name))
        self._fields[REGION["shadow_words"]] = shadow.words
        for index in shadow.further.rows:
            self.set_further(shadow.further, index)

    def set_further(self, further: FurtherReads, index: int) -> None:
        """Note the reads of `Shadow.further`, which have more rows now, those of the clock ``index``."""
        if not self._rows.size:
            self._readers, self._rows = (
                np.zeros((self._clocks, 2), np.int64),
                np.zeros(self._clocks, np.int64),
            )
            self.set("readers", self._readers)
            self.set("rows", self._rows)
        self.set("further_times", further.times)
        self.set("further_lanes", further.lanes)
        if not self._rows[index]:
            count = self._fields[REGION["reader_count"]]
            self._rows[index] = further.rows[index].ctypes.data
            self._readers[count] = index, self._rows[index]
            self._fields[REGION["reader_count"]] = count + 1

    def checked(
        self, what: str, clock: Clock, cells: Array, lanes: Any, generic: bool, section: int = 0
    ) -> bool:
        """Do the same as a method of `races.Shadow`. False: nothing was done, because it would raise an error or `further` lacks a row.

        ``section``: of the vector of the clock, for "fenced".
        """
        cells = np.ascontiguousarray(cells, np.int64)
        if isinstance(lanes, int):
            who = _lane(lanes, cells.size)
        else:
            who = np.empty(cells.shape, np.int8)
            who[...] = lanes
        context = self._context
        context[_INDEX], context[_NOW], context[_KNOWN] = clock.index, clock.now, address_of(clock.known)
        context[_KNOWN] += 8 * section * clock.warps
        context[_TRANSITIVE] = -clock.transitive
        routine = _routine(what)
        return not routine(
            self._context_address, self.address, address_of(cells), address_of(who), cells.size, generic
        )


class MachineMap:
    """The fields of a launch (`layout.MACHINE`).

    Attributes:
        address: of the fields.
    """

    def __init__(self, memory: GlobalMemory, warps: int):
        self._clocks = SECTIONS * warps
        self._fields = np.zeros(len(MACHINE), np.int64)
        self._view = self._fields.data
        self.address = self._fields.ctypes.data
        self._regions = np.array([self.of(region) for region in memory.regions], np.int64)
        self._fields[MACHINE["count"]] = len(self._regions)
        self._fields[MACHINE["regions"]] = self._regions.ctypes.data

    def of(self, region: Region) -> int:
        """Return the address of the fields of a region; create them first if there are none."""
        if region.map is None:
            region.map = RegionMap(region, self._clocks)
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
