"""Arguments of a prefill over a pool of states, in order: one definition for the compiler, the device code and the host.

The rules are those of `kda_core.contract.KdaPool` and `KdaCheckpoints`. `kda_cute.device.pools` reads the arguments on the device.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kda_core.contract import KdaInputs, KdaOutputs
from kda_cute.arguments import Address, Long, address
from kda_cute.host import PER_TOKEN, token_stride


class PoolArguments(NamedTuple):
    """Where states are read and written. Pitches are in bytes.

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
    checkpoint_count: int
    read_bytes: int  # 4 or 8; 0: state n is that of sequence n
    write_bytes: int  # the same of `into`
    narrow: int  # 1: the pool is in bf16; 0: fp32
    into_narrow: int  # the same of `into`
    checkpoint_narrow: int  # and of `checkpoint_states`


class SegmentArguments(NamedTuple):
    """Further arguments of a call in segments over a pool: `kda_core.contract.KdaSegments`. N is then the number of segments, and the arrays
    of `PoolArguments` belong to their sequences."""

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


def pool_arguments(inputs: KdaInputs, outputs: KdaOutputs) -> PoolArguments:
    """Returns where a call reads and writes states."""
    x, s, pool = inputs, inputs.shape, inputs.pool
    row = 4 * s.HV * s.K * s.V  # bytes of a state in fp32
    states, into = _Slots(x.initial_state, row), _Slots(outputs.final_state, row)
    values: dict[str, Any] = dict.fromkeys(PoolArguments._fields, 0)
    values["slots"] = s.N
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
