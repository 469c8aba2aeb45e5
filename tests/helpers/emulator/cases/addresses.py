"""Generic addresses and local memory."""

from __future__ import annotations

import torch

from helpers.emulator.cases.registry import Outputs, add
from helpers.emulator.ptx import run

GENERIC = """
    mov.b32 %r1, shared_bytes; mad.lo.s32 %r2, %r0, 4, %r1; cvt.u64.u32 %q15, %r2; cvta.shared.u64 %q8, %q15; mul.wide.u32 %q9, %r0, 4;
    add.s64 %q10, %q0, %q9; add.s64 %q11, %q1, %q9; cvta.global.u64 %q12, %q10; st.b32 [%q8], %r0; bar.warp.sync -1;
    and.b32 %r3, %r0, 1; setp.eq.s32 %p1, %r3, 0; selp.b64 %q13, %q8, %q12, %p1; atom.add.u32 %r4, [%q13], 100;
    ld.b32 %r5, [%q13]; isspacep.shared %p2, %q13; isspacep.global %p3, %q13; selp.b32 %r6, 1000, 0, %p2; selp.b32 %r7, 2000, 0, %p3;
    add.s32 %r5, %r5, %r6; add.s32 %r5, %r5, %r7; cvta.to.shared.u64 %q14, %q8; cvt.u32.u64 %r8, %q14; ld.shared.b32 %r9, [%r8];
    mad.lo.s32 %r5, %r9, 10000, %r5; st.global.b32 [%q11], %r5;
"""


def generic() -> Outputs:
    """One instruction accesses shared memory in half of the lanes and global memory in the other half."""
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
    """Each thread has its own local memory, accessed by local and by generic addresses."""
    y = torch.zeros(64, dtype=torch.int32)
    run(LOCAL, y, threads=64)
    return {"seen": y}


add("memory", "generic addresses", generic)
add("memory", "local memory", local)
