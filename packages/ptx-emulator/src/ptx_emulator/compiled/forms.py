"""Compiled forms of instructions. A form is one function in machine code for all instructions of the same name and types.

The closures of the handlers (`decode.HANDLERS`) are the specification: a form computes the same bits, and leaves an instruction
to its closure wherever that would raise an error. An instruction without a form always executes its closure.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ptx_emulator.compiled.emit import Operation
from ptx_emulator.decode import Decoder
from ptx_emulator.parser import Instruction


class Form(NamedTuple):
    """The compiled form of an instruction.

    Attributes:
        name: of the function. Equal names have equal functions.
        operands: the registers, in the order in which ``build`` numbers them.
        build: emits the function.
        immediate: a constant of the instruction, `layout.RECORD_TYPE`.
    """

    name: str
    operands: tuple[int, ...]
    build: Callable[[Operation], None]
    immediate: int = 0


Maker = Callable[[Decoder, Instruction], "Form | None"]

FORMS: dict[str, Maker] = {}


def form(*opcodes: str) -> Callable[[Maker], Maker]:
    """Register the maker of the forms of these opcodes. It returns None for an instruction that stays with its closure."""

    def register(function: Maker) -> Maker:
        FORMS.update(dict.fromkeys(opcodes, function))
        return function

    return register


def name_of(i: Instruction, *more: object) -> str:
    """Return the name of a function: the instruction's own, and what else distinguishes it."""
    return ".".join([i.opcode, *i.modifiers, *map(str, more)])
