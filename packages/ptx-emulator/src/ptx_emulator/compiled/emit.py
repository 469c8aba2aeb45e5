"""LLVM IR for operations on the 32 lanes of a warp: types, loops, and a function with access to the state of a warp."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

from ptx_emulator.compiled.layout import CONTEXT, OPERAND_BYTES, RECORD

Value = Any  # llvmlite.ir.Value, which has no types

I1, I8, I16, I32, I64, I128 = (ir.IntType(n) for n in (1, 8, 16, 32, 64, 128))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()
POINTER = ir.PointerType()
INTEGERS = {1: I8, 2: I16, 4: I32, 8: I64}

#: Type of an operation: it takes the context of a warp, its record and the active lanes. It returns 1 if it did nothing and the
#: closure of the instruction has to execute instead, otherwise 0.
OPERATION = ir.FunctionType(I32, (POINTER, POINTER, I32))


class Module(ir.Module):
    """A module of one function.

    Attributes:
        needs: the functions that it calls, by their names, with what builds them.
    """

    def __init__(self, name: str):
        super().__init__(name)
        self.needs: dict[str, Build] = {}


Build = Callable[[Module], None]


def lanes_of(element: Any, count: int = 32) -> Any:
    """Return the vector type with one element for each lane."""
    return ir.VectorType(element, count)


def splat(element: Any, value: float) -> Value:
    """Return a constant with the same element in all lanes."""
    return ir.Constant(lanes_of(element), [ir.Constant(element, value)] * 32)


def constant(like: Value, value: float) -> Value:
    """Return a constant of the type of ``like``."""
    if isinstance(like.type, ir.VectorType):
        return ir.Constant(like.type, [ir.Constant(like.type.element, value)] * like.type.count)
    return ir.Constant(like.type, value)


def intrinsic(b: Any, name: str, result: Any, *arguments: Value) -> Value:
    """Call an intrinsic by its full name."""
    found = b.module.globals.get(name)
    if found is None:
        found = ir.Function(b.module, ir.FunctionType(result, [x.type for x in arguments]), name)
    return b.call(found, arguments)


def suffix(value: Value) -> str:
    """Return the suffix of an intrinsic's name for the type of ``value``."""
    names = {F16: "f16", F32: "f32", F64: "f64"}
    kind = value.type
    if isinstance(kind, ir.VectorType):
        return f"v{kind.count}{names.get(kind.element) or 'i' + str(kind.element.width)}"
    return names.get(kind) or f"i{kind.width}"


@contextmanager
def loop(b: Any, count: Value) -> Iterator[Value]:
    """Repeat the body for each number below ``count``, and yield that number."""
    head, body, done = (b.append_basic_block(name) for name in ("head", "body", "done"))
    before = b.block
    b.branch(head)
    b.position_at_end(head)
    number = b.phi(count.type)
    number.add_incoming(constant(number, 0), before)
    b.cbranch(b.icmp_unsigned("<", number, count), body, done)
    b.position_at_end(body)
    yield number
    number.add_incoming(b.add(number, constant(number, 1)), b.block)
    b.branch(head)
    b.position_at_end(done)


@contextmanager
def each_lane(b: Any, lanes: Value) -> Iterator[Value]:
    """Repeat the body for each lane of a set, in ascending order, and yield it as i32."""
    left = allocate(b, I32)
    b.store(lanes, left)
    head, body, done = (b.append_basic_block(name) for name in ("lanes", "lane", "after"))
    b.branch(head)
    b.position_at_end(head)
    rest = b.load(left, typ=I32)
    b.cbranch(b.icmp_unsigned("!=", rest, I32(0)), body, done)
    b.position_at_end(body)
    yield intrinsic(b, "llvm.cttz.i32", I32, rest, I1(1))
    b.store(b.and_(rest, b.sub(rest, I32(1))), left)
    b.branch(head)
    b.position_at_end(done)


def at(b: Any, base: Value, index: Value, element: Any) -> Value:
    """Return the address of an element of an array."""
    return b.gep(base, [index], source_etype=element)


def element(b: Any, base: Value, index: Value, kind: Any) -> Value:
    """Load an element of an array."""
    return b.load(at(b, base, index, kind), typ=kind, align=1)


def allocate(b: Any, kind: Any, count: int = 1) -> Value:
    """Allocate an array in the entry block, so that a loop does not grow the stack."""
    with b.goto_entry_block():
        found = b.alloca(ir.ArrayType(kind, count))
    found.type = POINTER  # llvmlite gives it a typed pointer, which it checks against what is stored there
    return found


