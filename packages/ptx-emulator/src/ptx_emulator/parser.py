"""The parser: PTX text to instructions with resolved registers and labels. Each instruction keeps its source line."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import repeat
from typing import NamedTuple

import numpy as np

from ptx_emulator.errors import PtxError


class _Sizes(dict[str, int]):
    def __missing__(self, name: str) -> int:
        raise PtxError(f"the type .{name} is not modelled")


#: Bytes of each fundamental type (PTX ISA, "Fundamental Types"). A predicate has 0.
SIZES = _Sizes({f"{letter}{bits}": bits // 8 for letter in "bus" for bits in (8, 16, 32, 64)})
SIZES |= {"f16": 2, "f32": 4, "f64": 8, "pred": 0, "b128": 16, "f16x2": 4, "bf16": 2, "bf16x2": 4}


class Register(NamedTuple):
    """A virtual register. ``name`` is unique in its function; ``type`` is the declared one."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class Special:
    """A special register, such as ``%tid.x``."""

    name: str


@dataclass(frozen=True, slots=True)
class Immediate:
    """A number, as the PTX spells it."""

    text: str


@dataclass(frozen=True, slots=True)
class Symbol:
    """The name of a variable or a parameter; its value is the address."""

    name: str


@dataclass(frozen=True, slots=True)
class Address:
    """``[base + offset]``."""

    base: Operand
    offset: int


@dataclass(frozen=True, slots=True)
class Coordinates:
    """``[base, {x, y, ..}]``: coordinates in a tensor; ``base`` is the address of its tensor map."""

    base: Operand
    elements: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Vector:
    """``{a, b, ..}``."""

    elements: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Pair:
    """``a|b``: two destinations."""

    first: Operand
    second: Operand


@dataclass(frozen=True, slots=True)
class Negated:
    """``!p``."""

    predicate: Register


@dataclass(frozen=True, slots=True)
class Label:
    """The target of a branch. ``target`` is an index into the instructions; -1: not resolved yet."""

    name: str
    target: int = -1


@dataclass(frozen=True, slots=True)
class Sink:
    """``_``: a destination that discards its value."""


Operand = (
    Register | Special | Immediate | Symbol | Address | Coordinates | Vector | Pair | Negated | Label | Sink
)


@dataclass(eq=False, slots=True)
class Pattern:
    """What instructions have in common that differ in their registers only.

    Attributes:
        opcode: the name up to the first dot.
        modifiers: the further parts of the name, without dots.
        operands: those of the first of these instructions, in the order of the PTX.
        registers: its registers, each once, first that of its guard.
        negated: whether the guard is ``@!p`` instead of ``@p``; None: there is none.
    """

    opcode: str
    modifiers: tuple[str, ...]
    operands: tuple[Operand, ...]
    registers: tuple[Register, ...]
    negated: bool | None


class Instruction:
    """One instruction. It must not be changed, because kernels with the same declarations share instructions of the same text.

    Attributes:
        text: the statement without its semicolon.
        pattern: all of it but its registers.
        registers: its registers, in the order of `Pattern.registers`.
    """

    __slots__ = ("_operands", "pattern", "registers", "text")

    def __init__(self, text: str, pattern: Pattern, registers: tuple[Register, ...]):
        self.text, self.pattern, self.registers = text, pattern, registers
        self._operands: tuple[Operand, ...] | None = None

    @property
    def opcode(self) -> str:
        return self.pattern.opcode

    @property
    def modifiers(self) -> tuple[str, ...]:
        return self.pattern.modifiers

    @property
    def operands(self) -> tuple[Operand, ...]:
        """In the order of the PTX. They are made here, because most instructions are executed without them."""
        found = self._operands
        if found is None:
            move = dict(zip(self.pattern.registers, self.registers))
            found = self._operands = tuple([_moved(x, move) for x in self.pattern.operands])
        return found

    @property
    def guard(self) -> tuple[Register, bool] | None:
        """(predicate, negated) of ``@p`` or ``@!p``; None: there is none."""
        negated = self.pattern.negated
        return None if negated is None else (self.registers[0], negated)

    def replaced(self, operands: tuple[Operand, ...], name: str = "") -> Instruction:
        """Return an instruction of the same text with other operands. ``name``: its opcode and modifiers, if they differ as well."""
        opcode, modifiers, guards = self.opcode, self.modifiers, self.registers[: self.guard is not None]
        if name:
            opcode, *parts = name.split(".")
            modifiers = tuple(parts)
        return Instruction(
            self.text, Pattern(opcode, modifiers, operands, guards, self.pattern.negated), guards
        )


