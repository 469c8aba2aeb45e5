"""The backend object: two launches, the preparation of all chunks and the chain over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kda_core.contract import KdaInputs, KdaOutputs, ProblemShape
from kda_core.cute import get_kernel
from kda_sm90 import layouts
from kda_sm90.plan import Plan, plan, refusal

ARCH = "sm_90a"


class Sm90Backend:
    """Satisfies `kda_core.backend.Backend`. It has no state of its own; compiled kernels are shared by the process."""

    def can_run(self, shape: ProblemShape) -> str | None:
        return refusal(shape)

    def workspace_bytes(self, shape: ProblemShape) -> int:
        chosen = plan(shape)
        return layouts.workspace_bytes(chosen.slots, shape.HV, chosen.prepare.chunk)

    def prepare(self, shape: ProblemShape) -> None:
        kernels(plan(shape))

    def chunk_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        shape, options = inputs.shape, inputs.options
        if shape.T == 0:
            return pass_states(inputs, outputs)
        chosen = plan(shape)
        prepare, chain = kernels(chosen)
        assert outputs.workspace is not None  # `workspace_bytes` is positive where there are tokens
        workspace = layouts.split_workspace(outputs.workspace, chosen.slots, shape.HV, chosen.prepare.chunk)
        bound = 0.0 if options.lower_bound is None else options.lower_bound
        with torch.cuda.device(inputs.q.device):
            prepare(
                inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.A_log, inputs.dt_bias, inputs.cu_seqlens, *workspace,
                shape.scale, bound,
            )  # fmt: skip
            chain(
                *workspace, inputs.cu_seqlens, inputs.initial_state,
                outputs.o, outputs.final_state, outputs.intermediate_states,
            )  # fmt: skip
        return outputs


def kernels(chosen: Plan) -> tuple[Callable[..., Any], ...]:
    """The compiled kernels of a plan, in the order of `launches`."""
    return tuple(get_kernel(kernel, config, ARCH) for kernel, config in launches(chosen))


def launches(chosen: Plan) -> tuple[tuple[type, object], ...]:
    """(kernel class, configuration) of each launch of a plan: the preparation, the chain. Imports the DSL."""
    from kda_sm90.kernels.chain import ChainKernel
    from kda_sm90.kernels.prepare import PrepareKernel

    return (PrepareKernel, chosen.prepare), (ChainKernel, chosen.chain)


def pass_states(inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
    """A call without tokens: final states are the initial ones."""
    if outputs.final_state is not None:
        if inputs.initial_state is None:
            outputs.final_state.zero_()
        else:
            outputs.final_state.copy_(inputs.initial_state)
    return outputs
