"""Behaviour that a device leaves undefined, and waits that never end, are errors that name the place."""

import re

import pytest
import torch
from helpers.emulator.ptx import run

import ptx_emulator

MISTAKES = {
    "global out of bounds": ("ld.global.b32 %r1, [%q0+128]; st.global.b32 [%q1], %r1;", "global memory out of bounds"),
    "global misaligned": ("ld.global.b32 %r1, [%q0+2];", "not aligned to 4 bytes"),
    "vector misaligned": ("ld.global.v4.b32 {%r1, %r2, %r3, %r4}, [%q0+8];", "not aligned to 16 bytes"),
    "shared out of bounds": ("mov.b32 %r1, shared_bytes; st.shared.b32 [%r1+256], %r0;", "shared memory out of bounds"),
    "uninitialised shared": (
        "mov.b32 %r1, shared_bytes; ld.shared.b32 %r2, [%r1]; st.global.b32 [%q1], %r2;", "nothing has written",
    ),
    "uninitialised register": ("st.global.b32 [%q1], %r77;", "nothing has written"),
    "uninitialised address": ("mul.wide.s32 %q9, %r77, 4; add.s64 %q9, %q9, %q1; st.global.b32 [%q9], 1;", "nothing has written"),
    "uninitialised branch": ("setp.eq.s32 %p1, %r77, 0; @%p1 bra END; END:", "nothing has written"),
    "barrier that is never completed": ("setp.lt.s32 %p1, %r0, 32; @%p1 bra END; bar.sync 1, 64; END:", "deadlock(.|\n)*barrier 1 of 64"),
    "barrier of different counts": (
        "setp.lt.s32 %p1, %r0, 32; @%p1 bra A; bar.sync 1, 64; bra B; A: bar.sync 1, 96; B:", "threads expected here",
    ),
    "mbarrier that is never completed": (
        ("setp.eq.s32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [shared_bytes], 1; bar.sync 0; mov.b32 %r1, shared_bytes;"
        "W: mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0; @!%p2 bra W;"), "deadlock(.|\n)*1 arrivals",
    ),
    "too many arrivals": (
        ("setp.eq.s32 %p1, %r0, 0; @%p1 mbarrier.init.shared.b64 [shared_bytes], 1;"
        "mov.b32 %r1, shared_bytes; @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16;"
        "@%p1 mbarrier.arrive.shared.b64 _, [%r1], 1;"), "1 arrivals where 0 of 1 are pending",
    ),
    "no mbarrier": ("mov.b32 %r1, shared_bytes; mbarrier.arrive.shared.b64 _, [%r1], 1;", "no mbarrier"),
    "a flag that is never set": ("W: ld.acquire.gpu.global.b32 %r1, [%q0]; setp.eq.s32 %p1, %r1, 0; @%p1 bra W;", "deadlock"),
    "lanes that never join a shuffle": (
        ("setp.lt.s32 %p1, %r0, 8; @%p1 bra A; shfl.sync.bfly.b32 %r1, %r0, 1, 31, -1; bra B;"
        "A: shfl.sync.bfly.b32 %r1, %r0, 2, 31, -1; B:"), "lanes diverged for good",
    ),
    "cp.async without its wait": (
        """mov.b32 %r1, shared_bytes; mad.lo.s32 %r1, %r0, 4, %r1; cp.async.ca.shared.global [%r1], [%q0], 4;
        cp.async.commit_group; cp.async.wait_group 1; ld.shared.b32 %r2, [%r1]; st.global.b32 [%q1], %r2;""",
        "nothing has written",
    ),
}  # fmt: skip


@pytest.mark.parametrize("compiled", (True, False), ids=("compiled", "closures"))
@pytest.mark.parametrize("mistake", MISTAKES)
def test_undefined_behaviour_is_an_error(mistake, compiled):
    text, message = MISTAKES[mistake]
    with pytest.raises(ptx_emulator.ExecutionError, match=message):
        run(
            text,
            torch.zeros(32, dtype=torch.int32),
            torch.zeros(32, dtype=torch.int32),
            threads=64,
            shared=256,
            compiled=compiled,
        )


def test_an_error_names_the_instruction_and_the_warp():
    with pytest.raises(ptx_emulator.ExecutionError) as caught:
        run("bar.sync 0;\nst.global.b32 [%q0+4], %r0;", torch.zeros(1), threads=32, grid=2)
    assert (
        caught.value.text == "st.global.b32 [%q0+4], %r0" and caught.value.warp == 0 and caught.value.line > 0
    )


