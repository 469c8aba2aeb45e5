"""Summaries of pieces over any backend that takes an initial state and returns a final one.

A piece maps a state S to ``M S + B``, M [K,K] = prod (I - beta k k^T) Diag(e^g), per value head. From a forward pass that
returns final states::

    B = final(v, S=0),   M = final(v=0, S=I)

V columns of M a pass: one for V = K, one with the identity padded by zero columns for V > K, ceil(K/V) for V < K. Never
``final(v, S=I) - B``, which cancels. Both are as exact as the backend's own final states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kda_core.contract import KdaInputs
from kda_cp.pieces import Caller, Piece, piece_inputs, rows, summary_shape


def exit_states(
    inputs: KdaInputs, pieces: Sequence[Piece], initial: Sequence[Tensor | None], o: Tensor, call: Caller
) -> Tensor:
    """Final states [n, HV, K, V] of n pieces, each started from its state in `initial`, [HV, K, V] or None for zeros.

    `o` [B, T, HV, V] is scratch memory: its first rows are overwritten.
    """
    shape = summary_shape(inputs.shape, pieces)
    start = inputs.q.new_zeros(shape.state_shape, dtype=shape.state_dtype)
    for row, state in zip(start, initial):
        if state is not None:
            row.copy_(state)
    final = torch.empty_like(start)
    k = rows(inputs.k, pieces)  # also in place of q: nobody reads the outputs
    call(piece_inputs(inputs, pieces, shape, start, q=k, k=k), o.flatten(0, 1)[None, : shape.T], final)
    return final


def transitions(inputs: KdaInputs, pieces: Sequence[Piece], o: Tensor, call: Caller) -> Tensor:
    """The transitions M [n, HV, K, K] of n pieces; `o` as in `exit_states`."""
    shape = summary_shape(inputs.shape, pieces)
    k, g, beta = (rows(x, pieces) for x in (inputs.k, inputs.g, inputs.beta))
    v = inputs.v.new_zeros((1, shape.T, shape.HV, shape.V))

    def final_states(start: Tensor) -> Tensor:
        final = torch.empty_like(start)
        x = piece_inputs(inputs, pieces, shape, start, q=k, k=k, v=v, g=g, beta=beta)
        call(x, o.flatten(0, 1)[None, : shape.T], final)
        return final

    like = inputs.q.new_empty(0, dtype=shape.state_dtype)
    return identity_pass(final_states, like, len(pieces), shape.HV, shape.K, shape.V)


def identity_pass(
    final_states: Callable[[Tensor], Tensor], like: Tensor, n: int, HV: int, K: int, V: int
) -> Tensor:
    """M [n, HV, K, K] from a function that maps initial states [n, HV, K, V] to final ones with v = 0."""
    columns = torch.eye(K, -(-K // V) * V, dtype=like.dtype, device=like.device)
    slabs = [final_states(c.expand(n, HV, K, V).contiguous()) for c in columns.split(V, dim=1)]
    return (slabs[0] if len(slabs) == 1 else torch.cat(slabs, dim=-1))[..., :K]
