"""What compiled code knows about memory: the regions of a launch, and its counters."""

from __future__ import annotations

import ctypes
import functools
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ptx_emulator.compiled import shadow
from ptx_emulator.compiled.engine import engine
from ptx_emulator.compiled.layout import CONTEXT, MACHINE, REGION
from ptx_emulator.lanes import Array, address_of
from ptx_emulator.races import SECTIONS, Clock, FurtherReads, Shadow

if TYPE_CHECKING:
    from ptx_emulator.memory import GlobalMemory, Region

_Routine = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)

_NOTHING = np.zeros(0, np.int64)
_FIELDS = "index", "now", "known", "transitive", "region", "cells", "cell_lanes", "cell_count", "generic"
_INDEX, _NOW, _KNOWN, _TRANSITIVE, _REGION, _CELLS, _LANES, _COUNT, _GENERIC = (CONTEXT[x] for x in _FIELDS)


@functools.cache
def _routine(what: str) -> Any:
    return _Routine(engine().function(*shadow.build(what)))


class Request:
    """The arguments of the routines of `shadow`, for one launch. They have the form of a context (`layout.CONTEXT`).

    Attributes:
        clocks: the number of indices of clocks in the launch (`races.Clock`).
    """

    def __init__(self, clocks: int):
        self.clocks = clocks
        self._fields = np.zeros(len(CONTEXT), np.int64)
        self._view, self._address = self._fields.data, address_of(self._fields)
        self._make_room(1 << 10)

    def _make_room(self, count: int) -> None:
        """Make room for ``count`` cells. Their place stays the same: to ask numpy for an address takes longer than a small copy."""
        self._cells, self._lanes = np.empty(count, np.int64), np.empty(count, np.int8)
        self._view[_CELLS], self._view[_LANES] = address_of(self._cells), address_of(self._lanes)

    def call(
        self, what: str, region: int, clock: Clock, cells: Array, lanes: Any, generic: bool, section: int
    ) -> bool:
        """Execute a routine. ``region``: the address of its fields. Returns whether the routine did nothing."""
        count, view = cells.size, self._view
        if count > len(self._cells):
            self._make_room(2 * count)
        self._cells[:count] = cells.ravel()
        if isinstance(lanes, int) or lanes.shape == (count,):
            self._lanes[:count] = lanes
        else:
            self._lanes[:count].reshape(cells.shape)[...] = lanes
        view[_INDEX], view[_NOW], view[_TRANSITIVE] = clock.index, clock.now, -clock.transitive
        view[_KNOWN] = clock.known_at + 8 * section * clock.warps
        view[_REGION], view[_COUNT], view[_GENERIC] = region, count, generic
        return bool(_routine(what)(self._address))


class RegionMap:
    """The fields of a region (`layout.REGION`). `memory.Region` and `races.Shadow` report what changes.

    Attributes:
        address: of the fields.
    """

    def __init__(self, region: Region, request: Request):
        """``request``: that of the launch."""
        self._fields = np.zeros(len(REGION), np.int64)
        self.address = address_of(self._fields)
        self._request = request
        for name in ("low", "high", "base", "scratch"):
            self._fields[REGION[name]] = int(getattr(region, name))
        for name in ("data", "known", "written", "writer"):
            self.set(name, getattr(region, name))
        self._readers, self._rows = _NOTHING, _NOTHING
        if region.shadow is not None:
            self.watch(region.shadow)

    def set(self, name: str, array: Array | None) -> None:
        """Note the array of a field."""
        self._fields[REGION[name]] = 0 if array is None else address_of(array)

    def watch(self, shadow: Shadow) -> None:
        """Note all arrays of the race check."""
        self.set("shadow_lane", shadow.write_lane)
        names = "writer", "written", "generic", "reader", "read_lane", "read", "constant", "reading", "apart"
        for name in names:
            self.set(f"shadow_{name}", getattr(shadow, name))
        self._fields[REGION["shadow_words"]] = shadow.words
        if shadow.further.rows:
            self.set_further(shadow.further)

    def set_further(self, further: FurtherReads) -> None:
        """Note the reads of `Shadow.further`, which have more rows now."""
        if not self._rows.size:
            clocks = self._request.clocks
            self._readers, self._rows = np.zeros((clocks, 2), np.int64), np.zeros(clocks, np.int64)
            self.set("readers", self._readers)
            self.set("rows", self._rows)
        self.set("further_times", further.times)
        self.set("further_lanes", further.lanes)
        known = int(self._fields[REGION["reader_count"]])
        for n, (index, rows) in enumerate(islice(further.rows.items(), known, None), known):
            self._rows[index] = address_of(rows)
            self._readers[n] = index, self._rows[index]
        self._fields[REGION["reader_count"]] = len(further.rows)

    def checked(
        self, what: str, clock: Clock, cells: Array, lanes: Any, generic: bool, section: int = 0
    ) -> bool:
        """Do the same as a method of `races.Shadow`. False: nothing was done, because it would raise an error or `further` lacks a row.

        ``section``: of the vector of the clock, for "fenced".
        """
        return not self._request.call(what, self.address, clock, cells, lanes, generic, section)


class MachineMap:
    """The fields of a launch (`layout.MACHINE`).

    Attributes:
        address: of the fields.
        view: the fields.
    """

    def __init__(self, memory: GlobalMemory, warps: int):
        self._request = Request(SECTIONS * warps)
        self._fields = np.zeros(len(MACHINE), np.int64)
        self.view = self._fields.data
        self.address = address_of(self._fields)
        self._regions = np.array([self.of(region) for region in memory.regions], np.int64)
        self._fields[MACHINE["count"]] = len(self._regions)
        self._fields[MACHINE["regions"]] = address_of(self._regions)

    def of(self, region: Region) -> int:
        """Return the address of the fields of a region; create them first if there are none."""
        if region.map is None:
            region.map = RegionMap(region, self._request)
        return region.map.address
