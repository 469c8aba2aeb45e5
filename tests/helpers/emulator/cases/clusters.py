"""Clusters: special registers, shared memory and mbarriers of other CTAs, multicast."""

from __future__ import annotations

from functools import partial

import torch

from helpers.emulator.cases.registry import Outputs, add
from helpers.emulator.ptx import run
from helpers.emulator.tensor_maps import tensor_map

MEET = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
SPECIALS = (
    "%cluster_ctaid.x", "%cluster_ctaid.y", "%cluster_nctaid.x", "%clusterid.x", "%clusterid.y", "%nclusterid.x",
    "%cluster_ctarank", "%cluster_nctarank", "%ctaid.x", "%nctaid.y", "%ntid.x", "%laneid", "%lanemask_lt", "%lanemask_ge",
)  # fmt: skip


def specials() -> Outputs:
    """The special registers of one thread of each CTA, [CTA y, CTA x, register]."""
    out = torch.zeros(4, 6, len(SPECIALS), dtype=torch.int32)
    body = "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mad.lo.s32 %r3, %r2, 6, %r1;"
    body += f"mul.wide.s32 %q8, %r3, {4 * len(SPECIALS)}; add.s64 %q8, %q0, %q8; setp.ne.s32 %p1, %r0, 5; @%p1 bra END;"
    body += "".join(
        f"mov.u32 %r4, {name}; st.global.b32 [%q8+{4 * n}], %r4;" for n, name in enumerate(SPECIALS)
    )
    run(f"{body} END:", out, grid=(6, 4), cluster=(3, 2))
    return {"registers": out}


#: Each CTA writes to or reads from the CTA of the next rank: %r3 and %r7 are its own word and mbarrier, %r5 and %r8 those of the
#: next rank, %r6 a number of the lane and the rank.
NEXT = """
    mov.b32 %r1, shared_bytes; mov.u32 %r2, %cluster_ctarank; mad.lo.s32 %r3, %r0, 4, %r1; add.s32 %r4, %r2, 1;
    and.b32 %r4, %r4, 3; mapa.shared::cluster.u32 %r5, %r3, %r4; mad.lo.s32 %r6, %r2, 100, %r0;
    add.s32 %r7, %r1, 128; mapa.shared::cluster.u32 %r8, %r7, %r4; setp.eq.s32 %p1, %r0, 0;
    @%p1 mbarrier.init.shared.b64 [%r7], 1; @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r7], 128;
    fence.mbarrier_init.release.cluster;
"""
#: Each thread stores its own word to the output.
PAST = f"""ld.shared.b32 %r9, [%r3]; mad.lo.s32 %r10, %r2, 32, %r0; mul.wide.s32 %q8, %r10, 4; add.s64 %q8, %q0, %q8;
    st.global.b32 [%q8], %r9; {MEET}"""
#: Wait for the bytes that the previous rank sends.
ARRIVED = "W: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r7], 0; @!%p2 bra W; bar.warp.sync -1;"
#: Accesses to the CTA of the next rank, by the name of their case.
REMOTE = {
    "mbarrier.arrive.shared::cluster": f"""@%p1 mbarrier.init.shared.b64 [%r7+8], 32; fence.mbarrier_init.release.cluster; {MEET}
        st.shared::cluster.b32 [%r5], %r6; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8+8];
        X: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p2, [%r7+8], 0; @!%p2 bra X; bar.warp.sync -1;""",
    "mapa of generic addresses": f"""cvt.u64.u32 %q9, %r3; cvta.shared.u64 %q9, %q9; mapa.u64 %q10, %q9, %r4; {MEET}
        st.b32 [%q10], %r6; {MEET}""",
    "red.async": f"""st.shared.b32 [%r3], 5; {MEET}
        red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%r5], %r6, [%r8]; {ARRIVED}""",
    "griddepcontrol": f"griddepcontrol.wait; {MEET} st.shared::cluster.b32 [%r5], %r6; {MEET} griddepcontrol.launch_dependents;",
    "st.shared::cluster": f"{MEET} st.shared::cluster.b32 [%r5], %r6; {MEET}",
    "ld.shared::cluster": f"st.shared.b32 [%r3], %r6; {MEET} ld.shared::cluster.b32 %r11, [%r5]; {MEET} st.shared.b32 [%r3], %r11;",
    "atom.shared::cluster": f"st.shared.b32 [%r3], %r6; {MEET} atom.shared::cluster.add.u32 %r11, [%r5], 7; {MEET}",
    "st.async": f"{MEET} st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r5], %r6, [%r8]; {ARRIVED}",
    "cp.async.bulk.shared::cluster.shared::cta": f"""add.s32 %r12, %r3, 256; st.shared.b32 [%r12], %r6;
        fence.proxy.async.shared::cta; {MEET} mapa.shared::cluster.u32 %r13, %r1, %r4; add.s32 %r14, %r1, 256;
        @%p1 cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r13], [%r14], 128, [%r8]; {ARRIVED}""",
}


def remote(body: str) -> Outputs:
    """Each CTA executes ``body``, an access to the next CTA of its cluster: the words [rank, lane] that it then finds."""
    out = torch.zeros(4, 32, dtype=torch.int32)
    run(f"{NEXT} {body} {PAST}", out, grid=4, cluster=(4,), shared=512)
    return {"seen": out}


def multicast(seed: int = 0) -> Outputs:
    """Rank 0 copies a box to ranks 0 and 2; each waits at its own mbarrier."""
    x, out = torch.arange(32, dtype=torch.int32).reshape(4, 8), torch.zeros(3, 32, dtype=torch.int32)
    body = f"""
        mov.b32 %r1, shared_bytes; mov.u32 %r2, %cluster_ctarank; setp.eq.s32 %p1, %r0, 0; setp.eq.s32 %p2, %r2, 1;
        @%p1 mbarrier.init.shared.b64 [%r1+128], 1; fence.mbarrier_init.release.cluster;
        @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1+128], 128; {MEET} setp.eq.s32 %p3, %r2, 0; and.pred %p3, %p3, %p1;
        mov.b16 %h1, 5; @%p3 cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster
            [%r1], [%q0, {{0, 0}}], [%r1+128], %h1;
        @%p2 bra END; WAIT: mbarrier.try_wait.parity.shared.b64 %p4, [%r1+128], 0; @!%p4 bra WAIT; mad.lo.s32 %r3, %r0, 4, %r1;
        ld.shared.b32 %r4, [%r3]; mad.lo.s32 %r5, %r2, 32, %r0; mul.wide.s32 %q8, %r5, 4; add.s64 %q8, %q2, %q8;
        st.global.b32 [%q8], %r4; END: bar.warp.sync -1; {MEET}
    """
    run(body, tensor_map(x, (8, 4)), x, out, grid=3, cluster=(3,), shared=144, seed=seed)
    return {"seen": out}


add("memory", "special registers", specials)
for name, body in REMOTE.items():
    add("memory", name, partial(remote, body))
add("memory", "cp.async.bulk.tensor.multicast::cluster", multicast)
