"""Floating-point arithmetic on arrays, as PTX defines it.

Functions named ``*_bits`` return the result's bits in the low bits of uint32; the others return floats. Arrays may have
any shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ptx_emulator.lanes import Array

NAN32 = np.uint32(0x7FFFFFFF)  # the canonical NaN: every fp32 instruction returns it


def flush(x: Array) -> Array:
    """Replace subnormal fp32 numbers by zeros of the same sign (modifier ``.ftz``)."""
    bits = x.view(np.uint32)
    return np.where(bits & np.uint32(0x7F800000) == 0, bits & np.uint32(0x80000000), bits).view(np.float32)


def canonical(x: Array) -> Array:
    """Replace every fp32 NaN by the canonical one, `NAN32`."""
    nan = np.isnan(x)
    return np.where(nan, NAN32, x.view(np.uint32)).view(np.float32) if nan.any() else x


def odd_fma(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in fp64, rounded to odd, for operands whose product is exact in fp64.

    A second rounding to fp32 or less gives the same result as a single one.
    """
    product, wide = a * b, c
    total = product + wide
    part = total - product
    rest = (product - (total - part)) + (wide - part)
    bits = total.view(np.int64)
    away = np.where(
        (rest > 0) == (total > 0), 0, -1
    )  # the rounding error points away from zero, or towards it
    inexact = (rest != 0) & np.isfinite(total) & np.isfinite(rest)
    odd = np.where(inexact & (bits & 1 == 0), (bits + away) | 1, bits)
    return odd.view(np.float64)


def fma32(a: Array, b: Array, c: Array) -> Array:
    """a * b + c in fp32, rounded once to nearest even."""
    return odd_fma(a.astype(np.float64), b.astype(np.float64), c.astype(np.float64)).astype(np.float32)


def cut32(x: Array) -> Array:
    """Round fp64, or longer, to fp32 towards zero. Magnitudes of 2^128 or more become infinite."""
    with np.errstate(over="ignore"):
        near = x.astype(np.float32)
    too_far = (np.abs(near) > np.abs(x)) & (np.abs(x) < 2.0**128)
    return np.where(too_far, np.nextafter(near, np.float32(0)), near)


def nearest32(x: Array) -> Array:
    """Round to fp32, to nearest even."""
    return x.astype(np.float32)


def down32(x: Array) -> Array:
    """Round to fp32 towards minus infinity."""
    near = x.astype(np.float32)
    return np.where(near.astype(x.dtype) > x, np.nextafter(near, np.float32(-np.inf)), near)


def up32(x: Array) -> Array:
    """Round to fp32 towards infinity."""
    near = x.astype(np.float32)
    return np.where(near.astype(x.dtype) < x, np.nextafter(near, np.float32(np.inf)), near)


def directed(opcode: str, how: str) -> Callable[..., Array]:
    """Return add, sub, mul or fma of fp32, rounded once.

    Args:
        how: "rz" (towards zero), "rm" (towards minus infinity) or "rp" (towards infinity).
    """
    end = {"rz": cut32, "rm": down32, "rp": up32}[how]
    one, largest = np.float64(1), np.float64(np.finfo(np.float32).max)

    def compute(a: Array, b: Array, c: Array | None = None) -> Array:
        x, y = a.astype(np.float64), b.astype(np.float64)
        product, z = x * y, np.zeros_like(x)
        if opcode == "mul":
            wide = product  # exact
        else:
            if opcode == "fma":
                assert c is not None
                z = c.astype(np.float64)
                wide = odd_fma(x, y, z)
            else:
                product, z = x, -y if opcode == "sub" else y
                wide = odd_fma(x, one, z)
        if how == "rz":
            wide = np.where(np.isfinite(wide), np.clip(wide, -largest, largest), wide)
        found = end(wide)
        if how == "rm" and opcode != "mul":  # the zero of numbers that cancel is negative
            negative = (wide == 0) & (np.signbit(product) | np.signbit(z))
            found = np.where(negative, np.float32(-0.0), found)
        return found.astype(np.float32)

    return compute


