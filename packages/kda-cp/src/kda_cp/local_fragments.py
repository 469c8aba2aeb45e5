"""Fragments that one rank computes together, each cut into segments that fill its device (`kda_cp.distributed`).

The fragments are summarised and then executed. In between, states may arrive from other ranks: a segment maps the state at its
start as ``S -> M S + B``, and so does the whole fragment, by the merge of its segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kda_core.backend import SupportsSegments
from kda_core.contract import KdaInputs, KdaOutputs, ProblemShape
from kda_core.registry import Choice
from kda_cp.choose import make_plan
from kda_cp.machine import machine
from kda_cp.merge import affine, merge, merge_kernel, merge_segments
from kda_cp.segments import Caller, Segment, aligned, execution_shape, segment_inputs, summary_shape
from kda_cp.summary import exit_states, transitions

_make_plan = lru_cache(maxsize=1024)(make_plan)  # takes milliseconds for many segments


def plan_fragments(
    whole: Sequence[Segment], begins: list[bool], ends: list[bool], inputs: KdaInputs, choice: Choice
) -> LocalFragments:
    """Cuts fragments into segments where that is predicted to be faster.

    Args:
        whole: each fragment as one segment of the rank's tokens.
        begins, ends: as in `LocalFragments`.
        inputs: of the rank.
        choice: the backend.
    """
    s, m = inputs.shape, machine(inputs, choice.spec)
    native = isinstance(choice.backend, SupportsSegments)
    plan = _make_plan(
        tuple(p.length for p in whole), HV=s.HV, K=s.K, V=s.V, constants=m.constants, source=m.source, SMs=m.SMs,
        native=native, crossing=not all(ends),
    )  # fmt: skip
    segments = [
        [
            Segment(p.sequence, i, p.start + at, n)
            for i, (at, n) in enumerate(zip(accumulate(lengths, initial=0), lengths))
        ]
        for p, lengths in zip(whole, plan.segments)
    ]
    summarises = not all(ends) or any(len(s) > 1 for s in segments)
    kind = NativeFragments if native and summarises else LocalFragments
    return kind(segments, begins, ends, choice.backend, execution_shape(s, segments))


@dataclass
class LocalFragments:
    """Fragments that are adjacent in a rank's tokens, computed by any backend.

    Attributes:
        segments: of each fragment, in order. `Segment.sequence` is the number of the fragment on its rank.
        begins, ends: for each fragment, whether it contains the first and the last token of its sequence.
        backend: that computes the fragments.
        shape: of the call over all segments.
    """

    segments: list[list[Segment]]
    begins: list[bool]
    ends: list[bool]
    backend: Any
    shape: ProblemShape

    def __post_init__(self) -> None:
        self.flat = [p for s in self.segments for p in s]
        self.numbers = [s[0].sequence for s in self.segments]
        #: Segments whose exit state is needed, and those of them whose transition is needed.
        self.outer = [p for s, ends in zip(self.segments, self.ends) for p in (s[:-1] if ends else s)]
        known = {s[0] for s, begins in zip(self.segments, self.begins) if begins}
        self.inner = [p for p in self.outer if p not in known]
        self.kernel = merge_kernel(self.backend)
        self._exits: dict[Segment, Tensor] = {}  # [HV, K, V], from the states that `summarize` got
        self._transitions: dict[Segment, Tensor] = {}  # [HV, K, K]

    def for_new_call(self) -> LocalFragments:
        """Returns a copy without the results of a call."""
        return copy(self)

    @property
    def crossing(self) -> bool:
        """Whether a state comes from another rank or goes to one."""
        return not all((*self.begins, *self.ends))

    def shapes(self, shape: ProblemShape) -> list[ProblemShape]:
        """Returns the shapes of the backend calls. `shape`: of the rank's inputs."""
        return [
            self.shape,
            *(summary_shape(shape, segments) for segments in (self.outer, self.inner) if segments),
        ]

    def reserve(self, inputs: KdaInputs) -> None:
        """Allocates nearly all memory of `summarize` and `execute`.

        A rank without enough memory then fails before the ranks agree on the call. `inputs`: of the rank.
        """
        needed = max(map(self.backend.workspace_bytes, self.shapes(inputs.shape)))
        self._call = Caller(self.backend, inputs.q.new_empty(needed, dtype=torch.uint8) if needed else None)
        self._final = self._new_final(inputs)

    def _new_final(self, inputs: KdaInputs) -> Tensor | None:
        if not self.shape.options.output_final_state:
            return None
        return inputs.q.new_empty(self.shape.state_shape, dtype=self.shape.state_dtype)

    def summarize(self, inputs: KdaInputs, first: Sequence[Tensor | None], o: Tensor) -> None:
        """Summarises the segments whose state passes to the next segment or to another rank. Requires `reserve`.

        Args:
            inputs: of the rank.
            first: for each fragment that begins its sequence the state [HV, K, V] at its start, or None for zeros. None
                for the other fragments, whose states are not known yet.
            o: [1, T_rank, HV, V], scratch memory. The first tokens are overwritten; `execute` writes o later.
        """
        if not self.outer:
            return
        given = {s[0]: state for s, state in zip(self.segments, first)}
        states = exit_states(inputs, self.outer, [given.get(p) for p in self.outer], o, self._call)
        self._exits = dict(zip(self.outer, states))
        if self.inner:
            self._transitions = dict(zip(self.inner, transitions(inputs, self.inner, o, self._call)))

    def summaries(self) -> dict[int, Tensor]:
        """Returns the summary (B | M) [HV, K, V + K] of each fragment that does not end its sequence, by its number.

        B is the exit state from the state that `summarize` got. M is zero if the fragment begins its sequence.
        """
        open_ended = [
            (s, begins) for s, begins, ends in zip(self.segments, self.begins, self.ends) if not ends
        ]
        exits = [[self._exits[p] for p in s] for s, _ in open_ended]
        inner = [[self._transitions[p] for p in s[1:]] for s, _ in open_ended]
        B = merge([torch.zeros_like(ends[0]) for ends in exits], exits, inner)
        found = {}
        for n, (s, begins) in enumerate(open_ended):
            M = exits[n][0].new_zeros((*exits[n][0].shape[:-1], exits[n][0].shape[-2]))
            if not begins:
                # The merge follows the identity: its exit from the first segment is the M of that segment, and the
                # exits of the other segments are zero.
                identity_exits = [[self._transitions[s[0]], *[M] * len(inner[n])]]
                M = merge([M], identity_exits, [inner[n]])[0][-1]
            found[s[0].sequence] = torch.cat([B[n][-1], M], -1)
        return found

    def execute(self, inputs: KdaInputs, starts: Sequence[Tensor], o: Tensor) -> dict[int, Tensor]:
        """Writes the tokens of o of these fragments.

        Args:
            inputs: of the rank.
            starts: the true state [HV, K, V] at the start of each fragment.
            o: [1, T_rank, HV, V].

        Returns:
            The final state of each fragment by its number; {} if the call does not return final states.
        """
        x = self._execution_inputs(inputs, self._segment_starts(starts))
        final = self._final
        at = self.flat[0].start
        own = o[:, at : at + self.shape.T]
        written = aligned(own)
        self._execute(x, written, final)
        if written is not own:
            own.copy_(written)
        last = accumulate(len(s) for s in self.segments)
        return {} if final is None else {n: final[end - 1] for n, end in zip(self.numbers, last)}

    def _execution_inputs(self, inputs: KdaInputs, states: Tensor) -> KdaInputs:
        states = (states.mT if self.shape.options.state_v_first else states).contiguous()
        return segment_inputs(inputs, self.flat, self.shape, states)

    def _execute(self, x: KdaInputs, o: Tensor, final: Tensor | None) -> None:
        self._call(x, o, final)

    def _segment_starts(self, starts: Sequence[Tensor]) -> Tensor:
        """Returns the true states at the starts of all segments, [segments, HV, K, V]."""
        exits, inner = [], []
        for segments, begins, S in zip(self.segments, self.begins, starts):
            # A state that `summarize` did not know is treated as the exit of a segment before the fragment.
            exits.append([*([] if begins else [S]), *(self._exits[p] for p in segments[:-1])])
            inner.append([self._transitions[p] for p in (segments[1:-1] if begins else segments[:-1])])
        found = merge(starts, exits, inner)
        states = [
            state for states, begins in zip(found, self.begins) for state in states[0 if begins else 1 :]
        ]
        return torch.stack(states).to(self.shape.state_dtype)


