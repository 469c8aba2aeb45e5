"""Calls of `kda_core.chunk_kda` like an earlier one, which need none of its checks.

A call is known if a launch was prepared (`kda_core.backend.SupportsPrepare`) for an earlier call with the same options, the same
environment, and tensors of the same metadata. One call of C++ compares the metadata (`kda_core.torch_private.metadata_guard`). Only
addresses may differ. A known call checks their alignment, allocates its outputs, and launches. If the host knows the lengths of packed
sequences, they must be the same too, as in the layers of a model. All other calls go through `kda_core.ops`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor

from kda_core import buffers
from kda_core import call as calls
from kda_core.arguments import N_TENSORS, Arguments
from kda_core.backend import PreparedLaunch
from kda_core.contract import ALIGNMENT, HALF_DTYPES
from kda_core.recent import Recent
from kda_core.registry import notify
from kda_core.torch_private import current_device, is_dispatcher_idle, metadata_guard

MOST_ALIKE = 4
"""How many known calls differ only in what their key does not hold, such as strides and options."""


@dataclass(frozen=True)
class Known:
    """A call that was made before. It holds no tensor of the caller.

    Attributes:
        values: the arguments that are no tensors.
        types: their types, because ``1 == True``.
        environment: as in `kda_core.call.look_up`.
        present: returns the tensors of arguments without those that are None here.
        is_like: whether such tensors are like those of the call.
        offsets: the contents of cu_seqlens that the host knows, or None.
        lengths: those of the sequences, or None.
        requires_grad: whether one of them requires grad. It only matters while grad mode is on.
        call: what its metadata decided.
        launch: the backend's.
        state, workspace: examples of the final states and of the workspace (`kda_core.buffers.example`), or None.
    """

    values: tuple[Any, ...]
    types: tuple[type, ...]
    environment: tuple[Any, ...]
    present: Callable[[Arguments], tuple[Tensor, ...]]
    is_like: Callable[..., bool]
    offsets: list[int] | None
    lengths: tuple[int, ...] | None
    requires_grad: bool
    call: calls.ResolvedCall
    launch: PreparedLaunch
    state: Tensor | None
    workspace: Tensor | None

    def has_options(self, values: tuple[Any, ...]) -> bool:
        """Returns whether these are the same options: usually the same objects."""
        return all(map(is_, values, self.values)) or (
            tuple(map(type, values)) == self.types and values == self.values
        )


KNOWN: Recent[tuple[Known, ...]] = Recent(calls.MAX_CALLS, lambda key, known: len(known))
"""Known calls by the size of q and which tensors are None, in each tuple the newest first."""

_VALUES = slice(N_TENSORS, -1)  # without `saves`, which does not affect the look-up


def run(args: Arguments) -> tuple[Tensor, Tensor | None] | None:
    """Makes a known call and returns o and the final states. If the call is not known, returns None and does nothing. Must not be called while
    `torch.compiler.is_compiling`. Types of arguments need not have been checked."""
    tensors: Any = args[:N_TENSORS]
    q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu = tensors
    absent = A_log is None, dt_bias is None, initial_state is None, cu_seqlens is None, cu_seqlens_cpu is None
    try:
        alike = KNOWN.get((q.shape, *absent))
    except (AttributeError, TypeError, RuntimeError):  # not a tensor, or one without a shape
        return None
    if alike is None or not is_dispatcher_idle():
        return None
    values: Any = args[_VALUES]
    offsets = None
    for known in alike:
        if known.has_options(values) and known.is_like(*known.present(args)):
            if known.offsets is None:
                break
            if offsets is None:
                offsets = (cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu).tolist()
            if known.offsets == offsets:
                break
    else:
        return None
    call = known.call
    if known.environment != calls.environment(args) or (known.requires_grad and torch.is_grad_enabled()):
        return None
    if call.planner is not None and not _is_direct(call, known.lengths):
        return None
    addresses = a, b, c, d, e, f, g_, h, i = (
        q.data_ptr(), k.data_ptr(), v.data_ptr(), g.data_ptr(), beta.data_ptr(),
        0 if A_log is None else A_log.data_ptr(), 0 if dt_bias is None else dt_bias.data_ptr(),
        0 if initial_state is None else initial_state.data_ptr(), 0 if cu_seqlens is None else cu_seqlens.data_ptr(),
    )  # fmt: skip
    if (a | b | c | d | e | f | g_ | h | i) % ALIGNMENT:
        return None
    o = torch.empty_like(v)
    state = workspace = None
    if known.state is not None:
        state = buffers.like_example(known.state)
    if known.workspace is not None:
        workspace = torch.empty_like(known.workspace)
    outputs = (
        o.data_ptr(), 0 if state is None else state.data_ptr(), 0 if workspace is None else workspace.data_ptr(),
    )  # fmt: skip
    device = q.get_device()
    if device < 0 or device == current_device():
        known.launch(o, addresses, *outputs)
    else:
        with torch.cuda.device(device):
            known.launch(o, addresses, *outputs)
    notify(call.choice.spec.name, call.entry, call.shape.device_type)
    return o, state


def _is_direct(call: calls.ResolvedCall, lengths: tuple[int, ...] | None) -> bool:
    """Returns whether the planner has already answered that this call is direct."""
    answer = calls.ANSWERS.get((call.number, lengths, False))
    return answer is not None and answer[0] is None


def remember(args: Arguments, call: calls.ResolvedCall) -> None:
    """Makes calls like this one known, if the backend prepares their launch. Nothing is launched.

    Args:
        args: with checked types, of a call that was made.
        call: what its metadata decided.
    """
    tensors = [x for x in args.tensors if x is not None]
    if call.entry != "chunk_fwd" or call.backward is not None or call.checks_contents:
        return
    if any(x is not None and x.dtype in HALF_DTYPES for x in (args.A_log, args.dt_bias)):
        return  # core converts them in every call
    if len(set(map(id, tensors))) < len(tensors):
        return  # the comparison takes no tensor twice
    if not all(x.is_contiguous() and _is_aligned(x) for x in tensors):
        return
    host = args.cu_seqlens if args.cu_seqlens_cpu is None else args.cu_seqlens_cpu
    offsets = None if host is None or host.device.type != "cpu" else host.tolist()
    key = (args.q.shape, *(x is None for x in args.tensors[5:]))
    values: Any = args[_VALUES]
    alike, environment = KNOWN.get(key) or (), calls.environment(args)
    alike = tuple(known for known in alike if known.environment == environment)
    if any(
        known.has_options(values) and known.is_like(*tensors) and known.offsets == offsets for known in alike
    ):
        return
    inputs = buffers.make_inputs(args.tensors, call.shape)
    lengths = None if inputs.cu_seqlens is None else inputs.sequence_lengths()
    if call.planner is not None and not _is_direct(call, lengths):
        return
    is_like = metadata_guard(tensors)
    if is_like is None or (launch := calls.prepared(call, inputs)) is None:
        return
    shape, size = call.shape, call.workspace_bytes
    found = Known(
        values,
        tuple(map(type, values)),
        environment,
        itemgetter(*(i for i, x in enumerate(args.tensors) if x is not None)),
        is_like,
        offsets,
        lengths,
        any(x.requires_grad for x in tensors),
        call,
        launch,
        buffers.example(shape.state_shape, shape.state_dtype, args.q)
        if shape.options.output_final_state
        else None,
        buffers.example((size,), torch.uint8, args.q) if size else None,
    )
    KNOWN.put(key, (found, *alike)[:MOST_ALIKE])


def _is_aligned(x: Tensor) -> bool:
    """Returns whether a tensor has memory, at a multiple of `ALIGNMENT` bytes."""
    address = x.data_ptr()
    return address != 0 and address % ALIGNMENT == 0
