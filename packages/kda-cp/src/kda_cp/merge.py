"""The merge: computes the state at the start of every segment from the summaries of the segments.

A segment maps the state affinely, ``S_out = M S_in + B``, because each step of the recurrence does (the associative scan of
linear recurrences, Blelloch 1990, Martin and Cundy 2018). Gradients of states follow the transposed map from the last segment to the first,
``dS_in = M^T dS_out + N``, where N is the gradient that comes from the outputs of the segment.

torch computes the scan in fp64: that costs little compared with the summaries, and neither TF32 settings nor autocast apply to
fp64 products. A backend may provide a kernel for the scan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from kda_core.backend import SupportsMerge
from kda_cp.upload import upload


def merge(
    initial: Sequence[Tensor], exits: Sequence[Sequence[Tensor]], transitions: Sequence[Sequence[Tensor]]
) -> list[list[Tensor]]:
    """Returns the state at the start of every segment of every sequence. The host reads no tensor.

    Args:
        initial: for each sequence, the state before its first segment, [HV, K, V].
        exits: for each sequence of P segments, the P - 1 exit states [HV, K, V] of all segments but the last: of the
            first segment from `initial`, of the others from zeros (B).
        transitions: for each sequence, the P - 2 transitions M [HV, K, K] of the segments between the first and the
            last; none for P < 3.

    Returns:
        For each sequence P states [HV, K, V], fp64.
    """
    states = [
        [s.to(torch.float64), *(e.to(torch.float64) for e in ends[:1])] for s, ends in zip(initial, exits)
    ]
    for step in range(1, max(map(len, exits), default=0)):
        live = [n for n, ends in enumerate(exits) if len(ends) > step]
        S, B = _stack([states[n][step] for n in live]), _stack([exits[n][step] for n in live])
        M = _stack([transitions[n][step - 1] for n in live])
        after = torch.baddbmm(B.flatten(0, 1), M.flatten(0, 1), S.flatten(0, 1)).view_as(S)
        for n, state in zip(live, after.unbind()):
            states[n].append(state)
    return states


MergeKernel = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""`kda_core.backend.SupportsMerge.merge_segments`."""


def merge_kernel(backend: Any) -> MergeKernel | None:
    """Returns the merge kernel of a backend, or None.

    Callers cache the result, because the check takes the host longer than a launch.
    """
    return backend.merge_segments if isinstance(backend, SupportsMerge) else None


def merge_segments(
    kernel: MergeKernel | None,
    bounds: Sequence[int],
    states: Tensor,
    exits: Tensor,
    transitions: Tensor,
    device_bounds: Tensor | None = None,
) -> None:
    """Merges P segments that lie one after the other, in place. It uses the kernel for fp32 states, else `merge`.

    Args:
        kernel: the `merge_kernel` of the backend; None if it has none.
        bounds: the number of the first segment of each sequence, and P.
        states: [P, HV, K, V], the states at the starts of the segments. Those of first segments are inputs; the others are
            overwritten.
        exits: [P, HV, K, V], exit states: of first segments from their given states, of the others from zeros.
        transitions: [P, HV, K, K].
        device_bounds: `bounds`, int32 on the device; None to upload them.
    """
    if kernel is not None and states.dtype == torch.float32:
        if device_bounds is None:
            device_bounds = upload(bounds, torch.int32, states.device).device
        kernel(states, exits, transitions, device_bounds)
        return
    spans = [slice(a, b) for a, b in pairwise(bounds)]
    merged = merge(
        [states[span.start] for span in spans],
        [exits[span][:-1].unbind() for span in spans],
        [transitions[span][1:-1].unbind() for span in spans],
    )
    states.copy_(torch.stack([state for found in merged for state in found]))


def merge_segments_backward(
    kernel: MergeKernel | None, bounds: Sequence[int], ends: Tensor, starts: Tensor, transitions: Tensor
) -> None:
    """Merges the gradients of the states of P segments that lie one after the other, in place, from the last to the first.

    Args:
        kernel, bounds, transitions: as in `merge_segments`, which computes this merge, too. The transitions are those of the
            forward, M; those of the first and of the last segment of a sequence are not used.
        ends: [P, HV, K, V], the gradients of the states at the ends of the segments. Those of last segments are inputs; the
            others are overwritten.
        starts: [P, HV, K, V], the gradients of the states at the starts of the segments: of last segments from their given
            `ends`, of the others from zeros (N). Those of first segments are not used.
    """
    # In reverse order, a last segment is a first one, M^T replaces M, and N replaces B.
    reversed_bounds = [bounds[-1] - bound for bound in reversed(bounds)]
    merged, exits, M = (x.flip(0).contiguous() for x in (ends, starts, transitions.mT))
    merge_segments(kernel, reversed_bounds, merged, exits, M)
    ends.copy_(merged.flip(0))


def affine(M: Tensor, S: Tensor, B: Tensor) -> Tensor:
    """Returns M S + B in the dtype of B, computed in fp64. M: [HV, K, K]; S and B: [HV, K, n]."""
    return torch.baddbmm(B.to(torch.float64), M.to(torch.float64), S.to(torch.float64)).to(B.dtype)


def _stack(tensors: list[Tensor]) -> Tensor:
    """Returns [n, HV, ...] in fp64."""
    return (tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(tensors)).to(torch.float64)
