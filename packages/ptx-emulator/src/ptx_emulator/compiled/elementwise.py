"""Forms of the instructions of `ptx_emulator.arithmetic`. fp64, and rare instructions, stay with their closures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from ptx_emulator.arithmetic import GENERIC
from ptx_emulator.compiled import floating
from ptx_emulator.compiled.emit import (
    F16,
    F32,
    F64,
    I1,
    I16,
    I32,
    I64,
    I128,
    INTEGERS,
    Operation,
    Value,
    constant,
    intrinsic,
    joined,
    lanes_of,
    picked,
    suffix,
)
from ptx_emulator.compiled.engine import engine
from ptx_emulator.compiled.forms import Form, form, name_of
from ptx_emulator.compiled.layout import PACKED
from ptx_emulator.decode import Decoder
from ptx_emulator.parser import SIZES, Instruction, Operand, Pair, Register, Sink, Vector

Function = Callable[..., Value]

ALL = 0xFFFFFFFF


def element_of(kind: str) -> Any:
    """Return the LLVM type of a PTX type: an integer, except for fp32."""
    return F32 if kind == "f32" else INTEGERS[SIZES[kind]]


def elementwise(
    d: Decoder, i: Instruction, function: Function, kind: str, result: str = "", kinds: tuple[str, ...] = (),
    operands: tuple[Operand, ...] = (), tag: object = "",
) -> Form:  # fmt: skip
    """Make the form of an instruction that applies ``function`` to each lane, as `arithmetic.elementwise`.

    Args:
        function: takes the builder and vectors of the sources, returns a vector.
        operands: the destination and the sources, if they are not those of the instruction.
        tag: what distinguishes the function besides the instruction's name.
    """
    operands = operands or i.operands
    kinds, result = kinds or (kind,) * (len(operands) - 1), result or kind
    slots = [d.destination(operands[0], result), *(d.source(x, k) for x, k in zip(operands[1:], kinds))]

    def build(o: Operation) -> None:
        sources = range(1, len(slots))
        found = function(o.b, *(o.source(n, element_of(k)) for n, k in zip(sources, kinds)))
        o.put(0, o.b.bitcast(found, lanes_of(INTEGERS[SIZES[result]])), o.unknown(*sources))
        o.done()

    return Form(name_of(i, tag), tuple(slots), build)


def _real(i: Instruction, function: Function) -> Function:
    """Wrap a function of fp32 as `arithmetic._fp` does."""

    def rounded(b: Any, *x: Value) -> Value:
        ftz = "ftz" in i.modifiers
        found = function(b, *(floating.flush(b, y) if ftz else y for y in x))
        found = floating.flush(b, found) if ftz else found
        found = floating.canonical(b, found)
        return floating.saturated(b, found) if "sat" in i.modifiers else found

    return rounded


#: Types of integers that have arithmetic.
WHOLE = ("u16", "s16", "u32", "s32", "u64", "s64")


def _fp32(i: Instruction, *more: str) -> bool:
    """Return whether an instruction is one of fp32 and has only these modifiers, `.rn` and `.ftz`."""
    return i.modifiers[-1] == "f32" and {*i.modifiers[:-1]} <= {"rn", "ftz", *more}


def _signed(kind: str) -> bool:
    return kind[0] == "s"


# ---- integers and floats


def _bf16(d: Decoder, i: Instruction) -> Form | None:
    """Return the form of an instruction of bf16, one number or a pair in a register, as `half.operation`; None: it is none."""
    *how, kind = i.modifiers
    if kind not in ("bf16", "bf16x2") or {*how} - {"rn"}:
        return None

    def single(b: Any, *x: Value) -> Value:
        wide = [b.fpext(floating.bf16_values(b, y), lanes_of(F64)) for y in x]
        return floating.bf16_bits_of(
            b, floating.odd_fma(b, *wide) if i.opcode == "fma" else getattr(b, f"f{i.opcode}")(*wide)
        )

    def pair(b: Any, *x: Value) -> Value:
        halves = [[b.trunc(b.lshr(y, constant(y, n)), lanes_of(I16)) for y in x] for n in (16, 0)]
        high, low = (single(b, *half) for half in halves)
        return b.or_(b.shl(high, constant(high, 16)), low)

    if kind == "bf16x2":
        return elementwise(d, i, pair, "b32")
    return elementwise(d, i, lambda b, *x: b.trunc(single(b, *x), lanes_of(I16)), "b16")


@form("add", "sub")
def _add(d: Decoder, i: Instruction) -> Form | None:
    if (found := _bf16(d, i)) is not None:
        return found
    kind, name = i.modifiers[-1], i.opcode
    if not _fp32(i, "sat") and i.modifiers != (kind,):
        return None
    if kind == "f32":
        return elementwise(d, i, _real(i, lambda b, x, y: getattr(b, f"f{name}")(x, y)), kind)
    return elementwise(d, i, lambda b, x, y: getattr(b, name)(x, y), kind) if kind in WHOLE else None


def _widened(b: Any, x: Value, kind: str, factor: int = 2) -> Value:
    wide = lanes_of(ir.IntType(8 * factor * SIZES[kind]))
    return b.sext(x, wide) if _signed(kind) else b.zext(x, wide)


def _product(kind: str, part: str) -> Function:
    """Return the function of `mul`: the lower or upper half, or all of it."""

    def multiply(b: Any, x: Value, y: Value) -> Value:
        if part == "lo":
            return b.mul(x, y)
        wide = b.mul(_widened(b, x, kind), _widened(b, y, kind))
        return wide if part == "wide" else b.trunc(b.lshr(wide, constant(wide, 8 * SIZES[kind])), x.type)

    return multiply


def _result_of(i: Instruction) -> str:
    kind = i.modifiers[-1]
    return f"{kind[0]}{2 * int(kind[1:])}" if i.modifiers[0] == "wide" else kind


@form("mul")
def _mul(d: Decoder, i: Instruction) -> Form | None:
    if (found := _bf16(d, i)) is not None:
        return found
    kind = i.modifiers[-1]
    if _fp32(i, "sat"):
        return elementwise(d, i, _real(i, lambda b, x, y: b.fmul(x, y)), kind)
    if kind not in WHOLE:
        return None
    return elementwise(d, i, _product(kind, i.modifiers[0]), kind, _result_of(i), (kind, kind))


@form("mad")
def _mad(d: Decoder, i: Instruction) -> Form | None:
    kind = i.modifiers[-1]
    if kind not in WHOLE:
        return None
    result = _result_of(i)
    multiply = _product(kind, i.modifiers[0])
    return elementwise(
        d, i, lambda b, x, y, z: b.add(multiply(b, x, y), z), kind, result, (kind, kind, result)
    )


@form("fma")
def _fma(d: Decoder, i: Instruction) -> Form | None:
    if not _fp32(i, "sat"):
        return _bf16(d, i)
    fused = lambda b, x, y, z: intrinsic(b, f"llvm.fma.{suffix(x)}", x.type, x, y, z)
    return elementwise(d, i, _real(i, fused), "f32")


@form("div", "rem")
def _div(d: Decoder, i: Instruction) -> Form | None:
    kind = i.modifiers[-1]
    if _fp32(i):
        return elementwise(d, i, _real(i, lambda b, x, y: b.fdiv(x, y)), kind)
    if kind not in ("u32", "s32"):
        return None

    def divide(b: Any, x: Value, y: Value) -> Value:
        zero = b.icmp_unsigned("==", y, constant(y, 0))
        wide_x = _widened(b, x, kind)
        wide_y = _widened(b, b.select(zero, constant(y, 1), y), kind)
        names = {"divu": b.udiv, "divs": b.sdiv, "remu": b.urem, "rems": b.srem}
        found = b.trunc(names[i.opcode + kind[0]](wide_x, wide_y), x.type)
        return b.select(zero, constant(x, -1), found)

    return elementwise(d, i, divide, kind)


@form("min", "max")
def _min(d: Decoder, i: Instruction) -> Form | None:
    kind, largest = i.modifiers[-1], i.opcode == "max"
    if kind not in WHOLE and (not _fp32(i) or len(i.operands) != 3):
        return None
    if kind == "f32":
        return elementwise(d, i, _real(i, lambda b, x, y: floating.extreme(b, x, y, largest)), kind)

    def choose(b: Any, x: Value, y: Value, largest: bool = largest) -> Value:
        compare = b.icmp_signed if _signed(kind) else b.icmp_unsigned
        return b.select(compare(">" if largest else "<", x, y), x, y)

    if "relu" in i.modifiers:
        return elementwise(d, i, lambda b, x, y: choose(b, choose(b, x, y), constant(x, 0), True), kind)
    return elementwise(d, i, choose, kind)


@form("neg", "abs")
def _neg(d: Decoder, i: Instruction) -> Form | None:
    kind, negate = i.modifiers[-1], i.opcode == "neg"
    if kind not in (*WHOLE, "f32"):
        return None
    if kind != "f32":
        below = lambda b, x: b.icmp_signed("<", x, constant(x, 0))
        minus = lambda b, x: b.sub(constant(x, 0), x)
        return elementwise(
            d, i, lambda b, x: minus(b, x) if negate else b.select(below(b, x), minus(b, x), x), kind
        )

    def apply(b: Any, x: Value) -> Value:
        bits = floating.bits_of(b, x)
        bits = b.xor(bits, constant(bits, 1 << 31)) if negate else b.and_(bits, constant(bits, (1 << 31) - 1))
        found = floating.canonical(b, floating.real_of(b, bits))
        return floating.flush(b, found) if "ftz" in i.modifiers else found

    return elementwise(d, i, apply, kind)


@form("ex2", "rcp", "rsqrt", "sqrt")
def _approximate(d: Decoder, i: Instruction) -> Form | None:
    if not _fp32(i, "approx"):
        return None

    def apply(b: Any, x: Value) -> Value:
        wide = b.fpext(x, lanes_of(F64))
        if i.opcode == "ex2":
            wide = floating.exp2(b, wide)
        if "sqrt" in i.opcode:
            wide = intrinsic(b, f"llvm.sqrt.{suffix(wide)}", wide.type, wide)
        if i.opcode[0] == "r":
            wide = b.fdiv(constant(wide, 1.0), wide)
        return floating.canonical(b, b.fptrunc(wide, x.type))

    return elementwise(d, i, _real(i, apply), "f32")


# ---- bits


@form("and", "or", "xor", "not")
def _logic(d: Decoder, i: Instruction) -> Form | None:
    (kind,) = i.modifiers
    opcode = i.opcode
    names = {"and": "and_", "or": "or_", "xor": "xor"}

    def combine(b: Any, x: Value, *y: Value) -> Value:
        return b.not_(x) if opcode == "not" else getattr(b, names[opcode])(x, *y)

    if kind != "pred":
        return elementwise(d, i, combine, kind)
    to = d.destination(i.operands[0], "pred")
    (p, p_negated), (q, q_negated) = d.predicate(i.operands[1]), d.predicate(i.operands[-1])

    def build(o: Operation) -> None:
        b = o.b
        x, y = o.predicate(1), o.predicate(2)
        x, y = b.not_(x) if p_negated else x, b.not_(y) if q_negated else y
        x_known, y_known = b.not_(o.unknown(1)), b.not_(o.unknown(2))
        unknown = o.unknown(1, 2)
        if opcode in ("and", "or"):  # a known operand that decides the result alone makes it known
            decides = b.not_ if opcode == "and" else lambda v: v
            decided = b.or_(b.and_(x_known, decides(x)), b.and_(y_known, decides(y)))
            unknown = b.and_(unknown, b.not_(decided))
        o.put(0, combine(b, x) if opcode == "not" else combine(b, x, y), unknown)
        o.done()

    return Form(name_of(i, p_negated, q_negated), (to, p, q), build)


@form("shl", "shr")
def _shift(d: Decoder, i: Instruction) -> Form | None:
    kind, left = i.modifiers[-1], i.opcode == "shl"

    def shift(b: Any, x: Value, n: Value) -> Value:
        bits = 8 * SIZES[kind]
        late = b.icmp_unsigned(">=", n, constant(n, bits))
        n = b.select(late, constant(n, bits - 1), n)
        n = b.trunc(n, x.type) if bits < 32 else b.zext(n, x.type) if bits > 32 else n
        if not left and _signed(kind):
            return b.ashr(x, n)
        return b.select(late, constant(x, 0), b.shl(x, n) if left else b.lshr(x, n))

    return elementwise(d, i, shift, kind, kinds=(kind, "u32"))


@form("popc", "clz", "brev")
def _count(d: Decoder, i: Instruction) -> Form | None:
    (kind,) = i.modifiers
    if i.opcode == "brev":
        return elementwise(d, i, lambda b, x: intrinsic(b, f"llvm.bitreverse.{suffix(x)}", x.type, x), kind)

    def count(b: Any, x: Value) -> Value:
        if i.opcode == "popc":
            found = intrinsic(b, f"llvm.ctpop.{suffix(x)}", x.type, x)
        else:
            found = intrinsic(b, f"llvm.ctlz.{suffix(x)}", x.type, x, I1(0))
        return b.trunc(found, lanes_of(I32)) if kind == "b64" else found

    return elementwise(d, i, count, kind, "u32", (kind,))


@form("bfe")
def _bfe(d: Decoder, i: Instruction) -> Form | None:
    (kind,) = i.modifiers

    def extract(b: Any, x: Value, start: Value, count: Value) -> Value:
        # A wider integer holds the sign extension behind the top bit.
        wide = lanes_of(I128 if SIZES[kind] == 8 else I64)
        bits = 8 * SIZES[kind]
        resize = lambda n: b.zext(b.and_(n, constant(n, 255)), wide)
        first, count = resize(start), resize(count)
        least = lambda n: b.select(b.icmp_unsigned("<", n, constant(n, bits)), n, constant(n, bits))
        y = b.sext(x, wide) if _signed(kind) else b.zext(x, wide)
        y = b.ashr(y, least(first))
        unused = b.sub(constant(count, 2 * bits), least(count))
        y = b.shl(y, unused)
        empty = b.icmp_unsigned("==", count, constant(count, 0))
        y = b.ashr(y, unused) if _signed(kind) else b.lshr(y, unused)
        return b.trunc(b.select(empty, constant(y, 0), y), x.type)

    return elementwise(d, i, extract, kind, kinds=(kind, "u32", "u32"))


@form("prmt")
def _prmt(d: Decoder, i: Instruction) -> Form | None:
    def permute(b: Any, x: Value, y: Value, selector: Value) -> Value:
        wide = lanes_of(I64)
        both = b.or_(b.shl(b.zext(y, wide), constant(b.zext(y, wide), 32)), b.zext(x, wide))
        found = constant(x, 0)
        for n in range(4):
            pick = b.lshr(selector, constant(selector, 4 * n))
            place = b.zext(b.shl(b.and_(pick, constant(pick, 7)), constant(pick, 3)), wide)
            byte = b.and_(b.trunc(b.lshr(both, place), x.type), constant(x, 255))
            top = b.icmp_unsigned("!=", b.and_(byte, constant(byte, 128)), constant(byte, 0))
            sign = b.select(top, constant(byte, 255), constant(byte, 0))
            signs = b.icmp_unsigned("!=", b.and_(pick, constant(pick, 8)), constant(pick, 0))
            found = b.or_(found, b.shl(b.select(signs, sign, byte), constant(byte, 8 * n)))
        return found

    return elementwise(d, i, permute, "b32")


@form("lop3")
def _lop3(d: Decoder, i: Instruction) -> Form | None:
    table = d.immediate(i.operands[4])

    def lookup(b: Any, x: Value, y: Value, z: Value) -> Value:
        total = constant(x, 0)
        for n in range(8):
            if table >> n & 1:
                x_, y_, z_ = (v if n & bit else b.not_(v) for v, bit in ((x, 4), (y, 2), (z, 1)))
                total = b.or_(total, b.and_(b.and_(x_, y_), z_))
        return total

    return elementwise(d, i, lookup, "b32", operands=i.operands[:4], tag=table)


@form("shf")
def _shf(d: Decoder, i: Instruction) -> Form | None:
    def funnel(b: Any, low: Value, high: Value, n: Value) -> Value:
        wide = lanes_of(I64)
        if "wrap" in i.modifiers:
            n = b.and_(n, constant(n, 31))
        else:
            n = b.select(b.icmp_unsigned("<", n, constant(n, 32)), n, constant(n, 32))
        by = b.zext(n, wide)
        both = b.or_(b.shl(b.zext(high, wide), constant(by, 32)), b.zext(low, wide))
        if i.modifiers[0] == "l":
            return b.trunc(b.lshr(b.shl(both, by), constant(by, 32)), low.type)
        return b.trunc(b.lshr(both, by), low.type)

    return elementwise(d, i, funnel, "b32")


# ---- comparisons and choices

_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}  # fmt: skip


def _compared(b: Any, name: str, kind: str, x: Value, y: Value) -> Value:
    if kind != "f32":
        return (b.icmp_signed if _signed(kind) else b.icmp_unsigned)(_COMPARE[name], x, y)
    if name == "num":
        return b.fcmp_ordered("ord", x, y)
    if name == "nan":
        return b.fcmp_unordered("uno", x, y)
    if name.endswith("u") and name[:-1] in _COMPARE:
        return b.fcmp_unordered(_COMPARE[name[:-1]], x, y)
    return b.fcmp_ordered(_COMPARE[name], x, y)


@form("setp")
def _setp(d: Decoder, i: Instruction) -> Form | None:
    kind, name = i.modifiers[-1], i.modifiers[0]
    if kind not in (*WHOLE, "b16", "b32", "b64", "f32"):
        return None
    combine = next((x for x in i.modifiers[1:-1] if x in ("and", "or", "xor")), None)
    first, second = i.operands[0], None
    if isinstance(first, Pair):
        second, first = (None if isinstance(first.second, Sink) else first.second), first.first
    c, negated = d.predicate(i.operands[3]) if combine else (0, False)
    sources = (d.source(i.operands[1], kind), d.source(i.operands[2], kind), *((c,) if combine else ()))
    targets = (d.destination(first, "pred"), *(() if second is None else (d.destination(second, "pred"),)))
    count = len(targets)

    def build(o: Operation) -> None:
        b = o.b
        x, y = (o.source(count + n, element_of(kind)) for n in range(2))
        if "ftz" in i.modifiers:
            x, y = floating.flush(b, x), floating.flush(b, y)
        value = o.set_of(_compared(b, name, kind, x, y))
        results = [value, b.not_(value)]
        if combine:
            z = o.predicate(count + 2)
            z = b.not_(z) if negated else z
            function = {"and": b.and_, "or": b.or_, "xor": b.xor}[combine]
            results = [function(v, z) for v in results]
        unknown = o.unknown(*range(count, count + len(sources)))
        for n, result in zip(range(count), results):
            o.put(n, result, unknown)
        o.done()

    return Form(name_of(i, count, negated), (*targets, *sources), build)


@form("selp")
def _selp(d: Decoder, i: Instruction) -> Form | None:
    (name,) = i.modifiers
    kind = f"b{8 * SIZES[name]}"
    p, negated = d.predicate(i.operands[3])
    to, x, y = (
        d.destination(i.operands[0], name),
        d.source(i.operands[1], name),
        d.source(i.operands[2], name),
    )

    def build(o: Operation) -> None:
        b = o.b
        p = b.not_(o.predicate(3)) if negated else o.predicate(3)
        found = b.select(o.flags(p), o.source(1, element_of(kind)), o.source(2, element_of(kind)))
        either = b.or_(b.and_(o.unknown(1), p), b.and_(o.unknown(2), b.not_(p)))
        o.put(0, found, b.or_(o.unknown(3), either))
        o.done()

    return Form(name_of(i, negated), (to, x, y, p), build)


# ---- moves and conversions


def _bail_if_packed(o: Operation, count: int) -> None:
    """Leave a move to its closure if the bytes of one of the first ``count`` registers differ in state."""
    state = o.b.load(o.state_place(0), typ=ir.IntType(8))
    for n in range(1, count):
        state = o.b.or_(state, o.b.load(o.state_place(n), typ=state.type))
    o.bail_if(o.nonzero(o.b.and_(state, constant(state, PACKED))))


@form("mov")
def _mov(d: Decoder, i: Instruction) -> Form | None:
    (kind,) = i.modifiers
    to, source = i.operands
    if kind == "pred":
        p, negated = d.predicate(source)

        def predicate(o: Operation) -> None:
            o.put(0, o.b.not_(o.predicate(1)) if negated else o.predicate(1), o.unknown(1))
            o.done()

        return Form(name_of(i, negated), (d.destination(to, "pred"), p), predicate)
    size = SIZES[kind]
    if size > 8:
        return None
    if isinstance(source, Vector):
        return _pack(d, i, source, size)
    if isinstance(to, Vector):
        return _unpack(d, i, to, size)

    def move(o: Operation) -> None:
        _bail_if_packed(o, 2)
        o.put(0, o.source(1, INTEGERS[size]), o.unknown(1))
        o.done()

    return Form(f"mov.{size}", (d.destination(to, kind), d.source(source, kind)), move)


def _pack(d: Decoder, i: Instruction, source: Vector, size: int) -> Form | None:
    count = len(source.elements)
    part = size // count
    parts = d.sources(source, f"b{8 * part}")

    def build(o: Operation) -> None:
        _bail_if_packed(o, 1 + count)
        unknown = o.unknown(1)
        for n in range(1, count):
            o.bail_if(o.b.icmp_unsigned("!=", unknown, o.unknown(1 + n)))
        # Lane by lane: the parts of a lane follow each other.
        together = joined(o.b, [o.source(1 + n, INTEGERS[part]) for n in range(count)])
        ordered = picked(o.b, together, [n * 32 + lane for lane in range(32) for n in range(count)])
        o.put(0, o.b.bitcast(ordered, lanes_of(INTEGERS[size])), unknown)
        o.done()

    return Form(name_of(i, "pack", count), (d.destination(i.operands[0], i.modifiers[0]), *parts), build)


def _unpack(d: Decoder, i: Instruction, to: Vector, size: int) -> Form | None:
    count = len(to.elements)
    part = size // count
    kept = [n for n, x in enumerate(to.elements) if not isinstance(x, Sink)]
    targets = [d.destination(to.elements[n], f"b{8 * part}") for n in kept]

    def build(o: Operation) -> None:
        _bail_if_packed(o, 1 + len(kept))
        unknown = o.unknown(0)
        whole = o.b.bitcast(o.source(0, INTEGERS[size]), lanes_of(INTEGERS[part], 32 * count))
        for place, n in enumerate(kept):
            o.put(1 + place, picked(o.b, whole, [lane * count + n for lane in range(32)]), unknown)
        o.done()

    return Form(name_of(i, "unpack", *kept), (d.source(i.operands[1], i.modifiers[0]), *targets), build)


@form("cvta")
def _cvta(d: Decoder, i: Instruction) -> Form | None:
    back = i.modifiers[0] == "to"
    base = GENERIC[i.modifiers[back].partition("::")[0]]
    return elementwise(d, i, lambda b, x: b.add(x, constant(x, -base if back else base)), "u64")


_ROUNDINGS = {"rni": "rint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
_NARROW: dict[str, Function] = {
    "bf16.rn": floating.bf16_bits,
    "bf16.rz": floating.bf16_bits_towards_zero,
    "f16.rn": floating.f16_bits,
    "tf32.rn": floating.tf32_bits,
}


@form("cvt")
def _cvt(d: Decoder, i: Instruction) -> Form | None:
    *rest, result, kind = i.modifiers
    if "f16" in (kind, result.removesuffix("x2")) and not engine().converts_f16:
        return None
    if kind == "f32" and rest and f"{result.removesuffix('x2')}.{rest[0]}" in _NARROW:
        return _cvt_narrow(d, i, result, rest)
    to, source = i.operands[:2]
    if not _converts(kind, result, rest) or not isinstance(to, Register):
        return None
    slots = d.destination(to, result, wider=True), d.source(source, kind, wider=True)
    held = SIZES[source.type] if isinstance(source, Register) else SIZES[kind]
    size, width = SIZES[result], SIZES[to.type]

    def build(o: Operation) -> None:
        b = o.b
        x = o.source(1, INTEGERS[held])
        if held > SIZES[kind]:
            x = b.trunc(x, lanes_of(INTEGERS[SIZES[kind]]))
        found = _converted(b, x, kind, result, rest)
        if width > size:
            found = (b.sext if _signed(result) else b.zext)(found, lanes_of(INTEGERS[width]))
        o.put(0, found, o.unknown(1))
        o.done()

    return Form(name_of(i, held, width), slots, build)


def _converts(kind: str, result: str, rest: list[str]) -> bool:
    """Return whether `_converted` has a conversion."""
    whole = tuple(f"{sign}{bits}" for sign in "us" for bits in (8, 16, 32, 64))
    integral = [m for m in rest if m in _ROUNDINGS]
    if kind in whole:
        return not rest if result in whole else result == "f32" and rest == ["rn"]
    if kind == "f32" and (result in whole or result == "f32"):
        return len(integral) == 1 and {*rest} <= {*integral, "ftz"}
    return result == "f32" and (kind == "bf16" and not rest or kind == "f16" and {*rest} <= {"rn", "ftz"})


def _converted(b: Any, x: Value, kind: str, result: str, rest: list[str]) -> Value:
    """Convert integers that hold numbers of type ``kind`` to integers that hold numbers of type ``result``."""
    size, given = SIZES[result], SIZES[kind]
    if kind[0] in "us" and result[0] in "us":
        target = lanes_of(INTEGERS[size])
        if size <= given:
            return b.trunc(x, target) if size < given else x
        return (b.sext if _signed(kind) else b.zext)(x, target)
    if kind[0] in "us":
        return floating.bits_of(b, (b.sitofp if _signed(kind) else b.uitofp)(x, lanes_of(F32)))
    if kind == "bf16":
        return floating.bits_of(b, floating.bf16_values(b, x))
    if kind == "f16":
        y = floating.canonical(b, b.fpext(b.bitcast(x, lanes_of(F16)), lanes_of(F32)))
        return floating.bits_of(b, floating.flush(b, y) if "ftz" in rest else y)
    y = floating.real_of(b, x)
    y = floating.flush(b, y) if "ftz" in rest else y
    if result == "f32":
        return floating.bits_of(b, floating.canonical(b, _integral(b, y, rest)))
    target = lanes_of(INTEGERS[size])
    kind_of = "fptosi" if _signed(result) else "fptoui"
    name = f"llvm.{kind_of}.sat.v32i{8 * size}.{suffix(y)}"
    found = intrinsic(b, name, target, _integral(b, y, rest))
    nan = constant(found, 1 << 63 if size == 8 else 0)
    return b.select(floating.is_nan(b, y), nan, found)


def _integral(b: Any, x: Value, rest: list[str]) -> Value:
    rounding = next(_ROUNDINGS[name] for name in rest if name in _ROUNDINGS)
    return intrinsic(b, f"llvm.{rounding}.{suffix(x)}", x.type, x)


def _cvt_narrow(d: Decoder, i: Instruction, result: str, rest: list[str]) -> Form | None:
    narrow = _NARROW[f"{result.removesuffix('x2')}.{rest[0]}"]
    if {*rest[1:]} - {"relu"}:
        return None

    def convert(b: Any, x: Value) -> Value:
        if "relu" in rest:
            zero = constant(x, 0.0)
            x = b.fadd(b.select(b.fcmp_ordered("<", x, zero), zero, x), zero)
        return narrow(b, x)

    if result.endswith("x2"):
        pair = lambda b, x, y: b.or_(b.shl(convert(b, x), constant(convert(b, x), 16)), convert(b, y))
        return elementwise(d, i, pair, "b32", kinds=("f32", "f32"))
    if result == "tf32":
        return elementwise(d, i, convert, "b32", kinds=("f32",))
    return elementwise(d, i, lambda b, x: b.trunc(convert(b, x), lanes_of(I16)), "b16", kinds=("f32",))
