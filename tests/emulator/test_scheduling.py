"""Cluster launch control: persistent CTAs cancel those that have not started, and do their work."""

import pytest
import torch
from helpers.emulator.ptx import run
from helpers.emulator.tensor_maps import filled

from ptx_emulator import ExecutionError

#: Thread 0 adds 1 to the element of tensor 0 that belongs to its CTA, then to those of CTAs that it cancels. <again>: the loop's label.
WORK = """
    .reg .b128 %z<2>; setp.ne.s32 %p1, %r0, 0; @%p1 bra END; mov.b32 %r1, shared_bytes; mbarrier.init.shared.b64 [%r1+16], 1;
    <fence> mov.b32 %r2, %ctaid.x; mov.b32 %r5, 0;
    NEXT: mul.wide.u32 %q8, %r2, 4; add.s64 %q8, %q8, %q0; atom.global.add.u32 %r3, [%q8], 1;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r1+16], 16; add.s32 %r6, %r1, 16;
    clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r1], [%r6];
    <wait> ld.shared.b128 %z0, [%r1]; clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p3, %z0; xor.b32 %r5, %r5, 1;
    <query> bra NEXT; END:
"""
PARTS = {
    "fence": "fence.mbarrier_init.release.cluster;",
    "wait": "W: mbarrier.try_wait.parity.shared.b64 %p2, [%r6], %r5; @!%p2 bra W;",
    "query": "@!%p3 bra END; clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r2, _, _, _}, %z0;",
}  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("resident", (2, 9))
def test_each_cta_is_done_once(seed, resident):
    out = torch.zeros(9, dtype=torch.int32)
    run(filled(WORK, **PARTS), out, shared=32, grid=9, resident=resident, seed=seed)
    assert out.tolist() == [1] * 9


def test_an_index_may_be_queried_before_the_branch():
    """Compilers move the query there. The index of a response that cancelled no cluster is undefined; nothing uses it."""
    early = "clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r2, %z0; @!%p3 bra END;"
    out = torch.zeros(9, dtype=torch.int32)
    run(filled(WORK, **PARTS | {"query": early}), out, shared=32, grid=9, resident=2)
    assert out.tolist() == [1] * 9


@pytest.mark.parametrize(
    ("part", "text", "wrong"),
    [
        ("fence", "", "no fence.mbarrier_init"), ("wait", "mov.b32 %r7, 0;", "nothing has written|nothing has waited"),
        ("query", "clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r2, %z0;", "undefined"),
        ("query", "@%p3 clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r2, %z0;", "after an earlier one"),
    ],
)  # fmt: skip
def test_misuse_is_an_error(part, text, wrong):
    for seed in range(3):
        with pytest.raises(ExecutionError, match=wrong):
            run(
                filled(WORK, **(PARTS | {part: text})),
                torch.zeros(9, dtype=torch.int32),
                shared=32,
                grid=9,
                resident=2,
                seed=seed,
            )
