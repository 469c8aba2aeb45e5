"""Arguments of a prefill over a pool of states, in order: one definition for the compiler, the device code and the host.

The rules are those of `kda_core.contract.KdaPool` and `KdaCheckpoints`. `kda_cute.device.pools` reads the arguments on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from kda_core.contract import KdaCheckpoints, KdaInputs, KdaOutputs, launch_tensors
from kda_cute.arguments import Address, Long, address
from kda_cute.host import PER_TOKEN, token_stride


class PoolAddresses(NamedTuple):
    """The tensors of a call that reads or writes states in slots. A kernel has them in front, so that a prepared launch fixes the rest.

    In a call without a pool, state n is that of sequence n.
    """

    pool: Address  # [slots, HV, 128, 128], from which sequences start; 0: all start from zeros
    into: Address  # the same, to which final states go; 0: they go nowhere
    read: Address  # [N], elements of read_bytes: the slot from which a sequence starts
    write: Address  # [N], the slot of its final state
    has_initial_state: Address  # [N] bool; 0: all have one
    checkpoint_states: Address  # [checkpoint_slots, HV, 128, 128]
    checkpoint_cu: Address  # [N + 1] int32; 0: the call has no checkpoints
    checkpoint_positions: Address  # [checkpoint_count] int32
    checkpoint_indices: Address  # [checkpoint_count], elements of read_bytes


class PoolArguments(NamedTuple):
    """Further arguments of such a call. Pitches, from a slot to the next, are in bytes.

    In a call without a pool, `read_bytes` and `write_bytes` are 0, and `slots` is N.
    """

    pool_pitch: Long
    into_pitch: Long
    slots: Long  # those of the pool are [least_slot, slots)
    least_slot: Long
    checkpoint_pitch: Long
    checkpoint_slots: Long
    checkpoint_count: int
    read_bytes: int  # 4 or 8; 0: state n is that of sequence n
    write_bytes: int  # the same of `into`
    narrow: int  # 1: the pool is in bf16; 0: fp32
    into_narrow: int  # the same of `into`
    checkpoint_narrow: int  # and of `checkpoint_states`


class SegmentArguments(NamedTuple):
    """Further arguments of a call in segments over a pool: `kda_core.contract.KdaSegments`. N is then the number of segments, and the arrays
    of `PoolAddresses` belong to their sequences."""

    segment_sequence: Address  # [N] int32
    segment_before: Address  # [N] int32
    segment_ends: Address  # [N] bool


class PitchArguments(NamedTuple):
    """Bytes from a token to the next in each input, also from the last token of a row of B to the first one of the next row."""

    q_pitch: Long
    k_pitch: Long
    v_pitch: Long
    g_pitch: Long
    beta_pitch: Long


#: Returns `PoolAddresses` from the addresses of `kda_core.contract.launch_tensors` and that of the final states.
Places = Callable[[Sequence[int], int], tuple[int, ...]]


def pool_places(inputs: KdaInputs) -> Places:
    """Returns the function of calls like this one."""
    pool, facts, points = inputs.pool, inputs.shape.pool, _checkpoints(inputs)
    if pool is None or facts is None:
        return lambda given, final_state: (given[_STATES], final_state, 0, 0, 0, 0, 0, 0, 0)
    no_points = () if points is not None else (0, 0, 0, 0)
    last = _SLOTS + 8 if points is not None else _SLOTS + 4
    # the final states of segments are not those of sequences
    writes, in_segments = facts.writes, inputs.segments is not None

    def places(given: Sequence[int], final_state: int) -> tuple[int, ...]:
        states, (read, write, has_initial_state, _, *kept) = given[_STATES], given[_SLOTS:last]
        into = states if writes else 0 if in_segments else final_state
        return (states, into, read, write, has_initial_state, *kept, *no_points)

    return places


#: The places of the states and of the first slots among `kda_core.contract.launch_tensors`.
_STATES, _SLOTS = 7, 9


def pool_addresses(inputs: KdaInputs, outputs: KdaOutputs) -> tuple[int, ...]:
    """Returns the `PoolAddresses` of a call."""
    given = [address(x) for x in launch_tensors(inputs)]
    return pool_places(inputs)(given, address(outputs.final_state))


def pool_arguments(inputs: KdaInputs) -> PoolArguments:
    """Returns the `PoolArguments` of a call."""
    s, pool = inputs.shape, inputs.pool
    row = 4 * s.HV * s.K * s.V  # bytes of a state in fp32
    values: dict[str, Any] = dict.fromkeys(PoolArguments._fields, 0)
    values |= {"slots": s.N, "pool_pitch": row, "into_pitch": row}
    if pool is not None and s.pool is not None:
        pitch, narrow, index_bytes = *_form(pool.states), pool.read.element_size()
        values |= {
            "slots": len(pool.states), "least_slot": pool.first_slot, "read_bytes": index_bytes, "pool_pitch": pitch, "narrow": narrow,
        }  # fmt: skip
        if s.pool.writes:
            values |= {"write_bytes": index_bytes, "into_pitch": pitch, "into_narrow": narrow}
    if (points := _checkpoints(inputs)) is not None:
        pitch, narrow = _form(points.states)
        values |= {
            "checkpoint_pitch": pitch, "checkpoint_narrow": narrow, "checkpoint_slots": len(points.states),
            "checkpoint_count": len(points.positions),
        }  # fmt: skip
    return PoolArguments(**values)


def segment_arguments(inputs: KdaInputs) -> SegmentArguments:
    """Returns where the segments of a call over a pool lie in its sequences."""
    segments = inputs.segments
    assert segments is not None
    found = segments.sequence, segments.before, segments.ends
    return SegmentArguments(*(Address(address(x)) for x in found))


def pitch_arguments(inputs: KdaInputs) -> PitchArguments:
    """Returns the pitches of inputs that have a `kda_cute.host.token_stride`."""
    tensors = (getattr(inputs, name) for name in PER_TOKEN)
    return PitchArguments(*((token_stride(x) or 0) * x.element_size() for x in tensors))


def _checkpoints(inputs: KdaInputs) -> KdaCheckpoints | None:
    """Returns the checkpoints of a call, None if it has none."""
    found = None if inputs.pool is None else inputs.pool.checkpoints
    return found if found is not None and len(found.positions) else None


def _form(states: torch.Tensor) -> tuple[int, int]:
    """Returns the bytes from a slot to the next; and 1 for bf16, 0 for fp32."""
    return states.stride(0) * states.element_size(), int(states.dtype == torch.bfloat16)
