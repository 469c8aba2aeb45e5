"""The backward: its launches over one workspace, and the sums of A_log and dt_bias.

1. ``chains``: the intra-chunk stage again, and the chains of the backward. They store dv, the gradients of the states, and that
   of the initial state. If the forward saved states every 64 tokens and R, the mode is ``reverse``. If it saved states every 512
   tokens, it is ``recompute``: the chains also store states every 64 tokens and R. If it saved nothing, a forward that saves states
   every 512 tokens comes first.
2. `kernels.gradients`: everything else, parallel over chunks.

The gradients of dt_bias and A_log are sums of one partial for each half of a chunk. Their order is fixed, and no launch uses atomics
on values, so two runs have the same bits.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core.contract import KdaGradients, KdaInputs, KdaOutputs, ProblemShape
from kda_cute import get_kernel
from kda_cute.arguments import address
from kda_cute.host import DTYPES, gate_of
from kda_sm90 import layouts
from kda_sm90.config import ARCH, HEAD_DIM, SPACINGS, GradientsConfig, Mode
from kda_sm90.launch import Launch, make_launch, sm_count
from kda_sm90.launch_config import SMS, backward_launch_config, launch_config
from kda_sm90.launch_config import workspace_bytes as chains_bytes

#: Tokens of a chunk, and between the states that `kernels.gradients` needs.
CHUNK = min(SPACINGS)

#: Tokens between the states from which the mode ``recompute`` starts.
CHECKPOINT = max(SPACINGS)


class Workspace(NamedTuple):
    """Arrays of the workspace of a backward, in memory order."""

    chains: Tensor  # records and counters of the chains (`layouts`), uint8
    checkpoints: Tensor  # [slots of 512 tokens, HV, 128, 128] bf16: S, unless saved
    states: Tensor  # [slots, HV, 128, 128] bf16: S before every chunk, unless saved
    grad_states: Tensor  # [slots, HV, 128, 128] bf16: dS' behind every chunk
    residual: Tensor  # [B, T, HV, 128] bf16: R, unless saved
    partials: Tensor  # [slots, HV, 2, 2, 128] fp32: (dt_bias, A_log), halves of a chunk
    scratch: Tensor  # [CTAs, 2, 64 * 128] fp32; empty unless HV > H


def slots_of(shape: ProblemShape, tokens: int = CHUNK) -> int:
    """Returns the slots of a value head."""
    return layouts.slot_count(shape.B, shape.T, tokens, shape.N if shape.varlen else None)


def arrays(shape: ProblemShape, sms: int = SMS) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Returns the dtype and shape of every array of `Workspace`."""
    slots = slots_of(shape)
    states = (slots, shape.HV, HEAD_DIM, HEAD_DIM)
    chains = max(chains_bytes(shape, sms, mode) for mode in ("whole", "reverse", "recompute"))
    return {
        "chains": (torch.uint8, (chains,)),
        "checkpoints": (torch.bfloat16, (slots_of(shape, CHECKPOINT), *states[1:])),
        "states": (torch.bfloat16, states),
        "grad_states": (torch.bfloat16, states),
        "residual": (torch.bfloat16, (shape.B, shape.T, shape.HV, HEAD_DIM)),
        "partials": (torch.float32, (slots, shape.HV, 2, 2, HEAD_DIM)),
        "scratch": (torch.float32, (sms if shape.HV > shape.H else 0, 2, CHUNK * HEAD_DIM)),
    }


