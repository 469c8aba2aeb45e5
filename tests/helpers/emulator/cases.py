"""What is calibrated: small kernels whose outputs on a GPU are fixtures, and how near the emulator has to come to them.

A case gives its outputs, computed by what `ptx.execute` is, from inputs that a seed makes. Where arithmetic is exactly
defined, and for products of matrices, the bits are compared; the approximate instructions may differ by what PTX documents,
and whole kernels, which they enter, by a norm. `calibrate.py` records and compares.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from helpers.emulator import prefill, tensor_maps
from helpers.emulator import wgmma_kernel as wgmma
from helpers.emulator.ptx import lanewise, run
from helpers.emulator.tensor_maps import OUT, START, WAIT, Form, filled, tensor_map
from kda_core.testing import make_inputs

Outputs = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Bits:
    """The same bits."""

    def __str__(self) -> str:
        return "equal"


@dataclass(frozen=True)
class Near:
    """fp32 within ``ulps`` representable numbers, or within an ``absolute`` difference; NaN where a NaN is."""

    ulps: int
    absolute: float = 0.0

    def __str__(self) -> str:
        return f"{self.ulps} ulp" + (f" or {self.absolute:.1e}" if self.absolute else "")


@dataclass(frozen=True)
class Norm:
    """The norm of the difference, relative to that of the whole."""

    relative: float

    def __str__(self) -> str:
        return f"norm {self.relative:.1e}"


Limit = Bits | Near | Norm


@dataclass(frozen=True)
class Case:
    """``run`` gives the outputs by name. Fixtures of a ``group`` are one file."""

    group: str
    name: str
    run: Callable[[], Outputs]
    limit: Limit = Bits()


CASES: dict[str, Case] = {}


def add(group: str, name: str, function: Callable[[], Outputs], limit: Limit = Bits()) -> None:
    key = f"{group}/{name}"
    assert key not in CASES, key
    CASES[key] = Case(group, name, function, limit)


def random(seed: str) -> np.random.Generator:
    """A generator of its own for each use."""
    return np.random.default_rng(list(seed.encode()))


# ---- one instruction, a thread an element


def instruction(group: str, text: str, result: str, *operands: np.ndarray, limit: Limit = Bits()) -> None:
    name = " ".join(re.sub(r"\{+\w\}+,?|;", "", text).split())
    kind = (
        np.float32 if result == "f32" else {"b16": np.int16, "b64": np.int64, "f64": np.float64}.get(result)
    )

    def outputs() -> Outputs:
        found = lanewise(text, result, *operands)
        return {"d": torch.from_numpy(found.view(kind or np.int32).copy())}

    add(group, name, outputs, limit)


def crossed(edges: np.ndarray, more: np.ndarray, operands: int) -> list[np.ndarray]:
    """All pairs of edges, in front of others; a third operand takes turns."""
    pairs = np.array(list(itertools.product(range(len(edges)), repeat=min(operands, 2)))).T
    picks = [edges[p] for p in pairs]
    if operands == 3:
        picks.append(edges[np.arange(len(picks[0])) * 7 % len(edges)])
    found = [np.concatenate([p, m]) for p, m in zip(picks, more)]
    return [x[: len(x) // 32 * 32] for x in found]


def words(operands: int, size: int = 4) -> list[np.ndarray]:
    edges = np.array([0, 1, 5, 31, 32, 255, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF], np.uint64)
    if size == 8:
        edges = np.concatenate([edges, np.array([1 << 63, (1 << 64) - 1, (1 << 63) - 1], np.uint64)])
    more = random("words").integers(0, (1 << 64) - 1, (operands, 64), np.uint64)
    more >>= random("shifts").integers(0, 8 * size, more.shape, np.uint64)
    return crossed(edges.astype(f"u{size}"), more.astype(f"u{size}"), operands)


def floats(operands: int) -> list[np.ndarray]:
    edges = [0.0, -0.0, 1.0, -1.5, np.inf, -np.inf, 1e-42, -3e-39, 3e38, -3.4e38, 1.1754944e-38, 0.3333333]
    edges = np.array([*edges, np.nan], np.float32)
    edges[-1:].view(np.uint32)[0] = 0xFF812345  # a NaN that none would compute
    r = random("floats")
    more = r.standard_normal((operands, 87)) * np.exp2(r.integers(-20, 20, (operands, 87)))
    return crossed(edges, more.astype(np.float32), operands)


INTEGERS = [
    "add.s32", "sub.s32", "mul.lo.s32", "mul.hi.s32", "mul.hi.u32", "min.s32", "max.s32", "min.u32", "max.u32",
    "min.relu.s32", "max.relu.s32", "and.b32", "or.b32", "xor.b32", "shl.b32", "shr.u32", "shr.s32", "div.s32", "div.u32",
    "rem.s32", "rem.u32",
]  # fmt: skip
for name in INTEGERS:
    instruction("arithmetic", f"{name} {{d}}, {{0}}, {{1}};", "b32", *words(2))
for name in ("neg.s32", "abs.s32", "not.b32", "popc.b32", "clz.b32", "brev.b32"):
    instruction("arithmetic", f"{name} {{d}}, {{0}};", "b32", *words(1))
for name in (
    "bfe.s32 {d}, {0}, {1}, {2};", "bfe.u32 {d}, {0}, {1}, {2};", "prmt.b32 {d}, {0}, {1}, {2};",
    "mad.lo.s32 {d}, {0}, {1}, {2};", "mad.hi.s32 {d}, {0}, {1}, {2};", "lop3.b32 {d}, {0}, {1}, {2}, 0x96;",
    "lop3.b32 {d}, {0}, {1}, {2}, 0xD8;", "shf.l.wrap.b32 {d}, {0}, {1}, {2};", "shf.r.wrap.b32 {d}, {0}, {1}, {2};",
    "shf.l.clamp.b32 {d}, {0}, {1}, {2};", "shf.r.clamp.b32 {d}, {0}, {1}, {2};",
):  # fmt: skip
    instruction("arithmetic", name, "b32", *words(3))
for name in ("mul.wide.s32", "mul.wide.u32"):
    instruction("arithmetic", f"{name} {{d}}, {{0}}, {{1}};", "b64", *words(2))
for name in ("add.s64", "mul.lo.s64", "mul.hi.u64", "min.s64"):
    instruction("arithmetic", f"{name} {{d}}, {{0}}, {{1}};", "b64", *words(2, 8))
for name in ("eq", "ne", "lt", "le", "gt", "ge"):
    for kind in ("s32", "u32"):
        instruction("arithmetic", f"setp.{name}.{kind} {{d}}, {{0}}, {{1}};", "pred", *words(2))

for name in ("add", "sub", "mul", "min", "max"):
    for ftz in ("", ".ftz"):
        instruction("arithmetic", f"{name}{ftz}.f32 {{d}}, {{0}}, {{1}};", "f32", *floats(2))
for ftz in ("", ".ftz"):
    instruction("arithmetic", f"fma.rn{ftz}.f32 {{d}}, {{0}}, {{1}}, {{2}};", "f32", *floats(3))
    instruction("arithmetic", f"fma.rn{ftz}.sat.f32 {{d}}, {{0}}, {{1}}, {{2}};", "f32", *floats(3))
    instruction("arithmetic", f"div.rn{ftz}.f32 {{d}}, {{0}}, {{1}};", "f32", *floats(2))
    for name in ("rcp.rn", "sqrt.rn", "neg", "abs"):
        instruction("arithmetic", f"{name}{ftz}.f32 {{d}}, {{0}};", "f32", *floats(1))
for name in ("add", "mul"):
    instruction("arithmetic", f"{name}.ftz.sat.f32 {{d}}, {{0}}, {{1}};", "f32", *floats(2))
instruction("arithmetic", "mul.rn.bf16x2 {d}, {0}, {1};", "b32", *words(2))
for name in (
    "eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan", "lt.ftz",
):  # fmt: skip
    instruction("arithmetic", f"setp.{name}.f32 {{d}}, {{0}}, {{1}};", "pred", *floats(2))


# ---- conversions


def conversions() -> np.ndarray:
    """Ties of every narrower type, the ends of their ranges, and fractions."""
    steps = [1 + m * 2.0**-k for k in (8, 9, 11, 12) for m in (1, 3, 5)] + [1 + 2.0**-9 + 2.0**-20]
    ends = [65504.0, 65519.9, 65520.0, 2.0**-24, 2.0**-25, 3 * 2.0**-25, 6.1e-5, 3.39e38, 3.4e38, 1e-40]
    whole = [0.5, 1.5, 2.5, 0.49999997, 2.0**31, 2.0**31 - 128, 2.0**32, 127.5, 128.5, 255.5, 1e20, 65536.5]
    x = np.array([0.0, np.inf, *steps, *ends, *whole], np.float32)
    r = random("conversions")
    more = (r.standard_normal(53) * np.exp2(r.integers(-16, 20, 53))).astype(np.float32)
    nan = np.array([0x7FC00000, 0xFF812345], np.uint32).view(np.float32)
    found = np.concatenate([x, -x, nan, more])
    return found[: len(found) // 32 * 32]


for name in ("rn.bf16", "rz.bf16", "rn.relu.bf16", "rn.f16", "rz.f16", "rn.relu.f16"):
    instruction("arithmetic", f"cvt.{name}.f32 {{d}}, {{0}};", "b16", conversions())
for name in ("rn.bf16x2", "rz.bf16x2", "rn.relu.bf16x2", "rn.f16x2", "rz.f16x2"):
    instruction(
        "arithmetic", f"cvt.{name}.f32 {{d}}, {{0}}, {{1}};", "b32", conversions(), conversions()[::-1]
    )
for name in ("rna.tf32", "rn.tf32"):
    instruction("arithmetic", f"cvt.{name}.f32 {{d}}, {{0}};", "b32", conversions())
for rounding, kind in itertools.product(("rni", "rzi", "rmi", "rpi"), ("s32", "u32")):
    instruction("arithmetic", f"cvt.{rounding}.{kind}.f32 {{d}}, {{0}};", "b32", conversions())
instruction("arithmetic", "cvt.rzi.ftz.s32.f32 {d}, {0};", "b32", conversions())
instruction("arithmetic", "cvt.rzi.s64.f32 {d}, {0};", "b64", conversions())
instruction("arithmetic", "cvt.f64.f32 {d}, {0};", "f64", conversions())
for kind in ("s32", "u32"):
    instruction("arithmetic", f"cvt.rn.f32.{kind} {{d}}, {{0}};", "f32", *words(1))
for kind in ("s8.s32", "u8.u32", "s16.s32", "u16.u32"):
    instruction("arithmetic", f"cvt.{kind} {{d}}, {{0}};", "b32", *words(1))
for kind in ("u8.s32", "s8.s32", "s16.s32", "u16.s32", "u8.u32"):
    instruction("arithmetic", f"cvt.sat.{kind} {{d}}, {{0}};", "b32", *words(1))
HALVES = np.concatenate(
    [np.arange(0, 1 << 16, 509), [0x7C00, 0xFC00, 0x7E01, 0x7F80, 0xFF80, 0x7FC1, 1, 0x8001]]
)
HALVES = HALVES[: len(HALVES) // 32 * 32].astype(np.uint16)
for kind in ("f16", "bf16"):
    instruction("arithmetic", f"cvt.f32.{kind} {{d}}, {{0}};", "f32", HALVES)
DOUBLES = np.nan_to_num(conversions()[:64], nan=7.0, posinf=np.inf, neginf=-np.inf).astype(np.float64)
DOUBLES = np.concatenate([DOUBLES * (1 + 2.0**-30), [1e300, -1e-300] * 16])
instruction("arithmetic", "cvt.rn.f32.f64 {d}, {0};", "f32", DOUBLES)
instruction("arithmetic", "cvt.rn.ftz.f32.f64 {d}, {0};", "f32", DOUBLES)


# ---- approximations

#: Within what the PTX ISA says of their errors, and as near as was seen: ulps of the result, or an absolute difference. The
#: emulator rounds what is exact.
ENDS = np.array(
    [
        0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1e-42,
        -1e-42,
        1e38,
        -1e38,
        1.1754944e-38,
        200,
        -200,
        127.9,
        1,
        -1,
        3e-39,
    ]
)
ENDS = np.resize(ENDS.astype(np.float32), 32)


def points(low: float, high: float, signed: bool = False) -> np.ndarray:
    """From 2^low to 2^high."""
    r = random(f"{low} {high}")
    x = np.exp2(r.uniform(low, high, 992)) * (r.choice([-1, 1], 992) if signed else 1)
    return np.concatenate([ENDS, x.astype(np.float32)])


for name, limit, x in (
    ("ex2.approx.ftz", Near(2), points(-10, 7, True)), ("ex2.approx", Near(2), points(-10, 7, True)),
    ("lg2.approx.ftz", Near(1, 2.0**-22), points(-60, 60)), ("lg2.approx", Near(1, 2.0**-22), points(-2, 2)),
    ("rcp.approx.ftz", Near(1), points(-120, 120, True)), ("rsqrt.approx.ftz", Near(1), points(-120, 120)),
    ("sqrt.approx.ftz", Near(1), points(-120, 120)), ("tanh.approx", Near(128), points(-12, 4, True)),
    ("sin.approx.ftz", Near(0, 2.0**-21), points(-10, 1.6, True)), ("cos.approx.ftz", Near(0, 2.0**-21), points(-10, 1.6, True)),
):  # fmt: skip
    if name[:3] in ("sin", "cos"):  # their error is documented from -pi to pi
        x = np.where(np.abs(x) < 3.2, x, np.float32(0))
    instruction("arithmetic", f"{name}.f32 {{d}}, {{0}};", "f32", x, limit=limit)


# ---- across lanes


def shuffle(mode: str, c: int) -> None:
    a, b = (x[:128] for x in words(2))
    for result, text in (("b32", "{d}, {0}"), ("pred", "%r20|{d}, {0}")):
        instruction("memory", f"shfl.sync.{mode}.b32 {text}, {{1}}, {c}, -1;", result, a, b)


for mode, width in itertools.product(("bfly", "idx", "up", "down"), (32, 8)):
    shuffle(mode, (32 - width) << 8 | (0 if mode == "up" else 31))
instruction("memory", "setp.lt.s32 %p1, {0}, 0; vote.sync.ballot.b32 {d}, %p1, -1;", "b32", words(1)[0][:64])
for name in ("any", "all", "uni"):
    instruction(
        "memory",
        f"setp.ge.u32 %p1, {{0}}, 1; vote.sync.{name}.pred {{d}}, %p1, -1;",
        "pred",
        words(1)[0][:64],
    )
instruction("memory", "elect.sync %r21|{d}, -1; mov.b32 %r20, {0};", "pred", words(1)[0][:64])
instruction("memory", "movmatrix.sync.aligned.m8n8.trans.b16 {d}, {0};", "b32", words(1)[0][:64])


def matrices(load: str, store: str, count: int) -> Outputs:
    """Rows of matrices by `ldmatrix`, which `stmatrix` stores elsewhere; what it does not write stays."""
    x = torch.arange(1, 257, dtype=torch.int16)
    y, z = torch.zeros(512, dtype=torch.int16), torch.zeros(32 * count, dtype=torch.int32)
    registers = "{" + ", ".join(f"%r{8 + n}" for n in range(count)) + "}"
    keep = "".join(f"st.global.b32 [%q11+{4 * n}], %r{8 + n};" for n in range(count))
    run(
        f"""
        mov.b32 %r1, shared_bytes; shl.b32 %r2, %r0, 4; add.s32 %r3, %r1, %r2; mul.wide.u32 %q8, %r0, 16;
        add.s64 %q9, %q0, %q8; mul.wide.u32 %q8, %r0, 32; add.s64 %q10, %q1, %q8; mul.wide.u32 %q8, %r0, {4 * count};
        add.s64 %q11, %q2, %q8; ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%q9];
        st.shared.v4.b32 [%r3], {{%r4, %r5, %r6, %r7}}; st.shared.v4.b32 [%r3+512], {{%r4, %r5, %r6, %r7}};
        st.shared.v4.b32 [%r3+1024], {{%r4, %r5, %r6, %r7}}; bar.warp.sync -1;
        ldmatrix.sync.aligned.m8n8.x{count}{load}.shared.b16 {registers}, [%r3]; {keep}
        stmatrix.sync.aligned.m8n8.x{count}{store}.shared.b16 [%r3+512], {registers}; bar.warp.sync -1;
        add.s32 %r3, %r3, %r2;
        ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r3+512]; st.global.v4.b32 [%q10], {{%r4, %r5, %r6, %r7}};
        ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r3+528]; st.global.v4.b32 [%q10+16], {{%r4, %r5, %r6, %r7}};
        """,
        x, y, z, shared=2048,
    )  # fmt: skip
    return {"shared": y, "registers": z}


for count, (load, store) in itertools.product((1, 2, 4), (("", ""), (".trans", ""), ("", ".trans"))):
    name = f"ldmatrix.x{count}{load} stmatrix.x{count}{store}"
    add("memory", name, lambda load=load, store=store, count=count: matrices(load, store, count))


# ---- atomic operations


def atomic(space: str, operation: str, kind: str, given: torch.Tensor, operand: torch.Tensor) -> Outputs:
    """A thread an element: what was there, and what is there then. ``space``: "global" or "shared"."""
    size = given.element_size()
    x, old = given.clone(), torch.zeros_like(given)
    where = {"global": "%q10", "shared": "%r3"}[space]
    # b32 registers serve pairs of halves, fp32 and fp64 have their own.
    r = {"f32": "%f", "f64": "%e"}.get(kind, {2: "%h", 4: "%r", 8: "%q"}[size])
    move = kind if kind in ("f32", "f64") else f"b{8 * size}"
    there = {2: 2, 4: 40, 8: 40}[size] if r in ("%h", "%r", "%q") else 2
    operands = f"{r}{there + 1}, {r}{there + 2}" if operation == "cas" else f"{r}{there + 1}"
    modifiers = f"{operation}.noftz" if kind[:3] in ("f16", "bf1") else operation
    run(
        f"""
        mov.b32 %r1, shared_bytes; mad.lo.s32 %r3, %r0, {size}, %r1; mul.wide.u32 %q8, %r0, {size};
        add.s64 %q10, %q0, %q8; add.s64 %q11, %q1, %q8; add.s64 %q12, %q2, %q8;
        ld.global.{move} {r}{there + 1}, [%q11]; ld.global.{move} {r}{there + 2}, [%q10]; st.shared.{move} [%r3], {r}{there + 2}; bar.sync 0;
        atom.{space}.{modifiers}.{kind} {r}{there}, [{where}], {operands}; st.global.{move} [%q12], {r}{there};
        {f"bar.sync 0; ld.shared.{move} {r}{there}, [%r3]; st.global.{move} [%q10], {r}{there};" if space == "shared" else ""}
        """,
        x, operand, old, threads=len(x), shared=8 * len(x),
    )  # fmt: skip
    return {"now": x, "before": old}


def integers(kind: str) -> list[torch.Tensor]:
    size = 8 if kind.endswith("64") else 4
    return [torch.from_numpy(x[:128].view(f"i{size}").copy()) for x in words(2, size)]


for space, (operation, kind) in itertools.product(
    ("global", "shared"),
    [
        ("add", "u32"), ("min", "s32"), ("max", "u32"), ("and", "b32"), ("or", "b32"), ("xor", "b32"), ("exch", "b32"),
        ("cas", "b32"), ("inc", "u32"), ("dec", "u32"), ("add", "u64"), ("max", "s64"), ("exch", "b64"),
    ],
):  # fmt: skip
    add(
        "memory", f"atom.{space}.{operation}.{kind}",
        lambda s=space, o=operation, k=kind: atomic(s, o, k, *integers(k)),
    )  # fmt: skip
HALVES_OF = {"f16": torch.float16, "bf16": torch.bfloat16}


def added(space: str, kind: str) -> Outputs:
    """Sums of floats; of fp16 and bf16 one or two a thread."""
    x, y = (torch.from_numpy(v[:192].copy()) for v in floats(2))
    if kind == "f64":
        return atomic(space, "add", kind, x.double(), y.double())
    if kind != "f32":
        dtype = HALVES_OF[kind.removesuffix("x2")]
        bits = torch.int32 if kind.endswith("x2") else torch.int16
        x, y = x.to(dtype).view(bits), y.to(dtype).view(bits)
    return atomic(space, "add", kind, x, y)


for space, kind in itertools.product(("global", "shared"), ("f32", "f64", "f16x2", "bf16x2", "f16", "bf16")):
    add("memory", f"atom.{space}.add.{kind}", lambda space=space, kind=kind: added(space, kind))
for space in ("global", "shared"):
    add(
        "memory", f"atom.{space}.cas.b16",
        lambda s=space: atomic(s, "cas", "b16", *(torch.from_numpy(v[:128].astype(np.uint16).view(np.int16)) for v in words(2))),
    )  # fmt: skip

RED = """
    mov.b32 %r1, shared_bytes; mul.wide.u32 %q8, %r0, 4; add.s64 %q9, %q0, %q8; add.s64 %q10, %q1, %q8; and.b32 %r2, %r0, 7;
    mul.wide.u32 %q11, %r2, 4; add.s64 %q11, %q2, %q11; mad.lo.s32 %r3, %r2, 4, %r1; ld.global.b32 %r4, [%q9]; mov.b32 %f4, %r4;
    st.shared.b32 [%r3], 0; bar.sync 0; red.<space>.<operation> [<where>], <r>4; bar.sync 0; ld.shared.b32 %r5, [%r3];
    st.global.b32 [%q10], %r5;
