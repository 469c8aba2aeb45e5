"""The merge: from what each piece does to a state, the state at the start of every piece.

A piece acts on the state as an affine map, ``S_out = M S_in + B``, for every factor of the recurrence does (the associative
scan of linear recurrences, Blelloch 1990, Martin and Cundy 2018). In torch the scan is carried out in fp64: its cost is
small beside the summaries, and neither TF32 settings nor autocast reach fp64 products. A backend may bring a kernel for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from kda_core.backend import SupportsMerge
from kda_cp.pieces import upload


def merge(
    initial: Sequence[Tensor], exits: Sequence[Sequence[Tensor]], transitions: Sequence[Sequence[Tensor]]
) -> list[list[Tensor]]:
    """The state at the start of every piece of every sequence. Nothing is read by the host.

    Args:
        initial: for each sequence, the state before its first piece, [HV, K, V].
        exits: for each sequence of P pieces, P - 1 states [HV, K, V]: that after the first piece, started from `initial`,
            then those after the others but the last, started from zero (B).
        transitions: for each sequence, the P - 2 transitions M [HV, K, K] of the pieces between the first and the last;
            none for P < 3.

    Returns:
        For each sequence P states [HV, K, V], fp64.
    """
    states = [
        [s.to(torch.float64), *(e.to(torch.float64) for e in ends[:1])] for s, ends in zip(initial, exits)
    ]
    for step in range(1, max(map(len, exits), default=0)):
        live = [n for n, ends in enumerate(exits) if len(ends) > step]
        S, B = _join([states[n][step] for n in live]), _join([exits[n][step] for n in live])
        M = _join([transitions[n][step - 1] for n in live])
        after = torch.baddbmm(B.flatten(0, 1), M.flatten(0, 1), S.flatten(0, 1)).view_as(S)
        for n, state in zip(live, after.unbind()):
            states[n].append(state)
    return states


def merge_by(
    backend: Any,
    initial: Sequence[Tensor],
    exits: Sequence[Sequence[Tensor]],
    transitions: Sequence[Sequence[Tensor]],
) -> list[list[Tensor]]:
    """As `merge`, but by the backend's kernel where it has one (`kda_core.backend.SupportsMerge`): in one launch, and in
    fp32, so that fp64 transitions are not given to it. They are merged as if they were states, which asks for K = V."""
    steps = [m for Ms in transitions for m in Ms]
    fits = all(m.dtype == torch.float32 and m.shape == initial[0].shape for m in steps)
    if not steps or not fits or not isinstance(backend, SupportsMerge):
        return merge(initial, exits, transitions)
    bounds = list(accumulate((len(ends) + 1 for ends in exits), initial=0))
    # Places for the transition of a first piece, and for both of a last one, which the result does not depend on.
    zero = torch.zeros_like(steps[0])
    B = torch.stack([e.to(torch.float32) for ends in exits for e in (*ends, zero)])
    M = torch.stack([m for ends, Ms in zip(exits, transitions) for m in (*[zero][: len(ends)], *Ms, zero)])
    states = torch.zeros_like(B)
    for at, state in zip(bounds, initial):
        states[at].copy_(state)
    backend.merge_segments(states, B, M, upload(bounds, torch.int32, B.device)[0])
    return [list(states[a:b].unbind()) for a, b in pairwise(bounds)]


def _join(parts: list[Tensor]) -> Tensor:
    """[n, HV, ...] in fp64."""
    return (parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)).to(torch.float64)
