"""Fragments that one rank computes together, each cut into segments that fill its device (`kda_cp.distributed`).

The fragments are summarised and then executed; in between, states may arrive from other ranks. A segment maps the state at its
start to ``M S + B``. The merge of the segments of a fragment gives the M and B of the whole fragment.
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

_make_plan = lru_cache(maxsize=1024)(make_plan)  # a plan of many segments takes milliseconds


def plan_fragments(
    whole: Sequence[Segment],
    holds_start: list[bool],
    holds_end: list[bool],
    inputs: KdaInputs,
    choice: Choice,
) -> LocalFragments:
    """Cuts fragments into segments where that is predicted to be faster.

    Args:
        whole: each fragment as one segment of the rank's tokens.
        holds_start, holds_end: as in `LocalFragments`.
        inputs: inputs of the rank.
        choice: the backend.
    """
    s, m = inputs.shape, machine(inputs, choice.spec)
    native = isinstance(choice.backend, SupportsSegments)
    plan = _make_plan(
        tuple(p.length for p in whole), HV=s.HV, K=s.K, V=s.V, constants=m.constants, source=m.source, SMs=m.SMs,
        native=native, crossing=not all(holds_end),
    )  # fmt: skip
    segments = [
        [
            Segment(p.sequence, i, start, length)
            for i, (start, length) in enumerate(zip(accumulate(lengths, initial=p.start), lengths))
        ]
        for p, lengths in zip(whole, plan.segments)
    ]
    summarises = not all(holds_end) or any(len(s) > 1 for s in segments)
    kind = NativeFragments if native and summarises else LocalFragments
    return kind(segments, holds_start, holds_end, choice.backend, execution_shape(s, segments))


@dataclass
class LocalFragments:
    """Fragments that are adjacent in a rank's tokens, computed by any backend.

    Attributes:
        segments: the segments of each fragment, in order. `Segment.sequence` is the number of the fragment on its rank.
        holds_start, holds_end: for each fragment, whether it contains the first and the last token of its sequence.
        backend: the backend that computes the fragments.
        shape: shape of the call over all segments.
        flat: all segments.
        numbers: the number of each fragment on its rank.
        outer: the segments whose exit state is needed.
        inner: those of `outer` whose transition is needed, because `summarize` does not know the state at their start.
        kernel: the merge kernel of the backend, or None.
    """

    segments: list[list[Segment]]
    holds_start: list[bool]
    holds_end: list[bool]
    backend: Any
    shape: ProblemShape

    def __post_init__(self) -> None:
        self.flat = [p for s in self.segments for p in s]
        self.numbers = [s[0].sequence for s in self.segments]
        self.outer = [p for s, end in zip(self.segments, self.holds_end) for p in (s[:-1] if end else s)]
        known = {s[0] for s, start in zip(self.segments, self.holds_start) if start}
        self.inner = [p for p in self.outer if p not in known]
        self.kernel = merge_kernel(self.backend)
        # [HV, K, V], from the states that `summarize` got for first segments, else from zeros
        self._exits: dict[Segment, Tensor] = {}
        self._transitions: dict[Segment, Tensor] = {}  # [HV, K, K]

    def for_new_call(self) -> LocalFragments:
        """Returns a copy without the results of a call."""
        return copy(self)

    @property
    def crossing(self) -> bool:
        """Whether a state comes from another rank or goes to one."""
        return not all((*self.holds_start, *self.holds_end))

    def shapes(self, shape: ProblemShape) -> list[ProblemShape]:
        """Returns the shapes of the backend calls. `shape`: the shape of the rank's inputs."""
        return [
            self.shape,
            *(summary_shape(shape, segments) for segments in (self.outer, self.inner) if segments),
        ]

    def reserve(self, inputs: KdaInputs) -> None:
        """Allocates nearly all memory of `summarize` and `execute`.

        A rank without enough memory then fails before the ranks agree on the call. `inputs`: inputs of the rank.
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
            inputs: inputs of the rank.
            first: for each fragment, the state [HV, K, V] at its start. None stands for zeros, and for a state that
                another rank computes.
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
        """Returns the summary (B | M) [HV, K, V + K] of each fragment without the end of its sequence, by its number.

        B is the exit state from the state that `summarize` got. M is zero if the fragment holds the start of its
        sequence: its B is then the true exit state.
        """
        continued = [
            (s, start) for s, start, end in zip(self.segments, self.holds_start, self.holds_end) if not end
        ]
        exits = [[self._exits[p] for p in s] for s, _ in continued]
        inner = [[self._transitions[p] for p in s[1:]] for s, _ in continued]
        B = merge([torch.zeros_like(own[0]) for own in exits], exits, inner)
        found = {}
        for n, (s, holds_start) in enumerate(continued):
            M = exits[n][0].new_zeros((*exits[n][0].shape[:-1], exits[n][0].shape[-2]))
            if not holds_start:
                # The merge of the segments, started from the identity, gives the M of the fragment. The exit of the
                # first segment is then its M, and the exits of the others, from zeros, are zeros.
                identity_exits = [[self._transitions[s[0]], *[M] * len(inner[n])]]
                M = merge([M], identity_exits, [inner[n]])[0][-1]
            found[s[0].sequence] = torch.cat([B[n][-1], M], -1)
        return found

    def execute(self, inputs: KdaInputs, starts: Sequence[Tensor], o: Tensor) -> dict[int, Tensor]:
        """Writes the output tokens of these fragments.

        Args:
            inputs: inputs of the rank.
            starts: the true state [HV, K, V] at the start of each fragment.
            o: [1, T_rank, HV, V].

        Returns:
            The final state of each fragment by its number; {} if the call does not return final states.
        """
        x = self._execution_inputs(inputs, self._segment_starts(starts))
        final = self._final
        first = self.flat[0].start
        own = o[:, first : first + self.shape.T]
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
        for segments, holds_start, S in zip(self.segments, self.holds_start, starts):
            own = [self._exits[p] for p in segments[:-1]]
            if holds_start:
                exits.append(own)
                inner.append([self._transitions[p] for p in segments[1:-1]])
            else:  # `summarize` did not know the state S: the merge takes it as the exit of an additional first segment
                exits.append([S, *own])
                inner.append([self._transitions[p] for p in segments[:-1]])
        merged = merge(starts, exits, inner)
        states = [
            state
            for states, holds_start in zip(merged, self.holds_start)
            for state in (states if holds_start else states[1:])
        ]
        return torch.stack(states).to(self.shape.state_dtype)


@dataclass
class NativeFragments(LocalFragments):
    """Fragments over a backend that summarises segments itself. Each tensor contains the values of all segments."""

    def __post_init__(self) -> None:
        super().__post_init__()
        #: The number of the first segment of each fragment, and the number of all segments.
        self._bounds = [*accumulate(map(len, self.segments), initial=0)]
        self._firsts, self._lasts = self._bounds[:-1], [end - 1 for end in self._bounds[1:]]
        self._summary_shape = self.shape
        if self.shape.options.state_v_first:
            options = replace(self.shape.options, state_v_first=False)
            self._summary_shape = replace(self.shape, options=options)
        self._merged = False  # whether `_states` are those that follow from the known start states

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
        for number, state in zip(self._firsts, first):
            if state is not None:
                self._states[number].copy_(state)
        self.backend.summarize(self._inputs, self._exit, self._transition, self._workspace)

    def summaries(self) -> dict[int, Tensor]:
        continued = [n for n, holds_end in enumerate(self.holds_end) if not holds_end]
        if not continued:
            return {}
        self._merge()
        # The merge of the segments, started from the identity, gives the M of a fragment. The exit of the first segment
        # is then its M, and the exits of the others, from zeros, are zeros.
        M = exits = torch.zeros_like(self._transition)
        if with_transition := [n for n in continued if not self.holds_start[n]]:
            M = torch.zeros_like(exits)
            for n in with_transition:
                exits[self._firsts[n]].copy_(self._transition[self._firsts[n]])
            # M is merged like a state. A kernel for states accepts it if K = V.
            merge_segments(
                self.kernel if self.shape.K == self.shape.V else None,
                self._bounds, M, exits, self._transition,
            )  # fmt: skip
        found = {}
        for n in continued:
            last = self._lasts[n]
            summary = torch.cat([self._exit[last], exits[last]], -1)
            if len(self.segments[n]) > 1:
                start = torch.cat([self._states[last], M[last]], -1)
                summary = affine(self._transition[last], start, summary)
            found[self.numbers[n]] = summary
        return found

    def _execution_inputs(self, inputs: KdaInputs, states: Tensor) -> KdaInputs:
        # With the same layout the inputs of the summaries serve again: the merge has written the true states into them.
        if self.shape.options.state_v_first:
            return super()._execution_inputs(inputs, states)
        return self._inputs

    def _execute(self, x: KdaInputs, o: Tensor, final: Tensor | None) -> None:
        self.backend.execute_segments(x, KdaOutputs(o, final, None, self._workspace))

    def _segment_starts(self, starts: Sequence[Tensor]) -> Tensor:
        for n, (first, holds_start) in enumerate(zip(self._firsts, self.holds_start)):
            if not holds_start:  # `summarize` did not know the state at the start
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
