"""One call by a plan: summaries of the pieces, their merge, and one packed run of all pieces. Over backends that summarise
pieces themselves, `kda_cp.native`."""

from __future__ import annotations

import contextlib
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from kda_core import contract
from kda_core.backend import Backend, BackendSpec
from kda_core.contract import KdaInputs, KdaOutputs, ProblemShape
from kda_core.errors import ShapeError
from kda_cp import certificate, native
from kda_cp.merge import merge
from kda_cp.pieces import Caller, Piece, exits, layout, middles, piece_inputs, run_shape, summary_shape
from kda_cp.plan import Cache, Plan
from kda_cp.summary import exit_states, transitions


def run(plan: Plan, inputs: KdaInputs, outputs: KdaOutputs, backend: Backend) -> KdaOutputs:
    """Executes a call by a plan that `refusal` has nothing against; returns `outputs`. Does not wait for a GPU.

    Raises:
        ShapeError: `outputs.workspace` has fewer than `workspace_bytes`.
    """
    route, found = _route(plan, inputs.shape, backend), outputs.workspace
    if route.workspace_bytes > (size := 0 if found is None else found.numel()):
        raise ShapeError("workspace", f"at least {route.workspace_bytes} bytes", f"{size} bytes")
    if not route.is_split:
        return backend.chunk_fwd(inputs, outputs)
    with _undisturbed(inputs.q.device.type):
        if route.natively is not None:
            native.run(route.natively, inputs, outputs)
        else:
            call = Caller(backend, found)
            starts = _initial_states(plan, layout(plan), inputs, outputs.o, call)
            _run_pieces(layout(plan), inputs, outputs, starts, call)
    return outputs


def workspace_bytes(plan: Plan, shape: ProblemShape, backend: Backend) -> int:
    """Bytes of scratch memory that `run` needs, as the backend counts them."""
    return _route(plan, shape, backend).workspace_bytes


class _Route(NamedTuple):
    """How a plan is executed: over a backend that summarises segments itself, or else by its forward calls."""

    backend: Backend
    is_split: bool
    natively: native.Execution | None
    workspace_bytes: int


_routes = Cache(256)


def _route(plan: Plan, shape: ProblemShape, backend: Backend) -> _Route:
    """It is kept, for every call by a plan asks twice. So is the backend, so that its id stays its own."""
    return _routes.get(
        (plan, shape, id(backend), native.WORKSPACE_BYTES), partial(_find_route, plan, shape, backend)
    )


def _find_route(plan: Plan, shape: ProblemShape, backend: Backend) -> _Route:
    if not plan.is_split:
        return _Route(backend, False, None, backend.workspace_bytes(shape))
    if plan.strategy == "exact" and (how := native.execution(plan, shape, backend)) is not None:
        return _Route(backend, True, how, how.workspace_bytes)
    return _Route(backend, True, None, max(map(backend.workspace_bytes, shapes(plan, shape, backend))))


def _undisturbed(device_type: str) -> contextlib.AbstractContextManager[object]:
    """No gradients, no autocast. To turn off what is off takes longer than to ask."""
    stack = contextlib.ExitStack()
    if torch.is_grad_enabled():
        stack.enter_context(torch.no_grad())
    if torch.is_autocast_enabled(device_type):
        stack.enter_context(torch.autocast(device_type, enabled=False))
    return stack


def shapes(plan: Plan, shape: ProblemShape, backend: Backend) -> list[ProblemShape]:
    """All calls of the backend that a split plan makes."""
    if plan.strategy == "exact" and (how := native.execution(plan, shape, backend)) is not None:
        return [w.run for w in how.windows]
    pieces = layout(plan)
    found = [run_shape(shape, pieces), summary_shape(shape, exits(pieces))]
    if inner := middles(pieces):
        certified = plan.strategy == "certified"
        found.append(certificate.stream_shape(shape, inner) if certified else summary_shape(shape, inner))
    return found