def test_unwritten_values_may_be_copied_but_not_used():
    """A select may have an unwritten operand that it does not take, and scratch memory may receive unwritten values."""
    x, y = torch.zeros(32, dtype=torch.int32), torch.zeros(32, dtype=torch.int32)
    run(
        """
        mov.b32 %r1, shared_bytes; ld.shared.b32 %r2, [%r1]; setp.eq.s32 %p1, 0, 0; selp.b32 %r3, 7, %r2, %p1;
        shl.b32 %r4, %r0, 2; cvt.u64.u32 %q8, %r4; add.s64 %q9, %q1, %q8; st.global.b32 [%q9], %r3;
        add.s64 %q9, %q0, %q8; st.global.b32 [%q9], %r2;
        """,
        x, y, shared=16, scratch=[x],
    )  # fmt: skip
    assert y.tolist() == [7] * 32


#: Values of %q9 of which some parts are written (%r7, %h7) and others are not. Each row: code that packs %q9, code that takes a
#: written part into %r9, code that takes an unwritten part into %r9.
PACKED = {
    "the upper half": ("mov.b64 %q9, {%r70, %r7};", "mov.b64 {_, %r9}, %q9;", "mov.b64 {%r9, _}, %q9;"),
    "the lower half": ("mov.b64 %q9, {%r7, %r70};", "mov.b64 {%r9, %r8}, %q9;", "mov.b64 {%r8, %r9}, %q9;"),
    "a copy": (
        "mov.b64 %q8, {%r70, %r7}; mov.b64 %q9, %q8;", "mov.b64 {%r8, %r9}, %q9;", "mov.b64 {%r9, %r8}, %q9;",
    ),
    "16 bits of 32 of 64": (
        "mov.b32 %r8, {%h7, %h20}; mov.b64 %q9, {%r70, %r8};",
        "mov.b64 {_, %r8}, %q9; mov.b32 {%h9, _}, %r8; cvt.u32.u16 %r9, %h9;",
        "mov.b64 {_, %r8}, %q9; mov.b32 {_, %h9}, %r8; cvt.u32.u16 %r9, %h9;",
    ),
    "16 bits of 64": (
        "mov.b64 %q9, {%h20, %h7, %h20, %h7};",
        "mov.b64 {%h8, %h9, _, _}, %q9; cvt.u32.u16 %r9, %h9;",
        "mov.b64 {%h8, _, %h9, _}, %q9; cvt.u32.u16 %r9, %h9;",
    ),
    "of two branches": (
        "@%p1 bra A; mov.b64 %q9, {%r70, %r7}; bra B; A: mov.b64 %q9, {%r70, %r7}; B:",
        "mov.b64 {_, %r9}, %q9;", "mov.b64 {%r9, _}, %q9;",
    ),
    "of one branch": (
        "mov.b64 %q9, {%r7, %r7}; @%p1 mov.b64 %q9, {%r70, %r7};", "mov.b64 {_, %r9}, %q9;", "mov.b64 {%r9, _}, %q9;",
    ),
    "packed again over itself": (
        "mov.b64 %q9, {%r70, %r7}; mov.b64 %q8, %q9; mov.b64 {%r8, _}, %q8; mov.b64 %q9, {%r7, %r8};",
        "mov.b64 {%r9, _}, %q9;", "mov.b64 {_, %r9}, %q9;",
    ),
}  # fmt: skip


@pytest.mark.parametrize("packed", PACKED)
def test_each_part_of_a_packed_register_is_tracked(packed):
    pack, known, unknown = PACKED[packed]
    pack = f"mov.b32 %r7, 7; mov.b16 %h7, 7; setp.lt.s32 %p1, %r0, 9; {pack}"
    store = "mad.wide.s32 %q1, %r0, 8, %q0; st.global.b32 [%q1], %r9;"
    x = torch.zeros(32, dtype=torch.int64)
    run(pack + known + store, x)
    assert x.tolist() == [7] * 32
    for mistake in (unknown + store, store.replace("b32", "b64").replace("%r9", "%q9")):
        with pytest.raises(ptx_emulator.ExecutionError, match="nothing has written"):
            run(pack + mistake, x)


@pytest.mark.parametrize(
    "compute",
    ("add.s64 %q9, %q9, 0;", "neg.s64 %q9, %q9;", "cvt.s64.s64 %q9, %q9;", "selp.b64 %q9, %q9, 7, %p1;"),
)
def test_a_result_of_a_partly_written_operand_is_unwritten(compute):
    """Only instructions that move bits unchanged keep track of each part."""
    with pytest.raises(ptx_emulator.ExecutionError, match="nothing has written"):
        run(
            f"setp.eq.s32 %p1, 0, 0; mov.b64 %q9, {{%r70, %r0}}; {compute} mov.b64 {{_, %r9}}, %q9;"
            "st.global.b32 [%q0], %r9;",
            torch.zeros(32, dtype=torch.int32),
        )


