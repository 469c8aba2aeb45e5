"""fp32 arithmetic on vectors, as `ptx_emulator.floats` defines it."""

from __future__ import annotations

from typing import Any

from ptx_emulator.compiled.emit import (
    F16,
    F32,
    F64,
    I16,
    I32,
    I64,
    Value,
    constant,
    intrinsic,
    lanes_of,
    suffix,
)
from ptx_emulator.floats import EXP2, EXP2_LIMIT

NAN32 = 0x7FFFFFFF


def bits_of(b: Any, x: Value) -> Value:
    """Return the bits of fp16, fp32 or fp64."""
    return b.bitcast(x, lanes_of({F16: I16, F32: I32, F64: I64}[x.type.element], x.type.count))


def real_of(b: Any, bits: Value) -> Value:
    """Return the fp32 numbers with these bits."""
    return b.bitcast(bits, lanes_of(F32, bits.type.count))


def is_nan(b: Any, x: Value) -> Value:
    """Return whether each number is a NaN."""
    return b.fcmp_unordered("uno", x, x)


def flush(b: Any, x: Value) -> Value:
    """`floats.flush`."""
    bits = bits_of(b, x)
    small = b.icmp_unsigned("==", b.and_(bits, constant(bits, 0x7F800000)), constant(bits, 0))
    return real_of(b, b.select(small, b.and_(bits, constant(bits, 0x80000000)), bits))


def canonical(b: Any, x: Value) -> Value:
    """`floats.canonical`."""
    bits = bits_of(b, x)
    return real_of(b, b.select(is_nan(b, x), constant(bits, NAN32), bits))


def saturated(b: Any, x: Value) -> Value:
    """Clamp to [0, 1]. NaN and -0 become +0."""
    one, zero = constant(x, 1.0), constant(x, 0.0)
    low = b.select(b.fcmp_ordered("<", x, one), x, one)
    return b.select(b.fcmp_ordered(">", x, zero), low, zero)


def extreme(b: Any, x: Value, y: Value, largest: bool) -> Value:
    """min or max: a number wins over NaN, and -0 is less than +0."""
    bits_x, bits_y = bits_of(b, x), bits_of(b, y)
    zeros = b.and_(b.fcmp_ordered("==", x, y), b.fcmp_ordered("==", x, constant(x, 0.0)))
    negative = b.icmp_signed("<", bits_x, constant(bits_x, 0))
    zero = b.select(negative, y, x) if largest else b.select(negative, x, y)
    better = b.select(b.fcmp_ordered(">" if largest else "<", x, y), bits_x, bits_y)
    better = b.select(is_nan(b, x), bits_y, b.select(is_nan(b, y), bits_x, better))
    return real_of(b, b.select(zeros, bits_of(b, zero), better))


def bf16_bits(b: Any, x: Value) -> Value:
    """`floats.bf16_bits`."""
    bits = bits_of(b, x)
    odd = b.and_(b.lshr(bits, constant(bits, 16)), constant(bits, 1))
    rounded = b.lshr(b.add(bits, b.add(constant(bits, 0x7FFF), odd)), constant(bits, 16))
    return b.select(is_nan(b, x), constant(bits, 0x7FFF), rounded)


def odd_fma(b: Any, x: Value, y: Value, z: Value) -> Value:
    """`floats.odd_fma`: the same operations on fp64 in the same order."""
    product = b.fmul(x, y)
    total = b.fadd(product, z)
    part = b.fsub(total, product)
    rest = b.fadd(b.fsub(product, b.fsub(total, part)), b.fsub(z, part))
    bits, zero = bits_of(b, total), constant(x, 0.0)
    same = b.icmp_unsigned("==", b.fcmp_ordered(">", rest, zero), b.fcmp_ordered(">", total, zero))
    away = b.select(same, constant(bits, 0), constant(bits, -1))
    inexact = b.and_(b.fcmp_unordered("!=", rest, zero), b.and_(_is_finite(b, total), _is_finite(b, rest)))
    even = b.icmp_unsigned("==", b.and_(bits, constant(bits, 1)), constant(bits, 0))
    odd = b.or_(b.add(bits, away), constant(bits, 1))
    return b.bitcast(b.select(b.and_(inexact, even), odd, bits), x.type)


