"""The position of a role in a ring buffer of shared memory."""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Int32
from cutlass.pipeline import PipelineState

from kda_cute.device import ptx


class Stage(NamedTuple):
    """A stage of a ring: its index, and the parity of the mbarrier that a role waits for."""

    index: Int32
    phase: Int32


class Ring(PipelineState):
    """The position of a role in a ring.

    A ring may have one more stage, which only local records use (`kernels.local_records`). A local record does not advance the position in
    the other stages.

    ``local_phase``: `Stage.phase` of the next local record; None if the ring has no stage for them. ``is_local`` of the methods: whether
    a record is local, a Boolean; False if none is.
    """

    def __init__(
        self, stages: int, count: Int32, index: Int32, phase: Int32, local_phase: Int32 | None
    ) -> None:
        super().__init__(stages, count, index, phase)
        self.local_phase = local_phase

    @classmethod
    def at_start(cls, stages: int, phase: int, has_local: bool) -> Ring:
        """Returns the position of a role that waits for ``phase`` first: 1 for the producer of an empty ring, 0 for its consumer."""
        return cls(stages, Int32(0), Int32(0), Int32(phase), Int32(phase) if has_local else None)

    def stage(self, is_local) -> Ring | Stage:
        """Returns the stage of the next record."""
        if is_local is False:
            return self
        return Stage(
            ptx.select(is_local, Int32(self.stages), self.index),
            ptx.select(is_local, self.local_phase, self.phase),
        )

    def advance_past(self, is_local) -> None:
        """Moves on behind a record."""
        if is_local is False:
            self.advance()
            return
        step = ptx.select(is_local, Int32(0), Int32(1))
        following = self._index + step  # `advance` would divide
        wraps = following == self.stages
        self._index = ptx.select(wraps, Int32(0), following)
        self._phase ^= ptx.select(wraps, Int32(1), Int32(0))
        self.local_phase ^= step ^ 1

    def clone(self) -> Ring:
        """Returns a copy, which moves independently."""
        return Ring(self.stages, self.count, self.index, self.phase, self.local_phase)

    def __get_mlir_types__(self):
        return [value.type for value in self.__extract_mlir_values__()]

    def __extract_mlir_values__(self):
        values = super().__extract_mlir_values__()
        return values if self.local_phase is None else [*values, self.local_phase.ir_value()]

    def __new_from_mlir_values__(self, values):
        count, index, phase, *local_phase = map(Int32, values)
        return Ring(self.stages, count, index, phase, *(local_phase or [None]))
