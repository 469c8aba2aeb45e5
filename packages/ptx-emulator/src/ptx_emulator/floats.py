"""Floating-point arithmetic on arrays, as PTX defines it."""

from __future__ import annotations

from typing import Any

import numpy as np

from ptx_emulator.lanes import Array

NAN32 = np.uint32(0x7FFFFFFF)  # what fp32 instructions give


def flush(x: Array) -> Array:
    """fp32 with subnormal numbers as zeros of their sign (``.ftz``)."""
    bits = x.view(np.uint32)
    return np.where(bits & np.uint32(0x7F800000) == 0, bits & np.uint32(0x80000000), bits).view(np.float32)


def canonical(x: Array) -> Array:
    """fp32 with every NaN as the one that instructions give."""
    nan = np.isnan(x)
    return np.where(nan, NAN32, x.view(np.uint32)).view(np.float32) if nan.any() else x


def fma32(a: Array, b: Array, c: Array) -> Array:
    """a*b + c in fp32, rounded once: the sum in fp64 is rounded to odd, so that to round it again does no
    harm."""
    product, wide = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + wide
    part = total - product
    rest = (product - (total - part)) + (wide - part)
    bits = total.view(np.int64)
    away = np.where((rest > 0) == (total > 0), 0, -1)  # what is left out leads away from zero, or back
    inexact = (rest != 0) & np.isfinite(total) & np.isfinite(rest)
    odd = np.where(inexact & (bits & 1 == 0), (bits + away) | 1, bits)
    return odd.view(np.float64).astype(np.float32)


def cut32(x: Array) -> Array:
    """fp64 to fp32 towards zero; from 2^128 on an infinity."""
    with np.errstate(over="ignore"):
        near = x.astype(np.float32)
    too_far = (np.abs(near) > np.abs(x)) & (np.abs(x) < 2.0**128)
    return np.where(too_far, np.nextafter(near, np.float32(0)), near)


def odd32(x: Array) -> Array:
    """fp64 to fp32 rounded to odd: to round it again, to fewer digits, does no harm."""
    cut = cut32(x)
    inexact = (cut != x) & np.isfinite(cut)
    return (cut.view(np.uint32) | inexact).view(np.float32)


def bf16_bits(x: Array) -> Array:
    """The bits of fp32 rounded to nearest even bf16, as uint32."""
    bits = x.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))) >> np.uint32(16)
    nan = np.isnan(x)
    return np.where(nan, np.uint32(0x7FFF), rounded) if nan.any() else rounded


def bf16_bits_towards_zero(x: Array) -> Array:
    """The same, truncated."""
    return np.where(np.isnan(x), np.uint32(0x7FFF), x.view(np.uint32) >> np.uint32(16))


def f16_bits(x: Array) -> Array:
    """The bits of fp32 rounded to nearest even fp16, as uint32."""
    return np.where(np.isnan(x), np.uint32(0x7FFF), x.astype(np.float16).view(np.uint16).astype(np.uint32))


def f16_bits_of(x: Array) -> Array:
    """The same of fp64, rounded once."""
    with np.errstate(over="ignore"):
        return np.where(
            np.isnan(x), np.uint32(0x7FFF), x.astype(np.float16).view(np.uint16).astype(np.uint32)
        )


def f16_bits_towards_zero(x: Array) -> Array:
    """The same, truncated: what was rounded away from zero is a step too far."""
    near = x.astype(np.float16)
    too_far = np.abs(near.astype(np.float32)) > np.abs(x)
    return f16_bits(x) - too_far.astype(np.uint32)


def tf32_bits(x: Array) -> Array:
    """fp32 rounded to nearest even tf32, whose low 13 bits are zero."""
    bits = x.view(np.uint32)
    rounded = bits + (np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.where(np.isnan(x), NAN32 & np.uint32(0xFFFFE000), np.where(np.isinf(x), bits, rounded))


def tf32_bits_away(x: Array) -> Array:
    """The same, ties away from zero; a NaN keeps its upper bits."""
    bits = x.view(np.uint32)
    rounded = bits + np.uint32(0x1000)
    return np.where(np.isfinite(x), rounded, bits) & np.uint32(0xFFFFE000)


def bf16_values(bits: Array) -> Array:
    """fp32 of the bits of bf16 (uint16)."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def approximated(function: Any, x: Array) -> Array:
    """A function of fp32 in fp64, rounded to fp32, as the model of one that the device approximates."""
    return canonical(function(x.astype(np.float64)).astype(np.float32))
