"""The backend object: two launches, the preparation of all chunks and the chains over them. Where sequences
are cut into segments, summaries of these and their merge come between the two."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core.contract import KdaInputs, KdaOutputs, ProblemShape
from kda_cute import arch_of_capability, arch_of_device, get_kernel
from kda_cute.host import merge_segments, pass_states, refusal
from kda_sm100.config import ARCHS, SMS
from kda_sm100.plan import plan


class Sm100Backend:
    """Satisfies `kda_core.backend.Backend`. It has no state of its own; compiled kernels are shared by the process."""

    def can_run(self, shape: ProblemShape) -> str | None:
        return refusal(shape)

    def workspace_bytes(self, shape: ProblemShape) -> int:
        return plan(shape).workspace_bytes

    def compile(self, shape: ProblemShape) -> None:
        launches_of(shape)

    def chunk_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        if inputs.shape.T == 0:
            return pass_states(inputs, outputs)
        with device_of(inputs.q):
            prepare, chain = launches_of(inputs.shape)
            prepare(inputs, outputs.workspace)
            chain(inputs, outputs)
        return outputs

    # ---- sequences that are cut into segments (SEGMENT_SUMMARY)

    def segment_workspace_bytes(self, shape: ProblemShape) -> int:
        return self.workspace_bytes(shape)

    def summarize(self, inputs: KdaInputs, exits: Tensor, transitions: Tensor, workspace: Tensor) -> None:
        outputs = KdaOutputs(inputs.v, exits, None, workspace)  # no o is written
        with device_of(inputs.q):
            prepare, summary = summaries_of(inputs.shape)
            prepare(inputs, workspace)
            summary(inputs, outputs, transitions)

    def merge_segments(self, initial: Tensor, exits: Tensor, transitions: Tensor, bounds: Tensor) -> None:
        arch = arch_of_device(initial.device) if initial.is_cuda else ARCHS[0]  # a CPU emulates
        with device_of(initial):
            merge_segments(initial, exits, transitions, bounds, sms=SMS, arch=arch)

    def execute_segments(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        with device_of(inputs.q):
            launches_of(inputs.shape)[1](inputs, outputs)
        return outputs


def device_of(x: Tensor) -> AbstractContextManager[Any]:
    """Within it the device of a tensor is the current one. A CPU (-1) emulates. To enter the context of the
    current device takes longer than to ask for it."""
    device = x.get_device()
    return nullcontext() if device < 0 or device == torch.cuda.current_device() else torch.cuda.device(device)


class Prepare(NamedTuple):
    """All of the first launch that the shape decides: the kernel, and its numbers in the order of its
    ``ARGUMENTS``."""

    kernel: Callable[..., Any]
    numbers: tuple[float, ...]

    def __call__(self, inputs: KdaInputs, workspace: Tensor | None) -> None:
        """On the current device and stream."""
        tokens = addresses(
            inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.A_log, inputs.dt_bias, inputs.cu_seqlens,
            workspace,
        )  # fmt: skip
        self.kernel(inputs.q, *tokens, *self.numbers)


class Chain(NamedTuple):
    """The same of the second launch, over the records that the first left, and of that of summaries."""

    kernel: Callable[..., Any]
    numbers: tuple[int, ...]

    def __call__(self, inputs: KdaInputs, outputs: KdaOutputs, transitions: Tensor | None = None) -> None:
        """On the current device and stream."""
        states = outputs.intermediate_states
        carried = addresses(
            inputs.cu_seqlens, inputs.initial_state, outputs.o, outputs.final_state, states, transitions,
            outputs.workspace,
        )  # fmt: skip
        count = 0 if states is None else states.shape[0] * states.shape[1]
        self.kernel(outputs.o, *carried, count, *self.numbers)


def addresses(*tensors: Tensor | None) -> list[int]:
    """0 for what is not there."""
    return [0 if x is None else x.data_ptr() for x in tensors]


@functools.lru_cache(maxsize=1024)
def launches_of(shape: ProblemShape) -> tuple[Prepare, Chain]:
    """The launches that serve a shape; compiles their kernels if no call has needed them before. The last 1024 are
    held."""
    from kda_sm100.kernels.chain import ChainKernel

    return prepare_of(shape), chain_of(shape, ChainKernel, plan(shape).chain)


@functools.lru_cache(maxsize=1024)
def summaries_of(shape: ProblemShape) -> tuple[Prepare, Chain]:
    """The same for summaries of segments."""
    from kda_sm100.kernels.summary import SummaryKernel

    return prepare_of(shape), chain_of(shape, SummaryKernel, plan(shape).summary)


def prepare_of(shape: ProblemShape) -> Prepare:
    from kda_sm100.kernels.intra_chunk import PrepareKernel

    options = shape.options
    beta_factor = (2.0 if options.allow_neg_eigval else 1.0) if options.use_beta_sigmoid_in_kernel else 0.0
    numbers = (
        shape.N, shape.T, shape.H, shape.HV, offset_bytes(shape), shape.beta_dtype.itemsize,
        int(options.use_qk_l2norm_in_kernel), shape.scale, options.lower_bound or 0.0, beta_factor,
    )  # fmt: skip
    return Prepare(get_kernel(PrepareKernel, plan(shape).prepare, arch_of(shape)), numbers)


def chain_of(shape: ProblemShape, kernel: type, config: object) -> Chain:
    options = shape.options
    numbers = (
        shape.N, shape.T, shape.HV, offset_bytes(shape), int(options.state_v_first),
        max(1, options.chunk_size // plan(shape).chunk),
    )  # fmt: skip
    return Chain(get_kernel(kernel, config, arch_of(shape)), numbers)


def arch_of(shape: ProblemShape) -> str:
    return ARCHS[0] if shape.arch is None else arch_of_capability(shape.arch)  # without a GPU: emulated


def offset_bytes(shape: ProblemShape) -> int:
    return 0 if shape.index_dtype is None else shape.index_dtype.itemsize
