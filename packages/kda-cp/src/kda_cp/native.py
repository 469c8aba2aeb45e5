"""Executes one call by a plan over a backend that summarises segments itself (`kda_core.backend.SupportsSegments`).

The intra-chunk stage runs once, in `summarize`. Its records stay in the workspace for `execute_segments`. A long call is executed
in windows of tokens, which keeps the workspace below `WORKSPACE_BYTES`. The states pass from window to window (`window_states`).

Over a pool the backend reads and writes the slots in the same two calls (`kda_core.contract.KdaSegments`), without copies of states.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core import contract
from kda_core.backend import SupportsSegments
from kda_core.contract import KdaInputs, KdaOutputs, ProblemShape, besides_tokens
from kda_core.errors import BackendContractError
from kda_cp.cache import Cache
from kda_cp.cuts import granule_of, windows
from kda_cp.merge import MergeKernel, merge_kernel, merge_segments
from kda_cp.plan import Plan
from kda_cp.saved_states import Saving, Slots, slots_of
from kda_cp.segments import Segment, aligned, execution_shape, offsets_of, packed, segment_inputs
from kda_cp.upload import Integers
from kda_cp.window_states import DenseStates, DenseTensors, PoolStates, PoolTensors

WORKSPACE_BYTES = 4 << 30
"""Largest workspace of a window, without the bytes that the backend adds per segment. A window has at least `granule` tokens, even
if their workspace is larger."""

TRAINING_WORKSPACE_BYTES = 640 << 20
"""The same for calls whose inputs require grad: a backward of kda-sm90 needs as much."""


@dataclass(frozen=True)
class Window:
    """Segments that are summarised and executed together, and everything about their calls that the plan and the shape
    determine.

    Attributes:
        segments: the segments of all sequences, in order. `Segment.index` is the number of the segment in the window.
        sequences: the sequences with segments in the window.
        bounds: the number of the first segment of each sequence, and the number of all segments.
        execution_shape, summary_shape: the shapes of the two calls; the same object if they are equal.
        chunks: number of intermediate states per value head; 0 if the call does not return them.
        workspace_bytes: workspace of the calls.
        integers: the integers of `DenseTensors`; over a pool those of `PoolTensors`.
        slots: where the saved states of the segments are; None for a call without gradients.
    """

    segments: tuple[Segment, ...]
    sequences: tuple[int, ...]
    bounds: tuple[int, ...]
    execution_shape: ProblemShape
    summary_shape: ProblemShape
    chunks: int
    workspace_bytes: int
    integers: tuple[Integers, ...]
    slots: Slots | None

    @property
    def is_split(self) -> bool:
        """Whether a segment needs the summary of another one."""
        return len(self.segments) > len(self.sequences)

    @property
    def in_segments(self) -> bool:
        """Whether the window is executed in segments. Over a pool every window is, because a window may begin inside of a sequence."""
        return self.is_split or self.execution_shape.pool is not None


@dataclass(frozen=True)
class Execution:
    """Everything about a split call that the plan and the shape determine.

    It is cached, because the device waits while the host computes it.

    Attributes:
        backend: a `SupportsSegments`.
        kernel: the merge kernel of the backend, or None.
        windows: the windows in the order of tokens.
        workspace_bytes: workspace of the largest window.
    """

    backend: Any
    kernel: MergeKernel | None
    windows: tuple[Window, ...]
    workspace_bytes: int


class _Cached(NamedTuple):
    backend: Any  # kept alive: the cache key contains its id, which no other object may get
    execution: Execution | None


_executions = Cache(256)


def execution(plan: Plan, shape: ProblemShape, backend: Any) -> Execution | None:
    """Returns how a backend executes a split plan; None for a backend that does not summarise segments."""

    def make() -> _Cached:
        if not isinstance(backend, SupportsSegments):
            return _Cached(backend, None)
        found = _windows(plan, shape, backend)
        most = max(w.workspace_bytes for w in found)
        return _Cached(backend, Execution(backend, merge_kernel(backend), found, most))

    return _executions.get((plan, shape, id(backend), most_bytes(shape)), make).execution


def most_bytes(shape: ProblemShape) -> int:
    """Returns the largest workspace of a window, `WORKSPACE_BYTES` or `TRAINING_WORKSPACE_BYTES`."""
    return TRAINING_WORKSPACE_BYTES if shape.options.needs_backward else WORKSPACE_BYTES


def window_tokens(shape: ProblemShape, backend: Any) -> int:
    """Returns the largest number of tokens of a window, a multiple of `granule`; 0 if one window is enough."""

    def needed(tokens: int) -> int:
        return backend.segment_workspace_bytes(execution_shape(shape, [[Segment(0, 0, 0, tokens)]]))

    tokens, limit, unit = shape.B * shape.T, most_bytes(shape), granule_of(shape)
    # A backend takes long to answer for a new number of tokens. So tokens are rounded up to one of 8 steps per power of 2.
    step = 1 << max(0, tokens.bit_length() - 4)
    rounded = -(-tokens // step) * step
    key = (rounded, limit, id(backend), *besides_tokens(shape))
    if _fits.get(key, lambda: (needed(rounded) <= limit, backend))[0]:
        return 0
    if (most := needed(tokens)) <= limit:
        return 0
    return max(unit, tokens * limit // most // unit * unit)


_fits = Cache(256)
"""Whether the tokens of a call fit into one window, and the backend, which is kept alive for its id in the key."""


def execute(execution: Execution, inputs: KdaInputs, outputs: KdaOutputs) -> None:
    """Executes a call. `outputs.workspace` has at least `execution.workspace_bytes`."""
    states: DenseStates | PoolStates = (
        DenseStates(inputs, outputs, len(execution.windows)) if inputs.pool is None else PoolStates(inputs)
    )
    o, chunk = packed(outputs.o), 0
    h = None if outputs.intermediate_states is None else packed(outputs.intermediate_states)
    for window in execution.windows:
        first, call = window.segments[0].start, window.execution_shape
        on_device: Any = states.upload(window.integers)
        starts = states.starts(call, on_device)

        # A slice of the caller's outputs may be unaligned; the backend then writes to a copy.
        window_o = o if call.T == o.shape[1] else o[:, first : first + call.T]
        window_h = None if h is None else h[:, chunk : chunk + window.chunks]
        written_o, written_h = aligned(window_o), None if window_h is None else aligned(window_h)
        chunk += window.chunks
        final = states.ends(call, starts)
        saving = Saving.allocate(outputs, window.slots, first)
        own = KdaOutputs(written_o, final, written_h, outputs.workspace, *saving)
        _execute_window(execution, window, inputs, starts, own, on_device)
        saving.deliver(outputs, window.slots, first)
        if written_o is not window_o:
            window_o.copy_(written_o)
        if window_h is not None and written_h is not None and written_h is not window_h:
            window_h.copy_(written_h)
        states.deliver(final, on_device)
    states.finish()


def _execute_window(
    execution: Execution,
    window: Window,
    inputs: KdaInputs,
    starts: Tensor,
    outputs: KdaOutputs,
    on_device: DenseTensors | PoolTensors,
) -> None:
    """Writes the outputs of one window.

    `starts` [P, HV, K, V] contains the states at the starts of first segments, and zeros elsewhere. It is overwritten.
    """
    call, x, backend = execution.backend.chunk_fwd, None, execution.backend
    if window.in_segments:
        of = on_device.segments if isinstance(on_device, PoolTensors) else None
        x = segment_inputs(inputs, window.segments, window.summary_shape, starts, on_device.offsets, of)
        exits = torch.empty_like(starts)
        transitions = starts.new_empty((*starts.shape[:-1], starts.shape[-2]))
        backend.summarize(x, exits, transitions, outputs.workspace)
        if window.is_split:
            merge_segments(
                execution.kernel, window.bounds, starts, exits, transitions, on_device.bounds.device
            )
        call = backend.execute_segments
    # If the shapes are equal, the inputs of the summaries serve again: the merge has written the true states into them.
    if x is None or window.execution_shape is not window.summary_shape:
        states = starts.mT if window.execution_shape.options.state_v_first else starts
        x = segment_inputs(inputs, window.segments, window.execution_shape, states, on_device.offsets)
    if (returned := call(x, outputs)) is not outputs:
        raise BackendContractError(
            f"{type(backend).__name__}.{call.__name__} must return the outputs it was given, "
            f"returned {type(returned).__name__}"
        )


# ---- windows


def _windows(plan: Plan, shape: ProblemShape, backend: Any) -> tuple[Window, ...]:
    groups = windows(plan.segments, window_tokens(shape, backend), granule_of(shape))
    start = 0
    found: list[Window] = []
    for group, following in zip(groups, [*groups[1:], []]):
        segments: list[Segment] = []
        for sequence, length in group:
            segments.append(Segment(sequence, len(segments), start, length))
            start += length
        if shape.pool is None:
            passes_states = shape.options.output_final_state or len(following) > 0
        else:
            passes_states = len(following) > 0 and following[0][0] == group[-1][0]
        found.append(_window(plan, segments, shape, backend, passes_states))
    return tuple(found)


def _window(
    plan: Plan, segments: list[Segment], shape: ProblemShape, backend: Any, passes_states: bool
) -> Window:
    """Returns a window. `passes_states`: whether states at the ends of segments are needed, by the next window or by the caller."""
    by_sequence = [list(s) for _, s in groupby(segments, key=lambda p: p.sequence)]
    call = execution_shape(shape, by_sequence, output_final_state=passes_states)
    summary = call
    if call.options.state_v_first and call.pool is None:
        summary = replace(call, options=replace(call.options, state_v_first=False))
    chunks = 0
    if shape.options.return_intermediate_states:
        # Cuts are multiples of chunk_size, so the chunks of the segments are those of the sequences.
        chunks = contract.num_chunks(tuple(p.length for p in segments), shape.options.chunk_size)
    in_segments = len(segments) > len(by_sequence) or call.pool is not None
    bounds = tuple(accumulate(map(len, by_sequence), initial=0))
    sequences = tuple(s[0].sequence for s in by_sequence)
    common = offsets_of(segments), Integers(bounds, torch.int32)
    integers: tuple[Integers, ...]
    if call.pool is None:
        integers = (
            *common,
            Integers(bounds[:-1], torch.int64),
            Integers(tuple(end - 1 for end in bounds[1:]), torch.int64),
            Integers(sequences, torch.int64),
        )
    else:
        integers = (*common, *_places(plan, segments))
    return Window(
        segments=tuple(segments),
        sequences=sequences,
        bounds=bounds,
        execution_shape=call,
        summary_shape=summary,
        chunks=chunks,
        workspace_bytes=(backend.segment_workspace_bytes if in_segments else backend.workspace_bytes)(call),
        integers=integers,
        slots=slots_of(shape, plan.lengths, segments, call) if shape.options.needs_backward else None,
    )


def _places(plan: Plan, segments: list[Segment]) -> tuple[Integers, Integers, Integers]:
    """Returns the fields of `KdaSegments`."""
    starts = tuple(accumulate(plan.lengths, initial=0))
    return (
        Integers(tuple(p.sequence for p in segments), torch.int32),
        Integers(tuple(p.start - starts[p.sequence] for p in segments), torch.int32),
        Integers(tuple(p.start + p.length == starts[p.sequence + 1] for p in segments), torch.bool),
    )
