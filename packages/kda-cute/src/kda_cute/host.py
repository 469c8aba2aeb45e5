"""What a call is to the GPU backends that share `preparation`: which ones they serve, in which variant, and calls without
tokens. Importing this needs torch, but not the DSL."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kda_core.contract import KdaInputs, KdaOutputs, ProblemShape
from kda_cute import get_kernel
from kda_cute.records import Gate, GateDtype

#: What g and beta may be in.
DTYPES: dict[torch.dtype, GateDtype] = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def refusal(shape: ProblemShape) -> str | None:
    """None, or why no kernel serves this shape, whose dtype and head dimensions the backend declares."""
    for name, dtype in (("g", shape.g_dtype), ("beta", shape.beta_dtype)):
        if dtype not in DTYPES:
            return f"{name} in {dtype}; only torch.bfloat16 and torch.float32 are built"
    if (shape.B * shape.T + 64 * shape.N) * shape.HV >= 2**31:
        return "2^31 or more tokens, sequences counted as 64, times value heads"
    return None


def gate_of(shape: ProblemShape) -> Gate:
    """The form of a call's gate."""
    if not shape.options.use_gate_in_kernel:
        return "precomputed"
    return "softplus" if shape.options.lower_bound is None else "bounded"


def pass_states(inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
    """A call without tokens: final states are the initial ones."""
    if outputs.final_state is not None:
        if inputs.initial_state is None:
            outputs.final_state.zero_()
        else:
            outputs.final_state.copy_(inputs.initial_state)
    return outputs


def merge_segments(
    initial: Tensor, exits: Tensor, transitions: Tensor, bounds: Tensor, *, sms: int, arch: str
) -> None:
    """`kda_core.backend.SupportsMerge.merge_segments` on the current device, which has `sms` SMs."""
    N, HV = bounds.shape[0] - 1, initial.shape[1]
    kernel = _merge_kernel(N * HV, sms, arch, initial.device.type)
    kernel(initial, *(x.data_ptr() for x in (initial, exits, transitions, bounds)), N, HV)


@functools.lru_cache(maxsize=256)
def _merge_kernel(states: int, sms: int, arch: str, device_type: str) -> Callable[..., Any]:
    """By the device type too, for on a CPU kernels are emulated."""
    from kda_cute.device.merge_states import MergeKernel, merge_config

    return get_kernel(MergeKernel, merge_config(states, sms), arch)
