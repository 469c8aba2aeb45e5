"""Routines of the race check for cells that a handler gives (`races.Shadow`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from ptx_emulator.compiled.access import RaceCheck
from ptx_emulator.compiled.emit import I8, I32, I64, POINTER, Value, element, loop

#: A routine takes a context, of which it uses ``index``, ``now``, ``known`` and ``transitive`` of the clock; ``region``, the address of its
#: fields; ``cells`` (i64), ``cell_lanes``, the lane of each (i8), and ``cell_count``; ``generic``, whether a write is of the generic proxy.
CELLS = ir.FunctionType(I32, (POINTER,))


def build(what: str) -> tuple[str, Callable[[Any], None]]:
    """Return the name of a routine, "load", "store", "observe" or "fenced", and the function that builds it."""
    name = f"shadow.{what}"
    return name, partial(_build, what, name)


def _build(what: str, name: str, module: Any) -> None:
    check = RaceCheck(module, name, CELLS)
    b = check.b
    cells, lanes, count = check.get("cells"), check.get("cell_lanes"), check.get("cell_count", I64)
    generic = b.trunc(check.get("generic", I64), I8)
    check.start(check.get("region"))

    def each(body: Callable[[Value, Value], None]) -> None:
        with loop(b, count) as n:
            body(element(b, cells, n, I64), element(b, lanes, n, I8))

    if what == "fenced":
        each(lambda cell, who: check.check_fence(cell))
        check.done()
        return
    if what == "store":
        each(lambda cell, who: check.check_marks(cell))
    each(check.check_writes)
    if what == "load":
        each(lambda cell, who: check.check_place(cell))
        each(check.record_read)
    elif what == "store":
        each(check.check_reads)
        each(lambda cell, who: check.record_write(cell, who, generic))
    check.done()
