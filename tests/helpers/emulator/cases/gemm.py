"""A product that loads its operands by tensor maps and multiplies them by wgmma, as kernels do."""

from __future__ import annotations

from functools import partial

import torch

from helpers.emulator import wgmma_kernel as wgmma
from helpers.emulator.cases.inputs import matrix
from helpers.emulator.cases.registry import Outputs, add
from helpers.emulator.ptx import run
from helpers.emulator.tensor_maps import WAIT, tensor_map

GEMM = """
    setp.eq.s32 %p1, %r0, 0; mov.b32 %r1, shared_bytes; add.s32 %r2, %r1, 16384; @%p1 mbarrier.init.shared.b64 [%r2], 1;
    fence.mbarrier_init.release.cluster; bar.sync 0; @!%p1 bra WAIT; mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 16384;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r1], [%q0, {0, 0}], [%r2];
    add.s32 %r3, %r1, 8192;
    cp.async.bulk.tensor.2d.shared::cta.global.tile.mbarrier::complete_tx::bytes [%r3], [%q1, {0, 0}], [%r2];
"""


def gemm(rows: int, whole: bool) -> Outputs:
    """x [rows, 64] y [64, 64]^T in bf16 and four steps of k. The load fills the rows of x up to 64 with zeros."""
    x, y = (matrix(n, 64, torch.bfloat16, whole, f"gemm {n}") for n in (rows, 64))
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
        *(tensor_map(v, (64, 64), 3, kind=9) for v in (x, y)), x, y, out,
        threads=128, shared=16448,
    )  # fmt: skip
    return {"d": out}


for rows in (64, 50):
    name = f"product of {rows} rows by tensor maps"
    add("matrices", name, partial(gemm, rows, whole=False), arch="sm_90a")
    add("matrices", f"{name}, of integers", partial(gemm, rows, whole=True), arch="sm_90a")
