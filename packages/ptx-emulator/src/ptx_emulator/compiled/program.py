"""Compiled programs: the records of a kernel's instructions, and the places of its registers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

# These modules register their forms when they are imported.
from ptx_emulator.compiled import elementwise, exchange, memory, products  # noqa: F401
from ptx_emulator.compiled.dispatch import NAME
from ptx_emulator.compiled.engine import engine
from ptx_emulator.compiled.forms import FORMS, Form
from ptx_emulator.compiled.layout import BRANCH, CLOSURE, COMPILED, OPERAND_BYTES, RECORD_TYPE
from ptx_emulator.decode import Alike, Decoded, Decoder, Row, standing_for
from ptx_emulator.lanes import Array
from ptx_emulator.machine import Program
from ptx_emulator.parser import Instruction, Label

ADVANCE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class RegisterFile:
    """The register file of the warps of kernels with the same declarations, and the records of their instructions.

    It starts with the sets of undefined lanes. Then follow the states, a byte for each register, the flags of instructions in
    flight, also bytes, and the words: first those that start as 0, then constants and special registers.

    Attributes:
        places: per register, where its words start, in bytes.
        sizes: per register, bytes of a word; 0 for a predicate.
        state, flight: where the states and the flags of instructions in flight start.
        rows: per tuple of registers of 4 bytes, the places of their words, see `Registers.rows`.
        constants: where the constants start.
        bytes: the size of the register file.
        unknown: the initial sets of undefined lanes.
        image: the initial bytes of the constants and special registers.
        records: by instruction, except branches, the bytes of its `layout.RECORD_TYPE`.
        kept: the arrays to which the records point. This list keeps them alive.
    """

    def __init__(self, registers: list[Any], unknown: list[int]):
        count = len(registers)
        self.rows: dict[tuple[int, ...], Array] = {}
        self.records: dict[Instruction, bytes] = {}
        self.kept: list[Array] = []
        self.sizes = [0 if isinstance(x, int) else x.itemsize for x in registers]
        self.unknown = np.array(unknown, np.uint32)
        self.state = 4 * count
        self.flight = self.state + count
        end = -(-(self.flight + count) // 64) * 64
        self.places = [0] * count
        written = [slot for slot in range(count) if unknown[slot]]
        constant = [slot for slot in range(count) if not unknown[slot]]
        for group in (written, constant):
            self.constants = end
            for slot in sorted(group, key=lambda slot: -self.sizes[slot]):
                self.places[slot] = end
                end += 32 * self.sizes[slot] or 4
            end = -(-end // 64) * 64
        self.bytes = end
        self.image = np.zeros(end - self.constants, np.uint8)
        for slot in constant:
            value = np.asarray(registers[slot], np.uint32 if self.sizes[slot] == 0 else None)
            bytes_: Array = np.frombuffer(value.tobytes(), np.uint8)
            place = self.places[slot] - self.constants
            self.image[place : place + len(bytes_)] = bytes_

    def add(
        self, instructions: list[Instruction], shapes: list[Shape], effects: list[Decoded | Alike]
    ) -> list[bytes]:
        """Return the records of instructions. ``shapes``, ``effects``: of each, see `Program.effects`."""
        rows = [x.row for x in effects]
        forms = [shape.form for shape in shapes]
        addresses = engine().addresses(form for form in forms if form is not None)
        slots = [shape.operands(row) for shape, row in zip(shapes, rows)]
        checked = [shape.touched(row) for shape, row in zip(shapes, rows)]
        places = np.array(self.places, np.int32)
        records = np.zeros(len(instructions), RECORD_TYPE)
        records["function"] = [0 if form is None else addresses[form.name] for form in forms]
        records["immediate"] = [
            0 if form is None else form.immediate + x.shift for form, x in zip(forms, effects)
        ]
        records["kind"] = [CLOSURE if form is None else COMPILED for form in forms]
        flat = np.fromiter(chain.from_iterable(slots), np.int32)
        operands = np.stack([flat, places[flat]], axis=1)
        touched = np.fromiter(chain.from_iterable(checked), np.int32)
        self.kept += [operands, touched]
        records["operands"] = operands.ctypes.data + OPERAND_BYTES * _starts(slots)
        records["touched"] = touched.ctypes.data + touched.itemsize * _starts(checked)
        records["touched_count"] = list(map(len, checked))
        records["guard"] = -1
        guarded = [n for n, i in enumerate(instructions) if i.pattern.negated is not None]
        guards = np.array([rows[n][0] for n in guarded], np.int32)
        records["guard"][guarded], records["guard_place"][guarded] = guards, places[guards]
        records["negated"][guarded] = [0xFFFFFFFF * bool(instructions[n].pattern.negated) for n in guarded]
        branches = [n for n, i in enumerate(instructions) if i.pattern.opcode == "bra"]
        records["kind"][branches] = BRANCH
        records["target"][branches] = [_target(instructions[n]) for n in branches]
        raw, size = records.tobytes(), RECORD_TYPE.itemsize
        return [raw[n : n + size] for n in range(0, len(raw), size)]


def _target(branch: Instruction) -> int:
    (label,) = branch.operands
    assert isinstance(label, Label)
    return label.target


def _starts(parts: list[list[int]]) -> Array:
    """Return where each part starts if they follow each other."""
    ends = np.cumsum(list(map(len, parts)), dtype=np.int64)
    return np.concatenate([[0], ends[:-1]])


class Shape(NamedTuple):
    """What the records of an example (`decode.Decoded`) and of all instructions like it have in common.

    Attributes:
        form: that of the example. None: they stay with their closures.
        operands, touched: functions of `decode.Decoded.row` that return the operands of the form, and the registers that `Warp` checks for
            instructions in flight.
    """

    form: Form | None
    operands: Callable[[Row], list[int]]
    touched: Callable[[Row], list[int]]


class CompiledProgram:
    """The compiled form of a `Program`.

    Attributes:
        advance: the loop, a function of a context. It returns `dispatch.MERGE` or `dispatch.PYTHON`.
        file: the layout of its register files.
        code: the address of the records.
        compiled: per instruction, whether `advance` can execute it.
    """

    def __init__(self, program: Program, decoder: Decoder):
        instructions, common = decoder.kernel.instructions, decoder.common
        effects: Any = program.effects  # `Decoded` or `Alike`
        known = {} if common.file is None else common.file.records
        for n, i in enumerate(instructions):
            if i not in known:
                example = effects[n].example
                if example not in common.forms:
                    common.forms[example] = self._shape(decoder, i, effects[n])
        # Forms may have added registers, and so may other kernels: then all records are made anew.
        if common.file is None or len(common.file.places) != len(common.registers):
            common.file = RegisterFile(common.registers, common.unknown)
        self.file: RegisterFile = common.file
        known = self.file.records
        records = list(map(known.get, instructions))
        new = [n for n, record in enumerate(records) if record is None]
        some = [instructions[n] for n in new]
        decoded = [effects[n] for n in new]
        made = self.file.add(some, [common.forms[x.example] for x in decoded], decoded)
        for n, i, record in zip(new, some, made):
            records[n] = record
            if i.pattern.opcode != "bra":
                known[i] = record
        past_the_end = bytes(RECORD_TYPE.itemsize)
        self._records = np.frombuffer(b"".join([*records, past_the_end]), RECORD_TYPE)
        self.advance = ADVANCE(engine().addresses(())[NAME])
        self.code = self._records.ctypes.data
        self.compiled = (self._records["kind"] != CLOSURE).tolist()

    def _shape(self, decoder: Decoder, i: Instruction, one: Decoded | Alike) -> Shape:
        """Return the shape of an instruction and of those like it."""
        maker = FORMS.get(i.opcode)
        form = None if maker is None else maker(decoder, i)
        if form is not None:
            form = form._replace(immediate=form.immediate - one.shift)
        operands = () if form is None else form.operands
        touched = () if one.relaxed else sorted(one.reads | one.writes)
        return Shape(form, standing_for(operands, one.row), standing_for(touched, one.row))
