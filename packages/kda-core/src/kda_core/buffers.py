"""The memory of a call: inputs in the form that backends require, and the outputs that they write."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core.contract import (
    ALIGNMENT,
    FLOAT_TENSORS,
    HALF_DTYPES,
    KdaGradients,
    KdaInputs,
    KdaJournal,
    KdaOutputs,
    KdaPool,
    ProblemShape,
    Tensors,
    intermediate_states_count,
    intermediate_states_shape,
    unchecked,
)
from kda_core.validate import check_layouts


class GivenOutputs(NamedTuple):
    """The tensors that the caller passed to be written, each or None; fields as in `KdaOutputs`."""

    o: Tensor | None = None
    final_state: Tensor | None = None
    intermediate_states: Tensor | None = None
    workspace: Tensor | None = None


NOTHING_GIVEN = GivenOutputs()


def make_inputs(
    tensors: Sequence[Tensor | None],
    shape: ProblemShape,
    *,
    align: bool = True,
    strided: bool = False,
    pool: KdaPool | None = None,
    journal: KdaJournal | None = None,
) -> KdaInputs:
    """Returns the tensors of a call in the form that backends require.

    Copies a tensor that is not contiguous or that does not start at a multiple of `ALIGNMENT`, such as a slice of a buffer.

    Args:
        tensors: the fields of `Tensors`, in order.
        shape: their `kda_core.validate.problem_shape`.
        align: False for tensors without memory (fake ones).
        strided: whether the backend declares `Feature.STRIDED`; views that it can read are then not copied.
        pool, journal: those of the call.

    Raises:
        ArgumentError: a tensor without strides (sparse, nested).
    """
    try:
        q, k, v, g, beta, A_log, dt_bias, initial_state, cu_seqlens, cu_seqlens_cpu = [
            x
            if x is None or (x.is_contiguous() and not (align and (x.data_ptr() or 1) % ALIGNMENT))
            else (x if strided and _is_strided(x, tensors) else _copied(x, align))
            for x in tensors
        ]
    except RuntimeError:  # torch's error for a tensor without strides does not name the argument
        check_layouts(Tensors._fields, tensors)
        raise
    if A_log is not None and (A_log.dim() != 1 or A_log.dtype in HALF_DTYPES):
        A_log = _widened(A_log).view(shape.HV)
    if dt_bias is not None and (dt_bias.dim() == 1 or dt_bias.dtype in HALF_DTYPES):
        dt_bias = _widened(dt_bias).view(shape.HV, shape.K)
    values = {
        "q": q, "k": k, "v": v, "g": g, "beta": beta, "A_log": A_log, "dt_bias": dt_bias,
        "initial_state": initial_state, "cu_seqlens": cu_seqlens, "cu_seqlens_cpu": cu_seqlens_cpu, "shape": shape,
        "pool": pool, "journal": journal, "segments": None,
    }  # fmt: skip
    return unchecked(KdaInputs, values)


def are_in_place(tensors: Sequence[Tensor | None], strided: bool) -> bool:
    """Returns whether `make_inputs` copies none of these tensors, and all have memory."""
    A_log, dt_bias = tensors[_N_STRIDED : _N_STRIDED + 2]
    return not any(x is not None and x.dtype in HALF_DTYPES for x in (A_log, dt_bias)) and all(
        x is None
        or (x.is_contiguous() and (at := x.data_ptr()) != 0 and not at % ALIGNMENT)
        or (strided and x.data_ptr() != 0 and _is_strided(x, tensors))
        for x in tensors[:-1]  # the last one is cu_seqlens_cpu
    )


_N_STRIDED = Tensors._fields.index("beta") + 1


def _is_strided(x: Tensor, tensors: Sequence[Tensor | None]) -> bool:
    """Returns whether `x` is one of q, k, v, g, beta among `tensors`, in the form of `Feature.STRIDED`, see `KdaInputs`."""
    if not any(x is y for y in tensors[:_N_STRIDED]):
        return False
    sizes, strides = x.shape, x.stride()
    inner = 1
    for size, stride in zip(reversed(sizes[2:]), reversed(strides[2:])):
        if size != 1 and stride != inner:
            return False
        inner *= size
    if len(sizes) == 3:  # beta
        return True
    outer = (stride * x.itemsize for size, stride in zip(sizes[:2], strides) if size != 1)
    return not any(n % ALIGNMENT for n in (x.data_ptr(), *outer))


def aligned(x: Tensor) -> Tensor:
    """Returns `x`, or a copy that is contiguous and starts at a multiple of `ALIGNMENT`."""
    return x if x.is_contiguous() and not (x.data_ptr() or 1) % ALIGNMENT else _copied(x, True)


def allocate_gradients(inputs: KdaInputs, names: Collection[str] = FLOAT_TENSORS) -> KdaGradients:
    """Returns uninitialised gradients of the floating-point inputs `names`, with their shapes and dtypes, and None for others.
    They are zeros if tokens may belong to no sequence (`ProblemShape.may_end_early`)."""
    new = torch.zeros_like if inputs.shape.may_end_early else torch.empty_like
    tensors = {name: getattr(inputs, name) if name in names else None for name in FLOAT_TENSORS}
    gradients: dict[str, Any] = {name: None if x is None else new(x) for name, x in tensors.items()}
    return KdaGradients(**gradients)


def allocate_workspace(size: int, like: Tensor) -> Tensor:
    """Returns `size` bytes of uninitialised scratch memory, on the device of `like`."""
    return like.new_empty(size, dtype=torch.uint8)


def allocate_saved(shape: ProblemShape, like: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns uninitialised `KdaOutputs.saved_states` and `KdaOutputs.residual`, on the device of `like`."""
    states = like.new_empty(shape.saved_states_shape, dtype=shape.saved_states_dtype)
    if not shape.options.disable_recompute:
        return states, None
    return states, like.new_empty((shape.B, shape.T, shape.HV, shape.V), dtype=torch.bfloat16)


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALF_DTYPES else x


