"""The backward: its launches over one workspace, and the sums of A_log and dt_bias.

1. ``chains``: the intra-chunk stage again, and the chains of the backward. They store dv, the gradients of the states, and that
   of the initial state. If the forward saved states every 64 tokens and R, the mode is ``reverse``. If it saved states every 512
   tokens, it is ``recompute``: the chains also store states every 64 tokens and R. If it saved nothing, a forward that saves states
   every 512 tokens comes first.
2. `kernels.gradients`: everything else, parallel over chunks.

`Summary` computes how the segments of a sequence act on gradients of states, so that `kda-cp` can cut the sequence.

A backward takes one slab of slots after the other, from the last to the first, so that its workspace is bounded (`kda_cute.backward`). The
gradients of states pass from slab to slab through memory.

The gradients of dt_bias and A_log are sums of one partial for each chunk. Their order is fixed, and no launch uses atomics
on values, so two runs have the same bits.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kda_core.contract import KdaGradients, KdaInputs, KdaOutputs, ProblemShape
from kda_cute import get_kernel
from kda_cute.backward import (
    BUDGETS,
    CHECKPOINT,
    CHUNK,
    Arrays,
    GradientsLaunch,
    GradientTensors,
    Slabs,
    cut,
    gradients_launch,
    scratch_shape,
    split,
    store_sums,
    total_bytes,
)
from kda_cute.gradients import GradientsConfig
from kda_cute.host import DTYPES, gate_of
from kda_sm90 import layouts
from kda_sm90.arguments import Address, BackwardArguments
from kda_sm90.config import ARCH, HEAD_DIM, Mode
from kda_sm90.interfaces import GRADIENTS
from kda_sm90.launch import Launch, make_launch, sm_count
from kda_sm90.launch_config import SMS, backward_launch_config, launch_config
from kda_sm90.launch_config import workspace_bytes as chains_bytes


class Workspace(NamedTuple):
    """Arrays of the workspace of a backward, in memory order."""

    chains: Tensor  # records and counters of the chains (`layouts`), uint8
    checkpoints: Tensor  # [slots of 512 tokens, HV, 128, 128] fp32: S of all slabs; empty if S is saved
    between: Tensor  # [2, HV, 2, 64 * 128] fp32: dS that passes from slab to slab; empty for one slab
    states: Tensor  # [chunks, HV, 128, 128] bf16: images of S before every chunk of a slab; empty in the mode ``reverse``
    grad_states: Tensor  # [chunks, HV, 128, 128] bf16: images of dS' behind every chunk of a slab
    partials: Tensor  # [chunks, HV, 2, 128] fp32: (dt_bias, A_log) of a chunk
    scratch: Tensor  # [CTAs, 2, 64 * 128] fp32; empty unless HV > H


def mode_of(spacing: int) -> Mode:
    """Returns the mode of the chains, by the tokens between the states that the forward has saved; 0 if it has saved none."""
    return "reverse" if spacing == CHUNK else "recompute"


def arrays(shape: ProblemShape, spacing: int, slabs: Slabs, sms: int = SMS) -> Arrays:
    """Returns the dtype and shape of every array of `Workspace`; ``spacing`` as in `mode_of`."""
    mode, matrix = mode_of(spacing), (shape.HV, HEAD_DIM, HEAD_DIM)
    chains = chains_bytes(shape, sms, mode)
    if not spacing:
        chains = max(chains, chains_bytes(shape, sms))
    return {
        "chains": (torch.uint8, (chains,)),
        "checkpoints": (torch.float32, (0 if spacing else slabs.total, *matrix)),
        "between": (torch.float32, (2 if slabs.slots < slabs.total else 0, *matrix)),
        "states": (torch.bfloat16, (slabs.chunks if mode == "recompute" else 0, *matrix)),
        "grad_states": (torch.bfloat16, (slabs.chunks, *matrix)),
        "partials": (torch.float32, (slabs.chunks, shape.HV, 2, HEAD_DIM)),
        "scratch": (torch.float32, scratch_shape(shape, sms)),
    }


def _total_bytes(shape: ProblemShape, spacing: int, slabs: Slabs, sms: int) -> int:
    return total_bytes(arrays(shape, spacing, slabs, sms))


@functools.lru_cache(maxsize=1024)
def slabs_of(shape: ProblemShape, spacing: int, sms: int = SMS, budget: int | None = None) -> Slabs:
    """Returns the slabs of a backward: as few as fit, all of about the same size.

    Args:
        spacing: as in `mode_of`.
        budget: bytes of the workspace (None: those of `kda_cute.backward.BUDGETS`). A slab of one slot may exceed it. If the forward
            saved nothing, the states every 512 tokens may take three quarters of it; beyond that it grows with them.
    """
    budget = BUDGETS[shape.options.disable_recompute] if budget is None else budget
    tokens = CHUNK if mode_of(spacing) == "reverse" else CHECKPOINT
    total = layouts.slot_count(shape.B, shape.T, tokens, shape.N if shape.varlen else None)
    size = lambda slabs: _total_bytes(shape, spacing, slabs, sms)
    return cut(tokens, total, size, budget, 0 if spacing else budget // 4)


def workspace_bytes(shape: ProblemShape, sms: int = SMS) -> int:
    """Returns the bytes of the workspace, whether or not the forward saves states."""
    spacings = 0, CHUNK if shape.options.disable_recompute else CHECKPOINT
    return max(_total_bytes(shape, n, slabs_of(shape, n, sms), sms) for n in spacings)


class Backward(NamedTuple):
    """The launches of a backward of a shape."""

    forward: Launch | None  # saves states every 512 tokens; None if the call's forward saved states
    chains: Launch
    gradients: GradientsLaunch
    spacing: int  # see `mode_of`
    slabs: Slabs
    sms: int

    def split(self, buffer: Tensor, shape: ProblemShape) -> Workspace:
        """Returns the arrays in a buffer of uint8 that is aligned to 128 bytes."""
        return Workspace(*split(buffer, arrays(shape, self.spacing, self.slabs, self.sms)))

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
        arrays = self.split(workspace, inputs.shape)
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
        if self.forward is not None:
            saved_states = workspace.checkpoints
            # The memory of dv takes o, which is not needed, until the chains write dv.
            self.forward(inputs, KdaOutputs(gradients.v, None, None, workspace.chains, saved_states))
        assert saved_states is not None  # `launch_of` was told what was saved
        sums = None
        for first in self.slabs.starts():
            self.run_slab(
                inputs, grad_o, grad_final_state, gradients, workspace, saved_states, residual, first
            )
            of_slab = workspace.partials.sum(0)
            sums = of_slab if sums is None else sums.add_(of_slab)
        assert sums is not None  # a call has a slab at least
        store_sums(gradients, sums)

    def run_slab(
        self,
        inputs: KdaInputs,
        grad_o: Tensor,
        grad_final_state: Tensor | None,
        gradients: KdaGradients,
        workspace: Workspace,
        saved_states: Tensor,
        residual: Tensor | None,
        first: int,
    ) -> None:
        """Writes the gradients of a slab, and its partial sums. ``first``: the first slot of the slab."""
        slabs, recompute = self.slabs, mode_of(self.spacing) == "recompute"
        states = workspace.states if recompute else saved_states[first:]
        if residual is None:
            residual = (
                gradients.g
            )  # its memory takes R until the gradients kernel, which reads R first, writes dg
        residual_row = HEAD_DIM * residual.element_size()
        from_slab, to_slab = 0, 0
        if slabs.slots < slabs.total:
            turn = first // slabs.slots % 2
            from_slab, to_slab = workspace.between[1 - turn].data_ptr(), workspace.between[turn].data_ptr()
        arguments = BackwardArguments(
            checkpoints=Address(saved_states.data_ptr() if recompute else 0),
            forward_v=Address(inputs.v.data_ptr()),
            forward_states=Address(workspace.states.data_ptr()),
            from_slab=Address(from_slab),
            to_slab=Address(to_slab),
            first_slot=first,
            slab_slots=slabs.slots,
            residual_row=residual_row,
        )
        # The chains of the backward take the gradients of outputs for values and initial states, and compute those of values
        # and initial states in place of outputs and final states.
        mirrored = replace(inputs, v=grad_o, initial_state=grad_final_state)
        outputs = KdaOutputs(
            o=gradients.v, final_state=gradients.initial_state, workspace=workspace.chains,
            saved_states=workspace.grad_states, residual=residual,
        )  # fmt: skip
        self.chains(mirrored, outputs, backward=arguments)
        of_slab = GradientTensors(
            residual, states, workspace.grad_states, workspace.partials, workspace.scratch
        )
        self.gradients(inputs, grad_o, gradients, of_slab, first, slabs.slots)


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
    sms = sms or sm_count()
    options = shape.options
    forward = None
    if not spacing:
        forward = make_launch(shape, launch_config(shape, sms, longest, CHECKPOINT), CHECKPOINT)
    chains = make_launch(shape, backward_launch_config(shape, sms, longest, mode_of(spacing)), CHUNK)
    slabs = slabs_of(shape, spacing, sms)
    config = GradientsConfig(gate_of(shape), not options.bounded_gate, DTYPES[shape.g_dtype])
    gradients = gradients_launch(
        get_kernel(GRADIENTS, config, ARCH), shape, slabs, sms, state_images=mode_of(spacing) == "recompute"
    )
    return Backward(forward, chains, gradients, spacing, slabs, sms)


# ---- how segments act on gradients of states


class Summary(NamedTuple):
    """The launch of the mode ``reverse_summarize``."""

    chains: Launch
    slots: int  # of a head

    def __call__(
        self,
        inputs: KdaInputs,
        grad_o: Tensor,
        grad_final_state: Tensor | None,
        gradients: Tensor,
        transitions: Tensor,
        workspace: Tensor,
    ) -> None:
        """Implements `kda_core.backend.SupportsStateGradients.initial_state_gradients` on the current device and stream."""
        mirrored = replace(inputs, v=grad_o, initial_state=grad_final_state)
        outputs = KdaOutputs(grad_o, gradients, None, workspace)  # this mode writes no o
        self.chains(mirrored, outputs, transitions, BackwardArguments(slab_slots=self.slots))


@functools.lru_cache(maxsize=1024)
def summary_of(shape: ProblemShape, sms: int | None = None) -> Summary:
    """Returns the launch for N segments packed along T. Compiles its kernel on first use. Caches the last 1024 results.

    ``sms``: SMs to use (None: those of the device).
    """
    config = backward_launch_config(shape, sms or sm_count(), mode="reverse_summarize")
    return Summary(make_launch(shape, config), layouts.slot_count(shape.B, shape.T, CHUNK, shape.N))


def summary_workspace_bytes(shape: ProblemShape, sms: int = SMS) -> int:
    """Returns the bytes of the workspace of `summary_of`. They hardly depend on the number of tokens."""
    return backward_launch_config(shape, sms, mode="reverse_summarize").workspace_bytes
