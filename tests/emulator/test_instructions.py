"""Single instructions against definitions in Python, numpy and torch."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from helpers.emulator.cases import addresses, atomics, inputs
from helpers.emulator.ptx import kernel, lanewise, run

import ptx_emulator

rng = np.random.default_rng(0)
EDGES32 = np.array(
    [0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFFFFFE, 255], np.uint32
)


def words(seed, size=4):
    r = np.random.default_rng(seed)
    x = r.integers(0, 1 << 63, 32, np.uint64).astype(f"u{size}")
    x[:12] = r.permutation(EDGES32).astype(f"u{size}")
    return x


def floats(seed):
    r = np.random.default_rng(seed)
    x = (r.standard_normal(32) * np.exp2(r.integers(-30, 30, 32))).astype(np.float32)
    edges = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 1e-42, -1e-42, 3e38, 1.1754944e-38, 0.5]
    x[:12] = r.permutation(np.array(edges, np.float32))
    return x


def signed(x, bits=32):
    return int(x) - (1 << bits) if int(x) >> bits - 1 else int(x)


def towards_zero(a, b):
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


INTEGER = {
    "add.s32 {d}, {0}, {1};": lambda a, b: a + b,
    "sub.s32 {d}, {0}, {1};": lambda a, b: a - b,
    "mul.lo.s32 {d}, {0}, {1};": lambda a, b: a * b,
    "mul.hi.s32 {d}, {0}, {1};": lambda a, b: signed(a) * signed(b) >> 32,
    "mul.hi.u32 {d}, {0}, {1};": lambda a, b: a * b >> 32,
    "min.s32 {d}, {0}, {1};": lambda a, b: min(signed(a), signed(b)),
    "max.u32 {d}, {0}, {1};": max,
    "min.relu.s32 {d}, {0}, {1};": lambda a, b: max(0, min(signed(a), signed(b))),
    "and.b32 {d}, {0}, {1};": lambda a, b: a & b,
    "or.b32 {d}, {0}, {1};": lambda a, b: a | b,
    "xor.b32 {d}, {0}, {1};": lambda a, b: a ^ b,
    "shl.b32 {d}, {0}, {1};": lambda a, b: a << b if b < 32 else 0,
    "shr.u32 {d}, {0}, {1};": lambda a, b: a >> min(b, 32),
    "shr.s32 {d}, {0}, {1};": lambda a, b: signed(a) >> min(b, 31),
    "div.s32 {d}, {0}, {1};": lambda a, b: towards_zero(signed(a), signed(b)) if b else -1,
    "rem.s32 {d}, {0}, {1};": lambda a, b: (
        signed(a) - signed(b) * towards_zero(signed(a), signed(b)) if b else -1
    ),
    "div.u32 {d}, {0}, {1};": lambda a, b: a // b if b else -1,
    "bfe.s32 {d}, {0}, 4, 8;": lambda a, b: signed(a >> 4 & 255, 8),
    "bfe.u32 {d}, {0}, 28, 8;": lambda a, b: a >> 28,
    "bfe.s32 {d}, {0}, 28, 8;": lambda a, b: signed(a >> 28, 4),
    "popc.b32 {d}, {0};": lambda a, b: (a).bit_count(),
    "clz.b32 {d}, {0};": lambda a, b: 32 - a.bit_length(),
    "brev.b32 {d}, {0};": lambda a, b: int(f"{a:032b}"[::-1], 2),
    "lop3.b32 {d}, {0}, {1}, {0}, 0x96;": lambda a, b: a ^ b ^ a,
    "shf.l.wrap.b32 {d}, {0}, {1}, 5;": lambda a, b: (b << 32 | a) << 5 >> 32,
    "prmt.b32 {d}, {0}, {1}, 0x3214;": lambda a, b: (
        b & 255 | (a >> 8 & 255) << 8 | (a >> 16 & 255) << 16 | a >> 24 << 24
    ),
    "neg.s32 {d}, {0};": lambda a, b: -a,
    "not.b32 {d}, {0};": lambda a, b: ~a,
    "cvt.s32.s8 {d}, {0};": lambda a, b: signed(a & 255, 8),
    "cvt.u32.u16 {d}, {0};": lambda a, b: a & 0xFFFF,
    "mad.lo.s32 {d}, {0}, {1}, 7;": lambda a, b: a * b + 7,
}


@pytest.mark.parametrize("instruction", INTEGER)
def test_integer_arithmetic(instruction):
    a, b = words(1), words(2)
    want = [INTEGER[instruction](int(x), int(y)) & 0xFFFFFFFF for x, y in zip(a, b)]
    assert lanewise(instruction, "b32", a, b).tolist() == want


@pytest.mark.parametrize("kind", ("s32", "u32"))
def test_wide_multiply_add(kind):
    a, b = words(3), words(4)
    c = words(5, 8)
    of = signed if kind == "s32" else int
    want = [of(x) * of(y) + int(z) & (1 << 64) - 1 for x, y, z in zip(a, b, c)]
    assert lanewise(f"mad.wide.{kind} {{d}}, {{0}}, {{1}}, {{2}};", "b64", a, b, c).tolist() == want


COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


@pytest.mark.parametrize("name", COMPARISONS)
@pytest.mark.parametrize("kind", ("s32", "u32", "f32"))
def test_comparisons(kind, name):
    a, b = (floats(6), floats(7)) if kind == "f32" else (words(6), words(7))
    b[:16:2] = a[:16:2]
    of = {"s32": signed, "u32": int, "f32": float}[kind]
    compare = eval(f"lambda x, y: x {COMPARISONS[name]} y")
    want = [compare(of(x), of(y)) and (of(x) == of(x) and of(y) == of(y)) for x, y in zip(a, b)]
    found = lanewise(f"setp.{name}.{kind} {{d}}, {{0}}, {{1}};", "pred", a.view(np.uint32), b.view(np.uint32))
    assert found.tolist() == [int(x) for x in want]


def nearest32(x: Fraction) -> float:
    """A rational rounded to the nearest fp32, ties to even. Subnormals are not handled."""
    if x == 0:
        return 0.0
    exponent = math.floor(math.log2(abs(x))) if abs(x) < 2**1000 else 127
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    ulp = Fraction(2) ** (exponent - 23)
    rounded = float(round(x / ulp) * ulp)
    return math.copysign(math.inf, rounded) if abs(rounded) > 3.4028235e38 else rounded


def test_fma_rounds_once():
    r = np.random.default_rng(8)
    worst = 0
    for _ in range(20):
        a, b = (r.standard_normal(32).astype(np.float32) for _ in range(2))
        # Sums that nearly cancel, terms of distant magnitude, and ties.
        scale = np.exp2(r.integers(-60, 10, 32)).astype(np.float32)
        c = np.where(r.random(32) < 0.5, -(a * b), r.standard_normal(32).astype(np.float32) * scale).astype(
            np.float32
        )
        found = lanewise("fma.rn.f32 {d}, {0}, {1}, {2};", "f32", a, b, c).view(np.float32)
        want = [
            nearest32(Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)))
            for x, y, z in zip(a, b, c)
        ]
        assert found.tolist() == want
        naive = (a.astype(np.float64) * b + c).astype(np.float32)
        worst += int((naive != found).sum())
    a = np.full(32, 1 + 2.0**-23, np.float32)
    c = np.full(32, 2.0**-60, np.float32)  # the sum lies just above a tie, which fp64 cannot represent
    b = np.full(32, 1 + 2.0**-23, np.float32)
    want = nearest32(Fraction(float(a[0])) * Fraction(float(b[0])) + Fraction(float(c[0])))
    assert lanewise("fma.rn.f32 {d}, {0}, {1}, {2};", "f32", a, b, c).view(np.float32)[0] == want


def flushed(x):
    return np.where(np.abs(x) < 2.0**-126, np.copysign(np.float32(0), x), x).astype(np.float32)


@pytest.mark.parametrize("ftz", ("", ".ftz"))
@pytest.mark.parametrize("name", ("add", "sub", "mul", "min", "max"))
@np.errstate(all="ignore")
def test_float_arithmetic(name, ftz):
    a, b = floats(9), floats(10)
    function = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.fmin, "max": np.fmax}[name]
    found = lanewise(f"{name}{ftz}.f32 {{d}}, {{0}}, {{1}};", "f32", a, b)
    want = flushed(function(flushed(a), flushed(b))) if ftz else function(a, b)
    nan = np.isnan(want)
    assert (found[nan] == 0x7FFFFFFF).all()
    zero = want == 0  # the calibration cases compare the sign of zeros of min and max
    assert (found[~nan & ~zero] == want.view(np.uint32)[~nan & ~zero]).all()
    assert (found.view(np.float32)[zero] == 0).all()


def test_saturation_clamps_to_0_and_1_and_turns_nan_into_0():
    a = np.resize(np.array([0.5, -0.5, 2, np.inf, -np.inf, np.nan, 1, -0.0], np.float32), 32)
    one, zero = np.ones(32, np.float32), np.zeros(32, np.float32)
    want = np.resize(np.array([0.5, 0, 1, 1, 0, 0, 1, 0], np.float32), 32)
    for text, more in (
        ("add.ftz.sat.f32 {d}, {0}, {1};", (zero,)),
        ("mul.ftz.sat.f32 {d}, {0}, {1};", (one,)),
        ("fma.rn.ftz.sat.f32 {d}, {0}, {1}, {2};", (one, zero)),
    ):
        assert lanewise(text, "f32", a, *more).tolist() == want.view(np.uint32).tolist()


@pytest.mark.parametrize(
    ("rounding", "expected"), [("rni", np.rint), ("rzi", np.trunc), ("rmi", np.floor), ("rpi", np.ceil)]
)
def test_floats_round_to_integral_floats(rounding, expected):
    ties = np.array([0.5, 1.5, -0.5, -1.5, 2.5, -2.25, 7.75, 1e9, -1e-3, 3.0, -3.0, 0.1], np.float32)
    x = np.concatenate([floats(3)[:20], ties])
    found = lanewise(f"cvt.{rounding}.f32.f32 {{d}}, {{0}};", "f32", x)
    np.testing.assert_array_equal(found.view(np.float32), expected(x))


def test_a_prefetch_into_a_cache_accesses_nothing():
    x = np.zeros(32, np.uint64)  # no memory is there
    found = lanewise("prefetch.global.L2 [{0}]; prefetch.global.L1 [{0}]; mov.b64 {d}, {0};", "b64", x)
    assert not found.any()


def test_a_bulk_prefetch_must_have_memory_and_be_aligned():
    x = torch.zeros(8)
    run("cp.async.bulk.prefetch.L2.global [%q0], 32;", x)
    for operands, reason in (
        ("[%q0], 48", "out of bounds"),
        ("[%q0], 8", "multiples of 16"),
        ("[%q0+8], 16", "multiples of 16"),
    ):
        with pytest.raises(ptx_emulator.ExecutionError, match=reason):
            run(f"cp.async.bulk.prefetch.L2.global {operands};", x)


def test_bf16x2_products_round_once():
    r = np.random.default_rng(12)
    halves = [torch.from_numpy(r.standard_normal((32, 2)).astype(np.float32)).bfloat16() for _ in range(2)]
    halves[0][0, 0], halves[1][0, 0] = 2.0**-100, 1.25 * 2.0**-33  # subnormal
    words = [x.view(torch.int16).numpy().view(np.uint32)[:, 0] for x in halves]
    found = lanewise("mul.rn.bf16x2 {d}, {0}, {1};", "b32", *words)
    want = (halves[0].double() * halves[1].double()).bfloat16()
    assert want[0, 0] == 2.0**-133
    assert found.tolist() == want.view(torch.int16).numpy().view(np.uint32)[:, 0].tolist()


@pytest.mark.parametrize("name", ("ex2", "lg2", "rcp", "rsqrt"))
def test_approximations_are_within_their_documented_error(name):
    x = np.abs(floats(11)) + np.float32(1e-3)
    x = np.where(np.isfinite(x), np.minimum(x, np.float32(60.0)), 1.5).astype(np.float32)
    exact = {"ex2": lambda v: 2.0**v, "lg2": math.log2, "rcp": lambda v: 1 / v, "rsqrt": lambda v: v**-0.5}[
        name
    ]
    found = lanewise(f"{name}.approx.ftz.f32 {{d}}, {{0}};", "f32", x).view(np.float32).astype(float)
    want = np.array([exact(float(v)) for v in x])
    assert (np.abs(found - want) <= 2.0**-22 * np.maximum(np.abs(want), 2.0**-1)).all()


def test_approximations_of_special_values():
    x = np.resize(np.array([0, -0.0, np.inf, -np.inf, 200, -200, np.nan, 1e-42], np.float32), 32)
    ex2 = lanewise("ex2.approx.ftz.f32 {d}, {0};", "f32", x).view(np.float32)[:8]
    assert ex2[:6].tolist() == [1, 1, np.inf, 0, np.inf, 0] and np.isnan(ex2[6]) and ex2[7] == 1
    rcp = lanewise("rcp.approx.ftz.f32 {d}, {0};", "f32", x).view(np.float32)[:8]
    assert rcp[:4].tolist() == [np.inf, -np.inf, 0, 0] and rcp[7] == np.inf


def test_bf16_pairs_round_to_nearest_even():
    a, b = floats(12), floats(13)
    a[20:24] = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20, 3.4e38], np.float32)
    found = lanewise("cvt.rn.bf16x2.f32 {d}, {0}, {1};", "b32", a, b)
    high, low = (torch.from_numpy(x).bfloat16().view(torch.int16).numpy().view(np.uint16) for x in (a, b))
    number = ~(np.isnan(a) | np.isnan(b))
    assert (found[number] == (high.astype(np.uint32) << 16 | low)[number]).all()


@pytest.mark.parametrize("mode", ("bfly", "idx", "up", "down"))
@pytest.mark.parametrize("width", (32, 8))
def test_shuffles_stay_within_their_width(mode, width):
    a = words(14)
    c = (32 - width) << 8 | (0 if mode == "up" else 31)
    found = lanewise(f"shfl.sync.{mode}.b32 {{d}}, {{0}}, 3, {c}, -1;", "b32", a)
    want = []
    for lane in range(32):
        first = lane - lane % width
        source = {"bfly": lane ^ 3, "idx": first + 3, "up": lane - 3, "down": lane + 3}[mode]
        want.append(int(a[source if first <= source < first + width else lane]))
    assert found.tolist() == want


def test_votes():
    a = words(15)
    ballot = lanewise("setp.lt.s32 %p1, {0}, 0; vote.sync.ballot.b32 {d}, %p1, -1;", "b32", a)
    assert set(ballot.tolist()) == {sum((int(x) >> 31) << n for n, x in enumerate(a))}
    some = lanewise("setp.lt.s32 %p1, {0}, 0; vote.sync.any.pred {d}, %p1, -1;", "pred", a)
    every = lanewise("setp.lt.s32 %p1, {0}, 0; vote.sync.all.pred {d}, !%p1, -1;", "pred", a)
    assert set(some.tolist()) == {1} and set(every.tolist()) == {0}


def test_movmatrix_transposes():
    x = np.arange(64, dtype=np.uint16).reshape(8, 8)
    found = lanewise("movmatrix.sync.aligned.m8n8.trans.b16 {d}, {0};", "b32", x.reshape(-1).view(np.uint32))
    assert (found.view(np.uint16).reshape(8, 8) == x.T).all()


@pytest.mark.parametrize("count", (1, 2, 4))
def test_stmatrix_stores_transposed_matrices_of_bytes(count):
    """Byte e of lane t of register n is element (t // 4 + 8 (e // 2), 2 (t % 4) + e % 2) of matrix n [16, 8]. Its transpose is stored:
    lane 8 n + r has the address of row r."""
    words = torch.randint(
        -(2**31), 2**31, (4, 32), generator=torch.Generator().manual_seed(count), dtype=torch.int32
    )
    out = torch.zeros(64 * 16, dtype=torch.uint8)
    names = ", ".join(f"%r{8 + n}" for n in range(count))
    loads = "".join(f"ld.global.b32 %r{8 + n}, [%q3+{128 * n}];" for n in range(count))
    run(
        f"""cvt.u64.u32 %q2, %r0; mad.lo.s64 %q3, %q2, 4, %q0; {loads} mov.u32 %r3, shared_bytes; mad.lo.s32 %r4, %r0, 32, %r3;
        stmatrix.sync.aligned.m16n8.x{count}.trans.shared.b8 [%r4], {{{names}}}; bar.warp.sync -1;
        mad.lo.s64 %q5, %q2, 16, %q1; ld.shared.v4.b32 {{%r20, %r21, %r22, %r23}}, [%r4]; setp.lt.u32 %p1, %r0, {8 * count};
        @%p1 st.global.v4.b32 [%q5], {{%r20, %r21, %r22, %r23}};""",
        words, out, shared=1024,
    )  # fmt: skip
    want = torch.zeros(4, 8, 16, dtype=torch.uint8)
    for n, t, e in itertools.product(range(count), range(32), range(4)):
        want[n, 2 * (t % 4) + e % 2, t // 4 + 8 * (e // 2)] = words[n, t].item() >> 8 * e & 255
    assert torch.equal(out[: 128 * count].view(count, 8, 16), want[:count])


@pytest.mark.parametrize("transposed", (False, True))
def test_ldmatrix_and_stmatrix_move_matrices(transposed):
    trans = ".trans" if transposed else ""
    x = torch.arange(256, dtype=torch.int16)
    y = torch.zeros(256, dtype=torch.int16)
    run(
        f"""
        mov.b32 %r1, shared_bytes; shl.b32 %r2, %r0, 4; add.s32 %r3, %r1, %r2;
        cvt.u64.u32 %q8, %r2; add.s64 %q9, %q0, %q8; add.s64 %q10, %q1, %q8;
        ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%q9]; st.shared.v4.b32 [%r3], {{%r4, %r5, %r6, %r7}};
        bar.warp.sync -1;
        ldmatrix.sync.aligned.m8n8.x4{trans}.shared.b16 {{%r8, %r9, %r10, %r11}}, [%r3];
        stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r3+1024], {{%r8, %r9, %r10, %r11}};
        bar.warp.sync -1;
        ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r3+1024]; st.global.v4.b32 [%q10], {{%r4, %r5, %r6, %r7}};
        """,
        x, y, shared=2048,
    )  # fmt: skip
    matrices = x.view(4, 8, 8)
    assert torch.equal(y.view(4, 8, 8), matrices.mT if transposed else matrices)


@pytest.mark.parametrize("depth", (8, 16))
def test_mma_on_integers_is_exact(depth):
    """The fragments follow the PTX ISA's tables."""
    r = np.random.default_rng(16)
    a, b = r.integers(-8, 9, (16, depth)), r.integers(-8, 9, (depth, 8))
    c = r.integers(-1000, 1000, (16, 8)).astype(np.float32)
    k = depth // 8
    bits = lambda x: torch.tensor(float(x)).bfloat16().view(torch.int16).item() & 0xFFFF
    operands = []
    for i in range(2 * k):
        row, column = lambda l, i=i: l // 4 + 8 * (i % 2), lambda l, i=i: l % 4 * 2 + 8 * (i // 2)
        operands.append(
            [bits(a[row(l), column(l)]) | bits(a[row(l), column(l) + 1]) << 16 for l in range(32)]
        )
    for i in range(k):
        at = lambda l, i=i: l % 4 * 2 + 8 * i
        operands.append([bits(b[at(l), l // 4]) | bits(b[at(l) + 1, l // 4]) << 16 for l in range(32)])
    operands = [np.array(x, np.uint32) for x in operands]
    for i in range(4):
        operands.append(
            np.array([c[l // 4 + 8 * (i // 2), l % 4 * 2 + i % 2] for l in range(32)], np.float32)
        )
    names = [f"{{{n}}}" for n in range(len(operands))]
    vector = lambda part: "{{" + ", ".join(part) + "}}"
    text = f"mma.sync.aligned.m16n8k{depth}.row.col.f32.bf16.bf16.f32 {{{{%r30, %r31, %r32, %r33}}}}, "
    text += f"{vector(names[: 2 * k])}, {vector(names[2 * k : 3 * k])}, {vector(names[3 * k :])};"
    want = a @ b + c
    for i in range(4):
        found = lanewise(f"{text} mov.b32 {{d}}, %r{30 + i};", "b32", *operands).view(np.float32)
        assert found.tolist() == [want[l // 4 + 8 * (i // 2), l % 4 * 2 + i % 2] for l in range(32)]


def test_atomics_count_every_thread():
    counter = torch.tensor([5, 0], dtype=torch.int32)
    out = torch.zeros(96, dtype=torch.int32)
    run(
        """
        atom.relaxed.gpu.global.inc.u32 %r1, [%q0], 0x7fffffff;
        mov.u32 %r2, %ctaid.x; mad.lo.s32 %r3, %r2, 32, %r0; mul.wide.s32 %q8, %r3, 4; add.s64 %q9, %q1, %q8;
        st.global.b32 [%q9], %r1;
        """,
        counter, out, grid=3,
    )  # fmt: skip
    assert sorted(out.tolist()) == list(range(5, 101)) and counter.tolist() == [101, 0]


def test_divergence_reconverges():
    """Lane n repeats a loop n times; then all lanes shuffle."""
    found = lanewise(
        "mov.b32 %r30, 0; mov.b32 %r31, %r0; LOOP: setp.eq.s32 %p1, %r31, 0; @%p1 bra DONE; add.s32 %r30, %r30, %r31;"
        " add.s32 %r31, %r31, -1; bra LOOP; DONE: shfl.sync.bfly.b32 {d}, %r30, 1, 31, -1;",
        "b32",
        words(17),
    )
    assert found.tolist() == [(n ^ 1) * ((n ^ 1) + 1) // 2 for n in range(32)]


def test_line_information_hides_no_instruction():
    """A `.loc` ends with its line, not with a semicolon."""
    x = torch.zeros(32, dtype=torch.int32)
    run(
        """
        .loc 1 12 3
        shl.b32 %r4, %r0, 2;
        .loc 1 13 7, function_name $L__info_string0, inlined_at 1 9 5
        cvt.u64.u32 %q8, %r4; add.s64 %q9, %q0, %q8;
        .loc 1 14 7
        st.global.b32 [%q9], 7;
        .loc 1 15 1
        """,
        x,
    )  # fmt: skip
    assert (x == 7).all()


def test_generic_addresses_reach_shared_and_global_memory():
    """Even lanes access shared memory, odd lanes global memory. Each lane adds 100 and asks for the state space."""
    found = addresses.generic()
    lane = np.arange(32)
    value = np.where(lane % 2 == 0, lane + 100 + 1000, 500 + lane + 100 + 2000)
    assert np.array_equal(found["seen"].numpy(), np.where(lane % 2 == 0, lane + 100, lane) * 10000 + value)
    assert np.array_equal(found["global"].numpy(), np.where(lane % 2 == 1, 600, 500) + lane)
    with pytest.raises(ptx_emulator.ExecutionError, match="leads to no memory"):
        run("mov.b64 %q5, 0x7000000000000000; ld.b32 %r1, [%q5];", torch.zeros(1))


def test_each_thread_has_its_own_local_memory():
    lane = np.arange(64)
    # Four vectors; the lane's number is one element further on in each.
    stored = np.where(np.arange(16)[:, None] == 3, lane, 0)
    for row, column in ((1, 0), (2, 1), (3, 2)):
        stored[4 * row + column] = lane
    for row, values in enumerate(([7, 8, 9, None], [None, 7, 8, 9], [9, None, 7, 8], [8, 9, None, 7])):
        for column, value in enumerate(values):
            if value is not None:
                stored[4 * row + column] = value
    index = lane & 15
    third = np.where(index == 3, index, stored[3])
    want = stored[index, lane] + 100 * index + 10000 * third
    assert np.array_equal(addresses.local()["seen"].numpy(), want)
    declared = ".local .align 16 .b8 stack[64]; mov.b64 %q5, stack;"
    for body, wrong in (
        ("st.local.b32 [%q5+64], %r0;", "local memory out of bounds: there are 64 bytes"),
        ("ld.local.b32 %r1, [%q5]; st.global.b32 [%q0], %r1;", "nothing has written"),
    ):
        with pytest.raises(ptx_emulator.ExecutionError, match=wrong):
            run(declared + body, torch.zeros(1))


def test_mbarriers_count_bytes_and_dropped_arrivals():
    """Phase 0 expects two arrivals and 16 bytes. One arrival drops out, so phase 1 expects one."""
    body = """
        mov.b32 %r1, shared_bytes; setp.eq.s32 %p1, %r0, 0; @!%p1 bra WAIT; mbarrier.init.shared.b64 [%r1], 2;
        mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%r1], 16; mbarrier.arrive_drop.shared.b64 _, [%r1];
        mbarrier.arrive.shared.b64 _, [%r1]; mbarrier.test_wait.parity.shared.b64 %p2, [%r1], 0; selp.b32 %r2, 1, 0, %p2;
        mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [%r1], 16; mbarrier.test_wait.parity.shared.b64 %p2, [%r1], 0;
        selp.b32 %r3, 2, 0, %p2; mbarrier.arrive.shared.b64 _, [%r1]; mbarrier.test_wait.parity.shared.b64 %p2, [%r1], 1;
        selp.b32 %r4, 4, 0, %p2; add.s32 %r2, %r2, %r3; add.s32 %r2, %r2, %r4; st.global.b32 [%q0], %r2;
        WAIT: bar.warp.sync -1;
    """
    out = torch.zeros(1, dtype=torch.int32)
    run(body, out, shared=8)
    assert out.item() == 2 + 4


RED = {
    "add.u32": np.add, "min.s32": np.minimum, "max.u32": np.maximum, "and.b32": np.bitwise_and, "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor, "add.f32": np.add, "relaxed.gpu.add.s32": np.add,
}  # fmt: skip


@pytest.mark.parametrize("operation", RED)
def test_red_combines_all_threads(operation):
    dtype = {"f32": np.float32, "s32": np.int32}.get(operation[-3:], np.uint32)
    given, there = inputs.words(2)[0][40:72], inputs.words(2)[1][40:48]
    if dtype is np.float32:
        given, there = np.arange(1, 33, dtype=dtype), np.zeros(8, dtype)
    for space, start in (("shared", np.zeros(8, dtype)), ("global", there.view(dtype))):
        want = start.copy()
        with np.errstate(over="ignore"):
            for value in given.view(dtype).reshape(4, 8):
                want = RED[operation](want, value)
        found = atomics.reduction(space, operation)[space].numpy().view(dtype)
        assert np.array_equal(found[:8], want)


@pytest.mark.parametrize("space", ("global", "shared"))
def test_16_bit_atomics(space):
    for kind, dtype in atomics.HALVES_OF.items():
        x, y = (torch.from_numpy(v[:192].copy()).to(dtype) for v in inputs.floats(2))
        found = atomics.added(space, kind)
        assert torch.equal(found["before"], x.view(torch.int16))
        assert torch.equal(torch.nan_to_num(found["now"].view(dtype)), torch.nan_to_num(x + y))
    x, y = (torch.from_numpy(v[:128].astype(np.uint16).view(np.int16)) for v in inputs.words(2))
    # cas compares with the operand and would store the value that is there: memory does not change.
    assert torch.equal(atomics.atomic(space, "cas", "b16", x, y)["now"], x)


NOT_MODELLED = {
    "ld.const.b32 %r1, [%q0];": "constant memory",
    "atom.global.add.v2.f32 {%f1, %f2}, [%q0], {%f3, %f4};": "v2 is not modelled",
    "atom.global.max.f32 %f1, [%q0], %f2;": "this atomic",
    "atom.global.exch.b128 %q1, [%q0], %q2;": "this atomic",
    "add.sat.f16 %h1, %h2, %h3;": "sat is not modelled",
    "cvt.rn.satfinite.s2f6x2.f32 %h1, %f1, %f2;": "is not modelled",
    "redux.sync.add.f32 %f1, %f2, -1;": "does not exist",
    "match.any.sync.b32 %r1, %r2, -1;": "match is not modelled",
    "cp.async.bulk.prefetch.tensor.4d.L2.global.im2col [%q0, {0, 0, 0, 0}];": "im2col is not modelled",
    "cp.async.bulk.tensor.4d.shared::cta.global.im2col.mbarrier::complete_tx::bytes [%r1], [%q0, {0, 0, 0, 0}], [%r2], {%h1};": "this bulk tensor copy",
    "tensormap.replace.tile.swizzle_atomicity.global.b1024.b32 [%q0], 0;": "swizzle_atomicity is not modelled",
    "fence.proxy.alias;": "alias is not modelled",
    "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%r1}, {%r1}, {%r1}, {%r1};": "this shape or these types",
    "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.bf16.bf16 {%r1}, %q1, %q2, %r3, 0, 1, 1, 1, 0, 0;": "this form",
    "tcgen05.shift.cta_group::1.down [%r1];": "tcgen05.shift is not modelled",
    "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale [%r1], %q1, %q2, %r2, [%r3], [%r4], %p1;": "kind::mxf8f6f4 is not modelled",
    "tcgen05.mma.cta_group::1.kind::i8 [%r1], %q1, %q2, %r2, %p1;": "kind::i8 is not modelled",
    "tcgen05.mma.ws.cta_group::1.kind::f16 [%r1], %q1, %q2, %r2, %p1;": "ws is not modelled",
    "tcgen05.mma.sp.cta_group::1.kind::f16 [%r1], %q1, %q2, [%r3], %r2, %p1;": "sp is not modelled",
    "tcgen05.ld.red.sync.aligned.32x32b.x1.min.f32 {%f1}, %f2, [%r1];": "not modelled",
    "clusterlaunchcontrol.query_cancel.other.b128 %r1, %r2;": "query_cancel.other.b128 is not modelled",
    "tex.2d.v4.f32.s32 {%f1, %f2, %f3, %f4}, [%q0, {%r1, %r2}];": "tex is not modelled",
}  # fmt: skip


def test_vector_registers_have_elements():
    out = torch.zeros(8, dtype=torch.int32)
    body = """{ .reg .v4 .s32 part; .reg .v2 .b32 pair; mov.s32 part.x, 1; mov.s32 part.y, 2; mov.s32 part.z, 3; mov.s32 part.w, 4;
        st.global.v4.b32 [%q0], part; ld.global.v2.b32 pair, [%q0+8]; st.global.b32 [%q0+16], pair.y; st.global.b32 [%q0+20], pair.x; }"""
    run(body, out, threads=1)
    assert out.tolist() == [1, 2, 3, 4, 4, 3, 0, 0]


@pytest.mark.parametrize("instruction", NOT_MODELLED)
def test_an_instruction_that_is_not_modelled_is_named(instruction):
    with pytest.raises(ptx_emulator.PtxError, match=rf"PTX line \d+: .*{NOT_MODELLED[instruction]}") as error:
        run(instruction, torch.zeros(1))
    assert instruction.split(";")[-2].split()[0] in str(error.value)


def test_an_unknown_instruction_is_named_with_its_line():
    with pytest.raises(ptx_emulator.PtxError, match=r"PTX line \d+: wombat is not modelled"):
        run("wombat.u32 %r1, %r0;", torch.zeros(1), torch.zeros(1))
    with pytest.raises(ptx_emulator.PtxError, match=r"PTX line \d+: \.rna is not modelled"):
        run("add.rna.f32 %f1, %f1, %f1;", torch.zeros(1), torch.zeros(1))


def test_a_kernel_that_prints_is_refused_by_name():
    """The form is that of `cute.printf`: a declaration, and a call over several lines."""
    call = """{ .param .b64 x; .param .b64 y; .param .b32 z; st.param.b64 [x], %q0; st.param.b64 [y], %q0;
        call.uni (z),
        vprintf, (x, y); }"""
    text = kernel(call).replace(
        ".extern .shared",
        ".extern .func (.param .b32 z) vprintf (.param .b64 x, .param .b64 y);\n.extern .shared",
    )
    line = next(n for n, x in enumerate(text.split("\n"), 1) if "call.uni" in x)
    message = rf"PTX line {line}: the kernel prints \(vprintf\), .* compile it without cute.printf"
    with pytest.raises(ptx_emulator.PtxError, match=message):
        ptx_emulator.run(text, (1,), (32,), 0, (torch.zeros(1), torch.zeros(1)))
    declared = text.replace(call, "")
    with pytest.raises(ptx_emulator.PtxError, match=r"device functions \(.func\) are not modelled"):
        ptx_emulator.run(declared, (1,), (32,), 0, (torch.zeros(1), torch.zeros(1)))
