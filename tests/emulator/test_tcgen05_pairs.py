"""tcgen05 of a pair of CTAs (`cta_group::2`): one product, copies, tensor maps, against exact sums of integers, and broken copies."""

import re

import pytest
import torch
from helpers.emulator.cases.clusters import MEET
from helpers.emulator.ptx import run
from helpers.emulator.tcgen05 import (
    FILL,
    HEAD,
    TAIL,
    VERSION,
    ZERO,
    copied_out,
    core_matrices,
    instruction_descriptor,
    integers,
    registers,
)
from helpers.emulator.tensor_maps import tensor_map

from ptx_emulator import ExecutionError, PtxError

COMMIT = (
    "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r2], %h1;"
)
WAIT = "W: mbarrier.try_wait.parity.acquire.cluster.shared.b64 %p4, [%r2], 0; @!%p4 bra W; tcgen05.fence::after_thread_sync;"
#: %r16: the rank, %h1: the mask of the CTAs of the pair. The global tensors of a CTA are parts of %q0, the operands, and %q1, the result.
PLACES = """
    mov.u32 %r16, %cluster_ctarank; and.b32 %r17, %r16, 14; mov.b32 %r18, 3; shl.b32 %r18, %r18, %r17; cvt.u16.u32 %h1, %r18;
    mul.wide.u32 %q8, %r16, <operands>; add.s64 %q0, %q0, %q8; mul.wide.u32 %q8, %r16, 32768; add.s64 %q1, %q1, %q8;
"""
#: The even CTA multiplies. Both wait for its commit.
MULTIPLY = """
    cvt.u64.u32 %q10, %r1; add.s64 %q10, %q10, 1024; shr.u64 %q10, %q10, 4; and.b64 %q10, %q10, 0x3FFF; add.s64 %q11, %q10, <b>;
    or.b64 %q10, %q10, <descriptor>; or.b64 %q11, %q11, <descriptor>; mov.b32 %r11, <instruction>; mov.b32 %r12, 0;
    and.b32 %r19, %r16, 1; setp.eq.and.s32 %p3, %r19, 0, %p2; setp.ne.s32 %p5, 0, 0; @!%p3 bra W;
    tcgen05.mma.cta_group::2.kind::f16 [%r8], %q10, %q11, %r11, {%r12, %r12, %r12, %r12, %r12, %r12, %r12, %r12}, %p5;
"""
HEAD, TAIL = (text.replace("cta_group::1", "cta_group::2") for text in (HEAD, TAIL))
RELINQUISH = "@!%p1 bra KEPT; tcgen05.relinquish_alloc_permit.cta_group::2.sync.aligned; KEPT:"


def body_of(m, n, words, b):
    """The PTX of one product, and the words of both operands of a CTA in shared memory. ``b``: where B starts, in units of 16 bytes."""
    text = PLACES.replace("<operands>", str(4 * words)) + HEAD + MEET + RELINQUISH + ZERO
    text += FILL.replace("<words>", str(words)) + MEET + MULTIPLY.replace("<b>", str(b))
    constant = 8 << 16 | 16 << 32 | VERSION  # blocks of 8 rows by 16 bytes: 128 and 256 bytes apart
    text = text.replace("<descriptor>", str(constant)).replace(
        "<instruction>", str(instruction_descriptor(m, n))
    )
    return text + COMMIT + WAIT + copied_out("%q1") + TAIL


