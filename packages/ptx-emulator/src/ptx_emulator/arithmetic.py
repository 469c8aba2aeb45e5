"""Instructions without communication between lanes: arithmetic, logic, comparisons, conversions, moves.

Source: PTX ISA, "Integer Arithmetic Instructions" and the following sections. Where PTX leaves a result open, it is the one of
an H200.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptx_emulator import floats, half
from ptx_emulator.decode import DTYPES, PARAMETERS, WORDS, Decoder, Execute, handler
from ptx_emulator.lanes import BOOLS, FULL, Array, to_bits
from ptx_emulator.machine import Warp
from ptx_emulator.memory import CTA_BITS, LOCAL_WINDOW, SHARED_WINDOW, UNSIGNED, WINDOW_BITS
from ptx_emulator.parser import SIZES, Instruction, Operand, Pair, Sink, Vector

Function = Callable[..., Array]


def elementwise(
    d: Decoder, i: Instruction, function: Function, kind: str, result: str = "", kinds: tuple[str, ...] = ()
) -> Execute:
    """Build an instruction that applies ``function`` to each lane.

    Args:
        function: takes arrays of 32 source values, returns 32 results.
        kind: PTX type of the sources.
        result: PTX type of the destination; default: ``kind``.
        kinds: PTX type of each source, if they differ.
    """
    kinds = kinds or (kind,) * (len(i.operands) - 1)
    result = result or kind
    if len(i.operands) != 1 + len(kinds):
        d.refuse(f"expected {1 + len(kinds)} operands, got {len(i.operands)}")
    to = d.destination(i.operands[0], result)
    sources = [d.source(x, k) for x, k in zip(i.operands[1:], kinds)]
    types = [DTYPES[k] for k in kinds]
    out = UNSIGNED[SIZES[result]]
    if len(sources) == 1:
        (a,), (ta,) = sources, types

        def unary(w: Warp, lanes: int) -> None:
            w.put(to, function(w.regs[a].view(ta)).view(out), w.unknown[a], lanes)

        return unary
    if len(sources) == 2:
        (a, b), (ta, tb) = sources, types

        def binary(w: Warp, lanes: int) -> None:
            r, u = w.regs, w.unknown
            w.put(to, function(r[a].view(ta), r[b].view(tb)).view(out), u[a] | u[b], lanes)

        return binary
    if len(sources) != 3:
        d.refuse(f"expected up to 3 sources, got {len(sources)}")
    (a, b, c), (ta, tb, tc) = sources, types

    def ternary(w: Warp, lanes: int) -> None:
        r, u = w.regs, w.unknown
        w.put(to, function(r[a].view(ta), r[b].view(tb), r[c].view(tc)).view(out), u[a] | u[b] | u[c], lanes)

    return ternary


def fp32(function: Function, ftz: bool) -> Function:
    """Wrap a function of fp32: canonical NaN; with ``ftz`` subnormal sources and results become zero."""
    if ftz:
        return lambda *x: floats.canonical(floats.flush(function(*map(floats.flush, x))))
    return lambda *x: floats.canonical(function(*x))


def _fp(d: Decoder, i: Instruction, function: Function, *more: str) -> Execute:
    """Build a rounded fp32 or fp64 instruction. ``more``: further modifiers of fp32 (`.sat`)."""
    kind = i.modifiers[-1]
    directed = [m for m in i.modifiers if m in ("rz", "rm", "rp")]
    if directed and kind == "f32" and i.opcode in ("add", "sub", "mul", "fma"):
        function, more = floats.directed(i.opcode, directed[0]), (*more, directed[0])
    d.only(i.modifiers[:-1], "rn", "ftz", *more)
    if kind == "f64":
        d.only(i.modifiers[:-1], "rn")
        return elementwise(d, i, function, kind)
    if kind != "f32":
        d.refuse(f".{kind} is not modelled")
    result = fp32(function, "ftz" in i.modifiers)
    if "sat" in i.modifiers:
        return elementwise(d, i, lambda *x: saturated(result(*x)), kind)
    return elementwise(d, i, result, kind)


def saturated(x: Array) -> Array:
    """Clamp to [0, 1]. NaN and -0 become +0."""
    return np.where(x > 0, np.minimum(x, np.float32(1)), np.float32(0))


# ---- integers and floats

_SIMPLE: dict[str, Function] = {"add": np.add, "sub": np.subtract}


@handler("add", "sub")
def _add(d: Decoder, i: Instruction) -> Execute:
    kind = i.modifiers[-1]
    if kind in ("f32", "f64"):
        return _fp(d, i, _SIMPLE[i.opcode], "sat")
    if (found := half.mixed(i.opcode, i.modifiers)) is not None:
        return elementwise(d, i, found[0], "f32", kinds=found[1])
    if kind in half.REGISTERS:
        return _half(d, i)
    d.only(i.modifiers, "u16", "s16", "u32", "s32", "u64", "s64")
    return elementwise(d, i, _SIMPLE[i.opcode], kind.replace("s", "u"))


def _high(a: Array, b: Array) -> Array:
    """Return the upper half of the product of integers."""
    bits = 8 * a.dtype.itemsize
    return np.array([int(x) * int(y) >> bits for x, y in zip(a, b)], dtype=object).astype(a.dtype)


@handler("mul")
def _mul(d: Decoder, i: Instruction) -> Execute:
    kind = i.modifiers[-1]
    if kind in ("f32", "f64"):
        return _fp(d, i, np.multiply, "sat")
    if kind in half.REGISTERS:
        return _half(d, i)
    d.only(i.modifiers[1:], "u16", "s16", "u32", "s32", "u64", "s64")
    if i.modifiers[0] == "lo":
        return elementwise(d, i, np.multiply, kind.replace("s", "u"))
    if i.modifiers[0] == "wide":
        wide = f"{kind[0]}{2 * int(kind[1:])}"
        return elementwise(d, i, lambda a, b: a.astype(DTYPES[wide]) * b, wide, kinds=(kind, kind))
    d.only(i.modifiers[:1], "hi")
    return elementwise(d, i, _high, kind)


@handler("mad")
def _mad(d: Decoder, i: Instruction) -> Execute:
    kind = i.modifiers[-1]
    d.only(i.modifiers[1:], "u16", "s16", "u32", "s32", "u64", "s64")
    if i.modifiers[0] == "lo":
        return elementwise(d, i, lambda a, b, c: a * b + c, kind.replace("s", "u"))
    if i.modifiers[0] == "wide":
        wide = f"{kind[0]}{2 * int(kind[1:])}"
        return elementwise(
            d, i, lambda a, b, c: a.astype(DTYPES[wide]) * b + c, wide, kinds=(kind, kind, wide)
        )
    d.only(i.modifiers[:1], "hi")
    return elementwise(d, i, lambda a, b, c: _high(a, b) + c, kind)


@handler("fma")
def _fma(d: Decoder, i: Instruction) -> Execute:
    if (found := half.mixed(i.opcode, i.modifiers)) is not None:
        return elementwise(d, i, found[0], "f32", kinds=found[1])
    if i.modifiers[-1] in half.REGISTERS:
        return _half(d, i)
    if i.modifiers[-1] != "f32" or not {"rn", "rz", "rm", "rp"} & {*i.modifiers}:
        d.refuse("only fma of fp32 with a rounding is modelled")
    return _fp(d, i, floats.fma32, "sat")


def _half(d: Decoder, i: Instruction) -> Execute:
    """Build an instruction of a type of `half.REGISTERS`."""
    return elementwise(d, i, half.operation(i.opcode, i.modifiers), half.REGISTERS[i.modifiers[-1]])


def _divide(a: Array, b: Array) -> Array:
    """Divide integers, truncating. PTX leaves division by zero open; the device returns all ones."""
    one = np.where(b == 0, 1, b).astype(a.dtype)
    if a.dtype.kind == "u":
        return np.where(b == 0, ~a.dtype.type(0), a // one)
    quotient = (np.abs(a.astype(np.longdouble)) // np.abs(one.astype(np.longdouble))).astype(a.dtype)
    return np.where(b == 0, a.dtype.type(-1), np.where((a < 0) != (one < 0), -quotient, quotient))


def _remainder(a: Array, b: Array) -> Array:
    """Remainder of integers. PTX leaves division by zero open; the device returns all ones."""
    return np.where(b == 0, np.array(-1).astype(a.dtype), a - _divide(a, b) * b)


@handler("div", "rem")
def _div(d: Decoder, i: Instruction) -> Execute:
    kind = i.modifiers[-1]
    if kind in ("f32", "f64"):
        if i.opcode == "rem" or "rn" not in i.modifiers:
            d.refuse("of floating-point division only div.rn is modelled")
        return _fp(d, i, np.divide)
    d.only(i.modifiers, "u16", "s16", "u32", "s32", "u64", "s64")
    if i.opcode == "div":
        return elementwise(d, i, _divide, kind)
    return elementwise(d, i, _remainder, kind)


@handler("min", "max")
def _min(d: Decoder, i: Instruction) -> Execute:
    kind = i.modifiers[-1]
    if kind in ("f32", "f64"):
        function = half.extreme(np.fmin if i.opcode == "min" else np.fmax, "NaN" in i.modifiers)
        return _fp(d, i, function, "NaN")
    if kind in half.REGISTERS:
        return _half(d, i)
    function = np.minimum if i.opcode == "min" else np.maximum
    if i.modifiers == ("relu", "s32"):
        return elementwise(d, i, lambda a, b: np.maximum(function(a, b), np.int32(0)), kind)
    d.only(i.modifiers, "u16", "s16", "u32", "s32", "u64", "s64")
    return elementwise(d, i, function, kind)


@handler("neg", "abs")
def _neg(d: Decoder, i: Instruction) -> Execute:
    kind = i.modifiers[-1]
    if kind in ("f32", "f64"):
        d.only(i.modifiers[:-1], "ftz")
        # Only the sign bit changes. An fp32 NaN becomes the canonical one.
        sign = np.uint32(1 << 31) if kind == "f32" else np.uint64(1 << 63)
        bits = np.bitwise_xor if i.opcode == "neg" else lambda x, s: x & ~s
        unsigned, real = UNSIGNED[SIZES[kind]], DTYPES[kind]
        ftz = "ftz" in i.modifiers

        def apply(x: Array) -> Array:
            y = bits(x.view(unsigned), sign).view(real)
            y = floats.canonical(y) if kind == "f32" else y
            return floats.flush(y) if ftz else y

        return elementwise(d, i, apply, kind)
    if kind in half.REGISTERS:
        return _half(d, i)
    d.only(i.modifiers, "s16", "s32", "s64")
    return elementwise(d, i, np.negative if i.opcode == "neg" else np.abs, kind)


_APPROXIMATE: dict[str, Function] = {
    "ex2": floats.exp2,
    "lg2": np.log2,
    "rcp": lambda x: 1 / x,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
}


@handler(*_APPROXIMATE)
def _approximate(d: Decoder, i: Instruction) -> Execute:
    function = _APPROXIMATE[i.opcode]
    if i.modifiers[-1] != "f32":
        d.refuse(f".{i.modifiers[-1]} is not modelled")
    d.only(i.modifiers[:-1], "approx", "ftz", *(("rn",) if i.opcode in ("rcp", "sqrt") else ()))
    return elementwise(d, i, fp32(lambda x: floats.approximated(function, x), "ftz" in i.modifiers), "f32")


# ---- bits


@handler("and", "or", "xor", "not")
def _logic(d: Decoder, i: Instruction) -> Execute:
    (kind,) = i.modifiers
    if kind != "pred":
        d.only(i.modifiers, "b16", "b32", "b64")
        names = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.bitwise_not}
        return elementwise(d, i, names[i.opcode], kind)
    to = d.destination(i.operands[0], "pred")
    a, a_negated = d.predicate(i.operands[1])
    b, b_negated = d.predicate(i.operands[-1])
    opcode = i.opcode

    def logic(w: Warp, lanes: int) -> None:
        x, y = w.regs[a] ^ (FULL * a_negated), w.regs[b] ^ (FULL * b_negated)
        value = (
            x & y if opcode == "and" else x | y if opcode == "or" else x ^ y if opcode == "xor" else ~x & FULL
        )
        unknown = w.unknown[a] | w.unknown[b]
        if opcode == "and":  # a known operand that decides the result alone makes it known
            unknown &= ~(~w.unknown[a] & ~x | ~w.unknown[b] & ~y)
        elif opcode == "or":
            unknown &= ~(~w.unknown[a] & x | ~w.unknown[b] & y)
        w.put_predicate(to, value, unknown, lanes)

    return logic


def _shl(a: Array, n: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    return np.where(n < bits, a << np.minimum(n, bits - 1).astype(a.dtype), a.dtype.type(0))


def _shr(a: Array, n: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    shifted = a >> np.minimum(n, bits - 1).astype(a.dtype)
    return shifted if a.dtype.kind == "i" else np.where(n < bits, shifted, a.dtype.type(0))


@handler("shl", "shr")
def _shift(d: Decoder, i: Instruction) -> Execute:
    kind = i.modifiers[-1]
    allowed = (
        ("b16", "b32", "b64")
        if i.opcode == "shl"
        else ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64")
    )
    d.only(i.modifiers, *allowed)
    return elementwise(d, i, _shl if i.opcode == "shl" else _shr, kind, kinds=(kind, "u32"))


@handler("popc", "clz", "brev")
def _count(d: Decoder, i: Instruction) -> Execute:
    d.only(i.modifiers, "b32", "b64")
    kind = i.modifiers[0]
    size = SIZES[kind]

    def bits(x: Array) -> Array:
        return np.unpackbits(x.view(np.uint8).reshape(-1, size), axis=1, bitorder="little")

    if i.opcode == "popc":
        return elementwise(d, i, lambda x: bits(x).sum(1).astype(np.uint32), kind, "u32", (kind,))
    if i.opcode == "clz":
        return elementwise(
            d, i, lambda x: (bits(x)[:, ::-1].cumsum(1) == 0).sum(1).astype(np.uint32), kind, "u32", (kind,)
        )
    return elementwise(
        d, i, lambda x: np.packbits(bits(x)[:, ::-1], axis=1, bitorder="little").view(x.dtype)[:, 0], kind
    )


@handler("bfe")
def _bfe(d: Decoder, i: Instruction) -> Execute:
    d.only(i.modifiers, "u32", "s32", "u64", "s64")
    kind = i.modifiers[0]
    bits = 8 * SIZES[kind]

    def extract(a: Array, start: Array, count: Array) -> Array:
        found = []
        for x, b, n in zip(a.tolist(), (start & 255).tolist(), (count & 255).tolist()):
            field = (x >> min(b, bits)) & ((1 << n) - 1)
            sign = x >> min(b + n - 1, bits - 1) & 1 if n and kind[0] == "s" else 0
            kept = min(n, max(bits - b, 0))
            field &= (1 << kept) - 1
            found.append(field | -sign << kept if sign else field)
        return np.array([x & (1 << bits) - 1 for x in found], UNSIGNED[bits // 8])

    return elementwise(d, i, extract, kind, kinds=(kind, "u32", "u32"))


@handler("prmt")
def _prmt(d: Decoder, i: Instruction) -> Execute:
    d.only(i.modifiers, "b32")

    def permute(a: Array, b: Array, selector: Array) -> Array:
        source = np.stack([a, b], 1).view(np.uint8)
        picks = selector[:, None] >> (4 * np.arange(4, dtype=np.uint32))
        found = np.take_along_axis(source, (picks & 7).astype(np.int64), 1)
        found = np.where(picks & 8, np.where(found & 128, 255, 0), found).astype(np.uint8)
        return np.ascontiguousarray(found).view(np.uint32)[:, 0]

    return elementwise(d, i, permute, "b32")


@handler("lop3")
def _lop3(d: Decoder, i: Instruction) -> Execute:
    d.only(i.modifiers, "b32")
    table = d.immediate(i.operands[4])

    def lookup(a: Array, b: Array, c: Array) -> Array:
        total = np.zeros_like(a)
        for n in range(8):
            if table >> n & 1:
                total |= (a if n & 4 else ~a) & (b if n & 2 else ~b) & (c if n & 1 else ~c)
        return total

    return elementwise(d, i.replaced(i.operands[:4]), lookup, "b32")


@handler("shf")
def _shf(d: Decoder, i: Instruction) -> Execute:
    left = i.modifiers[0] == "l"
    d.only(i.modifiers, "l", "r", "wrap", "clamp", "b32")

    def funnel(low: Array, high: Array, n: Array) -> Array:
        n = (n & 31 if "wrap" in i.modifiers else np.minimum(n, 32)).astype(np.uint64)
        both = high.astype(np.uint64) << np.uint64(32) | low
        found = both << n >> np.uint64(32) if left else both >> n
        return (found & np.uint64(0xFFFFFFFF)).astype(np.uint32)

    return elementwise(d, i, funnel, "b32")


# ---- comparisons and choices

_COMPARE: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def _comparison(d: Decoder, name: str, kind: str) -> Function:
    if kind[0] == "f":
        if name == "ne":  # an ordered comparison: false if there is a NaN
            return lambda a, b: (a < b) | (a > b)
        if name in ("num", "nan"):
            return lambda a, b: (np.isnan(a) | np.isnan(b)) == (name == "nan")
        if name.endswith("u") and name[:-1] in _COMPARE:
            inner = _COMPARE[name[:-1]]
            return lambda a, b: inner(a, b) | np.isnan(a) | np.isnan(b)
    if name not in _COMPARE:
        d.refuse(f".{name} is not modelled")
    return _COMPARE[name]


@handler("setp")
def _setp(d: Decoder, i: Instruction) -> Execute:
    kind = i.modifiers[-1]
    if kind != "bf16" and (kind not in DTYPES or SIZES[kind] < 2):
        d.refuse(f".{kind} is not modelled")
    compare = _comparison(d, i.modifiers[0], kind)
    combine = next((x for x in i.modifiers[1:-1] if x in ("and", "or", "xor")), None)
    d.only(i.modifiers[1:-1], "and", "or", "xor", *(("ftz",) if kind == "f32" else ()))
    first: Operand = i.operands[0]
    second: Operand = Sink()
    if isinstance(first, Pair):
        second, first = first.second, first.first
    to = d.destination(first, "pred")
    other = None if isinstance(second, Sink) else d.destination(second, "pred")
    a, b = d.source(i.operands[1], kind), d.source(i.operands[2], kind)
    c, negated = d.predicate(i.operands[3]) if combine else (0, False)
    dtype = DTYPES["u16" if kind == "bf16" else kind]
    ftz = "ftz" in i.modifiers

    def compared(w: Warp, lanes: int) -> None:
        x, y = w.regs[a].view(dtype), w.regs[b].view(dtype)
        if kind == "bf16":
            x, y = floats.bf16_values(x), floats.bf16_values(y)
        if ftz:
            x, y = floats.flush(x), floats.flush(y)
        value = to_bits(compare(x, y))
        unknown = w.unknown[a] | w.unknown[b]
        opposite = ~value & FULL
        if combine:
            z = w.regs[c] ^ (FULL * negated)
            unknown |= w.unknown[c]
            value, opposite = (
                (x & z if combine == "and" else x | z if combine == "or" else x ^ z)
                for x in (value, opposite)
            )
        w.put_predicate(to, value, unknown, lanes)
        if other is not None:
            w.put_predicate(other, opposite, unknown, lanes)

    return compared


@handler("selp")
def _selp(d: Decoder, i: Instruction) -> Execute:
    (kind,) = i.modifiers
    to = d.destination(i.operands[0], kind)
    a, b = d.source(i.operands[1], kind), d.source(i.operands[2], kind)
    p, negated = d.predicate(i.operands[3])

    def select(w: Warp, lanes: int) -> None:
        flags = w.regs[p] ^ (FULL * negated)
        r, u = w.regs, w.unknown
        w.put(to, np.where(BOOLS[flags], r[a], r[b]), u[p] | u[a] & flags | u[b] & ~flags, lanes)

    return select


# ---- moves and conversions


@handler("mov")
def _mov(d: Decoder, i: Instruction) -> Execute:
    (kind,) = i.modifiers
    to, source = i.operands
    if kind == "pred":
        t = d.destination(to, "pred")
        p, negated = d.predicate(source)

        def predicate(w: Warp, lanes: int) -> None:
            w.put_predicate(t, w.regs[p] ^ (FULL * negated), w.unknown[p], lanes)

        return predicate
    size = SIZES[kind]
    for operand in (source, to):
        if isinstance(operand, Vector) and size not in (n * len(operand.elements) for n in UNSIGNED):
            d.refuse(f"mov.{kind}: {len(operand.elements)} elements do not fill it")
    if isinstance(source, Vector):
        part = size // len(source.elements)
        parts = d.sources(source, f"b{8 * part}")
        t = d.destination(to, kind)

        def pack(w: Warp, lanes: int) -> None:
            value = np.stack([w.regs[x] for x in parts], 1).view(WORDS[size])[:, 0]
            w.put_bytes(t, value, [lane for x in parts for lane in w.unknown_bytes(x)], lanes)

        return pack
    if isinstance(to, Vector):
        part = size // len(to.elements)
        s = d.source(source, kind)
        targets = [None if isinstance(x, Sink) else d.destination(x, f"b{8 * part}") for x in to.elements]

        def unpack(w: Warp, lanes: int) -> None:
            values = np.ascontiguousarray(w.regs[s]).view(UNSIGNED[part]).reshape(32, -1)
            unknown = w.unknown_bytes(s)
            for n, x in enumerate(targets):
                if x is not None:
                    mine = unknown[n * part : (n + 1) * part]
                    w.put_bytes(x, np.ascontiguousarray(values[:, n]), mine, lanes)

        return unpack
    s, t = d.source(source, kind), d.destination(to, kind)

    def move(w: Warp, lanes: int) -> None:
        w.put_bytes(t, w.regs[s], w.unknown_bytes(s), lanes)

    return move


#: Generic address of the first byte of each state space. Those of global memory are the host's.
GENERIC = {
    "global": 0,
    "param": PARAMETERS,
    "local": LOCAL_WINDOW << WINDOW_BITS,
    "shared": SHARED_WINDOW << WINDOW_BITS,
}


@handler("cvta")
def _cvta(d: Decoder, i: Instruction) -> Execute:
    """`cvta`: convert addresses of a state space to generic ones, or back with `.to`."""
    back = i.modifiers[0] == "to"
    space = i.modifiers[back].partition("::")[0]
    if space not in GENERIC or i.modifiers[-1] != "u64" or len(i.modifiers) != 2 + back:
        d.refuse("this form of cvta is not modelled")
    t, s = d.destination(i.operands[0], "u64"), d.source(i.operands[1], "u64")
    base = np.uint64(-GENERIC[space] & (1 << 64) - 1 if back else GENERIC[space])
    return lambda w, lanes: w.put(t, w.regs[s] + base, w.unknown[s], lanes)


@handler("isspacep")
def _isspacep(d: Decoder, i: Instruction) -> Execute:
    (space,) = i.modifiers
    name = space.partition("::")[0]
    if name not in GENERIC:
        d.refuse(f".{space} is not modelled")
    to, s = d.destination(i.operands[0], "pred"), d.source(i.operands[1], "u64")
    window, bits = np.uint64(GENERIC[name] >> WINDOW_BITS), np.uint64(WINDOW_BITS)

    def check(w: Warp, lanes: int) -> None:
        found = w.regs[s] >> bits == window
        if space in ("shared", "shared::cta"):
            rank = (w.regs[s] & np.uint64((1 << WINDOW_BITS) - 1)) >> np.uint64(CTA_BITS)
            found &= rank == w.cta.rank
        w.put_predicate(to, to_bits(found), w.unknown[s], lanes)

    return check
