"""mma.sync: one instruction on fragments."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from helpers.emulator.cases.inputs import random
from helpers.emulator.cases.registry import Outputs, add
from helpers.emulator.ptx import run
from helpers.emulator.sums import SUMS, factors


def mma(shape: str, d: str, kind: str, whole: bool, special: bool = False) -> Outputs:
    """One mma.sync. The fragments hold integers from -8 to 8 if ``whole``, with exact sums, else normally distributed numbers.
    ``special`` adds infinities, NaN, and very small and large numbers."""
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
    add("matrices", f"{name} of integers", partial(mma, shape, d, kind, whole=True))
    add("matrices", name, partial(mma, shape, d, kind, whole=False))
    special = partial(mma, shape, d, kind, whole=True, special=True)
    add("matrices", f"{name} of integers, infinities and NaN", special)


def sums() -> Outputs:
    """One mma.sync for each tile of 16 by 8 of D, whose products differ widely in size (`helpers.emulator.sums`)."""
    a, b = factors()
    out = torch.zeros(len(a), len(b))
    run(
        f"""
        mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; shr.u32 %r3, %r0, 2; and.b32 %r4, %r0, 3; shl.b32 %r5, %r4, 2;
        mad.lo.s32 %r6, %r1, 16, %r3; mad.lo.s32 %r7, %r6, 32, %r5; mul.wide.s32 %q20, %r7, 1; add.s64 %q20, %q20, %q0;
        ld.global.b32 %r10, [%q20]; ld.global.b32 %r11, [%q20+256]; ld.global.b32 %r12, [%q20+16]; ld.global.b32 %r13, [%q20+272];
        mad.lo.s32 %r8, %r2, 8, %r3; mad.lo.s32 %r8, %r8, 32, %r5; mul.wide.s32 %q21, %r8, 1; add.s64 %q21, %q21, %q1;
        ld.global.b32 %r14, [%q21]; ld.global.b32 %r15, [%q21+16]; mov.b32 %r16, 0;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{%r20, %r21, %r22, %r23}}, {{%r10, %r11, %r12, %r13}},
            {{%r14, %r15}}, {{%r16, %r16, %r16, %r16}};
        mad.lo.s32 %r9, %r6, {len(b)}, 0; mad.lo.s32 %r9, %r2, 8, %r9; mad.lo.s32 %r9, %r4, 2, %r9; mul.wide.s32 %q22, %r9, 4;
        add.s64 %q22, %q22, %q2; st.global.b32 [%q22], %r20; st.global.b32 [%q22+4], %r21;
        st.global.b32 [%q22+{32 * len(b)}], %r22; st.global.b32 [%q22+{32 * len(b) + 4}], %r23;
        """,
        a, b, out, grid=(len(a) // 16, len(b) // 8),
    )  # fmt: skip
    return {"d": out}


add("matrices", f"mma.m16n8k16.f32.bf16, {SUMS}", sums)
