"""Saved states of split training calls: those of a packed call over segments, and those of the whole call.

The contract numbers slots by sequence (`kda_core.contract.saved_slots`), so both calls have the same states in other slots. Cuts are
multiples of `SAVED_SPACING`, hence a state of one call is a state of the other. Residuals belong to tokens, and both calls have them
in the same place.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kda_core import contract
from kda_core.backend import BackendSpec, saves_states
from kda_core.contract import SAVED_SPACING, KdaInputs, KdaOutputs, ProblemShape
from kda_cp.plan import Plan
from kda_cp.segments import Segment, aligned, packed
from kda_cp.upload import Integers, upload


def refusal(plan: Plan, shape: ProblemShape, spec: BackendSpec, backend: object) -> str | None:
    """Returns None, or why a call with this plan cannot save the states that its backward reads."""
    if not shape.options.needs_backward or not saves_states(shape, spec, spec, backend):
        return None
    for n, segments in enumerate(plan.segments):
        *cuts, _ = accumulate(segments)
        if any(cut % SAVED_SPACING for cut in cuts):
            return (
                f"the states that a forward saves for its backward require cuts at multiples of {SAVED_SPACING}; "
                f"sequence {n} has segments {segments}"
            )
    return None


class Slots(NamedTuple):
    """Where the states of consecutive segments are.

    Attributes:
        shape: shape of the packed call over the segments.
        first, end: the range of slots of the whole call that belong to the segments.
        of_whole: for each slot of this range, the slot of the packed call with its state; 0 for a slot without a state.
        of_packed: for each slot of the packed call, the slot of the whole call with its state; `first` for one without a state.
    """

    shape: ProblemShape
    first: int
    end: int
    of_whole: Integers
    of_packed: Integers


def slots_of(
    shape: ProblemShape, lengths: Sequence[int], segments: Sequence[Segment], call: ProblemShape
) -> Slots:
    """Returns where the states of segments are.

    Args:
        shape: shape of the whole call.
        lengths: tokens of its sequences.
        segments: consecutive segments, in order; not all empty.
        call: shape of the packed call over them.
    """
    spacing = shape.saved_spacing
    sequences = list(zip(contract.saved_slots(shape, lengths), accumulate(lengths, initial=0)))
    pairs: list[tuple[int, int]] = []
    for p, own in zip(segments, contract.saved_slots(call, [p.length for p in segments])):
        slots, start = sequences[p.sequence]
        first = slots.start + (p.start - start) // spacing
        pairs += zip(range(first, first + len(own)), own)
    first, end = pairs[0][0], pairs[-1][0] + 1
    of_whole, of_packed = [0] * (end - first), [first] * call.saved_states_shape[0]
    for whole, own_slot in pairs:
        of_whole[whole - first] = own_slot
        of_packed[own_slot] = whole
    return Slots(
        call, first, end, Integers(tuple(of_whole), torch.int64), Integers(tuple(of_packed), torch.int64)
    )


class Saving(NamedTuple):
    """What a packed call over segments saves.

    Attributes:
        states: [slots of the packed call, HV, K, V], or None if the call saves nothing.
        residual: [1, T, HV, V], or None.
    """

    states: Tensor | None
    residual: Tensor | None

    @classmethod
    def allocate(cls, outputs: KdaOutputs, slots: Slots | None, start: int) -> Saving:
        """Returns memory for what a packed call saves. A residual lies in that of the whole call where its address allows it.

        Args:
            outputs: outputs of the whole call.
            slots: those of the segments; None if the whole call saves nothing.
            start: first token of the segments.
        """
        if outputs.saved_states is None:
            return cls(None, None)
        assert slots is not None
        states = outputs.o.new_empty(slots.shape.saved_states_shape, dtype=outputs.saved_states.dtype)
        if outputs.residual is None:
            return cls(states, None)
        return cls(states, aligned(_of_tokens(outputs.residual, slots, start)))

    def deliver(self, outputs: KdaOutputs, slots: Slots | None, start: int) -> None:
        """Writes to what the whole call saves; arguments as in `allocate`."""
        if outputs.saved_states is None or self.states is None or slots is None:
            return
        index = upload(*slots.of_whole, self.states.device).device
        torch.index_select(self.states, 0, index, out=outputs.saved_states[slots.first : slots.end])
        if outputs.residual is not None and self.residual is not None:
            into = _of_tokens(outputs.residual, slots, start)
            if into.data_ptr() != self.residual.data_ptr():
                into.copy_(self.residual)


def _of_tokens(residual: Tensor, slots: Slots, start: int) -> Tensor:
    return packed(residual)[:, start : start + slots.shape.T]


def of_segments(inputs: KdaInputs, saved_states: Tensor, slots: Slots) -> Tensor:
    """Returns the saved states of the packed call over all segments of a call, from those of the whole call."""
    return saved_states.index_select(0, upload(*slots.of_packed, inputs.q.device).device)
