"""The backend object: two launches, the preparation of all chunks and the chains over them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kda_core.contract import KdaInputs, KdaOutputs, ProblemShape
from kda_core.cute import arch_of_capability, get_kernel
from kda_sm100.config import ARCHS
from kda_sm100.plan import plan, refusal


class Sm100Backend:
    """Satisfies `kda_core.backend.Backend`. It has no state of its own; compiled kernels are shared by the process."""

    def can_run(self, shape: ProblemShape) -> str | None:
        return refusal(shape)

    def workspace_bytes(self, shape: ProblemShape) -> int:
        return plan(shape).workspace_bytes

    def prepare(self, shape: ProblemShape) -> None:
        launch_of(shape)

    def chunk_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        if inputs.shape.T == 0:
            return pass_states(inputs, outputs)
        device = inputs.q.get_device()
        # A CPU (-1) emulates. To enter the context of the current device takes longer than to ask for it.
        if device < 0 or device == torch.cuda.current_device():
            launch_of(inputs.shape)(inputs, outputs)
        else:
            with torch.cuda.device(device):
                launch_of(inputs.shape)(inputs, outputs)
        return outputs


class Launch(NamedTuple):
    """All of a call's launches that the shape decides: the kernels, and of each its numbers in the order of its
    ``ARGUMENTS``."""

    prepare: Callable[..., Any]
    prepare_numbers: tuple[float, ...]
    chain: Callable[..., Any]
    chain_numbers: tuple[int, ...]

    def __call__(self, inputs: KdaInputs, outputs: KdaOutputs) -> None:
        """On the current device and stream."""
        states, workspace = outputs.intermediate_states, outputs.workspace
        tokens = addresses(
            inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.A_log, inputs.dt_bias, inputs.cu_seqlens,
            workspace,
        )  # fmt: skip
        self.prepare(inputs.q, *tokens, *self.prepare_numbers)
        carried = addresses(
            inputs.cu_seqlens, inputs.initial_state, outputs.o, outputs.final_state, states, workspace
        )
        count = 0 if states is None else states.shape[0] * states.shape[1]
        self.chain(outputs.o, *carried, count, *self.chain_numbers)


def addresses(*tensors: torch.Tensor | None) -> list[int]:
    """0 for what is not there."""
    return [0 if x is None else x.data_ptr() for x in tensors]


@functools.lru_cache(maxsize=1024)
def launch_of(shape: ProblemShape) -> Launch:
    """The launches that serve a shape; compiles their kernels if no call has needed them before. The last 1024 are
    held."""
    from kda_sm100.kernels.chain import ChainKernel
    from kda_sm100.kernels.prepare import PrepareKernel

    chosen, options = plan(shape), shape.options
    arch = ARCHS[0] if shape.arch is None else arch_of_capability(shape.arch)  # without a GPU: emulated
    offset_bytes = 0 if shape.index_dtype is None else shape.index_dtype.itemsize
    beta_factor = (2.0 if options.allow_neg_eigval else 1.0) if options.use_beta_sigmoid_in_kernel else 0.0
    return Launch(
        get_kernel(PrepareKernel, chosen.prepare, arch),
        (
            shape.N, shape.T, shape.H, shape.HV, offset_bytes, shape.beta_dtype.itemsize,
            int(options.use_qk_l2norm_in_kernel), shape.scale, options.lower_bound or 0.0, beta_factor,
        ),
        get_kernel(ChainKernel, chosen.chain, arch),
        (
            shape.N, shape.T, shape.HV, offset_bytes, int(options.state_v_first),
            max(1, options.chunk_size // chosen.chunk),
        ),
    )  # fmt: skip


def pass_states(inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
    """A call without tokens: final states are the initial ones."""
    if outputs.final_state is not None:
        if inputs.initial_state is None:
            outputs.final_state.zero_()
        else:
            outputs.final_state.copy_(inputs.initial_state)
    return outputs
