"""Warps whose registers are in one block of memory that compiled code and closures share."""

from __future__ import annotations

import functools
import operator
from typing import Any

import numpy as np

from ptx_emulator.compiled.dispatch import MERGE
from ptx_emulator.compiled.layout import CONTEXT, MACHINE, PACKED, WRITTEN
from ptx_emulator.compiled.memory_map import MachineMap
from ptx_emulator.compiled.products import product
from ptx_emulator.compiled.program import CompiledProgram, RegisterFile
from ptx_emulator.decode import WORDS
from ptx_emulator.lanes import BOOLS, FULL, LANES, Array, address_of
from ptx_emulator.machine import Warp

_FILE, _STATE, _CODE, _PC, _LANES, _BUDGET, _STOP, _FLIGHT = (
    CONTEXT[name] for name in ("file", "state", "code", "pc", "lanes", "budget", "stop", "flight")
)
_INDEX, _NOW, _KNOWN, _TRANSITIVE, _MACHINE, _SHARED, _PARAMETERS, _ALIVE, _CTA = (
    CONTEXT[name]
    for name in ("index", "now", "known", "transitive", "machine", "shared", "parameters", "alive", "cta")
)
_CLOCK, _CHANGES = MACHINE["clock"], MACHINE["changes"]


class Registers:
    """The values of a warp's registers, as `Warp.regs` has them. Reading one copies it."""

    def __init__(self, layout: RegisterFile, file: Array):
        self._places, self._sizes, self._rows = layout.places, layout.sizes, layout.rows
        self._words = {size: file.view(WORDS[size]) for size in WORDS}
        self._predicates = self._words[4].data

    def view(self, slot: int) -> Array:
        """Return the words of a register, not a copy."""
        size, place = self._sizes[slot], self._places[slot]
        return self._words[size][place // size : place // size + 32]

    @property
    def words(self) -> Array:
        """All words of 4 bytes."""
        return self._words[4]

    def rows(self, slots: list[int]) -> Array:
        """Return the places [n, 32] of the words of registers of 4 bytes among `words`."""
        key = tuple(slots)
        found = self._rows.get(key)
        if found is None:
            places = np.array([self._places[slot] >> 2 for slot in slots])
            found = self._rows[key] = places[:, None] + LANES
        return found

    def __getitem__(self, slot: int) -> Any:
        if self._sizes[slot] == 0:
            return self._predicates[self._places[slot] >> 2]
        return self.view(slot).copy()

    def __setitem__(self, slot: int, value: Any) -> None:
        if self._sizes[slot] == 0:
            self._predicates[self._places[slot] >> 2] = value
        else:
            self.view(slot)[:] = value


class Flight(dict[int, int]):
    """`Warp.flight`. A byte for each register tells compiled code whether it is in flight."""

    def __init__(self, flags: Array, given: dict[int, int]):
        super().__init__(given)
        self._flags = flags
        flags[:] = 0
        flags[list(given)] = 1

    def __setitem__(self, slot: int, group: int) -> None:
        super().__setitem__(slot, group)
        self._flags[slot] = 1

    def update(self, given: Any) -> None:
        super().update(given)
        self._flags[list(given)] = 1

    def pop(self, slot: int, *default: Any) -> Any:
        self._flags[slot] = 0
        return super().pop(slot, *default)


class CompiledWarp(Warp):
    """A warp that executes compiled instructions where they exist, and closures elsewhere."""

    regs: Any
    unknown: Any

    def _start_registers(self) -> None:
        compiled = self.machine.compiled
        assert isinstance(compiled, CompiledProgram)
        map_ = self.machine.map
        assert isinstance(map_, MachineMap)
        self._compiled, self._counters = compiled, map_.view
        layout = compiled.file
        memory = np.zeros(layout.bytes + 64, np.uint8)
        start = -address_of(memory) % 64
        file = self._file = memory[start : start + layout.bytes]
        count = len(layout.places)
        file[: 4 * count] = layout.unknown.view(np.uint8)
        file[layout.constants :] = layout.image
        self._unknown = file[: 4 * count].view(np.uint32)
        self.unknown = self._unknown.data
        self.regs = Registers(layout, file)
        self._states = file[layout.state : layout.state + count]
        self._state = self._states.data
        self._flags = file[layout.flight : layout.flight + count]
        self._fenced_once = False
        self._fields = np.zeros(len(CONTEXT), np.int64)
        fields = self._context = self._fields.data
        self._address, base = address_of(self._fields), address_of(file)
        fields[_FILE], fields[_STATE], fields[_CODE] = base, base + layout.state, compiled.code
        fields[_INDEX], fields[_KNOWN] = self.clock.index, self.clock.known_at
        fields[_TRANSITIVE] = -self.clock.transitive
        fields[_MACHINE], fields[_SHARED] = map_.address, map_.of(self.cta.shared)
        fields[_PARAMETERS], fields[_CTA] = map_.of(self.machine.parameters), self.cta.number

    def set_flight(self, registers: dict[int, int]) -> None:
        self.flight = Flight(self._flags, registers)

    def advance(self, pc: int, lanes: int, stop: int, budget: int) -> tuple[int, int, bool]:
        compiled = self._compiled
        if not compiled.compiled[pc]:
            return pc, budget, False
        fields, clock, machine = self._context, self.clock, self.machine
        fields[_PC], fields[_LANES], fields[_BUDGET], fields[_STOP] = pc, lanes, budget, stop
        fields[_FLIGHT] = self._address_of_flags() if self.flight else 0
        fields[_NOW], fields[_ALIVE] = clock.now, self.alive
        counters = self._counters
        counters[_CLOCK], counters[_CHANGES] = machine.clock, machine.changes
        result = compiled.advance(self._address)
        machine.clock, machine.changes = counters[_CLOCK], counters[_CHANGES]
        clock.now = fields[_NOW]
        return fields[_PC], fields[_BUDGET], result == MERGE

    def _address_of_flags(self) -> int:
        return self._context[_FILE] + self._compiled.file.flight

    # ---- registers

    def put(self, slot: int, value: Any, unknown: int, lanes: int) -> None:
        view = self.regs.view(slot)
        if lanes == FULL:
            view[:] = value
            self.unknown[slot] = unknown
        else:
            np.copyto(view, value, where=BOOLS[lanes])
            self.unknown[slot] = unknown & lanes | self.unknown[slot] & ~lanes
        self._state[slot] = WRITTEN

    def unknown_bytes(self, slot: int) -> list[int]:
        if self._state[slot] & PACKED:
            return self.packed[slot][1]
        return [self.unknown[slot]] * self._compiled.file.sizes[slot]

    def put_bytes(self, slot: int, value: Any, unknown: list[int], lanes: int) -> None:
        if any(unknown) or self.unknown[slot]:
            before = self.unknown_bytes(slot)
            unknown = [new & lanes | old & ~lanes for new, old in zip(unknown, before)]
            self.put(slot, value, functools.reduce(operator.or_, unknown), lanes)
            if any(x != unknown[0] for x in unknown):
                self.packed[slot] = None, unknown
                self._state[slot] = WRITTEN | PACKED
        else:
            self.put(slot, value, 0, lanes)

    def fence_registers(self) -> None:
        self._fenced_once = True
        self._states &= np.uint8(~WRITTEN & 0xFF)

    def written_since_fence(self, slots: list[int]) -> bool:
        return not self._fenced_once or bool((self._states[slots] & WRITTEN).any())

    def accumulate(self, slots: list[int]) -> None:
        self._states[slots] &= np.uint8(~WRITTEN & 0xFF)
        self.flight.update(dict.fromkeys(slots, self.wgmma_group))

    def values(self, slots: list[int]) -> Any:
        return self.regs.words[self.regs.rows(slots)]

    def put_all(self, slots: list[int], words: Any, unknown: list[int]) -> None:
        self.regs.words[self.regs.rows(slots)] = words
        self._unknown[slots] = unknown
        self._states[slots] = WRITTEN

    # ---- what handlers delegate to compiled code

    def product(self, left: Array, right: Array, c: Array | None) -> Array | None:
        return product(left, right, c)
