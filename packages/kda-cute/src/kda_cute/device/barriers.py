"""Accesses to mbarriers by warps."""

from cutlass import Int32, cute


def release(barrier):
    """Arrives at an mbarrier once for the warp, without a branch. All lanes pass ``elect.sync`` after their own accesses,
    so one arrival stands for all of them. ``elect.sync`` also chooses the lane: a comparison of the lane index would read
    that index again each time, which takes longer."""
    cute.arch.inline_ptx(
        "{ .reg .pred first; elect.sync _|first, 0xffffffff; "
        "@first mbarrier.arrive.release.cta.shared::cta.b64 _, [{$r0}]; }",
        read_only_args=[Int32(barrier.toint())],
    )