def product(m, n, pairs=1, change=lambda body: body, seed=0, more=(), **options):
    """The words [ctas, 128, 64] of tensor memory after one product of each pair, and what D should be [pairs, m, n]."""
    a, b = integers(pairs, m, 16), integers(pairs, n, 16, seed=1)
    images = []
    for x, y in zip(a, b):
        for part, other in zip(x.bfloat16().chunk(2), y.bfloat16().chunk(2)):
            images += [core_matrices(part)[0], core_matrices(other)[0]]
    first, second = len(images[0]), len(images[1])
    image = torch.cat(images).view(torch.int32)
    out = torch.full((2 * pairs, 128, 64), -7, dtype=torch.int32)
    body = change(body_of(m, n, (first + second) // 4, first // 16))
    size = 1024 + first + second
    run(
        body,
        image,
        out,
        *more,
        threads=128,
        grid=2 * pairs,
        cluster=(2 * pairs,),
        shared=size,
        seed=seed,
        **options,
    )
    return out.view(torch.float32), a @ b.transpose(1, 2)


@pytest.mark.parametrize("pairs", (1, 2))
@pytest.mark.parametrize(("m", "n"), [(256, 64), (256, 16), (128, 64), (128, 32)])
def test_a_product_of_a_pair(m, n, pairs):
    """M = 256: a CTA holds its 128 rows in all lanes. M = 128: its 64 rows, with the second half of the columns from lane 64 on."""
    for seed in range(3):
        found, want = product(m, n, pairs, seed=seed)
        for rank in range(2 * pairs):
            rows = want[rank // 2][rank % 2 * m // 2 :][: m // 2]
            expected = torch.zeros(128, 64)
            if m == 256:
                expected[:, :n] = rows
            else:
                expected[:64, : n // 2], expected[64:, : n // 2] = rows.chunk(2, dim=1)
            assert torch.equal(found[rank], expected)
    interpreted, _ = product(m, n, pairs, seed=2, compiled=False)
    assert torch.equal(found, interpreted)


def test_a_in_tensor_memory():
    """A lies in columns 48 to 55 of both CTAs, two bf16 in a word. The even CTA's mma of M = 256 and N = 16 reads it."""

    def change(body):
        where = "mul.wide.s32 %q20, %r0, 32; add.s64 %q21, %q20, %q2; mul.wide.u32 %q8, %r16, 4096; add.s64 %q21, %q21, %q8;"
        loads = "".join(f"ld.global.b32 %r{40 + n}, [%q21+{4 * n}];" for n in range(8))
        store = (
            f"add.s32 %r13, %r9, 48; tcgen05.st.sync.aligned.32x32b.x8.b32 [%r13], {{{registers(40, 8)}}};"
        )
        store += "tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync;"
        moved = body.replace("fence.proxy.async", where + loads + store + "fence.proxy.async").replace(
            "%r12, 0;", "%r12, 0; add.s32 %r13, %r8, 48; tcgen05.fence::after_thread_sync;"
        )
        return moved.replace("[%r8], %q10", "[%r8], [%r13]")

    packed = integers(1, 256, 16)[0].bfloat16().view(torch.int32).reshape(2, 128, 8)
    for seed in range(3):
        found, want = product(256, 16, change=change, seed=seed, more=[packed])
        assert torch.equal(found[:, :, :16].reshape(256, 16), want[0])
    with pytest.raises(ExecutionError, match="M = 128 is not modelled for cta_group::2"):
        product(128, 32, change=change, more=[packed])


BROKEN = {
    "no commit": (re.escape(COMMIT), "", "deadlock"),
    "a commit without the peer": (r"mov\.b32 %r18, 3;", "mov.b32 %r18, 1;", "deadlock"),
    "a commit of one CTA's barrier": (re.escape(COMMIT), COMMIT.replace(".multicast::cluster", "").replace(", %h1", ""), "deadlock"),
    "no wait in the odd CTA": (re.escape(WAIT), f"W: @%p6 bra SKIP; {WAIT.replace('W: ', 'V: ').replace('bra W', 'bra V')} SKIP:", "a race|nothing has written|in flight"),
    "no wait for the operands of the peer": (re.escape(f"shared::cta; bar.sync 0;\n{MEET}"), "shared::cta; bar.sync 0;", "a race|nothing has written"),
    "no fence towards the async proxy": (r"fence\.proxy\.async\.shared::cta;", "", "without a fence.proxy.async"),
    "no fence in the odd CTA": (r"fence\.proxy\.async\.shared::cta;", "@!%p6 fence.proxy.async.shared::cta;", "without a fence.proxy.async"),
    "both CTAs multiply": (r"setp\.eq\.and\.s32 %p3, %r19, 0, %p2;", "mov.pred %p3, %p2;", "a race|arrivals"),
    "columns that only one CTA allocates": (r"@!%p1 bra READY;", "@!%p1 bra READY; @%p6 bra READY;", "deadlock"),
    "different numbers of columns": (r"b32 \[%r1\], 64;", "b32 [%r1], %r22;", "in the peer CTA"),
    "M of 64": (r"mov\.b32 %r11, (\d+);", f"mov.b32 %r11, {instruction_descriptor(64, 64)};", "cta_group::2: expected M = 128 or 256"),
    "a CTA that leaves": (r"W: mbarrier", "W: @%p6 bra DONE; mbarrier", "has not freed"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_products_of_a_pair(name):
    """%p6: the CTA is the odd one; %r22: 64 columns in the even CTA, 32 in the odd one."""
    pattern, by, wrong = BROKEN[name]
    odd = "setp.eq.s32 %p6, %r16, 1; shl.b32 %r22, %r16, 5; sub.s32 %r22, 64, %r22;"

    def change(body):
        changed, count = re.subn(pattern, lambda _: by, body, count=1)
        assert count, "the pattern matches nothing"
        return changed.replace(HEAD[:40], odd + HEAD[:40], 1) + " DONE:"

    for seed in range(3):
        with pytest.raises(ExecutionError, match=wrong):
            product(256, 64, change=change, seed=seed)


def test_a_pair_needs_a_peer():
    with pytest.raises(ExecutionError, match="CTA 0 of a cluster of 1 has no peer"):
        run(HEAD + TAIL, torch.zeros(4), threads=128, shared=64)


def test_a_kernel_has_one_group():
    with pytest.raises(PtxError, match="all tcgen05 instructions must have the same one"):
        run(HEAD + TAIL.replace("cta_group::2", "cta_group::1"), torch.zeros(4), threads=128, shared=64)


def test_a_copy_fills_the_tensor_memory_of_both_ctas():
    x = torch.arange(2 * 128 * 4, dtype=torch.int32).reshape(2, 128, 4)
    image = torch.cat([core_matrices(part.view(torch.float32))[0] for part in x]).view(torch.int32)
    body = PLACES.replace("<operands>", "2048") + HEAD + MEET + FILL.replace("<words>", "512") + MEET
    body += f"""
        cvt.u64.u32 %q11, %r1; add.s64 %q11, %q11, 1024; shr.u64 %q11, %q11, 4; and.b64 %q11, %q11, 0x3FFF;
        or.b64 %q11, %q11, {8 << 16 | 8 << 32 | VERSION}; setp.eq.and.s32 %p3, %r16, 1, %p2; @!%p3 bra W;
        tcgen05.cp.cta_group::2.128x128b [%r8], %q11; {COMMIT}
    """
    out = torch.zeros(2, 128, 4, dtype=torch.int32)
    body = (body + WAIT + copied_out("%q1", 4) + TAIL).replace("32768", "2048")
    for seed in range(2):
        run(body, image, out.zero_(), threads=128, grid=2, cluster=(2,), shared=4096, seed=seed)
        assert torch.equal(out, x)


#: Each CTA loads its row of a tensor map; the mbarrier of the even CTA counts the bytes of both. Bit 24 of an address is that of the rank.
LOAD = f"""
    mov.u32 %r16, %cluster_ctarank; setp.eq.s32 %p1, %r0, 0; mov.b32 %r1, shared_bytes; add.s32 %r2, %r1, 1024;
    @%p1 mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster; {MEET} and.b32 %r3, %r2, <mask>; setp.eq.s32 %p2, %r16, 0;
    @!%p1 bra DONE; @!%p2 bra START; mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 256; START: mov.b32 %r5, 0;
    cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.cta_group::2 [%r1], [%q0, {{%r5, %r16}}], [%r3];
    DONE: @!%p2 bra MET; W: mbarrier.try_wait.parity.acquire.cluster.shared.b64 %p3, [%r2], 0; @!%p3 bra W; MET: {MEET}
    mad.lo.s32 %r7, %r0, 4, %r1; ld.shared.b32 %r8, [%r7]; mad.lo.s32 %r9, %r16, 32, %r0; mul.wide.s32 %q8, %r9, 4;
    add.s64 %q8, %q1, %q8; st.global.b32 [%q8], %r8;
"""


def test_a_load_counts_its_bytes_in_the_peer():
    x, out = torch.arange(64, dtype=torch.int32).reshape(2, 32), torch.zeros(2, 32, dtype=torch.int32)
    given = tensor_map(x, (32, 1)), out
    for seed in range(3):
        run(LOAD.replace("<mask>", "0xFEFFFFFF"), *given, grid=2, cluster=(2,), shared=2048, seed=seed, tensors=[x])  # fmt: skip
        assert torch.equal(out, x)
    for text, wrong in (
        (LOAD.replace("<mask>", "-1"), "deadlock|while a bulk copy"),
        (LOAD.replace("<mask>", "0xFEFFFFFF").replace(".cta_group::2", ""), "not in the CTA whose shared"),
    ):
        with pytest.raises(ExecutionError, match=wrong):
            run(text, *given, grid=2, cluster=(2,), shared=2048, tensors=[x])


def test_a_multicast_load_counts_its_bytes_in_the_even_ctas():
    """Rank 3 loads for ranks 1 and 2: the mbarriers of ranks 0 and 2 count the bytes."""
    x, out = torch.arange(32, dtype=torch.int32).reshape(1, 32), torch.zeros(4, 32, dtype=torch.int32)
    body = f"""
        mov.u32 %r16, %cluster_ctarank; setp.eq.s32 %p1, %r0, 0; mov.b32 %r1, shared_bytes; add.s32 %r2, %r1, 1024; mov.b16 %h1, 6;
        @%p1 mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster; {MEET} and.b32 %r3, %r2, 0xFEFFFFFF; and.b32 %r4, %r16, 1;
        setp.eq.s32 %p2, %r4, 0; @!%p1 bra DONE; @%p2 mbarrier.arrive.expect_tx.shared.b64 _, [%r2], 128; setp.eq.s32 %p4, %r16, 3; @!%p4 bra DONE;
        mov.b32 %r5, 0; cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.cta_group::2
        [%r1], [%q0, {{%r5, %r5}}], [%r3], %h1;
        DONE: @!%p2 bra MET; W: mbarrier.try_wait.parity.acquire.cluster.shared.b64 %p3, [%r2], 0; @!%p3 bra W; MET: {MEET}
        mad.lo.s32 %r7, %r0, 4, %r1; mul.wide.s32 %q8, %r16, 128; mul.wide.s32 %q9, %r0, 4; add.s64 %q8, %q8, %q9;
        setp.eq.s32 %p5, %r16, 1; setp.eq.or.s32 %p5, %r16, 2, %p5; mov.b32 %r8, 0; @%p5 ld.shared.b32 %r8, [%r7]; add.s64 %q8, %q1, %q8; st.global.b32 [%q8], %r8;
    """
    run(body, tensor_map(x, (32, 1)), out, grid=4, cluster=(4,), shared=2048, tensors=[x])
    assert torch.equal(out, torch.stack([0 * x[0], x[0], x[0], 0 * x[0]]))


def test_registers_of_a_warpgroup_are_those_of_its_cta():
    """`ld` and `st` reach the tensor memory of their CTA only."""
    body = PLACES.replace("<operands>", "0") + HEAD + MEET
    body += (
        "mad.lo.s32 %r20, %r16, 1000, %r0;"
        + f"tcgen05.st.sync.aligned.32x32b.x1.b32 [%r9], {{{registers(20, 1)}}};"
    )
    body += f"tcgen05.wait::st.sync.aligned; {MEET}" + copied_out("%q1", 1) + TAIL
    out = torch.zeros(2, 128, dtype=torch.int32)
    run(
        body.replace("32768", "512"),
        torch.zeros(1),
        out,
        threads=128,
        grid=2,
        cluster=(2,),
        shared=64,
    )
    assert torch.equal(out, torch.arange(2)[:, None] * 1000 + torch.arange(128))
