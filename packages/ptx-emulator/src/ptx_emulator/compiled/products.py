"""Products of matrices as Hopper's tensor cores compute them (`matrices.tensor_core_sum`), and the forms of `mma`."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
from llvmlite import ir

from ptx_emulator.compiled.emit import (
    F16,
    F32,
    F64,
    I16,
    I32,
    I64,
    POINTER,
    Operation,
    Routine,
    Value,
    allocate,
    at,
    element,
    intrinsic,
    joined,
    lanes_of,
    loop,
    picked,
)
from ptx_emulator.compiled.engine import engine
from ptx_emulator.compiled.floating import NAN32, bf16_values
from ptx_emulator.compiled.forms import Form, form, name_of
from ptx_emulator.decode import Decoder
from ptx_emulator.lanes import Array, address_of
from ptx_emulator.matrices import ALIGNED, ELEMENT, MMA_REGISTERS
from ptx_emulator.parser import Instruction

NAME = "product"
WIDTH = 8  # columns that one step computes
ROWS = 16
#: The context, A [16, k] and B [k, n] in fp64, C [16, n] in fp32 or null, the result [16, n] in fp32, n and k.
PRODUCT = ir.FunctionType(I32, (POINTER, POINTER, POINTER, POINTER, POINTER, I64, I64))


def build(module: Any) -> None:
    """Add the function that computes a product, rounded towards zero."""
    o = Routine(module, NAME, PRODUCT)
    b = o.b
    _, a, right, c, result, columns, depth = o.function.args
    kind, wide = ir.VectorType(F64, WIDTH), ir.VectorType(I64, WIDTH)
    top, total, plain = (allocate(b, F64, WIDTH) for _ in range(3))
    zero = ir.Constant(kind, [ir.Constant(F64, 0.0)] * WIDTH)
    number = lambda x: ir.Constant(kind, [ir.Constant(F64, x)] * WIDTH)
    exponent = ir.Constant(wide, [ir.Constant(I64, 0x7FF << 52)] * WIDTH)
    load = lambda p: b.load(p, typ=kind, align=8)
    save = lambda x, p: b.store(x, p, align=8)

    def power(x: Value) -> Value:
        """Return the power of two of each number's exponent; 0 for 0."""
        return b.bitcast(b.and_(b.bitcast(x, wide), exponent), kind)

    def spread(x: Value) -> Value:
        one = b.insert_element(ir.Constant(kind, ir.Undefined), x, I32(0))
        return b.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, WIDTH), [0] * WIDTH))

    with loop(b, I64(ROWS)) as row, loop(b, b.lshr(columns, I64(3))) as block:
        column = b.mul(block, I64(WIDTH))
        place = b.add(b.mul(row, columns), column)

        def factors(n: Value, row: Value = row, column: Value = column) -> tuple[Value, Value]:
            left = spread(element(b, a, b.add(b.mul(row, depth), n), F64))
            return left, load(at(b, right, b.add(b.mul(n, columns), column), F64))

        added = allocate(b, F64, WIDTH)
        save(zero, added)
        with b.if_then(b.icmp_unsigned("!=", c, ir.Constant(POINTER, None))):
            words = b.load(at(b, c, place, F32), typ=ir.VectorType(F32, WIDTH), align=4)
            save(b.fpext(words, kind), added)
        # 1. The largest exponent. Numbers are powers of two here, so their order is that of the exponents.
        save(power(load(added)), top)
        with loop(b, depth) as n:
            x, y = factors(n)
            product = b.fmul(power(x), power(y))
            most = load(top)
            save(b.select(b.fcmp_ordered(">", product, most), product, most), top)
        least = number(2.0**-900)
        most = load(top)
        most = b.select(b.fcmp_ordered(">", most, least), most, least)
        scale = b.fdiv(number(2.0**ALIGNED), most)
        # 2. and 3. Truncate below it, and sum.
        cut = lambda x: intrinsic(b, f"llvm.trunc.v{WIDTH}f64", kind, x)
        save(zero, total)
        save(load(added), plain)
        with loop(b, depth) as n:
            x, y = factors(n)
            product = b.fmul(x, y)
            save(b.fadd(load(total), cut(b.fmul(product, scale))), total)
            save(b.fadd(load(plain), product), plain)
        exact = b.fdiv(b.fadd(load(total), cut(b.fmul(load(added), scale))), scale)
        magnitude = b.and_(
            b.bitcast(load(plain), wide), ir.Constant(wide, [ir.Constant(I64, (1 << 63) - 1)] * WIDTH)
        )
        finite = b.icmp_unsigned("<", magnitude, exponent)
        save_words = b.store(
            _towards_zero(b, b.select(finite, exact, load(plain))), at(b, result, place, I32)
        )
        save_words.align = 4
    o.done()