"""


def reduction(space: str, operation: str) -> Outputs:
    """`red` of eight words, by four threads each, in global memory beside what is there."""
    real = operation.endswith("f32")
    a = np.arange(1, 33, dtype=np.float32) if real else words(2)[0][40:72]
    x, y = torch.from_numpy(a.view(np.int32).copy()), torch.zeros(32, dtype=torch.int32)
    z = torch.from_numpy(words(2)[1][40:48].view(np.int32).copy()) * (not real)
    values = {"where": "%q11" if space == "global" else "%r3", "r": "%f" if real else "%r"}
    run(filled(RED, space=space, operation=operation, **values), x, y, z, shared=32)
    return {"shared": y, "global": z}


for space, operation in itertools.product(
    ("global", "shared"), ("add.u32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32", "add.f32", "relaxed.gpu.add.s32")
):  # fmt: skip
    add("memory", f"red.{space}.{operation}", lambda s=space, o=operation: reduction(s, o))

GENERIC = """
    mov.b32 %r1, shared_bytes; mad.lo.s32 %r2, %r0, 4, %r1; cvt.u64.u32 %q15, %r2; cvta.shared.u64 %q8, %q15; mul.wide.u32 %q9, %r0, 4;
    add.s64 %q10, %q0, %q9; add.s64 %q11, %q1, %q9; cvta.global.u64 %q12, %q10; st.b32 [%q8], %r0; bar.warp.sync -1;
    and.b32 %r3, %r0, 1; setp.eq.s32 %p1, %r3, 0; selp.b64 %q13, %q8, %q12, %p1; atom.add.u32 %r4, [%q13], 100;
    ld.b32 %r5, [%q13]; isspacep.shared %p2, %q13; isspacep.global %p3, %q13; selp.b32 %r6, 1000, 0, %p2; selp.b32 %r7, 2000, 0, %p3;
    add.s32 %r5, %r5, %r6; add.s32 %r5, %r5, %r7; cvta.to.shared.u64 %q14, %q8; cvt.u32.u64 %r8, %q14; ld.shared.b32 %r9, [%r8];
    mad.lo.s32 %r5, %r9, 10000, %r5; st.global.b32 [%q11], %r5;
