"""One call by a plan over a backend that summarises segments itself (`kda_core.backend.SupportsSegments`).

What is parallel over tokens is computed once, in the summaries, and waits in the workspace for the run. So that the workspace
stays below `WORKSPACE_BYTES`, a long call goes in windows of tokens; the state passes from one to the next.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from kda_core import contract
from kda_core.contract import KdaInputs, KdaOutputs, ProblemShape
from kda_core.errors import BackendContractError
from kda_cp.merge import merge_pieces
from kda_cp.pieces import Piece, aligned, piece_inputs, run_shape, upload
from kda_cp.plan import GRANULE, Plan, windows

WORKSPACE_BYTES = 4 << 30
"""Of a window, but for what the backend adds for each segment. A window has `GRANULE` tokens at least."""

Window = list[list[Piece]]
"""Pieces that are summarised and run together, in order; a list for each sequence."""


def window_tokens(shape: ProblemShape, backend: Any) -> int:
    """Tokens that a window may have, a multiple of `GRANULE`; 0 where a call needs one window only."""
    tokens = shape.B * shape.T
    needed = backend.segment_workspace_bytes(run_shape(shape, [[Piece(0, 0, 0, tokens)]]))
    if needed <= WORKSPACE_BYTES:
        return 0
    return max(GRANULE, tokens * WORKSPACE_BYTES // needed // GRANULE * GRANULE)


def shapes(plan: Plan, shape: ProblemShape, backend: Any) -> list[ProblemShape]:
    """The calls of the backend that a plan makes, one for each window."""
    found = _windows(plan, shape, backend)
    return [_shape(shape, w, last=w is found[-1]) for w in found]


def run(plan: Plan, inputs: KdaInputs, outputs: KdaOutputs, backend: Any) -> None:
    """Executes a call by a split plan on a `Backend` that is a `SupportsSegments`."""
    shape, h = inputs.shape, outputs.intermediate_states
    found = _windows(plan, shape, backend)
    parts = [_shape(shape, w, last=w is found[-1]) for w in found]
    workspace = _workspace(found, parts, backend, outputs, inputs.q)
    states = _states(inputs) if len(found) > 1 else None  # which windows pass on
    o, chunk = outputs.o.flatten(0, 1), 0
    for window, part in zip(found, parts):
        pieces = [p for s in window for p in s]
        starts = inputs.q.new_zeros((len(pieces), shape.HV, shape.K, shape.V), dtype=shape.state_dtype)
        before = _given(inputs)
        if states is not None:
            sequences = upload((s[0].sequence for s in window), torch.int64, o.device)[0]
            before = states.index_select(0, sequences)
        if before is not None:
            starts.index_copy_(0, upload(_firsts(window), torch.int64, o.device)[0], before)

        rows = o[pieces[0].start : pieces[0].start + part.T].unsqueeze(0)
        final = starts.new_empty(part.state_shape) if part.options.output_final_state else None
        written, saved = aligned(rows), None
        if (
            h is not None
        ):  # cuts are multiples of chunk_size: the chunks of the pieces are those of the sequences
            count = contract.num_chunks(tuple(p.length for p in pieces), shape.options.chunk_size)
            chunks = h.flatten(0, 1)[None, chunk : chunk + count]
            saved, chunk = aligned(chunks), chunk + count
        _run_window(window, inputs, part, starts, KdaOutputs(written, final, saved, workspace), backend)
        if written is not rows:
            rows.copy_(written)
        if saved is not None and saved is not chunks:
            chunks.copy_(saved)
        if final is not None:
            last = upload((end - 1 for end in [*_firsts(window)[1:], len(pieces)]), torch.int64, o.device)[0]
            if states is None:
                torch.index_select(final, 0, last, out=outputs.final_state)
            else:
                after = final.index_select(0, last)
                states.index_copy_(0, sequences, after.mT if shape.options.state_v_first else after)
    if states is not None and outputs.final_state is not None:
        outputs.final_state.copy_(states.mT if shape.options.state_v_first else states)


def _run_window(
    window: Window, inputs: KdaInputs, shape: ProblemShape, starts: Tensor, outputs: KdaOutputs, backend: Any
) -> None:
    """Writes `outputs` of one window. `starts` [P, HV, K, V] has the states at the start of its first pieces, and zeros."""
    pieces = [p for s in window for p in s]
    call = backend.chunk_fwd
    if len(pieces) > len(window):  # else no piece needs another one's summary
        summary = replace(shape, options=replace(shape.options, state_v_first=False))
        exits = torch.empty_like(starts)
        transitions = starts.new_empty((*starts.shape[:-1], shape.K))
        backend.summarize(
            piece_inputs(inputs, pieces, summary, starts), exits, transitions, outputs.workspace
        )
        merge_pieces(backend, (*_firsts(window), len(starts)), starts, exits, transitions)
        call = backend.run_segments
    states = starts.mT if shape.options.state_v_first else starts
    if (returned := call(piece_inputs(inputs, pieces, shape, states), outputs)) is not outputs:
        raise BackendContractError(
            f"{type(backend).__name__}.{call.__name__} returned {type(returned).__name__}, not the outputs it was given"
        )


# ---- windows


def _windows(plan: Plan, shape: ProblemShape, backend: Any) -> list[Window]:
    start, found = 0, []
    for group in windows(plan.pieces, window_tokens(shape, backend)):
        pieces: list[Piece] = []
        for sequence, length in group:
            pieces.append(Piece(sequence, len(pieces), start, length))
            start += length
        found.append([list(s) for _, s in groupby(pieces, key=lambda p: p.sequence)])
    return found


def _firsts(window: Window) -> list[int]:
    """Where the pieces of each sequence begin in the window's list of pieces."""
    ends = [0]
    for s in window:
        ends.append(ends[-1] + len(s))
    return ends[:-1]


def _shape(shape: ProblemShape, window: Window, last: bool) -> ProblemShape:
    """The call of a window; states pass on from all but the last."""
    return run_shape(shape, window, output_final_state=shape.options.output_final_state or not last)


def _workspace(
    found: list[Window], parts: list[ProblemShape], backend: Any, outputs: KdaOutputs, like: Tensor
) -> Tensor:
    """The caller's where it is large enough for every window, else one of its own."""
    needed = 0
    for window, part in zip(found, parts):
        split = sum(map(len, window)) > len(window)
        needed = max(needed, (backend.segment_workspace_bytes if split else backend.workspace_bytes)(part))
    if (given := outputs.workspace) is not None and given.numel() >= needed:
        return given
    return like.new_empty(needed, dtype=torch.uint8)


def _given(inputs: KdaInputs) -> Tensor | None:
    """The initial states as [N, HV, K, V], if there are any."""
    given = inputs.initial_state
    return given.mT if given is not None and inputs.options.state_v_first else given


def _states(inputs: KdaInputs) -> Tensor:
    """A copy of the states [N, HV, K, V] before the first tokens."""
    s, given = inputs.shape, _given(inputs)
    if given is None:
        return inputs.q.new_zeros((s.N, s.HV, s.K, s.V), dtype=s.state_dtype)
    return given.clone(memory_format=torch.contiguous_format)
