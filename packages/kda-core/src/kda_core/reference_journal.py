"""The journal of the `reference` backend, by its definition (`kda_core.contract.KdaJournal`), in fp32 (fp64 for fp64 inputs).

Which rows are records is known on the device only. Every sequence is therefore computed over all `length` rows that may be records,
with zeros in place of those that are none. One sequence at a time, because torch's vectorized loops round the tail of a tensor
differently: in a batch, the bits of a sequence would depend on its place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kda_core.contract import KdaInputs, KdaJournal, KdaOutputs, KdaPool, ProblemShape
from kda_core.gates import L2NORM_EPS, log_decay, step_size
from kda_core.slots import initial_states, is_slot, masked_copy_


class _Places(NamedTuple):
    """The records of N sequences.

    Attributes:
        slot: [N] int64, 0 for a sequence without one. valid: [N], whether it has one.
        first, number: [N] int64, the span of its records.
    """

    slot: Tensor
    valid: Tensor
    first: Tensor
    number: Tensor


def journal_decode(inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
    """Implements `kda_core.backend.SupportsJournal.journal_decode`."""
    s, pool, journal = inputs.shape, inputs.pool, inputs.journal
    assert pool is not None and journal is not None  # core sets them with the entry
    at, rows = _places(pool, journal), journal.u.shape[2]
    state, end = _states(s, pool, journal, at)
    folds = at.valid & (at.number + s.T > journal.length)
    if journal.spans is None:
        folds = torch.zeros_like(folds)
    else:
        stored = state.mT if s.options.state_v_first else state
        masked_copy_(pool.states, at.slot, stored, folds)
    q, k, v, g, beta, factor = _activated(inputs)
    G = torch.where(folds.view(-1, 1, 1), 0.0, end)
    u, sums, outs = [], [], []
    for t in range(s.T):
        G = G + g[:, t]
        sums.append(G)
        o_t, u_t, state = _each(_token, state, *(x[:, t] for x in (q, k, v, g, beta)))
        outs.append(o_t)
        u.append(u_t)
    outputs.o.copy_(torch.where(at.valid.view(-1, 1, 1, 1), torch.stack(outs, 1) * s.scale, 0.0))
    row = (at.first + at.number).unsqueeze(1) + torch.arange(s.T, device=state.device)
    for target, values in (
        (journal.u, torch.stack(u, 1)),
        (journal.k, inputs.k),
        (journal.k_factor, factor),
        (journal.G, torch.stack(sums, 1)),
    ):
        _put(target, at, row % rows, values)
    return outputs


def journal_fold(shape: ProblemShape, pool: KdaPool, journal: KdaJournal) -> None:
    """Implements `kda_core.backend.SupportsJournal.journal_fold`."""
    at = _places(pool, journal)
    state, _ = _states(shape, pool, journal, at)
    stored = state.mT if shape.options.state_v_first else state
    masked_copy_(pool.states, at.slot, stored, at.valid & (at.number > 0))


def _places(pool: KdaPool, journal: KdaJournal) -> _Places:
    rows = journal.u.shape[2]
    valid = is_slot(pool.read, pool.states, pool.first_slot)
    slot = torch.where(valid, pool.read, 0).long()
    if journal.spans is not None:
        span = journal.spans.index_select(0, slot).long()
        return _Places(slot, valid, span[:, 0].clamp(0, rows - 1), span[:, 1].clamp(0, journal.length))
    zero = torch.zeros_like(slot)
    count = zero if journal.accepted is None else journal.accepted.long().clamp(0, rows)
    return _Places(slot, valid, zero, count)


def _states(s: ProblemShape, pool: KdaPool, journal: KdaJournal, at: _Places) -> tuple[Tensor, Tensor]:
    """Returns the states [N, HV, K, V] after the records, and G of the last record [N, HV, K], zero without records."""
    state = initial_states(pool, s.state_dtype)
    state = state.mT.contiguous() if s.options.state_v_first else state
    rows = journal.u.shape[2]
    most = 0 if journal.spans is None and journal.accepted is None else rows
    if not most:
        return state, state.new_zeros(state.shape[:-1])
    index = torch.arange(most, device=state.device)
    row = (at.first.unsqueeze(1) + index) % rows
    used = (index < at.number.unsqueeze(1)).view(-1, 1, most, 1)

    def records(x: Tensor) -> Tensor:
        """Returns the records of the N sequences in their order, [N, heads, rows, ..], zero where there are none."""
        x = x.index_select(0, at.slot).flatten(3)
        at_row = row.view(-1, 1, most, 1).expand(-1, x.shape[1], -1, x.shape[3])
        return torch.where(used, x.gather(2, at_row).to(s.state_dtype), 0.0)

    u, k, G = records(journal.u), records(journal.k), records(journal.G)
    k = (k * records(journal.k_factor.unsqueeze(-1))).repeat_interleave(s.HV // s.H, dim=1)
    last = (at.number - 1).clamp(min=0).view(-1, 1, 1, 1).expand(-1, *G.shape[1:2], 1, s.K)
    end = G.gather(2, last).squeeze(2)
    (after,) = _each(_accumulated, state, end, k, torch.where(used, end.unsqueeze(2) - G, 0.0), u)
    return after, end


def _accumulated(state: Tensor, end: Tensor, k: Tensor, decay: Tensor, u: Tensor) -> tuple[Tensor, ...]:
    """Returns the state [HV, K, V] after the records of one sequence. `decay` is the log decay [HV, rows, K] from each record to the end."""
    return (end.exp().unsqueeze(-1) * state + (k * decay.exp()).mT @ u,)


def _token(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """Returns o without the scale, u and the state of one sequence after a token."""
    state = state * g.exp().unsqueeze(-1)
    u = beta.unsqueeze(-1) * (v - (k.unsqueeze(-2) @ state).squeeze(-2))
    state = state + k.unsqueeze(-1) * u.unsqueeze(-2)
    return (q.unsqueeze(-2) @ state).squeeze(-2), u, state


def _each(compute: Callable[..., tuple[Tensor, ...]], *tensors: Tensor) -> list[Tensor]:
    """Returns the outputs of `compute` for each sequence, stacked."""
    found = [compute(*(x[n] for x in tensors)) for n in range(len(tensors[0]))]
    return [torch.stack(parts) for parts in zip(*found)]


def _put(target: Tensor, at: _Places, row: Tensor, values: Tensor) -> None:
    """Writes values [N, T, heads, ..] to rows [N, T] of their slots. A sequence without a slot repeats the write of another one, or writes
    what is there if none has a slot, as `masked_copy_`."""
    some = at.valid.any()
    number = torch.arange(len(row), device=row.device)
    source = torch.where(at.valid, number, at.valid.int().argmax())
    slot, row = torch.where(some, at.slot[source], 0).unsqueeze(1), row[source]
    old = target[slot, :, row]
    target[slot, :, row] = torch.where(some, values[source].to(target.dtype), old)


def _activated(inputs: KdaInputs) -> list[Tensor]:
    """Returns q, k [N, T, HV, K], v, the clamped log decay g, beta as the recurrence uses them, and k_factor [N, T, H]. A sequence without
    a slot may hold NaNs, which reach no other one."""
    s, options = inputs.shape, inputs.options
    A_log = None if inputs.A_log is None else inputs.A_log.view(s.HV, 1)
    least = -746.0 if s.state_dtype == torch.float64 else -104.0

    def activated(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
        """Returns the same of one sequence."""
        factor = torch.ones_like(k[..., 0])
        if options.use_qk_l2norm_in_kernel:
            factor = torch.rsqrt(k.square().sum(-1) + L2NORM_EPS)
            q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + L2NORM_EPS)
        q, k = (x.repeat_interleave(s.HV // s.H, dim=1) for x in (q, k * factor.unsqueeze(-1)))
        g = log_decay(g, A_log, inputs.dt_bias, options).clamp(min=least)
        return q, k, v, g, step_size(beta, options), factor

    tokens = (inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta)
    return _each(activated, *(x.to(s.state_dtype).contiguous() for x in tokens))
