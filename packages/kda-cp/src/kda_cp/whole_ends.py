"""Executes a call with whole ends: the first and the last segment of its split sequence are whole calls, beside the calls over the inner
segments.

Neither end needs a summary, and no records of them pass from step to step (`kda_core.backend.SupportsWholeEnds`). The sequences before the
split one belong to the first whole call, those behind it to the last one::

    step        sequences before, first segment     inner segments      last segment, sequences behind
    1           whole call: o, states               summarize
    2                                        merge
    3                                               execute             whole call: o, final states
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from kda_core.backend import SupportsWholeEnds
from kda_core.contract import WORKSPACE_ALIGNMENT, KdaInputs, KdaOutputs, ProblemShape
from kda_cp import native
from kda_cp.cache import Cache
from kda_cp.merge import MergeKernel, merge_kernel, merge_segments
from kda_cp.plan import Plan
from kda_cp.segments import (
    PER_TOKEN,
    Segment,
    aligned,
    execution_shape,
    layout,
    offsets_of,
    packed,
    replaced,
    whole_shape,
)
from kda_cp.upload import Integers, upload_groups


@dataclass(frozen=True)
class Part:
    """Adjacent segments of one call, the shape of the call, and its offsets."""

    segments: tuple[Segment, ...]
    shape: ProblemShape
    offsets: Integers


@dataclass(frozen=True)
class Execution:
    """Everything about a call with whole ends that the plan and the shape determine.

    Attributes:
        backend: a `SupportsWholeEnds`.
        kernel: the merge kernel of the backend, or None.
        first, inner, last: the first whole call, both calls over the inner segments, and the last whole call.
        summarized: shape of the first of both calls over the inner segments. They start from zeros, so it has no initial states.
        bounds: of the merge.
        whole_bytes: workspace of a whole call, a multiple of `WORKSPACE_ALIGNMENT`. That of the inner calls follows.
        workspace_bytes: workspace of all calls.
    """

    backend: Any
    kernel: MergeKernel | None
    first: Part
    inner: Part
    last: Part
    summarized: ProblemShape
    bounds: Integers
    whole_bytes: int
    workspace_bytes: int

    @property
    def parts(self) -> tuple[Part, Part, Part]:
        """All tokens, in order."""
        return self.first, self.inner, self.last


_executions = Cache(256)


def execution(plan: Plan, shape: ProblemShape, backend: Any) -> Execution:
    """Returns how a backend executes a plan for which `refusal` returned None."""
    return _executions.get((plan, shape, id(backend)), lambda: _execution(plan, shape, backend))


def _execution(plan: Plan, shape: ProblemShape, backend: Any) -> Execution:
    sequences = layout(plan)
    at = next(n for n, segments in enumerate(sequences) if len(segments) > 1)
    split = sequences[at]
    before, behind = chain(*sequences[:at]), chain(*sequences[at + 1 :])
    outer = [*before, split[0]], [split[-1], *behind]
    head = whole_shape(shape, outer[0], output_final_state=True, state_v_first=False)
    first = _part(outer[0], replace(head, has_initial_state=shape.has_initial_state))
    inner = _part(
        split[1:-1], execution_shape(shape, [split[1:-1]], output_final_state=False, state_v_first=False)
    )
    last = _part(outer[1], whole_shape(shape, outer[1]))
    whole, rest = backend.whole_ends_workspace_bytes(first.shape, inner.shape, last.shape)
    whole = -(-whole // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT
    summarized = replace(inner.shape, has_initial_state=False)
    bounds = Integers((0, len(split)), torch.int32)
    return Execution(
        backend, merge_kernel(backend), first, inner, last, summarized, bounds, whole, whole + rest
    )


def _part(segments: list[Segment], shape: ProblemShape) -> Part:
    return Part(tuple(segments), shape, offsets_of(segments))


def refusal(plan: Plan, shape: ProblemShape, backend: Any) -> str | None:
    """Returns None, or why a plan with whole ends cannot execute a call on this backend."""
    if (why := refusal_of_shape(shape)) is not None:
        return why
    if not isinstance(backend, SupportsWholeEnds):
        return f"whole ends require a backend with whole calls beside segments; {type(backend).__name__} has none"
    if native.window_tokens(shape, backend):
        return f"whole ends require a workspace of at most {native.WORKSPACE_BYTES} bytes"
    return None


def refusal_of_shape(shape: ProblemShape) -> str | None:
    """Returns None, or why no plan with whole ends executes a call, whatever the backend."""
    if shape.pool is not None:
        return "whole ends require states outside of a pool"
    if shape.options.needs_backward:
        return "whole ends require inputs without requires_grad"
    if shape.options.return_intermediate_states:
        return "whole ends require return_intermediate_states=False"
    return None


def shapes(plan: Plan, shape: ProblemShape, backend: Any) -> list[ProblemShape]:
    """Returns the shapes of all backend calls of a plan."""
    e = execution(plan, shape, backend)
    return [e.first.shape, e.inner.shape, e.last.shape]


def execute(e: Execution, inputs: KdaInputs, outputs: KdaOutputs) -> None:
    """Executes a call. `outputs.workspace` has at least `e.workspace_bytes`."""
    steps = Steps(e, inputs, outputs)
    steps.summarize()
    steps.merge()
    steps.execute()


class Steps:
    """The steps of one call, in order. Arguments as in `execute`."""

    def __init__(self, e: Execution, inputs: KdaInputs, outputs: KdaOutputs) -> None:
        assert outputs.workspace is not None
        self._e, self._inputs, self._final = e, inputs, outputs.final_state
        self._whole, self._rest = outputs.workspace[: e.whole_bytes], outputs.workspace[e.whole_bytes :]
        self._bounds, *self._offsets = upload_groups(
            (e.bounds, *(p.offsets for p in e.parts)), inputs.q.device
        )
        tokens = [sum(s.length for s in p.segments) for p in e.parts]
        views = (packed(getattr(inputs, name)).split_with_sizes(tokens, 1) for name in PER_TOKEN)
        self._views = list(zip(*views))
        self._o = packed(outputs.o).split_with_sizes(tokens, 1)
        self._written = [aligned(o) for o in self._o]

        shape, given = e.first.shape, inputs.initial_state
        self._given = given.mT if given is not None and inputs.options.state_v_first else given
        self._before, self._segments, behind = shape.N - 1, len(e.inner.segments) + 2, e.last.shape.N - 1
        # At the starts of all segments, then of the sequences behind. The merge writes those of all segments but the first one, which is
        # not read.
        self._states = inputs.q.new_empty(
            (self._segments + behind, *shape.state_shape[1:]), dtype=shape.state_dtype
        )
        if behind:
            starts = self._states[self._segments :]
            starts.zero_() if self._given is None else starts.copy_(self._given[-behind:])
        # Of the sequences before, then of all segments.
        self._exits = self._states.new_empty((self._before + self._segments, *shape.state_shape[1:]))
        self._transitions = self._states.new_empty((self._segments, shape.HV, shape.K, shape.K))
        self._inner = self._inputs_of(1, e.summarized, None)

    def _inputs_of(self, part: int, shape: ProblemShape, initial_state: Tensor | None) -> KdaInputs:
        """Returns the inputs of a call of this shape over a part: 0 is the first one, 1 the inner segments, 2 the last one."""
        cu_seqlens, host = self._offsets[part] if shape.varlen else (None, None)
        return replaced(
            self._inputs, shape=shape, initial_state=initial_state, cu_seqlens=cu_seqlens, cu_seqlens_cpu=host,
            **dict(zip(PER_TOKEN, self._views[part])),
        )  # fmt: skip

    def summarize(self) -> None:
        """Executes the sequences before and the first segment, and summarises the inner ones."""
        e, n = self._e, self._before + 1
        given = None if self._given is None else self._given[:n]
        e.backend.summarize_beside(
            self._inputs_of(0, e.first.shape, given),
            KdaOutputs(self._written[0], self._exits[:n], None, self._whole),
            self._inner,
            self._exits[n:-1],
            self._transitions[1:-1],
            self._rest,
        )

    def merge(self) -> None:
        """Computes the states at the starts of all segments."""
        e, states, exits = self._e, self._states[: self._segments], self._exits[self._before :]
        merge_segments(e.kernel, e.bounds.values, states, exits, self._transitions, self._bounds.device)

    def execute(self) -> None:
        """Executes the last segment and the sequences behind, and the inner segments."""
        e, v_first, final = self._e, self._inputs.options.state_v_first, self._final
        starts = self._states[self._segments - 1 :]
        e.backend.execute_beside(
            self._inputs_of(2, e.last.shape, starts.mT if v_first else starts),
            KdaOutputs(self._written[2], None if final is None else final[self._before :], None, self._whole),
            replace(self._inner, shape=e.inner.shape, initial_state=self._states[1 : self._segments - 1]),
            KdaOutputs(self._written[1], None, None, self._rest),
        )
        for o, written in zip(self._o, self._written):
            if written is not o:
                o.copy_(written)
        if final is not None and self._before:
            before = self._exits[: self._before]
            final[: self._before] = before.mT if v_first else before