def _copied(x: Tensor, align: bool) -> Tensor:
    """Returns `x` contiguous and aligned. A tensor without an address is empty, or zeros that torch has not yet written to
    memory; neither needs alignment."""
    x = x.contiguous()
    return x.clone() if align and (x.data_ptr() or 1) % ALIGNMENT else x


def has_other_rows(inputs: KdaInputs) -> bool:
    """Returns whether o may have rows of no sequence that must be zero, as in FLA: those of a packed decode call."""
    s = inputs.shape
    return s.options.recurrent and s.varlen and sum(inputs.sequence_lengths() or ()) < s.T


def allocate_outputs(
    inputs: KdaInputs, workspace_bytes: int = 0, given: GivenOutputs = NOTHING_GIVEN, *, saves: bool = False
) -> KdaOutputs:
    """Returns the outputs of a call: the `given` tensors, and uninitialised ones for what else the call asks for.

    A packed decode call whose sequences may end before T gets zeros for o, as in FLA.

    Args:
        workspace_bytes: size of the workspace; 0 for none.
        saves: whether the backend is to save states for the backward.

    Raises:
        ArgumentError: as `kda_core.contract.intermediate_states_count`.
    """
    s = inputs.shape
    o, state, h, workspace = given
    if o is None:
        # v has the shape of o, and `empty_like` is the fastest way to allocate it
        v = inputs.v
        o = torch.empty_like(v) if v.is_contiguous() else v.new_empty(v.shape)
        if has_other_rows(inputs):
            o.zero_()
    if state is None and s.options.output_final_state:
        state = inputs.q.new_empty(s.state_shape, dtype=s.state_dtype)
    if h is None and s.options.return_intermediate_states:
        wanted = intermediate_states_shape(s, intermediate_states_count(inputs))
        h = inputs.q.new_empty(wanted, dtype=torch.bfloat16)
    if workspace is None and workspace_bytes:
        workspace = allocate_workspace(workspace_bytes, inputs.q)
    saved, residual = allocate_saved(s, inputs.q) if saves else (None, None)
    values = {
        "o": o, "final_state": state, "intermediate_states": h, "workspace": workspace,
        "saved_states": saved, "residual": residual,
    }  # fmt: skip
    return unchecked(KdaOutputs, values)
