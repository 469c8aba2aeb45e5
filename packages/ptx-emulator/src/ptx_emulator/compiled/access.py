"""Routines that read and write memory for the active lanes, with the race check. Forms call them.

A routine executes accesses whose lanes all lie in one region and are aligned, and which are no race; any other access stays with
the closure of its instruction. It checks everything before it changes anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from llvmlite import ir

from ptx_emulator.compiled.emit import (
    I1,
    I8,
    I32,
    I64,
    INTEGERS,
    POINTER,
    Routine,
    Value,
    allocate,
    at,
    each_lane,
    element,
    intrinsic,
    lanes_of,
    loop,
    splat,
)
from ptx_emulator.compiled.layout import MACHINE, REGION
from ptx_emulator.memory import SHARED_WINDOW, WINDOW_BITS
from ptx_emulator.races import BLOCK, SEVERAL

NULL, FALSE = ir.Constant(POINTER, None), I1(0)
GLOBAL, GENERIC, SHARED, PARAMETERS = range(4)
SPACES = {"global": GLOBAL, "generic": GENERIC, "shared": SHARED, "param": PARAMETERS}

#: A routine takes the context; the addresses, an array of 32, which it may change; the set of lanes; the state space, of
#: `SPACES`; how many words each lane accesses, up to 16 bytes; whether the lanes count as `SEVERAL` in the race check; whether
#: this is `ld.global.nc`; the words, an array [count, 32]; and per word the set of lanes where it is undefined.
ACCESS = ir.FunctionType(I32, (POINTER, POINTER, I32, I32, I64, I1, I1, POINTER, POINTER))

#: The type of each field of a region that the race check uses.
_FIELDS = {
    name: I64 if name in ("shadow_words", "reader_count") else POINTER
    for name in REGION
    if name.startswith(("shadow_", "further_", "reader", "rows"))
}


class RaceCheck(Routine):
    """A routine with the checks and records of `races.Shadow` that is being built.

    Attributes:
        region: the address of the region's fields.
    """

    region: Value

    def start(self, region: Value) -> None:
        """Set the region, which must not be null, and load what the checks need of it and of the warp."""
        b, self.region = self.b, region
        self._me, self._now = self.get("index", I64), self.get("now", I64)
        self._clocks, self._transitive = self.get("known"), self.get("transitive", I64)
        self._own = element(b, self._clocks, self._me, I64)
        # Nothing changes the fields meanwhile. LLVM does not know that, and would load them for each cell.
        self._loaded: dict[str, Value] = {}
        self._loaded |= {name: self.of_region(name, kind) for name, kind in _FIELDS.items()}

    def of_region(self, name: str, kind: Any = I64) -> Value:
        """Return a field of the region."""
        return self._loaded.get(name) or element(self.b, self.region, I64(REGION[name]), kind)

    def _further(self, rows: Value, cell: Value) -> tuple[Value, Value]:
        """Return the row of a cell in `races.FurtherReads`, 0 if there is none, and the place of its read. ``rows``: of the clock."""
        b, words = self.b, self.of_region("shadow_words")
        upper = b.icmp_unsigned(">=", cell, words)
        word = b.sub(cell, b.select(upper, words, I64(0)))
        row = b.zext(element(b, rows, b.udiv(word, I64(BLOCK)), I32), I64)
        apart = b.icmp_unsigned("!=", self.of_region("shadow_apart", POINTER), NULL)
        first = b.mul(b.add(b.shl(row, b.zext(apart, I64)), b.zext(upper, I64)), I64(BLOCK))
        return row, b.add(first, b.urem(word, I64(BLOCK)))

    @contextmanager
    def _each_reader(self) -> Iterator[tuple[Value, Value]]:
        """Repeat the body for each clock with further reads; yield its index and its rows."""
        b, readers = self.b, self.of_region("readers", POINTER)
        with loop(b, self.of_region("reader_count")) as n:
            row = b.shl(n, I64(1))
            yield element(b, readers, row, I64), element(b, readers, b.add(row, I64(1)), POINTER)

    def _slot(self, cell: Value) -> tuple[Value, Value, Value]:
        """Load the read in the slot of a cell: the clock's index, the time, and whether a read of this warp may take its place."""
        b = self.b
        index = b.zext(element(b, self.of_region("shadow_reader", POINTER), cell, I32), I64)
        time = element(b, self.of_region("shadow_read", POINTER), cell, I64)
        known = b.and_(element(b, self._clocks, index, I64), self._transitive)
        free = b.or_(b.icmp_unsigned("==", index, self._me), b.icmp_signed("<=", time, known))
        return index, time, free

    def check_writes(self, cell: Value, who: Value) -> None:
        """`races.Shadow._after_writes`: leave the instruction to its closure if a write is not ordered before it."""
        b = self.b
        writer = element(b, self.of_region("shadow_writer", POINTER), cell, I32)
        written = element(b, self.of_region("shadow_written", POINTER), cell, I64)
        known = element(b, self._clocks, b.zext(writer, I64), I64)
        with b.if_then(b.icmp_signed(">", written, known), likely=False):
            lane = element(b, self.of_region("shadow_lane", POINTER), cell, I8)
            mine = b.icmp_unsigned("==", b.zext(writer, I64), self._me)
            self.bail_if(b.not_(b.and_(mine, self._same(lane, who))))

    def check_fence(self, cell: Value) -> None:
        """The first part of `races.Shadow.unfenced`. The clocks are those of a section."""
        b = self.b
        writer = element(b, self.of_region("shadow_writer", POINTER), cell, I32)
        written = element(b, self.of_region("shadow_written", POINTER), cell, I64)
        generic = self.nonzero(element(b, self.of_region("shadow_generic", POINTER), cell, I8))
        writer = b.select(
            generic, writer, I32(0)
        )  # others may be tensor core instructions, which have no section here
        late = b.icmp_signed(">", written, element(b, self._clocks, b.zext(writer, I64), I64))
        self.bail_if(b.and_(generic, late))

    def _same(self, lane: Value, who: Value) -> Value:
        b = self.b
        return b.and_(b.icmp_unsigned("==", lane, who), b.icmp_unsigned("!=", who, I8(SEVERAL)))

    def check_reads(self, cell: Value, who: Value) -> None:
        """The part of `races.Shadow.store` that compares a write with earlier reads."""
        b = self.b
        index, time, _ = self._slot(cell)
        self._check_read(index, time, self.of_region("shadow_read_lane", POINTER), cell, who)
        times, lanes = (self.of_region(f"further_{name}", POINTER) for name in ("times", "lanes"))
        with self._each_reader() as (index, rows):
            _, place = self._further(rows, cell)
            self._check_read(index, element(b, times, place, I64), lanes, place, who)

    def _check_read(self, index: Value, time: Value, lanes: Value, place: Value, who: Value) -> None:
        b = self.b
        with b.if_then(b.icmp_signed(">", time, element(b, self._clocks, index, I64)), likely=False):
            mine = b.icmp_unsigned("==", index, self._me)
            self.bail_if(b.not_(b.and_(mine, self._same(element(b, lanes, place, I8), who))))

    def check_place(self, cell: Value) -> None:
        """Leave a read to its closure if there is no place for it yet (`races.Shadow.further`)."""
        b = self.b
        _, _, free = self._slot(cell)
        with b.if_then(b.not_(free), likely=False):
            rows = self.of_region("rows", POINTER)
            self.bail_if(b.icmp_unsigned("==", rows, NULL))
            mine = element(b, rows, self._me, POINTER)
            self.bail_if(b.icmp_unsigned("==", mine, NULL))
            row, _ = self._further(mine, cell)
            self.bail_if(b.icmp_unsigned("==", row, I64(0)))

    def record_read(self, cell: Value, who: Value) -> None:
        """Record a read as `races.Shadow.load` does."""
        b = self.b
        index, time, free = self._slot(cell)
        with b.if_else(free, likely=True) as (slot, further):
            with slot:
                mine = b.icmp_unsigned("==", index, self._me)
                time = b.select(mine, time, I64(0))
                b.store(
                    b.trunc(self._me, I32),
                    at(b, self.of_region("shadow_reader", POINTER), cell, I32),
                    align=4,
                )
                times, lanes = (self.of_region(f"shadow_{name}", POINTER) for name in ("read", "read_lane"))
                self._record(time, times, lanes, cell, who)
            with further:
                _, place = self._further(element(b, self.of_region("rows", POINTER), self._me, POINTER), cell)
                times, lanes = (self.of_region(f"further_{name}", POINTER) for name in ("times", "lanes"))
                self._record(element(b, times, place, I64), times, lanes, place, who)

    def _record(self, time: Value, times: Value, lanes: Value, place: Value, who: Value) -> None:
        """Record a read. ``time``: of this warp's read that it replaces."""
        b, lane = self.b, at(self.b, lanes, place, I8)
        again = b.icmp_signed(">", time, self._own)
        other = b.icmp_unsigned("!=", b.load(lane, typ=I8), who)
        b.store(b.select(b.and_(again, other), I8(SEVERAL), who), lane)
        b.store(self._now, at(b, times, place, I64), align=8)

    def check_marks(self, cell: Value) -> None:
        """The parts of `races.Shadow.store` about copies in flight and `ld.global.nc`."""
        b = self.b
        for name, kind in (("shadow_reading", I32), ("shadow_constant", I8)):
            array = self.of_region(name, POINTER)
            with b.if_then(b.icmp_unsigned("!=", array, NULL), likely=False):
                self.bail_if(self.nonzero(element(b, array, cell, kind)))

    def record_write(self, cell: Value, who: Value, generic: Value) -> None:
        """Record a write as `races.Shadow.store` does. ``generic``: whether it is of the generic proxy (i8)."""
        b = self.b
        record = (
            ("writer", b.trunc(self._me, I32)),
            ("lane", who),
            ("written", self._now),
            ("generic", generic),
        )
        for name, value in record:
            place = at(b, self.of_region(f"shadow_{name}", POINTER), cell, value.type)
            b.store(value, place, align=1)

    def copy_history(self, word: Value) -> None:
        """Copy the history of a word, which is that of its lower half, to the cell of its upper half."""
        b = self.b
        upper = b.add(word, self.of_region("shadow_words"))

        def copy(array: Value, kind: Any, source: Value, target: Value) -> None:
            b.store(element(b, array, source, kind), at(b, array, target, kind), align=1)

        kinds = {"writer": I32, "lane": I8, "written": I64, "generic": I8, "constant": I8, "reading": I32}
        kinds |= {"reader": I32, "read_lane": I8, "read": I64}
        for name, kind in kinds.items():
            array = self.of_region(f"shadow_{name}", POINTER)
            with b.if_then(b.icmp_unsigned("!=", array, NULL)):
                copy(array, kind, word, upper)
        times, lanes = (self.of_region(f"further_{name}", POINTER) for name in ("times", "lanes"))
        with self._each_reader() as (_, rows):
            _, place = self._further(rows, word)
            for array, kind in ((times, I64), (lanes, I8)):
                copy(array, kind, place, b.add(place, I64(BLOCK)))


