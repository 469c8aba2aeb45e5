"""Routines of the race check for cells that a handler gives (`races.Shadow`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from ptx_emulator.compiled.access import RaceCheck
from ptx_emulator.compiled.emit import I1, I8, I32, I64, POINTER, Value, element, loop

#: The context, of which ``index``, ``now``, ``known`` and ``transitive`` are used; the region's fields; the cells (i64), the lane of each (i8),
#: and how many there are; whether a write is of the generic proxy.
CELLS = ir.FunctionType(I32, (POINTER, POINTER, POINTER, POINTER, I64, I1))


def build(what: str) -> tuple[str, Callable[[Any], None]]:
    """Return the name of a routine, "load", "store", "observe" or "fenced", and the function that builds it."""
    name = f"shadow.{what}"
    return name, partial(_build, what, name)


def _build(what: str, name: str, module: Any) -> None:
    check = RaceCheck(module, name, CELLS)
    _, region, cells, lanes, count, generic = check.function.args
    b = check.b
    check.start(region)

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
        each(lambda cell, who: check.record_write(cell, who, b.zext(generic, I8)))
    check.done()
