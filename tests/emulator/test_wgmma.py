"""wgmma and the copies that feed it: integer-valued products, exact, over shapes, swizzles and major-ness."""

import numpy as np
import pytest
import torch
from ptx import run

import ptx_emulator

WIDTHS = {0: 16, 3: 32, 2: 64, 1: 128}  # bytes of a swizzled row, by the descriptor's field


def image(matrix, mode, mn_major, leading, stride, size):
    """bf16 [rows, depth] as the bytes of an operand, chunk by chunk of 16 bytes, as CUTLASS's canonical
    layouts say."""
    width = WIDTHS[mode]
    chunks = width // 16
    major = matrix.T.contiguous() if mn_major else matrix  # the contiguous mode last
    out = torch.zeros(size, dtype=torch.uint8)
    lines, columns = major.shape
    for line in range(lines):
        for chunk in range(columns // 8):
            atom, inner = divmod(line, 8)
            panel, c = divmod(chunk, chunks)
            if width == 16:
                place = inner * 16 + (
                    (atom * leading + panel * stride) if mn_major else (atom * stride + panel * leading)
                )
            else:
                swizzled = c ^ inner * width // 128 % chunks
                place = atom * stride + panel * leading + inner * width + swizzled * 16
            out[place : place + 16] = major[line, 8 * chunk : 8 * chunk + 8].contiguous().view(torch.uint8)
    return out


def descriptor(address, mode, leading, stride):
    return address >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | mode << 62


def load(size, place, pointer, barrier):
    """Bytes to shared memory, by one thread, and the wait of all for them."""
    return f"""
    @%p1 mbarrier.init.shared.b64 [shared_bytes+{barrier}], 1;
    bar.sync 0;
    mov.b32 %r1, shared_bytes; add.s32 %r2, %r1, {place}; add.s32 %r3, %r1, {barrier};
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], {size};
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [{pointer}], {size}, [%r3];
    {{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.shared.b64 done, [%r3], 0; @done bra OUT; bra AGAIN; OUT: }}
    """


A_REGISTERS = """
    shr.u32 %r4, %r0, 5; and.b32 %r5, %r0, 31; shr.u32 %r6, %r5, 2; and.b32 %r7, %r5, 3;
    mad.lo.s32 %r8, %r4, 16, %r6; mul.lo.s32 %r8, %r8, 32; mad.lo.s32 %r8, %r7, 4, %r8; cvt.u64.u32 %q40, %r8;
    add.s64 %q41, %q1, %q40;
    ld.global.b32 %r10, [%q41]; ld.global.b32 %r11, [%q41+256]; ld.global.b32 %r12, [%q41+16]; ld.global.b32 %r13, [%q41+272];
"""


def multiply(n, a, b, b_major, a_major=0):
    """One wgmma of k16 onto accumulators of 1, which go to tensor 2 as [128, n / 2]."""
    acc = [f"%r{100 + j}" for j in range(n // 2)]
    vector = "{" + ", ".join(acc) + "}"
    majors = f"{b_major}" if a.startswith("{") else f"{a_major}, {b_major}"
    stores = "\n".join(f"st.global.b32 [%q43+{4 * j}], {x};" for j, x in enumerate(acc))
    return f"""
    {" ".join(f"mov.b32 {x}, 0f3F800000;" for x in acc)}
    setp.eq.b32 %p2, 0, 0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {vector}, {a}, {b}, %p2, 1, 1, {majors};
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    mul.lo.s32 %r9, %r0, {2 * n}; cvt.u64.u32 %q42, %r9; add.s64 %q43, %q2, %q42;
    {stores}
    """


def product(out, n):
    """[64, n] from the accumulators of the 128 threads, as the PTX ISA's table of D has them."""
    found = torch.zeros(64, n)
    for thread in range(128):
        for j in range(n // 2):
            row = thread // 32 * 16 + thread % 32 // 4 + 8 * (j // 2 % 2)
            found[row, j // 4 * 8 + thread % 4 * 2 + j % 2] = out[thread, j]
    return found


def integers(*shape, seed=0):
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


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
    d = descriptor(1024 + at, mode, leading, stride)
    out = torch.zeros(128, n // 2)
    run(
        f"setp.eq.s32 %p1, %r0, 0; {load(size, 0, '%q0', size)} {A_REGISTERS} mov.b64 %q44, {d};"
        + multiply(n, "{%r10, %r11, %r12, %r13}", "%q44", int(mn_major)),
        whole, a, out, threads=128, shared=size + 64,
    )  # fmt: skip
    want = a.float() @ b[:, 16 * step : 16 * step + 16].float().T + 1
    assert torch.equal(product(out, n), want)


@pytest.mark.parametrize("a_major", (0, 1), ids=("k", "mn"))
def test_a_in_shared_memory(a_major):
    a, b = integers(64, 64), integers(32, 64, seed=1)
    images = torch.cat([image(a, 1, bool(a_major), 1024, 1024, 16384), image(b, 1, False, 0, 1024, 8192)])
    da = descriptor(1024 + (32 if not a_major else 2048), 1, 1024, 1024)
    db = descriptor(1024 + 16384 + 32, 1, 0, 1024)
    out = torch.zeros(128, 16)
    run(
        f"setp.eq.s32 %p1, %r0, 0; {load(24576, 0, '%q0', 24576)} mov.b64 %q44, {da}; mov.b64 %q45, {db};"
        + multiply(32, "%q44", "%q45", 0, a_major),
        images, a, out, threads=128, shared=24576 + 64,
    )  # fmt: skip
    assert torch.equal(product(out, 32), a[:, 16:32].float() @ b[:, 16:32].float().T + 1)


def body(n=32, b="%q44"):
    d = descriptor(1024, 1, 0, 1024)
    return (
        f"setp.eq.s32 %p1, %r0, 0; {load(8192, 0, '%q0', 8192)} {A_REGISTERS} mov.b64 %q44, {d};"
        + multiply(n, "{%r10, %r11, %r12, %r13}", b, 0)
    )


MISTAKES = {
    "no fence": ("wgmma.fence.sync.aligned;", "", "after the last wgmma.fence"),
    "written after the fence": (
        "wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned; mov.b32 %r101, 0;", "after the last wgmma.fence",
    ),
    "no wait": ("wgmma.wait_group.sync.aligned 0;", "", "that nothing has waited for"),
    "a wait for too little": ("wait_group.sync.aligned 0;", "wait_group.sync.aligned 1;", "that nothing has waited for"),
    "overwritten in flight": (
        "wgmma.commit_group.sync.aligned;", "wgmma.commit_group.sync.aligned; st.shared.b32 [shared_bytes], %r0;",
        "overwritten while a multiplication was in flight",
    ),
    "written by the generic proxy": (
        "wgmma.fence.sync.aligned;", "st.shared.b32 [shared_bytes], 0; wgmma.fence.sync.aligned;", "without a fence.proxy.async",
    ),
    "not waited for its bytes": ("@done bra OUT; bra AGAIN;", "", None),
    "a base offset": ("mov.b64 %q44, ", "mov.b64 %q44, 0x2000000000000; add.s64 %q44, %q44, ", "base offset"),
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
