"""The `reference` backend: chunked KDA in plain torch, fp32 (fp64 for fp64 inputs), on any device.

Per value head, with a state S [K,V] and tokens t (Kimi Linear, arXiv:2510.26692)::

    S *= exp(g_t)[:, None];  S += (beta_t k_t) (v_t - k_t^T S);  o_t = scale * q_t^T S

Over a block of rows i with G the inclusive cumulative sum of g inside the block, G_end its last row and b = beta k::

    L_ij = sum_c k_ic b_jc e^{G_ic - G_jc} (j < i),   Aqk_ij = scale sum_c q_ic b_jc e^{G_ic - G_jc} (j <= i)
    [w u] = (I + L)^-1 [k e^G, v]
    R = u - w S,   o = (scale q e^G) S + Aqk R,   S <- e^{G_end} S + (b e^{G_end - G})^T R

No exponent is above 0, for any gates (`_pair_products`). Row i depends only on rows up to i. Blocks have 16 rows; blocks of
one row are the recurrence itself (decoding).

Accuracy is that of fp32, so this backend cannot replace the fp64 oracle (`kda_core.testing.token_oracle`), with which it
shares no code. If the process allows TF32 products, errors rise to about 1e-3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kda_core import install, reference_journal
from kda_core.abi import BACKEND_ABI
from kda_core.backend import BackendSpec
from kda_core.contract import (
    CHECKPOINT_SPACING,
    FLOAT_TENSORS,
    INPUT_DTYPES,
    Feature,
    KdaGradients,
    KdaInputs,
    KdaJournal,
    KdaOutputs,
    KdaPool,
    ProblemShape,
    dtype_name,
    num_chunks,
)
from kda_core.gates import l2_normalised, log_decay, step_size
from kda_core.slots import (
    checkpoint_rows,
    clear_rows,
    initial_states,
    is_slot,
    masked_copy_,
    sequence_bounds,
    store_final,
)

BLOCK = 16
"""Rows of a block; divides every chunk_size."""
ROWS_BYTES = 16 << 20
"""Upper bound for the rows of q and k of a slab, the largest temporary, in bytes."""

SPEC = BackendSpec(
    name="reference",
    abi=BACKEND_ABI,
    archs=frozenset({"any"}),
    features=frozenset(f.value for f in set(Feature) - {Feature.SEGMENT_SUMMARY, Feature.POOL_SEGMENTS}),
    target="kda_core.reference:ReferenceBackend",
    install=install.command(),
    priority=-100,
    dtypes=frozenset(map(dtype_name, INPUT_DTYPES)),
)


class ReferenceBackend:
    """The backend; see the module's docstring. Stateless, hence thread-safe.

    Its forward can save states for another backend. Its own backward reads none, so that gradients are as accurate as fp32 allows.
    """

    def can_run(self, shape: ProblemShape) -> str | None:
        """Returns None: every call is served."""
        return None

    def workspace_bytes(self, shape: ProblemShape) -> int:
        """Returns 0: torch allocates the temporaries."""
        return 0

    def compile(self, shape: ProblemShape) -> None:
        """Does nothing: there is nothing to compile."""

    def chunk_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        """Computes in blocks of 16 tokens."""
        return self._forward(inputs, outputs, BLOCK)

    def recurrent_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        """Computes token by token."""
        return self._forward(inputs, outputs, 1)

    def journal_decode(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        """Computes token by token, from the states that the records describe."""
        with torch.no_grad(), torch.autocast(inputs.q.device.type, enabled=False):
            return reference_journal.journal_decode(inputs, outputs)

    def journal_fold(self, shape: ProblemShape, pool: KdaPool, journal: KdaJournal) -> None:
        """Writes the states that the records describe to the pool."""
        with torch.no_grad(), torch.autocast(pool.states.device.type, enabled=False):
            reference_journal.journal_fold(shape, pool, journal)

    def _forward(self, inputs: KdaInputs, outputs: KdaOutputs, block: int) -> KdaOutputs:
        with torch.no_grad(), torch.autocast(inputs.q.device.type, enabled=False):
            if inputs.pool is None:
                for group in _groups(inputs):
                    group.execute(inputs, outputs, block)
            else:
                _over_pool(inputs, inputs.pool, outputs, block)
        return outputs

    def chunk_bwd(self, inputs: KdaInputs, grad_o: Tensor, grad_final_state: Tensor | None) -> KdaGradients:
        """Recomputes the forward under autograd, slab by slab, so that memory stays bounded."""
        with torch.enable_grad(), torch.autocast(inputs.q.device.type, enabled=False):
            x, leaves = _as_leaves(inputs)
            total = torch.zeros((), dtype=x.shape.state_dtype, device=x.q.device)
            for group in _groups(x):
                o, state = group.differentiable(x, BLOCK)
                total = total + (o * grad_o.to(o.dtype)).sum()
                if grad_final_state is not None:
                    given = grad_final_state[group.select].to(state.dtype)
                    total = total + (state * given).sum()
            grads: Sequence[Tensor | None] = [None] * len(leaves)
            if total.requires_grad:  # not without tokens and initial states
                grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        found = {n: torch.zeros_like(x) if d is None else d for (n, x), d in zip(leaves.items(), grads)}
        gradients: dict[str, Any] = {n: found.get(n) for n in FLOAT_TENSORS}
        return KdaGradients(**gradients)


# ---- the schedule: the order of the blocks


@dataclass(frozen=True)
class _Schedule:
    """The blocks of a call in the order in which the recurrence processes them.

    Step s processes the next `widths[s]` blocks, one of each of the first `widths[s]` sequences in `order`; widths never grow.
    If `order` is None, every step processes one block, and the sequences follow one another.

    Attributes:
        tokens: [NB, block], flat token index b*T+t.
        valid: [NB, block], whether the token belongs to the block's sequence.
        sequence: [NB], the sequence of the block.
        index: [NB], number of the block in its sequence.
        widths: blocks of each step.
        order: [N], the sequences, longest first, or None.
    """

    tokens: Tensor
    valid: Tensor
    sequence: Tensor
    index: Tensor
    widths: list[int]
    order: Tensor | None


@dataclass(frozen=True)
class _Group:
    """Sequences that are computed together.

    Attributes:
        starts, ends: [n], first flat token and end of each sequence; in host memory if the host knows them, else on the device
            of the inputs.
        select: slice of the call's sequences.
        on_device: whether only the device knows starts and ends.
        slab: upper bound for the blocks of one slab; None for as many as fit `ROWS_BYTES`.
    """

    starts: Tensor
    ends: Tensor
    select: slice
    on_device: bool
    slab: int | None

    def schedule(self, inputs: KdaInputs, block: int) -> _Schedule:
        """Returns the schedule in blocks of `block` tokens."""
        device = inputs.q.device
        row = torch.arange(block, device=device)
        n, T, order = self.starts.numel(), inputs.shape.T, None
        if self.on_device:  # the first block of sequence i has the slot start//block + i
            first = self.starts // block + torch.arange(n, device=device)
            slots = torch.arange(T // block + n if T else 0, device=device)
            sequence = (torch.searchsorted(first, slots, right=True) - 1).clamp(min=0)
            index, widths = slots - first[sequence], [1] * len(slots)
        elif not inputs.shape.varlen:  # equal lengths
            steps = -(-T // block)
            sequence = torch.arange(n, device=device).repeat(steps)
            index, widths = torch.arange(steps, device=device).repeat_interleave(n), [n] * steps
            order = torch.arange(n, device=device)
        else:
            counts = -(-(self.ends - self.starts) // block)
            order = torch.argsort(counts, descending=True, stable=True)
            live = torch.arange(int(counts.max())).unsqueeze(1) < counts[order]
            index, place = live.nonzero().unbind(1)
            sequence, widths = order[place], live.sum(1).tolist()
        starts, ends = self.starts[sequence], self.ends[sequence]
        tokens = (starts + index * block).unsqueeze(1) + row
        return _Schedule(tokens, tokens < ends.unsqueeze(1), sequence, index, widths, order)

    def initial(self, inputs: KdaInputs) -> Tensor:
        """Returns the initial states [n, HV, K, V] in the working dtype."""
        s = inputs.shape
        n = self.starts.numel()
        if inputs.initial_state is None:
            return inputs.q.new_zeros((n, s.HV, s.K, s.V), dtype=s.state_dtype)
        state = inputs.initial_state[self.select].to(s.state_dtype)
        return state.mT.contiguous() if s.options.state_v_first else state

    def execute(
        self, inputs: KdaInputs, outputs: KdaOutputs, block: int, inner: _InnerStates | None = None
    ) -> None:
        """Computes these sequences into `outputs`, and leaves rows of other sequences unchanged."""
        s, schedule = inputs.shape, self.schedule(inputs, block)
        savers = self._savers(inputs, outputs, schedule, block)
        if inner is not None:
            savers.append(inner.saver(self.select, schedule, block))
        keep = outputs.residual is not None
        rows, R, state = _chain(inputs, schedule, self.initial(inputs), self._slab(s, block), savers, keep)
        if s.T and schedule.widths:
            owner = _owner(schedule, s.B * s.T)
            mine = (owner >= 0).view(-1, 1, 1)
            for target, found in ((outputs.o, rows), (outputs.residual, R)):
                if target is not None and found is not None:
                    flat = target.view(s.B * s.T, s.HV, s.V)
                    flat.copy_(torch.where(mine, found[owner.clamp(min=0)].to(flat.dtype), flat))
        if outputs.final_state is not None:
            outputs.final_state[self.select] = state.mT if s.options.state_v_first else state

    def differentiable(self, inputs: KdaInputs, block: int) -> tuple[Tensor, Tensor]:
        """Returns o [B,T,HV,V] and the final states, in the working dtype and as part of the autograd graph."""
        s, schedule = inputs.shape, self.schedule(inputs, block)
        rows, _, state = _chain(
            inputs, schedule, self.initial(inputs), self._slab(s, block), intra_chunk=_intra_chunk_twice
        )
        if s.T and schedule.widths:
            owner = _owner(schedule, s.B * s.T)
            o = torch.where((owner >= 0).view(-1, 1, 1), rows[owner.clamp(min=0)], 0.0)
        else:
            o = rows.new_zeros((s.B * s.T, s.HV, s.V))
        return o.view(s.B, s.T, s.HV, s.V), state.mT if s.options.state_v_first else state

    def _slab(self, s: ProblemShape, block: int) -> int:
        """Returns the number of blocks in a slab."""
        return self.slab or max(1, ROWS_BYTES // (2 * s.HV * block * s.K * s.state_dtype.itemsize))

    def _savers(
        self, inputs: KdaInputs, outputs: KdaOutputs, schedule: _Schedule, block: int
    ) -> list[_Saver]:
        """Returns what stores the intermediate states and the saved states that the call asks for."""
        s, savers = inputs.shape, []
        device = inputs.q.device
        first = self.select.start
        if (h := outputs.intermediate_states) is not None:
            size = inputs.options.chunk_size
            chunks = -(-(self.ends - self.starts) // size)
            base = (torch.cumsum(chunks, 0) - chunks).to(device)
            if not s.varlen:  # rows of h are [b, chunk]; `select` may be a single b
                base = base + first * num_chunks((s.T,), size)
            elif not self.on_device:
                base = base + num_chunks(tuple((_host_lengths(inputs))[:first]), size)
            flat = h.view(-1, s.HV, *s.state_matrix)
            savers.append(_Saver(flat, s.options.state_v_first, schedule, block, size, base))
        if (saved := outputs.saved_states) is not None:  # `kda_core.contract.saved_slots`, on the device
            size, n = s.saved_spacing, first + torch.arange(self.starts.numel(), device=device)
            base = self.starts.to(device) // size + n if s.varlen else n * num_chunks((s.T,), size)
            savers.append(_Saver(saved, False, schedule, block, size, base))
        return savers


class _Saver:
    """Stores those of the states that are at the start of a chunk.

    Attributes:
        target: [rows, HV, K, V], or [rows, HV, V, K] with `v_first`.
        size: tokens of a chunk, a multiple of `block`.
        rows: [NB], the row of the chunk of each block.
    """

    def __init__(
        self, target: Tensor, v_first: bool, schedule: _Schedule, block: int, size: int, base: Tensor
    ) -> None:
        """`base` [n] is the row of the first chunk of each sequence."""
        self.target, self.v_first, self.size = target, v_first, size
        self.schedule, self.block = schedule, block
        self.rows = base[schedule.sequence] + schedule.index * block // size

    def __call__(self, first: int, width: int, step: int, state: Tensor) -> None:
        """Stores states [width, HV, K, V], those before the blocks from `first` on. ``step`` is the index of these blocks in their
        sequences, unless only the device knows it."""
        schedule, target = self.schedule, self.target
        state = (state.mT if self.v_first else state).to(target.dtype)
        here = slice(first, first + width)
        rows = self.rows[here]
        if schedule.order is None:  # width 1; a row that is not at the start of a chunk keeps its value
            row = rows.clamp(0, target.shape[0] - 1)
            starts = schedule.index[here] * self.block % self.size == 0
            wanted = (starts & schedule.valid[here, 0]).view(-1, 1, 1, 1)
            target.index_copy_(0, row, torch.where(wanted, state, target[row]))
        elif step * self.block % self.size == 0:
            target.index_copy_(0, rows, state)


# ---- pools: the states are copied out, computed with, and copied back


class _InnerStates:
    """The states of every sequence after a multiple of `spacing` tokens, in the working dtype.

    Attributes:
        states: [rows, HV, K, V]; row ``base[n] + i`` is the state of sequence n before chunk i of `spacing` tokens.
    """

    def __init__(self, inputs: KdaInputs, spacing: int) -> None:
        s = inputs.shape
        self.spacing, self.v_first = spacing, s.options.state_v_first
        self.starts, self.ends = sequence_bounds(inputs)
        # as `kda_core.contract.saved_slots`: chunks of two sequences never share a row
        self.base = self.starts // spacing + torch.arange(s.N, device=inputs.q.device)
        rows = s.B * s.T // spacing + s.N
        self.states = inputs.q.new_zeros((rows, s.HV, *s.state_matrix), dtype=s.state_dtype)

    def saver(self, select: slice, schedule: _Schedule, block: int) -> _Saver:
        """Returns what stores the states of the sequences `select`."""
        return _Saver(self.states, self.v_first, schedule, block, self.spacing, self.base[select])

    def after(self, owner: Tensor, position: Tensor, final: Tensor) -> Tensor:
        """Returns the states [n, HV, ..] of sequences `owner` [n] after `position` [n] tokens, a multiple of the spacing. At the end of
        a sequence that is its state in `final` [N, HV, ..]. Arbitrary for a position beyond the end."""
        row = (self.base[owner] + position // self.spacing).clamp(0, len(self.states) - 1)
        is_end = (position == (self.ends - self.starts)[owner]).view(-1, 1, 1, 1)
        return torch.where(is_end, final[owner], self.states[row])


def _over_pool(inputs: KdaInputs, pool: KdaPool, outputs: KdaOutputs, block: int) -> None:
    """Computes a call whose states are in a pool. All reads precede all writes."""
    s, facts = inputs.shape, inputs.shape.pool
    assert facts is not None  # core sets both or none
    spacing = 1 if facts.per_token else CHECKPOINT_SPACING
    inner = _InnerStates(inputs, spacing) if facts.per_token or pool.checkpoints is not None else None
    final = outputs.final_state
    if final is None:
        final = inputs.q.new_empty(s.state_shape, dtype=s.state_dtype)
    inputs = replace(inputs, initial_state=initial_states(pool, s.state_dtype))
    outputs_of_all = replace(outputs, final_state=final)
    for group in _groups(inputs):
        group.execute(inputs, outputs_of_all, block, inner)
    if inner is not None and pool.checkpoints is not None:
        kept = pool.checkpoints
        owner, wanted = checkpoint_rows(inputs, pool, kept)
        found = inner.after(owner, kept.positions.long(), final)
        masked_copy_(kept.states, kept.indices, found, wanted)
    if inner is not None and facts.per_token and facts.writes:
        N, W = pool.write.shape
        owner = torch.arange(N, device=final.device).repeat_interleave(W)
        position = torch.arange(1, W + 1, device=final.device).repeat(N)
        index = pool.write.flatten()
        wanted = is_slot(index, pool.states, pool.first_slot)
        wanted &= position <= (inner.ends - inner.starts)[owner]
        masked_copy_(pool.states, index, inner.after(owner, position, final), wanted)
    elif facts.writes:
        store_final(pool, final)
    clear_rows(inputs, pool, outputs.o)


def _host_lengths(inputs: KdaInputs) -> tuple[int, ...]:
    lengths = inputs.sequence_lengths()
    assert lengths is not None  # the callers have a cu_seqlens in host memory
    return lengths


def _groups(inputs: KdaInputs) -> list[_Group]:
    """Returns one group of all sequences, or with `pin` and in decoding one for each sequence, with slabs of one block. Every
    operation then has the same shape for every batch, and so the same rounding."""
    s = inputs.shape
    pinned = inputs.options.pin or inputs.options.recurrent
    device = inputs.q.device
    slab = 1 if pinned else None
    if s.varlen and inputs.cu_seqlens is not None:
        on_device = inputs.cu_seqlens.device.type != "cpu"
        bounds = inputs.cu_seqlens.long().clamp(0, s.T)
        starts = bounds[:-1]
        ends = torch.maximum(bounds[1:], starts)
    else:
        on_device = False
        starts = torch.arange(s.B, device=device) * s.T
        ends = starts + s.T
    if on_device or not pinned:
        return [_Group(starts, ends, slice(0, s.N), on_device, slab)]
    return [_Group(starts[n : n + 1], ends[n : n + 1], slice(n, n + 1), False, slab) for n in range(s.N)]


def _owner(schedule: _Schedule, tokens: int) -> Tensor:
    """Returns [tokens]: the row of the blocks' outputs that holds each token, -1 for a token outside of every sequence."""
    row = torch.arange(schedule.tokens.numel(), device=schedule.tokens.device)
    target = torch.where(schedule.valid, schedule.tokens, tokens).flatten()  # padding goes to an extra row
    return row.new_full((tokens + 1,), -1).index_copy_(0, target, row)[:-1]


