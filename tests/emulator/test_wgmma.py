"""wgmma and the copies that load its operands: exact products of integers over shapes, swizzles and majors."""

import numpy as np
import pytest
import torch
from helpers.emulator.ptx import lanewise, run
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

CASES = [
    (mode, mn_major, n)
    for mode, width in WIDTHS.items()
    for mn_major in (False, True)
    for n in (8, 24, 64, 128, 256)
    if not mn_major or n % (width // 2) == 0  # whole atoms
]


@pytest.mark.parametrize(("mode", "mn_major", "n"), CASES)
def test_b_in_shared_memory(mode, mn_major, n):
    """The second k16 step of a tile. Its start address lies within the period of the swizzle, if there is one."""
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
        "wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned; mov.b32 %r101, %r101;", "after the last wgmma.fence",
    ),
    "no wait": ("wgmma.wait_group.sync.aligned 0;", "", "accessed before its wait"),
    "a wait for too little": ("wait_group.sync.aligned 0;", "wait_group.sync.aligned 1;", "accessed before its wait"),
    "overwritten in flight": (
        "wgmma.commit_group.sync.aligned;", "wgmma.commit_group.sync.aligned; st.shared.b32 [shared_bytes], %r0;",
        "overwritten while a multiplication was in flight|a race",
    ),
    "written by the generic proxy": (
        "wgmma.fence.sync.aligned;", "@%p1 st.shared.b32 [shared_bytes], 0; bar.sync 0; wgmma.fence.sync.aligned;", "without a fence.proxy.async",
    ),
    "not waited for its bytes": ("@done bra OUT; bra AGAIN;", "", None),
    "a base offset": ("add.s64 %q44, %q45, ", "add.s64 %q45, %q45, 0x2000000000000; add.s64 %q44, %q45, ", "base offset"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_misuse_is_an_error(mistake):
    old, new, message = MISTAKES[mistake]
    b = integers(32, 64, seed=1)
    whole = image(b, 1, False, 0, 1024, 8192)
    text = body()
    assert old in text
    if message is None:  # without the wait, the bytes are used before they are written
        text = text.replace(
            "AGAIN: mbarrier.try_wait.parity.shared.b64 done, [%r3], 0; @done bra OUT; bra AGAIN; OUT:", ""
        )
        message = "nothing orders them|nothing has written|overwritten while|nothing has waited"
    else:
        text = text.replace(old, new)
    with pytest.raises(ptx_emulator.ExecutionError, match=message):
        for seed in range(4):
            run(text, whole, integers(64, 16), torch.zeros(128, 16), threads=128, shared=8192 + 64, seed=seed)


def test_a_kernel_may_rely_on_moves_behind_a_fence():
    old, new, _ = MISTAKES["written after the fence"]
    whole = image(integers(32, 64, seed=1), 1, False, 0, 1024, 8192)
    found = [torch.zeros(128, 16) for _ in range(2)]
    for out, text in zip(found, (body(), body().replace(old, new))):
        run(text, whole, integers(64, 16), out, threads=128, shared=8192 + 64, assume=("wgmma.fence",))
    assert torch.equal(*found) and found[0].any()


def test_the_unbroken_body_passes():
    b, out = integers(32, 64, seed=1), torch.zeros(128, 16)
    a = integers(64, 16)
    run(body(), image(b, 1, False, 0, 1024, 8192), a, out, threads=128, shared=8192 + 64)
    assert torch.equal(product(out, 32), a.float() @ b[:, :16].float().T + 1)
    assert np.isfinite(out.numpy()).all()


def tensor_core_sum(a, b, c):
    """One element of D of an mma.m16n8k16: c plus the products of the bf16 numbers ``a`` and ``b``, at most eight."""
    pairs = [torch.tensor([*x, *[0] * (8 - len(x))]).bfloat16().view(torch.int16) for x in (a, b)]
    # The first registers of A and B hold k = 2 (lane % 4) and the next one; elements from k = 8 on are 0.
    lanes = [np.resize(x.numpy().view(np.uint32), 32) for x in pairs]
    vector = lambda *registers: "{{" + ", ".join(registers) + "}}"
    d, of_a = vector("%r30", "%r31", "%r32", "%r33"), vector("{0}", "{0}", "%r40", "%r40")
    of_b, of_c = vector("{1}", "%r40"), vector("{2}", "{2}", "{2}", "{2}")
    text = (
        f"mov.b32 %r40, 0; mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {d}, {of_a}, {of_b}, {of_c};"
    )
    found = lanewise(f"{text} mov.b32 {{d}}, %r30;", "b32", *lanes, np.full(32, c, np.float32))
    assert (found == found[0]).all()  # all rows of A and all columns of B are the same
    return found.view(np.float32)[0]


def test_sums_of_products_cut_what_is_below_2_to_the_minus_25_of_the_largest_term():
    """The exponents of the factors decide which term is the largest."""
    for a, b, c, want in (
        ((1, 2.0**-13), (1, 2.0**-12), -1, 2.0**-25),
        ((1, 2.0**-13), (1, 2.0**-13), -1, 0),
        ((1, 2.0**-13), (1, -(2.0**-13)), -1, 0),
        # The exponent of 1.5 * 1.5 is that of 1; the exponent of c = -2.25 is that of 2.
        ((1.5, 1.5, 2.0**-13), (1.5, -1.5, 2.0**-12), 0, 2.0**-25),
        ((1.5, 2.0**-13), (1.5, 2.0**-12), -2.25, 0),
        ((np.inf,), (1,), 0, np.inf),
        ((np.inf,), (0,), 0, np.nan),
        # The sum is truncated to fp32.
        ((1, 2.0**-12), (1, 2.0**-12), 0, 1),
        ((2.0**-5,), (2.0**-20,), -(1 + 2.0**-23), -1),
        ((2.0**64,), (2.0**64,), 0, np.inf),
        ((2.0**64,), (2.0**64,), -(2.0**103), np.finfo(np.float32).max),
    ):
        assert np.array_equal(tensor_core_sum(a, b, c), want, equal_nan=True), (a, b, c)