def _is_finite(b: Any, x: Value) -> Value:
    return b.fcmp_ordered("==", b.fsub(x, x), constant(x, 0.0))


def bf16_bits_of(b: Any, x: Value) -> Value:
    """Round fp64 to bf16 once, as `floats.bf16_bits` of `floats.odd32`."""
    near = b.fptrunc(x, lanes_of(F32, x.type.count))
    back = b.fpext(near, x.type)
    size = lambda y: intrinsic(b, f"llvm.fabs.{suffix(y)}", y.type, y)
    too_far = b.zext(b.fcmp_ordered(">", size(back), size(x)), lanes_of(I32, x.type.count))
    bits = bits_of(b, near)
    odd = b.or_(b.sub(bits, too_far), constant(bits, 1))
    inexact = b.and_(b.fcmp_ordered("!=", back, x), _is_finite(b, x))
    return bf16_bits(b, real_of(b, b.select(inexact, odd, bits)))


def bf16_bits_towards_zero(b: Any, x: Value) -> Value:
    """`floats.bf16_bits_towards_zero`."""
    bits = bits_of(b, x)
    return b.select(is_nan(b, x), constant(bits, 0x7FFF), b.lshr(bits, constant(bits, 16)))


def f16_bits(b: Any, x: Value) -> Value:
    """`floats.f16_bits`."""
    wide = lanes_of(I32, x.type.count)
    narrow = bits_of(b, b.fptrunc(x, lanes_of(F16, x.type.count)))
    found = b.zext(narrow, wide)
    return b.select(is_nan(b, x), constant(found, 0x7FFF), found)


def tf32_bits(b: Any, x: Value) -> Value:
    """`floats.tf32_bits`."""
    bits = bits_of(b, x)
    odd = b.and_(b.lshr(bits, constant(bits, 13)), constant(bits, 1))
    rounded = b.and_(b.add(bits, b.add(constant(bits, 0xFFF), odd)), constant(bits, 0xFFFFE000))
    infinite = b.icmp_unsigned("==", b.and_(bits, constant(bits, 0x7FFFFFFF)), constant(bits, 0x7F800000))
    return b.select(is_nan(b, x), constant(bits, NAN32 & 0xFFFFE000), b.select(infinite, bits, rounded))


def bf16_values(b: Any, bits: Value) -> Value:
    """`floats.bf16_values` of i16."""
    wide = b.zext(bits, lanes_of(I32, bits.type.count))
    return real_of(b, b.shl(wide, constant(wide, 16)))


def exp2(b: Any, x: Value) -> Value:
    """`floats.exp2`: the same operations on fp64 in the same order."""
    limit = constant(x, EXP2_LIMIT)
    x = b.select(b.fcmp_ordered(">", x, limit), limit, x)
    x = b.select(b.fcmp_ordered("<", x, constant(x, -EXP2_LIMIT)), constant(x, -EXP2_LIMIT), x)
    whole = intrinsic(b, f"llvm.rint.{suffix(x)}", x.type, x)
    rest = b.fsub(x, whole)
    total = constant(x, EXP2[-1])
    for factor in reversed(EXP2[:-1]):
        total = b.fadd(b.fmul(total, rest), constant(x, factor))
    safe = b.select(is_nan(b, whole), constant(x, 0.0), whole)
    exponent = b.fptosi(safe, lanes_of(I64))
    scale = b.shl(b.add(exponent, constant(exponent, 1023)), constant(exponent, 52))
    return b.fmul(total, b.bitcast(scale, x.type))