def _moved(operand: Operand, move: dict[Register, Register]) -> Operand:
    """Return an operand with other registers."""
    if isinstance(operand, Register):
        return move.get(operand, operand)
    if isinstance(operand, Address):
        return Address(_moved(operand.base, move), operand.offset)
    if isinstance(operand, Vector):
        return Vector(tuple([_moved(x, move) for x in operand.elements]))
    if isinstance(operand, Coordinates):
        return Coordinates(_moved(operand.base, move), tuple([_moved(x, move) for x in operand.elements]))
    if isinstance(operand, Pair):
        return Pair(_moved(operand.first, move), _moved(operand.second, move))
    if isinstance(operand, Negated):
        return Negated(move.get(operand.predicate, operand.predicate))
    return operand


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable in shared or local memory, in bytes. ``size`` 0: dynamic shared memory, sized by the launch."""

    name: str
    size: int
    align: int


Patterns = dict[tuple[str, tuple[int, ...]], Pattern]


class Known:
    """What follows from the text of statements and from the declarations of their scope. Broken copies of a kernel share it.

    Attributes:
        patterns: by text with types in place of registers, and by which of these registers are the same. Scopes inside have the same.
        statements: the instructions, by their text with the blanks before it.
        registers: by the words of these texts that name them.
        shown: what stands for words in the keys of ``patterns``.
        inner: what is known of the scopes inside, by their numbers and declarations.
    """

    def __init__(self, patterns: Patterns | None = None) -> None:
        self.patterns: Patterns = {} if patterns is None else patterns
        self.statements: dict[str, Instruction] = {}
        self.registers: dict[str, Register] = {}
        self.shown: dict[str, str] = {}
        self.inner: dict[tuple[int, tuple[str, ...]], Known] = {}


@lru_cache(maxsize=48)
def _known(declarations: tuple[str, ...]) -> Known:
    """Return what is known of bodies with these declarations."""
    return Known()


@dataclass
class Kernel:
    """An entry.

    Attributes:
        parameters: (name, type, bytes) of each.
        instructions: in the order of the PTX.
        lines: their 1-based lines in the PTX.
        known: shared by the kernels with the same declarations.
        shared, local: variables of these state spaces.
        threads: extents of a CTA from `.reqntid`; None: not given.
    """

    name: str
    parameters: list[tuple[str, str, int]]
    instructions: list[Instruction] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    known: Known = field(default_factory=Known)
    shared: list[Variable] = field(default_factory=list)
    local: list[Variable] = field(default_factory=list)
    threads: tuple[int, ...] | None = None


@dataclass
class Module:
    """A PTX module: its ``.target``, and its entries by name."""

    target: str
    kernels: dict[str, Kernel]


# Patterns that are searched in a whole module start with a literal, which `re` finds fast.
_COMMENT = re.compile(r"/(?:/[^\n]*|\*.*?\*/)", re.DOTALL)
_LINE_COMMENT = re.compile(r"//[^\n]*")
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?([^{;]*)\{")
_PARAMETER = re.compile(
    r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr\b[^,\[]*?)?([\w$]+)(?:\[(\d+)\])?\s*$"
)
_VARIABLE = re.compile(
    r"(?:\.extern\s+)?\.(?:shared|local)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?\s*$"
)
#: Directives that end with their line instead of a semicolon.
_LINE_INFO = re.compile(r"\.(?:loc|file)\b[^\n]*")
_BLANKS = re.compile(r"\s*")
#: What may be the name of a register. Opcodes and numbers match as well, so that no name is found inside of them.
_WORDS = re.compile(r"([\w$%.]+)")
_BRACKETS = re.compile(r"[\[{(]")
_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_REGISTERS = re.compile(r"\.reg\s+(?:\.v([24])\s+)?\.(\w+)\s+(.*)", re.DOTALL)
_RANGE = re.compile(r"([\w$%]+)<(\d+)>")
_SPECIAL = re.compile(
    r"%(?:(?:tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyz]|laneid|warpid|nwarpid|smid|"
    r"lanemask_(?:eq|le|lt|ge|gt)|clock(?:_hi|64)?|globaltimer(?:_lo|_hi)?|dynamic_smem_size|total_smem_size|"
    r"cluster_ctarank|cluster_nctarank|gridid)$"
)
_NUMBER = re.compile(r"-?(?:0[xX][0-9a-fA-F]+U?|0[fF][0-9a-fA-F]{8}|0[dD][0-9a-fA-F]{16}|\d+U?)$")


def parse(text: str) -> Module:
    """Parse a PTX module.

    Raises:
        PtxError: the text cannot be parsed, or uses something that is not modelled.
    """
    if "/*" in text:
        text = _COMMENT.sub(lambda match: " " + "\n" * match[0].count("\n"), text)
    else:  # takes less time
        text = _LINE_COMMENT.sub(" ", text)
    target = re.search(r"\.target\s+(\w+)", text)
    if target is None:
        raise PtxError("the module has no .target directive")
    if "vprintf" in text and (match := re.search(r"\bcall\b[^;]*\bvprintf\b", text)):
        raise PtxError(
            "the kernel prints (vprintf), which is not modelled: compile it without cute.printf",
            text.count("\n", 0, match.start()) + 1,
        )
    if match := re.search(r"\.func\b", text):
        raise PtxError(
            "device functions (.func) are not modelled, only entries (.entry)",
            text.count("\n", 0, match.start()) + 1,
        )
    kernels = {}
    entries = list(_ENTRY.finditer(text))
    outside, end = [], 0
    for entry in entries:
        outside.append(text[end : entry.start()])
        parser = _Body(text, entry.end())
        kernel = Kernel(entry[1], [_parameter(x) for x in (entry[2] or "").split(",") if x.strip()])
        if match := re.search(r"\.reqntid\s+([\d,\s]+)", entry[3]):
            kernel.threads = tuple(int(x) for x in match[1].split(","))
        kernel.instructions, kernel.lines, kernel.known = parser.instructions, parser.lines(), parser.known
        kernel.shared, kernel.local = parser.shared, parser.local
        kernels[kernel.name] = kernel
        end = parser.end
    outside.append(text[end:])
    shared = [x for part in outside for x in _outside(part)]
    for kernel in kernels.values():
        kernel.shared = shared + kernel.shared
    return Module(target[1], kernels)


def _outside(text: str) -> list[Variable]:
    """Return the variables of the module in shared memory. Those of other state spaces are refused."""
    found = []
    for statement in text.split(";"):
        if re.search(r"\.(global|const|tex|local)\b", statement):
            raise PtxError(f"a module variable: only .shared is modelled, got: {statement.strip()}")
        if ".shared" in statement:
            found.append(_variable(statement[statement.index(".shared") :].strip()))
    return found


def _variable(text: str) -> Variable:
    match = _VARIABLE.match(text)
    if match is None:
        raise PtxError(f"a variable declaration was expected, got: {text}")
    size = SIZES[match[2]] * (1 if match[4] is None else int(match[4] or 0))
    return Variable(match[3], size, int(match[1] or SIZES[match[2]]))


def _parameter(text: str) -> tuple[str, str, int]:
    match = _PARAMETER.match(text.strip())
    if match is None:
        raise PtxError(f"a parameter declaration was expected, got: {text.strip()}")
    return match[2], match[1], SIZES[match[1]] * int(match[3] or 1)


@dataclass
class _Scope:
    number: int
    parent: _Scope | None
    registers: dict[str, Register] = field(default_factory=dict)
    vectors: dict[str, Vector] = field(default_factory=dict)
    ranges: dict[str, tuple[int, str]] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)
    declarations: tuple[str, ...] = ()
    known: Known | None = None  # None: not looked up since the last declaration

    def found(self) -> Known:
        """Return what is known of the statements of this scope."""
        if self.known is None:
            if self.parent is None:
                self.known = _known(self.declarations)
            else:
                key = self.number, self.declarations
                outer = self.parent.found()
                self.known = outer.inner.get(key)
                if self.known is None:
                    self.known = outer.inner[key] = Known(outer.patterns)
        return self.known


class _Body:
    """Parses the body of an entry from behind its opening brace. Scopes nest; inner names hide outer ones."""

    def __init__(self, text: str, start: int):
        self.text = text
        self.instructions: list[Instruction] = []
        self.places: list[int] = []  # where the blanks before them start in the text
        self.shared: list[Variable] = []
        self.local: list[Variable] = []
        self.scope, self.scopes = _Scope(0, None), 1
        self.branches: list[tuple[int, _Scope]] = []
        instructions, places = self.instructions, self.places
        self.place, left = start, True
        statements: dict[str, Instruction] = {}
        while left:
            place = self.place
            end = text.find(";", place)
            found = statements.get(text[place:end])
            if found is None or end < 0:
                left = self._item()
                known = self.scope.known
                statements = {} if known is None else known.statements
            else:  # most statements were seen before
                instructions.append(found)
                places.append(place)
                self.place = end + 1
        self.known, self.end = self.scope.found(), self.place
        for index, scope in self.branches:
            self.place = places[index]
            instructions[index] = self._resolved(instructions[index], scope)

    @property
    def line(self) -> int:
        """The 1-based line of what is parsed, behind the blanks before it."""
        match = _BLANKS.match(self.text, self.place)
        assert match is not None
        return self.text.count("\n", 0, match.end()) + 1

    def lines(self) -> list[int]:
        """Return the 1-based line of each instruction."""
        codes = np.frombuffer(self.text.encode("utf-32-le"), np.uint32)
        ends, written = np.flatnonzero(codes == ord("\n")), np.flatnonzero(codes > ord(" "))
        starts = written[np.searchsorted(written, self.places)]
        found: list[int] = (np.searchsorted(ends, starts) + 1).tolist()
        return found

    def _item(self) -> bool:
        """Parse a brace, a label, a directive, or an instruction whose text is new in its scope. False: the body ends."""
        text, before = self.text, self.place
        match = _BLANKS.match(text, before)
        assert match is not None
        place = self.place = match.end()
        c = text[place] if place < len(text) else ""
        if not c:
            raise PtxError("the text ends before the entry's closing brace", self.line)
        if c == "{":
            self.scope, self.place = _Scope(self.scopes, self.scope), place + 1
            self.scopes += 1
        elif c == "}":
            self.place += 1
            if self.scope.parent is None:
                return False
            self.scope = self.scope.parent
        elif c == ";":
            self.place += 1
        elif c == "." and (match := _LINE_INFO.match(text, place)):
            self.place = match.end()
        elif match := _LABEL.match(text, place):
            self.scope.labels[match[1]] = len(self.instructions)
            self.place = match.end()
        else:
            end = text.find(";", place)
            if end < 0:
                raise PtxError("the text ends before the entry's closing brace", self.line)
            if c == ".":
                self._directive(" ".join(text[place:end].split()))
            else:
                self._add(text[before:end], before)
            self.place = end + 1
        return True

    def _add(self, written: str, place: int) -> None:
        """Add an instruction. ``written``: its text with the blanks before it, ``place``: where they start."""
        known = self.scope.found()
        instruction = known.statements.get(written)
        if instruction is None:
            instruction = self._statement(" ".join(written.split()), known)
            if instruction.pattern.opcode == "bra":
                self.branches.append((len(self.instructions), self.scope))
            else:
                known.statements[written] = instruction
        self.instructions.append(instruction)
        self.places.append(place)

    def _statement(self, text: str, known: Known) -> Instruction:
        """Parse an instruction. The label of a branch is resolved at the end of the body."""
        pieces = _WORDS.split(text)
        words = pieces[1::2]
        shown = list(map(known.shown.get, words))
        if None in shown:
            shown = [known.shown.get(x) or self._show(x, known) for x in words]
        pieces[1::2] = shown
        named = list(filter(None, map(known.registers.get, words)))
        registers = tuple(dict.fromkeys(named))
        same = () if len(registers) == len(named) else tuple(map(registers.index, named))
        key = "".join(pieces), same
        pattern = known.patterns.get(key)
        if pattern is None:
            pattern = known.patterns[key] = self._pattern(text, registers)
        return Instruction(text, pattern, registers)

    def _show(self, word: str, known: Known) -> str:
        """Look up what a word is, and return what stands for it. The same names are the same in all scopes, except for those of registers
        and of vectors of them."""
        found = self._name(word)
        if isinstance(found, Register):
            known.registers[word], shown = found, f"<{found.type}>"
        else:
            shown = word if isinstance(found, Symbol) else str(found)
        known.shown[word] = shown
        return shown

    def _pattern(self, text: str, registers: tuple[Register, ...]) -> Pattern:
        """Parse an instruction that is like none before. ``registers``: those of its text."""
        negated = None
        name, opcode, modifiers, parts = _parts(text)
        if name is not None:
            register = self._name(name.lstrip("!"))
            if not isinstance(register, Register) or register.type != "pred":
                raise PtxError(f"the guard {name} is not a predicate register", self.line, text)
            negated = name.startswith("!")
        if opcode == "bra":
            operands: tuple[Operand, ...] = (Label(parts[0]),)
        else:
            operands = tuple([self._operand(x, text) for x in parts])
        return Pattern(opcode, modifiers, operands, registers, negated)

    def _directive(self, text: str) -> None:
        if text.startswith(".pragma"):  # it declares nothing
            return
        self.scope.declarations += (text,)
        self.scope.known = None
        if match := _REGISTERS.match(text):
            for name in (x.strip() for x in match[3].split(",")):
                if found := _RANGE.match(name):
                    if match[1]:
                        raise PtxError("ranges of vector registers are not modelled", self.line, text)
                    self.scope.ranges[found[1]] = (int(found[2]), match[2])
                elif match[1]:  # its elements are registers
                    parts = [f"{name}.{letter}" for letter in "xyzw"[: int(match[1])]]
                    self.scope.vectors[name] = Vector(tuple(self._declared(x, match[2]) for x in parts))
                else:
                    self._declared(name, match[2])
        elif text.startswith(".shared"):
            self.shared.append(_variable(text))
        elif text.startswith(".local"):
            self.local.append(_variable(text))
        else:
            raise PtxError("this directive is not modelled", self.line, text)

    def _declared(self, name: str, kind: str) -> Register:
        """Declare a register in the current scope."""
        unique = f"{name}#{self.scope.number}" if self.scope.parent else name
        self.scope.registers[name] = Register(unique, kind)
        return self.scope.registers[name]

    def _name(self, name: str) -> Register | Vector | Symbol:
        scope: _Scope | None = self.scope
        while scope is not None:
            if register := scope.found().registers.get(name) or scope.registers.get(name):
                return register
            if name in scope.vectors:
                return scope.vectors[name]
            if scope.ranges and (prefix := name.rstrip("0123456789")) in scope.ranges and prefix != name:
                self._declare_range(prefix, scope)
                continue
            scope = scope.parent
        return Symbol(name)

    def _declare_range(self, prefix: str, scope: _Scope) -> None:
        """Declare all registers of a range. Most are used, and together they take less time."""
        count, kind = scope.ranges.pop(prefix)
        names = [f"{prefix}{n}" for n in range(count)]
        unique = [f"{name}#{scope.number}" for name in names] if scope.parent else names
        declared = dict(zip(names, map(Register, unique, repeat(kind))))
        scope.registers.update(declared)
        known = scope.found()
        known.registers.update(declared)
        known.shown.update(dict.fromkeys(names, f"<{kind}>"))

    def _operand(self, text: str, whole: str) -> Operand:
        if text.startswith("%"):  # most operands
            register = self._name(text)
            if isinstance(register, Register):
                return register
        if text == "_":
            return Sink()
        if text.startswith("["):
            inner = text[1:-1].strip()
            if len(parts := _split(inner)) > 1:
                place = self._operand(parts[1], whole)
                if len(parts) != 2 or not isinstance(place, Vector):
                    raise PtxError(f"an address was expected, got {text}", self.line, whole)
                return Coordinates(self._operand(parts[0], whole), place.elements)
            base, offset = _base(inner)
            return Address(self._operand(base, whole), offset)
        if text.startswith("{"):
            return Vector(tuple(self._operand(x, whole) for x in _split(text[1:-1])))
        if "|" in text:
            first, second = text.split("|")
            return Pair(self._operand(first.strip(), whole), self._operand(second.strip(), whole))
        if text.startswith("!"):
            register = self._name(text[1:])
            if isinstance(register, Register):
                return Negated(register)
        kind = _kind(text)
        if kind is Immediate:
            return Immediate(text)
        if kind is Special:
            return Special(text)
        if kind is Symbol:
            found = self._name(text)
            if isinstance(found, (Register, Vector)) or not text.startswith("%"):
                return found
        raise PtxError(f"an operand was expected, got {text}", self.line, whole)

    def _resolved(self, instruction: Instruction, scope: _Scope | None) -> Instruction:
        (label,) = instruction.operands
        assert isinstance(label, Label)
        while scope is not None:
            if label.name in scope.labels:
                return instruction.replaced((Label(label.name, scope.labels[label.name]),))
            scope = scope.parent
        raise PtxError(f"label {label.name} is not defined in this scope", self.line, instruction.text)


def _parts(text: str) -> tuple[str | None, str, tuple[str, ...], tuple[str, ...]]:
    """Take a statement apart: its guard without `@` (None: there is none), the opcode, the modifiers and the operands. A branch has one operand."""
    guard = None
    if text.startswith("@"):
        guard, _, text = text[1:].partition(" ")
    name, _, rest = text.strip().partition(" ")
    opcode, *modifiers = name.split(".")
    return guard, opcode, tuple(modifiers), (rest.strip(),) if opcode == "bra" else tuple(_split(rest))


def _base(text: str) -> tuple[str, int]:
    """Take an address without its brackets apart: base and offset."""
    match = re.match(r"(\S+?)\s*\+\s*(-?\w+)$", text)
    return (match[1], int(match[2], 0)) if match else (text, 0)


def _kind(text: str) -> type | None:
    """Return what an operand without brackets is: a number, a special register, or a name; None: none of them."""
    if _NUMBER.match(text):
        return Immediate
    if _SPECIAL.match(text):
        return Special
    return Symbol if re.match(r"[A-Za-z_$%][\w$.]*$", text) else None


def _split(text: str) -> list[str]:
    """Split at the commas outside of brackets."""
    if not _BRACKETS.search(text):
        found = [part.strip() for part in text.split(",")]
        return found[:-1] if not found[-1] and len(found) == 1 else found
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "[{(":
            depth += 1
        elif c in "]})":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return [*parts, last] if last or parts else []
