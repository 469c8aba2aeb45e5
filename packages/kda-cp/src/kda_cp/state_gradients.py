"""Gradients over segments by the backward of any backend, above all those of the states at their starts.

A segment maps the gradient of the state at its end affinely to that at its start, ``dS_in = M^T dS_out + N``. M is the transition
of the forward (`kda_cp.summary`). N is the gradient of the initial state from the outputs alone. It does not depend on that state,
because outputs are affine in it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kda_core import backward, buffers
from kda_core.backend import SupportsBackwardInto
from kda_core.backward import Reserved
from kda_core.contract import KdaGradients, KdaInputs
from kda_core.registry import Choice
from kda_cp.segments import Segment, gradient_shape, packed, segment_inputs, tokens_of

OF_TOKENS = ("q", "k", "v", "g", "beta")


class BackwardCaller:
    """Calls the backward of a backend several times with one memory.

    Args:
        choice: the backend.
        reserved: the memory of the largest call, `kda_core.backward.reserve`; None if the backend allocates it itself.
    """

    def __init__(self, choice: Choice, reserved: Reserved | None) -> None:
        self._choice, self._reserved = choice, reserved

    @classmethod
    def reserve(
        cls, choice: Choice, inputs: KdaInputs, wanted: Collection[str], segments: Sequence[Segment]
    ) -> BackwardCaller:
        """Allocates the memory of a backward, and of `state_gradients` over some of its tokens.

        Args:
            choice: the backend.
            inputs: inputs of the backward.
            wanted: names of the inputs that need a gradient.
            segments: the segments of `state_gradients`; none if it is not called.
        """
        needed = 0
        if segments and isinstance(choice.backend, SupportsBackwardInto):
            needed = choice.backend.backward_workspace_bytes(gradient_shape(inputs.shape, segments))
        return cls(choice, backward.reserve(choice, inputs, wanted, needed))

    def __call__(
        self,
        inputs: KdaInputs,
        grad_o: Tensor,
        grad_final_state: Tensor | None,
        kept: Sequence[Tensor | None] = (None, None),
    ) -> KdaGradients:
        """Returns the gradients of the largest call. They share the memory of this object.

        Args:
            grad_o: [1, T, HV, V].
            grad_final_state: as the final states, or None for zeros.
            kept: the saved states and the residual, each or None.
        """
        return self._run(inputs, grad_o, grad_final_state, self._reserved, kept)

    def state_gradients(self, inputs: KdaInputs, grad_o: Tensor, grad_final_state: Tensor | None) -> Tensor:
        """Returns the gradient of the initial states of a call with at most as many tokens, in memory of its own."""
        memory = self._reserved
        if memory is not None:
            # The gradients of tokens are not used. They go to the memory of those of the largest call.
            scratch: dict[str, Any] = {
                n: packed(getattr(memory.gradients, n))[:, : inputs.shape.T] for n in OF_TOKENS
            }
            assert inputs.initial_state is not None
            scratch["initial_state"] = torch.empty_like(inputs.initial_state)
            if self._choice.spec.abi < (2, 2):  # expects all gradients
                like = buffers.allocate_gradients(inputs, ("A_log", "dt_bias"))
                scratch |= {"A_log": like.A_log, "dt_bias": like.dt_bias}
            else:
                scratch |= {"A_log": None, "dt_bias": None}
            memory = memory._replace(gradients=replace(memory.gradients, **scratch))
        found = self._run(inputs, grad_o, grad_final_state, memory).initial_state
        assert found is not None  # the call has initial states
        return found

    def _run(
        self,
        inputs: KdaInputs,
        grad_o: Tensor,
        grad_final_state: Tensor | None,
        memory: Reserved | None,
        kept: Sequence[Tensor | None] = (None, None),
    ) -> KdaGradients:
        final = None if grad_final_state is None else buffers.aligned(grad_final_state)
        # A backend may use autograd, which may be off here.
        with torch.inference_mode(False), torch.no_grad():
            return backward.run(self._choice, inputs, buffers.aligned(grad_o), final, memory, kept)


def state_gradients(
    inputs: KdaInputs,
    segments: Sequence[Segment],
    grad_o: Tensor,
    grad_ends: Tensor | None,
    call: BackwardCaller,
) -> Tensor:
    """Returns the gradients of the states at the starts of n segments, [n, HV, K, V].

    Args:
        inputs: inputs of the whole call. Its initial states are not read.
        segments: the n segments.
        grad_o: gradient of the output of the whole call, [B, T, HV, V].
        grad_ends: gradients of the states at the ends of the segments, [n, HV, K, V], or None for zeros. The result for zeros
            is N.
        call: calls the backward of a backend.
    """
    shape = gradient_shape(inputs.shape, segments)
    zeros = inputs.q.new_zeros(shape.state_shape, dtype=shape.state_dtype)
    x = segment_inputs(inputs, segments, shape, zeros)
    return call.state_gradients(x, tokens_of(grad_o, segments), grad_ends)
