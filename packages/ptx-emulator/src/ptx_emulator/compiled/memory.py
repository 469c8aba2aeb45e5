"""Forms of loads and stores, and of the instructions that move matrices between registers and shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ptx_emulator.access import space_of
from ptx_emulator.compiled.access import SPACES, build
from ptx_emulator.compiled.emit import (
    I1,
    I16,
    I32,
    I64,
    INTEGERS,
    Operation,
    Value,
    allocate,
    at,
    element,
    joined,
    lanes_of,
    picked,
)
from ptx_emulator.compiled.forms import Form, form
from ptx_emulator.decode import Decoder
from ptx_emulator.parser import SIZES, Instruction, Register, Vector

MOST_BYTES = 16  # of a lane


def access(
    o: Operation, what: str, size: int, count: int, space: str, places: Value, lanes: Value, values: Value, unknown: Value,
    *, several: bool = False, constant: bool = False,
) -> None:  # fmt: skip
    """Call a routine of `compiled.access`, and leave the instruction to its closure if the routine does. ``places``: a vector."""
    array = allocate(o.b, I64, 32)
    o.b.store(places, array, align=8)
    kinds = I32(SPACES[space]), I64(count), I1(several), I1(constant)
    left = o.call(*build(what, size), array, lanes, *kinds, values, unknown)
    o.bail_if(o.nonzero(left))


def addresses(o: Operation, number: int, size: int, lanes: Value) -> Value:
    """Return register + immediate as a vector of 64-bit addresses. ``size``: bytes of the register."""
    b = o.b
    o.bail_if(o.nonzero(b.and_(o.unknown(number), lanes)))
    found = o.source(number, INTEGERS[size])
    found = b.zext(found, lanes_of(I64)) if size < 8 else found
    return b.add(found, o.spread(o.field("immediate")))


def _space(d: Decoder, i: Instruction) -> str | None:
    """Return the state space; None for those that stay with the closures."""
    space = space_of(d, i)
    if space == "shared::cluster":
        return "shared"  # addresses of other CTAs are out of bounds there
    return space if space in SPACES else None


def _widths(i: Instruction, operand: int, kind: str) -> list[int]:
    """Return the bytes of each register of an operand of type ``kind``."""
    given = i.operands[operand]
    elements: Sequence[Any] = given.elements if isinstance(given, Vector) else (given,)
    return [SIZES[x.type] if isinstance(x, Register) else SIZES[kind] for x in elements]


def _base(d: Decoder, i: Instruction, operand: int, space: str) -> tuple[int, int, int]:
    """Return the register of an address, its bytes, and the offset."""
    parameter = d.parameter(i.operands[operand]) if space == "param" else None
    slot, offset = parameter or d.address(i.operands[operand], "b32")
    return slot, d.registers[slot].itemsize, offset


@form("ld")
def _ld(d: Decoder, i: Instruction) -> Form | None:
    space, kind = _space(d, i), i.modifiers[-1]
    if space is None or {"relaxed", "acquire", "volatile"} & set(i.modifiers):
        return None
    size, widths = SIZES[kind], _widths(i, 0, kind)
    targets = d.destinations(i.operands[0], kind, wider=True)
    base, base_size, offset = _base(d, i, 1, space)
    count = len(targets)
    if (
        size > 8
        or size * count > MOST_BYTES
        or (kind[0] not in "bus" and any(width != size for width in widths))
    ):
        return None
    signed, constant = kind[0] == "s", "nc" in i.modifiers and space == "global"

    def build(o: Operation) -> None:
        b, word = o.b, INTEGERS[size]
        places = addresses(o, count, base_size, o.lanes)
        values, unknown = allocate(b, word, 32 * count), allocate(b, I32, count)
        access(o, "load", size, count, space, places, o.lanes, values, unknown, constant=constant)
        for n, width in enumerate(widths):
            value = b.load(at(b, values, I64(32 * n), word), typ=lanes_of(word), align=size)
            if width > size:
                value = (b.sext if signed else b.zext)(value, lanes_of(INTEGERS[width]))
            o.put(n, value, element(b, unknown, I64(n), I32))
        o.done()

    name = ".".join(map(str, ("ld", space, constant, signed, size, base_size, *widths)))
    return Form(name, (*targets, base), build, offset)


@form("st")
def _st(d: Decoder, i: Instruction) -> Form | None:
    space, kind = _space(d, i), i.modifiers[-1]
    if space in (None, "param") or {"async", "relaxed", "release", "volatile"} & set(i.modifiers):
        return None
    assert space is not None
    size, widths = SIZES[kind], _widths(i, 1, kind)
    sources = d.sources(i.operands[1], kind, wider=True)
    base, base_size, offset = _base(d, i, 0, space)
    count = len(sources)
    if size > 8 or size * count > MOST_BYTES:
        return None

    def build(o: Operation) -> None:
        b, word = o.b, INTEGERS[size]
        places = addresses(o, count, base_size, o.lanes)
        values, unknown = allocate(b, word, 32 * count), allocate(b, I32, count)
        for n, width in enumerate(widths):
            value = o.source(n, INTEGERS[width])
            value = b.trunc(value, lanes_of(word)) if width > size else value
            b.store(value, at(b, values, I64(32 * n), word), align=size)
            b.store(o.unknown(n), at(b, unknown, I64(n), I32))
        access(o, "store", size, count, space, places, o.lanes, values, unknown)
        o.done()

    name = ".".join(map(str, ("st", space, size, base_size, *widths)))
    return Form(name, (*sources, base), build, offset)


# ---- 8x8 matrices in shared memory. The routines have their rows as [8 columns, 32 rows] of 2 bytes.


def _order(count: int, transposed: bool) -> list[int]:
    """Return for each register, lane and half the place of its element in the rows."""
    found = []
    for matrix in range(count):
        for lane in range(32):
            for half in range(2):
                row, column = lane // 4, lane % 4 * 2 + half
                row, column = (column, row) if transposed else (row, column)
                found.append(column * 32 + matrix * 8 + row)
    return found


def _matrices(i: Instruction) -> tuple[int, bool]:
    return next(int(m[1]) for m in i.modifiers if m in ("x1", "x2", "x4")), "trans" in i.modifiers


def bail_unless_whole(o: Operation) -> None:
    """Leave an `.aligned` instruction to its closure unless all lanes that have not ended execute it."""
    o.bail_if(o.b.icmp_unsigned("!=", o.lanes, o.get("alive", I32)))


@form("ldmatrix")
def _ldmatrix(d: Decoder, i: Instruction) -> Form | None:
    count, transposed = _matrices(i)
    targets = d.destinations(i.operands[0], "b32")
    base, base_size, offset = _base(d, i, 1, "shared")

    def build(o: Operation) -> None:
        b = o.b
        bail_unless_whole(o)
        rows = I32((1 << 8 * count) - 1)
        places = addresses(o, count, base_size, rows)
        values, unknown = allocate(b, I16, 256), allocate(b, I32, 8)
        access(o, "load", 2, 8, "shared", places, rows, values, unknown, several=True)
        missing: Value = I32(0)
        for n in range(8):
            missing = b.or_(missing, element(b, unknown, I64(n), I32))
        # The read has been recorded; recording it again, as the closure does, changes nothing.
        o.bail_if(o.nonzero(missing))
        rows_of = [b.load(at(b, values, I64(32 * n), I16), typ=lanes_of(I16), align=2) for n in range(8)]
        whole = joined(b, rows_of)
        order = _order(count, transposed)
        for n in range(count):
            words = picked(b, whole, order[64 * n : 64 * n + 64])
            o.put(n, b.bitcast(words, lanes_of(I32)), I32(0))
        o.done()

    return Form(f"ldmatrix.{count}.{transposed}.{base_size}", (*targets, base), build, offset)


@form("stmatrix")
def _stmatrix(d: Decoder, i: Instruction) -> Form | None:
    if "b8" in i.modifiers:
        return None
    count, transposed = _matrices(i)
    sources = d.sources(i.operands[1], "b32")
    base, base_size, offset = _base(d, i, 0, "shared")

    def build(o: Operation) -> None:
        b = o.b
        bail_unless_whole(o)
        o.bail_if(o.nonzero(o.unknown(*range(count))))
        rows = I32((1 << 8 * count) - 1)
        places = addresses(o, count, base_size, rows)
        values, unknown = allocate(b, I16, 256), allocate(b, I32, 8)
        whole = joined(b, [o.source(n % count, I32) for n in range(4)])
        halves = b.bitcast(whole, lanes_of(I16, 256))
        back = {place: n for n, place in enumerate(_order(4, transposed))}
        ordered = picked(b, halves, [back[n] for n in range(256)])
        b.store(ordered, values, align=2)
        for n in range(8):
            b.store(I32(0), at(b, unknown, I64(n), I32))
        access(o, "store", 2, 8, "shared", places, rows, values, unknown, several=True)
        o.done()

    return Form(f"stmatrix.{count}.{transposed}.{base_size}", (*sources, base), build, offset)


@form("movmatrix")
def _movmatrix(d: Decoder, i: Instruction) -> Form | None:
    to, source = d.destination(i.operands[0], "b32"), d.source(i.operands[1], "b32")

    def build(o: Operation) -> None:
        bail_unless_whole(o)
        o.bail_if(o.nonzero(o.unknown(1)))
        halves = o.b.bitcast(o.source(1, I32), lanes_of(I16, 64))
        order = [column * 8 + row for row in range(8) for column in range(8)]
        o.put(0, o.b.bitcast(picked(o.b, halves, order), lanes_of(I32)), I32(0))
        o.done()

    return Form("movmatrix", (to, source), build)
