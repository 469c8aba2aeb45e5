"""Asynchronous copies: bulk stores and reductions from shared memory, by boxes and by bytes; cp.async."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from helpers.emulator.cases.inputs import floats, words
from helpers.emulator.cases.registry import Outputs, add
from helpers.emulator.ptx import run
from helpers.emulator.tensor_maps import filled, tensor_map

SEND = """
    mov.b32 %r1, shared_bytes; mad.lo.s32 %r2, %r0, 4, %r1; mul.wide.u32 %q8, %r0, 4; add.s64 %q8, %q2, %q8; ld.global.b32 %r3, [%q8];
    st.shared.b32 [%r2], %r3; fence.proxy.async.shared::cta; bar.warp.sync -1; setp.ne.s32 %p1, %r0, 0; @%p1 bra END;
    <copy>; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:
"""


def sent(
    copy: str, there: torch.Tensor, given: torch.Tensor, kind: int = 3, extents: tuple[int, ...] = (8, 4)
) -> Outputs:
    """The tensor after a bulk copy of 32 words from shared memory, as bytes or as a box. The box extends past the tensor at its
    two upper ends only, because the corner of a stored box cannot be negative."""
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
    add("memory", f"store of {name}", partial(sent, copy, BLANK, ASCENDING))
REDUCTIONS = (
    ("add", "u32"), ("min", "s32"), ("max", "u32"), ("inc", "u32"), ("dec", "u32"), ("and", "b32"), ("or", "b32"), ("xor", "b32"),
    ("add", "f32"), ("add.noftz", "f16"), ("add.noftz", "bf16"), ("min", "bf16"), ("max", "f16"),
)  # fmt: skip
MAP_KINDS = {"u32": 2, "s32": 3, "b32": 2, "f32": 7, "f16": 6, "bf16": 9}


def reduced(operation: str, kind: str, in_box: bool) -> Outputs:
    """The tensor after a bulk reduction of 32 words, as a box or as bytes."""
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
    reduce = partial(reduced, operation, kind)
    add("memory", f"cp.reduce.async.bulk.{operation}.{kind}", partial(reduce, in_box=False))
    add("memory", f"cp.reduce.async.bulk.tensor.{operation}.{kind}", partial(reduce, in_box=True))

CP_ASYNC = """
    mov.b32 %r1, shared_bytes; mad.lo.s32 %r2, %r0, 16, %r1; mul.wide.u32 %q8, %r0, 16; add.s64 %q9, %q0, %q8; add.s64 %q10, %q1, %q8;
    and.b32 %r3, %r0, 15; min.u32 %r3, %r3, <size>; cp.async.<how>.shared.global [%r2], [%q9], <size>, %r3; cp.async.commit_group; cp.async.wait_group 0;
    mov.b32 %r5, 0; mov.b32 %r6, 0; mov.b32 %r7, 0; ld.shared.b32 %r4, [%r2]; setp.lt.s32 %p1, <size>, 16; @%p1 bra END;
    ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r2]; END: st.global.v4.b32 [%q10], {%r4, %r5, %r6, %r7};
"""


def cp_async(how: str, size: int) -> Outputs:
    """Lane n copies its first n % 16 bytes, at most ``size``. The rest of its ``size`` bytes become zeros."""
    x, y = torch.from_numpy(words(2)[0][:128].view(np.int32).copy()), torch.zeros(128, dtype=torch.int32)
    run(filled(CP_ASYNC, how=how, size=size), x, y, shared=512)
    return {"y": y}


for how, size in (("ca", 4), ("ca", 16), ("cg", 16)):
    add("memory", f"cp.async.{how} of up to {size} bytes", partial(cp_async, how, size))
