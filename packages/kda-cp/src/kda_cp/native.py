"""One call by a plan over a backend that summarises segments itself (`kda_core.backend.SupportsSegments`).

What is parallel over tokens is computed once, in the summaries, and waits in the workspace for the run. So that the workspace
stays below `WORKSPACE_BYTES`, a long call goes in windows of tokens; the state passes from one to the next.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

from kda_core import contract
from kda_core.backend import SupportsSegments
from kda_core.contract import KdaInputs, KdaOutputs, ProblemShape
from kda_core.errors import BackendContractError
from kda_cp.merge import MergeKernel, kernel_of, merge_pieces
from kda_cp.pieces import (
    Integers,
    Piece,
    Uploaded,
    aligned,
    offsets_of,
    packed,
    piece_inputs,
    run_shape,
    uploads,
)
from kda_cp.plan import GRANULE, Cache, Plan, windows

WORKSPACE_BYTES = 4 << 30
"""Of a window, but for what the backend adds for each segment. A window has `GRANULE` tokens at least."""


@dataclass(frozen=True)
class Window:
    """Pieces that are summarised and run together, and what the plan and the shape decide of their calls.

    Attributes:
        pieces: in order, over all sequences; `Piece.index` counts from the window's first.
        sequences: which have pieces here.
        bounds: where the pieces of each sequence begin, and the number of all.
        run, summary: the shapes of the two calls; one object where they are equal.
        chunks: of intermediate states, 0 where nobody asks for them.
        workspace_bytes: of its calls.
        integers: that the calls read on the device: offsets of the pieces, `bounds`, the first and the last piece of each
            sequence, `sequences`.
    """

    pieces: tuple[Piece, ...]
    sequences: tuple[int, ...]
    bounds: tuple[int, ...]
    run: ProblemShape
    summary: ProblemShape
    chunks: int
    workspace_bytes: int
    integers: tuple[Integers, ...]

    @property
    def is_split(self) -> bool:
        """Whether a piece needs another one's summary."""
        return len(self.pieces) > len(self.sequences)


@dataclass(frozen=True)
class Execution:
    """All of a call by a split plan that does not depend on its tensors. It is kept, for devices wait while a host finds it.

    Attributes:
        backend: a `SupportsSegments`.
        merge: its kernel, if it has one.
        windows: of tokens, in order.
        workspace_bytes: of the largest.
    """

    backend: Any
    merge: MergeKernel | None
    windows: tuple[Window, ...]
    workspace_bytes: int


_executions = Cache(256)


def execution(plan: Plan, shape: ProblemShape, backend: Any) -> Execution | None:
    """How a backend executes a plan of pieces that it summarises itself; None for a backend that does not."""

    def make() -> tuple[Any, Execution | None]:
        if not isinstance(backend, SupportsSegments):
            return backend, None
        found = _windows(plan, shape, backend)
        most = max(w.workspace_bytes for w in found)
        return backend, Execution(backend, kernel_of(backend), found, most)

    # the backend is kept, so that its id stays its own
    return _executions.get((plan, shape, id(backend), WORKSPACE_BYTES), make)[1]


