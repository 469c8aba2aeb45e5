"""Checks of synchronisation: what devices allow passes, and what only fails on some runs of a device always fails."""

import re

import pytest
import torch
from helpers.emulator import wgmma_kernel as wgmma
from helpers.emulator.ptx import run
from helpers.emulator.tensor_maps import OUT, START, WAIT, filled, tensor_map

from ptx_emulator import ExecutionError

SEEDS = range(4)


def lanes(count=32):
    return torch.zeros(count, dtype=torch.int32)


#: Stores %r9 of each thread to tensor 0.
STORE = "mul.wide.u32 %q9, %r0, 4; add.s64 %q9, %q9, %q0; st.global.b32 [%q9], %r9;"


# ---- what devices allow


@pytest.mark.parametrize("synchronize", ("bar.warp.sync %r2;", ""))
def test_each_half_of_a_warp_may_synchronize_alone(synchronize):
    """Half warps exchange words of shared memory; each has its own member mask at the same instruction."""
    body = f"""
        setp.lt.u32 %p1, %r0, 16; selp.b32 %r2, 0xFFFF, 0xFFFF0000, %p1; mov.b32 %r1, shared_bytes; mad.lo.s32 %r3, %r0, 4, %r1;
        st.shared.b32 [%r3], %r0; {synchronize} xor.b32 %r4, %r0, 15; mad.lo.s32 %r4, %r4, 4, %r1; ld.shared.b32 %r9, [%r4];
        shfl.sync.bfly.b32 %r9, %r9, 1, 31, %r2; vote.sync.ballot.b32 %r5, %p1, %r2; add.s32 %r9, %r9, %r5; {STORE}
    """
    x = lanes()
    if synchronize:
        run(body, x, shared=128)
        assert x.tolist() == [(n ^ 14) + (0xFFFF if n < 16 else 0) for n in range(32)]
    else:
        with pytest.raises(ExecutionError, match="a race"):
            run(body, x, shared=128)


def test_masks_that_contradict_each_other_are_an_error():
    body = "setp.lt.u32 %p1, %r0, 16; selp.b32 %r2, -1, 0xFFFF0000, %p1; bar.warp.sync %r2;"
    with pytest.raises(ExecutionError, match="have another mask"):
        run(body, lanes())


#: Lanes 0 to 7 of each warp and the others arrive at the same barrier from different instructions.
DIVERGENT = f"""
    mov.b32 %r1, shared_bytes; mad.lo.s32 %r3, %r0, 4, %r1; st.shared.b32 [%r3], %r0; and.b32 %r4, %r0, 31; setp.lt.u32 %p1, %r4, 8;
    @%p1 bra LOW; <high> bra JOIN; LOW: <low> JOIN: xor.b32 %r5, %r0, 32; mad.lo.s32 %r5, %r5, 4, %r1; ld.shared.b32 %r9, [%r5]; {STORE}
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_lanes_may_arrive_at_a_barrier_one_after_the_other(seed):
    x, barrier = lanes(64), "barrier.sync 1, 64;"
    run(filled(DIVERGENT, low=barrier, high=barrier), x, threads=64, shared=256, seed=seed)
    assert x.tolist() == [n ^ 32 for n in range(64)]
    run(filled(DIVERGENT, low=barrier, high="ret;"), x, threads=64, shared=256, seed=seed)
    with pytest.raises(ExecutionError, match="lanes diverged for good"):
        aligned = "barrier.sync.aligned 1, 64;"
        run(filled(DIVERGENT, low=aligned, high=aligned), x, threads=64, shared=256, seed=seed)
    with pytest.raises(ExecutionError, match="deadlock(.|\n)*barrier"):
        run(filled(DIVERGENT, low=barrier, high="barrier.sync 2, 64;"), x, threads=64, shared=256, seed=seed)


#: Each warp fills its part of shared memory, and lane 0 of each warp stores it. <value>: of the words; <offset>: in the tensor.
STORES = """
    mov.b32 %r1, shared_bytes; mad.lo.s32 %r2, %r0, 4, %r1; st.shared.b32 [%r2], <value>; fence.proxy.async.shared::cta; bar.sync 0;
    and.b32 %r3, %r0, 31; setp.ne.s32 %p1, %r3, 0; @%p1 bra END; cp.async.bulk.global.shared::cta.bulk_group [%q0], [%r2], 128;
    cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:
