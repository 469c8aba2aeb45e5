"""Launches in several processes: the same bits and errors as in one, and an error where CTAs share memory."""

import os

import pytest
import torch
from helpers.emulator.ptx import run

import kda_core
from kda_cute.testing.emulation import emulated
from ptx_emulator import ExecutionError
from ptx_emulator.machine import Machine

#: %q2: the address of the thread's word of the second tensor; %q3: that of the same thread of the next CTA.
PLACES = """
    mov.u32 %r1, %ctaid.x;  mad.lo.u32 %r2, %r1, 32, %r0;  mul.wide.u32 %q4, %r2, 4;
    add.u64 %q2, %q1, %q4;  add.u64 %q3, %q2, 128;  add.u64 %q5, %q0, %q4;
"""
SQUARE = "ld.global.u32 %r3, [%q5]; mul.lo.u32 %r3, %r3, %r3; st.global.u32 [%q2], %r3;"


def square(processes, body=SQUARE, grid=5, **options):
    """Returns the result of a launch of ``grid`` CTAs, and what `run` returned."""
    x, y = torch.arange(256, dtype=torch.int32), torch.full((256,), -1, dtype=torch.int32)
    count = run(PLACES + body, x, y, grid=grid, processes=processes, **options)
    return y, count


@pytest.mark.parametrize("processes, compiled", [(2, True), (9, False)])
def test_the_bits_are_those_of_one_process(processes, compiled):
    expected, count = square(1, compiled=compiled)
    found, counted = square(processes, compiled=compiled)
    assert torch.equal(found, expected) and counted == count
    assert expected[:160].tolist() == [n * n for n in range(160)] and (expected[160:] == -1).all()


def test_processes_may_write_neighbouring_halves_of_a_word():
    body = "mov.u32 %r1, %ctaid.x; mul.wide.u32 %q2, %r1, 2; add.u64 %q1, %q0, %q2; cvt.u16.u32 %h1, %r1; @%p1 st.global.u16 [%q1], %h1;"
    y = torch.zeros(8, dtype=torch.int16)
    run("setp.eq.u32 %p1, %r0, 0;" + body, y, grid=8, processes=3)
    assert y.tolist() == list(range(8))


def test_clusters_stay_together():
    y = torch.full((8,), -1, dtype=torch.int32)
    body = "mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, %ctaid.x; mul.wide.u32 %q2, %r2, 4; add.u64 %q1, %q0, %q2;"
    barrier = "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    store = "setp.eq.u32 %p1, %r0, 0; @%p1 st.global.u32 [%q1], %r1;"
    run(body + barrier + store, y, grid=8, processes=3, cluster=(2, 1, 1))
    assert y.tolist() == [0, 1] * 4


def test_an_error_arrives_with_its_message():
    fault = "setp.eq.u32 %p1, %r1, 4; @%p1 ld.global.u32 %r4, [%q5 + 4096];"
    found = []
    for processes in (1, 3):
        with pytest.raises(ExecutionError, match="out of bounds") as caught:
            square(processes, SQUARE + fault)
        error = caught.value
        found.append((error.kernel, error.cta, error.warp, error.line, error.text))
    assert found[0] == found[1] and found[0][1] == 4


def test_a_process_that_ends_early_is_an_error(monkeypatch):
    monkeypatch.setattr(Machine, "run", lambda machine: os._exit(7))
    with pytest.raises(RuntimeError, match="process 0 of the launch ended with exit code 7"):
        square(2)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(
    "body, access",
    [
        ("st.global.u32 [%q2], %r2; st.global.u32 [%q3], %r2;", "write"),
        ("st.global.u32 [%q2], %r2; ld.global.u32 %r4, [%q3];", "read"),
        ("st.global.u32 [%q2], %r2; ld.global.nc.u32 %r4, [%q3];", "read"),
    ],
)
def test_memory_that_two_processes_use_is_an_error(body, access, compiled):
    place = r"tensor 1 \(256,\) int32, offset 128,"  # the words of CTA 1
    with pytest.raises(
        ExecutionError, match=f"those of process 0 {access} {place} and those of another one write it"
    ):
        square(2, body, grid=2, compiled=compiled)


def test_memory_is_unchanged_after_an_error():
    x, y = torch.zeros(256, dtype=torch.int32), torch.zeros(256, dtype=torch.int32)
    own, shared = "st.global.u32 [%q5], 7;", "st.global.u32 [%q2], %r2; ld.global.u32 %r4, [%q3];"
    with pytest.raises(ExecutionError, match="tensor 1"):
        run(PLACES + own + shared, x, y, grid=2, processes=2)
    assert not x.any() and not y.any()


def test_what_an_asynchronous_copy_reads_is_compared():
    """In one process, the order of the copy and the write decides whether there is an error (`Shadow.observe`)."""
    body = """
        mbarrier.init.shared.b64 [shared_bytes], 1;  fence.mbarrier_init.release.cluster;
        mbarrier.arrive.expect_tx.shared.b64 %q7, [shared_bytes], 128;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [shared_bytes + 128], [%q3], 128, [shared_bytes];
        WAIT: mbarrier.try_wait.parity.shared.b64 %p2, [shared_bytes], 0;  @!%p2 bra WAIT;
    """
    load = f"setp.ne.u32 %p1, %r2, 0; @%p1 bra LOADED; {body} LOADED: setp.ne.u32 %p1, %r1, 1; @%p1 bra END;"
    tensors = torch.zeros(2, 256, dtype=torch.int32).unbind()
    with pytest.raises(
        ExecutionError, match="those of process 0 read .* offset 128, and those of another one write it"
    ):
        run(PLACES + load + "st.global.u32 [%q2], %r2; END:", *tensors, grid=2, processes=2, shared=256)


@pytest.mark.parametrize(
    "instruction",
    [
        "atom.global.add.u32 %r4, [%q2], 1;", "red.global.add.u32 [%q2], 1;", "ld.global.acquire.gpu.u32 %r4, [%q2];",
        "st.global.release.gpu.u32 [%q2], 1;", "ld.volatile.global.u32 %r4, [%q2];",
    ],
)  # fmt: skip
def test_kernels_whose_ctas_communicate_are_refused(instruction):
    with pytest.raises(ValueError, match="CTAs may communicate: PTX line") as caught:
        square(2, instruction)
    assert instruction.rstrip(";") in str(caught.value)


def test_what_several_processes_need():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        square(0)
    with pytest.raises(ValueError, match="need races='global'"):
        square(2, races=("shared",))
    with pytest.raises(ValueError, match="begin and end at even addresses"):
        run("", torch.zeros(7, dtype=torch.uint8), grid=2, processes=2)
    shared = torch.zeros(256, dtype=torch.int32).share_memory_()
    with pytest.raises(ValueError, match="shared by processes"):
        run(PLACES + SQUARE, shared, torch.zeros(256, dtype=torch.int32), grid=2, processes=2)


def test_a_cooperative_launch_is_refused():
    x, g = torch.zeros(1, 20, 2, 128).bfloat16(), torch.zeros(1, 20, 2, 128)
    with (
        emulated("sm90", "sm_90a", processes=2),
        pytest.raises(
            ValueError, match="processes: expected 1 for .*PrefillKernel.*, whose launch is cooperative"
        ),
    ):
        kda_core.chunk_kda(x, x, x, g, torch.zeros(1, 20, 2), backend="sm90")
