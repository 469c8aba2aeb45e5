"""Checks of the values of slots and checkpoints, for debugging: ``KDA_CHECK_SLOTS=1``. They wait for the GPU."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from kda_core.contract import CHECKPOINT_SPACING, KdaInputs, KdaPool
from kda_core.errors import ArgumentError
from kda_core.slots import checkpoint_rows, is_slot, read_slots, sequence_bounds, skipped

_READ, _WRITE = "ssm_state_indices", "final_state_indices"
_POSITIONS, _DESTINATIONS = "checkpoint_positions", "checkpoint_indices"


def check_slots(inputs: KdaInputs) -> None:
    """Checks that slots exist, that no slot is written twice, that none is written by one sequence and read by another, that no
    sequence has more tokens than slots for them, and that checkpoints have valid positions.

    During the capture of a CUDA graph nothing is checked, because the host cannot wait for a captured stream.

    Raises:
        ArgumentError: the message names the argument, what was expected, and the first violation.
    """
    pool, facts = inputs.pool, inputs.shape.pool
    assert pool is not None and facts is not None
    if inputs.q.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    write_name = _READ if pool.write is pool.read else _WRITE
    _check_range(_READ, pool.read, pool.states)
    _check_range(write_name, pool.write, pool.states)
    starts, ends = sequence_bounds(inputs)
    lengths = (ends - starts).tolist()
    written: list[tuple[int, int, str]] = []  # (slot, sequence, name of the argument)
    if facts.per_token:
        W = pool.write.shape[1]
        if max(lengths) > W:
            wanted = f"a slot for every token of the longest sequence, W of at least {max(lengths)}"
            raise ArgumentError(_READ, wanted, f"W={W}")
    if facts.writes:
        for n, (row, length) in enumerate(zip(pool.write.view(len(lengths), -1).tolist(), lengths)):
            used = row[:length] if facts.per_token else row
            written += [(slot, n, write_name) for slot in used if slot >= pool.first_slot]
    if pool.checkpoints is not None:
        stored = _check_checkpoints(inputs)
        if pool.checkpoints.states is pool.states:
            written += stored
        else:
            _check_once(stored)
    _check_once(written)
    reads = read_slots(pool)
    is_read = is_slot(reads, pool.states, pool.first_slot)
    if pool.has_initial_state is not None:
        is_read &= pool.has_initial_state
    owner = {slot: (n, name) for slot, n, name in written}
    for n, (slot, used) in enumerate(zip(reads.tolist(), is_read.tolist())):
        if used and slot in owner and owner[slot][0] != n:
            m, name = owner[slot]
            raise ArgumentError(
                name, "slots that no other sequence reads", f"slot {slot} of sequence {m}, which {n} reads"
            )


def check_own_slots(name: str, pool: KdaPool) -> None:
    """Checks that the slots [N] of a call that reads and writes them exist, and that no slot belongs to two sequences. Checks nothing
    during the capture of a CUDA graph, as `check_slots`.

    Args:
        name: of the argument that holds the slots.

    Raises:
        ArgumentError: the message names the argument, what was expected, and the first violation.
    """
    if pool.states.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    _check_range(name, pool.read, pool.states)
    _check_once([(slot, n, name) for n, slot in enumerate(pool.read.tolist()) if slot >= pool.first_slot])


def _check_range(name: str, index: Tensor, states: Tensor) -> None:
    if index.numel() and int(index.max()) >= len(states):
        raise ArgumentError(name, f"slots below {len(states)} (the size of the pool)", str(int(index.max())))


def _check_once(written: list[tuple[int, int, str]]) -> None:
    seen: dict[int, int] = {}
    for slot, n, name in written:
        if slot in seen:
            both = f"slot {slot} for sequences {seen[slot]} and {n}"
            raise ArgumentError(name, "no slot that is written twice", both)
        seen[slot] = n


def _check_checkpoints(inputs: KdaInputs) -> list[tuple[int, int, str]]:
    """Checks all checkpoints of sequences that are not skipped, and returns which slots they write."""
    pool = inputs.pool
    assert pool is not None and pool.checkpoints is not None
    kept = pool.checkpoints
    cu, count = kept.cu.tolist(), len(kept.positions)
    if cu[0] != 0 or cu[-1] != count or any(a > b for a, b in itertools.pairwise(cu)):
        wanted = f"values from 0 to {count}, the number of positions, that never decrease"
        raise ArgumentError("checkpoint_cu", wanted, str(cu))
    _check_range(_DESTINATIONS, kept.indices, kept.states)
    owner, wanted_rows = checkpoint_rows(inputs, pool, kept)
    asked = is_slot(kept.indices, kept.states, pool.first_slot) & ~skipped(pool)[owner]
    if (ignored := (asked & ~wanted_rows).nonzero()).numel():
        at = int(ignored[0])
        wanted = f"positive multiples of {CHECKPOINT_SPACING}, ascending in a sequence and at most its length"
        raise ArgumentError(_POSITIONS, wanted, f"{int(kept.positions[at])} at {at}")
    rows = wanted_rows.nonzero().flatten().tolist()
    slots, sequences = kept.indices.tolist(), owner.tolist()
    return [(slots[i], sequences[i], _DESTINATIONS) for i in rows]
