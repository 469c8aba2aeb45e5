"""The backend object. A call is two launches: the intra-chunk kernel over all chunks, then the chains over their records.

`kda_sm100.backward` has the launches of a backward. For a call in segments, the summaries of the segments and their
merge run between the two launches.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kda_core.backend import PreparedLaunch
from kda_core.contract import KdaGradients, KdaInputs, KdaJournal, KdaOutputs, KdaPool, ProblemShape
from kda_cute import arch_of_device
from kda_cute.backward import pass_gradient, spacing_between, spacing_of
from kda_cute.decode import make_decode
from kda_cute.host import dense, is_strided, merge_segments, pass_states, refusal, with_token_strides
from kda_cute.journal import make_journal
from kda_sm100 import backward
from kda_sm100.config import ARCHS, SMS
from kda_sm100.launch import arch_of, execution_launch_of, launches_of, prepared, summary_launches_of
from kda_sm100.launch_config import launch_config


class Sm100Backend:
    """Implements `kda_core.backend.Backend`. It holds no state; the process shares the compiled kernels."""

    def can_run(self, shape: ProblemShape) -> str | None:
        return refusal(shape)

    def workspace_bytes(self, shape: ProblemShape) -> int:
        return launch_config(shape).workspace_bytes

    def compile(self, shape: ProblemShape) -> None:
        if shape.journal is not None:
            make_journal(shape, arch_of(shape))
        elif shape.options.recurrent:
            make_decode(shape, arch_of(shape))
        else:
            launches_of(shape, saves=spacing_of(shape))
            if shape.options.needs_backward:
                backward.launch_of(shape, spacing_of(shape))

    def chunk_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        if inputs.shape.T == 0:
            return pass_states(inputs, outputs)
        strided, saves = is_strided(inputs), spacing_between(outputs.saved_states, outputs.residual)
        inputs = with_token_strides(inputs) if strided else dense(inputs)
        with device_of(inputs.q):
            intra_chunk, chain = launches_of(inputs.shape, strided, saves)
            intra_chunk(inputs, outputs)
            chain(inputs, outputs)
        return outputs

    # ---- decoding (the feature RECURRENT)

    def recurrent_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        if inputs.shape.T == 0:
            return pass_states(inputs, outputs)
        with device_of(inputs.q):
            make_decode(inputs.shape, arch_of(inputs.shape))(inputs, outputs)
        return outputs

    # ---- decoding with records of tokens (the feature JOURNAL)

    def journal_decode(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        with device_of(inputs.q):
            make_journal(inputs.shape, arch_of(inputs.shape))(inputs, outputs)
        return outputs

    def journal_fold(self, shape: ProblemShape, pool: KdaPool, journal: KdaJournal) -> None:
        with device_of(pool.states):
            make_journal(shape, arch_of(shape)).fold(pool, journal)

    # ---- gradients (the feature BACKWARD)

    def backward_workspace_bytes(self, shape: ProblemShape) -> int:
        return backward.workspace_bytes(shape)

    def chunk_bwd_into(
        self,
        inputs: KdaInputs,
        grad_o: Tensor,
        grad_final_state: Tensor | None,
        gradients: KdaGradients,
        workspace: Tensor,
        saved_states: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> None:
        if inputs.shape.T == 0:
            pass_gradient(grad_final_state, gradients)
            return
        with device_of(inputs.q):
            launch = backward.launch_of(inputs.shape, spacing_between(saved_states, residual))
            launch(inputs, grad_o, grad_final_state, gradients, workspace, saved_states, residual)

    # ---- prepared launches of prefill, decoding and records

    def prepare(self, inputs: KdaInputs, outputs: KdaOutputs) -> PreparedLaunch | None:
        if inputs.shape.options.recurrent:
            make = make_decode if inputs.journal is None else make_journal
            return make(inputs.shape, arch_of(inputs.shape)).prepare(inputs, outputs)
        strided = is_strided(inputs)
        if (with_token_strides(inputs) if strided else dense(inputs)) is not inputs:
            return None  # a launch would need copies
        return prepared(inputs, strided)

    # ---- calls in segments (the feature SEGMENT_SUMMARY)

    def segment_workspace_bytes(self, shape: ProblemShape) -> int:
        return self.workspace_bytes(shape)

    def summarize(self, inputs: KdaInputs, exits: Tensor, transitions: Tensor, workspace: Tensor) -> None:
        # These launches write no o. A contiguous tensor names the device in its place; v may be strided.
        outputs = KdaOutputs(exits.view(torch.bfloat16), exits, None, workspace)
        with device_of(inputs.q):
            intra_chunk, summary = summary_launches_of(inputs.shape, is_strided(inputs))
            intra_chunk(inputs, outputs)
            summary(inputs, outputs, transitions)

    def merge_segments(self, initial: Tensor, exits: Tensor, transitions: Tensor, bounds: Tensor) -> None:
        arch = arch_of_device(initial.device) if initial.is_cuda else ARCHS[0]  # CPU tensors are emulated
        with device_of(initial):
            merge_segments(initial, exits, transitions, bounds, sms=SMS, arch=arch)

    def execute_segments(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        with device_of(inputs.q):
            saves = spacing_between(outputs.saved_states, outputs.residual)
            execution_launch_of(inputs.shape, saves)(inputs, outputs)
        return outputs

    # ---- gradients of the states between segments

    def state_gradients_workspace_bytes(self, shape: ProblemShape) -> int:
        return backward.summary_workspace_bytes(shape)

    def initial_state_gradients(
        self,
        inputs: KdaInputs,
        grad_o: Tensor,
        grad_final_state: Tensor | None,
        gradients: Tensor,
        transitions: Tensor,
        workspace: Tensor,
    ) -> None:
        with device_of(inputs.q):
            launch = backward.summary_of(inputs.shape)
            launch(inputs, grad_o, grad_final_state, gradients, transitions, workspace)


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Returns a context in which the tensor's device is current. CPU tensors (device -1) are emulated and need none.

    The function compares devices first, because entering the context of the current device takes longer.
    """
    device = x.get_device()
    return nullcontext() if device < 0 or device == torch.cuda.current_device() else torch.cuda.device(device)