def odd32(x: Array) -> Array:
    """Round fp64 to fp32 to odd: a second rounding to fewer bits then gives the same result as a single one."""
    cut = cut32(x)
    inexact = (cut != x) & np.isfinite(cut)
    return (cut.view(np.uint32) | inexact).view(np.float32)


def bf16_bits(x: Array) -> Array:
    """Round fp32 to bf16, to nearest even."""
    bits = x.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))) >> np.uint32(16)
    nan = np.isnan(x)
    return np.where(nan, np.uint32(0x7FFF), rounded) if nan.any() else rounded


def bf16_bits_towards_zero(x: Array) -> Array:
    """Round fp32 to bf16, towards zero."""
    return np.where(np.isnan(x), np.uint32(0x7FFF), x.view(np.uint32) >> np.uint32(16))


def f16_bits(x: Array) -> Array:
    """Round fp32 to fp16, to nearest even."""
    return np.where(np.isnan(x), np.uint32(0x7FFF), x.astype(np.float16).view(np.uint16).astype(np.uint32))


def f16_bits_of(x: Array) -> Array:
    """Round fp64 to fp16 once, to nearest even."""
    with np.errstate(over="ignore"):
        return np.where(
            np.isnan(x), np.uint32(0x7FFF), x.astype(np.float16).view(np.uint16).astype(np.uint32)
        )


def f16_bits_towards_zero(x: Array) -> Array:
    """Round fp32 to fp16, towards zero.

    The code rounds to nearest, then steps back where that was away from zero.
    """
    near = x.astype(np.float16)
    too_far = np.abs(near.astype(np.float32)) > np.abs(x)
    return f16_bits(x) - too_far.astype(np.uint32)


def f16_bits_down(x: Array) -> Array:
    """Round fp32 to fp16, towards minus infinity."""
    near = x.astype(np.float16)
    return f16_bits(np.where(near > x, np.nextafter(near, np.float16(-np.inf)), near).astype(np.float32))


def f16_bits_up(x: Array) -> Array:
    """Round fp32 to fp16, towards infinity."""
    near = x.astype(np.float16)
    return f16_bits(np.where(near < x, np.nextafter(near, np.float16(np.inf)), near).astype(np.float32))


def tf32_bits_towards_zero(x: Array) -> Array:
    """Round fp32 to tf32, towards zero."""
    return np.where(np.isnan(x), NAN32, x.view(np.uint32)) & np.uint32(0xFFFFE000)


def tf32_bits(x: Array) -> Array:
    """Round fp32 to tf32, to nearest even. The low 13 bits of tf32 are zero."""
    bits = x.view(np.uint32)
    rounded = bits + (np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.where(np.isnan(x), NAN32 & np.uint32(0xFFFFE000), np.where(np.isinf(x), bits, rounded))


def tf32_bits_away(x: Array) -> Array:
    """Round fp32 to tf32, to nearest with ties away from zero. A NaN keeps its upper bits."""
    bits = x.view(np.uint32)
    rounded = bits + np.uint32(0x1000)
    return np.where(np.isfinite(x), rounded, bits) & np.uint32(0xFFFFE000)


def bf16_values(bits: Array) -> Array:
    """Convert the bits of bf16 (uint16) to fp32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


#: Coefficients of `exp2`: the powers of ln 2 over the factorials. Beyond the limit, fp32 has no further values.
EXP2 = [math.log(2) ** n / math.factorial(n) for n in range(14)]
EXP2_LIMIT = 200.0


def exp2(x: Array) -> Array:
    """2^x in fp64, within 1e-15 of the exact value, as a fixed sequence of operations: the bits are the same on all machines.

    x is clamped to `EXP2_LIMIT`, which changes no result in fp32.
    """
    x = np.clip(x, -EXP2_LIMIT, EXP2_LIMIT)
    whole = np.rint(x)
    rest = x - whole
    total = np.full_like(x, EXP2[-1])
    for factor in reversed(EXP2[:-1]):
        total = total * rest + factor
    return np.ldexp(total, np.nan_to_num(whole).astype(np.int32))


def approximated(function: Any, x: Array) -> Array:
    """Evaluate an fp32 function in fp64 and round the result to fp32.

    This models the ``.approx`` instructions: within their documented error, but not the device's bits.
    """
    return canonical(function(x.astype(np.float64)).astype(np.float32))
