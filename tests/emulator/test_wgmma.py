"""wgmma and the copies that feed it: integer-valued products, exact, over shapes, swizzles and major-ness."""

import numpy as np
import pytest
import torch
from helpers.emulator.ptx import run
from helpers.emulator.wgmma_kernel import (
    A_REGISTERS,
    ORIGIN,
    WIDTHS,
    descriptor,
    image,
    integers,
    load,
    multiply,
    product,
)

import ptx_emulator
from ptx_emulator import floats
from ptx_emulator.matrices import tensor_core_sum

CASES = [
    (mode, mn_major, n)
    for mode, width in WIDTHS.items()
    for mn_major in (False, True)
    for n in (8, 24, 64, 128, 256)
    if not mn_major or n % (width // 2) == 0  # whole atoms
]


@pytest.mark.parametrize(("mode", "mn_major", "n"), CASES)
def test_b_in_shared_memory(mode, mn_major, n):
    """The second k16 step of a tile, found by a start address within the swizzle's period where there is
    one."""
    width = WIDTHS[mode]
    per_row = width // 2
    depth = 32 if mn_major or width == 16 else max(per_row, 16)
    a, b = integers(64, 16), integers(n, depth, seed=1)
    panels = n // per_row if mn_major else depth // per_row
    if width == 16:
        leading, stride = (128, 512) if not mn_major else (128 * (n // 8) + 256, 128)
    else:
        stride = 8 * width
        leading = 2048 if not mn_major else stride * (depth // 8)
    if mn_major and width > 16:
        leading = -(-leading // 1024) * 1024
    size = 8 * 1024 + 64 * 1024
    whole = image(b, mode, mn_major, leading, stride, size)
    if depth == 16:
        step, at = 0, 0
    elif mn_major:
        step, at = 1, 2 * (leading if width == 16 else stride)
    elif width == 16:
        step, at = 1, 2 * leading
    else:
        step, at = 1, 32
    assert panels
    d = descriptor(at, mode, leading, stride)
    out = torch.zeros(128, n // 2)
    run(
        f"setp.eq.s32 %p1, %r0, 0; {load(size, 0, '%q0', size)} {A_REGISTERS} {ORIGIN} add.s64 %q44, %q45, {d};"
        + multiply(n, "{%r10, %r11, %r12, %r13}", "%q44", int(mn_major)),
        whole, a, out, threads=128, shared=size + 64,
    )  # fmt: skip
    want = a.float() @ b[:, 16 * step : 16 * step + 16].float().T + 1
    assert torch.equal(product(out, n), want)


@pytest.mark.parametrize("a_major", (0, 1), ids=("k", "mn"))
def test_a_in_shared_memory(a_major):
    a, b = integers(64, 64), integers(32, 64, seed=1)
    images = torch.cat([image(a, 1, bool(a_major), 1024, 1024, 16384), image(b, 1, False, 0, 1024, 8192)])
    da = descriptor((32 if not a_major else 2048), 1, 1024, 1024)
    db = descriptor(16384 + 32, 1, 0, 1024)
    out = torch.zeros(128, 16)
    run(
        f"setp.eq.s32 %p1, %r0, 0; {load(24576, 0, '%q0', 24576)} {ORIGIN} add.s64 %q44, %q45, {da}; add.s64 %q46, %q45, {db};"
        + multiply(32, "%q44", "%q46", 0, a_major),
        images, a, out, threads=128, shared=24576 + 64,
    )  # fmt: skip
    assert torch.equal(product(out, 32), a[:, 16:32].float() @ b[:, 16:32].float().T + 1)


def body(n=32, b="%q44"):
    d = descriptor(0, 1, 0, 1024)
    return (
        f"setp.eq.s32 %p1, %r0, 0; {load(8192, 0, '%q0', 8192)} {A_REGISTERS} {ORIGIN} add.s64 %q44, %q45, {d};"
        + multiply(n, "{%r10, %r11, %r12, %r13}", b, 0)
    )


MISTAKES = {
    "no fence": ("wgmma.fence.sync.aligned;", "", "after the last wgmma.fence"),
    "written after the fence": (
        "wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned; mov.b32 %r101, 0;", "after the last wgmma.fence",
    ),
    "no wait": ("wgmma.wait_group.sync.aligned 0;", "", "accessed before its wait"),
    "a wait for too little": ("wait_group.sync.aligned 0;", "wait_group.sync.aligned 1;", "accessed before its wait"),
    "overwritten in flight": (
        "wgmma.commit_group.sync.aligned;", "wgmma.commit_group.sync.aligned; st.shared.b32 [shared_bytes], %r0;",
        "overwritten while a multiplication was in flight|a race",
    ),
    "written by the generic proxy": (
        "wgmma.fence.sync.aligned;", "st.shared.b32 [shared_bytes], 0; wgmma.fence.sync.aligned;", "without a fence.proxy.async",
    ),
    "not waited for its bytes": ("@done bra OUT; bra AGAIN;", "", None),
    "a base offset": ("add.s64 %q44, %q45, ", "add.s64 %q45, %q45, 0x2000000000000; add.s64 %q44, %q45, ", "base offset"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake):
    old, new, message = MISTAKES[mistake]
    b = integers(32, 64, seed=1)
    whole = image(b, 1, False, 0, 1024, 8192)
    text = body()
    assert old in text
    if message is None:  # the wait that is left out: the bytes are not known when they are used
        text = text.replace(
            "AGAIN: mbarrier.try_wait.parity.shared.b64 done, [%r3], 0; @done bra OUT; bra AGAIN; OUT:", ""
        )
        message = "nothing orders them|nothing has written"
    else:
        text = text.replace(old, new)
    with pytest.raises(ptx_emulator.ExecutionError, match=message):
        for seed in range(4):
            run(text, whole, integers(64, 16), torch.zeros(128, 16), threads=128, shared=8192 + 64, seed=seed)


def test_without_a_mistake():
    b, out = integers(32, 64, seed=1), torch.zeros(128, 16)
    a = integers(64, 16)
    run(body(), image(b, 1, False, 0, 1024, 8192), a, out, threads=128, shared=8192 + 64)
    assert torch.equal(product(out, 32), a.float() @ b[:, :16].float().T + 1)
    assert np.isfinite(out.numpy()).all()


def test_what_a_sum_of_products_cuts():
    """What is 2^-26 of the largest term, by the exponents of its factors, counts for nothing."""
    column = lambda *x: np.array(x)[:, None]
    for a, b, c, want in (
        ((1, 2.0**-13), (1, 2.0**-12), -1, 2.0**-25),
        ((1, 2.0**-13), (1, 2.0**-13), -1, 0),
        ((1, 2.0**-13), (1, -(2.0**-13)), -1, 0),
        # Of 1.5 * 1.5 it is that of 1, of 2.25 that of 2.
        ((1.5, 1.5, 2.0**-13), (1.5, -1.5, 2.0**-12), 0, 2.0**-25),
        ((1.5, 2.0**-13), (1.5, 2.0**-12), -2.25, 0),
    ):
        found = tensor_core_sum(column(*a).T, column(*b), np.array([[c]], np.float64))
        assert found == want, (a, b, c)
    with np.errstate(invalid="ignore"):
        assert np.isinf(tensor_core_sum(column(np.inf), column(1.0), None))
        assert np.isnan(tensor_core_sum(column(np.inf), column(0.0), None))
    near = floats.cut32(
        np.array([1 + 2.0**-24 + 2.0**-30, -(1 + 2.0**-23 - 2.0**-40), 2.0**128, 2.0**128 - 2.0**100])
    )
    assert near.tolist() == [1, -1, np.inf, float(np.finfo(np.float32).max)]
