"""Executes the backward of one call by a plan.

A segment maps the gradient of the state at its end to that at its start, ``dS_in = M^T dS_out + N`` (`kda_cp.state_gradients`). So the
backward of a split call is the mirror image of its forward:

1. N and M^T of all segments, in parallel: by `initial_state_gradients` of a backend (`SupportsStateGradients`). Otherwise N comes from
   a backward over all segments, and M from forward calls (`kda_cp.summary`).
2. The merge from the last segment to the first gives the gradient of the state at the end of every segment.
3. One packed backward of the backend over all segments, from these gradients and from the saved states of the call.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core import backward, buffers
from kda_core.backend import Backend, BackendSpec, SupportsStateGradients, saves_states
from kda_core.contract import KdaGradients, KdaInputs, ProblemShape
from kda_core.registry import Choice
from kda_cp import saved_states
from kda_cp.cache import Cache
from kda_cp.execute import initial_states, mismatch, not_served, plain_mode
from kda_cp.merge import MergeKernel, merge_kernel, merge_segments_backward
from kda_cp.plan import Plan
from kda_cp.saved_states import Slots, slots_of
from kda_cp.segments import (
    Caller,
    Segment,
    gradient_shape,
    layout,
    offsets_of,
    packed,
    segment_inputs,
    summary_shape,
    with_exit,
    with_transition,
)
from kda_cp.state_gradients import OF_TOKENS, BackwardCaller, state_gradients
from kda_cp.summary import transitions
from kda_cp.upload import Integers, upload_groups


class Gradients(NamedTuple):
    """The gradients of a call.

    Attributes:
        grad_o: of o, [B, T, HV, V].
        grad_final_state: like the final states, or None.
        saved_states, residual: what the forward has saved (`kda_core.contract.KdaOutputs`), each or None.
    """

    grad_o: Tensor
    grad_final_state: Tensor | None
    saved_states: Tensor | None
    residual: Tensor | None


def refusal(plan: Plan, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> str | None:
    """Returns None, or why this plan cannot execute the backward of this call on this backend."""
    shape = inputs.shape
    if (why := mismatch(plan, inputs)) is not None:
        return why
    if not plan.is_split:
        return None
    if sum(plan.lengths) != shape.B * shape.T:
        return (
            f"tokens after the last sequence: the sequences have {sum(plan.lengths)} of {shape.B * shape.T}"
        )
    if (why := saved_states.refusal(plan, shape, spec, backend)) is not None:
        return why
    return not_served(_shapes(plan, shape, spec, backend), spec, backend)


def _shapes(plan: Plan, shape: ProblemShape, spec: BackendSpec, backend: Backend) -> list[ProblemShape]:
    """Returns the shapes of all backend calls of a split backward."""
    segments = layout(plan)
    flat = [p for s in segments for p in s]
    found = [gradient_shape(shape, flat)]
    if not isinstance(backend, SupportsStateGradients) and (inner := with_transition(segments)):
        found.append(summary_shape(shape, inner))
    if not saves_states(shape, spec, spec, backend):  # forward calls compute the states at the starts
        found.append(summary_shape(shape, with_exit(segments)))
    return found


def execute(
    plan: Plan,
    inputs: KdaInputs,
    given: Gradients,
    wanted: Collection[str],
    spec: BackendSpec,
    backend: Backend,
) -> KdaGradients:
    """Executes a backward by a plan for which `refusal` returned None. Does not wait for a GPU.

    Args:
        wanted: names of the inputs that need a gradient.
    """
    choice = Choice(spec, backend, "")
    if not plan.is_split:
        grads, memory = (given.grad_o, given.grad_final_state), backward.reserve(choice, inputs, wanted)
        return backward.run(choice, inputs, *grads, memory, (given.saved_states, given.residual))
    known = _layout(plan, inputs.shape, given.saved_states is not None, backend)
    with plain_mode(inputs.q.device.type):
        return _execute(plan, known, inputs, given, wanted, choice)


class _Integers(NamedTuple):
    """Integers that a backward reads on the device, or their uploads.

    Attributes:
        offsets: cu_seqlens over the segments.
        firsts, lasts: number of the first and of the last segment of each sequence.
        transitions: numbers of the segments of `with_transition`, in that order.
        inner: numbers of the segments that are not the first of their sequence.
        slots: the slots of the packed call with the saved states at the starts of `inner`; empty if nothing was saved.
    """

    offsets: Any
    firsts: Any
    lasts: Any
    transitions: Any
    inner: Any
    slots: Any


@dataclass(frozen=True)
class _Layout:
    """Everything about a split backward that the plan, the shape and the backend determine.

    Attributes:
        backend: the backend. It is kept alive: the cache key contains its id, which no other object may get.
        native: the backend if it has `initial_state_gradients`, else None.
        kernel: the merge kernel of the backend, or None.
        segments: all segments, in order.
        bounds: the number of the first segment of each sequence, and the number of all segments.
        inner: the segments of `with_transition`.
        shape: shape of the packed call over all segments.
        slots: where its saved states are; None if nothing was saved.
        integers: the integers that the call reads on the device.
    """

    backend: Backend
    native: SupportsStateGradients | None
    kernel: MergeKernel | None
    segments: tuple[Segment, ...]
    bounds: tuple[int, ...]
    inner: tuple[Segment, ...]
    shape: ProblemShape
    slots: Slots | None
    integers: _Integers


_layouts = Cache(256)


def _layout(plan: Plan, shape: ProblemShape, has_saved: bool, backend: Backend) -> _Layout:
    """Returns the layout of a backward. It is cached, because the device waits while the host computes it."""
    make = partial(_find_layout, plan, shape, has_saved, backend)
    return _layouts.get((plan, shape, has_saved, id(backend)), make)


def _find_layout(plan: Plan, shape: ProblemShape, has_saved: bool, backend: Backend) -> _Layout:
    by_sequence = layout(plan)
    segments = tuple(p for s in by_sequence for p in s)
    bounds = tuple(accumulate(map(len, by_sequence), initial=0))
    number = {p: i for i, p in enumerate(segments)}
    inner = tuple(with_transition(by_sequence))
    later = tuple(i for i, p in enumerate(segments) if p.index > 0)
    call = gradient_shape(shape, segments, has_saved and shape.options.disable_recompute)
    integers = _Integers(
        offsets=offsets_of(segments),
        firsts=Integers(bounds[:-1], torch.int64),
        lasts=Integers(tuple(end - 1 for end in bounds[1:]), torch.int64),
        transitions=Integers(tuple(number[p] for p in inner), torch.int64),
        inner=Integers(later, torch.int64),
        slots=Integers(
            tuple(segments[i].start // call.saved_spacing + i for i in later) if has_saved else (),
            torch.int64,
        ),
    )
    slots = slots_of(shape, plan.lengths, segments, call) if has_saved else None
    native = backend if isinstance(backend, SupportsStateGradients) else None
    return _Layout(backend, native, merge_kernel(backend), segments, bounds, inner, call, slots, integers)


def _execute(
    plan: Plan,
    known: _Layout,
    inputs: KdaInputs,
    given: Gradients,
    wanted: Collection[str],
    choice: Choice,
) -> KdaGradients:
    on_device = _Integers._make(upload_groups(known.integers, inputs.q.device))
    # [N, HV, K, V] from states of the call, or back
    k_first = (lambda x: x.mT) if inputs.options.state_v_first else (lambda x: x)
    kept: tuple[Tensor | None, Tensor | None] = None, None
    if known.slots is None or given.saved_states is None:
        call = _forward_caller(plan, inputs.shape, choice.backend, inputs.q)
        starts = k_first(initial_states(plan, inputs, torch.empty_like(inputs.v), call)).contiguous()
    else:
        states = saved_states.of_segments(inputs, given.saved_states, known.slots)
        kept = states, None if given.residual is None else packed(given.residual)
        starts = _from_saved(known, states, on_device)
        if inputs.initial_state is not None:
            starts.index_copy_(0, on_device.firsts.device, k_first(inputs.initial_state))
    x = segment_inputs(inputs, known.segments, known.shape, starts, on_device.offsets)
    grad_o, ends = packed(given.grad_o), torch.zeros_like(starts)
    if given.grad_final_state is not None:
        ends.index_copy_(0, on_device.lasts.device, k_first(given.grad_final_state))
    if known.native is not None:
        found, M = _native_summaries(known.native, x, grad_o, ends)
        run = BackwardCaller.reserve(choice, x, wanted, ())
    else:
        M = _transitions(plan, known, inputs, choice.backend, on_device)
        run = BackwardCaller.reserve(choice, x, wanted, known.segments)
        found = state_gradients(inputs, known.segments, given.grad_o, ends, run)
    merge_segments_backward(known.kernel, known.bounds, ends, found, M)
    gradients = run(x, grad_o, ends, kept)
    of_tokens = {name: getattr(gradients, name).reshape(getattr(inputs, name).shape) for name in OF_TOKENS}
    first = None
    if inputs.initial_state is not None and gradients.initial_state is not None:
        first = k_first(gradients.initial_state.index_select(0, on_device.firsts.device))
    return replace(gradients, initial_state=first, **of_tokens)


def _from_saved(known: _Layout, states: Tensor, on_device: _Integers) -> Tensor:
    """Returns the states at the starts of all segments from the saved ones, [P, HV, K, V]; zeros for first segments."""
    starts = states.new_zeros(known.shape.state_shape, dtype=known.shape.state_dtype)
    inner = states.index_select(0, on_device.slots.device).to(starts.dtype)
    return starts.index_copy_(0, on_device.inner.device, inner)


def _native_summaries(
    backend: SupportsStateGradients, x: KdaInputs, grad_o: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the gradients of the states at the starts of all segments from `ends`, and M, by the method of the backend."""
    found, transposed = torch.empty_like(ends), ends.new_empty((*ends.shape[:-1], ends.shape[-2]))
    workspace = buffers.allocate_workspace(backend.state_gradients_workspace_bytes(x.shape), x.q)
    backend.initial_state_gradients(x, grad_o, ends, found, transposed, workspace)
    return found, transposed.mT


def _transitions(
    plan: Plan, known: _Layout, inputs: KdaInputs, backend: Backend, on_device: _Integers
) -> Tensor:
    """Returns M of all segments by forward calls, [P, HV, K, K]; zeros for the first and the last ones of sequences."""
    s = known.shape
    M = inputs.q.new_zeros((s.N, s.HV, s.K, s.K), dtype=s.state_dtype)
    if known.inner:
        call = _forward_caller(plan, inputs.shape, backend, inputs.q)
        values = transitions(inputs, known.inner, torch.empty_like(inputs.v), call)
        M.index_copy_(0, on_device.transitions.device, values)
    return M


def _forward_caller(plan: Plan, shape: ProblemShape, backend: Backend, like: Tensor) -> Caller:
    """Returns what calls the forward over segments, with a workspace for all summaries of a plan."""
    groups = [group for group in (with_exit(layout(plan)), with_transition(layout(plan))) if group]
    needed = max(backend.workspace_bytes(summary_shape(shape, group)) for group in groups)
    return Caller(backend, buffers.allocate_workspace(needed, like) if needed else None)
