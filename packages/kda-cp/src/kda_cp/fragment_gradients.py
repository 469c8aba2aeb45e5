"""The backward of the fragments of one rank (`kda_cp.distributed`).

A fragment maps the gradient of the state at its end to that at its start, ``dS_in = M^T dS_out + N``. A rank computes N of its
fragments (`kda_cp.state_gradients`), gets those of other ranks, merges them from the last to the first, and runs the backward of its fragments.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from kda_core import call, registry
from kda_core.contract import KdaGradients, KdaInputs, ProblemShape
from kda_cp.fragments import Fragment, FragmentTable
from kda_cp.merge import merge_kernel, merge_segments_backward
from kda_cp.segments import Segment, gradient_shape, segment_inputs
from kda_cp.state_gradients import BackwardCaller, state_gradients


def whole_fragments(fragments: Sequence[Fragment]) -> list[Segment]:
    """Returns each fragment of a rank as one segment of the rank's tokens."""
    bounds = accumulate((f.stop - f.start for f in fragments), initial=0)
    return [Segment(i, 0, start, end - start) for i, (start, end) in enumerate(pairwise(bounds))]


class FragmentGradients:
    """What the backward of a rank's fragments does in every call of one shape. The fragments are the sequences of a packed call.

    Args:
        table: the distribution of the tokens.
        rank: a rank that holds at least one fragment.
        shape: shape of the rank's inputs.
        backend: name of the backend, or None for the best one.

    Attributes:
        backend: name of the backend.
        late: the fragments that do not hold the starts of their sequences, as segments of the rank's tokens.

    Raises:
        BackendError: no backend serves the backward.
    """

    def __init__(self, table: FragmentTable, rank: int, shape: ProblemShape, backend: str | None) -> None:
        self._table, self._own = table, table.of_rank(rank)
        self._whole = whole_fragments(self._own)
        self.late = [p for p, f in zip(self._whole, self._own) if f.start > 0]
        choice = call.choose(gradient_shape(shape, self._whole), backend).backward
        assert choice is not None  # the shape needs a backward
        if self.late:  # raises if the backend does not serve it
            registry.REGISTRY.resolve(gradient_shape(shape, self.late), choice.spec.name)
        self._choice, self.backend = choice, choice.spec.name
        self._kernel = merge_kernel(choice.backend)

    @cached_property
    def transitions(self) -> list[Fragment]:
        """The fragments whose transition M is needed: between a fragment of this rank and the last one of its sequence."""
        first: dict[int, int] = {}
        for f in self._own:
            first[f.sequence] = min(f.start, first.get(f.sequence, f.start))
        lengths = self._table.lengths
        return [
            f
            for f in self._table.fragments
            if f.sequence in first and first[f.sequence] < f.start and f.stop < lengths[f.sequence]
        ]

    def reserve(self, inputs: KdaInputs, starts: Tensor, wanted: Collection[str]) -> ReservedGradients:
        """Allocates nearly all memory of a backward.

        Args:
            inputs: inputs of the rank.
            starts: the true states at the starts of the fragments, [n, HV, K, V].
            wanted: names of the inputs that need a gradient.
        """
        x = segment_inputs(inputs, self._whole, gradient_shape(inputs.shape, self._whole), starts)
        return ReservedGradients(self, x, BackwardCaller.reserve(self._choice, x, wanted, self.late))

    def merge(
        self, ends: Tensor, starts: Mapping[Fragment, Tensor], transitions: Mapping[Fragment, Tensor]
    ) -> None:
        """Completes the gradients of the states at the ends of the fragments, [n, HV, K, V], in place.

        Args:
            ends: complete for the fragments that hold the ends of their sequences.
            starts: for each late fragment of any rank, the result of `ReservedGradients.state_gradients`, [HV, K, V].
            transitions: M [HV, K, K] of the fragments in `transitions`.
        """
        followed = [i for i, f in enumerate(self._own) if f.stop < self._table.lengths[f.sequence]]
        if not followed:
            return
        sequences = sorted({self._own[i].sequence for i in followed})
        by_sequence = [self._table.of_sequence(n) for n in sequences]
        fragments = [f for sequence in by_sequence for f in sequence]
        bounds = [*accumulate(map(len, by_sequence), initial=0)]
        # What is not used is zero: N of first fragments, and M of those that are not in `transitions`.
        zeros = torch.zeros_like(ends[0])
        no_transition = zeros.new_zeros((*zeros.shape[:-1], zeros.shape[-2]))
        merged = zeros.expand(len(fragments), *zeros.shape).clone()
        merge_segments_backward(
            self._kernel,
            bounds,
            merged,
            torch.stack([starts.get(f, zeros) for f in fragments]),
            torch.stack([transitions.get(f, no_transition) for f in fragments]),
        )
        found = dict(zip(fragments, merged.unbind()))
        for i in followed:
            ends[i] = found[self._own[i]]


class ReservedGradients:
    """One backward of a rank's fragments."""

    def __init__(self, plan: FragmentGradients, inputs: KdaInputs, caller: BackwardCaller) -> None:
        self.plan, self._inputs, self._caller = plan, inputs, caller

    def state_gradients(self, grad_o: Tensor, ends: Tensor) -> Tensor | None:
        """Returns the gradients of the states at the starts of the fragments that do not hold the starts of their sequences.

        Args:
            grad_o: [1, T_rank, HV, V].
            ends: the gradients of the states at the ends of all fragments, [n, HV, K, V]. Where another fragment follows they
                are zeros, and the result is N. Elsewhere the result is complete.

        Returns:
            [late fragments, HV, K, V], or None if there are none.
        """
        if not (late := self.plan.late):
            return None
        own = torch.stack([ends[p.sequence] for p in late])
        return state_gradients(self._inputs, late, grad_o, own, self._caller)

    def gradients(self, grad_o: Tensor, ends: Tensor) -> KdaGradients:
        """Returns the gradients of the fragments. `ends`: those of the states at the ends of all fragments, [n, HV, K, V]."""
        return self._caller(self._inputs, grad_o, ends)
