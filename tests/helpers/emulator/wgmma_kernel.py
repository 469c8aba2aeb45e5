"""wgmma for the tests: operands as bytes of shared memory, and PTX bodies that load and multiply them."""

from __future__ import annotations

import torch

WIDTHS = {0: 16, 3: 32, 2: 64, 1: 128}  # swizzle field of the descriptor -> bytes of a swizzled row


def image(matrix, mode, mn_major, leading, stride, size):
    """The ``size`` bytes of an operand ``matrix`` [rows, depth] in CUTLASS's canonical layout of swizzle ``mode``, a key of `WIDTHS`.
    ``leading`` and ``stride``: byte offsets of the descriptor."""
    width, per = WIDTHS[mode], 16 // matrix.element_size()
    chunks = width // 16
    major = matrix.T.contiguous() if mn_major else matrix  # the last dimension is the contiguous one
    out = torch.zeros(size, dtype=torch.uint8)
    lines, columns = major.shape
    atom, inner = (x[:, None] for x in (torch.arange(lines) // 8, torch.arange(lines) % 8))
    panel, c = torch.arange(columns // per) // chunks, torch.arange(columns // per) % chunks
    if width == 16:
        place = inner * 16 + (
            (atom * leading + panel * stride) if mn_major else (atom * stride + panel * leading)
        )
    else:
        swizzled = c ^ inner * width // 128 % chunks
        place = atom * stride + panel * leading + inner * width + swizzled * 16
    out[place[..., None] + torch.arange(16)] = major.view(torch.uint8).view(*place.shape, 16)
    return out


def descriptor(place, mode, leading, stride):
    """The matrix descriptor of an operand ``place`` bytes after the start of shared memory. The kernel adds `ORIGIN` to it."""
    return place >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | mode << 62


#: %q45 = start of shared memory in the unit of a descriptor, 16 bytes.
ORIGIN = "mov.b32 %r1, shared_bytes; cvt.u64.u32 %q45, %r1; shr.u64 %q45, %q45, 4;"


def load(size, place, pointer, barrier):
    """One thread copies ``size`` bytes to ``place`` in shared memory, and all threads wait for them at the mbarrier at ``barrier``."""
    return f"""
    @%p1 mbarrier.init.shared.b64 [shared_bytes+{barrier}], 1;
    fence.mbarrier_init.release.cluster;
    bar.sync 0;
    mov.b32 %r1, shared_bytes; add.s32 %r2, %r1, {place}; add.s32 %r3, %r1, {barrier};
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], {size};
    @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r2], [{pointer}], {size}, [%r3];
    {{ .reg .pred done; AGAIN: mbarrier.try_wait.parity.shared.b64 done, [%r3], 0; @done bra OUT; bra AGAIN; OUT: }}
    bar.sync 0;
    """


#: %r10 to %r13 = fragment of A, tensor 1 with 64 rows of 32 bytes.
A_REGISTERS = """
    shr.u32 %r4, %r0, 5; and.b32 %r5, %r0, 31; shr.u32 %r6, %r5, 2; and.b32 %r7, %r5, 3;
    mad.lo.s32 %r8, %r4, 16, %r6; mul.lo.s32 %r8, %r8, 32; mad.lo.s32 %r8, %r7, 4, %r8; cvt.u64.u32 %q40, %r8;
    add.s64 %q41, %q1, %q40;
    ld.global.b32 %r10, [%q41]; ld.global.b32 %r11, [%q41+256]; ld.global.b32 %r12, [%q41+16]; ld.global.b32 %r13, [%q41+272];
"""


#: Operand type -> (k of an instruction, dtype of tensors).
KINDS = {"bf16": (16, torch.bfloat16), "f16": (16, torch.float16), "tf32": (8, torch.float32)}


def multiply(n, a, b, b_major=0, a_major=0, kind="bf16", d="f32", factors=(1, 1), add=True):
    """One wgmma whose accumulators start as 1 and count only if ``add``. Each thread stores its accumulators as a row of tensor 2."""
    count = n // (2 if d == "f32" else 4)
    acc = [f"%r{100 + j}" for j in range(count)]
    vector = "{" + ", ".join(acc) + "}"
    operands = [vector, a, b, "%p2", *map(str, factors)]
    if kind != "tf32":
        operands += [f"{b_major}"] if a.startswith("{") else [f"{a_major}", f"{b_major}"]
    stores = "\n".join(f"st.global.b32 [%q43+{4 * j}], {x};" for j, x in enumerate(acc))
    one = "0f3F800000" if d == "f32" else "0x3C003C00"
    return f"""
    {" ".join(f"mov.b32 {x}, {one};" for x in acc)}
    setp.eq.b32 %p2, {int(not add)}, 0;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n{n}k{KINDS[kind][0]}.{d}.{kind}.{kind} {", ".join(operands)};
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    mul.lo.s32 %r9, %r0, {4 * count}; cvt.u64.u32 %q42, %r9; add.s64 %q43, %q2, %q42;
    {stores}
    """


def product(out, n):
    """D [64, n] from the accumulators [128, n / 2] of the threads, by the PTX ISA's table of D."""
    found, thread, j = torch.zeros(64, n), torch.arange(128)[:, None], torch.arange(n // 2)
    row = thread // 32 * 16 + thread % 32 // 4 + 8 * (j // 2 % 2)
    found[row, j // 4 * 8 + thread % 4 * 2 + j % 2] = out[:, : n // 2].float()
    return found


def integers(*shape, seed=0):
    """bf16 integers from -8 to 8."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
