"""The `reference` backend: chunked KDA in plain torch, fp32 (fp64 for fp64 inputs), on any device.

Per value head, with a state S [K,V] and tokens t (Kimi Linear, arXiv:2510.26692)::

    S *= exp(g_t)[:, None];  S += (beta_t k_t) (v_t - k_t^T S);  o_t = scale * q_t^T S

Over a block of rows i with G the inclusive cumulative sum of g inside the block and G_end its last row::

    L_ij = beta_i sum_c k_ic k_jc e^{G_ic - G_jc} (j < i),   Aqk_ij = scale sum_c q_ic k_jc e^{G_ic - G_jc} (j <= i)
    [w u] = (I + L)^-1 diag(beta) [k e^G, v]
    R = u - w S,   o = (scale q e^G) S + Aqk R,   S <- e^{G_end} S + (k e^{G_end - G})^T R

No exponent is above 0, whatever the gates are (`_pair_products`), and row i sees rows up to i alone. Blocks have 16 rows;
blocks of one row are the recurrence itself (decoding).

Accuracy is that of fp32, so it is no stand-in for the fp64 oracle (`kda_core.testing.token_oracle`), with which it
shares no code. TF32 products, if the process allows them, lower it to about 1e-3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kda_core import install
from kda_core.abi import BACKEND_ABI
from kda_core.backend import BackendSpec
from kda_core.contract import (
    INPUT_DTYPES,
    Feature,
    KdaGradients,
    KdaInputs,
    KdaOptions,
    KdaOutputs,
    ProblemShape,
    dtype_name,
    num_chunks,
)

BLOCK = 16  # rows of a block; divides every chunk_size
ROWS_BYTES = 16 << 20  # upper bound for the rows of q and k of a slab, the largest temporary
_FLOATS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")  # the inputs that have gradients

SPEC = BackendSpec(
    name="reference",
    abi=BACKEND_ABI,
    archs=frozenset({"any"}),
    features=frozenset(f.value for f in Feature if f is not Feature.SEGMENT_SUMMARY),
    target="kda_core.reference:ReferenceBackend",
    install=install.command(),
    priority=-100,
    dtypes=frozenset(map(dtype_name, INPUT_DTYPES)),
)


class ReferenceBackend:
    """See the module's docstring. Stateless, hence thread-safe."""

    def can_run(self, shape: ProblemShape) -> str | None:
        return None

    def workspace_bytes(self, shape: ProblemShape) -> int:
        return 0  # torch allocates its temporaries

    def compile(self, shape: ProblemShape) -> None:
        """Nothing to compile."""

    def chunk_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        return self._forward(inputs, outputs, BLOCK)

    def recurrent_fwd(self, inputs: KdaInputs, outputs: KdaOutputs) -> KdaOutputs:
        return self._forward(inputs, outputs, 1)

    def _forward(self, inputs: KdaInputs, outputs: KdaOutputs, block: int) -> KdaOutputs:
        with torch.no_grad(), torch.autocast(inputs.q.device.type, enabled=False):
            for part in _parts(inputs):
                part.run(inputs, outputs, block)
        return outputs

    def chunk_bwd(self, inputs: KdaInputs, grad_o: Tensor, grad_final_state: Tensor | None) -> KdaGradients:
        """Recomputes the forward pass under autograd, slab by slab, so that memory stays bounded."""
        with torch.enable_grad(), torch.autocast(inputs.q.device.type, enabled=False):
            x, leaves = _as_leaves(inputs)
            (part,) = _parts(x, pinned=False)
            o, state = part.differentiable(x, BLOCK)
            total = (o * grad_o.to(o.dtype)).sum()
            if grad_final_state is not None:
                total = total + (state * grad_final_state.to(state.dtype)).sum()
            grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        found = {n: torch.zeros_like(x) if d is None else d for (n, x), d in zip(leaves.items(), grads)}
        gradients: dict[str, Any] = {n: found.get(n) for n in _FLOATS}
        return KdaGradients(**gradients)