"""


@pytest.mark.parametrize("seed", SEEDS)
def test_warps_may_store_the_same_bytes_but_no_others(seed):
    x = lanes()
    run(filled(STORES, value="7"), x, threads=64, shared=256, seed=seed)
    assert x.tolist() == [7] * 32
    with pytest.raises(ExecutionError, match="a race"):
        run(filled(STORES, value="%r0"), x, threads=64, shared=256, seed=seed)


#: Warps 0 and 1 access words of tensor 0 before and behind a barrier: <before>, <first>, <second>. Lane 0 of each warp, %p1 or %p2.
WARPS = """
    setp.eq.s32 %p1, %r0, 0; setp.eq.s32 %p2, %r0, 32; add.s32 %r1, %r0, 5; cvt.u16.u32 %h1, %r1;
    mov.b32 %r9, 0x01010101; mov.b16 %h9, 0x0101; <before> bar.sync 0; @!%p1 bra OTHER; <first> OTHER: @!%p2 bra END; <second> END:
"""
WHOLE = "st.global.b32 [%q0], %r1;", "ld.global.b32 %r2, [%q0];"
LOWER = "st.global.b16 [%q0], %h1;", "ld.global.u16 %h2, [%q0];"
UPPER = "st.global.b16 [%q0+2], %h1;", "ld.global.u16 %h2, [%q0+2];"
BYTE = "st.global.u8 [%q0+3], %r1;", "ld.global.u8 %r2, [%q0+3];"
PAIR = "st.global.v2.b16 [%q0], {%h1, %h1};", "ld.global.v2.b16 {%h2, %h3}, [%q0];"
FOUR = "st.global.v4.b32 [%q0], {%r1, %r1, %r1, %r1};", "ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%q0];"
DISJOINT = [(LOWER, UPPER), (LOWER, BYTE)]
OVERLAPPING = [
    (LOWER, LOWER),
    (UPPER, UPPER),
    (UPPER, BYTE),
    *((half, x) for half in (LOWER, UPPER, BYTE) for x in (WHOLE, PAIR, FOUR)),
]
#: What happened to the words before: nothing, accesses of whole words, or of halves. The values written are others than later.
HISTORIES = [x.replace("%r1", "%r9").replace("%h1", "%h9") for x in (
    "", f"@%p2 {WHOLE[0]} bar.sync 0; {WHOLE[1]}", f"@%p1 {LOWER[0]} @%p2 {UPPER[0]}", f"@%p1 {FOUR[0]} bar.sync 0; @%p2 {FOUR[1]}",
)]  # fmt: skip


def accesses_of_warps(before, first, second, compiled):
    body = filled(WARPS, before=before, first=first, second=second)
    for seed in SEEDS:
        run(body, lanes(), threads=64, seed=seed, compiled=compiled)


@pytest.mark.parametrize("compiled", (True, False))
@pytest.mark.parametrize("before", HISTORIES)
def test_halves_of_a_word_are_apart(before, compiled):
    for one, other in DISJOINT:
        for first, second in ((one[0], other[0]), (one[0], other[1]), (one[1], other[0])):
            accesses_of_warps(before, first, second, compiled)
            accesses_of_warps(before, second, first, compiled)


@pytest.mark.parametrize("compiled", (True, False))
@pytest.mark.parametrize("before", HISTORIES)
def test_accesses_of_the_same_half_are_a_race(before, compiled):
    for one, other in OVERLAPPING:
        for first, second in ((one[0], other[1]), (one[1], other[0])):
            for pair in ((first, second), (second, first)):
                with pytest.raises(ExecutionError, match="a race"):
                    accesses_of_warps(before, *pair, compiled)


@pytest.mark.parametrize("compiled", (True, False))
@pytest.mark.parametrize("read", (LOWER[1], UPPER[1], WHOLE[1], FOUR[1]))
def test_a_half_keeps_the_write_of_its_own_warp(read, compiled):
    """Both warps write their half. Then the first one reads: its own half is no race, all others are."""
    if read == LOWER[1]:
        accesses_of_warps("", LOWER[0] + read, UPPER[0], compiled)
        return
    body = filled(WARPS, before="", first=LOWER[0] + read, second=UPPER[0])
    for seed in SEEDS:
        with pytest.raises(ExecutionError, match="a race: .* offset 2 is (accessed|written) here"):
            run(body, lanes(), threads=64, seed=seed, compiled=compiled)


@pytest.mark.parametrize("compiled", (True, False))
def test_ctas_may_store_halves_of_a_word(compiled):
    """As gradients of beta in bf16 do, one head for each CTA; <place>: of the CTA."""
    body = """mov.u32 %r1, %ctaid.x; add.s32 %r2, %r1, 5; cvt.u16.u32 %h1, %r2; mul.wide.u32 %q9, %r1, <place>; add.s64 %q9, %q9, %q0;
        setp.eq.s32 %p1, %r0, 0; @%p1 st.global.b16 [%q9], %h1;"""
    for seed in SEEDS:
        x = torch.zeros(8, dtype=torch.int16)
        run(filled(body, place="2"), x, grid=8, seed=seed, compiled=compiled)
        assert x.tolist() == list(range(5, 13))
        with pytest.raises(ExecutionError, match="a race"):
            run(
                filled(body, place="1").replace("%q9, %r1", "%q9, 0"), x, grid=8, seed=seed, compiled=compiled
            )


@pytest.mark.parametrize("compiled", (True, False))
def test_a_half_may_be_constant_while_the_other_is_written(compiled):
    constant = "ld.global.nc.u16 %h2, [%q0+2];"
    accesses_of_warps("", constant, LOWER[0], compiled)
    for other in (UPPER[0], WHOLE[0]):
        with pytest.raises(ExecutionError, match="ld.global.nc"):
            accesses_of_warps("", constant, other, compiled)


@pytest.mark.parametrize("compiled", (True, False))
@pytest.mark.parametrize(("place", "half"), ((0, 0), (0, 2), (124, 0), (124, 2)))
def test_bulk_copies_see_each_half(place, half, compiled):
    """A bulk copy reads 128 bytes of shared memory of which a store of 2 bytes writes one half of a word."""
    written = f"@%p1 st.shared.b16 [%r1+{place + half}], %h1;"
    body = """mov.b32 %r1, shared_bytes; mad.lo.s32 %r2, %r0, 4, %r1; mov.b16 %h1, 7; setp.eq.s32 %p1, %r0, 0; st.shared.b32 [%r2], 1;
        bar.warp.sync -1; <other> fence.proxy.async.shared::cta; bar.sync 0; <before> @!%p1 bra END; cp.async.bulk.global.shared::cta.bulk_group [%q0], [%r1], 128;
        cp.async.bulk.commit_group; <during> cp.async.bulk.wait_group 0; END:"""
    other = f"@%p1 st.shared.b16 [%r1+{place + 2 - half}], %h1;"
    for first in ("", other):
        run(filled(body, other=first + written, before="", during=""), lanes(), shared=128, compiled=compiled)
        with pytest.raises(ExecutionError, match="without a fence.proxy.async"):
            run(filled(body, other=first, before=written, during=""), lanes(), shared=128, compiled=compiled)
        with pytest.raises(ExecutionError, match="overwritten before a bulk copy has read it"):
            run(filled(body, other=first, before="", during=written), lanes(), shared=128, compiled=compiled)


def test_undefined_words_may_be_sent_but_not_used():
    """Each lane sends a word to the other CTA of the cluster; only lane 0 has a value."""
    body = f"""
        setp.eq.s32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [shared_bytes], 1; fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned; mov.u32 %r1, %cluster_ctarank; xor.b32 %r2, %r1, 1;
        mov.b32 %r3, shared_bytes; mapa.shared::cluster.u32 %r4, %r3, %r2; mad.lo.s32 %r5, %r0, 4, %r4; @%p1 mov.b32 %r6, 41;
        @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 128;
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r5+16], %r6, [%r4];
        W: mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0; @!%p2 bra W; ld.shared.b32 %r9, [%r3+<place>]; {STORE}
        barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
    """
    for seed in SEEDS:
        x = lanes()
        run(filled(body, place="16"), x, grid=2, cluster=(2,), shared=144, seed=seed)
        assert x.tolist() == [41] * 32
        with pytest.raises(ExecutionError, match="nothing has written"):
            run(filled(body, place="20"), x, grid=2, cluster=(2,), shared=144, seed=seed)


def multiplied(change=lambda body: body, **options):
    """One wgmma of B in shared memory, by four warps."""
    b, a = torch.zeros(32, 64).bfloat16(), torch.zeros(64, 16).bfloat16()
    d = wgmma.descriptor(0, 1, 0, 1024)
    body = f"setp.eq.s32 %p1, %r0, 0; {wgmma.load(8192, 0, '%q0', 8192)} {wgmma.A_REGISTERS} {wgmma.ORIGIN}"
    body += f"add.s64 %q44, %q45, {d};" + wgmma.multiply(32, "{%r10, %r11, %r12, %r13}", "%q44", 0)
    image = wgmma.image(b, 1, False, 0, 1024, 8192)
    run(change(body), image, a, torch.zeros(128, 16), threads=128, shared=8192 + 64, **options)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wgmma_is_complete_in_all_warps_of_its_warpgroup(seed):
    """Behind its own wait, one warp overwrites what the others have multiplied. Before the wait, it may not."""
    wait, overwrite = "wgmma.wait_group.sync.aligned 0;", "@%p1 st.shared.b32 [shared_bytes], 1;"
    multiplied(lambda body: body.replace(wait, wait + overwrite), seed=seed)
    with pytest.raises(ExecutionError, match="a race"):
        multiplied(lambda body: body.replace(wait, overwrite + wait), seed=seed)


def test_the_warps_of_a_warpgroup_execute_the_same_wgmma():
    other = "shr.u32 %r14, %r0, 5; setp.eq.s32 %p3, %r14, 1; @%p3 add.s64 %q44, %q44, 2; wgmma.fence.sync.aligned;"
    with pytest.raises(ExecutionError, match="warps of a warpgroup execute different wgmmas"):
        multiplied(lambda body: body.replace("wgmma.fence.sync.aligned;", other))
    with pytest.raises(ExecutionError, match="deadlock(.|\n)*the other warps of the warpgroup"):
        multiplied(
            lambda body: (
                body.replace("{ .reg .pred", "shr.u32 %r14, %r0, 5; { .reg .pred").replace(
                    wgmma.ORIGIN, wgmma.ORIGIN + "setp.eq.s32 %p3, %r14, 1; @%p3 bra OVER;"
                )
                + "OVER: "
            )
        )


# ---- what passes on most runs of a device

#: A load of a box and the wait for it, by START, WAIT and OUT of `tensor_maps`: what is replaced, by what, and the error.
LOADS = {
    "no fence.mbarrier_init": ("fence.mbarrier_init.release.cluster;", "", "no fence.mbarrier_init"),
    "a wait whose result is ignored": ("@!%p2 bra WAIT;", "", "nothing has written|a race|the CTA ends while a bulk copy"),
    "a result that is only copied": (
        "@!%p2 bra WAIT;", "selp.b32 %r7, 1, 0, %p2;", "nothing has written|a race|the CTA ends while a bulk copy",
    ),
    "no wait": (WAIT + OUT, "WAIT:", "the CTA ends while a bulk copy"),
    "too many bytes": (", 256;", ", 1048576;", "a tx-count of 1048576 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("seed", SEEDS)
def test_a_wait_whose_result_is_ignored_is_no_error_beside_another(seed):
    """Compilers leave such a wait behind where a kernel looks at a phase early. It neither waits nor orders anything."""
    x, out = torch.zeros(8, 16, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    body = filled(
        START + WAIT.replace("WAIT:", "WAIT: mbarrier.try_wait.parity.shared.b64 %p5, [%r2], 0; LOOK:") + OUT,
        bytes=256, rank=2, corner="0, 0", count=64,
    ).replace("@!%p2 bra WAIT;", "@!%p2 bra LOOK;")  # fmt: skip
    run(body, tensor_map(x, (8, 8)), x, out, shared=16400, seed=seed)
    with pytest.raises(ExecutionError, match="no mbarrier"):
        run(body.replace("%p5, [%r2]", "%p5, [%r2+8]"), tensor_map(x, (8, 8)), x, out, shared=16400)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("what", LOADS)
def test_a_load_needs_its_synchronisation(what, seed):
    old, new, wrong = LOADS[what]
    x, out = torch.zeros(8, 16, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    body = START + WAIT + OUT
    for text in (body, body.replace(old.replace(", 256;", ", <bytes>;"), new)):
        text = filled(text, bytes=256, rank=2, corner="0, 0", count=64)
        if text == filled(body, bytes=256, rank=2, corner="0, 0", count=64):
            run(text, tensor_map(x, (8, 8)), x, out, shared=16400, seed=seed)
        else:
            with pytest.raises(ExecutionError, match=wrong):
                run(text, tensor_map(x, (8, 8)), x, out, shared=16400, seed=seed)


def test_a_try_wait_may_give_up():
    """A wait that is not repeated reads too early under some seeds, if its result is used for something else."""
    body = """
        setp.eq.s32 %p1, %r0, 0; mov.b32 %r1, shared_bytes; @%p1 mbarrier.init.shared.b64 [%r1], 32; bar.sync 0;
        setp.lt.u32 %p3, %r0, 32; mad.lo.s32 %r2, %r0, 4, %r1; @%p3 st.shared.b32 [%r2+16], %r0;
        @%p3 mbarrier.arrive.shared.b64 _, [%r1]; @%p3 bra END; mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;
        <again> selp.b32 %r9, 1, 0, %p2; ld.shared.b32 %r3, [%r2+-112]; END:
    """
    body = filled(body.replace("END:", ""), again="<again>") + STORE.replace("st.", "@!%p3 st.") + "END:"
    outcomes = set()
    for seed in range(12):
        x = lanes(64)
        run(
            body.replace("mbarrier.try_wait", "W: mbarrier.try_wait").replace("<again>", "@!%p2 bra W;"),
            x,
            threads=64,
            shared=144,
            seed=seed,
        )
        assert x[32:].tolist() == [1] * 32
        try:
            run(body.replace("<again>", ""), x, threads=64, shared=144, seed=seed)
            outcomes.add("passed")
        except ExecutionError as error:
            outcomes.add("a race" if "a race" in str(error) else str(error))
    assert outcomes <= {"passed", "a race"} and "a race" in outcomes


#: A warp fills a buffer, a second one stores it and the first one fills it again. <fence>: the first warp's; <wait>: behind the store.
STAGED = """
    mov.b32 %r1, shared_bytes; and.b32 %r2, %r0, 31; mad.lo.s32 %r3, %r2, 4, %r1; setp.ge.u32 %p1, %r0, 32; setp.eq.s32 %p2, %r0, 32;
    setp.eq.s32 %p3, %r0, 0; @%p1 bra STORE; st.shared.b32 [%r3], %r0; <fence> bar.sync 0; bar.sync 0; st.shared.b32 [%r3], 5; bra END;
    STORE: bar.sync 0; <late> @!%p2 bra STORED; cp.async.bulk.global.shared::cta.bulk_group [%q0], [%r1], 128;
    cp.async.bulk.commit_group; <wait> STORED: bar.sync 0; @%p2 cp.async.bulk.wait_group 0; END:
