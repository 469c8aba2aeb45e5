"""Host functions of the GPU backends: the shapes that they serve, the form of the gate, calls without tokens, the merge.

Importing this needs torch, but not the DSL.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kda_core import slots
from kda_core.buffers import aligned
from kda_core.contract import KdaInputs, KdaOutputs, ProblemShape
from kda_cute import get_kernel
from kda_cute.merge import MERGE, merge_config
from kda_cute.records import Gate, GateDtype

#: The inputs that have a row for every token.
PER_TOKEN = ("q", "k", "v", "g", "beta")

#: dtypes of g and beta, and their names in a kernel's configuration.
DTYPES: dict[torch.dtype, GateDtype] = {torch.bfloat16: "bfloat16", torch.float32: "float32"}


def refusal(shape: ProblemShape) -> str | None:
    """Returns why no kernel serves this shape, or None if one does. dtype and head dimensions are declared in the backend's
    spec, so that kda-core checks them."""
    for name, dtype in (("g", shape.g_dtype), ("beta", shape.beta_dtype)):
        if dtype not in DTYPES:
            return f"{name}: expected torch.bfloat16 or torch.float32, got {dtype}"
    if (items := (shape.B * shape.T + 64 * shape.N) * shape.HV) >= 2**31:
        return f"too large: (B*T + 64*N)*HV must be below 2^31, got {items}"
    return None


def gate_of(shape: ProblemShape) -> Gate:
    """Returns the form of a call's gate."""
    if not shape.options.use_gate_in_kernel:
        return "precomputed"
    return "softplus" if shape.options.lower_bound is None else "bounded"


def dense(inputs: KdaInputs) -> KdaInputs:
    """Returns a call with contiguous and aligned q, k, v, g and beta, as kernels need them that are no variants for strided inputs. A
    backend that declares `Feature.STRIDED` receives strided tensors in all calls."""
    return _changed(inputs, aligned)


def token_stride(x: Tensor) -> int | None:
    """Returns the elements from a token of x [B, T, ..] to the next, over all rows of B; None if tokens have no one distance."""
    B, T = x.shape[:2]
    row, token = x.stride()[:2]
    if T == 1:
        return row
    return token if B == 1 or row == T * token else None


def with_token_strides(inputs: KdaInputs) -> KdaInputs:
    """Returns a call whose q, k, v, g and beta have a `token_stride`. Only rows of B at another distance need a copy."""
    return _changed(inputs, lambda x: x if token_stride(x) is not None else aligned(x))


def is_strided(inputs: KdaInputs) -> bool:
    """Returns whether q, k, v, g or beta is not contiguous."""
    x = inputs
    return not (
        x.q.is_contiguous() and x.k.is_contiguous() and x.v.is_contiguous() and x.g.is_contiguous() and x.beta.is_contiguous()
    )  # fmt: skip


def _changed(inputs: KdaInputs, change: Callable[[Tensor], Tensor]) -> KdaInputs:
    copies: dict[str, Any] = {}
    for name, x in zip(PER_TOKEN, (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)):
        if (y := change(x)) is not x:
            copies[name] = y
    return replace(inputs, **copies) if copies else inputs


def pass_states(inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
    """Serves a call without tokens: copies the initial states to the final ones, or writes zeros if there are none. With a slot for
    every token, no token writes a state."""
    initial, pool, facts = inputs.initial_state, inputs.pool, inputs.shape.pool
    if pool is not None and facts is not None:
        initial = slots.initial_states(pool, torch.float32)
        if facts.writes and not facts.per_token:
            slots.store_final(pool, initial)
    if outputs.final_state is not None:
        if initial is None:
            outputs.final_state.zero_()
        else:
            outputs.final_state.copy_(initial)
    return outputs


def merge_segments(
    initial: Tensor, exits: Tensor, transitions: Tensor, bounds: Tensor, *, sms: int, arch: str
) -> None:
    """Implements `kda_core.backend.SupportsMerge.merge_segments` on the current device.

    ``initial``, ``exits``, ``transitions``: fp32 [segments, HV, 128, 128]; the kernel fills ``initial`` except for the first
    segment of each sequence. ``bounds``: int32 [N+1]; sequence n has segments bounds[n] to bounds[n+1] - 1. ``sms``: SMs of
    the device.
    """
    N, HV = bounds.shape[0] - 1, initial.shape[1]
    kernel = _merge_kernel(N * HV, sms, arch, initial.device.type)
    kernel(initial, *(x.data_ptr() for x in (initial, exits, transitions, bounds)), N, HV)


@functools.lru_cache(maxsize=256)
def _merge_kernel(states: int, sms: int, arch: str, device_type: str) -> Callable[..., Any]:
    """Returns the merge kernel. ``device_type`` is part of the key, because kernels for a CPU are emulated."""
    return get_kernel(MERGE, merge_config(states, sms), arch)
