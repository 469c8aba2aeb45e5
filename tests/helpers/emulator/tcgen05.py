"""Small kernels of tcgen05: a product, accesses of tensor memory by a warpgroup, and the layouts of operands."""

from __future__ import annotations

import torch

from helpers.emulator import wgmma_kernel as wgmma
from helpers.emulator.ptx import run


def integers(*shape, seed=0):
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


#: A warpgroup allocates 64 columns of tensor memory. %r8: their address, %r9: the address of the warp's lanes, %r2: an mbarrier.
HEAD = """
    mov.b32 %r1, shared_bytes; add.s32 %r2, %r1, 16; shr.u32 %r3, %r0, 5; setp.eq.s32 %p1, %r3, 0; @!%p1 bra READY;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 64; setp.eq.s32 %p2, %r0, 0;
    @%p2 mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster; READY: bar.sync 0; ld.shared.b32 %r8, [%r1]; shl.b32 %r4, %r3, 21;
    add.s32 %r9, %r8, %r4; setp.eq.s32 %p2, %r0, 0;
"""
TAIL = "bar.sync 0; @!%p1 bra END; tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r8, 64; END:"


def registers(first, count):
    return ", ".join(f"%r{first + n}" for n in range(count))


def copied_out(out, count=64, pack=""):
    text = f"tcgen05.ld.sync.aligned.32x32b.x{count}{pack}.b32 {{{registers(100, count)}}}, [%r9]; tcgen05.wait::ld.sync.aligned;"
    text += f"mul.wide.s32 %q20, %r0, {4 * count}; add.s64 %q20, %q20, {out};"
    return text + "".join(f"st.global.b32 [%q20+{4 * n}], %r{100 + n};" for n in range(count))


