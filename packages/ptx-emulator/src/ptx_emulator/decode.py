"""The decoder: parsed instructions to closures over register numbers.

Every operand is a register; each constant and each special register has one. A handler, registered under its opcode, takes
the `Decoder` and an `Instruction`. It returns the function that executes the instruction for a warp and a set of active
lanes.
"""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import numpy as np

from ptx_emulator.errors import PtxError
from ptx_emulator.lanes import FULL, Array
from ptx_emulator.machine import Program, Warp
from ptx_emulator.memory import CTA_BITS, SHARED_BASE, UNSIGNED
from ptx_emulator.parser import (
    SIZES,
    Address,
    Coordinates,
    Immediate,
    Instruction,
    Kernel,
    Known,
    Negated,
    Operand,
    Pair,
    Pattern,
    Register,
    Sink,
    Special,
    Symbol,
    Vector,
)

Execute = Callable[[Warp, int], Any]
Handler = Callable[["Decoder", Instruction], Execute]

HANDLERS: dict[str, Handler] = {}
#: The modules of handlers that only compute registers from registers, lane by lane.
_PURE = ("ptx_emulator.arithmetic", "ptx_emulator.conversions")

#: Generic address of the first parameter. Generic addresses of global memory are those of the host.
PARAMETERS = 1 << 62


