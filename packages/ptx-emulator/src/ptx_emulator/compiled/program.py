"""Compiled programs: the records of a kernel's instructions, and the places of its registers."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

# These modules register their forms when they are imported.
from ptx_emulator.compiled import elementwise, exchange, memory, products  # noqa: F401
from ptx_emulator.compiled.dispatch import NAME
from ptx_emulator.compiled.engine import engine
from ptx_emulator.compiled.forms import FORMS, Form
from ptx_emulator.compiled.layout import BRANCH, CLOSURE, COMPILED, OPERAND_BYTES, RECORD, RECORD_TYPE
from ptx_emulator.decode import Decoder
from ptx_emulator.lanes import Array
from ptx_emulator.machine import Program
from ptx_emulator.parser import Instruction, Label

ADVANCE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)


class CompiledProgram:
    """The compiled form of a `Program`.

    A register file starts with the sets of undefined lanes. Then follow the states, a byte for each register, the flags of
    instructions in flight, also bytes, and the words: first those that start as 0, then constants and special registers.

    Attributes:
        advance: the loop, a function of a context. It returns `dispatch.MERGE` or `dispatch.PYTHON`.
        code: the address of the records.
        compiled: per instruction, whether `advance` can execute it.
        places: per register, where its words start in the register file, in bytes.
        sizes: per register, bytes of a word; 0 for a predicate.
        state, flight: where the states and the flags of instructions in flight start.
        rows: per tuple of registers of 4 bytes, the places of their words, see `Registers.rows`.
        constants: where the constants start.
        file_bytes: of a register file.
        unknown: the initial sets of undefined lanes.
        image: the initial bytes of the constants and special registers.
    """

    def __init__(self, program: Program, decoder: Decoder):
        instructions = decoder.kernel.instructions
        forms = [self._form(decoder, i) for i in instructions]
        registers, unknown = list(decoder.registers), list(decoder.unknown)  # forms may add some
        guards = [-1 if i.guard is None else decoder.source(i.guard[0], "pred") for i in instructions]
        addresses = engine().addresses(form for form in forms if form is not None)
        self.advance = ADVANCE(addresses[NAME])
        self.rows: dict[tuple[int, ...], Array] = {}
        self._lay_out(registers, unknown)
        slots = [slot for form in forms if form is not None for slot in form.operands]
        self._operands = np.array([(slot, self.places[slot]) for slot in slots], np.int32).reshape(-1, 2)
        checked = zip(program.reads, program.writes, program.relaxed)
        touched = [[] if relaxed else sorted(reads | writes) for reads, writes, relaxed in checked]
        self._touched = np.array([slot for slots in touched for slot in slots], np.int32)
        operand, first = self._operands.ctypes.data, self._touched.ctypes.data
        rows: list[tuple[int, ...]] = []
        for i, form, guard, found in zip(instructions, forms, guards, touched):
            count, kind, function, operands, immediate, target = len(found), CLOSURE, 0, 0, 0, 0
            place = negated = 0
            if i.guard is not None:
                place, negated = self.places[guard], 0xFFFFFFFF * i.guard[1]
            if i.opcode == "bra":
                (label,) = i.operands
                assert isinstance(label, Label)
                kind, target = BRANCH, label.target
            elif form is not None:
                kind, function, operands, immediate = COMPILED, addresses[form.name], operand, form.immediate
                operand += OPERAND_BYTES * len(form.operands)
            rows.append((function, operands, first, immediate, count, guard, place, negated, kind, target, 0))
            first += self._touched.itemsize * count
        rows.append((0,) * len(RECORD))  # past the end
        self._records = np.array(rows, RECORD_TYPE)
        self.code = self._records.ctypes.data
        self.compiled = (self._records["kind"] != CLOSURE).tolist()

    @staticmethod
    def _form(decoder: Decoder, i: Instruction) -> Form | None:
        maker, forms = FORMS.get(i.opcode), decoder.common.forms
        if maker is None:
            return None
        if i not in forms:
            forms[i] = maker(decoder, i)
        found: Form | None = forms[i]
        return found

    def _lay_out(self, registers: list[Any], unknown: list[int]) -> None:
        count = len(registers)
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
        self.file_bytes = end
        self.image = np.zeros(end - self.constants, np.uint8)
        for slot in constant:
            value = np.asarray(registers[slot], np.uint32 if self.sizes[slot] == 0 else None)
            bytes_: Array = np.frombuffer(value.tobytes(), np.uint8)
            place = self.places[slot] - self.constants
            self.image[place : place + len(bytes_)] = bytes_