# ---- the arithmetic


def _chain(
    inputs: KdaInputs,
    schedule: _Schedule,
    initial: Tensor,
    slab: int,
    savers: Sequence[_Saver] = (),
    keeps_residual: bool = False,
    intra_chunk: Callable[[KdaInputs, Tensor, Tensor], tuple[Tensor, ...]] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Computes all blocks. Returns their rows of o and, with `keeps_residual`, of R [NB*block, HV, V], and the final states
    [n, HV, K, V], in the working dtype.

    The intra-chunk stage runs on slabs of whole steps, at most `slab` blocks unless a single step has more.
    """
    order = schedule.order
    state = initial[:1] if order is None else initial[order]
    final, finished = initial, []
    rows: list[Tensor] = []
    residuals: list[Tensor] = []
    first, step = 0, 0
    while step < len(schedule.widths):
        widths = [schedule.widths[step]]
        while (
            step + len(widths) < len(schedule.widths)
            and sum(widths) + schedule.widths[step + len(widths)] <= slab
        ):
            widths.append(schedule.widths[step + len(widths)])
        blocks = slice(first, first + sum(widths))
        records = (intra_chunk or _intra_chunk)(inputs, schedule.tokens[blocks], schedule.valid[blocks])
        at = 0
        for number, width in enumerate(widths, step):
            if width < len(state):  # the shortest sequences have ended
                finished.append(state[width:])
                state = state[:width]
            if order is None:
                sequence = schedule.sequence[first + at : first + at + 1]
                fresh = (schedule.index[first + at] == 0).view(1, 1, 1, 1)
                state = torch.where(fresh, initial[sequence], state)
            for save in savers:
                save(first + at, width, number, state)
            w, u, Qd, Kg, Aqk, decay = (x[at : at + width] for x in records)
            R = u - w @ state
            rows.append(Qd @ state + Aqk @ R)
            if keeps_residual:
                residuals.append(R)
            state = decay.unsqueeze(-1) * state + Kg.mT @ R
            if order is None:
                final = final.index_copy(0, sequence, state)
            at += width
        first, step = blocks.stop, step + len(widths)
    if order is not None:
        final = torch.cat([state, *reversed(finished)])[torch.argsort(order)]
    block, s = schedule.tokens.shape[1], inputs.shape

    def joined(found: list[Tensor]) -> Tensor:
        out = torch.cat(found) if found else initial.new_zeros((0, s.HV, block, s.V))
        return out.transpose(1, 2).reshape(-1, s.HV, s.V)

    return joined(rows), joined(residuals) if keeps_residual else None, final


def _as_leaves(inputs: KdaInputs) -> tuple[KdaInputs, dict[str, Tensor]]:
    """Returns the inputs as leaves of a separate graph, and these leaves by name."""
    leaves = {n: x.detach().requires_grad_() for n in FLOAT_TENSORS if (x := getattr(inputs, n)) is not None}
    return replace(inputs, **leaves), leaves


def _intra_chunk_twice(inputs: KdaInputs, tokens: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
    """`_intra_chunk`, which the backward pass repeats, so that autograd keeps none of its temporaries."""
    leaves = [x for n in FLOAT_TENSORS if (x := getattr(inputs, n)) is not None]
    return _IntraChunkTwice.apply(inputs, tokens, valid, *leaves)


class _IntraChunkTwice(torch.autograd.Function):
    """The autograd function of `_intra_chunk_twice`. ``torch.utils.checkpoint`` does the same with hooks, which torch.func
    forbids."""

    @staticmethod
    def forward(
        ctx: Any, inputs: KdaInputs, tokens: Tensor, valid: Tensor, *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.arguments = inputs, tokens, valid
        return _intra_chunk(inputs, tokens, valid)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, tokens, valid = ctx.arguments
        with torch.enable_grad(), torch.autocast(inputs.q.device.type, enabled=False):
            again, leaves = _as_leaves(inputs)
            records = _intra_chunk(again, tokens, valid)
        found = torch.autograd.grad(records, list(leaves.values()), grads, allow_unused=True)
        return (None, None, None, *found)


def _intra_chunk(inputs: KdaInputs, tokens: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
    """Returns the records of blocks [n, block], which the chain reads: w [n,HV,block,K], u [n,HV,block,V], Qd, Kg
    [n,HV,block,K], Aqk [n,HV,block,block], decay [n,HV,K]. Rows that are not valid have k = v = 0, g = 0, beta = 0."""
    s, options = inputs.shape, inputs.options
    at = torch.where(valid, tokens, 0)

    def rows(x: Tensor) -> Tensor:
        """Returns the blocks' rows of x [B,T,heads,...] as [n, heads, block, ...] in the working dtype."""
        picked = x.flatten(0, 1)[at].to(s.state_dtype)
        return picked.transpose(1, 2)

    keep = valid.view(valid.shape[0], 1, valid.shape[1], 1)
    zero = torch.zeros((), dtype=s.state_dtype, device=valid.device)
    q, k, v = (torch.where(keep, rows(x), zero) for x in (inputs.q, inputs.k, inputs.v))
    if options.use_qk_l2norm_in_kernel:
        q, k = l2_normalised(q), l2_normalised(k)
    q, k = (x.repeat_interleave(s.HV // s.H, dim=1) for x in (q, k))
    g = torch.where(keep, _decay(rows(inputs.g), inputs), zero)
    beta = torch.where(keep, step_size(rows(inputs.beta.unsqueeze(-1)), options), zero)

    G = torch.cumsum(g, dim=-2)
    products = _pair_products(torch.stack([k, q * s.scale], -2), k, G)
    L = torch.tril(products[..., 0, :], -1) * beta.mT
    Aqk = products[..., 1, :] * beta.mT
    grown = torch.exp(G)
    wu = torch.linalg.solve_triangular(L, torch.cat([k * grown, v], -1), upper=False, unitriangular=True)
    w, u = wu[..., : s.K], wu[..., s.K :]
    return w, u, q * s.scale * grown, beta * k * torch.exp(G[..., -1:, :] - G), Aqk, grown[..., -1, :]


def _pair_products(rows: Tensor, k: Tensor, G: Tensor) -> Tensor:
    """Returns ``sum_c rows_irc k_jc e^{G_ic - G_jc}`` for j <= i and 0 elsewhere, [..., n, r, n].

    The result is assembled from groups of one row, whose exponent is 0, by joining neighbours. The exponent between the rows
    of two neighbours is split at the last row of the earlier one, so neither part is above 0.

    Args:
        rows: [..., n, r, K], n a power of 2.
        k, G: [..., n, K].
    """
    n, r = rows.shape[-3:-1]
    found = (rows * k.unsqueeze(-2)).sum(-1).view(*rows.shape[:-3], n, 1, r, 1)  # [..., group, i, r, j]
    size = 1
    while size < n:
        pairs = (n // (2 * size), 2, size)
        G_early, G_late = G.unflatten(-2, pairs).unbind(-3)
        edge = G_early[..., -1:, :]
        late = rows.unflatten(-3, pairs).select(-4, 1) * torch.exp(G_late - edge).unsqueeze(-2)
        early = k.unflatten(-2, pairs).select(-3, 0) * torch.exp(edge - G_early)
        cross = (late.flatten(-3, -2) @ early.mT).unflatten(-2, (size, r))
        first, second = found.unflatten(-4, pairs[:2]).unbind(-4)
        found = torch.cat([F.pad(first, (0, size)), torch.cat([cross, second], -1)], -3)
        size *= 2
    return found.squeeze(-4)


def _decay(g: Tensor, inputs: KdaInputs) -> Tensor:
    """Returns the log decay [n, HV, block, K]. It is clamped at a value whose exponential is 0, so that masks of -1000 or -inf
    do not spoil the cumulative sum of their neighbours."""
    A_log, dt_bias, HV = inputs.A_log, inputs.dt_bias, inputs.shape.HV
    g = log_decay(
        g,
        None if A_log is None else A_log.view(HV, 1, 1),
        None if dt_bias is None else dt_bias.view(HV, 1, -1),
        inputs.options,
    )
    return g.clamp(min=-746.0 if g.dtype == torch.float64 else -104.0)
