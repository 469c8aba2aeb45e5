"""Executes one call by a plan: summaries of the segments, their merge, and one packed call over all segments.

Backends that summarise segments themselves take the native path, `kda_cp.native`; plans with whole ends take `kda_cp.whole_ends`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kda_core import contract
from kda_core.backend import Backend, BackendSpec, SupportsSegments
from kda_core.contract import CHECKPOINT_SPACING, KdaInputs, KdaOutputs, ProblemShape
from kda_core.errors import ShapeError
from kda_cp import certificate, native, saved_states, whole_ends
from kda_cp.cache import Cache
from kda_cp.merge import merge
from kda_cp.plan import Plan
from kda_cp.saved_states import Saving, slots_of
from kda_cp.segments import (
    Caller,
    Segment,
    execution_shape,
    layout,
    segment_inputs,
    summary_shape,
    with_exit,
    with_transition,
)
from kda_cp.summary import exit_states, transitions


def execute(plan: Plan, inputs: KdaInputs, outputs: KdaOutputs, backend: Backend) -> KdaOutputs:
    """Executes a call by a plan for which `refusal` returned None; returns `outputs`. Does not wait for a GPU.

    Raises:
        ShapeError: `outputs.workspace` has fewer than `workspace_bytes`.
    """
    route, workspace = _route(plan, inputs.shape, backend), outputs.workspace
    if route.workspace_bytes > (size := 0 if workspace is None else workspace.numel()):
        raise ShapeError("workspace", f"at least {route.workspace_bytes} bytes", f"{size} bytes")
    if not route.is_split:
        return backend.chunk_fwd(inputs, outputs)
    with plain_mode(inputs.q.device.type):
        if route.of_backend is not None:
            route.of_backend(inputs, outputs)
        else:
            call = Caller(backend, workspace)
            starts = initial_states(plan, inputs, outputs.o, call)
            _execute_segments(plan, inputs, outputs, starts, call)
    return outputs


def workspace_bytes(plan: Plan, shape: ProblemShape, backend: Backend) -> int:
    """Returns the bytes of workspace that `execute` needs."""
    return _route(plan, shape, backend).workspace_bytes


class _Route(NamedTuple):
    """How a plan is executed.

    Attributes:
        backend: the backend. It is kept alive: the cache key contains its id, which no other object may get.
        is_split: whether the plan splits a sequence.
        of_backend: the execution by methods of the backend (`native`, `whole_ends`); None for the generic path, which makes forward calls.
        workspace_bytes: workspace of the largest call.
    """

    backend: Backend
    is_split: bool
    of_backend: Callable[[KdaInputs, KdaOutputs], None] | None
    workspace_bytes: int


_routes = Cache(256)


def _route(plan: Plan, shape: ProblemShape, backend: Backend) -> _Route:
    """Returns the route of a plan. Routes are cached, because every call by a plan needs its route twice."""
    return _routes.get(
        (plan, shape, id(backend), native.most_bytes(shape)), partial(_find_route, plan, shape, backend)
    )


def _find_route(plan: Plan, shape: ProblemShape, backend: Backend) -> _Route:
    if not plan.is_split:
        return _Route(backend, False, None, backend.workspace_bytes(shape))
    if plan.whole_ends:
        ends = whole_ends.execution(plan, shape, backend)
        return _Route(backend, True, partial(whole_ends.execute, ends), ends.workspace_bytes)
    if plan.strategy == "exact" and (found := native.execution(plan, shape, backend)) is not None:
        return _Route(backend, True, partial(native.execute, found), found.workspace_bytes)
    return _Route(backend, True, None, max(map(backend.workspace_bytes, shapes(plan, shape, backend))))


def plain_mode(device_type: str) -> contextlib.AbstractContextManager[object]:
    """Turns gradients and autocast off. It checks first whether they are on, which is faster than turning them off twice."""
    stack = contextlib.ExitStack()
    if torch.is_grad_enabled():
        stack.enter_context(torch.no_grad())
    if torch.is_autocast_enabled(device_type):
        stack.enter_context(torch.autocast(device_type, enabled=False))
    return stack


def shapes(plan: Plan, shape: ProblemShape, backend: Backend) -> list[ProblemShape]:
    """Returns the shapes of all backend calls that a split plan makes."""
    if plan.whole_ends:
        return whole_ends.shapes(plan, shape, backend)
    if plan.strategy == "exact" and (found := native.execution(plan, shape, backend)) is not None:
        return [window.execution_shape for window in found.windows]
    segments = layout(plan)
    calls = [execution_shape(shape, segments), summary_shape(shape, with_exit(segments))]
    if inner := with_transition(segments):
        certified = plan.strategy == "certified"
        calls.append(certificate.per_head_shape(shape, inner) if certified else summary_shape(shape, inner))
    return calls


def refusal(plan: Plan, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> str | None:
    """Returns None, or why this plan cannot execute this call on this backend."""
    shape, options = inputs.shape, inputs.options
    if (why := mismatch(plan, inputs)) is not None:
        return why
    if not plan.is_split:
        return None
    if plan.whole_ends and (why := whole_ends.refusal(plan, shape, backend)) is not None:
        return why
    if (why := saved_states.refusal(plan, shape, spec, backend)) is not None:
        return why
    if (why := _refusal_over_pool(plan, shape, backend)) is not None:
        return why
    if options.return_intermediate_states:
        for n, segments in enumerate(plan.segments):
            *cuts, _ = accumulate(segments)
            if any(cut % options.chunk_size for cut in cuts):
                return (
                    f"intermediate states require cuts at multiples of chunk_size={options.chunk_size}; "
                    f"sequence {n} has segments {segments}"
                )
    return not_served(shapes(plan, shape, backend), spec, backend)


def executes_over_pools(plan: Plan | None, backend: Backend) -> bool:
    """Returns whether calls over a pool are executed by this plan without copies of states; None is any automatic plan."""
    exact = plan is None or not plan.is_split or (plan.strategy == "exact" and not plan.whole_ends)
    return exact and isinstance(backend, SupportsSegments)


def _refusal_over_pool(plan: Plan, shape: ProblemShape, backend: Backend) -> str | None:
    """Returns None, or why this plan cannot execute a call over its pool."""
    if shape.pool is None:
        return None
    if not executes_over_pools(plan, backend):
        return "states in a pool require an exact plan, and a backend that summarises segments"
    if shape.pool.checkpoint_dtype is not None:
        for n, segments in enumerate(plan.segments):
            *cuts, _ = accumulate(segments)
            if any(cut % CHECKPOINT_SPACING for cut in cuts):
                return f"checkpoints require cuts at multiples of {CHECKPOINT_SPACING}; sequence {n} has segments {segments}"
    return None


def mismatch(plan: Plan, inputs: KdaInputs) -> str | None:
    """Returns None, or why a plan is not one for this call on any backend."""
    lengths = inputs.sequence_lengths()
    if inputs.options.pin:
        return "pin=True requires results that do not depend on a plan"
    if lengths is None:
        return "the host does not know the lengths (cu_seqlens_cpu is missing, or use_graph is set)"
    if plan.lengths != lengths:
        return f"it is for sequences of {_brief(plan.lengths)} tokens, the call has {_brief(lengths)}"
    return None


def not_served(needed: Iterable[ProblemShape], spec: BackendSpec, backend: Backend) -> str | None:
    """Returns None, or why a backend does not serve one of the shapes."""
    for shape in needed:
        if missing := sorted(f.value for f in shape.features if f.value not in spec.features):
            return f"backend {spec.name!r} does not declare {', '.join(missing)}"
        if (why := backend.can_run(shape)) is not None:
            return f"backend {spec.name!r} refuses a call that the plan needs: {why}"
    return None


def initial_states(plan: Plan, inputs: KdaInputs, o: Tensor, call: Caller) -> Tensor:
    """Returns the true initial states of all segments, [P, HV, K, V], or [P, HV, V, K] with `state_v_first`, by forward calls.

    Args:
        plan: splits a sequence.
        inputs: inputs of the whole call.
        o: [B, T, HV, V], scratch memory.
        call: calls the backend.
    """
    segments, shape = layout(plan), inputs.shape
    given = inputs.initial_state
    if given is not None and shape.options.state_v_first:
        given = given.mT
    zeros = inputs.q.new_zeros((shape.HV, shape.K, shape.V), dtype=shape.state_dtype)
    initial = [zeros if given is None else given[n] for n in range(shape.N)]

    outer = with_exit(segments)
    first = [initial[p.sequence] if p.index == 0 else None for p in outer]
    B = _by_sequence(outer, exit_states(inputs, outer, first, o, call), shape.N)
    M: list[list[Tensor]] = [[] for _ in range(shape.N)]
    if inner := with_transition(segments):
        if plan.strategy == "certified":
            values = certificate.transitions(inputs, inner, B, o, call)
        else:
            values = transitions(inputs, inner, o, call)
        M = _by_sequence(inner, values, shape.N)
    states = torch.stack([state for s in merge(initial, B, M) for state in s])
    states = states.mT if shape.options.state_v_first else states
    return states.to(shape.state_dtype).contiguous()


def _by_sequence(segments: list[Segment], values: Tensor, N: int) -> list[list[Tensor]]:
    """Returns the values [n, ...] of n segments as one list per sequence, in the order of its tokens."""
    found: list[list[Tensor]] = [[] for _ in range(N)]
    for p, value in sorted(zip(segments, values), key=lambda pair: pair[0].start):
        found[p.sequence].append(value)
    return found


def _execute_segments(
    plan: Plan,
    inputs: KdaInputs,
    outputs: KdaOutputs,
    starts: Tensor,
    call: Caller,
) -> None:
    """Calls the backend over all segments from their true initial states `starts`."""
    segments = layout(plan)
    shape, flat = execution_shape(inputs.shape, segments), [p for s in segments for p in s]
    final, h, slots = None, outputs.intermediate_states, None
    if outputs.final_state is not None:
        final = starts.new_empty(shape.state_shape)
    if h is not None:
        # Cuts are multiples of chunk_size, so the chunks of the segments are those of the sequences.
        lengths = tuple(p.length for p in flat)
        h = h.flatten(0, 1)[None, : contract.num_chunks(lengths, shape.options.chunk_size)]
    if outputs.saved_states is not None:
        slots = slots_of(inputs.shape, plan.lengths, flat, shape)
    saving = Saving.allocate(outputs, slots, 0)
    x = segment_inputs(inputs, flat, shape, starts)
    call(x, outputs.o.flatten(0, 1)[None, : shape.T], final, h, *saving)
    saving.deliver(outputs, slots, 0)
    if final is not None:
        ends = list(accumulate(len(s) for s in segments))
        torch.stack([final[end - 1] for end in ends], out=outputs.final_state)


def _brief(lengths: tuple[int, ...]) -> str:
    if len(lengths) <= 8:
        return str(list(lengths))
    return f"[{', '.join(map(str, lengths[:8]))}, ...] ({len(lengths)})"