"""


def generic() -> Outputs:
    """Half of the lanes in shared memory, half in global memory, by one instruction."""
    x, y = torch.arange(500, 532, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    run(GENERIC, x, y, shared=128)
    return {"seen": y, "global": x}


LOCAL = """
    .local .align 16 .b8 stack[64];
    mov.u64 %q8, stack; cvta.local.u64 %q9, %q8; and.b32 %r1, %r0, 15; mul.wide.u32 %q10, %r1, 4; add.s64 %q11, %q8, %q10;
    add.s64 %q12, %q9, %q10; mov.b32 %r2, 7; mov.b32 %r3, 8; mov.b32 %r4, 9; st.local.v4.b32 [%q8], {%r2, %r3, %r4, %r0};
    st.local.v4.b32 [%q8+16], {%r0, %r2, %r3, %r4}; st.local.v4.b32 [%q8+32], {%r4, %r0, %r2, %r3};
    st.local.v4.b32 [%q8+48], {%r3, %r4, %r0, %r2}; ld.local.b32 %r5, [%q11]; st.b32 [%q12], %r1; ld.local.b32 %r6, [%q11];
    ld.b32 %r7, [%q9+12]; mad.lo.s32 %r5, %r6, 100, %r5; mad.lo.s32 %r5, %r7, 10000, %r5; mul.wide.u32 %q13, %r0, 4;
    add.s64 %q13, %q0, %q13; st.global.b32 [%q13], %r5;
