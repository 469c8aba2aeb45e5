"""Compares instructions that the emulator decodes by example with their own decoding."""

from ptx_emulator.compiled.forms import FORMS
from ptx_emulator.decode import Alike
from ptx_emulator.launch import compiled_of, decoded


def check_decoding_by_example(source: str) -> None:
    """Asserts that instructions which differ in their registers, integers and offsets only share their decoding and their form, with their own
    ones. ``source``: PTX with one entry."""
    program, decoder = decoded(source, None)
    compiled_of(source, None)
    common = decoder.common
    alike = [
        (n, i) for n, i in enumerate(decoder.kernel.instructions) if isinstance(program.effects[n], Alike)
    ]
    assert len(alike) > len(decoder.kernel.instructions) / 2
    for n, i in alike:
        one, other = decoder.decoded(i), program.effects[n]
        assert (one.reads, one.writes, one.relaxed, one.pure) == (
            other.reads, other.writes, other.relaxed, other.pure,
        )  # fmt: skip
        maker, shape = FORMS.get(i.opcode), common.forms[other.example]
        made, form = None if maker is None else maker(decoder, i), shape.form
        assert (form is None) == (made is None)
        if made is not None:
            operands = tuple(shape.operands(other.row))
            assert (form.name, operands, form.immediate + other.shift) == (
                made.name,
                made.operands,
                made.immediate,
            )
