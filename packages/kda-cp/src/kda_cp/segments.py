"""Segments of a call: their position, and the shapes and tensors of backend calls over them.

A call of B rows of T tokens is treated as one packed row, [1, B*T, ...], in the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from kda_core import buffers, contract
from kda_core.backend import Backend
from kda_core.contract import KdaInputs, KdaOutputs, KdaSegments, ProblemShape, Tensors
from kda_core.errors import BackendContractError
from kda_cp.plan import Plan
from kda_cp.upload import Integers, Uploaded, upload


@dataclass(frozen=True)
class Segment:
    """Tokens [start, start + length) of the packed call.

    Attributes:
        sequence: number of the sequence.
        index: number of the segment in its sequence.
        start, length: in tokens.
    """

    sequence: int
    index: int
    start: int
    length: int


def layout(plan: Plan) -> list[list[Segment]]:
    """Returns the segments of each sequence, in order."""
    found, start = [], 0
    for n, lengths in enumerate(plan.segments):
        starts = accumulate(lengths, initial=start)
        found.append([Segment(n, i, *at) for i, at in enumerate(zip(starts, lengths))])
        start += sum(lengths)
    return found


def with_exit(segments: list[list[Segment]]) -> list[Segment]:
    """Returns the segments whose exit state is needed: of split sequences, all but the last.

    The segments of several split sequences are sorted, longest first: their tokens have to be copied together anyway. The
    segments of a single split sequence keep their order.
    """
    return _launch_order([s[:-1] for s in segments if len(s) > 1])


def with_transition(segments: list[list[Segment]]) -> list[Segment]:
    """Returns the segments whose transition is needed, all but the first and the last, in the order of `with_exit`."""
    return _launch_order([s[1:-1] for s in segments if len(s) > 2])


def _launch_order(groups: list[list[Segment]]) -> list[Segment]:
    flat = [p for group in groups for p in group]
    return flat if len(groups) < 2 else sorted(flat, key=lambda p: -p.length)


# ---- shapes


def execution_shape(
    shape: ProblemShape, segments: Sequence[Sequence[Segment]], **options: Any
) -> ProblemShape:
    """Returns the shape of the call over these segments from their true initial states.

    Args:
        shape: shape of the whole call.
        segments: the segments of each sequence.
        options: replacements of fields of `KdaOptions`.
    """
    lengths = [p.length for s in segments for p in s]
    return _packed_shape(shape, sum(lengths), len(lengths), needs_backward=False, **options)


def summary_shape(shape: ProblemShape, segments: Sequence[Segment]) -> ProblemShape:
    """Returns the shape of the call that computes exit states, or columns of transitions, of these segments.

    Its states are [n, HV, K, V].
    """
    return _packed_shape(
        shape, sum(p.length for p in segments), len(segments),
        output_final_state=True, return_intermediate_states=False, state_v_first=False, needs_backward=False,
    )  # fmt: skip


def gradient_shape(
    shape: ProblemShape, segments: Sequence[Segment], disable_recompute: bool = False
) -> ProblemShape:
    """Returns the shape of the backward over these segments. Its states are [n, HV, K, V].

    ``disable_recompute``: that of the call, for a backward that reads what the forward has saved. A backward that recomputes states
    from those at the starts of segments leaves it False: otherwise it would reserve memory for states that the forward had saved.
    """
    return _packed_shape(
        shape, sum(p.length for p in segments), len(segments), output_final_state=True,
        return_intermediate_states=False, state_v_first=False, needs_backward=True,
        disable_recompute=disable_recompute,
    )  # fmt: skip


def whole_shape(shape: ProblemShape, segments: Sequence[Segment], **options: Any) -> ProblemShape:
    """Returns the shape of a call over these segments as sequences of their own; that over one segment is not packed. ``options`` as in
    `execution_shape`."""
    call = execution_shape(shape, [segments], **options)
    return replace(call, index_dtype=None) if len(segments) == 1 else call


def _packed_shape(shape: ProblemShape, T: int, N: int, **options: Any) -> ProblemShape:
    options = {"use_graph": False, "max_num_seqs": None} | options
    return replace(
        shape, B=1, T=T, N=N, index_dtype=index_dtype(T), has_initial_state=True,
        options=replace(shape.options, **options),
    )  # fmt: skip


def index_dtype(T: int) -> torch.dtype:
    """Returns the dtype of offsets up to T."""
    return torch.int32 if T < 2**31 else torch.int64


# ---- tensors

PER_TOKEN = ("q", "k", "v", "g", "beta")
"""The inputs that have a row for every token."""


def packed(x: Tensor) -> Tensor:
    """Returns x [B, T, ...] as [1, B*T, ...]."""
    return x if x.shape[0] == 1 else x.flatten(0, 1).unsqueeze(0)


def tokens_of(x: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Returns the tokens of `segments` in x [B, T, ...] as [1, sum of lengths, ...].

    The result is a view if the segments are adjacent, else a copy.
    """
    return _select(x, _spans(segments))