def refusal(plan: Plan, inputs: KdaInputs, spec: BackendSpec, backend: Backend) -> str | None:
    """None, or why this call cannot be run by this plan on this backend."""
    shape, options, lengths = inputs.shape, inputs.options, inputs.sequence_lengths()
    if options.pin:
        return "pin=True asks for bits that depend on no plan"
    if lengths is None:
        return "the lengths are known to the device alone (cu_seqlens_cpu is missing, or use_graph is set)"
    if plan.lengths != lengths:
        return f"it is for sequences of {_brief(plan.lengths)} tokens, the call has {_brief(lengths)}"
    if not plan.is_split:
        return None
    if options.return_intermediate_states:
        for n, s in enumerate(plan.pieces):
            if any(cut % options.chunk_size for cut in list(accumulate(s))[:-1]):
                return f"intermediate states need cuts at multiples of chunk_size={options.chunk_size}; sequence {n} has {s}"
    for needed in shapes(plan, shape, backend):
        if missing := sorted(f.value for f in needed.features if f.value not in spec.features):
            return f"backend {spec.name!r} does not declare {', '.join(missing)}"
        if (why := backend.can_run(needed)) is not None:
            return f"backend {spec.name!r} refuses a part of it: {why}"
    return None


def _initial_states(
    plan: Plan, pieces: list[list[Piece]], inputs: KdaInputs, o: Tensor, call: Caller
) -> Tensor:
    """The true initial states of all pieces, [P, HV, K, V] or with `state_v_first` [P, HV, V, K]."""
    shape = inputs.shape
    given = inputs.initial_state
    if given is not None and shape.options.state_v_first:
        given = given.mT
    zeros = inputs.q.new_zeros((shape.HV, shape.K, shape.V), dtype=shape.state_dtype)
    initial = [zeros if given is None else given[n] for n in range(shape.N)]

    ends = exits(pieces)
    first = [initial[p.sequence] if p.index == 0 else None for p in ends]
    B = _by_sequence(ends, exit_states(inputs, ends, first, o, call), shape.N)
    M: list[list[Tensor]] = [[] for _ in range(shape.N)]
    if inner := middles(pieces):
        if plan.strategy == "certified":
            values = certificate.transitions(inputs, inner, B, o, call)
        else:
            values = transitions(inputs, inner, o, call)
        M = _by_sequence(inner, values, shape.N)
    states = torch.stack([state for s in merge(initial, B, M) for state in s])
    states = states.mT if shape.options.state_v_first else states
    return states.to(shape.state_dtype).contiguous()


def _by_sequence(pieces: list[Piece], values: Tensor, N: int) -> list[list[Tensor]]:
    """Values [n, ...] of n pieces, sorted into their sequences, in the order of their index."""
    found: list[list[Tensor]] = [[] for _ in range(N)]
    for p, value in sorted(zip(pieces, values), key=lambda pair: pair[0].start):
        found[p.sequence].append(value)
    return found


def _run_pieces(
    pieces: list[list[Piece]],
    inputs: KdaInputs,
    outputs: KdaOutputs,
    starts: Tensor,
    call: Caller,
) -> None:
    shape, everything = run_shape(inputs.shape, pieces), [p for s in pieces for p in s]
    final, h = None, outputs.intermediate_states
    if outputs.final_state is not None:
        final = starts.new_empty(shape.state_shape)
    if h is not None:  # cuts are multiples of chunk_size: the chunks of the pieces are those of the sequences
        lengths = tuple(p.length for p in everything)
        h = h.flatten(0, 1)[None, : contract.num_chunks(lengths, shape.options.chunk_size)]
    x = piece_inputs(inputs, everything, shape, starts)
    call(x, outputs.o.flatten(0, 1)[None, : shape.T], final, h)
    if final is not None:
        last = list(accumulate(len(s) for s in pieces))
        torch.stack([final[end - 1] for end in last], out=outputs.final_state)


def _brief(lengths: tuple[int, ...]) -> str:
    return (
        str(list(lengths))
        if len(lengths) <= 8
        else f"[{', '.join(map(str, lengths[:8]))}, ...] ({len(lengths)})"
    )
