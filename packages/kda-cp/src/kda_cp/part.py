"""Fragments that one rank computes together, each cut into pieces so that they fill its device (`kda_cp.distributed`).

A part is summarised and then run. In between, states may come from other ranks: a piece of a fragment maps the state at the
fragment's start as ``S -> M S + B``, and so does the fragment, by the merge of its pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kda_core.backend import SupportsSegments
from kda_core.contract import KdaInputs, KdaOutputs, ProblemShape
from kda_core.registry import Choice
from kda_cp.merge import merge_by
from kda_cp.pieces import Caller, Piece, aligned, piece_inputs, run_shape, summary_shape
from kda_cp.plan import make_plan
from kda_cp.planner import machine
from kda_cp.summary import exit_states, transitions

_plan = lru_cache(maxsize=1024)(make_plan)  # which takes milliseconds for many pieces


@dataclass
class Part:
    """Fragments that lie side by side in a rank's tokens.

    Attributes:
        pieces: of each fragment, in order; `Piece.sequence` is the number of the fragment on its rank.
        begins, ends: of each fragment, whether it holds the first and the last tokens of its sequence.
        backend: that computes it.
    """

    pieces: list[list[Piece]]
    begins: list[bool]
    ends: list[bool]
    backend: Any
    _exits: dict[Piece, Tensor] = field(default_factory=dict)  # [HV, K, V], from what `summarize` was given
    _transitions: dict[Piece, Tensor] = field(default_factory=dict)  # [HV, K, K]
    _workspace: Tensor | None = None  # as a native `summarize` left it

    @classmethod
    def planned(
        cls, whole: Sequence[Piece], begins: list[bool], ends: list[bool], inputs: KdaInputs, choice: Choice
    ) -> Part:
        """The part of these fragments, cut where that is predicted to be faster."""
        s, (known, source, SMs) = inputs.shape, machine(inputs, choice.spec)
        plan = _plan(
            tuple(p.length for p in whole), HV=s.HV, K=s.K, V=s.V, constants=known, source=source, SMs=SMs,
            native=isinstance(choice.backend, SupportsSegments), crossing=not all(ends),
        )  # fmt: skip
        pieces = [
            [Piece(p.sequence, i, p.start + at, n) for i, (at, n) in enumerate(zip(accumulate(cuts, initial=0), cuts))]
            for p, cuts in zip(whole, plan.pieces)
        ]  # fmt: skip
        return cls(pieces, begins, ends, choice.backend)

    @property
    def crossing(self) -> bool:
        """Whether a state comes from another rank or goes to one."""
        return not all((*self.begins, *self.ends))

    @property
    def fragments(self) -> list[int]:
        return [s[0].sequence for s in self.pieces]

    def shapes(self, shape: ProblemShape) -> list[ProblemShape]:
        """The calls of the backend."""
        run = run_shape(shape, self.pieces)
        if isinstance(self.backend, SupportsSegments):
            return [run]
        return [run, *(summary_shape(shape, part) for part in self._needed() if part)]

    def summarize(self, inputs: KdaInputs, first: Sequence[Tensor | None], o: Tensor) -> None:
        """Summaries of the pieces whose state passes on, to the next piece or to another rank.

        Args:
            inputs: of the rank.
            first: the state [HV, K, V] at the start of each fragment that begins its sequence; None for zeros, and where
                it is not known yet.
            o: [1, T_rank, HV, V], scratch memory: its first rows are overwritten, `run` comes later.
        """
        exits, inner = self._needed()
        if not exits:
            return
        given = {s[0]: state for s, state in zip(self.pieces, first)}
        if isinstance(self.backend, SupportsSegments):
            self._summarize_natively(inputs, given)
            return
        call = Caller(self.backend, self.shapes(inputs.shape)[1:], None, inputs.q)
        states = exit_states(inputs, exits, [given.get(p) for p in exits], o, call)
        self._exits = dict(zip(exits, states))
        if inner:
            self._transitions = dict(zip(inner, transitions(inputs, inner, o, call)))

    def _summarize_natively(self, inputs: KdaInputs, given: dict[Piece, Tensor | None]) -> None:
        pieces, shape, new = self._flat(), run_shape(inputs.shape, self.pieces), inputs.q.new_empty
        self._workspace = new(self.backend.segment_workspace_bytes(shape), dtype=torch.uint8)
        starts = inputs.q.new_zeros((shape.N, shape.HV, shape.K, shape.V), dtype=shape.state_dtype)
        for row, p in zip(starts, pieces):
            if (state := given.get(p)) is not None:
                row.copy_(state)
        exits, M = torch.empty_like(starts), starts.new_empty((*starts.shape[:-1], shape.K))
        shape = replace(shape, options=replace(shape.options, state_v_first=False))
        self.backend.summarize(piece_inputs(inputs, pieces, shape, starts), exits, M, self._workspace)
        self._exits, self._transitions = dict(zip(pieces, exits)), dict(zip(pieces, M))

    def rows(self) -> dict[int, Tensor]:
        """(B | M) [HV, K, V + K] of each fragment that does not end its sequence, by its number: the exit from what
        `summarize` was given, and the transition, zero where the fragment begins its sequence."""
        going = [(s, begins) for s, begins, ends in zip(self.pieces, self.begins, self.ends) if not ends]
        if not going:
            return {}
        exits = [[self._exits[p] for p in s] for s, _ in going]
        inner = [[self._transitions[p] for p in s[1:]] for s, _ in going]
        B = merge_by(self.backend, [torch.zeros_like(ends[0]) for ends in exits], exits, inner)
        like = exits[0][0]
        zero = like.new_zeros((*like.shape[:-1], like.shape[-2]))
        M = {n: zero for n, (_, begins) in enumerate(going) if begins}
        # Else M is where the identity goes: the first piece takes it to that piece's own M, the others go on without exits.
        if others := [n for n in range(len(going)) if n not in M]:
            firsts = [self._transitions[going[n][0][0]] for n in others]
            onwards = [[first, *[zero] * len(inner[n])] for n, first in zip(others, firsts)]
            found = merge_by(self.backend, [zero] * len(others), onwards, [inner[n] for n in others])
            M |= {n: states[-1] for n, states in zip(others, found)}
        return {s[0].sequence: torch.cat([B[n][-1], M[n]], -1) for n, (s, _) in enumerate(going)}

    def run(self, inputs: KdaInputs, starts: Sequence[Tensor], o: Tensor) -> dict[int, Tensor]:
        """Writes the rows of o of these fragments.

        Args:
            inputs: of the rank.
            starts: the true state [HV, K, V] at the start of each fragment.
            o: [1, T_rank, HV, V].

        Returns:
            The final state of each fragment by its number, where the call asks for final states.
        """
        s, pieces = inputs.shape, self._flat()
        shape, at = run_shape(s, self.pieces), pieces[0].start
        states = torch.stack(self._piece_starts(starts)).to(s.state_dtype)
        states = (states.mT if s.options.state_v_first else states).contiguous()
        final = states.new_empty(shape.state_shape) if s.options.output_final_state else None
        x, mine = piece_inputs(inputs, pieces, shape, states), o[:, at : at + shape.T]
        written = aligned(mine)
        if self._workspace is not None:
            self.backend.run_segments(x, KdaOutputs(written, final, None, self._workspace))
        else:
            Caller(self.backend, [shape], None, inputs.q)(x, written, final)
        if written is not mine:
            mine.copy_(written)
        last = accumulate(len(s) for s in self.pieces)
        return {} if final is None else {n: final[end - 1] for n, end in zip(self.fragments, last)}

    def _piece_starts(self, starts: Sequence[Tensor]) -> list[Tensor]:
        """The true states at the starts of all pieces."""
        exits, inner = [], []
        for pieces, begins, S in zip(self.pieces, self.begins, starts):
            # A state at the start that `summarize` did not know counts as the exit of a piece before.
            exits.append([*([] if begins else [S]), *(self._exits[p] for p in pieces[:-1])])
            inner.append([self._transitions[p] for p in (pieces[1:-1] if begins else pieces[:-1])])
        found = merge_by(self.backend, starts, exits, inner)
        return [state for states, begins in zip(found, self.begins) for state in states[0 if begins else 1 :]]

    def _needed(self) -> tuple[list[Piece], list[Piece]]:
        """The pieces whose exit state, and whose transition, is needed."""
        exits = [p for s, ends in zip(self.pieces, self.ends) for p in (s[:-1] if ends else s)]
        known = {s[0] for s, begins in zip(self.pieces, self.begins) if begins}
        return exits, [p for p in exits if p not in known]

    def _flat(self) -> list[Piece]:
        return [p for s in self.pieces for p in s]