class Routine:
    """A function of the context of a warp that is being built. It returns 1 if it did nothing, otherwise 0.

    Attributes:
        b: the builder.
        context: the first argument.
    """

    def __init__(self, module: Any, name: str, kind: Any):
        self.function = ir.Function(module, kind, name)
        self.context = self.function.args[0]
        entry = self.function.append_basic_block("entry")  # for allocations
        self.b = ir.IRBuilder(self.function.append_basic_block("start"))
        with self.b.goto_block(entry):
            self.b.branch(self.function.blocks[1])

    def place(self, name: str) -> Value:
        """Return the address of a field of the context."""
        return at(self.b, self.context, I64(CONTEXT[name]), I64)

    def get(self, name: str, kind: Any = POINTER) -> Value:
        """Load a field of the context."""
        return self.b.load(self.place(name), typ=kind, align=8)

    def bail_if(self, condition: Value) -> None:
        """Leave this instruction to its closure."""
        with self.b.if_then(condition, likely=False):
            self.b.ret(I32(1))

    def nonzero(self, value: Value) -> Value:
        """Return whether an integer is not 0."""
        return self.b.icmp_unsigned("!=", value, constant(value, 0))

    def flags(self, lanes: Value) -> Value:
        """Convert a set of lanes to a vector of i1."""
        return self.b.bitcast(lanes, lanes_of(I1))

    def set_of(self, flags: Value) -> Value:
        """Convert a vector of i1 to a set of lanes."""
        return self.b.bitcast(flags, I32)

    def spread(self, value: Value) -> Value:
        """Return a vector with the same value in all lanes."""
        one = self.b.insert_element(ir.Constant(lanes_of(value.type), ir.Undefined), value, I32(0))
        return self.b.shuffle_vector(one, one, splat(I32, 0))

    def call(self, name: str, build: Build, *arguments: Value) -> Value:
        """Call a routine, whose first argument is the context. ``build``: builds it."""
        module = self.b.module
        module.needs[name] = build
        arguments = (self.context, *arguments)
        routine = module.globals.get(name)
        if routine is None:
            routine = ir.Function(module, ir.FunctionType(I32, [x.type for x in arguments]), name)
        return self.b.call(routine, arguments)

    def done(self) -> None:
        """End the function."""
        self.b.ret(I32(0))


class Operation(Routine):
    """An operation that is being built.

    Attributes:
        record, lanes: the further arguments.
        file, state: where the register file and its states start.
    """

    def __init__(self, module: Any, name: str):
        super().__init__(module, name, OPERATION)
        _, self.record, self.lanes = self.function.args
        self._operands = self.field("operands")
        self.file = self.get("file")
        self.state = self.get("state")

    def field(self, name: str) -> Value:
        """Load a field of the record."""
        offset, size, is_pointer = RECORD[name]
        place = at(self.b, self.record, I64(offset), I8)
        return self.b.load(place, typ=POINTER if is_pointer else INTEGERS[size], align=size)

    def slot(self, number: int) -> Value:
        """Return the register number of an operand."""
        return element(self.b, self._operands, I64(number * OPERAND_BYTES // 4), I32)

    def words(self, number: int) -> Value:
        """Return the address of the 32 words of an operand, or of the set of lanes of a predicate."""
        offset = element(self.b, self._operands, I64(number * OPERAND_BYTES // 4 + 1), I32)
        return at(self.b, self.file, self.b.zext(offset, I64), I8)

    def source(self, number: int, kind: Any) -> Value:
        """Load the 32 words of an operand."""
        return self.b.load(self.words(number), typ=lanes_of(kind), align=8)

    def predicate(self, number: int) -> Value:
        """Load the set of lanes of a predicate."""
        return self.b.load(self.words(number), typ=I32, align=4)

    def unknown_place(self, number: int) -> Value:
        """Return the address of the set of lanes whose value of an operand is undefined."""
        return at(self.b, self.file, self.b.zext(self.slot(number), I64), I32)

    def unknown(self, *numbers: int) -> Value:
        """Return the set of lanes where an operand is undefined."""
        found: Value = I32(0)
        for number in numbers:
            found = self.b.or_(found, self.b.load(self.unknown_place(number), typ=I32, align=4))
        return found

    def bail_unless_known(self, *numbers: int) -> None:
        """Leave this instruction to its closure if an operand of an active lane is undefined."""
        self.bail_if(self.nonzero(self.b.and_(self.unknown(*numbers), self.lanes)))

    def state_place(self, number: int) -> Value:
        """Return the address of the state of an operand's register (`layout.WRITTEN`)."""
        return at(self.b, self.state, self.b.zext(self.slot(number), I64), I8)

    def put(self, number: int, value: Value, unknown: Value) -> None:
        """`Warp.put` for the active lanes. ``value``: a vector of integers, or a set of lanes."""
        b, place, unknown_at = self.b, self.words(number), self.unknown_place(number)
        with b.if_else(b.icmp_unsigned("==", self.lanes, I32(0xFFFFFFFF)), likely=True) as (all_lanes, some):
            with all_lanes:
                b.store(value, place, align=4)
                b.store(unknown, unknown_at, align=4)
            with some:
                before = b.load(place, typ=value.type, align=4)
                b.store(self.chosen(value, before), place, align=4)
                b.store(self.chosen(unknown, b.load(unknown_at, typ=I32, align=4)), unknown_at, align=4)
        b.store(I8(1), self.state_place(number))

    def chosen(self, value: Value, before: Value) -> Value:
        """Return ``value`` in the active lanes and ``before`` in the others."""
        b = self.b
        if value.type == I32:
            return b.or_(b.and_(value, self.lanes), b.and_(before, b.not_(self.lanes)))
        return b.select(self.flags(self.lanes), value, before)


def joined(b: Any, parts: Sequence[Value]) -> Value:
    """Concatenate vectors of the same type, whose number is a power of two."""
    parts = list(parts)
    while len(parts) > 1:
        count = parts[0].type.count
        mask = ir.Constant(ir.VectorType(I32, 2 * count), list(range(2 * count)))
        parts = [b.shuffle_vector(x, y, mask) for x, y in zip(parts[::2], parts[1::2])]
    return parts[0]


def picked(b: Any, value: Value, indices: Sequence[int]) -> Value:
    """Return the elements of a vector with these indices."""
    mask = ir.Constant(ir.VectorType(I32, len(indices)), list(indices))
    return b.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), mask)
