"""The merge: from what each piece does to a state, the state at the start of every piece.

A piece acts on the state as an affine map, ``S_out = M S_in + B``, for every factor of the recurrence does (the associative
scan of linear recurrences, Blelloch 1990, Martin and Cundy 2018). In torch the scan is carried out in fp64: its cost is
small beside the summaries, and neither TF32 settings nor autocast reach fp64 products. A backend may bring a kernel for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
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


MergeKernel = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""`kda_core.backend.SupportsMerge.merge_segments`."""


def kernel_of(backend: Any) -> MergeKernel | None:
    """The kernel that a backend brings, if it does. To ask takes longer than a launch: keep the answer."""
    return backend.merge_segments if isinstance(backend, SupportsMerge) else None


def merge_pieces(
    kernel: MergeKernel | None,
    bounds: Sequence[int],
    states: Tensor,
    exits: Tensor,
    transitions: Tensor,
    placed: Tensor | None = None,
) -> None:
    """As `merge`, of pieces that lie one after the other; by a kernel where there is one and states are fp32.

    Args:
        kernel: `kernel_of` the backend.
        bounds: where the pieces of each sequence begin, and the number P of all.
        states: [P, HV, K, V]; those at the first pieces are given, the others overwritten.
        exits: [P, HV, K, V], from the given state of first pieces, else from zeros.
        transitions: [P, HV, K, K].
        placed: `bounds`, int32 on the device, if they are there.
    """
    if kernel is not None and states.dtype == torch.float32:
        if placed is None:
            placed = upload(bounds, torch.int32, states.device)[0]
        kernel(states, exits, transitions, placed)
        return
    spans = [slice(a, b) for a, b in pairwise(bounds)]
    merged = merge(
        [states[span.start] for span in spans],
        [exits[span][:-1].unbind() for span in spans],
        [transitions[span][1:-1].unbind() for span in spans],
    )
    states.copy_(torch.stack([state for found in merged for state in found]))


def affine(M: Tensor, S: Tensor, B: Tensor) -> Tensor:
    """M S + B of [HV, K, K] and [HV, K, ...], computed as in `merge`; in the dtype of B."""
    return torch.baddbmm(B.to(torch.float64), M.to(torch.float64), S.to(torch.float64)).to(B.dtype)


def _join(parts: list[Tensor]) -> Tensor:
    """[n, HV, ...] in fp64."""
    return (parts[0].unsqueeze(0) if len(parts) == 1 else torch.stack(parts)).to(torch.float64)