#: By shape: registers of a thread in one repetition, (lane, column) of register n of thread t, and columns of a repetition. Sources:
#: the PTX ISA's figures "Matrix Fragment for shape .32x32b, .16x64b, .16x128b, .16x256b", and the DSL's layouts of these copies.
LAYOUTS = {
    "32x32b": (1, lambda t, n: (t, 0), 1),
    "16x64b": (1, lambda t, n: (t // 4 + t % 2 * 8, t // 2 % 2), 2),
    "16x128b": (2, lambda t, n: (t // 4 + 8 * n, t % 4), 4),
    "16x256b": (4, lambda t, n: (t // 4 + 8 * (n // 2), t % 4 * 2 + n % 2), 8),
}


ZERO = "".join(f"mov.b32 %r{20 + i}, 0;" for i in range(64))
ZERO += f"tcgen05.st.sync.aligned.32x32b.x64.b32 [%r9], {{{registers(20, 64)}}}; tcgen05.wait::st.sync.aligned; bar.sync 0;"


#: Copies the operands, tensor 0, unchanged to shared memory from %r1 + 1024 on.
FILL = """
    mov.b32 %r5, %r0; COPY: setp.ge.s32 %p3, %r5, <words>; @%p3 bra COPIED; mul.wide.s32 %q8, %r5, 4; add.s64 %q8, %q8, %q0;
    ld.global.b32 %r6, [%q8]; mad.lo.s32 %r7, %r5, 4, %r1; st.shared.b32 [%r7+1024], %r6; add.s32 %r5, %r5, 128; bra COPY;
    COPIED: fence.proxy.async.shared::cta; bar.sync 0;
"""
MULTIPLY = """
    @!%p2 bra ISSUED; tcgen05.mma.cta_group::1.kind::<kind> [%r8], <a>, %q11, %r11, {%r12, %r12, %r12, %r12}, %p5;
    <commit> ISSUED: W: mbarrier.try_wait.parity.shared.b64 %p4, [%r2], 0; @!%p4 bra W; tcgen05.fence::after_thread_sync;
"""
COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2];"


VERSION = 1 << 46  # the constant of bits 46 to 48 of a matrix descriptor of tcgen05


def instruction_descriptor(m, n, dtype=torch.bfloat16, half=False, majors=(False, False)):
    """Of an mma of operands of ``dtype``. ``half``: D is fp16, else fp32. ``majors``: which operands are MN-major."""
    types = {
        torch.float16: 0,
        torch.bfloat16: 1,
        torch.float32: 2,
        torch.float8_e4m3fn: 0,
        torch.float8_e5m2: 1,
    }[dtype]
    descriptor = (not half) << 4 | types << 7 | types << 10 | n // 8 << 17 | m // 16 << 24
    return descriptor | majors[0] << 15 | majors[1] << 16


def core_matrices(x):
    """The layout of x [rows, columns] without a swizzle: blocks of 8 rows by 16 bytes, along the columns first. Returns its bytes,
    the leading and the stride offset."""
    rows, per = x.shape[0], 16 // x.element_size()
    image = x.reshape(rows // 8, 8, x.shape[1] // per, per).permute(0, 2, 1, 3).contiguous()
    return image.view(torch.uint8).flatten(), 128, 128 * (x.shape[1] // per)


#: Swizzle field of a wgmma descriptor -> that of a tcgen05 descriptor.
SWIZZLES = {0: 0, 1: 2, 2: 4, 3: 6}


def swizzled(x, mode, mn_major):
    """The layout of an operand under swizzle ``mode``, a number of wgmma. Returns its bytes, the leading and the stride offset."""
    width = wgmma.WIDTHS[mode]
    lines, columns = x.T.shape if mn_major else x.shape
    if width == 16:
        # Blocks of 8 lines by 16 bytes; blocks of neighbouring columns follow each other.
        outer, inner = 128 * (columns * x.element_size() // 16), 128
        leading, stride = (outer, inner) if mn_major else (inner, outer)
    else:
        stride = 8 * width
        leading = -(-lines // 8) * stride
    size = -(-max(lines, 8) // 8) * 8 * max(columns * x.element_size(), width)
    size = -(-size // 1024) * 1024
    return wgmma.image(x, mode, mn_major, leading, stride, size), leading, stride


def product(
    m,
    n,
    a,
    b,
    kind="f16",
    *,
    first="",
    change=lambda body: body,
    modes=None,
    majors=(False, False),
    half=False,
    seed=0,
    **options,
):
    """The words [128, 64] of tensor memory after one mma of a [m, k] and b [n, k].

    ``first``: PTX before the mma. ``change``: edits the body. ``modes``: swizzles of a and b, as numbers of wgmma. ``majors``: which
    of them are MN-major. ``half``: D is fp16; the result is [128, 32] then. ``options``: of `ptx_emulator.run`.
    """
    if modes is None:
        images, modes = [core_matrices(x) for x in (a, b)], (0, 0)
    else:
        images = [swizzled(x, mode, major) for x, mode, major in zip((a, b), modes, majors)]
    (image_a, lead_a, stride_a), (image_b, lead_b, stride_b) = images
    image = torch.cat([image_a, image_b]).view(torch.int32)
    descriptor = instruction_descriptor(m, n, b.dtype, half, majors)
    mode_a, mode_b = (SWIZZLES[mode] << 61 for mode in modes)
    constant = lambda lead, stride: (lead >> 4) << 16 | (stride >> 4) << 32 | VERSION
    body = HEAD + FILL.replace("<words>", str(image.numel())) + first
    body += f"""
        cvt.u64.u32 %q10, %r1; add.s64 %q10, %q10, 1024; shr.u64 %q10, %q10, 4; add.s64 %q11, %q10, {len(image_a) >> 4};
        or.b64 %q10, %q10, {constant(lead_a, stride_a) | mode_a}; or.b64 %q11, %q11, {constant(lead_b, stride_b) | mode_b};
        mov.b32 %r11, {descriptor}; mov.b32 %r12, 0; setp.ne.s32 %p5, 0, 0;
    """
    multiply = MULTIPLY.replace("<kind>", kind).replace("<a>", "%q10").replace("<commit>", COMMIT)
    body += multiply + (copied_out("%q1", 32, ".pack::16b") if half else copied_out("%q1")) + TAIL
    out = torch.full((128, 32 if half else 64), -7, dtype=torch.int32)
    run(change(body), image, out, threads=128, shared=1024 + image.numel() * 4, seed=seed, **options)
    return out.view(torch.float16 if half else torch.float32)
