"""Arguments of the kernel, in order: one definition for the compiler, the device code and the host.

On the device an ``Address``, a ``Ticket`` and a ``Long`` are 64-bit integers, an ``int`` has 32 bits and a ``float`` is an fp32.
The kernel trusts all values: the caller has checked shapes, dtypes, contiguity and alignment to 16 bytes.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, NamedTuple, NewType, get_type_hints

import torch

from kda_core.contract import KdaInputs, KdaOutputs
from kda_cute.arguments import address
from kda_cute.host import PER_TOKEN, token_stride

#: A global memory address; 0 for an absent tensor.
Address = NewType("Address", int)

#: A 64-bit number that identifies a launch.
Ticket = NewType("Ticket", int)


#: A 64-bit number.
Long = NewType("Long", int)


class InputArguments(NamedTuple):
    """Tensors of `KdaInputs`."""

    q: Address  # [B, T, H, 128] bf16
    k: Address  # [B, T, H, 128] bf16
    v: Address  # [B, T, HV, 128] bf16
    g: Address  # [B, T, HV, 128] in `PrefillConfig.gate_dtype`
    beta: Address  # [B, T, HV], elements of beta_bytes
    a_log: Address  # [HV] fp32
    dt_bias: Address  # [HV, 128] fp32
    offsets: Address  # [N + 1], elements of offset_bytes: bounds of packed sequences, clamped to [0, T]
    initial_state: Address  # [N, HV, 128, 128] fp32


class OutputArguments(NamedTuple):
    """Tensors of `KdaOutputs`."""

    o: Address  # [B, T, HV, 128] bf16
    final_state: Address  # [N, HV, 128, 128] fp32; in the mode summarize, the exit states
    states: Address  # [state_count, HV, 128, 128]: intermediate or saved states, bf16; fp32 before every 512 tokens
    workspace: Address  # uint8, see `layouts`
    residual: Address  # [B, T, HV, 128] bf16


class LaunchArguments(NamedTuple):
    """Other arguments that change from call to call."""

    ticket: Ticket  # no earlier launch has had it; 0: the caller has cleared the counters
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


class ServingArguments(NamedTuple):
    """Further arguments of the variants for serving (`PrefillConfig.serving`). Pitches are in bytes.

    In a call without a pool, state n is that of sequence n: `read_bytes` and `write_bytes` are 0, and `slots` is N.
    """

    pool: Address  # [slots, HV, 128, 128], from which sequences start; 0: all start from zeros
    pool_pitch: Long  # from a slot to the next
    into: Address  # the same, to which final states go; 0: they go nowhere
    into_pitch: Long
    read: Address  # [N], elements of read_bytes: the slot from which a sequence starts
    write: Address  # [N], the slot of its final state
    has_initial_state: Address  # [N] bool; 0: all have one
    slots: Long  # those of the pool are [least_slot, slots)
    least_slot: Long
    checkpoint_states: Address  # [checkpoint_slots, HV, 128, 128]
    checkpoint_pitch: Long
    checkpoint_slots: Long
    checkpoint_cu: Address  # [N + 1] int32; 0: the call has no checkpoints
    checkpoint_positions: Address  # [checkpoint_count] int32
    checkpoint_indices: Address  # [checkpoint_count], elements of read_bytes
    q_pitch: Long  # from a token to the next, also from the last one of a row of B to the first one of the next row
    k_pitch: Long
    v_pitch: Long
    g_pitch: Long
    beta_pitch: Long
    checkpoint_count: int
    read_bytes: int  # 4 or 8; 0: state n is that of sequence n
    write_bytes: int  # the same of `into`
    narrow: int  # 1: the pool is in bf16; 0: fp32
    into_narrow: int  # the same of `into`
    checkpoint_narrow: int  # and of `checkpoint_states`


class SegmentArguments(NamedTuple):
    """Further arguments of the variants for serving in the modes ``summarize`` and ``execute``: `KdaInputs.segments`. There N is the
    number of segments, and the arrays of `ServingArguments` belong to their sequences."""

    segment_sequence: Address  # [N] int32
    segment_before: Address  # [N] int32
    segment_ends: Address  # [N] bool


#: Name and type of every argument after the leading tensor, in order.
ARGUMENTS: dict[str, Any] = {
    name: kind
    for group in (InputArguments, OutputArguments, LaunchArguments, BackwardArguments, ShapeArguments)
    for name, kind in get_type_hints(group).items()
}

#: The same of the variants for serving.
SERVING_ARGUMENTS: dict[str, Any] = ARGUMENTS | get_type_hints(ServingArguments)

#: The same of those in the modes ``summarize`` and ``execute``.
SEGMENT_ARGUMENTS: dict[str, Any] = SERVING_ARGUMENTS | get_type_hints(SegmentArguments)

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


def serving_arguments(inputs: KdaInputs, outputs: KdaOutputs) -> ServingArguments:
    """Returns the further arguments of a variant for serving."""
    x, s, pool = inputs, inputs.shape, inputs.pool
    row = 4 * s.HV * s.K * s.V  # bytes of a state in fp32
    states, into = _Slots(x.initial_state, row), _Slots(outputs.final_state, row)
    values: dict[str, Any] = dict.fromkeys(ServingArguments._fields, 0)
    values["slots"] = s.N
    for name in PER_TOKEN:
        y = getattr(x, name)
        values[f"{name}_pitch"] = (token_stride(y) or 0) * y.element_size()
    if pool is not None and s.pool is not None:
        states, index_bytes = _Slots.of(pool.states), pool.read.element_size()
        if x.segments is not None:
            into = _Slots(None, 0)  # the final states of segments are not those of sequences
        if s.pool.writes:
            into, values["write_bytes"] = states, index_bytes
        values |= {
            "slots": len(pool.states), "least_slot": pool.first_slot, "read_bytes": index_bytes,
            "read": address(pool.read), "write": address(pool.write), "has_initial_state": address(pool.has_initial_state),
        }  # fmt: skip
        if (points := pool.checkpoints) is not None and len(points.positions):
            kept = _Slots.of(points.states)
            values |= {
                "checkpoint_states": address(kept.states), "checkpoint_pitch": kept.pitch, "checkpoint_narrow": kept.narrow,
                "checkpoint_slots": len(points.states), "checkpoint_count": len(points.positions),
                "checkpoint_cu": address(points.cu), "checkpoint_positions": address(points.positions),
                "checkpoint_indices": address(points.indices),
            }  # fmt: skip
    values |= {
        "pool": address(states.states), "pool_pitch": states.pitch, "narrow": states.narrow,
        "into": address(into.states), "into_pitch": into.pitch, "into_narrow": into.narrow,
    }  # fmt: skip
    return ServingArguments(**values)


def segment_arguments(inputs: KdaInputs) -> SegmentArguments:
    """Returns the further arguments of a variant for serving that summarizes or executes segments."""
    segments = inputs.segments
    assert segments is not None
    return SegmentArguments(*map(address, (segments.sequence, segments.before, segments.ends)))  # type: ignore[arg-type]


class _Slots(NamedTuple):
    """States in slots, and the bytes from a slot to the next."""

    states: torch.Tensor | None
    pitch: int

    @classmethod
    def of(cls, states: torch.Tensor) -> _Slots:
        return cls(states, states.stride(0) * states.element_size())

    @property
    def narrow(self) -> int:
        """1 for bf16, 0 for fp32."""
        return int(self.states is not None and self.states.dtype == torch.bfloat16)