def window_tokens(shape: ProblemShape, backend: Any) -> int:
    """Tokens that a window may have, a multiple of `GRANULE`; 0 where a call needs one window only."""

    def needed(tokens: int) -> int:
        return backend.segment_workspace_bytes(run_shape(shape, [[Piece(0, 0, 0, tokens)]]))

    tokens = shape.B * shape.T
    # A backend takes long for a number of tokens that it has not met, so it is asked for the next of 8 steps to a power of 2.
    step = 1 << max(0, tokens.bit_length() - 4)
    if needed(-(-tokens // step) * step) <= WORKSPACE_BYTES or (most := needed(tokens)) <= WORKSPACE_BYTES:
        return 0
    return max(GRANULE, tokens * WORKSPACE_BYTES // most // GRANULE * GRANULE)


def run(how: Execution, inputs: KdaInputs, outputs: KdaOutputs) -> None:
    """Executes a call; `outputs.workspace` has `how.workspace_bytes` at least."""
    shape, h, device = inputs.shape, outputs.intermediate_states, inputs.q.device
    states = _states(inputs) if len(how.windows) > 1 else None  # which windows pass on
    o, chunk = packed(outputs.o), 0
    for window in how.windows:
        first, T = window.pieces[0].start, window.run.T
        offsets, (bounds, _), (firsts, _), (lasts, _), (sequences, _) = uploads(window.integers, device)
        rows = o if T == o.shape[1] else o[:, first : first + T]
        starts = inputs.q.new_zeros((window.run.N, shape.HV, shape.K, shape.V), dtype=shape.state_dtype)
        before = _given(inputs)
        if states is not None:
            before = states.index_select(0, sequences)
        if before is not None:
            starts.index_copy_(0, firsts, before)

        final = starts.new_empty(window.run.state_shape) if window.run.options.output_final_state else None
        written, saved = aligned(rows), None
        if h is not None:
            chunks = packed(h)[:, chunk : chunk + window.chunks]
            saved, chunk = aligned(chunks), chunk + window.chunks
        given = KdaOutputs(written, final, saved, outputs.workspace)
        _run_window(how, window, inputs, starts, given, offsets, bounds)
        if written is not rows:
            rows.copy_(written)
        if saved is not None and saved is not chunks:
            chunks.copy_(saved)
        if final is not None:
            if states is None:
                torch.index_select(final, 0, lasts, out=outputs.final_state)
            else:
                after = final.index_select(0, lasts)
                states.index_copy_(0, sequences, after.mT if shape.options.state_v_first else after)
    if states is not None and outputs.final_state is not None:
        outputs.final_state.copy_(states.mT if shape.options.state_v_first else states)


def _run_window(
    how: Execution,
    window: Window,
    inputs: KdaInputs,
    starts: Tensor,
    outputs: KdaOutputs,
    offsets: Uploaded,
    bounds: Tensor,
) -> None:
    """Writes `outputs` of one window. `starts` [P, HV, K, V] has the states at the start of its first pieces, and zeros."""
    call, x, backend = how.backend.chunk_fwd, None, how.backend
    if window.is_split:
        x = piece_inputs(inputs, window.pieces, window.summary, starts, offsets)
        exits = torch.empty_like(starts)
        transitions = starts.new_empty((*starts.shape[:-1], starts.shape[-2]))
        backend.summarize(x, exits, transitions, outputs.workspace)
        merge_pieces(how.merge, window.bounds, starts, exits, transitions, bounds)
        call = backend.execute_segments
    # after summaries of the same shape their inputs serve again: the states in them have been overwritten
    if x is None or window.run is not window.summary:
        states = starts.mT if window.run.options.state_v_first else starts
        x = piece_inputs(inputs, window.pieces, window.run, states, offsets)
    if (returned := call(x, outputs)) is not outputs:
        raise BackendContractError(
            f"{type(backend).__name__}.{call.__name__} returned {type(returned).__name__}, not the outputs it was given"
        )


# ---- windows


def _windows(plan: Plan, shape: ProblemShape, backend: Any) -> tuple[Window, ...]:
    start = 0
    found: list[Window] = []
    groups = windows(plan.pieces, window_tokens(shape, backend))
    for group in groups:
        pieces: list[Piece] = []
        for sequence, length in group:
            pieces.append(Piece(sequence, len(pieces), start, length))
            start += length
        by_sequence = [list(s) for _, s in groupby(pieces, key=lambda p: p.sequence)]
        passes_on = shape.options.output_final_state or len(found) + 1 < len(groups)
        call = run_shape(shape, by_sequence, output_final_state=passes_on)
        summary = call
        if call.options.state_v_first:
            summary = replace(call, options=replace(call.options, state_v_first=False))
        chunks = 0
        if shape.options.return_intermediate_states:
            # cuts are multiples of chunk_size: the chunks of the pieces are those of the sequences
            chunks = contract.num_chunks(tuple(p.length for p in pieces), shape.options.chunk_size)
        split = len(pieces) > len(by_sequence)
        size = (backend.segment_workspace_bytes if split else backend.workspace_bytes)(call)
        bounds = tuple(accumulate(map(len, by_sequence), initial=0))
        sequences = tuple(s[0].sequence for s in by_sequence)
        lasts = tuple(end - 1 for end in bounds[1:])
        integers = (
            offsets_of(pieces), (bounds, torch.int32),
            (bounds[:-1], torch.int64), (lasts, torch.int64), (sequences, torch.int64),
        )  # fmt: skip
        found.append(Window(tuple(pieces), sequences, bounds, call, summary, chunks, size, integers))
    return tuple(found)


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
