"""Checks of the values of a call's inputs, for debugging: ``KDA_CHECK=1``.

All other checks of kda-core read metadata or host memory. These read tensors on the GPU and wait for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_core.contract import SAFE_GATE_BOUND, KdaInputs
from kda_core.errors import ArgumentError
from kda_core.offsets import check_copy, lengths_of
from kda_core.slots import initial_states

BETA_BOUND = 2.0
"""The largest beta. A token scales the state along k by 1 - beta, so that a larger beta makes the state grow."""


def check_contents(inputs: KdaInputs) -> None:
    """Checks the offsets in cu_seqlens, that inputs are finite, and that decays and beta are in range.

    A decay may be -inf, which resets its channel. Tokens outside of every sequence are not checked. During the capture of a
    CUDA graph nothing is checked, because the host cannot wait for a captured stream.

    Raises:
        ArgumentError: the message names the argument, what was expected, and value and index of the first violation.
    """
    if inputs.q.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    options, used = inputs.options, _tokens_used(inputs)
    for name in ("q", "k", "v", "g", "beta"):
        x = getattr(inputs, name)[:, :used]
        if name == "g" and not options.use_gate_in_kernel:
            if options.safe_gate:
                expected = f"values in [{SAFE_GATE_BOUND:g}, 0] with safe_gate=True"
                _expect(name, expected, x, (x <= 0) & (x >= SAFE_GATE_BOUND))
            _expect(name, "values of at most 0 (it is the log of the decay)", x, x <= 0)
        elif name == "beta" and not options.use_beta_sigmoid_in_kernel:
            _expect(name, f"values in [0, {BETA_BOUND:g}]", x, (x >= 0) & (x <= BETA_BOUND))
        else:
            _expect(name, "finite values", x, x.isfinite())
    for name in ("A_log", "dt_bias", "initial_state"):
        x = getattr(inputs, name)
        if name == "initial_state" and inputs.pool is not None:
            x = initial_states(inputs.pool, inputs.shape.state_dtype)
        if x is not None:
            _expect(name, "finite values", x, x.isfinite())


def _tokens_used(inputs: KdaInputs) -> int:
    """Returns how many tokens of a batch row belong to a sequence, and checks cu_seqlens on any device."""
    if inputs.cu_seqlens is None:
        return inputs.shape.T
    offsets, s = inputs.cu_seqlens.tolist(), inputs.shape
    lengths_of("cu_seqlens", offsets, s.T, may_end_early=s.may_end_early)
    # with use_graph, replays change only the values on the device
    if inputs.cu_seqlens_cpu is not None and not inputs.options.use_graph:
        check_copy(offsets, inputs.cu_seqlens_cpu.tolist())
    return offsets[-1]


def _expect(name: str, expected: str, x: Tensor, good: Tensor) -> None:
    """Raises an error for the first element of `x` that is not `good`."""
    if not good.all():
        at = (~good).nonzero()[0].tolist()
        others = int((~good).sum()) - 1
        more = f", and {others} more such values" if others else ""
        raise ArgumentError(name, expected, f"{x[tuple(at)].item()} at {at}{more}")