"""


def local() -> Outputs:
    """A place of its own for each thread, by local and by generic addresses."""
    y = torch.zeros(64, dtype=torch.int32)
    run(LOCAL, y, threads=64)
    return {"seen": y}


add("memory", "generic addresses", generic)
add("memory", "local memory", local)


# ---- mma.sync


def mma(shape: str, d: str, kind: str, whole: bool, special: bool = False) -> Outputs:
    """Fragments are registers of any content: ``whole`` numbers, whose sums are exact, or normal ones."""
    n, k = {"k4": (1, 4), "k8": (2, 8), "k16": (4, 16)}[shape[5:]]
    count_a, count_b = (2 * max(n // 2, 1), max(n // 2, 1)) if kind != "tf32" else (2 * (k // 4), k // 4)
    count_c = 4 if d == "f32" else 2
    r = random(f"mma {shape} {d} {kind} {whole}")
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "tf32": torch.float32}[kind]

    def registers(count: int, dtype: torch.dtype) -> torch.Tensor:
        elements = 4 // torch.zeros((), dtype=dtype).element_size()
        x = r.integers(-8, 9, (count, 32 * elements)) if whole else r.standard_normal((count, 32 * elements))
        if special:
            edges = [0.0, np.inf, -np.inf, np.nan, 1e-39, 3e38]
            x = np.where(r.random(x.shape) < 0.06, r.choice(edges, x.shape), x)
        return torch.from_numpy(x.astype(np.float32)).to(dtype).view(torch.int32)

    a, b = registers(count_a, dtype), registers(count_b, dtype)
    c = registers(count_c, torch.float32 if d == "f32" else torch.float16)
    out = torch.zeros_like(c)
    loads, names, first = "", [], 10
    for q, count in enumerate((count_a, count_b, count_c)):
        loads += f"add.s64 %q2{q}, %q{q}, %q8;"
        loads += "".join(f"ld.global.b32 %r{first + i}, [%q2{q}+{128 * i}];" for i in range(count))
        names.append("{" + ", ".join(f"%r{first + i}" for i in range(count)) + "}")
        first += count
    to = [f"%r{40 + i}" for i in range(count_c)]
    run(
        f"mul.wide.u32 %q8, %r0, 4; {loads} mma.sync.aligned.{shape}.row.col.{d}.{kind}.{kind}.{d} "
        f"{{{', '.join(to)}}}, {', '.join(names)}; add.s64 %q23, %q3, %q8;"
        + "".join(f"st.global.b32 [%q23+{128 * i}], {x};" for i, x in enumerate(to)),
        a, b, c, out,
    )  # fmt: skip
    return {"d": out.view(torch.float32 if d == "f32" else torch.float16)}


for shape, d, kind in (
    ("m16n8k8", "f32", "bf16"), ("m16n8k16", "f32", "bf16"), ("m16n8k8", "f32", "f16"), ("m16n8k16", "f32", "f16"),
    ("m16n8k8", "f16", "f16"), ("m16n8k16", "f16", "f16"), ("m16n8k4", "f32", "tf32"), ("m16n8k8", "f32", "tf32"),
):  # fmt: skip
    name = f"mma.{shape}.{d}.{kind}"
    add("matrices", f"{name} of integers", lambda x=(shape, d, kind): mma(*x, whole=True))
    add("matrices", name, lambda x=(shape, d, kind): mma(*x, whole=False))
    add(
        "matrices",
        f"{name} of integers, infinities and NaN",
        lambda x=(shape, d, kind): mma(*x, whole=True, special=True),
    )


# ---- wgmma


def operand(rows: int, columns: int, dtype: torch.dtype, whole: bool, seed: str) -> torch.Tensor:
    r = random(seed)
    x = r.integers(-8, 9, (rows, columns)) if whole else r.standard_normal((rows, columns))
    return torch.from_numpy(x.astype(np.float32)).to(dtype)


def multiplied(
    n: int, kind: str, d: str, *, mode: int = 1, mn_major: bool = False, whole: bool = False, shared_a: bool = False,
    a_mn_major: bool = False, factors: tuple[int, int] = (1, 1), accumulates: bool = True,
) -> Outputs:  # fmt: skip
    """One wgmma, the second step of k in its tile of B; ``mode`` is the swizzle of B."""
    k, dtype = wgmma.KINDS[kind]
    size = 32 // k
    width = wgmma.WIDTHS[mode]
    per_row = width // size
    depth = 2 * k if mn_major or width == 16 else max(per_row, k)
    a, b = (
        operand(64, 64 if a_mn_major else 2 * k, dtype, whole, f"a {n}"),
        operand(n, depth, dtype, whole, f"b {n}"),
    )
    if width == 16:
        leading, stride = (128 * (n // 8) + 256, 128) if mn_major else (128, 512)
    else:
        stride = 8 * width
        leading = -(-stride * (depth // 8) // 1024) * 1024 if mn_major else 2048
    at = 0 if depth == k else (2 * leading if width == 16 else 2 * stride if mn_major else 32)
    room = 64 * 1024
    whole_b = wgmma.image(b, mode, mn_major, leading, stride, room)
    db = wgmma.descriptor(at, mode, leading, stride)
    count = n // (2 if d == "f32" else 4)
    out = torch.zeros(128, count, dtype=torch.int32)
    if shared_a:
        # 64 x 64 K-major or MN-major, rows of 128 bytes, behind B; rows of tf32 are 32 long.
        tile = operand(64, 128 // size, dtype, whole, "tile")
        images = torch.cat([whole_b, wgmma.image(tile, 1, a_mn_major, 1024, 1024, 16384)])
        da = wgmma.descriptor(room + (2048 if a_mn_major else 32), 1, 1024, 1024)
        source, first = "%q47", f"{wgmma.ORIGIN} add.s64 %q47, %q45, {da};"
    else:
        images, source, first = whole_b, "{%r10, %r11, %r12, %r13}", wgmma.A_REGISTERS + wgmma.ORIGIN
    text = f"setp.eq.s32 %p1, %r0, 0; {wgmma.load(len(images), 0, '%q0', len(images))} {first} add.s64 %q44, %q45, {db};"
    text += wgmma.multiply(n, source, "%q44", int(mn_major), int(a_mn_major), kind, d, factors, accumulates)
    rows = a[:, :k].contiguous()
    run(text, images, rows, out, threads=128, shared=len(images) + 64)
    return {"d": out.view(torch.float32 if d == "f32" else torch.float16)}


TYPES = (("bf16", "f32"), ("f16", "f32"), ("f16", "f16"), ("tf32", "f32"))
for kind, d in TYPES:
    for n in (8, 24, 64, 128, 256):
        name = f"wgmma.m64n{n}.{d}.{kind} RS"
        add("matrices", f"{name} of integers", lambda n=n, x=(kind, d): multiplied(n, *x, whole=True))
        add("matrices", name, lambda n=n, x=(kind, d): multiplied(n, *x))
    add(
        "matrices",
        f"wgmma.m64n64.{d}.{kind} SS",
        lambda x=(kind, d): multiplied(64, *x, shared_a=True),
    )
    add(
        "matrices",
        f"wgmma.m64n64.{d}.{kind} SS of integers",
        lambda x=(kind, d): multiplied(64, *x, shared_a=True, whole=True),
    )
for mode, mn_major in itertools.product(wgmma.WIDTHS, (False, True)):
    name = f"wgmma.m64n64.f32.bf16, B {'MN' if mn_major else 'K'}-major, rows of {wgmma.WIDTHS[mode]} bytes"
    add(
        "matrices",
        name,
        lambda mode=mode, m=mn_major: multiplied(64, "bf16", "f32", mode=mode, mn_major=m, whole=True),
    )
add(
    "matrices", "wgmma.m64n64.f32.bf16, A MN-major",
    lambda: multiplied(64, "bf16", "f32", shared_a=True, a_mn_major=True, whole=True),
)  # fmt: skip
add(
    "matrices",
    "wgmma.m64n64.f32.bf16, A negated",
    lambda: multiplied(64, "bf16", "f32", factors=(-1, 1), whole=True),
)
add(
    "matrices",
    "wgmma.m64n64.f32.bf16, no D",
    lambda: multiplied(64, "bf16", "f32", accumulates=False, whole=True),
)


# ---- tensor maps and bulk copies


def maps() -> dict[str, Form]:
    """Maps of many forms, at an address that is no tensor's."""
    place, found = 0x7F12_3456_0000, {}
    sizes = {0: 1, 1: 2, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2, 10: 4, 11: 4, 12: 4}
    for kind, size in sizes.items():
        found[f"kind {kind}"] = Form(kind, place, (64, 48), (256 * size,), (16, 8))
    extents, strides, box = (100, 7, 9, 11, 13), (256, 2048, 32768, 1 << 20), (8, 1, 2, 3, 4)
    for rank in range(1, 6):
        found[f"rank {rank}"] = Form(9, place, extents[:rank], strides[: rank - 1], box[:rank])
    for swizzle in range(1, 4):
        found[f"swizzle {swizzle}"] = Form(9, place, (64, 48), (256,), (8 << swizzle, 8), swizzle=swizzle)
    for promotion in range(1, 4):
        found[f"promotion {promotion}"] = Form(9, place, (64, 48), (256,), (16, 8), promotion=promotion)
    found["fill with NaN"] = Form(9, place, (64, 48), (256,), (16, 8), fill=1)
    found["large"] = Form(9, place, (1 << 32, 1 << 31), (1 << 39,), (64, 256), swizzle=3)
    return found


