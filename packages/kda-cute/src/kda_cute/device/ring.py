"""The state of a ring buffer in shared memory: which stage comes next, and the phase of its mbarriers."""

from typing import NamedTuple

from cutlass import Int32

from kda_cute.device import ptx


class Ring(NamedTuple):
    """The next stage of a ring, and the phase to wait for.

    A consumer starts with phase 0. A producer starts with phase 1, because all stages are empty at the start.
    """

    stage: Int32
    phase: Int32

    def next(self, depth: int) -> "Ring":
        """Returns the state for the stage after this one. ``depth``: number of stages."""
        last = self.stage == depth - 1
        return Ring(ptx.select(last, Int32(0), self.stage + 1), ptx.select(last, self.phase ^ 1, self.phase))
