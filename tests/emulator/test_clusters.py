"""Clusters: special registers, shared memory and mbarriers of other CTAs, the cluster barrier, multicast."""

import numpy as np
import pytest
import torch
from helpers.emulator.cases import clusters
from helpers.emulator.cases.clusters import MEET
from helpers.emulator.ptx import run

from ptx_emulator import ExecutionError

SPECIALS = (
    "%cluster_ctaid.x", "%cluster_ctaid.y", "%cluster_nctaid.x", "%clusterid.x", "%clusterid.y", "%nclusterid.x",
    "%cluster_ctarank", "%cluster_nctarank",
)  # fmt: skip


def test_special_registers_of_a_cluster():
    out = torch.zeros(4, 6, len(SPECIALS), dtype=torch.int32)
    body = "mov.u32 %r1, %ctaid.x; mov.u32 %r2, %ctaid.y; mad.lo.s32 %r3, %r2, 6, %r1;"
    body += f"mul.wide.s32 %q8, %r3, {4 * len(SPECIALS)}; add.s64 %q8, %q0, %q8;"
    body += "".join(
        f"mov.u32 %r4, {name}; st.global.b32 [%q8+{4 * n}], %r4;" for n, name in enumerate(SPECIALS)
    )
    run(body, out, grid=(6, 4), cluster=(3, 2))
    for y in range(4):
        for x in range(6):
            assert out[y, x].tolist() == [x % 3, y % 2, 3, x // 3, y // 2, 2, y % 2 * 3 + x % 3, 6]


#: %r3: a thread's own word, %r5: its word in the CTA of the next rank, %r6: a number of the rank and the thread. The part in <>
#: is left out to break a body.
NEXT = """
    mov.b32 %r1, shared_bytes; mov.u32 %r2, %cluster_ctarank; mad.lo.s32 %r3, %r0, 4, %r1; add.s32 %r4, %r2, 1;
    and.b32 %r4, %r4, 3; mapa.shared::cluster.u32 %r5, %r3, %r4; mad.lo.s32 %r6, %r2, 100, %r0;
"""
WRITE = f"""{NEXT} st.shared::cluster.b32 [%r5], %r6; <{MEET}> ld.shared.b32 %r7, [%r3];
    mad.lo.s32 %r8, %r2, 32, %r0; mul.wide.s32 %q8, %r8, 4; add.s64 %q8, %q0, %q8; st.global.b32 [%q8], %r7;"""
READ = f"""{NEXT} st.shared.b32 [%r3], %r6; <{MEET}> ld.shared::cluster.b32 %r7, [%r5]; {MEET}
    mad.lo.s32 %r8, %r2, 32, %r0; mul.wide.s32 %q8, %r8, 4; add.s64 %q8, %q0, %q8; st.global.b32 [%q8], %r7;"""


@pytest.mark.parametrize(("body", "step"), [(WRITE, -1), (READ, 1)], ids=("write", "read"))
def test_accesses_to_the_next_cta_need_the_cluster_barrier(body, step):
    out = torch.zeros(4, 32, dtype=torch.int32)
    want = (np.arange(4)[:, None] + step) % 4 * 100 + np.arange(32)
    for seed in range(3):
        run(body.replace("<", "").replace(">", ""), out, grid=4, cluster=(4,), shared=128, seed=seed)
        assert np.array_equal(out.numpy(), want)
        with pytest.raises(ExecutionError, match="a race|nothing has written|has ended"):
            run(body.replace(f"<{MEET}>", ""), out, grid=4, cluster=(4,), shared=128, seed=seed)


#: After each body of `clusters.REMOTE`, a rank holds the number of the rank this many steps on, plus an offset.
LEFT = {name: (-1, 0) for name in clusters.REMOTE} | {
    "ld.shared::cluster": (1, 0), "atom.shared::cluster": (0, 7), "red.async": (-1, 5),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_remote_accesses_reach_the_next_cta(name):
    step, more = LEFT[name]
    want = (np.arange(4)[:, None] + step) % 4 * 100 + np.arange(32) + more
    assert np.array_equal(clusters.remote(clusters.REMOTE[name])["seen"].numpy(), want)


@pytest.mark.parametrize("name", ("st.async", "red.async", "cp.async.bulk.shared::cluster.shared::cta"))
def test_asynchronous_remote_writes_need_a_wait_and_the_right_mbarrier(name):
    body = clusters.REMOTE[name]
    for broken, wrong in (
        (body.replace(clusters.ARRIVED, MEET), "a race|nothing has written|not modelled"),
        (body.replace("[%r8]", "[%r7]"), "not in the CTA whose shared memory"),
    ):
        assert broken != body
        if name == "red.async" and "[%r7]" not in broken:
            continue  # the word was written before, so the emulator cannot notice that the reduction is still to come
        with pytest.raises(ExecutionError, match=wrong):
            clusters.remote(broken)


def test_multicast_of_bytes():
    """Rank 0 copies from global memory to ranks 0 and 2."""
    x, out = torch.arange(32, dtype=torch.int32), torch.zeros(3, 32, dtype=torch.int32)
    body = f"""
        mov.b32 %r1, shared_bytes; mov.u32 %r2, %cluster_ctarank; setp.eq.s32 %p1, %r0, 0; setp.eq.s32 %p2, %r2, 1;
        @%p1 mbarrier.init.shared.b64 [%r1+128], 1; fence.mbarrier_init.release.cluster;
        @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1+128], 128; {MEET} setp.eq.s32 %p3, %r2, 0; and.pred %p3, %p3, %p1;
        mov.b16 %h1, 5; @%p3 cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster
            [%r1], [%q0], 128, [%r1+128], %h1;
        @%p2 bra END; WAIT: mbarrier.try_wait.parity.shared.b64 %p4, [%r1+128], 0; @!%p4 bra WAIT; mad.lo.s32 %r3, %r0, 4, %r1;
        ld.shared.b32 %r4, [%r3]; mad.lo.s32 %r5, %r2, 32, %r0; mul.wide.s32 %q8, %r5, 4; add.s64 %q8, %q1, %q8;
        st.global.b32 [%q8], %r4; END: bar.warp.sync -1; {MEET}
    """
    run(body, x, out, grid=3, cluster=(3,), shared=144)
    assert torch.equal(out[0], x) and torch.equal(out[2], x) and not out[1].any()


def test_reading_shared_memory_of_an_ended_cta_is_an_error():
    body = READ.replace("<", "").replace(">", "").replace(f"[%r5]; {MEET}", "[%r5];")
    found = []
    for seed in range(8):
        try:
            run(body, torch.zeros(4, 32, dtype=torch.int32), grid=4, cluster=(4,), shared=128, seed=seed)
        except ExecutionError as error:
            found.append(str(error))
    assert found and all("has ended" in text for text in found)


def test_a_remote_arrival_publishes_a_remote_write():
    """Rank 1 writes to rank 0 and arrives at its mbarrier."""
    body = f"""
        mov.b32 %r1, shared_bytes; mov.u32 %r2, %cluster_ctarank; setp.eq.s32 %p1, %r0, 0; setp.eq.s32 %p2, %r2, 0;
        @%p1 mbarrier.init.shared.b64 [%r1], 1; fence.mbarrier_init.release.cluster; {MEET} @%p2 bra WAIT;
        mapa.shared::cluster.u32 %r5, %r1, 0; @%p1 st.shared::cluster.b32 [%r5+16], 7;
        @%p1 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5]; bra END;
        WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p3, [%r1], 0; @!%p3 bra WAIT;
        ld.shared.b32 %r6, [%r1+16]; @%p1 st.global.b32 [%q0], %r6; END: {MEET}
    """
    for seed in range(4):
        out = torch.zeros(1, dtype=torch.int32)
        run(body, out, grid=2, cluster=(2,), shared=32, seed=seed)
        assert out.item() == 7


def test_multicast_of_a_box():
    x = torch.arange(32, dtype=torch.int32)
    for seed in range(4):
        seen = clusters.multicast(seed)["seen"]
        assert torch.equal(seen, torch.stack([x, torch.zeros_like(x), x]))


def test_misuse_of_clusters_is_an_error():
    out = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ExecutionError, match="rank 5 of a cluster of 2"):
        run(
            "mov.b32 %r1, shared_bytes; mapa.shared::cluster.u32 %r2, %r1, 5; ld.shared::cluster.b32 %r3, [%r2];",
            out,
            grid=2,
            cluster=(2,),
            shared=16,
        )
    with pytest.raises(ExecutionError, match="a wait without an arrival"):
        run("barrier.cluster.wait.aligned;", out, grid=2, cluster=(2,))
    with pytest.raises(ExecutionError, match="deadlock(.|\n)*barrier of the cluster"):
        body = "mov.u32 %r1, %cluster_ctarank; setp.eq.s32 %p1, %r1, 0; @%p1 barrier.cluster.arrive.aligned;"
        run(
            body + "@%p1 barrier.cluster.wait.aligned; @!%p1 bra W; bra END; W: bar.sync 1, 64; END:",
            out,
            grid=2,
            cluster=(2,),
        )
    with pytest.raises(ValueError, match="cluster: up to 16"):
        run("", out, grid=3, cluster=(2,))