def encoded() -> Outputs:
    """The half of each map that is understood; zeros where there is no such map."""
    found = {}
    for name, form in maps().items():
        try:
            raw = tensor_maps.encode(form)
        except RuntimeError as error:
            print(f"{name}: {error}")
            raw = bytes(128)
        found[name] = torch.frombuffer(bytearray(raw[:64]), dtype=torch.uint8)
    return found


add("memory", "cuTensorMapEncodeTiled", encoded)


BOX_OF = {
    0: torch.uint8,
    1: torch.int16,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    9: torch.bfloat16,
}


def box(
    shape: tuple[int, ...], box: tuple[int, ...], corner: tuple[int, ...], swizzle: int = 0, fill: int = 0, kind: int = 7
) -> Outputs:  # fmt: skip
    """A box of a tensor, as shared memory holds it; ``kind``: of `Form`. Rows narrower than the swizzle leave gaps."""
    size = torch.zeros((), dtype=BOX_OF[kind]).element_size()
    per = 16 // size
    count = int(np.prod(shape[:-1])) * -(-shape[-1] // per) * per
    x = torch.arange(1, 1 + count).to(BOX_OF[kind]).view(*shape[:-1], -1)[..., : shape[-1]]
    taken = int(np.prod(box)) * size
    room = taken // (box[0] * size) * (16 << swizzle) if swizzle else taken
    out = torch.zeros(room // 4, dtype=torch.float32)
    whole = torch.tensor([], dtype=BOX_OF[kind]).set_(x.untyped_storage())
    at = ", ".join(map(str, corner))
    text = filled(START + WAIT + OUT, bytes=taken, rank=len(box), corner=at, count=room // 4)
    if room > taken:
        text = filled(BLANKED, words=room // 4) + text
    run(text, tensor_map(x, box, swizzle, fill, kind), whole, out, shared=16400)
    return {"box": out}


#: 32 threads write -1 where a copy will leave gaps.
BLANKED = """
    mov.b32 %r1, shared_bytes; mov.b32 %r3, %r0; mov.b32 %r5, -1; AGAIN: setp.ge.s32 %p3, %r3, <words>; @%p3 bra BLANK;
    mad.lo.s32 %r4, %r3, 4, %r1; st.shared.b32 [%r4], %r5; add.s32 %r3, %r3, 32; bra AGAIN; BLANK: fence.proxy.async.shared::cta;
"""

for shape, extents, corner in (
    ((50,), (16,), (40,)), ((50,), (16,), (-4,)), ((9, 20), (8, 4), (16, 7)), ((9, 20), (8, 4), (-100, 3)),
    ((5, 9, 20), (8, 2, 3), (-4, 8, 1)), ((3, 5, 9, 20), (4, 2, 3, 2), (12, -1, 3, 2)),
    ((2, 3, 5, 9, 20), (4, 2, 3, 2, 2), (20, 0, 0, 0, 0)),
):  # fmt: skip
    add(
        "memory", f"box {extents} of {shape} at {corner}",
        lambda shape=shape, extents=extents, corner=corner: box(shape, extents, corner),
    )  # fmt: skip
for swizzle in range(1, 4):
    add("memory", f"box with swizzle {swizzle}", lambda s=swizzle: box((32, 32), (4 << s, 32), (0, 0), s))
    add(
        "memory",
        f"box with swizzle {swizzle} of half its width",
        lambda s=swizzle: box((32, 32), (2 << s, 24), (0, 3), s),
    )
add("memory", "box filled with NaN", lambda: box((9, 20), (8, 4), (16, 7), fill=1))
for kind, dtype in BOX_OF.items():
    if kind != 7:
        fill = int(dtype.is_floating_point)
        add(
            "memory",
            f"box of {str(dtype)[6:]}",
            lambda k=kind, f=fill: box((9, 20), (16, 4), (16, 7), fill=f, kind=k),
        )

SEND = """
    mov.b32 %r1, shared_bytes; mad.lo.s32 %r2, %r0, 4, %r1; mul.wide.u32 %q8, %r0, 4; add.s64 %q8, %q2, %q8; ld.global.b32 %r3, [%q8];
    st.shared.b32 [%r2], %r3; fence.proxy.async.shared::cta; bar.warp.sync -1; setp.ne.s32 %p1, %r0, 0; @%p1 bra END;
    <copy>; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:
"""


def sent(
    copy: str, there: torch.Tensor, given: torch.Tensor, kind: int = 3, extents: tuple[int, ...] = (8, 4)
) -> Outputs:
    """32 words from shared memory to a tensor, by a bulk copy of bytes, or of a box that leaves the tensor at two sides: the
    corner of what is stored cannot be negative."""
    y = there.clone()
    copy = copy.replace("CORNER", f"{extents[0]}, 4")
    run(filled(SEND, copy=copy), tensor_map(y, extents, kind=kind), y, given, shared=128)
    return {"tensor": y}


BLANK = torch.full((6, 12), -1, dtype=torch.int32)
ASCENDING = torch.arange(32, dtype=torch.int32)
for name, copy in (
    ("box", "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%q0, {CORNER}], [%r1]"),
    ("bytes", "cp.async.bulk.global.shared::cta.bulk_group [%q1+48], [%r1], 128"),
):
    add("memory", f"store of {name}", lambda copy=copy: sent(copy, BLANK, ASCENDING))
REDUCTIONS = (
    ("add", "u32"), ("min", "s32"), ("max", "u32"), ("inc", "u32"), ("dec", "u32"), ("and", "b32"), ("or", "b32"), ("xor", "b32"),
    ("add", "f32"), ("add.noftz", "f16"), ("add.noftz", "bf16"), ("min", "bf16"), ("max", "f16"),
)  # fmt: skip
MAP_KINDS = {"u32": 2, "s32": 3, "b32": 2, "f32": 7, "f16": 6, "bf16": 9}


def reduced(operation: str, kind: str, in_box: bool) -> Outputs:
    a, b = words(2)
    if kind in ("f32", "f16", "bf16"):
        a, b = (x[~np.isnan(x)] for x in floats(2))
    x, y = torch.from_numpy(a[:72].copy()), torch.from_numpy(b[8:40].copy())
    if kind in ("f16", "bf16"):
        dtype = torch.float16 if kind == "f16" else torch.bfloat16
        x, y = torch.from_numpy(a[:144].copy()).to(dtype), torch.from_numpy(b[8:72].copy()).to(dtype)
    x, y = x.view(torch.int32).view(6, 12), y.view(torch.int32)
    if in_box:
        operation = operation.removesuffix(".noftz")
        wide = x.view(torch.int16) if kind in ("f16", "bf16") else x
        copy = f"cp.reduce.async.bulk.tensor.2d.global.shared::cta.{operation}.tile.bulk_group [%q0, {{CORNER}}], [%r1]"
        extents = (8 * (wide.shape[1] // 12), 4)
        return sent(copy, wide, y, MAP_KINDS[kind], extents)
    copy = f"cp.reduce.async.bulk.global.shared::cta.bulk_group.{operation}.{kind} [%q1+48], [%r1], 128"
    return sent(copy, x, y)


for operation, kind in REDUCTIONS:
    add(
        "memory",
        f"cp.reduce.async.bulk.{operation}.{kind}",
        lambda x=(operation, kind): reduced(*x, in_box=False),
    )
    add(
        "memory",
        f"cp.reduce.async.bulk.tensor.{operation}.{kind}",
        lambda x=(operation, kind): reduced(*x, in_box=True),
    )

CP_ASYNC = """
    mov.b32 %r1, shared_bytes; mad.lo.s32 %r2, %r0, 16, %r1; mul.wide.u32 %q8, %r0, 16; add.s64 %q9, %q0, %q8; add.s64 %q10, %q1, %q8;
    and.b32 %r3, %r0, 15; min.u32 %r3, %r3, <size>; cp.async.<how>.shared.global [%r2], [%q9], <size>, %r3; cp.async.commit_group; cp.async.wait_group 0;
    mov.b32 %r5, 0; mov.b32 %r6, 0; mov.b32 %r7, 0; ld.shared.b32 %r4, [%r2]; setp.lt.s32 %p1, <size>, 16; @%p1 bra END;
    ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r2]; END: st.global.v4.b32 [%q10], {%r4, %r5, %r6, %r7};
"""


def cp_async(how: str, size: int) -> Outputs:
    """The first bytes are copied, as many as the lane's number says; the rest are zeros."""
    x, y = torch.from_numpy(words(2)[0][:128].view(np.int32).copy()), torch.zeros(128, dtype=torch.int32)
    run(filled(CP_ASYNC, how=how, size=size), x, y, shared=512)
    return {"y": y}


for how, size in (("ca", 4), ("ca", 16), ("cg", 16)):
    add("memory", f"cp.async.{how} of up to {size} bytes", lambda x=(how, size): cp_async(*x))


# ---- a product by tensor maps and wgmma, as kernels are built

GEMM = """
    setp.eq.s32 %p1, %r0, 0; mov.b32 %r1, shared_bytes; add.s32 %r2, %r1, 16384; @%p1 mbarrier.init.shared.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster; bar.sync 0; @!%p1 bra WAIT; mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 16384;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%q0, {0, 0}], [%r2];
    add.s32 %r3, %r1, 8192;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r3], [%q1, {0, 0}], [%r2];
"""


def gemm(rows: int, whole: bool) -> Outputs:
    """x [rows, 64] y [64, 64]^T in bf16, rows of x up to 64 filled with zeros, four steps of k."""
    x, y = (operand(n, 64, torch.bfloat16, whole, f"gemm {n}") for n in (rows, 64))
    out, acc = torch.zeros(128, 32), [f"%r{100 + j}" for j in range(32)]
    text = GEMM + WAIT + "bar.sync 0;" + wgmma.ORIGIN + "wgmma.fence.sync.aligned;"
    for step in range(4):
        da, db = (wgmma.descriptor(place + 32 * step, 1, 0, 1024) for place in (0, 8192))
        text += f"add.s64 %q4{6 + step % 2}, %q45, {da}; add.s64 %q5{step}, %q45, {db}; setp.ne.b32 %p3, {step}, 0;"
        text += "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" + ", ".join(acc) + "}, "
        text += f"%q4{6 + step % 2}, %q5{step}, %p3, 1, 1, 0, 0;"
    text += "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; mul.wide.u32 %q8, %r0, 128; add.s64 %q8, %q4, %q8;"
    text += "".join(f"st.global.b32 [%q8+{4 * j}], {r};" for j, r in enumerate(acc))
    zero = "".join(f"mov.b32 {r}, 0;" for r in acc)
    run(
        zero + text,
        *(tensor_map(v, (64, 64), 3, kind=9) for v in (x, y)),
        x,
        y,
        out,
        threads=128,
        shared=16448,
    )
    return {"d": out}


for rows in (64, 50):
    add(
        "matrices",
        f"product of {rows} rows by tensor maps",
        lambda rows=rows: gemm(rows, False),
    )
    add("matrices", f"product of {rows} rows by tensor maps, of integers", lambda rows=rows: gemm(rows, True))


# ---- clusters

MEET = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
SPECIALS = (
    "%cluster_ctaid.x", "%cluster_ctaid.y", "%cluster_nctaid.x", "%clusterid.x", "%clusterid.y", "%nclusterid.x",
    "%cluster_ctarank", "%cluster_nctarank", "%ctaid.x", "%nctaid.y", "%ntid.x", "%laneid", "%lanemask_lt", "%lanemask_ge",
)  # fmt: skip


def specials() -> Outputs:
    """Of a thread in every CTA."""
    out = torch.zeros(4, 6, len(SPECIALS), dtype=torch.int32)
    body = "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mad.lo.s32 %r3, %r2, 6, %r1;"
    body += f"mul.wide.s32 %q8, %r3, {4 * len(SPECIALS)}; add.s64 %q8, %q0, %q8; setp.ne.s32 %p1, %r0, 5; @%p1 bra END;"
    body += "".join(
        f"mov.u32 %r4, {name}; st.global.b32 [%q8+{4 * n}], %r4;" for n, name in enumerate(SPECIALS)
    )
    run(f"{body} END:", out, grid=(6, 4), cluster=(3, 2))
    return {"registers": out}


NEXT = """
    mov.b32 %r1, shared_bytes; mov.u32 %r2, %cluster_ctarank; mad.lo.s32 %r3, %r0, 4, %r1; add.s32 %r4, %r2, 1;
    and.b32 %r4, %r4, 3; mapa.shared::cluster.u32 %r5, %r3, %r4; mad.lo.s32 %r6, %r2, 100, %r0;
    add.s32 %r7, %r1, 128; mapa.shared::cluster.u32 %r8, %r7, %r4; setp.eq.s32 %p1, %r0, 0;
    @%p1 mbarrier.init.shared.b64 [%r7], 1; @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r7], 128;
    fence.mbarrier_init.release.cluster;
"""
PAST = f"""ld.shared.b32 %r9, [%r3]; mad.lo.s32 %r10, %r2, 32, %r0; mul.wide.s32 %q8, %r10, 4; add.s64 %q8, %q0, %q8;
    st.global.b32 [%q8], %r9; {MEET}"""
ARRIVED = "W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r7], 0; @!%p2 bra W; bar.warp.sync -1;"
REMOTE = {
    "mbarrier.arrive.shared::cluster": f"""@%p1 mbarrier.init.shared.b64 [%r7+8], 32; fence.mbarrier_init.release.cluster; {MEET}
        st.shared::cluster.b32 [%r5], %r6; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8+8];
        X: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r7+8], 0; @!%p2 bra X; bar.warp.sync -1;""",
    "mapa of generic addresses": f"""cvt.u64.u32 %q9, %r3; cvta.shared.u64 %q9, %q9; mapa.u64 %q10, %q9, %r4; {MEET}
        st.b32 [%q10], %r6; {MEET}""",
    "red.async": f"""st.shared.b32 [%r3], 5; {MEET}
        red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r5], %r6, [%r8]; {ARRIVED}""",
    "griddepcontrol": f"griddepcontrol.wait; {MEET} st.shared::cluster.b32 [%r5], %r6; {MEET} griddepcontrol.launch_dependents;",
    "st.shared::cluster": f"{MEET} st.shared::cluster.b32 [%r5], %r6; {MEET}",
    "ld.shared::cluster": f"st.shared.b32 [%r3], %r6; {MEET} ld.shared::cluster.b32 %r11, [%r5]; {MEET} st.shared.b32 [%r3], %r11;",
    "atom.shared::cluster": f"st.shared.b32 [%r3], %r6; {MEET} atom.shared::cluster.add.u32 %r11, [%r5], 7; {MEET}",
    "st.async": f"{MEET} st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r5], %r6, [%r8]; {ARRIVED}",
    "cp.async.bulk.shared::cluster.shared::cta": f"""add.s32 %r12, %r3, 256; st.shared.b32 [%r12], %r6;
        fence.proxy.async.shared::cta; {MEET} mapa.shared::cluster.u32 %r13, %r1, %r4; add.s32 %r14, %r1, 256;
        @%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r13], [%r14], 128, [%r8]; {ARRIVED}""",
}


def remote(body: str) -> Outputs:
    """Between each CTA and the next of its cluster."""
    out = torch.zeros(4, 32, dtype=torch.int32)
    run(f"{NEXT} {body} {PAST}", out, grid=4, cluster=(4,), shared=512)
    return {"seen": out}


def multicast(seed: int = 0) -> Outputs:
    """A box from rank 0 to ranks 0 and 2, each with an mbarrier of its own."""
    x, out = torch.arange(32, dtype=torch.int32).reshape(4, 8), torch.zeros(3, 32, dtype=torch.int32)
    body = f"""
        mov.b32 %r1, shared_bytes; mov.u32 %r2, %cluster_ctarank; setp.eq.s32 %p1, %r0, 0; setp.eq.s32 %p2, %r2, 1;
        @%p1 mbarrier.init.shared.b64 [%r1+128], 1; fence.mbarrier_init.release.cluster;
        @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1+128], 128; {MEET} setp.eq.s32 %p3, %r2, 0; and.pred %p3, %p3, %p1;
        mov.b16 %h1, 5; @%p3 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
            [%r1], [%q0, {{0, 0}}], [%r1+128], %h1;
        @%p2 bra END; WAIT: mbarrier.try_wait.parity.shared.b64 %p4, [%r1+128], 0; @!%p4 bra WAIT; mad.lo.s32 %r3, %r0, 4, %r1;
        ld.shared.b32 %r4, [%r3]; mad.lo.s32 %r5, %r2, 32, %r0; mul.wide.s32 %q8, %r5, 4; add.s64 %q8, %q2, %q8;
        st.global.b32 [%q8], %r4; END: bar.warp.sync -1; {MEET}
    """
    run(body, tensor_map(x, (8, 4)), x, out, grid=3, cluster=(3,), shared=144, seed=seed)
    return {"seen": out}


add("memory", "special registers", specials)
for name, body in REMOTE.items():
    add("memory", name, lambda body=body: remote(body))
add("memory", "cp.async.bulk.tensor.multicast::cluster", multicast)


# ---- the kernel of kda-sm90


def kda(
    family: str, T: int, chunk: int, warpgroups: int, *, unbounded: bool | None = None, **options: object
) -> Outputs:
    """A launch of a variant: o and the states. ``options``: of `make_inputs`, of the schedule, and of the call."""
    schedule = {n: options.pop(n) for n in ("queues", "depth", "intra_chunk_ctas") if n in options}
    call = {n: options.pop(n) for n in ("return_intermediate_states",) if n in options}
    x = make_inputs(family, T, **options).arguments | call
    found = prefill.prefill(x, prefill.config_of(x, chunk, warpgroups, unbounded), **schedule)
    return dict(zip(("o", "final_state", "states"), found))


#: Outputs of bf16, and sums of products that were rounded to bf16 on the way.
PREFILL = Norm(2.0**-10)

PACKED = {"lengths": (0, 33, 1, 66), "initial_state": True, "queues": 3, "depth": 5, "intra_chunk_ctas": 2}
for name, arguments, options in (
    ("bounded", ("slow", 100, 64, 1), {"H": 1}),
    ("bounded, GVA", ("slow", 72, 64, 2), {"H": 1, "HV": 2}),
    ("bounded", ("slow", 100, 32, 1), {"H": 1}),
    ("bounded, GVA, initial state", ("slow", 72, 32, 2), {"H": 1, "HV": 2, "initial_state": True}),
    ("bounded, steep, vote", ("steep", 72, 64, 1), {"H": 1, "unbounded": True}),
    ("bounded, saturated", ("saturated", 72, 32, 1), {"H": 1}),
    ("softplus, initial state", ("mixed", 100, 64, 1), {"H": 1, "initial_state": True}),
    ("softplus", ("mixed", 100, 32, 2), {"H": 1}),
    ("precomputed, masked, GVA", ("masked", 100, 64, 1), {"H": 1, "HV": 2, "intra_chunk_ctas": 2, "queues": 2}),
    ("precomputed, masked", ("masked", 100, 32, 2), {"H": 1}),
    ("precomputed, slow memory", ("memory", 72, 64, 2), {"H": 1}),
    ("packed, V-first states", ("slow", 100, 64, 2), {"H": 1, "state_v_first": True, "return_intermediate_states": True, **PACKED}),
    ("packed, states, GVA", ("slow", 100, 32, 1), {"H": 1, "HV": 2, "return_intermediate_states": True, **PACKED}),
):  # fmt: skip
    _, _, chunk, warpgroups = arguments
    title = f"prefill chunk {chunk}, {warpgroups} warpgroup{'s' * (warpgroups > 1)}, {name}"
    add("prefill", title, lambda a=arguments, o=options: kda(*a, **dict(o)), PREFILL)


def segments(chunk: int, v_first: bool) -> Outputs:
    """A sequence that two launches cut into segments: one summarises them, one runs them."""
    x = make_inputs("slow", 160, H=1, HV=2, initial_state=True, state_v_first=v_first).arguments
    found = prefill.in_segments(x, (70, 0, 90), chunk, queues=(3, 5), intra_chunk_ctas=2)
    return dict(zip(("o", "final_state"), found))


for chunk, v_first in ((64, False), (32, True)):
    title = f"prefill chunk {chunk}, in segments{', V-first states' * v_first}"
    add("prefill", title, lambda a=(chunk, v_first): segments(*a), PREFILL)


def merged() -> Outputs:
    """Starts of the segments of two sequences, in products of TF32 parts and fp32 sums."""
    r, shape = random("merge"), (5, 1, 128, 128)
    starts, exits, transitions = (
        torch.from_numpy(r.standard_normal(shape).astype(np.float32)) for _ in range(3)
    )
    prefill.merge(starts, exits, transitions / 8, torch.tensor([0, 4, 5], dtype=torch.int32))
    return {"starts": starts}


add("prefill", "merge of segments", merged)


#: Cases that no GPU has executed yet: `calibrate.py record --missing` does, and then they leave this list.
TO_BE_RECORDED: set[str] = set()
