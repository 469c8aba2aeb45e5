"""Certified decay: which pieces have forgotten their initial state, shown on the device, per piece and value head.

For a piece with exit state B, transition M and true initial state S, the state after it is ``M S + B``. The first term may
be left out where ``||M S||_F <= 2^-24 ||B||_F``, the rounding of fp32. That holds where three things do:

- every factor of M, ``(I - beta k k^T) Diag(e^g)``, has norm at most 1: 0 <= beta |k|^2 <= 2 and g <= 0, checked for every
  token of the piece. Then the last factors bound them all, ``||M||_2 <= ||M_tail||_F``, M_tail those of the last `TAIL`
  tokens, computed in fp64: one from bf16 operands would be no bound;
- the same for all split-off pieces before it in the sequence: then ``||S||_F <= s``, the sum of ``||B||_F`` so far, where
  the first piece counts with its true exit state;
- ``m max(s, ||B||_F) <= 2^-24 ||B||_F < inf``, m being ``||M_tail||_F + SLACK``. So nothing is certified where s is more than
  2^12 times ``||B||_F``.

Sums of g alone show nothing: see ``docs/context-parallel.md``. What is not certified, pieces shorter than `TAIL` among it,
gets its exact transition from the backend in the same call, without the host knowing how much that is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kda_core.contract import KdaInputs, ProblemShape
from kda_core.gates import log_decay, step_size
from kda_cp.pieces import Caller, Piece, index_dtype, upload
from kda_cp.summary import identity_pass

TAIL = 512  # tokens of a piece whose transition is computed exactly
BLOCK = 16  # of its rows
FLOOR = -40.0  # of log decays there: e^(BLOCK |FLOOR|) is finite in fp64
SLACK = 2.0**-36  # above TAIL e^FLOOR, and what fp64 rounds off in so many tokens
STREAMS = 256  # tails of a piece and head that are computed at a time: each takes some 5 MB
THRESHOLD = 2.0**-24
LONGEST_STEP = 2 * (1 - 2.0**-18)  # of beta |k|^2 as fp32 computes it


def transitions(
    inputs: KdaInputs, pieces: Sequence[Piece], exits: Sequence[Sequence[Tensor]], o: Tensor, call: Caller
) -> Tensor:
    """The transitions [n, HV, K, K] of n pieces: zero where `certified` says so, else the backend's.

    Args:
        exits: for each sequence the exit states of its pieces, the first from its true initial state.
        o: [B, T, HV, V], scratch memory: its first rows are overwritten.
    """
    vanished = certified(inputs, pieces, exits)
    M = _remaining(inputs, pieces, vanished, o, call)
    return torch.where(vanished[:, :, None, None], 0.0, M)


def certified(inputs: KdaInputs, pieces: Sequence[Piece], exits: Sequence[Sequence[Tensor]]) -> Tensor:
    """[n, HV] bool: where the transition of a piece, neither first nor last of its sequence, may be left out."""
    HV, device = inputs.shape.HV, inputs.q.device
    long = [p for p in pieces if p.length >= TAIL]
    if not long:
        return torch.zeros(len(pieces), HV, dtype=torch.bool, device=device)
    tail = dict(zip(long, _tail_norms(inputs, long)))
    expands = _expanding(inputs)
    expanding = {p: expands[p.start : p.start + p.length].any(0) for p in pieces}
    open_end = torch.full((HV,), torch.inf, dtype=torch.float64, device=device)
    found: dict[Piece, Tensor] = {}
    for n, ends in enumerate(exits):
        inner = sorted((p for p in pieces if p.sequence == n), key=lambda p: p.start)
        if not inner:
            continue
        b = torch.stack([B.flatten(1).norm(dim=1, dtype=torch.float64) for B in ends])  # [P - 1, HV]
        before = b.cumsum(0)[:-1]
        sound = torch.stack([expanding[p] for p in inner]).cumsum(0) == 0
        m = torch.stack([tail.get(p, open_end) for p in inner])
        holds = sound & b[1:].isfinite() & (m * torch.maximum(before, b[1:]) <= THRESHOLD * b[1:])
        found |= zip(inner, holds)
    return torch.stack([found[p] for p in pieces])


def _tail_norms(inputs: KdaInputs, pieces: Sequence[Piece]) -> Tensor:
    """An upper bound [n, HV] of ||M_tail||_2 of pieces of at least `TAIL` tokens, whose factors have norm at most 1.

    Over a block of rows, with G the inclusive cumulative sum of g in it (the WY form, `kda_core.reference`)::

        M = Diag(e^G_end) - (k e^{G_end - G})^T (I + L)^-1 diag(beta) k e^G
        L_ij = beta_i sum_c k_ic e^{G_ic - G_mid,c} k_jc e^{G_mid,c - G_jc}  (j < i)

    Log decays are raised to `FLOOR`, so that no exponent overflows; that moves M_tail by at most ``TAIL e^FLOOR``.
    """
    count = max(1, STREAMS // inputs.shape.HV)
    groups = [pieces[i : i + count] for i in range(0, len(pieces), count)]
    return torch.cat([_tails(inputs, group) for group in groups]).flatten(2).norm(dim=2) + SLACK


def _tails(inputs: KdaInputs, pieces: Sequence[Piece]) -> Tensor:
    """M_tail [n, HV, K, K] in fp64."""
    s = inputs.shape
    first, _ = upload((p.start + p.length - TAIL for p in pieces), torch.int64, inputs.q.device)
    rows = first.unsqueeze(1) + torch.arange(TAIL, device=first.device)

    def blocks(x: Tensor) -> Tensor:
        """[n, TAIL, HV, ...] -> [n * HV, blocks, BLOCK, ...]."""
        return x.transpose(1, 2).reshape(len(pieces) * s.HV, TAIL // BLOCK, BLOCK, -1)

    k = inputs.k.flatten(0, 1)[rows].double()
    if inputs.options.use_qk_l2norm_in_kernel:
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
    k = blocks(k.repeat_interleave(s.HV // s.H, dim=2))
    g = _log_decay(inputs.g.flatten(0, 1)[rows].double(), inputs, slice(None))
    beta = blocks(step_size(inputs.beta.flatten(0, 1)[rows].double(), inputs.options))

    G = blocks(g.clamp(min=FLOOR)).cumsum(2)
    mid, end = G[:, :, BLOCK // 2, None], G[:, :, -1, None]
    L = beta * ((k * (G - mid).exp()) @ (k * (mid - G).exp()).mT).tril(-1)
    w = torch.linalg.solve_triangular(L, beta * k * G.exp(), upper=False, unitriangular=True)
    out, decay = (k * (end - G).exp()).mT, end.exp().mT
    M = torch.eye(s.K, dtype=torch.float64, device=k.device).expand(len(k), -1, -1)
    for c in range(TAIL // BLOCK):
        M = torch.baddbmm(decay[:, c] * M, out[:, c], w[:, c] @ M, alpha=-1)
    return M.view(len(pieces), s.HV, s.K, s.K)


def _expanding(inputs: KdaInputs) -> Tensor:
    """[B*T, HV] bool: whether a token's factor may have a norm above 1, or is not a number."""
    s, options = inputs.shape, inputs.options
    size = inputs.k.flatten(0, 1).float().square().sum(-1)  # [B*T, H]
    if options.use_qk_l2norm_in_kernel:
        size = size / (size + 1e-6)
    beta = step_size(inputs.beta.flatten(0, 1).float(), options)
    step = beta * size.repeat_interleave(s.HV // s.H, dim=1)
    shrinks = (step >= 0) & (step <= LONGEST_STEP)
    if not options.use_gate_in_kernel:  # the gate formulas give no value above 0
        shrinks &= (inputs.g.flatten(0, 1) <= 0).all(-1)
    return ~shrinks


def _log_decay(g: Tensor, inputs: KdaInputs, head: Tensor | slice) -> Tensor:
    """The log decay of rows [..., K] from the gate that was given; their last dimension but one is that of `head`, their
    value heads."""
    A_log, dt_bias = inputs.A_log, inputs.dt_bias
    return log_decay(
        g,
        None if A_log is None else A_log[head].unsqueeze(-1),
        None if dt_bias is None else dt_bias.view(inputs.shape.HV, -1)[head],
        inputs.options,
    )


# ---- the exact path of what is not certified


def stream_shape(shape: ProblemShape, pieces: Sequence[Piece]) -> ProblemShape:
    """The largest call that `_remaining` makes: every (piece, value head) is a sequence of its own, H = HV = 1."""
    graph = shape.device_type != "cpu"
    n, T = len(pieces) * shape.HV, sum(p.length for p in pieces) * shape.HV
    options = replace(
        shape.options, output_final_state=True, return_intermediate_states=False, state_v_first=False,
        needs_backward=False, use_gate_in_kernel=False, lower_bound=None, safe_gate=shape.options.bounded_gate,
        use_graph=graph, max_num_seqs=n if graph else None,
    )  # fmt: skip
    return replace(
        shape, B=1, T=T, H=1, HV=1, N=n, g_dtype=shape.state_dtype, index_dtype=index_dtype(T), has_A_log=False,
        has_dt_bias=False, has_initial_state=True, options=options,
    )  # fmt: skip


def _remaining(
    inputs: KdaInputs, pieces: Sequence[Piece], vanished: Tensor, o: Tensor, call: Caller
) -> Tensor:
    """M [n, HV, K, K] of what has not vanished; the identity elsewhere.

    The streams that remain are copied next to each other; the others have length zero. On a GPU the host does not know how
    many there are, so memory and launches are sized for all, and the work is not.
    """
    s, device = inputs.shape, inputs.q.device
    shape = stream_shape(s, pieces)
    lengths, _ = upload((p.length for p in pieces for _ in range(s.HV)), torch.int64, device)
    first, _ = upload((p.start for p in pieces), torch.int64, device)
    ends = torch.where(vanished.flatten(), 0, lengths).cumsum(0)
    cu_seqlens = F.pad(ends, (1, 0)).to(shape.index_dtype)
    if device.type == "cpu":
        shape = replace(shape, T=int(ends[-1]))

    at = torch.arange(shape.T, device=device)
    stream = torch.searchsorted(ends, at, right=True).clamp(max=shape.N - 1)
    head = stream % s.HV
    token = first[stream // s.HV] + at - cu_seqlens[stream]
    token = token.clamp(max=s.B * s.T - 1)  # rows behind the last stream belong to nobody
    row = token * s.HV + head

    def picked(x: Tensor, index: Tensor) -> Tensor:
        """x [B, T, heads, ...] -> [1, rows, 1, ...]."""
        return x.flatten(0, 2)[index].unsqueeze(0).unsqueeze(2)

    k = picked(inputs.k, token * s.H + head // (s.HV // s.H))
    g = _log_decay(inputs.g.flatten(0, 2)[row].to(shape.state_dtype), inputs, head).view_as(k)
    v = k.new_zeros((1, shape.T, 1, s.V))
    x = replace(
        inputs, q=k, k=k, v=v, g=g, beta=picked(inputs.beta, row), A_log=None, dt_bias=None,
        cu_seqlens=cu_seqlens, cu_seqlens_cpu=None, shape=shape,
    )  # fmt: skip

    def final_states(start: Tensor) -> Tensor:
        final = torch.empty_like(start)
        scratch = o.flatten(0, 2)[: shape.T].view(1, shape.T, 1, s.V)
        call(replace(x, initial_state=start), scratch, final)
        return final

    M = identity_pass(final_states, inputs.q.new_empty(0, dtype=shape.state_dtype), shape.N, 1, s.K, s.V)
    return M.view(len(pieces), s.HV, s.K, s.K)
