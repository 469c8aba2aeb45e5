"""One call of a backend's backward, by the interface that the backend has.

`reserve` allocates what core provides, and `run` calls the backend. They are separate, because context parallelism over several
ranks allocates before the ranks agree on a call.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, cast

from torch import Tensor

from kda_core.backend import SupportsBackward, SupportsBackwardInto, SupportsSavedStates
from kda_core.buffers import allocate_gradients, allocate_workspace
from kda_core.contract import FLOAT_TENSORS, Feature, KdaGradients, KdaInputs
from kda_core.registry import Choice

MAY_BE_LEFT_OUT = frozenset(("A_log", "dt_bias", "initial_state"))
"""The inputs whose gradients a backend computes only where they are needed."""


class Reserved(NamedTuple):
    """The memory that `chunk_bwd_into` writes.

    Attributes:
        gradients: uninitialised, None for those that autograd does not need.
        workspace: [bytes] uint8.
    """

    gradients: KdaGradients
    workspace: Tensor


def reserve(
    choice: Choice, inputs: KdaInputs, wanted: Collection[str], workspace_bytes: int = 0
) -> Reserved | None:
    """Returns the memory of a backward; None if the backend allocates it itself (`SupportsBackward`).

    Args:
        choice: the backend. The registry has checked that it has a backward.
        wanted: names of the inputs that need a gradient.
        workspace_bytes: the least size of the workspace.
    """
    backend = choice.backend
    if not isinstance(backend, SupportsBackwardInto):
        return None
    names = FLOAT_TENSORS
    if choice.spec.abi >= (2, 2):  # older backends expect all of them
        names = tuple(n for n in FLOAT_TENSORS if n in wanted or n not in MAY_BE_LEFT_OUT)
    needed = max(workspace_bytes, backend.backward_workspace_bytes(inputs.shape))
    return Reserved(allocate_gradients(inputs, names), allocate_workspace(needed, inputs.q))


def run(
    choice: Choice,
    inputs: KdaInputs,
    grad_o: Tensor,
    grad_final_state: Tensor | None,
    reserved: Reserved | None,
    kept: Sequence[Tensor | None] = (None, None),
) -> KdaGradients:
    """Returns the gradients of sum(o * grad_o) + sum(final_state * grad_final_state).

    Args:
        choice: the backend.
        grad_o, grad_final_state: as `SupportsBackwardInto.chunk_bwd_into` expects them: contiguous and aligned.
        reserved: what `reserve` returned for this backend; it is overwritten, and the result shares its memory.
        kept: the saved states and the residual, each or None.
    """
    if reserved is None:
        return cast(SupportsBackward, choice.backend).chunk_bwd(inputs, grad_o, grad_final_state)
    backend, into = cast(SupportsSavedStates, choice.backend), (reserved.gradients, reserved.workspace)
    if Feature.SAVED_STATES.value not in choice.spec.features:
        kept = ()
    backend.chunk_bwd_into(inputs, grad_o, grad_final_state, *into, *kept)
    return reserved.gradients