class _Types(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise PtxError(f"the type .{name} is not modelled here")


#: The numpy type of each PTX type.
DTYPES: dict[str, Any] = _Types(
    {f"u{8 * n}": UNSIGNED[n] for n in (1, 2, 4, 8)}
    | {f"b{8 * n}": UNSIGNED[n] for n in (1, 2, 4, 8)}
    | {"s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64}
    | {"f16": np.float16, "f32": np.float32, "f64": np.float64}
)

#: The numpy type of a register, by its bytes.
WORDS: dict[int, Any] = UNSIGNED | {16: np.dtype("V16")}
#: The value of a register that nothing has written, by its bytes. Values are never changed in place.
_ZEROS = {size: np.zeros(32, word) for size, word in WORDS.items()}
for _zero in _ZEROS.values():
    _zero.flags.writeable = False

#: Value of each special register: a function of the warp that returns a number or 32 of them.
SPECIALS: dict[str, Callable[[Warp], Any]] = {}


def handler(*opcodes: str) -> Callable[[Handler], Handler]:
    """Register a handler for these opcodes."""

    def register(function: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(opcodes, function))
        return function

    return register


#: Integers that Python can read as well.
_INTEGER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+|0|[1-9]\d*)U?")

Row = tuple[int, ...]


@dataclass(eq=False, slots=True)
class Decoded:
    """A decoded instruction.

    Attributes:
        execute: its entry in a `Program`, as are reads, writes, relaxed and pure.
        unobserved: what `Decoder.unobserved` noted; None: nothing.
        cta_group: its `.cta_group`; "": it has none.
        row: the numbers of `Instruction.registers`, then those of its constants that others of its family may have instead.
        shift: see `Alike`.
    """

    execute: Execute
    reads: frozenset[int]
    writes: frozenset[int]
    relaxed: bool
    pure: bool
    unobserved: tuple[int, Execute] | None = None
    cta_group: str = ""
    row: Row = ()
    shift: int = 0

    @property
    def example(self) -> Decoded:
        """As that of `Alike`."""
        return self


class Alike:
    """A decoded instruction that differs from another one, its example, in its registers, constants and the offset of its address only.

    Most instructions are alike and have a compiled form. So what only their execution in Python needs is made when it is first needed.

    Attributes:
        example: the other one, without anything in `Decoded.unobserved` and `Decoded.cta_group`.
        row: as that of `Decoded`.
        shift: what has to be added to the offset of the example.
    """

    __slots__ = ("_accessed", "_decoder", "_execute", "_instruction", "example", "row", "shift")

    def __init__(self, decoder: Decoder, instruction: Instruction, example: Decoded, row: Row, shift: int):
        self._decoder, self._instruction = decoder, instruction
        self.example, self.row, self.shift = example, row, shift
        self._execute: Execute | None = None
        self._accessed: tuple[frozenset[int], frozenset[int]] | None = None

    def __call__(self, w: Warp, lanes: int) -> Any:
        execute = self._execute
        if execute is None:
            # A copy: other threads may use the decoder. All registers exist.
            execute = self._execute = copy(self._decoder).decoded(self._instruction).execute
        return execute(w, lanes)

    @property
    def reads(self) -> frozenset[int]:
        return self._accesses()[0]

    @property
    def writes(self) -> frozenset[int]:
        return self._accesses()[1]

    def _accesses(self) -> tuple[frozenset[int], frozenset[int]]:
        found = self._accessed
        if found is None:
            one = self.example
            reads, writes = (frozenset(standing_for(x, one.row)(self.row)) for x in (one.reads, one.writes))
            found = self._accessed = reads, writes
        return found

    @property
    def relaxed(self) -> bool:
        return self.example.relaxed

    @property
    def pure(self) -> bool:
        return self.example.pure


class Family(NamedTuple):
    """Instructions whose decoding differs in registers, constants and an offset only.

    Attributes:
        example: the first one.
        kinds: the types of the constants that they may have instead of those of the example.
        offset: that of the address of the example; 0 if it has none or several.
    """

    example: Decoded
    kinds: tuple[str, ...]
    offset: int


def family_of(pattern: Pattern) -> tuple[tuple[object, ...], list[str], int]:
    """Return what the members of a family have in common, the integers that they may have instead of those of ``pattern``, each once, and
    the offset of its address."""
    key: list[object] = [pattern.opcode, pattern.modifiers, pattern.negated]
    integers: list[str] = []
    left = list(pattern.operands)
    addresses = [x for x in left if isinstance(x, Address)]
    offset = addresses[0].offset if len(addresses) == 1 else 0
    for operand in left:  # it grows
        if isinstance(operand, Register) and operand in pattern.registers:
            key += [operand.type, pattern.registers.index(operand)]
        elif isinstance(operand, Immediate) and _INTEGER.fullmatch(operand.text):
            if operand.text not in integers:
                integers.append(operand.text)
            key += [Immediate, integers.index(operand.text)]
        elif isinstance(operand, Address):
            key += [Address, operand.offset if len(addresses) > 1 else 0]
            left.append(operand.base)
        elif isinstance(operand, (Vector, Coordinates)):
            key += [type(operand), len(operand.elements)]
            left += operand.elements
            if isinstance(operand, Coordinates):
                left.append(operand.base)
        elif isinstance(operand, Pair):
            key.append(Pair)
            left += [operand.first, operand.second]
        elif isinstance(operand, Negated):
            key.append(Negated)
            left.append(operand.predicate)
        else:
            key.append(operand)
    return tuple(key), integers, offset


def standing_for(registers: Collection[int], row: Row) -> Callable[[Row], list[int]]:
    """Return a function of the row of an instruction that is like one with ``row``: its registers that stand for ``registers``. Those that
    are not in the row, such as constants, are the same for all of these instructions."""
    fixed = tuple([x for x in registers if x not in row])
    everything = row + fixed
    places = [everything.index(x) for x in registers]

    def found(other: Row) -> list[int]:
        everything = other + fixed
        return [everything[n] for n in places]

    return found


#: Held while a kernel is decoded or compiled, because kernels share what `Shared` has.
PREPARATION = threading.RLock()


class Shared:
    """What kernels with the same declarations share: broken copies of a kernel consist of the same instructions.

    Attributes:
        registers, unknown, specials: as in `Program`, of all these kernels.
        slots: the numbers of registers.
        decoded: instructions whose decoding does not depend on others.
        families: by `family_of`.
        patterns: per pattern of instructions that are decoded by example, the example, its constants in place of those of the example, and its
            `Alike.shift`.
        forms: their compiled forms, by their example: `compiled.program.Shape`.
        file: `compiled.program.RegisterFile` of the last program that was compiled; None: there is none.
    """

    def __init__(self) -> None:
        self.registers: list[Any] = []
        self.unknown: list[int] = []
        self.specials: list[tuple[int, Callable[[Warp], Any]]] = []
        self.slots: dict[Any, int] = {}
        self.decoded: dict[Instruction, Decoded | Alike] = {}
        self.families: dict[tuple[object, ...], Family] = {}
        self.patterns: dict[Pattern, tuple[Decoded, Row, int]] = {}
        self.forms: dict[Decoded, Any] = {}
        self.file: Any = None


@lru_cache(maxsize=48)
def _shared_by(known: Known, *declarations: Any) -> Shared:
    """Return what kernels share. ``declarations``: everything that decoding depends on besides the instructions."""
    return Shared()


def _has_sink(operands: Iterable[Operand]) -> bool:
    return any(
        isinstance(x, Sink)
        or isinstance(x, Vector)
        and _has_sink(x.elements)
        or isinstance(x, Pair)
        and _has_sink((x.first, x.second))
        for x in operands
    )


class Decoder:
    """Decodes one kernel.

    Attributes:
        kernel: the parsed entry.
        common: shared with kernels of the same declarations.
        registers, unknown, specials: those of ``common``.
        relaxed: set by a handler whose instruction may access registers of a wgmma in flight.
        symbols: addresses of the variables in shared memory, without the rank of the CTA, and in local memory.
        shared: the names of those in shared memory.
        cta_group: set by a handler of a tcgen05 instruction: its `.cta_group`.
        static_bytes: static shared memory of a CTA.
        local_bytes: local memory of a thread, a multiple of 16.
        offsets: of the parameters, in bytes.
        parameter_bytes: of all parameters.
    """

    def __init__(self, kernel: Kernel):
        self.kernel = kernel
        self.common = _shared_by(
            kernel.known, kernel.name, tuple(kernel.parameters), tuple(kernel.shared), tuple(kernel.local)
        )
        self.registers, self.unknown = self.common.registers, self.common.unknown
        self.specials, self._slots = self.common.specials, self.common.slots
        self._read: set[int] = set()
        self._written: set[int] = set()
        self._index = 0
        self._unobserved: tuple[int, Execute] | None = None
        # By the texts of constants, the types that they were used as. "": the decoding depends on their values.
        self._integers: dict[str, set[str]] = {}
        self.relaxed = False
        self.cta_group = ""
        self.symbols, end = {}, SHARED_BASE
        for variable in kernel.shared:
            end = -(-end // variable.align) * variable.align
            self.symbols[variable.name] = end
            end += variable.size
        self.static_bytes = end - SHARED_BASE
        end = 0
        self.shared = frozenset(self.symbols)
        for variable in kernel.local:
            end = -(-end // variable.align) * variable.align
            self.symbols[variable.name] = end
            end += variable.size
        self.local_bytes = -(-end // 16) * 16
        self.offsets, offset = {}, 0
        for name, _, size in kernel.parameters:
            offset = -(-offset // size) * size
            self.offsets[name] = offset
            offset += size
        self.parameter_bytes = offset
        # For the entries of ``common``: if they referred to it in turn, only Python's garbage collector would free it.
        self._apart = copy(self)
        del self._apart.common

    def decode(self) -> Program:
        """Decode all instructions.

        Raises:
            PtxError: an instruction is not modelled.
        """
        instructions, known = self.kernel.instructions, self.common.decoded
        found = [one or self._decoded_at(index) for index, one in enumerate(map(known.get, instructions))]
        self._check_groups(found)
        code = [one.execute if isinstance(one, Decoded) else one for one in found]
        noted = {
            index: one.unobserved
            for index, one in enumerate(found)
            if isinstance(one, Decoded) and one.unobserved is not None
        }
        unused = self._unused({slot for slot, _ in noted.values()}, found)
        for index, (slot, execute) in noted.items():
            if slot in unused:
                guard = instructions[index].guard
                code[index] = execute if guard is None else self._guarded(execute, guard)
        texts = [i.text for i in instructions]
        lines = [*self.kernel.lines, self.kernel.lines[-1]]
        end = Decoded(_past_the_end, frozenset(), frozenset(), False, False)
        return Program(
            self.kernel.name, [*code, end.execute], lines, [*texts, texts[-1]], list(self.registers), list(self.unknown), list(self.specials),
            [*found, end], self.local_bytes,
        )  # fmt: skip

    def _check_groups(self, found: list[Decoded | Alike]) -> None:
        """Check that all tcgen05 instructions have the same `.cta_group` (PTX ISA, "CTA pair")."""
        first = ""
        for index, one in enumerate(found):
            if isinstance(one, Alike) or not (group := one.cta_group):
                continue
            first = first or group
            if group != first:
                self._index = index
                self.refuse(
                    f".{group} in a kernel with .{first}: all tcgen05 instructions must have the same one"
                )

    def _decoded_at(self, index: int) -> Decoded | Alike:
        """Decode an instruction that no kernel had before."""
        instruction, self._index = self.kernel.instructions[index], index
        one = self._decoded_alike(instruction)
        if instruction.opcode != "bra":  # no other kernel has this object: its label belongs to one
            self.common.decoded[instruction] = one
        return one

    def _decoded_alike(self, instruction: Instruction) -> Decoded | Alike:
        """`decoded`, by the example of an instruction of its family, if there is one."""
        registers = instruction.registers
        found = self.common.patterns.get(instruction.pattern)
        if found is None:
            key, integers, offset = family_of(instruction.pattern)
            family = self.common.families.get(key)
            if family is None:
                return self._decoded_first(instruction, key, integers, offset)
            constants = self._constants(integers, family.kinds)
            found = family.example, constants, offset - family.offset
            self.common.patterns[instruction.pattern] = found
        example, constants, shift = found
        row = (*[self._declared(x) for x in registers], *constants)
        return Alike(self._apart, instruction, example, row, shift)

    def _decoded_first(
        self, instruction: Instruction, key: tuple[object, ...], integers: list[str], offset: int
    ) -> Decoded:
        """Decode an instruction, and let it be the example of its family or, if it depends on integers, of its pattern."""
        one = self.decoded(instruction)
        kinds = [next(iter(x)) if len(x := self._integers.get(text, set())) == 1 else "" for text in integers]
        one.row = tuple([self._declared(x) for x in instruction.registers])
        pattern = instruction.pattern
        if (
            one.unobserved is not None
            or one.cta_group
            or pattern.opcode == "bra"
            or _has_sink(pattern.operands)
        ):
            return one  # it notes more than an `Alike` has; each sink has a register of its own
        if all(kinds):
            one.row += self._constants(integers, kinds)
            self.common.families[key] = Family(one, tuple(kinds), offset)
        else:
            self.common.patterns[pattern] = one, (), 0
        return one

    def _constants(self, integers: list[str], kinds: Sequence[str]) -> Row:
        """Return the registers of integers of these types."""
        return tuple([self._constant(self.number(x, kind), SIZES[kind]) for x, kind in zip(integers, kinds)])

    def decoded(self, instruction: Instruction) -> Decoded:
        """Decode an instruction.

        Raises:
            PtxError: it is not modelled.
        """
        self._read, self._written, self.relaxed, self._unobserved = set(), set(), False, None
        self.cta_group, self._integers = "", {}
        found = HANDLERS.get(instruction.opcode)
        if found is None:
            self.refuse(f"{instruction.opcode} is not modelled")
        try:
            execute = found(self, instruction)
        except PtxError as error:
            if error.line:
                raise
            self.refuse(error.message)
        except (KeyError, IndexError, ValueError, TypeError) as error:
            # The operands or modifiers are not those that the handler takes apart.
            raise PtxError(
                "this form is not modelled", self.kernel.lines[self._index], instruction.text
            ) from error
        if instruction.guard is not None and instruction.opcode != "bra":
            execute = self._guarded(execute, instruction.guard)
        return Decoded(
            execute, frozenset(self._read), frozenset(self._written), self.relaxed, found.__module__ in _PURE, self._unobserved,
            self.cta_group,
        )  # fmt: skip

    def _guarded(self, execute: Execute, guard: tuple[Register, bool]) -> Execute:
        slot, negated = self.source(guard[0], "pred"), guard[1]

        def guarded(w: Warp, lanes: int) -> Any:
            if w.unknown[slot] & lanes:
                w.fail(
                    f"the guard predicate is undefined: nothing has written it (lanes {w.unknown[slot] & lanes:08x})"
                )
            value = w.regs[slot]
            lanes &= ~value if negated else value
            return execute(w, lanes) if lanes else None

        return guarded

    def unobserved(self, slot: int, execute: Execute) -> None:
        """Let the current instruction do this instead if the program never uses its result in register ``slot``."""
        self._unobserved = slot, execute

    def _unused(self, registers: set[int], program: Sequence[Decoded | Alike]) -> set[int]:
        """Return those registers whose values reach nothing but registers."""
        origins = {x: {x} for x in registers}  # per register, those whose values reach it
        used: set[int] = set()
        left = registers
        while left:
            following: set[int] = set()
            for one in program:
                # Most instructions read none of them, which is seen without the sets of alike instructions.
                if left.isdisjoint(one.row) and left.isdisjoint(one.example.reads):
                    continue
                reaching = set().union(*(origins[x] for x in one.reads & left))
                if not one.pure:
                    used |= reaching
                    continue
                for x in one.writes:
                    if not reaching <= origins.setdefault(x, set()):
                        origins[x] |= reaching
                        following.add(x)
            left = following
        return registers - used

    def refuse(self, message: str) -> NoReturn:
        """Raise a `PtxError` for the instruction that is being decoded."""
        raise PtxError(message, self.kernel.lines[self._index], self.kernel.instructions[self._index].text)

    def only(self, modifiers: Iterable[str], *allowed: str) -> None:
        """Refuse every modifier that is not in ``allowed``."""
        for modifier in modifiers:
            if modifier not in allowed:
                self.refuse(f".{modifier} is not modelled")

    # ---- operands

    def _new(self, value: Any, unknown: int) -> int:
        self.registers.append(value)
        self.unknown.append(unknown)
        return len(self.registers) - 1

    def _declared(self, register: Register) -> int:
        slot = self._slots.get(register)
        if slot is None:
            value = 0 if register.type == "pred" else _ZEROS[SIZES[register.type]]
            slot = self._slots[register] = self._new(value, FULL)
        return slot

    def size_of(self, operand: Operand) -> int:
        """Return the bytes of a register operand."""
        if not isinstance(operand, Register):
            self.refuse(f"expected a register, got {operand}")
        return SIZES[operand.type]

    def source(self, operand: Operand, kind: str, wider: bool = False) -> int:
        """Return the register number of a source operand of type ``kind``. ``wider``: a wider register is accepted."""
        if isinstance(operand, Register):
            size = SIZES[operand.type]
            if (operand.type == "pred") != (kind == "pred") or (
                size < SIZES[kind] if wider else size != SIZES[kind]
            ):
                self.refuse(f"register {operand.name}: expected .{kind}, got .{operand.type}")
            slot = self._declared(operand)
        elif isinstance(operand, Immediate):
            self._integers.setdefault(operand.text, set()).add(kind)
            slot = self._constant(self.number(operand.text, kind), SIZES[kind])
        elif isinstance(operand, Symbol):
            place = self.symbols.get(operand.name, self.offsets.get(operand.name))
            if place is None:
                self.refuse(f"{operand.name}: expected a variable or a parameter, found no such declaration")
            if operand.name in self.shared:
                slot = self._shared(operand.name, place, SIZES[kind])
            else:
                slot = self._constant(place, SIZES[kind])
        elif isinstance(operand, Special):
            slot = self._special(operand.name, SIZES[kind])
        else:
            self.refuse(f"expected a source operand, got {operand}")
        self._read.add(slot)
        return slot

    def destination(self, operand: Operand, kind: str, wider: bool = False) -> int:
        """Return the register number of a destination operand. A sink ``_`` gets a register of its own."""
        if isinstance(operand, Sink):
            return self._new(0 if kind == "pred" else _ZEROS[SIZES[kind]], FULL)
        if not isinstance(operand, Register):
            self.refuse(f"expected a destination register, got {operand}")
        size = SIZES[operand.type]
        if (operand.type == "pred") != (kind == "pred") or (
            size < SIZES[kind] if wider else size != SIZES[kind]
        ):
            self.refuse(f"register {operand.name}: expected .{kind}, got .{operand.type}")
        slot = self._declared(operand)
        self._written.add(slot)
        return slot

    def predicate(self, operand: Operand) -> tuple[int, bool]:
        """Return the register number of a predicate operand, and whether it is negated."""
        if isinstance(operand, Negated):
            return self.source(operand.predicate, "pred"), True
        if isinstance(operand, Immediate):
            self._integers.setdefault(operand.text, set()).add("")
            return self._constant(FULL if int(operand.text, 0) else 0, 0), False
        return self.source(operand, "pred"), False

    def sources(self, operand: Operand, kind: str, wider: bool = False) -> list[int]:
        """Return the register numbers of a vector operand, or of a scalar."""
        elements = operand.elements if isinstance(operand, Vector) else (operand,)
        return [self.source(x, kind, wider) for x in elements]

    def destinations(self, operand: Operand, kind: str, wider: bool = False) -> list[int]:
        """Return the register numbers of a vector of destinations, or of a scalar."""
        elements = operand.elements if isinstance(operand, Vector) else (operand,)
        return [self.destination(x, kind, wider) for x in elements]

    def address(self, operand: Operand, kind: str) -> tuple[int, int]:
        """Return the register number and the offset of ``[base + offset]``. ``kind``: the type of a constant base."""
        if not isinstance(operand, Address):
            self.refuse(f"expected an address, got {operand}")
        if isinstance(operand.base, Register):
            kind = "b64" if SIZES[operand.base.type] == 8 else "b32"
        return self.source(operand.base, kind), operand.offset

    def parameter(self, operand: Operand) -> tuple[int, int] | None:
        """Return the same for ``[name + offset]`` if ``name`` is a parameter; None otherwise."""
        if (
            isinstance(operand, Address)
            and isinstance(operand.base, Symbol)
            and operand.base.name in self.offsets
        ):
            return self._constant(0, 8), self.offsets[operand.base.name] + operand.offset
        return None

    def immediate(self, operand: Operand) -> int:
        """Return the value of an integer constant."""
        if not isinstance(operand, Immediate):
            self.refuse(f"expected a constant, got {operand}")
        self._integers.setdefault(operand.text, set()).add("")
        return int(operand.text.rstrip("U"), 0)

    def number(self, text: str, kind: str) -> int:
        """Return the bits of a constant of type ``kind``."""
        if text[:2] in ("0f", "0F"):
            bits = int(f"0x{text[2:]}", 0)
            if kind == "f64":
                (bits,) = struct.unpack(
                    "<Q", struct.pack("<d", struct.unpack("<f", struct.pack("<I", bits))[0])
                )
            return bits
        if text[:2] in ("0d", "0D"):
            return int(f"0x{text[2:]}", 0)
        if kind.startswith("f"):
            self.refuse(f"expected a floating-point constant, got {text}")
        value = int(text.rstrip("U"), 0)
        if kind == "pred":
            return FULL if value else 0
        return value & (1 << 8 * SIZES[kind]) - 1

    def _constant(self, bits: int, size: int) -> int:
        slot = self._slots.get((bits, size))
        if slot is None:
            value = bits if size == 0 else np.full(32, bits, UNSIGNED[size])
            slot = self._slots[bits, size] = self._new(value, 0)
        return slot

    def _special(self, name: str, size: int) -> int:
        if name not in SPECIALS:
            self.refuse(f"{name} is not modelled")
        return self._of_warp(name, size, SPECIALS[name])

    def _shared(self, name: str, place: int, size: int) -> int:
        """Return the register of the address of a variable in shared memory: it depends on the rank of the CTA."""
        return self._of_warp(name, size, lambda w: place + (w.cta.rank << CTA_BITS))

    def _of_warp(self, name: str, size: int, value: Callable[[Warp], Any]) -> int:
        """Return the register of a value that is fixed for each warp."""
        slot = self._slots.get((name, size))
        if slot is None:
            slot = self._slots[name, size] = self._new(np.zeros(32, UNSIGNED[size]), 0)
            self.specials.append((slot, lambda w: np.full(32, value(w), UNSIGNED[size])))
        return slot


def _past_the_end(w: Warp, lanes: int) -> NoReturn:
    w.fail("execution reaches the end of the kernel without ret")


def _specials() -> None:
    def thread(w: Warp) -> Array:
        return w.number * 32 + np.arange(32)

    def place(w: Warp) -> tuple[Array, Array, Array]:
        x, y, _ = w.machine.block
        return thread(w) % x, thread(w) // x % y, thread(w) // (x * y)

    def component(triple: Callable[[Warp], Any], index: int) -> Callable[[Warp], Any]:
        return lambda w: triple(w)[index]

    triples: dict[str, Callable[[Warp], Any]] = {
        "%tid": place,
        "%ntid": lambda w: w.machine.block,
        "%ctaid": lambda w: w.cta.index,
        "%nctaid": lambda w: w.machine.grid,
        "%cluster_ctaid": lambda w: w.cta.place,
        "%cluster_nctaid": lambda w: w.machine.cluster,
        "%clusterid": lambda w: w.cta.cluster.index,
        "%nclusterid": lambda w: [n // size for n, size in zip(w.machine.grid, w.machine.cluster)],
    }
    for name, triple in triples.items():
        for i, letter in enumerate("xyz"):
            SPECIALS[f"{name}.{letter}"] = component(triple, i)
    SPECIALS["%cluster_ctarank"] = lambda w: w.cta.rank
    SPECIALS["%cluster_nctarank"] = lambda w: (
        w.machine.cluster[0] * w.machine.cluster[1] * w.machine.cluster[2]
    )
    SPECIALS["%laneid"] = lambda w: np.arange(32)
    SPECIALS["%warpid"] = lambda w: w.number
    SPECIALS["%nwarpid"] = lambda w: len(w.cta.warps)
    SPECIALS["%lanemask_eq"] = lambda w: 1 << np.arange(32)
    SPECIALS["%lanemask_lt"] = lambda w: (1 << np.arange(32)) - 1
    SPECIALS["%lanemask_le"] = lambda w: (2 << np.arange(32)) - 1
    SPECIALS["%lanemask_gt"] = lambda w: FULL & ~((2 << np.arange(32)) - 1)
    SPECIALS["%lanemask_ge"] = lambda w: FULL & ~((1 << np.arange(32)) - 1)


_specials()
