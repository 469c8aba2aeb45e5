"""The values of a call's inputs against the contract, for debugging: ``KDA_CHECK=1``.

Everything else that core checks is metadata, or in host memory. These checks read tensors on a GPU and wait for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_core.contract import SAFE_GATE_BOUND, KdaInputs, check_copy, lengths_of
from kda_core.errors import ArgumentError

BETA_BOUND = 2.0  # a state's factor along k is 1 - beta: beyond 2 it grows with every token


def check_contents(inputs: KdaInputs) -> None:
    """Checks the offsets in cu_seqlens, that inputs are finite, and that decays and beta are in range. A decay may be
    -inf, which resets its channel, and rows of no sequence may hold anything.

    Nothing is checked while a CUDA graph is captured, for the host cannot wait for a captured stream.

    Raises:
        ArgumentError: names the argument, what was expected, the first value that is not so, and where it is.
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
        if x is not None:
            _expect(name, "finite values", x, x.isfinite())


def _tokens_used(inputs: KdaInputs) -> int:
    """Tokens of a batch row that belong to a sequence, by offsets that are checked wherever they are."""
    if inputs.cu_seqlens is None:
        return inputs.shape.T
    ends = inputs.cu_seqlens.tolist()
    lengths_of("cu_seqlens", ends, inputs.shape)
    if inputs.cu_seqlens_cpu is not None and not inputs.options.use_graph:  # replays leave the copy behind
        check_copy(ends, inputs.cu_seqlens_cpu.tolist())
    return ends[-1]


def _expect(name: str, expected: str, x: Tensor, good: Tensor) -> None:
    if not good.all():
        at = (~good).nonzero()[0].tolist()
        others = int((~good).sum()) - 1
        more = f", and {others} more such values" if others else ""
        raise ArgumentError(name, expected, f"{x[tuple(at)].item()} at {at}{more}")
