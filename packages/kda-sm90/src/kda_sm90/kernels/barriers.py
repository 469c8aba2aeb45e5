"""Barriers of a chain CTA: the named barriers, and accesses to mbarriers by warps and by ring stages."""

from enum import IntEnum

from cutlass import cute

from kda_cute.device.barriers import release

__all__ = ["WARPGROUP", "NamedBarrier", "arrive", "release", "sync", "test", "wait", "wait_unless"]

WARPGROUP = 128  # threads


class NamedBarrier(IntEnum):
    """Named barriers of the first half of a CTA. Those of the second half follow; 0 is ``sync_threads``."""

    O_READY = 1  # chain -> store: the buffer holds O of the previous chunk
    STATE_FREE = 2  # store -> chain: the buffer of intermediate states may be written
    STATE_READY = 3  # chain -> store: the buffer holds an intermediate state
    CARRY_STORED = 4  # chain warps only: all threads have stored their share of a state for the next queue


def _id(name: NamedBarrier, wg):
    return name + len(NamedBarrier) * wg


def sync(name: NamedBarrier, wg, threads: int = WARPGROUP + 32):
    """Waits at a named barrier of the warpgroup ``wg``, 0 or 1. ``threads``: by default the chain warpgroup and its
    store warp."""
    cute.arch.barrier(barrier_id=_id(name, wg), number_of_threads=threads)


def arrive(name: NamedBarrier, wg):
    """Arrives at a named barrier of a chain warpgroup and its store warp without waiting."""
    cute.arch.barrier_arrive(barrier_id=_id(name, wg), number_of_threads=WARPGROUP + 32)


def wait(barrier, ring):
    """Waits for the mbarrier of a ring's stage. ``barrier``: the mbarrier of stage 0."""
    cute.arch.mbarrier_wait(barrier + ring.index, ring.phase)


def test(barrier, ring):
    """Returns whether the mbarrier of a ring's stage has completed its phase, for `wait_unless`. The caller does
    other work while the answer is on its way."""
    return cute.arch.mbarrier_try_wait(barrier + ring.index, ring.phase)


@cute.jit
def wait_unless(done, barrier, ring):
    """Waits for the mbarrier of a ring's stage unless an earlier `test` found it done."""
    if not done:
        wait(barrier, ring)
