"""Arithmetic of fp16 and bf16, one number or a pair in a register, and of pairs of fp32.

Source: PTX ISA, "Half Precision Floating-Point Instructions", `add`, `mul`, `fma` of `.f32x2`, "Mixed Precision Floating-Point
Instructions". Each result is rounded once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptx_emulator import floats
from ptx_emulator.errors import PtxError
from ptx_emulator.lanes import Array

Function = Callable[..., Array]
#: Type -> type of its registers.
REGISTERS = {"f16": "b16", "bf16": "b16", "f16x2": "b32", "bf16x2": "b32", "f32x2": "b64"}
NAN = np.uint32(0x7FFF)


def extreme(function: Function, nan: bool) -> Function:
    """Build max or min of floats (``function``: np.fmax or np.fmin). -0 is less than +0.

    A number wins over NaN, or with ``nan`` (`.NaN`) the other way round.
    """

    def one(a: Array, b: Array) -> Array:
        signs = np.signbit(a) if function is np.fmax else ~np.signbit(a)
        found = np.where((a == b) & (a == 0), np.where(signs, b, a), function(a, b))
        return np.where(np.isnan(a) | np.isnan(b), a.dtype.type(np.nan), found) if nan else found

    def several(*x: Array) -> Array:
        found = x[0]
        for other in x[1:]:
            found = one(found, other)
        return found

    return several


_EXACT: dict[str, Function] = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "fma": floats.odd_fma}


def operation(opcode: str, modifiers: tuple[str, ...]) -> Function:
    """Return the function of an instruction of a type of `REGISTERS`, on the bits of its registers.

    Raises:
        PtxError: a modifier is not modelled.
    """
    *how, kind = modifiers
    allowed = {
        "add": ("rn",),
        "sub": ("rn",),
        "mul": ("rn",),
        "fma": ("rn", "relu"),
        "min": ("NaN",),
        "max": ("NaN",),
    }
    if kind == "f32x2":
        allowed = {name: ("rn", "rz", "rm", "rp", "ftz") for name in _EXACT}
    for modifier in how:
        if modifier not in allowed.get(opcode, ()):
            raise PtxError(f".{modifier} is not modelled")
    if opcode not in (*_EXACT, *(("min", "max", "neg", "abs") if kind != "f32x2" else ())):
        raise PtxError(f"{opcode}.{kind} is not modelled")
    if kind == "f32x2":
        return _pairs32(opcode, "ftz" in how, next((m for m in how if m in ("rz", "rm", "rp")), "rn"))
    single = _single(opcode, kind.removesuffix("x2"), "NaN" in how, "relu" in how)
    if not kind.endswith("x2"):
        return lambda *x: single(*x).astype(np.uint16)

    def pair(*x: Array) -> Array:
        high, low = (single(*((v >> np.uint32(n)).astype(np.uint16) for v in x)) for n in (16, 0))
        return high.astype(np.uint32) << np.uint32(16) | low.astype(np.uint32)

    return pair


def _single(opcode: str, kind: str, nan: bool, relu: bool) -> Function:
    """Return an operation on the bits of single numbers (uint16)."""
    if opcode in ("neg", "abs"):
        sign = np.uint16(0x8000)
        return (lambda x: x ^ sign) if opcode == "neg" else (lambda x: x & ~sign)
    values = floats.bf16_values if kind == "bf16" else lambda bits: bits.view(np.float16)
    rounded = (lambda x: floats.bf16_bits(floats.odd32(x))) if kind == "bf16" else floats.f16_bits_of
    if opcode in ("min", "max"):
        function = extreme(np.fmin if opcode == "min" else np.fmax, nan)
    else:
        function = _EXACT[opcode]

    def apply(*x: Array) -> Array:
        found = function(*(values(v).astype(np.float64) for v in x))
        if relu:
            found = np.where(found < 0, 0.0, found)
        return np.where(np.isnan(found), NAN, rounded(found))

    return apply


def _pairs32(opcode: str, ftz: bool, how: str) -> Function:
    """Return an operation on the bits of pairs of fp32 (uint64). ``how``: the rounding."""
    if how == "rn":
        function = floats.fma32 if opcode == "fma" else _EXACT[opcode]
    else:
        function = floats.directed(opcode, how)

    def apply(*x: Array) -> Array:
        values = [np.ascontiguousarray(v).view(np.float32) for v in x]
        if ftz:
            values = [floats.flush(v) for v in values]
        found = floats.canonical(function(*values))
        return np.ascontiguousarray(floats.flush(found) if ftz else found).view(np.uint64)

    return apply


def mixed(opcode: str, modifiers: tuple[str, ...]) -> tuple[Function, tuple[str, ...]] | None:
    """Return an instruction of fp32 with sources of fp16 or bf16: its function, and the types of its sources.

    None: these modifiers say something else. ``fma.rn.f32.bf16``: a * b + c; ``add.f32.bf16``: a + c, where c is fp32.
    """
    if len(modifiers) < 2 or modifiers[-2] != "f32" or modifiers[-1] not in ("f16", "bf16"):
        return None
    kind = modifiers[-1]
    if opcode not in ("add", "sub", "fma") or any(m != "rn" for m in modifiers[:-2]):
        raise PtxError(f"{opcode}.{'.'.join(modifiers)} is not modelled")
    values = floats.bf16_values if kind == "bf16" else lambda bits: bits.view(np.float16).astype(np.float32)
    if opcode == "fma":
        return lambda a, b, c: floats.canonical(floats.fma32(values(a), values(b), c)), ("b16", "b16", "f32")
    return lambda a, c: floats.canonical(_EXACT[opcode](values(a), c)), ("b16", "f32")