# ---- the schedule: which block of tokens comes when


@dataclass(frozen=True)
class _Schedule:
    """The blocks of a call in the order in which the chain meets them.

    A lane is a run of blocks that share a state. Step s of the chain takes the next `widths[s]` blocks, one for each of
    the first `widths[s]` lanes; widths never grow. Without an order, one lane passes through all sequences.
    """

    tokens: Tensor  # [NB, block] flat token index b*T+t
    valid: Tensor  # [NB, block] whether the token belongs to the block's sequence
    sequence: Tensor  # [NB] which sequence the block belongs to
    index: Tensor  # [NB] number of the block inside its sequence
    widths: list[int]
    order: Tensor | None  # [N] sequence of each lane; None for the one lane


@dataclass(frozen=True)
class _Part:
    """A set of sequences that is computed together: flat tokens [first, first + length) each.

    `starts`, `ends` [n] are host tensors where the host knows them, else tensors on the device of the inputs.
    `select` is the slice of the call's sequences. `slab` bounds how many blocks are prepared at a time.
    """

    starts: Tensor
    ends: Tensor
    select: slice
    on_device: bool
    slab: int | None  # None: as many as fit ROWS_BYTES

    def schedule(self, inputs: KdaInputs, block: int) -> _Schedule:
        device = inputs.q.device
        row = torch.arange(block, device=device)
        n, T, order = self.starts.numel(), inputs.shape.T, None
        if (
            self.on_device
        ):  # lengths are known to the device alone: slot start//block + i is the first of sequence i
            first = self.starts // block + torch.arange(n, device=device)
            slots = torch.arange(T // block + n if T else 0, device=device)
            sequence = (torch.searchsorted(first, slots, right=True) - 1).clamp(min=0)
            index, widths = slots - first[sequence], [1] * len(slots)
        elif not inputs.shape.varlen:  # equal lengths, all lanes run to the end
            steps = -(-T // block)
            sequence = torch.arange(n, device=device).repeat(steps)
            index, widths = torch.arange(steps, device=device).repeat_interleave(n), [n] * steps
            order = torch.arange(n, device=device)
        else:
            counts = -(-(self.ends - self.starts) // block)
            order = torch.argsort(counts, descending=True, stable=True)
            live = torch.arange(int(counts.max())).unsqueeze(1) < counts[order]
            index, lane = live.nonzero().unbind(1)
            sequence, widths = order[lane], live.sum(1).tolist()
        starts, ends = self.starts[sequence], self.ends[sequence]
        tokens = (starts + index * block).unsqueeze(1) + row
        return _Schedule(tokens, tokens < ends.unsqueeze(1), sequence, index, widths, order)

    def initial(self, inputs: KdaInputs) -> Tensor:
        """[n, HV, K, V] in the working dtype."""
        s = inputs.shape
        n = self.starts.numel()
        if inputs.initial_state is None:
            return inputs.q.new_zeros((n, s.HV, s.K, s.V), dtype=s.state_dtype)
        state = inputs.initial_state[self.select].to(s.state_dtype)
        return state.mT.contiguous() if s.options.state_v_first else state

    def run(self, inputs: KdaInputs, outputs: KdaOutputs, block: int) -> None:
        """Computes these sequences into `outputs`; rows of other sequences stay as they are."""
        s, schedule = inputs.shape, self.schedule(inputs, block)
        save = (
            None
            if outputs.intermediate_states is None
            else self._saver(inputs, outputs.intermediate_states, schedule, block)
        )
        rows, state = _chain(inputs, schedule, self.initial(inputs), self._slab(s, block), save)
        o = outputs.o.view(s.B * s.T, s.HV, s.V)
        if s.T and schedule.widths:
            owner = _owner(schedule, s.B * s.T)
            mine = (owner >= 0).view(-1, 1, 1)
            o.copy_(torch.where(mine, rows[owner.clamp(min=0)].to(o.dtype), o))
        if outputs.final_state is not None:
            outputs.final_state[self.select] = state.mT if s.options.state_v_first else state

    def differentiable(self, inputs: KdaInputs, block: int) -> tuple[Tensor, Tensor]:
        """o [B,T,HV,V] and the final states, both in the working dtype and part of the autograd graph."""
        s, schedule = inputs.shape, self.schedule(inputs, block)
        rows, state = _chain(
            inputs, schedule, self.initial(inputs), self._slab(s, block), None, prepare=_prepare_twice
        )
        if s.T and schedule.widths:
            owner = _owner(schedule, s.B * s.T)
            o = torch.where((owner >= 0).view(-1, 1, 1), rows[owner.clamp(min=0)], 0.0)
        else:
            o = rows.new_zeros((s.B * s.T, s.HV, s.V))
        return o.view(s.B, s.T, s.HV, s.V), state.mT if s.options.state_v_first else state

    def _slab(self, s: ProblemShape, block: int) -> int:
        return self.slab or max(1, ROWS_BYTES // (2 * s.HV * block * s.K * s.state_dtype.itemsize))

    def _saver(
        self, inputs: KdaInputs, h: Tensor, schedule: _Schedule, block: int
    ) -> Callable[[int, int, Tensor], None]:
        """A function (first block, width, states) that stores the states which stand at the start of a chunk."""
        s, size = inputs.shape, inputs.options.chunk_size
        chunks = -(-(self.ends - self.starts) // size)
        base = (torch.cumsum(chunks, 0) - chunks).to(h.device)
        if not s.varlen:  # rows of h are [b, chunk]; `select` may be a single b
            base = base + self.select.start * num_chunks((s.T,), size)
        elif not self.on_device:
            base = base + num_chunks(tuple((_host_lengths(inputs))[: self.select.start]), size)
        rows = base[schedule.sequence] + schedule.index * block // size
        at_start = (schedule.index * block % size == 0) & schedule.valid[:, 0]
        flat = h.view(-1, s.HV, *s.state_matrix)

        def save(first: int, width: int, state: Tensor) -> None:
            state = (state.mT if s.options.state_v_first else state).to(h.dtype)
            here, wanted = rows[first : first + width], at_start[first : first + width]
            if self.on_device:  # one lane; a row that is not at a chunk's start keeps what is there
                row = here.clamp(0, flat.shape[0] - 1)
                flat.index_copy_(0, row, torch.where(wanted.view(-1, 1, 1, 1), state, flat[row]))
            elif (
                int(schedule.index[first]) * block % size == 0
            ):  # all lanes of a step stand at the same index
                flat.index_copy_(0, here, state)

        return save


def _host_lengths(inputs: KdaInputs) -> tuple[int, ...]:
    lengths = inputs.sequence_lengths()
    assert lengths is not None  # only asked for where cu_seqlens lies in host memory
    return lengths


def _parts(inputs: KdaInputs, pinned: bool | None = None) -> list[_Part]:
    """One part, or with `pin` one a sequence, whose blocks are prepared one by one: every operation then has the same
    shape whatever else the batch holds, and so the same rounding."""
    s = inputs.shape
    pinned = inputs.options.pin if pinned is None else pinned
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
        return [_Part(starts, ends, slice(0, s.N), on_device, slab)]
    return [_Part(starts[n : n + 1], ends[n : n + 1], slice(n, n + 1), False, slab) for n in range(s.N)]


def _owner(schedule: _Schedule, tokens: int) -> Tensor:
    """[tokens]: the row of the blocks' outputs that holds each token, -1 for a token of no sequence."""
    row = torch.arange(schedule.tokens.numel(), device=schedule.tokens.device)
    target = torch.where(
        schedule.valid, schedule.tokens, tokens
    ).flatten()  # padding goes to a row of its own
    return row.new_full((tokens + 1,), -1).index_copy_(0, target, row)[:-1]


# ---- the arithmetic


def _chain(
    inputs: KdaInputs,
    schedule: _Schedule,
    initial: Tensor,
    slab: int,
    save: Callable[[int, int, Tensor], None] | None,
    prepare: Callable[[KdaInputs, Tensor, Tensor], tuple[Tensor, ...]] | None = None,
) -> tuple[Tensor, Tensor]:
    """All blocks: their rows of o [NB*block, HV, V], and the final states [n, HV, K, V], in the working dtype.

    Blocks are prepared in slabs of whole steps, at most `slab` blocks where a step allows it.
    """
    order = schedule.order
    state = initial[:1] if order is None else initial[order]
    final, finished, rows = initial, [], []
    first, step = 0, 0
    while step < len(schedule.widths):
        widths = [schedule.widths[step]]
        while (
            step + len(widths) < len(schedule.widths)
            and sum(widths) + schedule.widths[step + len(widths)] <= slab
        ):
            widths.append(schedule.widths[step + len(widths)])
        blocks = slice(first, first + sum(widths))
        prepared = (prepare or _prepare)(inputs, schedule.tokens[blocks], schedule.valid[blocks])
        at = 0
        for width in widths:
            if width < len(state):  # the shortest lanes are through
                finished.append(state[width:])
                state = state[:width]
            if order is None:
                sequence = schedule.sequence[first + at : first + at + 1]
                fresh = (schedule.index[first + at] == 0).view(1, 1, 1, 1)
                state = torch.where(fresh, initial[sequence], state)
            if save is not None:
                save(first + at, width, state)
            w, u, Qd, Kg, Aqk, decay = (x[at : at + width] for x in prepared)
            R = u - w @ state
            rows.append(Qd @ state + Aqk @ R)
            state = decay.unsqueeze(-1) * state + Kg.mT @ R
            if order is None:
                final = final.index_copy(0, sequence, state)
            at += width
        first, step = blocks.stop, step + len(widths)
    if order is not None:
        final = torch.cat([state, *reversed(finished)])[torch.argsort(order)]
    block, s = schedule.tokens.shape[1], inputs.shape
    out = torch.cat(rows) if rows else initial.new_zeros((0, s.HV, block, s.V))
    return out.transpose(1, 2).reshape(-1, s.HV, s.V), final


def _as_leaves(inputs: KdaInputs) -> tuple[KdaInputs, dict[str, Tensor]]:
    """The inputs as leaves of a graph of their own, and these leaves by name."""
    leaves = {n: x.detach().requires_grad_() for n in _FLOATS if (x := getattr(inputs, n)) is not None}
    return replace(inputs, **leaves), leaves


def _prepare_twice(inputs: KdaInputs, tokens: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
    """`_prepare`, in the backward pass again, so that autograd keeps no temporary of it."""
    leaves = [x for n in _FLOATS if (x := getattr(inputs, n)) is not None]
    return _PrepareTwice.apply(inputs, tokens, valid, *leaves)


class _PrepareTwice(torch.autograd.Function):
    """`_prepare_twice` for autograd. ``torch.utils.checkpoint`` does the same with hooks, which torch.func forbids."""

    @staticmethod
    def forward(
        ctx: Any, inputs: KdaInputs, tokens: Tensor, valid: Tensor, *leaves: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.arguments = inputs, tokens, valid
        return _prepare(inputs, tokens, valid)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        inputs, tokens, valid = ctx.arguments
        with torch.enable_grad(), torch.autocast(inputs.q.device.type, enabled=False):
            again, leaves = _as_leaves(inputs)
            prepared = _prepare(again, tokens, valid)
        found = torch.autograd.grad(prepared, list(leaves.values()), grads, allow_unused=True)
        return (None, None, None, *found)


def _prepare(inputs: KdaInputs, tokens: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
    """What the chain needs of some blocks [n, block]: w, Qd, Kg [n,HV,block,K], u [n,HV,block,V], Aqk
    [n,HV,block,block], decay [n,HV,K]. Rows that are not valid have k = v = 0, g = 0, beta = 0."""
    s, options = inputs.shape, inputs.options
    at = torch.where(valid, tokens, 0)

    def rows(x: Tensor) -> Tensor:
        """[B,T,heads,...] -> [n, heads, block, ...] in the working dtype."""
        picked = x.flatten(0, 1)[at].to(s.state_dtype)
        return picked.transpose(1, 2)

    keep = valid.view(valid.shape[0], 1, valid.shape[1], 1)
    zero = torch.zeros((), dtype=s.state_dtype, device=valid.device)
    q, k, v = (torch.where(keep, rows(x), zero) for x in (inputs.q, inputs.k, inputs.v))
    if options.use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(s.HV // s.H, dim=1) for x in (q, k))
    g = torch.where(keep, _decay(rows(inputs.g), inputs), zero)
    beta = torch.where(keep, step_size(rows(inputs.beta.unsqueeze(-1)), options), zero)

    G = torch.cumsum(g, dim=-2)
    products = _pair_products(torch.stack([k, q * s.scale], -2), k, G)
    L = torch.tril(products[..., 0, :], -1) * beta
    Aqk = products[..., 1, :]
    grown = torch.exp(G)
    wu = torch.linalg.solve_triangular(
        L, beta * torch.cat([k * grown, v], -1), upper=False, unitriangular=True
    )
    w, u = wu[..., : s.K], wu[..., s.K :]
    return w, u, q * s.scale * grown, k * torch.exp(G[..., -1:, :] - G), Aqk, grown[..., -1, :]


def _pair_products(rows: Tensor, k: Tensor, G: Tensor) -> Tensor:
    """``sum_c rows_irc k_jc e^{G_ic - G_jc}`` for j <= i, 0 elsewhere: [..., n, r, n] from rows [..., n, r, K], k and G
    [..., n, K]; n a power of 2.

    Built from runs of one row, whose exponent is 0, by joining neighbours. Between the rows of the later run and those of
    the earlier one the exponent is split at the earlier run's last row, so neither part is above 0.
    """
    n, r = rows.shape[-3:-1]
    found = (rows * k.unsqueeze(-2)).sum(-1).view(*rows.shape[:-3], n, 1, r, 1)  # [..., run, i, r, j]
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
    """Log decay [n, HV, block, K] from g as it was given; bounded below where its exponential is 0 anyway, so that
    masks of -1000 or -inf do not spoil the cumulative sum of their neighbours."""
    A_log, dt_bias, HV = inputs.A_log, inputs.dt_bias, inputs.shape.HV
    g = log_decay(
        g,
        None if A_log is None else A_log.view(HV, 1, 1),
        None if dt_bias is None else dt_bias.view(HV, 1, -1),
        inputs.options,
    )
    return g.clamp(min=-746.0 if g.dtype == torch.float64 else -104.0)


def log_decay(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, options: KdaOptions) -> Tensor:
    """The log decay from g as a call gives it, in its dtype; A_log and dt_bias broadcast to g."""
    if not options.use_gate_in_kernel:
        return g
    if dt_bias is not None:
        g = g + dt_bias.to(g.dtype)
    rate = 1.0 if A_log is None else A_log.to(g.dtype).exp()
    if options.lower_bound is not None:
        return options.lower_bound * torch.sigmoid(rate * g)
    return -rate * F.softplus(g)  # torch's softplus is linear above 20, as FLA's


def step_size(beta: Tensor, options: KdaOptions) -> Tensor:
    """beta of the recurrence from beta as a call gives it, in its dtype."""
    if not options.use_beta_sigmoid_in_kernel:
        return beta
    return torch.sigmoid(beta) * (2.0 if options.allow_neg_eigval else 1.0)
