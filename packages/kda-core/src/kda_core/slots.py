"""Arithmetic on the slots of a `KdaPool`, on the device of the pool. No function waits for the device.

A row that must not be written cannot be left out of a copy without knowing on the host how many rows remain. `masked_copy_` lets
such a row repeat the write of another one instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kda_core.contract import CHECKPOINT_SPACING, KdaCheckpoints, KdaInputs, KdaPool


def is_slot(index: Tensor, states: Tensor, first_slot: int) -> Tensor:
    """Returns which of these indices are slots of `states` [slots, ..] from `first_slot` on."""
    return (index >= first_slot) & (index < states.shape[0])


def read_slots(pool: KdaPool) -> Tensor:
    """Returns [N]: the slot from which each sequence starts, also where that is none."""
    if pool.read.dim() == 1:
        return pool.read
    if pool.num_accepted_tokens is None:
        return pool.read[:, 0]
    column = pool.num_accepted_tokens.long().clamp(1, pool.read.shape[1]) - 1
    return pool.read.gather(1, column.unsqueeze(1)).squeeze(1)


def skipped(pool: KdaPool) -> Tensor:
    """Returns [N] bool: the sequences that have neither a read slot nor a write slot."""
    written = is_slot(pool.write, pool.states, pool.first_slot)
    if written.dim() == 2:
        written = written.any(1)
    return ~(written | is_slot(read_slots(pool), pool.states, pool.first_slot))


def initial_states(pool: KdaPool, dtype: torch.dtype) -> Tensor:
    """Returns the initial states [N, HV, ..] in `dtype`: zeros where a sequence has no read slot, or has no initial state."""
    index = read_slots(pool)
    wanted = is_slot(index, pool.states, pool.first_slot)
    if pool.has_initial_state is not None:
        wanted = wanted & pool.has_initial_state
    found = pool.states.index_select(0, torch.where(wanted, index, 0)).to(dtype)
    return torch.where(wanted.view(-1, 1, 1, 1), found, 0.0)


def masked_copy_(target: Tensor, index: Tensor, values: Tensor, wanted: Tensor) -> None:
    """Copies ``values[i]`` to ``target[index[i]]`` for every i that is wanted, rounded to the dtype of the target.

    A row that is not wanted repeats the first one that is, with the same values. If none is wanted, row 0 of the target gets its own
    values.

    Args:
        target: [rows, ..]. index, wanted: [n]. values: [n, ..].
    """
    if not (len(target) and len(index)):
        return
    some = wanted.any()
    row = torch.where(wanted, torch.arange(len(index), device=index.device), wanted.int().argmax())
    index = torch.where(some, index[row], 0).long()
    values = torch.where(some, values.index_select(0, row).to(target.dtype), target[:1])
    target.index_copy_(0, index, values)


def store_final(pool: KdaPool, states: Tensor) -> None:
    """Writes the final states [N, HV, ..] to their slots [N]."""
    masked_copy_(pool.states, pool.write, states, is_slot(pool.write, pool.states, pool.first_slot))


def sequence_bounds(inputs: KdaInputs) -> tuple[Tensor, Tensor]:
    """Returns first flat token and end of each of the N sequences, [N] int64 on the device of the inputs."""
    s, device = inputs.shape, inputs.q.device
    if inputs.cu_seqlens is None:
        starts = torch.arange(s.B, device=device) * s.T
        return starts, starts + s.T
    bounds = inputs.cu_seqlens.long().clamp(0, s.T)
    return bounds[:-1], torch.maximum(bounds[1:], bounds[:-1])


def clear_rows(inputs: KdaInputs, pool: KdaPool, o: Tensor) -> None:
    """Sets o [B, T, HV, V] to zero for sequences that are skipped."""
    starts, ends = sequence_bounds(inputs)
    token = torch.arange(o.shape[0] * o.shape[1], device=o.device)
    owner = torch.searchsorted(ends, token, right=True).clamp(max=len(ends) - 1)
    mine = (token >= starts[owner]) & (token < ends[owner])
    cleared = mine & skipped(pool)[owner]
    o.masked_fill_(cleared.view(*o.shape[:2], 1, 1), 0.0)


def checkpoint_rows(inputs: KdaInputs, pool: KdaPool, checkpoints: KdaCheckpoints) -> tuple[Tensor, Tensor]:
    """Returns the sequence of each checkpoint [C], and which checkpoints are stored [C], by the rules of `KdaCheckpoints`."""
    starts, ends = sequence_bounds(inputs)
    position = checkpoints.positions.long()
    number = torch.arange(len(position), device=position.device)
    cu = checkpoints.cu.long().clamp(0, len(position))
    owner = torch.searchsorted(cu[1:].contiguous(), number, right=True).clamp(max=len(starts) - 1)
    wanted = (number >= cu[owner]) & (number < cu[owner + 1])
    wanted &= (position > 0) & (position % CHECKPOINT_SPACING == 0) & (position <= (ends - starts)[owner])
    # the owner is the higher part of the key, so the maximum of an earlier sequence is below every key of a later one
    key = (owner << 32) + position.clamp(min=0)
    highest = torch.cat([key.new_full((1,), -1), key.cummax(0).values[:-1]])
    wanted &= key > highest
    wanted &= is_slot(checkpoints.indices, checkpoints.states, pool.first_slot) & ~skipped(pool)[owner]
    return owner, wanted
