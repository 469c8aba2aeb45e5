"""Forms of votes, shuffles and `bar.warp.sync`: instructions in which the lanes of a warp communicate."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ptx_emulator.compiled.emit import (
    I1,
    I32,
    I64,
    Operation,
    Value,
    allocate,
    at,
    element,
    intrinsic,
    lanes_of,
    loop,
    splat,
)
from ptx_emulator.compiled.forms import Form, form, name_of
from ptx_emulator.decode import Decoder
from ptx_emulator.parser import Instruction, Pair, Sink

LANES = ir.Constant(lanes_of(I32), list(range(32)))


def _first(o: Operation) -> Value:
    """Return the lowest active lane."""
    return intrinsic(o.b, "llvm.cttz.i32", I32, o.lanes, I1(1))


def _members(o: Operation, number: int) -> None:
    """Leave the instruction to its closure unless all members of the mask in an operand have arrived, as `synchronize.members`."""
    b = o.b
    o.bail_unless_known(number)
    masks = o.source(number, I32)
    mask = element(b, o.words(number), b.zext(_first(o), I64), I32)
    others = o.set_of(b.icmp_unsigned("!=", masks, o.spread(mask)))
    o.bail_if(o.nonzero(b.and_(others, o.lanes)))
    missing = b.and_(b.and_(mask, o.get("alive", I32)), b.not_(o.lanes))
    o.bail_if(o.nonzero(b.or_(missing, b.and_(o.lanes, b.not_(mask)))))


@form("bar", "barrier")
def _bar(d: Decoder, i: Instruction) -> Form | None:
    if i.modifiers[:2] != ("warp", "sync"):
        return None

    def synchronize(o: Operation) -> None:
        b = o.b
        _members(o, 0)
        now = o.get("now", I64)
        b.store(now, at(b, o.get("known"), o.get("index", I64), I64), align=8)
        b.store(b.add(now, I64(1)), o.place("now"), align=8)
        o.done()

    return Form("bar.warp.sync", (d.source(i.operands[0], "b32"),), synchronize)


@form("vote")
def _vote(d: Decoder, i: Instruction) -> Form | None:
    mode, kind = i.modifiers[1:3]
    p, negated = d.predicate(i.operands[1])
    slots = d.destination(i.operands[0], kind), p, d.source(i.operands[2], "b32")

    def vote(o: Operation) -> None:
        b = o.b
        _members(o, 2)
        given = b.not_(o.predicate(1)) if negated else o.predicate(1)
        value = b.and_(given, o.lanes)
        some = o.nonzero(b.and_(o.unknown(1), o.lanes))
        unknown = b.select(some, o.lanes, I32(0))
        if mode == "ballot":
            o.put(0, o.spread(value), unknown)
        else:
            every, none = b.icmp_unsigned("==", value, o.lanes), b.icmp_unsigned("==", value, I32(0))
            result = {"any": b.not_(none), "all": every, "uni": b.or_(every, none)}[mode]
            o.put(0, b.sext(result, I32), unknown)
        o.done()

    return Form(name_of(i, negated), slots, vote)


@form("activemask")
def _activemask(d: Decoder, i: Instruction) -> Form | None:
    def mask(o: Operation) -> None:
        o.put(0, o.spread(o.lanes), I32(0))
        o.done()

    return Form("activemask", (d.destination(i.operands[0], "b32"),), mask)


@form("elect")
def _elect(d: Decoder, i: Instruction) -> Form | None:
    (pair, mask) = i.operands
    assert isinstance(pair, Pair)
    lane = None if isinstance(pair.first, Sink) else d.destination(pair.first, "b32")
    slots = [d.source(mask, "b32"), d.destination(pair.second, "pred"), *([] if lane is None else [lane])]

    def elect(o: Operation) -> None:
        _members(o, 0)
        if lane is not None:
            o.put(2, o.spread(_first(o)), I32(0))
        o.put(1, o.b.shl(I32(1), _first(o)), I32(0))
        o.done()

    return Form(name_of(i, len(slots)), tuple(slots), elect)


@form("shfl")
def _shfl(d: Decoder, i: Instruction) -> Form | None:
    mode, first = i.modifiers[1], i.operands[0]
    targets = []
    if isinstance(first, Pair):
        targets, first = [d.destination(first.second, "pred")], first.first
    sources = [d.source(x, "b32") for x in i.operands[1:5]]
    slots = (*sources, d.destination(first, "b32"), *targets)

    def shuffle(o: Operation) -> None:
        b = o.b
        _members(o, 3)
        o.bail_unless_known(1, 2)
        source, valid = _shuffled(b, mode, o.source(1, I32), o.source(2, I32))
        active = b.trunc(b.lshr(o.spread(o.lanes), source), lanes_of(I1))
        o.bail_if(o.nonzero(b.and_(o.lanes, b.not_(o.set_of(active)))))
        unknown = o.set_of(b.trunc(b.lshr(o.spread(o.unknown(0)), source), lanes_of(I1)))
        places, found = allocate(b, I32, 32), allocate(b, I32, 32)
        b.store(source, places, align=4)
        with loop(b, I64(32)) as lane:
            place = b.zext(element(b, places, lane, I32), I64)
            b.store(element(b, o.words(0), place, I32), at(b, found, lane, I32), align=4)
        o.put(4, b.load(found, typ=lanes_of(I32), align=4), unknown)
        if targets:
            o.put(5, o.set_of(valid), I32(0))
        o.done()

    return Form(name_of(i, len(slots)), slots, shuffle)


def _shuffled(b: Any, mode: str, amount: Value, c: Value) -> tuple[Value, Value]:
    """`synchronize.shuffled`."""
    mask = splat(I32, 31)
    n, clamp = b.and_(amount, mask), b.and_(c, mask)
    segment = b.and_(b.lshr(c, splat(I32, 8)), mask)
    low = b.and_(LANES, segment)
    high = b.or_(low, b.and_(clamp, b.not_(segment)))
    if mode == "idx":
        source = b.or_(low, b.and_(n, b.not_(segment)))
    else:
        source = {"bfly": b.xor, "up": b.sub, "down": b.add}[mode](LANES, n)
    valid = b.icmp_signed(">=" if mode == "up" else "<=", source, high)
    return b.select(valid, source, LANES), valid
