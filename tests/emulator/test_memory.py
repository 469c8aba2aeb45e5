"""The memory of a launch is given back when it ends, and that of a program when no cache has it, without the help of Python's garbage
collector."""

import gc

import pytest
import torch
from helpers.emulator import tcgen05
from helpers.emulator.ptx import run

from ptx_emulator import ExecutionError, PtxError, decode, launch, parser
from ptx_emulator.machine import Cta, Machine, Warp
from ptx_emulator.memory import Region

COPY = "mul.wide.s32 %q20, %r0, 4; add.s64 %q20, %q20, %q0; st.global.b32 [%q20], %r0; cp.async.bulk.commit_group;"
PRODUCT = tcgen05.HEAD + tcgen05.ZERO + tcgen05.copied_out("%q0") + tcgen05.TAIL
PENDING = "add.s32 %r5, %r1, 1024; @%p2 cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%r5], [%q0], 16, [%r2];"


@pytest.fixture
def without_collector():
    gc.collect()
    gc.freeze()  # `kept` then sees new objects only, and the next collection does not go through the others
    gc.disable()
    yield
    gc.enable()


def kept():
    return [x for x in gc.get_objects() if type(x) in (Machine, Cta, Region) or issubclass(type(x), Warp)]


@pytest.mark.parametrize("compiled", (True, False))
@pytest.mark.parametrize("body", (COPY, PRODUCT), ids=("copy", "tensor memory"))
def test_nothing_is_kept(without_collector, body, compiled):
    out = torch.zeros((128, 64), dtype=torch.int32)
    run(body, out, threads=128, grid=3, shared=4096, compiled=compiled)
    assert kept() == []


def test_nothing_is_kept_after_an_error(without_collector):
    out = torch.zeros((128, 64), dtype=torch.int32)
    with pytest.raises(ExecutionError, match="has not freed its tensor memory"):
        run(tcgen05.HEAD, out, threads=128, shared=4096)
    assert kept() == []
    with pytest.raises(ExecutionError, match="the CTA ends while a bulk copy") as error:
        run(tcgen05.HEAD + PENDING + tcgen05.TAIL, out, threads=128, shared=4096)
    del error
    assert kept() == []


def forget_programs():
    for module in (launch, decode, parser):
        for value in list(vars(module).values()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def test_programs_are_freed(without_collector):
    forget_programs()  # of earlier tests, with which the program would share what it has
    run("add.s32 %r1, %r0, 1; add.s32 %r2, %r1, 2; add.s32 %r3, %r2, 3;")
    (shared,) = [x for x in gc.get_objects() if type(x) is decode.Shared]
    assert any(type(x) is decode.Alike for x in shared.decoded.values())
    del shared
    forget_programs()
    assert [x for x in gc.get_objects() if type(x) is decode.Shared] == []


@pytest.mark.parametrize("enabled", (True, False))
def test_decoding_leaves_the_garbage_collector_as_it_was(enabled):
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        run(f"mov.b32 %r1, {int(enabled)};")
        with pytest.raises(PtxError):
            run(f"no_such_instruction %r1, {int(enabled)};")
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
