"""Instructions that move values between the lanes of a warp: shfl, vote, elect, movmatrix, ldmatrix and stmatrix."""

from __future__ import annotations

import itertools
from functools import partial

import torch

from helpers.emulator.cases.inputs import words
from helpers.emulator.cases.registry import Outputs, add, instruction
from helpers.emulator.ptx import run


def shuffle(mode: str, c: int) -> None:
    """Register a shuffle, once for its value and once for its predicate."""
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
    """`ldmatrix` loads ``count`` matrices and `stmatrix` stores them elsewhere: the registers between them, and shared memory with
    the bytes that `stmatrix` leaves unchanged."""
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
    add("memory", name, partial(matrices, load, store, count))