"""
FENCE, READ = "fence.proxy.async.shared::cta;", "cp.async.bulk.wait_group.read 0;"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_staging_buffer_needs_its_fence_and_its_wait(seed):
    staged = lambda **parts: run(
        filled(STAGED, **({"fence": FENCE, "late": "", "wait": READ} | parts)),
        x,
        threads=64,
        shared=128,
        seed=seed,
    )
    x = lanes()
    staged()
    assert x.tolist() == list(range(32))
    staged(fence="", late=f"@%p2 {FENCE}")  # by the thread that stores, behind the barrier
    for fence in ("", f"@%p3 {FENCE}"):  # of no thread, or of one for all
        with pytest.raises(ExecutionError, match=r"without a fence\.proxy\.async"):
            staged(fence=fence)
    with pytest.raises(ExecutionError, match="overwritten before a bulk copy has read it|a race"):
        staged(wait="")


@pytest.mark.parametrize("races", (("shared", "global"), ()))
def test_a_bulk_store_over_generic_stores_needs_a_fence(races):
    """Both write the tensor. Which value stays is undefined without the fence."""
    body = """
        mov.b32 %r1, shared_bytes; mad.lo.s32 %r2, %r0, 4, %r1; mul.wide.u32 %q2, %r0, 4; add.s64 %q2, %q2, %q0; st.global.b32 [%q2], 5;
        st.shared.b32 [%r2], 7; <fence> fence.proxy.async.shared::cta; bar.sync 0; setp.ne.s32 %p1, %r0, 0; @%p1 bra END;
        cp.async.bulk.global.shared::cta.bulk_group [%q0], [%r1], 128; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:
    """
    x = lanes()
    run(filled(body, fence="fence.proxy.async.global;"), x, shared=128, races=races)
    assert x.tolist() == [7] * 32
    with pytest.raises(
        ExecutionError, match=r"the async proxy writes tensor 0 .* without a fence\.proxy\.async"
    ):
        run(filled(body, fence=""), x, shared=128, races=races)


def test_a_thread_may_fence_what_it_has_written_alone():
    body = f"""
        mov.b32 %r1, shared_bytes; setp.eq.s32 %p1, %r0, 0; @!%p1 bra END; st.shared.v4.b32 [%r1], {{1, 2, 3, 4}}; {FENCE}
        cp.async.bulk.global.shared::cta.bulk_group [%q0], [%r1], 16; cp.async.bulk.commit_group; cp.async.bulk.wait_group 0; END:
    """
    x = lanes(4)
    run(
        body.replace("{1, 2, 3, 4}", "{%r5, %r6, %r7, %r8}").replace(
            "setp.eq", "mov.b32 %r5, 1; mov.b32 %r6, 2; mov.b32 %r7, 3; mov.b32 %r8, 4; setp.eq", 1
        ),
        x,
        shared=16,
    )
    assert x.tolist() == [1, 2, 3, 4]


NC = "ld.global.nc.b32 %r5, [%q0+<read>];"


@pytest.mark.parametrize(
    "text", (f"{NC} @%p1 st.global.b32 [%q0], 5;", f"@%p1 st.global.b32 [%q0], 5; bar.warp.sync -1; {NC}")
)
def test_constant_loads_are_of_data_that_the_kernel_does_not_write(text):
    text = "setp.eq.s32 %p1, %r0, 0; " + text
    run(text.replace("<read>", "4"), lanes())
    with pytest.raises(ExecutionError, match=r"ld\.global\.nc"):
        run(text.replace("<read>", "0"), lanes())


def test_all_warps_of_a_warpgroup_set_their_registers():
    body = "shr.u32 %r1, %r0, 5; setp.ge.u32 %p1, %r1, <first>; @%p1 bra END; setmaxnreg.inc.sync.aligned.u32 240; END:"
    run(filled(body, first=4), threads=256)
    with pytest.raises(
        ExecutionError,
        match=r"setmaxnreg: all warps of a warpgroup .* warp 0 executed \[240\] and warp 1 \[\]",
    ):
        run(filled(body, first=1), threads=256)
    run(filled(body, first=1), threads=256, assume=("setmaxnreg",))


#: A word of which only the lower half is written, as compilers pack 16 bits.
HALF = "cvt.u16.u32 %h1, %r0; mov.b32 %r1, {%h1, %h2}; mad.lo.s64 %q5, %q2, 4, %q0; "


@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize(
    "use",
    (
        "st.global.b8 [%q5], %r1;", "st.global.b16 [%q5], %r1;", "prmt.b32 %r2, %r1, 0, 0x7770U; st.global.b32 [%q5], %r2;",
        "prmt.b32 %r2, 0, %r1, 0x0004; st.global.b32 [%q5], %r2;",
    ),
)  # fmt: skip
def test_a_half_that_nothing_reads_may_be_undefined(use, compiled):
    out = torch.zeros(32, dtype=torch.int32)
    run("cvt.u64.u32 %q2, %r0; " + HALF + use, out, compiled=compiled)
    assert out.tolist() == list(range(32))


@pytest.mark.parametrize("compiled", (False, True))
@pytest.mark.parametrize(
    "use",
    (
        "st.global.b32 [%q5], %r1;", "prmt.b32 %r2, %r1, 0, 0x7720U; st.global.b32 [%q5], %r2;", "add.s32 %r2, %r1, 1; st.global.b32 [%q5], %r2;",
        "st.global.b8 [%q5], %r1; st.global.b16 [%q5], %h2;",
    ),
)  # fmt: skip
def test_an_undefined_half_that_is_read_is_an_error(use, compiled):
    with pytest.raises(ExecutionError, match="undefined"):
        run("cvt.u64.u32 %q2, %r0; " + HALF + use, torch.zeros(32, dtype=torch.int32), compiled=compiled)


@pytest.mark.parametrize(("mode", "start"), [(1, 512), (2, 256), (3, 128)])
def test_an_operand_starts_at_its_swizzle_pattern(mode, start):
    """512 mod 1024 for a swizzle of 128 bytes, with base offset 0."""
    moved = lambda body: re.sub(
        r"(add\.s64 %q44, %q45, )(\d+)", lambda m: m[1] + str(wgmma.descriptor(start, mode, 0, 1024)), body
    )
    with pytest.raises(ExecutionError, match=f"{start} bytes into its swizzle pattern of {2 * start} bytes"):
        multiplied(moved)
    multiplied(moved, assume=("swizzle",))
