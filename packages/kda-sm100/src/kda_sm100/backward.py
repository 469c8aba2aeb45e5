"""The backward: its launches over one workspace.

For each slab of slots, from the last to the first:

1. the intra-chunk kernel makes the records of the slab, with T;
2. ``recompute``, unless the forward has saved states every 64 tokens and R: a chain for every slot of 512 tokens computes both;
3. ``reverse``: the chains of the backward store dv, the gradients of the states, and that of the initial state;
4. `kernels.gradients`: everything else, parallel over chunks.

If the forward has saved nothing, the chains ``checkpoint`` come first, slab after slab in ascending order.

`Summary` computes how the segments of a sequence act on gradients of states, so that `kda-cp` can cut the sequence.
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
from kda_cute.records import Gate, GateDtype
from kda_sm100 import layouts
from kda_sm100.arguments import (
    BACKWARD_CHAINS,
    GRADIENTS,
    INTRA_CHUNK,
    BackwardChainArguments,
    SlabIntraChunkArguments,
)
from kda_sm100.config import HEAD_DIM, SMS, BackwardChainConfig, IntraChunkConfig, Mode
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


class SlabLaunches(NamedTuple):
    """The launches over one slab of a shape after the other, without that of the gradients kernel."""

    intra_chunk: Callable[..., Any]
    chains: dict[Mode, Callable[..., Any]]
    slabs: Slabs

    def make_records(self, inputs: KdaInputs, leading: Tensor, records: Tensor, first: int) -> None:
        """Makes the records of a slab. ``leading``: a tensor of the device. ``first``: the first slot of the slab."""
        x = inputs
        arguments = SlabIntraChunkArguments(
            *map(address, (x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, x.cu_seqlens, records)),
            **intra_chunk_numbers(x.shape), **self.slab_numbers(x.shape, first),
        )  # fmt: skip
        self.intra_chunk(leading, *arguments)

    def run_chain(
        self, mode: Mode, inputs: KdaInputs, leading: Tensor, records: Tensor, between: Tensor, first: int, **given: Any
    ) -> None:  # fmt: skip
        """Runs the chains of a mode over a slab. ``between``: the states that pass from slab to slab, twice. ``given``: fields of
        `BackwardChainArguments`."""
        s, from_slab, to_slab = inputs.shape, None, None
        if self.slabs.slots < self.slabs.total:
            turn = first // self.slabs.slots % 2
            from_slab, to_slab = between[1 - turn], between[turn]
        arguments = pack(
            BackwardChainArguments, offsets=inputs.cu_seqlens, workspace=records, from_slab=from_slab,
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


class Backward(NamedTuple):
    """The launches of a backward of a shape."""

    launches: SlabLaunches
    gradients: GradientsLaunch
    spacing: int  # see `arrays`

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
        views = Workspace(*split(workspace, arrays(inputs.shape, self.spacing, self.launches.slabs)))
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
        checkpoints, slabs, records = saved_states, self.launches.slabs, workspace.records
        run_chain = functools.partial(
            self.launches.run_chain, inputs=inputs, leading=gradients.q, records=records, between=workspace.between
        )  # fmt: skip
        if not self.spacing:
            checkpoints = workspace.checkpoints
            for first in sorted(slabs.starts()):
                self.launches.make_records(inputs, gradients.q, records, first)
                run_chain("checkpoint", first=first, entry=inputs.initial_state, checkpoints=checkpoints)
        assert checkpoints is not None  # `launch_of` was told what was saved
        sums = None
        for first in slabs.starts():
            self.launches.make_records(inputs, gradients.q, records, first)
            if self.spacing == CHUNK:
                states, r = checkpoints[first:], residual
            else:
                # the memory of dg takes R until the gradients kernel, which reads R first, writes dg
                states, r = workspace.states, gradients.g
                run_chain(
                    "recompute", first=first, checkpoints=checkpoints, states=states, residual=r,
                    residual_row=HEAD_DIM * r.element_size(),
                )  # fmt: skip
            assert r is not None
            run_chain(
                "reverse", first=first, entry=grad_final_state, exit=gradients.initial_state, states=workspace.grad_states,
                grad_o=grad_o, o=gradients.v,
            )  # fmt: skip
            of_slab = GradientTensors(r, states, workspace.grad_states, workspace.partials, workspace.scratch)
            self.gradients(inputs, grad_o, gradients, of_slab, first, slabs.slots)
            partials = workspace.partials.sum(0)
            sums = partials if sums is None else sums.add_(partials)
        assert sums is not None  # a call has a slab at least
        store_sums(gradients, sums)


@functools.lru_cache(maxsize=1024)
def launch_of(shape: ProblemShape, spacing: int) -> Backward:
    """Returns the launches for a shape. Compiles their kernels on first use. Caches the last 1024 results. ``spacing``: as in `arrays`."""
    slabs = slabs_of(shape, spacing)
    modes: tuple[Mode, ...] = ("reverse",)
    if spacing != CHUNK:
        modes = ("recompute", "reverse") if spacing else ("checkpoint", "recompute", "reverse")
    gradients = get_kernel(GRADIENTS, GradientsConfig(*_gate(shape)), arch_of(shape))
    return Backward(
        _slab_launches(shape, modes, slabs),
        gradients_launch(gradients, shape, slabs, SMS, state_images=False),
        spacing,
    )


def _slab_launches(shape: ProblemShape, modes: tuple[Mode, ...], slabs: Slabs) -> SlabLaunches:
    config = IntraChunkConfig(CHUNK, *_gate(shape), backward=True)
    get = functools.partial(get_kernel, arch=arch_of(shape))
    return SlabLaunches(
        get(INTRA_CHUNK, config),
        {mode: get(BACKWARD_CHAINS[mode], BackwardChainConfig(mode)) for mode in modes},
        slabs,
    )


def _gate(shape: ProblemShape) -> tuple[Gate, bool, GateDtype]:
    """Returns the fields of a configuration that the gate determines."""
    return gate_of(shape), not shape.options.bounded_gate, DTYPES[shape.g_dtype]


# ---- how segments act on gradients of states


class SummaryWorkspace(NamedTuple):
    """Arrays of the workspace of `Summary`, in memory order."""

    records: Tensor  # as in `Workspace`
    between: Tensor  # [2, 2, HV, 128, 128] fp32: N and M^T that pass from slab to slab; empty for one slab


def summary_arrays(shape: ProblemShape, slabs: Slabs) -> Arrays:
    """Returns the dtype and shape of every array of `SummaryWorkspace`."""
    records = layouts.workspace_bytes(slabs.chunks * shape.HV, CHUNK, backward=True)
    passes = 2 if slabs.slots < slabs.total else 0
    return {
        "records": (torch.uint8, (records,)),
        "between": (torch.float32, (passes, 2, shape.HV, HEAD_DIM, HEAD_DIM)),
    }


@functools.lru_cache(maxsize=1024)
def summary_slabs_of(shape: ProblemShape) -> Slabs:
    """Returns the slabs of `Summary`, whose workspace has the bound of a backward's."""
    total = layouts.slot_count(shape.B, shape.T, CHUNK, shape.N if shape.varlen else None)
    size = lambda slabs: total_bytes(summary_arrays(shape, slabs))
    return cut(CHUNK, total, size, BUDGETS[shape.options.disable_recompute], 0)


def summary_workspace_bytes(shape: ProblemShape) -> int:
    """Returns the bytes of the workspace of `summary_of`."""
    return total_bytes(summary_arrays(shape, summary_slabs_of(shape)))


class Summary(NamedTuple):
    """The launches of the mode ``reverse_summarize``."""

    launches: SlabLaunches

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
        launches = self.launches
        of = SummaryWorkspace(*split(workspace, summary_arrays(inputs.shape, launches.slabs)))
        for first in launches.slabs.starts():
            launches.make_records(inputs, grad_o, of.records, first)
            launches.run_chain(
                "reverse_summarize", inputs, grad_o, of.records, of.between, first, entry=grad_final_state, exit=gradients,
                transitions=transitions, grad_o=grad_o,
            )  # fmt: skip


@functools.lru_cache(maxsize=1024)
def summary_of(shape: ProblemShape) -> Summary:
    """Returns the launches for N segments packed along T. Compiles their kernels on first use. Caches the last 1024 results."""
    return Summary(_slab_launches(shape, ("reverse_summarize",), summary_slabs_of(shape)))
