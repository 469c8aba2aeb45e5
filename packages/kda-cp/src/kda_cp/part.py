"""Fragments that one rank computes together, each cut into pieces so that they fill its device (`kda_cp.distributed`).

A part is summarised and then run. In between, states may come from other ranks: a piece of a fragment maps the state at the
fragment's start as ``S -> M S + B``, and so does the fragment, by the merge of its pieces.
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
from kda_cp.merge import affine, kernel_of, merge, merge_pieces
from kda_cp.pieces import Caller, Piece, aligned, piece_inputs, run_shape, summary_shape
from kda_cp.plan import make_plan
from kda_cp.planner import machine
from kda_cp.summary import exit_states, transitions

_plan = lru_cache(maxsize=1024)(make_plan)  # which takes milliseconds for many pieces


def planned(
    whole: Sequence[Piece], begins: list[bool], ends: list[bool], inputs: KdaInputs, choice: Choice
) -> Part:
    """The part of these fragments, cut where that is predicted to be faster."""
    s, (known, source, SMs) = inputs.shape, machine(inputs, choice.spec)
    native = isinstance(choice.backend, SupportsSegments)
    plan = _plan(
        tuple(p.length for p in whole), HV=s.HV, K=s.K, V=s.V, constants=known, source=source, SMs=SMs,
        native=native, crossing=not all(ends),
    )  # fmt: skip
    pieces = [
        [Piece(p.sequence, i, p.start + at, n) for i, (at, n) in enumerate(zip(accumulate(cuts, initial=0), cuts))]
        for p, cuts in zip(whole, plan.pieces)
    ]  # fmt: skip
    summarises = not all(ends) or any(len(cuts) > 1 for cuts in pieces)
    kind = NativePart if native and summarises else Part
    return kind(pieces, begins, ends, choice.backend, run_shape(s, pieces))


@dataclass
class Part:
    """Fragments that lie side by side in a rank's tokens, over any backend.

    Attributes:
        pieces: of each fragment, in order; `Piece.sequence` is the number of the fragment on its rank.
        begins, ends: of each fragment, whether it holds the first and the last tokens of its sequence.
        backend: that computes it.
        shape: the call over all pieces.
    """

    pieces: list[list[Piece]]
    begins: list[bool]
    ends: list[bool]
    backend: Any
    shape: ProblemShape

    def __post_init__(self) -> None:
        self.flat = [p for s in self.pieces for p in s]
        self.fragments = [s[0].sequence for s in self.pieces]
        #: The pieces whose exit state, and whose transition, is needed.
        self.exits = [p for s, ends in zip(self.pieces, self.ends) for p in (s[:-1] if ends else s)]
        known = {s[0] for s, begins in zip(self.pieces, self.begins) if begins}
        self.inner = [p for p in self.exits if p not in known]
        self.kernel = kernel_of(self.backend)  # of the merge
        self._exits: dict[Piece, Tensor] = {}  # [HV, K, V], from what `summarize` was given
        self._transitions: dict[Piece, Tensor] = {}  # [HV, K, K]

    def fresh(self) -> Part:
        """The same, for a call of its own."""
        return copy(self)

    @property
    def crossing(self) -> bool:
        """Whether a state comes from another rank or goes to one."""
        return not all((*self.begins, *self.ends))

    def shapes(self, shape: ProblemShape) -> list[ProblemShape]:
        """The calls of the backend; `shape`: of the rank's inputs."""
        return [self.shape, *(summary_shape(shape, part) for part in (self.exits, self.inner) if part)]

    def reserve(self, inputs: KdaInputs) -> None:
        """Takes the memory of `summarize` and `run`, but for what is small: so that a rank that has none finds out before the
        ranks agree to go on. `inputs`: of the rank."""
        needed = max(map(self.backend.workspace_bytes, self.shapes(inputs.shape)))
        self._call = Caller(self.backend, inputs.q.new_empty(needed, dtype=torch.uint8) if needed else None)
        self._final = self._new_final(inputs)

    def _new_final(self, inputs: KdaInputs) -> Tensor | None:
        if not self.shape.options.output_final_state:
            return None
        return inputs.q.new_empty(self.shape.state_shape, dtype=self.shape.state_dtype)

    def summarize(self, inputs: KdaInputs, first: Sequence[Tensor | None], o: Tensor) -> None:
        """Summaries of the pieces whose state passes on, to the next piece or to another rank. After `reserve`.

        Args:
            inputs: of the rank.
            first: the state [HV, K, V] at the start of each fragment that begins its sequence; None for zeros, and where
                it is not known yet.
            o: [1, T_rank, HV, V], scratch memory: its first rows are overwritten, `run` comes later.
        """
        if not self.exits:
            return
        given = {s[0]: state for s, state in zip(self.pieces, first)}
        states = exit_states(inputs, self.exits, [given.get(p) for p in self.exits], o, self._call)
        self._exits = dict(zip(self.exits, states))
        if self.inner:
            self._transitions = dict(zip(self.inner, transitions(inputs, self.inner, o, self._call)))

    def rows(self) -> dict[int, Tensor]:
        """(B | M) [HV, K, V + K] of each fragment that does not end its sequence, by its number: the exit from what
        `summarize` was given, and the transition, zero where the fragment begins its sequence."""
        going = [(s, begins) for s, begins, ends in zip(self.pieces, self.begins, self.ends) if not ends]
        exits = [[self._exits[p] for p in s] for s, _ in going]
        inner = [[self._transitions[p] for p in s[1:]] for s, _ in going]
        B = merge([torch.zeros_like(ends[0]) for ends in exits], exits, inner)
        found = {}
        for n, (s, begins) in enumerate(going):
            M = exits[n][0].new_zeros((*exits[n][0].shape[:-1], exits[n][0].shape[-2]))
            if not begins:
                # The first piece takes the identity to that piece's own M, the others go on without exits.
                onwards = [[self._transitions[s[0]], *[M] * len(inner[n])]]
                M = merge([M], onwards, [inner[n]])[0][-1]
            found[s[0].sequence] = torch.cat([B[n][-1], M], -1)
        return found

    def run(self, inputs: KdaInputs, starts: Sequence[Tensor], o: Tensor) -> dict[int, Tensor]:
        """Writes the rows of o of these fragments.

        Args:
            inputs: of the rank.
            starts: the true state [HV, K, V] at the start of each fragment.
            o: [1, T_rank, HV, V].

        Returns:
            The final state of each fragment by its number, where the call asks for final states.
        """
        x = self._run_inputs(inputs, self._piece_starts(starts))
        final = self._final
        at = self.flat[0].start
        mine = o[:, at : at + self.shape.T]
        written = aligned(mine)
        self._run(x, written, final)
        if written is not mine:
            mine.copy_(written)
        last = accumulate(len(s) for s in self.pieces)
        return {} if final is None else {n: final[end - 1] for n, end in zip(self.fragments, last)}

    def _run_inputs(self, inputs: KdaInputs, states: Tensor) -> KdaInputs:
        states = (states.mT if self.shape.options.state_v_first else states).contiguous()
        return piece_inputs(inputs, self.flat, self.shape, states)

    def _run(self, x: KdaInputs, o: Tensor, final: Tensor | None) -> None:
        self._call(x, o, final)

    def _piece_starts(self, starts: Sequence[Tensor]) -> Tensor:
        """The true states at the starts of all pieces, [pieces, HV, K, V]."""
        exits, inner = [], []
        for pieces, begins, S in zip(self.pieces, self.begins, starts):
            # A state at the start that `summarize` did not know counts as the exit of a piece before.
            exits.append([*([] if begins else [S]), *(self._exits[p] for p in pieces[:-1])])
            inner.append([self._transitions[p] for p in (pieces[1:-1] if begins else pieces[:-1])])
        found = merge(starts, exits, inner)
        states = [
            state for states, begins in zip(found, self.begins) for state in states[0 if begins else 1 :]
        ]
        return torch.stack(states).to(self.shape.state_dtype)


