"""Summaries of segments over any backend that accepts an initial state and returns a final one.

A segment maps a state S to ``M S + B``, with the transition ``M = prod (I - beta k k^T) Diag(e^g)``, [K, K] per value head, over
its tokens. Forward calls that return final states give both::

    B = final(v, S=0),   M = final(v=0, S=I)

One call gives V columns of M, so M takes ceil(K/V) calls; for V > K the identity is padded by zero columns. ``final(v, S=I) - B``
is not used, because the subtraction cancels digits. Both results are as exact as the backend's final states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kda_core.contract import KdaInputs
from kda_cp.segments import Caller, Segment, segment_inputs, summary_shape, tokens_of


def exit_states(
    inputs: KdaInputs, segments: Sequence[Segment], initial: Sequence[Tensor | None], o: Tensor, call: Caller
) -> Tensor:
    """Returns the exit states [n, HV, K, V] of n segments.

    Args:
        inputs: inputs of the whole call.
        segments: the n segments.
        initial: the state at the start of each segment, [HV, K, V], or None for zeros.
        o: [B, T, HV, V], scratch memory. The first tokens are overwritten.
        call: calls the backend.
    """
    shape = summary_shape(inputs.shape, segments)
    start = inputs.q.new_zeros(shape.state_shape, dtype=shape.state_dtype)
    for own, state in zip(start, initial):
        if state is not None:
            own.copy_(state)
    final = torch.empty_like(start)
    k = tokens_of(inputs.k, segments)  # also serves as q, because only final states are used
    call(segment_inputs(inputs, segments, shape, start, q=k, k=k), o.flatten(0, 1)[None, : shape.T], final)
    return final


def transitions(inputs: KdaInputs, segments: Sequence[Segment], o: Tensor, call: Caller) -> Tensor:
    """Returns the transitions M [n, HV, K, K] of n segments; arguments as in `exit_states`."""
    shape = summary_shape(inputs.shape, segments)
    k, g, beta = (tokens_of(x, segments) for x in (inputs.k, inputs.g, inputs.beta))
    v = inputs.v.new_zeros((1, shape.T, shape.HV, shape.V))

    def final_states(start: Tensor) -> Tensor:
        final = torch.empty_like(start)
        x = segment_inputs(inputs, segments, shape, start, q=k, k=k, v=v, g=g, beta=beta)
        call(x, o.flatten(0, 1)[None, : shape.T], final)
        return final

    like = inputs.q.new_empty(0, dtype=shape.state_dtype)
    return transitions_from(final_states, like, len(segments), shape.HV, shape.K, shape.V)


def transitions_from(
    final_states: Callable[[Tensor], Tensor], like: Tensor, n: int, HV: int, K: int, V: int
) -> Tensor:
    """Returns M [n, HV, K, K] by calls of `final_states` on the columns of the identity.

    Args:
        final_states: maps initial states [n, HV, K, V] to final ones, with v = 0.
        like: any tensor with the dtype and the device of states.
        n, HV, K, V: number of segments, value heads and head dimensions.
    """
    columns = torch.eye(K, -(-K // V) * V, dtype=like.dtype, device=like.device)
    slabs = [final_states(c.expand(n, HV, K, V).contiguous()) for c in columns.split(V, dim=1)]
    return (slabs[0] if len(slabs) == 1 else torch.cat(slabs, dim=-1))[..., :K]
