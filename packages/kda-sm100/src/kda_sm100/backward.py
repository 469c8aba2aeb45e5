"""The backward: its launches over one workspace.

For each slab of slots, from the last to the first:

1. the intra-chunk kernel makes the records of the slab, with T;
2. ``recompute``, unless the forward has saved states every 64 tokens and R: a chain for every slot of 512 tokens computes both;
3. ``reverse``: the chains of the backward store dv, the gradients of the states, and that of the initial state;
4. `kernels.gradients`: everything else, parallel over chunks.

If the forward has saved nothing, the chains ``checkpoint`` come first, slab after slab in ascending order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kda_core.contract import KdaGradients, KdaInputs, ProblemShape
from kda_cute import get_kernel
from kda_cute.arguments import address, pack
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
from kda_sm100 import layouts
from kda_sm100.arguments import (
    BACKWARD_CHAINS,
    GRADIENTS,
    INTRA_CHUNK,
    BackwardChainArguments,
    SlabIntraChunkArguments,
)
from kda_sm100.config import HEAD_DIM, MODES, SMS, BackwardChainConfig, IntraChunkConfig, Mode
from kda_sm100.launch import arch_of, intra_chunk_numbers, offset_bytes


class Workspace(NamedTuple):
    """Arrays of the workspace of a backward, in memory order."""

    records: Tensor  # uint8: records of a slab, with T (`layouts`)
    checkpoints: Tensor  # [slots of 512 tokens, HV, 128, 128] fp32: S of all slabs; empty if S is saved
    between: Tensor  # [2, HV, 128, 128] fp32: the state that passes from slab to slab; empty for one slab
    states: Tensor  # [chunks, HV, 128, 128] bf16: S before every chunk of a slab; empty if S is saved
    grad_states: Tensor  # [chunks, HV, 128, 128] bf16: images of dS' behind every chunk of a slab
    partials: Tensor  # [chunks, HV, 2, 128] fp32: (dt_bias, A_log) of a chunk
    scratch: Tensor  # [CTAs, 2, 64 * 128] fp32; empty unless HV > H


def arrays(shape: ProblemShape, spacing: int, slabs: Slabs) -> Arrays:
    """Returns the dtype and shape of every array of `Workspace`. ``spacing``: tokens between the states that the forward has saved; 0
    if it has saved none."""
    matrix, chunks = (shape.HV, HEAD_DIM, HEAD_DIM), slabs.chunks
    records = layouts.workspace_bytes(chunks * shape.HV, CHUNK, backward=True)
    return {
        "records": (torch.uint8, (records,)),
        "checkpoints": (torch.float32, (0 if spacing else slabs.total, *matrix)),
        "between": (torch.float32, (2 if slabs.slots < slabs.total else 0, *matrix)),
        "states": (torch.bfloat16, (0 if spacing == CHUNK else chunks, *matrix)),
        "grad_states": (torch.bfloat16, (chunks, *matrix)),
        "partials": (torch.float32, (chunks, shape.HV, 2, HEAD_DIM)),
        "scratch": (torch.float32, scratch_shape(shape, SMS)),
    }


@functools.lru_cache(maxsize=1024)
def slabs_of(shape: ProblemShape, spacing: int, budget: int | None = None) -> Slabs:
    """Returns the slabs of a backward.

    Args:
        spacing: as in `arrays`.
        budget: bytes of the workspace (None: those of `kda_cute.backward.BUDGETS`). If the forward saved nothing, the states every 512
            tokens may take three quarters of it; beyond that it grows with them.
    """
    budget = BUDGETS[shape.options.disable_recompute] if budget is None else budget
    tokens = CHUNK if spacing == CHUNK else CHECKPOINT
    total = layouts.slot_count(shape.B, shape.T, tokens, shape.N if shape.varlen else None)
    size = lambda slabs: total_bytes(arrays(shape, spacing, slabs))
    return cut(tokens, total, size, budget, 0 if spacing else budget // 4)


@functools.lru_cache(maxsize=1024)
def workspace_bytes(shape: ProblemShape) -> int:
    """Returns the bytes of the workspace, whether or not the forward saves states."""
    spacings = 0, CHUNK if shape.options.disable_recompute else CHECKPOINT
    return max(total_bytes(arrays(shape, n, slabs_of(shape, n))) for n in spacings)


class Backward(NamedTuple):
    """The launches of a backward of a shape."""

    intra_chunk: Callable[..., Any]
    chains: dict[Mode, Callable[..., Any]]
    gradients: GradientsLaunch
    spacing: int  # see `arrays`
    slabs: Slabs

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
        """Writes the gradients of a call, on the current device and stream. ``workspace``: uint8, aligned to 128 bytes."""
        views = Workspace(*split(workspace, arrays(inputs.shape, self.spacing, self.slabs)))
        self.run(inputs, grad_o, grad_final_state, gradients, views, saved_states, residual)

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
        checkpoints = saved_states
        if not self.spacing:
            checkpoints = workspace.checkpoints
            for first in sorted(self.slabs.starts()):
                self.make_records(inputs, gradients.q, workspace, first)
                self.run_chain(
                    "checkpoint", inputs, gradients.q, workspace, first, entry=inputs.initial_state,
                    checkpoints=checkpoints,
                )  # fmt: skip
        assert checkpoints is not None  # `launch_of` was told what was saved
        sums = None
        for first in self.slabs.starts():
            self.make_records(inputs, gradients.q, workspace, first)
            if self.spacing == CHUNK:
                states, r = checkpoints[first:], residual
            else:
                # the memory of dg takes R until the gradients kernel, which reads R first, writes dg
                states, r = workspace.states, gradients.g
                self.run_chain(
                    "recompute", inputs, gradients.q, workspace, first, checkpoints=checkpoints, states=states,
                    residual=r, residual_row=HEAD_DIM * r.element_size(),
                )  # fmt: skip
            assert r is not None
            self.run_chain(
                "reverse", inputs, gradients.q, workspace, first, entry=grad_final_state, exit=gradients.initial_state,
                states=workspace.grad_states, grad_o=grad_o, o=gradients.v,
            )  # fmt: skip
            of_slab = GradientTensors(r, states, workspace.grad_states, workspace.partials, workspace.scratch)
            self.gradients(inputs, grad_o, gradients, of_slab, first, self.slabs.slots)
            partials = workspace.partials.sum(0)
            sums = partials if sums is None else sums.add_(partials)
        assert sums is not None  # a call has a slab at least
        store_sums(gradients, sums)

    def make_records(self, inputs: KdaInputs, leading: Tensor, workspace: Workspace, first: int) -> None:
        """Makes the records of a slab. ``leading``: a tensor of the device. ``first``: the first slot of the slab."""
        x = inputs
        arguments = SlabIntraChunkArguments(
            *map(address, (x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.cu_seqlens, workspace.records)),
            **intra_chunk_numbers(x.shape), **self.slab_numbers(x.shape, first),
        )  # fmt: skip
        self.intra_chunk(leading, *arguments)

    def run_chain(
        self, mode: Mode, inputs: KdaInputs, leading: Tensor, workspace: Workspace, first: int, **given: Any
    ) -> None:
        """Runs the chains of a mode over a slab. ``given``: fields of `BackwardChainArguments`."""
        s, from_slab, to_slab = inputs.shape, None, None
        if self.slabs.slots < self.slabs.total:
            turn = first // self.slabs.slots % 2
            from_slab, to_slab = workspace.between[1 - turn], workspace.between[turn]
        arguments = pack(
            BackwardChainArguments, offsets=inputs.cu_seqlens, workspace=workspace.records, from_slab=from_slab,
            to_slab=to_slab, N=s.N, T=s.T, HV=s.HV, offset_bytes=offset_bytes(s), v_first=int(s.options.state_v_first),
            **{"residual_row": 0} | given | self.slab_numbers(s, first),
        )  # fmt: skip
        self.chains[mode](leading, *arguments)

    def slab_numbers(self, shape: ProblemShape, first: int) -> dict[str, int]:
        """Returns the values of `SlabArguments`."""
        slabs = self.slabs
        return {
            "records": slabs.chunks * shape.HV, "first_slot": first, "slab_slots": slabs.slots,
            "slot_tokens": slabs.slot_tokens,
        }  # fmt: skip


@functools.lru_cache(maxsize=1024)
def launch_of(shape: ProblemShape, spacing: int) -> Backward:
    """Returns the launches for a shape. Compiles their kernels on first use. Caches the last 1024 results. ``spacing``: as in `arrays`."""
    arch, unbounded, slabs = arch_of(shape), not shape.options.bounded_gate, slabs_of(shape, spacing)
    gate = gate_of(shape), unbounded, DTYPES[shape.g_dtype]
    modes: tuple[Mode, ...] = ("reverse",)
    if spacing != CHUNK:
        modes = ("recompute", "reverse") if spacing else MODES
    chains = {mode: get_kernel(BACKWARD_CHAINS[mode], BackwardChainConfig(mode), arch) for mode in modes}
    gradients = get_kernel(GRADIENTS, GradientsConfig(*gate), arch)
    return Backward(
        get_kernel(INTRA_CHUNK, IntraChunkConfig(CHUNK, *gate, backward=True), arch),
        chains,
        gradients_launch(gradients, shape, slabs, SMS, state_images=False),
        spacing,
        slabs,
    )