class Access(RaceCheck):
    """A routine for words of ``size`` bytes that is being built. It has located the accesses.

    Attributes:
        size, kind: bytes and type of a word.
        lanes, count, several, constant, values, unknown: the arguments.
        places: the addresses.
        space: the argument.
        base, data: of the region.
        known: of the region; null: all its bytes are defined.
        watched: whether the region is checked for races.
        words: the words of 4 bytes that each lane accesses.
        half: whether each lane accesses at most 2 bytes.
        apart: of the region's race check (`races.Shadow`); null: None.
    """

    def __init__(self, module: Any, name: str, size: int):
        super().__init__(module, name, ACCESS)
        arguments = self.function.args[1:]
        self.places, self.lanes, self.space, self.count = arguments[:4]
        self.several, self.constant, self.values, self.unknown = arguments[4:]
        self.size, self.kind = size, INTEGERS[size]
        b = self.b
        bytes_ = b.mul(self.count, I64(size))
        words = b.lshr(bytes_, I64(2))
        self.half = b.icmp_unsigned("==", words, I64(0))
        self.words = b.select(self.half, I64(1), words)
        self._locate(bytes_)
        self.base, self.data = self.of_region("base"), self.of_region("data", POINTER)
        self.known = self.of_region("known", POINTER)
        self.tracked = b.icmp_unsigned("!=", self.known, NULL)
        self.watched = b.icmp_unsigned("!=", self.of_region("shadow_writer", POINTER), NULL)
        self.apart = self.of_region("shadow_apart", POINTER)

    # ---- where the accesses are

    def _locate(self, bytes_: Value) -> None:
        """Find the region of the first lane, and check that all lanes are within it and aligned."""
        b = self.b
        first_lane = intrinsic(b, "llvm.cttz.i32", I32, self.lanes, I1(0))
        first = element(b, self.places, b.zext(first_lane, I64), I64)
        window = b.lshr(first, I64(WINDOW_BITS))
        generic = b.icmp_unsigned("==", self.space, I32(GENERIC))
        self.bail_if(b.and_(generic, b.icmp_unsigned(">", window, I64(SHARED_WINDOW))))
        in_window = b.and_(generic, b.icmp_unsigned("==", window, I64(SHARED_WINDOW)))
        shared = b.or_(in_window, b.icmp_unsigned("==", self.space, I32(SHARED)))
        offset = b.select(in_window, I64(SHARED_WINDOW << WINDOW_BITS), I64(0))
        found = allocate(b, POINTER)
        parameters = b.icmp_unsigned("==", self.space, I32(PARAMETERS))
        b.store(b.select(parameters, self.get("parameters"), self.get("shared")), found)
        with b.if_then(b.not_(b.or_(shared, parameters))):
            b.store(NULL, found)
            self._search(first, found)
        region = b.load(found, typ=POINTER)
        self.bail_if(b.icmp_unsigned("==", region, NULL))
        self.start(region)
        places = b.sub(b.load(self.places, typ=lanes_of(I64), align=8), self.spread(offset))
        b.store(places, self.places, align=8)
        low, high = self.of_region("low"), self.of_region("high")
        self.bail_if(b.icmp_unsigned("<", b.sub(high, low), bytes_))
        # Addresses are unsigned here: each one outside of [low, high - bytes] is out of bounds.
        bad = b.icmp_unsigned("<", places, self.spread(low))
        bad = b.or_(bad, b.icmp_unsigned(">", places, self.spread(b.sub(high, bytes_))))
        rest = b.and_(places, self.spread(b.sub(bytes_, I64(1))))
        bad = b.or_(bad, b.icmp_unsigned("!=", rest, splat(I64, 0)))
        self.bail_if(self.nonzero(b.and_(self.set_of(bad), self.lanes)))
        self._in_global = b.not_(b.or_(shared, parameters))

    def _search(self, first: Value, found: Value) -> None:
        """Store the region of global memory with an address to ``found``."""
        b, machine = self.b, self.get("machine")
        regions = element(b, machine, I64(MACHINE["regions"]), POINTER)
        with loop(b, element(b, machine, I64(MACHINE["count"]), I64)) as n:
            region = element(b, regions, n, POINTER)
            low, high = (element(b, region, I64(REGION[name]), I64) for name in ("low", "high"))
            with b.if_then(b.and_(b.icmp_unsigned(">=", first, low), b.icmp_unsigned("<", first, high))):
                b.store(region, found)

    @contextmanager
    def _each(self) -> Iterator[tuple[Value, Value, Value]]:
        """Repeat the body for each lane; yield the lane, as i64 too, and its offset from the region's base."""
        with each_lane(self.b, self.lanes) as lane:
            wide = self.b.zext(lane, I64)
            yield lane, wide, self.b.sub(element(self.b, self.places, wide, I64), self.base)

    @contextmanager
    def _each_cell(self) -> Iterator[tuple[Value, Value, Value]]:
        """Repeat the body for each cell of the race check; yield the cell, its lane, and the place of its word of 4 bytes among
        all words of the access."""
        b, halves = self.b, self.of_region("shadow_words")
        cells = allocate(b, I64)
        with self._each() as (lane, wide, offset):
            who = b.select(self.several, I8(SEVERAL), b.trunc(lane, I8))
            first = b.lshr(offset, I64(2))
            upper: Value = I64(0)
            if self.size < 4:
                upper = b.and_(b.lshr(offset, I64(1)), b.zext(self.half, I64))
                upper = b.mul(b.and_(upper, I64(1)), halves)
            with loop(b, self.words) as n:
                word = b.add(first, n)
                b.store(I64(1), cells)
                with b.if_then(b.and_(self._some_apart, b.not_(self.half)), likely=False):
                    b.store(b.add(I64(1), b.zext(element(b, self.apart, word, I8), I64)), cells)
                with loop(b, b.load(cells, typ=I64)) as part:
                    cell = b.add(b.add(word, upper), b.mul(part, halves))
                    yield cell, who, b.add(b.mul(n, I64(32)), wide)

    @property
    def _some_apart(self) -> Value:
        return self.b.icmp_unsigned("!=", self.apart, NULL)

    def _take_apart(self) -> None:
        """`races.Shadow._take_apart`, before accesses of at most 2 bytes. The first one in a region stays with its closure."""
        if self.size >= 4:
            return
        b = self.b
        with b.if_then(self.half):
            self.bail_if(b.not_(self._some_apart))
            with self._each() as (_, _, offset):
                word = b.lshr(offset, I64(2))
                place = at(b, self.apart, word, I8)
                with b.if_then(b.icmp_unsigned("==", b.load(place, typ=I8), I8(0)), likely=False):
                    b.store(I8(1), place)
                    self.copy_history(word)

    def _value_at(self, n: Value, lane: Value) -> Value:
        """Return the address of word ``n`` of a lane among the values."""
        return at(self.b, self.values, self.b.add(self.b.mul(n, I64(32)), lane), self.kind)

    def _in(self, array: Value, offset: Value, n: Value) -> Value:
        """Return the address of word ``n`` of a lane in an array of the region's bytes."""
        return at(self.b, array, self.b.add(offset, self.b.mul(n, I64(self.size))), I8)

    # ---- reading and writing

    def load(self) -> None:
        """Read. A read for which there is no place yet, and the first `ld.global.nc`, stay with their closures, which make room."""
        b = self.b
        with b.if_then(self.watched):
            marks, written = (self.of_region(f"shadow_{name}", POINTER) for name in ("constant", "written"))
            self.bail_if(b.and_(self.constant, b.icmp_unsigned("==", marks, NULL)))
            self._take_apart()
            with self._each_cell() as (cell, who, _):
                self.check_writes(cell, who)
                self.check_place(cell)
                with b.if_then(self.constant):
                    self.bail_if(self.nonzero(element(b, written, cell, I64)))
            with b.if_then(self.constant), self._each_cell() as (cell, _, _):
                b.store(I8(1), at(b, marks, cell, I8))
            with self._each_cell() as (cell, who, _):
                self.record_read(cell, who)
        with loop(b, self.count) as n:
            b.store(I32(0), at(b, self.unknown, n, I32))
        with self._each() as (_, wide, offset), loop(b, self.count) as n:
            value = b.load(self._in(self.data, offset, n), typ=self.kind, align=self.size)
            b.store(value, self._value_at(n, wide), align=self.size)
        with b.if_then(self.tracked), self._each() as (lane, _, offset), loop(b, self.count) as n:
            mask = b.load(self._in(self.known, offset, n), typ=self.kind, align=self.size)
            missing = b.zext(b.icmp_unsigned("!=", mask, self.kind(-1)), I32)
            place = at(b, self.unknown, n, I32)
            b.store(b.or_(b.load(place, typ=I32), b.shl(missing, lane)), place)
        self.done()

    def store(self) -> None:
        """Write, as `access.scatter`."""
        b = self.b
        undefined = allocate(b, I32)
        b.store(I32(0), undefined)
        with loop(b, self.count) as n:
            b.store(b.or_(b.load(undefined, typ=I32), element(b, self.unknown, n, I32)), undefined)
        some = self.nonzero(b.and_(b.load(undefined, typ=I32), self.lanes))
        accepted = b.and_(self.nonzero(self.of_region("scratch")), self.tracked)
        self.bail_if(b.and_(some, b.not_(accepted)))
        changed = allocate(b, I8, 32 * 8)
        with b.if_then(self.watched):
            self._compare(changed)
            self._take_apart()
            with self._each_changed(changed) as (cell, who):
                self.check_marks(cell)
                self.check_writes(cell, who)
                self.check_reads(cell, who)
            with self._each_changed(changed) as (cell, who):
                self.record_write(cell, who, I8(1))
        machine = self.get("machine")
        clock_at, changes_at = (at(b, machine, I64(MACHINE[name]), I64) for name in ("clock", "changes"))
        clock = b.add(b.load(clock_at, typ=I64), I64(1))
        b.store(clock, clock_at)
        b.store(b.add(b.load(changes_at, typ=I64), b.zext(self._in_global, I64)), changes_at)
        cta = b.trunc(self.get("cta", I64), I32)
        written, writer = self.of_region("written", POINTER), self.of_region("writer", POINTER)
        with self._each() as (lane, wide, offset):
            with loop(b, self.count) as n:
                value = b.load(self._value_at(n, wide), typ=self.kind, align=self.size)
                b.store(value, self._in(self.data, offset, n), align=self.size)
                with b.if_then(self.tracked):
                    mask = b.select(self._missing(n, lane), self.kind(0), self.kind(-1))
                    b.store(mask, self._in(self.known, offset, n), align=self.size)
            unit = b.lshr(offset, I64(4))
            b.store(clock, at(b, written, unit, I64), align=8)
            b.store(cta, at(b, writer, unit, I32), align=4)
        self.done()

    @contextmanager
    def _each_changed(self, changed: Value) -> Iterator[tuple[Value, Value]]:
        """Repeat the body for each cell of `_each_cell` whose word changes, see `_compare`."""
        b = self.b
        with self._each_cell() as (cell, who, place), b.if_then(b.trunc(element(b, changed, place, I8), I1)):
            yield cell, who

    def _missing(self, n: Value, lane: Value) -> Value:
        b = self.b
        return b.trunc(b.lshr(element(b, self.unknown, n, I32), lane), I1)

    def _compare(self, changed: Value) -> None:
        """Store for each word of 4 bytes whether its value or its state changes. Writing what is there is not a race."""
        b = self.b
        with self._each() as (_, wide, _), loop(b, self.words) as n:
            b.store(I8(0), at(b, changed, b.add(b.mul(n, I64(32)), wide), I8))
        with self._each() as (lane, wide, offset), loop(b, self.count) as n:
            before = b.load(self._in(self.data, offset, n), typ=self.kind, align=self.size)
            value = b.load(self._value_at(n, wide), typ=self.kind, align=self.size)
            differs = allocate(b, I1)
            missing = self._missing(n, lane)
            b.store(b.or_(b.icmp_unsigned("!=", before, value), missing), differs)
            with b.if_then(self.tracked):
                mask = b.load(self._in(self.known, offset, n), typ=self.kind, align=self.size)
                unset = b.icmp_unsigned("!=", mask, self.kind(-1))
                b.store(b.or_(b.load(differs, typ=I1), unset), differs)
            flag = b.zext(b.load(differs, typ=I1), I8)
            word = b.lshr(b.mul(n, I64(self.size)), I64(2))
            for part in range(max(self.size // 4, 1)):
                row = b.mul(b.add(word, I64(part)), I64(32))
                place = at(b, changed, b.add(row, wide), I8)
                b.store(b.or_(b.load(place, typ=I8), flag), place)


def build(what: str, size: int) -> tuple[str, Callable[[Any], None]]:
    """Return the name of a routine, "load" or "store", for words of ``size`` bytes, and the function that builds it."""
    name = f"access.{what}.{size}"
    return name, partial(_build, what, name, size)


def _build(what: str, name: str, size: int, module: Any) -> None:
    access = Access(module, name, size)
    access.load() if what == "load" else access.store()
