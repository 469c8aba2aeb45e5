"""Arguments of the kernel, in order: one definition for the compiler, the device code and the host.

The types are those of `kda_cute.arguments`. The kernel trusts all values: the caller has checked shapes, dtypes, contiguity and alignment to 16 bytes.
"""

from __future__ import annotations

from operator import attrgetter
from typing import NamedTuple

import torch

from kda_core.contract import KdaInputs, KdaOutputs
from kda_cute.arguments import Address, Long, joined
from kda_cute.pools import (
    PitchArguments,
    PoolAddresses,
    PoolArguments,
    SegmentArguments,
    pitch_arguments,
    pool_arguments,
    segment_arguments,
)


class InputArguments(NamedTuple):
    """Tensors of `KdaInputs`, in the order of `kda_core.contract.launch_tensors`."""

    q: Address  # [B, T, H, 128] bf16
    k: Address  # [B, T, H, 128] bf16
    v: Address  # [B, T, HV, 128] bf16
    g: Address  # [B, T, HV, 128] in `PrefillConfig.gate_dtype`
    beta: Address  # [B, T, HV], elements of beta_bytes
    a_log: Address  # [HV] fp32
    dt_bias: Address  # [HV, 128] fp32
    initial_state: Address  # [N, HV, 128, 128] fp32
    offsets: Address  # [N + 1], elements of offset_bytes: bounds of packed sequences, clamped to [0, T]


class OutputArguments(NamedTuple):
    """Tensors of `KdaOutputs`."""

    o: Address  # [B, T, HV, 128] bf16
    final_state: Address  # [N, HV, 128, 128] fp32; in the mode summarize, the exit states
    states: Address  # [state_count, HV, 128, 128]: intermediate or saved states, bf16; fp32 before every 512 tokens
    workspace: Address  # uint8, see `layouts`
    residual: Address  # [B, T, HV, 128] bf16


class LaunchArguments(NamedTuple):
    """Other arguments that change from call to call."""

    ticket: Long  # no earlier launch has had it; 0: the caller has cleared the counters
    transitions: Address  # [N, HV, 128, 128] fp32; written in the mode summarize
    state_count: int  # states per value head, over all rows of B


class BackwardArguments(NamedTuple):
    """Arguments of the modes of a backward, all 0 in the others.

    In these modes v and initial_state are the gradients of o and of the final states, and o, final_state and states take those of v,
    of the initial states, and of the states behind chunks, as images (`layouts.unpack_states`). A launch computes a *slab*: some
    consecutive slots of every head. The arrays of states begin with the slab. The first three tensors belong to the mode
    ``recompute``.
    """

    checkpoints: Address = Address(0)  # [slots of 512 tokens, HV, 128, 128] fp32: S before them, of all slabs
    forward_v: Address = Address(0)  # [B, T, HV, 128] bf16: v
    forward_states: Address = Address(
        0
    )  # [chunks, HV, 128, 128] bf16, written: S before every chunk, as images
    from_slab: Address = Address(
        0
    )  # [HV, 2, 64 * 128] fp32: dS behind the slab, of the sequence that continues there
    to_slab: Address = Address(0)  # the same, written: dS before the slab
    first_slot: int = 0  # of the slab
    slab_slots: int = 0
    residual_row: int = 0  # bytes of a row of `residual`


class ShapeArguments(NamedTuple):
    """Arguments that the shape and its launch configuration determine."""

    N: int  # sequences: one per row of B, or packed along T (then B = 1)
    T: int  # tokens per row of B
    H: int  # query and key heads
    HV: int  # value heads
    offset_bytes: int  # bytes of an element of offsets: 4 or 8; 0: sequences are not packed
    beta_bytes: int  # 2: bf16, 4: fp32
    l2norm: int  # 1: normalise q and k
    v_first: int  # 1: states are [V, K]; 0: [K, V]
    saved: int  # 1: states are `KdaOutputs.saved_states`, [K, V] in slots; 0: intermediate states, dense, laid out by v_first
    every: int  # chunks between states
    intra_chunk_ctas: int
    queues: int
    depth: int  # records in the ring of a queue; in the modes summarize and execute, records of the workspace
    scale: float
    lower_bound: float  # of the bounded gate
    beta_factor: float  # factor on the sigmoid of beta; 0: beta is used without a sigmoid


#: The arguments of a launch, and those of the variants for serving, in the mode ``whole`` and in the modes of segments.
PrefillArguments = joined(
    "PrefillArguments", InputArguments, OutputArguments, LaunchArguments, BackwardArguments, ShapeArguments
)
ServingPrefillArguments = joined(
    "ServingPrefillArguments", PoolAddresses, PrefillArguments, PoolArguments, PitchArguments
)
SegmentPrefillArguments = joined("SegmentPrefillArguments", ServingPrefillArguments, SegmentArguments)


#: Names that differ in the contract.
_CONTRACT_NAMES = {"a_log": "A_log", "offsets": "cu_seqlens"}

_inputs = attrgetter(*(_CONTRACT_NAMES.get(name, name) for name in InputArguments._fields))


def states_of(outputs: KdaOutputs) -> torch.Tensor | None:
    """Returns the intermediate or the saved states. A call has no more than one of them."""
    return outputs.intermediate_states if outputs.saved_states is None else outputs.saved_states


def addresses(inputs: KdaInputs, outputs: KdaOutputs) -> list[int]:
    """Returns the `InputArguments` and the `OutputArguments` of a call."""
    tensors: tuple[torch.Tensor | None, ...] = (
        *_inputs(inputs), outputs.o, outputs.final_state, states_of(outputs), outputs.workspace, outputs.residual,
    )  # fmt: skip
    return [0 if x is None else x.data_ptr() for x in tensors]


def serving_arguments(inputs: KdaInputs) -> tuple[int, ...]:
    """Returns the arguments of a variant for serving behind those of `PrefillArguments`."""
    more = (*pool_arguments(inputs), *pitch_arguments(inputs))
    return more if inputs.segments is None else (*more, *segment_arguments(inputs))
