"""tcgen05: one instruction. No GPU has executed these cases yet; sums are the first question to one (`helpers.emulator.sums`)."""

from __future__ import annotations

from functools import partial

import torch

from helpers.emulator.cases.inputs import matrix
from helpers.emulator.cases.registry import TO_BE_RECORDED, Outputs, add
from helpers.emulator.ptx import run
from helpers.emulator.sums import SUMS, factors
from helpers.emulator.tcgen05 import HEAD, LAYOUTS, TAIL, ZERO, copied_out, product, registers

KINDS = {"f16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32}


def blackwell(name: str, function: partial[Outputs]) -> None:
    """Register a case that a Blackwell GPU will record."""
    add("blackwell", name, function, arch="sm_100a")
    TO_BE_RECORDED.add(f"blackwell/{name}")


def multiplied(m: int, n: int, dtype: str, whole: bool) -> Outputs:
    """One mma from a D of zeros, operands in shared memory without a swizzle."""
    k = 8 if dtype == "tf32" else 16
    a, b = (matrix(rows, k, KINDS[dtype], whole, f"{name} {dtype}") for rows, name in ((m, "a"), (n, "b")))
    return {"d": product(m, n, a, b, "tf32" if dtype == "tf32" else "f16", first=ZERO)}


def sums() -> Outputs:
    """One mma whose products differ widely in size, so that D shows how a sum is aligned and rounded."""
    return {"d": product(128, 64, *factors(), first=ZERO)}


def rounded_to_half(m: int) -> Outputs:
    """One mma with D in fp16."""
    a, b = (matrix(rows, 16, torch.float16, False, f"{name} half") for rows, name in ((m, "a"), (64, "b")))
    return {"d": product(m, 64, a, b, first=ZERO, half=True)}


def swizzled(mode: int, majors: tuple[bool, bool], m: int = 128, lane: int = 0) -> Outputs:
    """One mma of integers in bf16, with a swizzle (a number of wgmma) and an order of each operand. ``lane``: the first one of D."""
    deep = {1: 64, 2: 32, 3: 16}[mode]
    shapes = ((m, 16 if majors[0] else deep), (64, 16 if majors[1] else deep))
    a, b = (matrix(*shape, torch.bfloat16, True, f"swizzled {i}") for i, shape in enumerate(shapes))
    at = f"add.s32 %r10, %r8, {lane << 16};"
    change = lambda body: body.replace("kind::f16 [%r8]", "kind::f16 [%r10]")
    return {"d": product(m, 64, a, b, first=ZERO + at, change=change, modes=(mode, mode), majors=majors)}


def loaded(shape: str) -> Outputs:
    """A load of words that a store in the shape 32x32b wrote by lane and column."""
    each, _, _ = LAYOUTS[shape]
    count = 4 * each
    words = "mul.lo.s32 %r5, %r0, 100;" + "".join(f"add.s32 %r{20 + n}, %r5, {n};" for n in range(32))
    store = f"tcgen05.st.sync.aligned.32x32b.x32.b32 [%r9], {{{registers(20, 32)}}}; tcgen05.wait::st.sync.aligned;"
    load = f"tcgen05.ld.sync.aligned.{shape}.x4.b32 {{{registers(100, count)}}}, [%r9]; tcgen05.wait::ld.sync.aligned;"
    load += f"mul.wide.s32 %q20, %r0, {4 * count}; add.s64 %q20, %q20, %q0;"
    load += "".join(f"st.global.b32 [%q20+{4 * n}], %r{100 + n};" for n in range(count))
    out = torch.zeros(128, count, dtype=torch.int32)
    run(HEAD + words + store + load + TAIL, out, threads=128, shared=32)
    return {"words": out}


def stored(shape: str) -> Outputs:
    """A store of a shape, loaded by lane and column."""
    each, _, _ = LAYOUTS[shape]
    count = 4 * each
    ids = "mul.lo.s32 %r5, %r0, 1000;" + "".join(f"add.s32 %r{20 + n}, %r5, {1 + n};" for n in range(count))
    store = f"tcgen05.st.sync.aligned.{shape}.x4.b32 [%r9], {{{registers(20, count)}}}; tcgen05.wait::st.sync.aligned;"
    out = torch.zeros(128, 64, dtype=torch.int32)
    run(HEAD + ZERO + ids + store + copied_out("%q0") + TAIL, out, threads=128, shared=32)
    return {"words": out}


for dtype in KINDS:
    for m, n in ((128, 64), (64, 64), (128, 16)):
        name = f"tcgen05.mma.m{m}n{n}.{dtype}"
        blackwell(f"{name} of integers", partial(multiplied, m, n, dtype, True))
        blackwell(name, partial(multiplied, m, n, dtype, False))
blackwell(f"tcgen05.mma.m128n64.bf16, {SUMS}", partial(sums))
for m in (128, 64):
    blackwell(f"tcgen05.mma.m{m}n64.f16, D in fp16", partial(rounded_to_half, m))
for mode in (1, 2, 3):
    for majors in ((False, False), (False, True), (True, True)):
        text = ", ".join("MN" if major else "K" for major in majors)
        blackwell(f"tcgen05.mma, swizzle {mode}, {text}", partial(swizzled, mode, majors))
# What the backward needs: A with its rows contiguous, and 64 rows of D in either half of the lanes.
for lane in (0, 16):
    for majors in ((False, False), (False, True), (True, False), (True, True)):
        text = ", ".join("MN" if major else "K" for major in majors)
        name = f"tcgen05.mma.m64 from lane {lane}, swizzle 1, {text}"
        blackwell(name, partial(swizzled, 1, majors, m=64, lane=lane))
blackwell("tcgen05.mma, swizzle 1, MN, K", partial(swizzled, 1, (True, False)))
for shape in LAYOUTS:
    blackwell(f"tcgen05.ld.{shape}", partial(loaded, shape))
    blackwell(f"tcgen05.st.{shape}", partial(stored, shape))
