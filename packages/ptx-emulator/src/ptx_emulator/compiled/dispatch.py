"""The loop that executes compiled instructions of a fragment, until one needs Python."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from ptx_emulator.compiled.emit import I8, I32, I64, OPERATION, POINTER, at, element
from ptx_emulator.compiled.layout import BRANCH, CLOSURE, CONTEXT, RECORD, RECORD_TYPE

NAME = "advance"
#: Results of the loop: the fragment reached the instruction at which it has to merge; its budget is used up, or the next
#: instruction needs Python.
MERGE, PYTHON = 0, 1


def build(module: Any) -> None:
    """Add the loop to a module: a function of the context. It changes the context's ``pc`` and ``budget``."""
    function = ir.Function(module, ir.FunctionType(I32, (POINTER,)), NAME)
    (context,) = function.args
    b = ir.IRBuilder(function.append_basic_block("entry"))

    def get(name: str, kind: Any = I64) -> Any:
        return b.load(at(b, context, I64(CONTEXT[name]), I64), typ=kind, align=8)

    def set_(name: str, value: Any) -> None:
        b.store(value, at(b, context, I64(CONTEXT[name]), I64), align=8)

    file, code, flight = get("file", POINTER), get("code", POINTER), get("flight", POINTER)
    lanes = get("lanes", I32)
    stop = b.trunc(get("stop"), I32)
    in_flight = b.icmp_unsigned("!=", flight, ir.Constant(POINTER, None))
    pc_at, budget_at = b.alloca(I32), b.alloca(I32)
    b.store(b.trunc(get("pc"), I32), pc_at)
    b.store(b.trunc(get("budget"), I32), budget_at)
    head, merge, python = (b.append_basic_block(name) for name in ("head", "merge", "python"))
    b.branch(head)
    for block, result in ((merge, MERGE), (python, PYTHON)):
        b.position_at_end(block)
        set_("pc", b.zext(b.load(pc_at, typ=I32), I64))
        set_("budget", b.zext(b.load(budget_at, typ=I32), I64))
        b.ret(I32(result))
    b.position_at_end(head)
    pc, budget = b.load(pc_at, typ=I32), b.load(budget_at, typ=I32)
    record = at(b, code, b.mul(b.zext(pc, I64), I64(RECORD_TYPE.itemsize)), I8)

    def field(name: str) -> Any:
        offset, size, is_pointer = RECORD[name]
        kind = POINTER if is_pointer else ir.IntType(8 * size)
        return b.load(at(b, record, I64(offset), I8), typ=kind, align=size)

    def go_if(condition: Any, block: Any) -> None:
        following = b.append_basic_block()
        b.cbranch(condition, block, following)
        b.position_at_end(following)

    kind = field("kind")
    go_if(b.or_(b.icmp_unsigned("==", budget, I32(0)), b.icmp_unsigned("==", kind, I32(CLOSURE))), python)
    with b.if_then(in_flight, likely=False):
        count, touched = field("touched_count"), field("touched")
        check, body, clear = (b.append_basic_block(name) for name in ("check", "body", "clear"))
        before = b.block
        b.branch(check)
        b.position_at_end(check)
        number = b.phi(I32)
        number.add_incoming(I32(0), before)
        b.cbranch(b.icmp_unsigned("<", number, count), body, clear)
        b.position_at_end(body)
        slot = element(b, touched, b.zext(number, I64), I32)
        number.add_incoming(b.add(number, I32(1)), body)
        b.cbranch(b.icmp_unsigned("!=", element(b, flight, b.zext(slot, I64), I8), I8(0)), python, check)
        b.position_at_end(clear)
    guard = field("guard")
    guarded, execute = b.append_basic_block("guarded"), b.append_basic_block("execute")
    before = b.block
    b.cbranch(b.icmp_signed(">=", guard, I32(0)), guarded, execute)
    b.position_at_end(guarded)
    unknown = element(b, file, b.zext(guard, I64), I32)
    go_if(b.icmp_unsigned("!=", b.and_(unknown, lanes), I32(0)), python)
    value = b.load(at(b, file, b.zext(field("guard_place"), I64), I8), typ=I32, align=4)
    some = b.and_(lanes, b.xor(value, field("negated")))
    after_guard = b.block
    b.branch(execute)
    b.position_at_end(execute)
    active = b.phi(I32)
    active.add_incoming(lanes, before)
    active.add_incoming(some, after_guard)
    branch, call, called, next_ = (
        b.append_basic_block(name) for name in ("branch", "call", "called", "next")
    )
    skipped = b.append_basic_block("skipped")
    b.cbranch(b.icmp_unsigned("==", active, I32(0)), next_, skipped)
    b.position_at_end(skipped)
    b.cbranch(b.icmp_unsigned("==", kind, I32(BRANCH)), branch, call)

    b.position_at_end(call)
    place = at(b, record, I64(RECORD["function"][0]), I8)
    result = b.call(b.load(place, typ=OPERATION.as_pointer(), align=8), (context, record, active))
    b.cbranch(b.icmp_unsigned("!=", result, I32(0)), python, called)
    b.position_at_end(called)
    b.branch(next_)

    b.position_at_end(next_)
    b.store(b.sub(budget, I32(1)), budget_at)
    following = b.add(pc, I32(1))
    b.store(following, pc_at)
    b.cbranch(b.icmp_unsigned("==", following, stop), merge, head)

    b.position_at_end(branch)
    go_if(b.icmp_unsigned("!=", active, lanes), python)  # the fragment splits
    target = field("target")
    b.store(b.sub(budget, I32(1)), budget_at)
    b.store(target, pc_at)
    late = b.and_(b.icmp_signed(">=", stop, I32(0)), b.icmp_signed(">=", target, stop))
    b.cbranch(late, merge, head)