@dataclass
class NativePart(Part):
    """Fragments over a backend that summarises segments itself: what is known of all pieces is in one tensor."""

    def __post_init__(self) -> None:
        super().__post_init__()
        ends = [*accumulate(map(len, self.pieces), initial=0)]
        self._bounds, self._firsts, self._lasts = ends, ends[:-1], [end - 1 for end in ends[1:]]
        self._summary = self.shape
        if self.shape.options.state_v_first:
            self._summary = replace(self.shape, options=replace(self.shape.options, state_v_first=False))
        self._merged = False  # whether `_states` are those at the starts of all pieces, as far as is known

    def shapes(self, shape: ProblemShape) -> list[ProblemShape]:
        return [self.shape]

    def reserve(self, inputs: KdaInputs) -> None:
        s, new = self._summary, inputs.q.new_empty
        self._final = self._new_final(inputs)
        self._workspace = new(self.backend.segment_workspace_bytes(self.shape), dtype=torch.uint8)
        self._states = inputs.q.new_zeros((s.N, s.HV, s.K, s.V), dtype=s.state_dtype)
        self._exit = torch.empty_like(self._states)  # from `_states` of first pieces, else from zeros
        self._transition = new((s.N, s.HV, s.K, s.K), dtype=s.state_dtype)

    def summarize(self, inputs: KdaInputs, first: Sequence[Tensor | None], o: Tensor) -> None:
        self._inputs = piece_inputs(inputs, self.flat, self._summary, self._states)
        for at, state in zip(self._firsts, first):
            if state is not None:
                self._states[at].copy_(state)
        self.backend.summarize(self._inputs, self._exit, self._transition, self._workspace)

    def rows(self) -> dict[int, Tensor]:
        going = [n for n, ends in enumerate(self.ends) if not ends]
        if not going:
            return {}
        self._merge()
        # M is where the identity goes: the first piece takes it to that piece's own M, the others go on without exits.
        M = exits = torch.zeros_like(self._transition)
        if onwards := [n for n in going if not self.begins[n]]:
            M = torch.zeros_like(exits)
            for n in onwards:
                exits[self._firsts[n]].copy_(self._transition[self._firsts[n]])
            # It is merged as if it were a state, which a kernel for states takes where K = V.
            merge_pieces(
                self.kernel if self.shape.K == self.shape.V else None,
                self._bounds, M, exits, self._transition,
            )  # fmt: skip
        found = {}
        for n in going:
            last = self._lasts[n]
            row = torch.cat([self._exit[last], exits[last]], -1)
            if len(self.pieces[n]) > 1:
                row = affine(self._transition[last], torch.cat([self._states[last], M[last]], -1), row)
            found[self.fragments[n]] = row
        return found

    def _run_inputs(self, inputs: KdaInputs, states: Tensor) -> KdaInputs:
        # Those of the summary where they are the same: the states have been overwritten meanwhile.
        return super()._run_inputs(inputs, states) if self.shape.options.state_v_first else self._inputs

    def _run(self, x: KdaInputs, o: Tensor, final: Tensor | None) -> None:
        self.backend.execute_segments(x, KdaOutputs(o, final, None, self._workspace))

    def _piece_starts(self, starts: Sequence[Tensor]) -> Tensor:
        for n, (first, begins) in enumerate(zip(self._firsts, self.begins)):
            if not begins:  # what no summary knew of
                self._states[first].copy_(starts[n])
                self._exit[first].copy_(
                    affine(self._transition[first], self._states[first], self._exit[first])
                )
                self._merged = False
        self._merge()
        return self._states

    def _merge(self) -> None:
        if not self._merged:
            merge_pieces(self.kernel, self._bounds, self._states, self._exit, self._transition)
            self._merged = True