@pytest.mark.parametrize("seed", range(5))
def test_ctas_may_wait_for_each_other_in_any_order(seed):
    """A chain through global memory: each CTA waits for the one with the next number and adds its own number to the sum."""
    flags, total = torch.zeros(9, dtype=torch.int32), torch.zeros(9, dtype=torch.int32)
    flags[8] = 1
    run(
        """
        mov.u32 %r1, %ctaid.x; mul.wide.s32 %q8, %r1, 4; add.s64 %q9, %q0, %q8; add.s64 %q10, %q1, %q8;
        setp.ne.s32 %p1, %r0, 0; @%p1 bra END;
        W: ld.acquire.gpu.global.b32 %r2, [%q9+4]; setp.eq.s32 %p2, %r2, 0; @!%p2 bra GO; nanosleep.u32 100;
        bra W; GO: ld.global.b32 %r3, [%q10+4]; add.s32 %r3, %r3, %r1; st.global.b32 [%q10], %r3;
        st.release.gpu.global.b32 [%q9], 1; END: """,
        flags, total, grid=8, seed=seed,
    )  # fmt: skip
    assert total.tolist() == [sum(range(n, 8)) for n in range(9)]


ORDERED = {
    "a barrier between a write and a read": """
        mov.b32 %r1, shared_bytes; setp.ge.s32 %p1, %r0, 32; @%p1 bra READ; st.shared.b32 [%r1], 5;
        READ: <bar.sync 0;> ld.shared.b32 %r2, [%r1]; setp.eq.s32 %p2, %r0, 32; @%p2 st.global.b32 [%q0], %r2;""",
    "a barrier between a read and a write": """
        mov.b32 %r1, shared_bytes; mad.lo.s32 %r3, %r0, 4, %r1; st.shared.b32 [%r3], %r0; bar.sync 0;
        xor.b32 %r4, %r0, 32; mad.lo.s32 %r4, %r4, 4, %r1; ld.shared.b32 %r2, [%r4]; <bar.sync 0;>
        add.s32 %r5, %r2, 1; st.shared.b32 [%r3], %r5;""",
    "the lanes of a warp": """
        mov.b32 %r1, shared_bytes; mad.lo.s32 %r3, %r0, 4, %r1; st.shared.b32 [%r3], %r0; <bar.warp.sync -1;>
        xor.b32 %r4, %r0, 1; mad.lo.s32 %r4, %r4, 4, %r1; ld.shared.b32 %r2, [%r4];""",
    "matrices of a warp": """
        mov.b32 %r1, shared_bytes; mad.lo.s32 %r3, %r0, 4, %r1; st.shared.b32 [%r3], %r0; and.b32 %r4, %r0, 7;
        shr.u32 %r5, %r0, 5; mul.lo.s32 %r5, %r5, 128; mad.lo.s32 %r4, %r4, 16, %r5; add.s32 %r4, %r4, %r1;
        <bar.warp.sync -1;> ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r6}, [%r4];""",
    "a release that is acquired": """
        setp.eq.s32 %p1, %r0, 0; @%p1 bra WRITE; setp.ne.s32 %p1, %r0, 32; @%p1 bra END;
        W: ld.<acquire.gpu|relaxed.gpu>.global.b32 %r1, [%q0]; setp.eq.s32 %p2, %r1, 0; @%p2 bra W;
        ld.global.b32 %r2, [%q0+4]; bra END;
        WRITE: st.global.b32 [%q0+4], 7; st.<release.gpu|relaxed.gpu>.global.b32 [%q0], 1;
        END:""",
    "fences around relaxed accesses": """
        setp.eq.s32 %p1, %r0, 0; @%p1 bra WRITE; setp.ne.s32 %p1, %r0, 32; @%p1 bra END;
        W: ld.relaxed.gpu.global.b32 %r1, [%q0]; setp.eq.s32 %p2, %r1, 0; @%p2 bra W;
        <fence.acq_rel.gpu;> ld.global.b32 %r2, [%q0+4]; bra END;
        WRITE: st.global.b32 [%q0+4], 7; fence.acq_rel.gpu; st.relaxed.gpu.global.b32 [%q0], 1;
        END:""",
    "an atomic operation that releases": """
        setp.eq.s32 %p1, %r0, 0; @%p1 bra WRITE; setp.ne.s32 %p1, %r0, 32; @%p1 bra END;
        W: ld.acquire.gpu.global.b32 %r1, [%q0]; setp.eq.s32 %p2, %r1, 0; @%p2 bra W;
        ld.global.b32 %r2, [%q0+4]; bra END;
        WRITE: st.global.b32 [%q0+4], 7; atom.<release|relaxed>.gpu.global.add.u32 %r1, [%q0], 1;
        END:""",
}