@dataclass
class NativeFragments(LocalFragments):
    """Fragments over a backend that summarises segments itself. Tensors contain the values of all segments."""

    def __post_init__(self) -> None:
        super().__post_init__()
        ends = [*accumulate(map(len, self.segments), initial=0)]
        self._bounds, self._firsts, self._lasts = ends, ends[:-1], [end - 1 for end in ends[1:]]
        self._summary_shape = self.shape
        if self.shape.options.state_v_first:
            options = replace(self.shape.options, state_v_first=False)
            self._summary_shape = replace(self.shape, options=options)
        self._merged = False  # whether `_states` are merged, as far as start states are known

    def shapes(self, shape: ProblemShape) -> list[ProblemShape]:
        return [self.shape]

    def reserve(self, inputs: KdaInputs) -> None:
        s, new = self._summary_shape, inputs.q.new_empty
        self._final = self._new_final(inputs)
        self._workspace = new(self.backend.segment_workspace_bytes(self.shape), dtype=torch.uint8)
        self._states = inputs.q.new_zeros((s.N, s.HV, s.K, s.V), dtype=s.state_dtype)
        self._exit = torch.empty_like(self._states)  # from `_states` of first segments, else from zeros
        self._transition = new((s.N, s.HV, s.K, s.K), dtype=s.state_dtype)

    def summarize(self, inputs: KdaInputs, first: Sequence[Tensor | None], o: Tensor) -> None:
        self._inputs = segment_inputs(inputs, self.flat, self._summary_shape, self._states)
        for at, state in zip(self._firsts, first):
            if state is not None:
                self._states[at].copy_(state)
        self.backend.summarize(self._inputs, self._exit, self._transition, self._workspace)

    def summaries(self) -> dict[int, Tensor]:
        open_ended = [n for n, ends in enumerate(self.ends) if not ends]
        if not open_ended:
            return {}
        self._merge()
        # The merge follows the identity to compute M: its exit from the first segment is the M of that segment, and
        # the exits of the other segments are zero.
        M = exits = torch.zeros_like(self._transition)
        if continued := [n for n in open_ended if not self.begins[n]]:
            M = torch.zeros_like(exits)
            for n in continued:
                exits[self._firsts[n]].copy_(self._transition[self._firsts[n]])
            # M is merged like a state, which a kernel for states accepts if K = V.
            merge_segments(
                self.kernel if self.shape.K == self.shape.V else None,
                self._bounds, M, exits, self._transition,
            )  # fmt: skip
        found = {}
        for n in open_ended:
            last = self._lasts[n]
            summary = torch.cat([self._exit[last], exits[last]], -1)
            if len(self.segments[n]) > 1:
                start = torch.cat([self._states[last], M[last]], -1)
                summary = affine(self._transition[last], start, summary)
            found[self.numbers[n]] = summary
        return found

    def _execution_inputs(self, inputs: KdaInputs, states: Tensor) -> KdaInputs:
        # With the same layout the inputs of the summaries are used again: the merge has written the states in them.
        if self.shape.options.state_v_first:
            return super()._execution_inputs(inputs, states)
        return self._inputs

    def _execute(self, x: KdaInputs, o: Tensor, final: Tensor | None) -> None:
        self.backend.execute_segments(x, KdaOutputs(o, final, None, self._workspace))

    def _segment_starts(self, starts: Sequence[Tensor]) -> Tensor:
        for n, (first, begins) in enumerate(zip(self._firsts, self.begins)):
            if not begins:  # a state that `summarize` did not know
                self._states[first].copy_(starts[n])
                self._exit[first].copy_(
                    affine(self._transition[first], self._states[first], self._exit[first])
                )
                self._merged = False
        self._merge()
        return self._states

    def _merge(self) -> None:
        if not self._merged:
            merge_segments(self.kernel, self._bounds, self._states, self._exit, self._transition)
            self._merged = True
