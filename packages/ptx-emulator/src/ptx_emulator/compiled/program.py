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
from ptx_emulator.compiled.layout import BRANCH, CLOSURE, COMPILED, OPERAND_BYTES, RECORD_TYPE
from ptx_emulator.decode import Decoder
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
        self, instructions: list[Instruction], forms: list[Form | None], touched: list[list[int]], decoder: Decoder
    ) -> list[bytes]:  # fmt: skip
        """Return the records of instructions. ``touched``: their registers that `Warp` checks for instructions in flight."""
        addresses = engine().addresses(form for form in forms if form is not None)
        slots = [slot for form in forms if form is not None for slot in form.operands]
        operands = np.array([(slot, self.places[slot]) for slot in slots], np.int32).reshape(-1, 2)
        checked = np.array([slot for slots in touched for slot in slots], np.int32)
        self.kept += [operands, checked]
        operand, first = operands.ctypes.data, checked.ctypes.data
        rows: list[tuple[int, ...]] = []
        for i, form, found in zip(instructions, forms, touched):
            count, kind, function, arguments, immediate, target = len(found), CLOSURE, 0, 0, 0, 0
            guard, place, negated = -1, 0, 0
            if i.guard is not None:
                guard = decoder.source(i.guard[0], "pred")
                place, negated = self.places[guard], 0xFFFFFFFF * i.guard[1]
            if i.opcode == "bra":
                (label,) = i.operands
                assert isinstance(label, Label)
                kind, target = BRANCH, label.target
            elif form is not None:
                kind, function, arguments, immediate = COMPILED, addresses[form.name], operand, form.immediate
                operand += OPERAND_BYTES * len(form.operands)
            rows.append(
                (function, arguments, first, immediate, count, guard, place, negated, kind, target, 0)
            )
            first += checked.itemsize * count
        raw, size = np.array(rows, RECORD_TYPE).tobytes(), RECORD_TYPE.itemsize
        return [raw[n : n + size] for n in range(0, len(raw), size)]


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
        forms = common.forms
        for i in instructions:
            if i not in forms:
                forms[i] = self._form(decoder, i)
        for i in instructions:
            if i.guard is not None:
                decoder.source(i.guard[0], "pred")
        # Forms and guards may have added registers, and so may other kernels: then all records are made anew.
        if common.file is None or len(common.file.places) != len(common.registers):
            common.file = RegisterFile(common.registers, common.unknown)
        self.file: RegisterFile = common.file
        known = self.file.records
        new = [n for n, i in enumerate(instructions) if i not in known]
        touched = [[] if program.relaxed[n] else sorted(program.reads[n] | program.writes[n]) for n in new]
        some = [instructions[n] for n in new]
        made = self.file.add(some, [forms[i] for i in some], touched, decoder)
        records = [known.get(i, b"") for i in instructions]
        for n, i, record in zip(new, some, made):
            records[n] = record
            if i.opcode != "bra":
                known[i] = record
        past_the_end = bytes(RECORD_TYPE.itemsize)
        self._records = np.frombuffer(b"".join([*records, past_the_end]), RECORD_TYPE)
        self.advance = ADVANCE(engine().addresses(())[NAME])
        self.code = self._records.ctypes.data
        self.compiled = (self._records["kind"] != CLOSURE).tolist()

    def _form(self, decoder: Decoder, i: Instruction) -> Form | None:
        """Return the form of an instruction, by that of a like one if there is one."""
        common = decoder.common
        if i in common.alike:
            first, move = common.alike[i]
            if first not in common.forms:
                common.forms[first] = self._form(decoder, first)
            form: Form | None = common.forms[first]
            if form is None:
                return None
            return form._replace(operands=tuple([move.get(slot, slot) for slot in form.operands]))
        maker = FORMS.get(i.opcode)
        return None if maker is None else maker(decoder, i)
