"""wgmma: one instruction, over types, shapes, swizzles and major-ness."""

from __future__ import annotations

import itertools
from functools import partial

import torch

from helpers.emulator import wgmma_kernel as wgmma
from helpers.emulator.cases.inputs import matrix
from helpers.emulator.cases.registry import Outputs, add
from helpers.emulator.ptx import run

hopper = partial(add, arch="sm_90a")


def multiplied(
    n: int, kind: str, d: str, *, mode: int = 1, mn_major: bool = False, whole: bool = False, shared_a: bool = False,
    a_mn_major: bool = False, factors: tuple[int, int] = (1, 1), accumulates: bool = True,
) -> Outputs:  # fmt: skip
    """One wgmma on the second step of k in a tile of B.

    ``mode``: swizzle of B, a key of `wgmma_kernel.WIDTHS`. ``whole``: operands are integers. ``shared_a``: A is in shared memory
    instead of registers. ``factors``: signs of A and B. ``accumulates``: the initial D,
    all ones, is added.
    """
    k, dtype = wgmma.KINDS[kind]
    size = 32 // k
    width = wgmma.WIDTHS[mode]
    per_row = width // size
    depth = 2 * k if mn_major or width == 16 else max(per_row, k)
    a, b = (
        matrix(64, 64 if a_mn_major else 2 * k, dtype, whole, f"a {n}"),
        matrix(n, depth, dtype, whole, f"b {n}"),
    )
    if width == 16:
        leading, stride = (128 * (n // 8) + 256, 128) if mn_major else (128, 512)
    else:
        stride = 8 * width
        leading = -(-stride * (depth // 8) // 1024) * 1024 if mn_major else 2048
    at = 0 if depth == k else (2 * leading if width == 16 else 2 * stride if mn_major else 32)
    size_b = 64 * 1024
    whole_b = wgmma.image(b, mode, mn_major, leading, stride, size_b)
    db = wgmma.descriptor(at, mode, leading, stride)
    count = n // (2 if d == "f32" else 4)
    out = torch.zeros(128, count, dtype=torch.int32)
    if shared_a:
        # A is 64 x 64 with rows of 128 bytes and lies behind B. Rows of tf32 have 32 elements.
        tile = matrix(64, 128 // size, dtype, whole, "tile")
        images = torch.cat([whole_b, wgmma.image(tile, 1, a_mn_major, 1024, 1024, 16384)])
        da = wgmma.descriptor(size_b + (2048 if a_mn_major else 32), 1, 1024, 1024)
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
        hopper("matrices", f"{name} of integers", partial(multiplied, n, kind, d, whole=True))
        hopper("matrices", name, partial(multiplied, n, kind, d))
    name = f"wgmma.m64n64.{d}.{kind} SS"
    hopper("matrices", name, partial(multiplied, 64, kind, d, shared_a=True))
    hopper("matrices", f"{name} of integers", partial(multiplied, 64, kind, d, shared_a=True, whole=True))

bf16 = partial(multiplied, 64, "bf16", "f32", whole=True)
for mode, mn_major in itertools.product(wgmma.WIDTHS, (False, True)):
    name = f"wgmma.m64n64.f32.bf16, B {'MN' if mn_major else 'K'}-major, rows of {wgmma.WIDTHS[mode]} bytes"
    hopper("matrices", name, partial(bf16, mode=mode, mn_major=mn_major))
hopper("matrices", "wgmma.m64n64.f32.bf16, A MN-major", partial(bf16, shared_a=True, a_mn_major=True))
hopper("matrices", "wgmma.m64n64.f32.bf16, A negated", partial(bf16, factors=(-1, 1)))
hopper("matrices", "wgmma.m64n64.f32.bf16, no D", partial(bf16, accumulates=False))
