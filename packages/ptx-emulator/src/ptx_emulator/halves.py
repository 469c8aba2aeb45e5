"""Words with a half that nothing writes and nothing reads, as compilers pack a value of 16 bits for instructions that take 32.

The emulator knows for whole registers whether they are undefined. So a word with one undefined half would be undefined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from ptx_emulator.parser import (
    SIZES,
    Address,
    Coordinates,
    Immediate,
    Instruction,
    Negated,
    Operand,
    Pair,
    Register,
    Vector,
)


def without_undefined_halves(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Replace ``mov.b32 d, {a, b}`` by ``cvt.u32.u16 d, a`` where b occurs nowhere else, and d is read in its lower half only."""
    packed = [(n, halves) for n, i in enumerate(instructions) if (halves := _halves(i)) is not None]
    found = list(instructions)
    if not packed:
        return found
    counts = Counter(x for i in instructions for operand in i.operands for x in _registers(operand))
    counts.update(i.guard[0] for i in instructions if i.guard)
    for n, (low, high) in packed:
        i = instructions[n]
        word = i.operands[0]
        if not isinstance(word, Register):
            continue
        if counts[high] == 1 and all(
            _reads_lower_half(x, word) for m, x in enumerate(instructions) if m != n
        ):
            found[n] = i.replaced((word, low), "cvt.u32.u16")
    return found


def _halves(i: Instruction) -> tuple[Register, Register] | None:
    """Return the registers that a ``mov.b32`` packs; None: it is another instruction."""
    # A pattern has operands of the same kinds. Those of the instruction may not be made yet.
    p = i.pattern
    if p.opcode != "mov" or p.modifiers != ("b32",) or not isinstance(p.operands[1], Vector):
        return None
    source = i.operands[1]
    assert isinstance(source, Vector)
    parts = [x for x in source.elements if isinstance(x, Register)]
    return (parts[0], parts[1]) if len(parts) == len(source.elements) == 2 else None


def _registers(operand: Operand) -> Iterator[Register]:
    """Yield the registers of an operand."""
    if isinstance(operand, Register):
        yield operand
    elif isinstance(operand, Vector):
        for x in operand.elements:
            yield from _registers(x)
    elif isinstance(operand, Address):
        yield from _registers(operand.base)
    elif isinstance(operand, Coordinates):
        for x in (operand.base, *operand.elements):
            yield from _registers(x)
    elif isinstance(operand, Pair):
        yield from _registers(operand.first)
        yield from _registers(operand.second)
    elif isinstance(operand, Negated):
        yield operand.predicate


def _reads_lower_half(i: Instruction, word: Register) -> bool:
    """Return whether an instruction reads no more of a register than its lower half."""
    if not any(x == word for operand in i.operands for x in _registers(operand)):
        return True
    if i.opcode == "st" and len(i.operands) == 2 and i.operands[1] == word:
        return SIZES[i.modifiers[-1]] <= 2 and word not in _registers(i.operands[0])
    if i.opcode == "prmt" and i.modifiers == ("b32",) and isinstance(i.operands[3], Immediate):
        selectors = int(i.operands[3].text.rstrip("U"), 0)
        of_word = [4 * n for n in (0, 1) if i.operands[1 + n] == word]
        upper = {first + n for first in of_word for n in (2, 3)}
        return i.operands[0] != word and not any(selectors >> 4 * n & 7 in upper for n in range(4))
    return False