def _bytes(dtype: torch.dtype, size: tuple[int, ...]) -> int:
    """Returns the bytes of an array in the workspace, a multiple of 128."""
    return -(-math.prod(size) * dtype.itemsize // 128) * 128


def workspace_bytes(shape: ProblemShape, sms: int = SMS) -> int:
    """Returns the bytes of the workspace."""
    return sum(_bytes(*array) for array in arrays(shape, sms).values())


def split_workspace(buffer: Tensor, shape: ProblemShape, sms: int = SMS) -> Workspace:
    """Returns the arrays in a buffer of uint8 that is aligned to 128 bytes."""
    views, start = [], 0
    for dtype, size in arrays(shape, sms).values():
        views.append(buffer[start : start + math.prod(size) * dtype.itemsize].view(dtype).view(size))
        start += _bytes(dtype, size)
    return Workspace(*views)


class Backward(NamedTuple):
    """The launches of a backward of a shape."""

    forward: Launch | None  # saves states every 512 tokens; None if the call's forward saved states
    chains: Launch
    gradients: Callable[..., Any]
    numbers: dict[str, int | float]  # arguments of the gradients kernel that the shape determines
    sms: int

    def __call__(
        self,
        inputs: KdaInputs,
        grad_o: Tensor,
        grad_final_state: Tensor | None,
        gradients: KdaGradients,
        workspace: Tensor,
        saved_states: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> None:
        """Writes the gradients of a call, on the current device and stream."""
        arrays = split_workspace(workspace, inputs.shape, self.sms)
        self.run(inputs, grad_o, grad_final_state, gradients, arrays, saved_states, residual)

    def run(
        self,
        inputs: KdaInputs,
        grad_o: Tensor,
        grad_final_state: Tensor | None,
        gradients: KdaGradients,
        workspace: Workspace,
        saved_states: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> None:
        """`__call__` with the arrays of the workspace."""
        chains = workspace.chains
        # The chains of the backward take the gradients of outputs for values and initial states, and compute those of values
        # and initial states in place of outputs and final states.
        mirrored = replace(inputs, v=grad_o, initial_state=grad_final_state)
        outputs = KdaOutputs(gradients.v, gradients.initial_state, None, chains, workspace.grad_states)
        if self.forward is not None:
            saved_states = workspace.checkpoints
            # The memory of dv takes o, which is not needed, until the chains write dv.
            self.forward(inputs, KdaOutputs(gradients.v, None, None, chains, saved_states))
        if residual is not None:
            self.chains(mirrored, outputs)
        else:
            residual, tensors = workspace.residual, (saved_states, inputs.v, workspace.states)
            self.chains(mirrored, replace(outputs, residual=residual), recompute=tensors)
            saved_states = workspace.states
        tensors = {
            "q": inputs.q, "k": inputs.k, "g": inputs.g, "beta": inputs.beta, "a_log": inputs.A_log,
            "dt_bias": inputs.dt_bias, "offsets": inputs.cu_seqlens, "grad_o": grad_o, "grad_v": gradients.v,
            "residual": residual, "states": saved_states, "grad_states": workspace.grad_states,
            "grad_q": gradients.q, "grad_k": gradients.k, "grad_g": gradients.g, "grad_beta": gradients.beta,
            "partials": workspace.partials, "scratch": workspace.scratch,
        }  # fmt: skip
        self.gradients(gradients.q, *(address(x) for x in tensors.values()), *self.numbers.values())
        if gradients.dt_bias is None and gradients.A_log is None:
            return
        sums = workspace.partials.sum((0, 3))  # [HV, 2, 128]
        if gradients.dt_bias is not None:
            gradients.dt_bias.copy_(sums[:, 0].view_as(gradients.dt_bias))
        if gradients.A_log is not None:
            gradients.A_log.copy_(sums[:, 1].sum(-1).view_as(gradients.A_log))


@functools.lru_cache(maxsize=1024)
def launch_of(
    shape: ProblemShape, spacing: int, longest: int | None = None, sms: int | None = None
) -> Backward:
    """Returns the launches for a shape. Compiles their kernels on first use. Caches the last 1024 results.

    Args:
        spacing: tokens between the states that the forward has saved, one of `SPACINGS`; 0 if it has saved none.
        longest: tokens of the longest packed sequence, as in `launch_config`.
        sms: SMs to use (None: those of the device).
    """
    from kda_sm90.kernels.gradients import GradientsKernel

    sms = sms or sm_count()
    options = shape.options
    forward = None
    if not spacing:
        forward = make_launch(shape, launch_config(shape, sms, longest, CHECKPOINT), CHECKPOINT)
    mode: Mode = "reverse" if spacing == CHUNK else "recompute"
    chains = make_launch(shape, backward_launch_config(shape, sms, longest, mode), CHUNK)
    config = GradientsConfig(gate_of(shape), not options.bounded_gate, DTYPES[shape.g_dtype])
    shared = chains.shape_arguments
    numbers = {
        "N": shape.N, "T": shape.T, "H": shape.H, "HV": shape.HV, "offset_bytes": shared.offset_bytes,
        "beta_bytes": shared.beta_bytes, "l2norm": shared.l2norm, "ctas": min(sms, slots_of(shape) * shape.H),
        "scale": shape.scale, "lower_bound": shared.lower_bound, "beta_factor": shared.beta_factor,
    }  # fmt: skip
    return Backward(forward, chains, get_kernel(GradientsKernel, config, ARCH), numbers, sms)


def pass_gradient(grad_final_state: Tensor | None, gradients: KdaGradients) -> None:
    """Serves a call without tokens: the gradient of the final states is that of the initial ones."""
    for x in (gradients.A_log, gradients.dt_bias):
        if x is not None:
            x.zero_()
    if gradients.initial_state is not None:
        if grad_final_state is None:
            gradients.initial_state.zero_()
        else:
            gradients.initial_state.copy_(grad_final_state)