def _spans(segments: Sequence[Segment]) -> list[list[int]]:
    """Returns the token ranges [start, end) of `segments`. Adjacent segments share a range."""
    spans = [[segments[0].start, segments[0].start]]
    for p in segments:
        if p.start == spans[-1][1]:
            spans[-1][1] += p.length
        else:
            spans.append([p.start, p.start + p.length])
    return spans


def _select(x: Tensor, spans: list[list[int]]) -> Tensor:
    x = packed(x)
    if spans == [[0, x.shape[1]]]:
        return x
    ranges = [x[:, a:b] for a, b in spans]
    return ranges[0] if len(ranges) == 1 else torch.cat(ranges, 1)


def segment_inputs(
    inputs: KdaInputs,
    segments: Sequence[Segment],
    shape: ProblemShape,
    initial_state: Tensor,
    offsets: Uploaded | None = None,
    of: KdaSegments | None = None,
    **tensors: Tensor,
) -> KdaInputs:
    """Returns the inputs of a call over `segments`.

    Args:
        inputs: inputs of the whole call.
        segments: n segments in the order of the new call.
        shape: shape of the new call.
        initial_state: states at the starts of the segments, [n, HV, K, V] or [n, HV, V, K].
        offsets: cu_seqlens of the new call; None to upload them.
        of: where the segments lie in the sequences of a pool; None for a call without a pool.
        tensors: q, k, v, g or beta of the new call, [1, sum of lengths, ...]. The others are selected from `inputs`.
    """
    cu_seqlens, host = offsets or upload(*offsets_of(segments), inputs.q.device)
    spans = _spans(segments)
    if spans == [[0, inputs.q.shape[1]]] and len(inputs.q) == 1 and not tensors:
        # Tensors of whole calls already have the form that a backend expects.
        return replace(
            inputs, shape=shape, initial_state=initial_state.contiguous(), cu_seqlens=cu_seqlens, cu_seqlens_cpu=host,
            segments=of,
        )  # fmt: skip
    selected = {n: tensors[n] if n in tensors else _select(getattr(inputs, n), spans) for n in PER_TOKEN}
    found = replaced(
        inputs, shape=shape, initial_state=initial_state, cu_seqlens=cu_seqlens, cu_seqlens_cpu=host, **selected
    )  # fmt: skip
    return found if of is None else replace(found, segments=of)


def offsets_of(segments: Sequence[Segment]) -> Integers:
    """Returns the cu_seqlens [n + 1] of n packed segments."""
    ends = tuple(accumulate((p.length for p in segments), initial=0))
    return Integers(ends, index_dtype(ends[-1]))


def replaced(inputs: KdaInputs, *, shape: ProblemShape, **tensors: Tensor | None) -> KdaInputs:
    """Returns `inputs` with another shape and other tensors, made contiguous and aligned as backends expect them. In a call over a pool,
    strided inputs may stay strided: only a backend that declares `Feature.STRIDED` receives them."""
    own = (tensors[name] if name in tensors else getattr(inputs, name) for name in Tensors._fields)
    strided = inputs.pool is not None and not all(getattr(inputs, name).is_contiguous() for name in PER_TOKEN)
    return buffers.make_inputs(Tensors._make(own), shape, strided=strided, pool=inputs.pool)


def aligned(x: Tensor) -> Tensor:
    """Returns `x` if its address is a multiple of `contract.ALIGNMENT`, else an uninitialised tensor of its shape.

    A slice of an output may have any address.
    """
    return x if x.data_ptr() % contract.ALIGNMENT == 0 else torch.empty_like(x)


# ---- calls


class Caller:
    """Calls the forward of a backend several times with one workspace.

    Args:
        backend: the backend.
        workspace: large enough for each call; None if no call needs one.
    """

    def __init__(self, backend: Backend, workspace: Tensor | None) -> None:
        self._backend, self._workspace = backend, workspace

    def __call__(
        self,
        inputs: KdaInputs,
        o: Tensor,
        final_state: Tensor | None,
        h: Tensor | None = None,
        saved_states: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> None:
        """Calls `chunk_fwd`, which writes `o`, `final_state`, the intermediate states `h`, `saved_states` and `residual`.

        Raises:
            BackendContractError: the backend did not return the outputs that it was given.
        """
        outputs = KdaOutputs(o, final_state, h, self._workspace, saved_states, residual)
        if (returned := self._backend.chunk_fwd(inputs, outputs)) is not outputs:
            raise BackendContractError(
                f"{type(self._backend).__name__}.chunk_fwd must return the outputs it was given, "
                f"returned {type(returned).__name__}"
            )
