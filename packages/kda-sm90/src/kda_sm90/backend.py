"""The backend object. A call is one launch, and so is a call of the decode entry. A call in segments is two launches, with a merge of states in between."""

from __future__ import annotations

import functools

import torch

from kda_core.backend import PreparedLaunch
from kda_core.contract import KdaGradients, KdaInputs, KdaJournal, KdaOutputs, KdaPool, ProblemShape
from kda_cute.backward import pass_gradient, spacing_between, spacing_of
from kda_cute.decode import make_decode
from kda_cute.host import dense, is_strided, merge_segments, pass_states, refusal, with_token_strides
from kda_cute.journal import make_journal
from kda_sm90 import backward
from kda_sm90.config import ARCH, Mode
from kda_sm90.launch import Launch, at_the_same_time, compiled, make_launch, on_device_of, sm_count
from kda_sm90.launch_config import (
    beside_workspace_bytes,
    launch_config,
    launch_configs_beside,
    segment_launch_configs,
    workspace_bytes,
)


class Sm90Backend:
    """Implements `kda_core.backend.Backend`. It has no state of its own: the process shares the compiled kernels."""

    def can_run(self, shape: ProblemShape) -> str | None:
        return refusal(shape)

    def workspace_bytes(self, shape: ProblemShape) -> int:
        return workspace_bytes(shape, sm_count())

    def compile(self, shape: ProblemShape) -> None:
        if shape.journal is not None:
            make_journal(shape, ARCH)
            return
        if shape.options.recurrent:
            make_decode(shape, ARCH)
            return
        lengths_known = shape.varlen and not shape.options.use_graph
        steps = (n * length_step(shape) for n in range(LENGTH_STEPS + 1)) if lengths_known else ()
        spacing = spacing_of(shape)
        for config in {launch_config(shape, sm_count(), n, spacing).config for n in (None, *steps)}:
            compiled(config)
        if shape.options.needs_backward:
            backward.launch_of(shape, spacing)

    def chunk_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        if inputs.shape.T == 0:
            return pass_states(inputs, outputs)
        spacing = spacing_between(outputs.saved_states, outputs.residual)
        strided = not spacing and is_strided(inputs)
        inputs = with_token_strides(inputs) if strided else dense(inputs)
        launch = launch_of(inputs.shape, longest_of(inputs), spacing, strided)
        on_device_of(inputs.q, launch, inputs, outputs)
        return outputs

    # ---- decoding (the feature RECURRENT)

    def recurrent_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        if inputs.shape.T == 0:
            return pass_states(inputs, outputs)
        on_device_of(inputs.q, make_decode(inputs.shape, ARCH), inputs, outputs)
        return outputs

    # ---- decoding with records of tokens (the feature JOURNAL)

    def journal_decode(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        on_device_of(inputs.q, make_journal(inputs.shape, ARCH), inputs, outputs)
        return outputs

    def journal_fold(self, shape: ProblemShape, pool: KdaPool, journal: KdaJournal) -> None:
        on_device_of(pool.states, make_journal(shape, ARCH).fold, pool, journal)

    # ---- prepared launches of all three

    def prepare(self, inputs: KdaInputs, outputs: KdaOutputs) -> PreparedLaunch | None:
        if inputs.journal is not None:
            return make_journal(inputs.shape, ARCH).prepare(inputs, outputs)
        if inputs.shape.options.recurrent:
            return make_decode(inputs.shape, ARCH).prepare(inputs, outputs)
        strided = is_strided(inputs)
        if (with_token_strides(inputs) if strided else dense(inputs)) is not inputs:
            return None  # a launch would need copies
        return launch_of(inputs.shape, longest_of(inputs), 0, strided).prepare(inputs)

    # ---- gradients (the feature BACKWARD)

    def backward_workspace_bytes(self, shape: ProblemShape) -> int:
        return backward.workspace_bytes(shape, sm_count())

    def chunk_bwd_into(
        self,
        inputs: KdaInputs,
        grad_o: torch.Tensor,
        grad_final_state: torch.Tensor | None,
        gradients: KdaGradients,
        workspace: torch.Tensor,
        saved_states: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
    ) -> None:
        if inputs.shape.T == 0:
            pass_gradient(grad_final_state, gradients)
        else:
            spacing = spacing_between(saved_states, residual)
            launch = backward.launch_of(inputs.shape, spacing, longest_of(inputs))
            arguments = (inputs, grad_o, grad_final_state, gradients, workspace, saved_states, residual)
            on_device_of(inputs.q, launch, *arguments)

    # ---- calls in segments (the feature SEGMENT_SUMMARY)

    def segment_workspace_bytes(self, shape: ProblemShape) -> int:
        return segment_launch_configs(shape, sm_count()).workspace_bytes

    def summarize(
        self, inputs: KdaInputs, exits: torch.Tensor, transitions: torch.Tensor, workspace: torch.Tensor
    ) -> None:
        # This mode writes no o. It names the device, and v may be strided.
        o = inputs.v if inputs.pool is None else exits.view(torch.bfloat16)
        outputs = KdaOutputs(o, exits, None, workspace)
        on_device_of(inputs.q, segment_launches(inputs.shape)[0], inputs, outputs, transitions)

    def merge_segments(
        self,
        initial: torch.Tensor,
        exits: torch.Tensor,
        transitions: torch.Tensor,
        bounds: torch.Tensor,
    ) -> None:
        merge = functools.partial(merge_segments, sms=sm_count(), arch=ARCH)
        on_device_of(initial, merge, initial, exits, transitions, bounds)

    def execute_segments(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        spacing = spacing_between(outputs.saved_states, outputs.residual)
        on_device_of(inputs.q, segment_launches(inputs.shape, spacing)[1], inputs, outputs)
        return outputs

    # ---- first and last segments as whole calls beside the inner ones

    def whole_ends_workspace_bytes(
        self, first: ProblemShape, inner: ProblemShape, last: ProblemShape
    ) -> tuple[int, int]:
        return beside_workspace_bytes(first, inner, last, sm_count())

    def summarize_beside(
        self,
        whole: KdaInputs,
        whole_outputs: KdaOutputs,
        inputs: KdaInputs,
        exits: torch.Tensor,
        transitions: torch.Tensor,
        workspace: torch.Tensor,
    ) -> None:
        beside, summarize = launches_beside(whole.shape, inputs.shape, "summarize", longest_of(whole))
        outputs = KdaOutputs(inputs.v, exits, None, workspace)
        summary = lambda: summarize(inputs, outputs, transitions)
        on_device_of(inputs.q, at_the_same_time, inputs.q, lambda: beside(whole, whole_outputs), summary)

    def execute_beside(
        self, whole: KdaInputs, whole_outputs: KdaOutputs, inputs: KdaInputs, outputs: KdaOutputs
    ) -> None:
        beside, execute = launches_beside(whole.shape, inputs.shape, "execute", longest_of(whole))
        segments = lambda: execute(inputs, outputs)
        on_device_of(inputs.q, at_the_same_time, inputs.q, lambda: beside(whole, whole_outputs), segments)

    # ---- gradients of the states between segments

    def state_gradients_workspace_bytes(self, shape: ProblemShape) -> int:
        return backward.summary_workspace_bytes(shape, sm_count())

    def initial_state_gradients(
        self,
        inputs: KdaInputs,
        grad_o: torch.Tensor,
        grad_final_state: torch.Tensor | None,
        gradients: torch.Tensor,
        transitions: torch.Tensor,
        workspace: torch.Tensor,
    ) -> None:
        launch = backward.summary_of(inputs.shape)
        arguments = (inputs, grad_o, grad_final_state, gradients, transitions, workspace)
        on_device_of(inputs.q, launch, *arguments)


@functools.lru_cache(maxsize=1024)
def launch_of(
    shape: ProblemShape, longest: int | None = None, spacing: int = 0, strided: bool = False
) -> Launch:
    """Returns the launch for a shape; ``longest``, ``spacing`` and ``strided`` as in `launch_config`. Compiles its kernel on first use.

    The cache holds the last 1024 results.
    """
    return make_launch(shape, launch_config(shape, sm_count(), longest, spacing, strided), spacing)


#: The length of the longest packed sequence is rounded up to a multiple of T / LENGTH_STEPS. Calls of one shape then
#: share few launches.
LENGTH_STEPS = 32


def length_step(shape: ProblemShape) -> int:
    """Returns the step in tokens. The longest length is rounded up to a multiple of it."""
    return -(-shape.T // LENGTH_STEPS)


def longest_of(inputs: KdaInputs) -> int | None:
    """Returns the tokens of the longest packed sequence, rounded up to a multiple of `length_step`.

    Returns None for sequences that are not packed, and if the host does not know the lengths.
    """
    if inputs.cu_seqlens is None or (lengths := inputs.sequence_lengths()) is None:
        return None
    step = length_step(inputs.shape)
    return -(-max(lengths) // step) * step


@functools.lru_cache(maxsize=1024)
def segment_launches(shape: ProblemShape, spacing: int = 0) -> tuple[Launch, Launch]:
    """Returns the launches (summarize, execute) of segments packed along T; ``spacing`` as in `launch_config`."""
    configs = segment_launch_configs(shape, sm_count(), spacing)
    return make_launch(shape, configs.summarize), make_launch(shape, configs.execute, spacing)


@functools.lru_cache(maxsize=1024)
def launches_beside(
    whole: ProblemShape, inner: ProblemShape, mode: Mode, longest: int | None
) -> tuple[Launch, Launch]:
    """Returns the launches of `launch_configs_beside`: of the whole call, and of the inner segments."""
    configs = launch_configs_beside(whole, inner, mode, sm_count(), longest)
    return make_launch(whole, configs.whole), make_launch(inner, configs.inner)
