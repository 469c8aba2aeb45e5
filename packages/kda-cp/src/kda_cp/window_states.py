"""States that enter and leave the windows of a call: those of its sequences, and those that pass from window to window.

Both classes have the same methods. For each window in order, `kda_cp.native` calls `starts`, `ends` and `deliver`; then `finish`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kda_core.contract import KdaInputs, KdaOutputs, KdaSegments, ProblemShape
from kda_cp.upload import Integers, Uploaded, upload_groups


class DenseTensors(NamedTuple):
    """Integers that the calls of a window read on the device.

    Attributes:
        offsets: cu_seqlens over the segments.
        bounds: the number of the first segment of each sequence of the window, and the number of all segments.
        firsts, lasts: number of the first and of the last segment of each sequence.
        sequences: the sequences.
    """

    offsets: Uploaded
    bounds: Uploaded
    firsts: Uploaded
    lasts: Uploaded
    sequences: Uploaded


class PoolTensors(NamedTuple):
    """The same for a call over a pool.

    Attributes:
        offsets, bounds: as in `DenseTensors`.
        sequence, before, ends: the fields of `KdaSegments`.
    """

    offsets: Uploaded
    bounds: Uploaded
    sequence: Uploaded
    before: Uploaded
    ends: Uploaded

    @property
    def segments(self) -> KdaSegments:
        return KdaSegments(self.sequence.device, self.before.device, self.ends.device)


class DenseStates:
    """Copies the initial states of a call to the first segments, and the states of the last segments to its final states."""

    def __init__(self, inputs: KdaInputs, outputs: KdaOutputs, windows: int) -> None:
        self._inputs, self._outputs = inputs, outputs
        self._passed = _states(inputs) if windows > 1 else None  # of all sequences

    def upload(self, integers: tuple[Integers, ...]) -> DenseTensors:
        """Returns the integers of a window on the device."""
        return DenseTensors._make(upload_groups(integers, self._inputs.q.device))

    def starts(self, call: ProblemShape, on_device: DenseTensors) -> Tensor:
        """Returns new states [P, HV, K, V] of P segments: the known states of first segments, and zeros."""
        starts = zeros(self._inputs, call)
        before = _given_states(self._inputs)
        if self._passed is not None:
            before = self._passed.index_select(0, on_device.sequences.device)
        if before is not None:
            starts.index_copy_(0, on_device.firsts.device, before)
        return starts

    def ends(self, call: ProblemShape, starts: Tensor) -> Tensor | None:
        """Returns memory for the states at the ends of the segments, None if nothing needs them."""
        return starts.new_empty(call.state_shape) if call.options.output_final_state else None

    def deliver(self, final: Tensor | None, on_device: DenseTensors) -> None:
        """Takes the states at the ends of the segments, which the backend has written."""
        if final is None:
            return
        if self._passed is None:
            torch.index_select(final, 0, on_device.lasts.device, out=self._outputs.final_state)
            return
        after = final.index_select(0, on_device.lasts.device)
        after = after.mT if self._inputs.options.state_v_first else after
        self._passed.index_copy_(0, on_device.sequences.device, after)

    def finish(self) -> None:
        """Writes the final states of the call that have been passed from window to window."""
        if self._passed is not None and self._outputs.final_state is not None:
            v_first = self._inputs.options.state_v_first
            self._outputs.final_state.copy_(self._passed.mT if v_first else self._passed)


class PoolStates:
    """The backend reads and writes the slots of a pool. Only the state of a sequence that two windows share is passed on here."""

    def __init__(self, inputs: KdaInputs) -> None:
        self._inputs = inputs
        self._passed: Tensor | None = None  # [1, HV, K, V]

    def upload(self, integers: tuple[Integers, ...]) -> PoolTensors:
        return PoolTensors._make(upload_groups(integers, self._inputs.q.device))

    def starts(self, call: ProblemShape, on_device: PoolTensors) -> Tensor:
        starts = zeros(self._inputs, call)
        if self._passed is not None:
            starts[:1].copy_(self._passed)
        return starts

    def ends(self, call: ProblemShape, starts: Tensor) -> Tensor | None:
        return torch.empty_like(starts) if call.options.output_final_state else None

    def deliver(self, final: Tensor | None, on_device: PoolTensors) -> None:
        self._passed = None if final is None else final[-1:]

    def finish(self) -> None:
        pass


def zeros(inputs: KdaInputs, call: ProblemShape) -> Tensor:
    """Returns zero states [P, HV, K, V] of P segments."""
    return inputs.q.new_zeros((call.N, call.HV, call.K, call.V), dtype=call.state_dtype)


def _given_states(inputs: KdaInputs) -> Tensor | None:
    """Returns the initial states of the call as [N, HV, K, V], or None."""
    given = inputs.initial_state
    return given.mT if given is not None and inputs.options.state_v_first else given


def _states(inputs: KdaInputs) -> Tensor:
    """Returns a copy of the states before the first tokens, [N, HV, K, V]."""
    given = _given_states(inputs)
    return (
        zeros(inputs, inputs.shape) if given is None else given.clone(memory_format=torch.contiguous_format)
    )