def _towards_zero(b: Any, x: Value) -> Value:
    """Return the bits of `floats.cut32`, with the canonical NaN."""
    count = x.type.count
    bits = ir.VectorType(I32, count)
    near = b.fptrunc(x, ir.VectorType(F32, count))
    absolute = lambda y, kind: intrinsic(b, f"llvm.fabs.v{count}f64", kind, y)
    size, limit = absolute(x, x.type), ir.Constant(x.type, [ir.Constant(F64, 2.0**128)] * count)
    far = b.fcmp_ordered(">", absolute(b.fpext(near, x.type), x.type), size)
    far = b.and_(far, b.fcmp_ordered("<", size, limit))
    found = b.sub(b.bitcast(near, bits), b.zext(far, bits))
    return b.select(
        b.fcmp_unordered("uno", x, x), ir.Constant(bits, [ir.Constant(I32, NAN32)] * count), found
    )


_Product = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 5, ctypes.c_int64, ctypes.c_int64)


def product(left: Array, right: Array, c: Array | None) -> Array:
    """Return the bits of left @ right + c in fp32, rounded towards zero.

    Args:
        left, right, c: fp64 [16, k], [k, n], [16, n] with fp32 values; c None: zero.
    """
    left, right = np.ascontiguousarray(left), np.ascontiguousarray(right)
    c = None if c is None else np.ascontiguousarray(c, np.float32)
    found = np.empty((ROWS, right.shape[1]), np.uint32)
    _routine()(
        None, address_of(left), address_of(right), None if c is None else address_of(c), address_of(found),
        right.shape[1], left.shape[1],
    )  # fmt: skip
    return found


@functools.cache
def _routine() -> Any:
    return _Product(engine().function(NAME, build))


# ---- mma


def _elements(b: Any, words: Value, kind: str) -> Value:
    """Convert a register to the fp64 values of its elements, lane by lane."""
    count = 128 // ELEMENT[kind]
    if kind == "tf32":
        mask = ir.Constant(words.type, [ir.Constant(I32, 0xFFFFE000)] * 32)
        real = b.bitcast(b.and_(words, mask), lanes_of(F32))
    elif kind == "bf16":
        real = bf16_values(b, b.bitcast(words, lanes_of(I16, count)))
    else:
        real = b.fpext(b.bitcast(words, lanes_of(F16, count)), lanes_of(F32, count))
    return b.fpext(real, lanes_of(F64, count))


@form("mma")
def _mma(d: Decoder, i: Instruction) -> Form | None:
    shape, d_type, kind = i.modifiers[2], *i.modifiers[5:7]
    if d_type != "f32" or (kind == "f16" and not engine().converts_f16):
        return None
    a_count, b_count = MMA_REGISTERS[shape, kind]
    targets = d.destinations(i.operands[0], "b32")
    sources = [slot for x in i.operands[1:] for slot in d.sources(x, "b32")]
    width = 16 // ELEMENT[kind]  # elements of K that a register holds
    depth = width * b_count

    def multiply(o: Operation) -> None:
        b = o.b
        o.bail_if(b.icmp_unsigned("!=", o.lanes, I32(0xFFFFFFFF)))
        o.bail_if(o.nonzero(o.unknown(*range(4, 4 + len(sources)))))
        left, right = allocate(b, F64, ROWS * depth), allocate(b, F64, WIDTH * depth)
        c, result = allocate(b, F32, ROWS * WIDTH), allocate(b, I32, ROWS * WIDTH)
        for n in range(a_count):
            tile = _elements(b, o.source(4 + n, I32), kind)
            for row in range(8):
                values = picked(b, tile, range(row * width, (row + 1) * width))
                place = (n % 2 * 8 + row) * depth + n // 2 * width
                b.store(values, at(b, left, I64(place), F64), align=8)
        for n in range(b_count):
            tile = _elements(b, o.source(4 + a_count + n, I32), kind)
            for k in range(width):
                values = picked(b, tile, [column * width + k for column in range(8)])
                b.store(values, at(b, right, I64((n * width + k) * WIDTH), F64), align=8)
        for half in range(2):
            first = 4 + a_count + b_count + 2 * half
            both = joined(b, [o.source(first, F32), o.source(first + 1, F32)])
            for row in range(8):
                values = picked(b, both, [e * 32 + row * 4 + quad for quad in range(4) for e in range(2)])
                b.store(values, at(b, c, I64((half * 8 + row) * WIDTH), F32), align=4)
        o.call(NAME, build, left, right, c, result, I64(WIDTH), I64(depth))
        whole = b.load(result, typ=ir.VectorType(I32, ROWS * WIDTH), align=4)
        for n in range(4):
            places = [(n // 2 * 8 + row) * WIDTH + quad * 2 + n % 2 for row in range(8) for quad in range(4)]
            o.put(n, picked(b, whole, places), I32(0))
        o.done()

    return Form(name_of(i), (*targets, *sources), multiply)