@pytest.mark.parametrize("what", ORDERED)
def test_races_are_found_in_every_execution_order(what):
    """A body contains <a|b>: with a the accesses are ordered, with b they are not."""
    right = re.sub(r"<([^|>]*)(\|[^>]*)?>", r"\1", ORDERED[what])
    wrong = re.sub(r"<([^|>]*)\|?([^>]*)>", r"\2", ORDERED[what])
    for seed in range(4):
        run(right, torch.zeros(4, dtype=torch.int32), threads=64, shared=512, seed=seed)
        with pytest.raises(ptx_emulator.ExecutionError, match="a race|nothing has written"):
            run(wrong, torch.zeros(4, dtype=torch.int32), threads=64, shared=512, seed=seed)


PHASES = """
    setp.eq.s32 %p1, %r0, 0; mov.b32 %r1, shared_bytes; setp.ge.s32 %p2, %r0, 32;
    @%p1 mbarrier.init.shared.b64 [%r1], 1; @%p1 mbarrier.init.shared.b64 [%r1+8], 1; fence.mbarrier_init.release.cluster;
    bar.sync 0; @%p2 bra WAIT;
"""
WAIT = "{name}: mbarrier.{kind}.parity.shared.b64 %p3, [%r1+{place}], {parity}; @!%p3 bra {name};"


ARRIVE = "@%p1 mbarrier.arrive.shared.b64 _, [%r1], 1;"


@pytest.mark.parametrize(("count", "kind"), [(2, "try_wait"), (2, "test_wait"), (3, "try_wait")])
def test_a_wait_for_a_phase_followed_by_others_is_an_error(count, kind):
    """``count`` phases complete before the wait for phase 0. Parity is ambiguous then, and for 3 it even matches. The relaxed flag
    only delays the wait; it orders nothing."""
    wait = WAIT.format(name="W", kind=kind, place=0, parity=0)
    body = f"""{PHASES} {ARRIVE * count} @%p1 st.relaxed.cta.global.b32 [%q0], 1; bra END;
        WAIT: ld.relaxed.cta.global.b32 %r2, [%q0]; setp.eq.s32 %p4, %r2, 0; @%p4 bra WAIT; {wait} END:"""
    with pytest.raises(
        ptx_emulator.ExecutionError, match=rf"wait for phase 0 (.|\n)*\({count} are complete\)"
    ):
        run(body, torch.zeros(1, dtype=torch.int32), threads=64, shared=16)


@pytest.mark.parametrize("seed", range(4))
def test_consecutive_phases_can_be_waited_for(seed):
    """The second arrival follows the waiter's answer that it has seen the first one."""
    first, second, asked = (
        WAIT.format(name=name, kind="try_wait", place=place, parity=parity)
        for name, place, parity in (("A", 0, 0), ("B", 0, 1), ("C", 8, 0))
    )
    answer = "setp.eq.s32 %p4, %r0, 32; @%p4 mbarrier.arrive.shared.b64 _, [%r1+8], 1;"
    body = f"{PHASES} {ARRIVE} {asked} {ARRIVE} bra END; WAIT: {first} {answer} {second} END:"
    run(body, threads=64, shared=16, seed=seed)


def test_a_wait_for_the_first_load_of_a_refilled_stage_is_an_error():
    """The consumer has read the first load, the producer refills the stage and only then waits for the first load."""
    x = torch.zeros(4, dtype=torch.int32)
    load = """@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 16;
        @%p1 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r1+16], [%q0], 16, [%r1];"""
    late, read, right = (
        WAIT.format(name=name, kind="try_wait", place=0, parity=parity)
        for name, parity in (("A", 0), ("B", 0), ("C", 1))
    )
    body = f"{PHASES} {load} bar.sync 1, 64; {load} <wait> bra END; WAIT: {read} bar.sync 1, 64; END:"
    for seed in range(4):
        run(body.replace("<wait>", right), x, threads=64, shared=32, seed=seed)
        with pytest.raises(ptx_emulator.ExecutionError, match="wait for phase 0 "):
            run(body.replace("<wait>", late), x, threads=64, shared=32, seed=seed)


def test_launch_arguments_are_checked():
    x = torch.zeros(4)
    with pytest.raises(ValueError, match="shared_bytes"):
        run("", x, shared=228 * 1024)
    with pytest.raises(ValueError, match="without gaps"):
        run("", torch.zeros(4, 4)[:, :2])
    with pytest.raises(ValueError, match="overlaps"):
        run("", x, x[1:])
